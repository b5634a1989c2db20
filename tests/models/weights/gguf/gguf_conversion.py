"""Hugging Face checkpoints to GGUF files by the rules of llama.cpp's convert_hf_to_gguf.py, for tests.

Written from those rules, with a table of names of its own: it must not share what gguf_layout gets wrong.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from tests.models.weights.gguf.gguf_metadata import metadata
from tests.models.weights.gguf.gguf_writer import Tensor, gguf_bytes

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MixtralForCausalLM": "llama",
    "Ministral3ForCausalLM": "mistral3",
    "Qwen3MoeForCausalLM": "qwen3moe",
    "Phi3ForCausalLM": "phi3",
    "GraniteForCausalLM": "granite",
    "MiniCPMForCausalLM": "minicpm",
    "SeedOssForCausalLM": "seed_oss",
    "GemmaForCausalLM": "gemma",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3",
    "Gemma4ForCausalLM": "gemma4",
    "Olmo2ForCausalLM": "olmo2",
    "Olmo3ForCausalLM": "olmo2",
    "SmolLM3ForCausalLM": "smollm3",
    "CohereForCausalLM": "command-r",
    "Cohere2ForCausalLM": "cohere2",
    "Exaone4ForCausalLM": "exaone4",
    "Starcoder2ForCausalLM": "starcoder2",
    "NemotronForCausalLM": "nemotron",
    "Glm4ForCausalLM": "glm4",
    "Ernie4_5ForCausalLM": "ernie4_5",
    "HunYuanDenseV1ForCausalLM": "hunyuan-dense",
    "Qwen2MoeForCausalLM": "qwen2moe",
    "OlmoeForCausalLM": "olmoe",
    "Dots1ForCausalLM": "dots1",
    "DeepseekV2ForCausalLM": "deepseek2",
    "DeepseekV3ForCausalLM": "deepseek2",
    "YoutuForCausalLM": "deepseek2",
    "GptOssForCausalLM": "gpt-oss",
    "Llama4ForCausalLM": "llama4",
    "MiniMaxM2ForCausalLM": "minimax-m2",
    "HunYuanMoEV1ForCausalLM": "hunyuan-moe",
    "GPT2LMHeadModel": "gpt2",
    "GPTNeoXForCausalLM": "gptneox",
    "ExaoneForCausalLM": "exaone",
    "ArceeForCausalLM": "arcee",
    "OlmoForCausalLM": "olmo",
    "PhiForCausalLM": "phi2",
    "GraniteMoeForCausalLM": "granitemoe",
}
PERMUTED = ("llama", "mistral3", "granite", "minicpm", "smollm3", "arcee", "olmo", "granitemoe")
NORMS_PLUS_ONE = ("gemma", "gemma2", "gemma3", "nemotron")
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "block_sparse_moe.gate": "ffn_gate_inp",
    "gate_proj": "ffn_gate_exps",
    "up_proj": "ffn_up_exps",
    "down_proj": "ffn_down_exps",
    "w1": "ffn_gate_exps",
    "w3": "ffn_up_exps",
    "w2": "ffn_down_exps",
}
POST_NORMS = {"post_attention_layernorm": "post_attention_norm", "post_feedforward_layernorm": "post_ffw_norm"}
OWN_NAMES = {
    **dict.fromkeys(["gemma2", "gemma3"], {**POST_NORMS, "pre_feedforward_layernorm": "ffn_norm"}),
    "gemma4": {
        **POST_NORMS,
        "pre_feedforward_layernorm": "ffn_norm",
        "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
        "post_feedforward_layernorm_1": "post_ffw_norm_1",
        "post_feedforward_layernorm_2": "post_ffw_norm_2",
        "router.proj": "ffn_gate_inp",
        "per_layer_input_gate": "inp_gate",
        "per_layer_projection": "proj",
        "post_per_layer_input_norm": "post_norm",
        "model.embed_tokens_per_layer": "per_layer_token_embd",
        "model.per_layer_model_projection": "per_layer_model_proj",
        "model.per_layer_projection_norm": "per_layer_proj_norm",
    },
    **dict.fromkeys(["olmo2", "exaone4"], POST_NORMS),
    "starcoder2": {"mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down"},
    "seed_oss": {"post_attention_layernorm": "post_attention_norm"},
    "glm4": {"post_self_attn_layernorm": "post_attention_norm", "post_mlp_layernorm": "post_ffw_norm"},
    "hunyuan-dense": {"self_attn.query_layernorm": "attn_q_norm", "self_attn.key_layernorm": "attn_k_norm"},
}
for _shared, _architectures in {
    "mlp.shared_expert": ["qwen2moe"],
    "mlp.shared_experts": ["dots1", "deepseek2"],
    "feed_forward.shared_expert": ["llama4"],
}.items():
    for _architecture in _architectures:
        OWN_NAMES[_architecture] = {f"{_shared}.{part}_proj": f"ffn_{part}_shexp" for part in ("gate", "up", "down")}
OWN_NAMES["qwen2moe"]["mlp.shared_expert_gate"] = "ffn_gate_inp_shexp"
OWN_NAMES["deepseek2"] |= {
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.k_b_proj": "attn_k_b",
    "self_attn.v_b_proj": "attn_v_b",
}
OWN_NAMES["gpt-oss"] = {"mlp.router": "ffn_gate_inp", "post_attention_layernorm": "post_attention_norm"}
OWN_NAMES["hunyuan-moe"] = {
    **OWN_NAMES["hunyuan-dense"],
    "mlp.gate.wg": "ffn_gate_inp",
    **{f"mlp.shared_mlp.{part}_proj": f"ffn_{part}_shexp" for part in ("gate", "up", "down")},
}
OWN_NAMES["llama4"] |= {
    "feed_forward.router": "ffn_gate_inp",
    **{f"feed_forward.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
}
OWN_NAMES["exaone"] = {
    "ln_1": "attn_norm",
    "ln_2": "ffn_norm",
    "attn.attention.q_proj": "attn_q",
    "attn.attention.k_proj": "attn_k",
    "attn.attention.v_proj": "attn_v",
    "attn.attention.out_proj": "attn_output",
    "mlp.c_fc_0": "ffn_gate",
    "mlp.c_fc_1": "ffn_up",
    "mlp.c_proj": "ffn_down",
}
OWN_NAMES["gpt2"] = {
    "model.embed_positions": "position_embd",
    "ln_1": "attn_norm",
    "ln_2": "ffn_norm",
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
}
OWN_NAMES["gptneox"] = {
    "attention.query_key_value": "attn_qkv",
    "attention.dense": "attn_output",
    "mlp.dense_h_to_4h": "ffn_up",
    "mlp.dense_4h_to_h": "ffn_down",
}
OWN_NAMES["phi2"] = {"self_attn.dense": "attn_output", "mlp.fc1": "ffn_up", "mlp.fc2": "ffn_down"}
OWN_NAMES["granitemoe"] = {"block_sparse_moe.router.layer": "ffn_gate_inp"}
# Called otherwise than `.weight` and `.bias` in checkpoints.
BARE = {
    "self_attn.sinks": "attn_sinks.weight",
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    "block_sparse_moe.e_score_correction_bias": "exp_probs_b.bias",
    "layer_scalar": "layer_output_scale.weight",
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
}
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")
_EXPERT = re.compile(
    r"model\.layers\.(\d+)\.(?:(?:mlp|block_sparse_moe|feed_forward)\.)?experts\.(\d+)\.(\w+)\.(weight|bias)"
)
_BARE = re.compile(rf"model\.layers\.(\d+)\.({'|'.join(map(re.escape, BARE))})")


def tensor(name: str, values: np.ndarray) -> Tensor:
    kind, dtype = (26, "<i4") if values.dtype.kind == "i" else (0, "<f4")
    return name, values.shape[::-1], kind, values.astype(dtype).tobytes()


def converted(
    config: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    store: Callable[[str, np.ndarray], Tensor] = tensor,
) -> bytes:
    """The file of a checkpoint with this config.json and these tensors, all in float32 unless `store` says otherwise.

    store: llama.cpp's name of a tensor and its values -> what is written.
    """
    architecture = ARCHITECTURES[config["architectures"][0]]
    names = {**NAMES, **OWN_NAMES.get(architecture, {})}
    heads = {"self_attn.q_proj": config["num_attention_heads"], "self_attn.k_proj": config["num_key_value_heads"]}
    written, experts = {}, {}
    for name, values in latents_apart(config, tensors).items():
        if architecture in NORMS_PLUS_ONE and name.endswith("norm.weight"):
            values = values + np.float32(1)
        if match := _EXPERT.fullmatch(name):
            layer, expert, part, kind = match.groups()
            experts.setdefault(f"blk.{layer}.{names[part]}.{kind}", {})[int(expert)] = values
        elif match := _BARE.fullmatch(name):
            written[f"blk.{match[1]}.{BARE[match[2]]}"] = values
        elif match := _LAYER.fullmatch(name):
            layer, part, kind = match.groups()
            if architecture in PERMUTED and part in heads:
                values = permuted(values, heads[part])
            if architecture == "gptneox" and part == "attention.query_key_value":  # GPTNeoXModel.modify_tensors
                by_head = values.reshape(config["num_attention_heads"], 3, -1, *values.shape[1:])
                values = np.concatenate([by_head[:, each].reshape(-1, *values.shape[1:]) for each in range(3)])
            # The base class writes every tensor squeezed.
            written[f"blk.{layer}.{names[part]}.{kind}"] = values.squeeze()
        else:
            module, _, kind = name.rpartition(".")
            written[f"{names[module]}.{kind}"] = values
    written |= {name: np.stack([each[expert] for expert in sorted(each)]) for name, each in experts.items()}
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    for length in ("long", "short"):
        if f"{length}_factor" in rope:
            written[f"rope_factors_{length}.weight"] = np.asarray(rope[f"{length}_factor"], np.float32)
    if architecture == "gemma4":  # generate_extra_tensors
        half = config["global_head_dim"] // 2
        turned = int(half * rope["full_attention"]["partial_rotary_factor"])
        written["rope_freqs.weight"] = np.asarray([1.0] * turned + [1e30] * (half - turned), np.float32)
    return gguf_bytes(metadata(architecture, config), [store(name, values) for name, values in written.items()])


def latents_apart(config: Mapping[str, Any], tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """DeepseekV2Model.modify_tensors: kv_b_proj as two, of which that of keys is transposed."""
    apart = {}
    for name, values in tensors.items():
        if not name.endswith(".kv_b_proj.weight"):
            apart[name] = values
            continue
        by_head = values.reshape(config["num_attention_heads"], -1, values.shape[1])
        keys, heads_values = np.split(by_head, [config["qk_nope_head_dim"]], axis=1)
        apart[name.replace("kv_b", "k_b")] = np.ascontiguousarray(keys.swapaxes(1, 2))
        apart[name.replace("kv_b", "v_b")] = np.ascontiguousarray(heads_values)
    return apart


def permuted(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """LlamaModel.permute."""
    split = rows.reshape(num_heads, 2, rows.shape[0] // num_heads // 2, *rows.shape[1:])
    return split.swapaxes(1, 2).reshape(rows.shape)
