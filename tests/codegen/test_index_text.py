"""Index expressions as text mean what the polys mean, in C and in Triton: products are divided by whole."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest

from onepass.codegen import c, triton
from onepass.codegen.emitter import Emitter
from onepass.ir.poly import Poly, Symbol

A, B, C = (Poly.ONE * Symbol(name) for name in "abc")
DIVISORS = [B, B * C, B * 2, B * C * 3, B + C, A // 2 + 1, (A // 2 + 1) * B, B * B]
NUMERATORS = [A, A * B, A * B * C + C, A * 7 + B, (A * B + 3) // C]


def text_of(emitter_class: type[Emitter], poly: Poly) -> str:
    emitter = object.__new__(emitter_class)
    emitter.sizes = {}
    vars(emitter).update(kernel=SimpleNamespace(wide=False), tiles={}, near=True)
    return emitter.poly(poly)


def floordiv(a: int, b: int) -> int:
    return a // b


def remainder(a: int, b: int) -> int:
    return a % b


@pytest.mark.parametrize("language", ["c", "triton"])
def test_divisions_by_products(language: str) -> None:
    emitter = c._Emitter if language == "c" else triton.TritonEmitter
    names = {"op_index_floordiv": floordiv, "op_index_remainder": remainder}
    for above, below in itertools.product(NUMERATORS, DIVISORS):
        for poly in (above // below, above % below, (above // below) * below + above % below):
            text = text_of(emitter, poly).replace(" / ", " // ")
            for a, b, c_ in itertools.product((1, 5, 12), (1, 3, 4), (2, 7)):
                values = {"a": a, "b": b, "c": c_}
                exact = poly.evaluate({Symbol(name): value for name, value in values.items()})
                assert eval(text, {**names, **values}) == exact, (text, values)
