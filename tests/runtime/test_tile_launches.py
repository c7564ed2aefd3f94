"""The host function of tile kernels, without a GPU: which device is current, what is passed, what follows an error."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from onepass.ir.source import Allocate, HostProgram, Launch, Ref
from onepass.runtime import executable
from onepass.runtime.kernels import LoadedKernel


def program(device: str) -> HostProgram:
    return HostProgram(
        ("a0", "a1"),
        (Allocate("b0", ("4",), ("1",), "float32", device), Launch(0, ("b0", "a0"), (), "7", device, ("a1",))),
        (Ref("b0"),),
    )


def kernel(status: list[int], seen: list[Any]) -> LoadedKernel:
    def on(device: int) -> tuple[Any, Any]:
        def launch(*arguments: int) -> int:
            seen.append(("launch", device, arguments[2:]))
            return status.pop(0)

        return launch, lambda *arguments: seen.append(("recover", device, arguments[2:]))

    return LoadedKernel("k", on, 2, 1, False)


def test_numbers_go_by_value_and_errors_to_recovery() -> None:
    seen: list[Any] = []
    run = executable.Executable(program("cpu"), [kernel([0, 5], seen)])
    for _ in range(2):
        run([torch.ones(4), torch.tensor(9)])
    assert seen == [("launch", 0, (9, 7, 0)), ("launch", 0, (9, 7, 0)), ("recover", 0, (9, 7, 0))]


@pytest.mark.parametrize("number", [torch.tensor(1.5), torch.tensor(True), torch.tensor(-3, dtype=torch.int16)])
def test_a_number_is_its_bits(number: torch.Tensor) -> None:
    word = executable.word_of(number)
    kind = {1: torch.int8, 2: torch.int16, 4: torch.int32}[number.element_size()]
    assert torch.tensor(word).to(kind).view(number.dtype) == number


def test_another_current_device_is_changed_around_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    current = [1]

    def on_device(index: int, call: Any, args: list[Any]) -> Any:
        seen.append(("enter", index))
        current[0] = index
        return call(args)

    monkeypatch.setattr(executable, "current_device", lambda: current[0])
    monkeypatch.setattr(executable, "on_device", on_device)
    monkeypatch.setattr(executable, "current_stream", lambda index: 40 + index)
    monkeypatch.setattr(executable, "empty_cuda", lambda shape, strides, dtype: torch.empty_strided(shape, strides))
    run = executable.Executable(program("cuda:0"), [kernel([0], seen)])
    run([torch.ones(4), torch.tensor(9)])
    assert seen == [("enter", 0), ("launch", 0, (9, 7, 40))]
