"""Fields of config.json that mean in transformers what their names do not say: absent ones, zeros, contradictions."""

from __future__ import annotations

import json
from typing import Any

import pytest
from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.config.fields import ModelConfigError
from jaxengine.models.config.pooler import Pooler
from jaxengine.models.config.rope import RopeScaling
from jaxengine.models.layers.experts.moe import MixtureOfExperts
from jaxengine.models.registry import build_model, read_hf
from tests.fixtures.drawn_weights import FOLDER
from tests.tables import each_row

ABSENT = object()


def recorded(name: str, **changes: Any) -> dict[str, Any]:
    """The config.json of a recorded checkpoint, with changes; ABSENT leaves a field out."""
    raw = json.loads((FOLDER / name / "config.json").read_text()) | changes
    return {key: value for key, value in raw.items() if value is not ABSENT}


SMALL, SCALED = {"rms_norm_eps": 1e-5}, {"routed_scaling_factor": 2.5}
GROUPED = {"n_group": 8, "topk_group": 4, "first_k_dense_replace": 3, "n_shared_experts": 1}
_MELLUM = {"full_attention": {"rope_theta": 5e5}, "sliding_attention": {"rope_theta": 1e4}}
_LAGUNA = {
    "full_attention": {"rope_theta": 5e5, "partial_rotary_factor": 0.5},
    "sliding_attention": {"rope_theta": 1e4, "partial_rotary_factor": 1.0},
}
_HALF = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
_WINDOWED = {"use_sliding_window": True}
# The attribute of towers with the base of rotary frequencies.
_AXIAL = dict.fromkeys(("glm_ocr_vision", "paddleocr_vl_vision", "qwen2_vl_vision", "pixtral_vision"), "rope_theta")
_AXIAL |= {"gemma4_pictures_vision": "theta"}
_LINEAR = {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}
_LISTED = {"full_attn_layers": [3], "kda_layers": [1, 2, 4], "head_dim": 12, "num_heads": 4}
_KINDS = ["full_attention", "linear_attention", "linear_attention", "full_attention"]
_SWAPPED = {"full_attn_layers": [1, 4], "kda_layers": [2, 3], "head_dim": 12, "num_heads": 4}
_DENSE, _WIDE = ["dense", "dense", "sparse", "sparse"], {"intermediate_size": 62}
_KEPT = _WINDOWED | _LINEAR | {"max_window_layers": 0, "layer_types": None}  # what is not left out


@each_row(
    ("name", "defaults"),
    [
        *((name, SMALL) for name in ("mixtral", "phi3", "internlm3", "hunyuan_dense", "ministral3", "gpt_oss")),
        *((name, SMALL) for name in ("glm4_moe", "minicpm3", "glm_moe_dsa")),
        *((name, {"rms_norm_eps": 1.5625e-7}) for name in ("glm", "glm4")),
        *((name, {"norm_eps": 1e-5}) for name in ("lfm2", "lfm2_moe")),
        *((name, SCALED) for name in ("deepseek_v3", "deepseek_v32", "glm_moe_dsa", "sarvam_mla")),
        ("deepseek_v32", {"rms_norm_eps": 1e-6}),
        ("glm4_moe_lite", {**SMALL, "routed_scaling_factor": 1.8}),
        ("phi3_longrope", {"original_max_position_embeddings": 4096}),
        *((name, {**GROUPED, "q_lora_rank": 1536}) for name in ("deepseek_v3", "deepseek_v32")),
        ("bailing_hybrid", {"num_expert_group": 8, "topk_group": 4, "num_shared_experts": 1}),
        ("glm4_moe_lite", {"n_group": 1, "topk_group": 1, "n_shared_experts": 1, "q_lora_rank": 768}),
        ("glm_moe_dsa", {"n_group": 1, "topk_group": 1, "n_shared_experts": 1, "q_lora_rank": 2048}),
        ("axk2", {"n_group": None, "topk_group": None, "n_shared_experts": 1, "q_lora_rank": 384}),
        ("hy_v4", {**SMALL, "n_group": 1, "topk_group": 1, "n_shared_experts": 1, "num_key_value_heads": 4}),
        ("hy_v4", {"routed_scaling_factor": 2.827, "norm_topk_prob": True, "hc_magnitude": 2.0, "hc_eps": 1e-6}),
        ("glm4_moe", {"first_k_dense_replace": 1, "n_shared_experts": 1}),
        ("deepseek_v2", {"n_shared_experts": 2, "q_lora_rank": 1536}),
        ("ernie4_5_moe", {"moe_num_shared_experts": 2}),
        ("kimi_linear", {"routed_scaling_factor": 2.446, "num_shared_experts": 1}),
        ("mellum", {"rope_parameters": _MELLUM}),
        ("laguna", {"rope_parameters": _LAGUNA}),
        ("dots1", {"sliding_window": 4096}),
        ("longcat_flash", {"zero_expert_num": 256}),
        ("step3p5", {**SMALL, "rope_theta": [10000.0] * 5, "moe_router_scaling_factor": 1.0}),
        ("flint_odd", {"sliding_window": 513, "rms_norm_eps": 1e-6, "norm_topk_prob": True, "mlp_only_layers": [0, 1]}),
        (
            "lara_mini",
            {"norm_topk_prob": True, "sliding_window": 512, "linear_conv_kernel_dim": 4, "attention_bias": False},
        ),
        ("beam", {**SCALED, "rms_norm_eps": 1e-6, "sliding_window": 512, "final_logit_softcapping": 30.0}),
        ("beam_odd", {"final_logit_softcapping": None, "mlp_layer_types": ["dense"] * 3 + ["sparse"] * 2}),
        ("cohere_compass", {"layer_norm_eps": 1e-5, "logit_scale": 1.0, "sliding_window": 4096}),
        ("qwen3_moe_bias", {**_WINDOWED, "sliding_window": 4096}),
        ("llama4", {"attention_chunk_size": 8192}),
        ("mistral", {"sliding_window": 4096}),
        ("bailing_moe", {"head_dim": 64}),
        ("qwen2", {**_WINDOWED, "max_window_layers": 0, "layer_types": None, "sliding_window": 4096}),
        ("phimoe", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
        ("helium", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e5}}),
        ("cwm", {**_LINEAR, "rope_theta": 1e6}),
        ("mistral4", {"q_lora_rank": 1024}),
        ("youtu", {"q_lora_rank": 1536}),
        ("granite_hybrid", {"num_local_experts": 8}),
        ("dory", {"initializer_range": 0.0177, "ngpt_alpha_init": 0.05, "sliding_window": 1024}),
        ("dory", {"num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 256, "n_recurrent_loops": 2}),
        (
            "inkling",
            {"conv_kernel_size": 4, "d_rel": 16, "rel_extent": 1024, "route_scale": 8.0, "n_shared_experts": 2},
        ),
        ("inkling", {"sliding_window_size": 512, "log_scaling_alpha": 0.1, "logits_mup_width_multiplier": 24.0}),
        ("zaya", {"cca_time0": 2, "cca_time1": 2, "router_hidden_size": 256, "rms_norm_eps": 1e-5, "num_experts": 16}),
        ("jetmoe", {"num_local_experts": 8, "num_experts_per_tok": 2, "kv_channels": 128, "rms_norm_eps": 1e-6}),
        ("zamba", {"mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2, "hidden_act": "gelu"}),
        ("zamba", {**SMALL, "n_mamba_heads": 2, "mamba_dt_rank": "auto", "attention_head_dim": 24}),
        ("zamba2", {**SMALL, "mamba_d_conv": 4, "mamba_expand": 2, "hidden_act": "gelu", "time_step_min": 0.001}),
        ("zamba2_odd", {"num_mem_blocks": 1, "mamba_ngroups": 1, "use_mem_rope": False, "intermediate_size": 120}),
        (
            "recurrent_gemma",
            {"attention_window_size": 2048, "conv1d_width": 4, "logits_soft_cap": 30.0, "lru_width": 64}
            | {"block_types": ["recurrent", "recurrent", "attention"], "rope_parameters": _HALF, "rms_norm_eps": 1e-6},
        ),
        ("recurrent_gemma", {"head_dim": 16, "hidden_activation": "gelu_pytorch_tanh"}),
    ],
)
def test_what_is_absent_is_what_the_class_in_transformers_has(name, defaults):
    kept = {key: value for key, value in defaults.items() if _KEPT.get(key) == value}
    assert read_hf(recorded(name, **dict.fromkeys(defaults, ABSENT) | kept)) == read_hf(recorded(name, **defaults))


def test_heads_and_gates_of_recurrent_gemma_are_those_of_the_file():
    first, _, third, _ = read_hf(recorded("recurrent_gemma", head_dim=12, hidden_activation="silu")).attention
    assert (third.head_dim, third.rope.rotary_dim) == (12, 6) and first.state.activation == "silu"


@each_row("name", ["mistral4", "youtu"])
def test_queries_without_a_latent(name):
    """Null is not absent: transformers' classes project queries from the hidden state."""
    assert read_hf(recorded(name, q_lora_rank=None)).attention[0].latent.q_lora_rank is None


@each_row(
    ("name", "count"),
    [
        *((name, 2) for name in ("glm", "qwen3_next", "qwen3_5_moe_vision")),
        *((name, 4) for name in ("gemma2", "qwen3_moe", "qwen3_5_vision", "bailing_moe")),
        *((name, 8) for name in ("mistral", "mixtral", "qwen2_5_vl_vision", "glm4v_moe_vision")),
        ("qwen3_vl_vision", 32),
    ],
)
def test_key_value_heads_of_the_class_in_transformers(name, count):
    """A file without them; null is as many as query heads."""
    raw, found = recorded(name), []
    for more in ({"num_key_value_heads": count}, {}, {"num_key_value_heads": None}):
        text = {"head_dim": 16, **raw.get("text_config", raw), "num_attention_heads": 2 * count}
        text = {key: value for key, value in text.items() if key != "num_key_value_heads"} | more
        config = read_hf({**raw, "text_config": text} if "text_config" in raw else text)
        found.append(config.attention[-1].num_kv_heads)
    assert found == [count, count, 2 * count]


@each_row(
    ("name", "field"),
    [
        *((name, "norm_topk_prob") for name in ("deepseek_v3", "dots1", "mistral4", "axk1")),
        *((name, "rope_interleave") for name in ("deepseek_v3", "youtu")),
        *((name, "mamba_conv_bias") for name in ("falcon_h1", "granite_hybrid")),
        ("kimi_linear", "moe_renormalize"),
        ("falcon_h1", "mamba_norm_before_gate"),
    ],
)
def test_a_switch_that_is_null_is_off(name, field):
    changes = {"mamba_rms_norm": True} if field == "mamba_norm_before_gate" else {}
    off, absent = (read_hf(recorded(name, **changes, **{field: value})) for value in (False, ABSENT))
    assert read_hf(recorded(name, **changes, **{field: None})) == off
    assert name == "dots1" or absent != off


@each_row(
    ("name", "changes", "same"),
    [
        ("kimi_linear", {"layer_types": _KINDS, "linear_attn_config": _LISTED}, {"linear_attn_config": _SWAPPED}),
        ("kimi_linear", {"mlp_layer_types": _DENSE, "first_k_dense_replace": 0}, {"first_k_dense_replace": 2}),
        ("lfm2", {"tie_embedding": False}, {"tie_word_embeddings": False}),
        ("lfm2_moe", {"tie_embedding": False}, {"tie_word_embeddings": False}),
        ("lfm2", {**_WIDE, "block_ffn_dim_multiplier": None}, {**_WIDE, "block_multiple_of": 1}),
        ("deepseek_v32", {"num_experts": 16}, {"n_routed_experts": 16}),
        ("glm_moe_dsa", {"num_experts": 4}, {"n_routed_experts": 4}),
    ],
)
def test_of_two_fields_the_one_that_transformers_takes_is_read(name, changes, same):
    assert read_hf(recorded(name, **changes)) == read_hf(recorded(name, **same)) != read_hf(recorded(name))


@each_row("name", ["cohere2_moe", "cohere_compass"])
def test_a_token_id_that_is_null_is_none(name):
    ids, size = ("bos_token_id", "eos_token_id"), {"vocab_size": 256000}
    null, absent = (read_hf(recorded(name, **size, **dict.fromkeys(ids, value))) for value in (None, ABSENT))
    assert (null.bos_token_id, null.eos_token_ids) == (None, ())
    assert (absent.bos_token_id, absent.eos_token_ids) == (5, (255001,))


@each_row("name", ["hy_v3", "laguna", "afmoe", "step3p5"])
def test_weights_that_always_add_up_to_one_are_not_switched_off(name):
    for field, value in (("norm_topk_prob", False), ("n_group", 2)):
        with pytest.raises(ModelConfigError, match=f"^{field} must be "):
            read_hf(recorded(name, **{field: value}))


@each_row("name", ["glm_moe_dsa", "qwen3_next_long", "minicpmv4_6_vision"])
def test_kinds_of_layers_as_earlier_releases_name_them(name):
    """As in nvidia/GLM-5.2-NVFP4; transformers renames them in every family, and in text_config."""
    old = {"indexed_attention": "deepseek_sparse_attention", "linear_attention": "mamba", "full_attention": "attention"}
    raw = recorded(name)
    text = json.loads(json.dumps(raw.get("text_config", raw)))
    listed = text.get("layer_types") or ["indexed_attention"] * text["num_hidden_layers"]
    text["layer_types"] = [old.get(kind, kind) for kind in listed]
    assert text["layer_types"] != listed
    assert read_hf({**raw, "text_config": text} if "text_config" in raw else text) == read_hf(raw)


def test_fields_of_single_layers_are_refused_where_they_are_not_read():
    with pytest.raises(ModelConfigError, match="^per_layer_config must be absent or empty"):
        read_hf(recorded("llama", per_layer_config={"1": {"intermediate_size": 48}}))
    assert read_hf(recorded("llama", per_layer_config={})) == read_hf(recorded("llama"))
    with pytest.raises(ModelConfigError, match="^per_layer_config must be head_dim and num_key_value_heads"):
        read_hf(recorded("gemma4", per_layer_config={"2": {"head_dim": 24, "sliding_window": 9}}))
    with pytest.raises(ModelConfigError, match=r"^per_layer_config\.2\.head_dim must be an integer >= 1 and <= 4096"):
        read_hf(recorded("gemma4", per_layer_config={"2": {"head_dim": 0}}))
    alike = read_hf(recorded("gemma4", per_layer_config=None))
    assert len({layer.head_dim for layer in alike.attention}) == 1


def test_numbers_of_layers_may_begin_with_zeros():
    """As transformers writes them for a model of more than ten layers."""
    own = recorded("gemma4")["per_layer_config"]
    padded = {f"{number:0>3}": fields for number, fields in own.items()}
    assert read_hf(recorded("gemma4", per_layer_config=padded)) == read_hf(recorded("gemma4"))
    for key in ("7", "-1", "two", "02"):  # the last one stands for a layer that has fields already
        with pytest.raises(ModelConfigError, match="^per_layer_config must be a mapping whose keys are numbers of lay"):
            read_hf(recorded("gemma4", per_layer_config=own | {key: {"head_dim": 24}}))


def test_rope_that_no_layer_has_scales_no_products():
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "mscale_all_dim": 1.3}
    for name in ("rope_parameters", "rope_scaling"):
        assert read_hf(recorded("kimi_linear", **{name: yarn})) == read_hf(recorded("kimi_linear"))


def test_an_mscale_of_zero_is_none():
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "mscale": 0.7}
    assert RopeScaling.from_hf(yarn | {"mscale_all_dim": 0.0}, 64) == RopeScaling.from_hf(yarn, 64)
    for wrong in (-1, False):
        with pytest.raises(ModelConfigError, match=f"mscale_all_dim must be a finite number > 0, got {wrong}"):
            RopeScaling.from_hf(yarn | {"mscale_all_dim": wrong}, 64)
    raw = recorded("deepseek_v3")
    rope = raw["rope_parameters"]
    of_all = {**yarn, "rope_theta": 10000.0, "mscale_all_dim": 0.0}
    without = {key: value for key, value in of_all.items() if key != "mscale_all_dim"}
    assert rope and read_hf(raw | {"rope_parameters": of_all}) == read_hf(raw | {"rope_parameters": without})


@each_row("name", ["deepseek_v2", "hy_v3", "aria_text", "deepseek_v4", "step3p5"])
def test_biases_of_mlps_are_those_of_shared_ones_too(name):
    made = nnx.eval_shape(lambda: build_model(read_hf(recorded(name, mlp_bias=True)), Build("float32")))
    found = [node.shared for _, node in nnx.iter_graph(made) if isinstance(node, MixtureOfExperts)]
    assert found and all(each.gate_up.bias is not None and each.down.bias is not None for each in found)


@each_row("name", [*_AXIAL, "kimi_k25_vision"])
def test_rope_of_towers(name):
    raw = recorded(name)
    vision = {key: value for key, value in raw["vision_config"].items() if not key.startswith("rope_")}
    if name in _AXIAL:
        for changes in ({"rope_theta": 77}, {"rope_scaling": {"type": "default", "rope_theta": 77}, "rope_theta": 5}):
            tower = read_hf(raw | {"vision_config": vision | changes}).tower
            assert getattr(tower, _AXIAL[name]) == 77
    else:
        with pytest.raises(ModelConfigError, match="rope_parameters must be a mapping with the rope_theta 10000"):
            read_hf(raw | {"vision_config": vision | {"rope_theta": 77}})
    with pytest.raises(ModelConfigError, match='rope_parameters must be a mapping with the rope_type "axial" or'):
        read_hf(raw | {"vision_config": vision | {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}})


def test_sections_of_minicpmv():
    raw = recorded("minicpmv4_7_vision")
    rope = raw["text_config"]["rope_parameters"]
    plain = {key: value for key, value in raw["text_config"].items() if key != "rope_parameters"}
    for name, given in (("rope_scaling", rope), ("rope_parameters", rope | {"mrope_interleaved": False})):
        assert read_hf(raw | {"text_config": plain | {name: given}}) == read_hf(raw)


@each_row(
    ("name", "changes", "message"),
    [
        ("bailing_hybrid", {"kda_lower_bound": -(10**400)}, "kda_lower_bound must be a number < 0"),
        ("bailing_hybrid", {"kda_lower_bound": float("nan")}, "kda_lower_bound must be a number < 0"),
        ("bailing_hybrid", {"kda_lower_bound": 1.0}, "kda_lower_bound must be a number < 0"),
        ("minicpmv4_7_vision", {"merge_kernel_size": 4}, r"merge_kernel_size must be \[2, 2\], got 4"),
    ],
)
def test_values_of_another_form_are_configuration_errors(name, changes, message):
    with pytest.raises(ModelConfigError, match=message):
        read_hf(recorded(name, **changes))


@each_row("name", ["qwen2_untied", "qwen3_bias", "qwen2_moe_unbiased", "smollm3_untied"])
def test_windows_that_are_listed_and_switched_off_are_refused(name):
    raw = recorded(name)
    kinds = ["sliding_attention"] * raw["num_hidden_layers"]
    with pytest.raises(ModelConfigError, match="layer_types must be without sliding_attention where"):
        read_hf(raw | {"layer_types": kinds, "use_sliding_window": False})


@each_row("name", ["qwen2_untied", "qwen3", "smollm3_untied"])
def test_a_window_that_is_null_is_none(name):
    windowed = recorded(name, use_sliding_window=True, sliding_window=None)
    assert read_hf(windowed) == read_hf(recorded(name, use_sliding_window=False))
    assert read_hf(windowed | {"layer_types": None}) == read_hf(windowed)
    if name != "smollm3_untied":
        kinds = ["sliding_attention"] * windowed["num_hidden_layers"]
        with pytest.raises(ModelConfigError, match="layer_types must be without sliding_attention where sliding_win"):
            read_hf(windowed | {"layer_types": kinds})


@each_row("name", ["cwm", "gpt_oss", "ministral3", "mistral4"])
def test_a_base_of_rope_alone_is_refused_where_transformers_has_a_scaling(name):
    with pytest.raises(ModelConfigError, match="rope_parameters must be a mapping, got None"):
        read_hf(recorded(name, rope_parameters=ABSENT, rope_theta=5000.0))


@each_row("name", ["mistral4", "ministral3"])
def test_the_older_spelling_of_rope_scales_queries_too(name):
    raw = recorded(name)
    assert read_hf(recorded(name, rope_parameters=ABSENT, rope_scaling=raw["rope_parameters"])) == read_hf(raw)


@each_row("name", ["beam", "gemma4_plain", "gemma4_unified", "laguna", "lfm3", "mellum"])
def test_the_older_spelling_of_rope_is_refused_where_ropes_have_none(name):
    with pytest.raises(ModelConfigError, match="^rope_scaling must be absent, got {'rope_type': 'linear'"):
        read_hf(recorded(name, rope_parameters=ABSENT, rope_scaling={"rope_type": "linear", "factor": 2.0}))


@each_row("name", ["seed_oss", "ernie4_5", "iquestcoder"])
def test_a_null_head_dim_is_a_part_of_the_hidden_size(name):
    raw = recorded(name, head_dim=None)
    assert read_hf(raw).attention[0].head_dim == raw["hidden_size"] // raw["num_attention_heads"]
    assert read_hf(recorded(name, head_dim=ABSENT)).attention[0].head_dim == 128


def test_mistral_3_has_another_tower_by_default_than_its_towers_class():
    raw = recorded("mistral3_vision")
    vision = {key: value for key, value in raw["vision_config"].items() if key != "patch_size"}
    assert read_hf(raw | {"vision_config": vision}) == read_hf(raw | {"vision_config": vision | {"patch_size": 16}})
    sides = [read_hf(raw | {"vision_config": whole}).tower.patch_size for whole in (None, {})]
    assert sides == [14, 16]


def test_a_text_of_mistral_3_lacks_what_its_class_has_by_default():
    """As transformers 4.50 saved fine-tuned models."""
    raw, sizes = recorded("mistral3_pictures_vision"), {"num_hidden_layers": 32, "num_attention_heads": 32}
    whole = raw["text_config"] | sizes | {"hidden_size": 4096, "intermediate_size": 14336, "vocab_size": 32000}
    whole |= {"num_key_value_heads": 8, "max_position_embeddings": 131072, "rms_norm_eps": 1e-6, "sliding_window": 4096}
    text = {key: whole[key] for key in ("model_type", "head_dim", "rope_parameters", "tie_word_embeddings")}
    found = [read_hf(raw | {"text_config": each}) for each in (whole, text)]
    assert found[0] == found[1]


def test_eurobert_norms_by_its_own_epsilon():
    llama = recorded("llama", architectures=["EuroBertModel"], rms_norm_eps=ABSENT)
    assert read_hf(llama, Pooler()).rms_norm_eps == 1e-5


def test_gemma_3_with_a_tower_caps_no_logits():
    raw = recorded("gemma3_vision")
    capped = raw | {"text_config": raw["text_config"] | {"final_logit_softcapping": 6.0}}
    assert read_hf(capped) == read_hf(raw)


def test_a_model_that_generates_looks_back_only():
    for name, prefix in (("gemma3", ""), ("gemma3_vision", "text_config.")):
        raw = recorded(name)
        holder = raw["text_config"] if prefix else raw
        changed = holder | {"use_bidirectional_attention": True}
        with pytest.raises(ModelConfigError, match=f"^{prefix}use_bidirectional_attention must be false .* got True$"):
            read_hf(raw | {"text_config": changed} if prefix else changed)


def test_olmo_hybrid_has_rope_where_its_base_is_not_null():
    """A checkpoint of before `rope_parameters` has its base outside; null is no rope."""
    old = recorded("olmo_hybrid", rope_parameters=ABSENT)
    rotated = read_hf(recorded("olmo_hybrid", rope_parameters={"rope_type": "default", "rope_theta": 5000.0}))
    assert read_hf(old | {"rope_theta": 5000.0}) == rotated and rotated.attention[-1].rope is not None
    for null in ({"rope_theta": None}, {"rope_parameters": {"rope_type": "default", "rope_theta": None}}):
        assert read_hf(old | null).attention[-1].rope is None


@each_row(
    ("name", "field", "value"),
    [
        ("axk2", "rope_interleave", False),
        ("axk2", "indexer_rope_interleave", True),
        *(("hy_v4", name, True) for name in ("rope_interleave", "indexer_rope_interleave")),
        *((name, "rope_interleave", False) for name in ("deepseek_v32", "glm_moe_dsa")),
    ],
)
def test_the_pairs_of_rope_are_those_of_the_class_whatever_the_file_says(name, field, value):
    assert read_hf(recorded(name, **{field: not value})) == read_hf(recorded(name))
    with pytest.raises(ModelConfigError, match=f"^{field} must be "):
        read_hf(recorded(name, **{field: value}))


def test_a_scaling_of_all_ropes_of_modernbert_is_refused():
    """transformers gives it to the layers with windows as well."""
    scaling = {"rope_type": "linear", "factor": 4.0}
    decoder = recorded("modernbert_decoder")
    encoder = decoder | {"architectures": ["ModernBertModel"], "model_type": "modernbert"}
    for raw, pooler in ((decoder, None), (encoder, Pooler("CLS"))):
        for each in (raw, raw | {"rope_parameters": None}):
            read_hf(each, pooler)
            with pytest.raises(ModelConfigError, match="^rope_scaling must be absent"):
                read_hf(each | {"rope_scaling": scaling}, pooler)


def test_a_window_of_modernbert_prevails_over_local_attention():
    decoder = recorded("modernbert_decoder")
    encoder = decoder | {"architectures": ["ModernBertModel"], "model_type": "modernbert"}
    for given, window in ((16, 16), (None, decoder["local_attention"] // 2)):
        for raw, pooler, own in ((decoder, None, window), (encoder, Pooler("CLS"), window + 1)):
            read = read_hf(raw | {"sliding_window": given}, pooler)
            assert max(layer.window or 0 for layer in read.attention) == own
