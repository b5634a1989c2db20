"""Loading of LoRA adapters into an engine in this process or another one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from jaxengine.requests.params.lora import LoRARequest

if TYPE_CHECKING:
    # API processes use this module too, without jax.
    from jaxengine.api.core import EngineCore

# About as long as reading a small model's adapter takes.
_POLL_SECONDS = 0.01


async def load_adapter(
    utility: Callable[..., Awaitable[Any]], name: str, path: str, number: int | None = None, *, in_place: bool = False
) -> None:
    """Load an adapter from a path on the engine's machine, on a thread of its process, and return when it is loaded; at
    once if one with this name, path and number is.

    utility: `EngineClient.utility`. number: the adapter's lora_int_id; None for an unused one, and then a loaded name
    is an error. in_place: replace the adapter that has this name, if there is one, whose number `number` must be unless
    None; its running requests continue with the old matrices. Raises RequestError, with nothing changed, for a name or
    number that is not allowed or that another adapter has, for files that cannot be used, without enable_lora, and if
    too many adapters are loaded or being loaded; EngineDeadError.
    """
    ticket = await utility("load_adapter", name, path, number, in_place)
    while ticket and not await utility("adapter_is_loaded", ticket):
        await asyncio.sleep(_POLL_SECONDS)


def load_first(core: EngineCore, lock: AbstractContextManager[Any], request: LoRARequest | None) -> str | None:
    """Load the request's adapter unless it is loaded already and not to be read again, and return its name; None if
    `request` is None.

    lock: guards `core`; files are read without holding it. Raises ModelFileError for files that cannot be used, and
    RequestError as `load_adapter` does; in each case with nothing changed.
    """
    if request is None:
        return None
    name, wanted = request.lora_name, (request.lora_name, request.path, request.lora_int_id)
    with lock:
        store = core.engine.extensions.adapter_store()
        known = store.known(*wanted, in_place=request.load_inplace)
    if not known:
        weights = store.read(request.path)
        with lock:
            if not store.known(*wanted, in_place=request.load_inplace):
                if any(each.adapter.name == name for each in store.adapters):
                    core.utility("unload_adapter", name)
                store.add(*wanted, weights)
    return name


def load_each(
    core: EngineCore, lock: AbstractContextManager[Any], requests: Sequence[LoRARequest | None]
) -> list[str | None]:
    """Load the adapters of several prompts, one for each, and return their names; None for a prompt without one. A
    request that several prompts share is read once. Raises the errors of `load_first`.
    """
    names = {key: load_first(core, lock, each) for key, each in {id(each): each for each in requests}.items()}
    return [names[id(each)] for each in requests]
