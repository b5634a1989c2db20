"""What a layer does about being split over devices: gather tokens, add partial sums. On one device, nothing.

The whole step runs under one `jax.shard_map` (jaxengine.runner): every array in it is the device's own part and
every exchange between devices is written down, here, so that what the compiler put in can be counted. The mesh is the
ambient one; axes are the logical ones of sharding.layout.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
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


def keep_tokens(x: jax.Array, axis: str, part: str) -> jax.Array:
    """Of x, gathered for `axis`, what `gather_tokens` would give for `part`, whose devices are some of the axis's."""
    over = tuple(name for name in _other_tokens(axis) if name not in _other_tokens(part))
    size = x.shape[0] // lax.axis_size(over) if over else 0
    return lax.dynamic_slice_in_dim(x, lax.axis_index(over) * size, size) if over else x


def scatter_tokens(x: jax.Array, axis: str) -> jax.Array:
    """The sums of partial results [n * T, ...] over devices with other tokens: each keeps its own, [T, ...]."""
    over = _other_tokens(axis)
    return lax.psum_scatter(x, over, scatter_dimension=0, tiled=True) if over else x


def sum_same_tokens(x: jax.Array, axis: str) -> jax.Array:
    """The sum of partial results [T, ...] over the devices that hold parts of `axis` and the same tokens."""
    over = _same_tokens(axis)
    return lax.psum(x, over) if over else x


def reduce_tokens(x: jax.Array, axis: str) -> jax.Array:
    """The sum of partial results [n * T, ...] over the devices that hold parts of `axis`; each keeps its own tokens.

    The counterpart of `gather_tokens`.
    """
    return sum_same_tokens(scatter_tokens(x, axis), axis)


def largest_of_parts(x: jax.Array, axis: str) -> jax.Array:
    """The largest values over the devices that hold parts of `axis`, which have the same tokens."""
    over = split_over(axis)
    return lax.pmax(x, over) if over else x


def gather_parts(x: jax.Array, axis: str, *, dimension: int) -> jax.Array:
    """x with dimension `dimension`, which is split over `axis` among devices with the same tokens, whole."""
    over = split_over(axis)
    return lax.all_gather(x, over, axis=dimension, tiled=True) if over else x


def exchange_tokens(x: jax.Array, axis: str) -> jax.Array:
    """x [n * T, C], columns of the tokens of all devices, to [T, n * C], more columns of the device's own tokens."""
    over = _other_tokens(axis)
    return lax.all_to_all(x, over, split_axis=0, concat_axis=1, tiled=True) if over else x


def share_tokens(x: jax.Array, axis: str, *, fill: Any = 0) -> jax.Array:
    """This device's share of x [T, ...] among the n that hold parts of `axis` and the same tokens, [ceil(T / n), ...].

    The last shares are filled up with `fill`.
    """
    over = _same_tokens(axis)
    if not over:
        return x
    share = -(-x.shape[0] // lax.axis_size(over))
    missing = share * lax.axis_size(over) - x.shape[0]
    x = jnp.pad(x, ((0, missing), *((0, 0),) * (x.ndim - 1)), constant_values=fill)
    return lax.dynamic_slice_in_dim(x, lax.axis_index(over) * share, share)


def join_tokens(x: jax.Array, axis: str, num_tokens: int) -> jax.Array:
    """The shares of all those devices, [num_tokens, ...]. The counterpart of `share_tokens`."""
    over = _same_tokens(axis)
    return lax.all_gather(x, over, axis=0, tiled=True)[:num_tokens] if over else x


def exchange_rows(x: jax.Array, out: jax.Array, sizes: jax.Array, axis: str, *, back: bool = False) -> jax.Array:
    """Rows to the devices that hold their groups, or back to where they came from: a ragged all-to-all.

    The parts of `axis`, on n > 1 devices, are G / n groups each, in order. A sender's rows are sorted by group; those
    that a device gets are sorted by group, and within a group by sender.

    Args:
      x: [N, ...], a sender's rows or, with `back`, those that it got; what follows them goes nowhere.
      out: [M, ...], what there is where no row lands. A device may get at most M rows.
      sizes: i32[n, G], rows that each device has for each group; the same on all devices.

    Returns [M, ...].

    XLA:CPU has no such exchange; there devices exchange as many rows as there could be, all equally many.
    """
    over = split_over(axis)
    devices, groups = sizes.shape
    me, own = lax.axis_index(over), groups // devices
    # Where a device's rows of a group begin: with itself, and with the group's device.
    sent = jnp.cumsum(sizes, axis=1) - sizes
    by_group = sizes.T.reshape(devices, own * devices)
    got = (jnp.cumsum(by_group, axis=1) - by_group).reshape(groups, devices).T

    def of_me(table: jax.Array) -> jax.Array:
        return table[me]

    def for_me(table: jax.Array) -> jax.Array:
        return lax.dynamic_slice_in_dim(table, me * own, own, axis=1).ravel()

    # Both have a slice for each device and each of the groups of the one that gets it.
    mine, theirs = (for_me, of_me) if back else (of_me, for_me)
    first, then = (got, sent) if back else (sent, got)

    def ragged(x: jax.Array, out: jax.Array) -> jax.Array:
        return lax.ragged_all_to_all(x, out, mine(first), mine(sizes), mine(then), theirs(sizes), axis_name=over)

    def padded(x: jax.Array, out: jax.Array) -> jax.Array:
        most = min(x.shape[0], out.shape[0])  # rows that a device can have for another one

        def packed(sizes: jax.Array) -> jax.Array:
            """Where slices begin when those for each device are put together, `most` rows for each."""
            sizes = sizes.reshape(devices, own)
            part = jnp.arange(devices, dtype=jnp.int32)[:, None] * most
            return (part + jnp.cumsum(sizes, axis=1) - sizes).ravel()

        with jax.named_scope("ragged_all_to_all"):
            parts = jnp.zeros((devices * most, *x.shape[1:]), x.dtype)
            parts = _copy_slices(x, parts, mine(first), mine(sizes), packed(mine(sizes)))
            parts = lax.all_to_all(parts, over, split_axis=0, concat_axis=0, tiled=True)
            return _copy_slices(parts, out, packed(theirs(sizes)), theirs(sizes), theirs(then))

    return lax.platform_dependent(x, out, cpu=padded, tpu=ragged)


def stack_parts(x: jax.Array, axis: str) -> jax.Array:
    """x of every device that holds a part of `axis`, [parts, ...]."""
    over = split_over(axis)
    return lax.all_gather(x, over, axis=0) if over else x[None]


def stack_ranks(x: jax.Array) -> jax.Array:
    """x of every rank, [ranks, ...], on all devices."""
    return stack_parts(x, "batch")


def sum_parts(x: jax.Array, axis: str) -> jax.Array:
    """The sum of x over the parts of `axis`."""
    over = split_over(axis)
    return lax.psum(x, over) if over else x


def any_device(predicate: jax.Array) -> jax.Array:
    """Whether each holds anywhere on the mesh, bool[...]: devices that exchange data must take the same branch."""
    over = tuple(name for name, size in jax.sharding.get_abstract_mesh().shape.items() if size > 1)
    return lax.psum(predicate.astype("int32"), over) > 0 if over else predicate


def _other_tokens(axis: str) -> tuple[str, ...]:
    return tuple(name for name in split_over(axis) if name in RULES["batch"])


def _copy_slices(x: jax.Array, out: jax.Array, first: jax.Array, sizes: jax.Array, then: jax.Array) -> jax.Array:
    """out [M, ...] with slices of x [N, ...]: of each, sizes[i] rows from first[i] on, at then[i]."""
    place = jnp.arange(out.shape[0], dtype=jnp.int32)[:, None]
    covers = (place >= then) & (place < then + sizes)
    source = jnp.sum(jnp.where(covers, first + place - then, 0), axis=1)
    covered = jnp.any(covers, axis=1).reshape(-1, *(1,) * (out.ndim - 1))
    return jnp.where(covered, x[source], out)


def _same_tokens(axis: str) -> tuple[str, ...]:
    return tuple(name for name in split_over(axis) if name not in RULES["batch"])
