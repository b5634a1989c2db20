"""Cost of a tight KV pool: tokens that a trace computes, over those that it would compute with room for everything.

Requests all arrive at once and run through the real scheduler with a model that costs nothing, with pages of 16 tokens
and steps of 512. `long` has prompts of which the pool holds little more than the longest; `chat` has log-normal lengths
in a fifth of the pages that the running requests need. `default` uses the prefix cache; `scored` also asks for the
prompt's logprobs, for which a cached prefix is computed again.
"""

from __future__ import annotations

import logging
from argparse import Namespace

import numpy as np

from benchmarks.harness import Option
from benchmarks.recorder import Recorder, Row
from jaxengine.scheduler.base.config import SchedulerConfig
from jaxengine.scheduler.base.request import Request
from jaxengine.scheduler.base.token_params import TokenParams
from jaxengine.scheduler.scheduler import Scheduler

PAGE_SIZE, MAX_MODEL_LEN, MAX_NUM_SEQS = 16, 4096, 64
# Tokens chosen are random and above it, so that no request stops by itself.
STOP_TOKEN_ID = 2
OPTIONS: dict[str, Option] = {}
CASES = {
    "no cache": (False, None, (None,)),
    "default": (True, None, (None,)),
    "scored": (True, 0, (None,)),
    "window of 512 in half": (False, None, (None, 512)),
}


def lengths(trace: str, generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray, int]:
    """Return (prompt lengths, output lengths, pages of a pool with one cache group) of a trace.

    trace: "long", 60 even draws; else "chat", 400 lognormal ones cut to 8 to 1,800.
    """
    if trace == "long":
        prompts, outputs = generator.integers(1500, 3600, 60), generator.integers(16, 200, 60)
        return prompts, outputs, (MAX_MODEL_LEN + 200) // PAGE_SIZE
    prompts, outputs = (
        np.clip(generator.lognormal(np.log(mean), 0.8, 400), 8, 1800).astype(int) for mean in (160, 240)
    )
    return prompts, outputs, MAX_NUM_SEQS * int((prompts + outputs).mean()) // PAGE_SIZE // 5


def measure(trace: str, case: str) -> Row:
    """Run a trace to its end in a scheduler without a model; return its row: the tokens that were computed, how many
    they would be without preemption and prefix cache ("ideal"), their ratio, and the number of preemptions. trace:
    "long" or "chat". case: key of CASES. The ratio is rounded.
    """
    generator = np.random.default_rng(7)
    caching, prompt_logprobs, windows = CASES[case]
    prompts, outputs, num_pages = lengths(trace, generator)
    config = SchedulerConfig(
        num_pages=num_pages * len(windows),
        page_size=PAGE_SIZE,
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=512,
        max_model_len=MAX_MODEL_LEN,
        enable_prefix_caching=caching,
        windows=windows,
    )
    scheduler, params = Scheduler(config), TokenParams(temperature=0.0, prompt_logprobs=prompt_logprobs)
    for index, (length, count) in enumerate(zip(prompts.tolist(), outputs.tolist(), strict=True)):
        ids = generator.integers(100, 30_000, length).astype(np.int32)
        scheduler.add_request(Request(str(index), ids, params, count, stop_token_ids=(STOP_TOKEN_ID,)))
    computed = 0
    while scheduler.num_unfinished:
        step = scheduler.schedule()
        computed += step.num_tokens
        scheduler.update(step, generator.integers(100, 30_000, (1, max(1, step.num_rows))).astype(np.int32))
    ideal = int((prompts + outputs - 1).sum())
    return {
        "trace": trace,
        "case": case,
        "ideal": ideal,
        "computed": computed,
        "ratio": round(computed / ideal, 3),
        "preemptions": scheduler.num_preemptions,
    }


def run(args: Namespace, recorder: Recorder) -> None:
    logging.getLogger("jaxengine.scheduler").setLevel(logging.ERROR)  # preemptions are what is measured
    for trace in ("long", "chat"):
        for case in CASES:
            recorder.add(measure(trace, case))
