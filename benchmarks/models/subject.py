"""A model on a device as each mode and system runs it, with what its values must be.

Inference runs without gradients. Forward + backward gives the outputs and every parameter's gradient. A training step
is the compiled model, its backward and a compiled AdamW; to be checked, AdamW gets eager's gradients, because its
first change of a parameter is little more than the sign of the gradient, whose noise decides where it is near 0.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..systems import Runner, compiled
from ..workloads import TOLERANCE, value_problem
from .cases import INFERENCE, STEP, Case

LEARNING_RATE = 1e-3
# A bias before a norm has no gradient but noise: a gradient is judged beside this part of the largest one, at least.
LEAST_GRADIENT = 1e-2
Values = dict[str, Tensor]  # by what they are: "output 0", "gradient of lm_head.weight", "change of lm_head.weight"


@dataclass
class Step:
    """A training step in its parts, as one system runs them."""

    forward: Callable[..., Any]
    optimiser: torch.optim.Optimizer
    update: Callable[[], Any]


class Subject:
    """One model, shared by all systems: they take turns on the same parameters."""

    def __init__(self, case: Case, device: str) -> None:
        torch.manual_seed(0)
        self.case, self.device = case, device
        with torch.device(device):
            model, batch = case.model.build(case.size)
        randomise(model)
        layout = torch.channels_last if case.channels_last else torch.preserve_format
        self.model: nn.Module = model.to(case.dtype, memory_format=layout)
        self.batch = {key: self._placed(value, case.dtype) for key, value in batch.items()}
        self._compiled: dict[str, Callable[..., Any]] = {}

    def _placed(self, value: Tensor, dtype: torch.dtype) -> Tensor:
        value = value.to(dtype) if value.is_floating_point() else value
        return value.contiguous(memory_format=torch.channels_last) if self._is_image(value) else value

    def _is_image(self, value: Tensor) -> bool:
        return self.case.channels_last and value.ndim == 4

    # --- one call ---

    def set_mode(self, mode: str) -> None:
        """Compilations of the last mode are dropped, except that a step runs what forward + backward compiled."""
        if mode != STEP:
            self._compiled.clear()
            torch._dynamo.reset()
        self.model.train(mode != INFERENCE)

    def compiled(self, system: str) -> Callable[..., Any]:
        if system not in self._compiled:
            self._compiled[system] = compiled(system, self.model)
        return self._compiled[system]

    def runner(self, mode: str, system: str, eager_gradients: Values | None = None) -> Runner:
        """The call that is timed, and the one that gives values to check; nothing is compiled yet."""
        if system == "xla":
            from .jax_llama import xla_runner

            return xla_runner(self, mode)
        function = self.compiled(system)
        if mode != STEP:
            call = self._infer if mode == INFERENCE else self._train
            return Runner(lambda: call(function), lambda: call(function))
        optimiser = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE)
        step = Step(function, optimiser, compiled(system, optimiser.step))
        return Runner(lambda: self._step(step), lambda: self._checked_step(step, eager_gradients))

    def _infer(self, function: Callable[..., Any]) -> Values:
        with torch.no_grad():
            return _outputs(function(**self.batch))

    def _train(self, function: Callable[..., Any]) -> Values:
        result = function(**self.batch)
        _loss(result).backward()
        return _outputs(result) | self._take_gradients()

    def _take_gradients(self) -> Values:
        found = {}
        for name, parameter in self.model.named_parameters():
            if parameter.grad is not None:
                found[f"gradient of {name}"] = parameter.grad
                parameter.grad = None
        return found

    def _step(self, step: Step) -> Tensor:
        step.optimiser.zero_grad()
        loss = _loss(step.forward(**self.batch))
        loss.backward()
        step.update()
        return loss

    def _checked_step(self, step: Step, eager_gradients: Values | None) -> Values:
        """Outputs, gradients, and how AdamW changes the parameters, which are put back."""
        values = self._train(step.forward)
        for name, parameter in self.model.named_parameters():
            given = (eager_gradients or values).get(f"gradient of {name}")
            parameter.grad = None if given is None else given.to(parameter.dtype, copy=True)
        before = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        step.update()
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                wide = torch.float64 if parameter.dtype is torch.float64 else torch.float32
                values[f"change of {name}"] = parameter.to(wide) - before[name].to(wide)
                parameter.copy_(before[name])
                parameter.grad = None
        return values

    # --- what is right ---

    def reference(self, mode: str, eager_gradients: Values | None = None, dtype: torch.dtype = torch.float64) -> Values:
        """The same in a wide type, by eager."""
        wide = Subject.__new__(Subject)
        wide.case, wide.device, wide._compiled = self.case, self.device, {}
        wide.model = copy.deepcopy(self.model).to(dtype)
        if self.case.model.name == "Mixtral":
            wide.model.set_experts_implementation("eager")  # one expert at a time: grouped products have no float64
        wide.batch = {key: wide._placed(value, dtype) for key, value in self.batch.items()}
        return wide.runner(mode, "eager", eager_gradients).values()

    def problem(self, ours: Values, eager: Values, exact: Values) -> str:
        """Empty if every value is right, else how many are not, and the first of them."""
        if ours.keys() != eager.keys():
            return f"values that eager has not, or that are missing: {', '.join(sorted(ours.keys() ^ eager.keys()))}"
        largest = max((e.abs().max().item() for k, e in exact.items() if k.startswith("gradient")), default=0.0)
        tolerance = TOLERANCE.get(self.case.dtype, 1e-5)
        wrong = []
        for name, got in ours.items():
            least = LEAST_GRADIENT * largest if name.startswith("gradient") else 0.0
            if text := value_problem(got, eager[name], exact[name], tolerance, least):
                wrong.append(f"{name}: {text}")
        return f"{len(wrong)} of {len(ours)} values are wrong; {wrong[0]}" if wrong else ""


def randomise(model: nn.Module) -> None:
    """Norms and biases that start as 0 or 1, and branches that start as 0, get values that a mistake would change."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1 and bool((parameter == parameter[0]).all()):
                noise = 0.1 * torch.randn_like(parameter)
                parameter.copy_(noise if name.endswith("bias") else 0.5 + noise)


def _tensors(result: Any) -> Iterator[Tensor]:
    for leaf in pytree.tree_leaves(dict(result) if hasattr(result, "keys") else result):
        if isinstance(leaf, Tensor):
            yield leaf


def _loss(result: Any) -> Tensor:
    return next(_tensors(result))


def _outputs(result: Any) -> Values:
    return {f"output {number}": tensor.detach() for number, tensor in enumerate(_tensors(result))}
