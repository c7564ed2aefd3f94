"""The command line: `onepass explain | profile | repro | export | demo | bench | cache | doctor`.

Results on stdout, the rest on stderr. Nothing here imports torch before a command needs it.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from .. import __version__
from ..errors import CacheError, OnepassError, UnusableProgram

if TYPE_CHECKING:
    from .program import LoadedProgram

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
    _add_profile(commands)
    _add_repro(commands)
    _add_export(commands)
    demo = commands.add_parser("demo", help="compile several real workloads, check them, time them beside eager")
    demo.set_defaults(command=_demo)
    beside = "speed beside eager, Inductor and XLA"
    commands.add_parser("bench", help=beside, add_help=False).set_defaults(command=_bench)
    cache = commands.add_parser("cache", help="the persistent cache: its size, its folder, clear it")
    cache.add_argument("action", choices=("size", "clear", "path"), nargs="?", default="size")
    cache.set_defaults(command=_cache)
    doctor = commands.add_parser("doctor", help="check this machine: versions, compiler, cache, a real kernel")
    doctor.set_defaults(command=_doctor)
    return parser


def _add_program(
    commands: argparse._SubParsersAction[argparse.ArgumentParser], name: str, help: str, description: str
) -> argparse.ArgumentParser:
    """A command about FILE.py:NAME and its arguments."""
    command = commands.add_parser(
        name,
        help=help,
        description=description,
        epilog="Arguments come from NAME_inputs() or example_inputs() in the same file (a tuple, a dict of "
        "keyword arguments, or one value), from --input, or from the function's defaults.",
    )
    command.add_argument("program", metavar="FILE.py:NAME", help="a function, a module, or a module class")
    command.add_argument(
        "--input",
        action="append",
        default=[],
        metavar="SHAPE[:DTYPE]",
        help="a random tensor argument such as 4096x4096 or 8x128:bf16; repeat it for each argument",
    )
    command.add_argument("--train", action="store_true", help="--input tensors require gradients")
    command.add_argument("--eval", action="store_true", help="modules are put into evaluation mode")
    command.add_argument("--no-grad", action="store_true", help="without gradients: forward alone")
    command.add_argument("--target", help="plan for this chip instead of the one here")
    return command


def _add_explain(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    what = "Compile a function, forward and backward, and say what was fused and why."
    explain = _add_program(commands, "explain", "say which kernels a function becomes, and why", what)
    explain.add_argument("--operations", action="store_true", help="whose the instructions of a GPU's kernels are, too")
    _add_outputs(explain)
    explain.set_defaults(command=_explain)


def _add_profile(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    what = "Run a function, forward and backward, beside eager, and say where its time goes, kernel by kernel."
    profile = _add_program(commands, "profile", "measure where a function's time goes", what)
    profile.add_argument("--beside", default="eager", metavar="NAMES", help="eager,inductor: what it takes turns with")
    profile.add_argument("--operations", action="store_true", help="what each operation inside a kernel costs, too")
    profile.add_argument("--seconds", type=float, default=3.0, help="that all rounds together should take")
    profile.add_argument("--trace", type=Path, metavar="TRACE.json", help="also write a time line for trace viewers")
    _add_outputs(profile)
    profile.set_defaults(command=_profile)


def _add_repro(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    what = "Write the graph of a function that fails to compile, or else the slowest one, as one file that runs."
    repro = _add_program(commands, "repro", "write a failing or slow graph as one runnable file", what)
    repro.add_argument("--graph", type=int, metavar="N", help="the graph of that number instead, from 1 on")
    repro.add_argument("--out", type=Path, default=Path("repro.py"), metavar="OUT.py", help="default: repro.py")
    repro.set_defaults(command=_repro)


def _add_export(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    what = "Compile a function, forward alone, into a file that onepass.load runs without a compiler."
    export = _add_program(commands, "export", "write a compiled function as a file to deploy", what)
    export.add_argument("-o", "--out", type=Path, required=True, metavar="OUT.onepass", help="the file to write")
    export.add_argument("--no-weights", action="store_true", help="leave parameters and buffers out of the file")
    export.add_argument("--march", default="native", help='a CPU as the C compiler names it, such as "x86-64-v3"')
    export.set_defaults(command=_export)


def _add_outputs(command: argparse.ArgumentParser) -> None:
    command.add_argument("--json", action="store_true", help="print JSON instead of text")
    command.add_argument("--html", type=Path, metavar="OUT.html", help="also write one self-contained page")


@contextmanager
def _loaded(arguments: argparse.Namespace, doing: str) -> Iterator[LoadedProgram]:
    """The program of the command line, ready to be called."""
    import torch

    from .. import load_all
    from ..progress import Progress
    from .program import in_evaluation, load_program, random_inputs

    load_all()  # the file may use the package
    with Progress(sys.stderr, 2) as progress:
        progress.step(f"loading {arguments.program}")
        given = random_inputs(arguments.input, arguments.train) if arguments.input else None
        program = load_program(arguments.program, given)
        progress.step(doing)
        with in_evaluation(program.function, arguments.eval), torch.set_grad_enabled(not arguments.no_grad):
            yield program


def _explain(arguments: argparse.Namespace) -> int:
    from ..api import explain
    from ..explain.width import painted

    with _loaded(arguments, "compiling") as program:
        wanted = {"target": arguments.target, "operations": arguments.operations}
        explanation = explain(program.function, *program.args, **wanted, **program.kwargs)
    _write(arguments.html, "--html", explanation.to_html)
    print(explanation.to_json() if arguments.json else painted(str(explanation)))
    return 0


def _profile(arguments: argparse.Namespace) -> int:
    from ..api import profile
    from ..explain.width import painted

    beside = [name for name in arguments.beside.split(",") if name]
    with _loaded(arguments, "measuring") as program:
        found = profile(
            program.function, *program.args, beside=beside, operations=arguments.operations,
            seconds=arguments.seconds, target=arguments.target, **program.kwargs,
        )  # fmt: skip
    _write(arguments.html, "--html", found.to_html)
    _write(arguments.trace, "--trace", found.to_trace)
    print(found.to_json() if arguments.json else painted(str(found)))
    return 0


def _repro(arguments: argparse.Namespace) -> int:
    from ..backend import make_backend
    from ..profiling.repro import repro_text

    options = {"strict": True, **({"target": arguments.target} if arguments.target else {})}
    with _loaded(arguments, "compiling") as program:
        backend = make_backend(options)
        text = repro_text(program.function, program.args, program.kwargs, backend, arguments.program, arguments.graph)
    _write(arguments.out, "--out", lambda: text)
    return 0


def _export(arguments: argparse.Namespace) -> int:
    from ..exporting import export

    with _loaded(arguments, "compiling") as program:
        export(
            program.function, *program.args, path=arguments.out, target=arguments.target,
            weights=not arguments.no_weights, march=arguments.march, **program.kwargs,
        )  # fmt: skip
    print(f"wrote {arguments.out}", file=sys.stderr)
    return 0


def _write(path: Path | None, option: str, text: Callable[[], str]) -> None:
    """Write a file that was asked for."""
    if path is None:
        return
    try:
        path.write_text(text(), "utf-8")
    except OSError as error:
        problem = f"cannot write {path} ({error.strerror})"
        raise UnusableProgram(problem, f"Choose another file for {option}") from error
    print(f"wrote {path}", file=sys.stderr)


def _demo(arguments: argparse.Namespace) -> int:
    from .. import load_all
    from ..demo import run_demo

    load_all()
    return run_demo()


def _bench(arguments: argparse.Namespace) -> int:
    if not (_SOURCE_FOLDER / "benchmarks" / "__main__.py").is_file():  # an installed package, which has its own
        command = [sys.executable, "-m", "onepass.benchmarks", *arguments.rest]
        return subprocess.run(command, check=False).returncode
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
    from .. import load_all
    from .doctor import run_doctor

    load_all()
    return run_doctor()
