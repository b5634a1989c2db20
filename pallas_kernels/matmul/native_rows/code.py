"""LLVM IR of products of many rows with a dense matrix, and of the XLA FFI handlers that run them.

A handler cuts the outputs into blocks, and many rows too if there are few outputs, which the threads of XLA's pool, and
the calling thread, take one after another. Of a block it packs a panel at a time, some inputs (`longest_panel`) of a
few tiles of outputs, in words of 32 bits: an input of float32, or two neighbouring ones of bfloat16, the operand of
AVX-512's `vdpbf16ps`. All rows are then multiplied by each packed tile, a few at once, whose sums stay in registers
from one end of the panel to the other (Goto & van de Geijn 2008, "Anatomy of high-performance matrix multiplication").
Meanwhile the next panel is prefetched.

The order of additions to an element follows from the matrix's shape alone: a row has the same bits whatever other rows
are multiplied with it, and for any number of threads. For a matrix [in, out] they are those of matmul.native, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import llvmlite.ir as ir  # pyright: ignore[reportMissingImports]

from jaxengine.pallas_kernels.native.builder import (
    COUNTERS,
    FLOATS,
    I8,
    I32,
    I64,
    INTS,
    LANES,
    NOTHING,
    PTR,
    Builder,
    Job,
    ceiling,
    each_lane,
    least,
)
from jaxengine.pallas_kernels.native.handlers import Handlers
from jaxengine.pallas_kernels.native.transpose import make_transpose
from jaxengine.pallas_kernels.native.words import PANELS, add_words, longest_panel, read_operands, read_words

VECTORS = 4  # of outputs in a tile
TILE = VECTORS * LANES  # the outputs are a multiple of this
ROWS = (6, 4, 2, 1)  # numbers of rows that are multiplied at once
_STRIP = 4  # tiles whose panels are packed together
_FEW_TILES = 8  # of a thread, below which rows are cut into blocks
_HEIGHT = 48  # rows of such a block, at least
_LINES = 8  # inputs of a matrix that are read side by side from left to right
_VECTOR_BYTES = 4 * LANES


@dataclass(frozen=True)
class Kind:
    """Matrices that a handler multiplies.

    Attributes:
      per_word: inputs in a word of 32 bits: 1 of float32, 2 of bfloat16.
      is_table: whether the matrix is [out, in].
    """

    per_word: int
    is_table: bool

    @property
    def words(self) -> int:
        """Most words of a panel, for each output."""
        return PANELS[-1] // self.per_word

    @property
    def tile_bytes(self) -> int:
        """Bytes of a packed tile, i32 [VECTORS, words, LANES]."""
        return VECTORS * self.words * _VECTOR_BYTES


# XLA is faster for tables of float32.
HANDLERS = {
    "many_float32": Kind(1, is_table=False),
    "many_bfloat16": Kind(2, is_table=False),
    "many_bfloat16_table": Kind(2, is_table=True),
}
# Blocks are numbered along the outputs, `columns` of them, `width` outputs each; then along the rows, `height` each.
JOB = Job(("x", "matrix", "y"), ("width", "columns", "height", "rows", "inputs", "outputs", "panel"))


class RowProducts(Handlers):
    """Module of LLVM IR with one handler for each of HANDLERS, named as it, and for each a function NAME_blocks(job),
    which computes the blocks of a job with the fields of JOB until none is left.
    """

    def __init__(self, triple: str, abi: Mapping[str, int], *, wide: bool, has_dots: bool):
        """Build the module.

        triple, abi: see Handlers. wide: whether the processor has vectors of 512 bits; with narrower ones a tile is
        multiplied a vector at a time. has_dots: whether it has `vdpbf16ps`; otherwise bfloat16 is widened and
        multiplied as float32.
        """
        super().__init__("row_products", triple, abi)
        self._at_once = VECTORS if wide else 1
        self._add_words = add_words(self, self._fma, has_dots=has_dots)
        transpose = make_transpose(self)
        of_word = {kind.per_word: kind for kind in HANDLERS.values()}
        products = {
            size: {rows: self._make_products(f"products_{size}_{rows}", kind, rows) for rows in ROWS}
            for size, kind in of_word.items()
        }
        for handler, kind in HANDLERS.items():
            pack = self._make_pack_table(handler, kind, transpose) if kind.is_table else self._make_pack(handler, kind)
            block = self._make_block(handler, kind, pack, products[kind.per_word])
            self.make_handler(handler, JOB, self.make_work(f"{handler}_blocks", block))

    def _make_products(self, name: str, kind: Kind, rows: int) -> Any:
        """Build NAME(x, row_bytes, packed, words, y, outputs, is_first, ahead, ahead_bytes), and return the LLVM
        function. It multiplies `rows` rows of x by `words` words of a packed tile, and adds the sums to a tile of y, or
        stores them if is_first is not 0. For each word it prefetches two lines of 64 bytes: from `ahead` on for the
        first word, and ahead_bytes later for each one after it.

        x, y: pointers to the first row's first word and output.
        """
        function, b = self.begin(name, NOTHING, [PTR, I64, PTR, I64, PTR, I64, I64, PTR, I64])
        x, row_bytes, packed, words, y, outputs, is_first, ahead, ahead_bytes = function.args
        is_first = b.icmp_signed("!=", is_first, I64(0))
        for first in range(0, VECTORS, self._at_once):
            vectors = range(first, first + self._at_once)
            with b.loop(I64(0), words, 1, [each_lane(0.0)] * rows * len(vectors)) as (word, sums):
                own = [
                    b.read(packed, b.total((word, _VECTOR_BYTES), (kind.words * _VECTOR_BYTES * vector,)), INTS, 64)
                    for vector in vectors
                ]
                for line in range(2 if first == 0 else 0):
                    self.fetch(b, ahead, b.total((word, ahead_bytes), (_VECTOR_BYTES * line,)))
                for row in range(rows):
                    of_row = b.all_lanes(b.read(x, b.total((word, 4), (row_bytes, row)), I32))
                    for at, matrix in enumerate(own, row * len(vectors)):
                        if kind.per_word == 2:
                            sums[at] = self._add_words(b, sums[at], matrix, of_row)
                        else:
                            factors = b.bitcast(matrix, FLOATS), b.bitcast(of_row, FLOATS)
                            sums[at] = b.call(self._fma, [*factors, sums[at]])
            for at, found in enumerate(sums):
                place = b.total((outputs, 4 * (at // len(vectors))), (_VECTOR_BYTES * vectors[at % len(vectors)],))
                old = b.select(is_first, each_lane(0.0), b.read(y, place, FLOATS))
                b.write(b.fadd(old, found), y, place)
        b.ret_void()
        return function

    def _make_pack(self, name: str, kind: Kind) -> Any:
        """Build NAME_pack(job, first, column, tiles, packed), which packs a panel's words of inputs, from word `first`
        on, of `tiles` tiles from output `column` on of a matrix [in, out]. Return the LLVM function.
        """
        function, b = self.begin(f"{name}_pack", NOTHING, [PTR, I64, I64, I64, PTR])
        job, first, column, tiles, packed = function.args
        matrix, outputs = JOB.get(b, job, "matrix"), JOB.get(b, job, "outputs")
        count, size = _LINES // kind.per_word, 4 // kind.per_word
        with b.loop(I64(0), JOB.get(b, job, "panel"), count) as (start, _), b.loop(I64(0), tiles, 1) as (tile, _):
            word = b.add(first, start)
            source = b.total((word, outputs, 4), (column, size), (tile, TILE * size))
            target = b.at(packed, b.total((tile, kind.tile_bytes), (start, _VECTOR_BYTES)))
            for line in range(count):
                line_of = b.at(matrix, b.total((source,), (outputs, 4 * line)))
                if kind.per_word == 1:
                    found = [b.read(line_of, _VECTOR_BYTES * vector, INTS) for vector in range(VECTORS)]
                else:
                    found = read_words(b, (line_of, b.at(line_of, b.mul(outputs, I64(2)))))
                for vector, own in enumerate(found):
                    b.write(own, target, _VECTOR_BYTES * (kind.words * vector + line), _VECTOR_BYTES)
        b.ret_void()
        return function

    def _make_pack_table(self, name: str, kind: Kind, transpose: Any) -> Any:
        """Build NAME_pack, see `_make_pack`, for a matrix [out, in], whose words are packed LANES at a time. Return the
        LLVM function. transpose: of `make_transpose`.
        """
        function, b = self.begin(f"{name}_pack", NOTHING, [PTR, I64, I64, I64, PTR])
        job, first, column, tiles, packed = function.args
        matrix, words = JOB.get(b, job, "matrix"), JOB.get(b, job, "panel")
        row_bytes = b.mul(JOB.get(b, job, "inputs"), I64(4 // kind.per_word))
        with b.loop(I64(0), b.mul(tiles, I64(VECTORS)), 1) as (vector, _), b.loop(I64(0), words, LANES) as (word, _):
            source = b.at(matrix, b.total((column, row_bytes), (vector, row_bytes, LANES), (first, 4), (word, 4)))
            target = b.at(packed, b.total((vector, kind.words * _VECTOR_BYTES), (word, _VECTOR_BYTES)))
            b.call(transpose, [source, row_bytes, target])
        b.ret_void()
        return function

    def _make_block(self, name: str, kind: Kind, pack: Any, products: Mapping[int, Any]) -> Any:
        """Build NAME_block(job, block), which multiplies a block's rows by its outputs, and return the LLVM function.
        pack: of `_make_pack` or `_make_pack_table`. products: of `_make_products`, by number of rows.
        """
        function, b = self.begin(f"{name}_block", NOTHING, [PTR, I64])
        job, block = function.args
        own = {field: JOB.get(b, job, field) for field in JOB.fields if field not in COUNTERS}
        panels = b.sdiv(own["inputs"], b.mul(own["panel"], I64(kind.per_word)))
        begin = b.mul(b.srem(block, own["columns"]), own["width"])
        end = least(b, b.add(begin, own["width"]), own["outputs"])
        first_row = b.mul(b.sdiv(block, own["columns"]), own["height"])
        rows = first_row, least(b, b.add(first_row, own["height"]), own["rows"])
        packed: Any = b.alloca(I8, I64(_STRIP * kind.tile_bytes))
        packed.align = _VECTOR_BYTES
        with b.loop(begin, end, _STRIP * TILE) as (strip, _):
            tiles = least(b, b.sdiv(b.sub(end, strip), I64(TILE)), I64(_STRIP))
            with b.loop(I64(0), panels, 1) as (panel, _):
                word = b.mul(panel, own["panel"])
                b.call(pack, [job, word, strip, tiles, packed])
                is_last = b.icmp_signed("==", b.add(panel, I64(1)), panels)
                following = b.select(is_last, I64(0), b.add(word, own["panel"]))
                next_strip = b.select(is_last, b.add(strip, I64(_STRIP * TILE)), strip)
                with b.loop(I64(0), tiles, 1) as (tile, _):
                    ahead = _ahead(b, kind, own, following, b.total((next_strip,), (tile, TILE)))
                    tile_of = b.at(packed, b.mul(tile, I64(kind.tile_bytes)))
                    _by_rows(b, kind, own, products, rows, (word, b.total((strip,), (tile, TILE)), tile_of), ahead)
        b.ret_void()
        return function

    def operands(self, b: Builder, handler: str, frame: Any) -> dict[str, Any]:
        kind, (found, _) = HANDLERS[handler], read_operands(b, frame, is_table=HANDLERS[handler].is_table)
        panel = b.sdiv(longest_panel(b, found["inputs"]), I64(kind.per_word))
        return found | {"panel": panel, "is_small": ir.IntType(1)(0)}

    def cut(self, b: Builder, values: Mapping[str, Any], threads: Any) -> dict[str, Any]:
        """Emit the computation of a block's outputs and rows, and of the number of blocks, and return them as fields of
        the job. values: others by name. threads: their number, i64.

        Rows are cut where a thread would have fewer than _FEW_TILES tiles.
        """
        tiles, one = b.sdiv(values["outputs"], I64(TILE)), I64(1)
        parts = least(b, threads, b.sdiv(values["rows"], I64(_HEIGHT)))
        is_few = b.icmp_signed("<", tiles, b.mul(threads, I64(_FEW_TILES)))
        parts = b.select(b.and_(is_few, b.icmp_signed(">", parts, one)), parts, one)
        each = ceiling(b, tiles, ceiling(b, threads, parts))
        columns, height = ceiling(b, tiles, each), ceiling(b, values["rows"], parts)
        blocks = b.mul(columns, ceiling(b, values["rows"], height))
        return {"width": b.mul(each, I64(TILE)), "columns": columns, "height": height, "blocks": blocks}


def _ahead(b: Builder, kind: Kind, own: Mapping[str, Any], word: Any, column: Any) -> tuple[Any, Any, Any]:
    """Emit the addresses of a tile of the matrix, whose first word and output are `word` and `column`. Return those of
    its first two lines of 64 bytes, of its next two, and the bytes of a row as it is stored: of a word's inputs, or of
    one output of a table.
    """
    size = 4 // kind.per_word
    if kind.is_table:
        row_bytes, two = b.mul(own["inputs"], I64(size)), I64(2 * _VECTOR_BYTES)
        first = b.at(own["matrix"], b.total((column, row_bytes), (word, 4)))
    else:
        row_bytes = b.mul(own["outputs"], I64(4))
        two = I64(2 * _VECTOR_BYTES) if kind.per_word == 1 else b.mul(own["outputs"], I64(2))
        first = b.at(own["matrix"], b.total((word, row_bytes), (column, size)))
    return first, b.at(first, two), row_bytes


def _by_rows(
    b: Builder,
    kind: Kind,
    own: Mapping[str, Any],
    products: Mapping[int, Any],
    block: tuple[Any, Any],
    panel: tuple[Any, Any, Any],
    ahead: tuple[Any, Any, Any],
) -> None:
    """Emit calls of `products`, by number of rows, that multiply a block's rows by a packed tile.

    own: the job's fields by name. block: its first row and the one after its last. panel: the first word, the first
    output, and a pointer to the packed words. ahead: of `_ahead`; the calls for the first two groups of rows prefetch
    it, the others nothing new.
    """
    word, column, packed = panel
    row_bytes = b.mul(own["inputs"], I64(4 // kind.per_word))
    is_first, (done, end) = b.zext(b.icmp_signed("==", word, I64(0)), I64), block
    for rows in ROWS:
        stop = b.total((done,), (b.sdiv(b.sub(end, done), I64(rows)), rows))
        with b.loop(done, stop, rows) as (row, _):
            x = b.at(own["x"], b.total((row, row_bytes), (word, 4)))
            y = b.at(own["y"], b.total((row, own["outputs"], 4), (column, 4)))
            group = b.sub(row, block[0])
            is_start, is_next = b.icmp_signed("==", group, I64(0)), b.icmp_signed("<=", group, I64(ROWS[0]))
            lines = b.select(is_start, ahead[0], b.select(is_next, ahead[1], packed))
            step = b.select(is_next, ahead[2], I64(0))
            b.call(products[rows], [x, row_bytes, packed, own["panel"], y, own["outputs"], is_first, lines, step])
        done = stop


def build(triple: str, abi: Mapping[str, int], features: Mapping[str, bool]) -> ir.Module:
    """Return the module of LLVM IR with the handlers. triple, abi: see Handlers. features: of the processor, by LLVM's
    names; avx512f and avx512bf16 are used.
    """
    has = {"wide": bool(features.get("avx512f")), "has_dots": bool(features.get("avx512bf16"))}
    return RowProducts(triple, abi, **has).module
