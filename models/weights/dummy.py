"""Random weights for a model without a checkpoint: benchmarks, compile tests, memory plans (load_format="dummy").

A value follows by integer arithmetic from the seed, the name of a checkpoint tensor and the index in it, so it is the
same on every mesh and every platform. Each device computes its own part of a large weight; NumPy computes small ones.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from jaxengine.models.causal_lm import CausalLM
from jaxengine.models.params.declare import DeclaredParam, ParamDecl, declared_params
from jaxengine.models.weights.load import Progress
from jaxengine.models.weights.views.parts import column_axis, format_of, num_parts, put, source_row, tensor_name
from jaxengine.sharding.layout import RULES
from jaxengine.sharding.rules import named_sharding

# Largest number of elements of a weight that NumPy computes.
_MOST_BY_NUMPY = 1 << 21
# Types to which NumPy and every compiler convert float32 alike.
_BY_NUMPY = frozenset(map(np.dtype, (np.float32, np.float16, jnp.bfloat16, np.uint8)))
_BYTES_MEAN, _BYTES_STD = 4 * 127.5, math.sqrt(4 * (256**2 - 1) / 12)  # moments of the sum of four random bytes


def dummy_params(
    model_abstract: CausalLM, *, seed: int = 0, mesh: Mesh | None = None, progress: Progress | None = None
) -> nnx.State:
    """Return the state of `model_abstract` with random weights that depend on `seed`.

    mesh: the mesh to split them over; None for the default device. progress: called after each weight with (bytes done,
    bytes in total, its name); None for no reports. Raises ValueError for a mesh that does not split a weight evenly.
    """
    params = list(declared_params(model_abstract))
    total = sum(param.num_bytes for param in params)
    done, made = 0, []
    for param in params:
        # Weights that differ only in their names share one compilation.
        nameless = tuple(source._replace(name="") for source in param.decl.sources)
        decl, parts = replace(param.decl, sources=nameless), num_parts(param, mesh)
        fill = (_by_numpy if _is_small(param) else _filler)(param.shape, jnp.dtype(param.dtype), decl, parts, mesh)
        made.append((param.path, param.variable.replace(fill(_tensor_keys(param, seed)))))
        done += param.num_bytes
        if progress is not None:
            progress(done, total, param.name)
    return nnx.from_flat_state(made)


def _tensor_keys(param: DeclaredParam, seed: int) -> np.ndarray:
    """Return a hash of the seed and the name of each tensor of a weight, u32[E, sources], E the matrices of a stack."""
    experts = range(1 if param.decl.num_experts is None else param.shape[0])
    names = [[f"{seed}/{tensor_name(source, expert)}" for source in param.decl.sources] for expert in experts]
    return np.array([[zlib.crc32(name.encode()) for name in row] for row in names], np.uint32)


def _is_small(param: DeclaredParam) -> bool:
    """Return whether NumPy computes a weight: it is small, and of a type of _BY_NUMPY."""
    return math.prod(param.shape) <= _MOST_BY_NUMPY and jnp.dtype(param.dtype) in _BY_NUMPY


def _by_numpy(shape: tuple[int, ...], dtype: Any, decl: ParamDecl, parts: tuple[int, ...], mesh: Mesh | None) -> Any:
    """Return a function from tensor keys to a weight of this declaration, which it computes on the host and splits over
    the mesh. parts: number of parts of each axis.
    """
    axis = decl.joined_axis
    split = tuple(count if at == axis else 1 for at, count in enumerate(parts))
    wholes = [tuple(part if at == axis else 0 for at in range(len(shape))) for part in range(parts[axis])]

    def fill(keys: np.ndarray) -> jax.Array:
        made = [_filled(np, keys, here, shape=shape, dtype=dtype, decl=decl, parts=split) for here in wholes]
        whole = np.concatenate(made, axis)
        if mesh is None or (sharding := named_sharding(mesh, decl.axes)).is_fully_addressable:
            return put(whole, decl, None if mesh is None else sharding)
        return jax.make_array_from_callback(shape, format_of(decl, sharding), whole.__getitem__)

    return fill


@cache
def _filler(shape: tuple[int, ...], dtype: Any, decl: ParamDecl, parts: tuple[int, ...], mesh: Mesh | None) -> Any:
    """Return the jitted function that maps tensor keys to a weight of this declaration, split over the mesh; results
    are cached for equal arguments. parts: number of parts of each axis.
    """
    fill = partial(_fill, shape=shape, dtype=dtype, decl=decl, parts=parts)
    if mesh is None:
        return jax.jit(fill)
    sharding = named_sharding(mesh, decl.axes)
    mapped = jax.shard_map(fill, mesh=mesh, in_specs=PartitionSpec(), out_specs=sharding.spec, check_vma=False)
    return jax.jit(mapped, out_shardings=format_of(decl, sharding))


def _fill(keys: jax.Array, *, shape: tuple[int, ...], dtype: Any, decl: ParamDecl, parts: tuple[int, ...]) -> jax.Array:
    """Return this device's part of a weight, over the mesh of the enclosing shard_map. keys: those of all experts.
    parts: number of parts of each axis.
    """
    here = [lax.axis_index(RULES[str(name)]) if count > 1 else 0 for name, count in zip(decl.axes, parts, strict=True)]
    if decl.num_experts is not None:
        size = shape[0] // parts[0]
        keys = lax.dynamic_slice_in_dim(keys, here[0] * size, size)
    return _filled(jnp, keys, here, shape=shape, dtype=dtype, decl=decl, parts=parts)


def _filled(
    xp: Any,
    keys: Any,
    here: Sequence[Any],
    *,
    shape: tuple[int, ...],
    dtype: Any,
    decl: ParamDecl,
    parts: tuple[int, ...],
) -> Any:
    """Return a part of a weight in its shape [shape / parts], computed from `_tensor_keys`, u32[experts, sources]: the
    numbers of `_drawn`, random bytes for uint8, and zeros for padding.

    xp: numpy or jax.numpy. keys: those of the part's experts. here: number of the part on each axis. parts: number of
    parts of each axis.
    """
    sizes = [size // count for size, count in zip(shape, parts, strict=True)]
    joined, axis = decl.joined_axis, column_axis(decl)
    columns = xp.zeros(1, xp.uint32) if axis is None else _numbers(xp, here[axis], sizes[axis])
    blocks = []
    for number, source in enumerate(decl.sources):
        contributed = _numbers(xp, here[joined], source.num_contributed // parts[joined])
        rows = _mixed(keys[:, number, None] ^ _mixed(source_row(source, contributed)))
        # Like a checkpoint's tensor, [experts, rows, columns].
        bits = _mixed(rows[:, :, None] ^ _mixed(columns))
        drawn = (bits & 0xFF) if dtype == xp.uint8 else _drawn(xp, bits, decl)
        padding = contributed >= source.rows * source.repeat
        blocks.append(xp.where(padding[:, None], 0, drawn).astype(dtype))
    weight = xp.concatenate(blocks, axis=1)
    return (weight.swapaxes(1, 2) if decl.transposed else weight).reshape(sizes)


def _numbers(xp: Any, part: Any, size: int) -> Any:
    """Return the indices u32[size] of the elements of part number `part`, whose parts have `size` elements each."""
    return xp.uint32(part) * xp.uint32(size) + xp.arange(size, dtype=xp.uint32)


def _drawn(xp: Any, bits: Any, decl: ParamDecl) -> Any:
    """Return f32[...] for random bits u32[...]: the constant init_value if init_std is None, otherwise nearly normal
    numbers with that deviation. A sum of four random bytes is the same on every platform.
    """
    if (std := decl.init_std) is None:
        return xp.full(bits.shape, decl.init_value, xp.float32)
    total = (bits & 0xFF) + (bits >> 8 & 0xFF) + (bits >> 16 & 0xFF) + (bits >> 24)
    return (total.astype(xp.float32) - _BYTES_MEAN) * xp.float32(std / _BYTES_STD)


def _mixed(x: Any) -> Any:
    """Return a hash of each of 32-bit numbers x (the finaliser of MurmurHash3, Appleby 2011)."""
    x = (x ^ (x >> 16)) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * np.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
