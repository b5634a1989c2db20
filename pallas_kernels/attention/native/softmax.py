"""LLVM IR of the online softmax of one row over the keys of a block."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import llvmlite.ir as ir  # pyright: ignore[reportMissingImports]

from jaxengine.pallas_kernels.native.builder import (
    F32,
    FLOATS,
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
)
from jaxengine.pallas_kernels.native.handlers import Handlers
from jaxengine.pallas_kernels.native.words import BFLOAT16

CHUNKS = 4  # vectors of keys in a block
# 2^f for f in [-0.5, 0.5]: coefficients of a least maximum relative error of 2e-9, from the highest power on.
_EXP2 = 1.5353362e-4, 1.3398874e-3, 9.618437e-3, 5.5503324e-2, 0.24022648, 0.6931472, 1.0
_LOG2_E = 1.44269504088896341
# A number of small magnitude is rounded by adding this; the sum's lowest bits are the exponent field of its power of 2.
_ROUNDING = 1.5 * 2.0**23 + 127.0
_SMALLEST = -87.0  # the result for exponents below is that for this one, 1.6e-38


class Softmax:
    """LLVM functions of a module that work on one row's logits f32 [BLOCK]: `cap`, `weigh` and `weigh_words`."""

    def __init__(self, code: Handlers, fma: Any, *, has_dots: bool):
        """Build the functions in the module of `code`. fma: its LLVM function of fused multiply-add. has_dots: whether
        the processor rounds to bfloat16 by itself (AVX-512's `vcvtneps2bf16`).
        """
        self._code, self._fma, self._has_dots = code, fma, has_dots
        self._abs = code.declare("llvm.fabs.v16f32", FLOATS, [FLOATS])
        self._copysign = code.declare("llvm.copysign.v16f32", FLOATS, [FLOATS] * 2)
        self._exp = self._make_exp()
        self.cap = self._make_cap()
        self.weigh = self._make_weigh("weigh", words=False)
        self.weigh_words = self._make_weigh("weigh_words", words=True)

    def _make_exp(self) -> Any:
        """Build exp(f32 vector), for numbers up to 0, and return the LLVM function: exactly 1 for 0, 1.6e-38 below
        _SMALLEST, and NaN for any NaN.
        """
        function, b = self._code.begin("exp", FLOATS, [FLOATS])
        function.attributes.add("alwaysinline")
        x = _larger(b, each_lane(_SMALLEST), *function.args)
        rounded = b.call(self._fma, [x, each_lane(_LOG2_E), each_lane(_ROUNDING)])
        rest = b.call(self._fma, [x, each_lane(_LOG2_E), b.fsub(each_lane(_ROUNDING), rounded)])
        found = each_lane(_EXP2[0])
        for coefficient in _EXP2[1:]:
            found = b.call(self._fma, [found, rest, each_lane(coefficient)])
        power = b.bitcast(b.shl(b.bitcast(rounded, INTS), each_lane(23)), FLOATS)
        b.ret(b.fmul(found, power))  # a product, as NaN must stay NaN whatever its lowest bits are
        return function

    def _make_cap(self) -> Any:
        """Build cap(logits, scale, soft_cap), which replaces one row's logits f32 [BLOCK], after multiplying them by
        `scale`, by soft_cap * tanh(logit / soft_cap). Return the LLVM function.
        """
        function, b = self._code.begin("cap", NOTHING, [PTR, F32, F32])
        row, scale, cap = function.args
        factor, cap = b.all_lanes(b.fdiv(scale, cap)), b.all_lanes(cap)
        for chunk in range(CHUNKS):
            x = b.fmul(b.read(row, 4 * LANES * chunk, FLOATS), factor)
            power = b.call(self._exp, [b.fmul(b.call(self._abs, [x]), each_lane(-2.0))])
            tanh = b.fdiv(b.fsub(each_lane(1.0), power), b.fadd(each_lane(1.0), power))
            b.write(b.fmul(b.call(self._copysign, [tanh, x]), cap), row, 4 * LANES * chunk)
        b.ret_void()
        return function

    def _make_weigh(self, name: str, *, words: bool) -> Any:
        """Build NAME(logits, scale, first, end, largest, total, decay), which replaces one row's logits f32 [BLOCK],
        after multiplying them by `scale`, by its weights, which are 0 outside [first, end). It updates the row's
        running largest logit and total of weights, and writes the factor for what it has summed before to `decay`;
        these three are pointers. Return the LLVM function.

        words: whether the weights are written as bfloat16 [BLOCK], in half of the logits' memory; the total is of those
        before rounding.
        """
        function, b = self._code.begin(name, NOTHING, [PTR, F32, I64, I64, PTR, PTR, PTR])
        row, scale, first, end, largest, total, decay = function.args
        is_whole = b.and_(b.icmp_signed("<=", first, I64(0)), b.icmp_signed(">=", end, I64(CHUNKS * LANES)))
        with b.if_else(is_whole) as (whole, part):
            with whole:
                self._weigh_row(b, row, scale, [None] * CHUNKS, (largest, total, decay), words=words)
            with part:
                ends = [b.all_lanes(b.trunc(each, I32)) for each in (first, end)]
                seen = []
                for start in range(0, CHUNKS * LANES, LANES):
                    key = indices(range(start, start + LANES))
                    seen.append(b.and_(b.icmp_signed(">=", key, ends[0]), b.icmp_signed("<", key, ends[1])))
                self._weigh_row(b, row, scale, seen, (largest, total, decay), words=words)
        b.ret_void()
        return function

    def _weigh_row(self, b: Builder, row: Any, scale: Any, seen: Sequence[Any], softmax: Any, *, words: bool) -> None:
        """Emit the computation of weigh, see `_make_weigh`. seen: for each chunk, i1 [LANES], whether each key counts;
        None if all do. softmax: pointers to largest, total and decay.
        """
        largest, total, decay = softmax
        scale, logits = b.all_lanes(scale), []
        for chunk, own in enumerate(seen):
            logit = b.fmul(b.read(row, 4 * LANES * chunk, FLOATS), scale)
            logits.append(logit if own is None else b.select(own, logit, each_lane(-math.inf)))
        before = b.read(largest, 0, F32)
        new = _larger(b, _across(b, functools.reduce(functools.partial(_larger, b), logits), _larger), before)
        shift = b.select(b.fcmp_ordered("==", new, F32(-math.inf)), F32(0.0), new)
        shifts, found = b.all_lanes(shift), each_lane(0.0)
        for chunk, (logit, own) in enumerate(zip(logits, seen, strict=True)):
            weight = b.call(self._exp, [b.fsub(logit, shifts)])
            weight = weight if own is None else b.select(own, weight, each_lane(0.0))
            found = b.fadd(found, weight)
            if words:
                b.write(self._rounded(b, weight), row, 2 * LANES * chunk)
            else:
                b.write(weight, row, 4 * LANES * chunk)
        factor = b.extract_element(b.call(self._exp, [b.all_lanes(b.fsub(before, shift))]), I32(0))
        added = _across(b, found, Builder.fadd)
        b.write(b.fadd(b.fmul(b.read(total, 0, F32), factor), added), total, 0)
        b.write(new, largest, 0)
        b.write(factor, decay, 0)

    def _rounded(self, b: Builder, numbers: Any) -> Any:
        """Emit the conversion of f32 [LANES], finite, to bfloat16, rounded to nearest even; return the bits, i16
        [LANES].
        """
        shorts = ir.VectorType(I16, LANES)
        if self._has_dots:
            return b.bitcast(b.fptrunc(numbers, ir.VectorType(BFLOAT16, LANES)), shorts)
        bits = b.bitcast(numbers, INTS)
        last = b.and_(b.lshr(bits, each_lane(16)), each_lane(1))
        return b.trunc(b.lshr(b.add(bits, b.add(last, each_lane(0x7FFF))), each_lane(16)), shorts)


def _larger(b: Builder, one: Any, other: Any) -> Any:
    """Emit and return the larger of two f32 values, or of each lane; `other` where one of them is NaN."""
    return b.select(b.fcmp_ordered(">", one, other), one, other)


def _across(b: Builder, vector: Any, combine: Callable[[Builder, Any, Any], Any]) -> Any:
    """Emit the combination of all lanes of f32 [LANES], halves with halves, and return it, f32."""
    step = LANES // 2
    while step:
        moved = b.shuffle_vector(vector, vector, indices([(lane + step) % LANES for lane in range(LANES)]))
        vector, step = combine(b, vector, moved), step // 2
    return b.extract_element(vector, I32(0))
