"""Faults of products of few rows as machine code."""

from __future__ import annotations

from importlib.util import find_spec

from tests.pallas_kernels.mutants.mutant import Mutant

SECONDS = 60
UNLESS = "" if find_spec("llvmlite") else "llvmlite is not installed"

_CODE, _PRODUCT = "matmul/native/code", "matmul/native/product"
# Of tests.pallas_kernels.matmul.test_native.CASES.
_ONE, _PAIRS, _INT8, _CHANNEL, _BLOCKS, _SHORT, _NARROW, _BF16, _LONG = ((("native", "cpu", n),) for n in range(9))

MUTANTS = [
    Mutant("eight is no negative code", _CODE, "16 * (code > 7)", "16 * (code > 8)", _ONE),
    Mutant("codes without a sign", _CODE, "b.ashr(left", "b.lshr(left", _INT8),
    Mutant("odd inputs as even ones", _CODE, "4 * each), (4 * i,)", "4 * each), (0,)", _ONE),
    Mutant("bytes of a pair exchanged", _CODE, "each, own = divmod", "own, each = divmod", _ONE),
    Mutant("low half of a bfloat16 word kept", _CODE, "[-65536]", "[-1]", _BF16),
    Mutant("even columns of bfloat16 not moved", _CODE, "b.shl(both", "b.lshr(both", _BF16),
    Mutant("columns of bfloat16 as those of bytes", _CODE, "2 * (column // 32) + column % 2", "column % 4", _BF16),
    Mutant("columns of bytes as they are", _CODE, "(column % 4, column // 4)", "(column // 16, column % 16)", _ONE),
    Mutant("first row of x for all", _CODE, '(own["inputs"], 4 * each)', '(own["inputs"], 0)', _PAIRS),
    Mutant("results of rows in one", _CODE, "b.total((row,), (each,)), panel", "row, panel", _PAIRS),
    Mutant("a single last row is left out", _CODE, "_ROWS = (4, 2, 1)", "_ROWS = (4, 2)", _PAIRS),
    Mutant("two last rows are left out", _CODE, "_ROWS = (4, 2, 1)", "_ROWS = (4,)", _INT8),
    Mutant("scales of the first group", _CODE, 'b.mul(b.sdiv(panel, own["each"]), own["outputs"])', "_I64(0)", _ONE),
    Mutant("scales of panels", _CODE, 'b.sdiv(panel, own["each"])', "panel", _PAIRS),
    Mutant(
        "results begin with what was there",
        _CODE,
        'icmp_signed("==", panel, _I64(0))',
        'icmp_signed("==", panel, _I64(-1))',
        _ONE,
    ),
    Mutant(
        "every panel begins anew",
        _CODE,
        'icmp_signed("==", panel, _I64(0))',
        'icmp_signed(">=", panel, _I64(0))',
        _PAIRS,
    ),
    Mutant("zeros are added", _CODE, "b.fsub(ir", "b.fadd(ir", _ONE),
    Mutant("zeros of the first row's inputs", _CODE, '(row, own["panels"], 4), (panel, 4)', "(panel, 4)", _INT8),
    Mutant("inputs of the first panel", _CODE, "(panel, size, 4), (first, 4)", "(first, 4)", _ONE),
    Mutant("bfloat16 scales read as float32", _CODE, "b.zext(of_two, _I64)", "_I64(0)", _INT8),
    Mutant("panels across groups", _CODE, "b.select(fits, size", "b.select(b.or_(fits, fits.type(1)), size", _ONE),
    Mutant("later blocks are left out", _CODE, '_get(b, job, "blocks")', "_I64(1)", _BLOCKS),
    Mutant("groups that vectors do not divide", _PRODUCT, "% _SUM_LANES", "% 1", _SHORT),
    Mutant("half a tile", _PRODUCT, "matrix.shape[1] % _TILE", "matrix.shape[1] % 32", _NARROW),
]
