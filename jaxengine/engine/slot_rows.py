"""Sampler inputs of each slot, kept up to date on the devices: parameters, biases, logprob ids and token counts.

They are sent after a step's forward pass, which needs none of them, and before its sampler. A slot's global number is
rank * max_num_seqs + slot, where rank is the replica's index.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from jaxengine.engine.token_bias import Forbidden, TokenBias
from jaxengine.runner.model_runner import ModelRunner
from jaxengine.scheduler.base.request import NOT_FINITE, Request
from jaxengine.scheduler.base.sampling_fields import PENALTIES
from jaxengine.scheduler.base.token_params import BIAS, LAST_TOKEN, row_words
from jaxengine.scheduler.batches.batch import ScheduledStep
from jaxengine.scheduler.scheduler import Scheduler

_NOTHING_LEFT = "no token is allowed by the request's parameters and the model's suppress_tokens together"


class _SlotBias(NamedTuple):
    """Bias of a slot's request, as last sent to the devices.

    Attributes:
      request: the request that had the slot when its bias was sent.
      bias: computes the request's bias rows.
      forbidden: what the row on the devices forbids.
    """

    request: Request
    bias: TokenBias
    forbidden: Forbidden


class SlotRows:
    """Sender of the sampler inputs that the host determines, for all slots."""

    def __init__(self, runner: ModelRunner, scheduler: Scheduler):
        """Begin without biases. runner: sends the inputs to the devices; scheduler: gives requests their slots."""
        self._runner = runner
        self._scheduler = scheduler
        self._biases: dict[int, _SlotBias] = {}

    def sync(self, step: ScheduledStep) -> None:
        """Send the devices the changed inputs of this step's sampler, which must be dispatched next.

        The host must already have all tokens that the biases depend on, that is `is_behind` must be False.
        """
        if admitted := self.admitted(step):
            self._begin(admitted)
        if step.features & BIAS:
            changed = []
            for request, _ in self.sampling(step, BIAS):
                before = self._biases[self.number(request)]
                forbidden = self._forbidden(request, before.bias)
                if forbidden != before.forbidden:
                    changed.append((self.number(request), self._bias_row(request, before.bias, forbidden)))
            self._runner.set_biases(changed)

    def is_behind(self, step: ScheduledStep) -> bool:
        """Return whether a bias of this step depends on a token that is still being computed
        (TokenParams.forbids_by_output).
        """
        if step.features & LAST_TOKEN:
            for request, _ in self.sampling(step, LAST_TOKEN):
                slots, slot = self._scheduler.ranks[request.rank].slots, request.slot
                if request.params.forbids_by_output and slots.num_known[slot] < slots.num_tokens[slot] - 1:
                    return True
        return False

    def number(self, request: Request) -> int:
        """Return the global number of a request's slot."""
        return request.rank * self._scheduler.config.max_num_seqs + request.slot

    def admitted(self, step: ScheduledStep) -> list[Request]:
        """Return the requests that took a slot in this step and still have it."""
        return [request for batch in step.batches for request in batch.admitted if request.slot >= 0]

    def sampling(self, step: ScheduledStep, feature: int) -> Iterator[tuple[Request, int]]:
        """Yield (request, row) for each request with a feature that samples in the step and has kept its slot since the
        step was scheduled.

        feature: a bit of `TokenParams.features`. row: index in the replica's batch.
        """
        for rank, batch in zip(self._scheduler.ranks, step.batches, strict=True):
            if batch.features & feature:
                slots, own = rank.slots, batch.slots
                chosen = batch.sample & (slots.epoch[own] == batch.epochs) & (slots.features[own] & feature > 0)
                for row in chosen.nonzero()[0].tolist():
                    request = slots.requests[own[row]]
                    assert request is not None
                    yield request, row

    def ended(self, request: Request) -> None:
        """Replace the stop_reason NOT_FINITE of a request by one that says that no token was allowed, if its own bias
        left none to sample, such as an only allowed token that min_tokens forbids. Other requests stay unchanged.
        """
        if request.stop_reason == NOT_FINITE:
            # Made only here: the vocabulary of a simulated device has 2^31 tokens.
            every = np.ones(self._runner.vocab_size, bool)
            if not self.leaves_any(request, every):
                request.stop_reason = _NOTHING_LEFT

    def leaves_any(self, request: Request, allowed: np.ndarray) -> bool:
        """Return whether any of the tokens `allowed`, bool[V], had a logit when the request sampled its last token: the
        model does not suppress it, and the request's bias, if there is one, is finite.
        """
        allowed = allowed.copy()
        allowed[list(self._runner.suppressed_tokens)] = False
        output = np.asarray(request.output_token_ids[:-1], np.int32)
        for owner, bias, _ in self._biases.values():
            if owner is request:
                forbidden = bias.forbidden(len(output), output)  # the recorded row may already be that of a later token
                return bool(np.isfinite(bias.row(forbidden)[allowed]).any())
        return bool(allowed.any())

    def _begin(self, requests: list[Request]) -> None:
        """Send the parameters, logprob ids, token counts and biases of requests that are new in their slots, in one
        message of each kind, and record their biases.
        """
        params, counts, biases, logprob_ids = [], [], [], []
        for request in requests:
            slot, features = self.number(request), request.params.features
            params.append((slot, np.array(row_words(request.params, request.seed), np.int32)))
            if features & PENALTIES:
                counts.append((slot, request.prompt_token_ids, self._scheduler.output_token_ids(request)))
            if request.params.given_token_ids:
                logprob_ids.append((slot, request.params.given_token_ids))
            self._biases.pop(slot, None)
            row = None
            if features & BIAS:
                bias = TokenBias(request, self._runner.vocab_size)
                row = self._bias_row(request, bias, self._forbidden(request, bias))
            biases.append((slot, row))
        self._runner.set_params(params)
        self._runner.set_logprob_ids(logprob_ids)
        self._runner.set_token_counts(counts)
        self._runner.set_biases(biases)

    def _bias_row(self, request: Request, bias: TokenBias, forbidden: Forbidden) -> np.ndarray:
        """Return the bias row f32[V] that forbids `forbidden`, and record it as the row that the devices have."""
        self._biases[self.number(request)] = _SlotBias(request, bias, forbidden)
        return bias.row(forbidden)

    def _forbidden(self, request: Request, bias: TokenBias) -> Forbidden:
        """Return which stop tokens and ends of bad words are forbidden for the token that the step being dispatched
        samples.
        """
        slots, slot = self._scheduler.ranks[request.rank].slots, request.slot
        sampling = int(slots.num_computed[slot] >= slots.num_fed[slot])
        num_output = int(slots.num_tokens[slot] - slots.num_prompt[slot]) - sampling
        return bias.forbidden(num_output, self._scheduler.output_token_ids(request))
