"""PendingStep: a dispatched step, with the results of its forward pass and the outputs of its epilogues."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from jaxengine.runner.programs.step import Forwarded
from jaxengine.scheduler.batches.buckets import Bucket


class PendingStep:
    """Step whose forward pass has been dispatched. The devices may still be computing its results.

    It has tokens once the epilogue that ends it has been dispatched. All results have a leading axis of replicas.

    Attributes:
      bucket: bucket of the step.
      forwarded: results of the forward pass; None once the last epilogue has taken them.
      sampled: output of the last epilogue; None before it is dispatched.
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

        bucket: the step's bucket. forwarded: results of its forward pass. fetch: waits for a result and returns it as a
        numpy array. given: arrays that extensions provided for the forward pass; None for none.
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
        """Whether the step has been computed, so that `token_ids` would not wait; False before its last epilogue is
        dispatched.
        """
        return self.sampled is not None and self.sampled.token_ids.is_ready()

    def token_ids(self) -> np.ndarray:
        """Wait for the step, whose last epilogue must have been dispatched, and return the sampled tokens,
        i32[replicas, rows of logits], or i32[replicas, rows, W] if rows have W > 1 tokens.
        """
        token_ids, width = self._fetch(self.sampled.token_ids), self.bucket.width
        return token_ids if width == 1 else token_ids.reshape(len(token_ids), -1, width)

    def result(self, name: str) -> np.ndarray | None:
        """Wait for the field `name` of the last epilogue's output and return it as a numpy array. None if the output
        has no such field, or the epilogue was not dispatched.
        """
        field = getattr(self.sampled, name, None)
        return None if field is None else self._fetch(field)

    def logprobs(self, given: bool) -> Any:
        """Wait for the last epilogue's output (of type Epilogue.output), which includes logprobs, and return it as
        numpy arrays [replicas, ...], without its `support`. If rows have several positions, these follow each other.

        given: whether to fetch also the logprobs of the token ids that requests name; if not, `given_logprobs` has no
        columns.
        """
        output = self.sampled._replace(support=None)
        if not given:
            output = output._replace(given_logprobs=np.empty((*output.rank.shape, 0), np.float32))
        return jax.tree.map(self._fetch, output)

    def output(self, name: str) -> Any:
        """Wait for the output of the epilogue `name`, which is not the last one, and return it as numpy arrays. Raises
        KeyError if it was not dispatched.
        """
        return jax.tree.map(self._fetch, self.outputs[name])
