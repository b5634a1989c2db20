"""VibeVoice-ASR (Microsoft 2026, arXiv:2601.18184): Qwen2 that writes down who says what, and when, of sounds of an
hour."""

from __future__ import annotations

from typing import Any, ClassVar

from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.families.qwen2_audio import AUDIO_NAMES, Qwen2AudioForConditionalGeneration, read_sound_text
from jaxengine.models.params.source import CheckpointNames
from jaxengine.models.sound.vibevoice_asr import ACOUSTIC, CONVOLUTION, SEMANTIC, read_vibevoice_asr
from jaxengine.models.vision.llava import PROJECTOR

_PARTS = (f"{ACOUSTIC}.", f"{SEMANTIC}.", f"{PROJECTOR}.")


class VibeVoiceAsrForConditionalGeneration(Qwen2AudioForConditionalGeneration):
    """Qwen2 with sounds of any length in the prompt. Acoustic results have no noise, as with transformers'
    sample=False.
    """

    checkpoint_names: ClassVar[CheckpointNames] = AUDIO_NAMES._replace(
        prefixes=(*AUDIO_NAMES.prefixes[:3], *((f"model.{part}", part) for part in _PARTS)),
        tower=_PARTS,
        flattened=(CONVOLUTION,),
    )

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        # transformers never ties the head of this model.
        shared = read_sound_text(cls, fields, tied=False)
        return shared | {"tower": read_vibevoice_asr(fields)}
