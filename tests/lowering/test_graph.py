"""Programs from whole functions: views, mutation, outputs, externs, precision, reuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from onepass.ir.dtypes import DType
from onepass.ir.expr import Part, Pointwise, Reduce, postorder
from onepass.ir.program import Program, Update
from onepass.lowering.registry import RULES, lowers

from .tracing import Traced


def check(function: Callable[..., Any], *args: Any, **options: Any) -> Program:
    """Values and strides are eager's; returns the (forward) program."""
    traced = Traced(function, **options)
    copies = [a.clone() if isinstance(a, torch.Tensor) else a for a in args]
    expected, result = function(*args), traced(*copies)
    torch.testing.assert_close(tuple_of(result), tuple_of(expected), equal_nan=True, check_stride=True)
    for ours, eager in zip(copies, args, strict=True):
        torch.testing.assert_close(ours, eager, equal_nan=True)
    return traced.program


def tuple_of(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, tuple | list) else (value,)


X = torch.arange(48, dtype=torch.float32).reshape(6, 8) / 7


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.t()[1:, ::2].reshape(-1),
        lambda x: x.view(2, 3, 8).permute(2, 0, 1).reshape(4, 12) + 1,
        lambda x: x[None, :, 2].expand(5, 6).flip(0, 1),
        lambda x: x.unfold(1, 3, 2).sum(-1),
        lambda x: torch.cat([x, x[:2] * 2, x.t().reshape(6, 8)[1:3]]),
        lambda x: F.pad(x, (1, -2, -1, 3), value=0.5),
        lambda x: x.roll((2, -3), (0, 1)),
        lambda x: x.diagonal(1) + x.tril(-1)[0, 0] + x.triu(2)[0, 1],
        lambda x: x.repeat(2, 3),
        lambda x: torch.stack(x.unbind(0), 1),
        lambda x: torch.as_strided(x * 1, (3, 4), (8, 2), 3),
        lambda x: x.select_scatter(x[:, 0] + 1, 1, 3),
        lambda x: x.slice_scatter(x[1:3] * 2, 0, 0, 4, 2),
        lambda x: x.diagonal_scatter(x[0, :6] * 2, 1),
        lambda x: x[:, 3:3].sum(1),
    ],
)
def test_views_and_movement(function: Callable[..., Any]) -> None:
    assert not check(function, X.clone()).externs()


def test_views_define_nothing() -> None:
    program = check(lambda x: x.view(2, 3, 8).transpose(0, 2)[1:].squeeze() * 2, X.clone())
    assert len(program.defines()) == 1


@pytest.mark.parametrize(("rows", "columns"), [(300, 300), (6, 8), (0, 3), (70000, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int64, torch.bool])
def test_ones_on_the_diagonal(rows: int, columns: int, dtype: torch.dtype) -> None:
    """Of any size: torch's own form counts in the narrowest type, which may have no range."""
    program = check(lambda x: (torch.eye(rows, columns, dtype=dtype), x + torch.eye(6, 8)), X.clone())
    assert not program.externs()


def test_gather_index_and_masks() -> None:
    rows, columns = torch.tensor([0, -1, 3]), torch.tensor([[1], [0]])
    check(lambda x, i, j: x[i, j], X.clone(), rows, columns)
    check(lambda x, i: x[:, i], X.clone(), rows)
    check(lambda x, i, j: x.view(2, 3, 8)[j, :, i], X.clone(), rows, columns)
    check(lambda x, i: x.gather(1, i), X.clone(), torch.tensor([[2, 3], [0, 1]]))
    check(lambda x, i: F.embedding(i, x), X.clone(), torch.tensor([[1, 5], [2, 2]]))

    def masked(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        y[mask] = 7.0
        return y

    assert not check(masked, X.clone(), X > 3).externs()


def test_bad_index_raises_index_error() -> None:
    traced = Traced(lambda x, i: x[i])
    with pytest.raises(IndexError):
        traced(X, torch.tensor([6]))


def test_mutation_becomes_updates() -> None:
    def shift(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x[1:] = x[1:] + x[:-1]
        y.copy_(x)
        return x.sum()

    program = check(shift, X.clone(), X.clone())
    assert [s.target.name for s in program.statements if isinstance(s, Update)] == ["a0", "a1"]


def test_swapped_inputs() -> None:
    def swap(x: torch.Tensor, y: torch.Tensor) -> None:
        old = x.clone()
        x.copy_(y)
        y.copy_(old)

    first, second = X.clone(), X * 2
    Traced(swap)(first, second)
    torch.testing.assert_close((first, second), (X * 2, X))


def test_transposed_copy_into_itself() -> None:
    square = torch.arange(16.0).reshape(4, 4)
    check(lambda x: x.copy_(x.t().clone()).sum(), square)


def test_outputs_do_not_share_storage_unless_eager_does() -> None:
    first, second = Traced(lambda x: (x + 1, x + 1))(X)
    first.zero_()
    assert second.ne(0).any()


def test_channels_last_strides_are_kept() -> None:
    image = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    check(lambda x: (F.relu(x) + 1, x.clone(), torch.empty_like(x).copy_(x), x.sum(1)), image)


def test_extern_gets_views_and_says_why() -> None:
    program = check(lambda x: F.relu(x[1:].t() @ x[1:]), X.clone())
    (extern,) = program.externs()
    assert extern.why == "a matmul goes to the library, what is around it is fused"


def test_unknown_and_unsupported_are_externs() -> None:
    check(lambda x: torch.fft.rfft(x).abs() + 1, X.clone())
    program = check(lambda x: torch.special.i0(x).relu(), X.clone())
    assert [e.why for e in program.externs()] == ["a special function that kernels do not have"]


def test_a_broken_rule_falls_back_and_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    target = torch.ops.aten.relu.default

    def broken(*args: Any) -> None:
        raise KeyError("oops")

    monkeypatch.setitem(RULES, target, broken)
    traced = Traced(lambda x: F.relu(x), strict=False)
    torch.testing.assert_close(traced(X), F.relu(X))
    assert traced.program.externs()[0].why.startswith("internal: KeyError")
    with pytest.raises(KeyError):
        Traced(lambda x: F.relu(x))(X)


def test_two_rules_for_one_operation_are_refused() -> None:
    with pytest.raises(AssertionError, match="two rules"):
        lowers("relu")(lambda ctx, x: x)


def test_same_value_is_defined_once() -> None:
    program = check(lambda x, y: (x + y) * (y + x), X.clone(), X + 1)
    assert len(program.defines()) == 2


def test_dead_definitions_are_dropped() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        x.exp()
        return x + 1

    assert len(check(function, X.clone()).defines()) == 1


def ops_of(program: Program) -> list[str]:
    values = [d.value for d in program.defines()]
    return [e.op for e in postorder(values) if isinstance(e, Pointwise)]


def test_sixteen_bit_values_compute_in_float32() -> None:
    half = X.bfloat16()
    ops = ops_of(check(lambda x: (x + 1) * x, half))
    assert ops.count("narrow") == 2 and "widen" in ops and "cast" not in ops
    eager = ops_of(check(lambda x: (x + 1) * x, half, precision="eager"))
    assert "narrow" not in eager and "widen" not in eager


def test_users_casts_and_discontinuous_operands_keep_rounding() -> None:
    half = X.bfloat16()
    assert "cast" in ops_of(check(lambda x: (x + 1).float(), half))
    program = check(lambda x: (x * 3) > 0.1, half)
    assert "cast" in ops_of(program)


def reductions(program: Program) -> list[Reduce]:
    return [e for d in program.defines() for e in postorder([d.value]) if isinstance(e, Reduce)]


def test_variance_is_welford_and_shares_the_mean() -> None:
    large = X + 1000
    program = check(lambda x: (x.var(1), x.mean(1)), large)
    assert {r.monoid for r in reductions(program)} == {"welford"}
    assert {r.monoid for r in reductions(check(lambda x: torch.var_mean(x, 1), large))} == {"welford"}


def test_value_and_index_ties_and_nans() -> None:
    values = torch.tensor([[1.0, 3.0, 3.0], [2.0, float("nan"), float("nan")], [-1.0, -1.0, -1.0]])
    program = check(lambda x: (*x.max(1), *x.min(0), x.argmax(), x.argmin(1, keepdim=True)), values)
    assert all(isinstance(d.value, Part) for d in program.defines())


def test_integers_wrap_and_sum_in_int64() -> None:
    small = torch.tensor([100, 100, 27], dtype=torch.int8)
    check(lambda x: (x + x, x.sum(), x.prod(), x * 3), small)
    assert check(lambda x: x.sum(), small).defines()[0].buffer.dtype is DType.I64


def test_nothing_is_divided_where_there_is_nothing() -> None:
    """An index modulo an empty dimension, inside a sum over it: no element, no error."""

    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.take_along_dim(x, torch.zeros_like(x, dtype=torch.int64), 0).sum(0, keepdim=True)

    run = torch.compile(function, backend="onepass", options={"strict": True})
    assert torch.equal(run(torch.zeros(0)), torch.zeros(1))


def test_empty_tensors() -> None:
    empty = torch.empty(0, 4)
    check(lambda x: (x.sum(0), x.prod(0), x.reshape(4, 0), x.mean(0), torch.cat([x, x]), (x + 1).any()), empty)


def test_optimiser_step_has_no_extern() -> None:
    def step(parameters: list[torch.Tensor], gradients: list[torch.Tensor]) -> None:
        torch._foreach_lerp_(parameters, gradients, 0.1)
        torch._foreach_addcdiv_(parameters, gradients, [g.abs() + 1 for g in gradients], value=-0.5)
        torch._foreach_mul_(parameters, [0.5, 2.0])

    ours, eager = [X.clone(), X[0].clone()], [X.clone(), X[0].clone()]
    gradients = [X * 2, X[0] * 3]
    traced = Traced(lambda p, q, g, h: step([p, q], [g, h]))
    traced(*ours, *gradients)
    step(eager, gradients)
    torch.testing.assert_close(ours, eager)
    assert not traced.program.externs()
