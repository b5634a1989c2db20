"""Processor of VibeVoice-ASR's sounds: samples of equal loudness, in windows that overlap, and their durations in
prompts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxengine.media.base.processor import Expanded, Processed
from jaxengine.media.base.samples import Sound
from jaxengine.media.processors.log_mel import required_features
from jaxengine.media.processors.settings import WHOLE
from jaxengine.media.processors.sounds import AskedTranscripts, SoundProcessor
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.model_config import ModelConfig
from jaxengine.models.config.readers.hf import errors_of
from jaxengine.models.params.files import read_object
from jaxengine.scheduler.base.errors import RequestError
from jaxengine.scheduler.base.media import AUDIO

_MOST_DECIBELS = 200


class VibeVoiceAsrProcessor(AskedTranscripts, SoundProcessor):
    """Processor of VibeVoiceAsrForConditionalGeneration.

    Attributes:
      duration: text in prompts in the place of a sound's seconds.
    """

    usual_token = 151648  # in transformers
    around = ("<|object_ref_start|>", "<|object_ref_end|>")

    def __init__(self, folder: Path | str, config_json: Mapping[str, Any], model_config: ModelConfig, tokenizer: Any):
        """Read the checkpoint's settings, and set `duration`, audio_duration_token of processor_config.json. Raises the
        errors of SoundProcessor.
        """
        super().__init__(folder, config_json, model_config, tokenizer)
        whole = ConfigFields(read_object(Path(folder), WHOLE) or {})
        with errors_of(Path(folder) / WHOLE):
            self.duration = whole.text("audio_duration_token", "<|AUDIO_DURATION|>")

    def read_features(self, folder: Path) -> ConfigFields:
        """Return the settings of samples, and set `loudness`, the root mean square that they get (target_dB_FS, by
        default -25), None for that of the sound (normalize_audio false or null), and `eps`, which is added to what they
        are divided by. Raises ModelFileError for settings other than those of the tower, and values out of range.
        """
        hop = self.tower.num_features
        wanted = {"feature_size": 1, "sampling_rate": self.tower.rate, "padding_value": 0.0, "padding_side": "right"}
        found = required_features(folder, **wanted, pad_to_multiple_of=hop)
        with errors_of(folder):
            decibels = found.value("target_dB_FS", -25)
            is_number = isinstance(decibels, int | float) and not isinstance(decibels, bool)
            if not is_number or not -_MOST_DECIBELS <= decibels <= _MOST_DECIBELS:
                raise found.fail("target_dB_FS", f"a number from -{_MOST_DECIBELS} to {_MOST_DECIBELS}")
            self.loudness = (
                10 ** (decibels / 20) if found.boolean("normalize_audio", True, null_is_false=True) else None
            )
            self.eps = found.number("eps", 1e-6)
        return found

    @property
    def hop(self) -> int:
        return self.tower.num_features

    def spectrogram(self, samples: np.ndarray) -> np.ndarray:
        """Return frames f32[P, F] of samples f32[N], scaled to `loudness` and then, if one is above 1, by the largest;
        the last frame is filled up with zeros. Each window but the first begins with the last `context` frames of the
        one before.
        """
        if self.loudness is not None:
            # Summed in float64 without a copy of all samples, which would be several times as large as the sound.
            total = np.einsum("n,n->", samples, samples, dtype=np.float64)
            samples = samples * np.float32(self.loudness / (np.sqrt(total / len(samples)) + self.eps))
            if (largest := np.abs(samples).max()) > 1:
                samples = samples / (largest + np.float32(self.eps))
        frames = np.pad(samples, (0, -len(samples) % self.hop)).reshape(-1, self.hop)
        return frames[np.minimum(self._order(len(frames)), len(frames) - 1)].astype(np.float32)

    def num_samples(self, sound: Sound) -> int:
        """Return the number of samples of a sound, which is not padded."""
        return len(sound.samples)

    def num_rows(self, sound: Sound) -> int:
        """Return the number of embeddings of a sound, one for each frame that it begins."""
        return -(-len(sound.samples) // self.hop)

    def placed(self, sound: Sound, num_frames: int) -> tuple[np.ndarray, np.ndarray]:
        """Return (columns, rows) of a sound with num_frames frames in all windows: no columns, and the numbers of its
        embeddings, -1 for frames that a window has from the one before.
        """
        order = self._order(self.num_rows(sound))
        is_new = np.arange(len(order)) % self.tower.unit >= self.tower.context
        is_new[: self.tower.unit] = True
        rows = np.where(is_new, order, -1).astype(np.int32)
        return np.zeros((0, num_frames), np.int32), np.pad(rows, (0, num_frames - len(rows)), constant_values=-1)

    def process(self, modality: str, value: Any, options: Mapping[str, Any], most: int | None = None) -> Processed:
        """Return the item of a Sound (`value`), with its duration in `seconds`. Raises the errors of
        SoundProcessor.process.
        """
        made = super().process(modality, value, options, most)
        return made._replace(seconds=(value.seconds,))

    def expand(self, token_ids: Sequence[int], items: Mapping[str, Sequence[Processed]]) -> Expanded:
        """Return the expanded prompt of SoundProcessor.expand, in whose text each `duration` is replaced by the seconds
        of a sound, with two decimals, in order. Raises RequestError for another number of sounds than placeholders, and
        for more durations than sounds.
        """
        sounds = items.get(AUDIO, ())
        if self.tokenizer is not None and sounds:
            text = self.tokenizer.decode(token_ids, skip_special_tokens=False)
            pieces = text.split(self.duration)
            if len(pieces) - 1 > len(sounds):
                problem = (
                    f"the prompt has {len(pieces) - 1} of the text {self.duration} and {len(sounds)} sounds are given"
                )
                raise RequestError(problem, param=AUDIO)
            if len(pieces) > 1:
                shown = [f"{item.seconds[0]:.2f}" for item in sounds]
                text = "".join(
                    piece + each for piece, each in zip(pieces, [*shown[: len(pieces) - 1], ""], strict=True)
                )
                token_ids = self.tokenizer.encode(text, add_special_tokens=False)
        return super().expand(token_ids, items)

    def _order(self, num_frames: int) -> np.ndarray:
        """Return the number of the frame at each place of all windows, i64[P]."""
        unit, context = self.tower.unit, self.tower.context
        windows = [np.arange(min(unit, num_frames))]
        for first in range(unit, num_frames, unit - context):
            windows.append(np.arange(first - context, min(first - context + unit, num_frames)))
        return np.concatenate(windows)
