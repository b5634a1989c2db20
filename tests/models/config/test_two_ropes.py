"""Rope that a config.json says twice: `rope_scaling`, as model cards advise, in a folder that transformers 5 wrote."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from jaxengine.models.config.fields import ModelConfigError
from jaxengine.models.config.readers.hf import with_usual_fields
from jaxengine.models.registry import read_eagle3, read_folder, read_hf
from tests.tables import each_row

MODELS = Path(__file__).parents[2] / "fixtures" / "models"
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
# Recorded models of each way to read a rope; text_config is inside of a wrapper in those with _vision.
FAMILIES = (
    *("llama", "llama3_sharded", "qwen3", "mixtral", "gpt_oss", "smollm3", "ernie4_5", "cohere", "apertus", "lfm2"),
    *("glm", "nemotron", "minimax_m2_tied", "deepseek_v3", "minicpm3", "qwen3_next", "hunyuan_dense", "hunyuan_moe"),
    *("gemma3", "olmo3", "exaone4", "llama4", "ministral3", "gemma3_vision", "llava_vision", "qwen2_5_vl_vision"),
    *("qwen3_vl_vision", "qwen3_5_vision", "glm4v_vision", "internvl_vision", "mistral3_vision", "llama4_vision"),
)


def with_recipe(name: str, **scaling: Any) -> dict[str, Any]:
    """The recorded config.json with a rope_scaling where its rope_parameters are."""
    raw = json.loads((MODELS / name / "config.json").read_text())
    inner = raw.get("text_config", raw)
    sections = {key: value for key, value in inner["rope_parameters"].items() if key.startswith("mrope")}
    inner["rope_scaling"] = {**YARN, **sections, **scaling}
    return raw


def ropes(raw: dict[str, Any]) -> set[tuple[Any, ...]]:
    """(base, kind, factor, original context) of each rope of a model."""
    found = {layer.rope for layer in read_hf(raw).attention if layer.rope is not None}
    scalings = [(rope.theta, rope.scaling) for rope in found]
    return {
        (theta, "default", None, None)
        if scaling is None
        else (theta, scaling.rope_type, scaling.factor, scaling.original_max_position_embeddings)
        for theta, scaling in scalings
    }


def theirs(raw: dict[str, Any]) -> set[tuple[Any, ...]]:
    """The same of transformers' own configuration."""
    config = AutoConfig.for_model(**json.loads(json.dumps(raw))).get_text_config()
    parameters = config.rope_parameters
    each = [parameters] if "rope_type" in parameters else list(parameters.values())
    return {
        (one["rope_theta"], one["rope_type"], one.get("factor"), one.get("original_max_position_embeddings"))
        for one in each
    }


@each_row("name", FAMILIES)
def test_both_are_read_as_transformers_reads_them(name: str):
    for scaling in ({}, {"rope_theta": 777.0}):
        raw = with_recipe(name, **scaling)
        assert ropes(raw) == theirs(raw)
        assert "yarn" in {kind for _, kind, *_ in ropes(raw)}


def test_base_beside_both_is_kept():
    raw = with_recipe("qwen3") | {"rope_theta": 555.0}
    assert ropes(raw) == theirs(raw) == {(555.0, "yarn", 4.0, 64)}


def test_lost_base_is_logged(caplog):
    with caplog.at_level(logging.WARNING):
        read_hf(with_recipe("qwen3_vl_vision"))
        assert "its rope_theta, 1000.0, is lost" in caplog.text
        caplog.clear()
        read_hf(with_recipe("qwen3", rope_theta=10000.0))
        read_hf(with_recipe("gemma3"))  # its mapping for each kind of layers keeps its base
        assert not caplog.text


def test_empty_scaling_replaces_nothing():
    plain = {"rope_type": "linear", "factor": 2.0, "rope_theta": 9.0}
    for empty in ({}, None):
        assert with_usual_fields({"rope_parameters": plain, "rope_scaling": empty}).get("rope_parameters") == plain
    with pytest.raises(ModelConfigError, match="rope_scaling must be a mapping"):
        with_usual_fields({"rope_parameters": plain, "rope_scaling": [4.0]})


def test_scaling_outside_of_text_config_is_refused():
    raw = with_recipe("qwen3_vl_vision")
    inner = raw["text_config"]
    assert read_hf({**raw, "rope_scaling": inner["rope_scaling"]}) == read_hf(raw)
    for scaling in (YARN, {"type": "linear", "factor": 2.0}):
        text = {name: value for name, value in inner.items() if name != "rope_scaling"}
        with pytest.raises(ModelConfigError, match="rope_scaling must be in text_config"):
            read_hf({**raw, "text_config": text, "rope_scaling": scaling})


def test_eagle3_head(tmp_path):
    raw = with_recipe("llama") | {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    rope = read_eagle3(tmp_path, read_folder(MODELS / "llama")).attention[0].rope
    assert rope is not None and rope.scaling is not None and rope.scaling.rope_type == "yarn"
