"""GGUF metadata to the fields of a ModelConfig.

Contains the key names of the GGUF specification (ggml/docs/gguf.md). Tensors are read in models/weights/gguf/file.py.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from jaxengine.models.config.attention import LayerAttention, LayerState, TemperatureTuning
from jaxengine.models.config.experts import ExpertsConfig
from jaxengine.models.config.fields import ConfigFields, ModelConfigError
from jaxengine.models.config.rope import Rope, RopeScaling
from jaxengine.models.config.state import SelectiveScan, StateSpace
from jaxengine.models.params.gguf_ends import END_KEYS, EOS_LIST, listed_ends, named_turn_ends

# Of these a file with experts is read by a family of its own.
WITH_EXPERTS = {name: f"{name} with experts" for name in ("llama", "granite_swa")}
DEEPSEEK_V3 = "deepseek2 with sigmoid scores"
OLMO3 = "olmo2 with windows"
EMBEDDING_GEMMA = "gemma-embedding"
# Architectures whose files are read as those of others. Of models that see, they have the text part, whose tokens have
# equal positions in all sections of rope.
READ_AS = {"qwen2vl": "qwen2", "qwen3vl": "qwen3", "qwen3vlmoe": "qwen3moe"}
READ_AS |= {"hunyuan_vl": "hunyuan-dense", "paddleocr": "qwen2"}
READ_AS |= {EMBEDDING_GEMMA: "gemma3", "nemotron_h_moe": "nemotron_h", "mistral4": "deepseek2"}
# Values of `expert_gating_func`.
SOFTMAX, SIGMOID = 1, 2
EXPERT_SIZE, _HEADS, _HEADS_KV = "expert_feed_forward_length", "attention.head_count", "attention.head_count_kv"
# Fields that may be a list of a number for each layer.
_OF_LAYERS = (_HEADS, _HEADS_KV, "feed_forward_length", EXPERT_SIZE, "expert_used_count")
# llama.cpp's name of what is added to the scores of experts.
_CORRECTION = "exp_probs_b"
# llama.cpp's names of a layer's matrices whose biases are those of attention's inputs, and of its MLP.
_INPUTS, _MLP = ("attn_q", "attn_k", "attn_v", "attn_qkv"), ("ffn_gate", "ffn_up", "ffn_down")


def gguf_architecture(metadata: Mapping[str, Any]) -> str:
    """Return llama.cpp's name of the model's architecture. Raises ModelConfigError if it is missing or not a string."""
    return ConfigFields(metadata).text("general.architecture")


def gguf_family(metadata: Mapping[str, Any], biased: Collection[str]) -> str:
    """Return the name of the family that reads a file, as in CausalLM.gguf_architecture.

    It is the file's architecture, with these exceptions: that of READ_AS, that of WITH_EXPERTS for experts, OLMO3 for
    olmo2 with windows, and DEEPSEEK_V3 for deepseek2 whose experts are chosen by sigmoids. So are those of files that
    do not say it and have a correction of scores, as of GLM-4.7-Flash. biased: see `with_stored_biases`. Raises
    ModelConfigError if the architecture is missing, and if the number of experts or the gating function is not an
    integer in its limits.
    """
    own = gguf_architecture(metadata)
    fields, architecture = ConfigFields(metadata, f"{own}."), READ_AS.get(own, own)
    if architecture == "deepseek2":
        unsaid = SIGMOID if _CORRECTION in biased else SOFTMAX
        return DEEPSEEK_V3 if fields.integer("expert_gating_func", unsaid) == SIGMOID else architecture
    if architecture == "olmo2" and fields.integer("attention.sliding_window", 0, minimum=0):
        return OLMO3
    has_experts = fields.integer("expert_count", 0, minimum=0) > 0
    return WITH_EXPERTS.get(architecture, architecture) if has_experts else architecture


class RopeFactors(NamedTuple):
    """Rope scaling that a file stores in tensors, with one divisor for each rotated pair. `factors` is the tensor
    `rope_freqs`; `short` and `long` are `rope_factors_short` and `rope_factors_long`; each is empty without its tensor.
    """

    factors: tuple[float, ...] = ()
    short: tuple[float, ...] = ()
    long: tuple[float, ...] = ()


class GGUFConfig(NamedTuple):
    """Data of a GGUF file that determines its model's configuration.

    Attributes:
      metadata: the file's key-values.
      tie_word_embeddings: whether the file lacks an output head.
      rope_factors: content of its tensors that scale rope.
      stored: shapes of the weights of its modules by llama.cpp's names, of layers without the layer's number, such as
        attn_q_norm: those of the first layer that has them.
    """

    metadata: Mapping[str, Any]
    tie_word_embeddings: bool
    rope_factors: RopeFactors
    stored: Mapping[str, tuple[int, ...]] = MappingProxyType({})

    @property
    def fields(self) -> ConfigFields:
        """Fields of the metadata that belong to the architecture: `llama.block_count` is the field `block_count`.
        Raises ModelConfigError if the metadata name no architecture.
        """
        return ConfigFields(self.metadata, f"{gguf_architecture(self.metadata)}.")


def with_numbers(metadata: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a copy of metadata in which a list of a number for each layer in a field of _OF_LAYERS is the number if
    all are equal; other lists stay. Raises ModelConfigError if the architecture is missing.
    """
    prefix = gguf_architecture(metadata)
    own = (f"{prefix}.{name}" for name in _OF_LAYERS)
    count: Any = metadata.get(f"{prefix}.block_count")
    lists = {name: as_array(metadata[name]) for name in own if name in metadata}
    lists = {name: value for name, value in lists.items() if value.size and np.array_equal(value.shape, [count])}
    return {**metadata, **{name: value[0].item() for name, value in lists.items() if (value == value[0]).all()}}


def gguf_fields(
    gguf: GGUFConfig,
    *,
    partial_rotary: bool = False,
    interleaved: bool = False,
    experts: ExpertsConfig | None = None,
    eps: str = "attention.layer_norm_rms_epsilon",
    yarn: Mapping[str, Any] = MappingProxyType({}),
    **attention: Any,
) -> dict[str, Any]:
    """Return the fields that families share from a GGUF file, as keyword arguments of ModelConfig, without the
    architecture. All layers are alike. They are numbers and sizes of layers (less nextn_predict_layers), heads,
    feed-forward part, context and window, the epsilon, rope, and the tokenizer's vocabulary, first token and ends.

    Args:
      partial_rotary: whether the family supports rotating a part of each head only.
      interleaved: whether rope rotates pairs of neighbouring elements, as in GPT-J.
      experts: config of a family with experts; None for a family without.
      eps: name of the field with the epsilon of norms.
      yarn: YaRN settings of the family that files lack, named as in a config.json. With an attention_factor or mscale
        among them the family reads yarn_log_multiplier itself.
      attention: further fields of every layer's LayerAttention.

    Raises ModelConfigError for a field that is missing, wrong or not supported, such as experts if `experts` is None.
    """
    metadata, fields = gguf.metadata, gguf.fields
    general = ConfigFields(metadata)
    if experts is None and fields.integer("expert_count", 0, minimum=0):
        raise fields.fail("expert_count", "0 or absent: this family has no mixture of experts")
    hidden_size = fields.integer("embedding_length")
    num_unread = fields.integer("nextn_predict_layers", 0, minimum=0)
    if (num_layers := fields.integer("block_count") - num_unread) < 1:
        raise fields.fail("nextn_predict_layers", "less than block_count")
    num_heads = fields.integer(_HEADS)
    head_dim = _head_dim(fields, hidden_size, num_heads)
    max_positions = fields.integer("context_length")
    bos = general.token_ids("tokenizer.ggml.bos_token_id")
    vocab_size = fields.integer("vocab_size", None) or _vocab_size(general)
    scaling = _rope_scaling(fields, max_positions, gguf.rope_factors, yarn)
    rotary_dim = _rotary_dim(fields, head_dim, partial_rotary)
    theta = fields.number("rope.freq_base", 10000.0)
    layer = LayerAttention(
        num_heads=num_heads,
        num_kv_heads=fields.integer(_HEADS_KV, num_heads),
        head_dim=head_dim,
        rope=Rope(rotary_dim, theta, scaling, interleaved),
        window=_sliding_window(fields, max_positions),
        **attention,
    )
    return {
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        # Of experts in all layers files may not say it.
        "intermediate_size": fields.integer(
            "feed_forward_length", *([] if experts is None else [experts.intermediate_size])
        ),
        "rms_norm_eps": fields.number(eps),
        "max_position_embeddings": max_positions,
        "attention": (layer,) * num_layers,
        "tie_word_embeddings": gguf.tie_word_embeddings,
        "experts": experts,
        "bos_token_id": bos[0] if bos else None,
        "eos_token_ids": _ends(metadata, vocab_size),
    }


def with_stored_biases(
    shape: Mapping[str, Any], biased: Collection[str], stored: Collection[str] = ()
) -> dict[str, Any]:
    """Return arguments of ModelConfig, `shape`, with the biases of attention, MLPs and Mamba that a file has, and the
    norm of Mamba-2: no metadata say it, and llama.cpp takes what there is. Layers with latents keep what their family
    reads.

    biased: llama.cpp's names of the matrices that have a bias in any layer, such as attn_q. stored: see GGUFConfig.
    Raises ModelConfigError if the scores of experts have one in a family that does not correct them.
    """
    experts = shape.get("experts")
    if _CORRECTION in biased and experts is not None and not experts.correction_bias:
        raise ModelConfigError(f"expert_gating_func must be {SIGMOID} (sigmoid) in a file with {_CORRECTION}.bias")
    own = {"bias": any(name in biased for name in _INPUTS), "output_bias": "attn_output" in biased}
    layers = tuple(
        replace(each, state=_with_biases(each.state, biased, stored), **({} if each.latent is not None else own))
        for each in shape["attention"]
    )
    return {**shape, "attention": layers, "mlp_bias": any(name in biased for name in _MLP)}


def _with_biases(state: LayerState | None, biased: Collection[str], stored: Collection[str]) -> LayerState | None:
    """Return a layer's state with the biases that a file has, and with the norm of Mamba-2, if it is one of Mamba;
    others are unchanged.
    """
    own: dict[str, Any] = {"conv_bias": "ssm_conv1d" in biased, "bias": "ssm_in" in biased}
    if isinstance(state, StateSpace):
        norm = "after" if "ssm_norm" in stored else state.norm
        return replace(state, **own, output_bias="ssm_out" in biased, norm=norm)
    return replace(state, **own) if isinstance(state, SelectiveScan) else state


def as_array(value: Any) -> np.ndarray:
    """Return a GGUF value as an array. For nested lists of unequal lengths, return an array of shape () that contains
    None.
    """
    try:
        return np.asarray(value)
    except ValueError:
        return np.asarray(None)


def gguf_temperature(fields: ConfigFields) -> TemperatureTuning | None:
    """Return the factor of queries by their positions, which grows with each original context; None without
    `attention.temperature_scale`. The context is `attention.temperature_length`, or else the original context of rope's
    scaling, or else `context_length`. Raises ModelConfigError for wrong fields.
    """
    if not (beta := fields.number("attention.temperature_scale", 0.0)):
        return None
    named = ("attention.temperature_length", "rope.scaling.original_context_length")
    length = next((value for name in named if (value := fields.integer(name, None))), None)
    return TemperatureTuning(float(length or fields.integer("context_length")), beta)


def gguf_sliding(fields: ConfigFields, full_every: int, *, full_first: bool = False) -> tuple[bool, ...]:
    """Return whether each layer that is read has the sliding window, as `attention.sliding_window_pattern` lists; the
    list may have the layers that predict further tokens, too. If it is a number n, all but every n-th layer have it, or
    all for 0; without the field, n is `full_every`. Every n-th layer is the last of n or, with `full_first`, the first.
    Raises ModelConfigError unless the list has a boolean for each layer, and for other values.
    """
    name, count = "attention.sliding_window_pattern", fields.integer("block_count")
    every = fields.value(name, full_every)
    if isinstance(every, bool) or not isinstance(every, int):
        return gguf_flags(fields, name, ())
    if every < 0:
        raise fields.fail(name, f"true or false for each of {count} layers, or an integer >= 0")
    every = int(every)
    usual = [every == 0 or (layer + (not full_first)) % every > 0 for layer in range(count)]
    return tuple(usual[: count - fields.integer("nextn_predict_layers", 0, minimum=0)])


def gguf_flags(fields: ConfigFields, name: str, default: Sequence[bool]) -> tuple[bool, ...]:
    """Return whether what the field `name` lists, as booleans or as 0 and 1, is so for each layer that is read; without
    it, `default`. The list may have layers that predict further tokens, too. Raises ModelConfigError for anything else.
    """
    count = fields.integer("block_count")
    read = max(count - fields.integer("nextn_predict_layers", 0, minimum=0), 0)
    listed = as_array(fields.value(name, default))
    if listed.dtype.kind not in "biu" or listed.shape not in ((read,), (count,)) or not set(listed.tolist()) <= {0, 1}:
        raise fields.fail(name, f"true or false for each of {read} layers")
    return tuple(map(bool, listed.tolist()))[:read]


def gguf_of_layers(fields: ConfigFields, name: str, minimum: int = 1) -> tuple[int, ...]:
    """Return the number for each layer in the field `name`, which is one number for all layers, or a list. Raises
    ModelConfigError for other values and for numbers below `minimum`.
    """
    count = fields.integer("block_count")
    listed = np.atleast_1d(as_array(fields.value(name)))
    if listed.dtype.kind not in "iu" or listed.shape not in ((1,), (count,)) or listed.min() < minimum:
        raise fields.fail(name, f"an integer >= {minimum}, or a list of {count}")
    return tuple(np.broadcast_to(listed, count).tolist())


def gguf_limits(fields: ConfigFields) -> tuple[tuple[float | None, float | None], ...]:
    """Return the bounds of SwiGLU in the experts and in the shared MLP of each layer that is read, as
    `swiglu_clamp_exp` and `swiglu_clamp_shexp` list them for all layers; None for 0 and without the list, which is no
    bound. Raises ModelConfigError for wrong lists.
    """
    limits, count = [], fields.integer("block_count")
    for name in ("swiglu_clamp_exp", "swiglu_clamp_shexp"):
        listed = as_array(fields.value(name, [0.0] * count))
        if listed.dtype.kind not in "iuf" or listed.shape != (count,) or not (listed >= 0).all():
            raise fields.fail(name, f"a list of {count} numbers >= 0")
        limits.append([each or None for each in listed.tolist()])
    count -= fields.integer("nextn_predict_layers", 0, minimum=0)
    return tuple(zip(*limits, strict=True))[:count]


def gguf_limit(fields: ConfigFields) -> float:
    """Return the bound of SwiGLU in all layers, from the fields of `gguf_limits`. Raises ModelConfigError for wrong
    lists, and unless they have one number > 0.
    """
    found = {limit for layer in gguf_limits(fields) for limit in layer}
    if len(found) == 1 and (limit := found.pop()) is not None:
        return limit
    raise fields.fail("swiglu_clamp_exp", "the one number > 0 of swiglu_clamp_shexp")


def gguf_layers(
    fields: ConfigFields, windowed: LayerAttention, full: LayerAttention, full_every: int, *, full_first: bool = False
) -> tuple[LayerAttention, ...]:
    """Return the attention of each layer: `windowed`, with the base of rope in `rope.freq_base_swa` if there is one, or
    `full`, as `gguf_sliding` says. Raises ModelConfigError for wrong values of either field.
    """
    if windowed.rope is not None:
        theta = fields.number("rope.freq_base_swa", windowed.rope.theta)
        windowed = replace(windowed, rope=replace(windowed.rope, theta=theta))
    return tuple(windowed if slides else full for slides in gguf_sliding(fields, full_every, full_first=full_first))


def gguf_by_layer(
    gguf: GGUFConfig,
    full_every: int,
    windowed: Callable[[LayerAttention], LayerAttention],
    *,
    full_first: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Return `gguf_fields` with each layer's numbers of heads and, as `gguf_layers` says, its window,
    `attention.sliding_window`. windowed: what a family changes in layers with one. options: those of gguf_fields.
    Raises ModelConfigError for wrong fields.
    """
    fields = gguf.fields
    counts = {name: gguf_of_layers(fields, name) for name in (_HEADS, _HEADS_KV)}
    first = {f"{fields.prefix}{name}": each[0] for name, each in counts.items()}
    shared = gguf_fields(gguf._replace(metadata={**gguf.metadata, **first}), **options)
    full = replace(shared["attention"][0], window=None)
    own = windowed(replace(full, window=fields.integer("attention.sliding_window")))
    layers = zip(gguf_layers(fields, own, full, full_every, full_first=full_first), *counts.values(), strict=False)
    attention = (replace(each, num_heads=heads, num_kv_heads=kv_heads) for each, heads, kv_heads in layers)
    return shared | {"attention": tuple(attention)}


def gguf_experts(
    fields: ConfigFields, *, norm_weights: bool, size: str = "feed_forward_length", **more: Any
) -> ExpertsConfig:
    """Return the ExpertsConfig of a file, from `expert_count`, `expert_used_count` and `size`. size: name of the field
    with the experts' feed-forward size. more: fields of ExpertsConfig that the family fixes. Raises ModelConfigError
    for a field that is missing or wrong.
    """
    return ExpertsConfig(
        num_experts=fields.integer("expert_count"),
        num_per_token=fields.integer("expert_used_count"),
        intermediate_size=fields.integer(size),
        norm_weights=norm_weights,
        **more,
    )


def gguf_shared_experts(fields: ConfigFields, *, scoring_func: str, norm_weights: bool = False) -> ExpertsConfig | None:
    """Return the ExpertsConfig of a file with experts as in DeepSeek: after dense layers (`leading_dense_block_count`),
    in groups (`expert_group_count` and `expert_group_used_count`, 1 by default), weights times `expert_weights_scale`
    (1), and a shared MLP of expert_shared_count experts. None for a file without experts (Youtu-LLM). scoring_func:
    "softmax", or "sigmoid", which comes with a correction bias. norm_weights: default of expert_weights_norm. Raises
    ModelConfigError for missing or wrong fields, and for another gating function than `scoring_func`.
    """
    if not fields.integer("expert_count", 0, minimum=0):
        return None
    number = {"softmax": SOFTMAX, "sigmoid": SIGMOID}[scoring_func]
    if fields.integer("expert_gating_func", number) != number:
        raise fields.fail("expert_gating_func", f"{number} ({scoring_func}) or absent")
    size, num_layers = fields.integer(EXPERT_SIZE), fields.integer("block_count")
    return gguf_experts(
        fields,
        size=EXPERT_SIZE,
        norm_weights=fields.boolean("expert_weights_norm", norm_weights),
        dense_layers=tuple(range(min(fields.integer("leading_dense_block_count", 0, minimum=0), num_layers))),
        scoring_func=scoring_func,
        correction_bias=scoring_func == "sigmoid",
        num_expert_group=fields.integer("expert_group_count", 1),
        topk_group=fields.integer("expert_group_used_count", 1),
        routed_scaling_factor=fields.number("expert_weights_scale", 1.0),
        shared_intermediate_size=size * fields.integer("expert_shared_count", 0, minimum=0),
    )


def _ends(metadata: Mapping[str, Any], vocab_size: int) -> tuple[int, ...]:
    """Return all tokens that end an answer, without repetitions: first the listed ones, then those named tokens below
    vocab_size with which chat models end their turns. Raises ModelConfigError if a listed id is not an integer >= 0.
    """
    general = ConfigFields({**metadata, EOS_LIST: listed_ends(metadata)})
    ids = [number for key in (*END_KEYS, EOS_LIST) for number in general.token_ids(key)]
    named = (number for number in named_turn_ends(metadata) if number < vocab_size)
    return tuple(dict.fromkeys((*ids, *named)))


def _vocab_size(general: ConfigFields) -> int:
    """Return the number of tokens in the file's tokenizer. Raises ModelConfigError if the metadata has no list of
    tokens.
    """
    tokens = general.value("tokenizer.ggml.tokens", None)
    if tokens is None or isinstance(tokens, (str, int, float)):
        raise ModelConfigError("the GGUF metadata gives neither a vocab_size nor tokenizer.ggml.tokens")
    return len(tokens)


def _head_dim(fields: ConfigFields, hidden_size: int, num_heads: int) -> int:
    """Return the elements of a head, `attention.key_length`, or hidden_size / num_heads without it. Raises
    ModelConfigError if that is not a whole number, and if values and keys differ in size.
    """
    head_dim = fields.integer("attention.key_length", None)
    if head_dim is None:
        if hidden_size % num_heads:
            raise ModelConfigError(
                f"{fields.prefix}embedding_length must be a multiple of {fields.prefix}attention.head_count when "
                f"attention.key_length is absent, got {hidden_size} and {num_heads}"
            )
        head_dim = hidden_size // num_heads
    if fields.integer("attention.value_length", head_dim) != head_dim:
        raise fields.fail("attention.value_length", f"the head dimension {head_dim}")
    return head_dim


def _rotary_dim(fields: ConfigFields, head_dim: int, partial_rotary: bool) -> int:
    """Return the number of rotated elements of a head, `rope.dimension_count`, by default all. Raises ModelConfigError
    for more than head_dim, and for fewer unless partial_rotary.
    """
    rotary_dim = fields.integer("rope.dimension_count", head_dim)
    if rotary_dim > head_dim or (rotary_dim < head_dim and not partial_rotary):
        raise fields.fail("rope.dimension_count", f"{'at most ' * partial_rotary}the head dimension {head_dim}")
    return rotary_dim


def _scaling_kind(fields: ConfigFields) -> tuple[str, float | None]:
    """Return (kind of rope scaling, its factor): the kind is "none" for a file without scaling, the factor None if the
    file gives none.

    As in llama.cpp, a factor without a kind is linear ("none" if it is 1), `rope.scale_linear` is its older name, which
    counts only if the newer is absent, and a factor of 0 is returned as None. Raises ModelConfigError for a kind that
    is not a string or a factor that is not a number >= 0.
    """
    names = ("rope.scaling.factor", "rope.scale_linear")
    name = next((name for name in names if fields.has(name)), names[0])
    factor = fields.zero_or_more(name) or None
    unsaid = "none" if factor is None or factor == 1.0 else "linear"
    return fields.text("rope.scaling.type", unsaid), factor


def _rope_scaling(
    fields: ConfigFields, max_positions: int, tensors: RopeFactors, yarn: Mapping[str, Any]
) -> RopeScaling | None:
    """Return the scaling of rope from metadata and the file's tensors of factors; None for plain rope. Long and short
    factors are longrope, other factors are used as they are; without any it is linear or yarn, by
    `rope.scaling.factor`, and with yarn `yarn_attn_factor`, `yarn_beta_fast` and `yarn_beta_slow`.

    max_positions: default of the original context length. yarn: YaRN settings that files lack. Raises ModelConfigError
    for a wrong or unsupported scaling, and if metadata and tensors contradict each other.
    """
    kind, factor = _scaling_kind(fields)
    if tensors.long or tensors.short:
        if kind == "linear" and not fields.has("rope.scaling.type"):
            raise ModelConfigError(
                f"a linear rope factor, {factor}, with tensors of longrope's factors is not supported"
            )
        if kind not in ("none", "longrope") or tensors.factors:
            raise fields.fail("rope.scaling.type", "longrope or absent with tensors rope_factors_short and _long only")
        return RopeScaling(
            "longrope",
            original_max_position_embeddings=fields.integer("rope.scaling.original_context_length", max_positions),
            attention_factor=fields.number("rope.scaling.attn_factor", 1.0),
            factors=tensors.long,
            short_factors=tensors.short,
        )
    if kind not in ("none", "linear", "yarn"):
        raise fields.fail("rope.scaling.type", "none, linear or yarn, or longrope with tensors of its factors")
    if kind != "none" and tensors.factors:
        raise ModelConfigError(f"rope.scaling.type {kind!r} together with a rope_freqs.weight tensor is not supported")
    if tensors.factors:
        return RopeScaling("factors", factors=tensors.factors)
    if kind == "none":
        return None
    if factor is None:
        factor = fields.number("rope.scaling.factor")
    scaling: dict[str, Any] = {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        if fields.has("rope.scaling.yarn_log_multiplier") and yarn.keys().isdisjoint(("attention_factor", "mscale")):
            raise fields.fail("rope.scaling.yarn_log_multiplier", "absent")
        factors = ("attn_factor", "yarn_ext_factor", "yarn_attn_factor")
        for name in factors if "attention_factor" in yarn else factors[:2]:
            if fields.number(f"rope.scaling.{name}", 1.0) != 1.0:
                raise fields.fail(f"rope.scaling.{name}", "1.0 or absent")
        # The attention_factor of a config.json; 1.0 is what llama.cpp says for none.
        if (attention := fields.number("rope.scaling.yarn_attn_factor", 1.0)) != 1.0:
            scaling["attention_factor"] = attention
        for name in ("beta_fast", "beta_slow"):
            if fields.has(f"rope.scaling.yarn_{name}"):
                scaling[name] = fields.number(f"rope.scaling.yarn_{name}")
        scaling |= yarn
        scaling["original_max_position_embeddings"] = fields.integer(
            "rope.scaling.original_context_length", max_positions
        )
    return RopeScaling.from_hf(scaling, max_positions)


def _sliding_window(fields: ConfigFields, max_positions: int) -> int | None:
    """Return `attention.sliding_window`; None if it is absent or 0, or if it is at least max_positions. Raises
    ModelConfigError for a value that is not an integer >= 0.
    """
    window = fields.integer("attention.sliding_window", 0, minimum=0)
    return None if window == 0 or window >= max_positions else window
