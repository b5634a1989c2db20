"""Products of rows with quantised matrices, codes * scales - zeros: the public operations, dense and grouped.

Checks the arguments and chooses the implementation. How checkpoints store codes is in jaxengine.models.quantization.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxengine.pallas_kernels.matmul.gated import Gating, biased_products, check_bias, check_halves, gated_products
from jaxengine.pallas_kernels.matmul.nibbles import per_byte
from jaxengine.pallas_kernels.matmul.operands import QuantizedOperands
from jaxengine.pallas_kernels.matmul.rounding import RoundedRows
from jaxengine.pallas_kernels.registry import kernel, kernel_module, platform_rows

# uint8 holds two int4 codes a byte: see nibbles.
CODES = ("int8", "float8_e4m3fn", "uint8")


def quantized_matmul(
    x: jax.Array | RoundedRows,
    codes: jax.Array,
    scales: jax.Array,
    zeros: jax.Array | None = None,
    *,
    dtype: Any = None,
    out_dtype: Any = jnp.float32,
) -> jax.Array:
    """Multiply x [M, in] by codes * scales - zeros [in, out]: return [M, out] in `out_dtype`.

    A scale, and a zero, belongs to in / n neighbouring inputs of one output; n = 1 is a scale per channel. Sums are
    float32, rounded to `out_dtype` once; a matrix that is widened before it is multiplied is rounded to `dtype`.

    The implementation is chosen when the program is compiled, by the platform it is compiled for.

    Args:
      x: bfloat16 or float32, or rounded rows, whose number of scales divides n or is a multiple of it.
      codes: [in, out] int8 or float8_e4m3fn, or [in / 2, out] uint8, pairs of four-bit codes (see nibbles). A pair then
        has one scale.
      scales: [n, out], bfloat16 or float32.
      zeros: [n, out], the zero points times their scales, or None.
      dtype: dtype that codes are widened to; default x's, float32 for rounded rows.

    Raises ValueError if shapes or dtypes do not fit together.
    """
    operands, dtype = _checked("quantized_matmul", x, codes, scales, zeros, dtype, 2)
    by_platform = {
        platform: partial(kernel("quantized_matmul", row), dtype=dtype, out_dtype=jnp.dtype(out_dtype))
        for platform, row in platform_rows().items()
    }
    return lax.platform_dependent(operands, **by_platform)


def product_of(op: str, platform: str, size: int, out: int, num_scales: int, codes: Any, dtype: Any) -> str:
    """Return the name of the module that computes product `op` with a matrix [size, out] on a registry platform, or
    "MODULE: REASON", with the name of the plain XLA module, if the platform's own module leaves this shape to XLA.

    op: a product of the registry. num_scales: scales along the inputs. codes: dtype of the stored codes. dtype: the
    model's dtype. Raises ValueError for an op that the platform does not have.
    """
    module = kernel_module(op, platform)
    why_xla = getattr(importlib.import_module(f"jaxengine.pallas_kernels.{module}"), "why_xla", None)
    reason = "" if why_xla is None else why_xla(size, out, num_scales, jnp.dtype(codes), jnp.dtype(dtype))
    return f"{kernel_module(op, 'gpu_xla')}: {reason}" if reason else module


def quantized_grouped_matmul(
    x: jax.Array | RoundedRows,
    codes: jax.Array,
    scales: jax.Array,
    zeros: jax.Array | None,
    group_sizes: jax.Array,
    bias: jax.Array | None = None,
    *,
    dtype: Any = None,
    out_dtype: Any = None,
) -> jax.Array:
    """Multiply rows by the quantised matrix of their group: return [M, out] in `out_dtype`, by default `dtype`.

    Rows (x [M, in], also rounded ones), group_sizes (i32 [G]) and bias ([G, out] or None) are those of
    jaxengine.pallas_kernels.matmul.grouped: rows after those of the last group give 0. Matrices are those of
    `quantized_matmul` with a first axis of groups: codes [G, in, out], scales and zeros [G, n, out].

    Raises ValueError if shapes or dtypes do not fit together.
    """
    name = "quantized_grouped_matmul"
    operands, dtype = _checked(name, x, codes, scales, zeros, dtype, 3)
    _check_sizes(name, group_sizes, len(codes))
    check_bias(name, len(codes), codes.shape[2], bias)
    out_dtype = jnp.dtype(dtype if out_dtype is None else out_dtype)
    products = biased_products(name, _grouped_products(dtype, out_dtype))
    return lax.platform_dependent(operands, group_sizes, bias, **products)


def quantized_gated_matmul(
    x: jax.Array | RoundedRows,
    codes: jax.Array,
    scales: jax.Array,
    zeros: jax.Array | None,
    group_sizes: jax.Array,
    bias: jax.Array | None,
    *,
    activation: Gating,
    dtype: Any = None,
    out_dtype: Any = None,
) -> jax.Array:
    """Return activation(gate, up) of rows times the quantised matrix of their group: [M, F] in `out_dtype`, by default
    `dtype`.

    Arguments are `quantized_grouped_matmul`'s. The first half of a matrix's outputs, [G, in, 2 F], are gates and the
    second ups, to which the group's bias [G, 2 F], if it is not None, is added. A row of no group is 0: the activation
    must map zeros to zeros. A platform with one kernel for both steps rounds once; elsewhere the product is rounded to
    `out_dtype` before it is activated.

    Raises ValueError if shapes or dtypes do not fit together.
    """
    name = "quantized_gated_matmul"
    operands, dtype = _checked(name, x, codes, scales, zeros, dtype, 3)
    _check_sizes(name, group_sizes, len(codes))
    check_halves(name, len(codes), codes.shape[2], bias)
    out_dtype = jnp.dtype(dtype if out_dtype is None else out_dtype)
    products = gated_products(name, _grouped_products(dtype, out_dtype), activation, out_dtype, dtype=dtype)
    return lax.platform_dependent(operands, group_sizes, bias, **products)


def _grouped_products(dtype: Any, out_dtype: Any) -> dict[str, Callable[..., jax.Array]]:
    """Return the implementations of quantized_grouped_matmul by platform (`platform_rows`), which compute in `dtype`
    and return results in `out_dtype`.
    """
    return {
        platform: partial(kernel("quantized_grouped_matmul", row), dtype=dtype, out_dtype=out_dtype)
        for platform, row in platform_rows().items()
    }


def _check_sizes(name: str, group_sizes: jax.Array, num_groups: int) -> None:
    """Raise ValueError, naming operation `name`, unless group sizes are i32 [num_groups]."""
    if group_sizes.dtype != jnp.int32 or group_sizes.shape != (num_groups,):
        got = f"{group_sizes.dtype} {group_sizes.shape}"
        raise ValueError(f"{name}: group_sizes must be int32 {(num_groups,)}, got {got}")


def _checked(
    name: str, x: Any, codes: jax.Array, scales: jax.Array, zeros: jax.Array | None, dtype: Any, rank: int
) -> tuple[QuantizedOperands, Any]:
    """Return the checked operands, and `dtype` or its default: x's dtype, or float32 for rounded rows.

    rank: dimensions of codes and scales, 3 with an axis of groups. Raises ValueError, naming operation `name`, unless
    operands have the shapes, and codes a dtype, that `quantized_matmul` documents; other dtypes are not checked.
    """
    values, x_scales, default = (*x, jnp.float32) if isinstance(x, RoundedRows) else (x, None, x.dtype)
    inputs = codes.shape[-2] * per_byte(codes.dtype) if codes.ndim == rank else 0
    if values.ndim != 2 or inputs != values.shape[1]:
        raise ValueError(f"{name}: x [M, in] and codes [..., in, out] must agree, got {values.shape} and {codes.shape}")
    if str(codes.dtype) not in CODES:
        raise ValueError(f"{name}: codes must be one of {', '.join(CODES)}, got {codes.dtype}")
    wanted = (*codes.shape[:-2], "n", codes.shape[-1])
    fits = scales.ndim == rank and (*scales.shape[:-2], scales.shape[-1]) == (*codes.shape[:-2], codes.shape[-1])
    if not fits or not scales.shape[-2] or codes.shape[-2] % scales.shape[-2]:
        raise ValueError(f"{name}: scales must be {wanted} where n divides {codes.shape[-2]}, got {scales.shape}")
    if zeros is not None and zeros.shape != scales.shape:
        raise ValueError(f"{name}: zeros must have the shape of scales, {scales.shape}, got {zeros.shape}")
    if x_scales is not None:
        count = x_scales.shape[-1] if x_scales.ndim == 2 and len(x_scales) == len(values) else 0
        if not count or values.shape[1] % count or (scales.shape[-2] % count and count % scales.shape[-2]):
            text = f"scales of rows must be [M, n] where n and {scales.shape[-2]} divide one another"
            raise ValueError(f"{name}: {text}, got {x_scales.shape}")
    return QuantizedOperands(values, x_scales, codes, scales, zeros), jnp.dtype(default if dtype is None else dtype)
