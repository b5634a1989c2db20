"""config.json of Muse Glimmer and Muse Spark: what is read, and what is refused."""

from __future__ import annotations

import pytest

from jaxengine.models.config.fields import ModelConfigError
from jaxengine.models.config.model_config import NormedOutputs
from jaxengine.models.config.rope import Rope
from jaxengine.models.registry import read_hf
from jaxengine.models.vision.muse_glimmer import MuseTowerConfig
from tests.models.config.test_as_transformers import ABSENT, recorded
from tests.tables import each_row

GLIMMER = {"architectures": ["MuseGlimmerForConditionalGeneration"], "model_type": "muse_glimmer"}
SPARK = {"architectures": ["MuseSparkForConditionalGeneration"], "model_type": "muse_spark"}


def text(name, **changes):
    raw = recorded(name)
    inner = {key: value for key, value in (raw["text_config"] | changes).items() if value is not ABSENT}
    return raw | {"text_config": inner}


def test_defaults_are_those_of_the_classes_in_transformers():
    config = read_hf(GLIMMER)
    full, near = config.attention[-1], config.attention[0]
    assert [each.window for each in config.attention] == [2048, 2048, 2048, None] * 13
    assert full.rope is None and near.rope is not None and near.rope.theta == 10000.0
    assert (near.num_heads, near.num_kv_heads, near.head_dim, near.scale) == (32, 2, 128, 3.87 * 128**-0.5)
    assert (config.logit_scale, config.logit_soft_cap) == (0.19611613513818404, 20.0)
    assert config.normed_outputs == NormedOutputs(1e-8) and config.eos_token_ids == (200001,)
    tower = config.tower
    assert isinstance(tower, MuseTowerConfig) and tower.full_layers == (*range(3, 50, 4), 49)
    assert (tower.num_features, tower.window_size, tower.unit, tower.projector_size) == (1176, 32, 1024, 4096)
    config = read_hf(SPARK)
    assert config.tower is None and config.experts is not None
    assert (config.num_layers, config.attention[0].rope, config.attention[1].rope) == (62, Rope(64, 500000.0), None)
    assert (config.experts.latent_size, config.experts.num_experts, config.experts.dense_layers) == (4096, 256, ())
    assert config.normed_outputs == NormedOutputs(1e-8, 0.3)
    # transformers leaves a base out that is not in a mapping, unless rope is scaled.
    linear = {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}
    for own, theta in (({}, 500000.0), (linear, 77.0)):
        fields = {"num_hidden_layers": 2, "rope_theta": 77.0, **own}
        rope = read_hf(SPARK | {"text_config": fields}).attention[0].rope
        assert rope is not None and rope.theta == theta


def test_the_text_of_muse_glimmer_alone():
    raw = recorded("muse_glimmer_vision")
    alone = read_hf(raw["text_config"] | {"architectures": ["MuseGlimmerForCausalLM"]})
    whole = read_hf(raw)
    assert alone.tower is None and whole.tower is not None and alone.attention == whole.attention


def test_kinds_of_layers():
    kept = text("muse_glimmer_vision", layer_types=None, layer_rope_theta=None, sliding_window=None)
    layers = read_hf(kept).attention
    assert [each.rope is None for each in layers] == [True, False, False, False, True]
    assert {each.window for each in layers} == {None}  # null is no window
    assert read_hf(text("muse_glimmer_vision", final_logit_softcapping=None)).logit_soft_cap is None


@each_row(
    ("name", "changes", "said"),
    [
        ("muse_glimmer_vision", {"hidden_activation": "selu"}, "hidden_activation must be 'silu' or 'gelu'"),
        ("muse_glimmer_vision", {"layer_rope_theta": [1.0] * 5}, "layer_rope_theta must be a list of 5 of 0, 10000.0"),
        ("muse_glimmer_vision", {"layer_rope_theta": [0]}, "layer_rope_theta must be a list of 5 of 0, 10000.0"),
        ("muse_glimmer_vision", {"layer_types": ["full_attention"]}, "layer_types must be a list of 5 of"),
        ("muse_glimmer_vision", {"post_norm_eps": -1.0}, "post_norm_eps must be a finite number > 0"),
        ("muse_glimmer_vision", {"qk_scale_factor": 0}, "qk_scale_factor must be a finite number > 0"),
        ("muse_spark", {"hidden_act": "selu"}, "hidden_act must be 'silu' or 'gelu'"),
        ("muse_spark", {"num_shared_experts": 1}, "num_shared_experts must be 0 or absent"),
        ("muse_spark", {"mlp_layer_types": ["dense"]}, "mlp_layer_types must be a list of 5 of dense, sparse"),
        ("muse_spark", {"residual_gate_temperature": 0.0}, "residual_gate_temperature must be a finite number > 0"),
    ],
)
def test_what_is_not_served_is_refused(name, changes, said):
    with pytest.raises(ModelConfigError, match=said):
        read_hf(text(name, **changes))


@each_row(
    ("changes", "said"),
    [
        ({"pos_emb_height": 5}, "pos_emb_height must be a multiple of merge_size = 2 up to 64, got 5"),
        ({"pos_emb_height": 66}, "pos_emb_height must be a multiple of merge_size = 2 up to 64, got 66"),
        ({"pos_emb_width": 8}, "pos_emb_width must be pos_emb_height, 4, got 8"),
        ({"hidden_size": 36}, "hidden_size must be a multiple of 4 \\* num_attention_heads = 8, got 36"),
        (
            {"hidden_size": 40},
            "out_hidden_size must be hidden_size \\* merge_size \\*\\* 2 of vision_config, 160, got 128",
        ),
        ({"merge_size": 32}, "merge_size must be 1 to 16, got 32"),
        ({"patch_temporal": 300}, "patch_temporal must be 1 to 256, got 300"),
        (
            {"layer_types": ["sliding_attention"] * 2},
            "layer_types must be a list of 2 of full_attention, window_attention",
        ),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters must be a mapping with the rope_type"),
        ({"hidden_act": "selu"}, "hidden_act must be one of"),
    ],
)
def test_what_a_tower_lacks_is_refused(changes, said):
    raw = recorded("muse_glimmer_vision")
    with pytest.raises(ModelConfigError, match=said):
        read_hf(raw | {"vision_config": raw["vision_config"] | changes})
