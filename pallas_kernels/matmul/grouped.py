"""Products of groups of rows, each with a matrix of its own (mixtures of experts): the public operations.

Checks the arguments and chooses the implementation. Why rows form groups does not matter here.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxengine.pallas_kernels.matmul.gated import Gating, biased_products, check_bias, check_halves, gated_products
from jaxengine.pallas_kernels.registry import UNPAGED, group_kernel, kernel, platform_rows


def grouped_matmul(
    x: jax.Array, w: jax.Array, group_sizes: jax.Array, bias: jax.Array | None = None, *, out_dtype: Any = None
) -> jax.Array:
    """Multiply every row of x by the matrix of its group, summed in float32: return [M, out] in `out_dtype` (default:
    x's).

    Rows are sorted by group; rows after those of the last group give exactly 0, whatever x holds there.

    The implementation is chosen when the program is compiled, by the platform it is compiled for.

    Args:
      x: [M, in], bfloat16 or float32.
      w: [G, in, out] in x's dtype.
      group_sizes: i32 [G], rows of each group; their sum is at most M.
      bias: [G, out], added to the rows of each group, or None. Kernels that add it themselves round once;
        elsewhere it is added to the rounded product.

    Raises ValueError if shapes or dtypes do not fit together.
    """
    _check("grouped_matmul", x, w, group_sizes)
    check_bias("grouped_matmul", len(w), w.shape[2], bias)
    out_dtype = jnp.dtype(x.dtype if out_dtype is None else out_dtype)
    products = biased_products("grouped_matmul", _products(out_dtype))
    return lax.platform_dependent(x, w, group_sizes, bias, **products)


def gated_matmul(
    x: jax.Array,
    w: jax.Array,
    group_sizes: jax.Array,
    bias: jax.Array | None,
    *,
    activation: Gating,
    out_dtype: Any = None,
) -> jax.Array:
    """Return activation(gate, up) of every row's product with the matrix of its group: [M, F] in `out_dtype` (default:
    x's).

    Arguments are `grouped_matmul`'s. The first half of a matrix's outputs, [G, in, 2 F], are gates and the second ups,
    to which the group's bias [G, 2 F], if it is not None, is added. A row of no group is 0: the activation must map
    zeros to zeros. A platform with one kernel for both steps rounds once; elsewhere the product is rounded to
    `out_dtype` before it is activated.

    Raises ValueError if shapes or dtypes do not fit together.
    """
    _check("gated_matmul", x, w, group_sizes)
    check_halves("gated_matmul", len(w), w.shape[2], bias)
    out_dtype = jnp.dtype(x.dtype if out_dtype is None else out_dtype)
    products = gated_products("gated_matmul", _products(out_dtype), activation, out_dtype)
    return lax.platform_dependent(x, w, group_sizes, bias, **products)


def group_step(num_rows: int, num_groups: int) -> int:
    """Return the number to a multiple of which group sizes should be padded on the device of the trace, in rows. It is
    1, for no padding, on all devices but TPUs and in unpaged programs.

    num_rows, num_groups: rows of all groups, and groups. Code that sorts rows by group pads each group.
    """
    from jax.experimental.pallas import tpu as pltpu

    if UNPAGED in platform_rows().values():
        return 1
    return group_kernel("tpu").group_step(num_rows, num_groups) if pltpu.is_tpu_device() else 1


def _products(out_dtype: Any) -> dict[str, Callable[..., jax.Array]]:
    """Return the implementations of grouped_matmul by platform (`platform_rows`), with results in `out_dtype`."""
    return {
        platform: partial(kernel("grouped_matmul", row), out_dtype=out_dtype)
        for platform, row in platform_rows().items()
    }


def _check(name: str, x: jax.Array, w: jax.Array, group_sizes: jax.Array) -> None:
    """Raise ValueError, naming operation `name`, unless the operands have the shapes and dtypes that `grouped_matmul`
    documents.
    """
    if x.ndim != 2 or w.ndim != 3 or w.shape[1] != x.shape[1]:
        raise ValueError(f"{name}: x [M, in] and w [G, in, out] must agree, got {x.shape} and {w.shape}")
    if x.dtype != w.dtype or x.dtype not in (jnp.bfloat16, jnp.float32):
        raise ValueError(f"{name}: x and w must both be bfloat16 or float32, got {x.dtype} and {w.dtype}")
    if group_sizes.dtype != jnp.int32 or group_sizes.shape != w.shape[:1]:
        got = f"{group_sizes.dtype} {group_sizes.shape}"
        raise ValueError(f"{name}: group_sizes must be int32 {w.shape[:1]}, got {got}")
