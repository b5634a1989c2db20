"""A batch of prompts answered together in this process, with timings.

    python examples/offline_batch.py [MODEL]

MODEL is a GGUF file, a Hugging Face folder or a hub id; by default the embedded SmolLM2-135M-Instruct. The
first start compiles for a minute or two; later ones load the compiled steps.
"""

import sys

from jaxengine import LLM, SamplingParams

PROMPTS = ["The capital of France is", "The largest planet is", "Water boils at", "The opposite of hot is"]

llm = LLM(*sys.argv[1:])
params = SamplingParams(temperature=0.0, max_tokens=8)

# All prompts are one continuous batch; results come in the order of the prompts.
for output in llm.generate(PROMPTS, params, use_tqdm=False):
    (completion,) = output.outputs
    print(f"{output.prompt}{completion.text!r}  ({completion.finish_reason}, {len(completion.token_ids)} tokens)")

# One SamplingParams for each prompt; a seed makes draws repeatable, whatever else runs in the batch.
draws = [SamplingParams(temperature=0.8, seed=seed, max_tokens=6) for seed in (1, 1, 2)]
for draw, output in zip(draws, llm.generate(["Once upon a time"] * 3, draws, use_tqdm=False), strict=True):
    print(f"seed {draw.seed}: {output.outputs[0].text!r}")

metrics = {metric.name: metric.value for metric in llm.get_metrics()}
print(f"{metrics['jaxengine:compilations_since_ready']:.0f} compilations since ready")
