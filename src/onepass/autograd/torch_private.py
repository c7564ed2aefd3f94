"""The private torch names that work on joint graphs uses."""

from __future__ import annotations

import torch
from torch._dynamo.source import ConstantSource
from torch._functorch import config as functorch_config
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental import _config as shape_config
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

__all__ = ["Sizes", "functorch_config", "graph_is_kept", "min_cut_rematerialization_partition", "shape_config"]


class Sizes:
    """Sizes that may be anything, and a mode for tensors of such sizes that have no memory."""

    def __init__(self) -> None:
        self.env = ShapeEnv(specialize_zero_one=False, duck_shape=False)
        self.mode = FakeTensorMode(shape_env=self.env)

    def add(self, name: str, example: int) -> torch.SymInt:
        """A new one, such as the example."""
        source = ConstantSource(name)
        with shape_config.patch(backed_size_oblivious=True):
            symbol = self.env.create_symbol(example, source=source, dynamic_dim=DimDynamic.DYNAMIC)
            size = self.env.create_symintnode(symbol, hint=example, source=source)
        assert isinstance(size, torch.SymInt)
        return size


def graph_is_kept() -> bool:
    """Whether what forward saved may be read by another backward; also where no backward runs."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())
