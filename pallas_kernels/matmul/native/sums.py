"""LLVM IR of sums over the inputs, without threads: some rows times some outputs of a stored matrix.

Vectors are of LANES numbers on every processor; LLVM cuts them to the width of its registers, which changes no bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import llvmlite.ir as ir  # pyright: ignore[reportMissingImports]

from jaxengine.pallas_kernels.native.builder import (
    F32,
    FLOATS,
    I8,
    I16,
    I32,
    I64,
    INTS,
    LANES,
    NOTHING,
    NULL,
    PTR,
    Builder,
    Job,
    each_lane,
    indices,
    least,
)
from jaxengine.pallas_kernels.native.handlers import Handlers
from jaxengine.pallas_kernels.native.words import add_words, read_words

TILE = 4 * LANES  # the outputs of a block are a multiple of this
ROWS = (4, 2, 1)  # numbers of rows of x that can be multiplied at once
# Kind -> (inputs in an element of the matrix, its bytes). Rows of "dots" are bfloat16, too, as its matrix is; those of
# other kinds are float32.
KINDS = {"pairs": (2, 1), "int8": (1, 1), "bfloat16": (1, 2), "float32": (1, 4), "dots": (1, 2)}
JOB = Job(
    ("x", "matrix", "scales", "zeros", "y", "sums"),
    ("width", "rows", "inputs", "outputs", "panels", "panel", "each", "bf16_scales", "bf16_zeros"),
)
# Columns whose sums are kept in memory while they are added up, by rows of x in all: 8 KB, which stay in the first
# cache. And lines of a matrix that are read side by side from left to right, while those after them are prefetched: the
# processor prefetches within a line, but where a line ends it waits for the memory.
_STRIP, _LINES = 32 * TILE, 8
_MOST_SUMS = 16  # sums of a table's tokens that are kept in registers


class Sums(Handlers):
    """Methods that build functions which multiply rows by a range of outputs, in a module of LLVM IR."""

    def __init__(self, triple: str, abi: Mapping[str, int], *, table_lookup: bool, has_dots: bool):
        """Create a module with the functions that the others share.

        triple, abi: see Handlers. table_lookup: whether the processor has AVX-512F's `vpermps`, which widens four bits
        in one instruction. has_dots: see `add_words`.
        """
        super().__init__("products", triple, abi)
        self._lookup = None
        if table_lookup:
            self._lookup = self.declare("llvm.x86.avx512.permvar.sf.512", FLOATS, [FLOATS, INTS])
        self._wide = {
            lanes: self._make_wide(lanes) for lanes in sorted({LANES, *(_MOST_SUMS // rows for rows in ROWS)})
        }
        self._add, self._subtract = self._make_add(), self._make_subtract()
        self._add_words = add_words(self, self._fma, has_dots=has_dots)
        self._lines = {
            (kind, rows, count): self._make_lines(kind, rows, count)
            for kind in KINDS
            for rows in ROWS
            for count in ((_LINES,) if kind == "dots" else (_LINES, 1))  # which divides all panels of words
        }

    def _make_wide(self, lanes: int) -> Any:
        """Build wide(pointer, index, is_bf16), which returns `lanes` numbers from number `index` on as f32. They are
        stored as bfloat16 if is_bf16 is not 0, else as float32. Return the LLVM function.
        """
        numbers, bits = ir.VectorType(F32, lanes), ir.VectorType(I32, lanes)
        function, b = self.begin(f"wide_{lanes}", numbers, [PTR, I64, I64])
        function.attributes.add("alwaysinline")
        pointer, index, is_bf16 = function.args
        with b.if_then(b.icmp_signed("!=", is_bf16, I64(0))):
            half = b.zext(b.read(pointer, b.total((index, 2)), ir.VectorType(I16, lanes)), bits)
            b.ret(b.bitcast(b.shl(half, ir.Constant(bits, [16] * lanes)), numbers))
        b.ret(b.read(pointer, b.total((index, 4)), numbers))
        return function

    def _parts(self, b: Builder, kind: str, matrix: Any, offset: Any, line_bytes: Any) -> list[tuple[int, int, Any]]:
        """Emit reads of TILE columns of one row of the matrix, for "dots" of two neighbouring rows, and prefetches of
        those _LINES rows below. Return a list of (input within the row, index of the accumulator, LANES f32 numbers,
        for "dots" i32 words).

        kind: a key of KINDS. matrix: pointer. offset: i64, bytes from there to the tile. line_bytes: i64, bytes of a
        row. Accumulators hold columns in the order that `_columns` undoes.
        """
        found, places = [], [b.total((offset,), (64 * line,)) for line in range(KINDS[kind][1])]
        lines = (I64(0), line_bytes) if kind == "dots" else (I64(0),)
        for below in lines:
            for place in places:
                self.fetch(b, matrix, b.total((place,), (below,), (line_bytes, _LINES)))
        if kind == "dots":
            words = read_words(b, (b.at(matrix, offset), b.at(matrix, b.add(offset, line_bytes))))
            return [(0, accumulator, own) for accumulator, own in enumerate(words)]
        bits = [b.read(matrix, place, INTS) for place in places]
        if kind == "float32":
            return [(0, line, b.bitcast(own, FLOATS)) for line, own in enumerate(bits)]
        if kind == "bfloat16":
            for line, both in enumerate(bits):
                even = b.shl(both, each_lane(16))
                odd = b.and_(both, each_lane(-65536))
                found += [(0, 2 * line + part, b.bitcast(own, FLOATS)) for part, own in enumerate((even, odd))]
            return found
        width = 8 // KINDS[kind][0]
        for part in range(32 // width):
            each, own = divmod(part, 8 // width)
            found.append((own, each, self._signed(b, bits[0], width * part, width)))
        return found

    def _signed(self, b: Builder, bits: Any, first: int, width: int) -> Any:
        """Emit the conversion of a signed number of `width` bits, from bit `first` on, in each of LANES i32, to
        float32; return the vector.
        """
        if width == 4 and self._lookup is not None:  # vpermps uses the lowest four bits of an index
            table = ir.Constant(FLOATS, [float(code - 16 * (code > 7)) for code in range(16)])
            return b.call(self._lookup, [table, b.lshr(bits, each_lane(first))])
        left = b.shl(bits, each_lane(32 - width - first))
        return b.sitofp(b.ashr(left, each_lane(32 - width)), FLOATS)

    def columns(self, kind: str, rows: int) -> Any:
        """Build columns(job, row, begin, end), which multiplies `rows` rows from `row` on by columns [begin, end), a
        multiple of TILE, of a matrix of this kind (a key of KINDS), and writes the results to the job's y. Return the
        LLVM function.
        """
        function, b = self.begin(f"{kind}_columns_{rows}", NOTHING, [PTR, I64, I64, I64])
        job, row, begin, end = function.args
        panels, panel_lines = JOB.get(b, job, "panels"), JOB.get(b, job, "panel")
        strip = _STRIP // rows
        held = b.bitcast(b.alloca(FLOATS, _STRIP // LANES), PTR)
        with b.loop(begin, end, strip) as (first, _):
            last = least(b, b.add(first, I64(strip)), end)
            with b.loop(I64(0), panels, 1) as (panel, _):
                most = b.sub(panel_lines, b.srem(panel_lines, I64(_LINES)))
                parts = (_LINES, I64(0), most), (1, most, panel_lines)
                for count, start, stop in parts[: 1 if kind == "dots" else 2]:
                    with b.loop(start, stop, count) as (line, _):
                        b.call(self._lines[kind, rows, count], [job, row, first, last, panel, line, held])
                with b.loop(first, last, TILE) as (column, _):
                    sums = self._held(b, rows, held, b.sub(column, first))
                    for each in range(rows):
                        tile = _columns(b, kind, [b.load(place, align=64) for place in sums[4 * each :][:4]])
                        b.call(self._add, [job, b.total((row,), (each,)), panel, column, *tile])
        b.ret_void()
        return function

    def _held(self, b: Builder, rows: int, held: Any, column: Any) -> list[Any]:
        """Emit pointers to the sums of `rows` rows in a tile, four vectors each, whose first column is `column`, i64,
        of a strip. held: pointer to the strip's sums. Return the pointers.
        """
        first = b.bitcast(b.at(held, b.total((column, 4 * rows))), FLOATS.as_pointer())
        return [b.gep(first, [I64(place)]) for place in range(4 * rows)]

    def _make_lines(self, kind: str, rows: int, count: int) -> Any:
        """Build lines(job, row, begin, end, panel, line, held), which multiplies `rows` rows from `row` on by columns
        [begin, end), at most a strip, of the `count` lines of a panel from `line` on. It adds the products to the sums
        in `held`, which it takes as 0 for line 0. Return the LLVM function.
        """
        function, b = self.begin(f"{kind}_lines_{rows}_{count}", NOTHING, [PTR, *[I64] * 5, PTR])
        job, row, begin, end, panel, line, held = function.args
        own = {name: JOB.get(b, job, name) for name in ("x", "matrix", "inputs", "outputs", "panel")}
        inputs, size = KINDS[kind]
        is_first, first_line = b.icmp_signed("==", line, I64(0)), b.total((panel, own["panel"]), (line,))
        # Lines that are multiplied together, and bytes of an input.
        words, x_bytes = (2, 2) if kind == "dots" else (1, 4)
        start = b.total((row, own["inputs"], x_bytes), (first_line, x_bytes * inputs))

        def broadcast(each: int, number: int) -> Any:
            place = b.total((start,), (own["inputs"], x_bytes * each), (x_bytes * number,))
            return b.all_lanes(b.read(own["x"], place, I32 if kind == "dots" else F32))

        numbers = [(each, number) for each in range(rows) for number in range(0, count * inputs, words)]
        stay = {key: broadcast(*key) for key in numbers} if len(numbers) <= _MOST_SUMS else {}
        line_bytes = b.mul(own["outputs"], I64(size))
        with b.loop(begin, end, TILE) as (column, _):
            places = self._held(b, rows, held, b.sub(column, begin))
            sums: list[Any] = [b.select(is_first, each_lane(0.0), b.load(place, align=64)) for place in places]
            for index in range(0, count, words):
                offset = b.total((first_line, own["outputs"], size), (own["outputs"], size * index), (column, size))
                x = {
                    (each, i): stay.get((each, index * inputs + i)) or broadcast(each, index * inputs + i)
                    for each in range(rows)
                    for i in range(inputs)
                }
                for i, accumulator, found in self._parts(b, kind, own["matrix"], offset, line_bytes):
                    for each in range(rows):
                        place = 4 * each + accumulator
                        if kind == "dots":
                            sums[place] = self._add_words(b, sums[place], found, x[each, i])
                        else:
                            sums[place] = b.call(self._fma, [found, x[each, i], sums[place]])
            for found, place in zip(sums, places, strict=True):
                b.store(found, place, align=64)
        b.ret_void()
        return function

    def _make_add(self) -> Any:
        """Build add(job, row, panel, column, four vectors), and return the LLVM function. It multiplies a tile's sums
        by the panel's scales, if the job has any, and adds them to the row's result, or stores them for panel 0. Then
        it subtracts the zeros, if any, times the sum of the panel's inputs.
        """
        function, b = self.begin("add", NOTHING, [PTR, I64, I64, I64, *[FLOATS] * 4])
        job, row, panel, column, *sums = function.args
        own = {name: JOB.get(b, job, name) for name in ("outputs", "panels", "each", "y", "sums")}
        held = {name: (JOB.get(b, job, name), JOB.get(b, job, f"bf16_{name}")) for name in ("scales", "zeros")}
        null, is_first = NULL, b.icmp_signed("==", panel, I64(0))
        places = [b.total((column,), (LANES * part,)) for part in range(4)]
        results = [b.total((row, own["outputs"], 4), (place, 4)) for place in places]
        factors = b.mul(b.sdiv(panel, own["each"]), own["outputs"])
        for new, place, result in zip(sums, places, results, strict=True):
            old = b.read(own["y"], result, FLOATS)
            old = b.select(is_first, each_lane(0.0), old)
            with b.if_else(b.icmp_unsigned("!=", held["scales"][0], null)) as (then, otherwise):
                with then:
                    scale = b.call(self._wide[LANES], [held["scales"][0], b.add(factors, place), held["scales"][1]])
                    b.write(b.call(self._fma, [new, scale, old]), own["y"], result)
                with otherwise:
                    b.write(b.fadd(old, new), own["y"], result)
        with b.if_then(b.icmp_unsigned("!=", held["zeros"][0], null)):
            total = b.read(own["sums"], b.total((row, own["panels"], 4), (panel, 4)), F32)
            less = b.fneg(b.all_lanes(total))
            for place, result in zip(places, results, strict=True):
                zeros = b.call(self._wide[LANES], [held["zeros"][0], b.add(factors, place), held["zeros"][1]])
                y = b.read(own["y"], result, FLOATS)
                b.write(b.call(self._fma, [zeros, less, y]), own["y"], result)
        b.ret_void()
        return function

    def _make_subtract(self) -> Any:
        """Build subtract(job, row, begin, end), which subtracts zeros times the sums of inputs, if the job has zeros,
        from a row's results for tokens [begin, end) of a table, LANES tokens at a time. Return the LLVM function.
        """
        function, b = self.begin("subtract", NOTHING, [PTR, I64, I64, I64])
        job, row, begin, end = function.args
        own = {name: JOB.get(b, job, name) for name in ("outputs", "panels", "zeros", "bf16_zeros", "sums", "y")}
        with b.if_then(b.icmp_unsigned("!=", own["zeros"], NULL)), b.loop(begin, end, LANES) as (token, _):
            result = b.total((row, own["outputs"], 4), (token, 4))
            with b.loop(I64(0), own["panels"], 1, [b.read(own["y"], result, FLOATS)]) as (panel, y):
                total = b.read(own["sums"], b.total((row, own["panels"], 4), (panel, 4)), F32)
                zeros = b.total((panel, own["outputs"]), (token,))
                zeros = b.call(self._wide[LANES], [own["zeros"], zeros, own["bf16_zeros"]])
                y[0] = b.call(self._fma, [zeros, b.fneg(b.all_lanes(total)), y[0]])
            b.write(y[0], own["y"], result)
        b.ret_void()
        return function

    def table(self, kind: str, rows: int) -> Any:
        """Build table(job, row, begin, end), which multiplies `rows` rows from `row` on by tokens [begin, end) of a
        table of this kind (a key of KINDS), and writes the results to the job's y. Return the LLVM function.

        If elements are pairs, each 2 * LANES inputs of x must be ordered with the even ones first.
        """
        function, b = self.begin(f"{kind}_table_{rows}", NOTHING, [PTR, I64, I64, I64])
        job, row, begin, end = function.args
        own = {
            name: JOB.get(b, job, name) for name in ("x", "matrix", "inputs", "outputs", "panels", "panel", "scales")
        }
        own |= {name: JOB.get(b, job, name) for name in ("bf16_scales", "y")}
        inputs, size = KINDS[kind]
        stride = b.total((own["panels"], own["panel"], size))  # bytes of a token
        units, each = (b.sdiv(own["inputs"], I64(inputs * LANES)), b.sdiv(own["panel"], I64(LANES)))
        count = _MOST_SUMS // rows
        with b.loop(begin, end, count) as (tile, _):
            with b.loop(I64(0), units, 1, [each_lane(0.0)] * _MOST_SUMS) as (unit, sums):
                first = b.total((row, own["inputs"], 4), (unit, 4 * LANES * inputs))
                scales = None
                if kind != "bfloat16":
                    scales = b.total((b.sdiv(unit, each), own["outputs"]), (tile,))
                    scales = b.call(self._wide[count], [own["scales"], scales, own["bf16_scales"]])
                x = {
                    r: [
                        b.read(own["x"], b.total((first,), (own["inputs"], 4 * r), (4 * LANES * i,)), FLOATS)
                        for i in range(inputs)
                    ]
                    for r in range(rows)
                }
                for token in range(count):
                    place = b.total((tile, stride), (stride, token), (unit, LANES * size))
                    numbers = self._unit(b, kind, own["matrix"], place)
                    self.fetch(b, own["matrix"], b.total((place,), (stride, count)))
                    for r in range(rows):
                        at = token * rows + r
                        if scales is None:
                            sums[at] = b.call(self._fma, [numbers[0], x[r][0], sums[at]])
                            continue
                        found = b.fmul(numbers[0], x[r][0])
                        for own_numbers, own_x in zip(numbers[1:], x[r][1:], strict=True):
                            found = b.call(self._fma, [own_numbers, own_x, found])
                        scale = b.shuffle_vector(scales, scales, indices([token] * LANES))
                        sums[at] = b.call(self._fma, [found, scale, sums[at]])
            for at, found in enumerate(sums):
                token, r = divmod(at, rows)
                result = b.total((row, own["outputs"], 4), (own["outputs"], 4 * r), (tile, 4), (4 * token,))
                b.write(_sum_of_lanes(b, found), own["y"], result)
        for r in range(rows):
            b.call(self._subtract, [job, b.total((row,), (r,)), begin, end])
        b.ret_void()
        return function

    def _unit(self, b: Builder, kind: str, matrix: Any, place: Any) -> list[Any]:
        """Emit a read of LANES elements of a table of this kind, `place` bytes (i64) after the pointer `matrix`. Return
        a list of f32 vectors: one, or for pairs one of the even and one of the odd inputs.
        """
        inputs, size = KINDS[kind]
        bits = b.zext(b.read(matrix, place, ir.VectorType(I16 if size == 2 else I8, LANES)), INTS)
        if kind == "bfloat16":
            return [b.bitcast(b.shl(bits, each_lane(16)), FLOATS)]
        return [self._signed(b, bits, 8 // inputs * i, 8 // inputs) for i in range(inputs)]


def _sum_of_lanes(b: Builder, vector: Any) -> Any:
    """Emit and return the sum, f32, of a vector's LANES numbers, by adding halves until one number is left."""
    size = LANES
    while size > 1:
        size //= 2
        low, high = (b.shuffle_vector(vector, vector, indices(range(first, first + size))) for first in (0, size))
        vector = b.fadd(low, high)
    return b.extract_element(vector, I32(0))


def _columns(b: Builder, kind: str, sums: Sequence[Any]) -> list[Any]:
    """Emit shuffles of a tile's four accumulators `sums`, and return four vectors of neighbouring columns. An
    accumulator holds every fourth column, for kind "bfloat16" every second column of one half of the tile, and for
    "float32" and "dots" neighbouring ones.
    """
    if kind in ("float32", "dots"):
        return list(sums)
    order = [(column % 4, column // 4) for column in range(TILE)]
    if kind == "bfloat16":
        order = [(2 * (column // 32) + column % 2, column % 32 // 2) for column in range(TILE)]
    pairs = [b.shuffle_vector(sums[first], sums[first + 1], indices(range(2 * LANES))) for first in (0, 2)]
    places = [LANES * accumulator + lane for accumulator, lane in order]
    return [
        b.shuffle_vector(pairs[0], pairs[1], indices(places[first : first + LANES])) for first in range(0, TILE, LANES)
    ]
