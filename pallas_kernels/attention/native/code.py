"""LLVM IR of paged attention, and of the XLA FFI handlers that run it.

Online softmax over blocks of BLOCK keys (Milakov & Gimelshein 2018, arXiv 1805.02867; FlashAttention, Dao et al. 2022,
arXiv 2205.14135). A handler cuts a step into items, a few tokens of one sequence and one KV head each, which the
threads of XLA's pool, and the calling thread, take one after another. For each block of keys an item copies the keys
that its tokens see, transposed and as float32, and the values, as float32, into its own memory; all its rows, one for
each token and query head, are then multiplied by them from there. Queries, keys and values of bfloat16 can stay so: as
words, two neighbouring ones in 32 bits, the operands of AVX-512's `vdpbf16ps`, with weights rounded to bfloat16.

Blocks begin at multiples of BLOCK in the sequence's own positions, and the order of additions to an element follows
from these alone: a token has the same bits whatever other tokens are in its item or in the step, and for any number of
threads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import llvmlite.ir as ir  # pyright: ignore[reportMissingImports]

from jaxengine.pallas_kernels.attention.native.copies import (
    FORMATS,
    make_copy_keys,
    make_copy_keys_words,
    make_copy_values,
    make_copy_values_words,
    make_trim,
)
from jaxengine.pallas_kernels.attention.native.products import BLOCK, ROWS, Products
from jaxengine.pallas_kernels.attention.native.softmax import CHUNKS, Softmax
from jaxengine.pallas_kernels.native.builder import (
    COUNTERS,
    F32,
    FLOATS,
    I32,
    I64,
    LANES,
    NOTHING,
    PTR,
    Builder,
    Job,
    each_lane,
    least,
)
from jaxengine.pallas_kernels.native.handlers import BUFFER, FRAME, Handlers
from jaxengine.pallas_kernels.native.transpose import make_transpose
from jaxengine.pallas_kernels.native.words import add_words

_OF_FORMATS = {f"attention_{kv_dtype}": kv_dtype for kv_dtype in FORMATS}
WORDS = "attention_words"  # handler for queries and pools of bfloat16
HANDLERS = _OF_FORMATS | {WORDS: "bfloat16"}  # with KVSpec.kv_dtype of their pools
# Arguments of a handler, in order, with the fields of a job that are sizes of their axes.
_ARGUMENTS = {
    "q": ("num_tokens", "heads", "width"),  # [T, N, H], f32, of WORDS bfloat16
    "pool": ("num_pages", "kv_heads", ""),  # [P, K, elements and scales of a page]
    "page_table": ("", "columns"),  # i32 [S, W]
    "tiles": ("", "num_tiles"),  # i32 [3, n]: sequence, first token, tokens
    "ranges": ("", ""),  # i32 [2, T]: first key that a token sees, one past the last
    "scale": ("",),  # f32 [K], factor of the logits of a KV head
    "soft_cap": ("",),  # f32 [1], 0 for none
    "sinks": ("",),  # f32 [N]
    "sizes": ("",),  # i32 [4]: _SIZES
}
_RESULTS = {"o": ("", "", "value_width"), "softmax": ("", "")}  # f32 [T, N, Hv]; f32 [T, N, 2]: largest logit, total
# Tiles in use, tokens of a page, most tokens of a tile, and whether one thread is as fast as several.
_SIZES = "tiles_in_use", "page_size", "block_q", "is_small"
JOB = Job(
    (*_ARGUMENTS, *_RESULTS),
    (*(size for sizes in (*_ARGUMENTS.values(), *_RESULTS.values()) for size in sizes if size), *_SIZES[:-1]),
)
# Memory of an item, in this order.
_SCRATCH = "keys", "values", "weights", "sums", "largest", "total", "decay"
_COPY = ir.FunctionType(NOTHING, [PTR, I64, PTR]).as_pointer()  # of keys or values
_LINE_BYTES = 64  # of a cache


@dataclass(frozen=True)
class Steps:
    """LLVM functions that an item calls for a block of keys; dots and sums by number of rows.

    Attributes:
      query_bytes: bytes of an element of q.
      copies: copy of a chunk's keys, and of its values (copies.py).
      dots, sums: of Products.
      weigh: of Softmax.
      trim: of `make_trim`; None for values that are not words.
    """

    query_bytes: int
    copies: Sequence[Any]
    dots: Mapping[int, Any]
    sums: Mapping[int, Any]
    weigh: Any
    trim: Any = None


class AttentionCode(Handlers):
    """Module of LLVM IR with one handler for each of HANDLERS, named as it, and for each a function NAME_items(job),
    which computes the items of a job with the fields of JOB until none is left.
    """

    def __init__(self, triple: str, abi: Mapping[str, int], *, wide: bool, has_dots: bool):
        """Build the module.

        triple, abi: see Handlers. wide: whether the processor has vectors of 512 bits; with narrower ones half as many
        chunks of keys are multiplied at once. has_dots: whether it has `vdpbf16ps`; otherwise words are widened and
        multiplied as float32.
        """
        super().__init__("attention", triple, abi)
        self._softmax = softmax = Softmax(self, self._fma, has_dots=has_dots)
        at_once = CHUNKS if wide else CHUNKS // 2
        floats = self._of_products(Products("floats", 1, self._add_floats, at_once))
        item, transpose = self._make_item(*floats, softmax.weigh), make_transpose(self)
        for name, kv_dtype in _OF_FORMATS.items():
            self._add_handler(name, self._make_item_of(name, kv_dtype, item, transpose))
        words = self._of_products(Products("words", 2, add_words(self, self._fma, has_dots=has_dots), at_once))
        squares = make_transpose(self, "transpose_words", 4 * BLOCK)
        copies = make_copy_keys_words(self, squares, BLOCK), make_copy_values_words(self)
        steps = Steps(2, copies, *words, softmax.weigh_words, make_trim(self))
        function, b = self.begin(f"{WORDS}_item", NOTHING, [PTR, I64])
        job, index = function.args
        self._compute(b, job, index, I64(2), I64(0), steps)
        self._add_handler(WORDS, function)

    def _add_floats(self, b: Builder, sums: Any, one: Any, other: Any) -> Any:
        """Emit sums + one * other of float32, rounded once (a fused multiply-add), and return it; see Products.add."""
        return b.call(self._fma, [one, other, sums])

    def _of_products(self, products: Products) -> tuple[dict[int, Any], dict[int, Any]]:
        """Build the functions of `products`, and return dots and sums, each by number of rows."""
        dots = {rows: products.make_dots(self, rows) for rows in ROWS}
        return dots, {rows: products.make_sums(self, rows) for rows in ROWS}

    def _add_handler(self, name: str, item: Any) -> None:
        """Build the handler NAME and its function NAME_items. item: function (job, index) that computes an item."""
        self.make_handler(name, JOB, self.make_work(f"{name}_items", item))

    def _make_item(self, dots: dict, sums: dict, weigh: Any) -> Any:
        """Build item(job, index, size, after, copy keys, copy values), which computes one item of a pool whose elements
        have `size` bytes, with `after` bytes after those of a token, for queries of float32. Return the LLVM function.

        Copies are pointers to functions of `make_copy_keys` and `make_copy_values`. The other arguments: see Steps.
        """
        function, b = self.begin("item", NOTHING, [PTR, I64, I64, I64, _COPY, _COPY])
        job, index, size, after, *copies = function.args
        self._compute(b, job, index, size, after, Steps(4, copies, dots, sums, weigh))
        return function

    def _compute(self, b: Builder, job: Any, index: Any, size: Any, after: Any, steps: Steps) -> None:
        """Emit the computation of an item, see `_make_item`, and the function's end."""
        own = {field: JOB.get(b, job, field) for field in JOB.fields if field not in COUNTERS}
        own["group"] = b.sdiv(own["heads"], own["kv_heads"])
        own["key_bytes"] = b.add(b.mul(own["width"], size), after)
        own["value_bytes"] = b.add(b.mul(own["value_width"], size), after)
        _Item(self, b, own, self._scratch(b, own), steps).compute(index)
        b.ret_void()

    def _make_item_of(self, name: str, kv_dtype: str, item: Any, transpose: Any) -> Any:
        """Build NAME_item(job, index), which computes an item of a pool of kv_dtype, and return the LLVM
        function. item, transpose: those of `_make_item` and `make_transpose`.
        """
        copies = make_copy_keys(self, kv_dtype, transpose, BLOCK), make_copy_values(self, kv_dtype)
        form = FORMATS[kv_dtype]
        function, b = self.begin(f"{name}_item", NOTHING, [PTR, I64])
        b.call(item, [*function.args, I64(form.size), I64(form.after), *copies])
        b.ret_void()
        return function

    def _scratch(self, b: Builder, own: dict[str, Any]) -> dict[str, Any]:
        """Emit the allocation of an item's memory in the stack frame of the function; return pointers by name."""
        rows = b.mul(own["block_q"], own["group"])
        sizes = (own["width"], BLOCK), (own["value_width"], BLOCK), (rows, BLOCK), (rows, own["value_width"])
        found = {}
        for each, factors in zip(_SCRATCH, (*sizes, (rows,), (rows,), (rows,)), strict=True):
            found[each] = b.alloca(ir.IntType(8), b.total((*factors, 4)))
            found[each].align = 64
        return found

    @property
    def cap(self) -> Any:
        """LLVM function `cap` of Softmax."""
        return self._softmax.cap

    def operands(self, b: Builder, handler: str, frame: Any) -> dict[str, Any]:
        values = {}
        for place, table in (("arguments", _ARGUMENTS), ("results", _RESULTS)):
            buffers = b.read(frame, FRAME[place], PTR)
            for index, (name, axes) in enumerate(table.items()):
                buffer = b.read(buffers, 8 * index, PTR)
                values[name] = b.read(buffer, BUFFER["data"], PTR)
                dims = b.read(buffer, BUFFER["dims"], PTR)
                values |= {axis: b.read(dims, 8 * at, I64) for at, axis in enumerate(axes) if axis}
        sizes = [b.sext(b.read(values["sizes"], 4 * index, I32), I64) for index in range(len(_SIZES))]
        values |= dict(zip(_SIZES, sizes, strict=True))
        values["is_small"] = b.icmp_signed("!=", values["is_small"], I64(0))
        return values

    def cut(self, b: Builder, values: Mapping[str, Any], threads: Any) -> dict[str, Any]:
        return {"blocks": b.mul(values["tiles_in_use"], values["kv_heads"])}


class _Item:
    """Emits the computation of one item: at most block_q tokens of a sequence, and one KV head."""

    def __init__(self, code: AttentionCode, b: Builder, own: dict[str, Any], scratch: dict, steps: Steps):
        """Prepare. own: fields of the job by name, and sizes that follow from them. scratch: pointers to the item's
        memory, by the names of _SCRATCH.
        """
        self._code, self._b, self._own, self._scratch, self._steps = code, b, own, scratch, steps

    def compute(self, item: Any) -> None:
        """Emit reads of the tile of an item, by its index, i64, and the computation."""
        b, own, scratch, steps = self._b, self._own, self._scratch, self._steps
        self._head = b.srem(item, own["kv_heads"])
        tile = b.sdiv(item, own["kv_heads"])
        lines = [b.total((own["num_tiles"], 4 * line), (tile, 4)) for line in range(3)]
        self._seq, self._first, self._count = (b.sext(b.read(own["tiles"], line, I32), I64) for line in lines)
        self._rows = b.mul(self._count, own["group"])
        self._start()
        with b.loop(I64(0), self._count, 1, [I64(2**31 - 1), I64(0)]) as (token, limits):
            low, high = self._range(token)
            some = b.icmp_signed(">", high, low)
            limits[0] = b.select(some, least(b, limits[0], low), limits[0])
            limits[1] = b.select(b.and_(some, b.icmp_signed(">", high, limits[1])), high, limits[1])
        low, high = limits
        scale = b.read(own["scale"], b.mul(self._head, I64(4)), F32)
        cap = b.read(own["soft_cap"], 0, F32)
        has_cap = b.fcmp_ordered(">", cap, F32(0.0))
        rest = b.select(has_cap, F32(1.0), scale)  # what capped logits are still multiplied by
        first = b.total((b.sdiv(low, I64(BLOCK)), BLOCK))
        start = b.total((b.sdiv(low, I64(LANES)), LANES))
        with b.loop(start, least(b, high, b.add(first, I64(BLOCK))), LANES) as (key, _):
            self._fetch(key)
        with b.loop(first, high, BLOCK) as (base, _):
            begin, end = b.sub(low, base), b.sub(high, base)
            begin = b.select(b.icmp_signed("<", begin, I64(0)), I64(0), begin)
            end = least(b, end, I64(BLOCK))
            self._copy(base, begin, end, high)
            self._by_rows(
                steps.dots,
                lambda rows, row: [
                    *(self._query(b.add(row, I64(each))) for each in range(rows)),
                    own["width"],
                    scratch["keys"],
                    b.at(scratch["weights"], b.total((row, 4 * BLOCK))),
                ],
            )
            with b.loop(I64(0), self._rows, 1) as (row, _):
                start, stop = self._range(b.sdiv(row, own["group"]))
                softmax = [b.at(scratch[each], b.total((row, 4))) for each in ("largest", "total", "decay")]
                logits = b.at(scratch["weights"], b.total((row, 4 * BLOCK)))
                with b.if_then(has_cap):
                    b.call(self._code.cap, [logits, scale, cap])
                b.call(steps.weigh, [logits, rest, b.sub(start, base), b.sub(stop, base), *softmax])
            self._by_rows(
                steps.sums,
                lambda rows, row: [
                    own["value_width"],
                    scratch["values"],
                    begin,
                    end,
                    b.at(scratch["weights"], b.total((row, 4 * BLOCK))),
                    b.at(scratch["decay"], b.total((row, 4))),
                    b.at(scratch["sums"], b.total((row, own["value_width"], 4))),
                ],
            )
        self._finish()

    def _by_rows(self, functions: Mapping[int, Any], arguments: Callable[[int, Any], list[Any]]) -> None:
        """Emit calls of `functions`, by number of rows, that cover the item's rows. arguments(rows, row): returns those
        of a call for `rows` rows from `row` on.
        """
        b, done = self._b, I64(0)
        for rows in ROWS:
            stop = b.total((done,), (b.sdiv(b.sub(self._rows, done), I64(rows)), rows))
            with b.loop(done, stop, rows) as (row, _):
                b.call(functions[rows], arguments(rows, row))
            done = stop

    def _start(self) -> None:
        """Emit the start of each row's softmax: its sink, if it has one, and no sums."""
        b, own, scratch = self._b, self._own, self._scratch
        with b.loop(I64(0), self._rows, 1) as (row, _):
            sink = b.read(own["sinks"], b.total((self._query_head(row), 4)), F32)
            has_sink = b.fcmp_ordered(">", sink, F32(-math.inf))
            b.write(sink, scratch["largest"], b.total((row, 4)))
            b.write(b.select(has_sink, F32(1.0), F32(0.0)), scratch["total"], b.total((row, 4)))
            with b.loop(I64(0), own["value_width"], LANES) as (first, _):
                b.write(each_lane(0.0), scratch["sums"], b.total((row, own["value_width"], 4), (first, 4)))

    def _query_head(self, row: Any) -> Any:
        """Emit and return the query head of a row of the item."""
        b, group = self._b, self._own["group"]
        return b.total((self._head, group), (b.srem(row, group),))

    def _place(self, row: Any) -> Any:
        """Emit and return the index of a row in [T, N]."""
        b, own = self._b, self._own
        token = b.add(self._first, b.sdiv(row, own["group"]))
        return b.total((token, own["heads"]), (self._query_head(row),))

    def _query(self, row: Any) -> Any:
        """Emit and return a pointer to the query of a row."""
        b, own = self._b, self._own
        return b.at(own["q"], b.total((self._place(row), own["width"], self._steps.query_bytes)))

    def _range(self, token: Any) -> tuple[Any, Any]:
        """Emit reads of the range of keys that a token of the item sees, and return its ends."""
        b, own = self._b, self._own
        token = b.add(self._first, token)
        places = b.total((token, 4)), b.total((own["num_tokens"], 4), (token, 4))
        start, end = (b.sext(b.read(own["ranges"], place, I32), I64) for place in places)
        return start, end

    def _copy(self, base: Any, begin: Any, end: Any, high: Any) -> None:
        """Emit copies of the chunks of a block that contain keys [begin, end), counted from its first key `base`, and
        prefetches of the chunks a block later, as far as they lie below key `high`.
        """
        b, own, scratch = self._b, self._own, self._scratch
        first = b.total((b.sdiv(begin, I64(LANES)), LANES))
        with b.loop(first, end, LANES) as (key, _):
            position = b.add(base, key)
            later = b.add(position, I64(BLOCK))
            self._fetch(b.select(b.icmp_signed("<", later, high), later, position))
            keys, values = self._chunk(position)
            copy_keys, copy_values = self._steps.copies
            b.call(copy_keys, [keys, own["width"], b.at(scratch["keys"], b.total((key, 4)))])
            per_word = 4 // self._steps.query_bytes
            target = b.at(scratch["values"], b.total((b.sdiv(key, I64(per_word)), own["value_width"], 4)))
            b.call(copy_values, [values, own["value_width"], target])
        if self._steps.trim is not None:
            b.call(self._steps.trim, [scratch["values"], own["value_width"], begin, end])

    def _chunk(self, position: Any) -> tuple[Any, Any]:
        """Emit and return pointers to the keys and to the values of the chunk that begins at a position, i64."""
        b, own = self._b, self._own
        column = least(b, b.sdiv(position, own["page_size"]), b.sub(own["columns"], I64(1)))
        page = b.sext(b.read(own["page_table"], b.total((self._seq, own["columns"], 4), (column, 4)), I32), I64)
        page = least(b, page, b.sub(own["num_pages"], I64(1)))
        page = b.select(b.icmp_signed("<", page, I64(0)), I64(0), page)
        within = b.srem(position, own["page_size"])
        tile = b.total((page, own["kv_heads"]), (self._head,))
        token_bytes = b.add(own["key_bytes"], own["value_bytes"])
        tile = b.at(own["pool"], b.total((tile, own["page_size"], token_bytes)))
        keys = b.at(tile, b.mul(within, own["key_bytes"]))
        return keys, b.at(tile, b.total((own["page_size"], own["key_bytes"]), (within, own["value_bytes"])))

    def _fetch(self, position: Any) -> None:
        """Emit prefetches, into the second cache, of the chunk that begins at a position, i64."""
        b, own = self._b, self._own
        for pointer, size in zip(self._chunk(position), ("key_bytes", "value_bytes"), strict=True):
            with b.loop(I64(0), b.mul(own[size], I64(LANES)), _LINE_BYTES) as (line, _):
                self._code.fetch(b, pointer, line)

    def _finish(self) -> None:
        """Emit writes of the item's results."""
        b, own, scratch = self._b, self._own, self._scratch
        with b.loop(I64(0), self._rows, 1) as (row, _):
            place = self._place(row)
            for index, name in enumerate(("largest", "total")):
                number = b.read(scratch[name], b.total((row, 4)), F32)
                b.write(number, own["softmax"], b.total((place, 8), (4 * index,)))
            divisor = b.select(b.fcmp_ordered("==", number, F32(0.0)), F32(1.0), number)
            divisor = b.all_lanes(divisor)
            with b.loop(I64(0), own["value_width"], LANES) as (first, _):
                found = b.read(scratch["sums"], b.total((row, own["value_width"], 4), (first, 4)), FLOATS)
                b.write(b.fdiv(found, divisor), own["o"], b.total((place, own["value_width"], 4), (first, 4)))


def build(triple: str, abi: Mapping[str, int], features: Mapping[str, bool]) -> ir.Module:
    """Return the module of LLVM IR with the handlers. triple, abi: see Handlers. features: of the processor, by LLVM's
    names.
    """
    has = {"wide": bool(features.get("avx512f")), "has_dots": bool(features.get("avx512bf16"))}
    return AttentionCode(triple, abi, **has).module
