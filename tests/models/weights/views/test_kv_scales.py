"""Scales of cached keys and values as checkpoints have them, and as magnitudes make them."""

from __future__ import annotations

import json

import ml_dtypes
import numpy as np
import pytest

from jaxengine.models.params.errors import ModelFileError
from jaxengine.models.weights.views.kv_scales import (
    KV_SCALES,
    KVScales,
    KVShape,
    largest_for,
    of_object,
    read_scales,
    scales_for,
    to_object,
)

SHAPE = KVShape(num_layers=2, paged=(0, 1), num_heads=2, values_in_keys=False)
LATENT = SHAPE._replace(num_heads=1, values_in_keys=True)


class Tensors:
    """A WeightSource of arrays."""

    path = "model.safetensors"

    def __init__(self, tensors):
        self.tensors = {f"model.layers.{name}": np.asarray(value, np.float32) for name, value in tensors.items()}

    def names(self):
        return self.tensors

    def read(self, name):
        return self.tensors[name]


def both(k, v, value=0.5):
    return {f"{layer}.self_attn.{name}": value * (layer + 1) for layer in range(2) for name in (k, v)}


@pytest.mark.parametrize(
    ("k", "v"),
    [
        ("k_scale", "v_scale"),
        ("attn.k_scale", "attn.v_scale"),
        ("k_proj.k_scale", "v_proj.v_scale"),
        ("k_proj.output_scale", "v_proj.output_scale"),
        ("kv_scale", "kv_scale"),
    ],
)
def test_one_number_of_a_layer(k, v):
    found = read_scales(Tensors(both(k, v)), SHAPE)
    assert found is not None and found.v is not None
    for scales in found:
        np.testing.assert_array_equal(scales, [[0.5] * SHAPE.num_heads, [1.0] * SHAPE.num_heads])


def test_a_number_of_each_head():
    k = np.arange(1, SHAPE.num_heads + 1, dtype=np.float32)
    found = read_scales(Tensors(both("k_scale", "v_scale") | {"1.self_attn.k_scale": k}), SHAPE)
    assert found is not None and found.k[1].tolist() == k.tolist() and found.k[0].tolist() == [0.5, 0.5]


def test_layers_without_pages_have_none():
    found = read_scales(Tensors({"1.self_attn.k_scale": 3, "1.self_attn.v_scale": 4}), SHAPE._replace(paged=(1,)))
    assert found is not None and found.k.tolist() == [[1, 1], [3, 3]]


def test_runs_of_a_layer_have_the_scales_of_that_layer():
    runs = SHAPE._replace(num_layers=4, paged=(0, 1, 2, 3), stored=(0, 1, 0, 1))
    found = read_scales(Tensors(both("k_scale", "v_scale")), runs)
    assert found is not None and found.k[:, 0].tolist() == [0.5, 1.0, 0.5, 1.0]
    with pytest.raises(ModelFileError, match="though other layers have theirs .at model.layers.2.self_attn.k_scale"):
        read_scales(Tensors(both("k_scale", "v_scale")), runs._replace(stored=(0, 1, 1, 2)))


def test_none_is_no_fault():
    assert read_scales(Tensors({}), SHAPE) is None


def test_layers_that_a_checkpoint_numbers_in_pairs():
    names = {f"0.self_attn.{half}.k_scale": half + 1 for half in range(2)}
    found = read_scales(Tensors(names), LATENT)
    assert found is not None and found.k.tolist() == [[1.0], [2.0]]
    assert all(name.endswith(KV_SCALES) for name in names)


def test_latents_have_those_of_keys_only():
    found = read_scales(Tensors({name: 2 for name in both("k_scale", "v_scale") if name.endswith("k_scale")}), LATENT)
    assert found is not None and found.v is None and found.k.tolist() == [[2.0], [2.0]]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"1.self_attn.k_scale": None}, "though other layers have theirs .at model.layers.1.self_attn.k_scale"),
        (
            {"0.self_attn.v_scale": None, "1.self_attn.v_scale": None},
            "though the checkpoint has others .at model.layers.0.self_attn.v_scale",
        ),
        ({"0.self_attn.k_scale": 0.0}, "must hold finite scales above 0 .* .at model.layers.0.self_attn.k_scale"),
        ({"0.self_attn.k_scale": np.nan}, "finite scales above 0"),
        ({"0.self_attn.k_scale": 1e-40}, "finite scales above 0 that float32 can multiply with"),
        ({"0.self_attn.k_scale": 1e28}, "finite scales above 0 that float32 can multiply with"),
        ({"0.self_attn.k_scale": [1.0, 1.0, 1.0]}, "one for each of 2 kv heads, got 3"),
    ],
)
def test_refused(changes, said):
    tensors = {name: value for name, value in (both("k_scale", "v_scale") | changes).items() if value is not None}
    with pytest.raises(ModelFileError, match=said):
        read_scales(Tensors(tensors), SHAPE)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "int8"])
def test_the_largest_fits_into_codes(dtype):
    largest = np.array([[3.0, 0.0], [700.0, 1e-3]], np.float32)
    scales = scales_for(largest, dtype)
    assert scales[0, 1] == 1
    most = 127 if dtype == "int8" else float(ml_dtypes.finfo(dtype).max)
    codes = largest / scales
    assert (codes <= most * 1.0001).all() and (codes[largest > 0] >= most / 2.01).all()
    assert (scales_for(np.float32([[1e-44, 1e-37]]), dtype) == 1).all(), "of them a device makes 0"
    assert KVScales(scales, None).of_layers([1]).k.tolist() == scales[1:].tolist()


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "int8"])
def test_a_file_of_largest_magnitudes_keeps_every_bit_of_scales(dtype):
    """Those of any float32, which has no number for all of their magnitudes."""
    bits = np.random.default_rng(0).integers(1 << 23, 211 << 23, (2, 1 << 12), np.uint32)
    bits[0, :2] = 1 << 23, (211 << 23) - 1
    scales = KVScales(bits.view(np.float32), None)
    shape = SHAPE._replace(num_heads=bits.shape[1], values_in_keys=True)
    written = json.loads(json.dumps(to_object(scales.each(lambda kind: largest_for(kind, dtype)))))
    read = of_object(written, shape).each(lambda kind: scales_for(kind, dtype))
    assert np.array_equal(read.k.view(np.uint32), bits)
