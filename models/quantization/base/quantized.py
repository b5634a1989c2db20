"""Weights as codes, scales and zeros: the one form in which devices hold quantised weights.

    weight = codes * scales - zeros     codes [in, out], scales and zeros [n, out], each for in / n neighbouring inputs

Codes of four bits are stored in pairs, [in / 2, out] (jaxengine.pallas_kernels.matmul.nibbles), if two inputs share a
scale, otherwise as int8. n is 1 for a scale per channel; a scale of a tensor, or of a block, is repeated for each of
its outputs. If inputs are split over devices in the middle of a group, scales are repeated for smaller groups. The
parts of a matrix are thus joined and split like those of a plain one. If codes have to be permuted before neighbours
share scales ("act-order"), they are stored permuted, and rows are permuted to match; a device that holds a part of them
gathers its rows' inputs from all devices. Files are read in jaxengine.models.quantization.base.stored.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jaxengine.models.config.fields import ModelConfigError
from jaxengine.models.params.declare import ParamDecl, Source, declare
from jaxengine.models.quantization.base.online import Rounded
from jaxengine.models.quantization.base.plain import Plain
from jaxengine.models.quantization.base.scheme import Weight
from jaxengine.models.quantization.base.stored import Activation, Stored
from jaxengine.pallas_kernels.matmul.gated import Gating
from jaxengine.pallas_kernels.matmul.microscaled import microscaled_rows
from jaxengine.pallas_kernels.matmul.nibbles import code_parts
from jaxengine.pallas_kernels.matmul.quantized import quantized_gated_matmul, quantized_grouped_matmul, quantized_matmul
from jaxengine.pallas_kernels.matmul.quantized_table import quantized_table_matmul
from jaxengine.pallas_kernels.matmul.rounding import (
    RoundedRows,
    dynamic_scales,
    largest_values,
    rounded_rows,
    static_scales,
)
from jaxengine.sharding.collectives import gather_parts, largest_of_parts, shard_index

# Kinds of tensors that no file has: jaxengine.models.weights.views.quantized derives them from the stored ones.
CODES, PAIRS, SCALES, ZEROS = "weight:codes", "weight:pairs", "weight:scales", "weight:zeros"
VALUES = "weight:values"
ORDER, INPUT_SCALE = "input:order", "input:scale"
# Standard deviation of dummy codes: a quarter of the largest code.
_STD = {"int8": 32.0, "float8_e4m3fn": 112.0, "int4": 4.6}


class QuantizedWeight(nnx.Module):
    """Weight (jaxengine.models.quantization.base.scheme) of a quantised matrix or a stack of them."""

    def __init__(
        self,
        stored: Stored,
        shape: tuple[int, ...],
        sources: Sequence[Source],
        axes: tuple[str | None, ...],
        *,
        dtype: Any,
        num_experts: int | None,
        input_parts: int,
    ):
        self.activation: Activation | None = stored.activation
        self.dtype = jnp.dtype(dtype).name
        size, out, stack = shape[-2], shape[-1], shape[:-2]
        self.input_axis = axes[-2] if input_parts > 1 else None
        count = 1 if stored.group is None else size // math.gcd(stored.group, size // input_parts)

        def part(kind: str, rows: int, dtype: str, **init: Any) -> nnx.Param:
            axis = axes[-2] if rows > 1 else None
            tensors = tuple(source.tensor(kind) for source in sources)
            # In the layout that kernels read: a TPU would by default store some by outputs, or a stack by groups, to
            # save padding.
            init["row_major"] = rows > 1 and (count > 1 or num_experts is not None)
            decl = ParamDecl((*axes[:-2], axis, axes[-1]), tensors, transposed=True, num_experts=num_experts, **init)
            return declare((*stack, rows, out), jnp.dtype(dtype), decl)

        def of_inputs(kind: str, count: int, dtype: str) -> nnx.Param:
            """Return a new parameter with `count` numbers for the inputs, the same for all sources, so that it is read
            from the first one.
            """
            source = Source(sources[0].tensor(kind).name, count)
            decl = ParamDecl((*axes[:-2], None), (source,), num_experts=num_experts)
            return declare((*stack, count), jnp.dtype(dtype), decl)

        std = _STD[stored.dtype]
        if stored.dtype != "int4":
            self.codes = part(CODES, size, stored.dtype, init_std=std, transposed_on_gpu=True)
        elif in_pairs(size // input_parts, size // count):
            self.codes = part(PAIRS, size // 2, "uint8", init_std=std, transposed_on_gpu=True)
        else:
            self.codes = part(CODES, size, "int8", init_std=std, transposed_on_gpu=True)
        self.scales = part(SCALES, count, "float32", init_value=size**-0.5 / std)
        self.zeros = part(ZEROS, count, "float32", init_value=0.0) if stored.has_zeros else None
        self.order = of_inputs(ORDER, size, "int32") if stored.reordered else None
        static = self.activation is not None and self.activation.static
        self.input_scale = of_inputs(INPUT_SCALE, 1, "float32") if static else None

    @property
    def agrees_on_scales(self) -> bool:
        """Whether devices that split the inputs exchange the largest values from which the scales of rows are computed:
        if they are dynamic and without groups.
        """
        dynamic = self.activation is not None and not self.activation.static and self.activation.group is None
        return dynamic and self.input_axis is not None

    @property
    def gathered_inputs(self) -> int:
        """Number of elements per row that devices which split the inputs exchange because codes are permuted; 0 if they
        exchange none.
        """
        return self.order.shape[-1] if self.order is not None and self.input_axis is not None else 0

    def matmul(self, x: jax.Array, *, contract: int = 0, out_dtype: Any = jnp.float32) -> jax.Array:
        if contract != 0:
            raise ValueError(f"a quantised matrix is multiplied over its inputs, axis 0, got {contract}")
        scale = None if self.input_scale is None else self.input_scale[...].reshape(1, 1)
        x = x if self.order is None else self._in_order(x, self.order[...])
        return quantized_matmul(self._rows(x, scale), *self._matrix, dtype=self.dtype, out_dtype=out_dtype)

    def grouped_matmul(self, x: jax.Array, group_sizes: jax.Array, bias: jax.Array | None, out_dtype: Any) -> jax.Array:
        rows = self._rows_of_groups(x, group_sizes)
        options = {"dtype": self.dtype, "out_dtype": out_dtype}
        return quantized_grouped_matmul(rows, *self._matrix, group_sizes, bias, **options)

    def gated_matmul(
        self, x: jax.Array, group_sizes: jax.Array, bias: jax.Array | None, activation: Gating, out_dtype: Any
    ) -> jax.Array:
        rows = self._rows_of_groups(x, group_sizes)
        options = {"activation": activation, "dtype": self.dtype, "out_dtype": out_dtype}
        return quantized_gated_matmul(rows, *self._matrix, group_sizes, bias, **options)

    def _rows_of_groups(self, x: jax.Array, group_sizes: jax.Array) -> jax.Array | RoundedRows:
        """Return rows x [M, in], for a stack of matrices, permuted and rounded as the matrix of each row's group
        requires.
        """
        scale = None
        if self.input_scale is not None or self.order is not None:
            # The scale or order of each row's group; rows of no group get an arbitrary one.
            group = jnp.searchsorted(jnp.cumsum(group_sizes), jnp.arange(x.shape[0]), side="right")
            scale = None if self.input_scale is None else self.input_scale[...].at[group].get(mode="clip")
            x = x if self.order is None else self._in_order(x, self.order[...].at[group].get(mode="clip"))
        return self._rows(x, scale)

    def batched_matmul(self, x: jax.Array, *, contract: int) -> jax.Array:
        raise ValueError("matrices of heads, one below the other, are stored as they are")

    def rows(self, ids: jax.Array, *, of_others: bool = False) -> jax.Array:
        raise ValueError("a quantised matrix is not a table: its rows are not looked up")

    @property
    def _matrix(self) -> tuple[jax.Array, jax.Array, jax.Array | None]:
        """Codes, scales, and zeros or None."""
        return self.codes[...], self.scales[...], None if self.zeros is None else self.zeros[...]

    def _in_order(self, x: jax.Array, order: jax.Array) -> jax.Array:
        """Return rows x [M, in] with their inputs permuted to the order of the codes. Devices that split the inputs
        gather them first.

        order: i32 [all inputs], or [M, all inputs], one order per row.
        """
        if self.input_axis is not None:
            own = x.shape[1]
            x = gather_parts(x, self.input_axis, dimension=1)
            order = lax.dynamic_slice_in_dim(order, shard_index(self.input_axis) * own, own, axis=-1)
        return jnp.take(x, order, axis=1) if order.ndim == 1 else jnp.take_along_axis(x, order, axis=1)

    def _rows(self, x: jax.Array, static_scale: jax.Array | None) -> jax.Array | RoundedRows:
        """Return rows x [M, in], already in the order of the codes, rounded to the activation's dtype; unchanged if
        there is no activation.

        static_scale: f32 [1, 1] or [M, 1]; None for scales that are computed from the rows' largest magnitudes, of
        which `activation.bound`, if any, counts at most. Microscaled rows are returned in x's dtype, with their scales
        applied.
        """
        if self.activation is None:
            return x
        dtype = self.activation.dtype
        if self.activation.microscaled:
            assert self.activation.group is not None
            kind = self.activation.scales
            return microscaled_rows(x, self.activation.group, dtype, kind=kind, global_scale=static_scale)
        if static_scale is not None:
            return rounded_rows(x, static_scales(x, static_scale, dtype), dtype)
        largest = self._largest(x, x.shape[1])
        if self.activation.bound is not None:
            largest = jnp.minimum(largest, self.activation.bound)
        return rounded_rows(x, dynamic_scales(largest, dtype, kind=self.activation.scales), dtype)

    def _largest(self, x: jax.Array, size: int) -> jax.Array:
        """Return the largest magnitudes of rows x [M, size], f32 [M, n], from which scales are computed.

        Without groups n is 1, for all devices' parts of a row. Otherwise n is size / gcd(group, size), with equal
        values within a group.
        """
        assert self.activation is not None
        group = self.activation.group
        if group is None:
            largest = largest_values(x, size)
            return largest if self.input_axis is None else largest_of_parts(largest, self.input_axis)
        step = math.gcd(group, size)
        largest, each = largest_values(x, step), group // step
        if each == 1:
            return largest
        # The last group is cut off: scales are repeated for every `step` inputs, equal within a group.
        count = largest.shape[1]
        padded = jnp.pad(largest, ((0, 0), (0, -count % each))).reshape(len(largest), -1, each)
        return jnp.repeat(jnp.max(padded, axis=2), each, axis=1)[:, :count]


class QuantizedTable(nnx.Module):
    """Weight (jaxengine.models.quantization.base.scheme) of a token table [V, D]: codes [V, D], or [V, D / 2] in pairs,
    and scales and zeros [n, V], each for D / n neighbouring numbers of a token.
    """

    def __init__(
        self,
        stored: Stored,
        shape: tuple[int, ...],
        sources: Sequence[Source],
        axes: tuple[str | None, ...],
        *,
        dtype: Any,
    ):
        self.dtype = jnp.dtype(dtype).name
        rows, size = shape
        count = size // math.gcd(stored.group or size, size)

        def part(kind: str, width: int, dtype: str, *, transposed: bool = False, **init: Any) -> nnx.Param:
            tensors = tuple(source.tensor(kind) for source in sources)
            order = slice(None, None, -1) if transposed else slice(None)
            decl = ParamDecl(axes[order], tensors, transposed=transposed, row_major=True, **init)
            return declare((rows, width)[order], jnp.dtype(dtype), decl)

        std = _STD[stored.dtype]
        if stored.dtype == "int4" and in_pairs(size, size // count):
            self.codes = part(PAIRS, size // 2, "uint8", init_std=std)
        else:
            self.codes = part(CODES, size, "int8", init_std=std)
        self.scales = part(SCALES, count, "float32", transposed=True, init_value=size**-0.5 / std)
        self.zeros = part(ZEROS, count, "float32", transposed=True, init_value=0.0) if stored.has_zeros else None

    def matmul(self, x: jax.Array, *, contract: int = 0, out_dtype: Any = jnp.float32) -> jax.Array:
        if contract != 1:
            raise ValueError(f"a quantised table is multiplied over its columns, axis 1, got {contract}")
        zeros = None if self.zeros is None else self.zeros[...]
        options = {"dtype": self.dtype, "out_dtype": out_dtype}
        return quantized_table_matmul(x, self.codes[...], self.scales[...], zeros, **options)

    def grouped_matmul(self, x: jax.Array, group_sizes: jax.Array, bias: jax.Array | None, out_dtype: Any) -> jax.Array:
        raise ValueError("a quantised table is not a stack of matrices")

    def gated_matmul(
        self, x: jax.Array, group_sizes: jax.Array, bias: jax.Array | None, activation: Gating, out_dtype: Any
    ) -> jax.Array:
        raise ValueError("a quantised table is not a stack of matrices")

    def batched_matmul(self, x: jax.Array, *, contract: int) -> jax.Array:
        raise ValueError("a quantised table is not matrices of heads")

    def rows(self, ids: jax.Array, *, of_others: bool = False) -> jax.Array:
        mode: dict[str, Any] = {"mode": "clip"}
        if of_others:
            mode = {"mode": "fill", "fill_value": 0, "wrap_negative_indices": False}

        def found(scales: nnx.Param) -> jax.Array:
            return scales[...].at[:, ids].get(**mode).T[:, :, None]

        # Codes [T, D / 2, 1] of even and of odd numbers, to be interleaved, or [T, D, 1].
        codes = code_parts(self.codes[...].at[ids].get(**mode)[:, :, None])
        wide = jnp.concatenate(codes, axis=2).astype(jnp.float32)
        wide = wide.reshape(len(ids), self.scales[...].shape[0], -1) * found(self.scales)
        wide = wide if self.zeros is None else wide - found(self.zeros)
        return wide.reshape(len(ids), -1).astype(self.dtype)


def in_pairs(size: int, group: int) -> bool:
    """Return whether codes of four bits are stored in pairs: if both `size`, the inputs of a device, and `group`, the
    inputs that share a scale, are even.
    """
    return size % 2 == 0 and group % 2 == 0


@dataclass(frozen=True)
class Quantized:
    """Scheme (jaxengine.models.quantization.base.scheme) of modules that are quantised in a checkpoint.

    Tables are dequantised as they are read, unless `with_tables`, as few checkpoints quantise them. So are matrices
    whose codes cannot be multiplied with. Tables that would be rounded at load are read plain.
    """

    stored: Stored
    with_tables: bool = False

    def declare(
        self,
        shape: tuple[int, ...],
        sources: Sequence[Source],
        axes: tuple[str | None, ...],
        *,
        dtype: Any,
        num_experts: int | None = None,
        table: bool = False,
        input_parts: int = 1,
    ) -> Weight:
        if table and self.with_tables:
            return QuantizedTable(self.stored, shape, sources, axes, dtype=dtype)
        if table or self.stored.dtype == "float32":
            tensor = "weight" if isinstance(self.stored, Rounded) else VALUES
            return Plain(tensor).declare(shape, sources, axes, dtype=dtype, num_experts=num_experts, table=table)
        stored, own = self.stored, shape[-2] // input_parts
        group, size = stored.activation.group if stored.activation is not None else None, shape[-2]
        what = f"{sources[0].name.replace('{layer}', '*').replace('{expert}', '*')}: {stored.format}: {size} inputs"
        if stored.activation is not None and stored.activation.microscaled and group is not None and size % group:
            raise ModelConfigError(f"quantization_config: {what} are not a multiple of the {group} that share a scale")
        if input_parts > 1 and group is not None and own % group:
            text = f"which are rounded {group} at a time, cannot be split over {input_parts} devices"
            raise ValueError(f"{what}, {text}")
        options: dict[str, Any] = {"dtype": dtype, "num_experts": num_experts, "input_parts": input_parts}
        return QuantizedWeight(stored, shape, sources, axes, **options)
