"""Models of `transformers` and `timm` with random weights: `llama("large")` gives the module and its arguments.

A library is imported by the function that needs it, so that a missing one costs its own models only. Nothing is
downloaded. Dropout is 0, so that training has values to compare; every result starts with the loss.
"""

from __future__ import annotations

import importlib.util
import runpy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from .written import DiffusionUNet, ImageClassifier, Recommender

Built = tuple[nn.Module, dict[str, Tensor]]


@dataclass(frozen=True, slots=True)
class Text:
    """Sizes of a language model and its batch."""

    width: int
    layers: int
    heads: int
    key_heads: int
    inner: int
    vocabulary: int
    batch: int
    tokens: int

    def some_tokens(self, count: int = 0) -> Tensor:
        return torch.randint(2, self.vocabulary, (self.batch, count or self.tokens))


TEXT = {
    "large": Text(1024, 8, 16, 8, 4096, 32000, 8, 1024),
    "launch-bound": Text(256, 8, 8, 4, 1024, 8000, 1, 128),
    "small": Text(256, 4, 8, 4, 1024, 8000, 1, 128),
    "tiny": Text(32, 2, 2, 1, 64, 96, 2, 16),
}


def llama(size: str) -> Built:
    from transformers import LlamaConfig, LlamaForCausalLM

    s = TEXT[size]
    config = LlamaConfig(
        hidden_size=s.width, intermediate_size=s.inner, num_hidden_layers=s.layers, num_attention_heads=s.heads,
        num_key_value_heads=s.key_heads, vocab_size=s.vocabulary, max_position_embeddings=max(2048, s.tokens),
        use_cache=False,
    )  # fmt: skip
    return _language_model(LlamaForCausalLM, config, s)


def gpt2(size: str) -> Built:
    from transformers import GPT2Config, GPT2LMHeadModel

    s = TEXT[size]
    config = GPT2Config(
        n_embd=s.width, n_inner=s.inner, n_layer=s.layers, n_head=s.heads, vocab_size=s.vocabulary,
        n_positions=s.tokens, use_cache=False, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    return _language_model(GPT2LMHeadModel, config, s)


def mixtral(size: str) -> Built:
    """A mixture of eight experts, each token by two of them; half the layers, experts of half the usual size."""
    from transformers import MixtralConfig, MixtralForCausalLM

    s = TEXT[size]
    config = MixtralConfig(
        hidden_size=s.width, intermediate_size=s.inner // 2, num_hidden_layers=s.layers // 2,
        num_attention_heads=s.heads, num_key_value_heads=s.key_heads, vocab_size=s.vocabulary, num_local_experts=8,
        num_experts_per_tok=2, max_position_embeddings=max(2048, s.tokens), sliding_window=None, use_cache=False,
    )  # fmt: skip
    return _language_model(MixtralForCausalLM, config, s)


def mamba(size: str) -> Built:
    """Half the layers and a quarter of the tokens: eager walks the tokens one by one."""
    from transformers import MambaConfig, MambaForCausalLM

    s = TEXT[size]
    config = MambaConfig(
        hidden_size=s.width, num_hidden_layers=s.layers // 2, vocab_size=s.vocabulary, state_size=16, use_cache=False
    )
    tokens = s.some_tokens(s.tokens // 4)
    return MambaForCausalLM(config), {"input_ids": tokens, "labels": tokens}


def bert(size: str) -> Built:
    """With a padding mask: the sequences have from half to all of the positions."""
    from transformers import BertConfig, BertForMaskedLM

    s = TEXT[size]
    config = BertConfig(
        hidden_size=s.width, intermediate_size=s.inner, num_hidden_layers=s.layers, num_attention_heads=s.heads,
        vocab_size=s.vocabulary, max_position_embeddings=s.tokens, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    tokens = s.some_tokens()
    lengths = torch.linspace(s.tokens / 2, s.tokens, s.batch + 1)[:-1].long()
    mask = torch.arange(s.tokens) < lengths[:, None]
    labels = tokens.masked_fill(~mask, -100)
    model = BertForMaskedLM._from_config(config, attn_implementation="sdpa")
    return model, {"input_ids": tokens, "attention_mask": mask.long(), "labels": labels}


def t5(size: str) -> Built:
    """Half of the layers and tokens in the encoder, half in the decoder; attention has a relative bias."""
    from transformers import T5Config, T5ForConditionalGeneration

    s = TEXT[size]
    config = T5Config(
        d_model=s.width, d_kv=s.width // s.heads, d_ff=s.inner, num_layers=s.layers // 2,
        num_decoder_layers=s.layers // 2, num_heads=s.heads, vocab_size=s.vocabulary, dropout_rate=0.0,
        use_cache=False, decoder_start_token_id=0,
    )  # fmt: skip
    model = T5ForConditionalGeneration._from_config(config, attn_implementation="sdpa")
    return model, {"input_ids": s.some_tokens(s.tokens // 2), "labels": s.some_tokens(s.tokens // 2)}


def vit(size: str) -> Built:
    from transformers import ViTConfig, ViTForImageClassification

    width, layers, heads, batch, pixels, patch = {
        "large": (1024, 8, 16, 32, 224, 16),
        "launch-bound": (192, 8, 3, 1, 224, 16),
        "small": (192, 6, 3, 1, 224, 16),
        "tiny": (32, 2, 2, 2, 32, 8),
    }[size]
    config = ViTConfig(
        hidden_size=width, intermediate_size=4 * width, num_hidden_layers=layers, num_attention_heads=heads,
        image_size=pixels, patch_size=patch, num_labels=1000, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    model = ViTForImageClassification._from_config(config, attn_implementation="sdpa")
    images = torch.randn(batch, 3, pixels, pixels)
    return model, {"pixel_values": images, "labels": torch.randint(0, 1000, (batch,))}


def _language_model(kind: Any, config: Any, s: Text) -> Built:
    tokens = s.some_tokens()
    return kind._from_config(config, attn_implementation="sdpa"), {"input_ids": tokens, "labels": tokens}


# --- images ---

# size: name in timm, images, pixels. A batch norm of two values has no meaningful gradient: tiny ones have 16.
RESNET = {"large": ("resnet50", 64, 224), "launch-bound": ("resnet50", 1, 224), "small": ("resnet18", 1, 224),
          "tiny": ("resnet18", 4, 64)}  # fmt: skip
CONVNEXT = {"large": ("convnext_tiny", 64, 224), "launch-bound": ("convnext_tiny", 1, 224),
            "small": ("convnext_tiny", 1, 128), "tiny": ("convnext_atto", 2, 32)}  # fmt: skip
EFFICIENTNET = {"large": ("efficientnet_b0", 64, 224), "launch-bound": ("efficientnet_b0", 1, 224),
                "small": ("efficientnet_b0", 1, 224), "tiny": ("efficientnet_b0", 4, 64)}  # fmt: skip


def resnet(size: str) -> Built:
    return _timm(*RESNET[size])


def convnext(size: str) -> Built:
    return _timm(*CONVNEXT[size])


def efficientnet(size: str) -> Built:
    return _timm(*EFFICIENTNET[size])


def _timm(name: str, batch: int, pixels: int) -> Built:
    with _without_images():
        import timm
    model = ImageClassifier(timm.create_model(name, pretrained=False))
    return model, {"images": torch.randn(batch, 3, pixels, pixels), "labels": torch.randint(0, 1000, (batch,))}


@contextmanager
def _without_images() -> Iterator[None]:
    """Lets timm be imported where torchvision and Pillow are not installed: its networks use one class of them."""
    found = importlib.util.find_spec("timm")
    if "timm" in sys.modules or found is None or importlib.util.find_spec("torchvision") is not None:
        yield
        return
    frozen = type("FrozenBatchNorm2d", (nn.Module,), {})
    stand_ins = {"torchvision": {}, "torchvision.ops": {}, "torchvision.ops.misc": {"FrozenBatchNorm2d": frozen}}
    for name, values in stand_ins.items():
        _stand_in(name, values)
    folder = Path(str(found.origin)).parent / "data"
    _stand_in("timm.data", runpy.run_path(str(folder / "constants.py")), [str(folder)])
    try:
        yield
    finally:
        for name in stand_ins:
            del sys.modules[name]


def _stand_in(name: str, values: dict[str, Any], path: list[str] | None = None) -> None:
    module = ModuleType(name)
    module.__path__ = path or []  # a package: its parts can be imported
    module.__dict__.update({key: value for key, value in values.items() if not key.startswith("__")})
    sys.modules[name] = module


# --- written in the benchmark ---


def unet(size: str) -> Built:
    channels, batch, pixels = {
        "large": (128, 16, 64),
        "launch-bound": (64, 1, 32),
        "small": (32, 1, 32),
        "tiny": (8, 2, 8),
    }[size]
    images = torch.randn(batch, 3, pixels, pixels)
    steps = torch.randint(0, 1000, (batch,))
    return DiffusionUNet(channels), {"images": images, "steps": steps, "noise": torch.randn_like(images)}


def recommender(size: str) -> Built:
    tables, rows, width, inner, batch = {
        "large": (26, 100_000, 128, 1024, 16384),
        "launch-bound": (26, 1000, 16, 64, 128),
        "small": (26, 10_000, 32, 256, 512),
        "tiny": (3, 20, 8, 16, 5),
    }[size]
    categories = torch.randint(0, rows, (batch, tables, 4))
    arguments = {"numbers": torch.randn(batch, 13), "categories": categories, "clicked": torch.rand(batch).round()}
    return Recommender(tables, rows, width, 13, inner), arguments
