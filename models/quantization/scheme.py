"""Scheme and Weight: all that layers know of how a matrix is stored.

A layer declares a matrix by its logical shape and the checkpoint modules that it is made of, and multiplies with what
it gets. Which arrays hold it, of which dtypes, under which tensor names, is the scheme's affair. Knows no layer, no
family and no file format.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from models.weights.declare import Source
from pallas_kernels.matmul.gated import Gating


class Weight(Protocol):
    """A matrix [in, out], a stack of them [E, in, out], or a table [rows, D]: an nnx.Module of declared parameters.

    On a mesh the arrays are a device's part of what was declared, and so is what each method says below.
    """

    def matmul(self, x: jax.Array, *, contract: int = 0, out_dtype: Any = jnp.float32) -> jax.Array:
        """x [R, n] times the matrix, over its axis `contract` of size n: [R, size of the other], summed in float32."""
        ...

    def grouped_matmul(self, x: jax.Array, group_sizes: jax.Array, bias: jax.Array | None, out_dtype: Any) -> jax.Array:
        """Rows of x [M, in] times the matrix of their group, plus its bias: see pallas_kernels.matmul.grouped."""
        ...

    def gated_matmul(
        self, x: jax.Array, group_sizes: jax.Array, bias: jax.Array | None, activation: Gating, out_dtype: Any
    ) -> jax.Array:
        """activation(gate, up) of such products, [M, F]: see pallas_kernels.matmul.quantized.quantized_gated_matmul."""
        ...

    def batched_matmul(self, x: jax.Array, *, contract: int) -> jax.Array:
        """A table's rows as N matrices, one below the other: see pallas_kernels.matmul.batched."""
        ...

    def rows(self, ids: jax.Array, *, of_others: bool = False) -> jax.Array:
        """Rows i32[T] of a table -> [T, D]. of_others: ids outside the table may occur, and give zeros."""
        ...


class Scheme(Protocol):
    """One way of storing matrices. Frozen and hashable, with a repr that says all: part of a stored executable's key.

    Of the mesh it knows one number, over how many devices inputs are split: what a device holds of each array follows
    from the array's declaration.
    """

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
        """A weight of this logical shape.

        Args:
          sources: checkpoint modules, not tensors; joined along `out`, or along the rows of a table.
          axes: logical axes of the shape.
          dtype: of the model.
          num_experts: size of the first axis of a stack; names of its sources hold "{expert}".
          table: [rows, D], as a checkpoint has it; read row by row.
          input_parts: devices that split the axis `in` of a matrix or of a stack.

        Raises ValueError where what is stored cannot be split so.
        """
        ...
