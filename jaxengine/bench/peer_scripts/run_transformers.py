"""Runs Hugging Face transformers on torch: `generate` over static batches of at most 8, sorted by length, left-padded.

When the workload allows it, a prefix shared by all prompts is computed once and its cache repeated.
"""

from __future__ import annotations

import copy
import os
import time

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import transformers
from peer import Measured, Workload, serve

BATCH = 8


class FirstToken(transformers.generation.streamers.BaseStreamer):
    """Streamer that records when the first new token arrives: at the second `put`, because `generate` passes the prompt
    first.
    """

    def __init__(self):
        """Start without a token; `time` is None until the first new one, then seconds of time.perf_counter."""
        self.puts = 0
        self.time = None

    def put(self, value):
        """Count a call by `generate`, and record the time of the second one. value: ignored."""
        self.puts += 1
        if self.puts == 2:
            self.time = time.perf_counter()

    def end(self):
        pass


def load(job):
    """Load the model of a job, dequantised to the variant's dtype; return (versions, function that runs one workload).

    torch uses job["threads"] threads.
    """
    torch.set_num_threads(job["threads"])
    folder, name = os.path.split(job["gguf"])
    # Dequantised at load: packed weights would be unpacked in every matmul, which is slower than reading them unpacked.
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder,
        gguf_file=name,
        dtype=getattr(torch, job["variant"]),
        quantization_config=transformers.GgufConfig(dequantize=True),
    ).eval()

    def generate(prompts: list[list[int]], max_tokens: int, **options) -> int:
        """Generate exactly `max_tokens` tokens for each prompt of a batch, padded on the left; return the number of new
        tokens.

        options: options of `model.generate`.
        """
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        out = model.generate(
            ids,
            attention_mask=mask,
            do_sample=False,
            max_new_tokens=max_tokens,
            min_new_tokens=max_tokens,
            pad_token_id=0,
            **options,
        )
        return (out.shape[1] - width) * len(prompts)

    def shared(workload: Workload) -> int:
        """Compute the workload's shared prefix once, generate for all prompts from it, and return the number of new
        tokens.

        The prefix is read from the first prompt; all prompts run in one batch.
        """
        prompts = workload["prompts"]
        cache = transformers.DynamicCache(config=model.config)
        model(torch.tensor([prompts[0][: workload["prefix"]]]), past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache = copy.deepcopy(cache)
        cache.batch_repeat_interleave(len(prompts))
        return generate(prompts, workload["max_tokens"], past_key_values=cache)

    @torch.inference_mode()
    def run(workload: Workload) -> Measured:
        """Run a workload; return seconds, new tokens and, for a single prompt, the time to first token, else None.

        Prompts run in batches of BATCH, sorted by length, or all at once if they have the same length. A prefix that
        may be shared is computed once, for all prompts at once.
        """
        prompts = sorted(workload["prompts"], key=len)
        streamer = FirstToken() if len(prompts) == 1 else None
        start = time.perf_counter()
        if workload["prefix"] and workload["share_prefix"]:
            tokens = shared(workload)
        else:
            # Equal prompts need no padding: one batch of all of them is faster.
            size = len(prompts) if len(prompts[0]) == len(prompts[-1]) else BATCH
            batches = [prompts[at : at + size] for at in range(0, len(prompts), size)]
            tokens = sum(generate(batch, workload["max_tokens"], streamer=streamer) for batch in batches)
        seconds = time.perf_counter() - start
        first = streamer.time - start if streamer else None
        return {"seconds": seconds, "output_tokens": tokens, "first_token_seconds": first}

    return f"{transformers.__version__}, torch {torch.__version__}", run


serve(load)
