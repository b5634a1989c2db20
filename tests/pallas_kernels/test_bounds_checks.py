"""Bounds checks of every TPU kernel: off on a chip, where they cost more than a copy's start; on when interpreted.

Programs are traced and not run, except for one with a page that the pool does not have.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import pytest
from jax import ShapeDtypeStruct as Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxengine import pallas_kernels
from jaxengine.pallas_kernels.attention.ragged_batch import AttentionSpec, RaggedBatch
from jaxengine.pallas_kernels.kv.pages import KVSpec, alloc
from jaxengine.pallas_kernels.matmul.lora import lora_visits
from jaxengine.pallas_kernels.matmul.operands import QuantizedOperands
from jaxengine.pallas_kernels.registry import kernel
from jaxengine.pallas_kernels.tuning import Tuning
from tests.pallas_kernels.findings import FITTED_TO, IS_FITTED
from tests.tables import each_row

SOURCES = Path(pallas_kernels.__file__).parent
PAGES, PAGE_SIZE = 4, 8
BFLOAT16, FLOAT32, INT32 = jnp.bfloat16, jnp.float32, jnp.int32
SPEC = AttentionSpec(2, 1, 64, 64, 0.125)


def attend(tokens: int, interpret: Any) -> tuple[Callable, Any]:
    """Attention of two sequences, of one token each or more, and the shapes of its arguments."""
    shapes: tuple[Any, ...] = ((3,), (2,), (2, 2), (tokens,), (), ())
    batch: Any = RaggedBatch(*(Array(shape, INT32) for shape in shapes))
    kv = jax.eval_shape(partial(alloc, KVSpec(PAGES, PAGE_SIZE, 1, 64, 64, "bfloat16"), platform="tpu"))

    def run(q, kv, batch):
        schedule = kernel("attention_schedule", "tpu")(
            batch, SPEC, num_tokens=tokens, page_size=PAGE_SIZE, tuning=Tuning()
        )
        options = {"spec": SPEC, "sinks": None, "tree_mask": None, "interpret": interpret}
        return kernel("ragged_paged_attention", "tpu")(q, kv, batch, schedule, **options)

    return run, (Array((tokens, 2, 64), BFLOAT16), kv, batch)


def select(interpret: Any) -> tuple[Callable, Any]:
    """Selection of four keys for each of two sequences' tokens, by an indexer of eight heads."""
    shapes: tuple[Any, ...] = ((3,), (2,), (2, 2), (2,), (), ())
    batch: Any = RaggedBatch(*(Array(shape, INT32) for shape in shapes))
    kv = jax.eval_shape(partial(alloc, KVSpec(PAGES, PAGE_SIZE, 1, 128, 128, "bfloat16"), platform="tpu"))

    def run(q, weights, kv, batch):
        sizes = {"num_tokens": 2, "page_size": PAGE_SIZE, "tuning": Tuning()}
        schedule = kernel("selection_schedule", "tpu")(batch, **sizes)
        options = {"count": 4, "pooling": None, "interpret": interpret}
        return kernel("select_keys", "tpu")(q, weights, kv, batch, schedule, **options)

    return run, (Array((2, 8, 128), BFLOAT16), Array((2, 8), FLOAT32), kv, batch)


def write(interpret: Any) -> tuple[Callable, Any]:
    kv = jax.eval_shape(partial(alloc, KVSpec(PAGES, PAGE_SIZE, 1, 64, 64, "bfloat16"), platform="tpu"))

    def run(kv, new, slots):
        schedule = kernel("kv_update_schedule", "tpu")(slots, page_size=PAGE_SIZE, tuning=Tuning())
        return kernel("kv_cache_update", "tpu")(kv, new, new, slots, schedule=schedule, interpret=interpret)

    return run, (kv, Array((8, 1, 64), BFLOAT16), Array((8,), INT32))


def multiply(op: str, interpret: Any, *, groups: int = 0, codes: Any = jnp.int8, **more: Any) -> tuple[Callable, Any]:
    """Product of eight rows with a matrix [256, 256], or with one for each group."""
    stack = (groups,) if groups else ()
    rows, matrix = Array((8, 256), BFLOAT16), Array((*stack, 256, 256), codes)
    sizes = (Array(stack, INT32),) if groups else ()
    if codes == BFLOAT16:
        return partial(kernel(op, "tpu"), out_dtype=BFLOAT16, interpret=interpret, **more), (rows, matrix, *sizes)
    scales = Array((*stack, 2, 256), FLOAT32)

    def run(x, codes, scales, *sizes):
        options = {"dtype": BFLOAT16, "out_dtype": BFLOAT16, "interpret": interpret, **more}
        return kernel(op, "tpu")(QuantizedOperands(x, None, codes, scales, None), *sizes, **options)

    return run, (rows, matrix, scales, *sizes)


def adapt(interpret: Any) -> tuple[Callable, Any]:
    def run(y, x, a, b, slots):
        visits = lora_visits(slots, num_slots=2, rank=16, sizes=Tuning().lora_tiles)
        return kernel("lora_product", "tpu")(y, x, a, [b], visits, modules=(0,), rank=16, interpret=interpret)

    shapes = Array((8, 128), FLOAT32), Array((8, 128), BFLOAT16), Array((32, 128), BFLOAT16), Array((32, 128), BFLOAT16)
    return run, (*shapes, Array((8,), INT32))


def round_rows(interpret: Any) -> tuple[Callable, Any]:
    options = {"group": 32, "dtype": "float8_e4m3fn", "kind": "e8m0", "interpret": interpret}
    return (lambda x: kernel("microscaled_rows", "tpu")(x, None, **options)), (Array((8, 128), BFLOAT16),)


GATED = {"bias": None, "activation": lambda gate, up: gate * up}
PROGRAMS: dict[str, Callable[[Any], tuple[Callable, Any]]] = {
    "attention of single tokens": partial(attend, 2),
    "attention of runs": partial(attend, 16),
    "selection of keys": select,
    "write of keys and values": write,
    "quantised matrix": partial(multiply, "quantized_matmul"),
    "quantised matrices of groups": partial(multiply, "quantized_grouped_matmul", groups=2),
    "gated, quantised": partial(multiply, "quantized_gated_matmul", groups=2, **GATED),
    "matrices of groups": partial(multiply, "grouped_matmul", groups=2, codes=BFLOAT16),
    "gated": partial(multiply, "gated_matmul", groups=2, codes=BFLOAT16, **GATED),
    "rows with scales": round_rows,
    "adapters": adapt,
}


class Made(NamedTuple):
    """A call of `pl.pallas_call`: where it stands, and what it says of its compilation."""

    file: str
    line: int
    params: Any


@cache
def made_by(program: str, interpret: Any) -> tuple[Made, ...]:
    """Calls of kernels in a trace of the program."""
    found, pallas_call = [], pl.pallas_call

    def recording(*args: Any, compiler_params: Any = None, **options: Any) -> Any:
        frame = sys._getframe(1)
        file = Path(frame.f_code.co_filename).relative_to(SOURCES)
        found.append(Made(str(file), frame.f_lineno, compiler_params))
        return pallas_call(*args, compiler_params=compiler_params, **options)

    run, arguments = PROGRAMS[program](interpret)
    with mock.patch.object(pl, "pallas_call", recording):
        jax.make_jaxpr(run)(*arguments)
    return tuple(found)


def calls_in_sources() -> list[tuple[str, range]]:
    """(file, lines) of each `pl.pallas_call` for TPUs; Mosaic GPU has a launch of its own, Triton no such checks."""
    found = []
    for path in sorted(path for path in SOURCES.rglob("*.py") if path.parent.name != "triton"):
        calls = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call))
        named = (call for call in calls if ast.unparse(call.func) == "pl.pallas_call")
        found += [(str(path.relative_to(SOURCES)), range(call.lineno, (call.end_lineno or 0) + 1)) for call in named]
    return found


@each_row("program", PROGRAMS)
def test_bounds_checks_are_off_on_a_chip_and_on_in_the_interpreter(program):
    for interpret in (False, pltpu.InterpretParams()):
        params = [each.params for each in made_by(program, interpret)]
        assert params, "there is no kernel in the program"
        assert [each.disable_bounds_checks for each in params] == [interpret is False] * len(params)


@each_row("file, lines", calls_in_sources())
def test_every_kernel_is_in_one_of_these_programs(file, lines):
    made = [each for program in PROGRAMS for each in made_by(program, False)]
    assert any(each.file == file and each.line in lines for each in made)


def test_there_is_one_way_to_call_a_kernel_and_one_maker_of_its_parameters():
    texts = {path.name: path.read_text() for path in SOURCES.rglob("*.py")}
    assert [name for name, text in texts.items() if "pltpu.CompilerParams(" in text] == ["mosaic_tpu.py"]
    assert not [name for name, text in texts.items() if "import pallas_call" in text or "pl.kernel(" in text]


@pytest.mark.skipif(not IS_FITTED, reason=f"the interpreter's parameters are of jax {', '.join(FITTED_TO)}")
def test_the_interpreter_refuses_a_page_that_the_pool_does_not_have():
    from tests.pallas_kernels import tpu_interpret

    run, (_, kv, batch) = attend(2, tpu_interpret.interpret_params("eager"))
    kv = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), kv)
    table, ones = jnp.asarray([[1, 0], [PAGES, 0]], INT32), jnp.ones(2, INT32)
    batch = batch._replace(cu_q_lens=jnp.arange(3, dtype=INT32), kv_lens=ones, page_table=table)
    batch = batch._replace(slot_mapping=ones, num_seqs=INT32(2), num_decode=INT32(2))
    try:
        with pytest.raises(Exception, match="[Oo]ut-of-bounds read"):
            jax.block_until_ready(jax.jit(run)(jnp.ones((2, 2, 64), BFLOAT16), kv, batch))
    finally:
        tpu_interpret.reset()
