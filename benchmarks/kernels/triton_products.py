"""Products of an 8B with quantised matrices in Triton kernels on CUDA cards that are not here, as compiled, beside
plain XLA: launches, bytes moved over those of codes, scales, rows and results, registers, spills and shared memory of
the kernel; needs jax's CUDA compiler, no card.
"""

from __future__ import annotations

import tempfile
from argparse import Namespace
from contextlib import nullcontext
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Format, Layout
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks.harness import shared
from benchmarks.kernels.triton_attention import kernel_figures
from benchmarks.recorder import Recorder
from jaxengine.check.compiled import counts, hlo
from jaxengine.check.devices import target_devices
from jaxengine.check.targets import find_target
from jaxengine.models.cache import plain_cards
from jaxengine.pallas_kernels.matmul.nibbles import per_byte
from jaxengine.pallas_kernels.matmul.quantized import quantized_matmul

# Inputs and outputs of two matrices of an 8B, the one with the fewest outputs and the one with the most, and of keys.
MATRICES = {"down": (14336, 4096), "gate, up": (4096, 28672), "keys": (4096, 1024)}
# Dtype of the codes, inputs that share a scale (0 for all), and whether there are zeros.
FORMS: dict[str, tuple[str, int, bool]] = {
    "int4 in groups of 128, zeros": ("uint8", 128, True),
    "int4 in groups of 32": ("uint8", 32, False),
    "int8 by channel": ("int8", 0, False),
    "e4m3 in groups of 128": ("float8_e4m3fn", 128, False),
}
ROWS = (1, 64, 1024)


def measure(target: str, form: str, matrix: str, rows: int, *, plain: bool) -> dict[str, Any]:
    """Compile one product for a target and return its figures: "launches", "bytes moved / needed", and of the kernel
    "registers", "spilled bytes" and "KiB of shared memory".

    form, matrix: keys of FORMS and MATRICES. rows: of the left operand. plain: as plain XLA, whose figures have no
    registers, spills and shared memory. The ratio is rounded.
    """
    codes, group, has_zeros = FORMS[form]
    size, out = MATRICES[matrix]
    mesh = Mesh(np.array(target_devices(find_target(target))[:1]), ("devices",))
    place = NamedSharding(mesh, PartitionSpec())
    number = size // per_byte(jnp.dtype(codes)), out
    in_order: Any = place if plain else Format(Layout((1, 0)), place)
    vectors = jax.ShapeDtypeStruct((size // (group or size), out), jnp.float32, sharding=place)
    operands = [
        jax.ShapeDtypeStruct((rows, size), jnp.bfloat16, sharding=place),
        jax.ShapeDtypeStruct(number, codes, sharding=in_order),
        *[vectors] * (1 + has_zeros),
    ]
    with tempfile.TemporaryDirectory() as folder, jax.set_mesh(mesh), plain_cards() if plain else nullcontext():
        traced = jax.jit(partial(quantized_matmul, out_dtype=jnp.bfloat16)).trace(*operands)
        compiled = traced.lower(lowering_platforms=("cuda",)).compile({"xla_dump_to": folder})
        figures = {} if plain else kernel_figures(folder, "quantized_matmul")
    module = hlo.parse(compiled.as_text() or "")
    needed = sum(each.size * each.dtype.itemsize for each in operands) + 2 * rows * out
    times = counts.moved_bytes(module, ()) / needed
    return {"launches": counts.launches(module), "bytes moved / needed": round(times, 2), **figures}


OPTIONS = shared(targets=("sm_80", "sm_86", "sm_89", "sm_120"), only="")


def run(args: Namespace, recorder: Recorder) -> None:
    """Compile each product in whose "FORM, MATRIX, ROWS" args.only occurs, for each of args.targets, in Triton and as
    plain XLA; add a row with the figures of both to those of the file, or replace it there.
    """
    recorder.take_over()
    for target in args.targets:
        for form in FORMS:
            for matrix in MATRICES:
                for rows in ROWS:
                    if args.only not in f"{form}, {matrix}, {rows}":
                        continue
                    row: dict[str, Any] = {"target": target, "codes": form, "matrix": matrix, "rows": rows}
                    row |= measure(target, form, matrix, rows, plain=False)
                    plain = measure(target, form, matrix, rows, plain=True)
                    row |= {f"XLA: {name}": value for name, value in plain.items()}
                    recorder.add(row, ("target", "codes", "matrix", "rows"))
