"""Gemma 4 without towers (Google 2026, as Gemma 4 12B): the layers of a Gemma 4 without experts and without per-layer
inputs. Checkpoints project pixels and samples to embeddings; that part is not read.
"""

from __future__ import annotations

from typing import Any, ClassVar

from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.readers.hf import text_fields
from jaxengine.models.families.gemma4 import NAMES, Gemma4ForCausalLM
from jaxengine.models.params.source import CheckpointNames


class Gemma4UnifiedForCausalLM(Gemma4ForCausalLM):
    """Gemma 4 without per-layer inputs and without experts."""

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        fields.require(enable_moe_block=False)
        fields = fields.with_defaults(sliding_window=1024, max_position_embeddings=262144)
        return super().read_hf(ConfigFields({**fields.raw, "hidden_size_per_layer_input": 0}))


class Gemma4UnifiedForConditionalGeneration(Gemma4UnifiedForCausalLM):
    """Language model of a checkpoint that also takes images and audio, which are not supported here."""

    checkpoint_names: ClassVar[CheckpointNames] = CheckpointNames(
        prefixes=NAMES.prefixes, unused=("model.vision_embedder.", "model.embed_vision.", "model.embed_audio.")
    )

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        return super().read_hf(text_fields(fields))
