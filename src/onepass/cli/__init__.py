"""The command line: `onepass explain | demo | bench | cache | doctor`. Results on stdout, the rest on stderr."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from .. import __version__
from ..errors import CacheError, OnepassError, UnusableProgram

_SOURCE_FOLDER = Path(__file__).resolve().parents[3]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; an error is one line on stderr and exit status 1."""
    parser = _parser()
    parsed, rest = parser.parse_known_args(arguments)
    if rest and parsed.command is not _bench:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    parsed.rest = rest  # the benchmark has options of its own
    command: Callable[[argparse.Namespace], int] = parsed.command
    try:
        status = command(parsed)
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        # The reader (head, less) has gone; nothing may be written at interpreter exit either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        print("onepass: stopped", file=sys.stderr)
        return 130
    except Exception as error:
        _report(error)
        return 1


def _report(error: Exception) -> None:
    if os.environ.get("ONEPASS_DEBUG", "0") not in ("", "0"):
        traceback.print_exc()
        return
    error = getattr(error, "inner_exception", error)  # dynamo wraps what a backend raises
    text = (str(error).strip().splitlines() or ["no message"])[0]
    if not isinstance(error, OnepassError):
        text = f"{type(error).__name__}: {text} (ONEPASS_DEBUG=1 shows where)"
    print(f"onepass: {text}", file=sys.stderr)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="onepass", description="A kernel-fusion compiler for PyTorch: what it fused, and whether it works here."
    )
    parser.add_argument("--version", action="version", version=f"onepass {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    _add_explain(commands)
    demo = commands.add_parser("demo", help="compile several real workloads, check them, time them beside eager")
    demo.set_defaults(command=_demo)
    beside = "speed beside eager, Inductor and XLA (from a source folder)"
    commands.add_parser("bench", help=beside, add_help=False).set_defaults(command=_bench)
    cache = commands.add_parser("cache", help="the persistent cache: its size, its folder, clear it")
    cache.add_argument("action", choices=("size", "clear", "path"), nargs="?", default="size")
    cache.set_defaults(command=_cache)
    doctor = commands.add_parser("doctor", help="check this machine: versions, compiler, cache, a real kernel")
    doctor.set_defaults(command=_doctor)
    return parser


def _add_explain(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    explain = commands.add_parser(
        "explain",
        help="say which kernels a function becomes, and why",
        description="Compile a function, forward and backward, and say what was fused and why.",
        epilog="Arguments come from NAME_inputs() or example_inputs() in the same file (a tuple, a dict of "
        "keyword arguments, or one value), from --input, or from the function's defaults.",
    )
    explain.add_argument("program", metavar="FILE.py:NAME", help="a function, a module, or a module class")
    explain.add_argument(
        "--input",
        action="append",
        default=[],
        metavar="SHAPE[:DTYPE]",
        help="a random tensor argument such as 4096x4096 or 8x128:bfloat16; repeat it for each argument",
    )
    explain.add_argument("--train", action="store_true", help="--input tensors require gradients")
    explain.add_argument("--target", help="plan for this chip instead of the one here")
    explain.add_argument("--json", action="store_true", help="print JSON instead of text")
    explain.add_argument("--html", type=Path, metavar="OUT.html", help="also write one self-contained page")
    explain.set_defaults(command=_explain)


def _explain(arguments: argparse.Namespace) -> int:
    from ..api import explain
    from ..progress import Progress
    from .program import load_program, random_inputs

    with Progress(sys.stderr, 2) as progress:
        progress.step(f"loading {arguments.program}")
        given = random_inputs(arguments.input, arguments.train) if arguments.input else None
        program = load_program(arguments.program, given)
        progress.step("compiling")
        explanation = explain(program.function, *program.args, target=arguments.target, **program.kwargs)
    if arguments.html:
        try:
            arguments.html.write_text(explanation.to_html(), "utf-8")
        except OSError as error:
            problem = f"cannot write {arguments.html} ({error.strerror})"
            raise UnusableProgram(problem, "Choose another file for --html") from error
        print(f"wrote {arguments.html}", file=sys.stderr)
    print(explanation.to_json() if arguments.json else explanation)
    return 0


def _demo(arguments: argparse.Namespace) -> int:
    from ..demo import run_demo

    return run_demo()


def _bench(arguments: argparse.Namespace) -> int:
    if not (_SOURCE_FOLDER / "benchmarks" / "__main__.py").is_file():
        raise UnusableProgram("the benchmarks are not installed", "Run `onepass bench` from a source folder")
    command = [sys.executable, "-m", "benchmarks", *arguments.rest]
    paths = [str(_SOURCE_FOLDER / "src"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    return subprocess.run(command, cwd=_SOURCE_FOLDER, env=environment, check=False).returncode


def _cache(arguments: argparse.Namespace) -> int:
    from ..explain.text import byte_text, counted
    from ..runtime.cache import cache_folder, default_cache

    if arguments.action == "path":
        print(cache_folder())
        return 0
    cache = default_cache()
    if not cache.usable:
        raise CacheError(f"{cache.root} cannot be used as a cache; set ONEPASS_CACHE_DIR to a folder of your own")
    if arguments.action == "clear":
        print(f"freed {byte_text(cache.clear())} in {cache.root}")
        return 0
    count = cache.count()
    entries = f"{counted(count['graphs'], 'graph')}, {counted(count['kernels'], 'kernel')}"
    print(f"{byte_text(cache.size())} ({entries}) in {cache.root}")
    return 0


def _doctor(arguments: argparse.Namespace) -> int:
    from .doctor import run_doctor

    return run_doctor()
