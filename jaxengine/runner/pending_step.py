"""A step on its way: what its forward pass left, and then what its heads found."""

from __future__ import annotations

from collections.abc import Callable

import jax
import numpy as np

from jaxengine.drafts.proposer import Drafts
from jaxengine.runner.heads import PoolOutput, VerifyOutput
from jaxengine.runner.step import Forwarded
from jaxengine.sampling.logprobs import TokenLogprobs
from jaxengine.sampling.sampler import SampleOutput
from scheduler.buckets import Bucket


class PendingStep:
    """A step whose forward pass has been dispatched, its results possibly still being computed.

    It has tokens once its sampler, or what pools in its place, has been dispatched too. All results have a leading axis
    of ranks.

    Attributes:
      forwarded: what the forward pass left; None once the sampler has taken it.
    """

    def __init__(
        self,
        bucket: Bucket,
        forwarded: Forwarded,
        fetch: Callable[[jax.Array], np.ndarray] = np.asarray,
        drafts: Drafts | None = None,
    ):
        """fetch: waits for a result. drafts: that were made before it, on the devices."""
        self.bucket = bucket
        self._drafts = drafts
        self.forwarded: Forwarded | None = forwarded
        self.sampled: SampleOutput | VerifyOutput | PoolOutput | None = None
        self.scored: TokenLogprobs | None = None
        self._fetch = fetch

    @property
    def pools(self) -> bool:
        """Whether its rows are pooled."""
        return isinstance(self.sampled, PoolOutput)

    @property
    def is_sampled(self) -> bool:
        """Whether its sampler has been dispatched."""
        return self.sampled is not None

    def is_ready(self) -> bool:
        """Whether the step is done, so that `token_ids` would not wait."""
        # Every array has it, but the type that jax declares does not say so.
        return self.sampled is not None and self.sampled.token_ids.is_ready()  # pyright: ignore[reportAttributeAccessIssue]

    def token_ids(self) -> np.ndarray:
        """i32[ranks, rows of logits], or i32[ranks, rows, W]; waits for the step."""
        assert self.sampled is not None
        token_ids, width = self._fetch(self.sampled.token_ids), self.bucket.width
        return token_ids if width == 1 else token_ids.reshape(len(token_ids), -1, width)

    def drafts(self, num_ranks: int) -> np.ndarray | None:
        """i32[ranks, rows, W - 1], what a model or a head has drafted for the step, None where neither has; waits for
        that alone."""
        if self._drafts is None:
            return None
        return self._fetch(self._drafts.token_ids).reshape(num_ranks, -1, self.bucket.width - 1)

    def counts(self) -> np.ndarray | None:
        """i32[ranks, rows], tokens that each row has got; None where each has one."""
        return self._fetch(self.sampled.counts) if isinstance(self.sampled, VerifyOutput) else None

    def num_drafts(self) -> np.ndarray | None:
        """i32[ranks, rows], drafts that each row had; None for a step without."""
        return self._fetch(self.sampled.num_drafts) if isinstance(self.sampled, VerifyOutput) else None

    def logprobs(self) -> SampleOutput | VerifyOutput:
        """The sampled rows' logprobs as numpy arrays; with drafts of all places, row after row."""
        assert isinstance(self.sampled, (SampleOutput, VerifyOutput))
        return jax.tree.map(self._fetch, self.sampled)

    def vectors(self) -> np.ndarray:
        """f32[ranks, rows, N], what a pooling model tells of the prompts that end in this step; waits for it."""
        assert isinstance(self.sampled, PoolOutput)
        return self._fetch(self.sampled.vectors)

    def prompt_logprobs(self) -> TokenLogprobs:
        """The prompt tokens' logprobs as numpy arrays."""
        assert self.scored is not None
        return jax.tree.map(self._fetch, self.scored)
