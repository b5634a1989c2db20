"""Numbers of 64 bits as pairs of 32-bit words, since jax has none without x64: products of token ids and their
remainders, by which n-grams find rows of tables.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

Words = tuple[jax.Array, jax.Array]


def product_of_ids(ids: jax.Array, factor: int) -> Words:
    """Return the high and the low words, u32[T] each, of the products of ids u32[T] and a factor from 0 to 2**64 - 1.
    Of products of 2**64 and more they are the last 64 bits.
    """
    half = jnp.uint32(0xFFFF)
    parts = [jnp.uint32(factor >> shift & 0xFFFF) for shift in (0, 16)]
    low, high = ids & half, ids >> 16
    first = low * parts[0]
    second = high * parts[0] + (first >> 16)
    third = low * parts[1] + (second & half)
    upper = high * parts[1] + (second >> 16) + (third >> 16) + ids * jnp.uint32(factor >> 32)
    return upper, third << 16 | first & half


def remainders(number: Words, sizes: Sequence[int]) -> jax.Array:
    """Return the remainders i32[T, P] of numbers, high and low words u32[T] each, divided by P sizes from 1 to 2**31 -
    1. Digits of a number are taken in one after the other, of as many bits as keep each dividend below 2**32.
    """
    room = 32 - max(sizes).bit_length()
    bits = max(each for each in (1, 2, 4, 8, 16) if each <= room)
    divisors = jnp.asarray(sizes, jnp.uint32)
    left = jnp.zeros((number[0].shape[0], len(sizes)), jnp.uint32)
    for word in number:
        for shift in range(32 - bits, -1, -bits):
            digit = word >> shift & jnp.uint32((1 << bits) - 1)
            left = (left << bits | digit[:, None]) % divisors
    return left.astype(jnp.int32)
