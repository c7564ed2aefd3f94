"""Compare every decision with the recorded ones: `make oracle`; record them anew: `make oracle UPDATE=1`.

The exit status is 1 where a decision differs that flips.md does not answer for. See README.md in this folder.
"""

from __future__ import annotations

import argparse
import sys
from fnmatch import fnmatchcase
from pathlib import Path

import onepass
from tests.oracle.compare import Flip, answer, changed_texts, flips, read_meant, with_recorded
from tests.oracle.corpus import corpus
from tests.oracle.runs import TARGETS, Recording, record, recorded, update

FLIPS = Path(__file__).parent / "flips.md"
SOURCES = Path(__file__).resolve().parents[2] / "src"


def _report_texts(target: str, before: Recording, after: Recording) -> None:
    new, kernels, programs = changed_texts(before.texts, after.texts)
    print(f"{target}: {new} of {kernels} texts are new, in {programs} of {len(after.texts)} programs")


def _report(found: list[Flip], title: str) -> None:
    if found:
        print(f"\n{len(found)} {title}\n")
        print("\n".join(map(str, found)))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tests.oracle", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--update", action="store_true", help="record, if flips.md answers for every flip")
    parser.add_argument("--only", default="*", help="programs that match this pattern of the shell")
    parser.add_argument("--targets", default=",".join(TARGETS), help=f"of {', '.join(TARGETS)}")
    parser.add_argument("--workers", type=int, default=1, help="processes")
    arguments = parser.parse_args()
    arguments.targets = arguments.targets.split(",")
    if unknown := set(arguments.targets) - set(TARGETS):
        parser.error(f"unknown targets: {', '.join(sorted(unknown))}")
    return arguments


def main() -> int:
    arguments = _arguments()
    if SOURCES not in Path(onepass.__file__).resolve().parents:
        raise SystemExit(f"{onepass.__file__} would be planned with, not {SOURCES}: set PYTHONPATH=src:.")
    after = record(arguments.targets, arguments.only, arguments.workers)
    before = {target: recorded(target) for target in after}
    found = [f for target in after for f in flips(target, before[target].decisions, after[target].decisions)]
    open_flips, answered = answer(found, read_meant(FLIPS.read_text()))
    _report([f for listed in answered.values() for f in listed], "flips are meant")
    _report(open_flips, "flips that flips.md does not answer for")
    print()
    for target in after:
        _report_texts(target, before[target], after[target])
    names = {name for target in after for name in after[target].decisions}
    known = {name for target in before for name in before[target].decisions}
    gone = {name for name in known - set(corpus()) if fnmatchcase(name, arguments.only)}
    for title, changed in (("new programs", names - known), ("programs that are gone", gone)):
        if changed:
            print(f"{len(changed)} {title}: {', '.join(sorted(changed)[:9])}")
    if open_flips:
        return 1
    if arguments.update:
        update(before, after, gone)
        FLIPS.write_text(with_recorded(FLIPS.read_text(), answered))
    elif names - known or gone:
        print("the corpus is not what was recorded: make oracle UPDATE=1")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
