"""Response to a chat request, complete or streamed."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator
from typing import Any

from fastapi import Response

from jaxengine.requests.output.outputs import RequestOutput
from jaxengine.requests.params.options import RequestOptions
from jaxengine.requests.params.sampling_params import SamplingParams
from jaxengine.server.base.workers import written
from jaxengine.server.http.answer.answers import NULL_BODY
from jaxengine.server.http.answer.request_metrics import request_times, stream_times
from jaxengine.server.http.answer.sse import event, json_response
from jaxengine.server.http.chat.output import ChatChoiceWriter
from jaxengine.server.http.chat.protocol import ChatRequest, NamedTool, text_of
from jaxengine.server.http.chat.run import ChatRun, ChatServer
from jaxengine.server.http.request.protocol import usage, usage_in_stream


class ChatAnswer:
    """Chat request in progress, and writer of its response.

    name: id of the response and of the engine request. model: model name in the response. options: scheduling options.
    Raises RequestError for fields that this model or server cannot serve.

    Attributes:
      head: fields with which the complete response and each chunk begin.
    """

    def __init__(self, server: ChatServer, body: ChatRequest, name: str, model: str, options: RequestOptions):
        self._body = body
        self._config = server.config
        self._run = ChatRun(server, body, name, options, is_stream=bool(body.stream))
        kind = "chat.completion.chunk" if body.stream else "chat.completion"
        self.head = {"id": name, "object": kind, "created": int(time.time()), "model": model}
        last = body.messages[-1]
        role = last.get("role") if body.continues else server.config.response_role
        echoed = text_of(last.get("content")) if body.echo and last.get("role") == role else ""
        self._writer = ChatChoiceWriter(
            server.engine.inputs.require_tokenizer(),
            str(role),
            echoed,
            None if self._run.hides_tokens else body.num_listed,
            as_token_ids=body.names_tokens_by_id(server.config),
            with_token_ids=bool(body.return_token_ids) and not self._run.hides_tokens,
            with_versions=bool(body.return_weight_versions),
            is_named=isinstance(body.choice, NamedTool),
        )
        self._has_times = server.config.enable_per_request_metrics and body.n in (None, 1)
        self._num_prompt_tokens = 0

    async def prepare(self, ignored: list[str]) -> None:
        """Prepare the prompt, and append to `ignored` the fields that have no effect for this model. Raises the errors
        of ChatRun.prepare: RequestError and OverloadedError.
        """
        await self._run.prepare()
        ignored += self._run.ignored
        self._num_prompt_tokens = len(self._run.prompt["prompt_token_ids"])

    @property
    def captured(self) -> tuple[SamplingParams, int]:
        """Arguments of `check_captured`, once `prepare` has run: the sampling parameters and the length of the prompt
        in tokens.
        """
        return self._run.params, self._run.most_prompt_tokens

    async def whole(self) -> Response:
        """Run the request and return the complete response. Call it after `prepare`, for a request that does not
        stream. Raises the errors of ChatRun.pieces.
        """
        return json_response(await self.body())

    async def body(self) -> dict[str, Any]:
        """Run the request and return the complete response as JSON values. Call it after `prepare`, for a request that
        does not stream. Raises the errors of ChatRun.pieces.
        """
        async with contextlib.aclosing(self._run.pieces()) as pieces:
            output, outputs = await anext(pieces)
        choices = await written(output, lambda: [self._writer.whole(*piece) for piece in outputs])
        about = {**NULL_BODY, "prompt_logprobs": None, **self._about_prompt(output)}
        about["kv_transfer_params"] = output.kv_transfer_params
        if self._has_times:
            about["metrics"] = request_times(output.metrics, self._run.num_completion_tokens)
        body = {**self.head, "choices": choices, "usage": self._usage(), **about}
        if (scores := output.prompt_logprobs) is not None:
            body["prompt_logprobs"] = await written(output, lambda: self._writer.prompt_logprobs(scores))
        return body

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Run the request and yield `chunks` as server-sent events, without [DONE]: for each list an item, which may be
        b"". Call it after `prepare`. Raises the errors of ChatRun.pieces.
        """
        async with contextlib.aclosing(self.chunks()) as found:
            async for chunks in found:
                yield b"".join(map(event, chunks))

    async def chunks(self) -> AsyncGenerator[list[dict[str, Any]], None]:
        """Run the request and yield the response as chunks, a list for each output of the engine, which may be empty.
        Call it after `prepare`.

        The first chunks of a choice have its role and the text for `echo`. As the request's stream_options and the
        server's say, each chunk has the token counts of its choice so far, and a last chunk without choices has those
        of all, with the request's times if the server measures them. Raises the errors of ChatRun.pieces.
        """
        last, always = usage_in_stream(self._body.stream_options, self._config)
        num_tokens: dict[int, int] = {}
        metrics = None
        async with contextlib.aclosing(self._run.pieces()) as pieces:
            async for output, outputs in pieces:
                chunks, metrics = [], output.metrics
                about = {} if num_tokens else self._about_prompt(output)
                for piece in outputs:
                    index, added = piece.output.index, len(piece.output.token_ids)
                    opening = [] if index in num_tokens else self._writer.opening(index)
                    for choices, count in ((opening, 0), (self._writer.chunks(*piece), added)):
                        num_tokens[index] = num_tokens.get(index, 0) + count
                        counts = {"usage": self._usage(num_tokens[index])} if always else {}
                        chunks += [{"choices": [choice], **counts} for choice in choices]
                if chunks:
                    chunks[0] |= about
                yield [{**self.head, **chunk} for chunk in chunks]
        if last:
            times = request_times(metrics, self._run.num_completion_tokens) if self._has_times else None
            yield [{**self.head, "choices": [], "usage": self._usage(), **stream_times(times)}]

    def _about_prompt(self, output: RequestOutput) -> dict[str, Any]:
        """Return prompt_token_ids and prompt_text, each None unless it was requested."""
        body = self._body
        return {
            "prompt_token_ids": output.prompt_token_ids if body.return_token_ids else None,
            "prompt_text": self._run.prompt["prompt"] if body.return_prompt_text else None,
        }

    def _usage(self, num_tokens: int | None = None) -> dict[str, Any]:
        """Return the usage object, which also has the numbers of cached, created cache, media and, with a reasoning
        parser, reasoning tokens. num_tokens: completion tokens; None for those of all choices so far.
        """
        run = self._run
        count = run.num_completion_tokens if num_tokens is None else num_tokens
        counts = usage(self._num_prompt_tokens, count, run.num_cached_tokens)
        counts["prompt_tokens_details"]["created_cache_tokens"] = run.num_created_cache_tokens
        if run.num_media_tokens:
            counts["prompt_tokens_details"]["multimodal_tokens"] = dict(run.num_media_tokens)
        if run.has_reasoning:
            counts["completion_tokens_details"] = {"reasoning_tokens": run.num_reasoning_tokens}
        return counts
