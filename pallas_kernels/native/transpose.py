"""LLVM IR that transposes words."""

from __future__ import annotations

import math
from typing import Any

from jaxengine.pallas_kernels.native.builder import I64, INTS, LANES, NOTHING, PTR, indices
from jaxengine.pallas_kernels.native.handlers import Handlers

_VECTOR_BYTES = 4 * LANES


def make_transpose(code: Handlers, name: str = "transpose", target_bytes: int = _VECTOR_BYTES) -> Any:
    """Build NAME(source, row_bytes, target), which reads LANES words of LANES rows that lie row_bytes apart, and writes
    them transposed, to i32 [LANES, LANES] whose rows lie target_bytes apart. Return the LLVM function.
    """
    function, b = code.begin(name, NOTHING, [PTR, I64, PTR])
    source, row_bytes, target = function.args
    vectors = [b.read(source, b.mul(row_bytes, I64(row)), INTS) for row in range(LANES)]
    # Rounds of perfect shuffles of two halves: each moves one bit of a number's vector to its lane.
    for _ in range(int(math.log2(LANES))):
        halves = zip(vectors[: LANES // 2], vectors[LANES // 2 :], strict=True)
        vectors = [
            b.shuffle_vector(*pair, indices([lane // 2 + LANES * (lane % 2) for lane in range(at, at + LANES)]))
            for pair in halves
            for at in (0, LANES)
        ]
    for word, vector in enumerate(vectors):
        b.write(vector, target, target_bytes * word)
    b.ret_void()
    return function
