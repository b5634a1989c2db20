"""How much one request with the largest legal value of a field slows the steps of other requests.

Microseconds of an `Engine.step` with a runner that does nothing: `before` with plain requests only, `beside` while one
request has the field at its largest, `after` when that one has ended. `before` is measured anew for every field, since
a machine's speed changes; each figure is the fastest of several rounds. A field that makes `after` slower than `before`
has left something behind (tests/jaxengine/engine/test_step_cost.py counts calls, and fails).
"""

from __future__ import annotations

import time
from argparse import Namespace
from typing import Any

import numpy as np

from benchmarks.harness import Option
from benchmarks.recorder import Recorder, Row
from jaxengine import SamplingParams
from jaxengine.bench.host import FreeRunner
from jaxengine.config.command_line import positive_int
from jaxengine.engine.engine import Engine
from jaxengine.requests.params.param_limits import MAX_BAD_WORDS_TOKENS
from jaxengine.scheduler.base.config import SchedulerConfig
from jaxengine.scheduler.base.request import FinishReason, Request
from jaxengine.scheduler.base.token_params import MAX_LOGPROB_TOKEN_IDS
from jaxengine.scheduler.batches.buckets import Buckets
from jaxengine.scheduler.batches.packing import Packer

VOCAB = 151_936
ROUNDS, STEPS = 5, 60
MAX_MODEL_LEN = 4096
OPTIONS = {"num_seqs": Option(64, "sequences running at once", kind=positive_int)}


def largest(vocab_size: int) -> dict[str, Any]:
    """Return the largest legal value of each field of SamplingParams that reaches the engine's loop, by field."""
    return {
        "presence_penalty": 2.0,
        "frequency_penalty": 2.0,
        "repetition_penalty": 1e20,
        "temperature": 2.0,
        "top_p": 0.999,
        "top_k": vocab_size,
        "min_p": 1.0,
        "seed": 2**63 - 1,
        "stop_token_ids": range(3, vocab_size - 1),
        "max_tokens": 90,
        "min_tokens": 90,
        "logprobs": 20,
        "prompt_logprobs": 20,
        "logprob_token_ids": list(range(MAX_LOGPROB_TOKEN_IDS)),
        "logit_bias": dict.fromkeys(range(vocab_size), 1.0),
        "allowed_token_ids": range(vocab_size),
    }


# bad_words with the most sequences that are allowed, and with the most different lengths.
BAD_WORDS = {
    "bad_words pairs": tuple((1 + index % 5, 3 + index % 120) for index in range(MAX_BAD_WORDS_TOKENS // 2)),
    "bad_words lengths": tuple((5,) * length for length in range(2, 45)),
}


class Steps:
    """An engine with a runner that does nothing, running `num_seqs - 1` plain requests."""

    def __init__(self, num_seqs: int):
        config = SchedulerConfig(
            num_pages=num_seqs * MAX_MODEL_LEN // 16,
            page_size=16,
            max_num_seqs=num_seqs,
            max_num_batched_tokens=512,
            max_model_len=MAX_MODEL_LEN,
        )
        packer = Packer(Buckets(num_seqs, 512, [], []), 16)
        tokens = np.random.default_rng(0).integers(VOCAB - 1, VOCAB, (64, 1, num_seqs)).astype(np.int32)
        runner: Any = FreeRunner(config, packer, tokens)
        runner.vocab_size = VOCAB
        runner.set_token_counts = lambda slot, prompt, output: None
        self.engine, self._number = Engine(runner), 0
        for _ in range(num_seqs - 1):
            self.add(SamplingParams(temperature=0))

    def add(self, params: SamplingParams, bad_words: Any = ()) -> Request:
        """Queue a request with these parameters that does not end by itself, and return it."""
        prompt = np.random.default_rng(self._number).integers(3, 30_000, 20).astype(np.int32)
        request = Request(
            str(self._number),
            prompt,
            params.token_params(bad_words),
            MAX_MODEL_LEN - 100,
            stop_token_ids=tuple(params.stop_token_ids or ()),
        )
        self._number += 1
        self.engine.queue([request])
        return request

    def microseconds(self) -> float:
        """Run four steps, then ROUNDS rounds of STEPS steps; return the microseconds per step of the fastest round. It
        is rounded.
        """
        for _ in range(4):
            self.engine.step()
        best = float("inf")
        for _ in range(ROUNDS):
            start = time.perf_counter()
            for _ in range(STEPS):
                self.engine.step()
            best = min(best, (time.perf_counter() - start) / STEPS)
        return round(best * 1e6, 1)


def measure(field: str, num_seqs: int) -> Row:
    """Return the row of a field: microseconds of a step before, while and after a request has its largest value.

    field: key of `largest` or of BAD_WORDS.
    """
    steps = Steps(num_seqs)
    before = steps.microseconds()
    values = largest(VOCAB)
    params = SamplingParams(**{"temperature": 0, "max_tokens": 100, field: values[field]} if field in values else {})
    request = steps.add(params, BAD_WORDS.get(field, ()))
    beside = steps.microseconds()
    steps.engine.finish(request, FinishReason.ABORT)
    return {"field": field, "before": before, "beside": beside, "after": steps.microseconds()}


def run(args: Namespace, recorder: Recorder) -> None:
    for field in (*largest(VOCAB), *BAD_WORDS):
        if field != "prompt_logprobs":  # those are a program of the steps that compute the prompt, and of no other
            recorder.add(measure(field, args.num_seqs))
