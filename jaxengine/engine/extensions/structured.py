"""Structured outputs: requests wait for their grammars, and a step's sampler for the token masks of its requests.

A mask is computed while the device runs the forward pass before the token that it constrains (jaxengine.grammars).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from jaxengine.engine.extension import Events, LoopExtension
from jaxengine.engine.in_flight import InFlight
from jaxengine.engine.output import EngineOutput
from jaxengine.engine.stats.metric_types import Counter
from jaxengine.grammars.request_masks import RequestMasks
from jaxengine.scheduler.base.config import SchedulerConfig
from jaxengine.scheduler.base.request import Request, RequestStatus, Wait
from jaxengine.scheduler.base.token_params import MASK
from jaxengine.scheduler.batches.batch import ScheduledStep, StepResult

if TYPE_CHECKING:
    from jaxengine.engine.extensions.drafts import Drafts

_NOTHING_LEFT = "no token is allowed by structured_outputs, other parameters and the model's suppress_tokens together"
# Time for which a sampler waits for masks. A request whose mask takes longer gives up its slot, so that others go on.
_MASK_SECONDS = 0.05


class _Choice(NamedTuple):
    """Request with a grammar that samples in a step.

    Attributes:
      request: the request.
      row: index of its row in the replica's batch.
      width: number of positions of the row at which it samples.
      is_guided: whether each of its drafts has its own token mask.
    """

    request: Request
    row: int
    width: int
    is_guided: bool


class Structured(LoopExtension):
    """Loop extension for requests with grammars.

    Attributes:
      masks: computes the grammars and token masks of these requests.
    """

    def __init__(self, masks: RequestMasks, drafts: Drafts | None = None):
        """Set the masks and drafts, without requests. drafts: the extension of drafts, whose masks are computed with
        the mask before them; None for an engine without drafts.
        """
        self.masks = masks
        self._drafts = drafts
        self._deadline: float | None = None

    def configure(self, config: SchedulerConfig) -> SchedulerConfig:
        """Return the configuration; in an engine with drafts, with the function for grammar drafts, so that tokens that
        a grammar leaves no alternative to are scheduled before they are sampled.
        """
        if self._drafts is None:
            return config
        from jaxengine.scheduler.extensions.drafts import DraftOptions

        extensions = (
            replace(options, forced=self.masks.forced) if isinstance(options, DraftOptions) else options
            for options in config.extensions
        )
        return replace(config, extensions=tuple(extensions))

    def prepare(self, request: Request) -> None:
        """Mark a request with a grammar as waiting apart from the queue until `poll` reports that its grammar is
        ready.
        """
        if request.params.grammar is not None:
            request.wait = Wait.APART

    def queued(self, requests: Sequence[Request]) -> None:
        """Begin to compile the requests' grammars."""
        for request in requests:
            if request.params.grammar is not None:
                self.masks.add(request)

    def poll(self) -> Events:
        """Return the requests whose grammar or mask is ready, and those that end or are refused because of their
        grammar.
        """
        events = self.masks.take()
        return Events(events.ready, events.ended, events.refused)

    def is_behind(self, step: ScheduledStep) -> bool:
        """Return whether a token mask of the step depends on a token that is still being computed and that no grammar
        forces.
        """
        for each in self._choices(step):
            slots, slot = self.loop.scheduler.ranks[each.request.rank].slots, each.request.slot
            is_known = slots.num_known[slot] >= slots.num_tokens[slot] - (each.width if each.is_guided else 1)
            # The masks of drafts depend on all tokens before them, so that one known mask is not enough.
            if not is_known and (each.is_guided or not self._has_mask(each)):
                return True
        return False

    def before_sample(self, step: ScheduledStep) -> bool:
        """Return whether the step's sampler may be dispatched; if masks are missing, wait for some and return False.

        After _MASK_SECONDS in all for a step, requests that still lack a mask lose their slots (they run again once
        they have it), and True is returned.
        """
        if not step.features & MASK:
            return True
        now = time.monotonic()
        self._deadline = self._deadline or now + _MASK_SECONDS
        missing = [each.request for each in self._choices(step) if not self._has_mask(each)]
        if missing and now < self._deadline:
            self.masks.wait_for(missing, self._deadline - now)
            return False
        for request in missing:
            self.loop.scheduler.hold(request)
        self._deadline = None
        return True

    def sync(self, step: ScheduledStep) -> None:
        """Send the masks with which the step samples to the devices, and clear the masks of slots that no request with
        a grammar has any more: another request that took such a slot would get the mask as soon as any row of a step
        has one.
        """
        number, device = self.loop.rows.number, self.loop.runner.extension("structured")
        slots = (rank.slots for rank in self.loop.scheduler.ranks)
        own = np.concatenate([each.active & (each.features & MASK > 0) for each in slots])
        masks: list[tuple[int, np.ndarray | None]] = [(slot, None) for slot in device.masked(~own)]
        of_drafts: list[tuple[int, int, np.ndarray]] = []
        for each in self._choices(step):
            request, first = each.request, each.row * step.width
            if each.is_guided:
                words = enumerate(self.masks.rows(request, each.width), first)
                of_drafts += [(request.rank, index, row) for index, row in words]
            else:
                masks.append((number(request), self.masks.row(request, self._num_output(each))))
        if masks or of_drafts:
            device.set_masks(masks, of_drafts)

    def collected(self, step: InFlight, result: StepResult, output: EngineOutput) -> None:
        """Start computing the next masks of the requests that got a token in the step, and set the stop_reason of those
        that ended because their mask left no token.
        """
        for request, token_id in result.followed:
            if request.params.grammar is None:
                continue
            if request.status is not RequestStatus.FINISHED:
                if self._drafts is None:
                    self.masks.advance(request, token_id)
                else:
                    self.masks.advance(request, token_id, self._drafts.of_newest)
            elif token_id < 0 and not self._allowed_any(request):
                request.stop_reason = _NOTHING_LEFT

    def ended(self, request: Request) -> None:
        self.masks.drop(request)

    def wait(self, seconds: float) -> bool:
        if not self.masks.awaits:
            return False
        self.masks.wait(seconds)
        return True

    @property
    def is_idle(self) -> bool:
        return self.masks.is_idle and not self.loop.runner.extension("structured").masked()

    def shutdown(self) -> None:
        self.masks.shutdown()

    def metrics(self) -> Iterator[Counter]:
        yield Counter("jaxengine:masks", self.masks.num_masks)
        yield Counter("jaxengine:mask_seconds", self.masks.seconds)

    def _choices(self, step: ScheduledStep) -> Iterator[_Choice]:
        """Yield an entry for each request with a grammar that samples in a step."""
        if step.features & MASK:
            for request, row in self.loop.rows.sampling(step, MASK):
                batch, is_wide = step.batches[request.rank], step.width > 1
                width = int(batch.num_scheduled[row]) if is_wide else 1
                yield _Choice(request, row, width, is_wide and bool(batch.sections["drafts"].is_guided[row]))

    def _has_mask(self, each: _Choice) -> bool:
        """Return whether the mask of the last token that the step samples for a request has been computed; with masked
        drafts, the mask of the first.
        """
        return self.masks.has(each.request, self._num_output(each))

    def _num_output(self, each: _Choice) -> int:
        """Return the number of output tokens before the last token that the step samples for a request; with masked
        drafts, before the first.
        """
        slots, slot = self.loop.scheduler.ranks[each.request.rank].slots, each.request.slot
        return int(slots.num_tokens[slot] - slots.num_prompt[slot]) - (each.width if each.is_guided else 1)

    def _allowed_any(self, request: Request) -> bool:
        """Return whether mask, bias and the model left any token to the request when it sampled its last one; True
        without a mask.
        """
        mask = self.masks.row(request, len(request.output_token_ids) - 1)
        if mask is None:
            return True
        allowed = np.unpackbits(mask.view(np.uint8), bitorder="little")[: self.loop.runner.vocab_size]
        return self.loop.rows.leaves_any(request, allowed > 0)
