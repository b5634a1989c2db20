"""Dispatched step: what its forward pass left, and later the outputs of its epilogues."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from jaxengine.runner.programs.step import Forwarded
from jaxengine.scheduler.batches.buckets import Bucket


class PendingStep:
    """Step whose forward pass has been dispatched; its results may not be computed yet.

    It has tokens once the epilogue that ends it has been dispatched. All results have a leading axis of replicas.

    Attributes:
      forwarded: results of the forward pass; None once the last epilogue has taken them.
      sampled: output of that epilogue; None before it is dispatched.
      outputs: outputs of other epilogues, by name.
      given: arrays that extensions provided for the forward pass, by name.
    """

    def __init__(
        self,
        bucket: Bucket,
        forwarded: Forwarded,
        fetch: Callable[[jax.Array], np.ndarray] = np.asarray,
        given: Mapping[str, Any] | None = None,
    ):
        """Store the results of a forward pass.

        bucket: of the step. forwarded: results of its forward pass. fetch: waits for a result and returns it as a numpy
        array. given: arrays that extensions provided for the forward pass; None for none.
        """
        self.bucket = bucket
        self.forwarded: Forwarded | None = forwarded
        self.sampled: Any = None
        self.outputs: dict[str, Any] = {}
        self.given = given or {}
        self._fetch = fetch

    @property
    def is_sampled(self) -> bool:
        """Whether the epilogue that ends the step has been dispatched."""
        return self.sampled is not None

    def is_ready(self) -> bool:
        """Whether the step is computed, so that `token_ids` would not wait; False before its last epilogue is
        dispatched.
        """
        return self.sampled is not None and self.sampled.token_ids.is_ready()

    def token_ids(self) -> np.ndarray:
        """Return the sampled tokens, i32[replicas, rows of logits], or with W > 1 tokens a row i32[replicas, rows, W];
        waits for the step, whose last epilogue must have been dispatched.
        """
        token_ids, width = self._fetch(self.sampled.token_ids), self.bucket.width
        return token_ids if width == 1 else token_ids.reshape(len(token_ids), -1, width)

    def result(self, name: str) -> np.ndarray | None:
        """Return the field `name` of the output of the epilogue that ended the step as a numpy array; waits for it.
        None if the output has no such field, or the epilogue was not dispatched.
        """
        own = getattr(self.sampled, name, None)
        return None if own is None else self._fetch(own)

    def logprobs(self, given: bool) -> Any:
        """Return the output of the epilogue that ended the step (of type Epilogue.output), logprobs included, as numpy
        arrays [replicas, ...]; rows with several positions have all of them, row after row. Waits for the step.

        given: whether to fetch logprobs of the token ids that requests name, too; otherwise `given_logprobs` has no
        columns.
        """
        own = self.sampled
        if not given:
            own = own._replace(given_logprobs=np.empty((*own.rank.shape, 0), np.float32))
        return jax.tree.map(self._fetch, own)

    def output(self, name: str) -> Any:
        """Return the output of the epilogue `name`, which ran before the last one, as numpy arrays; waits for it.
        Raises KeyError if it was not dispatched.
        """
        return jax.tree.map(self._fetch, self.outputs[name])
