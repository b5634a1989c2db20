"""Scheme and Weight: the interface between layers and the storage of matrices.

A layer declares a matrix by its logical shape and its checkpoint modules, and multiplies with the resulting Weight. The
arrays that hold it, their dtypes and tensor names are the scheme's matter. Independent of layers, families and file
formats.
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
        """Multiply x [R, n] by the matrix, over its axis `contract` of size n: [R, size of the other], summed in
        float32. Raises ValueError for an axis over which a quantised form cannot be multiplied.
        """
        ...

    def grouped_matmul(self, x: jax.Array, group_sizes: jax.Array, bias: jax.Array | None, out_dtype: Any) -> jax.Array:
        """Multiply rows of x [M, in] by the matrix of their group, plus its bias: [M, out] in `out_dtype`, see
        jaxengine.pallas_kernels.matmul.grouped. group_sizes: i32[E], rows of each group, in order. bias: [E, out], None
        for none. Raises ValueError for a quantised table.
        """
        ...

    def gated_matmul(
        self, x: jax.Array, group_sizes: jax.Array, bias: jax.Array | None, activation: Gating, out_dtype: Any
    ) -> jax.Array:
        """Compute activation(gate, up) of the grouped products, [M, F]: see
        jaxengine.pallas_kernels.matmul.quantized.quantized_gated_matmul. Operands and errors are those of
        `grouped_matmul`.
        """
        ...

    def batched_matmul(self, x: jax.Array, *, contract: int) -> jax.Array:
        """Multiply x [T, N, n] with a table's rows as N stacked matrices, over their axis `contract` of size n: f32[T,
        N, size of the other] (jaxengine.pallas_kernels.matmul.batched). Raises ValueError for a quantised weight, and
        for shapes that do not fit.
        """
        ...

    def rows(self, ids: jax.Array, *, of_others: bool = False) -> jax.Array:
        """Look up rows i32[T] of a table -> [T, D]. of_others: ids outside the table may occur, and give zeros. Raises
        ValueError for a quantised matrix, which is no table.
        """
        ...


class Scheme(Protocol):
    """One way of storing matrices. Frozen and hashable, with a complete repr, which is part of a stored executable's
    key.

    Its only input from the mesh is the number of devices that inputs are split over: a device's part of each array
    follows from the array's declaration.
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
        """Declare a weight of this logical shape.

        Args:
          sources: checkpoint modules, not tensors; joined along `out`, or along the rows of a table.
          axes: logical axes of the shape.
          dtype: dtype of the model.
          num_experts: size of the first axis of a stack; names of its sources hold "{expert}".
          table: [rows, D], as a checkpoint has it; read row by row.
          input_parts: devices that split the axis `in` of a matrix or of a stack.

        Raises ValueError where the stored form cannot be split so, ModelConfigError where it cannot have this shape.
        """
        ...
