"""What XLA makes of the matrix products of CUDA cards, counted in what it compiles for one; without a card."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxengine.check import counts, hlo, inspect
from jaxengine.check.devices import target_devices
from jaxengine.check.targets import TARGETS, require_compiler
from jaxengine.config.engine_config import ConfigError
from pallas_kernels.matmul.dense import matmul
from pallas_kernels.matmul.grouped import grouped_matmul

SM_90 = TARGETS["sm_90"]


@pytest.fixture(scope="module")
def compiled():
    """compiled(function, (shape, dtype), ...) for an H100: (module, bytes of memory that are neither in nor out)."""
    try:
        require_compiler(SM_90)
    except ConfigError as error:
        pytest.skip(str(error))
    here = NamedSharding(Mesh(np.array(target_devices(SM_90)), ("card",)), PartitionSpec())

    def compile(function, *arrays):
        shapes = [jax.ShapeDtypeStruct(shape, dtype, sharding=here) for shape, dtype in arrays]
        program = jax.jit(function).trace(*shapes).lower(lowering_platforms=("cuda",)).compile()
        return hlo.parse(program.as_text()), inspect.memory(program)["workspace_bytes"]

    return compile


@pytest.mark.parametrize("rows", [1, 2, 8])
@pytest.mark.parametrize("contract", [0, 1])
def test_a_matrix_is_read_once(compiled, rows, contract):
    shape = (4096, 2048) if contract == 0 else (2048, 4096)
    module, _ = compiled(partial(matmul, contract=contract), ((rows, 4096), "bfloat16"), (shape, "bfloat16"))
    assert counts.moved_bytes(module, ()) < 1.1 * 2 * 4096 * 2048


def test_experts_cost_what_their_rows_cost(compiled):
    """The first product of Qwen3-30B-A3B at 8,192 tokens; a loop's trips, which are data, count as one."""
    rows, groups, size, out = 65536, 128, 2048, 1536
    arrays = ((rows, size), "bfloat16"), ((groups, size, out), "bfloat16"), ((groups,), "int32")
    module, workspace = compiled(partial(grouped_matmul, out_dtype=jnp.bfloat16), *arrays)
    (product,) = counts.operations(module).items()
    tiles = product[1] // (2 * size * out * 512)
    assert product[0] == "bf16" and tiles == 10
    most_trips = -(-(rows // 512 + groups) // tiles)
    assert most_trips * product[1] < 2.1 * 2 * rows * size * out
    assert workspace < 400 << 20  # of which 192 are the result's: ragged_dot took 33,152
