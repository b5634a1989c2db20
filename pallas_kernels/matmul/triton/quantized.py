"""Quantised product on an Ampere, Ada or RTX Blackwell GPU, in Pallas-Triton: codes are widened only in registers.

A program multiplies a tile of rows with a tile of outputs. A step loads the codes of a few inputs of each output,
packed as they are stored, widens them to bfloat16, which represents them exactly, and multiplies. The float32 sum of
each group of inputs is scaled, and the zeros times the sum of the row's inputs are subtracted, so that only the result
is rounded. If there are fewer tiles than half of the card's multiprocessors, several programs share a tile: each adds
up a part of the inputs, and XLA adds the parts in order, so that the result is the same on every run.

Codes are read as [out, in], as CUDA cards store them.
"""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from jaxengine.pallas_kernels.matmul.nibbles import per_byte
from jaxengine.pallas_kernels.matmul.operands import QuantizedOperands
from jaxengine.pallas_kernels.matmul.xla import quantized as quantized_xla
from jaxengine.pallas_kernels.triton import LEAST, padded, widened, widened_pairs
from jaxengine.pallas_kernels.tuning import TritonProducts, tuning_of

logger = logging.getLogger(__name__)

LEAST_OUTPUTS = 32
MOST_SUMS = 64 * 64  # sums of a tile that leave registers to the codes of 128 inputs


def quantized_matmul(
    operands: QuantizedOperands,
    *,
    dtype: Any,
    out_dtype: Any,
    sizes: TritonProducts | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Multiply x [M, in] by codes * scales - zeros on an NVIDIA GPU: return [M, out] in out_dtype.
    matmul.quantized.quantized_matmul has checked the arguments.

    XLA computes the product if the kernel does not support it (`why_xla`, rounded rows) or is slower for so many rows;
    a log line gives the reason once. dtype: the dtype that codes are widened to; the kernel supports bfloat16 only.
    sizes: tile sizes, None for those of the tuning table. interpret: whether to run on the CPU.
    """
    x, x_scales, codes, scales, zeros = operands
    (rows, size), (num_scales, out) = x.shape, scales.shape
    sizes = tuning_of("gpu_triton").triton_products if sizes is None else sizes
    reason = why_xla(size, out, num_scales, codes.dtype, dtype)
    if not reason and x_scales is not None:
        reason = "rows are rounded"
    # With one scale a channel int8 is an operand of XLA's own product of many rows, and read once there, too.
    most_rows = sizes.rows if num_scales == 1 and codes.dtype == jnp.int8 else sizes.most_rows
    if not reason and rows > most_rows:
        reason = f"{rows} rows are more than {most_rows}"
    if reason:
        _log_once(f"[{size}, {out}]: {reason}")
        return quantized_xla.quantized_matmul(operands, dtype=dtype, out_dtype=out_dtype)
    shape = Shape(rows, size, out, num_scales, codes.dtype, zeros is not None, jnp.dtype(out_dtype), sizes)
    inputs = [x.astype(jnp.bfloat16), codes.T, scales, *([] if zeros is None else [zeros])]
    parts = pl.pallas_call(
        partial(_multiply, shape),
        out_shape=jax.ShapeDtypeStruct((shape.splits, rows, out), shape.stored_dtype),
        grid=(shape.row_tiles, shape.out_tiles, shape.splits),  # neighbours share a tile of codes
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=sizes.stages),
        interpret=interpret,
        name="quantized_matmul",
    )(*inputs)
    return functools.reduce(jnp.add, (parts[each] for each in range(shape.splits))).astype(out_dtype)


def why_xla(size: int, out: int, num_scales: int, codes: Any, dtype: Any) -> str:
    """Return the reason why the kernel does not support a matrix [size, out] with `num_scales` scales along its inputs,
    so that XLA computes the product; "" if the kernel supports it.

    codes: dtype of the stored codes. dtype: dtype that they are widened to. Reasons: a dtype other than bfloat16,
    groups of inputs that are not a multiple of 16 (32 for pairs), fewer than 32 outputs, more than 2 and up to 4 GiB of
    codes.
    """
    if dtype != jnp.bfloat16:
        return f"the kernel widens to bfloat16, not {jnp.dtype(dtype).name}"
    group, packed = size // num_scales, per_byte(codes)
    if group % (LEAST * packed):
        return f"groups of {group} inputs are no multiple of {LEAST * packed}"
    if out < LEAST_OUTPUTS:
        return f"{out} outputs are fewer than {LEAST_OUTPUTS}"
    if 2**31 < size * out // packed <= 2**32:
        return f"{size * out // packed} bytes of codes, whose offsets jax's lowering keeps in 32 bits"
    return ""


@functools.cache
def _log_once(reason: str) -> None:
    """Log, at level INFO and once per process and reason, that a quantised product runs as plain XLA."""
    logger.info("a quantised product runs as plain XLA instead of the Triton kernel: %s", reason)


@dataclass(frozen=True)
class Shape:
    """Compile-time parameters of the kernel, and the sizes that follow from them.

    Attributes:
      rows, size, out: rows of the product, and inputs and outputs of the matrix.
      num_scales: scales along the inputs.
      codes: dtype of the codes.
      has_zeros: whether zeros are given.
      out_dtype: dtype of the product.
      sizes: tuned limits of the tile sizes.
    """

    rows: int
    size: int
    out: int
    num_scales: int
    codes: Any
    has_zeros: bool
    out_dtype: Any
    sizes: TritonProducts

    @property
    def tile_rows(self) -> int:
        """Number of rows of a tile: all of them, rounded up to a power of two of at least 16, at most sizes.rows."""
        return min(padded(self.rows), self.sizes.rows)

    @property
    def row_tiles(self) -> int:
        """Number of tiles along the rows."""
        return -(-self.rows // self.tile_rows)

    @property
    def outputs(self) -> int:
        """Number of outputs of a tile: twice as many as needed if there are at least as many tiles as multiprocessors
        even so. It is at least tile_rows: with fewer outputs than rows each of four warps would widen all codes.
        """
        least, most = max(self.tile_rows, LEAST_OUTPUTS), max(2 * self.tile_rows, 2 * LEAST_OUTPUTS)
        return most if self.row_tiles * -(-self.out // most) >= self.sizes.num_ctas else least

    @property
    def out_tiles(self) -> int:
        """Number of tiles along the outputs."""
        return -(-self.out // self.outputs)

    @property
    def packed(self) -> int:
        """Number of codes in a byte: 2 for pairs, else 1."""
        return per_byte(self.codes)

    @property
    def step_inputs(self) -> int:
        """Largest number of inputs of a step: sizes.inputs, halved if sums take most registers, doubled for pairs of
        codes if a tile has the fewest rows.
        """
        if self.tile_rows == LEAST:
            return self.sizes.inputs * self.packed
        return self.sizes.inputs // (1 + (self.tile_rows * self.outputs > MOST_SUMS))

    @property
    def inputs(self) -> int:
        """Number of inputs of one product, all of which share a scale: a power of two."""
        group = self.size // self.num_scales
        return min(group & -group, self.sizes.inputs, self.step_inputs)

    @property
    def products(self) -> int:
        """Number of products that one step computes."""
        count = self.size // self.inputs
        return min(self.step_inputs // self.inputs, count & -count)

    @property
    def steps(self) -> int:
        """Number of steps that cover all inputs."""
        return self.size // (self.inputs * self.products)

    @property
    def per_split(self) -> int:
        """Number of steps that one program runs."""
        splits = max(self.sizes.num_ctas // (self.row_tiles * self.out_tiles), 1)
        return -(-self.steps // min(splits, max(self.steps // self.sizes.least_steps, 1)))

    @property
    def splits(self) -> int:
        """Number of parts of the inputs, each added up by separate programs."""
        return -(-self.steps // self.per_split)

    @property
    def stored_dtype(self) -> Any:
        """Dtype in which the kernel stores results: float32 if they are parts of sums, else out_dtype."""
        return jnp.dtype(jnp.float32) if self.splits > 1 else self.out_dtype


def _multiply(shape: Shape, x: Any, codes: Any, scales: Any, *zeros_and_y: Any) -> None:
    """Body of the kernel: multiply one tile of rows x [M, in] by one tile of codes [out, in / packed] over one part of
    the inputs, and write the tile of y [splits, M, out]. The program's numbers are (tile of rows, tile of outputs,
    part).

    scales: [n, out]. zeros_and_y: zeros [n, out] if shape.has_zeros, then y.
    """
    *zeros, y = zeros_and_y
    row_tile, out_tile, split = (pl.program_id(axis) for axis in range(3))
    row = row_tile * shape.tile_rows + jnp.arange(shape.tile_rows, dtype=jnp.int32)
    output = out_tile * shape.outputs + jnp.arange(shape.outputs, dtype=jnp.int32)
    live, stored = (row < shape.rows)[:, None], output < shape.out
    num_bytes = shape.inputs // shape.packed

    def add(step, total):
        for each in range(shape.products):
            block = step * shape.products + each
            inputs = block * shape.inputs + jnp.arange(shape.inputs, dtype=jnp.int32)
            places = block * num_bytes + jnp.arange(num_bytes, dtype=jnp.int32)
            group = block // (shape.size // shape.num_scales // shape.inputs)
            rows = plt.load(x.at[row[:, None], inputs[None]], mask=live, other=0)
            narrow = plt.load(codes.at[output[:, None], places[None]], mask=stored[:, None])
            factor = widened(narrow, jnp.bfloat16) if shape.packed == 1 else widened_pairs(narrow)
            product = plt.dot(rows, factor, trans_b=True)
            total = total + product * plt.load(scales.at[group, output], mask=stored).astype(jnp.float32)[None]
            if shape.has_zeros:
                zero = plt.load(zeros[0].at[group, output], mask=stored).astype(jnp.float32)
                total = total - jnp.sum(rows.astype(jnp.float32), axis=1)[:, None] * zero[None]
        return total

    first = split * shape.per_split
    end = jnp.minimum(first + shape.per_split, shape.steps)
    total = lax.fori_loop(first, end, add, jnp.zeros((shape.tile_rows, shape.outputs), jnp.float32))
    plt.store(y.at[split, row[:, None], output[None]], total.astype(y.dtype), mask=live & stored[None])
