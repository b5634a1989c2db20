"""Hugging Face checkpoints of further architectures to GGUF files, by the rules of llama.cpp's converters
(conversion/*.py), for tests. Written from those rules, with names of its own, as gguf_conversion.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from statistics import NormalDist
from typing import Any

import numpy as np

from tests.models.weights.gguf import gguf_conversion as first
from tests.models.weights.gguf.gguf_conversion import NAMES, POST_NORMS, tensor
from tests.models.weights.gguf.gguf_writer import ARRAY, BOOL, F32, STRING, U32, Tensor, Value, gguf_bytes

ARCHITECTURES = {
    "Gemma3nForCausalLM": "gemma3n",
    "Glm4MoeForCausalLM": "glm4moe",
    "Ernie4_5_MoeForCausalLM": "ernie4_5-moe",
    "ExaoneMoeForCausalLM": "exaone-moe",
    "BailingMoeV2ForCausalLM": "bailingmoe2",
    "PhiMoEForCausalLM": "phimoe",
    "CohereForCausalLM": "command-r",
    "Cohere2MoeForCausalLM": "cohere2moe",
    "InternLM2ForCausalLM": "internlm2",
    "FalconForCausalLM": "falcon",
    "StableLmForCausalLM": "stablelm",
}
PARTS = ("gate", "up", "down")
SHARED = {f"mlp.shared_experts.{part}_proj": f"ffn_{part}_shexp" for part in PARTS}
OWN_NAMES: dict[str, Mapping[str, str]] = {
    "gemma3n": {
        **POST_NORMS,
        "pre_feedforward_layernorm": "ffn_norm",
        "altup.correction_coefs": "altup_correct_coef",
        "altup.correct_output_scale": "altup_correct_scale",
        "altup.prediction_coefs": "altup_predict_coef",
        "altup.modality_router": "altup_router",
        "altup.router_norm": "altup_router_norm",
        "laurel.linear_left": "laurel_l",
        "laurel.linear_right": "laurel_r",
        "laurel.post_laurel_norm": "laurel_post_norm",
        "per_layer_input_gate": "inp_gate",
        "per_layer_projection": "proj",
        "post_per_layer_input_norm": "post_norm",
        "model.embed_tokens_per_layer": "per_layer_token_embd",
        "model.per_layer_model_projection": "per_layer_model_proj",
        "model.per_layer_projection_norm": "per_layer_proj_norm",
    },
    "glm4moe": {"post_attention_layernorm": "post_attention_norm", **SHARED},
    **dict.fromkeys(["ernie4_5-moe", "exaone-moe", "cohere2moe"], SHARED),
    "internlm2": {
        "attention_norm": "attn_norm",
        "attention.wo": "attn_output",
        "feed_forward.w1": "ffn_gate",
        "feed_forward.w3": "ffn_up",
        "feed_forward.w2": "ffn_down",
        "ffn_norm": "ffn_norm",
    },
    "falcon": {
        "ln_attn": "attn_norm_2",
        "ln_mlp": "attn_norm",
        "self_attention.query_key_value": "attn_qkv",
        "self_attention.dense": "attn_output",
        "mlp.dense_h_to_4h": "ffn_up",
        "mlp.dense_4h_to_h": "ffn_down",
    },
    "bailingmoe2": {
        **SHARED,
        "attention.query_key_value": "attn_qkv",
        "attention.dense": "attn_output",
        "attention.query_layernorm": "attn_q_norm",
        "attention.key_layernorm": "attn_k_norm",
    },
}
_BERT = {
    "embeddings.word_embeddings": "token_embd",
    "embeddings.position_embeddings": "position_embd",
    "embeddings.token_type_embeddings": "token_types",
    "embeddings.LayerNorm": "token_embd_norm",
    "attention.self.query": "attn_q",
    "attention.self.key": "attn_k",
    "attention.self.value": "attn_v",
    "attention.output.dense": "attn_output",
    "attention.output.LayerNorm": "attn_output_norm",
    "intermediate.dense": "ffn_up",
    "output.dense": "ffn_down",
    "output.LayerNorm": "layer_output_norm",
}
_T5_MLP = {"wi_0": "gate", "wi_1": "up", "wi": "up", "wo": "down"}
_T5 = {
    "d_model": "hidden_size",
    "d_ff": "intermediate_size",
    "num_heads": "num_attention_heads",
    "num_layers": "num_hidden_layers",
    "n_positions": "max_position_embeddings",
}
# By model_type: the architecture, and the names of modules that differ from BERT's.
ENCODERS: dict[str, tuple[str, Mapping[str, str]]] = {
    "bert": ("bert", {}),
    "distilbert": (
        "bert",
        {
            **{f"attention.{part}_lin": f"attn_{part}" for part in "qkv"},
            "attention.out_lin": "attn_output",
            "sa_layer_norm": "attn_output_norm",
            "ffn.lin1": "ffn_up",
            "ffn.lin2": "ffn_down",
            "output_layer_norm": "layer_output_norm",
        },
    ),
    "nomic_bert": (
        "nomic-bert",
        {
            "emb_ln": "token_embd_norm",
            "attn.Wqkv": "attn_qkv",
            "attn.out_proj": "attn_output",
            "mlp.fc11": "ffn_up",
            "mlp.fc12": "ffn_gate",
            "mlp.fc2": "ffn_down",
            "norm1": "attn_output_norm",
            "norm2": "layer_output_norm",
        },
    ),
    "modernbert": (
        "modern-bert",
        {
            "embeddings.tok_embeddings": "token_embd",
            "embeddings.norm": "token_embd_norm",
            "final_norm": "output_norm",
            "attn_norm": "attn_norm",
            "attn.Wqkv": "attn_qkv",
            "attn.Wo": "attn_output",
            "mlp_norm": "ffn_norm",
            "mlp.Wi": "ffn_up",
            "mlp.Wo": "ffn_down",
        },
    ),
    "eurobert": ("eurobert", {"embed_tokens": "token_embd", "norm": "output_norm"}),
    "jina": (
        "jina-bert-v2",
        {"mlp.gated_layers": "ffn_up", "mlp.wo": "ffn_down", "mlp.layernorm": "layer_output_norm"},
    ),
    "jina_embeddings_v3": (
        "jina-bert-v3",
        {
            "emb_ln": "token_embd_norm",
            "mixer.Wqkv": "attn_qkv",
            "mixer.out_proj": "attn_output",
            "mlp.fc1": "ffn_up",
            "mlp.fc2": "ffn_down",
            "norm1": "attn_output_norm",
            "norm2": "layer_output_norm",
        },
    ),
    "t5": (
        "t5encoder",
        {
            **{f"0.SelfAttention.{part}": f"attn_{part}" for part in "qkvo"},
            "0.SelfAttention.relative_attention_bias": "attn_rel_b",
            "0.layer_norm": "attn_norm",
            "1.layer_norm": "ffn_norm",
            **{f"1.DenseReluDense.{part}": f"ffn_{name}" for part, name in _T5_MLP.items()},
            "shared": "token_embd",
            "encoder.final_layer_norm": "enc.output_norm",
        },
    ),
    "gemma3_text": (
        "gemma-embedding",
        {
            **POST_NORMS,
            "pre_feedforward_layernorm": "ffn_norm",
            "embed_tokens": "token_embd",
            "norm": "output_norm",
        },
    ),
}
_ENCODER_LAYER = re.compile(r"(?:(?:encoder|transformer)\.)?(?:layers?|block)\.(\d+)(?:\.layer)?\.(.+)\.(weight|bias)")
_UNWRITTEN = ("pooler.", "cls.", "head.", "decoder.", "classifier.")
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")
_EXPERT = re.compile(r"model\.layers\.(\d+)\..*experts\.(\d+)\.([a-z_0-9]+)\.weight")
_STACKED = {"model.altup_projections": "altup_proj", "model.altup_unembed_projections": "altup_unembd_proj"}
_CORRECTION = re.compile(r"model\.layers\.(\d+)\.mlp\.(?:(?:gate|moe_statics)\.)?(?:e_score_correction|expert)_bias")
_HEAD_NORM = re.compile(r"model\.layers\.(\d+)\.self_attn\.([qk])_layernorm\.norms\.(\d+)\.weight")


def converted(
    config: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    store: Callable[[str, np.ndarray], Tensor] = tensor,
) -> bytes:
    """As gguf_conversion.converted."""
    architecture = ARCHITECTURES[config["architectures"][0]]
    names = {**NAMES, **OWN_NAMES.get(architecture, {})}
    config = {"rope_theta": 10000.0} | {key: value for key, value in config.items() if value is not None}
    config = {**config, **(_falcon(config) if architecture == "falcon" else {})}
    written: dict[str, np.ndarray] = {}
    stacks: dict[str, dict[int, np.ndarray]] = {}
    for name, values in tensors.items():
        if name.endswith("_scale"):  # Gemma3NModel.filter_tensors
            name = f"{name}.weight"
        module, _, kind = name.rpartition(".")
        group, _, number = module.rpartition(".")
        if match := _EXPERT.fullmatch(name):
            layer, expert, part = match.groups()
            stacks.setdefault(f"blk.{layer}.{names[part]}.weight", {})[int(expert)] = values
        elif group in _STACKED:
            stacks.setdefault(f"{_STACKED[group]}.weight", {})[int(number)] = values
        elif match := _CORRECTION.fullmatch(name):
            written[f"blk.{match[1]}.exp_probs_b.bias"] = values.squeeze()
        elif match := _HEAD_NORM.fullmatch(name):  # StableLMModel._stack_qk_norm
            layer, part, head = match.groups()
            stacks.setdefault(f"blk.{layer}.attn_{part}_norm.weight", {})[int(head)] = values
        elif match := _LAYER.fullmatch(name):
            layer, part, kind = match.groups()
            own = {names.get(part, ""): values.squeeze()}
            if part in ("attention.wqkv", "self_attention.query_key_value") and architecture in ("internlm2", "falcon"):
                own = _groups_apart(config, values)
                own = own if architecture == "internlm2" else {"attn_qkv": np.concatenate([*own.values()])}
            written |= {f"blk.{layer}.{each}.{kind}": rows for each, rows in own.items()}
        else:
            written[f"{names[module]}.{kind}"] = values
    written |= {name: np.stack([each[number] for number in sorted(each)]) for name, each in stacks.items()}
    return gguf_bytes(metadata(architecture, config), [store(name, values) for name, values in written.items()])


def converted_encoder(config: Mapping[str, Any], tensors: Mapping[str, np.ndarray], *, split: bool = False) -> bytes:
    """The file of an encoder with this config.json and these tensors, named as without a prefix.

    split: whether JinaBERT's joined matrix of gate and up is written as two, as converters once did.
    """
    architecture, own = ENCODERS["jina" if "feed_forward_type" in config else config["model_type"]]
    names, written = {**NAMES, **_BERT, **own}, dict[str, np.ndarray]()
    block = "enc.blk" if architecture == "t5encoder" else "blk"
    for name, values in tensors.items():
        if name.startswith(_UNWRITTEN):
            continue
        if config["model_type"] == "gemma3_text" and name.endswith("norm.weight"):
            values = values + np.float32(1)
        if match := _ENCODER_LAYER.fullmatch(name):
            layer, part, kind = match.groups()
            parts = [(names[part], values)]
            if split and part == "mlp.gated_layers":
                parts = list(zip(("ffn_gate", "ffn_up"), np.split(values, 2), strict=True))
            written |= {f"{block}.{layer}.{each}.{kind}": half for each, half in parts}
        else:
            module, _, kind = name.rpartition(".")
            written[f"{names[module]}.{kind}"] = values
    about = _encoder_metadata(architecture, config)
    return gguf_bytes(about, [tensor(name, values) for name, values in written.items()])


def _encoder_metadata(architecture: str, config: Mapping[str, Any]) -> dict[str, Value]:
    def named(*names: str) -> Any:
        return next((config[name] for name in names if name in config), None)

    config = {**config, **{usual: config[name] for name, usual in _T5.items() if name in config}}
    heads = named("num_attention_heads", "n_heads")
    rope = config.get("rope_parameters") or {}
    own: dict[str, Value] = {
        "block_count": (U32, named("num_hidden_layers", "n_layers")),
        "context_length": (U32, config["max_position_embeddings"]),
        "embedding_length": (U32, named("hidden_size", "dim")),
        "feed_forward_length": (U32, named("hidden_dim", "intermediate_size")),
        "attention.head_count": (U32, heads),
        "attention.causal": (BOOL, False),
        "pooling_type": (U32, 1),
    }
    if architecture == "gemma-embedding":
        own |= {f"attention.{kind}_length": (U32, config["head_dim"]) for kind in ("key", "value")}
        own |= {
            "attention.head_count_kv": (U32, config["num_key_value_heads"]),
            "attention.layer_norm_rms_epsilon": (F32, 1e-6),
            "attention.sliding_window": (U32, config["sliding_window"]),
            "attention.sliding_window_pattern": (U32, 2),
            "rope.freq_base": (F32, 1e6),
        }
        del own["attention.causal"]
    else:
        own["attention.layer_norm_epsilon"] = (F32, config.get("layer_norm_eps", config.get("norm_eps", 1e-12)))
    if architecture == "t5encoder":
        own |= {f"attention.{kind}_length": (U32, config["d_kv"]) for kind in ("key", "value")}
        own["attention.layer_norm_rms_epsilon"] = (F32, config["layer_norm_epsilon"])
        own["attention.relative_buckets_count"] = (U32, config["relative_attention_num_buckets"])
        del own["pooling_type"], own["attention.causal"]
    if architecture == "eurobert":
        own |= {
            "attention.head_count_kv": (U32, config["num_key_value_heads"]),
            "attention.layer_norm_rms_epsilon": (F32, config["rms_norm_eps"]),
            "rope.freq_base": (F32, rope.get("rope_theta", 10000.0)),
        }
    if architecture == "modern-bert":
        own |= {
            "attention.layer_norm_epsilon": (F32, 1e-5),
            "attention.sliding_window": (U32, config["local_attention"]),
            "attention.sliding_window_pattern": (U32, config["global_attn_every_n_layers"]),
            "rope.freq_base": (F32, 160_000.0),
            "rope.freq_base_swa": (F32, 10_000.0),
            "hidden_activation": (STRING, config.get("hidden_activation", "gelu")),
        }
    if "rope_theta" in rope:
        own["rope.freq_base"] = (F32, rope["rope_theta"])
    return {
        "general.architecture": (STRING, architecture),
        **{f"{architecture}.{key}": value for key, value in own.items()},
        "tokenizer.ggml.tokens": (ARRAY, (STRING, [str(token) for token in range(config["vocab_size"])])),
        "tokenizer.ggml.token_type_count": (U32, config.get("type_vocab_size", 1)),
        "tokenizer.ggml.bos_token_id": (U32, 1),
        "tokenizer.ggml.eos_token_id": (U32, 2),
    }


def _groups_apart(config: Mapping[str, Any], values: np.ndarray) -> dict[str, np.ndarray]:
    """InternLM2Model and FalconModel: rows of queries, keys and values, of which groups of heads have each in turn."""
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    apart = values.reshape(groups, heads // groups + 2, -1, *values.shape[1:])
    queries, keys, own = (part.reshape(-1, *values.shape[1:]) for part in (apart[:, :-2], apart[:, -2], apart[:, -1]))
    if "InternLM2ForCausalLM" in config["architectures"]:
        queries, keys = first.permuted(queries, heads), first.permuted(keys, groups)
    return {"attn_q": queries, "attn_k": keys, "attn_v": own}


def _falcon(config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "num_key_value_heads": config["num_kv_heads"] if config["new_decoder_architecture"] else 1,
        "intermediate_size": config["ffn_hidden_size"],
        "layer_norm_eps": config["layer_norm_epsilon"],
    }


def metadata(architecture: str, config: Mapping[str, Any]) -> dict[str, Value]:
    own = _OWN_METADATA.get(architecture, lambda _: {})(config)
    return {**first.metadata(architecture, config), **{f"{architecture}.{key}": value for key, value in own.items()}}


def _gemma3n(config: Mapping[str, Any]) -> dict[str, Value]:
    shares, sizes = config["activation_sparsity_pattern"], config["intermediate_size"]
    quantiles = [NormalDist().inv_cdf(share) if share else -np.inf for share in shares]
    sliding = [kind == "sliding_attention" for kind in config["layer_types"]]
    return {
        "feed_forward_length": (ARRAY, (U32, sizes)),
        "attention.sliding_window": (U32, config["sliding_window"]),
        "attention.sliding_window_pattern": (ARRAY, (BOOL, sliding)),
        "attention.shared_kv_layers": (U32, config["num_kv_shared_layers"]),
        "altup.active_idx": (U32, config["altup_active_idx"]),
        "altup.num_inputs": (U32, config["altup_num_inputs"]),
        "embedding_length_per_layer_input": (U32, config["hidden_size_per_layer_input"]),
        "final_logit_softcapping": (F32, config["final_logit_softcapping"]),
        "activation_sparsity_scale": (ARRAY, (F32, quantiles)),
    }


def _experts(config: Mapping[str, Any]) -> dict[str, Value]:
    """Return the metadata of experts that TextModel.set_gguf_parameters writes."""
    named = {
        "expert_count": ("n_routed_experts", "num_experts", "moe_num_experts", "num_local_experts"),
        "expert_used_count": ("num_experts_per_tok", "moe_k"),
        "expert_group_count": ("n_group",),
        "expert_group_used_count": ("topk_group",),
        "expert_feed_forward_length": ("moe_intermediate_size",),
    }
    found = {key: next((config[name] for name in names if name in config), None) for key, names in named.items()}
    return {key: (U32, value) for key, value in found.items() if value is not None}


def _glm4moe(config: Mapping[str, Any]) -> dict[str, Value]:
    return {
        **_experts(config),
        "expert_shared_count": (U32, config["n_shared_experts"]),
        "leading_dense_block_count": (U32, config["first_k_dense_replace"]),
        "expert_gating_func": (U32, 2),
        "expert_weights_scale": (F32, config["routed_scaling_factor"]),
        "expert_weights_norm": (BOOL, config["norm_topk_prob"]),
        "block_count": (U32, config["num_hidden_layers"] + config["num_nextn_predict_layers"]),
        "nextn_predict_layers": (U32, config["num_nextn_predict_layers"]),
    }


def _ernie(config: Mapping[str, Any]) -> dict[str, Value]:
    return {
        **_experts(config),
        "interleave_moe_layer_step": (U32, config["moe_layer_interval"]),
        "leading_dense_block_count": (U32, config["moe_layer_start_index"]),
        "expert_shared_count": (U32, config["moe_num_shared_experts"]),
    }


def _sigmoid(config: Mapping[str, Any]) -> dict[str, Value]:
    """ExaoneMoEModel and BailingMoeV2Model."""
    own: dict[str, Value] = {
        **_experts(config),
        "expert_shared_count": (U32, config["num_shared_experts"]),
        "expert_gating_func": (U32, 2),
        "expert_weights_scale": (F32, config["routed_scaling_factor"]),
        "expert_weights_norm": (BOOL, config["norm_topk_prob"]),
        "leading_dense_block_count": (U32, config["first_k_dense_replace"]),
    }
    if "layer_types" in config:
        sliding = [kind == "sliding_attention" for kind in config["layer_types"]]
        own["attention.sliding_window"] = (U32, config["sliding_window"])
        own["attention.sliding_window_pattern"] = (ARRAY, (BOOL, sliding))
    return own


_OWN_METADATA = {
    "gemma3n": _gemma3n,
    "glm4moe": _glm4moe,
    "ernie4_5-moe": _ernie,
    **dict.fromkeys(["exaone-moe", "bailingmoe2"], _sigmoid),
    "phimoe": _experts,
    "command-r": lambda config: {
        "logit_scale": (F32, config["logit_scale"]),
        "rope.scaling.type": (STRING, "none"),
    },
    "cohere2moe": lambda config: {
        **_experts({**config, "moe_intermediate_size": config["intermediate_size"]}),
        "feed_forward_length": (U32, config["prefix_dense_intermediate_size"]),
        "logit_scale": (F32, config["logit_scale"]),
        "attention.sliding_window": (U32, config["sliding_window"]),
        "attention.sliding_window_pattern": (
            ARRAY,
            (BOOL, [kind == "sliding_attention" for kind in config["layer_types"]]),
        ),
        "leading_dense_block_count": (U32, 1),
        "expert_weights_norm": (BOOL, config["norm_topk_prob"]),
        "expert_gating_func": (U32, 2),
        "expert_shared_count": (U32, config["num_shared_experts"]),
        "rope.scaling.type": (STRING, "none"),
    },
    "stablelm": lambda config: {"use_parallel_residual": (BOOL, config["use_parallel_residual"])},
}
