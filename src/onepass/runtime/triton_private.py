"""What onepass takes from Triton's interpreter, in one place: its patching, tensors and program numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch


class Interpreter:
    """Runs undecorated kernels; written for Triton 3.6."""

    def __init__(self) -> None:
        import triton.language as tl
        from triton.runtime import interpreter

        self.language: Any = tl
        self._interpreter: Any = interpreter
        builder = interpreter.interpreter_builder
        names = [n for n in dir(builder) if n.startswith(("create_fcmp", "create_icmp"))]
        self._repaired = {n: self._boolean(getattr(builder, n)) for n in names}
        self._repaired["cast_impl"] = self._cast(builder.cast_impl)
        self._repaired["create_dot"] = self._dot

    def _boolean(self, compare: Callable[..., Any]) -> Callable[..., Any]:
        """A comparison whose result says that it is bool; the interpreter's own keeps the operands' type."""

        def compared(left: Any, right: Any) -> Any:
            return self._interpreter.TensorHandle(np.asarray(compare(left, right).data, dtype=bool), self.language.int1)

        return compared

    def _cast(self, cast: Callable[..., Any]) -> Callable[..., Any]:
        """A cast that rounds to bfloat16 as hardware does; the interpreter's own cuts off."""
        tl = self.language

        def converted(source: Any, kind: Any) -> Any:
            if source.dtype.scalar == tl.float32 and kind.scalar == tl.bfloat16:
                narrow = torch.tensor(np.asarray(source.data)).to(torch.bfloat16)
                data = narrow.view(torch.int16).numpy().view(np.uint16)
                return self._interpreter.TensorHandle(data, kind.scalar)
            return cast(source, kind)

        return converted

    def _dot(self, left: Any, right: Any, start: Any, *_: Any) -> Any:
        """A matrix product in 32 bits; the interpreter's own multiplies the bits of bfloat16 and of bytes."""
        sides = [self._wide(side) for side in (left, right)]
        total = np.matmul(*sides, dtype=np.asarray(start.data).dtype) + start.data
        return self._interpreter.TensorHandle(total, start.dtype.scalar)

    def _wide(self, side: Any) -> Any:
        """The numbers of an operand whose type numpy does not have, in float32."""
        data, tl = np.asarray(side.data), self.language
        if side.dtype.scalar == tl.bfloat16:
            return torch.tensor(data.view(np.int16)).view(torch.bfloat16).to(torch.float32).numpy()
        if side.dtype.scalar == tl.float8e4nv:
            return torch.tensor(data.view(np.uint8)).view(torch.float8_e4m3fn).to(torch.float32).numpy()
        return data

    def data(self, tensor: Any) -> Any:
        """The numpy array of a tile."""
        return np.asarray(tensor.handle.data)

    def tensor(self, array: Any, dtype: Any, single: bool = False) -> Any:
        """A tile of an array, or a `single` number."""
        tl = self.language
        kind = dtype if single else tl.block_type(dtype, list(array.shape))
        return tl.core.tensor(self._interpreter.TensorHandle(np.asarray(array), dtype), kind)

    def pointer(self, address: int, element: str) -> Any:
        """A pointer argument."""
        tl = self.language
        kind = tl.str_to_ty(element, None)
        return tl.core.tensor(self._interpreter.TensorHandle(np.array([address], dtype=np.uint64), kind), kind)

    def number(self, value: int, kind: str) -> Any:
        """A size argument."""
        dtype = self.language.str_to_ty(kind, None)
        return self.tensor(np.array([value], dtype=np.int64 if kind == "i64" else np.int32), dtype, single=True)

    def run(
        self, kernel: Callable[..., Any], arguments: Sequence[Any], programs: int, reduce: Callable[..., Any]
    ) -> None:
        """Every program of a one-dimensional grid, with `reduce` for tl.reduce."""
        builder, tl = self._interpreter.interpreter_builder, self.language
        scope = self._interpreter._patch_lang(kernel)
        index, kept = tl.core.tensor.__index__, tl.reduce
        tl.core.tensor.__index__ = lambda tensor: int(self.data(tensor).item())
        tl.reduce = reduce
        vars(builder).update(self._repaired)
        try:
            builder.set_grid_dim(programs, 1, 1)
            with np.errstate(all="ignore"):
                for program in range(programs):
                    builder.set_grid_idx(program, 0, 0)
                    kernel(*arguments)
        finally:
            tl.core.tensor.__index__, tl.reduce = index, kept
            for name in self._repaired:
                delattr(builder, name)
            scope.restore()
