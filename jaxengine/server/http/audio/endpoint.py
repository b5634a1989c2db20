"""POST /v1/audio/transcriptions and /v1/audio/translations, for models that transcribe.

Whisper transcribes a sound of several windows one window after the other (jaxengine.requests.media.transcripts). Other
models whose tokens attend to a sound do so piece by piece (jaxengine.server.http.audio.piecewise). For the rest the
prompt contains the whole sound (jaxengine.server.http.audio.asked).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import AsyncGenerator, Callable
from functools import partial
from typing import Any

import numpy as np
from fastapi import APIRouter, Request, Response

from jaxengine.api.engine_client import EngineClient
from jaxengine.requests.media.transcripts import (
    Segment,
    cut_segments,
    piece_processor,
    prompt_of,
    read_recording,
    sound_processor,
    token_times,
    transcriber,
)
from jaxengine.requests.media.words import Word, find_words
from jaxengine.requests.output.outputs import CompletionOutput, RequestOutput
from jaxengine.requests.params.extra_args import ALIGNMENT
from jaxengine.requests.params.options import RequestOptions
from jaxengine.requests.params.sampling_params import RequestOutputKind, SamplingParams
from jaxengine.scheduler.base.errors import RequestError
from jaxengine.server.base.names import served_names
from jaxengine.server.base.options import ServerConfig
from jaxengine.server.http.answer.answers import Error, answers
from jaxengine.server.http.answer.sse import answer, json_response, stream_events
from jaxengine.server.http.audio import formats
from jaxengine.server.http.audio.answers import TranscriptDelta, TranscriptDone, Transcription, VerboseTranscription
from jaxengine.server.http.audio.asked import AskedTranscript
from jaxengine.server.http.audio.formats import Said
from jaxengine.server.http.audio.piecewise import PiecewiseTranscript
from jaxengine.server.http.audio.protocol import GRANULARITIES, SEGMENT, WORD, TranscriptionRequest, read_request
from jaxengine.server.http.audio.transcript import Transcript, usage_of
from jaxengine.server.http.models import choose_model
from jaxengine.server.http.request.form import FILE, read_form

TRANSCRIBE, TRANSLATE = "transcribe", "translate"
# Limit of overlapping windows, as a multiple of those that cover the sound: a window may advance by only 0.02 seconds.
_MOST_WINDOWS = 20
# Parameters of the requests of one token by which languages and times of words are found.
_ONE_TOKEN: dict[str, Any] = {"temperature": 0, "max_tokens": 1, "detokenize": False, "return_sampling_mask": False}


class _Transcript(Transcript):
    """Transcript of a model with timestamps (Whisper), made window by window. task: "transcribe" or "translate"."""

    def __init__(self, engine: EngineClient, body: TranscriptionRequest, task: str, name: str, options: RequestOptions):
        super().__init__(engine, body, task, name, options)
        self._processor = sound_processor(engine.inputs.media)
        self._eos = self._processor.rules.eos
        self._language = body.language

    async def begin(self, data: bytes) -> None:
        """Read the sound of a file and, if the request gives no language, detect it by a request to the engine. A
        model without languages has "en". Raises RequestError for fields that the model cannot serve and for a file that
        cannot be used, OverloadedError, and the errors of `last`.
        """
        media = self.engine.inputs.media
        assert media is not None
        self._check_words()
        self._context = self._prompt_text()
        if self._language is not None or not self._processor.languages:
            prompt_of(self._processor, self._language, self.task, timed=False)  # refused before a file is decoded
        self._recording = await read_recording(media, data, FILE)
        self._is_long = len(self._recording.frames) > self._processor.num_frames
        if self._language is None:
            self._language = await self._detected() if self._processor.languages else "en"

    def _check_words(self) -> None:
        """Raise RequestError if word timestamps are requested and cannot be computed: for a translation, or for a model
        without alignment heads.
        """
        problem = None
        if self.body.has_words and self.task == TRANSLATE:
            problem = "the words of a translation are not aligned with the sound"
        elif self.body.has_words and not self._processor.has_alignment:
            problem = "this model's generation_config.json does not say which heads align words (alignment_heads): add"
            problem += " what its authors published, and start again"
        if problem is not None:
            allowed = f"; allowed: {SEGMENT!r}"
            raise RequestError(f"{GRANULARITIES} has {WORD!r}, and {problem}{allowed}", param=GRANULARITIES)

    def _prompt_text(self) -> list[int]:
        """Return the token ids that precede a transcript for the field `prompt`: the model's token for earlier text,
        then the last tokens of the prompt, at most half the context, rounded down, less one; [] for a prompt that is
        absent or white space.

        Raises RequestError for a model without such a token, and for special tokens in the prompt.
        """
        text = (self.body.prompt or "").strip()
        if not text:
            return []
        if self._processor.previous is None:
            raise RequestError("prompt: this model has no token before earlier text", param="prompt")
        ids = self.tokenizer.encode(" " + text, add_special_tokens=False)
        if any(token >= self._eos for token in ids):
            raise RequestError("prompt has special tokens; allowed: text", param="prompt")
        return [self._processor.previous, *ids[-(self.engine.inputs.config.max_model_len // 2 - 1) :]]

    async def _detected(self) -> str:
        """Return the code of the likeliest language of the first window, by a request to the engine for one token.
        Raises the errors of `last`.
        """
        ids = self._processor.languages
        params = SamplingParams(**_ONE_TOKEN, allowed_token_ids=list(ids.values()))
        prompt = {"prompt_token_ids": [self._processor.start], **self._recording.window(0, self._processor.num_frames)}
        output = await self.last(prompt, params)
        return next(code for code, token in ids.items() if token == output.outputs[0].token_ids[0])

    def _prompt(self, seek: int, *, timed: bool) -> dict[str, Any]:
        """Return the prompt for the window that begins at frame `seek`: the tokens of the field `prompt`, the tokens
        that start a transcript, and the sound. timed: whether the transcript has timestamps.
        """
        ids = [*self._context, *prompt_of(self._processor, self._language, self.task, timed=timed)]
        return {"prompt_token_ids": ids, **self._recording.window(seek, self._processor.num_frames)}

    async def said(self) -> AsyncGenerator[Said, None]:
        """Yield the transcript's segments, those of a window when its request is finished. A window begins where the
        last complete segment of the previous one ends; after _MOST_WINDOWS times as many windows as cover the sound, it
        begins at the end of the previous one.

        Raises the errors of `last`.
        """
        timed = self._is_long or self.body.has_segments
        total, size = len(self._recording.frames), self._processor.num_frames
        scored = self._scores() if self.body.response_format == "verbose_json" else {}
        seek, windows, most = 0, 0, _MOST_WINDOWS * (1 + total // size)
        while seek < total:
            prompt = self._prompt(seek, timed=timed)
            whole = await self._window(prompt, self.body.params(self.engine.inputs, **scored))
            output, no_speech = whole.outputs[0], self._no_speech(whole)
            tokens = [token for token in output.token_ids if token != self._eos]
            held = min(size, total - seek)
            found, behind = cut_segments(tokens, seek, held, self._processor.rules.first_timestamp)
            times = await self._times(prompt, output, seek) if self.body.has_words else None
            for segment in found:
                logprob = _mean_logprob(output, segment.first, segment.tokens)
                words = () if times is None else self._words(segment, times)
                yield Said(segment, self._text(segment.tokens), logprob, no_speech, words)
            windows += 1
            seek = behind if windows < most else seek + held

    async def _times(self, prompt: dict[str, Any], output: CompletionOutput, seek: int) -> np.ndarray:
        """Return f64[tokens, 2]: when each token of a window's output begins and ends, in seconds of the sound. A
        further request to the engine aligns the tokens with the sound.

        prompt: the window's. seek: the window's first frame. Raises the errors of `last`.
        """
        first, tokens = len(prompt["prompt_token_ids"]), output.token_ids
        positions = self._recording.num_positions(seek, self._processor.num_frames)
        alignment = np.zeros((0, positions), np.float32)
        if len(tokens) > 1:
            asked = SamplingParams(**_ONE_TOKEN, extra_args={ALIGNMENT: [first, positions]})
            text = {**prompt, "prompt_token_ids": [*prompt["prompt_token_ids"], *tokens[:-1]]}
            alignment = (await self.last(text, asked)).outputs[0].alignment
            assert alignment is not None
        media = self.engine.inputs.media
        assert media is not None
        return await media.reader.loader.process(token_times, alignment, len(tokens), seek)

    def _words(self, segment: Segment, times: np.ndarray) -> tuple[Word, ...]:
        """Return the words of a segment with their times. times: f64[tokens, 2], of all tokens of its window."""
        numbers = [number for number, token in enumerate(segment.tokens, segment.first) if token < self._eos]
        tokens = [token for token in segment.tokens if token < self._eos]
        return tuple(find_words(self.tokenizer.decode, tokens, times[numbers], self._language or "en"))

    def _scores(self) -> dict[str, Any]:
        """Return the additional sampling parameters for verbose_json: log-probabilities of the tokens and, if the model
        has a no-speech token, the log-probability of that token: at each position of the prompt or, for a model of one
        language, of the output.
        """
        token = self._processor.no_speech
        if token is None:
            return {"logprobs": 0}
        if not self._processor.languages:
            return {"logprobs": 0, "logprob_token_ids": [token]}
        return {"logprobs": 0, "prompt_logprobs": 0, "prompt_logprob_token_ids": [token]}

    def _no_speech(self, output: RequestOutput) -> float | None:
        """Return the probability that a window has no speech: that of the model's no-speech token after the token that
        begins a transcript. None if it was not requested, or the model has no such token.
        """
        token, said = self._processor.no_speech, output.outputs[0].logprobs
        if said is None or token is None:
            return None
        follows = [*(output.prompt_logprobs or [None] * len(output.prompt_token_ids)), *said]
        position = follows[output.prompt_token_ids.index(self._processor.start) + 1]
        return None if position is None else math.exp(position[token].logprob)

    async def _window(self, prompt: dict[str, Any], params: SamplingParams) -> RequestOutput:
        """Run the request of a window and return its output; add its tokens to the token counts. Raises the errors of
        `last`.
        """
        output = await self.last(prompt, params)
        self.input_tokens += len(output.prompt_token_ids)
        self.count(output)
        return output

    def _text(self, tokens: Any) -> str:
        """Return the text of a segment's tokens, without timestamps and special tokens."""
        return self.tokenizer.decode([token for token in tokens if token < self._eos])

    async def whole(self) -> Response:
        """Transcribe all windows and return the complete response in the request's format: srt, vtt, json, text or
        verbose_json. Raises the errors of `last`.
        """
        said = [each async for each in self.said()]
        text = "".join(each.text for each in said).strip()
        seconds = self._recording.seconds
        match self.body.response_format:
            case "srt":
                return Response(formats.srt(said), media_type="application/x-subrip")
            case "vtt":
                return Response(formats.vtt(said), media_type="text/vtt")
            case "json" | "text":
                return self.plain(text, seconds)
        answer: dict[str, Any] = {"task": self.task, "language": self._language, "duration": seconds, "text": text}
        if SEGMENT in (self.body.timestamp_granularities or (SEGMENT,)):
            answer["segments"] = formats.verbose_segments(said, self.body.temperature or 0.0)
        if self.body.has_words:
            words = (word for each in said for word in each.words)
            answer["words"] = [{"word": each.text, "start": each.start, "end": each.end} for each in words]
        return json_response({**answer, "usage": usage_of(seconds)})

    def pieces(self) -> AsyncGenerator[str, None]:
        """Yield the text in pieces: for a sound of one window token by token as it is generated, for a longer one
        segment by segment.
        """
        return self._segment_texts() if self._is_long else self._token_texts()

    async def _segment_texts(self) -> AsyncGenerator[str, None]:
        """Yield the text of each segment. Raises the errors of `last`."""
        async with contextlib.aclosing(self.said()) as said:
            async for each in said:
                yield each.text

    async def _token_texts(self) -> AsyncGenerator[str, None]:
        """Yield the text of a sound of one window as the engine generates it, and update the token counts. Raises the
        errors of `outputs`.
        """
        params = self.body.params(self.engine.inputs, output_kind=RequestOutputKind.DELTA, detokenize=True)
        prompt = self._prompt(0, timed=False)
        self.input_tokens = len(prompt["prompt_token_ids"])
        async with contextlib.aclosing(self.outputs(prompt, params)) as outputs:
            async for output in outputs:
                self.count(output)
                yield output.outputs[0].text


def _mean_logprob(output: CompletionOutput, first: int, tokens: tuple[int, ...]) -> float:
    """Return the mean log-probability of a segment's tokens, where each counts as at least -9999; 0 without
    log-probabilities or tokens.

    first: index of the segment's first token in its window's output.
    """
    if output.logprobs is None or not tokens:
        return 0.0
    own = list(output.logprobs)[first : first + len(tokens)]
    scores = [max(position[token].logprob, -9999.0) for token, position in zip(tokens, own, strict=False)]
    return sum(scores) / len(scores) if scores else 0.0


# Schema of the form, which is read by `read_form` and not by the framework.
_FIELDS = TranscriptionRequest.model_json_schema()["properties"]
_FORM = {"type": "object", "required": [FILE], "properties": {FILE: {"type": "string", "format": "binary"}, **_FIELDS}}
_BODY = {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": _FORM}}}}


def _kind(engine: EngineClient, config: ServerConfig) -> Callable[..., Transcript]:
    """Return the function that creates a transcript for the engine's model from the arguments of Transcript. Raises
    RequestError if the model cannot transcribe.
    """
    if piece_processor(engine.inputs.media) is not None:
        return PiecewiseTranscript
    if transcriber(engine.inputs.media) is not None:
        return partial(AskedTranscript, config.default_chat_template_kwargs)
    sound_processor(engine.inputs.media)
    return _Transcript


def router(engine: EngineClient, config: ServerConfig) -> APIRouter:
    """Return the routes /v1/audio/transcriptions and /v1/audio/translations. They raise RequestError if the model
    cannot transcribe.
    """
    routes = APIRouter(tags=["audio"])
    names = served_names(engine, config)

    async def respond(request: Request, task: str) -> Response:
        """Answer a request: read its form, then transcribe or translate its sound, as one response or a stream.

        task: TRANSCRIBE or TRANSLATE. Raises RequestError, ApiError for a damaged form or an unknown model, and the
        errors of Transcript.begin and `last`.
        """
        kind = _kind(engine, config)  # refused before a file is read
        data = bytearray()

        async def keep(piece: bytes) -> None:
            data.extend(piece)

        body = read_request(await read_form(request, keep), request)
        model, _ = await choose_model(engine, body.model, names)
        name = body.register("trsc" if task == TRANSCRIBE else "trsl", request)
        transcript = kind(engine, body, task, name, body.options(request, config))

        async def whole() -> Response:
            await transcript.begin(bytes(data))
            return await transcript.whole()

        async def events() -> AsyncGenerator[bytes, None]:
            await transcript.begin(bytes(data))
            async with contextlib.aclosing(transcript.events(model)) as pieces:
                async for each in pieces:
                    yield each

        if body.stream:
            return await stream_events(request, events(), config)
        return await answer(request, whole())

    @routes.post("/v1/audio/transcriptions", response_class=Response, openapi_extra=_BODY)
    @answers(Transcription | VerboseTranscription, TranscriptDelta | TranscriptDone | Error)
    async def transcriptions(request: Request) -> Response:
        """Transcribe the sound in a form, whole or as a stream of events. Raises the errors of `respond`."""
        return await respond(request, TRANSCRIBE)

    @routes.post("/v1/audio/translations", response_class=Response, openapi_extra=_BODY)
    @answers(Transcription | VerboseTranscription, TranscriptDelta | TranscriptDone | Error)
    async def translations(request: Request) -> Response:
        """Translate the sound in a form to English, whole or as a stream. Raises the errors of `respond`."""
        return await respond(request, TRANSLATE)

    return routes
