"""Checkpoints of older, pruned and looped architectures, and of GLM-5.3-Flash, Kimi K3 and DeepSeek-V4, to GGUF files,
by the rules of llama.cpp's converters, for tests. Written from those rules, as named_conversion, whose rows these are
like.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from tests.models.weights.gguf import named_conversion
from tests.models.weights.gguf.gguf_conversion import latents_apart, permuted
from tests.models.weights.gguf.gguf_writer import ARRAY, BOOL, F32, U32, Value
from tests.models.weights.gguf.named_conversion import (
    INDEXER,
    LATENT,
    PARTS,
    Config,
    Conversion,
    Tensors,
    all_permuted,
)
from tests.models.weights.gguf.named_metadata import mixture

# What the recorded checkpoint of DeepSeek-V4 becomes without its layer of another rate, as published files say it.
DEEPSEEK_V4 = {
    **dict.fromkeys(("layer_types", "mlp_layer_types", "compress_rates")),
    "compress_ratios": [0, 4, 4, 0],
    "num_hash_layers": 2,
    "num_hidden_layers": 3,
    "num_nextn_predict_layers": 0,
}
_NO_ROPE = {"rope.freq_base": None, "rope.dimension_count": None}
_STREAMS = "fn", "base", "scale"
_NETS = {
    **{f"self_attn.{part}_conv1d": f"ssm_conv1d_{part}" for part in "qkv"},
    **{f"self_attn.{part}_proj": f"ssm_{part}" for part in ("f_a", "f_b", "g_a", "g_b")},
    "self_attn.A_log": "ssm_a",
    "self_attn.dt_bias": "ssm_dt.bias",
    "self_attn.b_proj": "ssm_beta",
    "self_attn.o_norm": "ssm_norm",
}
_GPT = {"n_head": "num_attention_heads", "n_layer": "num_hidden_layers", "layer_norm_epsilon": "layer_norm_eps"}
_GPT2 = {**_GPT, "n_embd": "hidden_size", "n_positions": "max_position_embeddings"}


def _glm5(config: Config) -> dict[str, Value | None]:
    """Glm5NextModel.set_gguf_parameters."""
    kinds, rank, count = config["layer_types"], config["kv_lora_rank"], config["num_hidden_layers"]
    limits: Value = (ARRAY, (F32, [config["swiglu_limit"]] * count))
    return {
        **_NO_ROPE,
        **mixture({**config, "first_k_dense_replace": 1}),
        **{f"attention.{kind}_length": (U32, rank) for kind in ("key", "value")},
        "attention.head_count_kv": (ARRAY, (U32, [int(kind != "linear_attention") for kind in kinds])),
        "attention.key_length_mla": (U32, config["qk_nope_head_dim"]),
        "attention.value_length_mla": (U32, config["v_head_dim"]),
        "attention.q_lora_rank": (U32, config["q_lora_rank"]),
        "attention.kv_lora_rank": (U32, rank),
        "rope.dimension_count": (U32, 0),
        "ssm.conv_kernel": (U32, config["linear_conv_kernel_dim"]),
        "kda.head_dim": (U32, config["linear_head_dim"]),
        "kda.gate_lower_bound": (F32, config["linear_lower_bound"]),
        "attention.indexer.head_count": (U32, config["index_n_heads"]),
        "attention.indexer.key_length": (U32, config["index_head_dim"]),
        "attention.indexer.top_k": (U32, config["index_topk"]),
        "attention.indexer.kpool": (U32, config["index_kpool"]),
        "attention.indexer.kpool_select_tail": (BOOL, True),
        "attention.indexer.types": (ARRAY, (BOOL, [True] * count)),
        "hyper_connection.count": (U32, config["hc_mult"]),
        "hyper_connection.sinkhorn_iterations": (U32, config["hc_sinkhorn_iters"]),
        "hyper_connection.epsilon": (F32, config["hc_eps"]),
        "expert_weights_scale": (F32, config["routed_scaling_factor"]),
        "swiglu_clamp_exp": limits,
        "swiglu_clamp_shexp": limits,
    }


def _glm5_tensors(config: Config, tensors: Tensors) -> Tensors:
    """Glm5NextModel.modify_tensors."""
    modified = {}
    for name, values in latents_apart(config, tensors).items():
        if name.endswith("_conv1d.weight"):
            values = values.reshape(1, len(values), 1, -1)
        modified[name] = -np.exp(values) if name.endswith(".A_log") else values
    return modified


def _deepseek4(config: Config) -> dict[str, Value | None]:
    """DeepseekV4Model.set_gguf_parameters."""
    limits: Value = (ARRAY, (F32, [config["swiglu_limit"]] * config["num_hidden_layers"]))
    return {
        **mixture(config),
        "feed_forward_length": None,
        "expert_gating_func": (U32, 4),
        "expert_weights_scale": (F32, config["routed_scaling_factor"]),
        "rope.dimension_count": (U32, config["qk_rope_head_dim"]),
        "attention.q_lora_rank": (U32, config["q_lora_rank"]),
        "attention.sliding_window": (U32, config["sliding_window"]),
        "attention.indexer.head_count": (U32, config["index_n_heads"]),
        "attention.indexer.key_length": (U32, config["index_head_dim"]),
        "attention.indexer.top_k": (U32, config["index_topk"]),
        "attention.output_group_count": (U32, config["o_groups"]),
        "attention.output_lora_rank": (U32, config["o_lora_rank"]),
        "attention.compress_ratios": (ARRAY, (U32, config["compress_ratios"])),
        "attention.compress_rope_freq_base": (F32, config["compress_rope_theta"]),
        "hyper_connection.count": (U32, config["hc_mult"]),
        "hyper_connection.sinkhorn_iterations": (U32, config["hc_sinkhorn_iters"]),
        "hyper_connection.epsilon": (F32, config["hc_eps"]),
        "hash_layer_count": (U32, config["num_hash_layers"]),
        "swiglu_clamp_exp": limits,
        "swiglu_clamp_shexp": limits,
    }


def _kimi(config: Config) -> dict[str, Value | None]:
    """KimiK3Model.set_gguf_parameters."""
    linear, rank, rotated = config["linear_attn_config"], config["kv_lora_rank"], config["qk_rope_head_dim"]
    attending = [layer + 1 in linear["full_attn_layers"] for layer in range(config["num_hidden_layers"])]
    return {
        "rope.freq_base": None,
        **mixture({**config, "num_experts_per_tok": config["num_experts_per_token"]}),
        "attention.head_count_kv": (ARRAY, (U32, [int(each) for each in attending])),
        **{f"attention.{kind}_length": (U32, rank + rotated * (kind == "key")) for kind in ("key", "value")},
        "attention.key_length_mla": (U32, config["qk_nope_head_dim"] + rotated),
        "attention.value_length_mla": (U32, config["v_head_dim"]),
        "attention.kv_lora_rank": (U32, rank),
        "rope.dimension_count": (U32, rotated),
        "ssm.conv_kernel": (U32, linear["short_conv_kernel_size"]),
        "kda.head_dim": (U32, linear["head_dim"]),
        "expert_weights_scale": (F32, config["routed_scaling_factor"]),
        "expert_weights_norm": (BOOL, config["moe_renormalize"]),
        "expert_gating_func": (U32, 2),
        "expert_latent_length": (U32, config["routed_expert_hidden_size"]),
        "activation.situ_beta": (F32, 1.0),
        "activation.situ_linear_beta": (F32, 0.0),
        "attn_res.block_size": (U32, config["attn_res_block_size"]),
    }


def _kimi_tensors(config: Config, tensors: Tensors) -> Tensors:
    """KimiK3Model.modify_tensors: norms of scores are multiplied into these, and gates are of two kinds."""
    recurrent = {name.removesuffix("A_log") for name in tensors if name.endswith(".A_log")}
    modified = {}
    for name, values in _glm5_tensors(config, tensors).items():
        if name.endswith("_res_norm.weight"):
            continue
        if name.endswith("_res_proj.weight"):
            values = values * tensors[name.replace("_proj", "_norm")]
        if name.endswith(".g_proj.weight"):
            of_net = name.removesuffix("g_proj.weight") in recurrent
            name = name.replace("self_attn.g_proj", "ssm_g" if of_net else "attn_gate")
        modified[name] = values
    return modified


def _gpt(config: Config) -> Config:
    size = config.get("n_inner") or 4 * config["hidden_size"]
    return {"intermediate_size": size, "num_key_value_heads": config["num_attention_heads"]}


def _bloom(config: Config, tensors: Tensors) -> Tensors:
    """BloomModel.modify_tensors."""
    modified = dict(tensors)
    for name, values in tensors.items():
        if "query_key_value" in name:
            by_head = values.reshape(config["num_attention_heads"], 3, -1, *values.shape[1:])
            modified[name] = np.concatenate([by_head[:, each].reshape(-1, *values.shape[1:]) for each in range(3)])
    return modified


def _baichuan(config: Config, tensors: Tensors) -> Tensors:
    """BaichuanModel.modify_tensors, as before it called itself without end."""
    modified = {name: values for name, values in tensors.items() if "W_pack" not in name}
    for name in tensors.keys() - modified.keys():
        for part, rows in zip("qkv", np.split(tensors[name], 3), strict=True):
            own = name.replace("W_pack", f"{part}_proj")
            modified[own] = rows if part == "v" else permuted(rows, config["num_attention_heads"])
    return modified


def _deci(config: Config) -> dict[str, Value]:
    heads, kv_heads, sizes = _deci_layers(config)
    return {
        "attention.head_count": (ARRAY, (U32, heads)),
        "attention.head_count_kv": (ARRAY, (U32, kv_heads)),
        "feed_forward_length": (ARRAY, (U32, sizes)),
    }


def _deci_layers(config: Config) -> tuple[list[int], list[int], list[int]]:
    """DeciModel.__init__. It has no `intermediate_size` of blocks."""
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    groups = [each["attention"]["n_heads_in_group"] for each in config["block_configs"]]
    blocks = [each["ffn"] for each in config["block_configs"]]
    sizes = [
        each.get("intermediate_size") or -(-int(2 * (each.get("ffn_mult") or 0) * hidden / 3) // 256) * 256
        for each in blocks
    ]
    return [heads if group else 0 for group in groups], [heads // group if group else 0 for group in groups], sizes


def _deci_tensors(config: Config, tensors: Tensors) -> Tensors:
    """DeciModel.modify_tensors."""
    heads, kv_heads, _ = _deci_layers(config)
    modified = {}
    for name, values in tensors.items():
        counts = {"q_proj": heads, "k_proj": kv_heads}.get(name.split(".")[-2])
        modified[name] = values if counts is None else permuted(values, counts[int(name.split(".")[2])])
    return modified


def _jais_tensors(config: Config, tensors: Tensors) -> Tensors:
    """JaisModel.modify_tensors, of a checkpoint that stores its tied head."""
    embeddings = tensors["model.embed_tokens.weight"]
    scales = (
        np.float32(config["mup_embeddings_scale"]),
        np.float32(config["mup_output_alpha"] * config["mup_width_scale"]),
    )
    return {
        **tensors,
        "model.embed_tokens.weight": embeddings * scales[0],
        "lm_head.weight": embeddings * scales[1],
    }


_XIELU = ("alpha_n", "alpha_p", "beta", "eps")


def _xielu(tensors: Tensors) -> dict[str, Value]:
    """ApertusModel.modify_tensors; `beta` and `eps` are the same in all checkpoints."""
    ends = {part: [values for name, values in tensors.items() if name.endswith(f".{part}")] for part in _XIELU}
    layers = len(ends["alpha_n"])
    known = {"beta": [0.5] * layers, "eps": [-1e-6] * layers}
    return {
        f"xielu.{part}": (ARRAY, (F32, known.get(part) or [float(each[0]) for each in values]))
        for part, values in ends.items()
    }


CONVERSIONS = {
    "ApertusForCausalLM": Conversion(
        "apertus",
        {"attention_layernorm": "attn_norm", "feedforward_layernorm": "ffn_norm"},
        modified=lambda config, tensors: {name: each for name, each in tensors.items() if ".act_fn." not in name},
        listed=_xielu,
    ),
    "BaichuanForCausalLM": Conversion(
        "baichuan",
        {},
        modified=_baichuan,
        usual={"model_max_length": "max_position_embeddings"},
        given=lambda config: {"num_key_value_heads": config["num_attention_heads"]},
    ),
    "BloomForCausalLM": Conversion(
        "bloom",
        {
            "model.embed_norm": "token_embd_norm",
            "self_attention.query_key_value": "attn_qkv",
            "self_attention.dense": "attn_output",
            "mlp.dense_h_to_4h": "ffn_up",
            "mlp.dense_4h_to_h": "ffn_down",
        },
        lambda config: _NO_ROPE,
        modified=_bloom,
        usual={**_GPT, "seq_length": "max_position_embeddings"},
        given=_gpt,
    ),
    "DbrxForCausalLM": Conversion(
        "dbrx",
        {
            "norm_attn_norm.norm_1": "attn_norm",
            "norm_attn_norm.norm_2": "attn_output_norm",
            "norm_attn_norm.attn.Wqkv": "attn_qkv",
            "norm_attn_norm.attn.out_proj": "attn_output",
            "ffn.router.layer": "ffn_gate_inp",
            **{
                f"ffn.experts.#.{name}": f"ffn_{part}_exps"
                for part, name in zip(PARTS, ("w1", "v1", "w2"), strict=True)
            },
        },
        lambda config: {
            "attention.layer_norm_epsilon": (F32, 1e-5),
            "attention.clamp_kqv": (F32, config["attn_config"]["clip_qkv"]),
            "expert_count": (U32, config["ffn_config"]["moe_num_experts"]),
            "expert_used_count": (U32, config["ffn_config"]["moe_top_k"]),
            "rope.dimension_count": None,
        },
        usual={
            "d_model": "hidden_size",
            "n_heads": "num_attention_heads",
            "n_layers": "num_hidden_layers",
            "max_seq_len": "max_position_embeddings",
        },
        given=lambda config: {
            "intermediate_size": config["ffn_config"]["ffn_hidden_size"],
            "num_key_value_heads": config["attn_config"]["kv_n_heads"],
        },
    ),
    "DeciLMForCausalLM": Conversion(
        "deci",
        {},
        _deci,
        modified=_deci_tensors,
        given=lambda config: {"intermediate_size": 0, "num_key_value_heads": 0},
    ),
    "GPTBigCodeForCausalLM": Conversion(
        "starcoder",
        {
            "model.embed_positions": "position_embd",
            "ln_1": "attn_norm",
            "ln_2": "ffn_norm",
            "attn.c_attn": "attn_qkv",
            "attn.c_proj": "attn_output",
            "mlp.c_fc": "ffn_up",
            "mlp.c_proj": "ffn_down",
        },
        lambda config: {**_NO_ROPE, "attention.head_count_kv": (U32, 1)},
        usual=_GPT2,
        given=_gpt,
    ),
    "JAISLMHeadModel": Conversion(
        "jais",
        {
            "ln_1": "attn_norm",
            "ln_2": "ffn_norm",
            "attn.c_attn": "attn_qkv",
            "attn.c_proj": "attn_output",
            "mlp.c_fc2": "ffn_gate",
            "mlp.c_fc": "ffn_up",
            "mlp.c_proj": "ffn_down",
        },
        lambda config: {**_NO_ROPE, "attention.head_count_kv": None, "attention.max_alibi_bias": (F32, 8.0)},
        modified=_jais_tensors,
        usual=_GPT2,
        given=_gpt,
    ),
    "Jais2ForCausalLM": Conversion("jais2", {}),
    "MiniCPM3ForCausalLM": Conversion(
        "minicpm3",
        {
            **{name: part for name, part in LATENT.items() if "_proj" in name or "_layernorm" in name},
            "self_attn.kv_b_proj": "attn_kv_b",
        },
        lambda config: {
            "attention.q_lora_rank": (U32, config["q_lora_rank"]),
            "attention.kv_lora_rank": (U32, config["kv_lora_rank"]),
            "attention.key_length": (U32, config["qk_nope_head_dim"] + config["qk_rope_head_dim"]),
            "attention.value_length": None,
            "rope.dimension_count": (U32, config["qk_rope_head_dim"]),
        },
    ),
    "MptForCausalLM": Conversion(
        "mpt",
        {
            "norm_1": "attn_norm",
            "norm_2": "ffn_norm",
            "attn.Wqkv": "attn_qkv",
            "attn.out_proj": "attn_output",
            "ffn.up_proj": "ffn_up",
            "ffn.down_proj": "ffn_down",
        },
        lambda config: {
            **_NO_ROPE,
            "attention.head_count_kv": None,
            "attention.clamp_kqv": (F32, config["attn_config"]["clip_qkv"]),
            "attention.max_alibi_bias": (F32, config["attn_config"]["alibi_bias_max"]),
        },
        usual={
            "d_model": "hidden_size",
            "n_heads": "num_attention_heads",
            "n_layers": "num_hidden_layers",
            "max_seq_len": "max_position_embeddings",
            "layer_norm_epsilon": "layer_norm_eps",
        },
        given=_gpt,
    ),
    "DeepseekV4ForCausalLM": Conversion(
        "deepseek4",
        {
            **{f"{part}_norm": f"{part}_norm" for part in ("attn", "ffn")},
            **{
                f"attn.w{part}_{end}": f"attn_{name}_{end}"
                for part, name in (("q", "q"), ("o", "output"))
                for end in "ab"
            },
            **{f"attn.{part}norm": f"attn_{part}a_norm" for part in ("q_", "kv_")},
            "attn.wkv": "attn_kv",
            "attn.attn_sink": "attn_sinks.weight",
            "attn.indexer.wq_b": "indexer.attn_q_b",
            "attn.indexer.weights_proj": "indexer.proj",
            **{
                f"attn.{at}compressor.{name}": f"{own}_compressor_{part}"
                for at, own in (("", "attn"), ("indexer.", "indexer"))
                for name, part in (("wkv", "kv"), ("wgate", "gate"), ("norm", "norm"), ("ape", "ape.weight"))
            },
            "ffn.gate": "ffn_gate_inp",
            "ffn.gate.bias": "exp_probs_b.bias",
            "ffn.gate.tid2eid": "ffn_gate_tid2eid.weight",
            **{
                f"ffn.{at}.{name}": f"ffn_{part}_{end}"
                for at, end in (("experts.#", "exps"), ("shared_experts", "shexp"))
                for part, name in zip(PARTS, ("w1", "w3", "w2"), strict=True)
            },
            **{f"hc_{part}_{kind}": f"hc_{part}_{kind}.weight" for part in ("attn", "ffn") for kind in _STREAMS},
            **{f"model.hc_head.hc_{kind}": f"output_hc_{kind}.weight" for kind in _STREAMS},
        },
        _deepseek4,
        given=lambda config: {"intermediate_size": 1},
    ),
    "Glm5NextForConditionalGeneration": Conversion(
        "glm5-next",
        {
            **LATENT,
            **INDEXER,
            **{f"{part}_hc.{kind}": f"hc_{part}_{kind}.weight" for part in ("attn", "ffn") for kind in _STREAMS},
            **_NETS,
            "self_attn.indexer.index_kpool_compress_ape": "indexer_compressor_ape.weight",
            "self_attn.indexer.index_kpool_compress_gate": "indexer_compressor_gate",
        },
        _glm5,
        modified=_glm5_tensors,
        usual={"linear_num_heads": "num_attention_heads"},
    ),
    "KimiK3ForConditionalGeneration": Conversion(
        "kimi-k3",
        {
            **{name.replace("mlp.", "block_sparse_moe."): part for name, part in LATENT.items()},
            **_NETS,
            "ssm_g": "ssm_g",
            "attn_gate": "attn_gate",
            "block_sparse_moe.gate": "ffn_gate_inp",
            **{
                f"block_sparse_moe.experts.#.{name}": f"ffn_{part}_exps"
                for part, name in zip(PARTS, ("w1", "w3", "w2"), strict=True)
            },
            **{f"block_sparse_moe.routed_expert_{part}_proj": f"ffn_routed_{part}" for part in ("down", "up")},
            "self_attention_res_proj": "attn_res_score",
            "mlp_res_proj": "ffn_res_score",
            "model.output_attn_res_proj": "output_res_score",
        },
        _kimi,
        modified=_kimi_tensors,
    ),
    "NanbeigeForCausalLM": Conversion(
        "nanbeige",
        {},
        lambda config: {
            "num_loops": (U32, config["num_loops"]),
            "skip_loop_final_norm": (BOOL, config["skip_loop_final_norm"]),
        },
        modified=all_permuted,
    ),
}
ARCHITECTURES = {name: each.architecture for name, each in CONVERSIONS.items()}
converted = partial(named_conversion.converted, rows=CONVERSIONS)
