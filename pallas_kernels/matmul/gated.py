"""What is made of the product of rows with their group's matrix: a bias added, gates and ups side by side activated.

Owns these steps apart from the product, as every platform without a kernel of both does them, and which platforms have
one. Knows no activation.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.registry import ADDS_BIAS, KERNELS, PLATFORM_ROWS, kernel

logger = logging.getLogger(__name__)

# Of gate and up, both and the result f32[M, F].
Gating = Callable[[jax.Array, jax.Array], jax.Array]


def biased_products(op: str, products: Mapping[str, Callable[..., jax.Array]]) -> dict[str, Callable[..., jax.Array]]:
    """What each platform has for `op` with a bias: the kernel of its row, or its product, of these, and then the sum.

    All take the products' operands, the last of which are group sizes, and a bias [G, out]; None for none.
    """

    def apart(product: Callable[..., jax.Array], *operands: Any) -> jax.Array:
        *_, group_sizes, bias = operands
        return biased(product(*operands[:-1]), group_sizes, bias)

    return {
        platform: products[platform] if (op, row) in ADDS_BIAS else partial(apart, products[platform])
        for platform, row in PLATFORM_ROWS.items()
    }


def check_bias(name: str, num_groups: int, out: int, bias: jax.Array | None) -> None:
    """Raise ValueError where a bias is not one of `out` outputs of each group."""
    if bias is not None and bias.shape != (num_groups, out):
        raise ValueError(f"{name}: bias must be {(num_groups, out)} or None, got {bias.shape}")


def gated_products(
    op: str, products: Mapping[str, Callable[..., jax.Array]], activation: Gating, out_dtype: Any, **options: Any
) -> dict[str, Callable[..., jax.Array]]:
    """What each platform has for `op`: the kernel of its row, or its product, of these, and then `activated`.

    All take the products' operands, the last of which are group sizes, and a bias. options: what kernels take besides.
    """

    def apart(product: Callable[..., jax.Array], *operands: Any) -> jax.Array:
        *_, group_sizes, bias = operands
        return activated(product(*operands[:-1]), group_sizes, bias, activation, out_dtype)

    return {
        platform: partial(kernel(op, row), activation=activation, out_dtype=out_dtype, **options)
        if (op, row) in KERNELS
        else partial(apart, products[platform])
        for platform, row in PLATFORM_ROWS.items()
    }


def check_halves(name: str, num_groups: int, out: int, bias: jax.Array | None) -> None:
    """Raise ValueError where `out` outputs are no gates and ups, or the bias is not one of these."""
    if out % 2 or (bias is not None and bias.shape != (num_groups, out)):
        got = None if bias is None else bias.shape
        raise ValueError(f"{name}: outputs must be even, and bias {(num_groups, out)} or None, got {out} and {got}")


@functools.cache
def say_once(size: int, width: int, why: str) -> None:
    text = "gate and up [%d, 2 x %d] are multiplied, and then activated from memory: %s"
    logger.info(text, size, width, why)


def activated(
    y: jax.Array, group_sizes: jax.Array, bias: jax.Array | None, activation: Gating, out_dtype: Any
) -> jax.Array:
    """activation(gate, up) of y [M, 2 F] with the bias [G, 2 F] of each row's group: [M, F] in out_dtype."""
    y = y if bias is None else y + rows_of_groups(bias, group_sizes, len(y))
    # XLA:TPU would store all of `y` in float32 before it is split.
    gate, up = (part.astype(jnp.float32) for part in jnp.split(y, 2, axis=-1))
    return activation(gate, up).astype(out_dtype)


def biased(y: jax.Array, group_sizes: jax.Array, bias: jax.Array | None) -> jax.Array:
    """y [M, out] with the bias [G, out] of each row's group, in y's dtype; zeros stay behind the last group."""
    return y if bias is None else (y + rows_of_groups(bias, group_sizes, len(y))).astype(y.dtype)


def rows_of_groups(table: jax.Array, group_sizes: jax.Array, num_rows: int) -> jax.Array:
    """The row of a table [G, F] that each of `num_rows` rows' group has, f32[M, F]; zeros behind the last group."""
    # Compared rather than searched: a search is a loop of its own.
    group = jnp.sum(jnp.arange(num_rows)[:, None] >= jnp.cumsum(group_sizes), axis=1, dtype=jnp.int32)
    return table.at[group].get(mode="fill", fill_value=0).astype(jnp.float32)
