"""DeepSeek-OCR 2 (Wei et al. 2026), as transformers stores it and as it was published first (DeepseekOCR2ForCausalLM):
DeepSeek-V2's experts with Llama's attention, and a vision tower that encodes an image as a whole and in tiles.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import jax.numpy as jnp
from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.readers.gguf import GGUFConfig, gguf_fields, gguf_shared_experts
from jaxengine.models.config.readers.hf import listed_dense, text_of_type
from jaxengine.models.families.deepseek_v2 import read_experts
from jaxengine.models.families.llama import LAYER, LlamaForCausalLM, gated_fields
from jaxengine.models.layers.experts.moe import MixtureOfExperts
from jaxengine.models.params.source import CheckpointNames
from jaxengine.models.vision.deepseek_ocr import KERNELS, PROJECTOR, SEPARATOR, TOWER, read_deepseek_ocr2

_SAM, _ENCODER = f"{TOWER}.sam_encoder", f"{TOWER}.vision_encoder"
# (Prefix of names in published files, which follow the model's original code, prefix in transformers).
_STORED = (
    ("sam_model.blocks.", f"{_SAM}.layers."),
    ("sam_model.patch_embed.proj.", f"{_SAM}.patch_embed.projection."),
    ("sam_model.neck.0.", f"{_SAM}.neck.conv1."),
    ("sam_model.neck.1.", f"{_SAM}.neck.layer_norm1."),
    ("sam_model.neck.2.", f"{_SAM}.neck.conv2."),
    ("sam_model.neck.3.", f"{_SAM}.neck.layer_norm2."),
    ("sam_model.net_2.", f"{_SAM}.proj.conv1."),
    ("sam_model.net_3.", f"{_SAM}.proj.conv2."),
    ("sam_model.", f"{_SAM}."),
    ("qwen2_model.model.model.", f"{_ENCODER}."),
    ("qwen2_model.query_768.", f"{TOWER}.query_768_resolution."),
    ("qwen2_model.query_1024.", f"{TOWER}.query_1024_resolution."),
    ("projector.layers.", f"{PROJECTOR}."),
    ("view_seperator", SEPARATOR),
)
NAMES = CheckpointNames(
    prefixes=(
        ("model.language_model.", "model."),
        *((f"model.{part}", part) for part in (TOWER, PROJECTOR, SEPARATOR)),
        *((f"model.{stored}", name) for stored, name in _STORED),
    ),
    suffixes=tuple(
        (f".norm{number}.{end}", f".layer_norm{number}.{end}") for number in (1, 2) for end in ("weight", "bias")
    ),
    tower=(f"{TOWER}.", f"{PROJECTOR}.", SEPARATOR),
    flattened=KERNELS,
)
# transformers' defaults for fields that a file lacks.
_DEFAULTS = {
    "vocab_size": 102400,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "moe_intermediate_size": 1407,
}
# Sizes that are in the model's first code, and not in its config.json.
_FIRST_CHANNELS, _FIRST_SIZE = 512, 896
_FIRST_ENCODER = {
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "rope_theta": 1e6,
}


class DeepseekOcr2ForConditionalGeneration(LlamaForCausalLM):
    """Llama's attention with DeepSeek-V2's experts, and a vision tower."""

    checkpoint_names: ClassVar[CheckpointNames] = NAMES
    gguf_architecture: ClassVar[str | None] = "deepseek2-ocr"

    @classmethod
    def read_gguf(cls, gguf: GGUFConfig) -> dict[str, Any]:
        fields = gguf.fields
        fields.require(**{"attention.sliding_window": None})  # Unlimited-OCR's
        # It is the rotated part of latent attention, which the model lacks: all of each head is rotated.
        whole = {**gguf.metadata, f"{fields.prefix}rope.dimension_count": None}
        return gguf_fields(gguf._replace(metadata=whole), experts=gguf_shared_experts(fields, scoring_func="softmax"))

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        fields = _as_transformers(fields) if fields.has("language_config") else fields
        return read_text(fields, "deepseek_ocr2_text") | {"tower": read_deepseek_ocr2(fields)}

    def make_mlp(self, layer: int, build: Build) -> nnx.Module:
        assert self.config.experts is not None
        if layer in self.config.experts.dense_layers:
            return super().make_mlp(layer, build)
        return MixtureOfExperts(self.config, source=f"{LAYER}.mlp", router_dtype=jnp.float32, build=build)


def read_text(fields: ConfigFields, kind: str) -> dict[str, Any]:
    """Return arguments of ModelConfig, without the tower, for the fields of a config.json as transformers calls them.

    kind: model_type of `text_config`, which may lack it. Raises ModelConfigError for wrong fields, for another type,
    and if `mlp_layer_types` is absent.
    """
    text = text_of_type(fields, kind).with_defaults(**_DEFAULTS)
    bias, dense = text.boolean("attention_bias", False), listed_dense(text)
    if dense is None:
        raise text.fail("mlp_layer_types", "a list of dense and sparse, one for each layer")
    experts = read_experts(text, dense)
    shared = gated_fields(text, bias=bias, output_bias=bias)
    return shared | {"experts": experts, "mlp_bias": text.boolean("mlp_bias", False)}


def _as_transformers(fields: ConfigFields) -> ConfigFields:
    """Return the fields of a config.json of DeepseekOCR2ForCausalLM as transformers calls them. Of the second encoder
    it says only `dim` of `qwen2-0-5b` in `width` of vision_config (default: 896). Raises ModelConfigError for wrong
    fields and for what named_as_transformers refuses.
    """
    size = fields.part("vision_config").part("width").part("qwen2-0-5b").integer("dim", _FIRST_SIZE)
    # Its code takes no downsample_channels from the file, where they are another model's.
    sam = {"downsample_channels": [_FIRST_CHANNELS, size]}
    return named_as_transformers(fields, sam, _FIRST_ENCODER | {"hidden_size": size})


def named_as_transformers(fields: ConfigFields, sam: Mapping[str, Any], encoder: Mapping[str, Any]) -> ConfigFields:
    """Return the fields of a config.json of DeepSeek-OCR's first code as transformers calls them: `language_config`
    becomes text_config, in which the first `first_k_dense_replace` (default: 0) layers are dense, and sizes of SAM come
    from `sam_vit_b` in `width` of vision_config, with its `image_size`. Raises ModelConfigError for wrong fields and
    for what is not supported: latent attention, dense layers between sparse ones, another projector than a linear one,
    and another tile_tag than 2D.

    sam: further fields of the first encoder, under transformers' names. encoder: the fields of the second. `mlp_ratio`
    is left out, as that code does not use it.
    """
    language = fields.part("language_config")
    language.require(use_mla=False, kv_lora_rank=None, moe_layer_freq=1)
    fields.require(tile_tag="2D")
    fields.part("projector_config").require(projector_type="linear")
    vision = fields.part("vision_config")
    first, layers = vision.part("width").part("sam_vit_b"), language.integer("num_hidden_layers")
    dense = min(language.integer("first_k_dense_replace", 0, minimum=0), layers)
    mlps = ["dense"] * dense + ["sparse"] * (layers - dense)
    of_sam = {
        "hidden_size": first.value("width", None),
        "num_hidden_layers": first.value("layers", None),
        "num_attention_heads": first.value("heads", None),
        "global_attn_indexes": first.value("global_attn_indexes", None),
        "image_size": vision.value("image_size", None),
    }
    named = {name: value for name, value in of_sam.items() if value is not None}
    text = {name: value for name, value in (fields.mapping("language_config") or {}).items() if name != "model_type"}
    return ConfigFields(
        {
            **{name: value for name, value in fields.raw.items() if name != "language_config"},
            "text_config": {**text, "mlp_layer_types": mlps},
            "vision_config": {"sam_config": {**named, **sam}, "encoder_config": encoder},
        }
    )
