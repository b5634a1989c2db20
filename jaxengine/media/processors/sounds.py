"""Processors of sounds in prompts: log-mel spectrograms, and as many placeholder tokens as a tower makes embeddings."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxengine.media.base.processor import Expanded, Processed
from jaxengine.media.base.samples import RATE, Sound
from jaxengine.media.processors.log_mel import HOP, log_mel, read_features
from jaxengine.media.processors.settings import check_options
from jaxengine.media.processors.units import check_placeholders
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.model_config import ModelConfig
from jaxengine.scheduler.base.errors import RequestError
from jaxengine.scheduler.base.media import AUDIO

# Codes and names with which Qwen3-ASR was trained.
_LANGUAGES = """
ar=Arabic yue=Cantonese zh=Chinese cs=Czech da=Danish nl=Dutch en=English fil=Filipino fi=Finnish fr=French de=German
el=Greek hi=Hindi hu=Hungarian id=Indonesian it=Italian ja=Japanese ko=Korean mk=Macedonian ms=Malay fa=Persian
pl=Polish pt=Portuguese ro=Romanian ru=Russian es=Spanish sv=Swedish th=Thai tr=Turkish vi=Vietnamese
"""

# Limit of the samples to which a checkpoint may pad shorter sounds.
_LONGEST_LEAST = 60 * RATE


class SoundProcessor:
    """Base class of a MediaProcessor of sounds, whose patches are frames of a spectrogram and whose units are windows.
    A subclass implements `num_samples` and `num_rows`.

    Args:
      folder: of the checkpoint.
      config_json: content of its config.json.
      model_config: of the model, with a tower for sounds.
      tokenizer: of the model; None without one.

    Attributes:
      modalities: kinds of items that are taken.
      token_fields: names in config.json of the placeholder token, of which the first counts that it has.
      around: tokens before and after a sound, as templates write them.
      usual_token: token of a configuration that names none; None where it must.
      chunk: number of patches to a multiple of which spectrograms are padded with zeros.
      marks: tokens that are put before and after a sound's embeddings; none where templates write them.
      tower, num_frames, num_bins: the tower's configuration, its frames of a window and its bins of a frame.
      features: settings of spectrograms.
      tokenizer: the model's; None without one.
      token_id: the placeholder token.
      settings: text of everything that affects the results of `process`.
    """

    modalities: tuple[str, ...] = (AUDIO,)
    token_fields: tuple[str, ...] = ("audio_token_id",)
    around: tuple[str, str] = ("", "")
    usual_token: int | None = None
    chunk = 1
    marks: tuple[int, ...] = ()

    def __init__(self, folder: Path | str, config_json: Mapping[str, Any], model_config: ModelConfig, tokenizer: Any):
        """Read the checkpoint's settings of spectrograms and its placeholder token. Raises ModelConfigError for a
        placeholder token that is missing or invalid, ModelFileError for invalid settings.
        """
        self.tower: Any = model_config.tower
        self.num_frames, self.num_bins = self.tower.window, self.tower.num_features
        self.features = self.read_features(Path(folder))
        self.tokenizer = tokenizer
        fields = ConfigFields(config_json)
        name = next((name for name in self.token_fields if fields.has(name)), self.token_fields[0])
        if self.usual_token is not None:
            fields = fields.with_defaults(**{name: self.usual_token})
        self.token_id = fields.integer(name, minimum=0)
        if self.token_id >= model_config.vocab_size:
            raise fields.fail(name, f"a token id below vocab_size {model_config.vocab_size}")
        self.settings = f"{type(self).__name__} {sorted(self.features.raw.items(), key=str)} {self.tower!r}"

    @property
    def hop(self) -> int:
        """Number of samples from one patch to the next."""
        return HOP * self.tower.frames

    def read_features(self, folder: Path) -> ConfigFields:
        """Return the checkpoint's settings of spectrograms. Raises ModelFileError for settings that are not
        supported.
        """
        return read_features(folder, self.num_bins)

    def spectrogram(self, samples: np.ndarray) -> np.ndarray:
        """Return the spectrogram f32[P, bins] of samples f32[N]."""
        return log_mel(samples, self.num_bins)

    @abstractmethod
    def num_samples(self, sound: Sound) -> int:
        """Return the number of samples to which a sound is padded with silence. Raises RequestError for a sound that
        the model does not take.
        """

    @abstractmethod
    def num_rows(self, sound: Sound) -> int:
        """Return the number of embeddings of a sound; 0 for one that is too short."""

    def placed(self, sound: Sound, num_frames: int) -> tuple[np.ndarray, np.ndarray]:
        """Return (columns, rows), fields of jaxengine.scheduler.base.media.MediaItem, of a sound with num_frames frames
        including silence: the tower's columns, i32[C, num_frames], 0 within `held` frames and -1 after them, and rows,
        i32[num_frames // merge], the numbers of its embeddings and -1 after them.
        """
        column = np.where(np.arange(num_frames) < self.held(sound), 0, -1).astype(np.int32)
        rows = np.arange(num_frames // self.tower.merge, dtype=np.int32)
        return np.repeat(column[None], len(self.tower.columns), axis=0), cut(rows, self.num_rows(sound))

    def held(self, sound: Sound) -> int:
        """Return the number of frames of a sound without the silence after it."""
        return frames_of(sound)

    def placeholder(self, modality: str) -> str:
        """Return the text of the placeholder token between the texts of `around`. Needs the tokenizer."""
        begin, end = self.around
        return f"{begin}{self.tokenizer.convert_ids_to_tokens([self.token_id])[0]}{end}"

    def process(self, modality: str, value: Any, options: Mapping[str, Any], most: int | None = None) -> Processed:
        """Return the item of a Sound (`value`): its spectrogram, padded to whole chunks.

        most: limit of patches, if any. Raises RequestError for any option, other values, and a sound that is too short
        or too long.
        """
        check_options(options, ())
        if modality != AUDIO or not isinstance(value, Sound):
            raise RequestError(f"{modality} is not supported by this model; it takes sounds", param=modality)
        count, num_rows = self.num_samples(value), self.num_rows(value)
        if most is not None and num_rows * self.tower.merge > most:
            problem = f"a sound of {value.seconds:.1f} seconds makes {num_rows} embeddings"
            raise RequestError(f"{problem}; max_model_len has room for {most // self.tower.merge}", param=AUDIO)
        if not num_rows:
            raise RequestError(f"a sound of {value.seconds:.3f} seconds is too short for an embedding", param=AUDIO)
        frames = self.spectrogram(np.pad(value.samples, (0, count - len(value.samples))))
        frames = np.pad(frames, ((0, -len(frames) % self.chunk), (0, 0)))
        return Processed(frames, *self.placed(value, len(frames)), num_rows, (1, len(frames), 1))

    def grid_of(self, num_rows: int, grid: tuple[int, int, int] | None) -> tuple[int, int, int]:
        """Raise RequestError, since sounds cannot be given as embeddings."""
        raise RequestError("sounds are not given as embeddings", param=AUDIO)

    def largest(self, modality: str, size: tuple[int, int] | None = None, num_frames: int | None = None) -> Processed:
        """Return the largest item of a step, one window, whatever the arguments; its patches are f32[P, 0]."""
        count, sound = self.num_frames, Sound(np.zeros(self.num_frames * self.hop, np.float32))
        none = np.zeros((count, 0), np.float32)
        return Processed(none, *self.placed(sound, count), self.num_rows(sound), (1, count, 1))

    def with_options(self, options: Mapping[str, Any]) -> SoundProcessor:
        check_options(options, ())
        return self

    def found(self, token_ids: Sequence[int]) -> np.ndarray:
        """Return the indices i64[n], ascending, of the placeholders in a prompt's token ids."""
        return np.flatnonzero(np.asarray(token_ids, np.int64) == self.token_id)

    def length(self, item: Processed) -> int:
        """Return the number of tokens of a sound (`item`) in an expanded prompt: its embeddings and `marks`."""
        return item.num_rows + len(self.marks)

    def expand(self, token_ids: Sequence[int], items: Mapping[str, Sequence[Processed]]) -> Expanded:
        """Return the prompt with each placeholder repeated as often as its sound has embeddings, between `marks` if
        there are any. items: by modality, in the order of the prompt.

        Raises RequestError for another number of sounds than placeholders.
        """
        ids, found = np.asarray(token_ids, np.int64), items.get(AUDIO, ())
        at = self.found(token_ids)
        shown = self.token_id if self.tokenizer is None else self.placeholder(AUDIO)
        check_placeholders("sound", shown, len(at), len(found))
        counts = np.ones(len(ids), np.int64)
        counts[at] = [self.length(item) for item in found]
        ends, shift = np.cumsum(counts)[at], len(self.marks) // 2
        starts = (ends - counts[at] + shift).tolist()
        positions = [
            np.arange(start, start + item.num_rows, dtype=np.int32) for start, item in zip(starts, found, strict=True)
        ]
        written = np.repeat(ids, counts)
        if self.marks:
            written[ends - counts[at]], written[ends - 1] = self.marks
        return Expanded(written.tolist(), positions, [(AUDIO, number) for number in range(len(found))])


class AskedTranscripts:
    """Part of a SoundProcessor of a model that transcribes when it is asked to.

    Attributes:
      languages: empty: the request for a transcript names no language.
      text_mark: None: answers are only text.
      request: text of a request for a transcript that has none of its own; "" for none.
    """

    languages: Mapping[str, str] = {}
    text_mark: str | None = None
    request = ""

    def transcription(self, language: str | None, context: str) -> list[dict[str, Any]]:
        """Return the messages that request a transcript of a sound; `language` is ignored.

        context: the request's text; "" for `request`.
        """
        del language  # there is none
        said = context or self.request
        text = [{"type": "text", "text": said}] if said else []
        return [{"role": "user", "content": [{"type": AUDIO}, *text]}]


class Qwen2AudioProcessor(SoundProcessor):
    """Processor of Qwen2AudioForConditionalGeneration: one window for each sound; the prompt has only the embeddings of
    the sound itself, not those of the silence after it.
    """

    token_fields = ("audio_token_index", "audio_token_id")
    around = ("<|audio_bos|>", "<|audio_eos|>")

    def num_samples(self, sound: Sound) -> int:
        """Return the number of samples of a window, to which every sound is padded. Raises RequestError for a longer
        sound.
        """
        most = self.num_frames * HOP
        check_length(sound, most)
        return most

    def num_rows(self, sound: Sound) -> int:
        """Return the number of embeddings of a sound without the silence after it."""
        # The second convolution has stride 2; then pairs are averaged.
        positions = (frames_of(sound) - 1) // 2 + 1
        return (positions - 2) // 2 + 1


def check_length(sound: Sound, most: int) -> None:
    """Raise RequestError for a sound of more than `most` samples."""
    if len(sound.samples) > most:
        problem = f"a sound of {sound.seconds:g} seconds is given; this model takes at most {most / RATE:g}"
        raise RequestError(problem, param=AUDIO)


class VoxtralProcessor(SoundProcessor):
    """Processor of VoxtralForConditionalGeneration: as many windows as a sound has begun, all of whose embeddings are
    in the prompt.
    """

    around = ("[BEGIN_AUDIO]", "")

    def num_samples(self, sound: Sound) -> int:
        """Return the number of samples of a sound, padded to whole windows."""
        window = self.num_frames * HOP
        return -(-len(sound.samples) // window) * window

    def num_rows(self, sound: Sound) -> int:
        """Return the number of embeddings of all windows that a sound has begun."""
        return self.num_samples(sound) // HOP // self.tower.merge


class Qwen3SoundProcessor(SoundProcessor):
    """Processor of sounds in chunks of a second, as in Qwen3-Omni, of which the last may have fewer embeddings.

    Attributes:
      least: number of samples to which shorter sounds are padded.
    """

    around = ("<|audio_start|>", "<|audio_end|>")
    # Default of the settings' min_length.
    least_length = 0

    def __init__(self, folder: Path | str, config_json: Mapping[str, Any], model_config: ModelConfig, tokenizer: Any):
        """Read the checkpoint's settings, and set `chunk` to the tower's and `least` to min_length. If config_json has
        thinker_config, only that is read. Raises the errors of SoundProcessor, and ModelConfigError for a min_length of
        more than a minute.
        """
        # Qwen3-ASR's first published checkpoints have their configuration in a field named after a part of Qwen3-Omni.
        super().__init__(folder, config_json.get("thinker_config") or config_json, model_config, tokenizer)
        self.chunk = self.tower.chunk
        self.least = self.features.integer("min_length", self.least_length, minimum=0)
        if self.least > _LONGEST_LEAST:
            raise self.features.fail("min_length", f"an integer >= 0 and <= {_LONGEST_LEAST}")

    def num_samples(self, sound: Sound) -> int:
        """Return the number of samples of a sound, padded to at least `least`."""
        return max(self.least, len(sound.samples))

    def num_rows(self, sound: Sound) -> int:
        return int((self._rows(sound) >= 0).sum())

    def placed(self, sound: Sound, num_frames: int) -> tuple[np.ndarray, np.ndarray]:
        """Return (columns, rows) of a sound with num_frames frames: one column, i32[1, num_frames], 0 within the sound
        and -1 after it, and the rows of `_rows`.
        """
        return super().placed(sound, num_frames)[0], self._rows(sound)

    def held(self, sound: Sound) -> int:
        """Return the number of frames of a sound, padded to at least `least` samples."""
        return self.num_samples(sound) // HOP

    def _rows(self, sound: Sound) -> np.ndarray:
        """Return i32[num_chunks * num_slots]: the index, among the sound's embeddings, of each row of the tower; -1 for
        rows that begin after the last frame of the chunk or of the sound.
        """
        chunk, held = self.chunk, self.held(sound)
        first = np.arange(-(-held // chunk))[:, None] * chunk
        begins = np.arange(self.tower.num_slots) * self.tower.stride
        is_row = (begins < chunk) & (first + begins < held)
        return (
            np.where(is_row, np.cumsum(is_row.reshape(-1)).reshape(is_row.shape) - 1, -1).reshape(-1).astype(np.int32)
        )


class Qwen3ASRProcessor(Qwen3SoundProcessor):
    """Processor of Qwen3ASRForConditionalGeneration, which transcribes.

    Attributes:
      languages: names of the languages in which a transcript may be requested, by their codes.
      text_mark: text between "language NAME" and the transcript in an answer.
    """

    languages: Mapping[str, str] = {
        code: name for code, _, name in (each.partition("=") for each in _LANGUAGES.split())
    }
    text_mark = "<asr_text>"
    least_length = 8000

    def transcription(self, language: str | None, context: str) -> list[dict[str, Any]]:
        """Return the messages that request a transcript of a sound.

        language: a key of `languages`, with which the assistant's answer begins; None lets the model detect it.
        context: the system's text, whose words the transcript may have; "" for none. Raises KeyError for another
        language.
        """
        said: list[dict[str, Any]] = [{"role": "system", "content": context}] if context else []
        said.append({"role": "user", "content": [{"type": AUDIO}]})
        if language is not None:
            said.append({"role": "assistant", "content": f"language {self.languages[language]}{self.text_mark}"})
        return said


def frames_of(sound: Sound) -> int:
    """Return the number of frames of HOP samples that a sound has, including a partial one at its end."""
    return -(-len(sound.samples) // HOP)


def cut(rows: np.ndarray, count: int) -> np.ndarray:
    """Return a copy of `rows`, i32, in which values of at least `count` are -1."""
    return np.where(rows < count, rows, -1).astype(np.int32)
