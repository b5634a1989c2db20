"""Epilogues of grouped products: adding a bias, and activating gates and ups that are in the same rows.

Contains these steps as separate operations, for platforms without a kernel that fuses them, and chooses between the
two. The activation is an argument.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxengine.pallas_kernels.registry import adds_bias, kernel, kernel_kind, platform_rows

logger = logging.getLogger(__name__)

# (gate, up) to the activated result, all f32[M, F].
Gating = Callable[[jax.Array, jax.Array], jax.Array]


def biased_products(op: str, products: Mapping[str, Callable[..., jax.Array]]) -> dict[str, Callable[..., jax.Array]]:
    """Return implementations, by platform, of `op` with a bias: the platform's kernel if it adds biases itself, else
    its product followed by `biased`.

    They take the operands of the product, the last of which is the group sizes, then a bias [G, out] or None. products:
    the implementations by platform; those of kernels that add biases take the bias as their last operand, the others no
    bias.
    """

    def product_then_bias(product: Callable[..., jax.Array], *operands: Any) -> jax.Array:
        *_, group_sizes, bias = operands
        return biased(product(*operands[:-1]), group_sizes, bias)

    return {
        platform: products[platform] if adds_bias(op, row) else partial(product_then_bias, products[platform])
        for platform, row in platform_rows().items()
    }


def check_bias(name: str, num_groups: int, out: int, bias: jax.Array | None) -> None:
    """Raise ValueError, naming operation `name`, unless the bias is None or [num_groups, out]."""
    if bias is not None and bias.shape != (num_groups, out):
        raise ValueError(f"{name}: bias must be {(num_groups, out)} or None, got {bias.shape}")


def gated_products(
    op: str, products: Mapping[str, Callable[..., jax.Array]], activation: Gating, out_dtype: Any, **options: Any
) -> dict[str, Callable[..., jax.Array]]:
    """Return implementations of gated `op`, by platform: the registry's kernel if there is one, else the product
    followed by `activated`.

    They take the operands of the product, the last of which is the group sizes, then a bias [G, 2 F] or None, and
    return [M, F] in out_dtype. products: the implementations by platform, without a bias. options: further arguments of
    the registry's kernels.
    """

    def product_then_activation(product: Callable[..., jax.Array], *operands: Any) -> jax.Array:
        *_, group_sizes, bias = operands
        return activated(product(*operands[:-1]), group_sizes, bias, activation, out_dtype)

    return {
        platform: partial(kernel(op, row), activation=activation, out_dtype=out_dtype, **options)
        if kernel_kind(op, row) is not None
        else partial(product_then_activation, products[platform])
        for platform, row in platform_rows().items()
    }


def check_halves(name: str, num_groups: int, out: int, bias: jax.Array | None) -> None:
    """Raise ValueError, naming operation `name`, unless `out` is even, for gates and ups, and the bias is None or
    [num_groups, out].
    """
    if out % 2 or (bias is not None and bias.shape != (num_groups, out)):
        got = None if bias is None else bias.shape
        raise ValueError(f"{name}: outputs must be even, and bias {(num_groups, out)} or None, got {out} and {got}")


@functools.cache
def say_once(size: int, width: int, why: str) -> None:
    """Log, at level INFO and once per process for each size, width and reason, why products with gates and ups
    [size, 2 * width] are not fused with their activation.
    """
    text = "gate and up [%d, 2 x %d] are multiplied, and then activated from memory: %s"
    logger.info(text, size, width, why)


def activated(
    y: jax.Array, group_sizes: jax.Array, bias: jax.Array | None, activation: Gating, out_dtype: Any
) -> jax.Array:
    """Return activation(gate, up), where gate and up are the halves of y [M, 2 F] plus the bias [G, 2 F] of each row's
    group: [M, F] in out_dtype, computed in float32.

    group_sizes: i32 [G], consecutive rows of each group; rows after the last get no bias. bias may be None.
    """
    y = y if bias is None else y + rows_of_groups(bias, group_sizes, len(y))
    # XLA:TPU would store all of `y` in float32 before it is split.
    gate, up = (part.astype(jnp.float32) for part in jnp.split(y, 2, axis=-1))
    return activation(gate, up).astype(out_dtype)


def biased(y: jax.Array, group_sizes: jax.Array, bias: jax.Array | None) -> jax.Array:
    """Return y [M, out] plus the bias [G, out] of each row's group, in y's dtype. Rows of no group are unchanged.

    group_sizes: i32 [G], consecutive rows of each group. bias may be None.
    """
    return y if bias is None else (y + rows_of_groups(bias, group_sizes, len(y))).astype(y.dtype)


def rows_of_groups(table: jax.Array, group_sizes: jax.Array, num_rows: int) -> jax.Array:
    """Return, for each of M = num_rows rows, the row of a table [G, F] for its group: f32 [M, F], zeros for rows after
    the last group.

    group_sizes: i32 [G], consecutive rows of each group.
    """
    # Compared rather than searched: a search is a loop of its own.
    group = jnp.sum(jnp.arange(num_rows)[:, None] >= jnp.cumsum(group_sizes), axis=1, dtype=jnp.int32)
    return table.at[group].get(mode="fill", fill_value=0).astype(jnp.float32)
