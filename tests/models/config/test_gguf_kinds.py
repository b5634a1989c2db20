"""ModelConfig from GGUF metadata of families whose layers are of two kinds, most of which files leave to the reader."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from jaxengine.models.config.fields import ModelConfigError
from jaxengine.models.config.readers.gguf import READ_AS, RopeFactors
from jaxengine.models.config.rope import Rope, RopeScaling
from jaxengine.models.registry import read_gguf

SHARED = {
    "block_count": 8,
    "embedding_length": 64,
    "feed_forward_length": 96,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.key_length": 32,
    "attention.value_length": 32,
    "attention.layer_norm_rms_epsilon": 1e-6,
    "attention.layer_norm_epsilon": 1e-5,
    "attention.sliding_window": 100,
    "context_length": 512,
    "rope.freq_base": 1e6,
    "vocab_size": 128,
}
FULL, LOCAL = Rope(32, 1e6), Rope(32, 1e4)


def read(architecture: str, **changes: Any):
    """The layers, as (window, rope), and the configuration."""
    fields = {**SHARED, **{name.replace("__", "."): value for name, value in changes.items()}}
    own = {f"{architecture}.{name}": value for name, value in fields.items() if value is not None}
    config = read_gguf({"general.architecture": architecture, **own})
    return [(layer.window, layer.rope) for layer in config.attention], config


def test_gemma2():
    layers, config = read("gemma2", attn_logit_softcapping=40.0)
    assert layers == [(100, FULL), (None, FULL)] * 4 and config.attention[0].scale == 32**-0.5
    assert config.attention[0].soft_cap == 40.0 and config.logit_soft_cap == 30.0
    _, largest = read("gemma2", block_count=46)
    assert largest.attention[0].scale == (64 / 4) ** -0.5
    assert read("gemma2", context_length=8192, attention__sliding_window=None)[0][0][0] == 4096


def test_gemma3():
    scaled = {"rope__scaling__type": "linear", "rope__scaling__factor": 8.0}
    layers, config = read("gemma3", **scaled)
    assert layers == [*[(100, LOCAL)] * 5, (None, Rope(32, 1e6, RopeScaling("linear", 8.0))), *[(100, LOCAL)] * 2]
    assert config.attention[0].scale == 32**-0.5 and config.logit_soft_cap is None
    assert read("gemma3", rope__freq_base_swa=500.0)[0][0] == (100, Rope(32, 500.0))
    assert read("gemma3", block_count=62)[1].attention[0].scale == (64 / 4) ** -0.5


def test_layers_without_rope():
    assert read("smollm3", attention__sliding_window=None)[0] == ([(None, FULL)] * 3 + [(None, None)]) * 2
    local = Rope(32, 1e6, interleaved=True)
    layers, config = read("cohere2", logit_scale=0.25)
    assert layers == ([(100, local)] * 3 + [(None, None)]) * 2
    assert config.logit_scale == 0.25 and config.rms_norm_eps == 1e-5
    assert read("command-r", logit_scale=0.25, attention__sliding_window=None)[0] == [(None, local)] * 8
    assert read("exaone4")[0] == ([(100, FULL)] * 3 + [(None, None)]) * 2
    assert read("exaone4", attention__sliding_window=None)[0] == [(None, FULL)] * 8
    listed = np.array([False, True] * 4)
    assert read("exaone4", attention__sliding_window_pattern=listed)[0] == [(None, None), (100, FULL)] * 4


def test_plamo3():
    layers, _ = read("plamo3")
    assert layers == [*[(100, FULL)] * 7, (None, FULL)]
    scaled = {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0}
    found, _ = read("plamo3", **scaled, rope__freq_base_swa=500.0, attention__sliding_window_pattern=2)
    rope = found[1][1]
    assert found == [(100, Rope(32, 500.0)), (None, rope)] * 4
    assert rope.scaling is not None and not rope.scaling.truncate


EXPERTS = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 32}


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [("gemma2", {}), ("cohere2", {"logit_scale": 0.25}), ("exaone4", {}), ("gpt-oss", EXPERTS)]
    + [("llama4", {**EXPERTS, "attention__sliding_window": None})],
)
def test_bases_and_periods_of_windowed_layers(architecture, changes):
    """Both fields are llama.cpp's, which its converter seldom writes."""
    layers, config = read(architecture, **changes, rope__freq_base_swa=500.0, attention__sliding_window_pattern=3)
    assert [rope.theta if rope else None for _, rope in layers[:2]] == [500.0, 500.0]
    others = [layer.rope is None or layer.rope.theta == 1e6 for layer in config.attention]
    assert others == [False, False, True] * 2 + [False] * 2
    every, _ = read(architecture, **changes, attention__sliding_window_pattern=0)
    assert len(set(every)) == 1 and every[0] == read(architecture, **changes)[0][0]
    none, _ = read(architecture, **changes, attention__sliding_window_pattern=1)
    assert set(none).isdisjoint(every)


def test_text_parts_of_models_that_see():
    """Sections of rope are of positions that are equal in texts."""
    plain = {"attention__sliding_window": None}
    sections = {**plain, "rope__dimension_sections": np.array([6, 5, 5, 0])}
    for architecture, text in READ_AS.items():
        if architecture in ("gemma-embedding", "nemotron_h_moe", "mistral4"):  # of which other fields decide
            continue
        own = EXPERTS if "moe" in text else {}
        assert read(architecture, **sections, **own) == read(text, **plain, **own)


def test_olmo3():
    scaled = {"rope__scaling__type": "yarn", "rope__scaling__factor": 8.0, "rope__freq_base_swa": 500.0}
    scaled["rope__scaling__yarn_attn_factor"] = 1.25
    layers, config = read("olmo2", **scaled)
    assert config.architecture == "Olmo3ForCausalLM" and layers[:3] == [(100, Rope(32, 500.0))] * 3
    assert layers[3][0] is None and layers[3][1].scaling.attention_factor == 1.25 and layers[4:] == layers[:4]
    for window in (0, None):
        assert read("olmo2", attention__sliding_window=window)[1].architecture == "Olmo2ForCausalLM"


def test_gemma3n():
    """llama.cpp fixes what first files do not say."""
    layers, config = read("gemma3n", block_count=25, rope__freq_base_swa=None)
    assert layers == ([(100, LOCAL)] * 4 + [(None, FULL)]) * 5
    assert [layer.kv_source for layer in config.attention] == [None] * 20 + [18] * 4 + [19]
    assert config.altup.sparsity == (0.95,) * 10 + (0.0,) * 15
    assert (config.altup.num_streams, config.altup.active, config.altup.laurel_rank) == (4, 0, 64)
    assert config.layer_input_size == 256 and config.logit_soft_cap == 30.0


def test_a_pattern_may_leave_out_a_layer_that_predicts_further_tokens():
    pattern = {"attention__sliding_window_pattern": np.array([True, False] * 4)}
    layers, config = read("exaone-moe", block_count=9, nextn_predict_layers=1, **EXPERTS, **pattern)
    assert layers == [(100, FULL), (None, None)] * 4 and config.experts.scoring_func == "sigmoid"
    assert read("exaone-moe", **EXPERTS, attention__sliding_window=None)[0] == [(None, FULL)] * 8


def test_cohere2_with_experts():
    local = Rope(32, 1e6, interleaved=True)
    own = {**EXPERTS, "logit_scale": 0.5, "leading_dense_block_count": 5, "expert_shared_count": 1}
    layers, config = read("cohere2moe", **own)
    assert layers == ([(None, local)] + [(100, local)] * 3) * 2 and config.logit_scale == 0.5
    assert config.experts.output_scale == 0.5 and not config.experts.correction_bias
    layers, _ = read("cohere2moe", **{**own, "leading_dense_block_count": 0}, attention__sliding_window=512)
    assert layers == ([(None, None)] + [(None, local)] * 3) * 2


LATENT = {"rope.dimension_count": 8, "attention.kv_lora_rank": 16, "attention.sliding_window": None}
INDEXER = {f"attention.indexer.{name}": 8 for name in ("head_count", "key_length", "top_k")}
INDEXER["attention.q_lora_rank"] = 16


def test_what_files_leave_out():
    assert read("glm4moe", **EXPERTS, feed_forward_length=None)[1].intermediate_size == 32  # of Solar Open
    assert read("qwen", attention__sliding_window=None)[1].intermediate_size == 48  # half of what files say
    layers, _ = read("hunyuan_vl", attention__sliding_window=None, rope__scaling__alpha=100.0)
    assert layers[0][1].theta == pytest.approx(1e6 * 100 ** (32 / 30))
    layers, config = read("mellum", **EXPERTS, **{"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0})
    assert layers[0] == (100, FULL) and layers[3][0] is None and layers[3][1].scaling.rope_type == "yarn"
    assert config.experts.norm_weights
    layers, config = read("afmoe", **EXPERTS)
    assert layers == ([(100, FULL)] * 3 + [(None, None)]) * 2 and config.embedding_multiplier == 8.0


def test_windowed_layers_with_sizes_of_their_own():
    own = {**EXPERTS, "attention__value_length": 24, "attention__head_count_kv": [2, 4] * 4}
    own |= {"attention__sliding_window_pattern": np.array([0, 1] * 4), "rope__freq_base_swa": 500.0}
    layers, config = read("mimo2", **own)
    assert layers[:2] == [(None, FULL), (100, Rope(32, 500.0))] and config.attention[0].value_size == 24
    assert [layer.num_kv_heads for layer in config.attention[:2]] == [2, 4] and config.experts.dense_layers == ()
    own = {**EXPERTS, "attention__head_count": [4, 2] * 4, "expert_shared_feed_forward_length": 16}
    layers, config = read("step35", **own, attention__sliding_window_pattern=np.array([False, True] * 4))
    assert layers[:2] == [(None, Rope(16, 1e6)), (100, FULL)] and config.experts.shared_intermediate_size == 16
    assert [layer.num_heads for layer in config.attention[:2]] == [4, 2]


def test_windows_and_ropes_by_layer():
    """Laguna's files leave the kinds of layers to their reader: the first of every four has no window."""
    own = {**EXPERTS, "expert_shared_feed_forward_length": 16, "rope.dimension_count": 16, "rope.freq_base_swa": 500.0}
    own |= {"rope.dimension_count_swa": 24, "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}
    layers, config = read("laguna", **own)
    assert layers[1:5] == [(100, Rope(24, 500.0))] * 3 + [layers[0]] and layers[0][0] is None
    assert layers[0][1].rotary_dim == 16 and layers[0][1].scaling.factor == 4.0
    assert config.experts.shared_intermediate_size == 16 and config.experts.norm_weights
    for window in (0, None):
        assert read("laguna", **own, attention__sliding_window=window)[0] == [layers[0]] * 8
    layers, config = read("muse-glimmer", logit_scale=0.5)
    assert layers == ([(100, FULL)] * 3 + [(None, None)]) * 2 and config.normed_outputs.eps == 1e-8


def test_selections_of_keys():
    """GLM-5.2's files list which layers have an indexer, or have a million positions."""
    for changes, own in (
        ({}, range(8)),
        ({"context_length": 1 << 20}, (0, 1, 2, 6)),
        ({"attention.indexer.types": np.array([1, 0, 0, 1] * 2)}, (0, 3, 4, 7)),
    ):
        layers = read("glm-dsa", **LATENT, **EXPERTS, **INDEXER, **changes)[1].attention
        assert [number for number, layer in enumerate(layers) if layer.index.source is None] == [*own]


def test_queries_scaled_by_their_positions():
    """As Mistral Large 3 has them."""
    for architecture in ("deepseek2", "mistral4"):
        changes = {**LATENT, **EXPERTS, "attention.temperature_scale": 0.1}
        layer = read(architecture, **changes)[1].attention[0]
        assert layer.temperature.floor_scale == 512 and layer.temperature.attn_scale == 0.1
        layer = read(architecture, **changes, **{"attention.temperature_length": 64})[1].attention[0]
        assert layer.temperature.floor_scale == 64 and read(architecture, **LATENT)[1].attention[0].temperature is None


def test_windows_of_encoders():
    layers, config = read("modern-bert")
    assert layers == ([(None, FULL)] + [(51, LOCAL)] * 2) * 2 + [(None, FULL), (51, LOCAL)] and not config.is_causal
    assert read("modern-bert", attention__sliding_window=None)[0] == [(None, FULL)] * 8
    layers, config = read("gemma-embedding", attention__layer_norm_epsilon=None)
    assert layers[4:7] == [(51, LOCAL), (None, FULL), (51, LOCAL)] and not config.is_causal
    assert read("gemma-embedding", attention__sliding_window=512)[0][0] == (257, LOCAL)


def test_a_layer_that_predicts_further_tokens_is_left_unread():
    for architecture, changes in (("glm4", {}), ("glm4moe", EXPERTS), ("bailingmoe2", EXPERTS)):
        layers, config = read(architecture, attention__sliding_window=None, nextn_predict_layers=1, **changes)
        assert len(layers) == 7 and len(config.attention) == 7


def test_a_list_of_equal_numbers_is_the_number():
    """llama.cpp reads numbers of heads and sizes of MLPs either way; its converter lists those of Granite 4's models
    without states.
    """
    lists = {"attention__head_count": [4] * 8, "attention__head_count_kv": [2] * 8, "feed_forward_length": [96] * 8}
    lists = {name: np.asarray(values, np.int32) for name, values in lists.items()}
    assert read("granite", **lists)[1] == read("granite")[1]
    assert read("granite", rope__scaling__finetuned=False)[1].attention[0].rope is None
    with pytest.raises(ModelConfigError, match="granite.attention.head_count_kv must be an integer"):
        read("granite", attention__head_count_kv=np.asarray([2, 1] * 4))


STATES = {"time_step_rank": 4, "group_count": 2, "state_size": 8, "inner_size": 32, "conv_kernel": 4}


def test_layers_with_states():
    states: dict[str, Any] = {f"ssm__{name}": value for name, value in STATES.items()}
    states["attention__sliding_window"] = None
    for changes, attending in (
        ({}, [3, 7]),
        ({"full_attention_interval": 3}, [2, 5]),
        ({"attention__recurrent_layers": [False] + [True] * 7}, [0]),
        ({"nextn_predict_layers": 1}, [3]),
    ):
        layers = read("qwen35", **states, **changes)[1].attention
        assert [number for number, layer in enumerate(layers) if layer.state is None] == attending
        assert len(layers) == 8 - len(changes.keys() & {"nextn_predict_layers"})
    listed = {"attention__head_count_kv": [0, 2, 0, 0] * 2, "feed_forward_length": [0, 0, 96, 0, 0, 0, 96, 96]}
    config = read("nemotron_h", **states, **listed, nextn_predict_layers=1)[1]
    kinds = [(layer.state is not None, layer.feed_forward_only, layer.rope) for layer in config.attention]
    mamba, attention, mlp = (True, False, None), (False, False, None), (False, True, None)
    assert kinds == [mamba, attention, mlp, mamba, mamba, attention, mlp]
    own = {**states, "attention__head_count_kv": [0, 2] * 4, "rope__dimension_count": 16}  # as Bamba has it
    assert read("granitehybrid", **own)[1].attention[1].rope == Rope(16, 1e6)
    assert read("nemotron_h", **states, **listed, attention__layer_norm_rms_epsilon=None)[1].rms_norm_eps == 1e-5


GLM5 = LATENT | EXPERTS | INDEXER | {"attention.head_count_kv": [0, 1] * 4, "attention.indexer.kpool": 2}
GLM5 |= {"kda.head_dim": 16, "ssm.conv_kernel": 4, "expert_gating_func": 2, "attention.sliding_window": None}

DEEPSEEK4 = EXPERTS | INDEXER | {"expert_weights_norm": True, "expert_shared_count": 1, "expert_gating_func": 4}
DEEPSEEK4 |= {f"attention.output_{name}": 2 for name in ("group_count", "lora_rank")} | {"hash_layer_count": 0}
DEEPSEEK4 |= dict.fromkeys(("swiglu_clamp_exp", "swiglu_clamp_shexp"), [1.0] * 8) | {"expert_weights_scale": 1.0}
DEEPSEEK4["attention.compress_ratios"] = [0, 4] * 4


@pytest.mark.parametrize(
    ("architecture", "changes", "message"),
    [
        ("gemma3", {"attention.sliding_window": None}, "gemma3.attention.sliding_window is missing"),
        ("cohere2", {"attention.sliding_window": None}, "cohere2.attention.sliding_window is missing"),
        ("cohere2", {"logit_scale": None}, "cohere2.logit_scale is missing"),
        ("olmo2", {"attention.sliding_window": -1}, "olmo2.attention.sliding_window must be an integer >= 0"),
        ("deepseek2", {**LATENT, "attention.temperature_scale": "0.1"}, "attention.temperature_scale must be a finite"),
        ("deepseek32", LATENT | EXPERTS, "deepseek32.attention.indexer.head_count is missing"),
        ("glm-dsa", LATENT | EXPERTS | {**INDEXER, "attention.indexer.types": [1, 0]}, "false for each of 8 layers"),
        ("glm-dsa", LATENT | EXPERTS | {**INDEXER, "attention.indexer.types": [0] * 8}, "must be a list|full for the"),
        ("afmoe", {**EXPERTS, "expert_gating_func": 1}, r"expert_gating_func must be 2 \(sigmoid\) or absent, got 1"),
        ("bailingmoe", {**EXPERTS, "expert_used_count": None}, "bailingmoe.expert_used_count is missing"),
        ("chatglm", {"attention.layer_norm_rms_epsilon": None}, "attention.layer_norm_rms_epsilon is missing"),
        (
            "deepseek",
            {**EXPERTS, "expert_gating_func": 2},
            r"expert_gating_func must be 1 \(softmax\) or absent, got 2",
        ),
        ("hunyuan_vl", {"rope.scaling.alpha": "x"}, "hunyuan_vl.rope.scaling.alpha must be a finite number"),
        ("hunyuan_vl", {"attention.key_length": 2, "rope.scaling.alpha": 2.0}, "head_dim must be more than 2"),
        ("hunyuan_vl", {"rope.scaling.alpha": 1e38}, "rope.freq_base must be a finite number of float32"),
        ("hy_v3", {}, "hy_v3.expert_count must be at least 1, got None"),
        ("mellum", {**EXPERTS, "attention.sliding_window_pattern": [2]}, "must be true or false for each of 8 layers"),
        ("mimo2", {**EXPERTS, "attention.value_length": "24"}, "mimo2.attention.value_length must be an integer"),
        (
            "mimo2",
            {**EXPERTS, "attention.head_count_kv": [2, 4]},
            "head_count_kv must be an integer >= 1, or a list of 8",
        ),
        (
            "step35",
            {**EXPERTS, "expert_shared_feed_forward_length": 16, "swiglu_clamp_exp": [-1.0] * 8},
            "step35.swiglu_clamp_exp must be a list of 8 numbers >= 0",
        ),
        ("laguna", {"expert_shared_feed_forward_length": 16}, "laguna.expert_count must be at least 1, got None"),
        ("laguna", EXPERTS, "laguna.expert_shared_feed_forward_length is missing"),
        ("minimax-m3", EXPERTS, "minimax-m3.attention.indexer.head_count is missing"),
        ("bailingmoe3", {"kda.safe_gate": False}, "bailingmoe3.kda.safe_gate must be true or absent, got False"),
        # Lists where a file has a number.
        ("bailingmoe3", {"kda.safe_gate": np.array([True, True])}, "bailingmoe3.kda.safe_gate must be true or absent"),
        ("gemma2", {"block_count": np.array([8, 8]), "attention.head_count": [4] * 8}, "gemma2.block_count must be"),
        (
            "gemma3",
            {"rope.scaling.type": "linear", "rope.scaling.factor": np.array([2.0, 2.0])},
            "gemma3.rope.scaling.factor must be a finite number",
        ),
        ("bailingmoe3", {"kda.gate_lower_bound": 1.0}, "bailingmoe3.kda.gate_lower_bound must be a number < 0, got 1"),
        ("minimax-m3", {}, "minimax-m3.expert_count must be at least 1, got None"),
        ("muse-glimmer", {}, "muse-glimmer.logit_scale is missing"),
        ("deepseek2-ocr", EXPERTS, "deepseek2-ocr.attention.sliding_window must be absent, got 100"),
        ("orion", {"attention.layer_norm_epsilon": None}, "orion.attention.layer_norm_epsilon is missing"),
        (
            "deepseek4",
            DEEPSEEK4 | {"attention.compress_ratios": [4] * 7},
            "compress_ratios must be a list of 8 of 0, 4",
        ),
        (
            "deepseek4",
            DEEPSEEK4 | {"attention.compress_ratios": [5] * 8},
            "compress_ratios must be a list of 8 of 0, 4",
        ),
        ("deepseek4", DEEPSEEK4 | {"expert_gating_func": 2}, "expert_gating_func must be 4"),
        (
            "deepseek4",
            DEEPSEEK4 | {"attention.output_lora_rank": None},
            "deepseek4.attention.output_lora_rank is missing",
        ),
        ("glm5-next", GLM5 | {"attention.indexer.types": [True] * 7 + [False]}, "indexer.types must be true for each"),
        ("glm5-next", GLM5 | {"swiglu_clamp_exp": [2.0] * 8}, "swiglu_clamp_exp must be the one number > 0 of swiglu"),
        ("glm5-next", GLM5, "swiglu_clamp_exp must be the one number > 0 of swiglu_clamp_shexp"),
        (
            "glm5-next",
            GLM5 | {"attention.indexer.kpool_select_tail": False},
            "kpool_select_tail must be true or absent",
        ),
        ("granite_swa", {"attention.rope_pattern": [True]}, "rope_pattern must be true or false for each of 8 layers"),
        ("plamo3", {"attention.sliding_window_pattern": -1}, "true or false for each of 8 layers, or an integer >= 0"),
        ("t5encoder", {}, "t5encoder.attention.relative_buckets_count is missing"),
        ("t5encoder", {"attention.relative_buckets_count": 3}, "relative_buckets_count must be from 4 to 511, got 3"),
        ("qwen", {"feed_forward_length": "96"}, "qwen.feed_forward_length must be an integer >= 1"),
        ("glm4", {"nextn_predict_layers": 8}, "glm4.nextn_predict_layers must be less than block_count, got 8"),
        ("exaone4", {"attention.sliding_window_pattern": [True, 2]}, "must be true or false for each of 8 layers"),
        ("exaone4", {"attention.sliding_window_pattern": "LLLG"}, "must be true or false for each of 8 layers"),
        ("gemma3n", {"attention.sliding_window": None}, "gemma3n.attention.sliding_window is missing"),
        ("gemma3n", {"activation_sparsity_scale": [0.5]}, "activation_sparsity_scale must be a list of 8 numbers"),
        ("gemma3n", {"activation_sparsity_scale": 9 * [6.0]}, "activation_sparsity_scale must be a list of 8 numbers"),
        ("gemma3n", {"feed_forward_length": [96, 0]}, "feed_forward_length must be an integer >= 1, or a list of 8"),
        ("gemma3n", {"attention.shared_kv_layers": 8}, "num_kv_shared_layers must be a number that leaves a layer"),
        ("glm4moe", {"expert_count": 4, "expert_used_count": 2}, "expert_feed_forward_length is missing"),
        ("glm4moe", {**EXPERTS, "expert_gating_func": 1}, r"expert_gating_func must be 2 \(sigmoid\) or absent, got 1"),
        ("glm4moe", {**EXPERTS, "expert_count": "many"}, "glm4moe.expert_count must be an integer >= 0"),
        ("qwen35", {}, "qwen35.ssm.time_step_rank is missing"),
        ("qwen35", {"full_attention_interval": "4"}, "qwen35.full_attention_interval must be an integer >= 1"),
        (
            "qwen3next",
            {**EXPERTS, "expert_shared_feed_forward_length": 32, "ssm.time_step_rank": 6, "ssm.inner_size": 8},
            "qwen3next.ssm.inner_size must be a multiple of ssm.time_step_rank, 6, got 8",
        ),
        ("qwen35", {"attention.recurrent_layers": [True, 2]}, "must be true or false for each of 8 layers"),
        ("command-r", {"attention.sliding_window": None}, "command-r.logit_scale is missing"),
        ("command-r", {"logit_scale": "x"}, "command-r.logit_scale must be a finite number"),
        ("ernie4_5-moe", EXPERTS, "ernie4_5-moe.interleave_moe_layer_step is missing"),
        ("ernie4_5-moe", {**EXPERTS, "expert_gating_func": 2}, r"expert_gating_func must be 1 \(softmax\) or absent"),
        ("exaone-moe", {**EXPERTS, "expert_gating_func": 1}, r"expert_gating_func must be 2 \(sigmoid\) or absent"),
        ("bailingmoe2", {**EXPERTS, "expert_used_count": None}, "bailingmoe2.expert_used_count is missing"),
        ("cohere2moe", {**EXPERTS, "logit_scale": 0.5}, "cohere2moe.leading_dense_block_count is missing"),
        ("cohere2moe", {**EXPERTS, "attention.layer_norm_epsilon": None}, "attention.layer_norm_epsilon is missing"),
        ("internlm2", {"attention.layer_norm_rms_epsilon": None}, "attention.layer_norm_rms_epsilon is missing"),
        ("falcon", {"attention.head_count_kv": "one"}, "falcon.attention.head_count_kv must be an integer"),
        ("phimoe", {**EXPERTS, "expert_used_count": 3}, "phimoe.expert_used_count must be 2, got 3"),
        ("stablelm", {"attention.layer_norm_epsilon": "x"}, "stablelm.attention.layer_norm_epsilon must be"),
        ("bert", {"attention.layer_norm_epsilon": None}, "bert.attention.layer_norm_epsilon is missing"),
        ("nomic-bert", {"attention.causal": True}, "nomic-bert.attention.causal must be false or absent, got True"),
        ("jina-bert-v2", {"attention.causal": 1}, "jina-bert-v2.attention.causal must be"),
        ("modern-bert", {"hidden_activation": "step"}, "modern-bert.hidden_activation must be one of"),
        (
            "modern-bert",
            {"attention.sliding_window": "wide"},
            "modern-bert.attention.sliding_window must be an integer",
        ),
        ("lfm2", {}, "lfm2.shortconv.l_cache is missing"),
        ("lfm2", {"attention.causal": False}, "lfm2.attention.causal must be true or absent"),
        ("lfm2", {"shortconv.l_cache": 3, "attention.head_count_kv": [2, 0]}, "an integer >= 0, or a list of 8"),
        (
            "lfm2moe",
            EXPERTS | {"shortconv.l_cache": 3, "expert_gating_func": 1},
            "lfm2moe.expert_gating_func must be 2 .sigmoid. or absent, got 1",
        ),
        ("falcon-h1", {}, "falcon-h1.ssm.time_step_rank is missing"),
        ("kimi-linear", {}, "kimi-linear.kda.head_dim is missing"),
        ("kimi-linear", {"kda.head_dim": 16}, "kimi-linear.expert_count is missing"),
        ("jamba", {"expert_count": 1.5}, "jamba.expert_count must be an integer >= 0"),
        ("mamba", {"ssm.dt_b_c_rms": 1}, "mamba.ssm.dt_b_c_rms must be true or false"),
        ("mamba2", {"ssm.time_step_rank": "4"}, "mamba2.ssm.time_step_rank must be an integer >= 1"),
        ("granitehybrid", {}, "granitehybrid.ssm.time_step_rank is missing"),
        ("nemotron_h", {"feed_forward_length": [8, 9] * 4}, "must be 0, or the same number, in each layer"),
        ("gemma2", {"attention.sliding_window_pattern": -1}, "must be true or false .* or an integer >= 0, got -1"),
        ("exaone4", {"attention.sliding_window_pattern": [[True], [True, False]]}, "must be true or false for each"),
    ],
)
def test_unusable_metadata(architecture, changes, message):
    with pytest.raises(ModelConfigError, match=message):
        read(architecture, **{name.replace(".", "__"): value for name, value in changes.items()})


def test_factor_of_phimoes_longrope():
    """Published models multiply cos and sin by a number of their own; files have Phi-3's, of both lengths."""
    fields = {**SHARED, "expert_count": 4, "expert_used_count": 2, "rope.scaling.attn_factor": 1.19}
    metadata = {"general.architecture": "phimoe", **{f"phimoe.{name}": value for name, value in fields.items()}}
    factors = RopeFactors(short=(1.0,) * 16, long=(2.0,) * 16)
    rope = read_gguf(metadata, rope_factors=factors).attention[0].rope
    assert rope is not None and rope.scaling is not None and rope.scaling.attention_factor == 1.243163121016122
    plain = read_gguf(metadata).attention[0].rope
    assert plain is not None and plain.scaling is None
