"""rl_exact: which engines have it, and that no other option makes its results differ in silence."""

from __future__ import annotations

import dataclasses

import pytest

from jaxengine.config.base.platforms import PLATFORMS
from jaxengine.config.engine_config import ConfigError, EngineConfig
from jaxengine.config.features.exact import BLOCK_KEYS
from jaxengine.config.features.speculation import GRAMMAR, METHODS, NGRAM, STORED
from jaxengine.models.config.pooler import Pooler
from jaxengine.models.quantization.registry import rounded
from jaxengine.pallas_kernels.tuning import XlaAttention
from tests.models.tiny import TINY
from tests.tables import each_row

MODEL = dataclasses.replace(TINY, vocab_size=128, max_position_embeddings=1000)


@each_row("options", [{}, {"dtype": "bfloat16"}, {"kv_cache_dtype": "float32"}, {"block_size": 64}])
def test_engines_that_have_it(options):
    assert EngineConfig(rl_exact=True, **options).resolved(MODEL, PLATFORMS["cpu"]).rl_exact
    assert not EngineConfig(**options).resolved(MODEL, PLATFORMS["cpu"]).rl_exact


def test_it_needs_one_size_of_steps():
    sizes = EngineConfig(rl_exact=True, max_num_seqs=8).resolved(MODEL, PLATFORMS["cpu"]).compilation_config
    assert (sizes.cudagraph_capture_sizes, sizes.prefill_sizes) == ((), ())
    given = EngineConfig(rl_exact=True, compilation_config={"prefill_sizes": [64]})
    assert given.resolved(MODEL, PLATFORMS["cpu"]).compilation_config.prefill_sizes == (64,)


def test_blocks_of_keys_are_those_of_the_kernel():
    assert XlaAttention().block_kv == BLOCK_KEYS


DRAFTS = {
    method: {"method": method, "num_speculative_tokens": 2} | ({"model": "a folder"} if method in STORED else {})
    for method in METHODS
}
REFUSED = {
    "tp": ({"tensor_parallel_size": 2}, {}, "tensor_parallel_size", "given with tensor_parallel_size"),
    "dp": ({"data_parallel_size": 2}, {}, "data_parallel_size", "given with data_parallel_size"),
    "pp": ({"pipeline_parallel_size": 2}, {}, "pipeline_parallel_size", "given with pipeline_parallel_size"),
    "adapters": ({"enable_lora": True}, {}, "enable_lora", "given with enable_lora"),
    **{
        method: (
            {"speculative_config": drafts},
            {"num_nextn_predict_layers": 1},
            "speculative_config",
            "given with spec.*or let ngram or grammar draft",
        )
        for method, drafts in DRAFTS.items()
        if method not in (NGRAM, GRAMMAR)  # of which tests/jaxengine/rl/test_exact.py compares bits
    },
    "capture": ({"capture_layers": (0,)}, {}, "capture_layers", "given with capture_layers"),
    "taps": ({"capture": ("residual:0",)}, {}, "capture", "given with capture"),
    "steering": ({"steer": ("residual:0",)}, {}, "steer", "given with steer"),
    "codes": ({"kv_cache_dtype": "fp8"}, {}, "kv_cache_dtype", "allowed: auto with rl_exact"),
    "narrower": ({"kv_cache_dtype": "bfloat16"}, {}, "kv_cache_dtype", "allowed: auto with rl_exact"),
    "pages": ({"block_size": 48}, {}, "block_size", "allowed: a divisor of 128"),
    "pooling": ({}, {"pooler": Pooler()}, "rl_exact", "allowed: False: .* pools"),
    "int8": ({}, {"quantization": rounded("int8")}, "rl_exact", "allowed: False: .* stores its weights in fewer bits"),
}


@each_row("kind", REFUSED)
def test_what_would_be_rounded_otherwise_is_refused(kind):
    options, changes, param, text = REFUSED[kind]
    config, model = EngineConfig(rl_exact=True, **options), dataclasses.replace(MODEL, **changes)
    with pytest.raises(ConfigError, match=text) as error:
        config.resolved(model, PLATFORMS["cpu"])
    assert error.value.param == param


@each_row("platform", ["gpu", "gpu_xla", "tpu"])
def test_other_devices_are_refused(platform):
    with pytest.raises(ConfigError, match=f"rl_exact is True; allowed: False on {platform}"):
        EngineConfig(rl_exact=True).resolved(MODEL, PLATFORMS[platform])
