"""Collectives of layers that are split over devices: gather tokens, add partial sums. On one device they do nothing.

The entire step runs under one `jax.shard_map` (jaxengine.runner): every array in it is the device's own part, and every
exchange between devices is written here, so that those that the compiler adds can be counted. The mesh is the ambient
one; axes are the logical ones of jaxengine.sharding.layout.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxengine.sharding.layout import RULES


def split_over(axis: str) -> tuple[str, ...]:
    """Return the names of the mesh axes of more than one device over which `jax.shard_map` splits a logical axis.

    Mesh axes over which XLA itself splits arrays do not count. Raises KeyError for an axis that RULES lacks, as do all
    functions here that take one.
    """
    mesh = jax.sharding.get_abstract_mesh()
    sizes = {name: mesh.shape[name] for name in mesh.manual_axes}
    return tuple(name for name in RULES[axis] if sizes.get(name, 1) > 1)


def num_shards(axis: str) -> int:
    """Return the number of parts into which a logical axis is split (`split_over`); 1 if it is whole."""
    over = split_over(axis)
    return lax.axis_size(over) if over else 1


def shard_index(axis: str) -> Any:
    """Return the index of this device's part of a logical axis: 0 if the axis is whole, else i32 []."""
    over = split_over(axis)
    return lax.axis_index(over) if over else 0


def gather_tokens(x: jax.Array, axis: str) -> jax.Array:
    """All-gather x [T, ...] over the n replicas whose devices hold parts of `axis`: return [n * T, ...], in replica
    order.

    Devices of one replica have the same tokens and exchange none. Returns x itself if there is one such replica.
    """
    over = _other_tokens(axis)
    return lax.all_gather(x, over, axis=0, tiled=True) if over else x


def keep_tokens(x: jax.Array, axis: str, part: str) -> jax.Array:
    """Return the rows of x [T, ...], the result of `gather_tokens` for `axis`, that `gather_tokens` for `part` would
    return: [T / n, ...]. `part` must be split over fewer replicas.
    """
    over = tuple(name for name in _other_tokens(axis) if name not in _other_tokens(part))
    size = x.shape[0] // lax.axis_size(over) if over else 0
    return lax.dynamic_slice_in_dim(x, lax.axis_index(over) * size, size) if over else x


def scatter_tokens(x: jax.Array, axis: str) -> jax.Array:
    """Sum partial results x [n * T, ...] over the n replicas whose devices hold parts of `axis`, and return the rows of
    this replica's own tokens, [T, ...] (a reduce-scatter). Returns x itself if there is one such replica.
    """
    over = _other_tokens(axis)
    return lax.psum_scatter(x, over, scatter_dimension=0, tiled=True) if over else x


def sum_same_tokens(x: jax.Array, axis: str) -> jax.Array:
    """Sum partial results x [T, ...] elementwise over the devices that hold parts of `axis` and the same tokens: return
    [T, ...], equal on all of them.
    """
    over = _same_tokens(axis)
    return lax.psum(x, over) if over else x


def reduce_tokens(x: jax.Array, axis: str) -> jax.Array:
    """Sum partial results x [n * T, ...] of gathered tokens (`gather_tokens`) over all devices that hold parts of
    `axis`, and return the rows of this replica's own tokens, [T, ...]: `scatter_tokens`, then `sum_same_tokens`.
    """
    return sum_same_tokens(scatter_tokens(x, axis), axis)


def largest_of_parts(x: jax.Array, axis: str) -> jax.Array:
    """Return the elementwise maximum of x over the devices that hold parts of `axis`, which must have the same
    tokens.
    """
    over = split_over(axis)
    return lax.pmax(x, over) if over else x


def gather_parts(x: jax.Array, axis: str, *, dimension: int) -> jax.Array:
    """All-gather x, which is split along `dimension` over the n devices that hold parts of `axis` and have the same
    tokens. The result is n times as long along that dimension. Returns x itself if the axis is whole.
    """
    over = split_over(axis)
    return lax.all_gather(x, over, axis=dimension, tiled=True) if over else x


def exchange_tokens(x: jax.Array, axis: str) -> jax.Array:
    """Transpose x [n * T, C], C columns of the tokens of n replicas, to [T, n * C], all columns of this replica's
    own tokens (an all-to-all). The replicas are those whose devices hold parts of `axis`. Returns x itself for one
    replica.
    """
    over = _other_tokens(axis)
    return lax.all_to_all(x, over, split_axis=0, concat_axis=1, tiled=True) if over else x


def share_tokens(x: jax.Array, axis: str, *, fill: Any = 0) -> jax.Array:
    """Return this device's share of x [T, ...], whose rows are divided among the n devices that hold parts of `axis`
    and the same tokens: [ceil(T / n), ...].

    The last shares are padded with `fill`. Returns x itself if there is one such device.
    """
    over = _same_tokens(axis)
    if not over:
        return x
    share = -(-x.shape[0] // lax.axis_size(over))
    missing = share * lax.axis_size(over) - x.shape[0]
    x = jnp.pad(x, ((0, missing), *((0, 0),) * (x.ndim - 1)), constant_values=fill)
    return lax.dynamic_slice_in_dim(x, lax.axis_index(over) * share, share)


def join_tokens(x: jax.Array, axis: str, num_tokens: int) -> jax.Array:
    """All-gather the shares x [ceil(num_tokens / n), ...] that `share_tokens` returned for the same axis, and return
    them without their padding: [num_tokens, ...], equal on all of the devices. Returns x itself if there is one device.
    """
    over = _same_tokens(axis)
    return lax.all_gather(x, over, axis=0, tiled=True)[:num_tokens] if over else x


def exchange_rows(x: jax.Array, out: jax.Array, sizes: jax.Array, axis: str, *, back: bool = False) -> jax.Array:
    """Send rows to the devices that hold their groups, or back to their senders: a ragged all-to-all.

    The parts of `axis`, on n > 1 devices, are G / n groups each, in order. A sender's rows are sorted by group;
    received rows are sorted by group, and within a group by sender.

    Args:
      x: [N, ...], a sender's rows or, with `back`, the rows that it received; rows after them are not sent.
      out: [M, ...], initial values, which remain where no row is received. A device may receive at most M rows.
      sizes: i32 [n, G], rows that each device has for each group; the same on all devices.
      back: whether to send received rows back to their senders.

    Returns [M, ...].

    Compiles for TPUs and CPUs only. XLA:CPU has no such exchange; there every pair of devices exchanges the largest
    possible number of rows.
    """
    over = split_over(axis)
    devices, groups = sizes.shape
    me, own = lax.axis_index(over), groups // devices
    # Offsets of a device's rows of a group: on that device, and on the group's device.
    sent = jnp.cumsum(sizes, axis=1) - sizes
    by_group = sizes.T.reshape(devices, own * devices)
    got = (jnp.cumsum(by_group, axis=1) - by_group).reshape(groups, devices).T

    def of_me(table: jax.Array) -> jax.Array:
        return table[me]

    def for_me(table: jax.Array) -> jax.Array:
        return lax.dynamic_slice_in_dim(table, me * own, own, axis=1).ravel()

    # Both have a slice for each device and each of the groups of the receiver.
    mine, theirs = (for_me, of_me) if back else (of_me, for_me)
    first, then = (got, sent) if back else (sent, got)

    def ragged(x: jax.Array, out: jax.Array) -> jax.Array:
        return lax.ragged_all_to_all(x, out, mine(first), mine(sizes), mine(then), theirs(sizes), axis_name=over)

    def padded(x: jax.Array, out: jax.Array) -> jax.Array:
        most = min(x.shape[0], out.shape[0])  # most rows that one device can send to another

        def packed(sizes: jax.Array) -> jax.Array:
            """Return the offsets i32 [n] of slices of `sizes` i32 [n] rows, packed by device, `most` rows for each."""
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
    """Return x [...] of every device that holds a part of `axis`, stacked: [parts, ...], the same on all of them."""
    over = split_over(axis)
    return lax.all_gather(x, over, axis=0) if over else x[None]


def stack_ranks(x: jax.Array) -> jax.Array:
    """Return x [...] of every replica, stacked: [replicas, ...], the same on all devices."""
    return stack_parts(x, "batch")


def sum_parts(x: jax.Array, axis: str) -> jax.Array:
    """Return the elementwise sum of x [...] over all devices that hold a part of `axis`: the same shape, equal on all
    of them.
    """
    over = split_over(axis)
    return lax.psum(x, over) if over else x


def any_device(predicate: jax.Array) -> jax.Array:
    """Return bool [...], whether each element of `predicate` bool [...] holds on any device of the mesh: devices that
    exchange data must take the same branch.
    """
    mesh = jax.sharding.get_abstract_mesh()
    over = tuple(name for name in mesh.manual_axes if mesh.shape[name] > 1)
    return lax.psum(predicate.astype("int32"), over) > 0 if over else predicate


def _other_tokens(axis: str) -> tuple[str, ...]:
    """Return those mesh axes of `split_over` along which devices have different tokens."""
    return tuple(name for name in split_over(axis) if name in RULES["batch"])


def _copy_slices(x: jax.Array, out: jax.Array, first: jax.Array, sizes: jax.Array, then: jax.Array) -> jax.Array:
    """Return out [M, ...] with slices of x [N, ...] copied into it: sizes[i] rows from first[i] on, to then[i] on.
    Other rows of `out` are unchanged.
    """
    row = jnp.arange(out.shape[0], dtype=jnp.int32)[:, None]
    covers = (row >= then) & (row < then + sizes)
    source = jnp.sum(jnp.where(covers, first + row - then, 0), axis=1)
    covered = jnp.any(covers, axis=1).reshape(-1, *(1,) * (out.ndim - 1))
    return jnp.where(covered, x[source], out)


def _same_tokens(axis: str) -> tuple[str, ...]:
    """Return those mesh axes of `split_over` along which devices have the same tokens."""
    return tuple(name for name in split_over(axis) if name not in RULES["batch"])
