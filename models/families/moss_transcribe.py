"""MOSS-Transcribe-Diarize (OpenMOSS 2026): Qwen3 that writes down who says what, and when."""

from __future__ import annotations

from typing import Any

from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.families.qwen2_audio import Qwen2AudioForConditionalGeneration, read_sound_text
from jaxengine.models.sound.moss_transcribe import read_moss_transcribe

# transformers' defaults of fields of the text part that a file lacks.
_DEFAULTS: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
}


class MossTranscribeDiarizeForConditionalGeneration(Qwen2AudioForConditionalGeneration):
    """Qwen3 with sounds of any length in the prompt, among whose embeddings are the seconds that have passed."""

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        # transformers reads this field of the wrapper alone.
        tied = {"tie_word_embeddings": fields.boolean("tie_word_embeddings", True)}
        text = {**(fields.mapping("text_config") or {}), **tied}
        shared = read_sound_text(ConfigFields({**fields.raw, "text_config": text}), _DEFAULTS)
        return shared | {"tower": read_moss_transcribe(fields, shared["rms_norm_eps"])}
