"""Processing of outputs: token ids become callers' outputs, with text, stop strings and logprobs, and a request's n
outputs are combined.

A request whose caller only wants the finished output costs nothing until it ends.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxengine.engine.output import EngineOutput, PromptScores, TokenScores
from jaxengine.requests.output.detokenizer import IncrementalDetokenizer
from jaxengine.requests.output.flat_logprobs import FlatLogprobs
from jaxengine.requests.output.found_rows import FoundRows
from jaxengine.requests.output.outputs import (
    SAMPLING_FIELDS,
    CompletionOutput,
    PositionLogprobs,
    RequestMetrics,
    RequestOutput,
    position_logprobs,
    sampling_columns,
    weight_spans,
)
from jaxengine.requests.output.repetition_detector import STOP_REASON as REPETITION
from jaxengine.requests.output.repetition_detector import RepetitionDetector
from jaxengine.requests.output.sampling_mask import MaskRows
from jaxengine.requests.params.repetition import RepetitionDetectionParams
from jaxengine.requests.params.sampling_params import RequestOutputKind, SamplingParams
from jaxengine.scheduler.base.request import FinishReason, Request
from jaxengine.tokens.tokenizer import Tokenizer

if TYPE_CHECKING:
    from jaxengine.requests.params.prepared import PreparedRequest

# Range of request tags: a tag and the number of an API process share an int64.
TAGS = 1 << 31


@dataclass(eq=False)
class _Sequence:
    """One of a request's n outputs while it grows.

    Attributes:
      group: the caller's request. index: number of the output in it. request: the engine's request that generates it.
      detokenizer: None if there is no text. repetition: None if repetitions do not end the output.
      token_ids: output tokens so far.
      logprobs, masses: log-probabilities and the numbers of return_sampling_mass of each token, if requested.
      cumulative_logprob: sum of the log-probabilities of the output tokens; 0 if they were not requested.
      num_sent: number of tokens that the stream has sent.
      found: rows that capabilities have returned, by field of CompletionOutput.
      finish_reason, stop_reason: those of CompletionOutput.
    """

    group: _Group
    index: int
    request: Request
    detokenizer: IncrementalDetokenizer | None
    repetition: RepetitionDetector | None = None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    masses: list[np.ndarray] = field(default_factory=list)
    cumulative_logprob: float = 0.0
    num_sent: int = 0
    found: dict[str, FoundRows | MaskRows] = field(default_factory=dict)
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def append(self, token_id: int) -> tuple[FinishReason, str] | None:
        """Add a token to the ids, and to the text unless it is a hidden stop token. If the content now ends the output,
        return (reason, stop reason): STOP with the completed stop string, or REPETITION. Otherwise return None. Stop
        strings end it only after more than min_tokens tokens, a repetition from min_tokens on and only where neither
        max_tokens nor a stop token ends it.
        """
        self.token_ids.append(token_id)
        repeats = self.repetition is not None and self.repetition.append(token_id)
        count, least = len(self.token_ids), self.group.params.min_tokens
        if self.detokenizer is not None and not self._hides(token_id):
            stop_string = self.detokenizer.append([token_id], check_stop=count > least)
            if stop_string is not None:
                return FinishReason.STOP, stop_string
        # If the token ends the output in another way as well, the other reason is reported.
        if repeats and least <= count < self.request.max_tokens and not self._is_stop_token(token_id):
            return FinishReason.REPETITION, REPETITION
        return None

    def finish(self, reason: FinishReason, stop_reason: int | str | None) -> None:
        """End the output: set its reasons and complete its text. If its tokens were not reported step by step, first
        take all of them from the engine's request, except those of failed rows; a last one that is hidden (`_hides`)
        adds no text.
        """
        self.finish_reason, self.stop_reason = reason.value, stop_reason
        if not self.request.per_step:
            known = self.request.output_token_ids
            self.token_ids = known[known >= 0].tolist()  # a negative id marks a failed row
        if self.detokenizer is not None:
            if not self.request.per_step:
                hidden = bool(self.token_ids) and self._hides(self.token_ids[-1])
                self.detokenizer.append(self.token_ids[:-1] if hidden else self.token_ids)
            self.detokenizer.finish()

    def is_waiting(self, interval: int) -> bool:
        """Return whether a stream holds back its new tokens, because there are fewer than `interval`, or than the
        request's stream_interval if it has one. The first and the last token are never held back.
        """
        interval = self.group.params.stream_interval or interval
        return self.finish_reason is None and self.num_sent > 0 and len(self.token_ids) - self.num_sent < interval

    def output(self, kind: RequestOutputKind) -> CompletionOutput:
        """Return the output so far, or with DELTA only what is new since the last call, and count its tokens as sent.
        Logprobs, sampling mass, weight versions and rows of capabilities are included if the request has them.
        """
        first = self.num_sent if kind is RequestOutputKind.DELTA else 0
        self.num_sent = len(self.token_ids)
        text = ""
        if self.detokenizer is not None:
            text = self.detokenizer.delta() if kind is RequestOutputKind.DELTA else self.detokenizer.text
        scored = self.group.params.num_logprobs is not None
        num_prompt = len(self.group.prompt_token_ids)
        num_fed = num_prompt + len(self.token_ids) - 1
        skipped = {"routed_experts": self.group.params.routed_experts_prompt_start, "sampling_mask": num_prompt - 1}
        versions, masses = self.request.weight_versions, self.group.params.return_sampling_mass
        columns: dict[str, Any] = sampling_columns(self.masses[first:]) if masses else {}
        for name, rows in self.found.items():
            columns[name] = rows.take(num_fed - skipped.get(name, 0), kind is RequestOutputKind.DELTA)
        return CompletionOutput(
            index=self.index,
            text=text,
            token_ids=self.token_ids[first:],
            cumulative_logprob=self.cumulative_logprob if scored else None,
            logprobs=self._logprobs(first) if scored else None,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            weight_versions=weight_spans(versions, len(self.token_ids)) if versions else None,
            **columns,
        )

    def _logprobs(self, first: int) -> Sequence[PositionLogprobs]:
        """Return the log-probabilities from token `first` on: FlatLogprobs if the request has flat_logprobs, otherwise
        a list.
        """
        found = self.logprobs[first:]
        return FlatLogprobs.of(found) if self.group.params.flat_logprobs else found

    def _hides(self, token_id: int) -> bool:
        """Return whether a token is left out of the text, because it is the stop token that ended the request and
        include_stop_str_in_output is False.
        """
        return self._is_stop_token(token_id) and not self.group.params.include_stop_str_in_output

    def _is_stop_token(self, token_id: int) -> bool:
        """Return whether a stop token has ended the request, and `token_id` is one of the request's stop tokens."""
        request = self.request
        ended = request.finish_reason is FinishReason.STOP and not isinstance(request.stop_reason, str)
        return ended and token_id in request.stop_token_ids


@dataclass
class _Group:
    """A caller's request, with its n sequences.

    Attributes:
      request_id, params: those of the prepared request.
      prompt: the text, if known.
      prompt_token_ids: token ids of the prompt.
      metrics: times of the request, filled in as it proceeds.
      sequences: one for each of the n outputs, including ended ones.
      prompt_logprobs: log-probabilities of each prompt token, None for a token that has none yet; None unless
        requested.
      flat_prompt_logprobs: the same as FlatLogprobs, created when first needed.
      num_running: number of sequences that have not ended.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    metrics: RequestMetrics
    sequences: list[_Sequence] = field(default_factory=list)
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    flat_prompt_logprobs: FlatLogprobs[PositionLogprobs | None] | None = None
    num_running: int = 0


class OutputProcessor:
    """Tracker of an engine's requests that creates their outputs.

    Args:
      tokenizer: None for outputs without text.
      stream_interval: number of tokens that a stream sends together.

    Attributes:
      spans: (start, end, number of outputs) of the last 4096 calls of `process` with outputs, in seconds.
    """

    def __init__(self, tokenizer: Tokenizer | None, stream_interval: int = 1):
        self.spans: deque[tuple[float, float, int]] = deque(maxlen=4096)
        self._tokenizer, self._stream_interval = tokenizer, stream_interval
        self._groups: dict[str, _Group] = {}
        self._sequences: dict[int, _Sequence] = {}
        self._last_tag = 0

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._groups

    def __len__(self) -> int:
        return len(self._groups)

    def add(self, prepared: PreparedRequest) -> None:
        """Start tracking the n requests of `prepared`, whose params must be SamplingParams and whose id must not be
        tracked (unchecked), and set the `tag` of each, by which its tokens are recognised.
        """
        request_id, params, requests = prepared.request_id, prepared.params, prepared.requests
        assert isinstance(params, SamplingParams)
        prompt_ids, metrics = requests[0].prompt_token_ids.tolist(), RequestMetrics(requests[0].arrival_time)
        group = _Group(request_id, prepared.prompt, prompt_ids, params, metrics, num_running=len(requests))
        if params.num_prompt_logprobs is not None:
            group.prompt_logprobs = [None for _ in prompt_ids]
        for index, request in enumerate(requests):
            repetition = params.repetition_detection
            assert repetition is None or isinstance(repetition, RepetitionDetectionParams)
            detector = None if repetition is None else RepetitionDetector(repetition)
            sequence = _Sequence(group, index, request, self._detokenizer(params, prompt_ids), detector)
            group.sequences.append(sequence)
            self._last_tag = (self._last_tag + 1) % TAGS
            request.tag = self._last_tag
            self._sequences[request.tag] = sequence
        self._groups[request_id] = group

    def running(self, request_id: str) -> list[Request]:
        """Return those of the engine's requests of a caller's request that have not ended; [] for an unknown one."""
        group = self._groups.get(request_id)
        sequences = group.sequences if group is not None else []
        return [sequence.request for sequence in sequences if sequence.request.tag in self._sequences]

    def forget(self, request: Request) -> tuple[str | None, list[Request]]:
        """Stop tracking the caller's request to which `request` belongs, without an output. Return its id, and those of
        its n requests that had not ended; (None, []) if it is not tracked.
        """
        sequence = self._sequences.get(request.tag)
        if sequence is None:
            return None, []
        request_id = sequence.group.request_id
        running = self.running(request_id)
        for each in running:
            del self._sequences[each.tag]
        del self._groups[request_id]
        return request_id, running

    def process(
        self, step: EngineOutput, now: float, stop: Callable[[Request, FinishReason, str, int], None]
    ) -> list[RequestOutput]:
        """Process the results of a step, and return the outputs for callers: new parts of streams, and finished
        requests, which are no longer tracked.

        Token ids below 0 and everything about requests that are not tracked are ignored. now: seconds of
        time.monotonic. stop: called to end a request in the engine whose output ends because of its content. It gets
        the request, the reason, its stop_reason (the stop string or "repetition_detected") and the number of its tokens
        so far.
        """
        changed: dict[_Sequence, None] = {}
        for request in step.first_tokens:
            if (sequence := self._sequences.get(request.tag)) is not None:
                metrics = sequence.group.metrics
                metrics.first_token_time = metrics.first_token_time or now
        for each in step.found:
            if (sequence := self._sequences.get(each.request.tag)) is not None:
                kind = MaskRows if each.name == "sampling_mask" else FoundRows
                sequence.found.setdefault(each.name, kind()).add(each.rows)
        for prompt_scores in step.prompt_scores:
            self._score_prompt(prompt_scores)
        for emitted in step.emitted:
            score_rows = dict(zip(emitted.scored.tolist(), range(len(emitted.scored)), strict=True))
            tokens = zip(emitted.tags.tolist(), emitted.token_ids.tolist(), strict=True)
            for index, (tag, token_id) in enumerate(tokens):
                sequence = self._sequences.get(tag)
                if sequence is None or token_id < 0:
                    continue
                if index in score_rows:
                    assert emitted.scores is not None
                    self._score(sequence, token_id, emitted.scores, score_rows[index])
                if (end := sequence.append(token_id)) is not None:
                    stop(sequence.request, *end, len(sequence.token_ids))
                    self._end(sequence, *end)
                changed[sequence] = None
        for request in step.finished:
            sequence = self._sequences.get(request.tag)
            if sequence is not None:
                assert request.finish_reason is not None
                self._end(sequence, request.finish_reason, request.stop_reason)
                changed[sequence] = None
        outputs = self._outputs(list(changed), now)
        if outputs:
            self.spans.append((now, time.monotonic(), len(outputs)))
        return outputs

    def _outputs(self, changed: list[_Sequence], now: float) -> list[RequestOutput]:
        """Return the outputs for callers of these sequences, which have changed at time `now`. Set the times of their
        requests, and forget requests that have ended.

        A stream gets an output for each sequence that does not hold back its tokens. A request with FINAL_ONLY gets one
        output with all n sequences when it has ended.
        """
        outputs = []
        # Several of a request's n sequences may end in one step. Only the output of the last is marked as finished.
        last_of = {sequence.group.request_id: sequence for sequence in changed}
        for sequence in changed:
            group = sequence.group
            finished = not group.num_running and last_of[group.request_id] is sequence
            metrics = group.metrics
            metrics.last_token_time = now
            metrics.queued_time = metrics.queued_time or sequence.request.queued_time
            metrics.first_scheduled_time = metrics.first_scheduled_time or sequence.request.first_scheduled_time
            if finished:
                metrics.finished_time = now
                metrics.num_preemptions = sum(each.request.num_preemptions for each in group.sequences)
                metrics.num_generation_tokens = sum(len(each.token_ids) for each in group.sequences)
                self._groups.pop(group.request_id, None)
            kind = group.params.output_kind
            if kind is not RequestOutputKind.FINAL_ONLY:
                if sequence.is_waiting(self._stream_interval):
                    continue
                outputs.append(self._output(group, [sequence.output(kind)], finished))
            elif finished:
                outputs.append(self._output(group, [each.output(kind) for each in group.sequences], True))
        return outputs

    def _output(self, group: _Group, completions: list[CompletionOutput], finished: bool) -> RequestOutput:
        """Return a group's RequestOutput with these completions. Its prompt token ids, prompt logprobs and metrics are
        those of the group, not copies. finished: whether all n outputs have ended.
        """
        cached = group.sequences[0].request.num_cached_tokens
        return RequestOutput(
            request_id=group.request_id,
            prompt=group.prompt,
            prompt_token_ids=group.prompt_token_ids,
            outputs=completions,
            finished=finished,
            prompt_logprobs=self._prompt_logprobs(group),
            metrics=group.metrics,
            num_cached_tokens=cached if cached >= 0 else None,
            kv_transfer_params=group.sequences[0].request.kv_transfer_params,
        )

    def _prompt_logprobs(self, group: _Group) -> Sequence[PositionLogprobs | None] | None:
        """Return the prompt's log-probabilities: None unless requested, FlatLogprobs with flat_logprobs, otherwise a
        list. The FlatLogprobs are stored in the group for later calls.
        """
        if group.prompt_logprobs is None or not group.params.flat_logprobs:
            return group.prompt_logprobs
        if group.flat_prompt_logprobs is None:
            group.flat_prompt_logprobs = FlatLogprobs.of(group.prompt_logprobs)
        return group.flat_prompt_logprobs

    def _end(self, sequence: _Sequence, reason: FinishReason, stop_reason: int | str | None) -> None:
        """Stop tracking a sequence, end its output for these reasons, and decrement its group's num_running. Raises
        KeyError if it is not tracked.
        """
        del self._sequences[sequence.request.tag]
        sequence.finish(reason, stop_reason)
        sequence.group.num_running -= 1

    def _detokenizer(self, params: SamplingParams, prompt_ids: list[int]) -> IncrementalDetokenizer | None:
        """Return a new detokenizer for one output; None without a tokenizer or with detokenize=False. prompt_ids: token
        ids of the prompt, of which the last 8 are used.
        """
        if self._tokenizer is None or not params.detokenize:
            return None
        return IncrementalDetokenizer(
            self._tokenizer,
            skip_special_tokens=params.skip_special_tokens,
            spaces_between_special_tokens=params.spaces_between_special_tokens,
            stop=tuple(params.stop),
            stop_after=params.stop_after,  # pyright: ignore[reportArgumentType]  # a dict was converted
            include_stop_str_in_output=params.include_stop_str_in_output,
            prompt_tail_ids=prompt_ids[-8:],
        )

    def _score(self, sequence: _Sequence, token_id: int, scores: TokenScores, row: int) -> None:
        """Append the log-probabilities of a sampled token, `row` of the scores, to its sequence; with them the numbers
        of return_sampling_mass, if requested. The token's own log-probability is added to cumulative_logprob. Do
        nothing if the request reports no log-probabilities.
        """
        params = sequence.group.params
        count, given_ids = params.num_logprobs, params.logprob_token_ids or ()
        if count is None:  # only the engine needed them
            return
        given = list(zip(given_ids, scores.given_logprobs[row, : len(given_ids)].tolist(), strict=True))
        sequence.logprobs.append(self._position(params, token_id, scores, row, count, given))
        sequence.cumulative_logprob += float(scores.logprobs[row])
        if params.return_sampling_mass:
            sequence.masses.append(scores.given_logprobs[row, -len(SAMPLING_FIELDS) :])

    def _score_prompt(self, scores: PromptScores) -> None:
        """Store the log-probabilities of a chunk of a prompt in its group. Those of other sequences than the group's
        first, and of requests that are not tracked, are dropped.
        """
        sequence = self._sequences.get(scores.request.tag)
        if sequence is None or sequence.index != 0:
            return
        group, params = sequence.group, sequence.group.params
        count, given_ids = params.num_prompt_logprobs, params.prompt_logprob_token_ids or ()
        assert group.prompt_logprobs is not None and count is not None
        group.flat_prompt_logprobs = None
        first = len(params.logprob_token_ids or ())
        for row in range(len(scores.scores.ranks)):
            position = scores.first + row
            token_id = group.prompt_token_ids[position]
            given = scores.scores.given_logprobs[row, first : first + len(given_ids)].tolist()
            pairs = list(zip(given_ids, given, strict=True))
            group.prompt_logprobs[position] = self._position(params, token_id, scores.scores, row, count, pairs)

    def _position(
        self,
        params: SamplingParams,
        token_id: int,
        scores: TokenScores,
        row: int,
        count: int,
        given: Sequence[tuple[int, float]],
    ) -> PositionLogprobs:
        """Return the `position_logprobs` of one position, `row` of the scores, without texts if the request has
        detokenize=False. count: number of likeliest tokens to list, -1 for all. given: further (token id, logprob)
        to list.
        """
        return position_logprobs(
            token_id,
            float(scores.logprobs[row]),
            int(scores.ranks[row]),
            scores.top_ids[row].tolist(),
            scores.top_logprobs[row].tolist(),
            count,
            self._decode_one if self._tokenizer is not None and params.detokenize else None,
            given,
        )

    def _decode_one(self, token_id: int) -> str:
        """Return the text of one token, which may be a special token."""
        assert self._tokenizer is not None
        return self._tokenizer.decode([token_id], skip_special_tokens=False)
