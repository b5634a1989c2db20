"""Shapes of models that are published quantised: the plain one's, with what their configurations say of codes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from jaxengine.check.model.roofline import product_work
from jaxengine.check.model.shapes import model_config
from jaxengine.models.build import Build
from jaxengine.models.params.declare import declared_params
from jaxengine.models.registry import build_model
from jaxengine.scheduler.batches.buckets import Bucket
from jaxengine.sharding.layout import MeshLayout


@pytest.mark.parametrize(("name", "method"), [("deepseek-v3", "fp8"), ("gpt-oss-120b", "mxfp4")])
def test_codes_have_half_the_bytes(name, method):
    """Codes of a byte each, experts among them, and scales; attention of gpt-oss is as it is."""
    plain, published = model_config(f"{name}:4"), model_config(f"{name}-{method}:4")
    assert published.quantization is not None and published.quantization.method == method
    assert replace(published, quantization=None) == plain
    sizes = []
    for config in (published, plain):
        params = declared_params(build_model(config, Build("bfloat16")))
        sizes.append(sum(param.num_bytes for param in params if param.name.startswith("layers.")))
    assert 0.5 < sizes[0] / sizes[1] < 0.58


@pytest.mark.parametrize("kept", ["nvfp4", "mxfp4", "mxfp8"])
def test_rows_of_few_bits(kept):
    """Of the shape that is known by itself, with rows rounded in groups of a few inputs."""
    published = model_config(f"llama-3.1-8b-{kept}")
    assert replace(published, quantization=None) == model_config("llama-3.1-8b")
    assert published.quantization is not None
    (stored,) = (stored for _, stored in published.quantization.rules)
    assert stored is not None and stored.activation is not None and stored.activation.microscaled


def test_codes_and_experts_are_counted_apart():
    """Of gpt-oss as it is published the matrices of experts are codes with scales, their biases are not."""
    model = build_model(model_config("gpt-oss-120b-mxfp4:1"), Build("bfloat16"))
    needs = product_work(model, Bucket(8, 8), "bfloat16")
    codes = 128 * 3 * 2880 * 2880
    assert needs.quantized_bytes == codes + 4 * codes // 32
    assert needs.expert_bytes == needs.quantized_bytes + 2 * 128 * 3 * 2880
    # 90 groups are no multiple of eight: where the compiler has the choice, a step begins with turning scales around.
    scales = [param.decl for param in declared_params(model) if param.path[-1] == "scales"]
    assert len(scales) == 2 and all(decl.row_major for decl in scales)
    # Nor are 2,880 outputs one of 128 lanes: biases would lie by outputs, and are picked by experts.
    biases = [param.decl for param in declared_params(model) if param.decl.num_experts and "bias" in param.name]
    assert len(biases) == 2 and all(decl.row_major for decl in biases)


def test_codes_with_scales_of_groups_lie_as_kernels_read_them():
    """2112 outputs are no multiple of 128 lanes: a v5p or tpu7x would store such codes by outputs, and turn them round
    in every layer of every step."""
    model = build_model(model_config("deepseek-v3-fp8:1"), Build("bfloat16"))
    params = {param.name: param for param in declared_params(model) if param.path[-1] in ("codes", "scales")}
    assert params["layers.0.attention.down.weight.codes"].shape == (7168, 2112)
    assert all(param.decl.row_major for param in params.values())


def test_every_head_has_rows_of_its_own_where_its_matrix_is_its_own():
    """Of DeepSeek-V3 over two devices: queries of 64 heads are taken into the latents' space, values out of it."""
    model = build_model(model_config("deepseek-v3:1"), Build("bfloat16", MeshLayout(model=2)))
    down, queries, out, mlp = 7168 + 2112, 1536 + 64 * 192, 64 * 128 + 7168, 2 * 7168 + 3 * 9216
    of_heads = 2 * 64 * (128 + 512)
    row = down + queries + of_heads + out + mlp + 7168 + 129280 // 2
    assert product_work(model, Bucket(8, 8), "bfloat16").row_bytes == 2 * 8 * row
