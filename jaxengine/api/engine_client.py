"""EngineClient: the interface of an engine for a server. The engine runs in this process (AsyncLLM) or another one."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any, Protocol

from jaxengine.requests.output.outputs import RequestOutput
from jaxengine.requests.params.options import RequestOptions
from jaxengine.requests.params.prepared import Prompt
from jaxengine.requests.params.sampling_params import SamplingParams
from jaxengine.requests.pooling.outputs import PoolingOutput, PoolingRequestOutput
from jaxengine.requests.pooling.params import PoolingParams
from jaxengine.scheduler.base.errors import RequestError

if TYPE_CHECKING:  # imports tokenizers and models, which code that only catches EngineDeadError does not need
    from jaxengine.requests.inputs import InputProcessor


class EngineDeadError(RuntimeError):
    """Error of an engine that has failed or was shut down, so that a new one must be started."""


class EngineDrainingError(EngineDeadError):
    """Error of a server that is shutting down and accepts no new requests."""


class EngineClient(Protocol):
    """Interface of an engine that serves many requests at once. All methods are called on one event loop."""

    @property
    def inputs(self) -> InputProcessor:
        """Limits, tokenizer, chat template and default sampling parameters."""
        ...

    @property
    def errored(self) -> bool:
        """Whether the engine cannot answer at the moment."""
        ...

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        options: RequestOptions | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Yield outputs as `sampling_params.output_kind` specifies, until the request is finished.

        Leaving the iteration early, or cancelling the task that runs it, aborts the request and frees its pages. A
        request that takes longer than `options.timeout` seconds ends with finish_reason "abort" and stop_reason
        "timeout".

        sampling_params: None for the model's defaults. request_id: None for a generated one. options: None for the
        defaults.

        Raises:
          RequestError: the request cannot be served; other requests are not affected. If it is an OverloadedError, the
            caller may try again later.
          EngineDeadError: the engine has failed.
        """
        ...

    def pool(
        self,
        prompt: Prompt,
        pooling_params: PoolingParams | None = None,
        request_id: str | None = None,
        options: RequestOptions | None = None,
    ) -> AsyncIterator[PoolingRequestOutput[PoolingOutput]]:
        """Yield the only output of a request to a pooling model.

        pooling_params: None for the model's defaults. request_id: None for a generated one. options: None for the
        defaults. Leaving the iteration early aborts the request. The iteration raises RequestError, OverloadedError and
        EngineDeadError.
        """
        ...

    async def abort(self, request_id: str) -> None:
        """End a request, whose stream then yields a last output with finish_reason "abort". Ignores an unknown id.
        Raises EngineDeadError if the engine has failed.
        """
        ...

    async def check_health(self) -> None:
        """Raise EngineDeadError if the engine cannot answer."""
        ...

    async def utility(self, name: str, *arguments: Any) -> Any:
        """Call a function of `EngineCore.utilities` between two steps. Arguments and result are plain JSON values.

        Raises RequestError for an unknown name, the function's own errors, and EngineDeadError if the engine has
        failed.
        """
        ...

    def text_spans(self) -> list[tuple[float, float, int]]:
        """Return the latest periods in which this process turned tokens into text, in order.

        Each is (start, end, number of outputs); times are seconds of time.monotonic.
        """
        ...


class EngineWrapper:
    """Base class of an EngineClient that wraps another one and passes these calls on to it. Subclasses add the rest."""

    def __init__(self, engine: EngineClient):
        self.inputs: InputProcessor = engine.inputs
        self._engine = engine

    @property
    def errored(self) -> bool:
        """Whether the wrapped engine cannot answer at the moment."""
        return self._engine.errored

    async def abort(self, request_id: str) -> None:
        """End a request of the wrapped engine, whose stream then yields a last output with finish_reason "abort".
        Ignores an unknown id. Raises EngineDeadError if the engine has failed.
        """
        await self._engine.abort(request_id)

    async def check_health(self) -> None:
        """Raise EngineDeadError if the wrapped engine cannot answer."""
        await self._engine.check_health()

    async def utility(self, name: str, *arguments: Any) -> Any:
        """Call a utility function of the wrapped engine and return its result. Raises RequestError for an unknown name,
        the function's own errors, and EngineDeadError.
        """
        return await self._engine.utility(name, *arguments)

    def text_spans(self) -> list[tuple[float, float, int]]:
        """Return the `text_spans` of the wrapped engine."""
        return self._engine.text_spans()


def prefix_reset(running: bool, external: bool, name: str = "reset_connector") -> str:
    """Return the name of the utility (`EngineCore.utilities`) that drops cached prefixes.

    running: whether running requests compute their pages again ("recompute_running") or not ("reset_prefix_cache").
    Raises RequestError, which names the argument `name`, if `external` is true.
    """
    if external:
        raise RequestError(f"{name} is true; allowed: false, as no reset deletes files of pages", param=name)
    return "recompute_running" if running else "reset_prefix_cache"
