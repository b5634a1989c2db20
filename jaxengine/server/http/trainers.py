"""Admin routes under the names that trainers' clients expect: routes that AReaL and prime-rl add to vLLM."""

from __future__ import annotations

from typing import Literal

from fastapi import APIRouter

from jaxengine.api.engine_client import EngineClient
from jaxengine.server.adapters.lora import load_from_root
from jaxengine.server.base.names import served_names
from jaxengine.server.base.options import ServerConfig
from jaxengine.server.http.adapters import LoadRequest, Path
from jaxengine.server.http.answer.answers import Answer, answers
from jaxengine.server.http.request.auth import ADMIN
from jaxengine.server.http.request.limits import JsonRoute
from jaxengine.server.http.request.protocol import RequestModel
from jaxengine.server.weights import weights


class Nothing(RequestModel):
    """An empty object, as AReaL sends it."""


class ArealUpdate(RequestModel):
    """New weights for the engine, from a folder on its machine (`model_path`), for which running requests always end.

    abort_all_requests has no effect, as in AReaL.
    """

    refused = {"load_format": ("auto",)}

    model_path: Path
    abort_all_requests: bool = False


class Done(Answer):
    success: bool
    message: str


class Ok(Answer):
    status: Literal["ok"]


def router(engine: EngineClient, config: ServerConfig) -> APIRouter:
    """Return the routes for trainers: /areal_pause_generation, /areal_continue_generation, /areal_update_weights and,
    with enable_lora, /load_lora_adapter. Return a router without routes unless enable_admin is set. The routes raise
    the errors of the functions in jaxengine.server.weights.weights.
    """
    routes = APIRouter(tags=["admin"], dependencies=ADMIN, route_class=JsonRoute)
    if not config.enable_admin:
        return routes

    @routes.post("/areal_pause_generation")
    @answers(Done)
    async def areal_pause_generation(body: Nothing) -> dict[str, bool | str]:
        """Do as /pause with mode "abort": end running requests, and drop cached prefixes, images and videos. Returns
        `success` and a `message`. Raises EngineDeadError if the engine cannot answer.
        """
        await weights.pause(engine, "abort", clear_cache=True)
        await engine.utility("reset_mm_cache")
        return _done("Generation paused and all requests aborted")

    @routes.post("/areal_continue_generation")
    @answers(Done)
    async def areal_continue_generation(body: Nothing) -> dict[str, bool | str]:
        """Do as /resume. Returns `success` and a `message`. Raises RequestError while the engine sleeps,
        EngineDeadError.
        """
        await weights.resume(engine)
        return _done("Generation continued")

    @routes.post("/areal_update_weights")
    @answers(Done)
    async def areal_update_weights(body: ArealUpdate) -> dict[str, bool | str]:
        """Do as /update_weights with mode "abort" and kv "drop". An earlier pause stays. Returns `success` and a
        `message` with the new version. Raises the errors of `weights.update_from_path`.
        """
        done = await weights.update_from_path(engine, body.model_path, weights.UpdateOptions(mode="abort", kv="drop"))
        return _done(f"The weights have version {done['version']}")

    if engine.inputs.config.enable_lora:
        names = served_names(engine, config)

        @routes.post("/load_lora_adapter")
        @answers(Ok)
        async def load_lora_adapter(body: LoadRequest) -> dict[str, str]:
            """Do as /v1/load_lora_adapter with load_inplace, as prime-rl expects. Raises `load_from_root`'s errors."""
            await load_from_root(engine, config, names, body.lora_name, body.lora_path, in_place=True)
            return {"status": "ok"}

    return routes


def _done(message: str) -> dict[str, bool | str]:
    """Return the JSON of a Done that reports success. Failures are answered by errors instead."""
    return {"success": True, "message": message}
