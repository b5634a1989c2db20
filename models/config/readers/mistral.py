"""params.json of Mistral AI's own checkpoints as the config.json of the same model.

Its fields are those of Mistral AI's inference code: sizes, `moe`, multi-head latent attention, `yarn`, `quantization`
and `vision_encoder`. A field that would change the model and is not known is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxengine.models.config.fields import ConfigFields

PARAMS_FILE = "params.json"
# Field of params.json -> field of config.json.
_SIZES = {
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "hidden_dim": "intermediate_size",
    "vocab_size": "vocab_size",
}
_LATENT = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_MOE = {
    "num_experts": "n_routed_experts",
    "num_experts_per_tok": "num_experts_per_tok",
    "first_k_dense_replace": "first_k_dense_replace",
    "num_shared_experts": "n_shared_experts",
    "expert_hidden_dim": "moe_intermediate_size",
    "routed_scale": "routed_scaling_factor",
}
_VISION = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_channels", "patch_size")
# Fields of which only this value is supported; null counts as absent.
_ONLY = {"model_type": "transformer", "activation": "silu", "causal": True, "use_biases": False}
_ONLY_MOE = {
    "route_every_n": 1,
    "num_expert_groups": 1,
    "num_expert_groups_per_tok": 1,
    "renorm_strategy": "WEIGHTS",
    "use_load_balancing_bias": False,
}
# Fields that say how a model is run or was trained, not what it computes.
_NO_EFFECT = ("max_batch_size", "max_seq_len", "dtype", "expert_parallel", "expert_model_parallel")
_FIELDS = {
    *(*_SIZES, *_LATENT, *_ONLY, *_NO_EFFECT, "n_kv_heads", "head_dim", "norm_eps", "rope_theta", "tied_embeddings"),
    *("max_position_embeddings", "sliding_window", "_sliding_window", "yarn", "llama_4_scaling", "moe", "quantization"),
    *("vision_encoder", "multimodal"),
}
# Context length of a file that gives none, as in vLLM.
_LENGTH = 128_000
# Modules that are never stored as codes, by their names in a config.json.
_PLAIN = ("lm_head", "vision_tower", "multi_modal_projector")
_PLAIN_PATTERNS = tuple(rf"re:.*\b{name}\b.*" for name in _PLAIN)


def config_of_params(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of a config.json for the model that a params.json (`raw`) describes. Raises ModelConfigError
    for a field of it that is missing, wrong or not supported.

    The architecture is that of transformers' class with the same computation: Mistral, Ministral, Ministral 3, Mixtral
    or Mistral 4, the last for multi-head latent attention, or the class that has one of them with Pixtral's tower.
    bos_token_id is 1, and eos_token_id 2.
    """
    fields = ConfigFields(raw)
    _refuse_others(fields, _FIELDS)
    fields.require(**_ONLY)
    text = {to: fields.integer(name) for name, to in _SIZES.items()}
    text |= {
        "num_key_value_heads": fields.integer("n_kv_heads", text["num_attention_heads"]),
        "rms_norm_eps": fields.number("norm_eps"),
        "tie_word_embeddings": fields.boolean("tied_embeddings", False),
        "max_position_embeddings": _length(fields),
        "hidden_act": "silu",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    text |= _kind(fields, text)
    text |= {"rope_parameters": _rope(fields, text["model_type"] == "mistral4")}
    config = _with_tower(fields, text)
    if fields.mapping("quantization"):
        config["quantization_config"] = _quantization(fields)
    return config


def _refuse_others(fields: ConfigFields, known: Any) -> None:
    """Raise ModelConfigError for a field that is not among `known` and is neither null nor false nor 0."""
    for name in fields.raw:
        own = name.removeprefix(fields.prefix)
        if own not in known and fields.value(own, None) not in (None, False):
            raise fields.fail(own, "absent: what it means is not known")


def _length(fields: ConfigFields) -> int:
    """Return the context length in tokens: max_position_embeddings, or else max_seq_len, or else _LENGTH. Raises
    ModelConfigError for an invalid value.
    """
    return fields.integer("max_position_embeddings", None) or fields.integer("max_seq_len", _LENGTH)


def _kind(fields: ConfigFields, text: Mapping[str, Any]) -> dict[str, Any]:
    """Return the class, the model type and the fields that only this class has: Mistral4 for latent attention
    (`qk_nope_head_dim`), Mixtral for `moe`, Ministral3 for `llama_4_scaling`, Ministral for windows in some layers,
    else Mistral. text: the fields of config.json so far. Raises ModelConfigError for a combination that no class has.
    """
    windows = _windows(fields, text["num_hidden_layers"], text["max_position_embeddings"])
    own = {window for window in windows if window is not None}
    one = next(iter(own), None)
    if fields.has("qk_nope_head_dim"):
        if own:
            raise fields.fail("sliding_window", "absent with qk_nope_head_dim (latent attention)")
        return {**_class("Mistral4"), **_latent(fields, text)}
    head_dim = {"head_dim": fields.integer("head_dim", text["hidden_size"] // text["num_attention_heads"])}
    if len(own) > 1:
        raise fields.fail("sliding_window", "windows of one size, and null or the whole context for other layers")
    if fields.has("llama_4_scaling") or fields.has("moe"):
        name = "llama_4_scaling" if fields.has("llama_4_scaling") else "moe"
        if own and None in windows:
            raise fields.fail(name, "absent beside windows in some layers only")
        if name == "llama_4_scaling" and fields.has("moe"):
            raise fields.fail(name, "absent with moe, unless attention is latent")
        kind, more = ("Mixtral", _mixture(fields)) if name == "moe" else ("Ministral3", {})
        return {**_class(kind), "sliding_window": one, **head_dim, **more}
    if own and None in windows:
        kinds = ["full_attention" if window is None else "sliding_attention" for window in windows]
        return {**_class("Ministral"), "sliding_window": one, "layer_types": kinds, **head_dim}
    return {**_class("Mistral"), "sliding_window": one, **head_dim}


def _class(kind: str) -> dict[str, Any]:
    """Return the fields that name transformers' class of a text model. kind: beginning of the class name."""
    return {"architectures": [f"{kind}ForCausalLM"], "model_type": kind.lower()}


def _windows(fields: ConfigFields, num_layers: int, length: int) -> list[int | None]:
    """Return the window of each layer, None for one that sees all keys, as one of at least `length` tokens does. A list
    is repeated until there is one window for each layer. Raises ModelConfigError if both sliding_window and
    _sliding_window are present, for a list whose length does not divide num_layers, and for any other value.
    """
    name = "sliding_window" if fields.has("sliding_window") else "_sliding_window"
    if fields.has("sliding_window") and fields.has("_sliding_window"):
        raise fields.fail("_sliding_window", "absent beside sliding_window")
    found = fields.value(name, None)
    pattern = found if isinstance(found, list) else [found]
    if not pattern or num_layers % len(pattern):
        raise fields.fail(name, f"a list of a length that divides n_layers = {num_layers}")
    if any(each is not None and (type(each) is not int or each < 1) for each in pattern):
        raise fields.fail(name, "null, an integer >= 1, or a list of them")
    return [None if each is None or each >= length else each for each in pattern] * (num_layers // len(pattern))


def _latent(fields: ConfigFields, text: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of latent attention and of experts (`moe`) in transformers' names. For a file without `moe`
    these say that all layers are dense, since the class of such models always has experts. Raises ModelConfigError for
    a field that is missing, wrong or not supported.
    """
    found = {name: fields.integer(name) for name in _LATENT[1:]}
    found |= {"q_lora_rank": fields.integer("q_lora_rank", None), "rope_interleave": True, "norm_topk_prob": True}
    if fields.mapping("moe") is None:
        none = {"n_routed_experts": 1, "num_experts_per_tok": 1, "moe_intermediate_size": text["intermediate_size"]}
        return {**found, **none, "first_k_dense_replace": text["num_hidden_layers"]}
    moe = _moe(fields, _MOE)
    more = {to: moe.value(name) for name, to in _MOE.items() if moe.has(name)}
    return {"n_shared_experts": 0, "n_group": 1, "topk_group": 1, **found, **more}


def _mixture(fields: ConfigFields) -> dict[str, Any]:
    """Return num_local_experts and num_experts_per_tok, as Mixtral has them, from `moe`. Raises ModelConfigError for
    missing, wrong or unsupported fields.
    """
    moe, each = _moe(fields, ("num_experts", "num_experts_per_tok")), "num_experts_per_tok"
    return {"num_local_experts": moe.integer("num_experts"), each: moe.integer(each)}


def _moe(fields: ConfigFields, known: Any) -> ConfigFields:
    """Return the reader of `moe`. Raises ModelConfigError for fields other than `known` that change the model."""
    moe = fields.part("moe")
    moe.require(**_ONLY_MOE)
    _refuse_others(moe, {*known, *_ONLY_MOE, *_NO_EFFECT})
    return moe


def _rope(fields: ConfigFields, is_latent: bool) -> dict[str, Any]:
    """Return the `rope_parameters` that rope_theta, `yarn` (factor, original_max_position_embeddings, beta, 32 by
    default, alpha, 1, and apply_scale, true) and `llama_4_scaling` (beta, original_max_position_embeddings) amount to.
    Raises ModelConfigError for a field that is missing, wrong or not supported, and for two different original lengths.

    is_latent: whether attention is latent, where YaRN scales whole queries and keys. The base of a file without
    rope_theta is 10,000 with windows and 1,000,000 otherwise.
    """
    has_window = fields.has("sliding_window") or fields.has("_sliding_window")
    theta = fields.number("rope_theta", 1e4 if has_window else 1e6)
    rope, original = dict[str, Any](rope_type="default", rope_theta=theta), None
    if fields.mapping("yarn"):
        yarn = fields.part("yarn")
        _refuse_others(yarn, ("factor", "original_max_position_embeddings", "beta", "alpha", "apply_scale"))
        original = yarn.integer("original_max_position_embeddings")
        rope |= {"rope_type": "yarn", "factor": yarn.number("factor"), "original_max_position_embeddings": original}
        rope |= {"beta_fast": yarn.number("beta", 32.0), "beta_slow": yarn.number("alpha", 1.0)}
        if not yarn.boolean("apply_scale", True):
            rope["attention_factor"] = 1.0
        elif is_latent:
            rope |= {"mscale": 1.0, "mscale_all_dim": 1.0}
    if fields.mapping("llama_4_scaling"):
        scaling = fields.part("llama_4_scaling")
        _refuse_others(scaling, ("beta", "original_max_position_embeddings"))
        after = scaling.integer("original_max_position_embeddings")
        if original not in (None, after):
            raise scaling.fail("original_max_position_embeddings", f"yarn's, {original}")
        rope |= {"llama_4_scaling_beta": scaling.number("beta"), "original_max_position_embeddings": after}
    return rope


def _quantization(fields: ConfigFields) -> dict[str, Any]:
    """Return the quantization_config of the field `quantization`. Activations have static scales for the qscheme_act
    TENSOR (default), and dynamic ones for NO_SCALES. Raises ModelConfigError for a qformat_weight other than fp8_e4m3,
    other fields and other values, unless the quant_method is compressed-tensors, whose settings are returned with
    further modules to ignore.
    """
    own = fields.part("quantization")
    if own.text("quant_method", "").lower().replace("_", "-") == "compressed-tensors":
        stored = fields.mapping("quantization") or {}
        ignored = stored.get("ignore") or []
        if not isinstance(ignored, list):
            raise own.fail("ignore", "a list of names of modules")
        return {**stored, "quant_method": "compressed-tensors", "ignore": [*ignored, *_PLAIN_PATTERNS]}
    if own.text("qformat_weight", None) != "fp8_e4m3":
        raise own.fail("qformat_weight", "'fp8_e4m3', or absent with quant_method compressed-tensors")
    _refuse_others(own, ("qformat_weight", "qscheme_act"))
    schemes = {"TENSOR": "static", "NO_SCALES": "dynamic"}
    if (scheme := own.text("qscheme_act", "TENSOR")) not in schemes:
        raise own.fail("qscheme_act", "'TENSOR', 'NO_SCALES' or absent")
    return {"quant_method": "fp8", "activation_scheme": schemes[scheme], "modules_to_not_convert": list(_PLAIN)}


def _with_tower(fields: ConfigFields, text: dict[str, Any]) -> dict[str, Any]:
    """Return a config.json in transformers' names: `text`, the text model's, if params.json (`fields`) has no tower
    (`vision_encoder`, or `vision_encoder_args` of `multimodal`), otherwise that of Llava or Mistral3 with `text` and
    Pixtral's tower. Raises ModelConfigError for other fields of a tower, and for a text model that neither class takes.
    """
    holder, name = fields, "vision_encoder"
    if fields.mapping("multimodal"):
        holder, name = fields.part("multimodal"), "vision_encoder_args"
        _refuse_others(holder, (name,))
    if not holder.mapping(name):
        return text
    vision = holder.part(name)
    merge, normed = vision.text("mm_projector_id", ""), vision.boolean("add_pre_mm_projector_layer_norm", False)
    names = ("image_token_id", "image_break_token_id", "image_end_token_id", "image_size", "max_image_size")
    own = ("rope_theta", "adapter_bias", "spatial_merge_size", "mm_projector_id", "add_pre_mm_projector_layer_norm")
    _refuse_others(vision, {*_VISION, *names, *own})
    if merge not in ("", "patch_merge") or normed != bool(merge):
        raise vision.fail("mm_projector_id", "'patch_merge' with add_pre_mm_projector_layer_norm, or absent without it")
    kinds = ("mistral", "ministral3", "mistral4") if merge else ("mistral",)
    if text["model_type"] not in kinds:
        raise vision.fail("mm_projector_id", f"absent, or of a text model of {', '.join(kinds)}: {text['model_type']}")
    theta = vision.number("rope_theta", 10000.0)
    tower = {name: vision.integer(name) for name in _VISION}
    size = vision.integer("max_image_size", None) or vision.integer("image_size")
    tower |= {"model_type": "pixtral", "hidden_act": "silu", "image_size": size}
    tower |= {"rope_parameters": {"rope_type": "default", "rope_theta": theta}, "rope_theta": theta}
    config = {
        "architectures": [f"{'Mistral3' if merge else 'Llava'}ForConditionalGeneration"],
        "model_type": "mistral3" if merge else "llava",
        "image_token_index": vision.integer("image_token_id", 10, minimum=0),
        "projector_hidden_act": "gelu",
        "multimodal_projector_bias": vision.boolean("adapter_bias", True),
        "vision_feature_layer": -1,
        "text_config": text,
        "vision_config": tower,
    }
    if merge:
        return config | {"spatial_merge_size": vision.integer("spatial_merge_size", 1)}
    return config | {"vision_feature_select_strategy": "full"}
