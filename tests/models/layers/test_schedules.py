"""Work lists of a step's attention, which layers share: made once, for the code that reads the pool."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp

from jaxengine.models.layers.attention.attention import SCHEDULE
from jaxengine.models.layers.base.step_inputs import StepContext
from jaxengine.pallas_kernels.attention.op import AttentionSpec, RaggedBatch
from jaxengine.pallas_kernels.attention.xla.schedule import Schedule
from jaxengine.pallas_kernels.kv.pages import KVSpec, alloc
from tests.tables import each_row

SPEC = AttentionSpec(4, 2, 64, 64, 0.125)


@each_row(
    "platform, dtype, kv_dtype, is_xlas",
    [
        ("gpu", "bfloat16", "bfloat16", False),
        ("gpu", "float32", "float32", True),
        ("gpu", "bfloat16", "float16", True),
        ("gpu_triton", "bfloat16", "bfloat16", False),
        ("gpu_triton", "bfloat16", "int8", False),
        ("gpu_triton", "float32", "float32", True),
        ("gpu_triton", "bfloat16", "float32", True),
    ],
)
def test_dtypes_that_kernels_do_not_read_have_the_work_list_of_plain_xla(platform, dtype, kv_dtype, is_xlas):
    """Otherwise each layer would build it again."""
    kv = jax.eval_shape(lambda: alloc(KVSpec(8, 16, 2, 64, 64, kv_dtype), platform=platform))
    shapes = RaggedBatch(*(jnp.zeros(shape, jnp.int32) for shape in ((5,), (4,), (4, 2), (32,), (), ())))

    def schedule(ragged: RaggedBatch):
        batch: Any = SimpleNamespace(ragged=(ragged,), token_ids=jnp.zeros(32))
        build: Any = SimpleNamespace(dtype=jnp.dtype(dtype))
        return SCHEDULE.make(SPEC, StepContext(batch, kv, build, None))

    assert isinstance(jax.eval_shape(schedule, shapes), Schedule) == is_xlas
