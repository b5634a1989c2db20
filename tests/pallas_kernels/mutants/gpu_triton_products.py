"""Faults of the Triton kernel for products with quantised matrices."""

from __future__ import annotations

from tests.pallas_kernels.mutants.mutant import Mutant
from tests.pallas_kernels.worker import Job

SECONDS = 45

_KERNEL, _CODES = "matmul/triton/quantized", "triton"


def _on(*cases: str) -> tuple[Job, ...]:
    return tuple(("triton_product", "triton", case) for case in cases)


_SPLIT, _WIDE = _on("pairs, zeros, inputs split"), _on("a group of several products")
_CHANNEL, _FLOATS = _on("int8, a scale a channel"), _on("e4m3 in groups of 48")
_UNEQUAL, _TILES = _on("splits of unequal length"), _on("wide tiles")

MUTANTS = [
    Mutant(
        "halves of a pair exchanged", _CODES, "for part in (bits, bits >> 4)", "for part in (bits >> 4, bits)", _SPLIT
    ),
    Mutant("low half twice", _CODES, "for part in (bits, bits >> 4)", "for part in (bits, bits)", _SPLIT),
    Mutant("high half not shifted far enough", _CODES, "bits >> 4", "bits >> 3", _SPLIT),
    Mutant("sign of pairs lost", _CODES, "^ 0x4308", "| 0x4300", _SPLIT),
    Mutant("codes shifted by one", _CODES, "jnp.bfloat16(136)", "jnp.bfloat16(135)", _SPLIT),
    Mutant("halves one behind the other", _CODES, "axis=-1).reshape", "axis=-2).reshape", _SPLIT),
    Mutant(
        "int8 without its sign", _CODES, "return codes.astype(dtype)", "return jnp.abs(codes).astype(dtype)", _CHANNEL
    ),
    Mutant("scales of the next group", _KERNEL, "scales.at[group, output]", "scales.at[group + 1, output]", _SPLIT),
    Mutant("scales of the first group", _KERNEL, "scales.at[group, output]", "scales.at[0, output]", _SPLIT),
    Mutant(
        "a scale for each product", _KERNEL, "// shape.num_scales // shape.inputs)", "// shape.num_scales // 64)", _WIDE
    ),
    Mutant("zeros of the first group", _KERNEL, "zeros[0].at[group", "zeros[0].at[0", _SPLIT),
    Mutant("zeros added", _KERNEL, "total = total - jnp.sum(rows", "total = total + jnp.sum(rows", _SPLIT),
    Mutant("zeros of one row", _KERNEL, "axis=1)[:, None] * zero", "axis=1)[:1, None] * zero", _SPLIT),
    Mutant("zeros not used", _KERNEL, "if shape.has_zeros:", "if False:", _SPLIT),
    Mutant(
        "inputs of another product", _KERNEL, "inputs = block * shape.inputs", "inputs = step * shape.inputs", _SPLIT
    ),
    Mutant("codes of another product", _KERNEL, "places = block * num_bytes", "places = each * num_bytes", _SPLIT),
    Mutant("products of a step but the first dropped", _KERNEL, "in range(shape.products):", "in range(1):", _SPLIT),
    Mutant("sum overwritten", _KERNEL, "total = total + product *", "total = product *", _WIDE),
    Mutant("last step dropped", _KERNEL, "lax.fori_loop(first, end,", "lax.fori_loop(first, end - 1,", _WIDE),
    Mutant(
        "splits overlap", _KERNEL, "first = split * shape.per_split", "first = split * (shape.per_split - 1)", _SPLIT
    ),
    Mutant(
        "end of the last split", _KERNEL, "jnp.minimum(first + shape.per_split, shape.steps)", "shape.steps", _SPLIT
    ),
    Mutant(
        "steps past the end",
        _KERNEL,
        "jnp.minimum(first + shape.per_split, shape.steps)",
        "first + shape.per_split",
        _UNEQUAL,
    ),
    Mutant("one part of the sum dropped", _KERNEL, "in range(shape.splits))", "in range(1, shape.splits))", _SPLIT),
    Mutant("parts over each other", _KERNEL, "y.at[split, row", "y.at[0, row", _SPLIT),
    Mutant("rows of the first tile", _KERNEL, "row = row_tile * shape.tile_rows", "row = 0 * row_tile", _WIDE),
    Mutant("outputs of the first tile", _KERNEL, "output = out_tile * shape.outputs", "output = 0 * out_tile", _WIDE),
    Mutant(
        "a tile of outputs too few",
        _KERNEL,
        "return -(-self.out // self.outputs)",
        "return self.out // self.outputs",
        _WIDE,
    ),
    Mutant(
        "a tile of rows too few",
        _KERNEL,
        "return -(-self.rows // self.tile_rows)",
        "return self.rows // self.tile_rows",
        _TILES,
    ),
    Mutant("parts in bfloat16", _KERNEL, "jnp.dtype(jnp.float32) if", "jnp.dtype(jnp.bfloat16) if", _SPLIT),
    Mutant(
        "rounded before it is scaled",
        _KERNEL,
        "total + product * plt",
        "total + product.astype(jnp.bfloat16) * plt",
        _SPLIT,
    ),
]
