"""Admin routes that load and unload adapters at run time, under vLLM's names and SageMaker's. The engine reads their
files in a thread.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Response
from pydantic import Field

from jaxengine.api.engine_client import EngineClient
from jaxengine.server.adapters.lora import load_from_root, unload
from jaxengine.server.base.names import served_names
from jaxengine.server.base.options import ServerConfig
from jaxengine.server.http.request.auth import ADMIN
from jaxengine.server.http.request.limits import JsonRoute
from jaxengine.server.http.request.protocol import RequestModel

Name = Annotated[str, Field(min_length=1, max_length=256)]
Path = Annotated[str, Field(min_length=1, max_length=4096)]


class LoadRequest(RequestModel):
    """Adapter to load.

    Attributes:
      lora_name: name by which requests use it.
      lora_path: a folder in lora_root, relative to it or absolute.
      load_inplace: an adapter that has the name gives it up once the new one is read; its running requests continue
        with its own matrices.
    """

    refused = {"is_3d_lora_weight": (False,)}

    lora_name: Name
    lora_path: Path
    load_inplace: bool = False


class SageMakerLoadRequest(RequestModel):
    """Adapter to load, as SageMaker names the fields of a LoadRequest: `name`, `src`, `load_inplace`."""

    refused = {"is_3d_lora_weight": (False,), "pin": (False,), "preload": (True,)}

    name: Name
    src: Path
    load_inplace: bool = False


class UnloadRequest(RequestModel):
    """Adapter to unload, by its name."""

    ignored = frozenset(("lora_int_id",))

    lora_name: Name


def router(engine: EngineClient, config: ServerConfig) -> APIRouter:
    """Return the routes by which operators load and unload adapters: /v1/load_lora_adapter, /v1/unload_lora_adapter,
    and POST and DELETE of SageMaker's /adapters. Return a router without routes unless enable_admin and enable_lora are
    set.
    """
    routes = APIRouter(tags=["admin"], dependencies=ADMIN, route_class=JsonRoute)
    if not (config.enable_admin and engine.inputs.config.enable_lora):
        return routes
    names = served_names(engine, config)

    @routes.post("/v1/load_lora_adapter", response_class=Response)
    async def load_lora_adapter(body: LoadRequest) -> Response:
        """Load an adapter, which requests may then name as their model, and answer in plain text once it is loaded.
        Raises RequestError without lora_root, for a name that is taken (without load_inplace), a path out of lora_root
        and an unusable adapter, UnknownAdapterError for a path at which nothing is, and EngineDeadError.
        """
        await load_from_root(engine, config, names, body.lora_name, body.lora_path, in_place=body.load_inplace)
        return _text(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    @routes.post("/v1/unload_lora_adapter", response_class=Response)
    async def unload_lora_adapter(body: UnloadRequest) -> Response:
        """Close an adapter to further requests, and answer in plain text; running requests continue. Raises
        UnknownAdapterError for an unknown name, EngineDeadError if the engine cannot answer.
        """
        return await remove(body.lora_name)

    @routes.post("/adapters", response_class=Response)
    async def load_sagemaker_adapter(body: SageMakerLoadRequest) -> Response:
        """Do as /v1/load_lora_adapter, with SageMaker's names of the fields. Raises `load_lora_adapter`'s errors."""
        return await load_lora_adapter(
            LoadRequest(lora_name=body.name, lora_path=body.src, load_inplace=body.load_inplace)
        )

    @routes.delete("/adapters/{name:path}", response_class=Response)
    async def remove(name: Name) -> Response:
        """Do as /v1/unload_lora_adapter, with the name in the path. Raises UnknownAdapterError, EngineDeadError."""
        await unload(engine, name)
        return _text(f"Success: LoRA adapter '{name}' removed successfully.")

    return routes


def _text(text: str) -> Response:
    """Return a response with status 200 and `text` as plain text."""
    return Response(text, media_type="text/plain")
