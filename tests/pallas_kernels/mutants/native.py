"""Faults of products of few and of many rows as machine code."""

from __future__ import annotations

from importlib.util import find_spec

from tests.pallas_kernels.mutants.mutant import Mutant

SECONDS = 60
UNLESS = "" if find_spec("llvmlite") else "llvmlite is not installed"

_SUMS, _CODE, _PRODUCT = (f"matmul/native/{name}" for name in ("sums", "code", "product"))
# Of tests.pallas_kernels.matmul.test_native.CASES.
_ONE, _PAIRS, _INT8, _, _BLOCKS, _SHORT, _NARROW, _BF16 = ((("native", "cpu", n),) for n in range(8))
_TABLE, _TOKENS, _VECTORS, _TABLE_BF16, _HALF, _STRIPS = ((("native", "cpu", n),) for n in range(8, 14))
_MANY, _DOTS, _PANELS, _MANY_TABLE, _FLOAT32, _MANY_FLOAT32, _ODD = ((("native", "cpu", n),) for n in range(14, 21))
_CUT = (("native", "cpu", 22),)
_ROWS, _WORDS = "matmul/native_rows/code", "native/words"


MUTANTS = [
    Mutant("eight is no negative code", _SUMS, "16 * (code > 7)", "16 * (code > 8)", _ONE),
    Mutant("codes without a sign", _SUMS, "b.ashr(left", "b.lshr(left", _INT8),
    Mutant("odd inputs as even ones", _SUMS, "stay.get((each, index * inputs + i))", "stay.get((each, 0))", _ONE),
    Mutant("sums of the lines before dropped", _SUMS, '("==", line, I64(0))', '(">=", line, I64(0))', _ONE),
    Mutant("lines after the last eight left out", _SUMS, "(1, most, panel_lines)", "(1, most, most)", _BF16),
    Mutant("columns after a strip left out", _SUMS, "loop(begin, end, strip)", "loop(begin, I64(1), strip)", _STRIPS),
    Mutant("lines of the first panel", _SUMS, 'b.total((panel, own["panel"]), (line,))', "line", _ONE),
    Mutant("sums of tiles in one place", _SUMS, "rows, held, b.sub(column, begin)", "rows, held, I64(0)", _BLOCKS),
    Mutant("bytes of a pair exchanged", _SUMS, "each, own = divmod", "own, each = divmod", _ONE),
    Mutant("low half of a bfloat16 word kept", _SUMS, "each_lane(-65536)", "each_lane(-1)", _BF16),
    Mutant("even columns of bfloat16 not moved", _SUMS, "b.shl(both", "b.lshr(both", _BF16),
    Mutant("columns of bfloat16 as those of bytes", _SUMS, "2 * (column // 32) + column % 2", "column % 4", _BF16),
    Mutant("columns of bytes as they are", _SUMS, "(column % 4, column // 4)", "(column // 16, column % 16)", _ONE),
    Mutant("first row of x for all", _SUMS, '(own["inputs"], x_bytes * each)', '(own["inputs"], 0)', _PAIRS),
    Mutant("results of rows in one", _SUMS, "b.total((row,), (each,)), panel", "row, panel", _PAIRS),
    Mutant("a single last row is left out", _SUMS, "ROWS = (4, 2, 1)", "ROWS = (4, 2)", _PAIRS),
    Mutant("two last rows are left out", _SUMS, "ROWS = (4, 2, 1)", "ROWS = (4,)", _INT8),
    Mutant("scales of the first group", _SUMS, 'b.mul(b.sdiv(panel, own["each"]), own["outputs"])', "I64(0)", _ONE),
    Mutant("scales of panels", _SUMS, 'b.sdiv(panel, own["each"])', "panel", _PAIRS),
    Mutant(
        "results begin with what was there",
        _SUMS,
        'icmp_signed("==", panel, I64(0))',
        'icmp_signed("==", panel, I64(-1))',
        _ONE,
    ),
    Mutant(
        "every panel begins anew",
        _SUMS,
        'icmp_signed("==", panel, I64(0))',
        'icmp_signed(">=", panel, I64(0))',
        _PAIRS,
    ),
    Mutant("zeros are added", _SUMS, "less = b.fneg(b.all_lanes(total))", "less = b.all_lanes(total)", _ONE),
    Mutant(
        "zeros of the first row's inputs",
        _SUMS,
        '(row, own["panels"], 4), (panel, 4)), F32)\n            less',
        "(panel, 4)), F32)\n            less",
        _INT8,
    ),
    Mutant("inputs of the first panel", _CODE, "(panel, size, 4), (first, 4)", "(first, 4)", _ONE),
    Mutant("bfloat16 scales read as float32", _CODE, "b.zext(of_two, I64)", "I64(0)", _INT8),
    Mutant("panels across groups", _CODE, "b.select(fits, size", "b.select(b.or_(fits, fits.type(1)), size", _ONE),
    Mutant("later blocks are left out", "native/handlers", 'b.load(counter(b, job, "blocks"))', "I64(1)", _BLOCKS),
    Mutant("groups that vectors do not divide", _PRODUCT, "% _SUM_LANES", "% 1", _SHORT),
    Mutant("half a tile", _PRODUCT, "] or outputs % _TILE", "] or outputs % 32", _NARROW),
    Mutant(
        "tokens in another's place", _SUMS, "(tile, 4), (4 * token,)", "(tile, 4), (4 * (count - 1 - token),)", _TABLE
    ),
    Mutant("another token's scale", _SUMS, "indices([token] * LANES)", "indices([0] * LANES)", _TOKENS),
    Mutant("scales of vectors", _SUMS, "b.sdiv(unit, each)", "unit", _VECTORS),
    Mutant("a vector's last half is left out", _SUMS, "for first in (0, size))", "for first in (0, 0))", _TABLE),
    Mutant("zeros of the first row of a table", _SUMS, "b.total((row,), (r,)), begin", "row, begin", _TABLE),
    Mutant("inputs of a table in their order", _PRODUCT, ".swapaxes(2, 3)", "", _TABLE),
    Mutant("rows of a table in one", _SUMS, '(own["outputs"], 4 * r), (tile, 4)', "(tile, 4)", _TABLE),
    Mutant("bfloat16 of a table not moved", _SUMS, "b.shl(bits, each_lane(16))", "bits", _TABLE_BF16),
    Mutant("groups of half a vector", _PRODUCT, "group % _LANES", "group % 8", _HALF),
    Mutant("float32 lines of the first panel", _SUMS, 'b.total((panel, own["panel"]), (line,))', "line", _FLOAT32),
    Mutant(
        "words of the first line alone", _SUMS, "b.at(matrix, b.add(offset, line_bytes))", "b.at(matrix, offset)", _DOTS
    ),
    Mutant("rows of words as float32", _SUMS, "(2, 2) if kind", "(2, 4) if kind", _DOTS),
    Mutant("panels of float32 for few rows only", _CODE, 'in ("float32", "dots")', 'in ("dots",)', _MANY_FLOAT32),
    Mutant("panels of words for few rows only", _CODE, 'in ("float32", "dots")', 'in ("float32",)', _PANELS),
    Mutant("inputs that no panel divides", _PRODUCT, "or inputs % _MOST_PANEL or", "or inputs % 16 or", _ODD),
    Mutant("panels that do not divide the inputs", _WORDS, "I64(panel), found)", "I64(panel), I64(64))", _MANY),
    Mutant("outputs of words exchanged", _WORDS, "(lane, 2 * LANES + lane)", "(2 * LANES + lane, lane)", _MANY),
    Mutant("words of the first outputs", _WORDS, "b.read(line, 2 * first, _SHORTS)", "b.read(line, 0, _SHORTS)", _MANY),
    Mutant(
        "sums of the panels before dropped",
        _ROWS,
        'b.icmp_signed("==", word, I64(0))',
        'b.icmp_signed(">=", word, I64(0))',
        _PANELS,
    ),
    Mutant(
        "results of many rows begin with what was there",
        _ROWS,
        'b.icmp_signed("!=", is_first, I64(0))',
        'b.icmp_signed("!=", is_first, is_first)',
        _MANY,
    ),
    Mutant("the last single row left out", _ROWS, "ROWS = (6, 4, 2, 1)", "ROWS = (6, 4, 2)", _MANY),
    Mutant("first row for all", _ROWS, "(row_bytes, row)), I32", "(row_bytes, 0)), I32", _MANY),
    Mutant("results of many rows in one", _ROWS, "(outputs, 4 * (at // len(vectors)))", "(outputs, 0)", _MANY),
    Mutant("results of vectors in one", _ROWS, "vectors[at % len(vectors)],", "vectors[0],", _MANY),
    Mutant("one vector of a tile for all", _ROWS, "kind.words * _VECTOR_BYTES * vector,", "0,", _MANY),
    Mutant("words of the first panel", _ROWS, "word = b.add(first, start)", "word = start", _PANELS),
    Mutant("lines packed in one place", _ROWS, "(kind.words * vector + line)", "(kind.words * vector)", _MANY_FLOAT32),
    Mutant("tiles packed in one place", _ROWS, "(tile, kind.tile_bytes), (start", "(start", _PANELS),
    Mutant("the first tile for all", _ROWS, "b.mul(tile, I64(kind.tile_bytes))", "I64(0)", _PANELS),
    Mutant(
        "results of a strip in the first",
        _ROWS,
        "(word, b.total((strip,), (tile, TILE))",
        "(word, b.total((tile, TILE))",
        _PANELS,
    ),
    Mutant("blocks after the first left out", _ROWS, "b.mul(b.srem(block, own", "b.mul(b.srem(I64(0), own", _PANELS),
    Mutant("rows after the first block left out", _ROWS, "b.mul(b.sdiv(block, own", "b.mul(b.sdiv(I64(0), own", _CUT),
    Mutant("the first words of a table", _ROWS, "(first, 4), (word, 4)))", "(word, 4)))", _MANY_TABLE),
    Mutant(
        "the first tokens of a table",
        _ROWS,
        "b.total((column, row_bytes), (vector, row_bytes, LANES)",
        "b.total((vector, row_bytes, LANES)",
        _MANY_TABLE,
    ),
    Mutant("a vector of tokens for all", _ROWS, "(vector, row_bytes, LANES), ", "", _MANY_TABLE),
    Mutant(
        "words of a table not transposed", "native/transpose", "range(int(math.log2(LANES)))", "range(0)", _MANY_TABLE
    ),
    Mutant("rows of x of the first panel", _ROWS, "(row, row_bytes), (word, 4)))", "(row, row_bytes)))", _PANELS),
]
