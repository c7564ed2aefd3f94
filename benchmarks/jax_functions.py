"""The programs in JAX, for XLA; imported only where JAX is there.

Sums and normalisations widen to float32 inside, as torch's do. Random functions take a key first.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

Array = jax.Array


def chain(x: Array, y: Array) -> Array:
    return jax.nn.relu(x * 2.0 + y) - 0.5


def four_ops(x: Array) -> Array:
    return jax.nn.relu((x + 1) * 2) ** 2


def sigmoid_tanh(x: Array) -> Array:
    return jax.nn.sigmoid(x) * jnp.tanh(x + 1)


def bias_gelu(x: Array, bias: Array) -> Array:
    wide = x.astype(jnp.float32) + bias.astype(jnp.float32)
    return jax.nn.gelu(wide, approximate=False).astype(x.dtype)


def _dropout(key: Array, x: Array) -> Array:
    return jnp.where(jax.random.bernoulli(key, 0.9, x.shape), x / 0.9, 0).astype(x.dtype)


def bias_gelu_dropout(key: Array, x: Array, bias: Array) -> Array:
    return _dropout(key, bias_gelu(x, bias))


def bias_dropout_residual_layernorm(
    key: Array, x: Array, residual: Array, bias: Array, weight: Array, shift: Array
) -> Array:
    return layernorm(residual + _dropout(key, x + bias), weight, shift)


def layernorm(x: Array, weight: Array, shift: Array) -> Array:
    wide = x.astype(jnp.float32)
    centred = wide - wide.mean(-1, keepdims=True)
    normal = centred * jax.lax.rsqrt((centred * centred).mean(-1, keepdims=True) + 1e-5)
    return (normal * weight.astype(jnp.float32) + shift.astype(jnp.float32)).astype(x.dtype)


def _rmsnorm_wide(x: Array, weight: Array) -> Array:
    wide = x.astype(jnp.float32)
    epsilon = jnp.finfo(jnp.float32).eps
    return wide * jax.lax.rsqrt((wide * wide).mean(-1, keepdims=True) + epsilon) * weight.astype(jnp.float32)


def rmsnorm(x: Array, weight: Array) -> Array:
    return _rmsnorm_wide(x, weight).astype(x.dtype)


def rmsnorm_silu(x: Array, weight: Array) -> Array:
    return jax.nn.silu(_rmsnorm_wide(x, weight)).astype(x.dtype)


def softmax(x: Array) -> Array:
    return jax.nn.softmax(x.astype(jnp.float32), -1).astype(x.dtype)


def log_softmax(x: Array) -> Array:
    return jax.nn.log_softmax(x.astype(jnp.float32), -1).astype(x.dtype)


def cross_entropy(x: Array, target: Array) -> Array:
    wide = x.astype(jnp.float32)
    chosen = jnp.take_along_axis(wide, target[:, None], -1)[:, 0]
    return (jax.nn.logsumexp(wide, -1) - chosen).mean().astype(x.dtype)


def full_sum(x: Array) -> Array:
    return x.sum(dtype=jnp.float32).astype(x.dtype)


def relu_sum(x: Array) -> Array:
    return full_sum(jax.nn.relu(2 * x))


def column_sum(x: Array) -> Array:
    return x.sum(0, dtype=jnp.float32).astype(x.dtype)


def column_sum_of_product(x: Array, y: Array) -> Array:
    return column_sum(x * y)


def statistics(x: Array) -> tuple[Array, Array, Array]:
    return jnp.abs(x).max(), jnp.abs(x).mean(), jnp.square(x).mean()


def transpose_relu(x: Array) -> Array:
    return jax.nn.relu(x).T


def concatenate(x: Array, y: Array) -> Array:
    return jnp.concatenate([jax.nn.relu(x), y * 2.0], 1)


def swiglu(gate: Array, value: Array) -> Array:
    return jax.nn.silu(gate) * value


def adam_update(parameter: Array, gradient: Array, mean: Array, square: Array) -> tuple[Array, Array, Array]:
    mean = mean * 0.9 + gradient * 0.1
    square = square * 0.999 + gradient * gradient * 0.001
    step = (mean / 0.1) / (jnp.sqrt(square / 0.001) + 1e-8)
    return parameter * (1 - 1e-5) - step * 1e-3, mean, square


def two_outputs(a: Array, b: Array, c: Array) -> tuple[Array, Array]:
    return jax.nn.relu(a + b), jax.nn.sigmoid(a * c)


def gated_cumsum(x: Array, gate: Array) -> Array:
    return jnp.cumsum(jax.nn.sigmoid(gate) * x, -1) * jax.nn.silu(gate)
