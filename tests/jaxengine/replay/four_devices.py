"""Records steps on four CPU devices and runs one again; arguments are a folder for them and one for programs."""

from __future__ import annotations

import sys
from pathlib import Path

import jax

jax.config.update("jax_num_cpu_devices", 4)

from jaxengine import LLM, SamplingParams  # noqa: E402
from jaxengine.replay.replay import replay  # noqa: E402
from tests.conftest import TINY_OPTIONS  # noqa: E402
from tests.fixtures.drawn_weights import checkpoint  # noqa: E402

OPTIONS = TINY_OPTIONS | {"max_model_len": 64, "block_size": 8, "max_num_seqs": 2, "max_num_batched_tokens": 8}
PARALLEL = {"tensor_parallel_size": 2, "data_parallel_size": 2}

if __name__ == "__main__":
    folder, cache = Path(sys.argv[1]), sys.argv[2]
    own = {"model": str(checkpoint("llama")), "record_steps": folder, "compile_cache_dir": cache}
    llm = LLM(**OPTIONS | PARALLEL | own)
    params = SamplingParams(max_tokens=4, ignore_eos=True, temperature=0.8, seed=3, frequency_penalty=0.4)
    prompts = [{"prompt_token_ids": [5, 6, 7]}, {"prompt_token_ids": [9, 2]}, {"prompt_token_ids": [8] * 9}]
    llm.generate(prompts, params, use_tqdm=False)
    report = replay(folder, 3, compile_cache_dir=cache)
    print(*report.lines, sep="\n")
    sys.exit(report.status)
