"""Loading an adapter into an engine, wherever that runs: its files are read on a thread of the engine's."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from typing import Any

from jaxengine.api.core import EngineCore
from jaxengine.requests.lora import LoRARequest

# Of the order of what reading a small model's adapter takes.
_POLL_SECONDS = 0.01


async def load_adapter(utility: Callable[..., Awaitable[Any]], name: str, path: str, number: int | None = None) -> None:
    """Loads an adapter of a path on the engine's machine. Raises RequestError; nothing has changed then.

    utility: an EngineClient's. number: its lora_int_id; without one it is an error that the adapter is loaded already.
    """
    ticket = await utility("load_adapter", name, path, number)
    while ticket and not await utility("adapter_is_loaded", ticket):
        await asyncio.sleep(_POLL_SECONDS)


def load_first(core: EngineCore, turns: AbstractContextManager[Any], request: LoRARequest | None) -> str | None:
    """The name of an adapter, which is loaded unless it is already; its files are read outside of the turn.

    Raises ModelFileError, RequestError; nothing has changed then.
    """
    if request is None:
        return None
    name, path, number = request.lora_name, request.path, request.lora_int_id
    with turns:
        store = core.engine.extensions.adapter_store()
        known = store.known(name, path, number)
    if not known:
        weights = store.read(path)
        with turns:
            if not store.known(name, path, number):
                store.add(name, path, number, weights)
    return name
