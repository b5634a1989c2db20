"""Mamba-2's state space against float64, token by token."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxengine.pallas_kernels.registry import KERNELS, kernel
from jaxengine.pallas_kernels.state.space import state_space
from tests.pallas_kernels import reference
from tests.pallas_kernels.state.problems import BATCHES, NUM_ROWS, Batch

IMPLEMENTATIONS = {kernel(op, platform): platform for op, platform in KERNELS if op == "state_space"}
# Between them they have single tokens, prompts from nothing and with a state, and several chunks of one.
ALWAYS = ("chunks of all sizes", "decodes and prompts")
CASES = [
    pytest.param(batch, id=name, marks=() if name in ALWAYS else pytest.mark.thorough("a further kind of batch"))
    for name, batch in BATCHES.items()
]


def inputs(batch: Batch, *, heads: int = 6, groups: int = 2, width: int = 5, size: int = 8, fading: float = 1.0):
    """Decays of about -fading a token; of some heads none, of one as good as everything at every third token."""
    rng, count = np.random.default_rng(1), batch.num_tokens
    x = rng.standard_normal((count, heads, width))
    b, c = rng.standard_normal((2, count, groups, size)) / size**0.5
    dt = np.abs(rng.standard_normal((count, heads)))
    decay = -fading * np.abs(rng.standard_normal((count, heads)))
    decay[:, 1], decay[::3, 2] = 0.0, -90.0
    state = rng.standard_normal((NUM_ROWS, heads, width, size))
    return [jnp.asarray(array, jnp.float32) for array in (x, b, c, decay, dt, state)]


def compare(implementation, batch: Batch, arrays) -> None:
    rows, live = batch.rows(), len(batch.counts)
    reads, writes, ends = (np.asarray(array) for array in (rows.reads, rows.writes, rows.cu_q_lens))
    *tokens, state = arrays
    state = state.at[np.setdiff1d(np.arange(NUM_ROWS), reads[:live][reads[:live] >= 0])].set(jnp.nan)
    exact = reference.state_space(*map(np.asarray, (*tokens, state)), ends, reads, writes, live)
    tokens = [array.at[ends[-1] :].set(jnp.nan) for array in tokens]
    y, after = jax.jit(implementation)(*tokens, state, rows)
    # Heads that never fade add up all tokens before.
    np.testing.assert_allclose(y, exact[0], rtol=2e-5, atol=2e-5)
    saved = np.asarray(rows.saves)[live - 1]
    if saved < NUM_ROWS:
        exact[1][saved] = exact[1][writes[live - 1]]
    np.testing.assert_allclose(after, exact[1], rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS, ids=IMPLEMENTATIONS.values())
@pytest.mark.parametrize("batch", CASES)
def test_against_float64(implementation, batch):
    compare(implementation, batch, inputs(batch))


@pytest.mark.thorough("the same loops as the delta rule's")
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS, ids=IMPLEMENTATIONS.values())
@pytest.mark.parametrize(("heads", "groups"), [(3, 3), (5, 1)])
def test_heads_and_groups(implementation, heads, groups):
    batch = BATCHES["decodes and prompts"]
    compare(implementation, batch, inputs(batch, heads=heads, groups=groups, fading=30.0))


@pytest.mark.thorough("the same loops as the delta rule's")
def test_states_of_decodes_are_updated_in_place():
    batch = Batch((1,) * 4, 4, 4, 4)
    *arrays, state = inputs(batch)
    state = jnp.zeros((4096, *state.shape[1:]))
    compiled = jax.jit(state_space, donate_argnums=5).lower(*arrays, state, batch.rows()).compile()
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= state.nbytes > memory.temp_size_in_bytes


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"c": (8, 2, 9)}, "must agree"),
        ({"x": (8, 5, 5)}, "must agree"),
        ({"dt": (8, 2)}, "must agree"),
        ({"state": (9, 6, 8, 5)}, "must agree"),
        ({"state": "bfloat16"}, "must be float32"),
    ],
)
def test_shapes_that_do_not_fit(change, said):
    batch = BATCHES["decodes"]
    arrays = dict(zip(("x", "b", "c", "decay", "dt", "state"), inputs(batch), strict=True))
    for name, shape in change.items():
        arrays[name] = arrays[name].astype(shape) if isinstance(shape, str) else jnp.zeros(shape)
    with pytest.raises(ValueError, match=f"state_space: .*{said}"):
        state_space(*arrays.values(), batch.rows())
