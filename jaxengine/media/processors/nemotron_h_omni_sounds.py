"""Processor of Nemotron-H Omni's sounds: spectrograms of clips of 30 seconds, and tokens before and after a sound."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from jaxengine.media.base.processor import MediaProcessor
from jaxengine.media.base.samples import RATE, Sound
from jaxengine.media.processors.log_mel import HOP
from jaxengine.media.processors.nemo_mel import LENGTH, WINDOW, nemo_mel
from jaxengine.media.processors.nemotron_h_omni import NemotronHOmniProcessor
from jaxengine.media.processors.paired import PairedProcessor
from jaxengine.media.processors.sounds import SoundProcessor
from jaxengine.models.config.fields import ConfigFields, ModelConfigError
from jaxengine.models.config.model_config import ModelConfig

_MARKS = ("<so_start>", "<so_end>")
_PREEMPHASIS = 0.97
_SHORTEST = RATE // 10  # samples of the last clip; shorter ones are padded with silence


def nemotron_h_omni(
    folder: Path | str, config_json: Mapping[str, Any], model_config: ModelConfig, tokenizer: Any
) -> MediaProcessor:
    """Return the processor of NemotronH_Omni_Reasoning_V3 for the towers that it is served with.

    Arguments and errors are those of jaxengine.media.registry.processor_for.
    """
    kinds = NemotronHOmniProcessor, NemotronSoundProcessor
    return NemotronPairedProcessor.of_towers(*kinds, folder, config_json, model_config, tokenizer)


class NemotronPairedProcessor(PairedProcessor):
    """Processor of a checkpoint that sees and hears."""

    in_texts: ClassVar[tuple[str, ...]] = NemotronHOmniProcessor.in_texts

    def encode(self, text: str, token_ids: Sequence[int]) -> list[int]:
        """Return the token ids of a prompt `text`, with one token for each placeholder of a video."""
        seeing: Any = self.seeing
        return seeing.encode(text, token_ids)


class NemotronSoundProcessor(SoundProcessor):
    """Processor of the sounds of NemotronH_Omni_Reasoning_V3. A sound is cut into clips of which each has a spectrogram
    of its own; the settings of spectrograms are in config.json.
    """

    token_fields = ("audio_token_id", "sound_context_token_id")

    def __init__(self, folder: Path | str, config_json: Mapping[str, Any], model_config: ModelConfig, tokenizer: Any):
        """Read the settings of spectrograms, and set `marks`, the tokens before and after a sound. Raises
        ModelConfigError for settings that are not supported, invalid token ids, and a tokenizer without these tokens.
        """
        audio = next((config_json[name] for name in ("audio_config", "sound_config") if config_json.get(name)), {})
        self.fields = ConfigFields(audio)
        super().__init__(folder, config_json, model_config, tokenizer)
        self.chunk = self.num_frames
        if tokenizer is not None:
            found = [tokenizer.backend.token_to_id(token) for token in _MARKS]
            if None in found:
                raise ModelConfigError(f"the tokenizer has no {_MARKS[found.index(None)]!r}, for prompts with sounds")
            self.marks = tuple(found)

    def read_features(self, folder: Path) -> ConfigFields:
        """Return the settings of the model's configuration. Raises ModelConfigError for settings
        that are not supported.
        """
        sizes = {"hop_length": HOP, "n_fft": LENGTH, "win_length": WINDOW}
        self.fields.require(**sizes, sampling_rate=RATE, padding_value=0.0, preemphasis=_PREEMPHASIS)
        return self.fields

    def clips(self, sound: Sound) -> list[int]:
        """Return the number of samples of each clip of a sound; the last one is at least _SHORTEST."""
        full, rest = divmod(max(len(sound.samples), _SHORTEST), self.num_frames * HOP)
        return [self.num_frames * HOP] * full + ([max(rest, _SHORTEST)] if rest else [])

    def spectrogram(self, samples: np.ndarray) -> np.ndarray:
        """Return the spectrograms f32[P, bins] of the clips of samples f32[N], one after the other."""
        ends = range(0, len(samples), self.num_frames * HOP)
        clips = (samples[first : first + self.num_frames * HOP] for first in ends)
        return np.concatenate([nemo_mel(clip, self.num_bins, _PREEMPHASIS) for clip in clips])

    def num_samples(self, sound: Sound) -> int:
        """Return the number of samples of all clips of a sound."""
        return sum(self.clips(sound))

    def num_rows(self, sound: Sound) -> int:
        """Return the number of embeddings of a sound: one for each tower.merge frames begun in a clip."""
        return sum(-(-(count // HOP) // self.tower.merge) for count in self.clips(sound))

    def held(self, sound: Sound) -> int:
        """Return the number of frames of all clips of a sound."""
        return self.num_samples(sound) // HOP
