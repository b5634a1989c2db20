"""Admin routes that pause an engine, put it to sleep and replace its weights; names are vLLM's."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from fastapi.routing import APIRoute
from pydantic import Field
from starlette.routing import Match
from starlette.types import Scope

from jaxengine.api.engine_client import EngineClient
from jaxengine.scheduler.base.errors import RequestError
from jaxengine.scheduler.base.weight_version import MAX_VERSION_LENGTH
from jaxengine.server.base.options import ServerConfig
from jaxengine.server.http.adapters import Path
from jaxengine.server.http.request.arrival import is_streamed
from jaxengine.server.http.request.auth import ADMIN
from jaxengine.server.http.request.limits import JsonRoute
from jaxengine.server.http.request.protocol import RequestModel
from jaxengine.server.weights import weights

Mode = Literal["keep", "wait", "abort"]
Target = Literal["model", "draft"]
# Messages between processes have 64 bits for this number.
MAX_CHUNK_BYTES = 2**63 - 1
ChunkBytes = Annotated[int, Field(ge=1, le=MAX_CHUNK_BYTES)]


class _BodyRoute(APIRoute):
    """Route for bodies that are not JSON. Requests with a JSON body are left to the next route of its path."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """Return Starlette's result of matching the request to this route. It is (Match.NONE, {}) unless the body is
        one of STREAMED.
        """
        return super().matches(scope) if scope["type"] == "http" and is_streamed(scope) else (Match.NONE, {})


class UpdateWeights(RequestModel):
    """New weights for the engine.

    Attributes:
      path: a folder on the engine's machine, with safetensors or in device layout, or a GGUF file there.
      weight_dir: prime-rl's name for `path`; one of both must be given.
      weight_version: version of the new weights; None for the present number plus one, or, if it is a text, the
        number of updates.
      mode, kv, strict, chunk_bytes, target: see `LLM.update_weights`.
    """

    path: Path | None = None
    weight_dir: Path | None = None
    weight_version: Annotated[str, Field(max_length=MAX_VERSION_LENGTH)] | int | None = None
    mode: Mode = "keep"
    kv: Literal["keep", "recompute", "drop"] = "recompute"
    strict: bool = True
    chunk_bytes: ChunkBytes | None = None
    target: Target = "model"

    def source(self) -> str:
        """Return `path` or `weight_dir`. Raises RequestError unless exactly one of them is given."""
        if (self.path is None) == (self.weight_dir is None):
            given = "neither" if self.path is None else "both"
            text = f"path, weight_dir: {given} given; allowed: one; weights between devices are not served"
            raise RequestError(text, param="path", value=self.path)
        return self.path or self.weight_dir or ""


def router(engine: EngineClient, config: ServerConfig) -> APIRouter:
    """Return the operators' routes that pause the engine (/pause, /resume, /is_paused), put it to sleep (/sleep,
    /release_kv_cache_memory, /wake_up, /is_sleeping) and replace its weights (`_add_update`). Return a router without
    routes unless enable_admin is set. The routes raise the errors of the functions in jaxengine.server.weights.weights:
    RequestError and EngineDeadError.
    """
    routes = APIRouter(tags=["admin"], dependencies=ADMIN, route_class=JsonRoute)
    if not config.enable_admin:
        return routes

    @routes.post("/pause")
    async def pause(mode: Mode = "abort", clear_cache: bool = True) -> dict[str, Any]:
        """Let no request run until /resume, and answer once none does. Those that come meanwhile wait.

        mode: running requests end at once ("abort"), run to their end ("wait") or stay where they are ("keep").
        clear_cache: drop cached prefixes. Returns the status "paused". Raises RequestError for "wait" while the engine
        sleeps and has requests, and EngineDeadError.
        """
        await weights.pause(engine, mode, clear_cache=clear_cache)
        return {"status": "paused"}

    @routes.post("/resume")
    async def resume() -> dict[str, Any]:
        """End a pause. Returns the status "resumed". Raises RequestError while the engine sleeps, EngineDeadError."""
        await weights.resume(engine)
        return {"status": "resumed"}

    @routes.get("/is_paused")
    async def is_paused() -> dict[str, bool]:
        """Return whether the engine is paused. Raises EngineDeadError if the engine cannot answer."""
        return {"is_paused": (await weights.state(engine))["is_paused"]}

    @routes.post("/sleep")
    async def sleep(
        level: Annotated[int, Query(ge=0, le=2)] = 1,
        mode: Mode = "abort",
        tags: Annotated[list[str] | None, Query()] = None,
        keep_kv: bool = False,
    ) -> dict[str, Any]:
        """Give up device memory until /wake_up: level 1 keeps weights in host memory, level 2 keeps none.

        Level 0 gives up nothing and only pauses. mode: what becomes of running requests: "abort" ends them, "wait" lets
        them finish first, and "keep" continues them after /wake_up. tags: give up "weights" or "kv_cache" alone; by
        default, both. keep_kv: with kv_offloading_size, cached pages stay in host memory and are found after /wake_up.
        Returns the status "sleeping", and the level. Raises RequestError for arguments that `LLM.sleep` refuses,
        EngineDeadError.
        """
        await weights.sleep(engine, level, mode, tags, keep_kv=keep_kv)
        return {"status": "sleeping", "level": level}

    @routes.post("/release_kv_cache_memory")
    async def release_kv_cache_memory() -> dict[str, Any]:
        """Free the pages of a paused engine until /wake_up. Kept requests are recomputed. Returns the status
        "kv_cache_released". Raises RequestError if the engine is not paused, EngineDeadError.
        """
        await weights.release_kv_cache_memory(engine)
        return {"status": "kv_cache_released"}

    @routes.post("/wake_up")
    async def wake_up(tags: Annotated[list[str] | None, Query()] = None) -> dict[str, Any]:
        """Put back "weights", "kv_cache", by "scheduling" neither or by default both; requests run once both are.

        Returns `asleep`, the parts that still sleep, and vLLM's fields: `status`, "awake" if none does, else
        "sleeping", and `tags`, those of the request. Raises RequestError for tags that `LLM.wake_up` refuses,
        EngineDeadError.
        """
        asleep = await weights.wake_up(engine, tags)
        return {"status": "sleeping" if asleep else "awake", "tags": tags, "asleep": asleep}

    @routes.get("/is_sleeping")
    async def is_sleeping() -> dict[str, bool]:
        """Return whether any part sleeps. Raises EngineDeadError if the engine cannot answer."""
        return {"is_sleeping": bool((await weights.state(engine))["asleep"])}

    _add_update(routes, engine, config)
    return routes


def _add_update(routes: APIRouter, engine: EngineClient, config: ServerConfig) -> None:
    """Add the routes about weights to `routes`: /update_weights, with a path or with the file itself as the body, and
    /weight_info.
    """

    @routes.post("/update_weights")
    async def update_weights(body: UpdateWeights) -> dict[str, Any]:
        """Replace the engine's weights between two steps: all of them or, with an error that lists what does not fit,
        none. Requests go on while the folder is read. Returns a WeightUpdate's fields. Raises RequestError,
        EngineDeadError.
        """
        given = body.mode, body.kv, body.strict, body.chunk_bytes, body.target
        options = weights.UpdateOptions(body.weight_version, *given)
        return await weights.update_from_path(engine, body.source(), options)

    async def update_weights_by_body(
        request: Request,
        weight_version: Annotated[str | None, Query(max_length=MAX_VERSION_LENGTH)] = None,
        mode: Mode = "keep",
        kv: Literal["keep", "recompute", "drop"] = "recompute",
        strict: bool = True,
        chunk_bytes: Annotated[int | None, Query(ge=1, le=MAX_CHUNK_BYTES)] = None,
        target: Target = "model",
    ) -> dict[str, Any]:
        """Replace the weights by those of the body, a safetensors file, which is stored in weight_upload_dir until it
        has been read. Options, result and errors are those of `update_weights`; too many uploads: OverloadedError.
        """
        options = weights.UpdateOptions(weight_version, mode, kv, strict, chunk_bytes, target)
        return await weights.update_from_pieces(engine, config, request.stream(), options)

    add = {"methods": ["POST"], "include_in_schema": False, "dependencies": routes.dependencies}
    routes.routes.insert(0, _BodyRoute("/update_weights", update_weights_by_body, **add))

    @routes.get("/weight_info")
    async def weight_info(checksum: bool = False) -> dict[str, Any]:
        """Return the version of the weights; with `checksum` also SHA-256 of each weight as the devices hold it. Raises
        RequestError for checksums of weights that sleep on request, and EngineDeadError.
        """
        return await weights.info(engine, checksum=checksum)
