"""A step on its way: what its forward pass left, and then what its epilogues found."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from jaxengine.runner.programs.step import Forwarded
from jaxengine.scheduler.buckets import Bucket


class PendingStep:
    """A step whose forward pass has been dispatched, its results possibly still being computed.

    It has tokens once the epilogue that ends it has been dispatched too. All results have a leading axis of replicas.

    Attributes:
      forwarded: what the forward pass left; None once the last epilogue has taken it.
      sampled: what that epilogue gave; None before it has been dispatched.
      outputs: of other epilogues, by their names.
      given: what extensions brought for the forward pass, by their names.
    """

    def __init__(
        self,
        bucket: Bucket,
        forwarded: Forwarded,
        fetch: Callable[[jax.Array], np.ndarray] = np.asarray,
        given: Mapping[str, Any] | None = None,
    ):
        """bucket: of the step. forwarded: what its forward pass left. fetch: waits for a result, and gives it as a
        numpy array. given: what extensions brought for the forward pass; None for nothing."""
        self.bucket = bucket
        self.forwarded: Forwarded | None = forwarded
        self.sampled: Any = None
        self.outputs: dict[str, Any] = {}
        self.given = given or {}
        self._fetch = fetch

    @property
    def is_sampled(self) -> bool:
        """Whether the epilogue that ends it has been dispatched."""
        return self.sampled is not None

    def is_ready(self) -> bool:
        """Whether the step is done, so that `token_ids` would not wait."""
        return self.sampled is not None and self.sampled.token_ids.is_ready()

    def token_ids(self) -> np.ndarray:
        """Waits for the step; returns the tokens chosen, i32[replicas, rows of logits], or of W tokens a row
        i32[replicas, rows, W]."""
        token_ids, width = self._fetch(self.sampled.token_ids), self.bucket.width
        return token_ids if width == 1 else token_ids.reshape(len(token_ids), -1, width)

    def result(self, name: str) -> np.ndarray | None:
        """Returns a field of the output of the epilogue that ended the step, None without that field; waits for it."""
        own = getattr(self.sampled, name, None)
        return None if own is None else self._fetch(own)

    def logprobs(self, given: bool) -> Any:
        """Results of the epilogue that ended the step (of Epilogue.output), its logprobs with it, as numpy
        arrays [replicas, ...]; where rows have several positions those of all, row after row. Waits for the step.

        given: those of tokens that requests name as well; without, `given_logprobs` has no columns, and none are sent
        from the device.
        """
        own = self.sampled
        if not given:
            own = own._replace(given_logprobs=np.empty((*own.rank.shape, 0), np.float32))
        return jax.tree.map(self._fetch, own)

    def output(self, name: str) -> Any:
        """Returns the output of the epilogue `name`, of those before the last, as numpy arrays; waits for it."""
        return jax.tree.map(self._fetch, self.outputs[name])
