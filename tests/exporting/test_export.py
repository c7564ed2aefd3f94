"""What an exported program gives: the compiled function's values, in the function's containers, weights inside."""

from __future__ import annotations

import subprocess
import sys
from collections import namedtuple
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import onepass
from onepass.cli import main
from onepass.errors import InputMismatch, UnexportableProgram
from tests.checking import DEVICE

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="tests/gpu has those of a GPU")
Pair = namedtuple("Pair", ["first", "second"])


class Named(NamedTuple):
    mean: Tensor
    rest: list[Tensor]


class Block(nn.Module):
    """Attention and a wide layer, a counter of calls, a tied weight and a mask that is no parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.wide, self.narrow = nn.LayerNorm(16), nn.Linear(16, 40), nn.Linear(40, 16)
        self.tied = nn.Linear(40, 16, bias=False)
        self.tied.weight = self.narrow.weight
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("scale", torch.full((16,), 0.5), persistent=False)

    def forward(self, x: Tensor, mask: Tensor | None = None, *, twice: bool = False) -> dict[str, Any]:
        self.calls += 1
        y = self.norm(x) * self.scale
        scores = (y @ y.transpose(-2, -1)).softmax(-1)
        z = F.gelu(self.wide(scores @ y))
        z = self.narrow(z) + self.tied(z)
        return {"out": z * 2 if twice else z, "flat": (x.view(-1), None), "calls": self.calls}


def round_trip(path: Path, function: Any, *args: Any, **kwargs: Any) -> Any:
    onepass.export(function, *args, path=path / "f.onepass", **kwargs)
    return onepass.load(path / "f.onepass")


def test_another_default_device_changes_nothing(tmp_path: Path) -> None:
    module, x = nn.Linear(5, 3), torch.randn(4, 5)
    with torch.device("meta"):
        run = round_trip(tmp_path, module, x)
        found = run(x)
    torch.testing.assert_close(found, module(x).detach())


def test_a_module_gives_the_compiled_functions_bits(tmp_path: Path) -> None:
    module, x = Block().eval(), torch.randn(3, 7, 16)
    run = round_trip(tmp_path, module, x, None, twice=True)
    with torch.no_grad():
        compiled = torch.compile(module, backend="onepass")(x, twice=True)
        eager = module(x, twice=True)
    found = run(x, None, twice=True)
    assert torch.equal(found["out"], compiled["out"])
    torch.testing.assert_close(found["out"], eager["out"])
    assert found["flat"][0].data_ptr() == x.data_ptr() and found["flat"][1] is None
    assert found["calls"] is run.weights["calls"] and found["calls"].item() == 1
    run(x, None, twice=True)
    assert found["calls"].item() == 2
    assert run.weights["tied.weight"] is run.weights["narrow.weight"]
    assert set(module.state_dict()) <= set(run.state_dict())
    assert run.record.kernels and run.record.target == "cpu"


@pytest.mark.parametrize("sizes", [(1, 5), *(pytest.param(s, marks=pytest.mark.rotating) for s in ((3, 1), (64, 33)))])
def test_every_size_of_a_range(tmp_path: Path, sizes: tuple[int, int]) -> None:
    def f(x: Tensor, y: Tensor) -> Tensor:
        return (x * 2 + y).softmax(-1) @ y.T

    rows, columns = torch.export.Dim("rows", min=1, max=64), torch.export.Dim("columns", min=1)
    run = round_trip(tmp_path, f, torch.randn(4, 6), torch.randn(4, 6), dynamic_shapes=[{0: rows, 1: columns}] * 2)
    x, y = torch.randn(sizes), torch.randn(sizes)
    torch.testing.assert_close(run(x, y), f(x, y))
    with pytest.raises(InputMismatch, match="size 0 of x is 65; this program was exported for 1 to 64"):
        run(torch.randn(65, 2), torch.randn(65, 2))
    with pytest.raises(InputMismatch, match="size 1 of y is 3"):
        run(torch.randn(4, 2), torch.randn(4, 3))


def test_containers(tmp_path: Path) -> None:
    def f(pair: Any, parts: dict[str, list[Tensor]], *, flag: bool) -> Any:
        (a, b), c = pair, parts["c"]
        return Named((a + b).mean(), [c[0] + 1, c[1] * 2]), Pair(a, [1, None, flag])

    a, b, c, d = (torch.randn(4) for _ in range(4))
    run = round_trip(tmp_path, f, Pair(a, b), {"c": [c, d]}, flag=True)
    named, pair = run(Pair(a, b), {"c": [c, d]}, flag=True)
    assert type(named).__name__ == "Named" and named._fields == ("mean", "rest")
    assert torch.equal(named.rest[1], d * 2) and torch.equal(named.mean, (a + b).mean())
    assert pair.first is a and list(pair.second) == [1, None, True]
    for args, flag, said in (
        ((Pair(a, b), {"c": [c, d]}), False, "'flag' in what is passed by name is False"),
        (((a, b, c), {"c": [c, d]}), True, "a tuple of 3"),
        ((Pair(a, b), {"d": [c, d]}), True, "a dict of"),
        ((Pair(a, b),), True, "a tuple of 1"),
    ):
        with pytest.raises(InputMismatch, match=said):
            run(*args, flag=flag)


@pytest.mark.rotating
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.int32, torch.bool])
def test_dtypes(tmp_path: Path, dtype: torch.dtype) -> None:
    def f(x: Tensor, y: Tensor) -> Tensor:
        return torch.where(x > 0, x, y).to(torch.float32).cumsum(0)

    x, y = (torch.randn(5, 3).to(dtype) for _ in range(2))
    assert torch.equal(round_trip(tmp_path, f, x, y)(x, y), f(x, y))


def test_what_a_function_writes_to_its_inputs(tmp_path: Path) -> None:
    def f(x: Tensor, cache: Tensor) -> Tensor:
        cache[:, 2] = x.relu()
        x.mul_(3)
        return x

    x, cache = torch.randn(4), torch.zeros(4, 5)
    run = round_trip(tmp_path, f, x.clone(), cache.clone())
    own, kept = x.clone(), cache.clone()
    assert run(own, kept) is own
    f(x, cache)
    assert torch.equal(own, x) and torch.equal(kept, cache)


def test_zero_elements_numbers_and_views(tmp_path: Path) -> None:
    def f(x: Tensor, n: int) -> tuple[Tensor, Tensor]:
        return x.sum(-1) * n, x.transpose(0, 1)

    x = torch.randn(0, 7)
    run = round_trip(tmp_path, f, x, 3)
    assert run(x, 3)[0].shape == (0,) and run(x, 3)[1].shape == (7, 0)
    with pytest.raises(InputMismatch, match="is 4; this program was exported for the value 3"):
        run(x, 4)


def test_random_numbers_follow_the_seed(tmp_path: Path) -> None:
    def f(x: Tensor) -> Tensor:
        return F.dropout(x, 0.5)

    x = torch.ones(1000)
    run, compiled = round_trip(tmp_path, f, x), torch.compile(f, backend="onepass")
    torch.manual_seed(3)
    with torch.no_grad():
        wanted = compiled(x)
    torch.manual_seed(3)
    found = run(x)
    assert torch.equal(found, wanted) and 0 < found.count_nonzero() < 1000
    assert not torch.equal(run(x), found)


@pytest.mark.rotating
def test_a_program_of_torch_export(tmp_path: Path) -> None:
    module, x = Block().eval(), torch.randn(2, 5, 16)
    plain = torch.export.export(module, (x,))
    for program in (plain, plain.run_decompositions()):
        run = round_trip(tmp_path, program)
        found, eager = run(x), module(x)
        torch.testing.assert_close(found["out"], eager["out"])
        assert torch.equal(found["calls"], eager["calls"]) and found["calls"] is run.weights["calls"]
    with pytest.raises(UnexportableProgram, match="example arguments"):
        onepass.export(plain, x, path=tmp_path / "g")


def test_weights_are_given_at_load(tmp_path: Path) -> None:
    module, x = nn.Sequential(nn.Linear(6, 5), nn.GELU()), torch.randn(3, 6)
    path = tmp_path / "f.onepass"
    onepass.export(module, x, path=path, weights=False)
    with pytest.raises(InputMismatch, match=r"0\.weight is missing"):
        onepass.load(path)
    given = {name: torch.randn(t.shape) for name, t in module.state_dict().items()}
    run = onepass.load(path, weights=given)
    module.load_state_dict(given)
    torch.testing.assert_close(run(x), module(x))
    with pytest.raises(InputMismatch, match=r"weight 0\.bias"):
        onepass.load(path, weights={**given, "0.bias": torch.randn(4)})
    with pytest.raises(InputMismatch, match="a weight is other"):
        onepass.load(path, weights={**given, "other": torch.randn(4)})


def test_a_model_without_memory(tmp_path: Path) -> None:
    with torch.device("meta"):
        module = nn.Linear(6, 5)
    onepass.export(module, torch.randn(3, 6, device="meta"), path=tmp_path / "f", weights=False, target="cpu")
    given, x = {"weight": torch.randn(5, 6), "bias": torch.randn(5)}, torch.randn(3, 6)
    torch.testing.assert_close(onepass.load(tmp_path / "f", weights=given)(x), F.linear(x, *given.values()))
    with pytest.raises(UnexportableProgram, match="weights=False"):
        onepass.export(module, torch.randn(3, 6, device="meta"), path=tmp_path / "g", target="cpu")


def test_gradients_are_not_followed(tmp_path: Path) -> None:
    x = torch.randn(4, requires_grad=True)
    assert not round_trip(tmp_path, lambda x: x.sin() + 1, x)(x).requires_grad


@torch.library.custom_op("onepass_tests::in_python", mutates_args=())
def in_python(x: Tensor) -> Tensor:
    return x + 1


@in_python.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def test_what_cannot_be_exported(tmp_path: Path) -> None:
    x, path = torch.randn(4), tmp_path / "f"
    with pytest.raises(UnexportableProgram, match=r"onepass_tests\.in_python\.default is written in Python"):
        onepass.export(in_python, x, path=path)
    with pytest.raises(UnexportableProgram, match=r"torch\.export says"):
        onepass.export(lambda x: x + 1 if x.sum() > 0 else x, x, path=path)
    with pytest.raises(UnexportableProgram, match="no machine code"):
        onepass.export(lambda x: x.sin(), x, path=path, target="triton-interpret")
    assert not list(tmp_path.iterdir())


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "m.py").write_text("import torch\n\ndef f(x, y=2.0):\n    return (x * y).sin()\n")
    out = tmp_path / "f.onepass"
    assert main(["export", f"{tmp_path}/m.py:f", "--input", "4x6", "-o", str(out)]) == 0
    assert capsys.readouterr().err.endswith(f"wrote {out}\n")
    x = torch.randn(4, 6)
    torch.testing.assert_close(onepass.load(out)(x), (x * 2).sin())
    assert main(["export", f"{tmp_path}/m.py:f", "--input", "4x6", "-o", f"{tmp_path}/none/f"]) == 1
    assert "none" in capsys.readouterr().err


ALONE = """
import sys
sys.modules["triton"] = None  # importing it is an error
import torch
import onepass
run = onepass.load(sys.argv[1])
x, wanted = torch.load(sys.argv[2])
assert torch.equal(run(x)["out"], wanted)
heavy = ("torch._dynamo", "torch._functorch.aot_autograd", "torch._inductor", "onepass.pipeline", "onepass.lowering")
assert not [name for name in heavy if name in sys.modules], sys.modules.keys()
print("as compiled")
"""


def test_another_process_needs_neither_compiler_nor_triton(tmp_path: Path) -> None:
    module, x = Block().eval(), torch.randn(3, 7, 16)
    onepass.export(module, x, path=tmp_path / "f.onepass")
    with torch.no_grad():
        torch.save((x, torch.compile(module, backend="onepass")(x)["out"]), tmp_path / "values.pt")
    paths = [str(Path(onepass.__file__).parents[1])]
    alone = {"PATH": "/nonexistent", "PYTHONPATH": ":".join(paths), "HOME": str(tmp_path), "CC": "/nonexistent/cc"}
    command = [sys.executable, "-c", ALONE, str(tmp_path / "f.onepass"), str(tmp_path / "values.pt")]
    done = subprocess.run(command, env=alone, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "as compiled\n", done.stderr
