"""Writing the device's sampling parameters: each change lands where it should, and in place."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxengine.sampling import state as sampling_state


def test_rows_are_replaced():
    state = sampling_state.init_state(4, 6)
    bias, counts = jnp.arange(6, dtype=jnp.float32), jnp.arange(6, 12)
    changed = sampling_state.set_bias_rows(state, jnp.array([2]), bias[None])
    np.testing.assert_array_equal(changed.logit_bias, np.zeros((4, 6)) + (np.arange(4) == 2)[:, None] * bias)
    changed = sampling_state.set_rows(jnp.zeros((4, 6), jnp.int32), jnp.array([3]), counts[None])
    np.testing.assert_array_equal(changed, np.zeros((4, 6)) + (np.arange(4) == 3)[:, None] * counts)


def test_of_rows_for_one_slot_the_last_one_stays_and_others_than_slots_change_nothing():
    rows = np.arange(1, 31, dtype=np.float32).reshape(5, 6)
    changed = sampling_state.set_rows(jnp.zeros((4, 6)), jnp.array([3, 4, 1, 3, 7]), jnp.asarray(rows))
    np.testing.assert_array_equal(changed, [np.zeros(6), rows[2], np.zeros(6), rows[3]])


def test_mask_rows_are_replaced():
    state = sampling_state.init_state(4, 70)
    width = sampling_state.mask_words(70)
    assert width == 128
    rows = jnp.arange(4 * width).reshape(4, width)
    changed = sampling_state.set_mask_rows(state, jnp.array([3, 4, 1, 4]), rows).token_mask
    np.testing.assert_array_equal(changed, [[-1] * width, rows[2], [-1] * width, rows[0]])


@pytest.mark.parametrize("dtype", [np.float32, np.int32, np.uint32])
def test_slots_are_written(dtype):
    array = np.arange(10, 16).astype(dtype)
    values = np.array([7, 2**31 - 1 if dtype != np.float32 else 1e30, 3, 9]).astype(dtype)
    expected = array.copy()
    expected[[4, 0]] = values[:2]
    written = sampling_state.write_slots(jnp.asarray(array), jnp.array([4, 0, 6, 6]), jnp.asarray(values))
    assert written.dtype == dtype
    np.testing.assert_array_equal(written, expected)


@pytest.mark.parametrize(
    ("change", "arguments"),
    [
        (sampling_state.count_tokens, [((64, 4096), jnp.int32), ((1,), jnp.int32), ((1,), jnp.int32), ((1,), bool)]),
        (sampling_state.count_tokens, [((64, 4096), jnp.int32), ((8,), jnp.int32), ((8,), jnp.int32), ((8,), bool)]),
        (sampling_state.set_rows, [((64, 4096), jnp.int32), ((1,), jnp.int32), ((1, 4096), jnp.int32)]),
        (sampling_state.set_rows, [((64, 4096), jnp.int32), ((8,), jnp.int32), ((8, 4096), jnp.int32)]),
        (sampling_state.set_bias_rows, [((1,), jnp.int32), ((1, 4096), jnp.float32)]),
        (sampling_state.set_mask_rows, [((16,), jnp.int32), ((16, 128), jnp.int32)]),
        (sampling_state.write_params, [((2,), jnp.int32), ((2, 9), jnp.int32)]),
    ],
)
def test_changes_happen_in_place(change, arguments):
    """Donated, no change of the state makes a second copy of its [R, V] arrays."""
    arguments = [jax.ShapeDtypeStruct(*one) for one in arguments]
    if change in (sampling_state.set_bias_rows, sampling_state.set_mask_rows, sampling_state.write_params):
        arguments.insert(0, jax.eval_shape(lambda: sampling_state.init_state(64, 4096)))
    compiled = jax.jit(change, donate_argnums=0).lower(*arguments).compile()
    assert compiled.memory_analysis().temp_size_in_bytes <= 4 * 4096 + 4096
