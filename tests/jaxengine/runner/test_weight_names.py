"""A trainer's arrays under Hugging Face names: renamed, turned, split by layer, given up."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxengine import ScannedLayers
from jaxengine.runner.weight_names import WeightUpdateError, renamed
from tests.tables import each_row

STACK = np.arange(2 * 3 * 4, dtype=np.float32).reshape(2, 3, 4)
NAME = "layers.{layer}.weight"


@each_row(
    ("rule", "found"),
    [
        (ScannedLayers(NAME), {0: STACK[0], 1: STACK[1]}),
        (ScannedLayers(NAME, axis=1), {0: STACK[:, 0], 1: STACK[:, 1], 2: STACK[:, 2]}),
        (ScannedLayers(NAME, axis=-1, axes=(1, 0)), {layer: STACK[:, :, layer].T for layer in range(4)}),
        (ScannedLayers(NAME, layers=[5, 3]), {5: STACK[0], 3: STACK[1]}),
        (
            ScannedLayers(NAME, layers=range(1, 4, 2), function=lambda array: array + 1),
            {1: STACK[0] + 1, 3: STACK[1] + 1},
        ),
    ],
)
def test_layers_are_split(rule, found):
    for array in (STACK, jnp.asarray(STACK)):
        tensors = dict(renamed([("stack", array)], {"stack": rule}))
        assert [*tensors] == [NAME.replace("{layer}", str(layer)) for layer in found]
        for tensor, expected in zip(tensors.values(), found.values(), strict=True):
            np.testing.assert_array_equal(tensor, expected)


@each_row(
    ("rule", "array", "says"),
    [
        (ScannedLayers("layers.weight"), STACK, "must have {layer}"),
        (ScannedLayers(NAME, axis=3), STACK, "along axis 3, got shape"),
        (ScannedLayers(NAME, layers=[1, 2, 3]), STACK, "must have 3 layers along axis 0"),
        (ScannedLayers(NAME), "text", "must be an array"),
    ],
)
def test_what_cannot_be_split_is_named(rule, array, says):
    with pytest.raises(WeightUpdateError, match=says) as error:
        dict(renamed([("stack", array)], {"stack": rule}))
    assert [name for name, _ in error.value.faults] == ["stack"]


def test_arrays_are_given_up_where_they_change_their_form():
    """One that goes on as it is, is its reader's to delete."""
    rules: dict[str, Any] = {
        "turned": ("a", (1, 0), None),
        "doubled": ("b", None, lambda array: array * 2),
        "same": ("c", None, lambda array: array),
        "stack": ScannedLayers(NAME),
    }
    given = {name: jnp.asarray(STACK if name == "stack" else STACK[0]) for name in (*rules, "plain")}
    found = {}
    for name, array in renamed(given.items(), rules, donate=True):
        found[name] = np.array(array)
    assert {name for name, array in given.items() if array.is_deleted()} == {"turned", "doubled", "stack"}
    np.testing.assert_array_equal(found["a"], STACK[0].T)
    np.testing.assert_array_equal(found["b"], STACK[0] * 2)
    np.testing.assert_array_equal(found["layers.1.weight"], STACK[1])
