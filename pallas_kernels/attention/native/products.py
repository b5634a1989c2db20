"""LLVM IR of the two products of attention, of queries with keys and of weights with values, over a block of keys."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jaxengine.pallas_kernels.attention.native.softmax import CHUNKS
from jaxengine.pallas_kernels.native.builder import F32, FLOATS, I32, I64, INTS, LANES, NOTHING, PTR, Builder, each_lane
from jaxengine.pallas_kernels.native.handlers import Handlers

BLOCK = CHUNKS * LANES  # keys
ROWS = (4, 3, 2, 1)  # numbers of rows that are multiplied at once


@dataclass(frozen=True)
class Products:
    """Products of numbers that are stored as float32, or as words, two neighbouring bfloat16 in 32 bits.

    Attributes:
      name: suffix of the functions' names.
      per_word: numbers in 32 bits, 1 or 2.
      add: function that emits the addition of products: (builder, sums f32 [LANES], two vectors [LANES] of float32, or
        of words as i32) -> new sums.
      at_once: chunks of keys, or vectors of values, whose sums are in registers at a time.
    """

    name: str
    per_word: int
    add: Callable[[Builder, Any, Any, Any], Any]
    at_once: int

    @property
    def _vector(self) -> Any:
        """LLVM type of LANES words."""
        return FLOATS if self.per_word == 1 else INTS

    def _all_lanes(self, b: Builder, pointer: Any, offset: Any) -> Any:
        """Emit a read of the word at `offset` bytes from a pointer; return it in all LANES."""
        return b.all_lanes(b.read(pointer, offset, F32 if self.per_word == 1 else I32))

    def make_dots(self, code: Handlers, rows: int) -> Any:
        """Build dots(`rows` pointers to queries, width, keys, logits), which writes the products of queries [width] and
        keys [width, BLOCK], as words [width / per_word, BLOCK], to logits f32 [rows, BLOCK]. Return the LLVM function.
        """
        function, b = code.begin(f"dots_{self.name}_{rows}", NOTHING, [*[PTR] * rows, I64, PTR, PTR])
        *queries, width, keys, logits = function.args
        words = b.sdiv(width, I64(self.per_word))
        for first in range(0, CHUNKS, self.at_once):
            with b.loop(I64(0), words, 1, [each_lane(0.0)] * rows * self.at_once) as (word, sums):
                own = [
                    b.read(keys, b.total((word, 4 * BLOCK), (4 * LANES * (first + chunk),)), self._vector)
                    for chunk in range(self.at_once)
                ]
                for row, query in enumerate(queries):
                    x = self._all_lanes(b, query, b.total((word, 4)))
                    for at, key in enumerate(own, row * self.at_once):
                        sums[at] = self.add(b, sums[at], x, key)
            for at, found in enumerate(sums):
                row, chunk = divmod(at, self.at_once)
                b.write(found, logits, 4 * (row * BLOCK + LANES * (first + chunk)))
        b.ret_void()
        return function

    def make_sums(self, code: Handlers, rows: int) -> Any:
        """Build sums(width, values, begin, end, weights, decay, sums), which multiplies sums f32 [rows, width] by decay
        f32 [rows], and adds to them the values of keys [begin, end), each times its weight. Return the LLVM function.

        values: [BLOCK, width], as words [BLOCK / per_word, width], the neighbours being keys. weights: [rows, BLOCK],
        rows 4 * BLOCK bytes apart. A word of which one key lies outside of [begin, end) is multiplied whole.
        """
        function, b = code.begin(f"sums_{self.name}_{rows}", NOTHING, [I64, PTR, I64, I64, PTR, PTR, PTR])
        width, values, begin, end, weights, decay, sums = function.args
        begin = b.sdiv(begin, I64(self.per_word))
        end = b.sdiv(b.add(end, I64(self.per_word - 1)), I64(self.per_word))
        factors = [b.all_lanes(b.read(decay, 4 * row, F32)) for row in range(rows)]
        done = I64(0)
        for vectors in (self.at_once, 1):
            stop = b.total((done,), (b.sdiv(b.sub(width, done), I64(vectors * LANES)), vectors * LANES))
            with b.loop(done, stop, vectors * LANES) as (first, _):
                places = [
                    b.total((width, 4 * row), (first, 4), (4 * LANES * vector,))
                    for row in range(rows)
                    for vector in range(vectors)
                ]
                start = [b.fmul(b.read(sums, place, FLOATS), factors[at // vectors]) for at, place in enumerate(places)]
                with b.loop(begin, end, 1, start) as (word, found):
                    own = [
                        b.read(values, b.total((word, width, 4), (first, 4), (4 * LANES * vector,)), self._vector)
                        for vector in range(vectors)
                    ]
                    for row in range(rows):
                        weight = self._all_lanes(b, weights, b.total((word, 4), (4 * BLOCK * row,)))
                        for at, value in enumerate(own, row * vectors):
                            found[at] = self.add(b, found[at], weight, value)
                for place, new in zip(places, found, strict=True):
                    b.write(new, sums, place)
            done = stop
        b.ret_void()
        return function
