"""DeepSeek-OCR (Wei et al. 2025, arXiv:2510.18234), as it was published and with transformers' names of the same
(those of its UnlimitedOcr): the text model of DeepSeek-OCR 2 with another vision tower.
"""

from __future__ import annotations

from typing import Any, ClassVar

from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.families.deepseek_ocr2 import (
    NAMES,
    DeepseekOcr2ForConditionalGeneration,
    named_as_transformers,
    read_text,
)
from jaxengine.models.params.source import CheckpointNames
from jaxengine.models.vision.deepseek_ocr import TOWER
from jaxengine.models.vision.deepseek_ocr1 import NEWLINE, read_deepseek_ocr

_ENCODER, _FIRST = f"{TOWER}.vision_encoder", "model.vision_model"
_FULL = "full_attention"
# Names in the published config.json -> transformers' names, of the second encoder.
_SIZES = {
    "width": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "image_size": "image_size",
    "patch_size": "patch_size",
}


class DeepseekOCRForCausalLM(DeepseekOcr2ForConditionalGeneration):
    """Llama's attention with DeepSeek-V2's experts, and a vision tower of SAM and CLIP."""

    checkpoint_names: ClassVar[CheckpointNames] = NAMES._replace(
        prefixes=(
            *NAMES.prefixes,
            (f"model.{NEWLINE}", NEWLINE),
            (f"{_FIRST}.transformer.", f"{_ENCODER}.encoder."),
            (f"{_FIRST}.", f"{_ENCODER}."),
        ),
        tower=(*NAMES.tower, NEWLINE),
        # CLIP's own patches, in whose place it has SAM's rows, and numbers of positions.
        unused_ends=(".embeddings.patch_embedding.weight", ".embeddings.position_ids"),
        joined={
            f".self_attn.qkv_proj.{end}": tuple(f".self_attn.{part}_proj.{end}" for part in "qkv")
            for end in ("weight", "bias")
        },
    )

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        fields = _as_transformers(fields) if fields.has("language_config") else fields
        text = fields.part("text_config")
        # Unlimited-OCR, which has the same fields, lets tokens see the prompt and a window behind it.
        text.require(layer_types=[_FULL] * text.integer("num_hidden_layers"))
        return read_text(fields, "unlimited_ocr_text") | {"tower": read_deepseek_ocr(fields)}


def _as_transformers(fields: ConfigFields) -> ConfigFields:
    """Return the fields of a published config.json as transformers calls them: sizes of the encoders are in `sam_vit_b`
    and `clip-l-14-224` of `width` of its vision_config. Raises ModelConfigError for wrong fields and for what
    named_as_transformers refuses.
    """
    widths = fields.part("vision_config").part("width")
    encoder, sam = widths.part("clip-l-14-224"), widths.part("sam_vit_b")
    found = {usual: encoder.value(own, None) for own, usual in _SIZES.items()}
    named = {name: value for name, value in found.items() if value is not None}
    channels = sam.value("downsample_channels", None)
    return named_as_transformers(fields, {} if channels is None else {"downsample_channels": channels}, named)
