"""Inference service: passes requests to the engine and its outputs to the caller, within the deadline."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial

import grpc
import grpc.aio

from jaxengine.api.engine_client import EngineClient
from jaxengine.requests.output.outputs import RequestOutput
from jaxengine.requests.params.options import RequestOptions
from jaxengine.scheduler.base.errors import RequestError
from jaxengine.server.adapters.lora import has_adapter
from jaxengine.server.base.captured import check_captured
from jaxengine.server.base.keys import Keys, owner_tag
from jaxengine.server.base.options import ServerConfig
from jaxengine.server.base.prompts import check_detokenize
from jaxengine.server.base.workers import written
from jaxengine.server.grpc import inference_pb2 as pb
from jaxengine.server.grpc.answers import AnswerWriter
from jaxengine.server.grpc.auth import holder_of
from jaxengine.server.grpc.convert import Generation, RequestReader
from jaxengine.server.grpc.service import ARRIVAL
from jaxengine.server.grpc.status import CallError

Context = grpc.aio.ServicerContext


class InferenceService:
    """Implementation of inference.proto. Its methods have the names of the proto's and raise exceptions that
    status.status_of converts.
    """

    def __init__(self, engine: EngineClient, config: ServerConfig, model_names: tuple[str, ...], keys: Keys):
        self._engine = engine
        self._keys = keys
        self._reader = RequestReader(engine.inputs, config)
        self._config = config
        self._model_names = model_names

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> pb.GenerateResponse:
        """Return the complete answer to a prompt. Raises RequestError for an invalid request, CallError for an unknown
        model, an id in use and a passed deadline, OverloadedError and EngineDeadError.
        """
        model, lora = await self._model(request.model)
        generation = await self._reader.generation(request, stream=False)
        output = await self._finish(generation, lora, context)
        writer = AnswerWriter(generation.request_id, model, generation.wanted)
        return await written(output, partial(writer.response, output))

    async def GenerateStream(self, request: pb.GenerateRequest, context: Context) -> None:
        """Write the answer to a prompt in chunks, after initial metadata with the request's id.

        Raises the errors of `Generate`; if the deadline passes during the answer, after the last chunks. Raises
        CallError (ABORTED), and aborts the request, if a chunk is not read for stream_write_timeout seconds.
        """
        model, lora = await self._model(request.model)
        generation = await self._reader.generation(request, stream=True)
        writer = AnswerWriter(generation.request_id, model, generation.wanted)
        begun = False
        async with aclosing(self._run(generation, lora, context)) as outputs:
            async for output in outputs:
                if not begun:
                    await context.send_initial_metadata((("x-request-id", generation.request_id),))
                    begun = True
                for chunk in await written(output, partial(list, writer.chunks(output))):
                    await self._write(context, chunk)
                _refuse_expired(output)

    async def Score(self, request: pb.ScoreRequest, context: Context) -> pb.ScoreResponse:
        """Return the log-probabilities of a prompt's tokens, and of likely tokens if the request has candidates. Raises
        the errors of `Generate`.
        """
        model, lora = await self._model(request.model)
        generation = await self._reader.score(request)
        output = await self._finish(generation, lora, context)
        writer = AnswerWriter(generation.request_id, model, generation.wanted)
        return pb.ScoreResponse(
            prompt_info=await written(output, partial(writer.prompt_info, output)),
            usage=writer.usage(output),
            request_id=generation.request_id,
            model=model,
        )

    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:
        """Return the token ids of a text or a conversation, their number, the model's max_model_len and, if requested,
        the tokens as strings: "" for an id without a token. Special tokens are added to a text unless
        add_special_tokens is false.

        Raises RequestError without a prompt or tokenizer, for add_special_tokens with messages, and for an invalid
        prompt; CallError for an unknown model; OverloadedError.
        """
        await self._model(request.model)
        inputs = self._engine.inputs
        inputs.require_tokenizer()  # refused before the prompt is looked at
        kind = request.WhichOneof("prompt")
        special = request.HasField("add_special_tokens")
        if kind == "text":
            token_ids = await self._reader.encode(request.text, request.add_special_tokens if special else True)
        elif kind is None:
            raise RequestError("a prompt is needed: text or messages", param="prompt")
        elif special:
            raise RequestError(
                "add_special_tokens is only allowed with text: the template writes special tokens itself",
                param="add_special_tokens",
            )
        else:
            token_ids = await self._reader.encode_messages(request.messages)
        names = await self._reader.encoder.strings(token_ids) if request.return_token_strs else ()
        return pb.TokenizeResponse(
            token_ids=token_ids,
            count=len(token_ids),
            max_model_len=inputs.config.max_model_len,
            token_strs=[name or "" for name in names],
        )

    async def Detokenize(self, request: pb.DetokenizeRequest, context: Context) -> pb.DetokenizeResponse:
        """Return the text of token ids, decoded on a thread. Raises RequestError for more than MAX_DETOKENIZE ids, for
        ids outside the vocabulary, and without a tokenizer; CallError for an unknown model; OverloadedError.
        """
        await self._model(request.model)
        inputs = self._engine.inputs
        token_ids = list(request.token_ids)
        check_detokenize("token_ids", token_ids, inputs)
        decode = inputs.require_tokenizer().decode
        text = await self._reader.encoder.run(lambda: decode(token_ids, request.skip_special_tokens))
        return pb.DetokenizeResponse(text=text)

    async def _finish(self, generation: Generation, lora: str | None, context: Context) -> RequestOutput:
        """Run a request of kind FINAL_ONLY and return its only output. If the call is cancelled, the request is
        aborted.

        lora: name of its adapter, or None. Raises CallError if its deadline passes or its id is in use, RequestError
        for too many captured bytes, the errors of EngineClient.stream, and RuntimeError if the engine returns no final
        output.
        """
        async with aclosing(self._run(generation, lora, context)) as outputs:
            async for output in outputs:
                _refuse_expired(output)
                if output.finished:
                    return output
        raise RuntimeError("the engine ended a request without its last output")

    async def _run(
        self, generation: Generation, lora: str | None, context: Context
    ) -> AsyncGenerator[RequestOutput, None]:
        """Submit a request to the engine and yield its outputs. Closing this generator early aborts the request.

        lora: name of its adapter, or None. Raises CallError if its deadline has passed already or its id is in use,
        RequestError for too many captured bytes (`check_captured`), and the errors of EngineClient.stream.
        """
        prompt_length = len(generation.prompt["prompt_token_ids"])
        check_captured(self._engine.inputs, self._config, generation.params, [prompt_length])
        timeout = self._timeout(context)
        owner = owner_tag(holder_of(context.invocation_metadata()))
        options = RequestOptions(generation.priority, timeout, self._client(context), ARRIVAL.get(), lora, owner)
        outputs = self._engine.stream(generation.prompt, generation.params, generation.request_id, options)
        try:
            # Closing it early aborts the request now.
            async with aclosing(outputs):  # pyright: ignore[reportArgumentType]
                async for output in outputs:
                    yield output
        except RequestError as error:
            # Its form was checked before, so the id is in use.
            if error.param == "request_id":
                raise CallError(grpc.StatusCode.ALREADY_EXISTS, str(error)) from None
            raise

    def _client(self, context: Context) -> str | None:
        """Return the name of the caller's key, as which the "fair" scheduling_policy counts its requests; None for an
        unknown key and under other policies.
        """
        if self._engine.inputs.config.scheduling_policy != "fair":
            return None
        return self._keys.name_of(holder_of(context.invocation_metadata()))

    def _timeout(self, context: Context) -> float | None:
        """Return how long the request may take, in seconds from its arrival: until the caller's deadline or
        request_timeout, whichever is earlier; None without either.

        Raises CallError (DEADLINE_EXCEEDED) if that time has passed already.
        """
        age, left = time.monotonic() - ARRIVAL.get(), context.time_remaining()
        limits = [None if left is None else age + left, self._config.request_timeout]
        timeout = min((limit for limit in limits if limit is not None), default=None)
        if timeout is not None and timeout <= age:
            raise _expired()
        return timeout

    async def _write(self, context: Context, chunk: pb.GenerateChunk) -> None:
        """Write a chunk, after waiting until the reader has room. While it waits, the engine merges further outputs.

        Raises CallError (ABORTED) after stream_write_timeout seconds without room.
        """
        limit = self._config.stream_write_timeout
        try:
            async with asyncio.timeout(limit):
                await context.write(chunk)
        except TimeoutError:
            raise CallError(grpc.StatusCode.ABORTED, f"the stream was left unread for {limit:g} s") from None

    async def _model(self, name: str) -> tuple[str, str | None]:
        """Return (model name for the answer, adapter name or None) for a request's `model`. "" stands for the default
        model; the name of a route in lora_routes is replaced by one of its adapters.

        An adapter that is not loaded and can be found by its name is loaded. Raises CallError (NOT_FOUND) for a model
        or adapter that is not served, and the errors of `has_adapter`.
        """
        name = await self._engine.utility("route_model", name)
        if not name or name in self._model_names:
            return name or self._model_names[0], None
        if await has_adapter(self._engine, name):
            return name, name
        raise CallError(grpc.StatusCode.NOT_FOUND, f"there is no model {name[:200]!r} here")


def _refuse_expired(output: RequestOutput) -> None:
    """Raise CallError (DEADLINE_EXCEEDED) if the engine ended the output because of its timeout."""
    if any(each.finish_reason == "abort" and each.stop_reason == "timeout" for each in output.outputs):
        raise _expired()


def _expired() -> CallError:
    """Return the error of a request whose deadline has passed (DEADLINE_EXCEEDED), for the caller to raise."""
    return CallError(grpc.StatusCode.DEADLINE_EXCEEDED, "the deadline of this request has passed")
