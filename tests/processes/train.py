"""What each process of a test runs: the same training as eager and compiled; the first process prints the losses.

python -m torch.distributed.run --standalone --nproc-per-node 2 tests/processes/train.py ddp float32 1
"""

from __future__ import annotations

import json
import os
import sys

import torch
import torch.distributed as distributed
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import onepass  # noqa: F401  (names the backend)
from onepass.backend import record_compilations

STEPS, WORDS, WIDTH = 20, 50, 32


class Block(nn.Module):
    """A wide layer behind a norm, added to what comes in."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.wide, self.narrow = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(F.gelu(self.wide(self.norm(x))))


class Model(nn.Module):
    """Words in, a score for each word out."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.scores = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        for block in self.blocks:
            x = block(x)
        return self.scores(x)


def spread(model: Model, how: str) -> nn.Module:
    """The model over all processes."""
    if how == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    for part in (*model.blocks, model):
        fully_shard(part, mesh=mesh)
    return model


def losses(how: str, dtype: torch.dtype, batches: int, compiled: bool, dies: bool) -> list[float]:
    """The mean loss of all processes at each step; gradients of some batches are added up before a step."""
    torch.manual_seed(0)
    model = spread(Model().to(dtype), how)
    run = torch.compile(model, backend="onepass", options={"strict": True}) if compiled else model
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3)
    rank, found = distributed.get_rank(), []
    for step in range(STEPS):
        if dies and rank == 1 and step == 3:
            os._exit(7)
        total = torch.zeros(())
        for batch in range(batches):
            drawn = torch.Generator().manual_seed((step * batches + batch) * 8 + rank)
            tokens = torch.randint(0, WORDS, (4, 17), generator=drawn)
            loss = F.cross_entropy(run(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())
            loss.backward()
            total += loss.detach()
        optimiser.step()
        optimiser.zero_grad()
        distributed.all_reduce(total)
        found.append(total.item() / distributed.get_world_size() / batches)
    return found


def main() -> None:
    how, dtype, batches = sys.argv[1], getattr(torch, sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    eager = losses(how, dtype, batches, compiled=False, dies=False)
    with record_compilations() as records:
        compiled = losses(how, dtype, batches, compiled=True, dies="dies" in sys.argv)
    if distributed.get_rank() == 0:
        fallbacks = [r.fallback for r in records if r.fallback]
        kernels = sum(len(r.kernels) for r in records)
        print(json.dumps({"eager": eager, "compiled": compiled, "fallbacks": fallbacks, "kernels": kernels}))
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
