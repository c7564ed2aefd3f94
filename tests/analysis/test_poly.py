"""Index algebra: every simplification keeps the value, and the ones views rely on happen."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from onepass.ir.poly import Axis, Poly, Symbol, in_range, lower_bound, nonnegative, upper_bound


def axes(*extents: int) -> list[Axis]:
    return [Axis(f"p{k}", Poly.of(e)) for k, e in enumerate(extents)]


def build(draw: random.Random, names: list[Axis], depth: int = 3) -> tuple[Poly, object]:
    """A random poly and a function that computes it in plain integers."""
    if depth == 0:
        if draw.random() < 0.7:
            a = draw.choice(names)
            return a.poly(), lambda env: env[a]
        c = draw.randint(0, 7)
        return Poly.of(c), lambda env: c
    p, f = build(draw, names, depth - 1)
    match draw.choice(["add", "mul", "div", "mod"]):
        case "add":
            q, g = build(draw, names, depth - 1)
            return p + q, lambda env: f(env) + g(env)  # type: ignore[operator]
        case "mul":
            c = draw.randint(1, 6)
            return p * c, lambda env: f(env) * c  # type: ignore[operator]
        case "div":
            c = draw.randint(1, 9)
            return p // c, lambda env: f(env) // c  # type: ignore[operator]
    c = draw.randint(1, 9)
    return p % c, lambda env: f(env) % c  # type: ignore[operator]


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 10**9))
def test_simplification_keeps_the_value(seed: int) -> None:
    draw = random.Random(seed)
    names = axes(*(draw.randint(1, 9) for _ in range(3)))
    poly, plain = build(draw, names)
    low, high = lower_bound(poly), upper_bound(poly)
    for _ in range(20):
        env = {a: draw.randrange(a.extent.constant or 1) for a in names}
        expected = plain(env)  # type: ignore[operator]
        assert poly.evaluate(env) == expected
        assert low is None or low.constant is None or low.constant <= expected
        assert high is None or high.constant is None or high.constant >= expected


def test_reshape_there_and_back_is_the_identity() -> None:
    i, j = axes(8, 4)
    flat = i * 4 + j
    assert flat // 4 is i.poly() and flat % 4 is j.poly()
    (n,) = axes(32)
    assert (n // 4) * 4 + n % 4 is n.poly()
    assert ((n // 4) // 2) is n // 8


def test_symbolic_sizes() -> None:
    s = Symbol("s", 2)
    i, j = Axis("i", s.poly()), Axis("j", s * 3)
    flat = i * (s * 3) + j
    assert flat // (s * 3) is i.poly() and flat % (s * 3) is j.poly()
    assert in_range(flat, s * s * 3)
    assert nonnegative(s - 2) and not nonnegative(s - 3)
    whole = Axis("w", s * s)
    assert in_range(whole // s, s.poly())
