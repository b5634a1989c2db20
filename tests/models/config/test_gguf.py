"""ModelConfig from GGUF metadata."""

from __future__ import annotations

import numpy as np
import pytest

from jaxengine.models.config.attention import LayerAttention
from jaxengine.models.config.fields import ModelConfigError
from jaxengine.models.config.model_config import ModelConfig
from jaxengine.models.config.readers.gguf import RopeFactors
from jaxengine.models.config.rope import Rope, RopeScaling
from jaxengine.models.registry import read_gguf
from tests.models.tiny import windows_of
from tests.tables import each_row

YARN = {"rope_type": "yarn", "factor": 4.0}
SHARED = {
    "block_count": 2,
    "embedding_length": 64,
    "feed_forward_length": 96,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "context_length": 512,
}


def metadata(architecture: str = "llama", **changes) -> dict:
    fields = {**SHARED, **{key.replace("__", "."): value for key, value in changes.items()}}
    prefixed = {f"{architecture}.{key}": value for key, value in fields.items() if value is not None}
    return {
        "general.architecture": architecture,
        "tokenizer.ggml.tokens": [str(i) for i in range(128)],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.eot_token_id": 7,
        **prefixed,
    }


def test_llama():
    assert read_gguf(metadata()) == ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        rms_norm_eps=1e-5,
        max_position_embeddings=512,
        attention=(LayerAttention(num_heads=4, num_kv_heads=2, head_dim=16, rope=Rope(16)),) * 2,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_ids=(2, 7),
    )


def test_numpy_scalars_become_python_values():
    config = read_gguf(metadata(block_count=np.uint32(2), rope__freq_base=np.float32(5e5)), tie_word_embeddings=False)
    assert type(config.num_layers) is int and type(config.attention[0].rope.theta) is float
    assert config.attention[0].rope.theta == 5e5 and not config.tie_word_embeddings
    hash(config)


def test_qwen():
    qwen2 = read_gguf(metadata("qwen2"))
    assert qwen2.architecture == "Qwen2ForCausalLM" and qwen2.attention[0].bias and not qwen2.attention[0].output_bias
    qwen3 = read_gguf(metadata("qwen3", attention__key_length=32, attention__value_length=32))
    assert qwen3.architecture == "Qwen3ForCausalLM"
    assert qwen3.attention[0].qk_norm and qwen3.attention[0].head_dim == 32


def test_biases_are_those_that_the_file_has():
    """GLM-4-0414 has them in some of its sizes; the metadata of both are alike."""

    def biases(architecture: str, *biased: str, **changes) -> tuple[bool, bool, bool]:
        config = read_gguf(metadata(architecture, **changes), biased=biased)
        return config.attention[1].bias, config.attention[1].output_bias, config.mlp_bias

    assert read_gguf(metadata("glm4")).attention[0].bias and biases("glm4") == (False, False, False)
    assert biases("glm4", "attn_q", "attn_k", "attn_v") == (True, False, False)
    assert biases("llama", "attn_v", "attn_output", "attn_norm") == (True, True, False)
    assert biases("llama", "ffn_down", "ffn_gate_exps") == (False, False, True)
    assert biases("phi2", "attn_qkv", attention__layer_norm_epsilon=1e-5) == (True, False, False)
    experts = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 8}
    with pytest.raises(ModelConfigError, match="expert_gating_func must be 2 .sigmoid. in a file with exp_probs_b"):
        biases("qwen3moe", "exp_probs_b", **experts)


def test_rope_scaling():
    linear = read_gguf(metadata(rope__scaling__type="linear", rope__scaling__factor=2.0))
    assert linear.attention[0].rope.scaling == RopeScaling("linear", 2.0)
    yarn = metadata("qwen2", rope__scaling__type="yarn", rope__scaling__factor=4.0)
    yarn["qwen2.rope.scaling.original_context_length"] = 128
    assert read_gguf(yarn).attention[1].rope.scaling.original_max_position_embeddings == 128
    explicit = read_gguf(metadata(), rope_factors=RopeFactors((1.0,) * 6 + (4.0, 8.0)))
    assert explicit.attention[0].rope.scaling == RopeScaling("factors", factors=(1.0,) * 6 + (4.0, 8.0))


@each_row(
    "fields,expected",
    [
        ({"rope.scaling.factor": 4.0}, RopeScaling("linear", 4.0)),
        ({"rope.scale_linear": 4.0}, RopeScaling("linear", 4.0)),
        ({"rope.scaling.factor": 2.0, "rope.scale_linear": 4.0}, RopeScaling("linear", 2.0)),
        ({"rope.scaling.type": "linear", "rope.scale_linear": 4.0}, RopeScaling("linear", 4.0)),
        ({"rope.scaling.type": "yarn", "rope.scale_linear": 4.0}, RopeScaling.from_hf(YARN, 512)),
        ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, None),
        ({"rope.scaling.factor": np.float32(1.0)}, None),
        ({"rope.scale_linear": 0.0}, None),
    ],
)
def test_rope_factor_as_llama_cpp_takes_it(fields, expected):
    raw = metadata() | {f"llama.{name}": value for name, value in fields.items()}
    assert read_gguf(raw).attention[0].rope == Rope(16, scaling=expected)


def test_rope_factor_beside_tensors_is_refused():
    raw = metadata() | {"llama.rope.scaling.factor": 4.0}
    for factors in (RopeFactors((1.0,) * 8), RopeFactors(short=(1.0,) * 8, long=(2.0,) * 8)):
        with pytest.raises(ModelConfigError, match="linear.*not supported"):
            read_gguf(raw, rope_factors=factors)
    with pytest.raises(ModelConfigError, match="rope.scale_linear must be a finite number > 0, got -1"):
        read_gguf(metadata() | {"llama.rope.scale_linear": -1.0})


def test_sliding_window_shorter_than_the_context_counts():
    assert windows_of(read_gguf(metadata(attention__sliding_window=512))) == [None, None]
    assert windows_of(read_gguf(metadata(attention__sliding_window=64))) == [64, 64]


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"block_count": None}, "llama.block_count is missing"),
        ({"embedding_length": "64"}, "llama.embedding_length must be an integer"),
        ({"block_count": 2**20}, "llama.block_count.*<= 1024"),
        ({"attention.head_count": np.array([4, 2])}, "llama.attention.head_count must be an integer"),
        ({"attention.head_count": 6, "attention.head_count_kv": 6}, "embedding_length must be a multiple"),
        ({"attention.head_count_kv": 3}, "num_heads must be a multiple of num_kv_heads"),
        ({"attention.value_length": 32}, "llama.attention.value_length must be the head dimension 16"),
        ({"rope.dimension_count": 8}, "llama.rope.dimension_count must be the head dimension 16"),
        ({"rope.scaling.type": "longrope"}, "llama.rope.scaling.type must be none, linear or yarn"),
        ({"rope.scaling.type": "linear"}, "llama.rope.scaling.factor is missing"),
        ({"expert_count": 8}, "llama.expert_used_count is missing"),
    ],
)
def test_unusable_metadata(changes, message):
    raw = metadata() | {f"llama.{key}": value for key, value in changes.items()}
    with pytest.raises(ModelConfigError, match=message):
        read_gguf({key: value for key, value in raw.items() if value is not None})


def test_unknown_architecture_and_wrong_rope_factors():
    with pytest.raises(
        ModelConfigError, match=r"the architecture 'rwkv7' is not supported; docs/models.md lists the \d+ that are"
    ):
        read_gguf(metadata("rwkv7"))
    with pytest.raises(ModelConfigError, match="general.architecture is missing"):
        read_gguf({})
    with pytest.raises(ModelConfigError, match="rotary_dim / 2 = 8 values, got 3"):
        read_gguf(metadata(), rope_factors=RopeFactors((1.0, 2.0, 3.0)))
    with pytest.raises(ModelConfigError, match="finite numbers > 0"):
        read_gguf(metadata(), rope_factors=RopeFactors((0.0,) * 8))
