"""MOSS-Transcribe-Diarize (OpenMOSS 2026): Qwen3 that writes down who says what, and when."""

from __future__ import annotations

from typing import Any, ClassVar

from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.families.qwen2_audio import Qwen2AudioForConditionalGeneration, read_sound_text
from jaxengine.models.sound.moss_transcribe import read_moss_transcribe


class MossTranscribeDiarizeForConditionalGeneration(Qwen2AudioForConditionalGeneration):
    """Qwen3 with sounds of any length in the prompt, among whose embeddings are the seconds that have passed."""

    text: ClassVar[str] = "qwen3"

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        # transformers reads this field of the wrapper alone.
        tied = fields.boolean("tie_word_embeddings", True)
        shared = read_sound_text(cls, fields, tied=tied)
        return shared | {"tower": read_moss_transcribe(fields, shared["rms_norm_eps"])}
