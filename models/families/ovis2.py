"""Ovis2 (AIDC 2025), as transformers stores it and as it was published first (Ovis): Qwen 2.5 with a vision tower that
gives means of visual words.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.families.llava import NAMES, LlavaForConditionalGeneration
from jaxengine.models.params.source import CheckpointNames
from jaxengine.models.vision.llava import TOWER
from jaxengine.models.vision.ovis2 import NUM_INDICATORS, WORDS, read_ovis2


class Ovis2ForConditionalGeneration(LlavaForConditionalGeneration):
    """Qwen 2.5, or another text model, with a vision tower."""

    text: ClassVar[str] = "qwen2"
    checkpoint_names: ClassVar[CheckpointNames] = NAMES._replace(
        prefixes=(*NAMES.prefixes, (f"model.{WORDS}.", f"{WORDS}.")), tower=(f"{TOWER}.", f"{WORDS}.")
    )

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        fields = fields.with_defaults(tie_word_embeddings=True)
        return cls.read_text(fields) | {"tower": read_ovis2(fields)}


# Fields of visual_tokenizer_config that transformers has in vision_config.
_OF_WORDS = ("hidden_stride", "tokenize_function", "vocab_size")
_BACKBONE, _TRANSFORMER = "visual_tokenizer.backbone", f"{TOWER}.transformer"
_EMBEDDINGS = f"{_TRANSFORMER}.embeddings"


class Ovis(Ovis2ForConditionalGeneration):
    """Ovis2 as it was published first: AIMv2 under its own names, of which states before the last norm count."""

    checkpoint_names: ClassVar[CheckpointNames] = CheckpointNames(
        prefixes=(
            ("llm.model.", "model."),
            ("llm.lm_head.", "lm_head."),
            (f"{_BACKBONE}.preprocessor.patchifier.proj.", f"{_EMBEDDINGS}.patch_embedding."),
            (f"{_BACKBONE}.preprocessor.patchifier.norm.", f"{_EMBEDDINGS}.rms_norm."),
            (f"{_BACKBONE}.preprocessor.pos_embed", f"{_EMBEDDINGS}.position_embedding.weight"),
            (f"{_BACKBONE}.trunk.blocks.", f"{_TRANSFORMER}.encoder.layers."),
            (f"{_BACKBONE}.trunk.post_trunk_norm.", f"{_TRANSFORMER}.rms_norm."),
            ("visual_tokenizer.head.0.", f"{TOWER}.head_linear."),
            ("visual_tokenizer.head.1.", f"{TOWER}.head_norm."),
            ("vte.", f"{WORDS}."),
        ),
        tower=(f"{TOWER}.", f"{WORDS}."),
        tower_parts=(
            (".attn.proj.", ".attention.out_proj."),
            (".attn.", ".attention."),
            (".norm_1.", ".rms_norm1."),
            (".norm_2.", ".rms_norm2."),
            (".mlp.fc1.", ".ffn.gate_proj."),
            (".mlp.fc2.", ".ffn.down_proj."),
            (".mlp.fc3.", ".ffn.up_proj."),
        ),
        joined={
            f".attention.qkv.{end}": tuple(f".attention.{part}_proj.{end}" for part in "qkv")
            for end in ("weight", "bias")
        },
        flattened=(f"{_EMBEDDINGS}.patch_embedding.weight", f"{_EMBEDDINGS}.position_embedding.weight"),
    )

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        words, side = fields.part("visual_tokenizer_config"), "backbone_config"
        words.require(model_type="aimv2_visual_tokenizer", drop_cls_token=False, depths=None)
        given = ConfigFields(fields.mapping("visual_tokenizer_config") or {})
        backbone = given.part(side)
        backbone.require(model_type="aimv2")
        own = {name: given.value(name) for name in _OF_WORDS if given.has(name)}
        own |= {"mlp_bias": backbone.boolean("use_bias", False), "num_visual_indicator_tokens": NUM_INDICATORS}
        named = {
            "text_config": fields.value("llm_config", None),
            "vision_config": {**(given.mapping(side) or {}), **own},
        }
        shared = super().read_hf(ConfigFields({"tie_word_embeddings": False, **fields.raw, **named}))
        return shared | {"tower": replace(shared["tower"], as_first=True)}
