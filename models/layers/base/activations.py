"""Activations by the names that transformers gives them in configurations (Hendrycks & Gimpel 2016, arXiv:1606.08415,
for all kinds of GELU).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

import jax
import jax.numpy as jnp
from jax import lax

from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.layers.base.mlp import gelu, gelu_tanh, relu_squared

# Names of what most gated MLPs have, and Gemma's.
SILU, GELU_TANH = "silu", "gelu_pytorch_tanh"
# Those with which kernels of experts are known to compile; others are computed from memory.
FUSED = (SILU, GELU_TANH)
# Mean and deviation of `laplace`.
_LAPLACE = 0.707107, 0.282095


def quick_gelu(x: jax.Array) -> jax.Array:
    """Return x * sigmoid(1.702 x): `quick_gelu` in configurations."""
    return x * jax.nn.sigmoid(1.702 * x)


def clipped_gelu(x: jax.Array) -> jax.Array:
    """Return the exact GELU of x, at most 10: `gelu_10` in configurations."""
    return jnp.minimum(gelu(x), 10)


def laplace(x: jax.Array) -> jax.Array:
    """Return the distribution function of a normal variable with mean 0.707107 and deviation 0.282095 at x (Ma et al.
    2022, arXiv:2209.10655): `laplace` in configurations.
    """
    mean, deviation = _LAPLACE
    return 0.5 * (1.0 + lax.erf((x - mean) / (deviation * math.sqrt(2.0))))


def sqrt_softplus(x: jax.Array) -> jax.Array:
    """Return sqrt(ln(1 + exp(x))): `sqrtsoftplus` in configurations."""
    return jnp.sqrt(jax.nn.softplus(x))


def linear(x: jax.Array) -> jax.Array:
    """Return x: `linear` in configurations."""
    return x


# By their names in configurations.
ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "gelu": gelu,
    "gelu_python": gelu,
    "gelu_pytorch_tanh": gelu_tanh,
    "gelu_python_tanh": gelu_tanh,
    "gelu_new": gelu_tanh,
    "gelu_fast": gelu_tanh,
    "gelu_accurate": gelu_tanh,
    "gelu_10": clipped_gelu,
    "quick_gelu": quick_gelu,
    "silu": jax.nn.silu,
    "swish": jax.nn.silu,
    "relu": jax.nn.relu,
    "relu2": relu_squared,
    "relu6": jax.nn.relu6,
    "leaky_relu": jax.nn.leaky_relu,
    "hardswish": jax.nn.hard_swish,
    "mish": jax.nn.mish,
    "tanh": jnp.tanh,
    "sigmoid": jax.nn.sigmoid,
    "laplace": laplace,
    "linear": linear,
    "sqrtsoftplus": sqrt_softplus,
}


@cache
def gated_by(name: str) -> Callable[..., jax.Array]:
    """Return the function activation(gate) * up of gate and up (Shazeer 2020, arXiv:2002.05202) for a name of
    ACTIVATIONS; the same object at every call, so that layers share a trace.
    """
    activation = ACTIVATIONS[name]
    return lambda gate, up: activation(gate) * up


def read_activation(fields: ConfigFields, name: str = "hidden_act", default: str = "gelu") -> str:
    """Return the field `name`, a name of ACTIVATIONS; `default` if it is absent or null. Raises ModelConfigError for
    another value.
    """
    found = fields.text(name, default)
    if found not in ACTIVATIONS:
        raise fields.fail(name, f"one of {', '.join(ACTIVATIONS)}")
    return found
