"""LLVM IR that products of few and of many rows share: their operands, their panels, and words, two neighbouring
bfloat16 inputs in 32 bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import llvmlite.ir as ir  # pyright: ignore[reportMissingImports]

from jaxengine.pallas_kernels.native.builder import FLOATS, I16, I64, INTS, LANES, PTR, Builder, each_lane, indices
from jaxengine.pallas_kernels.native.handlers import BUFFER, FRAME, Handlers


class _BFloat16(ir.Type):
    """LLVM's type bfloat, which llvmlite has no name for."""

    def _to_string(self) -> str:
        return "bfloat"


# Inputs whose products are added up before they are added to the result. Rows get the same bits from all handlers
# because these panels are the same.
PANELS = 32, 64, 96, 128
BFLOAT16 = _BFloat16()
_HALVES = ir.VectorType(BFLOAT16, 2 * LANES)
_SHORTS = ir.VectorType(I16, 2 * LANES)


def read_operands(b: Builder, frame: Any, *, is_table: bool) -> tuple[dict[str, Any], Any]:
    """Emit reads, from an XLA_FFI_CallFrame, of x [rows, inputs], a matrix [lines, outputs], [outputs, lines] if
    is_table, and the result y. Return "x", "matrix", "y", "rows", "inputs" and "outputs" by name; and the lines.
    """
    buffers = b.read(frame, FRAME["arguments"], PTR)
    x, matrix = (b.read(buffers, 8 * index, PTR) for index in (0, 1))
    y = b.read(b.read(frame, FRAME["results"], PTR), 0, PTR)
    found = {name: b.read(own, BUFFER["data"], PTR) for name, own in (("x", x), ("matrix", matrix), ("y", y))}
    x_dims, dims = (b.read(own, BUFFER["dims"], PTR) for own in (x, matrix))
    found |= {"rows": b.read(x_dims, 0, I64), "inputs": b.read(x_dims, 8, I64)}
    return found | {"outputs": b.read(dims, 0 if is_table else 8, I64)}, b.read(dims, 8 if is_table else 0, I64)


def longest_panel(b: Builder, inputs: Any) -> Any:
    """Emit and return the largest of PANELS that divides `inputs`, an i64 multiple of PANELS[0]."""
    found = I64(PANELS[0])
    for panel in PANELS[1:]:
        found = b.select(b.icmp_signed("==", b.srem(inputs, I64(panel)), I64(0)), I64(panel), found)
    return found


def add_words(code: Handlers, fma: Any, *, has_dots: bool) -> Callable[[Builder, Any, Any, Any], Any]:
    """Return a function that emits the addition of the products of words: (builder, sums f32 [LANES], two i32 [LANES])
    -> new sums. A lane gets the sum of two products.

    code: module in which what it calls is declared. fma: LLVM function of fused multiply-add. has_dots: whether the
    processor has AVX-512's `vdpbf16ps`; otherwise inputs are widened and multiplied as float32.
    """
    dots = None
    if has_dots:
        dots = code.declare("llvm.x86.avx512bf16.dpbf16ps.512", FLOATS, [FLOATS, _HALVES, _HALVES])

    def add(b: Builder, sums: Any, one: Any, other: Any) -> Any:
        if dots is not None:
            return b.call(dots, [sums, b.bitcast(one, _HALVES), b.bitcast(other, _HALVES)])
        for widen in (lambda words: b.shl(words, each_lane(16)), lambda words: b.and_(words, each_lane(-65536))):
            sums = b.call(fma, [*(b.bitcast(widen(words), FLOATS) for words in (one, other)), sums])
        return sums

    return add


def read_words(b: Builder, lines: tuple[Any, Any]) -> list[Any]:
    """Emit reads of 4 * LANES bfloat16 from each of two pointers, the outputs of two neighbouring inputs. Return their
    words, four i32 vectors in the order of the outputs.
    """
    found = []
    for first in (0, 2 * LANES):
        one, other = (b.read(line, 2 * first, _SHORTS) for line in lines)
        for start in (0, LANES):
            lanes = [part for lane in range(start, start + LANES) for part in (lane, 2 * LANES + lane)]
            found.append(b.bitcast(b.shuffle_vector(one, other, indices(lanes)), INTS))
    return found
