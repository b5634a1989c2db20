"""Names and storage of a model's tensors in llama.cpp: a row for each of its architectures.

Taken from its converters (convert_hf_to_gguf.py, gguf-py/gguf/constants.py). Metadata is read by the family
of the architecture, jaxengine.models.causal_lm.CausalLM.gguf_architecture.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

_NONE: Mapping[str, str] = MappingProxyType({})


def _names(pairs: str) -> dict[str, str]:
    """Return the checkpoint's names by llama.cpp's, from pairs of the two that are separated by commas."""
    return dict(pair.split() for pair in pairs.split(","))


def _mlp(module: str, end: str = "", parts: Sequence[str] = ("gate", "up", "down")) -> dict[str, str]:
    """Return the names of the projections of an MLP in `module`. end: that of llama.cpp's names."""
    return {f"ffn_{part}{end}": f"{module}.{part}_proj" for part in parts}


_GLOBAL = _names(
    "token_embd model.embed_tokens, output_norm model.norm, output lm_head, position_embd model.embed_positions, "
    "per_layer_token_embd model.embed_tokens_per_layer, per_layer_model_proj model.per_layer_model_projection, "
    "per_layer_proj_norm model.per_layer_projection_norm, altup_proj model.altup_projections.{expert}, "
    "altup_unembd_proj model.altup_unembed_projections.{expert}, dense_2 dense.0.linear, dense_3 dense.1.linear, "
    "cls.output score, token_embd_norm model.embed_norm"
)
_LAYER = {
    **_names(
        "attn_norm input_layernorm, attn_q self_attn.q_proj, attn_k self_attn.k_proj, attn_v self_attn.v_proj, "
        "attn_output self_attn.o_proj, attn_q_norm self_attn.q_norm, attn_k_norm self_attn.k_norm, "
        "ffn_norm post_attention_layernorm"
    ),
    **_mlp("mlp"),
    "ffn_gate_inp": "mlp.gate",
    **_mlp("mlp.experts.{expert}", "_exps"),
}
_LAYER_TENSOR = re.compile(
    r"blk\.(0|[1-9][0-9]{0,5})\.((?:(?:indexer|shortconv)\.)?[a-z0-9_]+)(?:\.(weight|bias|scale|input_scale))?"
)
_GLOBAL_TENSOR = re.compile(r"([a-z_0-9]+(?:\.[a-z]+)?)\.(weight|bias|scale|input_scale)")
# Files of old converters have each expert's matrix as a tensor; new ones may join two matrices of all experts.
_ONE_EXPERT = re.compile(r"(blk\.[0-9]+\.ffn_(?:gate|up|down))\.(0|[1-9][0-9]{0,3})(\.[a-z_]+)")
_JOINED_EXPERTS = re.compile(r"(blk\.[0-9]+\.ffn_)gate_up(_exps\.[a-z_]+)")
_MIXTRAL = _names(
    "ffn_gate_inp block_sparse_moe.gate, ffn_gate_exps block_sparse_moe.experts.{expert}.w1, "
    "ffn_up_exps block_sparse_moe.experts.{expert}.w3, ffn_down_exps block_sparse_moe.experts.{expert}.w2"
)
_SHARED = _mlp("mlp.shared_experts", "_shexp")
_MINIMAX = {"exp_probs_b": "block_sparse_moe.e_score_correction_bias"}
_CORRECTION = {"exp_probs_b": "mlp.gate.e_score_correction_bias"}
_HUNYUAN = {"attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"}
_LATENT = _names(
    "attn_q_a self_attn.q_a_proj, attn_q_a_norm self_attn.q_a_layernorm, attn_q_b self_attn.q_b_proj, "
    "attn_kv_a_mqa self_attn.kv_a_proj_with_mqa, attn_kv_a_norm self_attn.kv_a_layernorm, "
    "attn_kv_b self_attn.kv_b_proj, attn_k_b self_attn.k_b_proj, attn_v_b self_attn.v_b_proj"
)
_INDEXER = {
    f"indexer.{part}": f"self_attn.indexer.{name}"
    for part, name in (("attn_q_b", "wq_b"), ("attn_k", "wk"), ("k_norm", "k_norm"), ("proj", "weights_proj"))
}
_LLAMA4 = {
    "ffn_gate_inp": "feed_forward.router",
    **_mlp("feed_forward"),
    **_mlp("feed_forward.experts.{expert}", "_exps"),
    **_mlp("feed_forward.shared_expert", "_shexp"),
}
_W = {"gate": "w1", "up": "w3", "down": "w2"}
_SHARED_EXPERT = {"ffn_gate_inp_shexp": "mlp.shared_expert_gate", **_mlp("mlp.shared_expert", "_shexp")}
_GATE_ROW = frozenset(("ffn_gate_inp_shexp",))
_DELTA = _names(
    "post_attention_norm post_attention_layernorm, attn_qkv linear_attn.in_proj_qkv, "
    "attn_gate linear_attn.in_proj_z, ssm_in linear_attn.in_proj_qkvz, ssm_ba linear_attn.in_proj_ba, "
    "ssm_alpha linear_attn.in_proj_a, ssm_beta linear_attn.in_proj_b, ssm_conv1d linear_attn.conv1d, "
    "ssm_norm linear_attn.norm, ssm_out linear_attn.out_proj"
)
_DELTA_BARE = {"ssm_a": "linear_attn.A_log", "ssm_dt": "linear_attn.dt_bias"}
_LFM2 = {
    **_names("attn_norm operator_norm, ffn_norm ffn_norm, attn_output self_attn.out_proj"),
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
    **_names("ffn_gate_inp mixer.gate, ffn_latent_down mixer.fc1_latent_proj, ffn_latent_up mixer.fc2_latent_proj"),
    **_mlp("mixer", parts=("up", "down")),
    **_mlp("mixer.experts.{expert}", "_exps", parts=("up", "down")),
    **_mlp("mixer.shared_experts", "_shexp", parts=("up", "down")),
}
_NEMOTRON_H_BARE = {part: f"mixer.{name}" for part, name in _MAMBA_BARE.items()}
_NEMOTRON_H_BARE["exp_probs_b"] = "mixer.gate.e_score_correction_bias"
_GRANITE_HYBRID = {
    "ffn_gate_inp": "block_sparse_moe.router.layer",
    **_mlp("block_sparse_moe.experts.{expert}", "_exps"),
    **{part: f"mamba.{name}" for part, name in _MAMBA.items()},
    **{f"ffn_{part}{end}": f"shared_mlp.{part}_proj" for part in ("gate", "up") for end in ("", "_shexp")},
    **{f"ffn_down{end}": "shared_mlp.output_linear" for end in ("", "_shexp")},
}
_FALCON_H1 = {**{part: f"mamba.{name}" for part, name in _MAMBA.items()}, **_mlp("feed_forward")}
_NETS = {
    **{f"ssm_conv1d_{part}": f"self_attn.{part}_conv1d" for part in "qkv"},
    **{f"ssm_{part}": f"self_attn.{part}_proj" for part in ("f_a", "f_b", "g_a", "g_b")},
    **_names("ssm_beta self_attn.b_proj, ssm_norm self_attn.o_norm"),
}
_KIMI = {**_LATENT, **_NETS, **_MIXTRAL, **_mlp("block_sparse_moe.shared_experts", "_shexp")}
_KIMI_BARE = _names(
    "ssm_a self_attn.A_log, ssm_dt self_attn.dt_bias, exp_probs_b block_sparse_moe.gate.e_score_correction_bias"
)
_SCAN = {"ssm_in": "in_proj", "ssm_conv1d": "conv1d", "ssm_x": "x_proj", "ssm_dt": "dt_proj", "ssm_out": "out_proj"}
_SCAN_BARE = {"ssm_a": "A_log", "ssm_d": "D"}
_JAMBA = {
    "ffn_norm": "pre_ff_layernorm",
    **{part: f"mamba.{name}" for part, name in _SCAN.items()},
    **{f"ssm_{part}_norm": f"mamba.{part}_layernorm" for part in ("dt", "b", "c")},
    "ffn_gate_inp": "feed_forward.router",
    **_mlp("feed_forward"),
    **_mlp("feed_forward.experts.{expert}", "_exps"),
}
_POST_NORMS = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
_GEMMA = {**_POST_NORMS, "ffn_norm": "pre_feedforward_layernorm"}
_PER_LAYER = _names("inp_gate per_layer_input_gate, proj per_layer_projection, post_norm post_per_layer_input_norm")
_GEMMA3N = {
    **_GEMMA,
    **_PER_LAYER,
    **_names(
        "altup_correct_coef altup.correction_coefs, altup_predict_coef altup.prediction_coefs, "
        "altup_router altup.modality_router, altup_router_norm altup.router_norm, laurel_l laurel.linear_left, "
        "laurel_r laurel.linear_right, laurel_post_norm laurel.post_laurel_norm"
    ),
}
_GEMMA4 = {
    **_GEMMA,
    **_PER_LAYER,
    **_names(
        "pre_ffw_norm_2 pre_feedforward_layernorm_2, post_ffw_norm_1 post_feedforward_layernorm_1, "
        "post_ffw_norm_2 post_feedforward_layernorm_2, ffn_gate_inp router.proj"
    ),
    **_mlp("experts.{expert}", "_exps"),
}
_BERT = {
    **{f"attn_{part[0]}": f"attention.self.{part}" for part in ("query", "key", "value")},
    **_names(
        "attn_output attention.output.dense, attn_output_norm attention.output.LayerNorm, ffn_up intermediate.dense, "
        "ffn_down output.dense, layer_output_norm output.LayerNorm"
    ),
}
_BERT_TABLES = _names(
    "token_embd model.embeddings.word_embeddings, token_types model.embeddings.token_type_embeddings, "
    "position_embd model.embeddings.position_embeddings, token_embd_norm model.embeddings.LayerNorm, "
    "cls model.pooler.dense, cls.output model.classifier"
)
_BERT_LAYERS = "model.encoder.layer"


class GGUFLayout(NamedTuple):
    """Storage of the tensors of one architecture.

    Attributes:
      parts: checkpoint modules of a layer's tensors, by llama.cpp's name, where they differ from _LAYER. "{expert}"
        in a module: the tensor's first axis is that of the experts.
      permuted: whether rows of q and k are in the order in which llama.cpp rotates neighbours (gguf/file.py,
        unpermute_rows).
      permuted_biases: whether the biases of q and k are in that order too, if their rows are.
      norm_offset: number that the converter has added to the weights of norms, except those in a delta net.
      decay: factor of exp(A_log), the decays of a layer, in the file.
      norms: end of the checkpoint's names of these norms.
      bare: checkpoint names, without `.weight` or `.bias`, of a layer's tensors, by llama.cpp's name.
      rows: llama.cpp's names of a layer's vectors that represent a matrix of one row.
      vectors: llama.cpp's names of a layer's vectors that are stored with more axes.
      factors: checkpoint names of a layer's `.scale` tensors that are weights of their own, by llama.cpp's name.
      layers: what the checkpoint names of a layer's modules begin with, before its number.
      tables: checkpoint modules outside of layers, by llama.cpp's name, where they differ from _GLOBAL.
      numbers: checkpoint names of a layer's tensors of one number, by the metadata that list it for each layer.
    """

    parts: Mapping[str, str] = _NONE
    permuted: bool = False
    permuted_biases: bool = True
    norm_offset: float = 0.0
    decay: float = -1.0
    norms: str = "norm.weight"
    bare: Mapping[str, str] = _NONE
    rows: frozenset[str] = frozenset()
    vectors: frozenset[str] = frozenset()
    factors: Mapping[str, str] = _NONE
    layers: str = "model.layers"
    tables: Mapping[str, str] = _NONE
    numbers: Mapping[str, str] = _NONE

    def canonical_name(self, name: str) -> str:
        """Return the checkpoint's name of a file's tensor: `blk.3.attn_q.weight` becomes
        `model.layers.3.self_attn.q_proj.weight`. An unknown name is returned unchanged.
        """
        if match := _LAYER_TENSOR.fullmatch(name):
            layer, part, kind = match.groups()
            if kind == "scale" and part in self.factors:
                return f"{self.layers}.{layer}.{self.factors[part]}"
            if part in self.bare:
                return f"{self.layers}.{layer}.{self.bare[part]}"
            if kind is None:
                return name
            module = self.parts.get(part) or _LAYER.get(part)
            return name if module is None else f"{self.layers}.{layer}.{module}.{kind}"
        if match := _GLOBAL_TENSOR.fullmatch(name):
            part, kind = match.groups()
            module = self.tables.get(part) or _GLOBAL.get(part)
            return name if module is None else f"{module}.{kind}"
        return name

    def canonical_names(self, name: str) -> tuple[str, ...]:
        """Return the checkpoint's names of the tensors that the rows of a file's tensor consist of, in equal parts and
        in order; with "{expert}" if there is one for each expert.
        """
        if match := _ONE_EXPERT.fullmatch(name):
            stem, expert, kind = match.groups()
            return (self.canonical_name(f"{stem}_exps{kind}").replace("{expert}", expert),)
        if match := _JOINED_EXPERTS.fullmatch(name):
            return tuple(self.canonical_name(match[1] + half + match[2]) for half in ("gate", "up"))
        return (self.canonical_name(name),)

    def offset_of(self, name: str) -> float:
        """Return what the converter has added to the checkpoint's tensor `name`."""
        is_norm = name.endswith(self.norms) and not name.endswith(".linear_attn.norm.weight")
        return self.norm_offset if is_norm else 0.0

    def usual_shape(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the checkpoint's shape of the file's tensor `name` of this shape, if it is the single row of a matrix,
        a vector with more axes or a convolution with axes of one entry; of others the shape itself.
        """
        match = _LAYER_TENSOR.fullmatch(name)
        part = match[2] if match is not None else ""
        if part.startswith("ssm_conv1d_"):
            return tuple(size for size in shape if size > 1)
        if part in self.vectors:
            return (math.prod(shape),)
        return (1, *shape) if part in self.rows and len(shape) == 1 else shape

    @property
    def heads(self) -> dict[str, str]:
        """Fields with the numbers of heads whose rows are permuted, by the checkpoint modules with these rows."""
        names = {"attn_q": "attention.head_count", "attn_k": "attention.head_count_kv"}
        return {{**_LAYER, **self.parts}[part]: key for part, key in names.items()} if self.permuted else {}


def _own(pairs: str) -> GGUFLayout:
    """Return the layout of an architecture that differs in its names alone, as `_names` has them."""
    return GGUFLayout(_names(pairs))


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
            **_mlp("block_sparse_moe.shared_experts", "_shexp"),
            **{f"indexer.{name}": f"self_attn.index_{name}" for name in ("q_proj", "k_proj", "q_norm", "k_norm")},
        },
        norm_offset=1.0,
        bare=_MINIMAX,
    ),
    "hunyuan-moe": GGUFLayout({**_HUNYUAN, "ffn_gate_inp": "mlp.gate.wg", **_mlp("mlp.shared_mlp", "_shexp")}),
    "deepseek": GGUFLayout(_SHARED, permuted=True),
    "bailingmoe": GGUFLayout({**_SHARED, "attn_output": "attention.dense"}, permuted=True),
    **dict.fromkeys(("olmoe", "jais2", "eurobert", "orion", "mellum", "command-r", "cohere2"), GGUFLayout()),
    "mimo2": GGUFLayout({"attn_qkv": "self_attn.qkv_proj"}, bare={**_CORRECTION, "attn_sinks": "self_attn.sinks"}),
    "step35": GGUFLayout({**_SHARED, "attn_gate": "self_attn.g_proj"}, norm_offset=1.0, bare=_CORRECTION),
    "afmoe": GGUFLayout(
        _SHARED
        | _names(
            "attn_gate self_attn.gate_proj, post_attention_norm post_attention_layernorm, "
            "ffn_norm pre_mlp_layernorm, post_ffw_norm post_mlp_layernorm, ffn_gate_inp mlp.router.gate"
        ),
        bare={"exp_probs_b": "mlp.expert_bias"},
    ),
    "laguna": GGUFLayout(
        {**_mlp("mlp.shared_expert", "_shexp"), "attn_gate": "self_attn.g_proj"},
        bare={"exp_probs_b": "mlp.experts.e_score_correction_bias"},
    ),
    "muse-glimmer": GGUFLayout(
        {**_GEMMA, "attn_gate": "self_attn.gate_proj"}, permuted=True, norm_offset=1.0, norms="layernorm.weight"
    ),
    "deepseek2-ocr": GGUFLayout(_SHARED),
    "hy_v3": GGUFLayout(
        {"ffn_gate_inp": "mlp.router.gate", **_mlp("mlp.shared_mlp", "_shexp")},
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
        bare={"attn_sinks": "self_attn.sinks"},
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
            **_names(
                "attn_qkv attention.query_key_value, attn_output attention.dense, "
                "attn_q_norm attention.query_layernorm, attn_k_norm attention.key_layernorm"
            ),
        },
        bare={"exp_probs_b": "mlp.gate.expert_bias"},
    ),
    "phimoe": GGUFLayout(_MIXTRAL),
    "cohere2moe": GGUFLayout(_SHARED),
    "internlm2": GGUFLayout(
        _names(
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
        _names(
            "attn_qkv attn.Wqkv, attn_output attn.out_proj, attn_output_norm norm1, ffn_up mlp.fc11, "
            "ffn_gate mlp.fc12, ffn_down mlp.fc2, layer_output_norm norm2"
        ),
        layers="model.encoder.layers",
        tables={**_BERT_TABLES, "token_embd_norm": "model.emb_ln"},
    ),
    "jina-bert-v3": GGUFLayout(
        _names(
            "attn_qkv mixer.Wqkv, attn_output mixer.out_proj, attn_output_norm norm1, ffn_up mlp.fc1, "
            "ffn_down mlp.fc2, layer_output_norm norm2"
        ),
        layers="model.encoder.layers",
        tables={**_BERT_TABLES, "token_embd_norm": "model.emb_ln"},
    ),
    "modern-bert": GGUFLayout(
        _names(
            "attn_norm attn_norm, attn_qkv attn.Wqkv, attn_output attn.Wo, ffn_norm mlp_norm, ffn_up mlp.Wi, "
            "ffn_down mlp.Wo"
        ),
        tables=_names(
            "token_embd model.embeddings.tok_embeddings, token_embd_norm model.embeddings.norm, "
            "output_norm model.final_norm, cls head.dense, cls.norm head.norm, cls.output classifier"
        ),
    ),
    "jina-bert-v2": GGUFLayout(
        {
            **_BERT,
            **_names(
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
    "kimi-linear": GGUFLayout(_KIMI, bare=_KIMI_BARE, vectors=frozenset(("ssm_a",))),
    "bailingmoe3": GGUFLayout(
        {
            **{part: name.replace("self_attn", "attention") for part, name in (_LATENT | _NETS | _LAYER).items()},
            **_SHARED,
            **_names("ssm_f_a attention.f_proj, ssm_g_a attention.g_proj, attn_gate attention.g_proj"),
        },
        bare=_names("ssm_a attention.A_log, ssm_dt attention.dt_bias, exp_probs_b mlp.gate.expert_bias"),
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
    "seed_oss": GGUFLayout({"post_attention_norm": "post_attention_layernorm"}),
}
