"""What a server needs of an engine, wherever the engine runs: in this process (AsyncLLM) or in another one."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any, Protocol

from jaxengine.requests.options import RequestOptions
from jaxengine.requests.outputs import RequestOutput
from jaxengine.requests.pooling_outputs import PoolingOutput, PoolingRequestOutput
from jaxengine.requests.pooling_params import PoolingParams
from jaxengine.requests.prepared import Prompt
from jaxengine.requests.sampling_params import SamplingParams

if TYPE_CHECKING:  # it reads tokenizers and models, and who catches EngineDeadError does not
    from jaxengine.requests.inputs import InputProcessor


class EngineDeadError(RuntimeError):
    """The engine has failed or was shut down; start a new one."""


class EngineDrainingError(EngineDeadError):
    """The server is about to end and takes no new requests."""


class EngineClient(Protocol):
    """An engine that answers many requests at once. All of it is used on one event loop.

    Attributes:
      inputs: limits, tokenizer, chat template and default sampling parameters.
    """

    inputs: InputProcessor

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
        """Yields outputs of the kind `sampling_params.output_kind` asks for, until the request is finished.

        Leaving the iteration early, or cancelling the task that runs it, aborts the request and frees its pages. A
        request that `options.timeout` seconds did not suffice for ends with finish_reason "abort" and stop_reason
        "timeout".

        Raises:
          RequestError: the request cannot be served; no other is disturbed. OverloadedError: not now.
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
        """As `stream`, of a pooling model: yields one output."""
        ...

    async def abort(self, request_id: str) -> None:
        """Ends a request; its stream yields a last output with finish_reason "abort"."""
        ...

    async def check_health(self) -> None:
        """Raises EngineDeadError when the engine cannot answer."""
        ...

    async def utility(self, name: str, *arguments: Any) -> Any:
        """Calls a function of `EngineCore.utilities` between two steps; arguments and result are plain JSON values.

        Raises RequestError for a name that is not there, EngineDeadError.
        """
        ...

    def text_spans(self) -> list[tuple[float, float, int]]:
        """When this process last made text of tokens: (start, end, outputs), seconds of time.monotonic, in order."""
        ...
