"""Faults of the TPU's products with quantised matrices, and with matrices of groups."""

from __future__ import annotations

from tests.pallas_kernels.mutants.mutant import Mutant
from tests.pallas_kernels.worker import Job

SECONDS = 60

_DENSE, _GROUPED, _TILE = "matmul/tpu/quantized", "matmul/tpu/grouped", "matmul/tpu/widened"
_PLAIN, _MOVED, _VISITS = "matmul/tpu/grouped_plain", "matmul/tpu/moved", "matmul/tpu/visits"


def _on(*cases: str) -> tuple[Job, ...]:
    return tuple(("product", "tpu-lazy", case) for case in cases)


_SUMS, _WEIGHTS = _on("sums of 32", "one row"), _on("weights of 32", "weights of 128")
_LOOPS = _on("sums in a loop", "weights in a loop")
_SHARED: tuple[Job, ...] = (("grouped_product", "tpu-lazy", "groups that share tiles"),)
_NO_ROWS: tuple[Job, ...] = (("grouped_product", "tpu-lazy", "no rows of any group"),)
_SKEWED: tuple[Job, ...] = (
    ("grouped_product", "tpu-lazy", "pieces of columns, a group of several blocks"),
    ("grouped_product", "tpu-lazy", "groups that share tiles"),
)
_AS_IT_IS: tuple[Job, ...] = (("grouped_product", "tpu-lazy", "matrices as they are, in a loop"),)
_BYTE_ROWS: tuple[Job, ...] = (("grouped_product", "tpu-lazy", "rows rounded by groups"),)
_BY_GROUPS, _MANY_GROUPS = _on("e4m3 rows by groups"), _on("many e4m3 rows by groups")


def _gated(*cases: str) -> tuple[Job, ...]:
    return tuple(("gated_product", "tpu-lazy", case) for case in cases)


_MANY_BIASES = _gated("more groups than biases at once")
_STRIPS, _GATED = _gated("strips of columns"), _gated("groups that share tiles")

MUTANTS = [
    Mutant(
        "scales of sums shifted by a group",
        _TILE,
        "index = (first + at) // group\n        part = _dot",
        "index = jnp.maximum((first + at) // group - 1, 0)\n        part = _dot",
        _SUMS,
    ),
    Mutant(
        "scales of weights shifted by a group",
        _TILE,
        "scales[pl.ds((first + at) // group, 1), :]",
        "scales[pl.ds(jnp.maximum((first + at) // group - 1, 0), 1), :]",
        _WEIGHTS,
    ),
    Mutant("scales of the first group for all", _TILE, "* scales[pl.ds(index, 1), :]", "* scales[0:1, :]", _SUMS),
    Mutant("sums not scaled", _TILE, "astype(jnp.float32) * scales[pl.ds(index, 1), :]", "astype(jnp.float32)", _SUMS),
    Mutant(
        "scales rounded before they scale weights",
        _TILE,
        "scales[pl.ds((first + at) // group, 1), :]",
        "scales[pl.ds((first + at) // group, 1), :].astype(jnp.bfloat16)",
        _WEIGHTS,
    ),
    Mutant(
        "scales of rows of another group",
        _TILE,
        "array.shape, 1) == index",
        "array.shape, 1) != index",
        _BY_GROUPS,
    ),
    Mutant(
        "scales of rows of the group before",
        _TILE,
        "array.shape, 1) == index",
        "array.shape, 1) == jnp.maximum(index - 1, 0)",
        _BY_GROUPS,
    ),
    Mutant(
        "last group of a chunk dropped",
        _TILE,
        "y = part if y is None else y + part",
        "y = part if y is None else y",
        _SUMS,
    ),
    Mutant("chunks replace each other", _TILE, "    total[...] += y\n", "    total[...] = y\n", _LOOPS),
    Mutant(
        "widened chunks replace each other",
        _TILE,
        "total[:, own] += y",
        "total[:, own] = y",
        _LOOPS[::-1],
    ),
    Mutant(
        "chunks of a matrix as it is replace each other",
        _TILE,
        "total[...] += _dot(x[:, pl.ds(first, length)], w[",
        "total[...] = _dot(x[:, pl.ds(first, length)], w[",
        _AS_IT_IS,
    ),
    Mutant(
        "every chunk of a matrix as it is the first",
        _TILE,
        "w[pl.ds(first, length), :]",
        "w[pl.ds(0, length), :]",
        _AS_IT_IS,
    ),
    Mutant(
        "matrices as they are: bias left out",
        _PLAIN,
        "Matrix(w, bias=bias), group_sizes, None",
        "Matrix(w), group_sizes, None",
        _AS_IT_IS,
    ),
    Mutant(
        "matrices as they are: bias of gates and ups left out",
        _PLAIN,
        "matrix = Matrix(w, bias=bias)",
        "matrix = Matrix(w)",
        _gated("matrices as they are"),
    ),
    Mutant(
        "bias left out of a product alone",
        _GROUPED,
        "    matrix = Matrix(codes, scales.astype(jnp.float32), zeros, bias)\n    return product",
        "    matrix = Matrix(codes, scales.astype(jnp.float32), zeros)\n    return product",
        _SHARED,
    ),
    Mutant("loop one pass short", _TILE, "@pl.loop(0, passes)", "@pl.loop(0, passes - 1)", _LOOPS),
    Mutant("loop starts late", _TILE, "@pl.loop(0, passes)", "@pl.loop(1, passes)", _LOOPS),
    Mutant(
        "inputs behind the loop dropped",
        _TILE,
        "for first in range(passes * span if passes > 1 else 0, size, chunk):",
        "for first in range(passes * span if passes > 1 else 0, size - chunk + 1, chunk):",
        _LOOPS,
    ),
    Mutant("every pass the first inputs", _TILE, "add(first + at, chunk)", "add(at, chunk)", _LOOPS),
    Mutant(
        "rows of the chunk before",
        _TILE,
        "rows, wide = x[:, pl.ds(first, length)]",
        "rows, wide = x[:, pl.ds(0, length)]",
        _LOOPS[::-1],
    ),
    Mutant("sums in units of weights not scaled", _TILE, "matrix[:, own]) * unit[:, own]", "matrix[:, own])", _WEIGHTS),
    Mutant("weights not in units", _TILE, "(scale / unit)", "scale", _WEIGHTS),
    Mutant("a unit of 0", _TILE, "jnp.where(jnp.abs(scale) < _LEAST, _LEAST, scale)", "scale", _WEIGHTS),
    Mutant("every piece the first's rows", _TILE, "rows[:, begin : begin", "rows[:, 0 : 0", _LOOPS[::-1]),
    Mutant("units of rows of the first chunk", _TILE, "x_scales, first // chunk", "x_scales, 0 * first", _MANY_GROUPS),
    Mutant("rows not in units", _DENSE, "scales / own)", "scales)", _MANY_GROUPS),
    Mutant(
        "rows in units of other chunks",
        _DENSE,
        "jnp.repeat(units, each, axis=1)",
        "jnp.tile(units, (1, each))",
        _MANY_GROUPS,
    ),
    Mutant("rows rounded twice", _DENSE, "if count > 1 and not by_sums:", "if False:", _MANY_GROUPS),
    Mutant("codes unsigned", _TILE, "pltpu.bitcast(part, jnp.int4)", "pltpu.bitcast(part, jnp.uint4)", _on("one row")),
    Mutant(
        "inputs of a pair swapped",
        _TILE,
        "pltpu.bitcast(part, jnp.int4)",
        "pltpu.bitcast((part << 4) | (part >> 4), jnp.int4)",
        _on("one row"),
    ),
    Mutant(
        "pairs at the rows of inputs",
        _TILE,
        "lax.div(first, packed), ALIGNED // packed",
        "lax.div(first, 1), ALIGNED",
        _LOOPS,
    ),
    Mutant("results not cleared", _DENSE, "total[...] = jnp.zeros_like(total)", "pass", _SUMS),
    Mutant("zeros added", _DENSE, "total[...] = -jnp.dot(", "total[...] = jnp.dot(", _on("one row")),
    Mutant("low bits of zeros left out", _DENSE, "[high, high, low]", "[high, high, 0 * low]", _on("one row")),
    Mutant(
        "low bits of zeros where high ones belong", _DENSE, "[high, high, low]", "[high, low, high]", _on("one row")
    ),
    Mutant(
        "low bits of sums left out",
        _DENSE,
        "(sums - high).astype(jnp.bfloat16)",
        "(high - high)",
        _on("one row"),
    ),
    Mutant(
        "zeros times codes of rows",
        _DENSE,
        "sums = sums * jnp.repeat(rows.scales, of_scale // step, axis=1)[:, : size // step]",
        "sums = sums",
        _on("int8 rows by groups"),
    ),
    Mutant(
        "a row's own scale left out",
        _DENSE,
        "if after is None else total[...] * after[...]",
        "",
        _on("int8 rows", "many int8 rows"),
    ),
    Mutant(
        "scales of rows not repeated in order",
        _DENSE,
        "jnp.repeat(x_scales, num_scales // count, axis=1)",
        "jnp.tile(x_scales, (1, num_scales // count))",
        _on("e4m3 rows by coarser groups"),
    ),
    Mutant(
        "every column tile the first's",
        _DENSE,
        "lambda m, n: (0, n)",
        "lambda m, n: (0, 0)",
        _on("sums of 32"),
    ),
    Mutant("every tile of rows the first's", _DENSE, "lambda m, n: (m, 0)", "lambda m, n: (0, 0)", _WEIGHTS),
    Mutant(
        "finer groups of rows taken by sums",
        _DENSE,
        "if count > num_scales:",
        "if False and count > num_scales:",
        _on("e4m3 rows by finer groups"),
    ),
    Mutant("a group's first row left to others", _GROUPED, "(row >= first)", "(row > first)", _SHARED),
    Mutant("a group's last row and one more", _GROUPED, "(row < last)", "(row <= last)", _SHARED),
    Mutant(
        "what others wrote is lost",
        _GROUPED,
        "previous = out[own, columns].astype(jnp.float32)",
        "previous = jnp.zeros(y.shape, jnp.float32)",
        _SHARED,
    ),
    Mutant(
        "tiles not cleared",
        _GROUPED,
        "        out[...] = jnp.zeros_like(out)\n",
        "        pass\n",
        _NO_ROWS,
    ),
    Mutant("tiles cleared at every visit", _GROUPED, "(visit == 0) | (tile[", "(visit >= 0) | (tile[", _SHARED),
    Mutant("list without the tiles to clear", _VISITS, "last[-1] + num_tiles - used", "last[-1] + 0 * used", _NO_ROWS),
    Mutant("last visit left out", _GROUPED, "visit < products[0])", "visit < products[0] - 1)", _SHARED),
    Mutant(
        "rows of bytes from a register's first on",
        _MOVED,
        "skipped = lax.div(begin - low, 4)",
        "skipped = lax.div(begin - low, ROWS)",
        _BYTE_ROWS,
    ),
    Mutant(
        "a word of the register before",
        _MOVED,
        "x.shape[1]), 0) < _WORDS - skipped",
        "x.shape[1]), 0) <= _WORDS - skipped",
        _BYTE_ROWS,
    ),
    Mutant("the first register for all", _MOVED, "        this = following\n", "", _BYTE_ROWS),
    Mutant(
        "registers behind the tile",
        _MOVED,
        "jnp.minimum(low + index * ROWS, x.shape[0] - ROWS)",
        "low + index * ROWS",
        _BYTE_ROWS,
    ),
    Mutant(
        "blocks begin a step late",
        _GROUPED,
        "lax.div(first, STEP) * STEP",
        "pl.cdiv(first, STEP) * STEP",
        _SKEWED,
    ),
    Mutant("one block of each visit", _GROUPED, "pl.cdiv(last - begin, most)", "jnp.minimum(last - begin, 1)", _SKEWED),
    Mutant("every block the first", _GROUPED, "at = begin + index * most", "at = begin + 0 * index", _SKEWED),
    Mutant("blocks a size too small", _GROUPED, "(last - at > fewer)", "(last - at > fewer + 5)", _SKEWED),
    Mutant(
        "blocks behind the tile",
        _GROUPED,
        "jnp.minimum(at, shape.rows - size), STEP)",
        "at, STEP)",
        _SKEWED,
    ),
    Mutant(
        "every piece of columns the first",
        _GROUPED,
        "pl.multiple_of(index * shape.piece, shape.piece)",
        "pl.multiple_of(index * 0, shape.piece)",
        _SKEWED,
    ),
    Mutant(
        "a piece of columns left out",
        _GROUPED,
        "shape.columns // shape.piece)",
        "shape.columns // shape.piece - 1)",
        _SKEWED,
    ),
    Mutant("every visit the first group's matrix", _GROUPED, "(group[v], 0, strip", "(0 * group[v], 0, strip", _SHARED),
    Mutant(
        "a tile too few of a group",
        _VISITS,
        "(ends - 1) // tile_rows - first + 1",
        "(ends - 1) // tile_rows - first",
        _SHARED,
    ),
    Mutant(
        "tile of the group before",
        _VISITS,
        "first[group] + visit - (last - each)[group]",
        "first[group] + visit - last[group]",
        _SHARED,
    ),
    Mutant("ups are gates", _GROUPED, "half * strips + n", "n", _GATED),
    Mutant("ups begin a strip late", _GROUPED, "half * strips + n", "half * (strips + 1) + n", _STRIPS),
    Mutant(
        "scales of gates for ups",
        _GROUPED,
        "add_product(y, rows, of_rows, codes, scales, by_sums",
        "add_product(y, rows, of_rows, codes, halves[0].scales.at[0, :, columns], by_sums",
        _GATED,
    ),
    Mutant(
        "zeros of gates for ups",
        _GROUPED,
        "clear(y, of_groups, zeros)",
        "clear(y, of_groups, None if zeros is None else halves[0].zeros.at[0, :, columns])",
        _GATED,
    ),
    Mutant(
        "bias of gates for ups",
        _GROUPED,
        "_row_of(matrix.bias[:, columns]",
        "_row_of(halves[0].bias[:, columns]",
        _GATED,
    ),
    Mutant("bias left out", _GROUPED, " + _row_of(matrix.bias[:, columns], group[visit])", "", _GATED),
    Mutant("bias of the next group", _GROUPED, "columns], group[visit])", "columns], group[visit] + 1)", _GATED),
    Mutant("bias of the first groups", _GROUPED, "(lax.div(group[v], _BIASES), strip", "(0, strip", _MANY_BIASES),
    Mutant(
        "bias left out, apart",
        _GROUPED,
        "product_of_groups(x, x_scales, matrix, group_sizes, None, dtype, out_dtype, *options)",
        "product_of_groups(x, x_scales, matrix._replace(bias=None), group_sizes, None, dtype, out_dtype, *options)",
        _gated("columns that fill no registers"),
    ),
    Mutant("gates and ups change places", _GROUPED, "activation(*products)", "activation(*products[::-1])", _GATED),
    Mutant(
        "rows with scales of their own have none in both",
        _GROUPED,
        "y[...] if row_factors is None else y[...] * row_factors[...]",
        "y[...]",
        _gated("rounded rows"),
    ),
]
