"""Which models are measured on which device: one `Row` per model, size and mode."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from . import library
from .library import Built

INFERENCE, TRAINING, STEP = MODES = ("inference", "forward + backward", "training step")
SYSTEMS = ("eager", "inductor", "inductor-max", "xla", "onepass")


@dataclass(frozen=True, slots=True)
class Model:
    """`build(size)` gives the module and its arguments; it imports the library that it `needs`."""

    name: str
    build: Callable[[str], Built]
    needs: str = "transformers"
    images: bool = False  # a network of convolutions, which a memory format concerns


LLAMA = Model("Llama", library.llama)
BERT = Model("BERT", library.bert)
VIT = Model("ViT", library.vit)
RESNET = Model("ResNet", library.resnet, "timm", images=True)
RESNETS = {"large": "ResNet-50", "launch-bound": "ResNet-50", "small": "ResNet-18", "tiny": "ResNet-18"}
MODELS = (
    LLAMA,
    Model("GPT-2", library.gpt2),
    BERT,
    Model("T5", library.t5),
    VIT,
    Model("Mixtral", library.mixtral),
    Model("Mamba", library.mamba),
    RESNET,
    Model("ConvNeXt", library.convnext, "timm", images=True),
    Model("EfficientNet", library.efficientnet, "timm", images=True),
    Model("U-Net", library.unet, "", images=True),
    Model("Recommender", library.recommender, ""),
)


@dataclass(frozen=True, slots=True)
class Case:
    """A model at a size. `extra`: systems that run this case beside those that run all."""

    model: Model
    size: str
    dtype: torch.dtype
    channels_last: bool = False
    extra: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        name = RESNETS[self.size] if self.model == RESNET else self.model.name
        layout = ", channels-last" if self.channels_last else ""
        dtype = {torch.bfloat16: "bf16", torch.float32: "float32"}[self.dtype]
        return f"{name}, {self.size}{layout}, {dtype}"


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table."""

    case: Case
    mode: str

    @property
    def name(self) -> str:
        return f"{self.case.name}, {self.mode}"


def _gpu_cases() -> list[Case]:
    bf16, f32 = torch.bfloat16, torch.float32
    autotuned, written_in_jax = (LLAMA, BERT, VIT, RESNET), (LLAMA,)
    cases = []
    for model in MODELS:
        extra = ("inductor-max",) * (model in autotuned) + ("xla",) * (model in written_in_jax)
        cases.append(Case(model, "large", bf16, channels_last=model.images, extra=extra))
    cases += [Case(model, "large", bf16) for model in MODELS if model.images]
    cases += [Case(model, "launch-bound", bf16, channels_last=model.images) for model in MODELS]
    cases += [Case(BERT, "large", f32), Case(RESNET, "large", f32, channels_last=True)]
    return cases


def _cpu_cases(size: str) -> list[Case]:
    cases = [Case(model, size, torch.float32) for model in MODELS]
    return cases + [Case(model, size, torch.float32, channels_last=True) for model in MODELS if model.images]


def rows(cases: list[Case]) -> tuple[Row, ...]:
    return tuple(Row(case, mode) for case in cases for mode in MODES)


ROWS = {"cuda": rows(_gpu_cases()), "cpu": rows(_cpu_cases("small"))}
TINY_ROWS = rows(_cpu_cases("tiny"))


def find_case(name: str, device: str) -> Case:
    """The case of that name, at any size that the device has."""
    found = {row.case.name: row.case for row in (*ROWS[device], *TINY_ROWS)}
    return found[name]
