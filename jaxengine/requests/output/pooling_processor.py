"""Conversion of pooled vectors to the caller's outputs; the counterpart of OutputProcessor for a pooling model.

A request has one output, at its end.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from jaxengine.engine.output import EngineOutput
from jaxengine.requests.output.output_processor import TAGS
from jaxengine.requests.pooling.outputs import STOP, PoolingOutput, PoolingRequestOutput
from jaxengine.requests.pooling.params import PoolingRecipe
from jaxengine.scheduler.base.request import NOT_FINITE, FinishReason, Request

if TYPE_CHECKING:
    from jaxengine.requests.params.prepared import PreparedRequest


@dataclass(eq=False)
class _Followed:
    """Tracked request to a pooling model.

    Attributes:
      request: the engine's request.
      request_id, prompt_token_ids: fields of the caller's output.
      recipe: how the answer is computed.
      vector: f32[N]; None until it is computed.
      rows: the rows of the prompt's tokens so far, f32[tokens, N] of each step.
    """

    request: Request
    request_id: str
    prompt_token_ids: list[int]
    recipe: PoolingRecipe
    vector: np.ndarray | None = None
    rows: list[np.ndarray] = field(default_factory=list)

    def output(self) -> PoolingRequestOutput[PoolingOutput]:
        """Return the caller's output of an ended request. Its data is empty unless the request ended with a vector.
        Token rows that are not finite change the request's finish reason to "error".
        """
        request = self.request
        assert request.finish_reason is not None
        # A request aborted after its vector was computed has no answer either.
        vector = self.vector if request.finish_reason is FinishReason.STOP else None
        if vector is None:
            data = np.empty(0, np.float32)
        elif self.recipe.tokens is None:
            data = self.recipe.finish(vector)
        else:
            data = self.recipe.finish_tokens(np.concatenate(self.rows), self.prompt_token_ids)
            if not np.isfinite(data).all():
                vector, request.stop_reason, request.finish_reason = None, NOT_FINITE, FinishReason.ERROR
        return PoolingRequestOutput(
            request_id=self.request_id,
            outputs=PoolingOutput(data),
            prompt_token_ids=self.prompt_token_ids,
            num_cached_tokens=max(0, request.num_cached_tokens),
            finish_reason=STOP if vector is not None else request.finish_reason.value,
            stop_reason=None if vector is not None else request.stop_reason,
        )


class PoolingProcessor:
    """Tracker of a pooling model's requests, by tag, that creates their outputs. It has the interface of
    OutputProcessor.
    """

    def __init__(self):
        self.spans: deque[tuple[float, float, int]] = deque(maxlen=4096)
        self._by_id: dict[str, _Followed] = {}
        self._by_tag: dict[int, _Followed] = {}
        self._last_tag = 0

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._by_id

    def __len__(self) -> int:
        return len(self._by_id)

    def add(self, prepared: PreparedRequest) -> None:
        """Start tracking the one request of `prepared`, and set its `tag`, by which its vectors are found.
        `prepared.params` must be a PoolingRecipe (asserted).
        """
        (request,), recipe = prepared.requests, prepared.params
        assert isinstance(recipe, PoolingRecipe)
        self._last_tag = request.tag = (self._last_tag + 1) % TAGS
        followed = _Followed(request, prepared.request_id, request.prompt_token_ids.tolist(), recipe)
        self._by_id[prepared.request_id] = self._by_tag[request.tag] = followed

    def running(self, request_id: str) -> list[Request]:
        """Return the request of this id as a list, [] if it has ended or is unknown."""
        followed = self._by_id.get(request_id)
        return [] if followed is None else [followed.request]

    def forget(self, request: Request) -> tuple[str | None, list[Request]]:
        """Stop tracking a request, without an output. Returns its id and the request as a list; (None, []) if it is not
        tracked.
        """
        followed = self._by_tag.pop(request.tag, None)
        if followed is None:
            return None, []
        del self._by_id[followed.request_id]
        return followed.request_id, [followed.request]

    def process(
        self, step: EngineOutput, now: float, stop: Callable[[Request, FinishReason, str, int], None]
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """Process the results of a step; return the outputs of requests that ended, which are no longer tracked.
        Results of other requests are stored; those of untracked ones are ignored. now: seconds of time.monotonic. stop:
        never called.
        """
        for emitted in step.emitted:
            assert emitted.vectors is not None
            for tag, token_id, vector in zip(emitted.tags.tolist(), emitted.token_ids, emitted.vectors, strict=True):
                if token_id >= 0 and (followed := self._by_tag.get(tag)) is not None:
                    followed.vector = vector
        for found in step.found:
            if (followed := self._by_tag.get(found.request.tag)) is not None:
                followed.rows.append(found.rows)
        outputs = []
        for request in step.finished:
            if (followed := self._by_tag.get(request.tag)) is not None:
                self.forget(request)
                outputs.append(followed.output())
        if outputs:
            self.spans.append((now, time.monotonic(), len(outputs)))
        return outputs
