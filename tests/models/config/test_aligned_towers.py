"""ViP-LLaVA, DeepSeek-VL, Janus and VideoLLaMA 3: what configurations may leave out, names of tensors, refusals."""

from __future__ import annotations

import json
from typing import Any

import pytest

from jaxengine.models.config.fields import ModelConfigError
from jaxengine.models.registry import model_for_hf, read_hf
from tests.fixtures.drawn_weights import FOLDER
from tests.tables import each_row

VIP, DEEPSEEK, JANUS, VIDEO = (
    json.loads((FOLDER / name / "config.json").read_text())
    for name in ("vip_llava_vision", "deepseek_vl_vision", "janus_vision", "video_llama3_vision")
)
# Of Janus-Pro-1B.
SIZES = {"model_type": "llama", "hidden_size": 2048, "num_attention_heads": 16, "num_hidden_layers": 24}


def without(raw: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in raw.items() if name not in names}


def test_vip_llava():
    """Five layers of the tower, unless the file says otherwise, by the name it was published with or by today's."""
    raw = without(VIP, "vision_feature_layer")
    deep = raw | {"vision_config": raw["vision_config"] | {"num_hidden_layers": 24}}
    for own, layers in (
        (deep, (23, 20, 17, 14, 6)),
        (deep | {"vision_feature_layers": [-1, 3]}, (24, 3)),
        (deep | {"vision_feature_layer": 5, "vision_feature_layers": [-1, 3]}, (5,)),
    ):
        tower: Any = read_hf(own).tower
        assert (tower.layers, tower.norm_eps, tower.projector_bias) == (layers, 1e-5, True)
    named: Any = read_hf(VIP | {"projector_layernorm_eps": 0.5, "multimodal_projector_bias": False}).tower
    assert (named.norm_eps, named.projector_bias) == (0.5, True)


def test_janus():
    """transformers' sizes where the file has none; what draws images is not read."""
    small = {"architectures": JANUS["architectures"], "text_config": SIZES, "vision_config": {}}
    tower: Any = read_hf(small).tower
    assert (tower.vit.hidden_size, tower.vit.intermediate_size, tower.vit.num_layers) == (1024, 4096, 24)
    assert (tower.unit, tower.products) == (576, ("aligner.fc1", "aligner.hidden_layers.0"))
    names = model_for_hf("JanusForConditionalGeneration").checkpoint_names
    layer = "vision_model.encoder.layers.0.self_attn"
    assert names.renamed(f"model.{layer}.projection_layer.bias") == f"{layer}.out_proj.bias"
    for part in ("vqmodel.decoder.conv_in.bias", "generation_head.proj_out.bias", "generation_embeddings.weight"):
        assert names.is_unused(f"model.{part}")
    names = model_for_hf("DeepseekVLForConditionalGeneration").checkpoint_names
    for begin in ("model.vision_model.", "model.vision_model.vision_model."):
        assert names.renamed(f"{begin}post_layernorm.bias") == "vision_model.post_layernorm.bias"


def test_heads_that_are_the_token_table():
    """text_config goes before its wrapper; DeepSeek-VL's and Janus's are tied where neither says anything."""
    for raw, outer, inner, tied in (
        (DEEPSEEK, None, None, True),
        (DEEPSEEK, None, False, False),
        (DEEPSEEK, False, None, False),
        (JANUS, True, False, False),
        (JANUS, False, False, False),
        (VIP, None, None, False),
        (VIP, False, True, True),
    ):
        text = raw["text_config"] | {"tie_word_embeddings": inner}
        config = read_hf(raw | {"text_config": text, "tie_word_embeddings": outer})
        assert config.tie_word_embeddings == tied, (raw["architectures"], outer, inner)


def test_video_llama3():
    """The base of rotation by either name; the tower has no table of positions that an image_size would count."""
    for given, theta in (({}, 1e4), ({"rope_theta": 5.0}, 5.0), ({"rope_parameters": {"rope_theta": 7.0}}, 7.0)):
        vision = without(VIDEO["vision_config"], "rope_parameters") | {"image_size": 5000} | given
        tower: Any = read_hf(VIDEO | {"vision_config": vision}).tower
        assert (tower.rope_theta, tower.vit.hidden_size, tower.merge) == (theta, 32, 1)


@each_row(
    ("raw", "where", "change", "message"),
    [
        (
            VIP,
            "vision_config",
            {"model_type": "siglip_vision_model"},
            'model_type must be "clip_vision_model" or absent, got',
        ),
        (VIP, None, {"vision_feature_layer": 7}, "vision_feature_layer must be an integer from -6 to 5"),
        (VIP, None, {"projector_layernorm_eps": 0}, "projector_layernorm_eps must be a finite number > 0"),
        (DEEPSEEK, "vision_config", {"model_type": "clip_vision_model"}, 'model_type must be "siglip_vision_model"'),
        (DEEPSEEK, None, {"vision_config": []}, "vision_config must be a mapping"),
        (DEEPSEEK, "text_config", {"model_type": "t5"}, "model_type must be that of a decoder"),
        (JANUS, "vision_config", {"use_qk_norm": True}, "vision_config.use_qk_norm must be false or absent, got True"),
        (JANUS, "vision_config", {"projection_dim": 63}, "projection_dim must be the hidden_size of the text, 64"),
        (JANUS, "vision_config", {"mlp_ratio": 0.01}, "mlp_ratio must be such that the MLP has 1 to 1048576 elements"),
        (JANUS, "vision_config", {"mlp_ratio": 1e9}, "mlp_ratio must be such that the MLP has 1 to 1048576 elements"),
        (JANUS, "vision_config", {"depth": 0}, "vision_config.depth must be an integer >= 1 and <= 1024, got 0"),
        (VIDEO, "vision_config", {"num_attention_heads": 16}, "a multiple of 4 * num_attention_heads = 64, got 32"),
        (VIDEO, "vision_config", {"model_type": "siglip_vision_model"}, 'model_type must be "video_llama_3_vision"'),
        (VIDEO, "vision_config", {"patch_size": 5000}, "patch_size must be an integer >= 1 and <= 4096"),
        (VIDEO, "vision_config", {"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters must be a mapping with"),
    ],
)
def test_refused(raw: dict[str, Any], where: str | None, change: dict[str, Any], message: str):
    changed = raw | change if where is None else raw | {where: raw[where] | change}
    with pytest.raises(ModelConfigError) as error:
        read_hf(changed)
    assert message in str(error.value)
