"""Close calls: where two predicted times are near each other, the device is asked, if it can be.

Takes a decision made by prediction, gives it back as it is, or as measuring decides. Who measures is handed in.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeAlias

from ..ir.plan import Decision
from .cost import SMALLEST_US
from .regions import Regions

# Predicted times that differ by less than this factor are a close call. On one H200 the predicted winner was seen to
# take 1.1 to 2.2 times as long as the other way; a question costs a second of building, so the range ends before that.
CLOSE = 1.75
AROUND = "by the library and kernels around it"
MOST_LOST = 2  # regions around one product that are measured in vain; the others are not asked for


@dataclass(frozen=True, slots=True)
class Verdict:
    """What both ways took, or why that is not known. `lost`: why one kernel is out of the question."""

    together_us: float = 0.0
    apart_us: float = 0.0
    problem: str = ""
    lost: str = ""


@dataclass(frozen=True, slots=True)
class Times:
    """Predicted times of both ways, and how to speak of them.

    `spared`: of what measuring apart would find, what another kernel does in passing; `apart_us` is without it.
    """

    together_us: float
    apart_us: float
    spared_us: float = 0.0
    ways: tuple[str, str] = ("in one kernel", AROUND)

    @property
    def are_close(self) -> bool:
        low, high = sorted((self.together_us, self.apart_us))
        return high < CLOSE * low and high >= SMALLEST_US


Judge: TypeAlias = Callable[[Regions, Regions, tuple[float, float]], Verdict]  # together, apart, what each should take


class CloseCalls:
    """The close calls of one program."""

    def __init__(self, judge: Judge | None, doubted: frozenset[str] = frozenset()) -> None:
        """`doubted`: operations whose predicted times are wrong, whether they are close or not."""
        self._judge, self._doubted = judge, doubted
        self._lost: Counter[tuple[str, str]] = Counter()  # by kind and first operation

    def settle(self, decision: Decision, times: Times, question: Callable[[], tuple[Regions, Regions]]) -> Decision:
        """The decision, measured if it is a close call and somebody measures. `question`: both ways."""
        if self._judge is None or not (times.are_close or self._doubts(question)):
            return decision
        about = decision.kind, decision.producer
        if self._lost[about] >= MOST_LOST:
            return _refused(decision, "measured and lost with other operations around it")
        verdict = self._judge(*question(), (times.together_us, times.apart_us + times.spared_us))
        if verdict.problem:
            if self._lost[about]:
                return _refused(decision, "measured and lost with more around it")
            return replace(decision, reason=f"{decision.reason}; not measured: {verdict.problem}")
        measured = _refused(decision, verdict.lost) if verdict.lost else _measured(decision, times, verdict)
        self._lost[about] += not measured.accepted
        return measured

    def _doubts(self, question: Callable[[], tuple[Regions, Regions]]) -> bool:
        if not self._doubted:
            return False
        return any(d.buffer.name in self._doubted for region in question()[0].regions for d in region.members)


def _refused(decision: Decision, why: str) -> Decision:
    return replace(decision, accepted=False, reason=f"{why}; {decision.reason}")


def _measured(decision: Decision, times: Times, verdict: Verdict) -> Decision:
    together, apart = verdict.together_us, verdict.apart_us - times.spared_us
    one, other = times.ways
    spared = f", {times.spared_us:.1f} us of it done anyway" if times.spared_us else ""
    reason = f"measured {together:.1f} us {one}, {verdict.apart_us:.1f} us {other}{spared}"
    reason += f" (predicted {times.together_us:.1f}, {times.apart_us:.1f})"
    return replace(decision, accepted=together < apart, reason=reason, saved_us=apart - together)
