"""Whether memory grows with the requests served: python -m benchmarks.endurance [--requests 100000] [--json FILE].

A model of random weights and a few KiB, so that a request costs little and what one leaves behind shows: offline in a
process of its own, then by `jaxengine serve` over sockets, of which the engine's process and the API process are
watched. A row is a tenth of the requests: resident anonymous memory at its end, and how much of it came since the row
before, for 1,000 requests. The first rows fill rings of a fixed length (the timeline, the latencies shown on the status
page); after them the growth has to be near 0.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxengine.bench.report import machine, table, write_json

ROWS = 10
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
OPTIONS = {
    "load_format": "dummy",
    "skip_tokenizer_init": True,
    "max_model_len": 96,
    "max_num_seqs": 32,
    "max_num_batched_tokens": 256,
    "block_size": 4,
    "num_gpu_blocks_override": 800,
    "compilation_config": {"cudagraph_capture_sizes": [8, 32], "prefill_sizes": [256]},
    "disable_log_stats": True,
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.endurance", description=__doc__)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--modes", default="offline,served")
    parser.add_argument("--json", metavar="FILE", help="write the results there")
    parser.add_argument("--here", metavar="FOLDER", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.here:
        offline(args.here, args.requests)
        return 0
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(MODEL))
        for mode in args.modes.split(","):
            readings = served(folder, args.requests) if mode == "served" else _offline_elsewhere(folder, args.requests)
            before: dict[str, int] = {}
            for number, held in readings:
                for process, size in held.items():
                    row = {"mode": mode, "process": process, "requests": number, "KiB": size >> 10}
                    growth = (size - before.get(process, size)) / (args.requests / ROWS) * 1000 / 1024
                    rows.append({**row, "KiB per 1,000": round(growth, 1) if process in before else None})
                    print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
                before = held
    print(table(rows))
    write_json(args.json, {"rows": rows, "machine": machine()})
    return 0


def offline(folder: str, num_requests: int) -> None:
    """Serves by `LLM.generate`, a hundred at a time; a JSON line [number, bytes] after each row."""
    from jaxengine import LLM, SamplingParams

    llm = LLM(folder, **OPTIONS)
    each = num_requests // ROWS
    for row in range(ROWS):
        for first in range(row * each, (row + 1) * each, 100):
            prompts = [{"prompt_token_ids": _prompt(number)} for number in range(first, first + 100)]
            llm.generate(prompts, SamplingParams(**_fields(first)), use_tqdm=False)
        print(json.dumps([(row + 1) * each, held_by(os.getpid())]), flush=True)


def _offline_elsewhere(folder: str, num_requests: int) -> Iterator[tuple[int, dict[str, int]]]:
    command = [sys.executable, "-m", "benchmarks.endurance", "--here", folder, "--requests", str(num_requests)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            number, size = json.loads(line)
            yield number, {"LLM": size}
    if process.returncode:
        raise SystemExit(f"the process that serves offline ended with status {process.returncode}")


def served(folder: str, num_requests: int) -> Iterator[tuple[int, dict[str, int]]]:
    """Serves streams over HTTP, as many at once as run at once."""
    from tests.jaxengine.server.server_process import start_server

    running = start_server({**OPTIONS, "model": folder}, wait=600.0)
    try:
        each = num_requests // ROWS
        for row in range(ROWS):
            asyncio.run(_send(running.base_url, row * each, each))
            (api,) = running.api_pids
            yield (row + 1) * each, {"engine": held_by(running.engine_pid), "API": held_by(api)}
    finally:
        running.remove()


async def _send(url: str, first: int, count: int) -> None:
    from jaxengine.bench.serve_client import Connections, Server, get_json, stream

    server = Server.at(f"{url}/v1")
    model = (await get_json(server, "/models"))["data"][0]["id"]
    connections, numbers = Connections(server), iter(range(first, first + count))

    async def client() -> None:
        for number in numbers:
            body = {
                "model": model,
                "prompt": _prompt(number),
                "stream": True,
                "return_token_ids": True,
                **_fields(number),
            }
            sample = await stream(connections, "/completions", body, 120.0)
            if sample.error not in (None, "empty"):  # without a tokenizer there is no text
                raise SystemExit(f"request {number}: {sample.error} {sample.message}")

    await asyncio.gather(*(client() for _ in range(OPTIONS["max_num_seqs"])))
    connections.close()


def _prompt(number: int) -> list[int]:
    """Six tokens, so that some prefixes are shared and most are not."""
    return [(number * 31 + place * (number % 97 + 1)) % 120 + 3 for place in range(6)]


def _fields(number: int) -> dict[str, Any]:
    """Parameters that differ between requests; some with logprobs."""
    return {"max_tokens": 2, "temperature": 1.0, "top_k": 5 + number % 7, "logprobs": 1 if number % 300 == 0 else None}


def held_by(pid: int) -> int:
    """Bytes of anonymous memory that a process holds."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


if __name__ == "__main__":
    sys.exit(main())
