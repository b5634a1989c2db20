"""What a target's compiler, where one is installed, makes of matrix products; what `jaxengine check` finds in that."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.layout import Format, Layout
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxengine.check import inspect
from jaxengine.check.compiled import counts, hlo
from jaxengine.check.devices import target_devices
from jaxengine.check.targets import TARGETS, Target, find_target, require_compiler
from jaxengine.config.engine_config import ConfigError
from jaxengine.models.cache import plain_cards
from jaxengine.pallas_kernels.matmul.dense import matmul
from jaxengine.pallas_kernels.matmul.grouped import grouped_matmul
from jaxengine.pallas_kernels.matmul.hopper.grouped import most_tiles_of, tile_rows_of
from tests.jaxengine.check.seeded_faults import FAULTS, faulty_source, judgement

SM_90 = TARGETS["sm_90"]


def require(target: Target) -> None:
    """Skip the test without the target's compiler."""
    try:
        require_compiler(target)
    except ConfigError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def compiled():
    """compiled(function, (shape, dtype), ...) for an H100: (module, bytes of memory that are neither in nor out)."""
    require(SM_90)
    here = NamedSharding(Mesh(np.array(target_devices(SM_90)), ("card",)), PartitionSpec())

    def compile(function, *arrays, plain=False):
        """An array of a third element is stored in that order of its axes."""
        shapes = [
            jax.ShapeDtypeStruct(shape, dtype, sharding=Format(Layout(*order), here) if order else here)
            for shape, dtype, *order in arrays
        ]
        with jax.set_mesh(here.mesh), plain_cards() if plain else nullcontext():
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
    module, workspace = compiled(partial(grouped_matmul, out_dtype=jnp.bfloat16), *arrays, plain=True)
    (product,) = counts.operations(module).items()
    tiles = product[1] // (2 * size * out * 512)
    assert product[0] == "bf16" and tiles == 10
    most_trips = -(-(rows // 512 + groups) // tiles)
    assert most_trips * product[1] < 2.1 * 2 * rows * size * out
    assert workspace < 400 << 20  # of which 192 are the result's: ragged_dot took 33,152


@pytest.mark.parametrize("tokens", [8, 1024])
def test_experts_of_a_hopper_card_are_copied_nowhere(compiled, tokens):
    """The same product by the kernel: rows go to tiles in the gather that brings them, and nothing else is written."""
    rows, groups, size, out = 8 * tokens, 128, 2048, 1536

    def product(x, index, w, sizes):
        return grouped_matmul(x[index // 8], w, sizes, out_dtype=jnp.bfloat16)

    matrices = (groups, size, out), "bfloat16", (0, 2, 1)
    arrays = ((tokens, size), "bfloat16"), ((rows,), "int32"), matrices, ((groups,), "int32")
    module, workspace = compiled(product, *arrays)
    assert not counts.operations(module)
    in_tiles = most_tiles_of(rows, groups, tile := tile_rows_of(rows, groups, 128)) * tile
    assert workspace < 1.05 * 2 * (in_tiles * (size + out) + rows * out) + (1 << 20)  # the result's among them


@pytest.mark.parametrize("name", FAULTS)
def test_the_pattern_occurs_once(name):
    compile(faulty_source(FAULTS[name]), FAULTS[name].file, "exec")


@pytest.mark.parametrize("name", FAULTS)
def test_seeded_fault_is_found(name):
    fault = FAULTS[name]
    require(find_target(fault.target))
    assert judgement(fault) is not None
