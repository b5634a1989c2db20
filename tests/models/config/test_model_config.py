"""ModelConfig from config.json: what is read, and that what cannot be used is named in one error."""

from __future__ import annotations

import dataclasses
import json

import pytest

from jaxengine.models.config.attention import Latent, LayerAttention
from jaxengine.models.config.fields import MAX_LAYERS, ModelConfigError, check_size
from jaxengine.models.config.model_config import ModelConfig
from jaxengine.models.config.readers.hf import read_config_json
from jaxengine.models.config.rope import Rope, RopeScaling
from jaxengine.models.params.errors import ModelFileError
from jaxengine.models.registry import read_hf
from tests.models.tiny import windows_of
from tests.tables import each_row

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "bos_token_id": 1,
    "eos_token_id": [2, 5],
}
QWEN2 = {**LLAMA, "architectures": ["Qwen2ForCausalLM"]}
QWEN3 = {**LLAMA, "architectures": ["Qwen3ForCausalLM"], "head_dim": 32}
MISTRAL = {**LLAMA, "architectures": ["MistralForCausalLM"], "sliding_window": 64}
PHI3 = {**LLAMA, "architectures": ["Phi3ForCausalLM"]}
GEMMA2 = {**LLAMA, "architectures": ["Gemma2ForCausalLM"]}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}


def test_llama():
    config = read_hf({**LLAMA, "attention_bias": True})
    assert config == ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=256,
        hidden_size=64,
        intermediate_size=96,
        rms_norm_eps=1e-5,
        max_position_embeddings=512,
        attention=(LayerAttention(4, 2, 16, Rope(16, 500000.0), bias=True, output_bias=True),) * 3,
        bos_token_id=1,
        eos_token_ids=(2, 5),
    )
    assert len({config, dataclasses.replace(config)}) == 1


def test_families_differ_where_they_should():
    mistral, qwen2, qwen3 = (read_hf(raw) for raw in (MISTRAL, QWEN2, QWEN3))
    plain = LayerAttention(4, 2, 16, Rope(16, 500000.0))
    assert mistral.attention == (dataclasses.replace(plain, window=64),) * 3
    assert qwen2.attention == (dataclasses.replace(plain, bias=True),) * 3
    assert qwen3.attention == (LayerAttention(4, 2, 32, Rope(32, 500000.0), qk_norm=True),) * 3
    assert read_hf({**MISTRAL, "sliding_window": None}).attention == (plain,) * 3


def test_phi3():
    config = read_hf({**PHI3, "partial_rotary_factor": 0.75, "sliding_window": 7})
    assert config.attention == (LayerAttention(4, 2, 16, Rope(12, 500000.0), window=7),) * 3
    nested = {"rope_theta": 500000.0, "rope_type": "default", "partial_rotary_factor": 0.75}
    assert read_hf({**PHI3, "rope_parameters": nested, "sliding_window": 7}) == config
    assert read_hf(PHI3).attention == (LayerAttention(4, 2, 16, Rope(16, 500000.0)),) * 3
    # transformers takes "yarn" of old files for longrope.
    longrope = {"factor": 4.0, "long_factor": [2.0] * 8, "short_factor": [1.0] * 8}
    yarn, same = ({**PHI3, "rope_scaling": {**longrope, "type": kind}} for kind in ("yarn", "longrope"))
    assert read_hf(yarn) == read_hf(same) != read_hf(PHI3)


def test_ids_that_no_token_has_are_left_out():
    config = read_hf({**LLAMA, "bos_token_id": 256, "eos_token_id": [2, 256, 5, 128256]})
    assert (config.bos_token_id, config.eos_token_ids) == (None, (2, 5))
    assert read_hf({**LLAMA, "eos_token_id": 256}).eos_token_ids == ()


def test_gemma2():
    config = read_hf(GEMMA2)
    layer = LayerAttention(4, 2, 256, Rope(256, 500000.0), scale=0.0625, window=4096, soft_cap=50.0)
    assert config.attention == (layer, dataclasses.replace(layer, window=None), layer)
    assert config.tie_word_embeddings and config.logit_soft_cap == 30.0
    changes = {"attn_logit_softcapping": None, "final_logit_softcapping": None, "sliding_window": 5, "head_dim": 8}
    kinds = ["full_attention", "sliding_attention", "full_attention"]
    config = read_hf({**GEMMA2, **changes, "query_pre_attn_scalar": 4, "layer_types": kinds})
    layer = LayerAttention(4, 2, 8, Rope(8, 500000.0), scale=0.5)
    assert config.attention == (layer, dataclasses.replace(layer, window=5), layer) and config.logit_soft_cap is None


def test_sizes_are_integers_within_their_limits():
    for value in (2, 7):
        check_size("size", value, 7, 2)
    for value in (1, 8, True, 3.0, "3", None):
        with pytest.raises(ModelConfigError, match=f"size must be an integer >= 2 and <= 7, got {value!r}"):
            check_size("size", value, 7, 2)


def test_layers_must_fit_one_pool():
    layer = LayerAttention(4, 2, 16, Rope(16))
    config = read_hf(LLAMA)
    other, latent = dataclasses.replace(layer, num_kv_heads=1), Latent(8, 8, 8, 8)
    with_latent = LayerAttention(4, 1, 16, Rope(8), latent=latent)
    for attention, message in (
        ((), "one entry per layer, at least one, got none"),
        ((layer,) * (MAX_LAYERS + 1), f"at most {MAX_LAYERS} layers, .*, got {MAX_LAYERS + 1} and"),
        (
            (layer, with_latent),
            "the same num_kv_heads, head_dim and v_head_dim where any has only a state, or where some",
        ),
        ((layer, dataclasses.replace(other, kv_source=0)), "kv_source of layer 1 must be a layer before it with pages"),
        ((dataclasses.replace(layer, kv_source=0), layer), "kv_source of layer 0 must be a layer before it with pages"),
        ((layer, dataclasses.replace(layer, kv_source=0, window=3)), "the same heads and the same window, got 0"),
    ):
        with pytest.raises(ModelConfigError, match=message):
            dataclasses.replace(config, attention=attention)
    assert dataclasses.replace(config, attention=(layer, other)).num_kv_heads == 1
    for changes, message in (
        ({"window": 0}, "window must be an integer >= 1 and <= 2147483647, got 0"),
        ({"soft_cap": 0.0}, "soft_cap must be a finite number > 0, got 0.0"),
        ({"scale": float("inf")}, "scale must be a finite number > 0, got inf"),
        ({"head_dim": 14}, "must be even and at most head_dim = 14, or odd and less, got 16"),
    ):
        with pytest.raises(ModelConfigError, match=message):
            dataclasses.replace(layer, **changes)


def test_windows_of_qwen_layers():
    used = {**QWEN2, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
    assert windows_of(read_hf(used)) == [None, 8, 8]
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    assert windows_of(read_hf({**used, "layer_types": kinds})) == [8, None, 8]
    assert windows_of(read_hf({**used, "use_sliding_window": False})) == [None] * 3


def test_rope_is_read_alike_from_both_generations_of_transformers():
    old = read_hf({**LLAMA, "rope_scaling": LLAMA3_ROPE})
    without_theta = {key: value for key, value in LLAMA.items() if key != "rope_theta"}
    new = read_hf({**without_theta, "rope_parameters": {**LLAMA3_ROPE, "rope_theta": 500000.0}})
    assert old == new
    scaling = RopeScaling("llama3", 8.0, 128, low_freq_factor=1.0, high_freq_factor=4.0)
    assert old.attention[0].rope == Rope(16, 500000.0, scaling)


def test_rope_types():
    def scaling(**rope):
        return read_hf({**LLAMA, "rope_scaling": rope}).attention[0].rope.scaling

    assert scaling(rope_type="default") is None
    assert scaling(rope_type="dynamic", factor=6.0) is None
    assert scaling(type="linear", factor=2.0) == RopeScaling("linear", 2.0)
    yarn = scaling(rope_type="yarn", factor=4.0, original_max_position_embeddings=128)
    assert yarn is not None and yarn.attention_factor == pytest.approx(1.138629436)
    assert scaling(rope_type="yarn", factor=4.0, attention_factor=1.5).attention_factor == 1.5


def test_code_in_a_config_is_not_followed():
    pointing_at_code = {**LLAMA, "auto_map": {"AutoModelForCausalLM": "evil.Model"}, "trust_remote_code": True}
    assert read_hf(pointing_at_code) == read_hf(LLAMA)


BAD = {
    "unknown architecture": (
        {"architectures": ["EvilForCausalLM"]},
        r"'EvilForCausalLM' is not supported; docs/models.md lists the \d+ that are",
    ),
    "misspelt architecture": ({"architectures": ["Qwen25ForCausalLM"]}, "the nearest is Qwen2ForCausalLM; "),
    "of another kind": (
        {"architectures": ["Gemma2ForQuestionAnswering"]},
        "the nearest is Gemma2ForCausalLM; .*CONTRIBUTING.md",
    ),
    "no architecture": ({"architectures": None}, "architectures is missing"),
    "two architectures": ({"architectures": ["LlamaForCausalLM", "Qwen2ForCausalLM"]}, "architectures must be"),
    "missing size": ({"hidden_size": None}, "hidden_size is missing"),
    "bool for int": ({"num_hidden_layers": True}, "num_hidden_layers must be an integer"),
    "text for int": ({"vocab_size": "256"}, "vocab_size must be an integer.*'256'"),
    "float for int": ({"num_attention_heads": 4.0}, "num_attention_heads must be an integer"),
    "negative": ({"intermediate_size": -96}, "intermediate_size must be an integer >= 1"),
    "zero": ({"num_key_value_heads": 0}, "num_key_value_heads must be an integer >= 1"),
    "absurd layers": ({"num_hidden_layers": 10**9}, "num_hidden_layers.*<= 1024"),
    "absurd size": ({"vocab_size": 10**30}, "vocab_size must be an integer"),
    "heads not divisible": ({"num_key_value_heads": 3}, "num_heads must be a multiple of num_kv_heads"),
    "hidden not divisible": ({"num_attention_heads": 6, "num_key_value_heads": None}, "hidden_size must be a multiple"),
    "few elements": ({"num_attention_heads": 66, "num_key_value_heads": 66}, "hidden_size must be at least"),
    "odd head": ({"head_dim": 15}, "rotary_dim, head_dim or a part of it, must be even"),
    "int for bool": ({"tie_word_embeddings": 1}, "tie_word_embeddings must be true or false"),
    "text for number": ({"rms_norm_eps": "1e-5"}, "rms_norm_eps must be a finite number"),
    "nan": ({"rope_theta": float("nan")}, "rope_theta must be a finite number"),
    "infinite in float32": ({"rms_norm_eps": 1e39}, "rms_norm_eps must be a finite number of float32, got 1e.39"),
    "infinite theta": ({"rope_theta": float("inf")}, "rope_theta must be a finite number"),
    "theta one": ({"rope_theta": 1.0}, "rope_theta must be a finite number > 1"),
    "activation": ({"hidden_act": "selu"}, "hidden_act must be 'silu' or 'gelu' or "),
    "quantized": ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
    "partial rope": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    "unknown rope": ({"rope_scaling": {"rope_type": "spiral", "factor": 2.0}}, "rope_type.*linear.*'spiral'"),
    "dynamic rope with alpha": ({"rope_scaling": {"rope_type": "dynamic", "alpha": 50.0}}, "alpha must be absent"),
    "rope not a mapping": ({"rope_scaling": [2.0]}, "rope_scaling must be a mapping"),
    "rope without factor": ({"rope_scaling": {"rope_type": "linear"}}, "factor is missing"),
    "rope context missing": (
        {"rope_scaling": {**LLAMA3_ROPE, "original_max_position_embeddings": None}},
        "original_max_position_embeddings is missing",
    ),
    "rope factors swapped": ({"rope_scaling": {**LLAMA3_ROPE, "low_freq_factor": 4.5}}, "high_freq_factor must be"),
    "rope per layer type": ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "one mapping for all layers"),
    "eos bool": ({"eos_token_id": [True]}, "eos_token_id must be a token id"),
}


@each_row("changes, message", BAD.values(), ids=BAD.keys())
def test_unusable_config(changes, message):
    with pytest.raises(ModelConfigError, match=message):
        read_hf({**LLAMA, **changes})


@pytest.mark.parametrize(
    "raw, message",
    [
        ({**MISTRAL, "sliding_window": 0}, "sliding_window must be an integer >= 1"),
        ({key: value for key, value in MISTRAL.items() if key != "sliding_window"}, "sliding_window is missing"),
        ({**QWEN2, "use_sliding_window": True}, "sliding_window is missing"),
        (
            {**QWEN3, "use_sliding_window": True, "sliding_window": 8, "layer_types": ["linear_attention"] * 3},
            "layer_types must be a list of 3 of full_attention, sliding_attention",
        ),
        ({**PHI3, "rope_scaling": {"type": "yarn", "factor": 4.0}}, "long_factor is missing from the model conf"),
        ({**PHI3, "rope_scaling": {"type": "linear"}}, "rope_type of Phi-3 must be default, longrope, su or yarn, got"),
        ({**PHI3, "partial_rotary_factor": 1.5}, "partial_rotary_factor must be a number > 0 and <= 1, got 1.5"),
        ({**PHI3, "partial_rotary_factor": 0.05}, "rotary_dim, head_dim or a part of it, must be >= 1.*got 0"),
        ({**GEMMA2, "hidden_activation": "selu"}, "hidden_activation must be 'gelu_pytorch_tanh' or 'gelu'"),
        ({**GEMMA2, "use_bidirectional_attention": True}, "use_bidirectional_attention must be false or absent"),
        ({**GEMMA2, "layer_types": ["full_attention"]}, "layer_types must be a list of 3"),
        ({**GEMMA2, "final_logit_softcapping": -1}, "final_logit_softcapping must be a finite number > 0"),
        ([], "must be a mapping"),
    ],
)
def test_unusable_config_of_other_families(raw, message):
    with pytest.raises(ModelConfigError, match=message):
        read_hf(raw)


def test_config_json_of_a_folder(tmp_path, checkpoints):
    assert read_hf(read_config_json(checkpoints / "llama3_sharded")).eos_token_ids == (2, 3)
    with pytest.raises(ModelFileError, match="cannot be read"):
        read_config_json(tmp_path)
    for content in ("{", "[" * 100_000, '{"a": ' + "1" * 5000 + "}", "\ud800"):
        (tmp_path / "config.json").write_bytes(content.encode("utf-8", "surrogatepass"))
        with pytest.raises(ModelFileError, match=r"config\.json: not (JSON|UTF-8)"):
            read_config_json(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps([LLAMA]))
    with pytest.raises(ModelFileError, match="must hold a JSON object"):
        read_config_json(tmp_path)
