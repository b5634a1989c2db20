"""Hugging Face checkpoints to GGUF files, by the rules of llama.cpp's converters (conversion/*.py), for tests: those of
architectures that a table of names and some metadata describe. Written from those rules, with names of its own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from tests.models.weights.gguf.gguf_conversion import NAMES, latents_apart, permuted, tensor
from tests.models.weights.gguf.gguf_metadata import metadata
from tests.models.weights.gguf.gguf_writer import ARRAY, BOOL, F32, STRING, U32, Tensor, Value, gguf_bytes
from tests.models.weights.gguf.named_metadata import laguna, ling, minimax, mixture, muse

Config = Mapping[str, Any]
Tensors = Mapping[str, np.ndarray]
PARTS = ("gate", "up", "down")


class Conversion(NamedTuple):
    """Rules of one architecture.

    names: llama.cpp's names of a layer's modules, or of whole tensors, where they differ from NAMES; "#" stands for an
    expert's number. like: architecture whose metadata it has, too. own: further metadata. modified: tensors before they
    are named. usual: fields of the configuration under their usual names, by those of the file. given: usual fields
    that follow from others. listed: metadata from the tensors, under whole names. None in `own`: metadata that the
    file lacks.
    """

    architecture: str
    names: Mapping[str, str]
    own: Callable[[Config], Mapping[str, Value | None]] = lambda config: {}
    like: str = ""
    modified: Callable[[Config, Tensors], Tensors] = lambda config, tensors: tensors
    usual: Mapping[str, str] = MappingProxyType({})
    given: Callable[[Config], Config] = lambda config: {}
    listed: Callable[[Tensors], dict[str, Value]] = lambda tensors: {}


def _experts(within: str = "mlp", shared: str = "shared_experts") -> dict[str, str]:
    return {
        **{f"{within}.experts.#.{part}_proj": f"ffn_{part}_exps" for part in PARTS},
        **{f"{within}.{shared}.{part}_proj": f"ffn_{part}_shexp" for part in PARTS},
    }


LATENT = {
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.k_b_proj": "attn_k_b",
    "self_attn.v_b_proj": "attn_v_b",
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    **_experts(),
}
INDEXER = {
    "self_attn.indexer.wq_b": "indexer.attn_q_b",
    "self_attn.indexer.wk": "indexer.attn_k",
    "self_attn.indexer.k_norm": "indexer.k_norm",
    "self_attn.indexer.weights_proj": "indexer.proj",
}


def _indexer(config: Config) -> dict[str, Value]:
    own: dict[str, Value] = {
        "expert_gating_func": (U32, 2),
        "attention.indexer.head_count": (U32, config["index_n_heads"]),
        "attention.indexer.key_length": (U32, config["index_head_dim"]),
        "attention.indexer.top_k": (U32, config["index_topk"]),
    }
    if "indexer_types" in config:
        own["attention.indexer.types"] = (ARRAY, (BOOL, [kind == "full" for kind in config["indexer_types"]]))
    return own


def windows(config: Config) -> dict[str, Value]:
    slides = [kind == "sliding_attention" for kind in config["layer_types"]]
    return {
        "attention.sliding_window": (U32, config["sliding_window"]),
        "attention.sliding_window_pattern": (ARRAY, (BOOL, slides)),
    }


def _afmoe(config: Config) -> dict[str, Value]:
    return {**mixture(config), "attention.sliding_window": (U32, config["sliding_window"])}


def _hunyuan(config: Config) -> dict[str, Value]:
    return {
        **mixture(config),
        "expert_shared_feed_forward_length": (U32, config["moe_intermediate_size"]),
        "expert_weights_scale": (F32, config["router_scaling_factor"]),
    }


def _mellum(config: Config) -> dict[str, Value]:
    ropes = config["rope_parameters"]
    return {
        **mixture(config),
        **windows(config),
        "rope.freq_base_swa": (F32, ropes["sliding_attention"]["rope_theta"]),
        "rope.scaling.type": (STRING, "yarn"),
        "rope.scaling.factor": (F32, ropes["full_attention"]["factor"]),
        "rope.scaling.original_context_length": (U32, ropes["full_attention"]["original_max_position_embeddings"]),
    }


def _mimo(config: Config) -> dict[str, Value]:
    """MimoV2Model, which counts three layers that predict further tokens, whether there are any or not."""
    slides = [*config["hybrid_layer_pattern"], 1, 1, 1]
    heads = [config["swa_num_key_value_heads" if each else "num_key_value_heads"] for each in slides]
    return {
        **mixture(config),
        "block_count": (U32, len(slides)),
        "nextn_predict_layers": (U32, 3),
        "attention.head_count_kv": (ARRAY, (U32, heads)),
        "attention.sliding_window": (U32, config["sliding_window"]),
        "attention.sliding_window_pattern": (ARRAY, (U32, slides)),
        "attention.value_length": (U32, config["v_head_dim"]),
        "attention.value_scale": (F32, config["attention_value_scale"]),
        "rope.dimension_count": (U32, int(config["head_dim"] * config["partial_rotary_factor"])),
        "rope.freq_base_swa": (F32, config["swa_rope_theta"]),
        "attention.layer_norm_rms_epsilon": (F32, config["layernorm_epsilon"]),
    }


def _ling_tensors(config: Config, tensors: Tensors) -> Tensors:
    """BailingMoeV3Model.modify_tensors; what gates are of depends on a layer's kind."""
    modified, recurrent = {}, {name.removesuffix("A_log") for name in tensors if name.endswith(".A_log")}
    for name, values in latents_apart(config, tensors).items():
        if name.endswith("_conv1d.weight"):
            values = values.reshape(1, len(values), 1, -1)
        if name.endswith(".A_log"):
            values = np.exp(values).reshape(-1, 1)
        if name.removesuffix("g_proj.weight") in recurrent:
            name = name.replace("g_proj", "delta_gate")
        modified[name] = values
    return modified


def _muse_tensors(config: Config, tensors: Tensors) -> Tensors:
    """MuseGlimmerModel.modify_tensors: weights of norms of queries are the factor of their products."""
    modified = {}
    for name, values in _of_text(config, tensors).items():
        values = values + np.float32(name.endswith("layernorm.weight"))
        modified[name] = _permuted(config, name, values)
        if name.endswith("q_proj.weight"):
            size = config["head_dim"]
            modified[name.replace("q_proj", "q_norm")] = np.full(size, config["qk_scale_factor"], np.float32)
            modified[name.replace("q_proj", "k_norm")] = np.ones(size, np.float32)
    return modified


def _of_text(config: Config, tensors: Tensors) -> Tensors:
    return {
        name: values
        for name, values in tensors.items()
        if name.startswith(("model.layers.", "model.embed_tokens.", "model.norm.", "lm_head."))
    }


def _step(config: Config) -> dict[str, Value]:
    slides, other = [kind == "sliding_attention" for kind in config["layer_types"]], config["attention_other_setting"]
    heads = [other["num_attention_heads"] if each else config["num_attention_heads"] for each in slides]
    return {
        **mixture(config),
        **windows(config),
        "block_count": (U32, len(slides)),
        "nextn_predict_layers": (U32, config["num_nextn_predict_layers"]),
        "attention.head_count": (ARRAY, (U32, heads)),
        "attention.head_count_kv": (ARRAY, (U32, [1] * len(slides))),
        "rope.freq_base": (F32, config["rope_theta"][slides.index(False)]),
        "rope.freq_base_swa": (F32, config["rope_theta"][slides.index(True)]),
        "expert_shared_feed_forward_length": (U32, config["share_expert_dim"]),
        "expert_weights_scale": (F32, config["moe_router_scaling_factor"]),
        "attention.layer_norm_rms_epsilon": (F32, 1e-5),
        "leading_dense_block_count": (U32, 1),
        "swiglu_clamp_exp": (ARRAY, (F32, config["swiglu_limits"])),
        "swiglu_clamp_shexp": (ARRAY, (F32, config["swiglu_limits_shared"])),
    }


def _step_tensors(config: Config, tensors: Tensors) -> Tensors:
    """Step35Model.modify_tensors, and MiniMaxM3Model's."""
    return {name: values + np.float32(name.endswith("norm.weight")) for name, values in tensors.items()}


def all_permuted(config: Config, tensors: Tensors) -> Tensors:
    return {name: _permuted(config, name, values) for name, values in tensors.items()}


def _plamo_tensors(config: Config, tensors: Tensors) -> Tensors:
    """Plamo3Model.modify_tensors."""
    added = {"post_mixer_norm.weight": 1 / 5, "post_mlp_norm.weight": 1 / 5**1.5, "norm.weight": 1}
    offsets = {name: next((own for end, own in added.items() if name.endswith(end)), 0) for name in tensors}
    return {name: values + np.float32(offsets[name]) for name, values in tensors.items()}


def _swash(config: Config) -> dict[str, Value]:
    """GraniteSWAModel, which takes the layers without rope from no_rope_layers."""
    bases = config.get("layer_rope_theta", [1.0] * config["num_hidden_layers"])
    return {**windows(config), "attention.rope_pattern": (ARRAY, (BOOL, [base > 0 for base in bases]))}


def _bailing(config: Config, tensors: Tensors) -> Tensors:
    """BailingMoeModel.modify_tensors."""
    modified, size = {}, config["head_dim"]
    sizes = np.cumsum([config["num_attention_heads"] * size, config["num_key_value_heads"] * size])
    for name, values in tensors.items():
        if "query_key_value" in name:
            apart = zip("qkv", np.split(values, sizes), strict=True)
            modified |= {name.replace("query_key_value", f"{part}_proj"): rows for part, rows in apart}
        else:
            modified[name] = values
    return all_permuted(config, modified)


def _shared_granite(config: Config, tensors: Tensors) -> Tensors:
    """GraniteMoeModel.modify_tensors."""
    modified = {}
    for name, values in tensors.items():
        if name.endswith("shared_mlp.input_linear.weight"):
            halves = zip(("gate", "up"), np.split(values, 2), strict=True)
            modified |= {name.replace("input_linear", part): half for part, half in halves}
        else:
            modified[name] = _permuted(config, name, values)
    return modified


def _permuted(config: Config, name: str, values: np.ndarray) -> np.ndarray:
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    part = name.split(".")[-2]
    return permuted(values, heads[part]) if part in heads else values


CONVERSIONS = {
    "AfmoeForCausalLM": Conversion(
        "afmoe",
        {
            **_experts(),
            "self_attn.gate_proj": "attn_gate",
            "post_attention_layernorm": "post_attention_norm",
            "pre_mlp_layernorm": "ffn_norm",
            "post_mlp_layernorm": "post_ffw_norm",
            "mlp.router.gate": "ffn_gate_inp",
            "mlp.expert_bias": "exp_probs_b.bias",
        },
        _afmoe,
    ),
    "BailingMoeV3ForCausalLM": Conversion(
        "bailingmoe3",
        {
            **_experts(),
            **{name.replace("self_attn", "attention"): part for name, part in (NAMES | LATENT).items()},
            **{f"attention.{part}_conv1d": f"ssm_conv1d_{part}" for part in "qkv"},
            "attention.A_log": "ssm_a",
            "attention.dt_bias": "ssm_dt.bias",
            "attention.f_proj": "ssm_f_a",
            "attention.delta_gate": "ssm_g_a",
            "attention.g_proj": "attn_gate",
            "attention.b_proj": "ssm_beta",
            "attention.o_norm": "ssm_norm",
            "mlp.gate.expert_bias": "exp_probs_b.bias",
        },
        ling,
        modified=_ling_tensors,
    ),
    "BailingMoeForCausalLM": Conversion(
        "bailingmoe",
        {
            **_experts(),
            "attention.dense": "attn_output",
            **{f"attention.{part}_proj": f"attn_{part}" for part in "qkv"},
        },
        mixture,
        modified=_bailing,
    ),
    "ChatGLMModel": Conversion(
        "chatglm",
        {
            "self_attention.query_key_value": "attn_qkv",
            "self_attention.dense": "attn_output",
            "mlp.dense_h_to_4h": "ffn_up",
            "mlp.dense_4h_to_h": "ffn_down",
        },
        lambda config: {
            "rope.dimension_count": (U32, config["kv_channels"] // 2),
            "rope.freq_base": (F32, 10000.0 * config["rope_ratio"]),
        },
        usual={
            "num_layers": "num_hidden_layers",
            "seq_length": "max_position_embeddings",
            "ffn_hidden_size": "intermediate_size",
            "multi_query_group_num": "num_key_value_heads",
            "layernorm_epsilon": "rms_norm_eps",
            "padded_vocab_size": "vocab_size",
        },
    ),
    "DeepseekForCausalLM": Conversion("deepseek", _experts(), mixture, modified=all_permuted),
    "HYV3ForCausalLM": Conversion(
        "hy_v3",
        {
            **_experts("mlp", "shared_mlp"),
            "mlp.router.gate": "ffn_gate_inp",
            "mlp.expert_bias": "exp_probs_b",
        },
        _hunyuan,
    ),
    "DeepseekOCRForCausalLM": Conversion(
        "deepseek2-ocr",
        _experts(),
        lambda config: {
            **mixture({**config, "first_k_dense_replace": config["mlp_layer_types"].count("dense")}),
            "expert_weights_scale": (F32, config["routed_scaling_factor"]),
            "rope.dimension_count": (U32, 0),  # qk_rope_head_dim of a file without latent attention
        },
        modified=_of_text,
    ),
    "LagunaForCausalLM": Conversion(
        "laguna",
        {
            **_experts("mlp", "shared_expert"),
            "self_attn.g_proj": "attn_gate",
            "mlp.experts.e_score_correction_bias": "exp_probs_b.bias",
        },
        laguna,
    ),
    "MuseGlimmerForConditionalGeneration": Conversion(
        "muse-glimmer",
        {
            "self_attn.gate_proj": "attn_gate",
            "post_attention_layernorm": "post_attention_norm",
            "pre_feedforward_layernorm": "ffn_norm",
            "post_feedforward_layernorm": "post_ffw_norm",
        },
        muse,
        modified=_muse_tensors,
    ),
    "MiniMaxM3VLForCausalLM": Conversion(
        "minimax-m3",
        {
            **_experts("block_sparse_moe"),
            **{
                f"block_sparse_moe.experts.#.{name}": f"ffn_{part}_exps"
                for part, name in zip(PARTS, ("w1", "w3", "w2"), strict=True)
            },
            "block_sparse_moe.gate": "ffn_gate_inp",
            "block_sparse_moe.e_score_correction_bias": "exp_probs_b.bias",
            **{f"self_attn.index_{name}": f"indexer.{name}" for name in ("q_proj", "k_proj", "q_norm", "k_norm")},
        },
        minimax,
        modified=_step_tensors,
    ),
    "MellumForCausalLM": Conversion("mellum", _experts(), _mellum),
    "MiMoV2ForCausalLM": Conversion(
        "mimo2",
        {
            **_experts(),
            "self_attn.sinks": "attn_sinks.weight",
            "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
        },
        _mimo,
    ),
    "Plamo3ForCausalLM": Conversion(
        "plamo3",
        {
            "pre_mixer_norm": "attn_norm",
            "post_mixer_norm.weight": "post_attention_norm",
            "pre_mlp_norm": "ffn_norm",
            "post_mlp_norm.weight": "post_ffw_norm",
            "mixer.qkv_proj": "attn_qkv",
            **{f"mixer.{part}_norm": f"attn_{part}_norm" for part in "qk"},
            "mixer.o_proj": "attn_output",
        },
        lambda config: {
            "attention.sliding_window": (U32, config["window_size"]),
            "attention.sliding_window_pattern": (U32, config["sliding_window_pattern"]),
            "rope.freq_base_swa": (F32, config["rope_local_theta"]),
        },
        modified=_plamo_tensors,
    ),
    "GraniteSWAForCausalLM": Conversion(
        "granite_swa", {"self_attn.sinks": "attn_sinks.weight"}, _swash, "granite", all_permuted
    ),
    "GraniteMoeSWAForCausalLM": Conversion(
        "granite_swa",
        {
            "self_attn.sinks": "attn_sinks.weight",
            "block_sparse_moe.router.layer": "ffn_gate_inp",
            **{f"block_sparse_moe.experts.#.{part}_proj": f"ffn_{part}_exps" for part in PARTS},
            "shared_mlp.input_linear": "ffn_up_shexp",
            "shared_mlp.output_linear": "ffn_down_shexp",
        },
        lambda config: {
            **_swash(config),
            "expert_shared_feed_forward_length": (U32, config["shared_intermediate_size"]),
        },
        "granitemoe",
        all_permuted,
    ),
    "OrionForCausalLM": Conversion(
        "orion", {}, lambda config: {"attention.layer_norm_epsilon": (F32, config["rms_norm_eps"])}
    ),
    "QWenLMHeadModel": Conversion(
        "qwen",
        {
            "ln_1": "attn_norm",
            "ln_2": "ffn_norm",
            "attn.c_attn": "attn_qkv",
            "attn.c_proj": "attn_output",
            "mlp.w2": "ffn_gate",
            "mlp.w1": "ffn_up",
            "mlp.c_proj": "ffn_down",
        },
        usual={"rotary_emb_base": "rope_theta"},
    ),
    "Step3p5ForCausalLM": Conversion(
        "step35",
        {**_experts(), "self_attn.g_proj": "attn_gate", "mlp.gate.e_score_correction_bias": "exp_probs_b.bias"},
        _step,
        modified=_step_tensors,
        usual={"num_attention_groups": "num_key_value_heads"},
    ),
    "DeepseekV32ForCausalLM": Conversion("deepseek32", {**LATENT, **INDEXER}, _indexer, "deepseek2", latents_apart),
    "GlmMoeDsaForCausalLM": Conversion("glm-dsa", {**LATENT, **INDEXER}, _indexer, "deepseek2", latents_apart),
    "GraniteMoeSharedForCausalLM": Conversion(
        "granitemoe",
        {
            "block_sparse_moe.router.layer": "ffn_gate_inp",
            **{f"block_sparse_moe.experts.#.{part}_proj": f"ffn_{part}_exps" for part in PARTS},
            "shared_mlp.gate": "ffn_gate_shexp",
            "shared_mlp.up": "ffn_up_shexp",
            "shared_mlp.output_linear": "ffn_down_shexp",
        },
        lambda config: {"expert_shared_feed_forward_length": (U32, config["shared_intermediate_size"])},
        "granitemoe",
        _shared_granite,
    ),
}
ARCHITECTURES = {name: each.architecture for name, each in CONVERSIONS.items()}
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
_NUMBER = re.compile(r"\.experts\.(\d+)\.")


def converted(
    config: Config,
    tensors: Tensors,
    store: Callable[[str, np.ndarray], Tensor] = tensor,
    rows: Mapping[str, Conversion] = CONVERSIONS,
) -> bytes:
    """As gguf_conversion.converted, by the rules of `rows`."""
    own = rows[config["architectures"][0]]
    config = {"rope_theta": 10000.0, **{key: value for key, value in config.items() if value is not None}}
    config = {**config, **{usual: config[name] for name, usual in own.usual.items() if name in config}}
    config = {**config, **own.given(config)}
    names, written, stacks = {**NAMES, **own.names}, {}, {}
    for name, values in own.modified(config, tensors).items():
        match = _LAYER.fullmatch(name)
        number = _NUMBER.search(name)
        part = _NUMBER.sub(".experts.#.", match[2] if match else name)
        module, _, kind = part.rpartition(".")
        named = names[part] if part in names else f"{names[module]}.{kind}"
        named = f"blk.{match[1]}.{named}" if match else named
        if number is None:
            written[named] = values
        else:
            stacks.setdefault(named, {})[int(number[1])] = values
    written |= {name: np.stack([each[number] for number in sorted(each)]) for name, each in stacks.items()}
    about = metadata(own.like or own.architecture, config)
    about = {re.sub(f"^{own.like}[.]", f"{own.architecture}.", key): value for key, value in about.items()}
    about |= {"general.architecture": (STRING, own.architecture)}
    changes = {f"{own.architecture}.{key}": value for key, value in own.own(config).items()}
    about = {key: value for key, value in {**about, **changes}.items() if value is not None} | own.listed(tensors)
    return gguf_bytes(about, [store(name, values) for name, values in written.items()])
