"""Endpoint /v1/models: the served model under its names, and its adapters."""

from __future__ import annotations

import time
from typing import Any, Literal

from fastapi import APIRouter

from jaxengine.api.engine_client import EngineClient
from jaxengine.scheduler.base.errors import show_value
from jaxengine.server.adapters.lora import has_adapter, loaded_adapters
from jaxengine.server.adapters.lora_routes import LoraRoutes
from jaxengine.server.base.names import served_names
from jaxengine.server.base.options import ServerConfig
from jaxengine.server.http.answer.answers import Answer, answers
from jaxengine.server.http.request.errors import ApiError


def check_model(name: str | None, served: tuple[str, ...]) -> str:
    """Return the model name for the response: `name`, or the first of `served` if it is None.

    Raises ApiError (404) for a model that is not in `served`.
    """
    if name is not None and name not in served:
        shown = f"the model {show_value(name)} does not exist; this server has {', '.join(served)}"
        raise ApiError(404, shown, param="model", kept=shown)
    return name or served[0]


async def choose_model(engine: EngineClient, name: str | None, served: tuple[str, ...]) -> tuple[str, str | None]:
    """Return (model name for the response, adapter name or None) for `name`, the model that a request names. None or ""
    stands for the first of `served`, the model's own names. The name of a route in lora_routes is replaced by one of
    its adapters.

    An adapter that is not loaded and can be found by its name is loaded. engine: an OwnedEngine. Raises ApiError (404)
    for a model or adapter that is not served, RequestError for an adapter that cannot be loaded, EngineDeadError.
    """
    name = name or None  # clients of vLLM that have no name send ""
    if name is not None and name not in served:
        name = str(await engine.utility("route_model", name))
    if name is not None and name not in served:
        if await has_adapter(engine, name):
            return name, name
        loaded = [each["name"] for each in await loaded_adapters(engine)]
        return check_model(name, (*served, *loaded)), None
    return check_model(name, served), None


_PERMISSION = {
    "object": "model_permission",
    "allow_create_engine": False,
    "allow_sampling": True,
    "allow_logprobs": True,
    "allow_search_indices": False,
    "allow_view": True,
    "allow_fine_tuning": False,
    "organization": "*",
    "group": None,
    "is_blocking": False,
}


class ModelCard(Answer):
    """A served model or adapter.

    permission: OpenAI's former list of rights, here the same for every model and key, as in vLLM.
    """

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int
    permission: list[dict[str, Any]]


class ModelList(Answer):
    object: Literal["list"]
    data: list[ModelCard]


def router(engine: EngineClient, config: ServerConfig) -> APIRouter:
    """Return the routes /v1/models, which lists models, and /v1/models/{model}, which describes one."""
    routes = APIRouter(tags=["models"])
    names = served_names(engine, config)
    routes_to_adapters = LoraRoutes.of(config, names).names
    created = int(time.time())

    def card(name: str, root: str = names[0], parent: str | None = None) -> dict[str, Any]:
        """Return the card of a name. root: path of an adapter; the model's first name for others. parent: the model's
        first name for an adapter; None for the model itself.
        """
        return {
            "id": name,
            "object": "model",
            "created": created,
            "owned_by": "jaxengine",
            "root": root,
            "parent": parent,
            "max_model_len": engine.inputs.config.max_model_len,
            "permission": [{"id": f"modelperm-{name}", "created": created, **_PERMISSION}],
        }

    async def adapter_cards() -> list[dict[str, Any]]:
        """Return the cards of loaded adapters. Raises EngineDeadError if the engine cannot answer."""
        return [card(each["name"], each["path"], names[0]) for each in await loaded_adapters(engine)]

    @routes.get("/v1/models")
    @answers(ModelList)
    async def list_models() -> dict[str, Any]:
        """List the names that a request may give as its model: the model's own, loaded adapters and lora_routes. Raises
        EngineDeadError if the engine cannot answer.
        """
        routed = [card(name, names[0], names[0]) for name in routes_to_adapters]
        return {"object": "list", "data": [*map(card, names), *await adapter_cards(), *routed]}

    @routes.get("/v1/models/{model:path}")
    @answers(ModelCard)
    async def get_model(model: str) -> dict[str, Any]:
        """Return the card of a model, adapter or lora_route by its name. Raises ApiError (404) for another name,
        EngineDeadError.
        """
        if model in routes_to_adapters:
            return card(model, names[0], names[0])
        found = next((each for each in await adapter_cards() if each["id"] == model), None)
        return found or card(check_model(model, names))

    return routes
