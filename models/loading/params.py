"""Declared parameters to real arrays, one checkpoint tensor at a time.

Each weight is joined on the host in the checkpoint's orientation and handed to the device already in its final dtype;
the transposition to [in, out] happens on that one copy. Host memory beyond the model itself stays near one weight.
Knows nothing of file formats.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from models.causal_lm import CausalLM
from models.declare import DeclaredParam, declared_params
from models.loading.errors import ModelFileError
from models.loading.source import WeightSource

# Tensors that some checkpoints carry and no model reads: they follow from the configuration.
IGNORABLE_SUFFIXES = (".rotary_emb.inv_freq",)
ROPE_FACTORS = "rope_freqs.weight"
EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"

ShardingFor = Callable[[tuple[str | None, ...]], jax.sharding.Sharding]
Progress = Callable[[int, int, str], None]


def load_params(
    model_abstract: CausalLM,
    source: WeightSource,
    *,
    dtype: Any,
    sharding_for: ShardingFor | None = None,
    progress: Progress | None = None,
) -> nnx.State:
    """The state of `model_abstract` with the weights of `source`.

    Args:
      model_abstract: from models.registry.build_model.
      source: an open checkpoint; it stays open.
      dtype: of every weight, whatever the checkpoint says; the one the model was built with.
      sharding_for: logical axes of a weight -> its sharding; None leaves weights on the default device.
      progress: called after each weight with (bytes done, bytes in total, name of the weight); bytes as loaded.

    Raises ModelFileError when a tensor is missing, has another shape than the model, is not used by the model, or holds
    something other than floating-point numbers; ValueError for a dtype that is not the model's.
    """
    params = list(declared_params(model_abstract))
    for param in params:
        if param.dtype != jnp.dtype(dtype):
            raise ValueError(f"dtype must be that of the model, {param.dtype} for {param.name}, got {dtype!r}")
    _check_names(params, source, model_abstract)
    total = sum(param.num_bytes for param in params)
    done, loaded = 0, []
    for param in params:
        sharding = sharding_for(param.decl.axes) if sharding_for is not None else None
        host = _read_joined(param, source)
        array = jax.device_put(host.T if param.decl.transposed else host, sharding)
        # Transfers are asynchronous: waiting here keeps at most one weight's host copy alive.
        loaded.append((param.path, param.variable.replace(array.block_until_ready())))
        del host
        done += param.num_bytes
        if progress is not None:
            progress(done, total, param.name)
    return nnx.from_flat_state(loaded)


def _read_joined(param: DeclaredParam, source: WeightSource) -> np.ndarray:
    """The weight in the checkpoint's orientation and the model's dtype."""
    sources = param.decl.sources
    if len(sources) == 1:
        return _read(param, *sources[0], source).astype(param.dtype, copy=False)
    joined = np.empty(param.source_shape(sum(rows for _, rows in sources)), param.dtype)
    start = 0
    for name, rows in sources:
        joined[start : start + rows] = _read(param, name, rows, source)
        start += rows
    return joined


def _read(param: DeclaredParam, name: str, rows: int, source: WeightSource) -> np.ndarray:
    array, expected = source.read(name), param.source_shape(rows)
    if array.shape != expected:
        raise ModelFileError(source.path, f"was announced with shape {expected}, but has {array.shape}", name)
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise ModelFileError(source.path, f"a weight must hold floating-point numbers, got {array.dtype}", name)
    return array


def _check_names(params: list[DeclaredParam], source: WeightSource, model: CausalLM) -> None:
    """Every tensor the model needs is there with its shape, and every tensor that is there is needed."""
    present = set(source.names())
    needed = {name: param.source_shape(rows) for param in params for name, rows in param.decl.sources}
    for name, expected in needed.items():
        if name not in present:
            raise ModelFileError(source.path, "a tensor that the model needs is missing", name)
        if tuple(source.shape(name)) != expected:
            raise ModelFileError(source.path, f"shape must be {expected}, got {tuple(source.shape(name))}", name)
    for name in sorted(present - needed.keys()):
        if name == ROPE_FACTORS:
            _check_rope_factors(source, model)
        elif name == HEAD and EMBEDDING in needed:
            _check_tied_copy(source)
        elif not name.endswith(IGNORABLE_SUFFIXES):
            raise ModelFileError(source.path, "the model has no use for this tensor", name)


def _check_rope_factors(source: WeightSource, model: CausalLM) -> None:
    """GGUF files carry rope scaling as a tensor; the configuration must have been made from it."""
    scaling = model.config.rope_scaling
    factors = np.asarray(scaling.factors if scaling is not None else (), np.float32)
    if not np.array_equal(source.read(ROPE_FACTORS).ravel().astype(np.float32), factors):
        raise ModelFileError(source.path, "the tensor scales rope, but the model's rope_scaling differs", ROPE_FACTORS)


def _check_tied_copy(source: WeightSource) -> None:
    """Some tied checkpoints store the embedding a second time as the output head."""
    if source.shape(HEAD) != source.shape(EMBEDDING) or not np.array_equal(source.read(HEAD), source.read(EMBEDDING)):
        raise ModelFileError(source.path, f"the head differs from {EMBEDDING}, but tie_word_embeddings is true", HEAD)
