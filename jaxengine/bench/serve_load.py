"""Generates load: request lengths, prompts with shared prefixes, arrival times, and the sending itself.

Open loop: a request is sent at its time whether or not earlier ones were answered, unless the number of open requests
is limited. Everything follows from the seed.
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

# Shape of the log-normal distribution; see ragged_trace.
SIGMA = 1.0
# Words that most tokenizers encode, with the space before them, as one token: a text has about as many tokens as words.
_TEXT = (
    "the of and to in is that it was for on are as with his they at be this from have or by one had not but what all"
    " were when we there can an your which their said if do will each about how up out them then she many some so"
    " these would other into has more her two like him see time could no make than first been its who now people my"
    " made over did down only way find use may water long little very after words called just where most know"
)
WORDS = tuple(_TEXT.split())


@dataclass(frozen=True)
class Load:
    """Description of the requests to send.

    Attributes:
      num_prompts: number of requests.
      input_len, output_len: tokens of each prompt, without its prefix, and of each output; `lengths` distributes them.
      lengths: distribution of prompt and output lengths: all equal, uniform within `range_ratio` around the given
        length, or log-normal with it as the median.
      max_model_len: limit of prompt plus output tokens of a request; None for no limit.
      num_prefixes: number of shared prefixes, of `prefix_len` tokens each; 0 for none.
      vocab_size: upper bound (exclusive) of token ids in prompts.
      text: send words instead of token ids.
      seed: of all random numbers.
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
    """A request to send.

    Attributes:
      prompt: token ids or text.
      max_tokens: output tokens.
    """

    prompt: list[int] | str
    max_tokens: int


def plan(load: Load) -> list[Planned]:
    """Return the requests of a load, in sending order; equal loads give equal requests.

    Prompts are lists of token ids, or texts of as many words if the load is text. The i-th request has the shared
    prefix number i modulo their number. With max_model_len an output has at most half of it, and the prompt at most the
    rest, but at least one token after its prefix.
    """
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
    """Return `count` random token ids, or indices into WORDS if the load is text.

    Ids are from 300, or from half the vocabulary if that is less.
    """
    if load.text:
        return generator.integers(0, len(WORDS), count).tolist()
    return generator.integers(min(300, load.vocab_size // 2), load.vocab_size, count).tolist()


def _lengths(load: Load, generator: np.random.Generator, length: int) -> list[int]:
    """Return a random length for each request: uniform, within range_ratio around `length`, or log-normal with `length`
    as the median.

    Lengths are at least 1, log-normal ones at least 2. "fixed" returns `length` for all.
    """
    if load.lengths == "uniform":
        low, high = math.ceil(length * (1 - load.range_ratio)), math.floor(length * (1 + load.range_ratio))
        values = generator.integers(max(1, low), max(1, high) + 1, load.num_prompts)
    elif load.lengths == "lognormal":
        values = np.clip(generator.lognormal(np.log(length), SIGMA, load.num_prompts), 2, None).astype(int)
    else:
        return [length] * load.num_prompts
    return values.tolist()


def arrivals(count: int, rate: float, burstiness: float = 1.0, seed: int = 0) -> list[float]:
    """Return sending times of `count` requests, in seconds after the start, ascending. The last one is at count / rate.

    rate: requests per second; inf sends all at once. burstiness: shape of the gamma distribution of the gaps; 1 is
    Poisson, smaller values give bursts. seed: seed of the random numbers.
    """
    if math.isinf(rate):
        return [0.0] * count
    gaps = np.random.default_rng(seed).gamma(burstiness, 1.0, count)
    times = np.cumsum(gaps)
    # Scaled so that the last request is sent at count / rate: all runs of one rate offer the same load.
    return (times * (count / rate / times[-1])).tolist()


@dataclass(frozen=True)
class Traffic:
    """Destination and form of the requests.

    Attributes:
      server: where they are sent.
      route: completions or chat/completions.
      model: name of the model in requests.
      fields: additional fields of every request body.
      timeout: seconds that a request may take; None for no limit.
    """

    server: Server
    route: str
    model: str
    fields: dict[str, Any]
    timeout: float | None = None

    def body(self, planned: Planned) -> dict[str, Any]:
        """Return the JSON body of a streamed request; `fields` replace the values set here. A chat has one user
        message.
        """
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
class LoadResult:
    """Result of a load.

    Attributes:
      seconds: from the start until the last response had ended.
      samples: one for each request, in their order.
      lags: seconds by which each request was sent too late; 0 with a limit of open requests.
      cpu_seconds: CPU time of this process in the meantime.
    """

    seconds: float
    samples: list[Sample]
    lags: list[float]
    cpu_seconds: float


async def send(
    traffic: Traffic, planned: Sequence[Planned], times: Sequence[float], max_concurrency: int | None = None
) -> LoadResult:
    """Send every request at its time and wait for all responses; return one sample for each, in the order of `planned`.

    Failures are recorded in the samples. times: one for each request, seconds after the start, ascending.
    max_concurrency: limit of open requests, None for no limit. With a limit, the time of a request that had to wait
    begins when it is sent, and the lags of all requests are 0. If this is cancelled, open requests are cancelled too
    and their connections closed.
    """
    connections = Connections(traffic.server)
    places = asyncio.Semaphore(max_concurrency) if max_concurrency else None
    lags = [0.0] * len(planned)
    # Bodies are built in advance, so that building them does not disturb the measurement.
    bodies = [traffic.body(request) for request in planned]
    cpu, start = time.process_time(), time.perf_counter()

    async def one(number: int) -> Sample:
        """Send a request now, or once fewer than max_concurrency are open; return its sample."""
        if places is None:
            lags[number] = time.perf_counter() - start - times[number]
            return await stream(connections, "/" + traffic.route, bodies[number], traffic.timeout)
        async with places:
            return await stream(connections, "/" + traffic.route, bodies[number], traffic.timeout)

    tasks = []
    try:
        for number, at in enumerate(times):
            # Sleeps even for 0 s, so that started tasks get to run.
            await asyncio.sleep(max(0.0, start + at - time.perf_counter()))
            tasks.append(asyncio.create_task(one(number)))
        samples = await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        connections.close()
    return LoadResult(time.perf_counter() - start, list(samples), lags, time.process_time() - cpu)
