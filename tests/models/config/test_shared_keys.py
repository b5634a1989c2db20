"""config.json of DeepSeek-V4.1: what is read, which layers compute and use what, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from jaxengine.models.config.compressed import BlockIndex, Candidates, NgramMemory, SharedKeys
from jaxengine.models.config.fields import ModelConfigError
from jaxengine.models.registry import read_hf
from tests.tables import each_row

# deepseek-ai/DeepSeek-V4.1-Flash, without its quantisation and what transformers has the same default for
TEXT: dict[str, Any] = {
    "model_type": "deepseek_v41_text",
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "rope_scaling": {"rope_type": "yarn", "factor": 16, "original_max_position_embeddings": 65536, "beta_fast": 32},
    "compress_ratios": [0, 0, *[2] * 18, *[1] * 20, 0, 0, 0],
    "kv_source_layer_ids": [2, 8, 14, 20],
    "index_source_layer_ids": [2, 8, 14, 20, 24, 28, 32, 36],
    "candidate_source_layer_id": 20,
    "engram_layer_ids": [1, 14],
    "engram_num_embeddings": [384006168, 384016682],
    "num_nextn_predict_layers": 3,
}
FLASH: dict[str, Any] = {
    "architectures": ["DeepseekV41ForCausalLM"],
    "model_type": "deepseek_v41",
    "vision_config": {"num_hidden_layers": 32},
}


def read(**changes: Any) -> Any:
    return read_hf(FLASH | {"text_config": TEXT | changes})


def test_published():
    config = read()
    assert (config.hidden_size, config.vocab_size, config.rms_norm_eps) == (5120, 129280, 1e-20)
    keys = [layer.compressed for layer in config.attention]
    shared = {"window": 128, "q_rank": 1280, "out_groups": 8, "out_rank": 1024, "index": BlockIndex(32, 128, 512)}
    wanted = {
        0: SharedKeys(512, **shared | {"index": None}, owned=False, selects=False),
        1: SharedKeys(512, **shared | {"index": None}, owned=False, selects=False, lookback=3),
        2: SharedKeys(512, **shared, rate=2),
        13: SharedKeys(512, **shared, rate=2, owned=False, selects=False),
        14: SharedKeys(512, **shared, rate=2, lookback=3),
        20: SharedKeys(512, **shared, rate=1, candidates=Candidates(2048, 8, chosen=False)),
        36: SharedKeys(512, **shared, rate=1, owned=False, candidates=Candidates(2048, 8, chosen=True)),
        39: SharedKeys(512, **shared, rate=1, owned=False, selects=False),
    }
    assert {number: keys[number] for number in wanted} == wanted
    sources = {
        number: (config.attention[number].kv_source, config.attention[number].selection_source)
        for number in (1, 2, 7, 19, 20, 24, 27, 39)
    }
    assert sources == {
        1: (None, None),
        2: (None, None),
        7: (2, 2),
        19: (14, 14),
        20: (None, None),
        24: (20, 20),
        27: (20, 24),
        39: (20, 36),
    }
    assert [array.shape for array in wanted[14].arrays] == [(127, 512), (1, 1024), (3, 1)]
    assert [layer.rope.theta for layer in config.attention[1:3]] == [10000, 160000]
    assert config.hyper_connections.delayed and config.stream_size == 4 * 5120 + 12
    assert config.ngrams == NgramMemory((1, 14), (384006168, 384016682), 4, 8, 256, 16_000_000, 2, 99_092)
    # The tables have exactly the rows of their ranges.
    assert tuple(map(sum, config.ngrams.primes)) == config.ngrams.num_rows
    # By transformers' defaults, and without text_config.
    short = {"kv_source_layer_ids": None, "index_source_layer_ids": None, "candidate_source_layer_id": None}
    assert [layer.compressed for layer in read(compress_ratios=None, **short).attention] == keys
    flat = read_hf(FLASH | TEXT | short | {"num_hidden_layers": 6, "compress_ratios": None, "engram_layer_ids": None})
    assert [layer.compressed.rate for layer in flat.attention] == [None, None, 2, 2, 1, 1]
    assert [layer.kv_source for layer in flat.attention] == [None, None, None, 2, None, 4] and flat.ngrams is None


@each_row(
    "changes, message",
    [
        ({"compress_ratios": [0] * 39}, "compress_ratios must be a list of 40 whole numbers"),
        ({"compress_ratios": [-1] * 40}, "compress_ratios must be a list of 40 whole numbers"),
        ({"kv_source_layer_ids": [40]}, "kv_source_layer_ids must be a list of numbers of the 40 layers"),
        ({"kv_source_layer_ids": [1, 2]}, "kv_source_layer_ids must be numbers of layers whose compress_ratios"),
        ({"kv_source_layer_ids": [8]}, "kv_source_layer_ids must be a layer of the same compress_ratios at or before"),
        ({"kv_source_layer_ids": [2]}, "kv_source_layer_ids must be a layer of the same compress_ratios at or before"),
        ({"index_source_layer_ids": [2]}, "index_source_layer_ids must be a list with all of kv_source_layer_ids"),
        ({"candidate_source_layer_id": 21}, "candidate_source_layer_id must be one of index_source_layer_ids"),
        ({"candidate_source_layer_id": 14}, "candidate_source_layer_id must be a layer after which"),
        ({"candidate_topk_blocks": 0}, "candidate_topk_blocks must be an integer >= 1"),
        ({"engram_num_embeddings": [5]}, "engram_num_embeddings must be a number for each of engram_layer_ids"),
        ({"engram_num_embeddings": [5, 5]}, "engram_num_embeddings must be at least 384006168, got 5"),
        ({"engram_n_heads": 257}, "engram_n_heads must be an integer >= 1 and <= 256"),
        ({"engram_vocab_size": 1 << 30}, r"engram_vocab_size . number of ranges must be an integer >= 1 and <= "),
        ({"engram_pad_token_id": 129280}, "engram_pad_token_id must be an integer >= 0 and <= 129279"),
        ({"engram_layer_ids": [1, 40]}, "engram_layer_ids must be a list of numbers of the 40 layers"),
        ({"engram_max_ngram_size": 1}, "engram_max_ngram_size must be an integer >= 2"),
        ({"gate_temp": 2.0}, "gate_temp must be 1.0"),
        ({"topk_method": "greedy"}, "topk_method must be .noaux_tc. or absent"),
        ({"norm_topk_prob": False}, "norm_topk_prob must be true"),
        ({"n_shared_experts": 2}, "n_shared_experts must be 1"),
    ],
)
def test_refused(changes, message):
    with pytest.raises(ModelConfigError, match=message):
        read(**changes)
