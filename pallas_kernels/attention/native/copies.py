"""LLVM IR that copies keys and values out of a pool as float32, for each format in which a pool stores them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
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
    PTR,
    Builder,
    each_lane,
    indices,
    least,
)
from jaxengine.pallas_kernels.native.handlers import Handlers

_SHORTS, _HALVES = ir.VectorType(I16, LANES), ir.VectorType(ir.HalfType(), LANES)
_WORD_BYTES, _VECTOR_BYTES = 4, 4 * LANES
_SCALE_BYTES = 4  # of a token's scale, float32, which lies after its elements


@dataclass(frozen=True)
class Format:
    """Storage of keys and values in a pool.

    Attributes:
      size: bytes of an element.
      widened: function that emits the conversion to f32 of element `index` of each lane: (builder, words i32 [LANES] of
        4 / size elements each, index) -> f32 [LANES]. Bits of other elements do not count.
      has_scales: whether the elements of a token are followed by the scale that they are multiplied by.
    """

    size: int
    widened: Callable[[Builder, Any, int], Any]
    has_scales: bool = False

    @property
    def after(self) -> int:
        """Bytes after the elements of a token."""
        return _SCALE_BYTES * self.has_scales


def _float32(b: Builder, words: Any, index: int) -> Any:
    """Emit the conversion of float32, see Format.widened: the same bits."""
    return b.bitcast(words, FLOATS)


def _bfloat16(b: Builder, words: Any, index: int) -> Any:
    """Emit the conversion of bfloat16, see Format.widened: the upper half of a float32."""
    return b.bitcast(b.and_(words, each_lane(-65536)) if index else b.shl(words, each_lane(16)), FLOATS)


def _float16(b: Builder, words: Any, index: int) -> Any:
    """Emit the conversion of float16, see Format.widened."""
    return _of_halves(b, b.lshr(words, each_lane(16 * index)))


def _int8(b: Builder, words: Any, index: int) -> Any:
    """Emit the conversion of int8, see Format.widened."""
    return b.sitofp(b.ashr(b.shl(words, each_lane(24 - 8 * index)), each_lane(24)), FLOATS)


def _float8_e5m2(b: Builder, words: Any, index: int) -> Any:
    """Emit the conversion of float8_e5m2, see Format.widened: the upper half of a float16."""
    return _of_halves(b, b.shl(b.lshr(words, each_lane(8 * index)), each_lane(8)))


def _float8_e4m3fn(b: Builder, words: Any, index: int) -> Any:
    """Emit the conversion of float8_e4m3fn, see Format.widened.

    With its four bits of exponent at the lower end of float16's five, a code is a float16 of 2**-8 times its value,
    subnormal ones included. The largest magnitude is NaN.
    """
    codes = b.lshr(words, each_lane(8 * index))
    magnitude = b.and_(codes, each_lane(0x7F))
    is_nan = b.icmp_unsigned("==", magnitude, each_lane(0x7F))
    magnitude = b.select(is_nan, each_lane(0x7E00), b.shl(magnitude, each_lane(7)))
    sign = b.shl(b.and_(codes, each_lane(0x80)), each_lane(8))
    return b.fmul(_of_halves(b, b.or_(sign, magnitude)), each_lane(256.0))


def _of_halves(b: Builder, words: Any) -> Any:
    """Emit the conversion of the float16 in the lower half of each word to f32, and return them."""
    return b.fpext(b.bitcast(b.trunc(words, _SHORTS), _HALVES), FLOATS)


# KVSpec.kv_dtype -> its format.
FORMATS: Mapping[str, Format] = {
    "float32": Format(4, _float32),
    "bfloat16": Format(2, _bfloat16),
    "float16": Format(2, _float16),
    "int8": Format(1, _int8),
    "float8_e4m3fn": Format(1, _float8_e4m3fn),
    "float8_e5m2": Format(1, _float8_e5m2),
    "int8_per_token_head": Format(1, _int8, has_scales=True),
    "fp8_per_token_head": Format(1, _float8_e4m3fn, has_scales=True),
}


def make_copy_keys(code: Handlers, kv_dtype: str, transpose: Any, block: int) -> Any:
    """Build DTYPE_keys(source, width, target), which copies LANES keys of `width` elements each to a column of f32
    [width, block], transposed and multiplied by their scales, if they have some. Return the LLVM function.

    It may read up to _VECTOR_BYTES after the keys, where a pool has values. transpose: of `make_transpose`.
    """
    form = FORMATS[kv_dtype]
    function, b = code.begin(f"{kv_dtype}_keys", NOTHING, [PTR, I64, PTR])
    source, width, target = function.args
    num_bytes = b.mul(width, I64(form.size))
    row_bytes = b.add(num_bytes, I64(form.after))
    words: Any = b.alloca(I8, I64(_VECTOR_BYTES * LANES))
    words.align = _VECTOR_BYTES
    scales = ir.Constant(FLOATS, ir.Undefined)
    for key in range(LANES * form.has_scales):
        scales = b.insert_element(scales, b.read(source, b.total((row_bytes, key), (num_bytes,)), F32), I32(key))
    per_word = _WORD_BYTES // form.size
    with b.loop(I64(0), width, LANES * per_word) as (first, _):
        b.call(transpose, [b.at(source, b.mul(first, I64(form.size))), row_bytes, words])
        end = least(b, b.sub(width, first), I64(LANES * per_word))
        columns = b.at(target, b.mul(first, I64(4 * block)))
        with b.loop(I64(0), end, 4) as (at, _):
            for place in range(4 // per_word):
                word = b.read(words, b.total((at, form.size * LANES), (_VECTOR_BYTES * place,)), INTS)
                for index in range(per_word):
                    column = form.widened(b, word, index)
                    column = b.fmul(column, scales) if form.has_scales else column
                    b.write(column, columns, b.total((at, 4 * block), (4 * block * (per_word * place + index),)))
    b.ret_void()
    return function


def make_copy_values(code: Handlers, kv_dtype: str) -> Any:
    """Build DTYPE_values(source, width, target), which copies LANES values of `width` elements each, a multiple of
    LANES, to f32 [LANES, width], multiplied by their scales, if they have some. Return the LLVM function.
    """
    form = FORMATS[kv_dtype]
    function, b = code.begin(f"{kv_dtype}_values", NOTHING, [PTR, I64, PTR])
    source, width, target = function.args
    row_bytes = b.total((width, form.size), (form.after,))
    with b.loop(I64(0), I64(LANES), 1) as (key, _):
        row = b.at(source, b.mul(key, row_bytes))
        scale = b.all_lanes(b.read(row, b.mul(width, I64(form.size)), F32)) if form.has_scales else None
        with b.loop(I64(0), width, LANES) as (first, _):
            found = _read(b, form, row, b.mul(first, I64(form.size)))
            found = found if scale is None else b.fmul(found, scale)
            b.write(found, target, b.total((key, width, 4), (first, 4)))
    b.ret_void()
    return function


def make_copy_keys_words(code: Handlers, transpose: Any, block: int) -> Any:
    """Build keys_words(source, width, target), which copies LANES keys of `width` bfloat16 each to a column of words of
    neighbouring elements, i32 [width / 2, block], transposed. Return the LLVM function.

    It may read up to _VECTOR_BYTES after the keys, and writes whole squares of [LANES, LANES] words. transpose: of
    `make_transpose`, whose target has rows of `block` words.
    """
    function, b = code.begin("keys_words", NOTHING, [PTR, I64, PTR])
    source, width, target = function.args
    row_bytes = b.mul(width, I64(2))
    with b.loop(I64(0), row_bytes, _VECTOR_BYTES) as (first, _):
        b.call(transpose, [b.at(source, first), row_bytes, b.at(target, b.mul(first, I64(block)))])
    b.ret_void()
    return function


def make_copy_values_words(code: Handlers) -> Any:
    """Build values_words(source, width, target), which copies LANES values of `width` bfloat16 each, a multiple of
    LANES, to words of neighbouring keys, i32 [LANES / 2, width]. Return the LLVM function.
    """
    function, b = code.begin("values_words", NOTHING, [PTR, I64, PTR])
    source, width, target = function.args
    order = indices([part for lane in range(LANES) for part in (lane, LANES + lane)])
    with b.loop(I64(0), I64(LANES // 2), 1) as (pair, _), b.loop(I64(0), width, LANES) as (first, _):
        place = b.total((pair, width, 4), (first, 2))
        one, other = (b.read(source, b.total((place,), (width, 2 * key)), _SHORTS) for key in (0, 1))
        words = b.bitcast(b.shuffle_vector(one, other, order), INTS)
        b.write(words, target, b.total((pair, width, 4), (first, 4)))
    b.ret_void()
    return function


def make_trim(code: Handlers) -> Any:
    """Build trim(values, width, begin, end), which sets to 0, in words of neighbouring keys i32 [block / 2, width], the
    values of a key that shares its word with the first or the last of keys [begin, end) but lies outside: a weight of 0
    does not help if they are not finite. Return the LLVM function.
    """
    function, b = code.begin("trim", NOTHING, [PTR, I64, I64, I64])
    values, width, begin, end = function.args
    for bound, kept in ((begin, -65536), (end, 65535)):
        is_odd = b.icmp_signed("!=", b.and_(bound, I64(1)), I64(0))
        line = b.mul(b.ashr(bound, I64(1)), width)
        with b.if_then(is_odd), b.loop(I64(0), width, LANES) as (first, _):
            place = b.total((line, 4), (first, 4))
            b.write(b.and_(b.read(values, place, INTS), each_lane(kept)), values, place)
    b.ret_void()
    return function


def _read(b: Builder, form: Format, pointer: Any, offset: Any) -> Any:
    """Emit a read of LANES elements `offset` bytes after a pointer; return them as f32."""
    words = b.read(pointer, offset, ir.VectorType({1: I8, 2: I16, 4: I32}[form.size], LANES))
    return form.widened(b, words if form.size == 4 else b.zext(words, INTS), 0)
