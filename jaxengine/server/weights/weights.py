"""Pauses, sleep and new weights for operators, over HTTP or gRPC: calls of an engine's utilities."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any, NamedTuple

from jaxengine.api.engine_client import EngineClient
from jaxengine.scheduler.base.errors import RequestError
from jaxengine.scheduler.base.weight_version import check_version
from jaxengine.server.base.options import ServerConfig
from jaxengine.server.weights.weight_upload import uploaded

_POLL_SECONDS = 0.01


class UpdateOptions(NamedTuple):
    """Options of `LLM.update_weights`.

    Attributes:
      version: version of the new weights; None: the present version plus one if it is a number, otherwise the number
        of updates.
      mode, kv, strict, chunk_bytes, target: see `LLM.update_weights`.
    """

    version: str | int | None = None
    mode: str = "keep"
    kv: str = "recompute"
    strict: bool = True
    chunk_bytes: int | None = None
    target: str = "model"


async def pause(engine: EngineClient, mode: str, *, clear_cache: bool = False) -> None:
    """Pause the engine, and return when the pause is complete, which is checked every 10 ms. mode: see PauseMode.
    clear_cache: then also drop all cached prefixes. Raises RequestError for an unknown mode, and for "wait" while the
    engine sleeps and has requests; EngineDeadError.
    """
    await engine.utility("pause_engine", mode)
    while not await engine.utility("pause_is_there"):
        await asyncio.sleep(_POLL_SECONDS)
    if clear_cache:
        await engine.utility("reset_prefix_cache")


async def resume(engine: EngineClient) -> None:
    """End the engine's pause. Raises RequestError while parts of the engine sleep, and EngineDeadError."""
    await engine.utility("resume_engine")


async def sleep(engine: EngineClient, level: int, mode: str, tags: list[str] | None, *, keep_kv: bool = False) -> None:
    """Pause the engine, free device memory, and return when that is done.

    level: 1 frees pages, and weights, which are kept in host memory; 2 frees both without a copy; 0 only pauses. mode:
    see PauseMode. tags: parts to free, "weights" or "kv_cache"; None for both. keep_kv: first copy cached pages to the
    host tier. Raises RequestError for arguments that are not allowed, and EngineDeadError.
    """
    await engine.utility("begin_sleep", level, mode, tags, keep_kv)
    while not await engine.utility("fall_asleep", level, tags, keep_kv):
        await asyncio.sleep(_POLL_SECONDS)


async def release_kv_cache_memory(engine: EngineClient) -> None:
    """Free the KV pages of a paused engine on its devices, and return when that is done. Raises RequestError if the
    engine is not paused, and EngineDeadError.
    """
    await engine.utility("check_paused")
    while not await engine.utility("fall_asleep", 1, ["kv_cache"]):
        await asyncio.sleep(_POLL_SECONDS)


async def wake_up(engine: EngineClient, tags: Sequence[str] | None) -> list[str]:
    """Put freed parts back on the devices, and return the parts that still sleep. tags: parts to wake, as in
    `LLM.wake_up`; None for all. Raises RequestError for an unknown tag, and for weights freed at level 2 that have not
    been loaded again; EngineDeadError.
    """
    await engine.utility("wake_engine", None if tags is None else list(tags))
    return (await state(engine))["asleep"]


async def state(engine: EngineClient) -> dict[str, Any]:
    """Return the engine's `is_paused`, `asleep` (list of the parts that sleep), and `weight_version`. Raises
    EngineDeadError if the engine cannot answer.
    """
    return await engine.utility("engine_pause")


async def info(engine: EngineClient, *, checksum: bool) -> dict[str, Any]:
    """Return `weight_version` and, if `checksum`, also `checksums`, which maps each weight's name to its SHA-256.
    Raises RequestError for checksums of weights that sleep on request, and EngineDeadError.
    """
    found: dict[str, Any] = {"weight_version": (await state(engine))["weight_version"]}
    return {**found, "checksums": await engine.utility("weight_checksums")} if checksum else found


async def update_from_path(engine: EngineClient, path: str, options: UpdateOptions) -> dict[str, Any]:
    """Replace the engine's weights by those of a folder or file that the engine's process can read, and return the
    fields of a WeightUpdate. Requests continue while the file is read. The engine is paused for the switch, in addition
    to any other pause.

    Raises RequestError for an empty path and for invalid options, and one that lists all faults if the new weights are
    unusable; the old weights then stay. Raises EngineDeadError if the engine cannot answer.
    """
    version, mode, kv, strict, chunk_bytes, target = options
    if not path:
        raise RequestError("path is empty; allowed: a folder or file with weights", param="path")
    check_version(version)
    number = await engine.utility("read_weights", path, version, mode, kv, strict, chunk_bytes, target)
    try:
        while not await engine.utility("weights_are_read", number):
            await asyncio.sleep(_POLL_SECONDS)
        await engine.utility("hold_engine", number, mode)
        while (done := await engine.utility("switch_weights", number, version, kv)) is None:
            await asyncio.sleep(_POLL_SECONDS)
        return done
    finally:
        await engine.utility("forget_read_weights", number)


async def update_from_pieces(
    engine: EngineClient, config: ServerConfig, pieces: AsyncIterator[bytes], options: UpdateOptions
) -> dict[str, Any]:
    """Replace the engine's weights by those of a safetensors file that arrives in pieces, and return the fields of a
    WeightUpdate. The file is stored in weight_upload_dir until the engine has read it.

    Raises the errors of `update_from_path`, RequestError also for a file that cannot be stored or is not safetensors,
    and OverloadedError for too many uploads at once.
    """
    check_version(options.version)
    async with uploaded(config.weight_upload_dir, pieces) as path:
        return await update_from_path(engine, path, options)
