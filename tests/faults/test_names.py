"""Names are data: quotes, newlines and code in module, parameter and function names reach no executed text."""

from __future__ import annotations

import types
from pathlib import Path

import pytest
import torch
from torch import nn

import onepass
from tests.checking import compiled

WITNESS = "onepass_name_was_executed"

NASTY = [
    'quote" + __import__("os").abort() + "',
    "single' ; raise SystemExit(3) #",
    "line\nint x = 1/0;\n",
    "*/ abort(); /*",
    "\\",
    "trigraph??/",
    "${jndi}{0}{name!r}%s%n",
    "#include </etc/passwd>",
    "tab\tand\rreturn\x0bfeed",
    "snowman \u2603 \u202e reversed",
    "<script>alert(1)</script>",
    "a" * 300,
]


class Nasty(nn.Module):
    """Parameters, buffers and submodules with hostile names."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.key = name.replace(".", "_") or "empty"
        self.register_parameter(self.key, nn.Parameter(torch.randn(6)))
        self.register_buffer(self.key + " buffer", torch.randn(6))
        self.add_module(self.key + " module", nn.Linear(6, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, buffer = self._parameters[self.key], self._buffers[self.key + " buffer"]
        linear = self._modules[self.key + " module"]
        assert weight is not None and buffer is not None and linear is not None
        return (linear(x * weight) + buffer).softmax(-1)


@pytest.mark.parametrize("name", NASTY, ids=range(len(NASTY)))
def test_module_names(name: str) -> None:
    model = Nasty(name)
    keys = list(model.state_dict())
    x = torch.randn(3, 6)
    out = compiled(model)(x)
    torch.testing.assert_close(out, model(x))
    out.sum().backward()
    assert list(model.state_dict()) == keys


@pytest.mark.parametrize("name", NASTY, ids=range(len(NASTY)))
def test_function_and_file_names(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's file and function names go into comments of generated code and into reports."""
    monkeypatch.chdir(tmp_path)
    text = "def function(x):\n    return x.sin() * 2 + x.amax(-1, keepdim=True)  # */ abort(); /* \\\n"
    space: dict[str, object] = {"torch": torch}
    exec(compile(text, name.replace("\0", ""), "exec"), space)
    function = space["function"]
    assert isinstance(function, types.FunctionType)
    function.__name__ = function.__qualname__ = name
    function.__code__ = function.__code__.replace(co_name=name, co_qualname=name)
    x = torch.randn(5, 7)
    torch.testing.assert_close(compiled(function)(x), function(x))
    e = onepass.explain(function, x)
    assert str(e) and e.to_json() and "<script>alert" not in e.to_html()
    assert not (tmp_path / WITNESS).exists()


def test_a_name_that_would_leave_a_witness(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    payloads = [
        f'"; open("{WITNESS}", "w"); "',
        f"'; open('{WITNESS}', 'w'); '",
        f'\nopen("{WITNESS}", "w")\n',
        f'*/\n__attribute__((constructor)) void f(void) {{ fopen("{WITNESS}", "w"); }}\n/*',
        f'\\\n*/ __attribute__((constructor)) void g(void) {{ fopen("{WITNESS}", "w"); }} /*',
        f"$(touch {WITNESS})`touch {WITNESS}`; touch {WITNESS}",
    ]
    for payload in payloads:
        model = Nasty(payload)
        x = torch.randn(3, 6)
        torch.testing.assert_close(compiled(model)(x), model(x))
        str(onepass.explain(model, x))
    assert not (tmp_path / WITNESS).exists()
