"""Every error a user can meet: one class each, with the fix in the message."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class OnepassError(Exception):
    """Base of all errors raised by onepass."""


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of a sentence about an unknown name: the known one that was probably meant, if there is one."""
    near = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {near[0]!r}?" if near else "."


class UnknownOption(OnepassError):
    """An option name that does not exist."""

    def __init__(self, name: str, known: Iterable[str]) -> None:
        known = sorted(known)
        super().__init__(f"unknown option {name!r}{nearest(name, known)} Options: {', '.join(known)}.")


class InvalidOption(OnepassError):
    """An option with a value it cannot have."""

    def __init__(self, name: str, value: object, allowed: str) -> None:
        super().__init__(f"option {name!r} cannot be {value!r}; it takes {allowed}.")


class UnknownTarget(OnepassError):
    """A target that is not in the table."""

    def __init__(self, name: str, known: Iterable[str]) -> None:
        known = sorted(known)
        super().__init__(f"unknown target {name!r}{nearest(name, known)} Known targets: {', '.join(known)}.")


class CompilerNotFound(OnepassError):
    """No C compiler on this machine."""

    def __init__(self, tried: Iterable[str]) -> None:
        super().__init__(
            f"no C compiler found (tried {', '.join(tried)}). Install gcc or clang, or set CC to one. "
            "Until then programs run as eager does."
        )


class KernelBuildError(OnepassError):
    """The C compiler rejected a generated kernel."""

    def __init__(self, command: str, message: str, source: str) -> None:
        super().__init__(
            f"building a generated kernel failed.\n  command: {command}\n  source kept at: {source}\n{message}"
        )


class KernelMismatch(OnepassError):
    """A kernel's result differs from the reference interpreter's (ONEPASS_DEBUG=5)."""

    def __init__(
        self, buffer: str, operations: str, wrong: int, total: int, place: tuple[int, ...], got: object, want: object
    ) -> None:
        super().__init__(
            f"the kernel that stores {buffer} ({operations}) differs from the reference in {wrong} of {total} elements,"
            f" first at {list(place)}: {got}, expected {want}. Please report it with what ONEPASS_DUMP writes."
        )


class VerifyError(OnepassError):
    """A stage produced something illegal: a bug in onepass, named with the statement."""


class CacheError(OnepassError):
    """The cache folder cannot be used the way it was asked to be."""


class LayoutMismatch(OnepassError):
    """An operator returned a tensor unlike the one its fake implementation promised."""

    def __init__(self, what: str, found: object, expected: object) -> None:
        super().__init__(
            f"{what} gave a tensor of {found} where its fake (meta) implementation promised {expected}. "
            "Correct that implementation, or keep the operator out of the compiled function."
        )


class UnmetOrder(OnepassError):
    """What a user asked of some operations (`onepass.fuse`, `onepass.recompute`) cannot be."""

    def __init__(self, order: str, line: str, reason: str, fix: str) -> None:
        place = f" at {line}" if line else ""
        super().__init__(f"{order}{place} cannot be met: {reason}. {fix}")


class UnequalReplacement(OnepassError):
    """A replacement that does not compute what its pattern does (`onepass.replace`)."""

    def __init__(self, pattern: str, difference: str) -> None:
        super().__init__(f"the replacement of {pattern} computes something else: {difference}. Correct one of both.")


class UnexportableProgram(OnepassError):
    """A program that cannot be written to a file by `onepass.export`."""

    def __init__(self, problem: str, fix: str) -> None:
        super().__init__(f"this program cannot be exported: {problem}. {fix}")


class DamagedFile(OnepassError):
    """A file that is not what `onepass.export` wrote."""

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(f"{path} is damaged or no exported program: {problem}. Copy it again, or export it again.")


class IncompatibleFile(OnepassError):
    """An exported program that cannot run here: another chip, processor, driver or version."""

    def __init__(self, path: str, needed: str, found: str, fix: str) -> None:
        super().__init__(f"{path} needs {needed}; here is {found}. {fix}")


class InputMismatch(OnepassError):
    """What an exported program was given is not what it was exported for."""

    def __init__(self, what: str, found: object, expected: object) -> None:
        super().__init__(
            f"{what} is {found}; this program was exported for {expected}. "
            "Pass what it was exported for, or export it for this, too (dynamic_shapes= for sizes)."
        )


class UnusableProgram(OnepassError):
    """What the command line was asked to explain cannot be found or called."""

    def __init__(self, problem: str, fix: str) -> None:
        super().__init__(f"{problem}. {fix}")
