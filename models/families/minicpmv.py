"""MiniCPM-V 4.6 and 4.7, and MiniCPM-OCR (OpenBMB 2026): Qwen3.5 with a vision tower over an image and its slices."""

from __future__ import annotations

from typing import Any, ClassVar

from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.readers.hf import text_fields, text_of_type
from jaxengine.models.families.qwen2_vl import with_rope_sections, without_mrope
from jaxengine.models.families.qwen3_5 import Qwen3_5ForCausalLM
from jaxengine.models.params.source import CheckpointNames
from jaxengine.models.vision.minicpmv import MERGER, TOWER, read_minicpmv


class MiniCPMV4_6ForConditionalGeneration(Qwen3_5ForCausalLM):
    """Qwen3.5 with a vision tower. Embeddings of images have the positions of their tokens. `downsample_mode` is
    transformers' default.
    """

    checkpoint_names: ClassVar[CheckpointNames] = CheckpointNames(
        prefixes=(*((f"model.{part}.", f"{part}.") for part in (TOWER, MERGER)), ("model.language_model.", "model.")),
        tower=(f"{TOWER}.", f"{MERGER}."),
        flattened=(".patch_embedding.weight",),
        squeezed=(".conv1d.weight",),
    )
    downsample_mode: ClassVar[str] = "16x"

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        text = text_of_type(fields, "qwen3_5_text")
        return super().read_hf(without_mrope(text)) | {"tower": read_minicpmv(fields, cls.downsample_mode)}


class MiniCPMOcrForConditionalGeneration(MiniCPMV4_6ForConditionalGeneration):
    """MiniCPM-V 4.6 with four times as many rows for an image."""

    downsample_mode: ClassVar[str] = "4x"


class MiniCPMV4_7ForConditionalGeneration(MiniCPMV4_6ForConditionalGeneration):
    """MiniCPM-V 4.6 with M-RoPE, in which an image and its slices have the coordinates of one canvas."""

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        text = text_fields(fields)
        rope = text.mapping("rope_parameters") or text.mapping("rope_scaling") or {}
        # As Qwen3.5's in transformers: these sections by default, interleaved whatever the file says.
        rope = {"mrope_section": [11, 11, 10], **rope, "mrope_interleaved": True}
        return with_rope_sections(super().read_hf(fields), ConfigFields({"rope_parameters": rope}))
