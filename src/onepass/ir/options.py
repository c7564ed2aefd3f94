"""Options: what a user may set, with defaults. Each either changes code (and the cache key) or only prints."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field, fields
from typing import Any

from ..errors import InvalidOption, UnknownOption

# A file and lines of it, in the option `no_fuse`; every other pattern names modules.
LINES = re.compile(r"(?P<file>[^:]+\.py):(?P<first>\d+)(-(?P<last>\d+))?")


def _option(default: Any, doc: str, changes_code: bool, allowed: tuple[Any, ...] = ()) -> Any:
    return field(default=default, metadata={"doc": doc, "changes_code": changes_code, "allowed": allowed})


@dataclass(frozen=True, slots=True)
class Options:
    """`torch.compile(f, backend="onepass", options={...})`; environment variables set the defaults."""

    target: str = _option("auto", "the chip to plan for: auto (the tensors' device) or a name of the table", True)
    precision: str = _option(
        "fused",
        "fused: 16-bit values stay float32 inside a kernel; eager: round after each op",
        True,
        ("fused", "eager"),
    )
    fuse: bool = _option(True, "False: one kernel per operation", True, (True, False))
    no_fuse: str = _option(
        "",
        "operations that get a kernel each, as inside `onepass.no_fuse()`: lines (`model.py:10-20`) or modules"
        " (`layers.*.mlp`), separated by commas",
        True,
    )
    tune: str = _option(
        "quick",
        "measure tile sizes and close calls on products on the GPU at hand: off, quick (about a second each) or max",
        True,
        ("off", "quick", "max"),
    )
    memory: float = _option(
        1.0,
        "training: the part of the bytes kept for backward by default that may be kept, from 0 (what can be computed"
        " again is) to 1",
        True,
    )
    graphs: str = _option(
        "off",
        "NVIDIA GPUs: record a program's launches as one CUDA graph: on; auto: where its predicted time is below the"
        " time that launching takes; off",
        False,
        ("off", "auto", "on"),
    )
    eager_random: bool = _option(
        False, "True: dropout and random tensors are eager's, bit by bit; drawn by its calls, not in kernels", True,
        (True, False),
    )  # fmt: skip
    strict: bool = _option(
        False, "True: an internal error is raised instead of running that graph as eager", False, (True, False)
    )
    debug: int = _option(
        0, "0 silent, 1 summary, 2 decisions, 3 program and plan, 4 sources, 5 check each kernel", False
    )
    watch: str = _option(
        "", "lines of yours (`model.py:12`), separated by commas: their values are printed at every call", False
    )
    dump: str = _option("", "folder that receives every stage of each compilation as files", False)
    cache: bool = _option(True, "False: neither read nor write the persistent cache", False, (True, False))

    @property
    def checks(self) -> bool:
        """Whether every kernel is compared with the interpreter."""
        return self.debug >= 5

    @property
    def observes(self) -> bool:
        """Whether something is done around each call."""
        return self.checks or bool(self.watch)

    @staticmethod
    def make(values: dict[str, Any] | None = None) -> Options:
        """Options from the environment, then from `values`; unknown names and bad values are errors."""
        known = {f.name: f for f in fields(Options)}
        merged = {**_from_environment(), **(values or {})}
        for name, value in merged.items():
            if name not in known:
                raise UnknownOption(name, known)
            allowed = known[name].metadata["allowed"]
            if allowed and value not in allowed:
                raise InvalidOption(name, value, " or ".join(map(repr, allowed)))
            kind = type(known[name].default)
            if kind is float and type(value) is int:
                merged[name] = value = float(value)
            if not isinstance(value, kind):
                raise InvalidOption(name, value, f"a value of type {kind.__name__}")
        for pattern in filter(None, str(merged.get("watch", "")).split(",")):
            if not LINES.fullmatch(pattern.strip()):
                raise InvalidOption("watch", pattern, "lines as in model.py:12 or model.py:10-20")
        for pattern in str(merged.get("no_fuse", "")).split(","):
            if ":" in pattern and not LINES.fullmatch(pattern.strip()):
                raise InvalidOption("no_fuse", pattern, "lines as in model.py:10-20, or modules as in layers.*.mlp")
        if not 0 <= merged.get("memory", 1.0) <= 1:
            raise InvalidOption("memory", merged["memory"], "a number from 0 to 1")
        return Options(**merged)

    def code_key(self) -> str:
        """The part of the cache key that options contribute."""
        return ",".join(f"{f.name}={getattr(self, f.name)}" for f in fields(self) if f.metadata["changes_code"])


def is_among(lines: re.Match[str], path: str, number: int) -> bool:
    """Whether a line of a file is one of those that a pattern (`LINES`) names."""
    first = int(lines["first"])
    return f"/{path}".endswith(f"/{lines['file']}") and first <= number <= int(lines["last"] or first)


MODES: dict[str, dict[str, Any]] = {
    "default": {},
    "reduce-overhead": {"graphs": "on"},
    "max-autotune": {"tune": "max"},
    "max-autotune-no-cudagraphs": {"tune": "max"},
}


def options_of_mode(mode: str | None) -> dict[str, Any]:
    """What `torch.compile(mode=...)` asks for."""
    if mode is not None and mode not in MODES:
        raise InvalidOption("mode", mode, " or ".join(map(repr, MODES)))
    return dict(MODES[mode or "default"])


def _from_environment() -> dict[str, Any]:
    found: dict[str, Any] = {}
    if level := os.environ.get("ONEPASS_DEBUG"):
        if not level.isdigit():
            raise InvalidOption("ONEPASS_DEBUG", level, "a number from 0 to 5")
        found["debug"] = int(level)
    for name in ("dump", "target", "tune", "watch"):
        if value := os.environ.get(f"ONEPASS_{name.upper()}"):
            found[name] = value
    if os.environ.get("ONEPASS_STRICT") == "1":
        found["strict"] = True
    return found
