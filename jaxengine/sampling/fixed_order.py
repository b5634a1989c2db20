"""Sums over the vocabulary whose rounding is the same whatever the number of rows, of devices and of padding columns.

A row's jnp.sum changes in its last bit with the shape of the whole array. Here every addition is an elementwise one,
and only the columns of two operands decide where they are added: zeros after the row's end change nothing. Devices that
share the rows, [S, V / n] on each, exchange the sums of blocks; each block is whole on one device.
"""

from __future__ import annotations

import functools
import operator

import jax
import jax.numpy as jnp
from jax import lax

from jaxengine.sharding.collectives import gather_parts, sum_parts
from jaxengine.sharding.layout import VOCAB_BLOCK

# Logical axis of a row's tokens.
VOCAB = "sampled_vocab"
BLOCK = VOCAB_BLOCK
# Operands added in one kernel: enough that there are few kernels, as compile time depends on their number.
_FAN_IN = 8


def block_sums(x: jax.Array) -> jax.Array:
    """Return the sums of consecutive blocks of BLOCK tokens of each row over the whole vocabulary: [S, V / n] -> [S,
    ceil(V / BLOCK)].

    n devices share the vocabulary, and each returns all the sums. A last, shorter block is filled with zeros.
    """
    sums = _add_neighbours(_add_neighbours(x, _FAN_IN), BLOCK // _FAN_IN)
    return gather_parts(sums, VOCAB, dimension=1)


def row_sums(x: jax.Array) -> jax.Array:
    """Return the sum of each row over the whole vocabulary: [S, V / n] -> [S, 1], the same on each of the n devices
    that share the vocabulary, added in an order that depends on neither S nor n.
    """
    x = block_sums(x)
    while x.shape[1] > 1:
        x = _add_neighbours(x, _FAN_IN)
    return x


def row_counts(mask: jax.Array) -> jax.Array:
    """Return how many entries of each row are True over the whole vocabulary: bool[S, V / n] -> i32[S, 1], the same on
    each of the n devices. Integer sums need no fixed order.
    """
    return sum_parts(jnp.sum(mask.astype(jnp.int32), axis=1, keepdims=True), VOCAB)


def running_sums(x: jax.Array) -> jax.Array:
    """Return the sums up to and including each column, [S, C] -> [S, C]. Every device has the whole rows.

    The additions follow Hillis and Steele 1986. The order in which jnp.cumsum adds depends on C and, on a GPU, differs
    from run to run.
    """
    distance = 1
    while distance < x.shape[1]:
        x = x + lax.pad(x, jnp.zeros((), x.dtype), ((0, 0, 0), (distance, -distance, 0)))
        distance *= 2
    return x


def _add_neighbours(x: jax.Array, num: int) -> jax.Array:
    """Return the sum of every `num` consecutive columns: [S, C] -> [S, ceil(C / num)]. Missing columns of the last sum
    count as zeros.
    """
    x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % num)))
    return functools.reduce(operator.add, [x[:, first::num] for first in range(num)])
