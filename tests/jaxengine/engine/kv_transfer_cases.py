"""A prefilling engine in a process of its own.

    python -m tests.jaxengine.engine.kv_transfer_cases OPTIONS

reads prompts from its input, JSON lists of token ids, and prints the kv_transfer_params of each.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from jaxengine import LLM, SamplingParams
from tests.jaxengine.engine.offload_cases import params_of

DECODE = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


def connector(role: str, transport: str, folder: Path, **more: Any) -> dict[str, Any]:
    """Options of an engine that hands over pages. folder: for the key, and for pages."""
    key = folder / "key"
    if not key.exists():
        key.write_text("a secret of all engines")
        key.chmod(0o600)
    extra = {"transport": transport, "kv_lease_duration": 60}
    if transport == "folder":
        extra["shared_storage_path"] = str(folder / "pages")
    config = {"kv_connector": "NixlConnector", "kv_role": role, "kv_ip": "127.0.0.1", "kv_port": 0}
    config["kv_connector_extra_config"] = extra
    return {"cluster_key_file": str(key), "kv_transfer_config": {**config, "kv_buffer_size": 5e7, **more}}


def asking(index: int, max_tokens: int, params: dict[str, Any]) -> SamplingParams:
    """How the tokens of a prompt are chosen, with kv_transfer_params."""
    found = params_of(index, max_tokens)
    found.extra_args = {"kv_transfer_params": json.loads(json.dumps(params))}
    return found


def prefill(llm: LLM, prompt: list[int], index: int = 0) -> Any:
    """kv_transfer_params of the answer to a prompt that another engine goes on with."""
    (output,) = llm.generate([{"prompt_token_ids": prompt}], asking(index, 1, DECODE), use_tqdm=False)
    return output.kv_transfer_params


class Producer:
    """The process."""

    def __init__(self, options: dict[str, Any]):
        command = [sys.executable, "-m", "tests.jaxengine.engine.kv_transfer_cases", json.dumps(options)]
        env = os.environ | {"JAX_PLATFORMS": "cpu"}
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(command, env=env, cwd=Path(__file__).parents[3], **pipes)

    def prefill(self, prompt: list[int]) -> Any:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(prompt) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


def main() -> None:
    with LLM(**json.loads(sys.argv[1])) as llm:
        for line in sys.stdin:
            print(json.dumps(prefill(llm, json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
