"""Token masks of an engine's requests: which tokens each request may take next, as far as that is known.

A request waits outside the queue until its grammar is compiled. From then on each mask is computed in another process
while the device runs the forward pass before the token that the mask constrains. A new grammar is first compiled on
trial. Grammars that take a long time to compile get a separate process. A grammar that begins after reasoning is
compiled like any other, and its first mask is kept until then. Masks along proposed drafts are computed together with
the mask before them.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from jaxengine.grammars.grammar_worker import GrammarFailure, GrammarWorker, NextMask
from jaxengine.grammars.reasoning_watch import UNLIMITED, ReasoningWatch, Vocabulary
from jaxengine.grammars.trials import GrammarTrials
from jaxengine.scheduler.base.errors import RequestError
from jaxengine.scheduler.base.request import FinishReason, Request
from jaxengine.scheduler.base.token_params import BIAS, FREE
from jaxengine.workers.process import wait_for_any

# Compilations that take at least this long are slow.
_SLOW_SECONDS = 0.25

# (request, number of its output tokens) -> the drafts that a step in flight has after these tokens; None if none has.
DraftsInFlight = Callable[[Request, int], Sequence[int] | None]


class MaskEnd(NamedTuple):
    """End of a request that its grammar caused.

    Attributes:
      request: the engine's request.
      reason: finish reason.
      stop_reason: text for the request's stop_reason; None for an ordinary end.
    """

    request: Request
    reason: FinishReason
    stop_reason: str | None


@dataclass
class _Known:
    """Constraints of a grammar on the tokens that its request has not sampled yet.

    Attributes:
      forced: the next tokens, each the only one that is allowed at its position.
      words: mask of the tokens that may follow the forced ones, i32[num_words]; None for all tokens.
      is_end: whether no token may follow the forced ones.
      guessed: the proposed drafts that continue there, each with the mask after it.
      num_free: number of next tokens that are not constrained.
      taken: tokens that the request has sampled since this became known.
    """

    forced: tuple[int, ...]
    words: np.ndarray | None
    is_end: bool = False
    guessed: tuple[tuple[int, np.ndarray], ...] = ()
    num_free: int = 0
    taken: list[int] = field(default_factory=list)

    def covers(self, offset: int) -> bool:
        """Return whether the mask of the token `offset` positions after the request's next one (offset 0) is known."""
        return offset < max(self.num_free, len(self.forced) + (not self.is_end))

    def take(self, token_id: int) -> bool:
        """Append the request's next token to `taken` and advance past it. Return whether the mask after it is known; if
        not, the other fields still describe the position before the token.
        """
        self.taken.append(token_id)
        if self.forced:
            self.forced = self.forced[1:]
        elif self.guessed and self.guessed[0][0] == token_id:
            (_, self.words), *rest = self.guessed
            self.guessed = tuple(rest)
        else:
            return False
        return True


@dataclass
class MaskEvents:
    """Result of `RequestMasks.take`.

    Attributes:
      ready: requests that may run.
      ended: requests that their grammars have ended.
      refused: requests that cannot begin, with the errors for their callers.
    """

    ready: list[Request]
    ended: list[MaskEnd]
    refused: list[tuple[Request, RequestError]]


class RequestMasks:
    """Token masks of all requests with grammars, which are registered by `add` and removed by `drop`.

    Attributes:
      worker: process for grammars that compile fast.
      num_masks, seconds: number of computed masks, without those that come with compilations, and the sum of their
        times.
    """

    def __init__(
        self,
        tokenizer: str,
        vocab_size: int,
        num_words: int,
        eos_token_ids: Sequence[int],
        vocabulary: Vocabulary | None = None,
        *,
        looks_ahead: bool = False,
    ):
        """Store the arguments without starting a process.

        tokenizer, vocab_size, num_words, eos_token_ids, looks_ahead: see GrammarWorker. vocabulary: tokenizer with
        which the end of reasoning is detected, required for grammars with reasoning_end.
        """
        self.worker, self._slow = (
            GrammarWorker(tokenizer, vocab_size, num_words, eos_token_ids, looks_ahead=looks_ahead) for _ in range(2)
        )
        self._trials = GrammarTrials(self.worker.start)
        self._num_words, self._nothing = num_words, np.zeros(num_words, np.int32)
        self.num_masks = 0
        self.seconds = 0.0
        self._keys: dict[Request, int] = {}
        self._requests: dict[int, Request] = {}
        self._workers: dict[Request, GrammarWorker] = {}
        self._num_tokens: dict[Request, int] = {}
        self._known: dict[Request, _Known] = {}
        # Drafts for which masks were requested, with the number of output tokens before them.
        self._drafts: dict[Request, tuple[int, Sequence[int]]] = {}
        # Number of the drafts in flight that will be rejected; None if that depends on what is sampled.
        self._surplus: dict[Request, int | None] = {}
        self._vocabulary = vocabulary
        self._watches: dict[Request, ReasoningWatch] = {}
        # First masks of grammars that wait for the end of reasoning, and of those that have begun since the last
        # `take`.
        self._first_masks: dict[Request, NextMask] = {}
        self._begun: list[NextMask] = []
        # Requests with a FREE grammar that have been added since the last `take`.
        self._free: list[Request] = []
        self._numbers = itertools.count()

    @property
    def awaits(self) -> bool:
        """Whether a mask, a compilation or an event of `take` is due."""
        return bool(self._begun or self._free) or self.worker.awaits or self._slow.awaits or self._trials.awaits

    @property
    def is_idle(self) -> bool:
        """Whether there are no requests, and no process still works for an earlier one."""
        return not self._keys and not self._trials.awaits and self.worker.is_idle and self._slow.is_idle

    def add(self, request: Request) -> None:
        """Begin to compute the masks of a request, which must have `params.grammar`, without waiting.

        Its grammar is compiled in another process, and `take` reports when the request may run, or why it is refused. A
        FREE grammar (only a limit on reasoning) needs no compilation; the next `take` reports its request as ready.
        """
        grammar = request.params.grammar
        assert grammar is not None
        key = next(self._numbers)
        self._keys[request], self._requests[key], self._num_tokens[request] = key, request, 0
        if grammar.reasoning_end:
            assert self._vocabulary is not None
            self._watches[request] = ReasoningWatch(grammar, self._vocabulary)
        if grammar.kind == FREE:
            self._update_known(request, None)
            self._free.append(request)
            return
        self.worker.launch()
        self._trials.add(key, request.client, grammar.kind, grammar.text, grammar.options)

    def advance(
        self, request: Request, token_id: int, guess: DraftsInFlight = lambda request, num_output: None
    ) -> None:
        """Record a token that an unfinished request with a grammar has got, and request the next mask unless it is
        known.

        Does not wait. guess: returns the drafts along which masks are computed as well. Raises KeyError for a request
        that was not added.
        """
        self._num_tokens[request] += 1
        self._surplus.pop(request, None)
        if request in self._watches:
            self._advance_reasoning(request, token_id, guess)
        elif not _is_free(request):
            self._advance_grammar(request, token_id, guess)

    def _update_known(self, request: Request, first: np.ndarray | None) -> None:
        """Record which tokens may follow for a request that reasons or whose grammar is FREE. first: its grammar's
        first mask; None if FREE.
        """
        watch = self._watches.get(request)
        if watch is None:
            self._known[request] = _Known((), None, num_free=UNLIMITED)
        elif (forced := watch.forced()) is not None:
            self._known[request] = _Known((), self._only(forced))
        else:
            self._known[request] = _Known((), watch.mask(first), num_free=watch.num_free)

    def _advance_reasoning(self, request: Request, token_id: int, guess: DraftsInFlight) -> None:
        """Record a token of a request that reasons, and which tokens may follow. At the end of the reasoning, request
        the mask after the tokens that already belong to the grammar; without such tokens the next `take` reports its
        first mask. guess: see `advance`.
        """
        watch = self._watches[request]
        taken = watch.read(token_id)
        if _is_free(request):
            if taken is not None:
                del self._watches[request]
            self._update_known(request, None)
            return
        first = self._first_masks[request]
        if taken is None:
            self._update_known(request, first.words)
            return
        del self._watches[request], self._first_masks[request]
        if taken:
            self._request_mask(request, taken, guess(request, self._num_tokens[request]))
        else:
            del self._known[request]
            self._begun.append(first)

    def _advance_grammar(self, request: Request, token_id: int, guess: DraftsInFlight) -> None:
        """Record a token of the grammar's text, and request the next mask if it is not known or if there are drafts,
        unless forced tokens remain. The next `take` reports the end of the text. guess: see `advance`.
        """
        known = self._known[request]
        is_known = known.take(token_id)
        if known.forced:
            return
        if known.is_end:
            del self._known[request]
            self._begun.append(NextMask(self._keys[request], None, None))
        elif (drafts := guess(request, self._num_tokens[request])) or not is_known:
            self._request_mask(request, known.taken, drafts)

    def _request_mask(self, request: Request, taken: Sequence[int], drafts: Sequence[int] | None) -> None:
        """Request the next mask from the worker, and masks along the drafts. Until it arrives, no mask of the request
        is known. taken: tokens that the worker does not have yet. drafts: None if no masks along drafts are wanted.
        """
        del self._known[request]
        if drafts is not None:
            self._drafts[request] = self._num_tokens[request], drafts
        self._workers[request].advance(self._keys[request], *taken, guess=drafts or ())

    def drop(self, request: Request) -> None:
        """Remove a request and release its grammar, in its worker or among the trials. Do nothing for a request without
        a grammar.
        """
        key = self._keys.pop(request, None)
        if key is not None:
            del self._requests[key], self._num_tokens[request]
            for each in (self._known, self._watches, self._first_masks, self._drafts, self._surplus):
                each.pop(request, None)
            worker = self._workers.pop(request, None)
            if worker is None:
                self._trials.drop(key)
            else:
                worker.close(key)

    def row(self, request: Request, num_output: int) -> np.ndarray | None:
        """Return the mask i32[num_words] of the tokens that the request may take after num_output output tokens; None
        for all.

        The mask must be known (`has`). The array is shared and must not be changed. Raises KeyError for a request
        without any known mask.
        """
        known = self._known[request]
        rest = known.forced[max(0, self._offset(request, num_output)) :]
        return self._only(rest[0]) if rest else known.words

    def rows(self, request: Request, width: int) -> list[np.ndarray]:
        """Return the masks i32[num_words] of the request's positions in a step, at most `width`.

        They are those after its output, and after each of its drafts in the step. The last one allows nothing if it is
        not known, or if masks were computed along other drafts or none. The arrays are shared and must not be changed.
        Also records for `has` how many of the drafts will certainly be rejected. Raises KeyError for a request without
        a known mask.
        """
        known = self._known[request]
        masks = [*map(self._only, known.forced[:width]), *([] if known.words is None else [known.words])]
        num_before, drafts = self._drafts.get(request, (-1, ()))
        self._surplus[request] = None
        if num_before != self._num_tokens[request]:  # the masks are along other drafts
            return [*masks[: width - 1], self._nothing]
        pairs = zip(known.forced, drafts, strict=False)
        agree = len([*itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)])
        if agree < len(known.forced):  # the forced tokens differ from the drafts
            # A bias may forbid a forced token and so end the request.
            self._surplus[request] = None if request.params.features & BIAS else width - 1 - agree
            return masks[: agree + 1]
        masks += [words for _, words in known.guessed]
        return masks if len(masks) > len(drafts) else [*masks, self._nothing]

    def has(self, request: Request, num_output: int) -> bool:
        """Return whether the mask after num_output output tokens is known, so that `row` can return it; False for an
        unknown request, and while it depends on sampling how many drafts in flight are rejected.

        The last of these tokens may still be in flight if the grammar forces them and no token is forbidden by those
        before it (TokenParams.forbids_by_output).
        """
        if (known := self._known.get(request)) is None or self._surplus.get(request, 0) is None:
            return False
        # What is forbidden by the output restricts tokens as well, depending on the token before.
        offset = self._offset(request, num_output)
        return known.covers(offset) and not (offset and request.params.forbids_by_output)

    def forced(self, request: Request, num_output: int, most: int) -> Sequence[int] | None:
        """Return the tokens, at most `most`, that must follow num_output output tokens and after which masks are known.

        A step can compute them before they are sampled. None if proposed drafts may follow instead, because no token is
        forced or no mask is known. () if neither may follow: the request reasons, its grammar is FREE, tokens are
        forbidden by its output, or the text ends after the one forced token.
        """
        if request.params.forbids_by_output or request in self._watches or _is_free(request):
            return ()
        if not self.has(request, num_output):
            return None
        known = self._known[request]
        rest = known.forced[self._offset(request, num_output) :]
        return rest[: min(most, len(rest) - known.is_end)] if rest else None

    def _offset(self, request: Request, num_output: int) -> int:
        """Return by how much num_output exceeds the number of tokens recorded for the request, without drafts that will
        be rejected.
        """
        return num_output - self._num_tokens[request] - (self._surplus.get(request) or 0)

    def wait_for(self, requests: Collection[Request], seconds: float) -> None:
        """Wait, at most `seconds`, until no mask is due for any of these requests."""
        end = time.monotonic() + seconds
        for worker in (self.worker, self._slow):
            keys = [self._keys[request] for request in requests if self._workers.get(request) is worker]
            worker.wait_for(keys, end - time.monotonic())

    def wait(self, seconds: float) -> None:
        """Wait, at most `seconds`, until `take` may have something to return."""
        workers = (self.worker, self._slow)
        processes = [worker.process for worker in workers if worker.process is not None] + self._trials.processes
        if not (self._begun or self._free or self._trials.has_news) and not any(worker.has_news for worker in workers):
            wait_for_any(processes, seconds)

    def shutdown(self) -> None:
        """Kill the processes. Requests stay registered until they are dropped."""
        for each in (self._trials, self.worker, self._slow):
            each.shutdown()

    def take(self) -> MaskEvents:
        """Return what has become known since the last call about requests that have not been dropped, without waiting.

        A request is ready if a mask has arrived or its grammar is FREE. It has ended if its grammar allows nothing
        more, even before min_tokens, or has failed. It is refused if its grammar cannot be used. Grammars that have
        passed their trial are opened, and masks and their seconds are counted.
        """
        free, self._free = self._free, []
        events = MaskEvents([request for request in free if request in self._keys], [], [])
        for each in self._news():
            request = self._requests.get(each.key)
            if request is None:  # dropped in the meantime
                continue
            if isinstance(each, GrammarFailure):
                self._fail(request, each, events)
                continue
            if each.seconds is not None:
                self.num_masks += 1
                self.seconds += each.seconds
            watch = self._watches.get(request)
            if watch is not None and watch.skips_reasoning(each.words):
                del self._watches[request]
            elif watch is not None:
                self._first_masks[request] = each
                self._update_known(request, each.words)
                events.ready.append(request)
                continue
            if each.forced or each.words is not None:
                self._known[request] = _Known(each.forced, each.words, each.words is None, each.guessed)
                events.ready.append(request)
            else:  # also before min_tokens, as in vLLM
                events.ended.append(MaskEnd(request, FinishReason.STOP, None))
        return events

    def _only(self, token_id: int) -> np.ndarray:
        """Return a new mask i32[num_words] that only allows token_id."""
        words = np.zeros(self._num_words, np.int32)
        words.view(np.uint8)[token_id // 8] = 1 << token_id % 8
        return words

    def _news(self) -> Iterator[NextMask | GrammarFailure]:
        """Yield the refusals of trials, `_begun`, and the masks and failures that have arrived. Open the grammars that
        have passed their trials: in `worker`, or in a second one if their compilation took _SLOW_SECONDS or more.
        """
        for key, reason, seconds in self._trials.take():
            if reason is not None:
                yield GrammarFailure(key, False, reason)
                continue
            request = self._requests[key]
            grammar = request.params.grammar
            assert grammar is not None
            self._workers[request] = worker = self.worker if seconds < _SLOW_SECONDS else self._slow
            worker.open(key, grammar.kind, grammar.text, grammar.options, self._trace(request))
        begun, self._begun = self._begun, []
        yield from begun
        yield from self.worker.take()
        yield from self._slow.take()

    def _trace(self, request: Request) -> Sequence[int]:
        """Return the tokens of trace_decode_token_ids that a request's grammar must allow: all of them, or those after
        its reasoning; () if the reasoning does not end.
        """
        grammar, trace = request.params.grammar, request.params.trace_decode_token_ids
        assert grammar is not None
        if not trace or not grammar.reasoning_end:
            return trace
        assert self._vocabulary is not None
        watch = ReasoningWatch(grammar, self._vocabulary)
        for count, token_id in enumerate(trace, 1):
            if (taken := watch.read(token_id)) is not None:
                return (*taken, *trace[count:])
        return ()

    def _fail(self, request: Request, failure: GrammarFailure, events: MaskEvents) -> None:
        """Add a failed request to `events`: to `ended`, with the reason ERROR, if its grammar was compiled, so that it
        has run, otherwise to `refused`, with a RequestError.
        """
        message = f"structured_outputs cannot be used: {failure.reason}"
        if failure.compiled:
            events.ended.append(MaskEnd(request, FinishReason.ERROR, message))
        else:
            events.refused.append((request, RequestError(message, param="structured_outputs")))


def _is_free(request: Request) -> bool:
    """Return whether the request has a grammar of kind FREE: no constraint, only a limit on its reasoning."""
    grammar = request.params.grammar
    return grammar is not None and grammar.kind == FREE
