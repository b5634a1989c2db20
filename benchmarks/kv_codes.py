"""What a cache of codes costs in exactness and saves in memory, of the default model in float32.

    python -m benchmarks.kv_codes [--only int8,fp8] [--json FILE]

The recorded workloads with their greedy continuations run through engines that differ in kv_cache_dtype, each with the
same bytes for its pool. Of every token of the continuations: whether it is still the likeliest after those before it,
and how far its log-probability is from that with a cache of float32. With --only, rows of others stay in FILE.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

from jaxengine import LLM, SamplingParams
from jaxengine.bench.report import machine, table, write_json
from jaxengine.bench.workloads import NAMES, recorded

EXACT = "auto"
KINDS = ("bfloat16", "int8_per_token_head", "int8", "fp8_per_token_head", "fp8", "fp8_e5m2")
OPTIONS = {
    "dtype": "float32",
    "max_model_len": 1536,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 512,
    "kv_cache_memory_bytes": 1 << 28,
    "compilation_config": {"cudagraph_capture_sizes": [], "prefill_sizes": []},
    "enable_prefix_caching": False,
    "disable_log_stats": True,
}


def scored(llm: LLM, name: str) -> tuple[np.ndarray, np.ndarray]:
    """(log-probability, whether it is the likeliest) of every token of the recorded continuations of a workload."""
    workload = recorded(name)
    prompts = [{"prompt_token_ids": [*p, *r]} for p, r in zip(workload.prompts, workload.reference, strict=True)]
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    logprobs, best = [], []
    for output, prompt in zip(llm.generate(prompts, params, use_tqdm=False), workload.prompts, strict=True):
        for entry in output.prompt_logprobs[len(prompt) :]:
            (told,) = entry.values()
            logprobs.append(told.logprob)
            best.append(told.rank == 1)
    return np.array(logprobs), np.array(best)


def measure(kind: str, exact: dict[str, np.ndarray]) -> dict[str, Any]:
    """One row; the log-probabilities of the first are what those of others are compared with."""
    llm = LLM(**OPTIONS, kv_cache_dtype=kind)
    plan = llm.core.runner.plan
    row = {"kv_cache_dtype": kind, "tokens in 256 MiB": plan.num_pages * plan.page_size, "cpu": machine()["cpu"]}
    for name in NAMES:
        logprobs, best = scored(llm, name)
        exact.setdefault(name, logprobs)
        row[f"{name} agree"] = round(float(best.mean()), 4)
        row[f"{name} mean error"] = round(float(np.abs(logprobs - exact[name]).mean()), 5)
    llm.core.shutdown()
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="KIND,KIND", help=f"of {', '.join(KINDS)}")
    parser.add_argument("--json", metavar="FILE", help="write the rows there, after each")
    args = parser.parse_args()
    kinds = KINDS if args.only is None else args.only.split(",")
    if set(kinds) - set(KINDS):
        parser.error(f"--only is {args.only!r}; allowed: {', '.join(KINDS)}")
    rows, exact = {}, {}
    if args.only and args.json and Path(args.json).exists():
        rows = {row["kv_cache_dtype"]: row for row in json.loads(Path(args.json).read_text())["rows"]}
    for kind in (EXACT, *kinds):
        rows[kind] = measure(kind, exact)
        told = [rows[each] for each in (EXACT, *KINDS) if each in rows]
        print(table(told), flush=True)
        write_json(args.json, {"rows": told})


if __name__ == "__main__":
    main()
