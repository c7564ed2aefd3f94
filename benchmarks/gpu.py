"""GPU speed beside eager and Inductor: `python -m benchmarks.gpu` writes benchmarks/results/<chip>.{json,md}.

One process, one device: values checked against float64, times by device events (median, the L2 cache flushed before
each run, systems interleaved), the fewest bytes a program must move over the copy bandwidth measured in the same run
as the floor, compile times with empty caches, and the host's own time per call.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

RESULTS = Path(__file__).parent / "results"
BF16 = torch.bfloat16
ROUNDS = 30


def _x(*shape: int, dtype: torch.dtype = BF16, grad: bool = False) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.float32).to(dtype).requires_grad_(grad)


def _norm_arguments(rows: int, columns: int) -> tuple[Tensor, ...]:
    return _x(rows, columns, grad=True), _x(columns, grad=True), _x(columns, grad=True)


# name -> (function, arguments, whether the backward runs too, bytes of the floor)
Workload = tuple[Callable[..., Any], Callable[[], tuple[Tensor, ...]], bool, float]
M = 1 << 20
WORKLOADS: dict[str, Workload] = {
    "4-op chain, 4096^2, fp32": (
        lambda x: torch.relu((x + 1) * 2) ** 2, lambda: (_x(4096, 4096, dtype=torch.float32),), False, 128 * M),
    "sigmoid*tanh, 8192^2, fp32": (
        lambda x: torch.sigmoid(x) * torch.tanh(x + 1), lambda: (_x(8192, 8192, dtype=torch.float32),), False, 512 * M),
    "bias + GELU, 16384x4096": (
        lambda x, b: F.gelu(x + b), lambda: (_x(16384, 4096), _x(4096)), False, 256 * M),
    "bias + GELU + dropout": (
        lambda x, b: F.dropout(F.gelu(x + b), 0.1), lambda: (_x(16384, 4096), _x(4096)), False, 256 * M),
    "bias + dropout + residual + LayerNorm": (
        lambda x, r, b, w, s: F.layer_norm(r + F.dropout(x + b, 0.1), x.shape[-1:], w, s),
        lambda: (_x(16384, 4096), _x(16384, 4096), _x(4096), _x(4096), _x(4096)), False, 384 * M),
    "LayerNorm 16384x4096": (
        lambda x, w, b: F.layer_norm(x, x.shape[-1:], w, b),
        lambda: tuple(t.detach() for t in _norm_arguments(16384, 4096)), False, 256 * M),
    "RMSNorm + SiLU 16384x8192": (
        lambda x, w: F.silu(F.rms_norm(x, x.shape[-1:], w)), lambda: (_x(16384, 8192), _x(8192)), False, 512 * M),
    "softmax 16384x4096": (lambda x: x.softmax(-1), lambda: (_x(16384, 4096),), False, 256 * M),
    "softmax 2048x131072": (lambda x: x.softmax(-1), lambda: (_x(2048, 131072),), False, 1024 * M),
    "sum(relu(2x)) 16384x8192": (lambda x: torch.relu(2 * x).sum(), lambda: (_x(16384, 8192),), False, 256 * M),
    "column sum of x*y, 32768x4096": (
        lambda x, y: (x * y).sum(0), lambda: (_x(32768, 4096), _x(32768, 4096)), False, 512 * M),
    "LayerNorm forward + backward": (
        lambda x, w, b: F.layer_norm(x, x.shape[-1:], w, b), lambda: _norm_arguments(16384, 4096), True, 640 * M),
    "RMSNorm forward + backward": (
        lambda x, w: F.rms_norm(x, x.shape[-1:], w), lambda: _norm_arguments(16384, 4096)[:2], True, 640 * M),
    "SwiGLU forward + backward, 16384x14336": (
        lambda g, v: F.silu(g) * v,
        lambda: (_x(16384, 14336, grad=True), _x(16384, 14336, grad=True)), True, 8 * 448 * M),
    "cross-entropy 8192x128256": (
        lambda x, t: F.cross_entropy(x, t),
        lambda: (_x(8192, 128256), torch.randint(0, 128256, (8192,), device="cuda")), False, 8192 * 128256 * 2),
    "cross-entropy forward + backward": (
        lambda x, t: F.cross_entropy(x, t),
        lambda: (_x(8192, 128256, grad=True), torch.randint(0, 128256, (8192,), device="cuda")), True,
        3 * 8192 * 128256 * 2),
    "relu(a+b), sigmoid(a*c) 8192^2": (
        lambda a, b, c: (torch.relu(a + b), torch.sigmoid(a * c)),
        lambda: (_x(8192, 8192), _x(8192, 8192), _x(8192, 8192)), False, 640 * M),
}  # fmt: skip
RANDOM = ("dropout",)
SYSTEMS = ("eager", "inductor", "onepass")


def compiled(system: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function as a system runs it; empty caches are the caller's affair."""
    torch._dynamo.reset()
    return function if system == "eager" else torch.compile(function, backend=system)


def call(function: Callable[..., Any], arguments: tuple[Tensor, ...], train: bool, seed: Any) -> list[Tensor]:
    outputs = function(*arguments)
    results = list(outputs) if isinstance(outputs, tuple) else [outputs]
    if train:
        wanted = [a for a in arguments if a.requires_grad]
        results += torch.autograd.grad(results, wanted, seed)
    return results


def problem(name: str, ours: list[Tensor], eager: list[Tensor]) -> str:
    """What is wrong with the values, in a few words."""
    for mine, theirs in zip(ours, eager, strict=True):
        if mine.shape != theirs.shape or mine.dtype != theirs.dtype:
            return "another shape or type"
        if any(word in name for word in RANDOM):
            if abs(mine.float().mean() - theirs.float().mean()) > 0.01 * (1 + theirs.float().abs().mean()):
                return "another distribution"
            continue
        error = (mine.float() - theirs.float()).abs().max()
        if not error <= 0.02 * (1 + theirs.float().abs().max()):
            return f"off by {error:.3g}"
    return ""


def times(functions: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Median milliseconds of each, interleaved, the cache flushed before every run."""
    flush = torch.empty(256 * M // 4, dtype=torch.int32, device="cuda")
    found: dict[str, list[tuple[Any, Any]]] = {name: [] for name in functions}
    for function in functions.values():
        function()
    for _ in range(rounds):
        for name, function in functions.items():
            flush.zero_()
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            function()
            end.record()
            found[name].append((start, end))
    torch.cuda.synchronize()
    return {name: statistics.median(s.elapsed_time(e) for s, e in pairs) for name, pairs in found.items()}


def measure(name: str, systems: tuple[str, ...], rounds: int, bandwidth: float) -> dict[str, Any]:
    function, build, train, fewest = WORKLOADS[name]
    arguments = build()
    outputs = function(*arguments)
    results = list(outputs) if isinstance(outputs, tuple) else [outputs]
    seed = [torch.randn_like(o) for o in results] if train else None
    eager = call(function, arguments, train, seed)
    row: dict[str, Any] = {"floor": fewest / bandwidth * 1e3, "compile": {}, "problems": {}}
    ready: dict[str, Callable[[], Any]] = {}
    for system in systems:
        run = compiled(system, function)
        start = time.perf_counter()
        try:
            ours = call(run, arguments, train, seed)
            torch.cuda.synchronize()
        except Exception as error:
            row["problems"][system] = f"{type(error).__name__}: {str(error)[:300]}"
            continue
        row["compile"][system] = time.perf_counter() - start
        if wrong := problem(name, ours, eager):
            row["problems"][system] = wrong
        del ours
        ready[system] = lambda run=run: call(run, arguments, train, seed)
    del eager, results, outputs
    row["ms"] = times(ready, rounds)
    return row


def copy_bandwidth() -> float:
    """Bytes per second of a 1 GiB copy."""
    source, target = (torch.empty(1024 * M, dtype=torch.int8, device="cuda") for _ in range(2))
    return 2 * source.numel() / (times({"copy": lambda: target.copy_(source)}, 10)["copy"] * 1e-3)


def host_cost(systems: tuple[str, ...]) -> dict[str, dict[str, float]]:
    """Microseconds of the host per call: of one kernel, of twenty of unequal sizes, and with twenty matmuls between."""

    def one(x: Tensor) -> Tensor:
        return x * 2 + 1

    def twenty(x: Tensor) -> list[Tensor]:
        return [x[:, : 2 + k].softmax(-1) * (k + 1) for k in range(20)]

    def matmuls(x: Tensor) -> Tensor:
        for _ in range(20):
            x = (x @ x).relu()
        return x

    x = torch.randn(32, 32, device="cuda")
    found: dict[str, dict[str, float]] = {}
    for label, function in (("one kernel", one), ("twenty kernels", twenty), ("twenty matmuls + relu", matmuls)):
        found[label] = {}
        for system in systems:
            run = compiled(system, function)
            for _ in range(20):
                run(x)
            torch.cuda.synchronize()
            samples = []
            for _ in range(15):
                start = time.perf_counter()
                for _ in range(50):
                    run(x)
                samples.append((time.perf_counter() - start) / 50)
                torch.cuda.synchronize()
            found[label][system] = statistics.median(samples) * 1e6
    return found


def table(data: dict[str, Any]) -> str:
    """The results as Markdown."""
    lines = [
        f"{data['device']}, torch {data['torch']}, triton {data['triton']}, {data['date']}; copy "
        f"{data['bandwidth'] / 1e12:.2f} TB/s. Times in ms; ratios are of this run.",
        "",
        "| workload | floor | eager | inductor | onepass | / floor | gain | compile: inductor | onepass |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    ratios = []
    for name, row in data["workloads"].items():
        ms, cold = row["ms"], row["compile"]
        ours, theirs = ms.get("onepass"), ms.get("inductor")
        over = f"{ours / row['floor']:.2f}" if ours else "-"
        gain = theirs / ours if ours and theirs else None
        if gain:
            ratios.append(gain)
        cells = [f"{ms[s]:.4f}" if s in ms else "-" for s in SYSTEMS]
        note = "; ".join(f"{s}: {p}" for s, p in row["problems"].items())
        lines.append(
            f"| {name}{' (' + note + ')' if note else ''} | {row['floor']:.4f} | {' | '.join(cells)} | {over} | "
            f"{f'{gain:.2f}' if gain else '-'} | {cold.get('inductor', 0):.2f} s | {cold.get('onepass', 0):.2f} s |"
        )
    if ratios:
        lines += [
            "",
            f"Geometric mean of inductor / onepass: {statistics.geometric_mean(ratios):.2f}; lowest {min(ratios):.2f}.",
        ]
    for label, row in data.get("host", {}).items():
        lines.append(f"Host time per call, {label}: " + ", ".join(f"{s} {v:.1f} us" for s, v in row.items()) + ".")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.gpu")
    parser.add_argument("--only", default="", help="workloads whose name contains one of these, by semicolon")
    parser.add_argument("--systems", default=",".join(SYSTEMS))
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    for variable in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "ONEPASS_CACHE_DIR"):
        os.environ[variable] = tempfile.mkdtemp()
    import triton

    import onepass  # noqa: F401

    words = [w.strip().lower() for w in options.only.split(";") if w.strip()]
    names = [n for n in WORKLOADS if not words or any(w in n.lower() for w in words)]
    systems = tuple(options.systems.split(","))
    torch.manual_seed(0)
    data: dict[str, Any] = {
        "device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__,
        "date": time.strftime("%Y-%m-%d"), "bandwidth": copy_bandwidth(), "workloads": {},
    }  # fmt: skip
    for name in names:
        data["workloads"][name] = measure(name, systems, options.rounds, data["bandwidth"])
        print(name, data["workloads"][name], flush=True)
        torch.cuda.empty_cache()
    if not words:
        data["host"] = host_cost(systems)
    options.out.mkdir(parents=True, exist_ok=True)
    stem = data["device"].lower().replace(" ", "-")
    (options.out / f"{stem}.json").write_text(json.dumps(data, indent=1) + "\n")
    (options.out / f"{stem}.md").write_text(table(data))
    print(table(data))


if __name__ == "__main__":
    main()
