"""Sampling masks: which tokens could have been sampled in place of each token, as ids (return_sampling_mask)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxengine.engine.extension import LoopExtension
from jaxengine.engine.in_flight import InFlight
from jaxengine.engine.output import EngineOutput, Found
from jaxengine.scheduler.base.request import Request
from jaxengine.scheduler.batches.batch import StepResult

# Field of CompletionOutput that gets them.
FIELD = "sampling_mask"


class SamplingMasks(LoopExtension):
    """Loop extension for requests with sampling masks. A step's supports are fetched only if it has tokens of such a
    request, and only rows of these are turned into ids.
    """

    def __init__(self) -> None:
        """Begin without requests."""
        self._requests: set[Request] = set()

    @property
    def is_idle(self) -> bool:
        return not self._requests

    def queued(self, requests: Sequence[Request]) -> None:
        self._requests.update(request for request in requests if request.params.return_sampling_mask)

    def collected(self, step: InFlight, result: StepResult, output: EngineOutput) -> None:
        """Add the masks of the step's new tokens to `output.found`, for each request as one array, i32[n, k]: a row for
        each of its n new tokens, with token ids in ascending order, then -1.
        """
        by_tag = {request.tag: request for request in self._requests}
        tags, words = np.array([*by_tag]), None
        for rows in result.emitted:
            own = np.flatnonzero(np.isin(rows.tags, tags) & (rows.token_ids >= 0))
            if not len(own):
                continue
            if words is None:
                words = self.loop.runner.extension("mass").words(step.pending)
            ids = ids_of(words[rows.rank, rows.rows[own]])
            # A request's tokens are adjacent.
            starts = np.flatnonzero(np.diff(rows.tags[own], prepend=-1))
            found = zip(rows.tags[own[starts]].tolist(), np.split(ids, starts[1:]), strict=True)
            output.found += [Found(by_tag[tag], FIELD, part) for tag, part in found]

    def ended(self, request: Request) -> None:
        self._requests.discard(request)


def ids_of(words: np.ndarray) -> np.ndarray:
    """Return the token ids in supports u32[n, W] (jaxengine.sampling.logprobs.support_words) as i32[n, k], in ascending
    order, where k is the largest number of a row; -1 follows them in other rows.

    Takes time in proportion to W and to the ids: few of the words have any.
    """
    at = np.flatnonzero(words)  # much faster over one dimension than over two
    row, word = np.divmod(at, words.shape[1])
    bits = np.flatnonzero(np.unpackbits(words.ravel()[at].astype("<u4").view(np.uint8), bitorder="little"))
    index = bits >> 5
    row, ids = row[index], (word[index] * 32 + (bits & 31)).astype(np.int32)
    counts = np.bincount(row, minlength=len(words))
    found = np.full((len(words), counts.max(initial=0)), -1, np.int32)
    found[row, np.arange(len(ids)) - (np.cumsum(counts) - counts)[row]] = ids
    return found
