"""Exported programs on a GPU: exported here, and a file that another machine exported for this chip.

The file of another machine: run `python -m tests.gpu.test_export carried.onepass` there (no GPU is needed), then name
it here by ONEPASS_CARRIED=carried.onepass.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import onepass

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
CARRIED = os.environ.get("ONEPASS_CARRIED", "")


class Layer(nn.Module):
    """A transformer layer with attention as plain math and a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(256), nn.Linear(256, 768), nn.Linear(256, 256)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        self.calls += 1
        q, k, v = (p.unflatten(-1, (4, 64)).transpose(1, 2) for p in self.qkv(self.norm(x)).chunk(3, -1))
        scores = (q @ k.transpose(-2, -1)).float() * 0.125
        seen = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1).to(v.dtype)
        y = x + self.out((weights @ v).transpose(1, 2).flatten(2))
        return {"out": F.gelu(y), "calls": self.calls, "mean": y.float().mean(-1)}


def layer() -> tuple[Layer, Tensor]:
    torch.manual_seed(0)
    return Layer().bfloat16().eval(), torch.randn(2, 128, 256).bfloat16()


ALONE = """
import json, sys, time
sys.modules["triton"] = None  # importing it is an error
import torch
import onepass
from tests.gpu.test_export import layer
module, x = layer()
torch.cuda.init(); torch.zeros(1, device="cuda").item()
started = time.perf_counter()
run = onepass.load(sys.argv[1])
loaded = time.perf_counter()
x = x.cuda()
found = run(x)
torch.cuda.synchronize()
called = time.perf_counter()
odd = torch.empty(x.numel() + 1, dtype=x.dtype, device="cuda")[1:].view_as(x).copy_(x)  # not on 16 bytes
again = run(odd)
graph = torch.cuda.CUDAGraph()
run(x)
torch.cuda.synchronize()
with torch.cuda.graph(graph):
    replayed = run(x)
graph.replay()
torch.cuda.synchronize()
exact = module.double()(x.double().cpu())
eager = layer()[0].cuda()(x)
scale = 1 + exact["out"].abs().max().item()
heavy = ("torch._dynamo", "torch._functorch.aot_autograd", "onepass.pipeline")
print(json.dumps({
    "load_s": loaded - started, "first_call_s": called - loaded, "calls": int(found["calls"]),
    "error": (found["out"].double().cpu() - exact["out"]).abs().max().item() / scale,
    "eager_error": (eager["out"].double().cpu() - exact["out"]).abs().max().item() / scale,
    "same_unaligned": (again["out"].double() - found["out"].double()).abs().max().item() / scale,
    "same_replayed": torch.equal(replayed["out"], found["out"]),
    "kernels": len(run.record.kernels), "imported": [name for name in heavy if name in sys.modules],
}))
"""


def run_alone(path: str) -> dict[str, Any]:
    """The file in a process without compiler and Triton."""
    root = Path(__file__).resolve().parents[2]
    paths = [str(Path(onepass.__file__).parents[1]), str(root)]
    environment = {k: v for k, v in os.environ.items() if k not in ("CC", "PATH", "PYTHONPATH")}
    environment |= {"PATH": "/nonexistent", "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-c", ALONE, path]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    print(found)
    return found


def check(found: dict[str, Any]) -> None:
    assert found["error"] <= 2 * found["eager_error"] + 4e-3 and found["same_unaligned"] <= 2e-2
    assert found["same_replayed"] and found["kernels"] > 0 and not found["imported"]
    assert found["first_call_s"] <= 1.0


def test_a_file_exported_here(tmp_path: Path) -> None:
    module, x = layer()
    path = tmp_path / "here.onepass"
    onepass.export(module.cuda(), x.cuda(), path=path)
    check(run_alone(str(path)))
    run = onepass.load(path)
    with torch.no_grad():
        compiled = torch.compile(layer()[0].cuda(), backend="onepass")(x.cuda())
    torch.testing.assert_close(run(x.cuda())["out"], compiled["out"], atol=2e-2, rtol=2e-2)


def test_a_file_exported_from_tensors_on_the_host(tmp_path: Path) -> None:
    module, x = layer()
    path = tmp_path / "host.onepass"
    onepass.export(module, x, path=path, target=onepass.explain(F.gelu, x.cuda()).graphs[0].target)
    check(run_alone(str(path)))


@pytest.mark.skipif(not CARRIED, reason="ONEPASS_CARRIED names no file")
def test_a_file_of_another_machine() -> None:
    check(run_alone(CARRIED))


if __name__ == "__main__":
    onepass.export(*layer(), path=sys.argv[1], target="sm_90")
