"""Synthetic traces: chat, long prompts, and prompts that share prefixes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from jaxengine.config.errors import ConfigError
from jaxengine.records.trace_file import TraceRequest
from jaxengine.simulate.trace import Trace

BLOCK_SIZE = 16


@dataclass(frozen=True)
class Kind:
    """Lengths of a kind of trace: log-normal, with these medians and shapes (the sigma of the logarithm).

    Attributes:
      shared, num_shared: tokens of the prefix that requests share, and how many such prefixes there are.
    """

    prompt: float
    prompt_shape: float
    output: float
    output_shape: float
    shared: int = 0
    num_shared: int = 0


# Chat has the averages of the ShareGPT trace (Kwon et al. 2023, section 6.1): 161 prompt and 338 output tokens.
KINDS = {
    "chat": Kind(98, 1.0, 205, 1.0),
    "long": Kind(4096, 0.6, 128, 0.6),
    "shared": Kind(64, 0.8, 128, 0.8, shared=512, num_shared=8),
}


def synthetic(
    kind: str, num_requests: int, rate: float, max_model_len: int, seed: int = 0, scale: float = 1.0
) -> Trace:
    """Return a trace of a kind of KINDS, with arrivals at random at `rate` requests a second; all at once for inf.

    max_model_len: prompt and output are cut to half of it each. scale: factor of all lengths.

    Raises ConfigError for another kind, and for lengths that leave no room for a shared prefix.
    """
    if kind not in KINDS:
        raise ConfigError("synthetic", kind, ", ".join(KINDS))
    own, rng, half = KINDS[kind], np.random.default_rng(seed), max_model_len // 2
    shared = int(own.shared * scale) // BLOCK_SIZE * BLOCK_SIZE
    if half <= shared:
        raise ConfigError("max_model_len", max_model_len, f"more than {2 * shared}, for a shared prefix of {shared}")
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


def _lengths(rng: np.random.Generator, count: int, scale: float) -> Callable[[float, float, int], np.ndarray]:
    def draw(median: float, shape: float, most: int) -> np.ndarray:
        return np.clip(rng.lognormal(np.log(median * scale), shape, count), 1, most).astype(int)

    return draw


def _prefix(head: int, blocks: int) -> tuple[int, ...]:
    return tuple(range(head * blocks, (head + 1) * blocks))
