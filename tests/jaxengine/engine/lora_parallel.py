"""Engines with adapters over several devices: run as a module it prints the tokens of each case.

    python -m tests.jaxengine.engine.lora_parallel JOB

needs four devices (XLA_FLAGS=--xla_force_host_platform_device_count=4). JOB: JSON of model, cases (options by name),
prompts, adapters (name, number and path of each prompt's, or null).
"""

from __future__ import annotations

import json
import sys

from jaxengine import LLM, LoRARequest, SamplingParams


def main() -> None:
    job = json.loads(sys.argv[1])
    loras = [None if each is None else LoRARequest(*each) for each in job["adapters"]]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    for name, options in job["cases"].items():
        with LLM(job["model"], **options) as llm:
            outputs = llm.generate(job["prompts"], params, use_tqdm=False, lora_request=loras)
            count = llm.core.runner.compiles.count
        tokens = [list(output.outputs[0].token_ids) for output in outputs]
        print(json.dumps({"case": name, "tokens": tokens, "compilations": count}), flush=True)


if __name__ == "__main__":
    main()
