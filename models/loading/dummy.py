"""Random weights for a model without a checkpoint: benchmarks, compile tests, memory plans (load_format="dummy").

Deterministic in (seed, parameter name), whatever the sharding. Scaled so that activations and logits stay near 1.
"""

from __future__ import annotations

import zlib
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from models.causal_lm import CausalLM
from models.declare import DeclaredParam, declared_params
from models.loading.params import Progress, ShardingFor


def dummy_params(
    model_abstract: CausalLM,
    *,
    seed: int = 0,
    sharding_for: ShardingFor | None = None,
    progress: Progress | None = None,
) -> nnx.State:
    """The state of `model_abstract` filled at random on the device, with the arguments of params.load_params."""
    params = list(declared_params(model_abstract))
    total = sum(param.num_bytes for param in params)
    done, made = 0, []
    for param in params:
        sharding = sharding_for(param.decl.axes) if sharding_for is not None else None
        made.append((param.path, param.variable.replace(_random(param, seed, sharding))))
        done += param.num_bytes
        if progress is not None:
            progress(done, total, param.name)
    return nnx.from_flat_state(made)


def _random(param: DeclaredParam, seed: int, sharding: jax.sharding.Sharding | None) -> jax.Array:
    if param.decl.init_std is None:
        return jnp.ones(param.shape, param.dtype, device=sharding)
    key = jax.random.fold_in(jax.random.key(seed), zlib.crc32(param.name.encode()))
    draw = jax.jit(_normal, static_argnums=(2, 3), out_shardings=sharding)
    return draw(key, param.decl.init_std, param.shape, param.dtype)


def _normal(key: jax.Array, std: float, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    return (jax.random.normal(key, shape, jnp.float32) * std).astype(dtype)
