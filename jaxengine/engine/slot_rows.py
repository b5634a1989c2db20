"""What the sampler reads of each slot, kept up to date on the devices: parameters, biases, masks and counts of tokens.

Works between a step's forward pass and its sampler: nothing here matters to the former. Knows which requests have a row
in a step, not when one has. A slot's global number is rank * max_num_seqs + slot.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from jaxengine.drafts.proposer import Proposer
from jaxengine.engine.in_flight import InFlight
from jaxengine.engine.token_bias import Forbidden, TokenBias
from jaxengine.grammars.request_masks import RequestMasks
from jaxengine.runner.model_runner import ModelRunner
from jaxengine.sampling.state import param_words
from scheduler.batch import ScheduledStep
from scheduler.request import Request
from scheduler.scheduler import Scheduler
from scheduler.token_params import BIAS, LAST_TOKEN, MASK, PENALTIES


class _SlotBias(NamedTuple):
    """The bias of a slot and what it forbids now."""

    request: Request
    bias: TokenBias
    forbidden: Forbidden


class _Sampling(NamedTuple):
    """A request that samples at `width` places of a row; is_guided: behind guesses, each under a mask of its own."""

    request: Request
    row: int
    width: int
    is_guided: bool


class SlotRows:
    """Owns the rows of all slots, as far as the host decides them."""

    def __init__(
        self, runner: ModelRunner, scheduler: Scheduler, masks: RequestMasks | None, proposer: Proposer | None = None
    ):
        """masks: None where no request has any; proposer: of guesses, where known tokens alone tell them."""
        self._runner = runner
        self._scheduler = scheduler
        self._masks = masks
        self._proposer = proposer
        self._biases: dict[int, _SlotBias] = {}

    def sync(self, step: ScheduledStep) -> None:
        """Writes what has changed for the sampler of this step, the next one to be dispatched.

        The tokens that its choices depend on are known (`is_behind`) and its masks are there (`without_mask`).
        """
        params: list[tuple[int, np.ndarray]] = []
        masks: list[tuple[int, np.ndarray | None]] = []
        places: list[tuple[int, int, np.ndarray]] = []
        for batch in step.batches:
            for request in batch.admitted:
                if request.slot >= 0:  # it may have been aborted since
                    params.append((self._slot(request), param_words(request.params, request.seed)))
                    if not request.params.features & MASK:
                        masks.append((self._slot(request), None))  # its slot's last owner may have had one
                    self._begin(request)
        self._runner.set_params(params)
        if self._masks is not None:
            for each in self._sampling(step, MASK):
                request, first = each.request, each.row * step.width
                if each.is_guided:
                    rows = enumerate(self._masks.rows(request, each.width), first)
                    places += [(request.rank, place, words) for place, words in rows]
                else:
                    masks.append((self._slot(request), self._masks.row(request, self._num_output(each))))
        self._runner.extension("structured").set_masks(masks, places)
        for request, *_ in self._sampling(step, BIAS):
            before = self._biases[self._slot(request)]
            forbidden = self._forbidden(request, before.bias)
            if forbidden != before.forbidden:
                self._set_bias(request, before.bias, forbidden)

    def is_behind(self, step: ScheduledStep) -> bool:
        """Whether a choice of this step depends on a token that is still being computed, and may be several."""
        for each in self._sampling(step, LAST_TOKEN):
            slots, slot = self._scheduler.ranks[each.request.rank].slots, each.request.slot
            is_known = slots.num_known[slot] >= slots.num_tokens[slot] - (each.width if each.is_guided else 1)
            # The masks of guesses depend on what these stand behind.
            if not is_known and (each.is_guided or not self._has_mask(each)):
                return True
        return False

    def guess(self, step: InFlight | None, request: Request, num_output: int) -> Sequence[int] | None:
        """The drafts of a request with a grammar that the device has made, in the step dispatched last, behind so many
        tokens of output; None if more are known, or the step has no guesses of it."""
        slots, slot = self._scheduler.ranks[request.rank].slots, request.slot
        if step is None or slot < 0 or slots.num_known[slot] - slots.num_prompt[slot] != num_output:
            return None
        count = int(slots.num_tokens[slot] - slots.num_known[slot]) - 1
        if count <= 0:
            return None
        if self._proposer is not None:
            return self._proposer.propose_one(slots.known_token_ids(slot), count).tolist()
        return step.drafts_of(request, self._runner)[:count] or None

    def without_mask(self, step: ScheduledStep) -> list[Request]:
        """The requests whose choice in this step depends on a mask that has not come."""
        if self._masks is None:
            return []
        return [each.request for each in self._sampling(step, MASK) if not self._has_mask(each)]

    def allows_any(self, request: Request, mask: np.ndarray | None) -> bool:
        """Whether mask and bias of the token that a request sampled last left anything to sample."""
        output = np.asarray(request.output_token_ids[:-1], np.int32)
        for owner, bias, _ in self._biases.values():
            if owner is request and mask is not None:
                forbidden = bias.forbidden(len(output), output)  # the row may be that of a later token by now
                allowed = np.unpackbits(mask.view(np.uint8), bitorder="little")[: self._runner.vocab_size]
                return bool(np.isfinite(bias.row(forbidden)[allowed > 0]).any())
        return True

    def _has_mask(self, each: _Sampling) -> bool:
        """Whether a request has a mask, and the one is there of what the step being dispatched chooses last for it, or
        in front of guesses."""
        if self._masks is None or each.request.params.grammar is None:
            return False
        return self._masks.has(each.request, self._num_output(each))

    def _num_output(self, each: _Sampling) -> int:
        """Tokens of output before the last one that the step being dispatched samples for a request, or before the
        first where there are guesses."""
        slots, slot = self._scheduler.ranks[each.request.rank].slots, each.request.slot
        return int(slots.num_tokens[slot] - slots.num_prompt[slot]) - (each.width if each.is_guided else 1)

    def _slot(self, request: Request) -> int:
        return request.rank * self._scheduler.config.max_num_seqs + request.slot

    def _sampling(self, step: ScheduledStep, feature: int) -> Iterator[_Sampling]:
        """The requests with a feature that sample in a step and still have the slot that they had in it."""
        if not step.features & feature:
            return
        for rank, batch in zip(self._scheduler.ranks, step.batches, strict=True):
            if batch.features & feature:
                slots, own = rank.slots, batch.slots
                chosen = batch.sample & (slots.epoch[own] == batch.epochs) & (slots.features[own] & feature > 0)
                for row in chosen.nonzero()[0].tolist():
                    width = int(batch.num_scheduled[row]) if step.width > 1 else 1
                    yield _Sampling(slots.requests[own[row]], row, width, step.width > 1 and bool(batch.is_guided[row]))

    def _begin(self, request: Request) -> None:
        """Counts and bias of a request that has just got its slot."""
        slot, features = self._slot(request), request.params.features
        drafts = self._runner.extensions.get("drafts")
        if drafts is not None and drafts.keeps_history:
            known = request.prompt_token_ids, self._scheduler.output_token_ids(request)
            drafts.set_history(slot, np.concatenate(known))
        if features & PENALTIES:
            self._runner.set_token_counts(slot, request.prompt_token_ids, self._scheduler.output_token_ids(request))
        self._biases.pop(slot, None)
        if features & BIAS:
            bias = TokenBias(request, self._runner.vocab_size)
            self._set_bias(request, bias, self._forbidden(request, bias))
        else:
            self._runner.set_bias(slot, None)

    def _set_bias(self, request: Request, bias: TokenBias, forbidden: Forbidden) -> None:
        slot = self._slot(request)
        self._biases[slot] = _SlotBias(request, bias, forbidden)
        self._runner.set_bias(slot, bias.row(forbidden))

    def _forbidden(self, request: Request, bias: TokenBias) -> Forbidden:
        """What is forbidden to the token that the step being dispatched samples."""
        slots, slot = self._scheduler.ranks[request.rank].slots, request.slot
        sampling = int(slots.num_computed[slot] >= slots.num_fed[slot])
        num_output = int(slots.num_tokens[slot] - slots.num_prompt[slot]) - sampling
        return bias.forbidden(num_output, self._scheduler.output_token_ids(request))
