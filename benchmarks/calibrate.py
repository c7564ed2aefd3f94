"""Fit the numbers of `ir/rates.py` to measured kernels: `python -m benchmarks.calibrate MEASURED --target sm_90`.

In: what `python -m benchmarks.candidates --measure FILE --out MEASURED` wrote on a chip. The kernels are built again
without a GPU. Each number is moved up and down by a factor as long as prices come nearer to the times of the kernels
whose key is even. Out: the table as Python text, and how near prices are for the other half, before and after.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

from onepass.analysis.price import price
from onepass.ir.kernel import Kernel
from onepass.ir.rates import Rates
from onepass.ir.target import Target, find_target
from onepass.ir.time import total_us

from .candidates import distinct

FACTORS = (1.25, 1.08)  # by which a number is moved: first far, then near
MOST_ROUNDS = 3  # with each factor
NEAR = 1.5
# Numbers of the library's calls, which are not kernels of ours, are fitted by hand.
LIBRARY = ("source", "library_tiles", "library_exposed", "call_us", "unaligned")


@dataclass(frozen=True, slots=True)
class Sample:
    """The kernels of one group, and the microseconds that they took."""

    key: str
    kernels: tuple[Kernel, ...]
    measured_us: float

    @property
    def is_fitted(self) -> bool:
        return int(self.key, 16) % 2 == 0

    def ratio(self, target: Target) -> float:
        return total_us(price(k, target) for k in self.kernels) / self.measured_us


def samples(measured: Mapping[str, Mapping[str, float]], target: Target, only: str = "") -> list[Sample]:
    """The candidates of the corpus that were measured."""
    return [
        Sample(key, candidate.group.kernels, measured[key]["measured_us"])
        for key, candidate in distinct(only, target).items()
        if key in measured
    ]


def distance(found: Sequence[Sample], target: Target) -> float:
    """How far prices are from times: the mean square of the logarithm of their ratio."""
    return sum(math.log(s.ratio(target)) ** 2 for s in found) / max(1, len(found))


def near(found: Sequence[Sample], target: Target) -> float:
    """The part of the samples whose price is within a factor of `NEAR`."""
    return sum(1 / NEAR <= s.ratio(target) <= NEAR for s in found) / max(1, len(found))


def fitted(found: Sequence[Sample], target: Target) -> Rates:
    """The numbers with which prices come nearest to the samples."""
    names = [f.name for f in fields(Rates) if f.name not in LIBRARY and not f.name.startswith("attention")]
    rates, least = target.rates, distance(found, target)
    for factor in FACTORS:
        for _ in range(MOST_ROUNDS):
            before = least
            for name in names:
                for step in (factor, 1 / factor):
                    moved = replace(rates, **{name: getattr(rates, name) * step})
                    away = distance(found, replace(target, rates=moved))
                    if away < least:
                        rates, least = moved, away
                        break
            if least > 0.999 * before:
                break
    return rates


def text(rates: Rates) -> str:
    """The table as Python, each number with four digits."""
    numbers = (f"    {f.name}={getattr(rates, f.name):.4g}," for f in fields(Rates) if f.name not in LIBRARY)
    return "\n".join((f"Rates(\n    {rates.source!r},", *numbers, ")"))


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.calibrate", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("measured", type=Path, help="measured candidates, as JSON")
    parser.add_argument("--target", default="sm_90")
    parser.add_argument("--only", default="", help="a part of program names")
    parser.add_argument("--source", default="this machine", help="the chip's name and the date, for the table")
    arguments = parser.parse_args()
    target = find_target(arguments.target)
    found = samples(json.loads(arguments.measured.read_text()), target, arguments.only)
    halves = [[s for s in found if s.is_fitted == even] for even in (True, False)]
    if not all(halves):
        print(f"{len(found)} kernels of the file are candidates of this version: too few to fit", file=sys.stderr)
        return 1
    rates = replace(fitted(halves[0], target), source=arguments.source)
    after = replace(target, rates=rates)
    print(text(rates))
    for name, half in zip(("fitted", "other half"), halves, strict=True):
        parts = f"{near(half, target):.1%} before, {near(half, after):.1%} after"
        print(f"{name}: {len(half)} kernels, within a factor of {NEAR}: {parts}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
