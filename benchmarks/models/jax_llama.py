"""The Llama stack of `library.llama` in JAX, for XLA, on the same parameters; imported only where JAX is there.

Parameters are a dictionary by torch's names, so that gradients find their partners.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import torch
from torch import Tensor

from ..systems import Runner, to_jax
from .cases import INFERENCE

if TYPE_CHECKING:
    from .subject import Subject, Values

Array = jax.Array
Parameters = dict[str, Array]


def loss_and_logits(
    parameters: Parameters, tokens: Array, layers: int, heads: int, key_heads: int, epsilon: float, theta: float,
    attention: str,
) -> tuple[Array, Array]:  # fmt: skip
    """The mean cross-entropy of every token but the first, and the logits."""
    x = parameters["model.embed_tokens.weight"][tokens]
    size = x.shape[-1] // heads
    angles = jnp.arange(tokens.shape[1])[:, None] / theta ** (jnp.arange(0, size, 2) / size)
    angles = jnp.concatenate((angles, angles), -1)[None, :, None, :]
    cosine, sine = jnp.cos(angles).astype(x.dtype), jnp.sin(angles).astype(x.dtype)
    for n in range(layers):
        prefix = f"model.layers.{n}."
        layer = {name.removeprefix(prefix): p for name, p in parameters.items() if name.startswith(prefix)}
        y = _norm(x, layer["input_layernorm.weight"], epsilon)
        query, key, value = (
            (y @ layer[f"self_attn.{part}_proj.weight"].T).reshape(*tokens.shape, count, size)
            for part, count in (("q", heads), ("k", key_heads), ("v", key_heads))
        )
        query, key = (part * cosine + _turned(part) * sine for part in (query, key))
        mixed = jax.nn.dot_product_attention(query, key, value, is_causal=True, implementation=attention)
        x = x + mixed.reshape(x.shape) @ layer["self_attn.o_proj.weight"].T
        y = _norm(x, layer["post_attention_layernorm.weight"], epsilon)
        gated = jax.nn.silu(y @ layer["mlp.gate_proj.weight"].T) * (y @ layer["mlp.up_proj.weight"].T)
        x = x + gated @ layer["mlp.down_proj.weight"].T
    logits = _norm(x, parameters["model.norm.weight"], epsilon) @ parameters["lm_head.weight"].T
    scores = logits[:, :-1].astype(jnp.float32)
    chosen = jnp.take_along_axis(scores, tokens[:, 1:, None], -1)[..., 0]
    return (jax.nn.logsumexp(scores, -1) - chosen).mean(), logits


def _norm(x: Array, weight: Array, epsilon: float) -> Array:
    wide = x.astype(jnp.float32)
    return weight * (wide * jax.lax.rsqrt((wide * wide).mean(-1, keepdims=True) + epsilon)).astype(x.dtype)


def _turned(x: Array) -> Array:
    first, second = jnp.split(x, 2, -1)
    return jnp.concatenate((-second, first), -1)


def xla_runner(subject: Subject, mode: str) -> Runner:
    """Inference, or forward and backward, compiled by XLA."""
    config: Any = subject.model.config
    library = "cudnn" if subject.device == "cuda" and subject.case.dtype is torch.bfloat16 else "xla"
    function = partial(
        loss_and_logits, layers=config.num_hidden_layers, heads=config.num_attention_heads,
        key_heads=config.num_key_value_heads, epsilon=config.rms_norm_eps, theta=rope_theta(config), attention=library,
    )  # fmt: skip
    if mode != INFERENCE:
        function = jax.value_and_grad(function, has_aux=True)
    jitted = jax.jit(function)
    parameters = {name: to_jax(p) for name, p in subject.model.named_parameters()}
    tokens = to_jax(subject.batch["input_ids"])

    def call() -> Any:
        return jax.block_until_ready(jitted(parameters, tokens))

    def values() -> Values:
        result = call()
        outputs, gradients = (result, {}) if mode == INFERENCE else result
        found = {f"output {number}": _to_torch(value) for number, value in enumerate(outputs)}
        return found | {f"gradient of {name}": _to_torch(value) for name, value in gradients.items()}

    return Runner(call, values)


def rope_theta(config: Any) -> float:
    """The base of the rotations, wherever this version of the library keeps it."""
    parameters = getattr(config, "rope_parameters", None) or {}
    return float(parameters.get("rope_theta", getattr(config, "rope_theta", 10000.0)))


def _to_torch(value: Array) -> Tensor:
    tensor: Tensor = torch.from_dlpack(value)
    return tensor
