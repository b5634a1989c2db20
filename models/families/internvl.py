"""InternVL 2.5, 3 (Zhu et al. 2025, arXiv:2504.10479) and 3.5: a Qwen model with a vision tower that encodes images in
tiles, and frames of videos; as transformers stores it, and as it was published first (InternVLChatModel).
"""

from __future__ import annotations

from typing import Any, ClassVar

from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.tower import TowerConfig
from jaxengine.models.families.llama import LlamaForCausalLM
from jaxengine.models.families.llava import NAMES
from jaxengine.models.families.wrapped import Wrapper
from jaxengine.models.params.source import CheckpointNames
from jaxengine.models.vision.internvl import read_internvl
from jaxengine.models.vision.llava import PROJECTOR, TOWER

_EMBEDDINGS, _FIRST = f"{TOWER}.embeddings", "vision_model"
# Names in the originally published files: prefixes, and ends within a layer of the tower.
_FIRST_PREFIXES = (
    (f"{_FIRST}.embeddings.class_embedding", f"{_EMBEDDINGS}.cls_token"),
    (f"{_FIRST}.embeddings.patch_embedding.", f"{_EMBEDDINGS}.patch_embeddings.projection."),
    (f"{_FIRST}.embeddings.position_embedding", f"{_EMBEDDINGS}.position_embeddings"),
    (f"{_FIRST}.encoder.layers.", f"{TOWER}.encoder.layer."),
    *(
        (f"mlp1.{index}.", f"{PROJECTOR}.{name}.")
        for index, name in ((0, "layer_norm"), (1, "linear_1"), (3, "linear_2"))
    ),
)
_FIRST_MODULES = {
    "attn.qkv": "attention.qkv",
    "attn.proj": "attention.projection_layer",
    "attn.q_norm": "attention.q_norm",
    "attn.k_norm": "attention.k_norm",
    "norm1": "layernorm_before",
    "norm2": "layernorm_after",
}
_FIRST_PARTS = tuple((f".{old}.", f".{new}.") for old, new in _FIRST_MODULES.items())
_FIRST_SUFFIXES = tuple((f".ls{number}", f".lambda_{number}") for number in (1, 2))


class InternVLForConditionalGeneration(Wrapper, LlamaForCausalLM):
    """Qwen 2.5 or 3, or another model with Llama's layers, with a vision tower."""

    text: ClassVar[str] = "qwen2"
    checkpoint_names: ClassVar[CheckpointNames] = NAMES._replace(
        prefixes=(*NAMES.prefixes, *_FIRST_PREFIXES),
        suffixes=_FIRST_SUFFIXES,
        parts=(*NAMES.parts, *_FIRST_PARTS),
        flattened=tuple(
            f"embeddings.{name}" for name in ("patch_embeddings.projection.weight", "cls_token", "position_embeddings")
        ),
    )

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        fields, tower = fields_and_tower(fields)
        return cls.read_text(fields) | {"tower": tower}


def fields_and_tower(fields: ConfigFields) -> tuple[ConfigFields, TowerConfig]:
    """Return (the fields of a config.json in transformers' form, the tower's configuration) of an InternVL checkpoint
    in either form. Raises ModelConfigError for wrong fields.
    """
    first = fields.has("llm_config")
    fields = _as_transformers(fields) if first else fields
    return fields, read_internvl(fields, joined_qkv=first)


def _as_transformers(fields: ConfigFields) -> ConfigFields:
    """Return the fields of an InternVLChatModel's config.json under transformers' names: `llm_config`, `select_layer`
    (default: -1) and three fields of `vision_config` are renamed: `qkv_bias` and `qk_normalization`, true by default,
    and `norm_type`, rms_norm by default. Raises ModelConfigError for wrong fields and for a ps_version other than v2;
    without one it is v2.
    """
    fields.require(ps_version="v2")
    vision = fields.part("vision_config")
    renamed = {
        "attention_bias": vision.boolean("qkv_bias", True),
        "use_qk_norm": vision.boolean("qk_normalization", True),
        "norm_type": vision.text("norm_type", "rms_norm"),
    }
    return ConfigFields(
        {
            **{name: value for name, value in fields.raw.items() if name != "llm_config"},
            "text_config": fields.value("llm_config"),
            "vision_config": {**(fields.mapping("vision_config") or {}), **renamed},
            "vision_feature_layer": fields.value("select_layer", -1),
        }
    )
