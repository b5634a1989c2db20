"""What a cache of codes costs in exactness and saves in memory, of the default model in float32.

    python -m benchmarks.kv_codes [--json FILE]

The recorded workloads with their greedy continuations run through engines that differ in kv_cache_dtype, each with the
same bytes for its pool. Of every token of the continuations: whether it is still the likeliest after those before it,
and how far its log-probability is from that with a cache of float32.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np

from jaxengine import LLM, SamplingParams
from jaxengine.bench.report import table, write_json
from jaxengine.bench.workloads import NAMES, recorded

KINDS = ("auto", "bfloat16", "int8", "fp8", "fp8_e5m2")
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


def run() -> list[dict[str, Any]]:
    rows, exact = [], {}
    for kind in KINDS:
        llm = LLM(**OPTIONS, kv_cache_dtype=kind)
        plan = llm.core.runner.plan
        row = {"kv_cache_dtype": kind, "tokens in 256 MiB": plan.num_pages * plan.page_size}
        for name in NAMES:
            logprobs, best = scored(llm, name)
            exact.setdefault(name, logprobs)
            row[f"{name} agree"] = round(float(best.mean()), 4)
            row[f"{name} mean error"] = round(float(np.abs(logprobs - exact[name]).mean()), 5)
        rows.append(row)
        print(table(rows), flush=True)
        del llm
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", help="write the rows there")
    args = parser.parse_args()
    write_json(args.json, {"rows": run()})


if __name__ == "__main__":
    main()
