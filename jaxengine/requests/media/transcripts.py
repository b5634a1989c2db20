"""Transcripts of sounds of any length: windows, one after the other, each begun where the segments of the last one end.

It is what transformers makes of long sounds without falling back to higher temperatures (sequential decoding, Radford
et al. 2022, arXiv:2212.04356, section 3.8, without its heuristics): tokens, segments and times are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxengine.config.inputs.multimodal import AUDIO
from jaxengine.media.base.samples import RATE, Sound, Spectrogram
from jaxengine.media.parts import MediaPart
from jaxengine.media.processors.attended import PieceProcessor
from jaxengine.media.processors.audioflamingo3 import GlmAsrProcessor
from jaxengine.media.processors.fun_asr_nano import FunAsrNanoProcessor
from jaxengine.media.processors.granite_speech import GraniteSpeechProcessor
from jaxengine.media.processors.log_mel import HOP
from jaxengine.media.processors.moss_transcribe import MossTranscribeProcessor
from jaxengine.media.processors.sounds import Qwen3ASRProcessor
from jaxengine.media.processors.vibevoice_asr import VibeVoiceAsrProcessor
from jaxengine.media.processors.whisper import WhisperProcessor
from jaxengine.requests.media.inputs import DATA, MediaInputs
from jaxengine.requests.media.words import token_positions
from jaxengine.scheduler.base.errors import RequestError, invalid

Transcriber = (
    Qwen3ASRProcessor
    | GraniteSpeechProcessor
    | GlmAsrProcessor
    | MossTranscribeProcessor
    | FunAsrNanoProcessor
    | VibeVoiceAsrProcessor
)
# Seconds from one timestamp to the next, and frames of a spectrogram in them.
PRECISION = 0.02
_FRAMES = round(PRECISION * RATE / HOP)


class Segment(NamedTuple):
    """Part of a transcript.

    Attributes:
      start, end: seconds from the beginning of the sound.
      tokens: its token ids, with the timestamps at its ends, if it has any.
      first: index of its first token in its window's transcript; seek: first frame of the window.
    """

    start: float
    end: float
    tokens: tuple[int, ...]
    first: int
    seek: int


class Recording(NamedTuple):
    """A sound to be transcribed.

    Attributes:
      frames: its spectrogram, f32[N, bins]; padded with silence to one window if it is shorter.
      seconds: its duration.
      num_frames: number of frames without the padding.
    """

    frames: np.ndarray
    seconds: float
    num_frames: int

    def window(self, seek: int, num_frames: int) -> dict[str, Any]:
        """Return the media of a prompt with at most `num_frames` frames from frame `seek` on; a view."""
        return {DATA: {AUDIO: Spectrogram(self.frames[seek : seek + num_frames])}}

    def num_positions(self, seek: int, num_frames: int) -> int:
        """Return how many positions the encoder outputs for the sound, without silence, in the window of num_frames
        from frame `seek` on; at least 1.
        """
        return max(1, min(self.num_frames - seek, num_frames) // _FRAMES)


def sound_processor(media: MediaInputs | None) -> WhisperProcessor:
    """Return the processor of a Whisper model. media: media inputs of the model; None for a text model. Raises
    RequestError for a model that is not a Whisper model.
    """
    processor = None if media is None else media.processor
    if not isinstance(processor, WhisperProcessor):
        problem = "this model transcribes no sounds; serve one that does, such as Whisper: see docs/audio.md"
        raise RequestError(problem, param="model")
    return processor


def transcriber(media: MediaInputs | None) -> Transcriber | None:
    """Return the processor of a model that transcribes with the whole sound in one prompt (Qwen3-ASR, Granite Speech,
    GLM-ASR, MOSS-Transcribe-Diarize, Fun-ASR-Nano, VibeVoice-ASR); None for others. media: media inputs of the model;
    None for a text model.
    """
    processor = None if media is None else media.processor
    return processor if isinstance(processor, Transcriber) else None


def piece_processor(media: MediaInputs | None) -> PieceProcessor | None:
    """Return the processor of a model that transcribes pieces of a sound without timestamps (Cohere Transcribe,
    Moonshine); None for others. media: media inputs of the model; None for a text model.
    """
    processor = None if media is None else media.processor
    return processor if isinstance(processor, PieceProcessor) else None


def media_of(samples: np.ndarray) -> dict[str, Any]:
    """Return the media of a prompt with a sound of samples f32[N], RATE per second; a view."""
    return {DATA: {AUDIO: Sound(samples)}}


async def read_whole(media: MediaInputs, data: bytes, param: str) -> Sound:
    """Decode a sound file, given as its bytes, on a thread. param: the field with the file, for errors. Raises
    RequestError for a file that cannot be used, OverloadedError if too many wait.
    """
    (sound,) = (await media.reader.loader.load([MediaPart(AUDIO, data, param, param)]))[AUDIO]
    return sound


async def read_recording(media: MediaInputs, data: bytes, param: str) -> Recording:
    """Decode a sound file, given as its bytes, and compute its spectrogram, both on threads. A sound shorter than a
    window of the model is padded with silence to one, which the recording's num_frames leaves out. param: the field
    with the file, for errors.

    Raises RequestError for a file that cannot be used, and for a model that transcribes no sounds; OverloadedError if
    too many wait.
    """
    processor, loader = sound_processor(media), media.reader.loader
    sound = await read_whole(media, data, param)
    missing = max(0, processor.num_frames * HOP - len(sound.samples))
    frames = await loader.process(processor.spectrogram, np.pad(sound.samples, (0, missing)))
    return Recording(frames, sound.seconds, min(len(frames), -(-len(sound.samples) // HOP)))


def prompt_of(processor: WhisperProcessor, language: str | None, task: str, *, timed: bool) -> list[int]:
    """Return the prompt tokens that request a transcript of a Whisper model. language: a code; None for a model of one
    language, which also accepts "en". task: "transcribe" or "translate". timed: with timestamps.

    Raises RequestError for a language that the model does not have, and for translation by an English-only model;
    KeyError for a task that it does not have.
    """
    if not processor.languages:
        if task != "transcribe" or language not in (None, "en"):
            what, value, allowed = "language", language, "en"
            if task != "transcribe":
                what, value, allowed = "task", task, "transcribe"
            raise invalid(what, value, f"{allowed!r}, as this model transcribes English alone")
        return [processor.start] + [processor.no_timestamps] * (not timed)
    if language not in processor.languages:
        allowed = ", ".join(sorted(processor.languages))
        raise invalid("language", language, allowed)
    middle = [processor.languages[language], processor.tasks[task]]
    return [processor.start, *middle] + [processor.no_timestamps] * (not timed)


def token_times(alignment: np.ndarray, num_tokens: int, seek: int) -> np.ndarray:
    """Return f64[num_tokens, 2], when each token of a window's transcript begins and ends, in seconds of the sound.

    alignment: f32[num_tokens - 1, positions], rows of all tokens but the last, for which no step ran. seek: first frame
    of the window.
    """
    begins = token_positions(alignment) if len(alignment) else np.zeros(1, np.int64)
    ends = np.append(begins, begins[-1])[:num_tokens] * PRECISION
    return seek * PRECISION / _FRAMES + np.stack([np.append(0.0, ends[:-1]), ends], axis=1)


def cut_segments(tokens: Sequence[int], seek: int, num_frames: int, first_timestamp: int) -> tuple[list[Segment], int]:
    """Cut a window's transcript at its timestamps; return its segments and the frame at which the next window begins.

    A segment lies between two timestamps: two adjacent timestamp tokens end one segment and begin the next. Tokens
    after the last such pair are dropped, and the next window begins at the pair (after this window if the pair's time
    is 0), unless a single timestamp ends the transcript: then no speech follows, they are the last segment and the next
    window begins after this one. A transcript without pairs is one segment, which ends at its last timestamp or,
    without any, with the window. tokens: tokens of the transcript without the end token. seek: first frame of the
    window. num_frames: number of frames of the sound in the window. first_timestamp: the token of 0.00 seconds.
    """
    is_time = [token >= first_timestamp for token in tokens]
    ends = [at + 1 for at in range(len(tokens) - 1) if is_time[at] and is_time[at + 1]]
    offset = seek * PRECISION / _FRAMES
    times = [token - first_timestamp for token in tokens]
    if not ends:
        last = int(num_frames / _FRAMES)
        said = [time for time, is_one in zip(times, is_time, strict=True) if is_one]
        if said and said[-1] != 0:
            last = said[-1]
        return [Segment(offset, offset + last * PRECISION, tuple(tokens), 0, seek)], seek + num_frames
    is_closed = is_time[-2:] == [False, True]
    if is_closed:
        ends.append(len(tokens))
    segments = []
    for start, end in zip([0, *ends], ends, strict=False):
        begins, stops = offset + times[start] * PRECISION, offset + times[end - 1] * PRECISION
        # The last of several keeps the timestamp after its end, which shows that speech continues.
        more = 1 if end == ends[-1] and not is_closed else 0
        segments.append(Segment(begins, stops, tuple(tokens[start : end + more]), start, seek))
    ahead = num_frames if is_closed else times[ends[-1] - 1] * _FRAMES
    return segments, seek + (ahead if ahead > 0 else num_frames)
