"""Audio Flamingo 3 (Goel et al. 2025, arXiv:2507.08128) and Music Flamingo (Ghosh et al. 2025, arXiv:2511.10289): Qwen2
with sounds of up to ten or twenty minutes in the prompt.
"""

from __future__ import annotations

from typing import Any

from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.families.qwen2_audio import Qwen2AudioForConditionalGeneration, read_sound_text
from jaxengine.models.sound.audioflamingo3 import read_audioflamingo3
from jaxengine.models.sound.musicflamingo import read_musicflamingo


class AudioFlamingo3ForConditionalGeneration(Qwen2AudioForConditionalGeneration):
    """Qwen2 with sounds in the prompt, which are encoded in windows of 30 seconds."""

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        return read_sound_text(cls, fields) | {"tower": read_audioflamingo3(fields)}


class MusicFlamingoForConditionalGeneration(Qwen2AudioForConditionalGeneration):
    """Audio Flamingo 3 whose sounds also have their time in rotated elements."""

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        return read_sound_text(cls, fields) | {"tower": read_musicflamingo(fields)}
