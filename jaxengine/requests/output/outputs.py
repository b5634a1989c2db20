"""Outputs of a request: vLLM's RequestOutput, CompletionOutput and Logprob, and the request's times."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter
from typing import Any, ClassVar, NamedTuple

import numpy as np

from jaxengine.requests.output.sampling_mask import SamplingMask
from jaxengine.requests.params.lora import LoRARequest
from jaxengine.requests.pooling.outputs import PoolingOutput, PoolingRequestOutput


@dataclass(frozen=True, slots=True)
class Logprob:
    """A token at a position.

    Attributes:
      logprob: its log-probability, or its logit with a logprobs_mode of logits.
      rank: 1 is the likeliest of the vocabulary; None for tokens that were only requested by id.
      decoded_token: its text; None without a tokenizer, and with detokenize=False.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


PositionLogprobs = dict[int, Logprob]
# Fields of CompletionOutput that return_sampling_mass asks for, in the order in which the devices report them.
SAMPLING_FIELDS = ("logprobs_raw", "logprobs_processed", "sampling_log_mass")


def position_logprobs(
    token_id: int,
    logprob: float,
    rank: int,
    top_ids: Sequence[int],
    top_logprobs: Sequence[float],
    num_logprobs: int,
    decode: Callable[[int], str] | None = None,
    given: Iterable[tuple[int, float]] = (),
) -> PositionLogprobs:
    """Return the logprobs of one position by token id: the sampled token, then the `num_logprobs` likeliest (-1: all in
    top_ids), then the `given` tokens, without a rank. Each token occurs once.

    top_ids and top_logprobs are sorted, likeliest first, and may be longer than requested. decode: returns a token's
    text; None leaves decoded_token None.
    """
    count = len(top_ids) if num_logprobs == -1 else num_logprobs
    best = zip(top_ids[:count], top_logprobs[:count], strict=True)
    top = [(int(top_id), top_logprob, top_rank) for top_rank, (top_id, top_logprob) in enumerate(best, 1)]
    found: PositionLogprobs = {}
    for entry_id, value, entry_rank in [(token_id, logprob, rank), *top]:
        # The sampled token keeps its own rank, because its index among equally likely tokens is arbitrary.
        if entry_id not in found:
            found[entry_id] = Logprob(float(value), int(entry_rank), None if decode is None else decode(entry_id))
    for entry_id, value in given:
        if entry_id not in found:
            found[entry_id] = Logprob(float(value), None, None if decode is None else decode(entry_id))
    return found


def sampling_columns(rows: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
    """Return the SAMPLING_FIELDS of an output as arrays by name. rows: f32[3] for each token."""
    columns = np.array(rows, np.float32).reshape(-1, len(SAMPLING_FIELDS)).T
    return dict(zip(SAMPLING_FIELDS, np.ascontiguousarray(columns), strict=True))


@dataclass(slots=True)
class RequestMetrics:
    """Times of a request, in seconds of one monotonic clock; None before they are reached.

    Attributes:
      arrival_time: when the caller's request arrived.
      queued_time: when the engine queued it, after tokenization.
      first_scheduled_time: when it was first part of a step.
      first_token_time, last_token_time: when the first and the latest token of any of its n outputs arrived.
      finished_time: when the last of its outputs ended.
      num_preemptions: how often its n sequences were preempted, all together.
      num_generation_tokens: tokens of its n outputs; 0 until the last of them has ended.

    They have vLLM's names, too: queued_ts, scheduled_ts, first_token_ts, last_token_ts and first_token_latency.
    """

    arrival_time: float
    queued_time: float | None = None
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    finished_time: float | None = None
    num_preemptions: int = 0
    num_generation_tokens: int = 0

    queued_ts = property(attrgetter("queued_time"))
    scheduled_ts = property(attrgetter("first_scheduled_time"))
    first_token_ts = property(attrgetter("first_token_time"))
    last_token_ts = property(attrgetter("last_token_time"))

    @property
    def time_in_queue(self) -> float | None:
        """Seconds that the request waited in the engine's queue before it first ran; None before that."""
        return _between(self.queued_time, self.first_scheduled_time)

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds from arrival to the first token; None before it."""
        return _between(self.arrival_time, self.first_token_time)

    first_token_latency = time_to_first_token


def _between(start: float | None, end: float | None) -> float | None:
    """Return end - start; None if either is None."""
    return None if start is None or end is None else end - start


class WeightSpan(NamedTuple):
    """Output tokens of a request, from `start` up to but excluding `end`, that one version of the weights computed."""

    version: int | str
    start: int
    end: int


def weight_spans(versions: Sequence[tuple[int | str, int]], num_tokens: int) -> list[WeightSpan] | None:
    """Return the spans of the first `num_tokens` output tokens by weight version.

    versions: each version, in order, with the number of output tokens before it was used. Returns None if there are
    none, or only version 0, with which the engine started.
    """
    if not versions or versions == [(0, 0)]:
        return None
    starts = [*versions, (versions[-1][0], num_tokens)]
    spans = [WeightSpan(version, start, min(end, num_tokens)) for (version, start), (_, end) in pairwise(starts)]
    return [span for span in spans if span.start < span.end]


@dataclass(slots=True)
class CompletionOutput:
    """One of a request's `n` outputs.

    Attributes:
      index: 0 to n - 1.
      text, token_ids, logprobs: everything so far, or only what is new (RequestOutputKind.DELTA).
      cumulative_logprob: sum over all tokens so far, for every output kind; None without logprobs.
      logprobs: a list with one dict per token, from token id to Logprob; or FlatLogprobs, if the request says so. None
        unless requested.
      finish_reason: "stop", "length", "abort", "error" or "repetition"; None while running.
      stop_reason: the stop string or stop token id that was met; details of "abort", such as "timeout", or "error";
        "repetition_detected"; None otherwise, and for the end-of-sequence token.
      hidden_states: [tokens, layers, hidden size] of the engine's capture_layers, in the dtype of the model: one row
        for each token of the prompt, then one for each output token except the last, which was not fed to the model.
        Everything so far, or only what is new (RequestOutputKind.DELTA); None unless requested.
      captured: activations by the names of the taps that the request asked for, with rows as in `hidden_states`:
        [tokens, hidden size] in the dtype of the model, f32[tokens, experts] for router_logits; None unless requested.
      routed_experts: [tokens, MoE layers, experts per token], the experts that each token was sent to, the best first:
        uint8 if a layer has at most 256, else uint16. Rows as in `hidden_states`, without the first
        routed_experts_prompt_start; None without enable_return_routed_experts.
      alignment: f32[tokens, positions], how likely each token of the prompt is said at each position of its sound, 50 a
        second, as numbers for a monotonic path (jaxengine.requests.media.words); None unless requested.
      logprobs_raw, logprobs_processed, sampling_log_mass: f32[tokens], for each of token_ids: its log-probability under
        the model's own logits, its log-probability under the distribution that it was drawn from, and the log of the
        probability that truncation kept, 0 if it kept all; None unless requested.
      sampling_mask: which tokens could have been sampled in place of each of token_ids; None unless requested.
      weight_versions: which weights computed which tokens, for all tokens so far and every output kind; None while the
        weights are those that the engine started with.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: Sequence[PositionLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    hidden_states: np.ndarray | None = None
    captured: dict[str, np.ndarray] | None = None
    weight_versions: list[WeightSpan] | None = None
    logprobs_raw: np.ndarray | None = None
    logprobs_processed: np.ndarray | None = None
    sampling_log_mass: np.ndarray | None = None
    sampling_mask: SamplingMask | None = None
    routed_experts: np.ndarray | None = None
    alignment: np.ndarray | None = None

    def finished(self) -> bool:
        """Return whether the output has ended."""
        return self.finish_reason is not None

    def _append(self, later: CompletionOutput) -> None:
        """Append a later output of the same sequence, which has only what is new, to this one, in place: texts, tokens,
        log-probabilities and arrays. cumulative_logprob, weight_versions and the reasons become the later one's.
        """
        self.text += later.text
        self.token_ids = [*self.token_ids, *later.token_ids]
        if later.logprobs is not None:
            # Both are lists, or both FlatLogprobs, which can be added, too.
            self.logprobs = later.logprobs if not self.logprobs else self.logprobs + later.logprobs  # pyright: ignore
        self.cumulative_logprob = later.cumulative_logprob
        for name in ("hidden_states", "routed_experts", "alignment", *SAMPLING_FIELDS):
            parts = [each for each in (getattr(self, name), getattr(later, name)) if each is not None]
            setattr(self, name, np.concatenate(parts) if parts else None)
        if later.sampling_mask is not None:
            self.sampling_mask = (self.sampling_mask or SamplingMask()) + later.sampling_mask
        if later.captured is not None:
            earlier = self.captured or {name: rows[:0] for name, rows in later.captured.items()}
            self.captured = {name: np.concatenate([earlier[name], rows]) for name, rows in later.captured.items()}
        self.weight_versions = later.weight_versions
        self.finish_reason = later.finish_reason
        self.stop_reason = later.stop_reason


@dataclass(slots=True)
class RequestOutput:
    """The state of a request, or the new part of it in a stream.

    Attributes:
      request_id: the id that was given, or one chosen when the request was prepared.
      prompt: the prompt's text; None if it was given as token ids.
      prompt_token_ids: token ids of the prompt, placeholders of media included.
      prompt_logprobs: one entry per prompt token, which is None for the first, as nothing precedes it, and for those up
        to prompt_logprob_start; None unless requested.
      outputs: those of the `n` outputs that changed, by ascending index.
      finished: whether all `n` have finished.
      metrics: times of the request so far; None where they are not known.
      num_cached_tokens: prompt tokens found in the prefix cache; None until the request first ran.
      kv_transfer_params: parameters with which another engine fetches the pages of the prompt; None unless requested,
        and None until the request has ended.
      lora_request: the adapter that the caller gave.
      encoder_prompt, encoder_prompt_token_ids: None, as encoders take no texts.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: Sequence[PositionLogprobs | None] | None = None
    metrics: RequestMetrics | None = None
    num_cached_tokens: int | None = None
    kv_transfer_params: dict[str, Any] | None = None
    lora_request: LoRARequest | None = None
    encoder_prompt: ClassVar[None] = None
    encoder_prompt_token_ids: ClassVar[None] = None

    def add(self, later: RequestOutput, aggregate: bool) -> None:
        """Merge a later output of the same request into this one, in place: each of its completions is appended to the
        one with the same index (aggregate, for DELTA) or replaces it. Of metrics, num_cached_tokens, kv_transfer_params
        and prompt_logprobs the later output's values are taken, unless they are missing. `finished` stays True once it
        is.

        Raises ValueError for another request's output.
        """
        if later.request_id != self.request_id:
            raise ValueError(f"cannot add output of request {later.request_id!r} to that of {self.request_id!r}")
        outputs = {output.index: output for output in self.outputs}
        for output in later.outputs:
            if aggregate and output.index in outputs:
                outputs[output.index]._append(output)
            else:
                outputs[output.index] = output
        self.outputs = [outputs[index] for index in sorted(outputs)]
        self.finished = self.finished or later.finished
        self.metrics = later.metrics or self.metrics
        if later.num_cached_tokens is not None:
            self.num_cached_tokens = later.num_cached_tokens
        self.kv_transfer_params = later.kv_transfer_params or self.kv_transfer_params
        if later.prompt_logprobs is not None:
            self.prompt_logprobs = later.prompt_logprobs


AnyOutput = RequestOutput | PoolingRequestOutput[PoolingOutput]
