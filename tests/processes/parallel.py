"""What each process of a test runs: one program as eager and compiled; the first process prints what was found.

python -m torch.distributed.run --standalone --nproc-per-node 2 tests/processes/parallel.py tensor
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as distributed
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import onepass  # noqa: F401  (names the backend)
from onepass.backend import record_compilations, watch_compilations

WIDTH, STEPS = 32, 6
OPTIONS = {"strict": True}


class Block(nn.Module):
    """A wide layer behind a norm, added to what comes in."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x)))) * 2


def batch(step: int, rank: int = 0) -> Tensor:
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(8 * step + rank))


def whole(gradient: Tensor) -> Tensor:
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


def tensor(compiled: bool) -> dict[str, Any]:
    """Two blocks, their weights in columns and rows over the processes."""
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block())
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    for block in model:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    run = torch.compile(model, backend="onepass", options=OPTIONS) if compiled else model
    optimiser = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for step in range(STEPS):
        if "dies" in sys.argv and compiled and distributed.get_rank() == 1 and step == 2:
            os._exit(7)
        loss = (run(batch(step)) - batch(step).roll(1, 1)).square().mean()
        loss.backward()
        losses.append(loss.item())
        optimiser.step()
        optimiser.zero_grad()
    return {"losses": losses}


def pipeline(compiled: bool) -> dict[str, Any]:
    """A block in each process, four micro-batches in turn."""
    torch.manual_seed(0)
    blocks, rank = [Block() for _ in range(distributed.get_world_size())], distributed.get_rank()
    own = blocks[rank]
    run = torch.compile(own, backend="onepass", options=OPTIONS) if compiled else own
    stage = PipelineStage(run, rank, len(blocks), torch.device("cpu"))
    schedule = ScheduleGPipe(stage, 4, loss_fn=F.mse_loss)
    optimiser = torch.optim.SGD(own.parameters(), lr=0.05)
    losses = []
    for step in range(STEPS):
        found: list[Tensor] = []
        given = {"target": batch(step).roll(1, 1), "losses": found} if stage.is_last else {}
        schedule.step(*([batch(step)] if stage.is_first else []), **given)
        optimiser.step()
        optimiser.zero_grad()
        total = torch.stack([loss.detach() for loss in found]).mean() if found else torch.zeros(())
        distributed.all_reduce(total)
        losses.append(total.item())
    return {"losses": losses}


def autograd(compiled: bool) -> dict[str, Any]:
    """Data-parallel training whose whole step is compiled, exchanges of gradients included."""
    if compiled:  # before the model is spread
        torch._dynamo.config.compiled_autograd = True
        torch._dynamo.config.optimize_ddp = "python_reducer"
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block())
    rank, optimiser = distributed.get_rank(), torch.optim.SGD(model.parameters(), lr=0.05)
    spread = nn.parallel.DistributedDataParallel(model)

    def loss_of(x: Tensor) -> Tensor:
        loss = (spread(x) - x.roll(1, 1)).square().mean()
        loss.backward()
        return loss

    run: Callable[[Tensor], Tensor] = (
        torch.compile(loss_of, backend="onepass", options=OPTIONS) if compiled else loss_of
    )
    losses = []
    for step in range(STEPS):
        total = run(batch(step, rank)).detach()
        optimiser.step()
        optimiser.zero_grad()
        distributed.all_reduce(total)
        losses.append(total.item())
    return {"losses": losses}


def order_of_calls(compiled: list[Any]) -> list[list[str]]:
    """What each host program launches and calls, in order."""
    found = []
    for one in (c for c in compiled if c.executable is not None):
        steps = [i for i in one.executable.host.instructions if type(i).__name__ in ("Launch", "Call")]
        names = [i.target.split(".")[1] if type(i).__name__ == "Call" else "kernel" for i in steps]
        found.append(names)
    return found


def main() -> None:
    program = {"tensor": tensor, "pipeline": pipeline, "autograd": autograd}[sys.argv[1]]
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    eager = program(compiled=False)
    with record_compilations() as records, watch_compilations() as compiled:
        found = program(compiled=True)
    own = {
        "calls": order_of_calls(compiled),
        "fallbacks": [r.fallback for r in records if r.fallback],
        "hits": [r.cache for r in records],
        "kernels": sum(len(r.kernels) for r in records),
    }
    everyone: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(everyone, own)
    if distributed.get_rank() == 0:
        print(json.dumps({"eager": eager["losses"], "compiled": found["losses"], "ranks": everyone}), flush=True)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
