"""What a layer does about being split over devices: gather tokens, add partial sums. On one device, nothing.

The whole step runs under one `jax.shard_map` (jaxengine.step_programs): every array in it is the device's own part and
every exchange between devices is written down, here, so that what the compiler put in can be counted. The mesh is the
ambient one; axes are the logical ones of sharding.layout.
"""

from __future__ import annotations

from typing import Any

import jax
from jax import lax

from sharding.layout import RULES


def split_over(axis: str) -> tuple[str, ...]:
    """The mesh axes of more than one device over which a logical axis is split."""
    sizes = dict(jax.sharding.get_abstract_mesh().shape)
    return tuple(name for name in RULES[axis] if sizes.get(name, 1) > 1)


def num_shards(axis: str) -> int:
    """Parts into which a logical axis is split."""
    over = split_over(axis)
    return lax.axis_size(over) if over else 1


def shard_index(axis: str) -> Any:
    """Which part of a logical axis this device holds: 0, or i32[]."""
    over = split_over(axis)
    return lax.axis_index(over) if over else 0


def gather_tokens(x: jax.Array, axis: str) -> jax.Array:
    """x [T, ...] with the tokens of all devices that hold parts of `axis`, [n * T, ...]; most hold the same tokens."""
    over = _other_tokens(axis)
    return lax.all_gather(x, over, axis=0, tiled=True) if over else x


def reduce_tokens(x: jax.Array, axis: str) -> jax.Array:
    """The sum of partial results [n * T, ...] over the devices that hold parts of `axis`; each keeps its own tokens.

    The counterpart of `gather_tokens`.
    """
    scattered = _other_tokens(axis)
    summed = tuple(name for name in split_over(axis) if name not in scattered)
    x = lax.psum(x, summed) if summed else x
    return lax.psum_scatter(x, scattered, scatter_dimension=0, tiled=True) if scattered else x


def gather_parts(x: jax.Array, axis: str, *, dimension: int) -> jax.Array:
    """x with dimension `dimension`, which is split over `axis` among devices with the same tokens, whole."""
    over = split_over(axis)
    return lax.all_gather(x, over, axis=dimension, tiled=True) if over else x


def exchange_tokens(x: jax.Array, axis: str) -> jax.Array:
    """x [n * T, C], columns of the tokens of all devices, to [T, n * C], more columns of the device's own tokens."""
    over = _other_tokens(axis)
    return lax.all_to_all(x, over, split_axis=0, concat_axis=1, tiled=True) if over else x


def sum_parts(x: jax.Array, axis: str) -> jax.Array:
    """The sum of x over the parts of `axis`."""
    over = split_over(axis)
    return lax.psum(x, over) if over else x


def stack_ranks(x: jax.Array) -> jax.Array:
    """x of every rank, [ranks, ...], on all devices."""
    over = split_over("batch")
    return lax.all_gather(x, over, axis=0) if over else x[None]


def any_device(predicate: jax.Array) -> jax.Array:
    """Whether it holds anywhere on the mesh, bool[]: devices that exchange data must take the same branch."""
    over = tuple(name for name, size in jax.sharding.get_abstract_mesh().shape.items() if size > 1)
    return lax.psum(predicate.astype("int32"), over) > 0 if over else predicate


def _other_tokens(axis: str) -> tuple[str, ...]:
    return tuple(name for name in split_over(axis) if name in RULES["batch"])
