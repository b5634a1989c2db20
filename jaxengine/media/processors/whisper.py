"""Processor of Whisper: log-mel spectrograms of 30 seconds, and the special tokens of its prompts. NumPy only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxengine.media.processor import Expanded, Processed
from jaxengine.media.processors.log_mel import HOP, log_mel, read_features
from jaxengine.media.processors.settings import check_options
from jaxengine.media.samples import RATE, Sound, Spectrogram
from jaxengine.models.config.fields import ConfigFields, ModelConfigError
from jaxengine.models.config.model_config import ModelConfig
from jaxengine.models.params.errors import ModelFileError
from jaxengine.models.params.files import read_object
from jaxengine.scheduler.errors import RequestError
from jaxengine.scheduler.media import AUDIO, TranscriptRules

GENERATION = "generation_config.json"
TRANSCRIBE, TRANSLATE = TASKS = ("transcribe", "translate")
_NO_SPEECH = ("<|nospeech|>", "<|nocaptions|>")


class WhisperProcessor:
    """Preprocessing of sounds for one Whisper checkpoint; implements MediaProcessor.

    Attributes:
      num_frames: frames of the spectrogram of a window, 3,000; num_bins: mel bins of a frame.
      languages: token ids of languages by their codes, {"en": 50259}; empty for a model of English alone.
      tasks: token ids by task, of TASKS; empty likewise.
      start, no_timestamps: token ids that begin a transcript, and that ask for one without timestamps.
      previous: token id before the text that a transcript continues; None if the vocabulary has none.
      no_speech: token id that stands for a window without speech; None if the vocabulary has none.
      rules: constraints on the tokens of transcripts.
      has_alignment: whether the checkpoint says which heads align words with the sound.
    """

    modalities: tuple[str, ...] = (AUDIO,)

    def __init__(self, folder: Path, config_json: Mapping[str, Any], model_config: ModelConfig, tokenizer: Any):
        tower: Any = model_config.tower
        self.num_frames, self.num_bins = tower.unit, tower.num_features
        self.has_alignment = tower.aligns
        read_features(folder, self.num_bins)
        raw = read_object(folder, GENERATION) or {}
        fields = ConfigFields({**_older(config_json), **raw})
        try:
            self._read(fields)
        except ModelConfigError as error:
            raise ModelFileError(folder / GENERATION, str(error)) from error
        self._tokenizer = tokenizer
        find = (lambda token: None) if tokenizer is None else tokenizer.backend.token_to_id
        self.previous = find("<|startofprev|>")
        # The older name is that of the first checkpoints.
        self.no_speech = next((found for name in _NO_SPEECH if (found := find(name)) is not None), None)
        self.settings = f"{type(self).__name__} {self.num_frames} {self.num_bins}"

    def _read(self, fields: ConfigFields) -> None:
        """Set the attributes that follow from generation_config.json (`fields`). Raises ModelConfigError."""
        self.start = fields.integer("decoder_start_token_id", minimum=0)
        self.no_timestamps = fields.integer("no_timestamps_token_id", minimum=0)
        ids = fields.mapping("lang_to_id") or {}
        self.languages = {code.strip("<|>"): token for code, token in ids.items()}
        self.tasks = {task: token for task, token in (fields.mapping("task_to_id") or {}).items() if task in TASKS}
        first, eos = self.no_timestamps + 1, fields.value("eos_token_id")
        most = fields.value("max_initial_timestamp_index", None)
        begin = tuple(fields.value("begin_suppress_tokens", None) or ())
        if len(begin) > 8:
            raise fields.fail("begin_suppress_tokens", "a list of at most 8 tokens")
        self.rules = TranscriptRules(
            first_timestamp=first,
            eos=eos[0] if isinstance(eos, list) else eos,
            tasks=tuple(self.tasks.values()),
            suppressed=tuple(token for token in fields.value("suppress_tokens", None) or () if token >= 0),
            begin=begin,
            most_initial=-1 if most is None else first + most,
        )

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a prompt: a tokenizer would begin any other text with a transcript's first tokens."""
        return self._tokenizer.encode(text, add_special_tokens=False)

    def placeholder(self, modality: str) -> str:
        return ""

    def process(self, modality: str, value: Any, options: Mapping[str, Any], most: int | None = None) -> Processed:
        check_options(options, ())
        if isinstance(value, Sound):
            if len(value.samples) > self.num_frames * HOP:
                most_seconds = self.num_frames * HOP // RATE
                problem = f"a sound of {value.seconds:.1f} seconds is given; a prompt has at most {most_seconds}"
                raise RequestError(f"{problem}: transcriptions of a server take longer ones", param="multi_modal_data")
            samples = np.pad(value.samples, (0, self.num_frames * HOP - len(value.samples)))
            value = Spectrogram(self.spectrogram(samples))
        frames = value.frames
        if frames.ndim != 2 or not 1 <= len(frames) <= self.num_frames or frames.shape[1] != self.num_bins:
            problem = f"a spectrogram of shape {list(frames.shape)} is given; allowed is [1 to {self.num_frames}, "
            raise RequestError(f"{problem}{self.num_bins}]", param="multi_modal_data")
        frames = np.pad(frames, ((0, self.num_frames - len(frames)), (0, 0)))
        return Processed(frames, *self._place(), 1, (1, self.num_frames, 1))

    def _place(self) -> tuple[np.ndarray, np.ndarray]:
        """Return columns and rows of an item: no column, and the one row."""
        return np.zeros((0, self.num_frames), np.int32), np.zeros(1, np.int32)

    def grid_of(self, num_rows: int, grid: tuple[int, int, int] | None) -> tuple[int, int, int]:
        raise RequestError("sounds are not given as embeddings", param="multi_modal_data")

    def largest(self, modality: str, size: tuple[int, int] | None = None) -> Processed:
        return Processed(np.zeros((self.num_frames, 0), np.float32), *self._place(), 1, (1, self.num_frames, 1))

    def with_options(self, options: Mapping[str, Any]) -> WhisperProcessor:
        """Return this processor, which has no options. Raises RequestError for any."""
        check_options(options, ())
        return self

    def expand(self, token_ids: Sequence[int], items: Mapping[str, Sequence[Processed]]) -> Expanded:
        count = len(items.get(AUDIO, ()))
        if count != 1:
            raise RequestError(f"multi_modal_data has {count} sounds; allowed is 1", param="multi_modal_data")
        return Expanded(list(token_ids), [np.zeros(1, np.int32)], [(AUDIO, 0)])

    def spectrogram(self, samples: np.ndarray) -> np.ndarray:
        """Return the log-mel spectrogram f32[N / HOP, num_bins] of samples f32[N]."""
        return log_mel(samples, self.num_bins)


def _older(config_json: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that older checkpoints have in config.json instead of GENERATION."""
    names = ("decoder_start_token_id", "eos_token_id", "suppress_tokens", "begin_suppress_tokens")
    return {name: config_json[name] for name in names if name in config_json}
