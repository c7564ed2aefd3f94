"""What both emitters do alike: lines and their depth, parameter names, index expressions, the header comment."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import accumulate

from ..ir.dtypes import DType
from ..ir.expr import Const
from ..ir.kernel import Bind, GridAxis, Kernel, Operand, Parts, Share, Statement, Var
from ..ir.poly import Atom, Axis, Poly, Quotient, Remainder, Symbol, nonnegative, sum_text
from ..ir.program import Buffer


class Emitter:
    """The text of one kernel, a statement at a time. Names are positional: equal kernels have equal text."""

    indent, quotient = "  ", "/"
    naming = "{} = {}"  # how an index gets a name
    literal: Callable[[Const], str]

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.pointers: dict[Buffer, str] = {}
        for b in kernel.passed:
            self.pointers[b] = f"out{kernel.writes.index(b)}" if b in kernel.writes else f"in{len(self.pointers)}"
        self.sizes = {s: f"n{k}" for k, s in enumerate(kernel.symbols)}
        self.lines: list[str] = []
        self.depth = 0

    def line(self, text: str) -> None:
        self.lines.append(self.indent * self.depth + text if text.strip() else "")

    @contextmanager
    def nested(self, opening: str, closing: str = "") -> Iterator[None]:
        """The lines written meanwhile are one level deeper, between an opening and a closing line."""
        self.line(opening)
        self.depth += 1
        yield
        self.depth -= 1
        if closing:
            self.line(closing)

    def block(self, body: tuple[Statement, ...]) -> None:
        for statement in body:
            self.statement(statement)

    def statement(self, s: Statement) -> None:
        """Emit one statement, by the method that has the name of its class."""
        getattr(self, f"visit_{type(s).__name__}")(s)

    def bind(self, name: str, text: str) -> None:
        """An index gets a name."""
        self.line(self.naming.format(name, text))

    def split(self, name: str, number: int, left: str, extent: str) -> str:
        """The last of several indices gets its name; what is left for those before it."""
        raise NotImplementedError

    def positions(self, axes: tuple[GridAxis, ...], left: str) -> None:
        """The number `left` becomes one position per grid axis, the last one fastest."""
        for k in range(len(axes) - 1, 0, -1):
            left = self.split(axes[k].axis.name, k, left, self.divisor(axes[k].extent))
        if axes:
            self.bind(axes[0].axis.name, left)

    def part(self, parts: Parts) -> str:
        """Which part the program is one of: the buffers and numbers that it has; its number among the part's own."""
        count = parts.count
        self.bind("part", f"op_part({self.table(parts.numbers_at)}, {count}, program{self.searched(count)})")
        for k, buffers in enumerate(parts.buffers):
            written = buffers[0] in self.kernel.writes
            name = self.pointers[buffers[0]] = f"{'to' if written else 'from'}{k}"
            self.pointer(name, buffers[0], f"{self.table(parts.buffers_at + k * count)} + part", written)
        for k, (symbol, _) in enumerate(parts.numbers):
            place = f"{self.table(parts.numbers_at + (k + 1) * count)} + part"
            self.bind(symbol.name, self.word(place, parts.divisor(k)))
        return f"(program - {self.word(f'{self.table(parts.numbers_at)} + part', 1)})"

    def table(self, at: int) -> str:
        """A place in the kernel's table."""
        return f"table + {at}" if at else "table"

    def searched(self, count: int) -> str:
        """What else the search for a part is told."""
        return ""

    def pointer(self, name: str, buffer: Buffer, place: str, written: bool) -> None:
        """A pointer from the table gets a name."""
        raise NotImplementedError

    def word(self, place: str, divisor: int) -> str:
        """A number from the table, which is a multiple of a divisor."""
        raise NotImplementedError

    def share(self, s: Share, number: str) -> None:
        """What programs of a range do; `number`: of a program of the launch."""
        outside = dict(self.pointers)
        if s.parts is not None:
            number = self.part(s.parts)
        elif s.first is not Poly.ZERO:
            number = f"({number} - {self.poly(s.first)})"
        self.positions(s.grid, number)
        self.block(s.body)
        self.pointers = outside

    def visit_Bind(self, s: Bind) -> None:
        self.bind(s.axis.name, self.poly(s.value))

    def operand(self, value: Operand) -> str:
        """A name, a literal or an index as a value."""
        match value:
            case Var():
                return value.name
            case Const():
                return self.literal(value)
        return self.poly(value)

    def division(self, atom: Quotient | Remainder) -> str:
        """A division of indices, or its rest; the language's own operators round negative numbers to zero."""
        a, b = self.poly(atom.numerator), self.divisor(atom.denominator)
        quotient = isinstance(atom, Quotient)
        if self.divides_plainly(atom.numerator):
            return f"({a} {self.quotient if quotient else '%'} {b})"
        return f"op_index_{'floordiv' if quotient else 'remainder'}({a}, {b})"

    def divides_plainly(self, numerator: Poly) -> bool:
        """Whether the language's own operators give the right result."""
        return nonnegative(numerator)

    def number(self, value: int) -> str:
        """A literal inside an index expression."""
        return str(value)

    def poly(self, poly: Poly) -> str:
        """A poly as an index expression."""
        text = sum_text(poly, self.atom, self.number, times=" * ")
        return f"({text})" if len(poly.terms) > 1 or text.startswith("-") else text

    def divisor(self, poly: Poly) -> str:
        """A poly to divide by; a product in parentheses, or only its first factor would divide."""
        product = len(poly.terms) == 1 and poly.terms[0][1] > 0 and len(poly.terms[0][0]) + (poly.terms[0][1] > 1) > 1
        return f"({self.poly(poly)})" if product else self.poly(poly)

    def atom(self, atom: Atom) -> str:
        match atom:
            case Axis():
                return atom.name
            case Symbol():
                return self.sizes.get(atom, atom.name)
            case Quotient() | Remainder():
                return self.division(atom)
        raise AssertionError(f"no text for {atom!r}")


def header(kernel: Kernel, comment: str) -> str:
    """How the kernel runs and where it comes from, as comment lines; user text is data, one printable line each."""
    lines = [f"{kernel.name}: {kernel.schedule}"]
    for o in kernel.origins:
        lines.append(f"  {o.op}  {o.node}" + (f"  {o.line}" if o.line else ""))
    # No escape may continue a comment of C, and no trigraph.
    clean = (
        "".join(c if c.isprintable() else " " for c in line).replace("\\", "/").replace("?", ".") for line in lines
    )
    return "".join(f"{comment} {line}\n" for line in clean)


def operand_dtype(value: Operand) -> DType:
    """The type of an operand; an index is an int64."""
    return DType.I64 if isinstance(value, Poly) else value.dtype


def bare(text: str) -> str:
    """Drop one pair of outer parentheses."""
    if not (text.startswith("(") and text.endswith(")")):
        return text
    *inside, end = accumulate((c == "(") - (c == ")") for c in text)
    return text[1:-1] if end == 0 and 0 not in inside else text
