"""config.json of models whose tokens attend to the keys that an indexer selects: what is read, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from jaxengine.models.config.attention import KeyIndex
from jaxengine.models.config.fields import ModelConfigError
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
