"""Rows too long to be held whole, with states carried from row to row: worked through piece by piece.

The states stay in registers, and what was loaded of a row if there is room; all else is computed again in every sweep
over its pieces. A sweep is not a loop: each piece has states of its own, and registers have no index.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ..analysis.access import numel
from ..ir.dtypes import DType
from ..ir.expr import Expr, Load, Pointwise, Reduce, postorder
from ..ir.kernel import Accumulator, Let, Operand, Start, Var
from ..ir.poly import Axis, Poly
from .builder import Finished
from .online import Online
from .sweeps import Item, NestScheduler
from .tiles import TileScheduler


class PieceScheduler(TileScheduler):
    """Builds the kernel of a nest whose rows are worked through in pieces."""

    in_pieces = True

    def _choose_layout(self) -> None:
        super()._choose_layout()
        row = [c for c in self.nest.classes if c not in self.nest.outer and c is not self.nest.split]
        assert self.layout.pieces * self.layout.lanes >= numel(row), "the pieces do not make up a row"
        self.states: dict[Reduce, list[Accumulator]] = {}  # of every piece, for each carried reduction
        self.loaded: list[dict[Expr, Operand]] = []  # of every piece of the row at hand

    def _carrier(self, reduce: Reduce, rows: int) -> Item:
        self.states[reduce] = [
            Accumulator(
                self.builder.name(f"{reduce.monoid}_acc"), reduce.monoid, reduce.part_dtypes, 1, tiles=(self.lane,)
            )
            for _ in range(self.layout.pieces)
        ]
        for accumulator in self.states[reduce]:
            self.builder.add(Start(accumulator))
        return replace(self._opened(reduce), accumulator=self.states[reduce][0])

    def _rows(self, split: Axis, items: list[Item], axes: frozenset[Axis]) -> None:
        def row(inside: list[Item]) -> None:
            self.loaded = [{} for _ in range(self.layout.pieces)] if self.layout.kept else []
            self._scope(inside, axes)
            self.loaded = []

        NestScheduler._open_loops(self, [split], items, row)

    def find_online(self, level: list[Item], second: list[Item], axes: frozenset[Axis]) -> Online | None:
        return None

    def _strip(self, items: list[Item], axis: Axis, then: Callable[[list[Item]], None] | None = None) -> None:
        for k in range(self.layout.pieces):
            with self.builder.stretch() as scope:
                start = k * self.layout.lanes
                extent = axis.extent.constant
                assert extent is not None
                self._open_strip(axis, Poly.of(start), whole=start + self.layout.lanes <= extent)
                scope.parts.update({r: Finished(found[k]) for r, found in self.states.items()})
                if self.loaded:
                    self._reopen(self.loaded[k], items)
                self._point([self._of_piece(i, k) for i in items], self.lane.poly())
                if self.loaded:
                    self._remember_loads(self.loaded[k])

    def _of_piece(self, item: Item, k: int) -> Item:
        carried = self.states.get(item.reduce) if item.reduce is not None else None
        return replace(item, accumulator=carried[k]) if carried is not None else item

    def _remember_loads(self, loaded: dict[Expr, Operand]) -> None:
        """What was loaded of this row's piece; what every row shares is near anyway."""
        split = self.nest.split
        values = self.builder.here.values
        loaded.update({e: v for e, v in values.items() if isinstance(e, Load) and split in e.axes})

    def _reopen(self, loaded: dict[Expr, Operand], items: list[Item]) -> None:
        """Later sweeps find the loads of the first. bfloat16 is widened by its bits then: a compiler that knew the
        number from before would keep it, wide, instead."""
        values = self.builder.here.values
        values.update(loaded)
        for e in postorder([v for i in items for v in i.values]):
            if not isinstance(e, Pointwise) or e.op not in ("cast", "widen") or e.args[0] not in loaded:
                continue
            if e.dtype is DType.F32 and e.args[0].dtype is DType.BF16:
                wide = Var(self.builder.name("again"), DType.F32)
                self.builder.add(Let(wide, "reopen", (loaded[e.args[0]],)))
                values[e] = wide
