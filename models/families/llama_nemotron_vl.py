"""Llama Nemotron Nano VL (NVIDIA 2025): Llama behind RADIO, over images in tiles."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.families.llama import LlamaForCausalLM
from jaxengine.models.families.nemotron_h_omni import RADIO_NAMES, as_transformers
from jaxengine.models.families.wrapped import Wrapper
from jaxengine.models.params.source import CheckpointNames
from jaxengine.models.vision.radio import read_tiled_radio


class Llama_Nemotron_Nano_VL(Wrapper, LlamaForCausalLM):
    """Llama with a vision tower over images in tiles."""

    checkpoint_names: ClassVar[CheckpointNames] = RADIO_NAMES._replace(
        prefixes=(
            ("language_model.model.", "model."),
            ("language_model.lm_head.", "lm_head."),
            *RADIO_NAMES.prefixes,
        )
    )

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        fields = as_transformers(fields)
        return cls.read_text(fields) | {"tower": replace(read_tiled_radio(fields), plain_projector=True)}
