"""Documentation that can be checked: options and errors are complete, links lead somewhere."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import pytest
import torch

from onepass import errors
from onepass.ir.options import Options

from .api import api_page
from .operators import operators_page

ROOT = Path(__file__).resolve().parents[2]
TOP = ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md")
PAGES = sorted([*(ROOT / name for name in TOP), *ROOT.glob("docs/**/*.md")])
OPTIONS_HEAD = """# Options

`torch.compile(f, backend="onepass", options={"precision": "eager"})`; `onepass.jit` and `onepass.explain` too.
`onepass.jit(f, fuse=False)` takes them by name, too. `mode="max-autotune"` (or `"max-autotune-no-cudagraphs"`) is
`tune="max"`, `mode="reduce-overhead"` is `graphs="on"`; other modes are errors. Targets may be given by the chip:
`a100`, `h100`, `h200`, `b200`, `mi300x`. An unknown name or value is an error that names the nearest one. This page is
generated from `ir/options.py` (`pytest --update-golden tests/docs`).

| option | default | meaning | changes code |
|---|---|---|---|
"""
OPTIONS_TAIL = """
Options that change code are part of the cache key; the others only print or check.

| environment variable | meaning |
|---|---|
| `ONEPASS_DEBUG` | the `debug` option, 0 to 5 |
| `ONEPASS_DUMP` | the `dump` option, a folder |
| `ONEPASS_STRICT` | `1`: the `strict` option |
| `ONEPASS_TARGET` | the `target` option |
| `ONEPASS_TUNE` | the `tune` option |
| `ONEPASS_WATCH` | the `watch` option |
| `ONEPASS_CACHE_DIR` | the cache folder (default: `onepass` in the user's cache folder) |
| `TORCH_LOGS` | torch's own: `onepass` a line for each graph, `+onepass.planner` plans, `+onepass.codegen` kernels |
| `CC` | the C compiler (default: the first of cc, gcc, clang) |

## Tuning

How a kernel is cut into tiles follows from rules. Where a kernel runs on a GPU of this machine and its first
measurement is more than 1.25 times the predicted time (`max`: 1.03), neighbours of what the rules say are built
and timed too: other numbers of warps, other tiles, loads that run ahead or do not. `quick` tries at most 4 for at
most about a second per kernel, 3 seconds per graph, `max` 24; one is taken if it is faster by more than 2 %, and
never one that spills registers where another does not. Nothing is measured for kernels predicted below 10 µs, for
targets that are not here, on CPUs, for `explain` on fake tensors, while a CUDA graph is captured, in a process
group of several ranks (their decisions must be equal), or where the
tensors would take more than a quarter of the free memory. What was tried is in `explain`; the choice is stored with
the compiled graph, so a warm start measures nothing, and by the kernel's own text, so other graphs with an equal
kernel do not measure it again. A kernel that takes more than twice its predicted time is compared with its parts:
with matrix products, with the library on the device; without, with kernels of half as many operations. The faster
plan stays, and `explain` tells both times.

Whether a matrix product runs inside a kernel or is left to the library follows from predicted times. Where these are
within 1.75 of each other, both ways are built and timed once, for at most 3 seconds per graph (`max`: 600) and under
the same conditions; `explain` then says "measured" with both times. A time above twice the predicted one is measured
up to twice again, and the least counts. Equal parts of a model share one measurement, and
so do later processes, by the cache.

Programs stay the same and so do results, but for the order in which a sum is added up, and for roundings to 16 bits
between a product and what follows it, which one kernel does not have. With `tune="off"` plan and order are the same
on every machine with the same chip.

## CUDA graphs

With `graphs="on"` the first two calls of new sizes run as without; the third is recorded, and later ones launch the
recording. Nothing else changes for a program: results are new tensors that may be kept, fed back and freed in any
order; inputs may lie elsewhere in every call; parameters may be changed in place or replaced; random numbers are those
without graphs. Kernels take the addresses of each call. What matrix products and other calls of the library read and
make is copied if it moves, except inputs that stay where they are, such as parameters; an input that was seen at three
addresses (a parameter: nine) is copied. One executable graph is kept for each stream, set of sizes and set of such
addresses, at most 8 of a program; all of one stream share the memory for what they compute in between, which is kept
until the process ends.

Programs with random numbers drawn by the library (`eager_random`), results of unknown size, operations of others,
kernels on the CPU or tensors on several devices run without, and so does a program of one launch, and what is called
while the user captures a graph or a profiler runs. `explain` says why, and how many bytes are copied and kept. `auto`
also leaves those alone whose predicted work takes the device longer than launching took the host. Graphs need a driver
of CUDA 12.3 or newer.

## Sizes known at run time

`onepass.jit(f, dynamic=True)` compiles once for every size, 1 included, whichever comes first, if the function is one
graph and means the same for a size of 1 (which elsewhere may be broadcast or squeezed).
`torch.compile(f, backend="onepass", dynamic=True)` follows torch's own rule: a size of 0 or 1 is a graph of its own,
every other size shares one, unless `torch.fx.experimental._config.backed_size_oblivious` is set while it is traced.
Either way a program is right for every size its guards admit; plans and the numbers of `explain` are made for the
sizes it was first called with (sizes of 0 and 1 count as 512), which the explanation names.
"""


def _options_page() -> str:
    rows = []
    for option in fields(Options):
        meaning = option.metadata["doc"]
        changes = "yes" if option.metadata["changes_code"] else "no"
        rows.append(f"| `{option.name}` | `{option.default!r}` | {meaning} | {changes} |\n")
    return OPTIONS_HEAD + "".join(rows) + OPTIONS_TAIL


def test_options_page_is_up_to_date(golden: Callable[[str, str], None]) -> None:
    golden("../../docs/options.md", _options_page())


def test_every_environment_variable_is_documented() -> None:
    sources = "".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    assert set(re.findall(r"\bONEPASS_[A-Z_]+", sources)) <= set(re.findall(r"ONEPASS_[A-Z_]+", OPTIONS_TAIL))


def test_every_error_has_a_row() -> None:
    page = (ROOT / "docs" / "errors.md").read_text()
    for name, value in vars(errors).items():
        if inspect.isclass(value) and issubclass(value, errors.OnepassError):
            assert f"`{name}`" in page, f"docs/errors.md says nothing about {name}"


@pytest.mark.skipif(not torch.__version__.startswith("2.13"), reason="the page is of the operators of one torch")
def test_operators_page_is_up_to_date(golden: Callable[[str, str], None]) -> None:
    golden("../../docs/operators.md", operators_page())


def test_api_page_is_up_to_date(golden: Callable[[str, str], None]) -> None:
    golden("../../docs/api.md", api_page())


def test_there_are_at_most_twenty_options() -> None:
    assert len(fields(Options)) <= 20


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for target, heading in re.findall(r"\]\(([^)#\s]*)#?([^)\s]*)\)", text):
        if "://" not in target:
            linked = page.parent / target if target else page
            assert linked.exists(), f"{page.name} links to {target}, which does not exist"
            assert not heading or heading in _headings(linked), (
                f"{page.name} links to {target}#{heading}: no such heading"
            )


def _headings(page: Path) -> set[str]:
    """The names by which a page's headings are linked to."""
    found = re.findall(r"^#+ (.*)$", page.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in found}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_source_files_exist(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for name in re.findall(r"`([\w./]+/[\w.]+\.(?:py|md|json|txt))`", text):
        assert any((folder / name).exists() for folder in (ROOT / "src" / "onepass", ROOT)), f"{page.name}: {name}"
