"""LFM2-VL and LFM2.5-VL (Liquid AI 2025): LFM2 with a vision tower over an image and its tiles."""

from __future__ import annotations

from typing import Any, ClassVar

from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.readers.hf import text_of_type
from jaxengine.models.families.lfm2 import Lfm2ForCausalLM
from jaxengine.models.params.source import CheckpointNames
from jaxengine.models.vision.lfm2_vl import read_lfm2_vl
from jaxengine.models.vision.llava import PROJECTOR, TOWER


class Lfm2VlForConditionalGeneration(Lfm2ForCausalLM):
    """LFM2 with a vision tower."""

    checkpoint_names: ClassVar[CheckpointNames] = Lfm2ForCausalLM.checkpoint_names._replace(
        prefixes=(
            ("model.language_model.", "model."),
            *((f"model.{TOWER}.{more}", f"{TOWER}.") for more in ("vision_model.", "")),
            (f"model.{PROJECTOR}.", f"{PROJECTOR}."),
        ),
        tower=(f"{TOWER}.", f"{PROJECTOR}."),
    )

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        fields = fields.with_defaults(tie_word_embeddings=fields.boolean("tie_embedding", True))
        text = text_of_type(fields, "lfm2")
        return super().read_hf(text) | {"tower": read_lfm2_vl(fields)}
