"""Prompts of requests as a replica would read them, for an ingress that routes by them.

The ingress runs the HTTP application over an engine that does nothing. The application reads a request until it calls
this engine, which receives the prompt; the request is then cancelled.
"""

from __future__ import annotations

import asyncio
import dataclasses
import re
from collections.abc import AsyncIterator, Sequence
from contextvars import ContextVar
from typing import Any

from starlette.types import Message, Scope

from jaxengine.api.engine_client import EngineDeadError
from jaxengine.requests.inputs import InputProcessor
from jaxengine.requests.media.inputs import has_media
from jaxengine.requests.params.options import RequestOptions
from jaxengine.requests.params.sampling_params import SamplingParams
from jaxengine.server.base.options import ServerConfig
from jaxengine.server.batch.run import receive_once
from jaxengine.server.http.app import create_app

# Paths of requests with a prompt for a model that generates text.
PATHS = frozenset(
    (
        *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/cohere/v2/chat"),
        *("/generative_scoring", "/inference/v1/generate", "/skyrl/v1/generate"),
    )
)
# Bodies that are not read: reading images twice would cost more than a prefix saves.
_MEDIA = re.compile(rb'"type"\s*:\s*"(?:input_)?(?:image|video|audio|file)')

_Tokens = tuple[Sequence[int], str | None]
_READ: ContextVar[_Reading] = ContextVar("reading")


class _Reading:
    """Request whose prompt is being read.

    Attributes:
      adapter: the model name in the request, if that is not a name of the model itself; otherwise None.
      tokens: future of (token ids, cache salt).
    """

    def __init__(self, adapter: str | None):
        """Create the future without a result, on the running event loop."""
        self.adapter = adapter
        self.tokens: asyncio.Future[_Tokens] = asyncio.get_running_loop().create_future()


class PromptReader:
    """Reader of the prompts of requests.

    inputs: an input processor equal to the engine's. store: store of responses that a request may continue; None if
    there is none.
    """

    def __init__(self, inputs: InputProcessor, server: ServerConfig, store: Any = None):
        # _NoEngine accepts any name as an adapter's, so adapters are not searched for in folders or on the Hub.
        bare = dataclasses.replace(server, lora_dirs=(), lora_hub_owners=(), middleware=(), otlp_traces_endpoint=None)
        self._app = create_app(_NoEngine(inputs), bare, store)

    async def read(self, scope: Scope, body: bytes, adapter: str | None) -> _Tokens:
        """Return (token ids, cache salt) of the first prompt of a request; ((), None) if it has none, has images or
        other media, or is not valid. Runs the HTTP application on the request until it calls the engine, and then
        cancels it.

        scope: ASGI scope with the same headers as the replica gets: without a session, their request id decides which
        adapter a name of lora_routes stands for. adapter: the adapter's name in the request, or None.
        """
        if _MEDIA.search(body):
            return (), None
        reading = _Reading(adapter)
        _READ.set(reading)
        work = asyncio.create_task(self._app({**scope, "state": {}}, receive_once(body), _ignore))
        try:
            await asyncio.wait((work, reading.tokens), return_when=asyncio.FIRST_COMPLETED)
            return reading.tokens.result() if reading.tokens.done() else ((), None)
        finally:
            reading.tokens.cancel()
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)


class _NoEngine:
    """EngineClient that publishes the tokens and cache salt of a request's first prompt and never responds. For prompts
    with images or sounds, requests with steering, and pooling requests it publishes ((), None).
    """

    errored = False

    def __init__(self, inputs: InputProcessor):
        self.inputs = inputs

    async def stream(
        self,
        prompt: Any,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        options: RequestOptions | None = None,
    ) -> AsyncIterator[Any]:
        """Publish the prompt's tokens and cache salt, which are read on a thread, and wait until cancelled. Yields
        nothing. Publishes ((), None) for a prompt with media or with steering. Does not use request_id and options.
        Raises RequestError for a prompt that is not valid.
        """
        found: _Tokens = (), None
        if not (has_media(prompt) or (sampling_params is not None and sampling_params.steer)):
            _, token_ids, salt = await asyncio.to_thread(self.inputs.read_prompt, prompt)
            found = token_ids, salt
        await _found(found)
        yield  # never

    async def pool(self, *_: Any, **__: Any) -> AsyncIterator[Any]:
        """Publish that the request has no tokens, ((), None), and wait until cancelled. Yields nothing."""
        await _found(((), None))
        yield  # never

    async def abort(self, request_id: str) -> None:
        """Do nothing."""

    async def check_health(self) -> None:
        """Do nothing."""

    async def utility(self, name: str, *arguments: Any) -> Any:
        """Return, for the utility "adapters", a list with the adapter that the request being read names, or [] if it
        names none. Any name is accepted. Raises EngineDeadError for any other utility.
        """
        if name != "adapters":
            raise EngineDeadError("an ingress has no engine")
        adapter = _READ.get().adapter
        return [] if adapter is None else [{"name": adapter, "path": ""}]

    def text_spans(self) -> list[tuple[float, float, int]]:
        """Return an empty list."""
        return []


async def _found(tokens: _Tokens) -> None:
    """Publish the tokens of the request that is being read, unless some are published already, and wait until
    cancelled.
    """
    future = _READ.get().tokens
    if not future.done():
        future.set_result(tokens)
    await asyncio.Event().wait()


async def _ignore(message: Message) -> None:
    """Drop an ASGI message."""
