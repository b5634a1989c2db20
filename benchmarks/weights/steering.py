"""Cost of steering: steps of requests that each add vectors of their own, compared with the same steps without.

Three kinds of steps on the default model, in turns: of an engine without the option, of one with it whose requests add
nothing, and of the same one where every request adds its own vector after every layer. A row has the decoded tokens of
all requests in a second, by the round with the most of them, and by the processor's seconds, which other programs on
the machine change less; ratios are to the engine without the option.

A last row counts the requests whose tokens, or bits of log-probabilities, zero vectors change.
"""

from __future__ import annotations

import logging
import time
from argparse import Namespace
from typing import Any, NamedTuple

import numpy as np

from benchmarks.engines import engine_options
from benchmarks.harness import Option, shared
from benchmarks.recorder import Recorder
from jaxengine import LLM, SamplingParams

OPTIONS = {
    "requests": Option(64, "that run at once, each with vectors of its own"),
    "steps": Option(40, "decode steps of a round"),
    **shared(rounds=3),
}
ENGINE = engine_options(dtype="float32", max_model_len=1024, max_num_batched_tokens=64, kv_cache_memory_bytes=1 << 30)
AT = "residual:*"


class Seconds(NamedTuple):
    """Seconds of a decode step of all requests: `clock` is elapsed time, `processor` CPU time of this process."""

    clock: float
    processor: float


def vectors_of(llm: LLM, number: int, scale: float) -> list[dict[str, Any]]:
    """Return the field `steer` of request `number`: a random vector [D] times `scale`, added after all layers.

    The number is the seed of the vector.
    """
    drawn = np.random.default_rng(number).standard_normal(llm.core.inputs.model_config.hidden_size)
    return [{"at": AT, "vector": drawn * scale}]


def step_seconds(llm: LLM, args: Namespace, *, steered: bool) -> Seconds:
    """Run one round of requests, which add vectors if `steered`; return the median seconds of its last `args.steps`
    steps.
    """
    core = llm.core
    for number in range(args.requests):
        steer = vectors_of(llm, number, 0.01) if steered else None
        count = args.steps + 20
        params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False, steer=steer)
        core.add(core.inputs.prepare({"prompt_token_ids": [100 + number]}, params))
    ends = [(time.perf_counter(), time.process_time())]
    while core.has_unfinished:
        core.step()
        ends.append((time.perf_counter(), time.process_time()))
    clock, processor = np.median(np.diff(ends[-args.steps :], axis=0), axis=0)
    return Seconds(float(clock), float(processor))


def changed_by_zeros(llm: LLM, args: Namespace) -> int:
    """Return the number of requests that get other tokens, or other bits of log-probabilities, with vectors of zeros
    than without vectors.
    """

    def answers(scale: float | None) -> list[tuple[list[int], bytes]]:
        """Return (token ids, bits of the log-probabilities) of each request; scale: of its vector, None for no
        vector.
        """
        params = [
            SamplingParams(
                temperature=number % 2,
                seed=number,
                max_tokens=args.steps,
                ignore_eos=True,
                logprobs=0,
                steer=None if scale is None else vectors_of(llm, number, scale),
            )
            for number in range(args.requests)
        ]
        outputs = llm.generate([[100 + number] for number in range(args.requests)], params, use_tqdm=False)
        found = [each.outputs[0] for each in outputs]
        scores = [[each.logprob for own in one.logprobs or () for each in own.values()] for one in found]
        return [
            (list(one.token_ids), np.array(own, np.float32).tobytes()) for one, own in zip(found, scores, strict=True)
        ]

    return sum(one != other for one, other in zip(answers(None), answers(0.0), strict=True))


def run(args: Namespace, recorder: Recorder) -> None:
    """Measure alternately steps of an engine without the option `steer`, of one with it and no vectors, and of that
    with a vector in each request; add a row for the fastest round of each, then a row for vectors of zeros. Numbers are
    rounded.
    """
    logging.getLogger("jaxengine").setLevel(logging.ERROR)
    plain = LLM(**ENGINE, max_num_seqs=args.requests)
    steered = LLM(**ENGINE, max_num_seqs=args.requests, steer=[AT])
    kinds = {"without the option": (plain, False), "no vectors": (steered, False), "a vector each": (steered, True)}
    rounds: dict[str, list[Seconds]] = {name: [] for name in kinds}
    for _ in range(args.rounds):
        for name, (llm, adds) in kinds.items():
            rounds[name].append(step_seconds(llm, args, steered=adds))
    least = {
        name: Seconds(min(each.clock for each in found), min(each.processor for each in found))
        for name, found in rounds.items()
    }
    first = least["without the option"]
    for name, seconds in least.items():
        recorder.add(
            {
                "requests": f"{args.requests}, {name}",
                "tokens/s": round(args.requests / seconds.clock, 1),
                "ratio": round(first.clock / seconds.clock, 3),
                "tokens/processor s": round(args.requests / seconds.processor, 1),
                "processor ratio": round(first.processor / seconds.processor, 3),
            }
        )
    changed = changed_by_zeros(steered, args)
    recorder.add({"requests": f"{args.requests}, zero vectors", "changed": changed, "kept": changed == 0})
