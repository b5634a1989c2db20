"""Layouts of llama.cpp's architectures, a row for each.

Taken from its converters (convert_hf_to_gguf.py, gguf-py/gguf/constants.py). Metadata is read by the family
of the architecture, jaxengine.models.causal_lm.CausalLM.gguf_architecture.
"""

from __future__ import annotations

from jaxengine.models.weights.gguf.layout import LAYER_NAMES, GGUFLayout, mlp_names, names_of

_MIXTRAL = names_of(
    "ffn_gate_inp block_sparse_moe.gate, ffn_gate_exps block_sparse_moe.experts.{expert}.w1, "
    "ffn_up_exps block_sparse_moe.experts.{expert}.w3, ffn_down_exps block_sparse_moe.experts.{expert}.w2"
)
_SHARED = mlp_names("mlp.shared_experts", "_shexp")
_MINIMAX = {"exp_probs_b": "block_sparse_moe.e_score_correction_bias"}
_CORRECTION = {"exp_probs_b": "mlp.gate.e_score_correction_bias"}
_SINKS = {"attn_sinks": "self_attn.sinks"}
_HUNYUAN = {"attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"}
_LATENT = names_of(
    "attn_q_a self_attn.q_a_proj, attn_q_a_norm self_attn.q_a_layernorm, attn_q_b self_attn.q_b_proj, "
    "attn_kv_a_mqa self_attn.kv_a_proj_with_mqa, attn_kv_a_norm self_attn.kv_a_layernorm, "
    "attn_kv_b self_attn.kv_b_proj, attn_k_b self_attn.k_b_proj, attn_v_b self_attn.v_b_proj"
)
_INDEXER = {
    f"indexer.{part}": f"self_attn.indexer.{name}"
    for part, name in (("attn_q_b", "wq_b"), ("attn_k", "wk"), ("k_norm", "k_norm"), ("proj", "weights_proj"))
}
_BLOCKS = (("attn_compressor", "attn.compressor"), ("indexer_compressor", "attn.indexer.compressor"))
_BLOCK_PARTS = {"kv": "wkv", "gate": "wgate", "norm": "norm"}
_POOL = "self_attn.indexer.index_kpool_compress"
_STREAMS = {f"hc_{part}_{kind}": f"{part}_hc.{kind}" for part in ("attn", "ffn") for kind in ("fn", "base", "scale")}
_LLAMA4 = {
    "ffn_gate_inp": "feed_forward.router",
    **mlp_names("feed_forward"),
    **mlp_names("feed_forward.experts.{expert}", "_exps"),
    **mlp_names("feed_forward.shared_expert", "_shexp"),
}
_W = {"gate": "w1", "up": "w3", "down": "w2"}
_SHARED_EXPERT = {"ffn_gate_inp_shexp": "mlp.shared_expert_gate", **mlp_names("mlp.shared_expert", "_shexp")}
_GATE_ROW = frozenset(("ffn_gate_inp_shexp",))
_DELTA = names_of(
    "post_attention_norm post_attention_layernorm, attn_qkv linear_attn.in_proj_qkv, "
    "attn_gate linear_attn.in_proj_z, ssm_in linear_attn.in_proj_qkvz, ssm_ba linear_attn.in_proj_ba, "
    "ssm_alpha linear_attn.in_proj_a, ssm_beta linear_attn.in_proj_b, ssm_conv1d linear_attn.conv1d, "
    "ssm_norm linear_attn.norm, ssm_out linear_attn.out_proj"
)
_DELTA_BARE = {"ssm_a": "linear_attn.A_log", "ssm_dt": "linear_attn.dt_bias"}
_LFM2 = {
    **names_of("attn_norm operator_norm, ffn_norm ffn_norm, attn_output self_attn.out_proj"),
    **{f"attn_{part}_norm": f"self_attn.{part}_layernorm" for part in "qk"},
    **{f"shortconv.{part}": f"conv.{part}" for part in ("conv", "in_proj", "out_proj")},
    "ffn_gate_inp": "feed_forward.gate",
    **{f"ffn_{part}": f"feed_forward.{name}" for part, name in _W.items()},
    **{f"ffn_{part}_exps": f"feed_forward.experts.{{expert}}.{name}" for part, name in _W.items()},
}
# LFM2's final norm has the name of a norm of embeddings.
_LFM2_NORM = {"output_norm": "model.embedding_norm", "token_embd_norm": "model.embedding_norm"}
_MAMBA = {"ssm_in": "in_proj", "ssm_conv1d": "conv1d", "ssm_norm": "norm", "ssm_out": "out_proj"}
_MAMBA_BARE = {"ssm_a": "A_log", "ssm_d": "D", "ssm_dt": "dt_bias"}
# Stored with a further axis.
_MAMBA_VECTORS = frozenset(("ssm_a", "ssm_d", "ssm_norm"))
_NEMOTRON_H = {
    "attn_norm": "norm",
    **{f"attn_{part}": f"mixer.{part}_proj" for part in "qkv"},
    "attn_output": "mixer.o_proj",
    **{part: f"mixer.{name}" for part, name in _MAMBA.items()},
    **names_of("ffn_gate_inp mixer.gate, ffn_latent_down mixer.fc1_latent_proj, ffn_latent_up mixer.fc2_latent_proj"),
    **mlp_names("mixer", parts=("up", "down")),
    **mlp_names("mixer.experts.{expert}", "_exps", parts=("up", "down")),
    **mlp_names("mixer.shared_experts", "_shexp", parts=("up", "down")),
}
_NEMOTRON_H_BARE = {part: f"mixer.{name}" for part, name in _MAMBA_BARE.items()}
_NEMOTRON_H_BARE["exp_probs_b"] = "mixer.gate.e_score_correction_bias"
_GRANITE_HYBRID = {
    "ffn_gate_inp": "block_sparse_moe.router.layer",
    **mlp_names("block_sparse_moe.experts.{expert}", "_exps"),
    **{part: f"mamba.{name}" for part, name in _MAMBA.items()},
    **{f"ffn_{part}{end}": f"shared_mlp.{part}_proj" for part in ("gate", "up") for end in ("", "_shexp")},
    **{f"ffn_down{end}": "shared_mlp.output_linear" for end in ("", "_shexp")},
}
_FALCON_H1 = {**{part: f"mamba.{name}" for part, name in _MAMBA.items()}, **mlp_names("feed_forward")}
_NETS = {
    **{f"ssm_conv1d_{part}": f"self_attn.{part}_conv1d" for part in "qkv"},
    **{f"ssm_{part}": f"self_attn.{part}_proj" for part in ("f_a", "f_b", "g_a", "g_b")},
    **names_of("ssm_beta self_attn.b_proj, ssm_norm self_attn.o_norm"),
}
_KIMI = {
    **_LATENT,
    **_NETS,
    **_MIXTRAL,
    **mlp_names("block_sparse_moe.shared_experts", "_shexp"),
    **{f"ffn_routed_{part}": f"block_sparse_moe.routed_expert_{part}_proj" for part in ("down", "up")},
    **names_of(
        "ssm_g self_attn.g_proj, attn_gate self_attn.g_proj, ffn_routed_norm block_sparse_moe.routed_expert_norm, "
        "attn_res_score self_attention_res_proj, ffn_res_score mlp_res_proj"
    ),
}
_KIMI_BARE = names_of(
    "ssm_a self_attn.A_log, ssm_dt self_attn.dt_bias, exp_probs_b block_sparse_moe.gate.e_score_correction_bias"
)
_SCAN = {"ssm_in": "in_proj", "ssm_conv1d": "conv1d", "ssm_x": "x_proj", "ssm_dt": "dt_proj", "ssm_out": "out_proj"}
_SCAN_BARE = {"ssm_a": "A_log", "ssm_d": "D"}
_JAMBA = {
    "ffn_norm": "pre_ff_layernorm",
    **{part: f"mamba.{name}" for part, name in _SCAN.items()},
    **{f"ssm_{part}_norm": f"mamba.{part}_layernorm" for part in ("dt", "b", "c")},
    "ffn_gate_inp": "feed_forward.router",
    **mlp_names("feed_forward"),
    **mlp_names("feed_forward.experts.{expert}", "_exps"),
}
_POST_NORMS = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
_GEMMA = {**_POST_NORMS, "ffn_norm": "pre_feedforward_layernorm"}
_PER_LAYER = names_of("inp_gate per_layer_input_gate, proj per_layer_projection, post_norm post_per_layer_input_norm")
_GEMMA3N = {
    **_GEMMA,
    **_PER_LAYER,
    **names_of(
        "altup_correct_coef altup.correction_coefs, altup_predict_coef altup.prediction_coefs, "
        "altup_router altup.modality_router, altup_router_norm altup.router_norm, laurel_l laurel.linear_left, "
        "laurel_r laurel.linear_right, laurel_post_norm laurel.post_laurel_norm"
    ),
}
_GEMMA4 = {
    **_GEMMA,
    **_PER_LAYER,
    **names_of(
        "pre_ffw_norm_2 pre_feedforward_layernorm_2, post_ffw_norm_1 post_feedforward_layernorm_1, "
        "post_ffw_norm_2 post_feedforward_layernorm_2, ffn_gate_inp router.proj"
    ),
    **mlp_names("experts.{expert}", "_exps"),
}
_BERT = {
    **{f"attn_{part[0]}": f"attention.self.{part}" for part in ("query", "key", "value")},
    **names_of(
        "attn_output attention.output.dense, attn_output_norm attention.output.LayerNorm, ffn_up intermediate.dense, "
        "ffn_down output.dense, layer_output_norm output.LayerNorm"
    ),
}
_BERT_TABLES = names_of(
    "token_embd model.embeddings.word_embeddings, token_types model.embeddings.token_type_embeddings, "
    "position_embd model.embeddings.position_embeddings, token_embd_norm model.embeddings.LayerNorm, "
    "cls model.pooler.dense, cls.output model.classifier"
)
_BERT_LAYERS = "model.encoder.layer"


def _own(pairs: str) -> GGUFLayout:
    """Return the layout of an architecture that differs in its names alone, as `names_of` has them."""
    return GGUFLayout(names_of(pairs))


# Layouts by general.architecture. A family reads each: jaxengine.models.registry.model_for_gguf.
LAYOUTS: dict[str, GGUFLayout] = {
    "llama": GGUFLayout(_MIXTRAL, permuted=True),
    **dict.fromkeys(("qwen2", "qwen3", "qwen3moe", "qwen2vl", "qwen3vl", "qwen3vlmoe", "paddleocr"), GGUFLayout()),
    "qwen2moe": GGUFLayout(_SHARED_EXPERT, rows=_GATE_ROW),
    "qwen3next": GGUFLayout({**_DELTA, **_SHARED_EXPERT}, norm_offset=1.0, bare=_DELTA_BARE, rows=_GATE_ROW),
    "qwen35": GGUFLayout(_DELTA, norm_offset=1.0, bare=_DELTA_BARE),
    "qwen35moe": GGUFLayout({**_DELTA, **_SHARED_EXPERT}, norm_offset=1.0, bare=_DELTA_BARE, rows=_GATE_ROW),
    "minimax-m2": GGUFLayout(_MIXTRAL, bare=_MINIMAX),
    "minimax-m3": GGUFLayout(
        {
            **_MIXTRAL,
            **mlp_names("block_sparse_moe.shared_experts", "_shexp"),
            **{f"indexer.{name}": f"self_attn.index_{name}" for name in ("q_proj", "k_proj", "q_norm", "k_norm")},
        },
        norm_offset=1.0,
        bare=_MINIMAX,
    ),
    "hunyuan-moe": GGUFLayout({**_HUNYUAN, "ffn_gate_inp": "mlp.gate.wg", **mlp_names("mlp.shared_mlp", "_shexp")}),
    "deepseek": GGUFLayout(_SHARED, permuted=True),
    "bailingmoe": GGUFLayout({**_SHARED, "attn_output": "attention.dense"}, permuted=True),
    **dict.fromkeys(("olmoe", "jais2", "eurobert", "orion", "mellum", "command-r", "cohere2"), GGUFLayout()),
    "mimo2": GGUFLayout({"attn_qkv": "self_attn.qkv_proj"}, bare=_CORRECTION | _SINKS),
    "step35": GGUFLayout({**_SHARED, "attn_gate": "self_attn.g_proj"}, norm_offset=1.0, bare=_CORRECTION),
    "afmoe": GGUFLayout(
        _SHARED
        | names_of(
            "attn_gate self_attn.gate_proj, post_attention_norm post_attention_layernorm, "
            "ffn_norm pre_mlp_layernorm, post_ffw_norm post_mlp_layernorm, ffn_gate_inp mlp.router.gate"
        ),
        bare={"exp_probs_b": "mlp.expert_bias"},
    ),
    "laguna": GGUFLayout(
        {**mlp_names("mlp.shared_expert", "_shexp"), "attn_gate": "self_attn.g_proj"},
        bare={"exp_probs_b": "mlp.experts.e_score_correction_bias"},
    ),
    "muse-glimmer": GGUFLayout(
        {**_GEMMA, "attn_gate": "self_attn.gate_proj"}, permuted=True, norm_offset=1.0, norms="layernorm.weight"
    ),
    "deepseek2-ocr": GGUFLayout(_SHARED),
    "hy_v3": GGUFLayout(
        {"ffn_gate_inp": "mlp.router.gate", **mlp_names("mlp.shared_mlp", "_shexp")},
        bare={"exp_probs_b": "mlp.expert_bias"},
    ),
    **dict.fromkeys(
        ("chatglm", "bloom"),
        _own(
            "attn_qkv self_attention.query_key_value, attn_output self_attention.dense, ffn_up mlp.dense_h_to_4h, "
            "ffn_down mlp.dense_4h_to_h"
        ),
    ),
    "mpt": _own(
        "attn_norm norm_1, ffn_norm norm_2, attn_qkv attn.Wqkv, attn_output attn.out_proj, ffn_up ffn.up_proj, "
        "ffn_down ffn.down_proj"
    ),
    **dict.fromkeys(
        ("baichuan", "deci", "nanbeige", "mistral3", "granite", "smollm3", "arcee"), GGUFLayout(permuted=True)
    ),
    "starcoder": _own(
        "attn_norm ln_1, ffn_norm ln_2, attn_qkv attn.c_attn, attn_output attn.c_proj, ffn_up mlp.c_fc, "
        "ffn_down mlp.c_proj"
    ),
    "dbrx": _own(
        "attn_norm norm_attn_norm.norm_1, attn_output_norm norm_attn_norm.norm_2, "
        "attn_qkv norm_attn_norm.attn.Wqkv, attn_output norm_attn_norm.attn.out_proj, "
        "ffn_gate_inp ffn.router.layer, ffn_gate_exps ffn.experts.{expert}.w1, "
        "ffn_up_exps ffn.experts.{expert}.v1, ffn_down_exps ffn.experts.{expert}.w2"
    ),
    "minicpm3": GGUFLayout(_LATENT),
    "apertus": GGUFLayout(
        {"attn_norm": "attention_layernorm", "ffn_norm": "feedforward_layernorm"},
        numbers={f"xielu.alpha_{sign}": f"mlp.act_fn.alpha_{sign}" for sign in "pn"},
    ),
    "qwen": _own(
        "attn_norm ln_1, ffn_norm ln_2, attn_qkv attn.c_attn, attn_output attn.c_proj, ffn_gate mlp.w2, "
        "ffn_up mlp.w1, ffn_down mlp.c_proj"
    ),
    "dots1": GGUFLayout(_SHARED, bare=_CORRECTION),
    **dict.fromkeys(("deepseek2", "mistral4"), GGUFLayout({**_LATENT, **_SHARED}, bare=_CORRECTION)),
    **dict.fromkeys(("deepseek32", "glm-dsa"), GGUFLayout({**_LATENT, **_SHARED, **_INDEXER}, bare=_CORRECTION)),
    "gpt-oss": GGUFLayout(
        {"ffn_gate_inp": "mlp.router", "post_attention_norm": "post_attention_layernorm"},
        bare=_SINKS,
    ),
    "llama4": GGUFLayout(_LLAMA4),
    "phi3": GGUFLayout({"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}),
    "gemma": GGUFLayout(norm_offset=1.0),
    "gemma4": GGUFLayout(
        _GEMMA4,
        bare={"layer_output_scale": "layer_scalar"},
        factors={"ffn_gate_inp": "router.scale", "ffn_down_exps": "router.per_expert_scale"},
    ),
    **dict.fromkeys(("gemma2", "gemma3", "gemma-embedding"), GGUFLayout(_GEMMA, norm_offset=1.0)),
    "gemma3n": GGUFLayout(_GEMMA3N, bare={"altup_correct_scale": "altup.correct_output_scale"}),
    "olmo2": GGUFLayout(_POST_NORMS),
    "exaone4": GGUFLayout(_POST_NORMS),
    "starcoder2": GGUFLayout({"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}),
    "nemotron": GGUFLayout(norm_offset=1.0),
    "glm4": _own(
        "post_attention_norm post_self_attn_layernorm, post_ffw_norm post_mlp_layernorm, ffn_up mlp.gate_up_proj"
    ),
    "glm4moe": GGUFLayout({"post_attention_norm": "post_attention_layernorm", **_SHARED}, bare=_CORRECTION),
    "ernie4_5": GGUFLayout(),
    "ernie4_5-moe": GGUFLayout(
        _SHARED, bare={"exp_probs_b": "mlp.moe_statics.e_score_correction_bias"}, rows=frozenset(("exp_probs_b",))
    ),
    "exaone-moe": GGUFLayout(_SHARED, bare={"exp_probs_b": "mlp.e_score_correction_bias"}),
    "bailingmoe2": GGUFLayout(
        {
            **_SHARED,
            **names_of(
                "attn_qkv attention.query_key_value, attn_output attention.dense, "
                "attn_q_norm attention.query_layernorm, attn_k_norm attention.key_layernorm"
            ),
        },
        bare={"exp_probs_b": "mlp.gate.expert_bias"},
    ),
    "phimoe": GGUFLayout(_MIXTRAL),
    "cohere2moe": GGUFLayout(_SHARED),
    "internlm2": GGUFLayout(
        names_of(
            "attn_norm attention_norm, attn_output attention.wo, ffn_norm ffn_norm, ffn_gate feed_forward.w1, "
            "ffn_up feed_forward.w3, ffn_down feed_forward.w2"
        ),
        permuted=True,
    ),
    "falcon": _own(
        "attn_norm_2 ln_attn, attn_qkv self_attention.query_key_value, attn_output self_attention.dense, "
        "ffn_up mlp.dense_h_to_4h, ffn_down mlp.dense_4h_to_h"
    ),
    "stablelm": GGUFLayout({f"attn_{part}_norm": f"self_attn.{part}_layernorm.norms.{{expert}}" for part in "qk"}),
    **dict.fromkeys(("hunyuan-dense", "hunyuan_vl"), GGUFLayout(_HUNYUAN)),
    "bert": GGUFLayout(_BERT, layers=_BERT_LAYERS, tables=_BERT_TABLES),
    "nomic-bert": GGUFLayout(
        names_of(
            "attn_qkv attn.Wqkv, attn_output attn.out_proj, attn_output_norm norm1, ffn_up mlp.fc11, "
            "ffn_gate mlp.fc12, ffn_down mlp.fc2, layer_output_norm norm2"
        ),
        layers="model.encoder.layers",
        tables={**_BERT_TABLES, "token_embd_norm": "model.emb_ln"},
    ),
    "jina-bert-v3": GGUFLayout(
        names_of(
            "attn_qkv mixer.Wqkv, attn_output mixer.out_proj, attn_output_norm norm1, ffn_up mlp.fc1, "
            "ffn_down mlp.fc2, layer_output_norm norm2"
        ),
        layers="model.encoder.layers",
        tables={**_BERT_TABLES, "token_embd_norm": "model.emb_ln"},
    ),
    "modern-bert": GGUFLayout(
        names_of(
            "attn_norm attn_norm, attn_qkv attn.Wqkv, attn_output attn.Wo, ffn_norm mlp_norm, ffn_up mlp.Wi, "
            "ffn_down mlp.Wo"
        ),
        tables=names_of(
            "token_embd model.embeddings.tok_embeddings, token_embd_norm model.embeddings.norm, "
            "output_norm model.final_norm, cls head.dense, cls.norm head.norm, cls.output classifier"
        ),
    ),
    "jina-bert-v2": GGUFLayout(
        {
            **_BERT,
            **names_of(
                "ffn_gate mlp.gated_layers_w, ffn_up mlp.gated_layers, ffn_down mlp.wo, layer_output_norm mlp.layernorm"
            ),
        },
        layers=_BERT_LAYERS,
        tables=_BERT_TABLES,
    ),
    **dict.fromkeys(
        ("gpt2", "jais"),
        _own(
            "attn_norm ln_1, ffn_norm ln_2, attn_qkv attn.qkv, attn_output attn.out, ffn_up mlp.up, "
            "ffn_gate mlp.gate, ffn_down mlp.down"
        ),
    ),
    "gptneox": _own(
        "attn_qkv attention.query_key_value, attn_output attention.dense, ffn_up mlp.dense_h_to_4h, "
        "ffn_down mlp.dense_4h_to_h"
    ),
    "exaone": _own(
        "attn_norm ln_1, ffn_norm ln_2, attn_q attn.attention.q_proj, attn_k attn.attention.k_proj, "
        "attn_v attn.attention.v_proj, attn_output attn.attention.out_proj, ffn_gate mlp.c_fc_0, "
        "ffn_up mlp.c_fc_1, ffn_down mlp.c_proj"
    ),
    **dict.fromkeys(("olmo", "minicpm"), GGUFLayout(permuted=True, permuted_biases=False)),
    "phi2": GGUFLayout({"attn_output": "self_attn.dense", "ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"}),
    "granitemoe": GGUFLayout(_GRANITE_HYBRID, permuted=True),
    "granite_swa": GGUFLayout(
        {
            "ffn_gate_inp": "block_sparse_moe.router.layer",
            **mlp_names("block_sparse_moe.experts.{expert}", "_exps"),
            **names_of("ffn_up_shexp shared_mlp.input_linear, ffn_down_shexp shared_mlp.output_linear"),
        },
        permuted=True,
        bare=_SINKS,
    ),
    "granitehybrid": GGUFLayout(
        _GRANITE_HYBRID,
        permuted=True,
        bare={part: f"mamba.{name}" for part, name in _MAMBA_BARE.items()},
        vectors=_MAMBA_VECTORS,
    ),
    "falcon-h1": GGUFLayout(
        _FALCON_H1,
        # The file's name of this norm has no end.
        bare={"ffn_norm": "pre_ff_layernorm.weight", **{part: f"mamba.{name}" for part, name in _MAMBA_BARE.items()}},
        vectors=_MAMBA_VECTORS,
        tables={"output_norm": "model.final_layernorm"},
    ),
    **dict.fromkeys(
        ("kimi-linear", "kimi-k3"),
        GGUFLayout(
            _KIMI,
            bare=_KIMI_BARE,
            vectors=frozenset(("ssm_a",)),
            tables={"output_res_score": "model.output_attn_res_proj"},
        ),
    ),
    "deepseek4": GGUFLayout(
        {
            **names_of(
                "attn_norm attn_norm, attn_q_a attn.wq_a, attn_q_a_norm attn.q_norm, attn_q_b attn.wq_b, "
                "attn_kv attn.wkv, attn_kv_a_norm attn.kv_norm, attn_output_a attn.wo_a, attn_output_b attn.wo_b, "
                "indexer.attn_q_b attn.indexer.wq_b, indexer.proj attn.indexer.weights_proj, ffn_norm ffn_norm, "
                "ffn_gate_inp ffn.gate"
            ),
            **{f"{own}_{part}": f"{at}.{name}" for own, at in _BLOCKS for part, name in _BLOCK_PARTS.items()},
            **{f"ffn_{part}_exps": f"ffn.experts.{{expert}}.{name}" for part, name in _W.items()},
            **{f"ffn_{part}_shexp": f"ffn.shared_experts.{name}" for part, name in _W.items()},
        },
        bare={
            **names_of("attn_sinks attn.attn_sink, exp_probs_b ffn.gate.bias, ffn_gate_tid2eid ffn.gate.tid2eid"),
            **{name: name for name in _STREAMS},
            **{f"output_hc_{kind}": f"model.hc_head.hc_{kind}" for kind in ("fn", "base", "scale")},
            **{f"{own}_ape": f"{at}.ape" for own, at in _BLOCKS},
        },
    ),
    "glm5-next": GGUFLayout(
        {**_LATENT, **_NETS, **_SHARED, **_INDEXER, "indexer_compressor_gate": f"{_POOL}_gate"},
        bare={**_KIMI_BARE, **_CORRECTION, **_STREAMS, "indexer_compressor_ape": f"{_POOL}_ape"},
        vectors=frozenset(("ssm_a",)),
    ),
    "bailingmoe3": GGUFLayout(
        {
            **{part: name.replace("self_attn", "attention") for part, name in (_LATENT | _NETS | LAYER_NAMES).items()},
            **_SHARED,
            **names_of("ssm_f_a attention.f_proj, ssm_g_a attention.g_proj, attn_gate attention.g_proj"),
        },
        bare=names_of("ssm_a attention.A_log, ssm_dt attention.dt_bias, exp_probs_b mlp.gate.expert_bias"),
        vectors=frozenset(("ssm_a",)),
        decay=1.0,
    ),
    "jamba": GGUFLayout(_JAMBA, bare={part: f"mamba.{name}" for part, name in _SCAN_BARE.items()}),
    "mamba": GGUFLayout(
        {"attn_norm": "norm", **{part: f"mixer.{name}" for part, name in _SCAN.items()}},
        bare={part: f"mixer.{name}" for part, name in _SCAN_BARE.items()},
    ),
    "mamba2": GGUFLayout(
        {"attn_norm": "norm", **{part: f"mixer.{name}" for part, name in _MAMBA.items()}},
        bare={part: f"mixer.{name}" for part, name in _MAMBA_BARE.items()},
        vectors=_MAMBA_VECTORS,
    ),
    **dict.fromkeys(
        ("nemotron_h", "nemotron_h_moe"),
        GGUFLayout(_NEMOTRON_H, permuted=True, bare=_NEMOTRON_H_BARE, vectors=_MAMBA_VECTORS),
    ),
    **dict.fromkeys(
        ("lfm2", "lfm2moe"), GGUFLayout(_LFM2, bare={"exp_probs_b": "feed_forward.expert_bias"}, tables=_LFM2_NORM)
    ),
    "t5encoder": GGUFLayout(
        {
            **{f"attn_{part}": f"layer.0.SelfAttention.{part}" for part in "qkv"},
            **names_of(
                "attn_norm layer.0.layer_norm, attn_o layer.0.SelfAttention.o, ffn_norm layer.1.layer_norm, "
                "attn_rel_b layer.0.SelfAttention.relative_attention_bias, ffn_gate layer.1.DenseReluDense.wi_0, "
                "ffn_up layer.1.DenseReluDense.wi_1, ffn_down layer.1.DenseReluDense.wo"
            ),
        },
        tables={"token_embd": "model.shared"},
    ),
    "plamo3": GGUFLayout(
        names_of(
            "attn_norm pre_mixer_norm, attn_qkv mixer.qkv_proj, attn_q_norm mixer.q_norm, attn_k_norm mixer.k_norm, "
            "attn_output mixer.o_proj, ffn_norm pre_mlp_norm, ffn_up mlp.gate_up_proj"
        ),
        norm_offset=1.0,
        offsets={"post_mixer_norm.weight": 1 / 5, "post_mlp_norm.weight": 1 / 5**1.5},
        # The file's names of these norms have no end.
        bare=names_of("post_attention_norm post_mixer_norm.weight, post_ffw_norm post_mlp_norm.weight"),
    ),
    "seed_oss": GGUFLayout({"post_attention_norm": "post_attention_layernorm"}),
}
