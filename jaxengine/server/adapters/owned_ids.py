"""Separation of request ids by owner: two owners may use the same id, and neither sees the other's requests.

In the engine, the id of a request whose owner has a key is "ID@OWNER". Clients write and see ID only.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

from jaxengine.api.engine_client import EngineClient, EngineWrapper
from jaxengine.requests.params.options import RequestOptions
from jaxengine.scheduler.base.errors import RequestError, show_value
from jaxengine.server.adapters.adapter_sources import AdapterSources
from jaxengine.server.adapters.lora_routes import ROUTE_KEY, LoraRoutes
from jaxengine.server.base.names import names_of
from jaxengine.server.base.options import ServerConfig

_AT = "@"  # not a character of names.REQUEST_ID
# Fields of a timeline's step that hold request ids.
_STEP_IDS = ("admitted", "preempted", "first_tokens", "finished")


def shown_id(engine_id: str) -> str:
    """Return the part of a request id that its client knows: the text before "@", or all of it if there is none."""
    return engine_id.partition(_AT)[0]


class OwnedEngine(EngineWrapper):
    """EngineClient that wraps another one and keeps the request ids of different owners (`RequestOptions.owner`) apart.

    It adds two utilities: "find_adapter", which calls AdapterSources.find, and "route_model", which returns the adapter
    that lora_routes choose for a model name and the current request.
    """

    def __init__(self, engine: EngineClient, sources: AdapterSources | None = None, routes: LoraRoutes | None = None):
        super().__init__(engine)
        self._sources, self._routes = sources, routes
        # Id that clients know -> ids in the engine of the running requests with this id.
        self._running: dict[str, list[str]] = {}

    def stream(
        self,
        prompt: Any,
        sampling_params: Any = None,
        request_id: str | None = None,
        options: RequestOptions | None = None,
    ) -> AsyncIterator[Any]:
        """Yield the outputs of a request, with the arguments and errors of EngineClient.stream. Outputs, and the error
        for an id in use, have `request_id` as given, although the engine's id includes the owner of `options`.
        """
        return self._named(self._engine.stream, prompt, sampling_params, request_id, options)

    def pool(
        self,
        prompt: Any,
        pooling_params: Any = None,
        request_id: str | None = None,
        options: RequestOptions | None = None,
    ) -> AsyncIterator[Any]:
        """Yield the output of a pooling request, with the arguments and errors of EngineClient.pool. The output, and
        the error for an id in use, have `request_id` as given.
        """
        return self._named(self._engine.pool, prompt, pooling_params, request_id, options)

    async def utility(self, name: str, *arguments: Any) -> Any:
        """Call a utility and return its result: "find_adapter" or "route_model", which this class has itself, or one of
        the engine's.

        "find_adapter" is AdapterSources.find of a name, False without `sources`. "route_model" is LoraRoutes.pick of a
        name by the context's ROUTE_KEY, the name itself without `routes`. Raises the utility's errors.
        """
        if name == "find_adapter":
            return self._sources is not None and await self._sources.find(self._engine, *arguments)
        if name == "route_model":
            return arguments[0] if self._routes is None else self._routes.pick(arguments[0], ROUTE_KEY.get())
        return await super().utility(name, *arguments)

    async def abort(self, request_id: str) -> None:
        """Abort the requests of all owners that have this id, given as clients know it or as it is in the engine. An
        unknown id has no effect. Raises EngineDeadError if the engine cannot answer.
        """
        # Requests without an owner have the id itself. A copy, as a request that ends is removed from the list.
        for engine_id in (*self._running.get(request_id, ()), request_id):
            await self._engine.abort(engine_id)

    def _named(
        self, run: Any, prompt: Any, params: Any, request_id: str | None, options: RequestOptions | None
    ) -> AsyncIterator[Any]:
        """Return the outputs of `run(prompt, params, id, options)`. If both a request id and an owner are given, the id
        is "REQUEST_ID@OWNER" and the outputs get `request_id` back; otherwise it is `request_id`.
        """
        if request_id is None or options is None or not options.owner:
            return run(prompt, params, request_id, options)
        engine_id = f"{request_id}{_AT}{options.owner}"
        return self._outputs(run(prompt, params, engine_id, options), request_id, engine_id)

    async def _outputs(self, stream: Any, request_id: str, engine_id: str) -> AsyncGenerator[Any, None]:
        """Yield copies of a stream's outputs with `request_id` in place of the engine's id, and close the stream in
        every case.

        While it runs, `abort(request_id)` reaches the request. Raises the stream's errors; the RequestError for an id
        in use names the client's id.
        """
        running = self._running.setdefault(request_id, [])
        running.append(engine_id)
        try:
            async with contextlib.aclosing(stream):  # now, as closing it early aborts the request
                async for output in stream:
                    named = copy.copy(output)  # the engine continues to use the original
                    named.request_id = request_id
                    yield named
        except RequestError as error:
            if error.param == "request_id" and error.value == engine_id:
                text = f"request_id {show_value(request_id)} is in use"
                raise RequestError(text, param="request_id", value=request_id) from None
            raise
        finally:
            running.remove(engine_id)
            if not running and self._running.get(request_id) is running:
                del self._running[request_id]


def owned(engine: EngineClient, config: ServerConfig | None = None) -> OwnedEngine:
    """Return `engine` wrapped in an OwnedEngine. An engine that is one already is returned as it is, and `config` has
    no effect.

    config: options about the sources of adapters and the routes to them; None for neither. Sources are used only if
    the engine has enable_lora. Raises ConfigError for a folder of lora_dirs that is missing if they are used, and for
    invalid lora_routes.
    """
    if isinstance(engine, OwnedEngine):
        return engine
    if config is None:
        return OwnedEngine(engine)
    finds = engine.inputs.config.enable_lora and (config.lora_dirs or config.lora_hub_owners)
    routes = LoraRoutes.of(config, names_of(engine.inputs.config.model, config))
    return OwnedEngine(engine, AdapterSources(config) if finds else None, routes)


class Viewer:
    """One client's view of request ids: its own ids without the owner, and numbers in place of the ids of others.

    owner: the client's `RequestOptions.owner`. None for an operator and if there are no keys: such a view shows all ids
    unchanged.
    """

    def __init__(self, owner: str | None):
        self._owner = owner
        self._others: dict[str, str] = {}

    def show(self, engine_id: str) -> str:
        """Return an id as this client sees it: without the owner if the request is its own, else "other-N", where N
        counts from 1 the distinct ids of others that this view has shown. A view without an owner returns the id
        unchanged.
        """
        if self._owner is None:
            return engine_id
        name, _, owner = engine_id.partition(_AT)
        return name if owner == self._owner else self._others.setdefault(engine_id, f"other-{len(self._others) + 1}")

    def status(self, status: dict[str, Any]) -> dict[str, Any]:
        """Return a copy of an engine's status, a dict with "requests", with their ids replaced by `show`."""
        return {**status, "requests": [self._named(request) for request in status["requests"]]}

    def timeline(self, timeline: dict[str, Any]) -> dict[str, Any]:
        """Return a copy of an engine's timeline, a dict with "steps" and "requests", with request ids replaced by
        `show`.
        """
        steps = [
            {
                **step,
                **{name: [self.show(each) for each in step[name]] for name in _STEP_IDS},
                "chunks": [(self.show(each), count) for each, count in step["chunks"]],
            }
            for step in timeline["steps"]
        ]
        return {**timeline, "steps": steps, "requests": [self._named(each) for each in timeline["requests"]]}

    def _named(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return a copy of a request's dict in which "id" is replaced by what `show` returns for it."""
        return {**request, "id": self.show(request["id"])}
