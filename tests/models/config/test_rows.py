"""config.json of families that are rows with experts or other parts of Llama: spellings, and what is refused."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from jaxengine.models.build import Build
from jaxengine.models.config.attention import alibi_slopes
from jaxengine.models.config.fields import ModelConfigError
from jaxengine.models.config.model_config import ModelConfig
from jaxengine.models.config.pooler import Pooler
from jaxengine.models.config.rope import Rope, RopeScaling
from jaxengine.models.layers.base.mlp import ThenClamped
from jaxengine.models.registry import build_model, model_for_hf, read_hf
from tests.fixtures.drawn_weights import FOLDER
from tests.tables import each_row

_OF_A_PART = dict.fromkeys(("sliding_attention", "full_attention"), {"partial_rotary_factor": 0.5})


def recorded(name: str, **changes: Any) -> dict[str, Any]:
    """The config.json of a recorded checkpoint, with changes; None leaves a field out."""
    raw = json.loads((FOLDER / name / "config.json").read_text()) | changes
    return {key: value for key, value in raw.items() if value is not None}


def rope_of(config: ModelConfig, layer: int) -> Rope:
    rope = config.attention[layer].rope
    assert rope is not None
    return rope


def test_mimo_as_published():
    """Kinds of layers as lists of 0 and 1, a base of rope for windows, a window without the token itself."""
    changed = dict.fromkeys(("layer_types", "mlp_layer_types", "rope_parameters", "routed_scaling_factor"))
    own = read_hf(recorded("mimo_v2_flash", **changed, partial_rotary_factor=0.334, rope_theta=10000.0))
    listed = {
        "hybrid_layer_pattern": [0, 1, 1],
        "moe_layer_freq": [0, 1, 1],
        "swa_rope_theta": 50.0,
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.334,
        "sliding_window_size": 4,
        "swa_num_key_value_heads": 4,
        "swa_num_attention_heads": 4,
        "swa_head_dim": 24,
        "swa_v_head_dim": 16,
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
        "n_shared_experts": None,
    }
    published = read_hf(recorded("mimo_v2_flash", **changed | listed))
    assert published == read_hf(recorded("mimo_v2_flash", norm_topk_prob=True))
    first = own.attention[0]
    assert (first.window, first.num_kv_heads, first.v_head_dim, first.sinks) == (None, 2, 16, False)
    assert own.attention[1] == own.attention[2] == replace(own.attention[1], window=5, num_kv_heads=4, sinks=True)


def test_layers_after_the_last_that_predict_tokens_are_not_read():
    """Whatever the family, as transformers and vLLM have it; MiniMax-M2's configuration calls them modules."""
    names = "bailing_moe", "sarvam_mla", "axk1", "kimi_linear", "llama"
    for name, field in *((name, "num_nextn_predict_layers") for name in names), ("minimax_m2", "num_mtp_modules"):
        config, own = read_hf(recorded(name, **{field: 3})), read_hf(recorded(name, **{field: None}))
        assert (config.num_unread_layers, own.num_unread_layers) == (3, 0), name
        assert replace(config, num_unread_layers=0) == own
    names = model_for_hf("Exaone4_5_ForConditionalGeneration").checkpoint_names
    unread = ("mtp.fc.weight", "model.mtp_layers.0.mlp.up_proj.weight", "model.language_model.mtp.norm.weight")
    assert all(map(names.is_unused, unread)) and not names.is_unused("model.layers.0.mtpx.weight")


def test_layers_after_the_last_that_predict_tokens_are_read_for_drafts():
    """Layers of families that say how they are stored; MiMo-V2-Flash's configuration does not say that there is one."""
    for name in ("hy_v3", "exaone_moe", "pangu_ultra", "mimo", "bailing_linear", "nemotron_h_latent"):
        config = read_hf(recorded(name, num_nextn_predict_layers=2))
        assert (config.num_unread_layers, config.num_nextn_predict_layers) == (0, 2), name
    assert read_hf(recorded("mimo_v2_flash")).num_nextn_predict_layers == 1
    pattern = {"mtp_layers_block_type": None, "num_nextn_predict_layers": 1}
    for kinds, read in (("*E", 1), ("*-", 0), ("*EE", 0), (None, 0)):
        config = read_hf(recorded("nemotron_h_latent", mtp_hybrid_override_pattern=kinds, **pattern))
        assert (config.num_unread_layers, config.num_nextn_predict_layers) == (1 - read, read), kinds


def test_step_as_published():
    """Lists with entries for layers that are not read, other spellings; heads of windows, limits of gate and up."""
    raw = recorded("step3p5")
    own = read_hf(raw)
    assert own.num_unread_layers == 2 and own.num_nextn_predict_layers == 0 and own.declared is not None
    assert [(each.num_heads, each.window, each.rope and each.rope.theta) for each in own.attention] == [
        (4, 7, 50.0),
        (3, None, 5000.0),
        (4, 7, 50.0),
    ]
    assert own.declared.limits == ((None, None), (None, 0.6), (None, None))
    kinds = ["sparse", "dense", "sparse", "dense", "dense"]
    spelled = {"share_expert_dims": raw["share_expert_dim"], "num_mtp_layers": 2, "mlp_layer_types": kinds}
    left_out = dict.fromkeys(("share_expert_dim", "num_nextn_predict_layers", "moe_layers_enum"))
    assert read_hf(recorded("step3p5", **left_out, **spelled)) == own
    assert read_hf(raw | {"moe_layers_enum": [0, 2, 4], "num_sliding_attention_heads": 4}) == own
    text = recorded("step3p7")["text_config"]
    assert read_hf(recorded("step3p7", text_config={**text, "per_layer_config": None})) == read_hf(recorded("step3p7"))
    scaled = read_hf(recorded("step3p7", text_config={**text, "query_pre_attn_scalar": 16}))
    assert {each.scale for each in scaled.attention} == {0.25}


def test_chunks_of_rnj():
    """Chunks of half a window, with the one before: their ropes as mappings by kind, one for all, or as Gemma 3's."""
    own = read_hf(recorded("rnj1"))
    assert [(each.chunk, each.lookback, each.reach) for each in own.attention] == [
        (5, 1, 10),
        (None, 0, None),
        (5, 1, 10),
    ]
    assert [rope_of(own, layer).theta for layer in range(3)] == [100.0, 5000.0, 100.0]
    of_gemma = {"rope_parameters": None, "rope_theta": 5000.0, "rope_local_base_freq": 100.0}
    assert read_hf(recorded("rnj1", **of_gemma)) == own
    flat = read_hf(recorded("rnj1", rope_parameters={"rope_type": "default", "rope_theta": 5000.0}))
    assert {rope_of(flat, layer).theta for layer in range(3)} == {5000.0}
    for changes, said in (
        ({"layer_types": None}, "layer_types must be a list of chunked_attention and full_attention"),
        ({"sliding_window": 1}, "sliding_window must be an integer >= 2"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention must be false or absent"),
    ):
        with pytest.raises(ModelConfigError, match=said):
            read_hf(recorded("rnj1", **changes))
    with pytest.raises(ModelConfigError, match="lookback must be at least 0, and 0 without chunk, got 1"):
        replace(own.attention[1], lookback=1)


def test_scales_of_jais():
    """As the first models spell them, and as the later ones do; contexts end where slopes would change."""
    own = read_hf(recorded("jais"))
    assert (own.embedding_multiplier, own.logit_scale, own.max_position_embeddings) == (9.1, 2.2 * 0.125, 64)
    assert own.attention[0].scale == 1 / 12 and own.attention[0].slopes == alibi_slopes(5)
    names = "mup_embeddings_scale", "mup_output_alpha", "mup_width_scale", "mup_scale_qk_dot_by_d"
    spelled = {"embeddings_scale": 9.1, "width_scale": 2.2 * 0.125, "scale_qk_dot_by_d": True}
    assert read_hf(recorded("jais", **dict.fromkeys(names), **spelled)) == own
    plain = read_hf(recorded("jais", **dict.fromkeys(names), alibi_scaling=None, n_inner=None))
    assert (plain.logit_scale, plain.attention[0].scale, plain.intermediate_size) == (1.0, None, 240)
    assert plain.max_position_embeddings == 128


def test_names_of_first_code():
    """What files of before a family's class in transformers leave out, or spell otherwise."""
    web = read_hf(recorded("refined_web_groups"))
    assert web.declared == read_hf(recorded("falcon_groups")).declared and web.attention[0].num_kv_heads == 2
    assert read_hf(recorded("qwen")).max_position_embeddings == 64  # not the 256 of its rope's scaling
    plain = recorded("internlm", rotary=None, rope_theta=5000.0)
    assert (
        read_hf(plain)
        == read_hf(recorded("internlm"))
        == read_hf(plain | {"architectures": ["PanguEmbeddedForCausalLM"]})
        == read_hf(plain | {"rotary": {"base": 5000.0, "type": "origin"}})
    )
    for name in ("AquilaModel", "AquilaForCausalLM", "LLaMAForCausalLM", "TeleChat3ForCausalLM", "XverseForCausalLM"):
        assert read_hf(recorded("llama", architectures=[name])) == read_hf(recorded("llama"))
    for name in ("TeleChatForCausalLM", "TelechatForCausalLM"):
        assert read_hf(recorded("telechat2", architectures=[name])) == read_hf(recorded("telechat2"))
    text = recorded("glm5_next")["text_config"] | {"architectures": ["Glm5NextForCausalLM"]}
    assert read_hf(text) == read_hf(recorded("glm5_next"))
    own = recorded("mistral4", architectures=["MistralLarge3ForCausalLM"], scoring_func="softmax", moe_layer_freq=1)
    assert read_hf(own) == read_hf(recorded("mistral4"))
    rope = recorded("mistral4")["rope_parameters"]
    plain = {key: value for key, value in rope.items() if key != "llama_4_scaling_beta"}
    scaling = {
        "beta": rope["llama_4_scaling_beta"],
        "original_max_position_embeddings": rope["original_max_position_embeddings"],
    }
    assert read_hf(own | {"rope_parameters": plain, "llama_4_scaling": scaling}) == read_hf(own)
    for name, family in (
        ("InternS1ForConditionalGeneration", "internvl_vision"),
        ("InternS2PreviewForConditionalGeneration", "qwen3_5_moe_pictures_vision"),
        ("Cosmos3ForConditionalGeneration", "cosmos3_vision"),
    ):
        assert read_hf(recorded(family, architectures=[name])) == read_hf(recorded(family))
    assert model_for_hf("InternS2PreviewForConditionalGeneration").checkpoint_names.is_unused("model.time_series.x")
    names = model_for_hf("Cosmos3ForConditionalGeneration").checkpoint_names
    for stored in (
        "layers.0.mlp_moe_gen.up_proj.weight",
        "layers.0.self_attn.add_q_proj.weight",
        "layers.0.self_attn.to_add_out.weight",
        "layers.0.self_attn.norm_added_k.weight",
        "proj_in.weight",
        "audio_proj_out.bias",
        "action_modality_embed",
        "time_embedder.linear_1.weight",
    ):
        assert names.is_unused(stored)
    everything = {"architectures": ["DeepseekV3BidirectionalModel"], "is_causal": False}
    embeds = read_hf(recorded("deepseek_v3", **everything), Pooler())  # ai-sage/Giga-Embeddings-instruct-10B-A1.8B-0826
    assert embeds == read_hf(recorded("deepseek_v3", **everything | {"architectures": ["DeepseekV3Model"]}), Pooler())
    assert not embeds.is_causal and embeds.architecture == "DeepseekV3ForCausalLM"
    scaled = read_hf(recorded("teleflm"))  # input_mult 3, output_mult 4, mup_scale_factor 8
    assert (scaled.embedding_multiplier, scaled.logit_scale) == (3.0, 0.5)
    plain = read_hf(recorded("teleflm", use_mup=False))
    assert (plain.embedding_multiplier, plain.logit_scale) == (1.0, 1.0)
    own = recorded("exaone_moe", architectures=["ExaoneMoEForCausalLM"])  # LGAI-EXAONE/K-EXAONE-236B-A23B
    assert read_hf(own) == read_hf(recorded("exaone_moe"))


def test_spellings_of_hub_rows():
    """Fields of Pangu's first code and DeepSeek-V3's, lists and texts of layers, windows of PLaMo, TeleChat's base."""
    raw, names = (
        recorded("pangu_ultra"),
        {"attention_kv_lora_dim": "kv_lora_rank", "num_dense_layers": "first_k_dense_replace"},
    )
    assert read_hf({names.get(key, key): value for key, value in raw.items()}) == read_hf(raw)
    assert read_hf(recorded("pangu_ultra", num_mtp_layers=1)) == replace(read_hf(raw), num_nextn_predict_layers=1)
    assert read_hf(recorded("step3", moe_layers_enum=[1, 2])) == read_hf(recorded("step3", moe_layers_enum=None))
    raw, wrapped = recorded("step3"), {"architectures": ["Step3VLForConditionalGeneration"], "vision_config": {}}
    text = {key: value for key, value in raw.items() if key != "architectures"}
    assert replace(read_hf({**wrapped, "text_config": text}), architecture="Step3TextForCausalLM") == read_hf(raw)
    for changes in ({"sliding_window": [5, None, 5]}, {"sliding_window": 5}):
        assert read_hf(recorded("plamo3", window_size=None, **changes)) == read_hf(recorded("plamo3"))
    assert read_hf(recorded("plamo3", rope_theta=None, rope_global_theta=5e3)) == read_hf(recorded("plamo3"))
    ropes = {"rope_type": "default", "rope_theta": 7e5}
    for changes in ({"full_attention": ropes, "sliding_attention": {**ropes, "rope_theta": 100.0}}, ropes):
        own = read_hf(recorded("plamo3", rope_theta=None, rope_parameters=changes))
        assert [rope_of(own, layer).theta for layer in range(3)] == [100.0, 7e5, 100.0]
    scaled = read_hf(recorded("plamo3", rope_scaling={"rope_type": "linear", "factor": 2.0}))
    assert [rope_of(scaled, layer).scaling is None for layer in range(3)] == [True, False, True]
    yarn = read_hf(recorded("plamo3", rope_scaling_factor=4.0, initial_context_length=16))
    assert [rope_of(yarn, layer).scaling is None for layer in range(3)] == [True, False, True]
    base = read_hf(recorded("telechat2", training_seqlen=None, base_seqlen=None))
    assert base == read_hf(recorded("telechat2")) and base.max_position_embeddings == 64
    longer = read_hf(recorded("telechat2", training_seqlen=128))
    assert rope_of(longer, 0).theta == pytest.approx(1e4 * 3 ** (16 / 14))


def test_ling_3_as_published():
    """Edge0/Edge0-8B-A1B-preview, a small Ling 3: fields of its first code, and kinds of layers in groups of four."""
    raw = recorded("bailing_v3", num_hidden_layers=6, layer_group_size=4, num_kv_heads_for_linear_attn=0)
    raw |= {"linear_silu": True, "use_qk_norm": True, "expert_swiglu_limit_list": None, "up_proj_norm": False}
    kinds = [each.state is None for each in read_hf(raw).attention]
    assert kinds == [False, False, False, True, True, True]
    limits = {"expert_swiglu_limit_list": [0.0, None, 7.0], "share_expert_swiglu_limit_list": [0.0, 5.0]}
    model: Any = build_model(limited := read_hf(recorded("bailing_v3", **limits)), Build("float32"))
    assert limited.experts is not None and limited.experts.limits == ((None, None), (None, 5.0), (7.0, None))
    assert [layer.mlp.shared.clamped for layer in model.layers[1:]] == [ThenClamped(5.0), None]
    assert [layer.mlp.activation == ThenClamped(7.0) for layer in model.layers[1:]] == [False, True]
    own = read_hf(recorded("bailing_linear", num_hidden_layers=5, num_nextn_predict_layers=1))
    assert [each.state is None for each in own.attention] == [False, False, True, True, True]
    assert own.num_nextn_predict_layers == 1 and rope_of(own, 0).rotary_dim == 8


def test_decilm():
    """Layers without attention, an MLP, or both; heads of keys by layer, sizes of MLPs by either name."""
    config = read_hf(recorded("decilm"))
    assert config.ffn_sizes == (256, 512, 0, 0, 256) and config.intermediate_size == 512
    assert [each.num_kv_heads if each.attends else None for each in config.attention] == [2, None, 1, None, 4]
    raw = recorded("decilm_bias")
    assert read_hf(raw).ffn_sizes == (40, 72, 56) and read_hf(raw).attention[0].bias

    def changed(part: str, **values: Any) -> dict[str, Any]:
        first, *others = raw["block_configs"]
        return raw | {"block_configs": [first | {part: first[part] | values}, *others]}

    for own, message in (
        (raw | {"block_configs": raw["block_configs"][:2]}, "^block_configs must be a list of 3 mappings"),
        (
            changed("attention", n_heads_in_group=4),
            "n_heads_in_group must be a divisor of num_attention_heads = 6, got 4",
        ),
        (changed("attention", window_length=8), r"^block_configs\.0\.attention\.window_length must be absent, got 8"),
        (changed("attention", replace_with_linear=True), "replace_with_linear must be false or absent"),
        (changed("ffn", replace_with_linear=True), "replace_with_linear must be false or absent"),
        (changed("ffn", hidden_act="gelu"), 'hidden_act must be "silu" or absent'),
        (changed("ffn", ffn_mult=1e9), "ffn_mult must be such that the MLP has 1 to"),
        (raw | {"position_embedding_type": "rope_llama4"}, "position_embedding_type must be none of mistral_yarn"),
    ):
        with pytest.raises(ModelConfigError, match=message):
            read_hf(own)


def test_slopes_of_alibi():
    """Those of the paper for 8 heads, of its code for 12; Falcon's are of products that are not scaled."""
    assert alibi_slopes(8) == tuple(2.0**-power for power in range(1, 9))
    np.testing.assert_allclose(
        alibi_slopes(12), [2.0**-n for n in range(1, 9)] + [2.0 ** (0.5 - n) for n in range(1, 5)]
    )
    assert read_hf(recorded("bloom")).attention[0].slopes == alibi_slopes(4)
    assert read_hf(recorded("falcon_sloped")).attention[0].slopes == tuple(each / 4 for each in alibi_slopes(4))
    for name in ("bloom", "falcon"):  # null counts as absent, a number comes first
        assert read_hf(recorded(name) | {"n_embed": None}) == read_hf(recorded(name))
        assert read_hf(recorded(name) | {"n_embed": 128}).hidden_size == 128
    # As published for MPT-7B-StoryWriter.
    own = recorded("mpt")["attn_config"] | {"alibi_bias_max": 16, "clip_qkv": 6}
    long = read_hf(recorded("mpt", attn_config=own))
    assert long.attention[0].slopes == (2.0**-4, 2.0**-8, 2.0**-12, 2.0**-16)
    assert long.attention[0].clip == 6.0
    for name, value in (("alibi_bias_max", 0), ("alibi_bias_max", math.inf), ("sliding_window_size", 128)):
        with pytest.raises(ModelConfigError, match=rf"^attn_config\.{name} must be .*, got {value}$"):
            read_hf(recorded("mpt", attn_config=own | {name: value}))


def test_baichuan_of_7_and_of_13_billion():
    sizes = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 3}
    small = sizes | {"architectures": ["BaiChuanForCausalLM"], "vocab_size": 96, "max_position_embeddings": 64}
    large = sizes | {"architectures": ["BaichuanForCausalLM"], "vocab_size": 96, "model_max_length": 80}
    one, other = read_hf(small), read_hf(large)
    assert one.attention[0].slopes is None and one.attention[0].rope is not None
    assert other.attention[0].slopes == alibi_slopes(3) and other.attention[0].rope is None
    assert (one.max_position_embeddings, other.max_position_embeddings) == (64, 80)
    with pytest.raises(ModelConfigError, match="Baichuan 2's normalised LM head is not supported"):
        read_hf(large | {"z_loss_weight": 0})


@each_row(
    ("name", "changes", "message"),
    [
        ("mimo_v2_flash", {"hybrid_layer_pattern": [0, 2, 1]}, "hybrid_layer_pattern must be a list of 3 of 0, 1"),
        ("mimo_v2_flash", {"moe_layer_freq": 1}, "moe_layer_freq must be a list of 3 of 0, 1, got 1"),
        ("mimo_v2_flash", {"swa_num_key_value_heads": 2}, "swa_num_key_value_heads must be 4 or absent, got 2"),
        ("mimo_v2_flash", {"add_full_attention_sink_bias": True}, "add_full_attention_sink_bias must be false"),
        ("mimo_v2_flash", {"n_shared_experts": 1}, "n_shared_experts must be absent, got 1"),
        ("mimo_v2_flash", {"v_head_dim": 1 << 40}, "v_head_dim must be an integer >= 1 and <= "),
        ("exaone_moe", {"layer_types": None, "sliding_window_pattern": "LX"}, "sliding_window_pattern must be"),
        ("exaone_moe", {"mlp_layer_types": ["dense"]}, "mlp_layer_types must be a list of 4 of dense, sparse"),
        ("xglm", {"pad_token_id": 2}, "pad_token_id must be at most 1, got 2"),
        ("cohere2_moe", {"expert_selection_fn": "top"}, "expert_selection_fn must be softmax or sigmoid, got 'top'"),
        ("cohere2_moe", {"shared_expert_combination_strategy": "max"}, "shared_expert_combination_strategy must be"),
        ("afmoe", {"score_func": "softmax"}, 'score_func must be "sigmoid" or absent'),
        ("hy_v3", {"num_nextn_predict_layers": -1}, "num_nextn_predict_layers must be an integer >= 0"),
        ("mistral4", {"n_group": 2}, "n_group must be 1 or absent"),
        ("flex_olmo", {"clip_qkv": 3.0}, "clip_qkv must be absent"),
        ("laguna", {"gating": "none"}, "gating must be true, false, per-head or per-element, got 'none'"),
        ("laguna", {"moe_router_logit_softcapping": -2.0}, "moe_router_logit_softcapping must be a finite number > 0"),
        ("laguna", {"num_attention_heads_per_layer": [4]}, "num_attention_heads_per_layer must be a list of 3"),
        ("laguna", {"num_attention_heads_per_layer": [4, "6", 2]}, "num_heads must be an integer"),
        ("granite_swa", {"layer_rope_theta": [1.0]}, "layer_rope_theta must be a list of 3 numbers"),
        ("iquestcoder", {"use_sliding_window": True}, "use_sliding_window must be false or absent"),
        ("bailing_moe", {"use_bias": True}, "use_bias must be false or absent"),
        ("axk1", {"moe_layer_freq": 2}, "moe_layer_freq must be 1 or absent"),
        (
            "exaone4_5_vision",
            {"text_config": {"model_type": "exaone5"}},
            "model_type must be exaone4 or exaone4_5_text in text_config",
        ),
        ("mpt", {"attn_config": {"alibi": False}}, "alibi must be true or absent"),
        ("mpt", {"attn_config": {"qk_ln": True}}, "qk_ln must be false or absent"),
        ("mpt", {"attn_config": 3}, "attn_config must be"),
        ("mpt", {"norm_type": "rmsnorm"}, "norm_type must be layernorm or low_precision_layernorm, got 'rmsnorm'"),
        ("mpt", {"no_bias": False}, "no_bias must be true or absent"),
        ("bloom", {"n_head": 1 << 40}, "num_attention_heads must be|num_heads must be"),
        ("step3p5", {"hidden_act": "gelu"}, 'hidden_act must be "silu" or absent'),
        ("nanochat", {"hidden_act": "prelu"}, "hidden_act must be one of gelu"),
        ("step3p5", {"layer_types": ["full_attention"] * 4}, "layer_types must be a list of 3 or 5 entries"),
        ("step3p5", {"swiglu_limits": [7.0]}, "swiglu_limits must be a list of 3 or 5 entries"),
        (
            "step3p5",
            {"swiglu_limits_shared": [0, -1, None, 0, 0]},
            "swiglu_limits_shared must be a list of numbers >= 0",
        ),
        ("step3p5", {"moe_layers_enum": "1,x"}, "moe_layers_enum must be numbers of layers"),
        ("step3p5", {"moe_layers_enum": [0, 5]}, "moe_layers_enum must be numbers of layers, 0 to 4"),
        (
            "step3p5",
            {"rope_theta": [50.0, 5000.0, 60.0]},
            "rope_theta must be a list with one number for all layers of",
        ),
        ("step3p5", {"yarn_only_types": ["sliding_attention"]}, "yarn_only_types must be"),
        ("step3p5", {"use_head_wise_attn_gate": False}, "use_head_wise_attn_gate must be true or absent"),
        ("step3p5", {"attention_other_setting": {"num_attention_groups": 2}}, "num_attention_groups must be 1"),
        ("step3p7", {"text_config": None}, "text_config must be a mapping"),
        *(
            (name, {"rope_parameters": _OF_A_PART}, "partial_rotary_factor must be 1.0, got 0.5")
            for name in ("beam", "cohere_compass")
        ),
        ("cohere_compass", {"rope_parameters": {}}, "rope_parameters must be a mapping that has one for"),
        (
            "lara_mini",
            {"layer_types": ["full_attention"]},
            "layer_types must be a list of 5 of full_attention, sliding",
        ),
        ("mistral4", {"scoring_func": "sigmoid"}, 'scoring_func must be "softmax" or absent'),
        ("teleflm", {"mup_scale_factor": 0}, "mup_scale_factor must be a finite number > 0"),
        ("telechat2", {"embed_layernorm": True}, "embed_layernorm must be false or absent"),
        ("telechat2", {"head_dim": 2, "training_seqlen": 128}, "head_dim must be more than 2"),
        ("jais", {"activation_function": "gelu_new"}, "activation_function must be swiglu"),
        ("jais", {"position_embedding_type": "learned"}, 'position_embedding_type must be "alibi" or absent'),
        ("jais", {"alibi_scaling": {"type": "linear", "factor": 2.0}}, "alibi_scaling.factor must be absent"),
        ("recurrent_gemma", {"block_types": ["mamba"]}, "block_types must be a list of recurrent and attention"),
        ("recurrent_gemma", {"lru_width": 66}, "lru_width must be a multiple of num_attention_heads, 4, got 66"),
        (
            "recurrent_gemma",
            {"hidden_size": 66, "head_dim": None},
            "hidden_size must be a multiple of num_attention_heads, 4, got 66",
        ),
        ("solar", {"bskcn_2": [6]}, "bskcn_2 must be a list of layers from 0 to 5"),
        ("solar", {"bskcn_3": None}, "bskcn_3 is missing"),
        ("solar", {"bskcn_tv": [0.9]}, "bskcn_tv must be two numbers, the second of which counts"),
        ("solar", {"bskcn_tv": [0.9, 1.5]}, "bskcn_tv must hold numbers from 0 to 1, got 1.5"),
        ("plamo3", {"sliding_window": [4, 5, None]}, "sliding_window must be an integer >= 1, or a list of one such"),
        ("plamo3", {"sliding_window": [[4], None]}, "sliding_window must be an integer >= 1, or a list of one such"),
        ("plamo3", {"sliding_window": {"full": 4}}, "sliding_window must be an integer >= 1, or a list of one such"),
        ("plamo3", {"rope_scaling_factor": 2.0}, "initial_context_length is missing"),
        ("plamo3", {"scale_embedding": True}, "scale_embedding must be false or absent"),
        ("pangu_ultra", {"n_group": 8}, "n_group must be 1 or absent"),
        ("pangu_ultra", {"param_sink_number": 128}, "param_sink_number must be 0 or absent"),
        ("step3", {"moe_layers_enum": "1,3"}, "moe_layers_enum must be numbers of layers, 0 to 2"),
        ("step3", {"num_attention_groups": 2}, "num_attention_groups must be 1 or absent"),
        ("bailing_linear", {"group_norm_size": 3}, "group_norm_size must be a divisor of num_attention_heads 4"),
        ("bailing_linear", {"num_kv_heads_for_linear_attn": 2}, "num_kv_heads_for_linear_attn must be 0 or num_att"),
        ("bailing_linear", {"rope_interleave": False}, "rope_interleave must be true or absent"),
        ("bailing_linear", {"moe_shared_expert_intermediate_size": 24}, "moe_shared_expert_intermediate_size must be"),
        ("bailing_v3", {"expert_swiglu_limit_list": [-1]}, "expert_swiglu_limit_list must be a list of numbers >= 0"),
        ("plamo3", {"rope_scaling_factor": 2, "rope_parameters": {"rope_type": "default"}}, "must be 1 or absent b"),
        ("bailing_v3", {"no_kda_lora": False}, "no_kda_lora must be true or absent"),
        ("bailing_v3", {"gated_attention_proj_granularity_type": "element_wise"}, 'granularity_type must be "head_w'),
        ("bailing_v3", {"moe_shared_expert_intermediate_size": 24}, "moe_shared_expert_intermediate_size must be 20"),
        ("flint", {"mlp_only_layers": 2}, "mlp_only_layers must be a list of layer indices"),
        ("bailing_lite", {"norm_head": True}, "norm_head must be false or absent"),
        ("qwen", {"intermediate_size": 161}, "intermediate_size must be an even number, got 161"),
        ("qwen", {"visual": {"layers": 48}}, "visual must be absent"),
        ("internlm", {"rotary": {"base": 1e4, "type": "linear"}}, "type must be dynamic or origin, got 'linear'"),
        *(
            ("gpt_neo", {"attention_layers": None, "attention_types": types}, "attention_types must be")
            for types in (
                [[["global"], 10**15]],
                [[["global"] * 10**5, 2]],
                [[["global"], 9], [["global", "local"], 1]],
            )
        ),
        ("gpt_neo", {"attention_layers": ["global"]}, "attention_layers must be global or local for each layer"),
        ("gpt_neo", {"attention_layers": ["global", 2]}, "attention_layers must be global or local for each layer"),
        ("gpt_neo", {"attention_layers": 2}, "attention_layers must be global or local for each layer"),
        ("gemma3", {"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 8.0}}, "rope_scaling must"),
    ],
)
def test_what_is_refused(name, changes, message):
    with pytest.raises(ModelConfigError, match=message):
        read_hf(recorded(name, **changes))


def test_layers_of_gpt_neo_one_by_one_prevail():
    assert [layer.window for layer in read_hf(recorded("gpt_neo")).attention] == [None, 5]
    listed = recorded("gpt_neo", attention_layers=["local", "global"])
    assert [layer.window for layer in read_hf(listed).attention] == [5, None]


def test_scaling_of_rope_that_transformers_leaves_out():
    scaled = read_hf(recorded("cohere2_moe", rope_scaling={"rope_type": "linear", "factor": 2.0}))
    ropes = [layer.rope for layer in scaled.attention if layer.rope is not None]
    assert ropes and all(rope.scaling == RopeScaling("linear", 2.0) for rope in ropes)


def test_dense_layers_are_layers_of_the_model():
    experts = read_hf(recorded("lfm2_moe", num_dense_layers=2**31 - 1)).experts
    assert experts is not None and experts.dense_layers == tuple(range(recorded("lfm2_moe")["num_hidden_layers"]))


def test_projected_embeddings_of_opt():
    untied: Any = build_model(read_hf(recorded("opt_after", tie_word_embeddings=False)), Build("float32"))
    assert untied.lm_head.weight.values.shape == untied.embed.weight.values.shape[::-1]
    config = read_hf(recorded("opt_after"), Pooler())
    assert config.declared is not None and config.declared.embedding_size is not None
    with pytest.raises(ModelConfigError, match="word_embed_proj_dim must be hidden_size = .* for a model that pools"):
        build_model(config, Build("float32"))


def test_deberta_refuses_what_it_does_not_compute():
    from jaxengine.models.config.pooler import MEAN, Pooler
    from tests.fixtures.encoder_models import DEBERTA, SIZE

    sizes = {"hidden_size": SIZE, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"architectures": ["DebertaV2Model"], "vocab_size": 96, "max_position_embeddings": 64}
    assert read_hf(sizes | DEBERTA, Pooler(MEAN)).max_position_embeddings == 64
    for changes, message in (
        ({"conv_kernel_size": 4}, "conv_kernel_size must be 0 or an odd number up to 31"),
        ({"conv_kernel_size": 3, "conv_groups": 2}, "conv_groups must be 1 or absent"),
        ({"conv_kernel_size": 3, "conv_act": "x"}, "conv_act must be one of gelu"),
        ({"pos_att_type": "c2p|p2p"}, "pos_att_type must be null, or a list of c2p and p2c"),
        ({"position_buckets": "8"}, "position_buckets must be an integer"),
        ({"max_relative_positions": 1 << 17}, "max_relative_positions must be an integer of at most 65536"),
        ({"architectures": ["DebertaModel"], "talking_head": True}, "talking_head must be false or absent"),
        ({"position_buckets": 64}, "position_buckets must be from 4 to 4096, half of it below"),
        ({"embedding_size": 20}, "embedding_size must be 32 or absent"),
    ):
        with pytest.raises(ModelConfigError, match=message):
            read_hf(sizes | DEBERTA | changes, Pooler(MEAN))
