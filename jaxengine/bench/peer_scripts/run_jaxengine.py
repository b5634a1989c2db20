"""Runs jaxengine under the protocol of its peers. Variants: float32, bfloat16, and q4_1 for the file as it is.

Each workload starts with an empty prefix cache. `share_prefix` false starts an engine without prefix caching.
"""

from __future__ import annotations

import sys
from pathlib import Path

from peer import Measured, Workload, serve

# The engine measured is the one this file belongs to, installed or not.
sys.path.insert(0, str(Path(__file__).resolve().parents[3]))


def load(job):
    """Load the engine of a job; return (its version, function that runs one workload).

    Variant q4_1 keeps the file's quantised weights; others are dequantised to their dtype. There is one engine at a
    time: a workload with another `share_prefix` replaces it.
    """
    import jaxengine
    from jaxengine.bench import engine_run, workloads

    engines = {}
    kept = {"dtype": "float32", "quantization": "gguf"} if job["variant"] == "q4_1" else {"dtype": job["variant"]}

    def engine(prefix_caching: bool) -> jaxengine.LLM:
        """Return an engine with or without prefix caching: the current one, or a new one in its place."""
        if prefix_caching not in engines:
            engines.clear()
            engines[prefix_caching] = jaxengine.LLM(
                model=job["gguf"],
                enable_prefix_caching=prefix_caching,
                max_model_len=2048,
                skip_tokenizer_init=True,
                **kept,
                **job.get("options", {}),
            )
        return engines[prefix_caching]

    def run(workload: Workload) -> Measured:
        """Run a workload with an empty prefix cache; return seconds, output tokens and the mean time to first token,
        None if unknown.
        """
        prompts = tuple(map(tuple, workload["prompts"]))
        wanted = workloads.Workload("", prompts, (workload["max_tokens"],) * len(prompts))
        done = engine_run.run_workload(engine(workload["share_prefix"]), wanted)
        first = done.first_token_seconds
        mean = sum(first) / len(first) if first else None
        return {"seconds": done.seconds, "output_tokens": done.output_tokens, "first_token_seconds": mean}

    engine(True)
    return jaxengine.__version__, run


serve(load)
