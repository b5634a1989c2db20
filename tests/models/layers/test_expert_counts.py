"""Rows that kernels multiply for a layer of experts, as devices share them and as checkpoints keep them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.config.experts import ExpertsConfig
from jaxengine.models.layers.experts.expert_counts import _operands, expert_rows, routed
from jaxengine.models.layers.experts.moe import MixtureOfExperts
from jaxengine.models.quantization.base.online import Rounded
from jaxengine.models.quantization.base.quantized import Quantized
from jaxengine.models.quantization.base.stored import Activation
from jaxengine.models.quantization.schemes.eight_bits import BLOCK, EightBits
from jaxengine.sharding.layout import ONE_DEVICE, RAGGED, MeshLayout
from tests.models.tiny import TINY

EXPERTS = ExpertsConfig(num_experts=16, num_per_token=4, intermediate_size=256)
CONFIG = replace(TINY, architecture="Qwen3MoeForCausalLM", hidden_size=256, experts=EXPERTS)


def layer_of(mesh: MeshLayout = ONE_DEVICE, config=CONFIG, **build) -> MixtureOfExperts:
    return MixtureOfExperts(config, source="m", build=Build("bfloat16", mesh, **build))


def test_every_token_goes_to_different_experts():
    sizes = routed(1000, 16, 16)
    np.testing.assert_array_equal(sizes, 1000)
    sizes = routed(1000, 16, 4)
    assert sizes.sum() == 4000 and sizes.min() > 200 and sizes.max() < 300


@pytest.mark.parametrize(("platform", "ratio"), [("tpu", 1.09), ("gpu", 1.06)])
def test_rows_of_one_device(platform, ratio):
    """256 tokens, four experts each, are 64 rows of an expert."""
    counted = expert_rows(layer_of(), ONE_DEVICE, 256, platform)
    assert counted is not None and (counted.rows, counted.average) == (1024, 64.0)
    assert 1.03 < counted.multiplied <= ratio


@pytest.mark.parametrize("platform", ["tpu", "gpu"])
def test_rows_of_a_device_with_some_of_the_experts(platform):
    """Which are those of all ranks' tokens, in blocks: each is a product of its own, and cuts a group in two."""
    mesh = MeshLayout(data=4, expert_parallel=True)
    counted = expert_rows(layer_of(mesh), mesh, 256, platform)
    assert counted is not None and abs(counted.average - 256) < 30 and counted.rows == 4 * counted.average
    assert 1 < counted.multiplied < 1.1
    few = expert_rows(layer_of(mesh), mesh, 8, platform)
    assert few is not None and few.multiplied > counted.multiplied


@pytest.mark.parametrize(
    ("stored", "rows", "scales", "codes"),
    [
        (Rounded("int4", "int4", 128), "bfloat16", None, "uint8"),
        (Rounded("int8", "int8"), "bfloat16", None, "int8"),
        (
            EightBits("fp8", "float8_e4m3fn", BLOCK, Activation("float8_e4m3fn", 128), (128, 128)),
            "float8_e4m3fn",
            (1024, 2),
            "float8_e4m3fn",
        ),
    ],
    ids=["int4", "int8", "e4m3"],
)
def test_operands_are_as_devices_hold_them(stored, rows, scales, codes):
    layer = layer_of(scheme=lambda module: Quantized(stored))
    (x, x_scales, matrices, _), numbers = _operands(layer.gate_up, ONE_DEVICE, 1024)
    assert (x.shape, x.dtype, matrices.dtype, numbers) == ((1024, 256), rows, codes, 256 * 512)
    assert (None if x_scales is None else x_scales.shape) == scales
    for platform in ("tpu", "gpu"):
        counted = expert_rows(layer, ONE_DEVICE, 256, platform)
        assert counted is not None and 1.03 < counted.multiplied <= 1.1


def test_what_is_not_counted():
    """What XLA multiplies, rows that devices send each other, and platforms without a kernel."""
    sends = MeshLayout(data=4, expert_parallel=True, all2all_backend=RAGGED)
    assert expert_rows(layer_of(sends), sends, 256, "tpu") is None
    assert expert_rows(layer_of(), ONE_DEVICE, 256, "gpu_xla") is None
    odd = replace(CONFIG, hidden_size=40, experts=replace(EXPERTS, intermediate_size=24))
    for platform in ("tpu", "gpu"):
        assert expert_rows(layer_of(config=odd), ONE_DEVICE, 256, platform) is None


def test_experts_without_weights_take_their_share_of_tokens():
    config = replace(CONFIG, experts=replace(EXPERTS, num_zero_experts=16))
    counted = expert_rows(nnx.eval_shape(lambda: layer_of(config=config)), ONE_DEVICE, 256, "tpu")
    assert counted is not None and abs(counted.rows - 512) < 60
