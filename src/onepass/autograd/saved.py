"""What forward keeps for backward, and what backward computes again: the cheapest cut through the joint graph.

Each value has the time of keeping it and the time of computing it again (`saved_costs.py`); bytes that are held may
have a price, too, so that less is kept. Torch's min-cut then carries out what is marked here.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Container
from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node

from ..ir.plan import Decision
from ..ir.target import Target
from .between import COMPUTE_AGAIN, SAVE
from .min_cut import Network
from .saved_costs import Costs, is_asked_again, is_view

# The price of a held byte is searched between those of moving it so often, in so many steps.
CHEAP, DEAR, STEPS, ROUNDS = 2.0**-8, 2.0**16, 16, 3
NEAR = 0.99  # of what may be held: the search ends
SLACK = 1 / 256  # by default, over what torch would hold: for a few numbers per row nothing large is computed again
RAMP = 1 / 16  # equal layers cost the same; bytes of later ones cost more, so that a price takes some of them only


@dataclass(frozen=True, slots=True)
class Kept:
    """One way to divide the work. `held`: bytes that only backward needs; the time of keeping and computing again."""

    saved: tuple[Node, ...]
    again: tuple[Node, ...]
    held: int
    time_us: float


def choose_saved(
    joint: GraphModule, outputs: int, target: Target, lowered: Container[object], budget: float = 1.0
) -> tuple[dict[str, str], list[Decision]]:
    """Mark what is kept and what is computed again; why, for each value that is kept, and the decisions.

    `budget`: the part of the bytes held by default that may be held.
    """
    costs = Costs(joint, outputs, target, lowered)
    fewest = _Cut(costs, {n: (math.inf if is_view(n) else 0.0, _banned_us(costs, n)) for n in costs.nodes})
    cut = _Cut(costs, {n: (costs.keeping_us(n), costs.again_us(n)) for n in costs.nodes})
    kept = quickest = cut.within(int(fewest.at(DEAR, ramp=0.0).held * (1 + SLACK)))
    decisions: list[Decision] = []
    if budget < 1:
        kept = cut.within(int(budget * quickest.held))
        longer = kept.time_us - quickest.time_us
        short = "" if kept.held <= budget * quickest.held else "; no less is possible"
        reason = (
            f"a budget of {budget:g}: {kept.held / 1e6:.1f} MB held of {quickest.held / 1e6:.1f}, backward predicted "
            f"to take {longer:.1f} us longer{short}"
        )
        saved = quickest.held - kept.held
        decisions.append(Decision("graph", "backward", "memory", kept.held < quickest.held, reason, -longer, saved))
    for nodes, mark in ((kept.saved, SAVE), (kept.again, COMPUTE_AGAIN)):
        for node in nodes:
            is_tensor = isinstance(node.meta.get("val"), torch.Tensor | tuple | list)
            if node.op == "call_function" and is_tensor and "recompute" not in node.meta:
                node.meta |= mark
    return {n.name: cut.why(n) for n in kept.saved}, decisions


def _banned_us(costs: Costs, node: Node) -> float:
    return math.inf if costs.is_banned(node) else 0.0


class _Cut:
    """A network whose cuts say what is kept: one edge through each value, which keeping it cuts.

    A value on the sink's side is there in backward; if its beginning is, too, it is computed there.
    """

    def __init__(self, costs: Costs, prices: dict[Node, tuple[float, float]]) -> None:
        self.costs, self.prices = costs, prices
        self.given = {n for n in costs.nodes if "recompute" in n.meta}
        self.network = network = Network()
        self.start: dict[Node, int] = {}
        self.through: dict[Node, int] = {}
        for node, (keeping, again) in prices.items():
            start, end = network.node(), network.node()
            self.start[node] = start
            network.edge(0, start, again)
            self.through[node] = network.edge(start, end, keeping)
            if costs.is_read(node):
                network.edge(end, 1, math.inf)
            if is_asked_again(node):
                network.edge(start, 1, math.inf)
            for made_of in node.all_input_nodes:
                network.edge(self.start[made_of] + 1, start, math.inf)
        self.quickest = self._kept(network.cut())
        self.room = network.room

    def within(self, held: int) -> Kept:
        """The quickest way found that holds so many bytes at most; where there is none, the one that holds fewest."""
        if self.quickest.held <= held:
            return self.quickest
        best, large = self.at(DEAR), set[Node]()
        for _ in range(ROUNDS if best.held <= held else 0):
            more, found = self._search(held, large)
            best = min(best, found, key=lambda k: k.time_us)
            # One price takes all that costs as much. What is too much to hold at this price goes first, the rest anew.
            fresh = {*more.saved} - {*found.saved}
            if best.held >= NEAR * held or any(self.prices[n][1] == math.inf for n in fresh) or fresh <= large:
                break
            large |= fresh
        return best

    def _search(self, held: int, large: Collection[Node]) -> tuple[Kept, Kept]:
        """The dearest way that holds more bytes and the cheapest that does not, by the price of a byte."""
        low, high = math.log2(CHEAP), math.log2(DEAR)
        more, found = self.at(0.0, large), self.at(DEAR, large)
        if more.held <= held:
            return more, more
        for _ in range(STEPS):
            middle = (low + high) / 2
            tried = self.at(2**middle, large)
            if tried.held > held:
                more, low = tried, middle
                continue
            found, high = tried, middle
            if found.held >= NEAR * held:
                break
        return more, found

    def at(self, price: float, large: Collection[Node] = (), ramp: float = RAMP) -> Kept:
        """The cheapest way where a byte held costs as much as moving it so often, and `large` values are not kept.

        Room only grows by that, so the flow found without prices is where the search for more begins.
        """
        network, costs = self.network, self.costs
        network.room = list(self.room)
        byte_us = price / costs.target.memory_bytes_per_us
        for at, node in enumerate(costs.nodes):
            added = byte_us * (1 + ramp * at / len(costs.nodes)) * costs.held(node)
            network.room[self.through[node]] += math.inf if node in large else added
        return self._kept(network.cut())

    def _kept(self, sides: list[bool]) -> Kept:
        """What backward reads, and what it computes itself: what it needs of the values that begin on its side."""
        saved: dict[Node, None] = {}
        again: dict[Node, None] = {}
        stack = [n for n in self.costs.nodes if self.costs.is_read(n) or is_asked_again(n)]
        while stack:
            node = stack.pop()
            if node not in saved and node not in again:
                there = sides[self.start[node]]
                (again if there else saved)[node] = None
                stack += node.all_input_nodes if there else ()
        time = sum(self.prices[n][0] for n in saved) + sum(self.prices[n][1] for n in again)
        order = self.costs.nodes
        return Kept(
            tuple(n for n in order if n in saved),
            tuple(n for n in order if n in again),
            sum(map(self.costs.held, saved)),
            time,
        )

    def why(self, node: Node) -> str:
        """The reason why a value is kept."""
        keeping, again = self.prices[node]
        if node in self.given:
            return "settled before: drawn once, compared with itself, or a result that backward reads as it is"
        stored = "forward stores it anyway, " if self.costs.is_stored(node) else ""
        ways = f"{again:.1f} us to compute again" if again < math.inf else "not to be computed again"
        return f"{stored}{keeping:.1f} us to keep, {ways}"
