"""The two functions of a program that runs as a CUDA graph: one records a call, one prepares and launches a graph.

Both are written like the executable's own function, from the same instructions (`Writer`). Slots number what a launch
is given anew on every call: addresses of inputs and new tensors, numbers of the host, addresses of tables.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import torch

from ..ir import source as ir
from .executable import Writer, host_name
from .graph_parts import SEED, Parts, refs
from .kernels import LoadedKernel
from .recording import FIXED
from .torch_private import is_capturing, is_profiling

ANYWHERE = "256"  # an address in the place of one that is known when the graph is launched


@dataclass(slots=True)
class Slots:
    """Number of each word that is given anew, by the expression that computes it; and which words of tables are not."""

    numbers: dict[str, int] = field(default_factory=dict)
    static: dict[tuple[int, int], int] = field(default_factory=dict)  # (table, word) -> position in `found.static`

    def of(self, expression: str) -> int:
        """The slot of an expression."""
        return self.numbers.setdefault(expression, len(self.numbers))


class _GraphWriter(Writer):
    """What both functions have in common."""

    def __init__(self, host: ir.HostProgram, kernels: Sequence[LoadedKernel], parts: Parts, slots: Slots) -> None:
        super().__init__(host, kernels, ranges=True)
        self._parts, self._slots = parts, slots
        self._given = {*host.inputs, *parts.of_host, *(a.name for a in parts.fresh)}
        self.namespace |= {"is_profiling": is_profiling, "is_capturing": is_capturing}

    def _head(self) -> None:
        self._unpack()
        for instruction in self._parts.before:
            self._instruction(0, instruction)

    def _index(self) -> int:
        return torch.device(self._parts.device).index or 0


class RecordWriter(_GraphWriter):
    """call(args, recorder, begin): all steps, captured after `begin`.

    `moving`: inputs that are copied before calls of the library read them.
    """

    def __init__(
        self, host: ir.HostProgram, kernels: Sequence[LoadedKernel], parts: Parts, slots: Slots, moving: Collection[str]
    ) -> None:
        super().__init__(host, kernels, parts, slots)
        self._moving = set(moving)
        self._current: dict[str, str] = {}  # moving inputs -> the copy that is as they are now

    def source(self) -> str:
        self._head()
        instruction: ir.Instruction
        for instruction in self._parts.drawn:
            if isinstance(instruction, ir.Call) and instruction.target != SEED:
                self._instruction(0, instruction)
        for instruction in self._parts.fresh:
            self._instruction(0, instruction)
        if still := [n for n in self._parts.read if n not in self._moving]:
            self._line(f"recorder.given({', '.join(still)})")
        self._line("begin()")
        self._line(f"{self._stream(self._parts.device)} = current_stream({self._index()})")
        for instruction in self._parts.steps:
            self._instruction(0, instruction)
        self._line(f"recorder.finish([{', '.join(self._ref(r) for r in self._parts.results)}])")
        return "def call(args, recorder, begin):\n" + "".join(self._lines)

    def visit_Launch(self, launch: ir.Launch) -> None:
        kernel = self._kernel_of(launch)
        function = f"k{int(launch.kernel)}_{self._index()}"
        self.namespace[function] = kernel.function(self._index())
        addresses = [f"{host_name(b)}.data_ptr()" for b in launch.buffers]
        slots = [
            self._slots.of(a) if b in self._given else FIXED for a, b in zip(addresses, launch.buffers, strict=True)
        ]
        taken = [ANYWHERE if b in self._parts.seeds else a for a, b in zip(addresses, launch.buffers, strict=True)]
        if launch.table:
            slots.append(self._slots.of(self._noted_table(launch)))
            taken.append(ANYWHERE)
        slots += [self._slots.of(f"word_of({host_name(n)})") for n in launch.numbers]
        sizes = [self._size(s) for s in launch.symbols]
        slots += [FIXED] * len(sizes)
        words = [*taken, *("0" for _ in launch.numbers), *sizes, self._size(launch.programs)]
        self._line(f"recorder.launch({function}, {tuple(slots)!r}, {', '.join(words)}, {self._stream(launch.device)})")
        for name in launch.buffers:
            self._current.pop(name, None)  # it may have been written

    def _noted_table(self, launch: ir.Launch) -> str:
        """What the other function calls this table's address. Addresses that stay are noted."""
        for position, word in enumerate(launch.table):
            if isinstance(word, ir.Ref) and word.name not in self._given:
                self._slots.static[self._tables, position] = len(self._slots.static)
                self._line(f"recorder.static.append({self._address(word)})")
            elif isinstance(word, ir.Ref):
                self._current.pop(word.name, None)
        self._tables += 1
        return f"table{self._tables - 1}"

    def visit_Call(self, call: ir.Call) -> None:
        if call in self._parts.drawn:
            super().visit_Call(call)
            return
        taken = {r.name for r in refs((call.args, call.kwargs))}
        for name in sorted(taken & self._moving - set(self._current)):
            self._current[name] = f"t{name[1:]}"
            self._line(f"t{name[1:]} = recorder.copied({name}, {self._slots.of(f'{name}.data_ptr()')})")
        super().visit_Call(call)
        self._line(f"{host_name(call.result)} = recorder.called({call.result})")

    def _ref(self, ref: ir.Ref) -> str:
        text = super()._ref(ref)
        return text.replace(ref.name, self._current[ref.name], 1) if ref.name in self._current else text


class ReplayWriter(_GraphWriter):
    """call(args): finds the recording for these sizes and addresses, and launches it; `missing` makes a new one.

    `fixed`: inputs that calls of the library read where they lie; `dynamic`: of those that they read, the ones whose
    shapes change.
    """

    def __init__(
        self, host: ir.HostProgram, kernels: Sequence[LoadedKernel], parts: Parts, slots: Slots,
        fixed: Sequence[str], dynamic: Collection[str],
    ) -> None:  # fmt: skip
        super().__init__(host, kernels, parts, slots)
        self._fixed, self._dynamic = fixed, dynamic
        checks = [b for b in parts.before if isinstance(b, ir.Check)]
        self._originals = {c.name: c.original for c in checks if c.original is not None}
        self._results = {result: f"r{k}" for k, result in enumerate(parts.results)}

    def source(self) -> str:
        self._line("if off or is_profiling() or executable.observed or is_capturing(): return plain(args)")
        if self._home:
            self._line(f"if current_device() != {self._index()}: return on_device({self._index()}, call, args)")
        self._head()
        stream = self._stream(self._parts.device)
        self._line(f"{stream} = current_stream({self._index()})")
        self._find(stream)
        self._line("args.clear()")
        instruction: ir.Instruction
        for instruction in (*self._parts.drawn, *self._parts.fresh):
            self._instruction(0, instruction)
        self._launch(stream)
        for instruction in self._parts.after:
            self._instruction(0, instruction)
        outputs = "".join(f"{self._tree(o)}, " for o in self._host.outputs)
        self._line(f"return ({outputs.rstrip()})")
        return "def call(args):\n" + "".join(self._lines)

    @property
    def sizes(self) -> list[str]:
        """What the key holds first: everything that the steps may depend on except addresses."""
        names = [n for n in self._host.inputs if n.startswith("s")]
        names += [b.size for b in self._parts.before if isinstance(b, ir.Bind)]
        return names + [f"{n}.{what}" for n in self._parts.read if n in self._dynamic for what in ("shape", "stride()")]

    def _find(self, stream: str) -> None:
        self._line(f"sizes = ({stream}, {''.join(f'{s}, ' for s in self.sizes)})")
        self._line(f"lie = ({''.join(f'{n}.data_ptr(), ' for n in self._fixed)})")
        self._line("found = recordings.get((sizes, lie))")
        self._line("if found is None:")
        self._line("    found = missing(sizes, lie, args)")
        held = [host_name(n) for n in (*self._host.inputs, *self._originals.values())]
        self._line("    if found is None:")
        if held:
            self._line(f"        del {', '.join(held)}")
        self._line("        return without(args)")

    def _launch(self, stream: str) -> None:
        """Gather what is given anew, and launch."""
        tables: dict[str, str] = {}
        for launch in self._parts.steps:
            if isinstance(launch, ir.Launch) and launch.table:
                name = f"table{self._tables}"
                tables[name] = self._table(launch)
        words = "".join(f"{tables.get(e, e)}, " for e in self._slots.numbers)
        if self._parts.results:
            self._line("made = found.made()")
            words += "*[m.data_ptr() for m in made], "
        self._line(f"status = found.replay(({words}), {stream})")
        inputs = ", ".join(host_name(self._originals.get(n, n)) for n in self._host.inputs)
        seeds = ", ".join(c.result for c in self._parts.drawn if isinstance(c, ir.Call) and c.target == SEED)
        self._line(f"if status: return failed(status, [{inputs}], [{seeds}])")
        if self._parts.results:
            self._line(f"{', '.join(self._results.values())}, = found.results(made)")

    def _address(self, ref: ir.Ref) -> str:
        if ref.name in self._given:
            return super()._address(ref)
        launch = [s for s in self._parts.steps if isinstance(s, ir.Launch) and s.table][self._tables]
        position = next(k for k, word in enumerate(launch.table) if word is ref)
        return f"found.static[{self._slots.static[self._tables, position]}]"

    def _ref(self, ref: ir.Ref) -> str:
        return self._results.get(ref) or super()._ref(ref)

    def visit_Copy(self, copy: ir.Copy) -> None:
        self._line(f"{host_name(copy.target)}.copy_({self._ref(ir.Ref(copy.source))})")


class DrawnWriter(Writer):
    """The executable's own function, with seeds that were drawn before it runs."""

    def visit_Call(self, call: ir.Call) -> None:
        if call.target == SEED:
            self._line(f"{host_name(call.result)} = next(drawn)")
        else:
            super().visit_Call(call)
