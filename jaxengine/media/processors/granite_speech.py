"""Processor of Granite Speech's sounds: pairs of spectrogram frames, and as many embeddings as its queries make of the
windows that a sound has begun.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxengine.media.base.samples import RATE, Sound
from jaxengine.media.processors.log_mel import HOP, htk_filters, log_spectrogram, required_features
from jaxengine.media.processors.sounds import AskedTranscripts, SoundProcessor, check_length
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.model_config import ModelConfig
from jaxengine.models.config.readers.hf import errors_of
from jaxengine.scheduler.base.errors import RequestError

_LENGTH, _WINDOW = 512, 400  # samples of a Fourier transform, and of a window


class GraniteSpeechProcessor(AskedTranscripts, SoundProcessor):
    """Processor of GraniteSpeechForConditionalGeneration."""

    token_fields = ("audio_token_index", "audio_token_id")
    usual_token = 49155  # in transformers
    request = "can you transcribe the speech into a written format?"

    def __init__(self, folder: Path | str, config_json: Mapping[str, Any], model_config: ModelConfig, tokenizer: Any):
        super().__init__(folder, config_json, model_config, tokenizer)
        self.chunk = self.tower.unit

    def read_features(self, folder: Path) -> ConfigFields:
        queries, bins = self.tower.queries, self.num_bins // self.tower.frames
        sizes = {"projector_window_size": queries.window, "sampling_rate": RATE}
        found = required_features(folder, **sizes, projector_downsample_rate=queries.window // queries.num_queries)
        mels = {"sample_rate": RATE, "n_fft": _LENGTH, "win_length": _WINDOW, "hop_length": HOP, "n_mels": bins}
        with errors_of(folder):
            for fields in (found, ConfigFields(found.mapping("melspec_kwargs") or {})):
                fields.require(**mels)
        return found

    def spectrogram(self, samples: np.ndarray) -> np.ndarray:
        """Return pairs of frames, f32[P, num_bins], of samples f32[N]; a last single frame is dropped."""
        bins = self.num_bins // self.tower.frames
        frames = log_spectrogram(samples, htk_filters(bins, _LENGTH), len(samples) // HOP + 1)
        joined = self.tower.frames
        return frames[: len(frames) // joined * joined].reshape(-1, self.num_bins)

    def num_samples(self, sound: Sound) -> int:
        """Return the number of samples of a sound, which is not padded. Raises RequestError for more than the tower
        takes.
        """
        check_length(sound, self.num_frames * self.hop)
        return len(sound.samples)

    def num_rows(self, sound: Sound) -> int:
        """Return the number of embeddings of a sound: those of each window of frame pairs that the sound fills at least
        partly.
        """
        queries = self.tower.queries
        return -(-self.held(sound) // queries.window) * queries.num_queries

    def transcription(self, language: str | None, context: str) -> list[dict[str, Any]]:
        """Return the messages that request a transcript of a sound; `language` is ignored.

        Raises RequestError for a context other than "", with which the model was not trained.
        """
        if context:
            raise RequestError("prompt: this model's request for a transcript has no context", param="prompt")
        return super().transcription(language, context)

    def held(self, sound: Sound) -> int:
        """Return the number of pairs of spectrogram frames of a sound."""
        return (len(sound.samples) // HOP + 1) // self.tower.frames
