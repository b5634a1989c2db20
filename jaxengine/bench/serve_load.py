"""What a load generator sends and when: lengths, prompts with shared prefixes, arrival times, and the sending itself.

Open loop: a request leaves at its time, whether or not earlier ones were answered, unless a limit on how many may be
open is asked for. Everything follows from the seed. Knows nothing of what is made of the measurements.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxengine.bench.serve_client import Connections, Sample, Server, stream

# A log-normal's shape; ragged_trace says where it is from.
SIGMA = 1.0
# Words that most tokenizers have as one token with the space before them: text of about as many tokens as words.
_TEXT = (
    "the of and to in is that it was for on are as with his they at be this from have or by one had not but what all"
    " were when we there can an your which their said if do will each about how up out them then she many some so"
    " these would other into has more her two like him see time could no make than first been its who now people my"
    " made over did down only way find use may water long little very after words called just where most know"
)
WORDS = tuple(_TEXT.split())


@dataclass(frozen=True)
class Load:
    """What is sent.

    Attributes:
      lengths: how prompt and output lengths are spread: all the same, evenly within `range_ratio` around the given
        length, or log-normal around it as a median.
      max_model_len: no request is longer than this together; None for no limit.
      num_prefixes: prompts start with one of this many prefixes of `prefix_len` tokens each, 0 for none.
      vocab_size: token ids of prompts are below it.
      text: prompts are words, not token ids.
    """

    num_prompts: int
    input_len: int
    output_len: int
    lengths: str = "fixed"
    range_ratio: float = 0.5
    max_model_len: int | None = None
    num_prefixes: int = 0
    prefix_len: int = 0
    vocab_size: int = 10_000
    text: bool = False
    seed: int = 0


@dataclass(frozen=True)
class Planned:
    """One request: its prompt, token ids or text, and how many tokens it asks for."""

    prompt: list[int] | str
    max_tokens: int


def plan(load: Load) -> list[Planned]:
    """The requests of a load, in order."""
    generator = np.random.default_rng(load.seed)
    prefixes = [_words(load, generator, load.prefix_len) for _ in range(load.num_prefixes)]
    inputs = _lengths(load, generator, load.input_len)
    outputs = _lengths(load, generator, load.output_len)
    planned = []
    for number, (length, new) in enumerate(zip(inputs, outputs, strict=True)):
        prefix = prefixes[number % len(prefixes)] if prefixes else []
        if load.max_model_len is not None:
            new = min(new, load.max_model_len // 2)
            length = max(1, min(length, load.max_model_len - new - len(prefix)))
        content = prefix + _words(load, generator, length)
        prompt = " ".join(WORDS[word] for word in content) if load.text else content
        planned.append(Planned(prompt, new))
    return planned


def _words(load: Load, generator: np.random.Generator, count: int) -> list[int]:
    """Random token ids, or places in WORDS. The lowest ids of most vocabularies are special tokens or single bytes."""
    if load.text:
        return generator.integers(0, len(WORDS), count).tolist()
    return generator.integers(min(300, load.vocab_size // 2), load.vocab_size, count).tolist()


def _lengths(load: Load, generator: np.random.Generator, length: int) -> list[int]:
    if load.lengths == "uniform":
        low, high = math.ceil(length * (1 - load.range_ratio)), math.floor(length * (1 + load.range_ratio))
        values = generator.integers(max(1, low), max(1, high) + 1, load.num_prompts)
    elif load.lengths == "lognormal":
        values = np.clip(generator.lognormal(np.log(length), SIGMA, load.num_prompts), 2, None).astype(int)
    else:
        return [length] * load.num_prompts
    return values.tolist()


def arrivals(count: int, rate: float, burstiness: float = 1.0, seed: int = 0) -> list[float]:
    """Seconds after the start at which each of `count` requests leaves.

    rate: requests a second, on average over these very requests; inf sends all at once.
    burstiness: shape of the gamma distribution that the gaps are drawn from: 1 is Poisson, less comes in bursts.
    """
    if math.isinf(rate):
        return [0.0] * count
    gaps = np.random.default_rng(seed).gamma(burstiness, 1.0, count)
    times = np.cumsum(gaps)
    # Whatever was drawn, the last leaves when `count` requests are due, so that runs of one rate offer one load.
    return (times * (count / rate / times[-1])).tolist()


@dataclass(frozen=True)
class Traffic:
    """How requests are written.

    Attributes:
      route: completions or chat/completions.
      fields: further fields of every request.
      timeout: seconds a request may take; None for as long as it takes.
    """

    server: Server
    route: str
    model: str
    fields: dict[str, Any]
    timeout: float | None = None

    def body(self, planned: Planned) -> dict[str, Any]:
        if self.route == "completions":
            prompt = {"prompt": planned.prompt}
        else:
            prompt = {"messages": [{"role": "user", "content": planned.prompt}]}
        return {
            "model": self.model,
            **prompt,
            "max_tokens": planned.max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.fields,
        }


@dataclass(frozen=True)
class Run:
    """What happened; `lags` are the seconds by which each request left late, `cpu_seconds` what sending took here."""

    seconds: float
    samples: list[Sample]
    lags: list[float]
    cpu_seconds: float


async def send(
    traffic: Traffic, planned: Sequence[Planned], times: Sequence[float], max_concurrency: int | None = None
) -> Run:
    """Sends every request at its time and waits for all of them.

    max_concurrency: requests open at once; later ones wait for a place, and are measured from when they got it.
    """
    connections = Connections(traffic.server)
    places = asyncio.Semaphore(max_concurrency) if max_concurrency else None
    lags = [0.0] * len(planned)
    # What is sent is made before, so that it costs nothing while others are measured.
    bodies = [traffic.body(request) for request in planned]
    cpu, start = time.process_time(), time.perf_counter()

    async def one(number: int) -> Sample:
        if places is None:
            lags[number] = time.perf_counter() - start - times[number]
            return await stream(connections, "/" + traffic.route, bodies[number], traffic.timeout)
        async with places:
            return await stream(connections, "/" + traffic.route, bodies[number], traffic.timeout)

    tasks = []
    try:
        for number, at in enumerate(times):
            # Also with nothing to wait for: what was started must get its turn.
            await asyncio.sleep(max(0.0, start + at - time.perf_counter()))
            tasks.append(asyncio.create_task(one(number)))
        samples = await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        connections.close()
    return Run(time.perf_counter() - start, list(samples), lags, time.process_time() - cpu)
