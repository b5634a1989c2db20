"""A trainer's arrays under Hugging Face names: renamed, turned, split by layer, given up."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxengine import ScannedLayers
from jaxengine.models.weights.formats.arrays import as_array, fault_of
from jaxengine.runner.weights.weight_names import GivenNames, WeightUpdateError, renamed, unwrapped, with_names
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


def test_names_are_without_what_wrappers_of_modules_add():
    plain = "model.layers.3.self_attn.q_proj.weight"
    for name in (
        plain,
        f"_orig_mod.{plain}",
        f"module._orig_mod.{plain}",
        "_fsdp_wrapped_module.model.layers.3._fsdp_wrapped_module._checkpoint_wrapped_module.self_attn.q_proj.weight",
        "base_model.model.model.layers.3.self_attn.q_proj.base_layer.weight",
        "base_model.model.model.layers.3.self_attn.q_proj.modules_to_save.default.weight",
    ):
        assert unwrapped(name) == plain
    assert unwrapped(f"base_model.model.{plain[:-6]}lora_A.weight") == f"{plain[:-6]}lora_A.weight"  # nobody's: refused


class Tensor:
    """Stand-in for a torch.Tensor over a numpy array; `dtype` is torch's name of one that numpy lacks, or None."""

    def __init__(self, array: np.ndarray, dtype: str | None = None, *, is_detached: bool = False):
        self.array, self.is_detached, self.shape = array, is_detached, array.shape
        self.dtype = f"torch.{dtype or array.dtype}"

    def detach(self) -> Tensor:
        return Tensor(self.array, self.dtype.removeprefix("torch."), is_detached=True)

    def cpu(self) -> Tensor:
        return self

    def element_size(self) -> int:
        return self.array.itemsize

    def view(self, dtype: Any) -> Tensor:
        return Tensor(self.array.view(dtype), is_detached=self.is_detached)

    def numpy(self) -> np.ndarray:
        if not self.is_detached or self.dtype not in ("torch.float32", "torch.int16", "torch.uint8"):
            raise TypeError("as torch says it of a gradient, bfloat16, or a sparse tensor")
        return self.array


def test_tensors_of_torch_are_taken_without_a_copy(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(Tensor=Tensor, int16=np.int16, uint8=np.uint8))
    for dtype in (np.float32, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn):
        array = STACK.astype(dtype)
        found = as_array(Tensor(array, np.dtype(dtype).name))
        assert found.dtype == dtype and np.shares_memory(found, array)
        np.testing.assert_array_equal(found, array)
        ((name, found),) = renamed([["a", Tensor(array, np.dtype(dtype).name)]], {"a": ("b", (2, 1, 0))})
        assert name == "b" and found.shape == STACK.shape[::-1]
    for sparse in (Tensor(STACK, "sparse"), as_array(Tensor(STACK, "sparse"))):
        assert "must be an array of numbers, got Tensor" in str(fault_of(sparse))


def test_faults_have_the_names_that_were_given():
    """A tensor that the trainer's mapping renames or splits is named with what it is for the model."""
    given, scanned = GivenNames(), ScannedLayers("model.layers.{layer}.up.weight")
    for lazily in (False, True):
        pairs = [("_orig_mod.model.embed.weight", STACK), ("scale", STACK[0]), ("up", STACK)]
        rules: dict[str, Any] = {"scale": "model.norm.weight", "up": scanned}
        tensors = with_names(given.following(unwrapped), renamed(pairs, rules, lazily=lazily, given=given))
        assert [name for name, _ in tensors][:2] == ["model.embed.weight", "model.norm.weight"]
    found = [
        (name, "shape") for name in ("model.embed.weight", "model.norm.weight", "model.layers.1.up.weight", "other")
    ]
    assert given.of(found) == [
        ("_orig_mod.model.embed.weight", "shape"),
        ("scale", "shape, as model.norm.weight"),
        ("up", "shape, as model.layers.1.up.weight"),
        ("other", "shape"),
    ]
