"""config.json of models whose tokens attend to the keys that an indexer selects: what is read, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from jaxengine.models.config.attention import KeyIndex
from jaxengine.models.config.fields import ModelConfigError
from jaxengine.models.config.state import GatedDelta
from jaxengine.models.registry import read_hf
from tests.models.config.test_latent import DEEPSEEK_V3
from tests.tables import each_row

# deepseek-ai/DeepSeek-V3.2, where it differs
DEEPSEEK_V32: dict[str, Any] = DEEPSEEK_V3 | {
    "architectures": ["DeepseekV32ForCausalLM"],
    "model_type": "deepseek_v32",
    "index_head_dim": 128,
    "index_n_heads": 64,
    "index_topk": 2048,
}
GLM = DEEPSEEK_V32 | {"architectures": ["GlmMoeDsaForCausalLM"], "model_type": "glm_moe_dsa", "num_hidden_layers": 7}

GLM5_NEXT: dict[str, Any] = {
    "architectures": ["Glm5NextForConditionalGeneration"],
    "model_type": "glm5_next",
    "text_config": {"model_type": "glm5_next_text"},
}


def sources(**changes: Any) -> list[int | None]:
    """The layer whose selection each layer of a GLM takes."""
    return [layer.index.source for layer in read_hf(GLM | changes).attention if layer.index is not None]


def test_deepseek_v32():
    config = read_hf(DEEPSEEK_V32)
    (layer,) = set(config.attention)
    assert layer.index == KeyIndex(64, 128, 2048) and layer.latent == read_hf(DEEPSEEK_V3).attention[0].latent
    # The indexer's key lies where other layers have a value.
    assert (layer.num_kv_heads, layer.head_dim, layer.v_head_dim, layer.values_in_keys) == (1, 576, 128, False)
    assert config.experts == read_hf(DEEPSEEK_V3).experts and config.num_nextn_predict_layers == 1


def test_glm_5_3_has_selected_groups_of_keys_and_delta_nets():
    """The defaults of transformers' class; the file may have the fields outside, and old names of the delta net's."""
    config = read_hf(GLM5_NEXT)
    indexed = [layer for layer in config.attention if layer.index is not None]
    assert [layer.index is not None for layer in config.attention] == [number % 4 == 3 for number in range(45)]
    assert {layer.index for layer in indexed} == {KeyIndex(32, 128, 2048, pool=16)} and indexed[0].rope is None
    assert (indexed[0].head_dim, indexed[0].v_head_dim) == (512, 256) and config.num_unread_layers == 1
    assert config.experts is not None and config.experts.dense_layers == (0, 1, 2)
    state = GatedDelta(64, 64, 128, 128, 4, by_element=True, rank=128, lower_bound=-5.0)
    assert {layer.state for layer in config.attention} == {None, state}
    inner = {"num_heads": 8, "head_dim": 64, "short_conv_kernel_size": 3, "gate_lower_bound": None}
    other = GatedDelta(8, 8, 64, 64, 3, by_element=True, rank=64, lower_bound=-5.0)
    for linear, bound in (inner, -5.0), (inner | {"safe_gate": False}, None):
        found = read_hf(GLM5_NEXT | {"text_config": {"linear_attn_config": linear, "linear_head_dim": 1}})
        assert found.attention[0].state == replace(other, lower_bound=bound)
    assert read_hf({**GLM5_NEXT, "text_config": None, "num_hidden_layers": 4}).num_layers == 4
    for changes, message in (
        ({"qk_rope_head_dim": 64}, "qk_rope_head_dim must be 0 or absent"),
        ({"index_kpool": 24}, "index_topk must be a multiple of index_kpool = 24, got 2048"),
        ({"index_kpool_always_select_tail": False}, "index_kpool_always_select_tail must be true or absent"),
        (
            {"indexer_types": ["full"] * 43 + ["shared", "full"]},
            "indexer_types must be full for each layer of indexed_att",
        ),
        ({"index_topk_freq": 2}, "index_topk_freq must be 1 or absent"),
        ({"linear_lower_bound": 1}, "linear_lower_bound must be a number < 0, got 1"),
        ({"layer_types": ["linear_attention"] * 44}, "layer_types must be a list of 45 of linear_attention, indexed"),
    ):
        with pytest.raises(ModelConfigError, match=message):
            read_hf(GLM5_NEXT | {"text_config": changes})


def test_which_layers_of_glm_have_an_indexer():
    assert sources() == [None] * 7
    assert read_hf(GLM).attention[0].index == KeyIndex(64, 128, 2048, interleaved=True)
    # As transformers 5.24 expands these.
    assert sources(index_topk_freq=3) == [None, None, 1, 1, None, 4, 4]
    assert sources(index_topk_freq=2, index_skip_topk_offset=4) == [None, None, None, None, 3, None, 5]
    assert sources(index_topk_pattern="FSSFFSS") == [None, 0, 0, None, None, 4, 4]
    kinds = ["full", "full", "shared", "full", "shared", "shared", "full"]
    assert sources(indexer_types=kinds, index_topk_pattern="F") == [None, None, 1, None, 3, 3, None]
    # The layer that drafts stands after the last one: it would take a selection that no layer hands on.
    shared = read_hf(GLM | {"index_topk_freq": 3})
    assert (shared.num_nextn_predict_layers, shared.num_unread_layers) == (0, 1)
    assert read_hf(GLM | {"indexer_types": kinds}).num_nextn_predict_layers == 1


@each_row(
    "changes, message",
    [
        ({"index_topk": 0}, "index_topk must be an integer >= 1"),
        ({"index_topk": True}, "index_topk must be an integer >= 1"),
        ({"index_topk": 2**40}, "index_topk must be an integer >= 1 and <= "),
        ({"index_n_heads": 2**31}, "index_n_heads must be an integer >= 1 and <= "),
        ({"index_head_dim": 2**20}, "index_head_dim must be an integer >= 1 and <= "),
        ({"index_head_dim": 32}, "index_head_dim must be at least qk_rope_head_dim = 64, got 32"),
        ({"q_lora_rank": None}, "q_lora_rank must be set where an indexer"),
        ({"indexer_rope_interleave": 1}, "indexer_rope_interleave must be true or false"),
        ({"layer_types": ["indexed_attention"] * 6 + ["full_attention"]}, "layer_types must be a list of indexed_att"),
        ({"layer_types": "indexed_attention"}, "layer_types must be a list of indexed_att"),
        ({"layer_types": 3}, "layer_types must be a list of indexed_att"),
        ({"indexer_types": ["full"] * 6}, "indexer_types must be a list of 7 of full, shared"),
        ({"indexer_types": ["full"] * 6 + [["full"]]}, "indexer_types must be a list of 7 of full, shared"),
        ({"indexer_types": "FFFFFFF"}, "indexer_types must be a list of 7 of full, shared"),
        ({"index_topk_pattern": "FFFFFFX"}, "index_topk_pattern must be a list of 7 of full, shared"),
        ({"index_topk_pattern": "SFFFFFF"}, "index_topk_pattern must be full for the first layer"),
        ({"index_topk_freq": 2.5}, "index_topk_freq must be an integer"),
        ({"index_topk_freq": 2, "index_skip_topk_offset": 0}, "index_skip_topk_offset must be at least 1 unless"),
    ],
)
def test_unusable(changes, message):
    with pytest.raises(ModelConfigError, match=message):
        read_hf(json.loads(json.dumps(GLM | changes)))
