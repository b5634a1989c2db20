"""Plain weights: one array in the model's dtype, read from the tensor `weight` of each module."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxengine.models.params.declare import ParamDecl, Source, declare
from jaxengine.pallas_kernels.matmul.batched import batched_matmul
from jaxengine.pallas_kernels.matmul.dense import matmul
from jaxengine.pallas_kernels.matmul.gated import Gating
from jaxengine.pallas_kernels.matmul.grouped import gated_matmul, grouped_matmul


class PlainWeight(nnx.Module):
    """Weight (jaxengine.models.quantization.base.scheme) over one array, `values`, of the declared shape."""

    def __init__(self, shape: tuple[int, ...], dtype: Any, decl: ParamDecl):
        self.values = declare(shape, dtype, decl)

    def matmul(self, x: jax.Array, *, contract: int = 0, out_dtype: Any = jnp.float32) -> jax.Array:
        return matmul(x, self.values[...], contract=contract).astype(out_dtype)

    def grouped_matmul(self, x: jax.Array, group_sizes: jax.Array, bias: jax.Array | None, out_dtype: Any) -> jax.Array:
        return grouped_matmul(x, self.values[...], group_sizes, bias, out_dtype=out_dtype)

    def gated_matmul(
        self, x: jax.Array, group_sizes: jax.Array, bias: jax.Array | None, activation: Gating, out_dtype: Any
    ) -> jax.Array:
        w = self.values[...]
        return gated_matmul(x, w, group_sizes, bias, activation=activation, out_dtype=out_dtype)

    def batched_matmul(self, x: jax.Array, *, contract: int) -> jax.Array:
        return batched_matmul(x, self.values[...], contract=contract)

    def rows(self, ids: jax.Array, *, of_others: bool = False) -> jax.Array:
        table = self.values[...]
        if of_others:
            return table.at[ids].get(mode="fill", fill_value=0, wrap_negative_indices=False)
        return table[ids]


@dataclass(frozen=True)
class Plain:
    """Scheme (jaxengine.models.quantization.base.scheme) of weights that are not quantised.

    tensor: name of the tensor in each module.
    """

    tensor: str = "weight"

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
    ) -> PlainWeight:
        del input_parts
        decl = ParamDecl(
            axes,
            tuple(source.tensor(self.tensor) for source in sources),
            transposed=not table,
            init_std=shape[-1 if table else -2] ** -0.5,
            num_experts=num_experts,
            row_major=table,
            transposed_on_gpu=num_experts is not None and jnp.dtype(dtype) == jnp.bfloat16,
        )
        return PlainWeight(shape, dtype, decl)
