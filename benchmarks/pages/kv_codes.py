"""Loss of exactness, and saving of memory, by a KV cache of codes (int8, fp8), on the default model in float32.

The recorded workloads with their greedy continuations run through engines that differ in kv_cache_dtype, each with the
same bytes for its pool. For every token of the continuations: whether it is still the likeliest after the tokens before
it, and how far its log-probability is from that with a cache of float32. With --only, the file's rows of other dtypes
are kept.
"""

from __future__ import annotations

from argparse import Namespace

import numpy as np

from benchmarks.engines import engine_options
from benchmarks.harness import Option
from benchmarks.recorder import Recorder, Row
from jaxengine import LLM, SamplingParams
from jaxengine.bench.workloads import NAMES, recorded
from jaxengine.results import machine

EXACT = "auto"
KINDS = ("bfloat16", "int8_per_token_head", "int8", "fp8_per_token_head", "fp8", "fp8_e5m2")
OPTIONS = {"only": Option(KINDS, "of the cache's numbers, in addition to float32", choices=KINDS, metavar="KIND")}
ENGINE = engine_options(
    dtype="float32",
    max_model_len=1536,
    max_num_seqs=8,
    max_num_batched_tokens=512,
    kv_cache_memory_bytes=1 << 28,
    enable_prefix_caching=False,
)


def scored(llm: LLM, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return (log-probability f64[n], whether it is the most likely token) of every token of a workload's recorded
    continuations.

    name: of the workload.
    """
    workload = recorded(name)
    prompts = [{"prompt_token_ids": [*p, *r]} for p, r in zip(workload.prompts, workload.reference, strict=True)]
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    logprobs, best = [], []
    for output, prompt in zip(llm.generate(prompts, params, use_tqdm=False), workload.prompts, strict=True):
        for entry in (output.prompt_logprobs or [])[len(prompt) :]:
            (told,) = (entry or {}).values()
            logprobs.append(told.logprob)
            best.append(told.rank == 1)
    return np.array(logprobs), np.array(best)


def measure(kind: str, exact: dict[str, np.ndarray]) -> Row:
    """Measure one kv_cache_dtype with its own engine; return a row: tokens in its pool, and for each text the share of
    the recorded tokens that are the most likely ones, and the mean absolute error of the recorded tokens'
    log-probabilities.

    exact: log-probabilities to compare with, by text. Those that it lacks are added to it. Numbers are rounded.
    """
    llm = LLM(**ENGINE, kv_cache_dtype=kind)
    plan = llm.core.runner.plan
    row = {"kv_cache_dtype": kind, "tokens in 256 MiB": plan.num_pages * plan.page_size, "cpu": machine()["cpu"]}
    for name in NAMES:
        logprobs, best = scored(llm, name)
        exact.setdefault(name, logprobs)
        row[f"{name} agree"] = round(float(best.mean()), 4)
        row[f"{name} mean error"] = round(float(np.abs(logprobs - exact[name]).mean()), 5)
    llm.core.shutdown()
    return row


def run(args: Namespace, recorder: Recorder) -> None:
    exact = {}
    if set(args.only) != set(KINDS):
        recorder.take_over()
    for kind in (EXACT, *args.only):
        recorder.add(measure(kind, exact), ("kv_cache_dtype",))
