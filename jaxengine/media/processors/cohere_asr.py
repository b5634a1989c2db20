"""Processor of Cohere Transcribe: log-mel spectrograms whose bins have mean 0 and variance 1, and its prompts.

Spectrograms are those of transformers' CohereAsrFeatureExtractor up to rounding, with the noise that it adds. NumPy
only.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxengine.media.base.processor import Processed
from jaxengine.media.base.samples import RATE, Sound
from jaxengine.media.processors.attended import PieceProcessor
from jaxengine.media.processors.log_mel import HOP, required_features
from jaxengine.media.processors.nemo_mel import LENGTH, WINDOW, nemo_mel
from jaxengine.media.processors.settings import check_options
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.model_config import ModelConfig
from jaxengine.models.config.readers.hf import errors_of
from jaxengine.models.params.errors import ModelFileError
from jaxengine.scheduler.base.errors import RequestError

_SHORTEST = 2 * HOP  # of one frame there is no variance
_LANGUAGES = ("ar", "de", "el", "en", "es", "fr", "it", "ja", "ko", "nl", "pl", "pt", "vi", "zh")
_UNSPACED = ("ja", "zh")
_USUAL = "en"
_BEGIN = ("\u2581", "<|startofcontext|>", "<|startoftranscript|>", "<|emo:undefined|>")
_END = ("<|pnc|>", "<|noitn|>", "<|notimestamp|>", "<|nodiarize|>")
_NOTHING = -1  # in the column of frames after a sound


class CohereAsrProcessor(PieceProcessor):
    """Processor of CohereAsrForConditionalGeneration.

    Attributes:
      num_bins: mel bins of a frame.
      preemphasis: share of each sample that is taken off the next one.
      dither: deviation of the noise that is added to samples; 0 for none.
    """

    def __init__(self, folder: Path, config_json: Mapping[str, Any], model_config: ModelConfig, tokenizer: Any):
        """Read the settings of spectrograms, and set `languages`: those of which the tokenizer has a token.

        folder: of the checkpoint. model_config: has the tower's sizes. config_json: not used. tokenizer: None without
        one. Raises ModelFileError for settings that are invalid or not the tower's, and for a tokenizer without the
        tokens of a prompt.
        """
        tower: Any = model_config.tower
        self.num_frames, self.num_bins, self.tokenizer = tower.unit, tower.num_features, tokenizer
        wanted = {"feature_size": self.num_bins, "n_fft": LENGTH, "win_length": WINDOW, "hop_length": HOP}
        features = required_features(folder, **wanted, sampling_rate=RATE, padding_side="right", padding_value=0.0)
        with errors_of(folder):
            self._read(features)
        if tokenizer is not None:
            find = tokenizer.backend.token_to_id
            if missing := [token for token in (*_BEGIN, *_END) if find(token) is None]:
                raise ModelFileError(folder, f"the tokenizer has no {missing[0]!r}, which begins each transcript")
            self.languages = [code for code in _LANGUAGES if find(f"<|{code}|>") is not None]
        self.settings = f"{type(self).__name__} {self.num_frames} {sorted(features.raw.items(), key=str)}"

    def _read(self, features: ConfigFields) -> None:
        """Set the attributes from the settings of spectrograms: `most` from max_audio_clip_s (35 seconds by default, at
        most the tower's length), `search` from overlap_chunk_second (5 by default, at most half of that), both rounded
        to samples and at least 1, `window` from min_energy_window_samples (a tenth of a second), and preemphasis (0.97)
        and dither (1e-5), each from 0 to 1. Raises ModelConfigError for a value that is not allowed.
        """

        def number(name: str, default: float, most: float) -> float:
            given = features.value(name, default)
            if isinstance(given, bool) or not isinstance(given, int | float) or not 0 <= given <= most:
                raise features.fail(name, f"a number >= 0 and <= {most:g}")
            return float(given)

        longest = self.num_frames * HOP
        given = number("max_audio_clip_s", min(35.0, longest / RATE), longest / RATE)
        self.most = max(1, round(given * RATE))
        # A piece is then never short.
        self.search = max(1, round(number("overlap_chunk_second", 5.0, given / 2) * RATE))
        self.window = features.integer("min_energy_window_samples", RATE // 10)
        self.preemphasis, self.dither = number("preemphasis", 0.97, 1.0), number("dither", 1e-5, 1.0)

    def prompt(self, language: str | None) -> list[int]:
        """Return the token ids that request a transcript with punctuation. language: one of `languages`; None for
        English. Needs the tokenizer.
        """
        code = f"<|{language or _USUAL}|>"
        return [self.tokenizer.backend.token_to_id(token) for token in (*_BEGIN, code, code, *_END)]

    def separator(self, language: str | None) -> str:
        """Return the text between the transcripts of two pieces of a sound: a space, but nothing in Japanese and
        Chinese.
        """
        return "" if language in _UNSPACED else " "

    def process(self, modality: str, value: Any, options: Mapping[str, Any], most: int | None = None) -> Processed:
        """Return a Sound as one item: its spectrogram, padded with zeros that do not count. A sound of fewer than two
        frames is padded with silence to two. most: not used.

        Raises RequestError for any option, longer sounds, and other values.
        """
        check_options(options, ())
        if not isinstance(value, Sound):
            raise RequestError("this model takes a sound, and no spectrogram of one", param="multi_modal_data")
        self.check_length(value, self.most)
        frames = self.spectrogram(np.pad(value.samples, (0, max(0, _SHORTEST - len(value.samples)))))
        padded = np.zeros((self.num_frames, self.num_bins), np.float32)
        padded[: len(frames)] = frames
        heard = np.where(np.arange(self.num_frames) < len(frames), 1, _NOTHING)
        return self.item(padded, heard[None].astype(np.int32))

    def spectrogram(self, samples: np.ndarray) -> np.ndarray:
        """Return f32[N // HOP, num_bins], `nemo_mel` of samples f32[N], N >= _SHORTEST."""
        return nemo_mel(samples, self.num_bins, self.preemphasis, self.dither)
