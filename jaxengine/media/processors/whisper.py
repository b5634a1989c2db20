"""Processor of Whisper: log-mel spectrograms of 30 seconds, and the special tokens of its prompts. NumPy only."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxengine.media.base.processor import Processed
from jaxengine.media.base.samples import RATE, Sound, Spectrogram
from jaxengine.media.processors.attended import AttendedProcessor
from jaxengine.media.processors.log_mel import HOP, log_mel, read_features
from jaxengine.media.processors.settings import check_options
from jaxengine.models.config.fields import MAX_TOKEN_IDS, ConfigFields
from jaxengine.models.config.model_config import ModelConfig
from jaxengine.models.config.readers.hf import errors_of
from jaxengine.models.params.files import read_object
from jaxengine.scheduler.base.errors import RequestError
from jaxengine.scheduler.base.media import MAX_BEGIN, TranscriptRules

GENERATION = "generation_config.json"
TRANSCRIBE, TRANSLATE = TASKS = ("transcribe", "translate")
_NO_SPEECH = ("<|nospeech|>", "<|nocaptions|>")
_NO_TIMESTAMPS = "<|notimestamps|>"
_LANGUAGE = re.compile(r"<\|[a-z]{2,3}\|>")
_ENGLISH_VOCAB = 51_864  # of the published models of English alone


class WhisperProcessor(AttendedProcessor):
    """Preprocessing of sounds for one Whisper checkpoint; implements MediaProcessor.

    Attributes:
      num_frames: frames of the spectrogram of a window, 3,000.
      num_bins: mel bins of a frame.
      languages: token ids of languages by their codes, {"en": 50259}; empty for a model of English alone.
      tasks: token ids by task, of TASKS; empty for a model of English alone.
      start, no_timestamps: token ids that begin a transcript, and that request one without timestamps.
      previous: token id before the text that a transcript continues; None if the vocabulary has none.
      no_speech: token id that stands for a window without speech; None if the vocabulary has none.
      rules: constraints on the tokens of transcripts.
      has_alignment: whether the checkpoint lists the attention heads that align tokens with the sound.
    """

    rules: TranscriptRules

    def __init__(self, folder: Path, config_json: Mapping[str, Any], model_config: ModelConfig, tokenizer: Any):
        """Read the checkpoint's settings, and set the attributes.

        folder: of the checkpoint. config_json: content of its config.json, where older checkpoints have fields of
        generation_config.json. model_config: has the tower's sizes. tokenizer: None without one, so that `previous` and
        `no_speech` are None. Raises ModelFileError for settings that are invalid or not the tower's.
        """
        tower: Any = model_config.tower
        self.num_frames, self.num_bins = tower.unit, tower.num_features
        self.has_alignment = tower.aligns
        read_features(folder, self.num_bins)
        raw = read_object(folder, GENERATION) or {}
        fields = ConfigFields({**_named_tokens(tokenizer, raw, config_json), **_older(config_json), **raw})
        with errors_of(folder / GENERATION):
            self._read(fields, model_config.vocab_size)
        self.tokenizer = tokenizer
        find = (lambda token: None) if tokenizer is None else tokenizer.backend.token_to_id
        self.previous = find("<|startofprev|>")
        # The older name is that of the first checkpoints.
        self.no_speech = next((found for name in _NO_SPEECH if (found := find(name)) is not None), None)
        self.settings = f"{type(self).__name__} {self.num_frames} {self.num_bins}"

    def _read(self, fields: ConfigFields, vocab_size: int) -> None:
        """Set the attributes from generation_config.json (`fields`): start, no_timestamps, languages and tasks from
        decoder_start_token_id, no_timestamps_token_id, lang_to_id and task_to_id (tasks other than TASKS are left out),
        and rules from the first eos_token_id, suppress_tokens, begin_suppress_tokens and max_initial_timestamp_index.
        vocab_size: exclusive limit of token ids.

        Raises ModelConfigError for a missing or invalid field.
        """
        self.start, self.no_timestamps = (
            _token(fields, name, vocab_size) for name in ("decoder_start_token_id", "no_timestamps_token_id")
        )
        languages, tasks = (_tokens_by_name(fields, name, vocab_size) for name in ("lang_to_id", "task_to_id"))
        self.languages = {code.strip("<|>"): token for code, token in languages.items()}
        self.tasks = {task: token for task, token in tasks.items() if task in TASKS}
        first, eos = self.no_timestamps + 1, _tokens(fields, "eos_token_id", vocab_size, MAX_TOKEN_IDS)
        if not eos:
            raise fields.fail("eos_token_id", f"a token id below vocab_size {vocab_size}, or a list of them")
        suppressed, begin = (
            _tokens(fields, name, vocab_size, most)
            for name, most in (("suppress_tokens", vocab_size), ("begin_suppress_tokens", MAX_BEGIN))
        )
        most = fields.integer("max_initial_timestamp_index", None, minimum=0)
        self.rules = TranscriptRules(
            first_timestamp=first,
            eos=eos[0],
            tasks=tuple(self.tasks.values()),
            suppressed=suppressed,
            begin=begin,
            most_initial=-1 if most is None else min(first + most, vocab_size),
        )

    def process(self, modality: str, value: Any, options: Mapping[str, Any], most: int | None = None) -> Processed:
        """Return a Sound, padded with silence to one window, or a Spectrogram, padded with zeros, as one item.
        modality, most: not used.

        Raises RequestError for any option, longer sounds, and spectrograms of another shape.
        """
        check_options(options, ())
        if isinstance(value, Sound):
            if len(value.samples) > self.num_frames * HOP:
                most_seconds = self.num_frames * HOP / RATE
                problem = f"a sound of {value.seconds:g} seconds is given; a prompt has at most {most_seconds:g}"
                raise RequestError(f"{problem}: transcriptions of a server take longer ones", param="multi_modal_data")
            samples = np.pad(value.samples, (0, self.num_frames * HOP - len(value.samples)))
            value = Spectrogram(self.spectrogram(samples))
        frames = value.frames
        if frames.ndim != 2 or not 1 <= len(frames) <= self.num_frames or frames.shape[1] != self.num_bins:
            problem = f"a spectrogram of shape {list(frames.shape)} is given; allowed: [1 to {self.num_frames}, "
            raise RequestError(f"{problem}{self.num_bins}]", param="multi_modal_data")
        frames = np.pad(frames, ((0, self.num_frames - len(frames)), (0, 0)))
        return self.item(frames, np.zeros((0, self.num_frames), np.int32))

    def spectrogram(self, samples: np.ndarray) -> np.ndarray:
        """Return the log-mel spectrogram f32[N // HOP, num_bins] of samples f32[N]."""
        return log_mel(samples, self.num_bins)


def _older(config_json: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of the fields of start, end and suppressed tokens that config.json has, as older checkpoints have
    them there and not in GENERATION.
    """
    names = ("decoder_start_token_id", "eos_token_id", "suppress_tokens", "begin_suppress_tokens")
    return {name: config_json[name] for name in names if name in config_json}


def _named_tokens(tokenizer: Any, raw: Mapping[str, Any], config_json: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that an old generation_config.json lacks, by the names of the tokenizer's special tokens:
    no_timestamps_token_id, and lang_to_id and task_to_id unless the model is of English alone.

    tokenizer: None without one. The result is empty without a tokenizer, and for one without the token that switches
    timestamps off. raw: content of GENERATION, whose is_multilingual says whether the model is of English alone, or
    else the vocab_size of config_json, the content of config.json, does.
    """
    if tokenizer is None or (no_timestamps := tokenizer.backend.token_to_id(_NO_TIMESTAMPS)) is None:
        return {}
    found: dict[str, Any] = {"no_timestamps_token_id": no_timestamps}
    if raw.get("is_multilingual", config_json.get("vocab_size") != _ENGLISH_VOCAB):
        added = {each.content: number for number, each in tokenizer.backend.get_added_tokens_decoder().items()}
        found["lang_to_id"] = {name: number for name, number in added.items() if _LANGUAGE.fullmatch(name)}
        found["task_to_id"] = {task: added[name] for task in TASKS if (name := f"<|{task}|>") in added}
    return found


def _token(fields: ConfigFields, name: str, vocab_size: int) -> int:
    """Return the token id in the field `name`. Raises ModelConfigError if it is missing or not below vocab_size."""
    found = fields.integer(name, minimum=0)
    if found >= vocab_size:
        raise fields.fail(name, f"a token id below vocab_size {vocab_size}")
    return found


def _tokens(fields: ConfigFields, name: str, vocab_size: int, most: int) -> tuple[int, ...]:
    """Return the token ids in the field `name`, a token id below vocab_size or a list of at most `most`, without the -1
    that some files use for none; () if the field is missing.

    Raises ModelConfigError for other values.
    """
    value = fields.value(name, ())
    ids = value if isinstance(value, (list, tuple)) else (value,)
    if len(ids) > most or any(type(each) is not int or not -1 <= each < vocab_size for each in ids):
        raise fields.fail(name, f"a token id below vocab_size {vocab_size}, or a list of at most {most}")
    return tuple(each for each in ids if each >= 0)


def _tokens_by_name(fields: ConfigFields, name: str, vocab_size: int) -> Mapping[str, int]:
    """Return the field `name`, a mapping of names to token ids below vocab_size; {} if the field is missing.

    Raises ModelConfigError for other values.
    """
    found = fields.mapping(name) or {}
    if any(type(each) is not int or not 0 <= each < vocab_size for each in found.values()):
        raise fields.fail(name, f"a mapping of names to token ids below vocab_size {vocab_size}")
    return found
