"""GLM-ASR (Z.ai 2025): Llama that writes down sounds of up to eleven minutes."""

from __future__ import annotations

from typing import Any, ClassVar

from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.families.qwen2_audio import Qwen2AudioForConditionalGeneration, read_sound_text
from jaxengine.models.sound.glmasr import read_glmasr

# transformers' defaults of fields of the text part that a file lacks.
_DEFAULTS: dict[str, Any] = {
    "vocab_size": 59264,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "eos_token_id": [59246, 59253, 59255],
}


class GlmAsrForConditionalGeneration(Qwen2AudioForConditionalGeneration):
    """Llama with sounds in the prompt, which are encoded in windows of 30 seconds."""

    text: ClassVar[str] = "llama"

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        # transformers reads this field of the wrapper alone.
        tied = fields.boolean("tie_word_embeddings", True)
        return read_sound_text(cls, fields, _DEFAULTS, tied) | {"tower": read_glmasr(fields)}
