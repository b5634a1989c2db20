"""Admin routes that pause an engine, put it to sleep and replace its weights; names are vLLM's."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Query
from pydantic import Field

from jaxengine.api.engine_client import EngineClient
from jaxengine.server.http.auth import require_admin
from jaxengine.server.http.limits import JsonRoute
from jaxengine.server.http.protocol import RequestModel
from jaxengine.server.options import ServerConfig

_POLL_SECONDS = 0.01
Mode = Literal["keep", "wait", "abort"]


class UpdateWeights(RequestModel):
    """New weights for the engine.

    path: a folder on the engine's machine, with safetensors or in device layout. weight_version: None counts on.
    mode, kv, strict: as of `LLM.update_weights`.
    """

    path: Annotated[str, Field(min_length=1, max_length=4096)]
    weight_version: Annotated[str, Field(max_length=256)] | int | None = None
    mode: Mode = "keep"
    kv: Literal["keep", "recompute", "drop"] = "recompute"
    strict: bool = True


def router(engine: EngineClient, config: ServerConfig) -> APIRouter:
    routes = APIRouter(tags=["admin"], dependencies=[Depends(require_admin)], route_class=JsonRoute)
    if not config.enable_admin:
        return routes

    @routes.post("/pause")
    async def pause(mode: Mode = "abort", clear_cache: bool = True) -> dict[str, Any]:
        """Lets no request run until /resume. Those that come meanwhile wait.

        mode: running requests end at once ("abort"), run to their end ("wait") or stay where they are ("keep").
        clear_cache: drop cached prefixes.
        """
        await _pause(engine, mode)
        if clear_cache:
            await engine.utility("reset_prefix_cache")
        return {"status": "paused"}

    @routes.post("/resume")
    async def resume() -> dict[str, Any]:
        """Ends a pause."""
        await engine.utility("resume_engine")
        return {"status": "resumed"}

    @routes.get("/is_paused")
    async def is_paused() -> dict[str, bool]:
        return {"is_paused": (await engine.utility("engine_pause"))["is_paused"]}

    @routes.post("/sleep")
    async def sleep(level: Annotated[int, Query(ge=0, le=2)] = 1, mode: Mode = "abort") -> dict[str, Any]:
        """Gives up device memory until /wake_up: level 1 keeps weights in host memory, level 2 keeps none.

        Level 0 gives up nothing and only pauses.
        """
        await engine.utility("check_sleep", level, mode)
        await _pause(engine, mode)
        await engine.utility("fall_asleep", level)
        return {"status": "asleep"}

    @routes.post("/wake_up")
    async def wake_up(tags: Annotated[list[str] | None, Query()] = None) -> dict[str, Any]:
        """Puts back "weights", "kv_cache" or, by default, both; requests run once both are there."""
        await engine.utility("wake_engine", tags)
        return {"asleep": (await engine.utility("engine_pause"))["asleep"]}

    @routes.get("/is_sleeping")
    async def is_sleeping() -> dict[str, bool]:
        return {"is_sleeping": bool((await engine.utility("engine_pause"))["asleep"])}

    _add_update(routes, engine)
    return routes


def _add_update(routes: APIRouter, engine: EngineClient) -> None:
    """Adds the routes that concern weights."""

    @routes.post("/update_weights")
    async def update_weights(body: UpdateWeights) -> dict[str, Any]:
        """Replaces the engine's weights between two steps: all of them or, with an error that lists what does not fit,
        none. Requests go on while the folder is read."""
        arguments = (body.path, body.weight_version, body.mode, body.kv, body.strict)
        number = await engine.utility("read_weights", *arguments)
        try:
            while not await engine.utility("weights_are_read", number):
                await asyncio.sleep(_POLL_SECONDS)
            was_paused = (await engine.utility("engine_pause"))["is_paused"]
            try:
                await _pause(engine, body.mode)
                return await engine.utility("switch_weights", number, body.weight_version, body.kv)
            finally:
                if not was_paused:
                    await engine.utility("resume_engine")
        finally:
            await engine.utility("forget_read_weights", number)

    @routes.get("/weight_info")
    async def weight_info(checksum: bool = False) -> dict[str, Any]:
        """The version of the weights; with `checksum` also SHA-256 of each weight as the devices hold it."""
        found: dict[str, Any] = {"weight_version": (await engine.utility("engine_pause"))["weight_version"]}
        return {**found, "checksums": await engine.utility("weight_checksums")} if checksum else found


async def _pause(engine: EngineClient, mode: Mode) -> None:
    """Pauses the engine; returns when the pause is there."""
    await engine.utility("pause_engine", mode)
    while not await engine.utility("pause_is_there"):
        await asyncio.sleep(_POLL_SECONDS)
