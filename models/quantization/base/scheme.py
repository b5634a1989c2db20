"""Scheme and Weight: the interface between layers and the storage of matrices.

A layer declares a matrix by its logical shape and its checkpoint modules, and multiplies with the resulting Weight. The
scheme determines the arrays that hold it, their dtypes and the tensor names. This module is independent of layers,
families and file formats.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from jaxengine.models.params.declare import Source
from jaxengine.pallas_kernels.matmul.gated import Gating


class Weight(Protocol):
    """A matrix [in, out], a stack of them [E, in, out], or a table [rows, D]: an nnx.Module of declared parameters.

    On a mesh the arrays are a device's parts of the declared ones, and each method computes the device's part.
    """

    def matmul(self, x: jax.Array, *, contract: int = 0, out_dtype: Any = jnp.float32) -> jax.Array:
        """Return the product of x [R, n] and the matrix, over its axis `contract` of size n: [R, size of the other
        axis] in `out_dtype`, summed in float32.

        Raises ValueError for an axis over which a quantised form cannot be multiplied.
        """
        ...

    def grouped_matmul(self, x: jax.Array, group_sizes: jax.Array, bias: jax.Array | None, out_dtype: Any) -> jax.Array:
        """Return the product of each row of x [M, in] and the matrix of its group, plus the group's bias: [M, out] in
        `out_dtype` (see jaxengine.pallas_kernels.matmul.grouped).

        group_sizes: i32[E], number of rows of each group, in order. bias: [E, out] or None. Raises ValueError for a
        quantised table.
        """
        ...

    def gated_matmul(
        self, x: jax.Array, group_sizes: jax.Array, bias: jax.Array | None, activation: Gating, out_dtype: Any
    ) -> jax.Array:
        """Return activation(gate, up), [M, F] in `out_dtype`, where gate and up are the halves of the grouped product
        of x [M, in] (see jaxengine.pallas_kernels.matmul.quantized.quantized_gated_matmul).

        group_sizes: i32[E], number of rows of each group, in order. bias: [E, out] or None. Raises ValueError for a
        quantised table.
        """
        ...

    def batched_matmul(self, x: jax.Array, *, contract: int) -> jax.Array:
        """Return the product of x [T, N, n] and a table's rows as N stacked matrices, over their axis `contract` of
        size n: f32[T, N, size of the other axis] (jaxengine.pallas_kernels.matmul.batched).

        Raises ValueError for a quantised weight, and for shapes that do not fit.
        """
        ...

    def rows(self, ids: jax.Array, *, of_others: bool = False) -> jax.Array:
        """Return the rows [T, D] of a table with these indices i32[T]. of_others: whether ids outside the table may
        occur, for which zeros are returned. Raises ValueError for a quantised matrix, which is not a table.
        """
        ...


class Scheme(Protocol):
    """One way of storing matrices. Schemes are frozen and hashable, with a complete repr, which is part of a stored
    executable's key.

    The only input from the mesh is the number of devices that split the inputs: a device's part of each array follows
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
        """Return a new Weight of this logical shape.

        Args:
          shape: [in, out], [num_experts, in, out], or [rows, D] of a table.
          sources: checkpoint modules, not tensors; joined along `out`, or along the rows of a table.
          axes: logical axes of the shape.
          dtype: dtype of the model.
          num_experts: size of the first axis of a stack; names of its sources contain "{expert}".
          table: whether this is a table [rows, D], stored so in the checkpoint and read row by row.
          input_parts: number of devices that split the axis `in` of a matrix or of a stack.

        Raises ValueError if the stored form cannot be split so, ModelConfigError if it cannot have this shape.
        """
        ...
