"""Fun-ASR-Nano (FunAudioLLM 2025, arXiv:2509.12508): Qwen3 that writes down sounds of up to two minutes."""

from __future__ import annotations

from typing import Any, ClassVar

from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.families.qwen2_audio import AUDIO_NAMES, Qwen2AudioForConditionalGeneration, read_sound_text
from jaxengine.models.params.source import CheckpointNames
from jaxengine.models.sound.fun_asr_nano import CONVOLUTION, read_fun_asr_nano


class FunAsrNanoForConditionalGeneration(Qwen2AudioForConditionalGeneration):
    """Qwen3 with sounds in the prompt, each of which is encoded whole."""

    text: ClassVar[str] = "qwen3"
    checkpoint_names: ClassVar[CheckpointNames] = AUDIO_NAMES._replace(flattened=(CONVOLUTION,))

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        # transformers reads this field of the wrapper alone.
        tied = fields.boolean("tie_word_embeddings", True)
        shared = read_sound_text(cls, fields, tied=tied)
        return shared | {"tower": read_fun_asr_nano(fields, shared["hidden_size"])}
