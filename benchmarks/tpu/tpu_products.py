"""Estimated cycles of the TPU's products with quantised matrices, and the time that their bytes take; needs libtpu, not
a TPU.

The kernel is profiled bare (tpu_profile) over the four products of a Llama 3.1 8B's layer. A grid's copies are assumed
to be hidden, so cycles are those of its computation; the larger of these and of its bytes over the bandwidth is its
time. Share: the time of the codes of the weights alone, of that time. Matrices with a scale per channel are multiplied
by XLA and not measured here.
"""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.harness import shared
from benchmarks.recorder import Recorder
from benchmarks.tpu.tpu_profile import ProfileError, bare_kernel, profile
from jaxengine.check.targets import TARGETS
from jaxengine.pallas_kernels.matmul.operands import QuantizedOperands
from jaxengine.pallas_kernels.matmul.tpu.quantized import quantized_matmul

LAYER = ((4096, 6144), (4096, 4096), (4096, 28672), (14336, 4096))
CLOCK_HZ = {"v6e": 1.75e9}
# Storage of a matrix: dtype and bits of its codes, inputs of a scale, whether it has zeros, dtype of rows' codes.
STORED = {
    "int4 g128": ("uint8", 4, 128, False, None),
    "int4 g128 with zeros": ("uint8", 4, 128, True, None),
    "int8 g128": ("int8", 8, 128, False, None),
    "e4m3 128x128, e4m3 rows": ("float8_e4m3fn", 8, 128, False, "float8_e4m3fn"),
}
ROWS = {"decode of 8": 8, "decode of 64": 64, "prefill of 512": 512}


def product(rows: int, size: int, out: int, stored: str) -> Any:
    """Build a product of `rows` rows with a matrix [size, out]; return (kernel, shapes of its operands, {"bytes": bytes
    moved}).

    stored: key of STORED.
    """
    codes, bits, group, zeros, of_rows = STORED[stored]
    scales = jax.ShapeDtypeStruct((size // group, out), jnp.float32)
    args = (
        jax.ShapeDtypeStruct((rows, size), jnp.dtype(of_rows or jnp.bfloat16)),
        jax.ShapeDtypeStruct((rows, size // group), jnp.float32) if of_rows else None,
        jax.ShapeDtypeStruct((size * bits // 8 if bits == 4 else size, out), jnp.dtype(codes)),
        scales,
        scales if zeros else None,
    )

    def fn(*operands):
        return quantized_matmul(QuantizedOperands(*operands), dtype=jnp.bfloat16, out_dtype=jnp.bfloat16)

    bare, operands = bare_kernel(fn, args, "quantized_matmul")
    return bare, operands, {"bytes": sum(x.size * x.dtype.itemsize for x in operands) + 2 * rows * out}


OPTIONS = shared(targets=("v6e",), only="")


def run(args: Namespace, recorder: Recorder) -> None:
    for target in args.targets:
        for name, rows in ROWS.items():
            for stored in STORED:
                if args.only in f"{name}, {stored}":
                    recorder.add(_layer(target, name, rows, stored))


def _layer(target: str, name: str, rows: int, stored: str) -> dict[str, Any]:
    """Return a row with the cycles and bytes of a layer's four products together, the microseconds that reading their
    codes takes ("codes_us") and these over the products' time ("share_of_floor"); or with an error of libtpu.

    target: TPU. name: label of the row. rows: rows of the activations. stored: key of STORED. Numbers are rounded.
    """
    chip, own = TARGETS[target], {"target": target, "rows": name, "stored": stored}
    cycles = moved = codes = time = 0.0
    for size, out in LAYER:
        arguments = {"rows": rows, "size": size, "out": out, "stored": stored}
        try:
            found = profile("benchmarks.tpu.tpu_products:product", chip.topology, **arguments)
        except ProfileError as error:
            return {**own, "error": str(error)}
        if found.cycles is None:
            return {**own, "error": "libtpu reports no cycles"}
        memory = found.facts["bytes"] / chip.hbm_bandwidth
        cycles, moved = cycles + found.cycles, moved + found.facts["bytes"]
        codes += size * out * STORED[stored][1] / 8
        time += max(memory, found.cycles / CLOCK_HZ[target])
    floor = codes / chip.hbm_bandwidth
    return {
        **own,
        "cycles": round(cycles),
        "moved_mib": round(moved / 2**20, 1),
        "computed_us": round(cycles / CLOCK_HZ[target] * 1e6, 1),
        "codes_us": round(floor * 1e6, 1),
        "share_of_floor": round(floor / time, 3),
    }
