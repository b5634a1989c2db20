"""Base class of transcripts in progress: their requests to the engine, and the formats of their answers."""

from __future__ import annotations

import contextlib
import math
import time
from abc import abstractmethod
from collections.abc import AsyncGenerator, Iterable
from typing import Any

from fastapi import Response

from jaxengine.api.engine_client import EngineClient
from jaxengine.requests.output.outputs import RequestOutput
from jaxengine.requests.params.options import RequestOptions, within_context
from jaxengine.requests.params.sampling_params import SamplingParams
from jaxengine.scheduler.base.errors import RequestError, show_value
from jaxengine.server.http.answer.sse import event, json_response
from jaxengine.server.http.audio.protocol import TranscriptionRequest
from jaxengine.server.http.request.errors import abort_error


class Transcript:
    """Transcript in progress: call `begin`, then `whole` for one response or `events` for a stream.

    task: "transcribe" or "translate". name: id of its requests in the engine. options: their scheduling options. Raises
    RequestError without a tokenizer.
    """

    def __init__(self, engine: EngineClient, body: TranscriptionRequest, task: str, name: str, options: RequestOptions):
        self.engine, self.body, self.task, self._name, self._options = engine, body, task, name, options
        self.tokenizer = engine.inputs.require_tokenizer()
        self.input_tokens = self.output_tokens = 0
        self._finish_reason: str | None = None

    @abstractmethod
    async def begin(self, data: bytes) -> None:
        """Read the sound of a file, `data`, and check the request. Raises RequestError for a file that cannot be used
        and for a request that the model cannot answer, OverloadedError if too many calls wait.
        """

    @abstractmethod
    async def whole(self) -> Response:
        """Run the requests and return the complete response. Call it after `begin`. Raises the errors of `last`."""

    @abstractmethod
    def pieces(self) -> AsyncGenerator[str, None]:
        """Yield the text of a stream in pieces as it is generated; update the token counts. Call it after `begin`."""

    def check_untimed(self, languages: Iterable[str]) -> None:
        """Raise RequestError for a request that a model without timestamps and translations cannot answer: a
        translation, a format with times, and a language that is not among `languages`, the codes that it takes.
        """
        if self.task != "transcribe":
            raise RequestError("this model transcribes, and translates nothing", param="model")
        if self.body.response_format not in ("json", "text"):
            shown = show_value(self.body.response_format)
            problem = f"response_format is {shown}; this model gives no times; allowed: json and text"
            raise RequestError(problem, param="response_format")
        if self.body.language not in (None, *languages):
            allowed = ", ".join(sorted(languages)) or "none, as this model takes no language"
            problem = f"language is {show_value(self.body.language)}; allowed: {allowed}"
            raise RequestError(problem, param="language", value=self.body.language)

    async def events(self, model: str) -> AsyncGenerator[bytes, None]:
        """Yield the server-sent events of a stream: a delta for each piece of text that is not empty, then the whole
        text. The latter has the token counts unless stream_include_usage is false; with stream_continuous_usage_stats
        each delta has those so far. model: the model's name in the events.

        Each event has OpenAI's keys and vLLM's, whose clients read `choices`. The last event has a choice with an empty
        text and the finish reason. If stream_include_usage is true, an event of its own has that choice, and the last
        event has no choices. White space at the beginning is dropped, and in the whole text also at the end. Raises the
        errors of `pieces`.
        """
        kind = "transcription.chunk" if self.task == "transcribe" else "translation.chunk"
        head = {"id": self._name, "object": kind, "created": int(time.time()), "model": model}

        def said(piece: str, finish_reason: str | None = None) -> dict[str, Any]:
            """Return the fields of an event with a piece of text, and with the usage so far if the request wants it.
            finish_reason: None until the last event.
            """
            counts = {"usage": self._counts()} if self.body.stream_continuous_usage_stats else {}
            choice = {"delta": {"content": piece}, "finish_reason": finish_reason, "stop_reason": None}
            return {**head, "type": "transcript.text.delta", "delta": piece, "choices": [choice], **counts}

        text, pieces = "", self.pieces()
        async with contextlib.aclosing(pieces):
            async for piece in pieces:
                piece = piece if text else piece.lstrip()
                text += piece
                if piece:
                    yield event(said(piece))
        last, included = said("", self._finish_reason), self.body.stream_include_usage
        if included:
            yield event(last)
        choices, usage = [] if included else last["choices"], None if included is False else self._counts()
        done = {"type": "transcript.text.done", "text": text.rstrip(), "usage": usage}
        yield event({**head, **done, "choices": choices})

    def _counts(self) -> dict[str, Any]:
        """Return the usage object of a stream with the token counts so far, under OpenAI's names and vLLM's."""
        given, new = self.input_tokens, self.output_tokens
        return {
            "type": "tokens",
            "input_tokens": given,
            "input_token_details": {"audio_tokens": 0, "text_tokens": given},
            "output_tokens": new,
            "total_tokens": given + new,
            "prompt_tokens": given,
            "completion_tokens": new,
        }

    def count(self, output: RequestOutput) -> None:
        """Add the new tokens of an output of the transcript to the token count, and store its finish reason. "length"
        stays, whatever further parts of the sound end with: a part of the text is missing.
        """
        said = output.outputs[0]
        self.output_tokens += len(said.token_ids)
        if self._finish_reason != "length":
            self._finish_reason = said.finish_reason

    async def outputs(self, prompt: dict[str, Any], params: SamplingParams) -> AsyncGenerator[RequestOutput, None]:
        """Yield the engine's outputs for a prompt, with a max_tokens of at most max_model_len. Closing this generator
        early aborts the request.

        Raises ApiError if the request was aborted, such as by its timeout (504) or an operator (409), or has failed
        (500); and the errors of EngineClient.stream.
        """
        params = within_context(params, self.engine.inputs.config.max_model_len)
        outputs = self.engine.stream(prompt, params, self._name, self._options)
        async with contextlib.aclosing(outputs):  # pyright: ignore[reportArgumentType]
            async for output in outputs:
                ended = output.outputs[0]
                if ended.finish_reason in ("abort", "error"):
                    raise abort_error(ended.finish_reason, ended.stop_reason)
                yield output

    async def last(self, prompt: dict[str, Any], params: SamplingParams) -> RequestOutput:
        """Run a prompt and return its last output. Raises RuntimeError if there is no output or it has no tokens, and
        the errors of `outputs`.
        """
        last: RequestOutput | None = None
        async with contextlib.aclosing(self.outputs(prompt, params)) as outputs:
            async for output in outputs:
                last = output
        if last is None or not last.outputs[0].token_ids:
            raise RuntimeError(f"{self._name} ended without an output")
        return last

    def plain(self, text: str, seconds: float) -> Response:
        """Return the response with a transcript in the request's format: for "text", plain text with a line break at
        the end, else JSON with the usage. seconds: length of the sound.
        """
        if self.body.response_format == "text":
            return Response(text + "\n", media_type="text/plain")
        return json_response({"text": text, "usage": usage_of(seconds)})


def usage_of(seconds: float) -> dict[str, Any]:
    """Return the usage object for a sound of this length; seconds are rounded up."""
    return {"type": "duration", "seconds": math.ceil(seconds)}
