"""Dots 3 Note (rednote-hilab 2026), served as text: DeepSeek-V3.2's sparse layers between layers with a window, whose
latent attention has sizes of its own; scaled latents, a norm of the rotated part of keys, and gates of the heads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import jax
from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.config.attention import KeyIndex, LayerAttention
from jaxengine.models.config.experts import ExpertsConfig
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.readers.hf import (
    FULL,
    LAYER_CONFIG,
    SLIDING,
    listed_dense,
    read_each_layer,
    read_rope,
    text_fields,
)
from jaxengine.models.config.readers.latent import hf_latent_fields
from jaxengine.models.config.rope import Rope
from jaxengine.models.families.bailing_hybrid import GatedLatentAttention
from jaxengine.models.families.deepseek_v3 import DeepseekV3ForCausalLM
from jaxengine.models.families.glm4_moe import sigmoid_experts
from jaxengine.models.families.llama import LAYER, gated_fields
from jaxengine.models.families.longcat_flash import ScaledNorm
from jaxengine.models.layers.attention.sparse_mla import SparseLatentAttention
from jaxengine.models.layers.base.norm import RMSNorm
from jaxengine.models.params.source import CheckpointNames

INDEXED = "indexed_attention"
# transformers' defaults for fields that a file lacks.
DEFAULTS: dict[str, Any] = {
    "vocab_size": 152064,
    "hidden_size": 5120,
    "intermediate_size": 13824,
    "moe_intermediate_size": 1536,
    "num_hidden_layers": 46,
    "num_attention_heads": 128,
    "max_position_embeddings": 1 << 19,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 151643,
    "eos_token_id": 151668,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 1024,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "head_dim": 256,
}
# Fields of the layers with a window, each after "swa_", and their defaults.
_OF_WINDOWS = {
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "q_lora_rank": 1024,
    "kv_lora_rank": 1024,
    "head_dim": 256,
    "qk_nope_head_dim": 192,
    "v_head_dim": 128,
}
# The name of the shared MLP's size in published files.
_SHARED_SIZE = "moe_shared_expert_intermediate_size"
_NO_ROPE: dict[str, Any] = dict.fromkeys(("rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor"))
_ROPE_DIM, _THETA, _WINDOW_THETA = "qk_rope_head_dim", 80_000_000.0, 50_000.0


class Dots3NoteAttention(GatedLatentAttention):
    """Latent attention with a gate for each head, in which normed latents are multiplied by the root of hidden_size /
    rank, and the rotated part of keys has a norm before it is rotated.
    """

    def __init__(
        self, attention: LayerAttention, hidden_size: int, *, source: str, build: Build, eps: float, **options: Any
    ):
        super().__init__(attention, hidden_size, source=source, build=build, eps=eps, **options)
        latent: Any = self.latent
        norms: Any = (self.q_norm, latent.q_lora_rank), (self.kv_norm, latent.kv_lora_rank)
        self.q_norm, self.kv_norm = (ScaledNorm(norm, (hidden_size / rank) ** 0.5) for norm, rank in norms)
        self.rope_norm = RMSNorm(latent.qk_rope_head_dim, eps, source=f"{source}.k_rope_only_layernorm", build=build)

    def normed_key(self, k_rope: jax.Array) -> jax.Array:
        """Return the part of keys [T, 1, R] that will be rotated, after its norm."""
        return self.rope_norm(k_rope)


class Dots3NoteSparseAttention(Dots3NoteAttention, SparseLatentAttention):
    """Dots3NoteAttention to the keys that an indexer selects."""


class Dots3NoteForCausalLM(DeepseekV3ForCausalLM):
    """DeepSeek-V3 with Dots3NoteAttention in each layer: to keys that an indexer selects, to those of a window, or to
    all. The towers of images and sounds are not read.
    """

    checkpoint_names: ClassVar[CheckpointNames] = CheckpointNames(
        prefixes=(("model.language_model.", "model."),),
        unused=tuple(
            f"{prefix}{part}."
            for prefix in ("", "model.")
            for part in ("vision_encoder", "vision_tower", "audio_encoder", "audio_tower", "audio_adapter")
        ),
    )

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        fields = (text_fields(fields) if fields.has("text_config") else fields).with_defaults(**DEFAULTS)
        fields.require(rope_interleave=True, indexer_rope_interleave=True)
        kinds, bias = _kinds(fields), fields.boolean("attention_bias", False)
        window = fields.integer("sliding_window", None) or fields.integer("sliding_window_size", 512)
        index = KeyIndex(
            num_heads=fields.integer("index_n_heads", 64),
            head_dim=fields.integer("index_head_dim", 128),
            top_k=fields.integer("index_topk", 2048),
            interleaved=True,
        )
        shared: dict[str, Any] = {}
        attention: list[LayerAttention] = []
        for layer, kind in enumerate(kinds):
            own = _of_layer(fields, layer, kind)
            own.integer("q_lora_rank")
            # The scale of products does not follow a scaled rope.
            plain = ConfigFields({**own.raw, **_NO_ROPE})
            shared = gated_fields(plain, read=hf_latent_fields, bias=bias, output_bias=bias)
            rope = _rope(fields, kind, kinds, own.integer(_ROPE_DIM))
            extra = {"window": window} if kind == SLIDING else {"index": index} if kind == INDEXED else {}
            attention.append(replace(shared["attention"][layer], rope=rope, **extra))
        # Published checkpoints have a further layer that no field counts.
        unread = max(1, shared["num_unread_layers"])
        return shared | {"attention": tuple(attention), "experts": _experts(fields), "num_unread_layers": unread}

    def make_attention(self, layer: int, build: Build) -> nnx.Module:
        config = self.config
        own, size, source = config.attention[layer], config.hidden_size, f"{LAYER}.self_attn"
        kind = Dots3NoteAttention if own.index is None else Dots3NoteSparseAttention
        return kind(own, size, source=source, build=build, eps=config.rms_norm_eps)


def _kinds(fields: ConfigFields) -> list[str]:
    """Return FULL, SLIDING or INDEXED for each layer, as `layer_types` lists them; without the list the first two
    layers and of every four layers the second have no window, and if `use_sliding_window` is false none has.

    `use_dsa` says that all layers without a window are INDEXED (true) or FULL (false); null keeps them as they are
    listed. Absent means true, or null in a file with `per_layer_config`. Raises ModelConfigError for wrong fields.
    """
    kinds = read_each_layer(fields, "layer_types", (FULL, SLIDING, INDEXED))
    sparse = fields.raw.get("use_dsa", None if LAYER_CONFIG in fields.raw else True)
    if sparse not in (True, False, None):
        raise fields.fail("use_dsa", "true, false or null")
    if kinds is None:
        windows = fields.boolean("use_sliding_window", True)
        count = fields.integer("num_hidden_layers")
        kinds = [SLIDING if windows and layer >= 2 and layer % 4 != 1 else INDEXED for layer in range(count)]
    if sparse is None:
        return list(kinds)
    return [SLIDING if kind == SLIDING else INDEXED if sparse else FULL for kind in kinds]


def _of_layer(fields: ConfigFields, layer: int, kind: str) -> ConfigFields:
    """Return the fields of one layer: those of the file, in which the sizes of attention are replaced by those that
    `per_layer_config` has for the layer, or in a file without it, for a SLIDING layer, by the fields of the same names
    after "swa_". Raises ModelConfigError for a `per_layer_config` with other keys than numbers of layers, or with other
    fields.
    """
    if LAYER_CONFIG not in fields.raw:
        if kind != SLIDING:
            return fields
        own = {name: fields.raw.get(f"swa_{name}", default) for name, default in _OF_WINDOWS.items()}
        sizes = ConfigFields(own)
        rest = sizes.integer("head_dim") - sizes.integer("qk_nope_head_dim")
        return ConfigFields({**fields.raw, **own, _ROPE_DIM: fields.raw.get(f"swa_{_ROPE_DIM}", rest)})
    count, found = fields.integer("num_hidden_layers"), {}
    for key, own in (fields.mapping(LAYER_CONFIG) or {}).items():
        number = int(key) if str(key).isdecimal() else count
        if number >= count or not isinstance(own, Mapping) or own.keys() - {*_OF_WINDOWS, _ROPE_DIM}:
            names = ", ".join((*_OF_WINDOWS, _ROPE_DIM))
            raise fields.fail(LAYER_CONFIG, f"for each number of a layer below {count} a mapping with some of {names}")
        found[number] = own
    own = {name: value for name, value in fields.raw.items() if name != LAYER_CONFIG}
    return ConfigFields({**own, **found.get(layer, {})})


def _rope(fields: ConfigFields, kind: str, kinds: list[str], rope_dim: int) -> Rope:
    """Return the rope of a layer of one of the `kinds`. rope_dim: elements of the rotated part of its keys.

    `rope_parameters`, or else `rope_scaling`, describes it, either for all layers or by kind. A theta that it lacks is
    `rope_theta`; in a file with neither of them, it is `swa_rope_theta` for SLIDING layers. Raises ModelConfigError for
    wrong fields, and for descriptions by kind without that of `kind`.
    """
    name = "rope_scaling" if fields.mapping("rope_parameters") is None else "rope_parameters"
    given = fields.mapping(name)
    own: Any = given or {}
    if by_kind := {*own} & {*kinds}:
        own = own.get(kind)
    if not isinstance(own, Mapping):
        raise fields.fail(name, f"a mapping that has one for {kind}, as it has for {', '.join(sorted(by_kind))}")
    theta = fields.number("rope_theta", _THETA)
    if kind == SLIDING and not given and fields.mapping("rope_parameters") is None:
        theta = fields.number("swa_rope_theta", _WINDOW_THETA)
    own = {key: value for key, value in own.items() if key != "partial_rotary_factor"}
    outer = {**fields.raw, **_NO_ROPE, "rope_parameters": own, "rope_theta": theta}
    return read_rope(ConfigFields(outer), rope_dim, interleaved=True)


def _experts(fields: ConfigFields) -> ExpertsConfig:
    """Return the experts: those of DeepSeek-V3 with a shared MLP of `n_shared_experts` (default: 1) times a size of its
    own (`moe_shared_expert_intermediate_size`, or else `shared_experts_intermediate_size`, 1536 by default), in the
    layers that `mlp_layer_types` lists as sparse. Without the list these are the layers from `first_k_dense_replace`
    on, by default 1, that are multiples of `moe_layer_freq`, or whose entry in that list is not 0. Raises
    ModelConfigError for wrong fields.
    """
    dense, count = listed_dense(fields), fields.integer("num_hidden_layers")
    if dense is None:
        first, every = fields.integer("first_k_dense_replace", 1, minimum=0), fields.value("moe_layer_freq", 1)
        if isinstance(every, list):
            sparse = read_each_layer(fields, "moe_layer_freq", (0, 1)) or []
        else:
            every = fields.integer("moe_layer_freq", 1)
            sparse = [layer % every == 0 for layer in range(count)]
        dense = tuple(layer for layer in range(count) if layer < first or not sparse[layer])
    size = fields.integer(_SHARED_SIZE, None) or fields.integer("shared_experts_intermediate_size", 1536)
    shared = size * fields.integer("n_shared_experts", 1)
    return replace(sigmoid_experts(fields), dense_layers=dense, shared_intermediate_size=shared)
