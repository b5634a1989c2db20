"""Synthetic traces: chat, long prompts, prompts that share prefixes, and conversations of agents."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np

from jaxengine.config.base.errors import ConfigError
from jaxengine.records.trace_file import TraceRequest
from jaxengine.simulate.trace import Trace

BLOCK_SIZE = 16
# Largest rate of a trace of conversations. Their simulation begins before time 0 and drops earlier requests, which
# takes work in proportion to the rate.
_MOST_TURNS = 10_000


@dataclass(frozen=True)
class Kind:
    """Distribution of the lengths in a kind of trace. Lengths are log-normal.

    Attributes:
      prompt, output: medians in tokens of prompts (without the shared prefix) and of outputs.
      prompt_shape, output_shape: standard deviations of the logarithms of the lengths.
      shared: tokens of the prefix that requests share.
      num_shared: number of different shared prefixes. Conversations choose the n-th with a weight of 1 / n.
      turns: mean number of requests of a conversation (geometric). Each begins with all earlier turns.
      pause: mean seconds between requests of a conversation (exponential).
    """

    prompt: float
    prompt_shape: float
    output: float
    output_shape: float
    shared: int = 0
    num_shared: int = 0
    turns: float = 1.0
    pause: float = 0.0


# Chat has the averages of the ShareGPT trace (Kwon et al. 2023, section 6.1): 161 prompt and 338 output tokens.
KINDS = {
    "chat": Kind(98, 1.0, 205, 1.0),
    "long": Kind(4096, 0.6, 128, 0.6),
    "shared": Kind(64, 0.8, 128, 0.8, shared=512, num_shared=8),
    "agents": Kind(256, 0.8, 32, 0.5, shared=1024, num_shared=256, turns=8.0, pause=2.0),
}


def synthetic(
    kind: str, num_requests: int, rate: float, max_model_len: int, seed: int = 0, scale: float = 1.0
) -> Trace:
    """Return a synthetic trace of the given kind, a key of KINDS, with `num_requests` requests that arrive at random at
    `rate` per second. With rate inf all arrive at once. Each turn of a conversation is a request.

    max_model_len: a prompt, its shared prefix included, and an output are each cut to half of it; those of a
    conversation are not, which ends before it reaches so many tokens. Lengths are at least 1.
    scale: factor of all lengths; shared prefixes are then rounded down to whole blocks. seed: equal seeds give equal
    traces. Raises ConfigError for an unknown kind, for a
    max_model_len without room for a shared prefix or a turn of a conversation, and for conversations at a rate of more
    than 10,000.
    """
    if kind not in KINDS:
        raise ConfigError("synthetic", kind, ", ".join(KINDS))
    own, rng, half = KINDS[kind], np.random.default_rng(seed), max_model_len // 2
    shared = int(own.shared * scale) // BLOCK_SIZE * BLOCK_SIZE
    if half <= shared:
        raise ConfigError("max_model_len", max_model_len, f"more than {2 * shared}, for a shared prefix of {shared}")
    turn = math.ceil((own.prompt + own.output) * scale)
    if own.turns > 1 and max_model_len < (least := shared + turn + 3):
        raise ConfigError("max_model_len", max_model_len, f"at least {least}, for a turn of {turn} tokens of {kind}")
    if own.turns > 1:
        if rate > _MOST_TURNS:
            allowed = f"at most {_MOST_TURNS:,} for {kind}, whose conversations have begun before the trace"
            raise ConfigError("rate", rate, allowed)
        return Trace(kind, _conversations(own, rng, num_requests, rate, max_model_len, shared, scale), BLOCK_SIZE)
    gaps = rng.exponential(1.0, num_requests) / rate
    arrivals = np.cumsum(gaps) - gaps[0]
    lengths = _lengths(rng, num_requests, scale)
    prompts = lengths(own.prompt, own.prompt_shape, half - shared)
    outputs = lengths(own.output, own.output_shape, max(1, half))
    heads = rng.integers(0, own.num_shared, num_requests) if own.num_shared else np.zeros(num_requests, int)
    blocks = shared // BLOCK_SIZE
    requests = [
        TraceRequest(float(arrival), shared + int(prompt), int(output), None, _prefix(int(head), blocks))
        for arrival, prompt, output, head in zip(arrivals, prompts, outputs, heads, strict=True)
    ]
    return Trace(kind, tuple(requests), BLOCK_SIZE)


def _conversations(
    own: Kind, rng: np.random.Generator, num_requests: int, rate: float, longest: int, shared: int, scale: float
) -> tuple[TraceRequest, ...]:
    """Return `num_requests` requests of conversations, in order of arrival, on average `rate` per second from time 0
    on. Conversations begin at random times, also before 0; their requests from 0 on are included.

    own: distribution of lengths, turns and pauses. longest: a conversation ends before it reaches so many tokens.
    shared: tokens of the shared prefix, a multiple of the block size. scale: factor of lengths.
    """
    begun, blocks, next_id = -5 * own.turns * own.pause, shared // BLOCK_SIZE, own.num_shared * (shared // BLOCK_SIZE)
    shares = np.cumsum(1.0 / np.arange(1, own.num_shared + 1))
    requests: list[TraceRequest] = []
    later: list[tuple[float, int, TraceRequest]] = []
    while len(requests) < num_requests:
        lengths = _lengths(rng, rng.geometric(1 / own.turns), scale)
        prompts, outputs = (
            lengths(*each, longest) for each in ((own.prompt, own.prompt_shape), (own.output, own.output_shape))
        )
        ends = shared + np.cumsum(prompts + outputs)
        ends, outputs = ends[ends < longest], outputs[ends < longest]
        pauses = rng.exponential(own.pause, len(ends))
        head = int(np.searchsorted(shares, rng.random() * shares[-1]))
        count = max(0, int(ends.max(initial=0)) // BLOCK_SIZE - blocks)
        chain = (*_prefix(head, blocks), *range(next_id, next_id + count))
        next_id += count
        for arrival, end, output in zip(begun + np.cumsum(pauses) - pauses, ends, outputs, strict=True):
            ids = chain[: int(end) // BLOCK_SIZE]
            heappush(
                later,
                (float(arrival), next_id, TraceRequest(float(arrival), int(end - output), int(output), None, ids)),
            )
        begun += rng.exponential(own.turns / rate)
        while later and later[0][0] <= begun:
            requests += [request] if (request := heappop(later)[2]).arrival >= 0.0 else []
    return tuple(requests[:num_requests])


def _lengths(rng: np.random.Generator, count: int, scale: float) -> Callable[[float, float, int], np.ndarray]:
    """Return a function (median, sigma, most) that draws i64[count] log-normal lengths, each cut to 1 to `most`, both
    included. scale: factor of the median.
    """

    def draw(median: float, shape: float, most: int) -> np.ndarray:
        """Return i64[count] log-normal lengths with this median (times scale) and sigma `shape`, cut to 1 to `most`."""
        return np.clip(rng.lognormal(np.log(median * scale), shape, count), 1, most).astype(int)

    return draw


def _prefix(head: int, blocks: int) -> tuple[int, ...]:
    """Return the hash ids of shared prefix `head`, one for each of its `blocks` blocks."""
    return tuple(range(head * blocks, (head + 1) * blocks))
