"""Products of rows on this CPU: machine code of llvmlite beside plain XLA, in turns within one process.

A program multiplies by one matrix after another, each product's rows from the one before, over more bytes than a core's
cache holds, as a step does.
"""

from __future__ import annotations

import time
from argparse import Namespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.harness import Option, OptionError, shared
from benchmarks.recorder import Recorder
from jaxengine.pallas_kernels.matmul.cpu import dense as dense_cpu
from jaxengine.pallas_kernels.matmul.cpu import quantized as quantized_cpu
from jaxengine.pallas_kernels.matmul.native import dense, quantized
from jaxengine.pallas_kernels.matmul.operands import QuantizedOperands
from jaxengine.pallas_kernels.registry import native_code

# Inputs and outputs: of the embedded model's layers, and of a 1B's and an 8B's widest.
SHAPES = ((576, 576), (576, 3072), (1536, 576), (2048, 8192), (4096, 14336))
KINDS = ("four bits", "int8", "bfloat16", "float32")
_DENSE = "bfloat16", "float32"
_GROUP, _BYTES = 32, 40_000_000
OPTIONS = {"rows": Option((1, 2, 8, 32), "of a step"), **shared(rounds=5, only="")}


def _matrix(kind: str, inputs: int, outputs: int, rng: np.random.Generator) -> tuple[jax.Array, ...]:
    """Return a random matrix [inputs, outputs]: one bfloat16 or float32 array, or codes and scales, for four bits also
    zeros.

    Scales and zeros are of groups of _GROUP inputs. Codes of four bits are packed in pairs, u8[inputs / 2, outputs].
    """
    if kind in _DENSE:
        return (jnp.asarray(rng.standard_normal((inputs, outputs)), kind),)
    scales = jnp.asarray(rng.random((inputs // _GROUP, outputs)), jnp.float32) / inputs
    if kind == "int8":
        return jnp.asarray(rng.integers(-127, 128, (inputs, outputs)), jnp.int8), scales
    return jnp.asarray(rng.integers(0, 256, (inputs // 2, outputs)), jnp.uint8), scales, scales


def _product(kind: str, native: bool, x: jax.Array, matrix: tuple[jax.Array, ...]) -> jax.Array:
    """Return x times the matrix, by machine code if `native`, else by plain XLA.

    kind: one of _DENSE for (values,), with x rounded to it; another for (codes, scales) or (codes, scales, zeros) and a
    float32 result.
    """
    if kind in _DENSE:
        return (dense if native else dense_cpu).matmul(x.astype(kind), matrix[0], contract=0)
    codes, scales, *zeros = matrix
    options = {"dtype": jnp.float32, "out_dtype": jnp.float32}
    multiply = (quantized if native else quantized_cpu).quantized_matmul
    return multiply(QuantizedOperands(x, None, codes, scales, zeros[0] if zeros else None), **options)


def measure(kind: str, rows: int, inputs: int, outputs: int, rounds: int) -> dict[str, Any]:
    """Return the row of a product of x [rows, inputs] and a matrix [inputs, outputs]: best microseconds of each
    implementation over `rounds`, the machine code's bytes a second, and "ratio", XLA's time over the machine code's.
    kind: see `_product`. Numbers are rounded.
    """
    rng = np.random.default_rng(0)
    size = sum(part.nbytes for part in _matrix(kind, inputs, outputs, rng))
    matrices = [_matrix(kind, inputs, outputs, rng) for _ in range(max(2, min(30, _BYTES // size)))]
    x, programs = jnp.asarray(rng.standard_normal((rows, inputs)), jnp.float32), {}
    for native in (False, True):

        def chain(x, matrices, native=native):
            for matrix in matrices:
                y = _product(kind, native, x, matrix)
                x = x + jnp.tile(y, (1, -(-inputs // outputs)))[:, :inputs] / 1024
            return x

        programs[native] = jax.jit(chain).lower(x, matrices).compile()
    best = dict.fromkeys(programs, float("inf"))
    for _ in range(rounds + 1):  # one more, to warm up
        for native, program in programs.items():
            start = time.perf_counter()
            program(x, matrices).block_until_ready()
            best[native] = min(best[native], (time.perf_counter() - start) / len(matrices))
    row = {"kind": kind, "shape": f"{inputs} x {outputs}", "rows": rows, "XLA us": round(best[False] * 1e6)}
    row |= {"native us": round(best[True] * 1e6), "native GB/s": round(size / best[True] / 1e9, 1)}
    return row | {"ratio": round(best[False] / best[True], 2)}


def run(args: Namespace, recorder: Recorder) -> None:
    if not native_code():
        raise OptionError("there is no machine code here: pip install 'jaxengine[cpu]', on x86-64 with AVX2")
    for kind in KINDS:
        for shape in SHAPES:
            for rows in args.rows:
                if args.only in f"{kind} {shape[0]} x {shape[1]}":
                    recorder.add(measure(kind, rows, *shape, args.rounds))
