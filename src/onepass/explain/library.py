"""What a call of the library has to do: its FLOPs by torch's own formulas, and its predicted time if there is one."""

from __future__ import annotations

from typing import Any

from torch.utils.flop_counter import flop_registry

from ..analysis.access import estimate
from ..analysis.library_price import multiply_us
from ..ir.callables import callable_name
from ..ir.program import Buffer, Extern, View
from ..ir.target import Target

_PRODUCTS = ("aten.mm.", "aten.bmm.", "aten.addmm.", "aten.baddbmm.")


def library_work(step: Extern, moved: int, target: Target) -> tuple[int, float]:
    """FLOPs and predicted microseconds of a call; 0 for what is not known."""
    shapes = [_shape(a) for a in step.args if isinstance(a, Buffer | View)]
    if step.origin.op.startswith(_PRODUCTS) and len(shapes) >= 2 and isinstance(step.result, Buffer):
        by_onednn = step.origin.op != callable_name(step.target)  # it takes the left matrix first and the sum last
        result, depth = _shape(step.result), shapes[0 if by_onednn else -2][-1]
        batches, rows, columns = (result[0] if len(result) == 3 else 1), *result[-2:]
        known = target.products_per_us and rows * depth * columns * batches
        price = multiply_us(batches, rows, columns, depth, step.result.dtype, moved, target) if known else 0.0
        started = target.launch_us + target.rates.call_us if known else 0.0
        return 2 * batches * rows * depth * columns, started + price
    formula = flop_registry.get(getattr(step.target, "overloadpacket", None))
    if formula is None:
        return 0, 0.0
    try:
        args, kwargs = [_shapes(a) for a in step.args], {k: _shapes(v) for k, v in step.kwargs.items()}
        return int(formula(*args, **kwargs, out_val=_shapes(step.result))), 0.0
    except Exception:  # a formula for other arguments; nothing depends on the number
        return 0, 0.0


def _shapes(argument: Any) -> Any:
    if isinstance(argument, list | tuple):
        return [_shapes(a) for a in argument]
    return _shape(argument) if isinstance(argument, Buffer | View) else argument


def _shape(tensor: Buffer | View) -> list[int]:
    return [estimate(size) for size in tensor.shape]
