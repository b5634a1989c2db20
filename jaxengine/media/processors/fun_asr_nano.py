"""Processor of Fun-ASR-Nano's sounds: Kaldi's log-mel spectrograms, of which neighbouring frames are stacked. NumPy
only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from jaxengine.media.base.processor import Processed
from jaxengine.media.base.samples import RATE, Sound
from jaxengine.media.processors.log_mel import HOP, required_features
from jaxengine.media.processors.sounds import SoundProcessor, check_length
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.model_config import ModelConfig
from jaxengine.scheduler.base.media import AUDIO

# Samples of a window, and the length to which it is padded with zeros.
_WINDOW, _LENGTH = 400, 512
_EMPHASIS = 0.97  # share of the preceding sample that is subtracted
_LOWEST = 20.0  # hertz
_FLOOR = float(np.finfo(np.float32).eps)
# Frames whose spectra are computed at a time.
_BLOCK = 3000


class FunAsrNanoProcessor(SoundProcessor):
    """Processor of FunAsrNanoForConditionalGeneration, which transcribes when it is asked to.

    Attributes:
      languages: names of the languages in which a transcript may be requested, by their codes.
      text_mark: None: answers are only text.
    """

    usual_token = 151646  # in transformers
    languages: Mapping[str, str] = {"zh": "中文", "en": "英文", "ja": "日文"}
    text_mark: str | None = None

    def __init__(self, folder: Path | str, config_json: Mapping[str, Any], model_config: ModelConfig, tokenizer: Any):
        super().__init__(folder, config_json, model_config, tokenizer)
        self.chunk = self.tower.unit

    def read_features(self, folder: Path) -> ConfigFields:
        """Return the settings of spectrograms, and set `num_bins`. Raises ModelFileError for settings other than those
        of the tower and this module.
        """
        stacked = self.tower.stacked
        self.num_bins = self.tower.num_features // stacked
        times = {"frame_length": 25, "frame_shift": 10, "stride_lfr": self.tower.frames, "window": "hamming"}
        return required_features(
            folder, feature_size=self.num_bins, num_frames_lfr=stacked, sampling_rate=RATE, **times
        )

    def spectrogram(self, samples: np.ndarray) -> np.ndarray:
        """Return patches f32[P, F] of samples f32[N]: frames `tower.frames` apart, each with its neighbours, as many
        before as after it (one more after it if the number is odd). The first and the last frame stand for those beyond
        them.
        """
        frames, stacked = kaldi_mel(samples, self.num_bins), self.tower.stacked
        first = np.arange(0, len(frames), self.tower.frames)[:, None] - (stacked - 1) // 2
        near = np.clip(first + np.arange(stacked), 0, len(frames) - 1)
        return frames[near].reshape(len(near), -1)

    def num_samples(self, sound: Sound) -> int:
        """Return the number of samples of a sound, which is not padded. Raises RequestError for more than the tower
        takes.
        """
        check_length(sound, _WINDOW + self.hop * self.tower.longest - 1)
        return len(sound.samples)

    def num_rows(self, sound: Sound) -> int:
        """Return the number of embeddings of a sound, one for each patch, of which the last may have fewer frames; 0
        for a sound shorter than a window.
        """
        frames = max(0, 1 + (len(sound.samples) - _WINDOW) // HOP)
        return -(-frames // self.tower.frames)

    def placed(self, sound: Sound, num_frames: int) -> tuple[np.ndarray, np.ndarray]:
        """Return (columns, rows) of a sound with num_frames patches: 0 and the numbers from 1, i32[2, num_frames], and
        the numbers of its embeddings, i32[num_frames]; -1 in all of them after the sound.
        """
        return self._placed(self.num_rows(sound), num_frames)

    def largest(self, modality: str, size: tuple[int, int] | None = None, num_frames: int | None = None) -> Processed:
        """Return the largest item of a step, the longest sound, whatever the arguments; its patches are f32[P, 0]."""
        count, rows = self.num_frames, self.tower.longest
        return Processed(np.zeros((count, 0), np.float32), *self._placed(rows, count), rows, (1, count, 1))

    def transcription(self, language: str | None, context: str) -> list[dict[str, Any]]:
        """Return the messages that request a transcript of a sound: one of the user, with the sound, the context and
        the language.

        language: a key of `languages`; None lets the model detect it. context: text that may help; "" for none. Raises
        KeyError for another language.
        """
        content: list[dict[str, Any]] = [{"type": AUDIO}]
        if context:
            content.append({"type": "text", "text": context})
        if language is not None:
            content.append({"type": "language", "language": self.languages[language]})
        return [{"role": "user", "content": content}]

    def _placed(self, num_rows: int, num_frames: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the result of `placed` for a sound of num_rows patches among num_frames: columns i32[2, num_frames], 0
        and the patch's number from 1, and rows i32[num_frames], its number from 0; all are -1 in padding.
        """
        places = np.arange(num_frames, dtype=np.int32)
        rows = np.where(places < num_rows, places, -1).astype(np.int32)
        return np.stack([np.minimum(rows, 0), np.where(rows < 0, -1, rows + 1)]).astype(np.int32), rows


def kaldi_mel(samples: np.ndarray, num_bins: int) -> np.ndarray:
    """Return the log-mel spectrogram f32[1 + (N - 400) // 160, num_bins] of samples f32[N], N >= 400, as Kaldi computes
    it without dither: windows that lie within the sound, without their mean, with preemphasis, of Hamming's shape. The
    logarithm is natural, of at least 2**-23.
    """
    windows = np.lib.stride_tricks.sliding_window_view(samples, _WINDOW)[::HOP]
    shape, filters = np.hamming(_WINDOW), kaldi_filters(num_bins)
    out = np.empty((len(windows), num_bins), np.float32)
    for first in range(0, len(windows), _BLOCK):
        own = windows[first : first + _BLOCK].astype(np.float64)
        own = own - own.mean(axis=1, keepdims=True)
        before = np.concatenate([own[:, :1], own[:, :-1]], axis=1)
        power = np.abs(np.fft.rfft((own - _EMPHASIS * before) * shape, _LENGTH)) ** 2
        out[first : first + _BLOCK] = np.log(np.maximum(power @ filters, _FLOOR))
    return out


@lru_cache
def kaldi_filters(num_bins: int) -> np.ndarray:
    """Return Kaldi's filters f32[257, num_bins]: triangles on the mel scale 1127 log(1 + f / 700), evenly spaced from
    20 hertz to half the rate; 0 for that last frequency. They are computed in float32, as by torchaudio, and cached: do
    not change the array.
    """
    low, high = (1127.0 * math.log(1.0 + each / 700.0) for each in (_LOWEST, RATE / 2))
    step, number = (high - low) / (num_bins + 1), np.arange(num_bins, dtype=np.float32)
    left, middle, right = (low + (number + more) * step for more in (0, 1, 2))
    frequencies = np.arange(_LENGTH // 2, dtype=np.float32)[:, None] * (RATE / _LENGTH)
    mels = 1127.0 * np.log(1.0 + frequencies / 700.0)
    up, down = (mels - left) / (middle - left), (right - mels) / (right - middle)
    return np.pad(np.maximum(0, np.minimum(up, down)), ((0, 1), (0, 0)))
