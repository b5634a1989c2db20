"""Types of the answers of /v1/audio, for /openapi.json; those of openai-python's audio client."""

from __future__ import annotations

from typing import Literal

from jaxengine.server.http.answer.answers import ABSENT, Answer


class DurationUsage(Answer):
    type: Literal["duration"]
    seconds: int


class Transcription(Answer):
    text: str
    usage: DurationUsage


class TranscriptionSegment(Answer):
    id: int
    seek: int
    start: float
    end: float
    text: str
    tokens: list[int]
    temperature: float
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float | None


class TranscriptionWord(Answer):
    word: str
    start: float
    end: float


class VerboseTranscription(Answer):
    task: Literal["transcribe", "translate"]
    language: str
    duration: float
    text: str
    segments: list[TranscriptionSegment] | None = None
    words: list[TranscriptionWord] | None = None
    usage: DurationUsage


class InputTokenDetails(Answer):
    audio_tokens: int
    text_tokens: int


class TokenUsage(Answer):
    type: Literal["tokens"]
    input_tokens: int
    input_token_details: InputTokenDetails
    output_tokens: int
    total_tokens: int
    prompt_tokens: int
    completion_tokens: int


class ChunkText(Answer):
    content: str


class ChunkChoice(Answer):
    delta: ChunkText
    finish_reason: str | None
    stop_reason: None


class TranscriptChunk(Answer):
    """vLLM's keys of a stream's events."""

    id: str
    object: Literal["transcription.chunk", "translation.chunk"]
    created: int
    model: str
    choices: list[ChunkChoice]


class TranscriptDelta(TranscriptChunk):
    type: Literal["transcript.text.delta"]
    delta: str
    usage: TokenUsage = ABSENT


class TranscriptDone(TranscriptChunk):
    type: Literal["transcript.text.done"]
    text: str
    usage: TokenUsage | None
