"""config.json of Qwen4-Exp: the defaults of transformers' classes, old spellings, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from jaxengine.config.base.platforms import PLATFORMS
from jaxengine.config.engine_config import ConfigError, EngineConfig
from jaxengine.models.build import Build
from jaxengine.models.config.attention import KeyBlocks
from jaxengine.models.config.compressed import RecentPlaces
from jaxengine.models.config.fields import ModelConfigError
from jaxengine.models.config.state import GatedDelta, NGrams
from jaxengine.models.model_classes import MODELS
from jaxengine.models.registry import build_model, read_folder, read_hf
from jaxengine.models.unpaged import check_unpaged
from tests.fixtures.drawn_weights import FOLDER
from tests.tables import each_row

_INDEXER = {
    "indexer_n_heads": 16,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 256,
    "indexer_budget": 2048,
    "indexer_compress_ratio": 16,
}
QWEN4: dict[str, Any] = {"architectures": ["Qwen4ExpForCausalLM"], "model_type": "qwen4_exp_text", **_INDEXER}
SEEING = json.loads((FOLDER / "qwen4_exp_pictures_vision" / "config.json").read_text())


def test_defaults():
    config = read_hf(QWEN4 | {"ple_layer_ids": [6, 2, 2], "eos_token_id": [9, 4]})
    assert [layer.blocks is not None for layer in config.attention] == [number % 4 == 3 for number in range(40)]
    last = config.attention[-1]
    assert last.blocks == KeyBlocks(16, 256, 16, 128) and last.rope is not None and last.rope.rotary_dim == 256
    assert (last.num_heads, last.num_kv_heads, last.head_dim, last.v_head_dim) == (16, 2, 256, 512)
    ngrams = NGrams(0, 3, 8, 2048, 20_000_000, 128, 512, 1234, 9, 248320, 8192, 4)
    state: Any = config.attention[1].state
    assert state == GatedDelta(16, 32, 128, 128, 4, ngrams=ngrams, gate="silu")
    second: Any = config.attention[5].state
    assert second.ngrams.number == 1 and {layer.state for layer in config.attention if layer.blocks} == {None}
    streams, experts = config.hyper_connections, config.experts
    assert streams is not None and (streams.num_streams, streams.rank) == (4, 320)
    assert experts is not None and (experts.num_experts, experts.num_per_token, experts.dense_layers) == (512, 10, ())


def test_old_spellings():
    kinds = ["linear_attention", "full_attention"] * 2
    old = read_hf(QWEN4 | {"num_hidden_layers": 4, "layer_types": kinds})
    kinds = [kind.replace("full", "indexed") for kind in kinds]
    assert old == read_hf(QWEN4 | {"num_hidden_layers": 4, "layer_types": kinds})
    assert old == read_hf(QWEN4 | {"num_hidden_layers": 4, "full_attention_interval": 2})
    gated: Any = read_hf(QWEN4 | {"output_gate_type": "sigmoid"}).attention[0].state
    assert gated.gate == "sigmoid"
    assert read_hf(QWEN4 | {"architectures": ["Qwen4ExpTextModel"]}).attention == read_hf(QWEN4).attention


def test_a_tower_brings_places_and_the_text_has_its_own_end():
    config = read_hf(SEEING | {"eos_token_id": 3})
    states: Any = [layer.state for layer in config.attention]
    assert states[0] == states[2] == RecentPlaces(6) and config.eos_token_ids == (3,)
    assert states[1].ngrams.end == 5


@each_row(
    ("changes", "message"),
    [
        ({"indexer_n_heads": None}, "indexer_n_heads"),
        ({"indexer_kv_heads": 2}, "indexer_kv_heads must be 1, got 2"),
        ({"indexer_budget": 40}, "indexer_budget must be a multiple of indexer_compress_ratio, 16, got 40"),
        ({"indexer_head_dim": 128}, "indexer_head_dim must be at least 256, of rope, got 128"),
        ({"layer_types": ["sliding_attention"] * 40}, "layer_types must be a list of 40 of linear_attention, "),
        ({"output_gate_type": "relu"}, "output_gate_type must be silu or sigmoid, got 'relu'"),
        ({"hidden_act": "prelu"}, "hidden_act must be 'silu' or 'gelu' or "),
        ({"hc_count": 1}, "hc_mult must be"),
        ({"ple_layer_ids": [4], "eos_token_id": 1}, "ple_layer_ids must be a list of numbers of layers of linear_att"),
        ({"ple_layer_ids": [1]}, "eos_token_id must be a token id where ple_layer_ids has layers"),
        ({"ple_layer_ids": [1], "eos_token_id": 1, "ple_embed_dim": 40}, "ple_embed_dim must be a multiple of the 16"),
        ({"ple_layer_ids": [1], "eos_token_id": 1, "ngram_vocab_size_base": 1 << 30}, "ngram_vocab_size_base"),
    ],
)
def test_refused(changes: dict[str, Any], message: str):
    with pytest.raises(ModelConfigError) as error:
        read_hf(QWEN4 | changes)
    assert message in str(error.value)


def test_options():
    config = read_folder(FOLDER / "qwen4_exp")
    for options, message in (
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype is .* whose keys of blocks are kept in no codes"),
        ({"rl_exact": True}, "rl_exact is True; allowed: False: Qwen4ExpForCausalLM selects keys by scores"),
    ):
        with pytest.raises(ConfigError, match=message):
            EngineConfig.from_options(**options).resolved(config, PLATFORMS["cpu"])
    with pytest.raises(ValueError, match="cannot be run over whole sequences: .* blocks of keys by the means"):
        check_unpaged(build_model(config, Build("float32")))


def test_tensors_that_are_not_read():
    """Tensors that vLLM leaves unread, too: they follow from the configuration, or are of no use."""
    names, layer = MODELS["Qwen4ExpForConditionalGeneration"].checkpoint_names, "model.language_model.layers.0.ple"
    unread = ("token_lookup", "hashstats_counts", "layer_multipliers")
    assert all(names.is_unused(f"{layer}.ple_embedding.{name}") for name in unread)
    assert names.is_unused("model.language_model.hyper_connection_mixer.block_inject_weight.weight")
    assert not names.is_unused(f"{layer}.ple_embedding.ngram_embedding.shard_3")
