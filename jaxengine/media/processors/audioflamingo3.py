"""Processors of sounds that are cut into windows, each with a spectrogram of its own, and of which the prompt has the
embeddings without those of the silence at the end: Audio Flamingo 3, Music Flamingo and GLM-ASR.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from jaxengine.media.base.samples import RATE, Sound
from jaxengine.media.processors.log_mel import HOP, log_mel
from jaxengine.media.processors.settings import WHOLE
from jaxengine.media.processors.sounds import AskedTranscripts, SoundProcessor, check_length, frames_of
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.model_config import ModelConfig
from jaxengine.models.config.readers.hf import errors_of
from jaxengine.models.params.files import read_object

# Limit of the seconds in the settings of a processor.
MOST_SECONDS = 24 * 3600


class AudioFlamingo3Processor(SoundProcessor):
    """Processor of AudioFlamingo3ForConditionalGeneration.

    Attributes:
      most_samples: samples of the longest sound, whole windows within `max_audio_len` seconds of the settings.
    """

    # transformers' defaults of max_audio_len and of the placeholder token.
    longest: ClassVar[int] = 600
    usual_token = 151669

    def __init__(self, folder: Path | str, config_json: Mapping[str, Any], model_config: ModelConfig, tokenizer: Any):
        """Read the checkpoint's settings, and set `most_samples`: max_audio_len seconds, `longest` if absent or null,
        in samples rounded down to whole windows. audio_token_id may be absent from config_json, not null.

        Raises the errors of SoundProcessor, and ModelFileError, with the file's name, for a chunk_length that is not
        the seconds of the tower's window, and for a max_audio_len of less than a window or more than MOST_SECONDS.
        """
        super().__init__(folder, config_json, model_config, tokenizer)
        path, window = Path(folder) / WHOLE, self.num_frames * HOP
        whole = ConfigFields(read_object(Path(folder), WHOLE) or {})
        with errors_of(path):
            self.features.require(chunk_length=window // RATE if window % RATE == 0 else window / RATE)
            seconds = whole.number("max_audio_len", self.longest)
            if not window <= seconds * RATE <= MOST_SECONDS * RATE:
                raise whole.fail("max_audio_len", f"a number of seconds from {window / RATE:g} to {MOST_SECONDS}")
        self.most_samples = int(seconds * RATE) // window * window

    def spectrogram(self, samples: np.ndarray) -> np.ndarray:
        """Return the spectrograms f32[P, bins] of each window of samples f32[N], one after the other. N is a multiple
        of a window's samples.
        """
        window = self.num_frames * HOP
        cuts = range(0, len(samples), window)
        return np.concatenate([log_mel(samples[first : first + window], self.num_bins) for first in cuts])

    def num_samples(self, sound: Sound) -> int:
        """Return the number of samples of a sound, padded to whole windows. Raises RequestError for a sound longer than
        `most_samples`.
        """
        check_length(sound, self.most_samples)
        window = self.num_frames * HOP
        return -(-len(sound.samples) // window) * window

    def num_rows(self, sound: Sound) -> int:
        """Return the number of embeddings of a sound without the silence after it: half of its frames, rounded up,
        joined by tower.merge / 2, where a rest is dropped.
        """
        # Whole rows of the positions that the second convolution, of stride 2, makes of the frames.
        return ((frames_of(sound) + 1) // 2) // (self.tower.merge // 2)


class MusicFlamingoProcessor(AudioFlamingo3Processor):
    """Processor of MusicFlamingoForConditionalGeneration, which puts tokens before and after the embeddings of a
    sound.
    """

    longest: ClassVar[int] = 1200
    # transformers' ids of tokens that a configuration does not name.
    usual_marks: ClassVar[Mapping[str, int]] = {"audio_bos_token_id": 151670, "audio_eos_token_id": 151671}

    def __init__(self, folder: Path | str, config_json: Mapping[str, Any], model_config: ModelConfig, tokenizer: Any):
        """Read the checkpoint's settings, and set `marks`, the tokens before and after a sound. Raises the errors of
        AudioFlamingo3Processor, and ModelConfigError for a mark that is not in the vocabulary.
        """
        super().__init__(folder, config_json, model_config, tokenizer)
        fields = ConfigFields(config_json)
        self.marks = tuple(fields.integer(name, usual, minimum=0) for name, usual in self.usual_marks.items())
        for name, token in zip(self.usual_marks, self.marks, strict=True):
            if token >= model_config.vocab_size:
                raise fields.fail(name, f"a token id below vocab_size {model_config.vocab_size}")

    def placed(self, sound: Sound, num_frames: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the columns and rows of AudioFlamingo3Processor.placed, where the second column is the number of a
        frame's window.
        """
        columns, rows = super().placed(sound, num_frames)
        columns[1] = np.arange(num_frames) // self.num_frames
        return columns, rows


class GlmAsrProcessor(AskedTranscripts, AudioFlamingo3Processor):
    """Processor of GlmAsrForConditionalGeneration."""

    longest: ClassVar[int] = 655
    usual_token = 59260
    around = ("<|begin_of_audio|>", "<|end_of_audio|>")

    def __init__(self, folder: Path | str, config_json: Mapping[str, Any], model_config: ModelConfig, tokenizer: Any):
        """Read the checkpoint's settings, and set `request`, default_transcription_prompt of its processor_config.json.
        Raises the errors of AudioFlamingo3Processor.
        """
        super().__init__(folder, config_json, model_config, tokenizer)
        whole = ConfigFields(read_object(Path(folder), WHOLE) or {})
        with errors_of(Path(folder) / WHOLE):
            self.request = whole.text("default_transcription_prompt", "Please transcribe this audio into text")
