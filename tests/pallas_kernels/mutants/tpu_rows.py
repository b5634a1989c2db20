"""Faults of the TPU's rounding of rows whose scales are each for a few inputs."""

from __future__ import annotations

from tests.pallas_kernels.mutants.mutant import Mutant
from tests.pallas_kernels.worker import Job

SECONDS = 60

_KERNEL, _ROUNDING = "matmul/tpu/microscaled", "matmul/rounding"


def _on(*cases: str) -> tuple[Job, ...]:
    return tuple(("microscaled", "tpu-lazy", case) for case in cases)


_COLUMNS, _ROWS = _on("nvfp4, tiles of columns and steps that overlap"), _on("nvfp4, tiles of rows")
_FOUR, _RECORDED, _POWERS = _on("mxfp4"), _on("nvfp4, recorded"), _on("mxfp4, recorded")

MUTANTS = [
    Mutant("scales shifted by a group", _KERNEL, "& -group\n", "& -group ^ group\n", _FOUR),
    Mutant("scales of the next column", _KERNEL, "first + register, axis", "first + (register ^ 1), axis", _FOUR),
    Mutant("scales of the first column for all", _KERNEL, "first + register, axis", "first, axis", _FOUR),
    Mutant("groups half as large", _KERNEL, "step = group // 2\n", "step = group // 4\n", _FOUR),
    Mutant("pairs of lanes left out", _KERNEL, "paired, step // 2", "paired, step // 4", _FOUR),
    Mutant(
        "the other part kept",
        _KERNEL,
        "jnp.where(has_bit, one, zero), given",
        "jnp.where(has_bit, zero, one), given",
        _FOUR,
    ),
    Mutant(
        "a lane's own part given",
        _KERNEL,
        "(jnp.where(has_bit, zero, one), there",
        "(jnp.where(has_bit, one, zero), there",
        _FOUR,
    ),
    Mutant("given to the next lane", _KERNEL, "lane ^ step", "lane ^ 1", _FOUR),
    Mutant("the least of a pair", _KERNEL, "= jnp.maximum(jnp.where", "= jnp.minimum(jnp.where", _FOUR),
    Mutant("signs kept", _KERNEL, "[jnp.abs(part(rows, register))", "[(part(rows, register))", _FOUR),
    Mutant("scales of the rows before", _KERNEL, "        return later\n", "        return held\n", _COLUMNS),
    Mutant("last rows left out", _KERNEL, "steps = pl.cdiv(num_rows, step)", "steps = num_rows // step", _COLUMNS),
    Mutant(
        "last rows begin behind the tile",
        _KERNEL,
        "jnp.minimum(index * step, num_rows - step)",
        "index * step",
        _COLUMNS,
    ),
    Mutant("every tile of columns the first", _KERNEL, "lambda m, n: (m, n)", "lambda m, n: (m, 0)", _COLUMNS),
    Mutant("every tile of rows the first", _KERNEL, "lambda m, n: (m, n)", "lambda m, n: (0, n)", _ROWS),
    Mutant("whole scales of the first tile", _KERNEL, "(0 if one else m, 0)", "(0, 0)", _ROWS),
    Mutant(
        "the first row's whole scale for all",
        _KERNEL,
        "global_scale[0][rows if len(global_scale[0]) > 1 else slice(None)]",
        "global_scale[0][:1]",
        _ROWS,
    ),
    Mutant("last tile of columns left out", _KERNEL, "pl.cdiv(size, columns)", "size // columns", _FOUR + _COLUMNS),
    Mutant("ties to the larger code", _ROUNDING, "(values + magnifier)", "(values * 1.00001 + magnifier)", _FOUR),
    Mutant("a bit too many", _ROUNDING, "2.0 ** (23 - mantissa)", "2.0 ** (22 - mantissa)", _FOUR),
    Mutant("no least step", _ROUNDING, "jnp.maximum(_power(values), least)", "_power(values)", _FOUR),
    Mutant(
        "values beyond the largest code",
        _ROUNDING,
        "_short(jnp.clip(values, LEAST[dtype], LARGEST[dtype]), dtype)",
        "_short(values, dtype)",
        _RECORDED,
    ),
    Mutant(
        "scales not rounded",
        _ROUNDING,
        "return _short(jnp.minimum(",
        "return (lambda held, _: held)(jnp.minimum(",
        _RECORDED,
    ),
    Mutant(
        "scales beyond the largest",
        _ROUNDING,
        'global_scale, LARGEST["float8_e4m3fn"])',
        "global_scale, 1e9)",
        _RECORDED,
    ),
    Mutant(
        "whole scales left out",
        _ROUNDING,
        "jnp.where(held > 0, held / global_scale, 1.0)",
        "jnp.where(held > 0, held, 1.0)",
        _RECORDED,
    ),
    Mutant("powers rounded down", _ROUNDING, "largest >= 1.75 * power", "largest >= 2 * power", _POWERS),
    Mutant("powers twice as large", _ROUNDING, "(0.5 * lax.bitcast_convert_type", "(lax.bitcast_convert_type", _FOUR),
]
