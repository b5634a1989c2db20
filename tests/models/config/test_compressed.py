"""config.json of DeepSeek-V4: what is read, how large pages and states are, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from jaxengine.config.base.platforms import PLATFORMS
from jaxengine.config.engine_config import ConfigError, EngineConfig
from jaxengine.models.build import Build
from jaxengine.models.config.compressed import BlockIndex, CompressedKeys
from jaxengine.models.config.fields import ModelConfigError
from jaxengine.models.registry import build_model, read_folder, read_hf
from jaxengine.models.unpaged import check_unpaged
from tests.fixtures.drawn_weights import FOLDER
from tests.tables import each_row

# deepseek-ai/DeepSeek-V4-Flash, without its quantisation
FLASH: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "num_hidden_layers": 43,
    "qk_rope_head_dim": 64,
    "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0],
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "rope_scaling": {"type": "yarn", "factor": 16, "original_max_position_embeddings": 65536, "beta_fast": 32},
    "num_hash_layers": 3,
    "sliding_window": 128,
}
SPARSE = CompressedKeys(512, 128, 1024, 8, 1024, rate=4, overlapping=True, index=BlockIndex(64, 128, 512))


def test_published():
    config = read_hf(FLASH)
    window, _, sparse, heavy = config.attention[:4]
    assert sparse.compressed == SPARSE and len(set(config.attention)) == 3
    assert heavy.compressed == replace(SPARSE, rate=128, overlapping=False, index=None)
    assert window.compressed == replace(SPARSE, rate=None, overlapping=False, index=None) and not window.has_pages
    assert window.rope is not None and window.rope.scaling is None and window.rope.rotary_dim == 64
    assert sparse.rope is not None and sparse.rope.theta == 160000 and sparse.rope.scaling is not None
    assert (sparse.rope.scaling.factor, sparse.rope.scaling.attention_factor) == (16, 1.0)
    assert config.experts is not None and config.experts.hashed_layers == (0, 1, 2)
    assert config.experts.scoring_func == "sqrtsoftplus" and config.stream_size == 4 * 4096
    # A key for each four tokens or 128: of the latter there is one in each eighth page of 16.
    assert sparse.page_sizes(16) == {"head_dim": 128, "v_head_dim": 32, "values_in_keys": False}
    assert [heavy.page_sizes(size)["head_dim"] for size in (16, 128, 256)] == [32, 4, 4]
    assert [array.shape for array in SPARSE.arrays] == [(127, 512), (7, 4 * (512 + 128))]
    # As transformers writes it, and by its defaults, whose first two layers have keys of 128 tokens.
    assert [layer.compressed.rate for layer in read_hf(FLASH | {"compress_ratios": None}).attention[:4]] == [
        *(128, 128, 128, 4)
    ]
    kinds = ["sliding_attention", "compressed_sparse_attention"] * 22
    mlps = ["moe"] * 42 + ["hash_moe"]
    written = read_hf(FLASH | {"layer_types": kinds, "compress_rates": {kinds[1]: 8}, "mlp_layer_types": mlps})
    assert [layer.compressed.rate for layer in written.attention[:3]] == [None, 8, None]
    assert written.experts.hashed_layers == (42,)


@each_row(
    "changes, message",
    [
        ({"compress_ratios": [0] * 42}, "compress_ratios must be a list of 43 of 0, 4, 128, got"),
        ({"compress_ratios": [0] * 42 + [True]}, "compress_ratios must be a list of 43 of 0, 4, 128, got"),
        ({"compress_ratios": [[]] * 43}, "compress_ratios must be a list of 43 of 0, 4, 128, got"),
        ({"layer_types": "sliding_attention"}, "layer_types must be a list of 43 of sliding_attention"),
        ({"mlp_layer_types": ["dense"] * 43}, "mlp_layer_types must be a list of 43 of hash_moe, moe"),
        ({"compress_rate_csa": 1}, "compress_rates must be an integer >= 2"),
        ({"compress_rate_hca": 2**30}, "compress_rates must be an integer >= 2 and <= 16384"),
        ({"sliding_window": 1}, "sliding_window must be an integer >= 2"),
        ({"sliding_window": 2**30}, "sliding_window must be an integer >= 2 and <= 16384"),
        ({"o_groups": 7}, "o_groups must divide num_attention_heads = 64, got 7"),
        ({"hc_mult": 1000}, "hc_mult must be an integer >= 2 and <= 16"),
        ({"hc_sinkhorn_iters": 10**6}, "hc_sinkhorn_iters must be an integer >= 1 and <= 1024"),
        ({"index_topk": 0}, "index_topk must be an integer >= 1"),
        ({"index_head_dim": 32}, "compressed keys need a rope of at most their"),
        ({"partial_rotary_factor": 0.001}, "partial_rotary_factor must be an even number"),
        ({"partial_rotary_factor": 1e38}, "partial_rotary_factor must be an even number"),
        ({"num_key_value_heads": 2}, "num_key_value_heads must be 1 or absent"),
        ({"scoring_func": "relu"}, "scoring_func must be one of softmax, sigmoid, sqrtsoftplus"),
        ({"norm_topk_prob": False}, "norm_topk_prob must be true or absent"),
    ],
)
def test_what_is_not_read(changes, message):
    with pytest.raises(ModelConfigError, match=message):
        read_hf(FLASH | changes)


def test_what_engines_refuse():
    model = read_folder(FOLDER / "deepseek_v4")

    def resolve(platform: str = "cpu", **options: Any) -> Any:
        return EngineConfig.from_options(**options).resolved(model, PLATFORMS[platform])

    for options, message in (
        (
            {"kv_cache_dtype": "fp8"},
            "kv_cache_dtype is 'float8_e4m3fn'; allowed: auto, float32 or bfloat16 for DeepseekV4",
        ),
        ({"kv_cache_dtype": "int8_per_token_head"}, "kv_cache_dtype is 'int8_per_token_head'; allowed: "),
        ({"block_size": 6}, "block_size is 6; allowed: a multiple or a divisor of the 4 tokens"),
        ({"rl_exact": True}, "rl_exact is True; allowed: False: DeepseekV4ForCausalLM attends to compressed keys"),
        ({"platform": "tpu"}, "keeps pages of several sizes"),
        ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}, "cannot be rolled back"),
    ):
        with pytest.raises(ConfigError, match=message):
            resolve(**options)
    pooled = read_folder(FOLDER / "glm5_next")
    with pytest.raises(ConfigError, match="kv_cache_dtype is .* whose gates of pooled keys are kept in no codes"):
        EngineConfig.from_options(kv_cache_dtype="fp8").resolved(pooled, PLATFORMS["cpu"])
    with pytest.raises(ValueError, match="cannot be run over whole sequences: .* keys of blocks of tokens"):
        check_unpaged(build_model(model, Build("float32")))
