"""config.json of a Hugging Face checkpoint to the fields of a ModelConfig.

Reads the fields that all families share. Only data is read: `auto_map` and every other pointer to code is ignored.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from jaxengine.models.config.attention import LayerAttention
from jaxengine.models.config.fields import ConfigFields, ModelConfigError
from jaxengine.models.config.readers.class_defaults import with_class_defaults
from jaxengine.models.config.readers.mistral import PARAMS_FILE, config_of_params
from jaxengine.models.config.readers.part_defaults import with_parts, with_sizes, with_usual_names
from jaxengine.models.config.rope import Rope, RopeScaling
from jaxengine.models.params.errors import ModelFileError
from jaxengine.models.params.files import AUTO, MISTRAL, read_object

logger = logging.getLogger(__name__)

CONFIG_FILE = "config.json"
# Fields with the number of layers, after the last one, that predict further tokens. The last is MiniMax's.
_NEXT_TOKEN_FIELDS = "num_nextn_predict_layers", "num_mtp_layers", "num_mtp_modules", "mtp_num_hidden_layers"
# ModelOpt's file of quantization settings, read if config.json has none.
QUANTIZATION_FILE = "hf_quant_config.json"
# The kinds of layers that configurations list.
FULL, SLIDING = "full_attention", "sliding_attention"
# Kinds as earlier releases of transformers 5 wrote them -> as this one does.
_OLD_KINDS = {
    "attention": FULL,
    "deepseek_sparse_attention": "indexed_attention",
    "mamba": "linear_attention",
}
# The field with fields of single layers.
LAYER_CONFIG = "per_layer_config"


@contextmanager
def errors_of(path: Path | str) -> Iterator[None]:
    """Return a context manager that raises a ModelConfigError of its block as a ModelFileError of the file `path`."""
    try:
        yield
    except ModelConfigError as error:
        raise ModelFileError(path, str(error)) from error


def config_file(folder: Path | str, config_format: str = AUTO) -> str:
    """Return the name of a folder's configuration: PARAMS_FILE of Mistral AI's format if `config_format` is MISTRAL, or
    if it is AUTO and the folder has this file and no config.json; otherwise CONFIG_FILE. The file may be absent.
    """
    has_params = not (Path(folder) / CONFIG_FILE).exists() and (Path(folder) / PARAMS_FILE).exists()
    return PARAMS_FILE if config_format == MISTRAL or config_format == AUTO and has_params else CONFIG_FILE


def read_config_json(folder: Path | str, config_format: str = AUTO) -> dict[str, Any]:
    """Return the content of a checkpoint folder's config.json, or what Mistral AI's params.json says in its place. If
    config.json has no quantization settings, those of hf_quant_config.json in the same folder are added, with the
    method "modelopt" unless they name another; the fields of a `vlm_config` replace its own (`with_inner_model`).

    config_format: see `config_file`. Raises ModelFileError if the file is absent or not a JSON object, and for a
    params.json of an unsupported model.
    """
    name = config_file(folder, config_format)
    raw = read_object(folder, name)
    if raw is None:
        raise ModelFileError(Path(folder) / name, "cannot be read: there is no such file")
    if name == PARAMS_FILE:
        with errors_of(Path(folder) / name):
            return config_of_params(raw)
    if "quantization_config" not in raw and (settings := read_object(folder, QUANTIZATION_FILE)) is not None:
        raw = {**raw, "quantization_config": {"quant_method": "modelopt", **settings}}
    return with_inner_model(raw)


def with_inner_model(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of a config.json with the fields of `vlm_config`, the model that a retriever (ColPali) is made
    of, in place of its own fields of the same names except `architectures`. A file without `vlm_config` is returned as
    a copy.
    """
    inner = raw.get("vlm_config")
    if not isinstance(inner, Mapping):
        return dict(raw)
    outer = {name: value for name, value in raw.items() if name != "vlm_config"}
    own = {"architectures": raw["architectures"]} if "architectures" in raw else {}
    return {**outer, **inner, **own}


def with_usual_fields(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a config.json as transformers 5 reads it, for every family: with one description of rope, with
    its names of the kinds in `layer_types` and of other fields (`with_usual_names`), and with its classes' defaults
    (`with_class_defaults`). Configurations in it, such as text_config, are treated in the same way, but not those
    nested in them. Those of models with towers may be absent or incomplete (`with_parts`, `with_sizes`).

    If both `rope_scaling` and `rope_parameters` are present, the former replaces the latter, as in transformers 5. A
    warning is logged if a `rope_theta` in rope_parameters is lost. If rope_parameters has a mapping for each kind of
    layers, rope_scaling is merged into the one for FULL layers, except for ModernBERT, whose file is left unchanged.
    Raises ModelConfigError if both are present and either is not a mapping.
    """
    raw = with_parts(raw)
    inner = {name: value for name, value in raw.items() if name.endswith("_config") and isinstance(value, Mapping)}
    return _usual(raw) | {name: _usual(with_sizes(value)) for name, value in inner.items()}


def _usual(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of one mapping of fields with transformers 5's names of kinds of layers and of fields, the defaults
    of its class, and one rope (`_merge_ropes`), without treating nested mappings. Raises
    ModelConfigError if there are two ropes and either is not a mapping.
    """
    kinds = raw.get("layer_types")
    if isinstance(kinds, list):
        raw = {**raw, "layer_types": [_OLD_KINDS.get(kind, kind) if isinstance(kind, str) else kind for kind in kinds]}
    return _merge_ropes(with_class_defaults(with_usual_names(raw)))


def _merge_ropes(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of one mapping of fields in which `rope_scaling` replaces `rope_parameters` or, if that has a
    mapping for each kind of layers, is merged into the one for FULL layers; an unchanged copy if either is absent or
    null, and of ModernBERT with such mappings. An empty mapping gives way to the other one. Logs a warning if a
    rope_theta is lost. Raises ModelConfigError if both are present and either is not a mapping.
    """
    fields, merged = ConfigFields(raw), dict(raw)
    if not fields.has("rope_parameters") or not fields.has("rope_scaling"):
        return merged
    old, new = fields.mapping("rope_parameters"), fields.mapping("rope_scaling")
    del merged["rope_scaling"]
    if not old or not new:
        return merged | {"rope_parameters": old or new}
    if isinstance(full := old.get(FULL), Mapping):
        if str(raw.get("model_type")).startswith("modernbert"):  # whose windows it scales too; its families refuse it
            return dict(raw)
        kept = {name: value for name, value in full.items() if name not in ("rope_type", "type")}
        return merged | {"rope_parameters": {**old, FULL: {**kept, **new}}}
    theta = old.get("rope_theta")
    if theta is not None and new.get("rope_theta", raw.get("rope_theta")) != theta:
        logger.warning(
            "config.json: rope_scaling replaces rope_parameters, as in transformers, and its rope_theta, %r, is lost. "
            "Add rope_theta to rope_scaling to keep it.",
            theta,
        )
    return merged | {"rope_parameters": new}


# Beginnings of the names of classes, and the class of the configuration in Jina AI's own code for the first.
_XLM, _JINA, _FLASH = "XLMRoberta", "JinaEmbeddingsV3", "XLMRobertaFlash"
_OWN_CODE = "XLMRobertaFlashConfig"
_JINA_V5, _JINA_V5_ENCODER = "JinaEmbeddingsV5Model", "JinaEmbeddingsV5EncoderModel"
_COLBERT_JINA, _ALIGNER = "ColBERTJinaRobertaModel", "Qwen3ASRForcedAlignerForTokenClassification"
_CHATGLM, _GLM4V = ("ChatGLMModel", "ChatGLMForConditionalGeneration"), "GLM4VForCausalLM"
# (Class that takes several kinds of models, model_type of the text or of the model) -> class with these layers.
_BY_KIND = {
    ("ColQwen2ForRetrieval", "qwen2_5_vl"): "ColQwen2_5ForRetrieval",
    ("Glm46VForConditionalGeneration", "glm4v_moe_text"): "Glm4vMoeForConditionalGeneration",
}


def hf_architecture(fields: ConfigFields) -> str:
    """Return the class name in `architectures`, which must be a list of one.

    If it begins with XLMRoberta and `position_embedding_type` is "rotary", as in jinaai/jina-embeddings-v3, that
    beginning is replaced by JinaEmbeddingsV3; by XLMRobertaFlash if it is not, but `auto_map` names that code's
    configuration, as in jinaai/jina-reranker-v2-base-multilingual. JinaEmbeddingsV5Model, whose layers may be those of
    an encoder, becomes JinaEmbeddingsV5EncoderModel if `is_decoder` is false. HF_ColBERT with that
    `position_embedding_type` is jinaai/jina-colbert-v2's _COLBERT_JINA, and Qwen3-ASR with `classify_num` the forced
    _ALIGNER. ChatGLM with a `vision_config` is GLM-4V. For a class that takes several kinds of models, the result
    depends on the model_type of text_config, or llm_config, or the file's own (_BY_KIND). Other names are returned
    unchanged. Raises ModelConfigError if `architectures` is anything but a list of one text, and for an `is_decoder` of
    that class that is not a bool.
    """
    names = fields.value("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise fields.fail("architectures", "a list of one class name")
    if names[0] in _CHATGLM and fields.has("vision_config"):
        return _GLM4V
    rotates = fields.value("position_embedding_type", None) == "rotary"
    if names[0] == "HF_ColBERT" and rotates:
        return _COLBERT_JINA
    if names[0] == "Qwen3ASRForConditionalGeneration":
        thinker = fields.value("thinker_config", None)
        return _ALIGNER if isinstance(thinker, Mapping) and thinker.get("classify_num") is not None else names[0]
    if names[0].startswith(_XLM) and not names[0].startswith(_FLASH):
        code = fields.value("auto_map", None)
        own = isinstance(code, Mapping) and str(code.get("AutoConfig")).endswith(_OWN_CODE)
        return (_JINA if rotates else _FLASH if own else _XLM) + names[0].removeprefix(_XLM)
    if names[0] == _JINA_V5 and not fields.boolean("is_decoder", True):
        return _JINA_V5_ENCODER
    text = fields.value("text_config", None) or fields.value("llm_config", None)
    kind = text.get("model_type") if isinstance(text, Mapping) else None
    kinds = kind, fields.value("model_type", None)
    return next((found for kind in kinds if (found := _BY_KIND.get((names[0], str(kind))))), names[0])


class Activation(NamedTuple):
    """Name of the field with a model's activation, and the values that stand for the family's activation."""

    field: str
    values: tuple[str, ...]


SILU = Activation("hidden_act", ("silu", "swish"))


def hf_fields(
    fields: ConfigFields,
    *,
    windows: int | None | Sequence[int | None] = None,
    ropes: Sequence[Rope | None] | None = None,
    head_dim: int | None = None,
    activation: Activation = SILU,
    partial_rotary: bool = False,
    tied: bool = False,
    eps: str = "rms_norm_eps",
    **attention: Any,
) -> dict[str, Any]:
    """Return the fields that families share from a config.json, as keyword arguments of ModelConfig, without the
    architecture. num_key_value_heads is by default num_attention_heads, and the epsilon 1e-6; of several first tokens
    the first counts; other fields without a default below must be there. Layers that predict further tokens count as
    not read.

    Args:
      windows: window of each layer, or one for all; None for a layer that attends to all keys.
      ropes: rope of each layer, with None for a layer without rope. None in place of the list: the file's rope in all
        layers.
      head_dim: default for a file without it; None for hidden_size / num_attention_heads.
      activation: the only activation that the family supports.
      partial_rotary: whether the family supports rotating a part of each head only.
      tied: default of tie_word_embeddings.
      eps: name of the field with the epsilon of norms.
      attention: further fields of every layer's LayerAttention.

    Raises ModelConfigError for a field that is missing, wrong or not supported; ValueError if windows or ropes do not
    have one entry for each layer.
    """
    if fields.text(activation.field, activation.values[0]) not in activation.values:
        raise fields.fail(activation.field, " or ".join(map(repr, activation.values)))
    if fields.mapping(LAYER_CONFIG):  # transformers takes fields of single layers from it, in every family
        raise fields.fail(LAYER_CONFIG, "absent or empty for this family")
    num_heads = fields.integer("num_attention_heads")
    num_layers = fields.integer("num_hidden_layers")
    own_head_dim = read_head_dim(fields, head_dim)
    one_rope = read_rope(fields, own_head_dim, partial_rotary=partial_rotary) if ropes is None else None
    each_rope = [one_rope] * num_layers if ropes is None else ropes
    each_window = windows if isinstance(windows, Sequence) else [windows] * num_layers
    layer = partial(
        LayerAttention,
        num_heads=num_heads,
        num_kv_heads=fields.integer("num_key_value_heads", num_heads),
        head_dim=own_head_dim,
        **attention,
    )
    bos = fields.token_ids("bos_token_id")
    return {
        "vocab_size": fields.integer("vocab_size"),
        "hidden_size": fields.integer("hidden_size"),
        "intermediate_size": fields.integer("intermediate_size"),
        "rms_norm_eps": fields.number(eps, 1e-6),
        "max_position_embeddings": fields.integer("max_position_embeddings"),
        "attention": tuple(
            layer(window=window, rope=rope) for window, rope in zip(each_window, each_rope, strict=True)
        ),
        "tie_word_embeddings": fields.boolean("tie_word_embeddings", tied),
        "bos_token_id": bos[0] if bos else None,
        "eos_token_ids": fields.token_ids("eos_token_id"),
        "num_unread_layers": max(fields.integer(name, 0, minimum=0) for name in _NEXT_TOKEN_FIELDS),
    }


def predicting(shared: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of ModelConfig `shared` with num_unread_layers, then 0, as num_nextn_predict_layers: for a
    family that reads the layers after the last one.
    """
    return {**shared, "num_nextn_predict_layers": shared["num_unread_layers"], "num_unread_layers": 0}


def text_fields(fields: ConfigFields, *, optional: bool = False) -> ConfigFields:
    """Return the fields of the language model in a multimodal configuration: `text_config`, with quantization_config,
    bos_token_id, eos_token_id and tie_word_embeddings taken from the outer configuration if they are present there.

    tie_word_embeddings is taken from outside only if text_config lacks it. optional: read an absent or null text_config
    as an empty mapping. Raises ModelConfigError if text_config is not a mapping, unless `optional` if it is absent or
    null, and if rope is scaled differently outside of it.
    """
    text = fields.mapping("text_config")
    if text is None and not optional:
        raise fields.fail("text_config", "a mapping")
    text = text or {}
    _check_outer_rope(fields, text)
    outer = ["quantization_config", "bos_token_id", "eos_token_id"]
    if not ConfigFields(text).has("tie_word_embeddings"):
        outer.append("tie_word_embeddings")
    return ConfigFields({**text, **{name: fields.value(name) for name in outer if fields.has(name)}})


def text_of_type(fields: ConfigFields, *types: str) -> ConfigFields:
    """Return `text_fields` of a configuration whose text part has one of these types; the first if it names none.
    Raises ModelConfigError for another type, and as text_fields.
    """
    text = text_fields(fields)
    if text.text("model_type", types[0]) not in types:
        raise text.fail("model_type", f"{' or '.join(types)} in text_config")
    return text


def _check_outer_rope(fields: ConfigFields, text: Mapping[str, Any]) -> None:
    """Raise ModelConfigError if `rope_parameters` or `rope_scaling` outside of text_config scale rope in a way that
    text_config, which alone is read, does not: each key must have the same value there, in the first of the two fields
    that is not empty. Fields whose type is absent, "default" or "mrope" may differ.
    """
    own = text.get("rope_parameters") or text.get("rope_scaling") or {}
    for name in ("rope_parameters", "rope_scaling"):
        outer = ConfigFields(fields.mapping(name) or {})
        kind = outer.text("rope_type", None) or outer.text("type", "default")
        differs = not isinstance(own, Mapping) or any(own.get(key) != value for key, value in outer.raw.items())
        if kind not in ("default", "mrope") and differs:
            raise fields.fail(name, "in text_config, whose rope it scales, or absent")


def read_head_dim(fields: ConfigFields, default: int | None = None) -> int:
    """Return `head_dim`. If it is absent, return `default`; without a default, or if it is null, hidden_size /
    num_attention_heads. Of a file with num_key_value_heads the quotient is rounded down, as in transformers, where
    projections have the sizes of heads. Raises ModelConfigError for an invalid value, and if the quotient is not a
    whole number in other files.
    """
    hidden_size, num_heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    if "head_dim" in fields.raw:  # null does not stand for the default
        default = None
    if default is None and not fields.has("head_dim"):
        rounds = fields.has("num_key_value_heads")
        if hidden_size < num_heads or (hidden_size % num_heads and not rounds):
            allowed = f"{'at least' if rounds else 'a multiple of'} num_attention_heads when head_dim is absent"
            raise ModelConfigError(f"hidden_size must be {allowed}, got {hidden_size} and {num_heads}")
    return fields.integer("head_dim", default or hidden_size // num_heads)


def read_each_layer(fields: ConfigFields, name: str, allowed: Sequence[Any]) -> list[Any] | None:
    """Return the list `name`, which has one of the `allowed` values for each layer; None if it is absent or null.
    Raises ModelConfigError for any other value.
    """
    listed, count = fields.value(name, None), fields.integer("num_hidden_layers")
    if listed is None or isinstance(listed, list) and len(listed) == count and all(each in allowed for each in listed):
        return listed
    raise fields.fail(name, f"a list of {count} of {', '.join(map(str, allowed))}")


def layer_kinds(fields: ConfigFields, full_every: int = 1) -> tuple[str, ...]:
    """Return FULL or SLIDING for each layer, as `layer_types` lists them; without the list every `full_every`-th layer
    is FULL. Raises ModelConfigError for a list with other kinds or of another length.
    """
    kinds, num_layers = read_each_layer(fields, "layer_types", (FULL, SLIDING)), fields.integer("num_hidden_layers")
    if kinds is None:
        return tuple(SLIDING if (layer + 1) % full_every else FULL for layer in range(num_layers))
    return tuple(kinds)


def listed_dense(fields: ConfigFields) -> tuple[int, ...] | None:
    """Return the indices of the layers that `mlp_layer_types` lists as dense (the others are sparse); None if the field
    is absent. Raises ModelConfigError for a list with other kinds or of another length.
    """
    kinds = read_each_layer(fields, "mlp_layer_types", ("dense", "sparse"))
    return None if kinds is None else tuple(layer for layer, kind in enumerate(kinds) if kind == "dense")


def windows_by_kind(kinds: Iterable[str], window: int | None) -> tuple[int | None, ...]:
    """Return the window of each layer by its kind: `window` for SLIDING layers, None for others."""
    return tuple(window if kind == SLIDING else None for kind in kinds)


def ropes_by_kind(
    fields: ConfigFields, head_dim: int, kinds: Sequence[str], *, sliding_theta: str = "rope_theta", **options: Any
) -> tuple[Rope, ...]:
    """Return the rope of each layer. kinds: the kind of each layer, FULL or SLIDING. options: options of read_rope.
    Raises ModelConfigError for a field that is missing or wrong.

    transformers 5 writes a mapping for each kind into `rope_parameters`, whose `rope_theta` takes precedence.
    transformers 4 writes `rope_theta` and `rope_scaling` for FULL layers, and the field named by `sliding_theta` for
    SLIDING ones, which are not scaled. The outer base of each kind must be present in either case. Either must name the
    kind of scaling as `rope_type`; the older `type` is refused.
    """
    parameters, by_kind = fields.mapping("rope_parameters"), {}
    for kind in dict.fromkeys(kinds):
        own = fields.mapping("rope_scaling") if kind == FULL else {}
        if parameters is not None:
            own = ConfigFields(parameters).mapping(kind)
            if own is None:
                raise fields.fail("rope_parameters", f"a mapping that has one for {kind}")
        said = ConfigFields(own or {})
        if said.text("type", "default") != "default" and not said.has("rope_type"):
            name = "rope_scaling" if parameters is None else "rope_parameters"
            raise fields.fail(name, "a mapping with rope_type: versions of transformers differ on the older type")
        theta = fields.number("rope_theta" if kind == FULL else sliding_theta)
        flat = {**fields.raw, "rope_parameters": own, "rope_scaling": None, "rope_theta": theta}
        by_kind[kind] = read_rope(ConfigFields(flat), head_dim, **options)
    return tuple(by_kind[kind] for kind in kinds)


def require_rope(fields: ConfigFields) -> None:
    """Raise ModelConfigError for a file in which both `rope_parameters` and `rope_scaling` are absent, null or empty,
    and for one that is not a mapping.
    """
    if not (fields.mapping("rope_parameters") or fields.mapping("rope_scaling")):
        raise fields.fail("rope_parameters", "a mapping")


def read_rope(fields: ConfigFields, head_dim: int, *, partial_rotary: bool = False, interleaved: bool = False) -> Rope:
    """Return a model's Rope from its config.json.

    transformers 4 writes `rope_theta` and `rope_scaling`; transformers 5 one mapping, `rope_parameters`, which is read
    if both are present. A `rope_theta` or `partial_rotary_factor` in the mapping takes precedence over one outside of
    it, but an outer `original_max_position_embeddings` over the mapping's. `rope_theta` defaults to 10000.

    Args:
      head_dim: elements of a head.
      partial_rotary: whether partial_rotary_factor may be less than 1. With rope_type proportional it always may, and
        the Rope covers the whole head.
      interleaved: whether rope rotates pairs of neighbouring elements, as in GPT-J.

    Raises ModelConfigError for wrong or unsupported fields, and for a mapping per layer type.
    """
    max_positions = fields.integer("max_position_embeddings")
    rope = fields.mapping("rope_parameters") or fields.mapping("rope_scaling") or {}
    nested = ConfigFields(rope)
    theta = nested.number("rope_theta", None) or fields.number("rope_theta", 10000.0)
    if nested.value("rope_type", None) == "proportional":
        share, factor = nested.number("partial_rotary_factor", 1.0), nested.number("factor", 1.0)
        return Rope(head_dim, theta, RopeScaling("proportional", factor, rotated=share), interleaved)
    rotated = 1.0
    for each in (fields, nested):
        rotated = each.number("partial_rotary_factor", rotated)
        if rotated > 1.0 or (rotated != 1.0 and not partial_rotary):
            raise each.fail("partial_rotary_factor", "a number > 0 and <= 1" if partial_rotary else "1.0")
    if any(isinstance(value, Mapping) for value in rope.values()):
        raise ModelConfigError("rope_parameters must be one mapping for all layers, got one per layer type")
    # Phi-3 and MiniCPM write this field outside of the mapping, and it takes precedence.
    if fields.has(original := "original_max_position_embeddings"):
        rope = {**rope, original: fields.integer(original)}
    return Rope(int(head_dim * rotated), theta, RopeScaling.from_hf(rope, max_positions), interleaved)
