"""hf_overrides: an overridden field is as one in the file, and one that means nothing is found."""

from __future__ import annotations

import json

import numpy as np
import pytest

from jaxengine.models.config.fields import ModelConfigError
from jaxengine.models.config.readers.overrides import UnreadError, check_read, overridden, overridden_metadata
from jaxengine.models.registry import read_gguf, read_hf
from tests.fixtures.drawn_weights import checkpoint
from tests.models.config.test_gguf import metadata
from tests.tables import each_row

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
SHAPE = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "head_dim": 16,
    "num_hidden_layers": 2,
    "max_position_embeddings": 40,
    "eos_token_id": 2,
}
OLD, NEW = {"rope_theta": 1e6}, {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}


def raw_of(name):
    return json.loads((checkpoint(name) / "config.json").read_text())


def ropes(config):
    return [layer.rope for layer in config.attention if layer.rope is not None]


@each_row(
    "stored, overrides, expected",
    [
        (OLD, {"rope_scaling": YARN}, (1e6, "yarn", 4.0, 32, 128)),
        (NEW, {"rope_scaling": YARN}, (1e6, "yarn", 4.0, 32, 128)),
        (NEW, {"rope_parameters": YARN}, (1e6, "yarn", 4.0, 32, 128)),
        (OLD, {"rope_parameters": YARN}, (1e6, "yarn", 4.0, 32, 128)),
        (NEW, {"rope_parameters": YARN | {"rope_theta": 5e5}}, (5e5, "yarn", 4.0, 32, 128)),
        (NEW, {"rope_scaling": YARN, "rope_theta": 5e5}, (5e5, "yarn", 4.0, 32, 128)),
        (NEW, {"rope_scaling": {"type": "yarn", "factor": 2}}, (1e6, "yarn", 2, 40, 80)),
        (OLD, {"rope_scaling": {"type": "yarn", "factor": 2}}, (1e6, "yarn", 2, 40, 80)),
        (NEW, {"rope_scaling": YARN, "max_position_embeddings": 99}, (1e6, "yarn", 4.0, 32, 99)),
        (NEW, {"rope_scaling": {"rope_type": "linear", "factor": 1.5}}, (1e6, "linear", 1.5, 0, 60)),
        (NEW, {"rope_theta": 7e4}, (7e4, None, None, None, 40)),
        (OLD, {"rope_theta": 7e4}, (7e4, None, None, None, 40)),
        (OLD | {"rope_scaling": YARN}, {"rope_theta": 7e4}, (7e4, "yarn", 4.0, 32, 128)),
        (OLD | {"rope_scaling": YARN}, {}, (1e6, "yarn", 4.0, 32, 128)),
        ({"rope_parameters": YARN | OLD}, {}, (1e6, "yarn", 4.0, 32, 128)),
        (OLD | {"rope_scaling": YARN}, {"max_position_embeddings": 50}, (1e6, "yarn", 4.0, 32, 50)),
        (OLD | {"rope_scaling": YARN | {"factor": 1.1}}, {}, (1e6, "yarn", 1.1, 32, 40)),
        (OLD | {"rope_scaling": {"type": "linear", "factor": 2}}, {}, (1e6, "linear", 2, 0, 40)),
        (OLD | {"rope_scaling": YARN}, {"rope_scaling": None}, (1e6, None, None, None, 40)),
        ({"rope_parameters": YARN | OLD}, {"rope_parameters": None}, (1e6, None, None, None, 40)),
        (NEW | {"rope_scaling": None}, {"rope_scaling": YARN}, (1e6, "yarn", 4.0, 32, 128)),
    ],
)
def test_a_rope_is_scaled_anew(stored, overrides, expected):
    """By hand, as rope_scaling is in every Qwen card: the base stays, and the context is as vLLM derives it."""
    raw = SHAPE | stored
    check_read(raw, overrides, read_hf)
    config = read_hf(overridden(raw, overrides))
    rope = config.attention[0].rope
    scaling = rope.scaling
    found = (None,) * 3 if scaling is None else (scaling.rope_type, scaling.factor)
    found = found if scaling is None else (*found, scaling.original_max_position_embeddings)
    assert (rope.theta, *found, config.max_position_embeddings) == expected
    inside = {"architectures": ["LlavaForConditionalGeneration"], "text_config": raw}
    for given in (overrides, {"text_config": overrides}):
        assert overridden(inside, given)["text_config"] == overridden(raw, overrides), "where the language model is"


@each_row(
    "name",
    [
        "qwen2",
        "qwen3_5",
        "qwen2_vl_vision",
        "qwen3_vl_vision",
        "qwen3_moe",
        "gpt_oss",
        "deepseek_v3",
        "mistral",
        "gemma3",
    ],
)
def test_families_follow(name):
    raw = raw_of(name)
    check_read(raw, {"rope_scaling": YARN}, read_hf)
    config, before = read_hf(overridden(raw, {"rope_scaling": YARN})), read_hf(raw)
    found = [(new.theta, new.sections, new.rotary_dim) for new in ropes(config)]
    assert found == [(old.theta, old.sections, old.rotary_dim) for old in ropes(before)]
    kinds = {None if rope.scaling is None else rope.scaling.rope_type for rope in ropes(config)}
    assert "yarn" in kinds and config.max_position_embeddings == 128
    assert name == "gemma3" or kinds == {"yarn"}, "the layers with windows of Gemma 3 are not scaled"


def test_kinds_of_layers_have_ropes_of_their_own():
    rope = {kind: {"rope_type": "default", "rope_theta": 1e4} for kind in ("full_attention", "sliding_attention")}
    raw = SHAPE | {"rope_parameters": rope}
    for given in (YARN, {"full_attention": YARN}):
        found = overridden(raw, {"rope_parameters": given})
        assert found["rope_parameters"] == rope | {"full_attention": {"rope_theta": 1e4, **YARN}}
        assert found["max_position_embeddings"] == 128


def test_other_fields_are_as_in_the_file():
    for name, overrides in (
        ("qwen3_moe", {"num_experts_per_tok": 1, "eos_token_id": [3, 4], "max_position_embeddings": 50}),
        ("qwen2", {"num_hidden_layers": 1, "rms_norm_eps": 1e-3}),
    ):
        raw = raw_of(name)
        check_read(raw, overrides, read_hf)
        edited = raw | overrides | {"layer_types": None}
        assert read_hf(overridden(raw, overrides)) == read_hf(edited) != read_hf(raw)
    raw = SHAPE | {"layer_types": ["full_attention", "sliding_attention"]}
    assert overridden(raw, {"num_hidden_layers": 1})["layer_types"] == ["full_attention"]
    vision = raw_of("qwen3_vl_vision")
    assert overridden(vision, {"vision_config": {"depth": 1}})["vision_config"] == vision["vision_config"] | {
        "depth": 1
    }
    quantised = raw | {"quantization_config": {"quant_method": "fp8", "x": 1}}
    assert overridden(quantised, {"quantization_config": {"y": 1}})["quantization_config"] == {"y": 1}


@each_row(
    "overrides, name",
    [
        ({"num_expert_per_tok": 2}, "num_expert_per_tok"),
        ({"rope_scaling": YARN, "nothing": None}, "nothing"),
        ({"rope_scaling": YARN | {"facter": 4}}, "rope_scaling.facter"),
        ({"text_config": {"hidden_size": 4}}, "text_config.hidden_size"),
        ({"num_experts_per_tok": 2}, "num_experts_per_tok"),
        ({"model_type": "llama"}, "model_type"),
    ],
)
def test_what_means_nothing_is_named(overrides, name):
    with pytest.raises(UnreadError) as error:
        check_read(SHAPE, overrides, read_hf)
    assert error.value.name == name


def test_what_means_nothing_inside_is_named():
    for overrides, name in (({"vision_config": {"dept": 1}}, "vision_config.dept"), ({"dept": 1}, "dept")):
        with pytest.raises(UnreadError) as error:
            check_read(raw_of("qwen3_vl_vision"), overrides, read_hf)
        assert error.value.name == name


@each_row(
    "overrides, says",
    [
        ({"rope_scaling": "yarn"}, "rope_scaling must be a mapping, got 'yarn'"),
        ({"rope_scaling": YARN, "rope_parameters": YARN}, "rope_parameters and rope_scaling are given"),
        ({"rope_scaling": YARN | {"rope_theta": 5}, "rope_theta": 6}, "rope_theta is 6, and 5 in rope_scaling"),
        ({"rope_scaling": {"rope_type": "spiral"}}, "rope_type must be one of"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": "4"}}, "factor must be a"),
        ({"rope_theta": "1e6"}, "rope_theta must be a"),
        (
            {"max_position_embeddings": 10**400, "rope_scaling": {"rope_type": "linear", "factor": 1.5}},
            "max_position_embeddings must be an integer",
        ),
        ({"rope_scaling": YARN | {"original_max_position_embeddings": 10**400}}, "original_max_position_embeddings"),
    ],
)
def test_a_rope_that_is_wrong_is_named(overrides, says):
    with pytest.raises(ModelConfigError, match=says):
        read_hf(overridden(SHAPE | NEW, overrides))


def test_gguf_files_take_another_rope():
    raw = metadata(
        rope__freq_base=np.float32(5e5),
        rope__scaling__type="yarn",
        rope__scaling__factor=2.0,
        rope__scaling__finetuned=True,
    )
    for overrides, expected in (
        ({}, (5e5, "yarn", 2.0, 512, 512)),
        ({"rope_scaling": YARN}, (5e5, "yarn", 4.0, 32, 128)),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4}, "rope_theta": 1e6}, (1e6, "yarn", 4, 512, 2048)),
        ({"max_position_embeddings": 64}, (5e5, "yarn", 2.0, 64, 64)),
    ):
        config = read_gguf(overridden_metadata(raw, overrides))
        rope, scaling = config.attention[0].rope, config.attention[0].rope.scaling
        found = rope.theta, scaling.rope_type, scaling.factor, scaling.original_max_position_embeddings
        assert (*found, config.max_position_embeddings) == expected, overrides
    assert read_gguf(overridden_metadata(raw, {"rope_scaling": None})).attention[0].rope.scaling is None
    for overrides, name in (
        ({"num_hidden_layers": 1}, "num_hidden_layers"),
        ({"rope_scaling": YARN | {"attention_factor": 2}}, "rope_scaling.attention_factor"),
    ):
        with pytest.raises(UnreadError) as error:
            overridden_metadata(raw, overrides)
        assert error.value.name == name
    with pytest.raises(ModelConfigError, match="rope.scaling.type"):
        read_gguf(overridden_metadata(raw, {"rope_scaling": {"rope_type": "llama3", "factor": 2}}))
    for wrong in (np.array([1, 2]), ["512"]):
        with pytest.raises(ModelConfigError, match="context_length must be"):
            read_gguf(overridden_metadata(metadata(context_length=wrong), {"rope_theta": 1e6}))
