"""Routes about health and load, and admin routes."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request, Response
from pydantic import Field

from jaxengine.api.engine_client import EngineClient, prefix_reset
from jaxengine.server.base.options import ServerConfig
from jaxengine.server.http.answer.answers import Answer, answers
from jaxengine.server.http.request.auth import ADMIN
from jaxengine.server.http.request.fields import Texts
from jaxengine.server.http.request.limits import JsonRoute
from jaxengine.server.http.request.protocol import RequestModel
from jaxengine.version import __version__


class AbortRequest(RequestModel):
    """Requests to abort, by the values of `id` in their responses: at least one, as none stands for all in vLLM."""

    request_ids: Annotated[Texts, Field(min_length=1, max_length=1024)]


class ProfileStart(RequestModel):
    """vLLM's changes of one profile, which are refused: a profile lasts until it is stopped."""

    refused = {"delay_iterations": (0,), "max_iterations": (0,), "profile_prefix": (), "profiler_kwargs": ({},)}


_NO_CHANGES = ProfileStart()


class Version(Answer):
    version: str


class Load(Answer):
    server_load: int


def router(engine: EngineClient, config: ServerConfig) -> APIRouter:
    """Return the routes /health and /ping, /live and /livez, /version and /load, which every server has."""
    routes = APIRouter(tags=["operations"])

    @routes.get("/health", response_class=Response)
    @routes.get("/ping", operation_id="ping", response_class=Response)
    @routes.post("/ping", operation_id="post_ping", response_class=Response)
    async def health() -> Response:
        """Return an empty response 200 if requests are answered. Raises EngineDeadError (503) while the engine is
        started again, hangs or is being shut down.
        """
        await engine.check_health()
        return Response()

    @routes.get("/livez", response_class=Response, include_in_schema=False)
    @routes.get("/live", response_class=Response)
    async def live() -> Response:
        """Answer 200, as this process runs. The server restarts its engine itself, and ends if that does not help."""
        return Response()

    @routes.get("/version")
    @answers(Version)
    async def version() -> dict[str, str]:
        """Return the version of the server."""
        return {"version": __version__}

    @routes.get("/load")
    @answers(Load)
    async def load(request: Request) -> dict[str, int]:
        """Return, as `server_load`, how many POST requests and background responses this API process works on."""
        return {"server_load": request.app.state.traffic.num_running}

    return routes


def admin_router(engine: EngineClient, config: ServerConfig) -> APIRouter:
    """Return the routes for operators: /reset_prefix_cache, /reset_mm_cache, /abort_requests, /server_info,
    /get_world_size and, with profiler_config, /start_profile and /stop_profile. Return a router without routes unless
    enable_admin is set.
    """
    routes = APIRouter(tags=["admin"], dependencies=ADMIN, route_class=JsonRoute)
    if not config.enable_admin:
        return routes

    @routes.post("/reset_prefix_cache")
    async def reset_prefix_cache(reset_running_requests: bool = False, reset_external: bool = False) -> dict[str, bool]:
        """Drop all cached prefixes, those in host memory too; files stay. Running requests keep their pages, or, with
        reset_running_requests, are computed again from their first token. Returns `success`. Raises RequestError if
        reset_external is true, EngineDeadError.
        """
        utility = prefix_reset(reset_running_requests, reset_external, "reset_external")
        return {"success": bool(await engine.utility(utility))}

    @routes.post("/reset_mm_cache")
    async def reset_mm_cache() -> dict[str, bool]:
        """Drop cached images and videos, preprocessed and encoded; running requests keep theirs. Returns `success`.
        Raises EngineDeadError if the engine cannot answer.
        """
        return {"success": bool(await engine.utility("reset_mm_cache"))}

    @routes.post("/inference/v1/abort_requests")  # vLLM's path beside /inference/v1/generate
    @routes.post("/abort_requests")
    async def abort_requests(body: AbortRequest) -> dict[str, Any]:
        """Abort requests of any client; their answers have finish_reason "abort". Ignores unknown ids. Returns the
        status "aborted", and as `aborted` how many ids were given. Raises EngineDeadError if the engine cannot answer.
        """
        for request_id in body.request_ids:
            await engine.abort(request_id)
        return {"status": "aborted", "aborted": len(body.request_ids)}

    if engine.inputs.config.profiler_config is not None:

        @routes.post("/start_profile")
        async def start_profile(body: ProfileStart = _NO_CHANGES) -> dict[str, bool]:
            """Start a profile of the engine's process (jax.profiler). Returns `success`. Raises RequestError if that is
            not possible, or for fields of the body, EngineDeadError.
            """
            return {"success": bool(await engine.utility("start_profile"))}

        @routes.post("/stop_profile")
        async def stop_profile() -> dict[str, bool]:
            """Write the profile into profiler_config's folder, on the server's machine. Returns `success`. Raises
            RequestError if none was started, EngineDeadError.
            """
            return {"success": bool(await engine.utility("stop_profile"))}

    @routes.get("/server_info")
    async def server_info(config_format: Literal["json"] = "json") -> dict[str, Any]:
        """Return `engine` and `server`, their settings in use, without keys, and the following fields. Raises
        EngineDeadError if the engine cannot answer.

        weights: formats of stored and multiplied matrices. adapter_forms: how products apply adapters. mm_cache: where
        preprocessed images are cached. vllm_config: what trainers look up in vLLM's answer, by its names.
        config_format: vLLM's other format, a text, is refused.
        """
        hidden = {"api_key"}
        server = {name: value for name, value in dataclasses.asdict(config).items() if name not in hidden}
        weights = await engine.utility("weights")
        settings = {"engine": dataclasses.asdict(engine.inputs.config), "server": server}
        more = {name: await engine.utility(name) for name in ("adapter_forms", "mm_cache")}
        return {**settings, "weights": weights, **more, "vllm_config": _vllm_config(engine)}

    @routes.get("/get_world_size")
    async def get_world_size(include_dp: bool = True) -> dict[str, int]:
        """Return `world_size`, the devices of the engine by the sizes of its parallelism, or those of one data-parallel
        part of it without include_dp. Trainers ask for it before they open a transport of weights, whose refusal says
        what to use.
        """
        config = engine.inputs.config
        size = config.tensor_parallel_size * config.pipeline_parallel_size
        return {"world_size": size * (config.data_parallel_size if include_dp else 1)}

    return routes


def _vllm_config(engine: EngineClient) -> dict[str, Any]:
    """Return the sections of vLLM's configuration, by vLLM's names, from which trainers (TRL) choose how they send
    weights: model_config, parallel_config and lora_config, which is None without enable_lora. weight_transfer_config is
    None, as in a vLLM without a transport of weights between devices.
    """
    config = engine.inputs.config
    model = {"model": config.model, "dtype": f"torch.{config.dtype}", "max_model_len": config.max_model_len}
    sizes = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
    lora = {"max_loras": config.max_loras, "max_lora_rank": config.max_lora_rank} if config.enable_lora else None
    return {
        "model_config": {**model, "logprobs_mode": config.logprobs_mode},
        "parallel_config": {name: getattr(config, name) for name in sizes},
        "lora_config": lora,
        "weight_transfer_config": None,
    }
