"""Qwen2-VL (Wang et al. 2024, arXiv:2409.12191) and Qwen2.5-VL (Bai et al. 2025, arXiv:2502.13923): Qwen2 with M-RoPE
(rotation by positions in time, height and width) and vision towers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.readers.hf import text_fields
from jaxengine.models.config.tower import TowerConfig
from jaxengine.models.families.qwen2 import Qwen2ForCausalLM
from jaxengine.models.params.source import CheckpointNames
from jaxengine.models.vision.qwen2_vl import VISUAL, read_qwen2_5_vl, read_qwen2_vl

_ROPES = ("rope_parameters", "rope_scaling")
# model_type of the text -> transformers' sections for a file without any, and whether they are always interleaved.
_SECTIONS: dict[str, tuple[list[int], bool]] = {
    **dict.fromkeys(("qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text"), ([16, 24, 24], False)),
    **dict.fromkeys(("qwen2_5_omni_text", "paddleocr_vl", "paddleocr_vl_text"), ([16, 24, 24], False)),
    **dict.fromkeys(("glm4v_text", "glm4v_moe_text", "glm_ocr_text"), ([8, 12, 12], False)),
    **dict.fromkeys(("qwen3_vl_text", "qwen3_vl_moe_text", "qwen3_omni_moe_text"), ([24, 20, 20], True)),
    "cosmos3_edge_text": ([24, 20, 20], True),
    **dict.fromkeys(("qwen3_5_text", "qwen3_5_moe_text", "qwen4_exp_text"), ([11, 11, 10], True)),
}
# Names in checkpoints of transformers 5, and in earlier ones; with a second "model." in some retrievers (Ops-Colqwen3).
_TEXT = "model.language_model."
QWEN_NAMES = CheckpointNames(
    prefixes=((f"model.{VISUAL}.", f"{VISUAL}."), (f"{_TEXT}model.", "model."), (_TEXT, "model.")),
    tower=(f"{VISUAL}.",),
    flattened=(".patch_embed.proj.weight",),
)


class Qwen2VLForConditionalGeneration(Qwen2ForCausalLM):
    """Qwen2 with M-RoPE and a vision tower."""

    checkpoint_names: ClassVar[CheckpointNames] = QWEN_NAMES
    read_tower: ClassVar[Callable[[ConfigFields, int], TowerConfig]] = staticmethod(read_qwen2_vl)

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        # Before transformers 5 the fields of the text were at the top level, next to all others.
        text = text_fields(fields) if fields.has("text_config") else fields
        text = without_mrope(text.with_defaults(rope_theta=1e6, rms_norm_eps=1e-5))
        return with_sight(super().read_hf(text), text, fields, cls.read_tower)


class Qwen2_5_VLForConditionalGeneration(Qwen2VLForConditionalGeneration):
    """Qwen2.5 with M-RoPE and a vision tower with windowed attention."""

    read_tower: ClassVar[Callable[[ConfigFields, int], TowerConfig]] = staticmethod(read_qwen2_5_vl)


def without_mrope(fields: ConfigFields) -> ConfigFields:
    """Return a copy of `fields` in which the rope type "mrope", which older files have for rope with sections, is
    replaced by "default". Raises ModelConfigError if the rope field is not a mapping.
    """
    changed = {}
    for name in _ROPES:
        if (rope := fields.mapping(name)) is not None:
            kind = {key: "default" for key in ("rope_type", "type") if rope.get(key) == "mrope"}
            changed[name] = {**rope, **kind}
    return ConfigFields({**fields.raw, **changed})


def with_sight(
    shared: dict[str, Any],
    text: ConfigFields,
    fields: ConfigFields,
    read_tower: Callable[[ConfigFields, int], TowerConfig],
) -> dict[str, Any]:
    """Return `shared` with M-RoPE added to its attention layers and the vision tower added as "tower": keyword
    arguments of a ModelConfig. `shared` is not changed.

    Args:
      shared: the arguments read from the text part, "attention" and "hidden_size" among them.
      text, fields: fields of the text part, and of the whole configuration.
      read_tower: function that returns the tower's config from (fields of `vision_config`, hidden size of the text
        model).

    Raises ModelConfigError for wrong fields, and if `vision_config` is absent.
    """
    vision = fields.mapping("vision_config")
    if vision is None:
        raise fields.fail("vision_config", "a mapping")
    return with_rope_sections(shared, text) | {"tower": read_tower(ConfigFields(vision), shared["hidden_size"])}


def with_rope_sections(shared: dict[str, Any], text: ConfigFields) -> dict[str, Any]:
    """Return a copy of `shared`, keyword arguments of a ModelConfig, in which each layer of "attention" that has rope
    has M-RoPE with the `mrope_section` of the text part `text`, interleaved if `mrope_interleaved` is true. If they are
    absent, both are what transformers has for the model_type of `text`; for another type `mrope_section` is required,
    and not interleaved. Raises ModelConfigError if it is not a list of integers, and for an `mrope_interleaved` that is
    false where transformers always interleaves.
    """
    rope = ConfigFields(next((found for name in _ROPES if (found := text.mapping(name)) is not None), {}))
    usual, always = _SECTIONS.get(text.text("model_type", ""), (None, False))
    sections = rope.value("mrope_section") if usual is None else rope.value("mrope_section", usual)
    if not isinstance(sections, list) or any(type(count) is not int for count in sections):
        raise rope.fail("mrope_section", "a list of three numbers of pairs")
    if always:
        rope.require(mrope_interleaved=True)
    turned = {"sections": tuple(sections), "sections_interleaved": rope.boolean("mrope_interleaved", always)}
    layers = (
        each if each.rope is None else replace(each, rope=replace(each.rope, **turned)) for each in shared["attention"]
    )
    return shared | {"attention": tuple(layers)}
