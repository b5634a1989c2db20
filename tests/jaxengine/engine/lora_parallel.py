"""Engines with adapters over several devices: run as a module it prints the tokens of each case.

    python -m tests.jaxengine.engine.lora_parallel JOB

needs four devices (XLA_FLAGS=--xla_force_host_platform_device_count=4). JOB: JSON of model, cases (options by name),
prompts, adapters (name, number and path of each prompt's, or null).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from jaxengine import LLM, LoRARequest, SamplingParams


def over_devices(job: dict[str, Any]) -> list[dict[str, Any]]:
    """What a process with four devices says of each case, in order: case, tokens, compilations."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4"
    done = subprocess.run(
        [sys.executable, "-m", "tests.jaxengine.engine.lora_parallel", json.dumps(job)],
        env=os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags},
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


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
