"""Whether memory grows with the number of requests served.

The model has random weights of a few KiB, so that a request costs little and what it leaves behind shows: first offline
in a process of its own, then with `jaxengine serve` over sockets, where the engine's process and the API process are
watched. A row is a tenth of the requests: resident anonymous memory at its end, and its growth since the previous row
per 1,000 requests. The first rows fill rings of a fixed length (the timeline, the latencies shown on the status page);
after them the growth has to be near 0.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import tempfile
from argparse import Namespace
from collections.abc import Iterator
from typing import Any

from benchmarks.engines import engine_options, serving, write_config
from benchmarks.harness import Option
from benchmarks.processes import command, memory
from benchmarks.recorder import Recorder

ROWS = 10
SIZES = (64, 80, 2, 4, 2, 128, 256)
ENGINE = engine_options(
    (8, 32),
    (256,),
    load_format="dummy",
    skip_tokenizer_init=True,
    max_model_len=96,
    max_num_seqs=32,
    max_num_batched_tokens=256,
    block_size=4,
    num_gpu_blocks_override=800,
)
OPTIONS = {
    "requests": Option(100_000),
    "modes": Option(("offline", "served"), choices=("offline", "served")),
}


def run(args: Namespace, recorder: Recorder) -> None:
    """Serve `args.requests` requests in each mode; add a row for each tenth and process: its KiB, and by how many it
    grew per 1,000 requests since the tenth before, None for the first. Growth is rounded.
    """
    with tempfile.TemporaryDirectory() as folder:
        write_config(folder, SIZES, tie_word_embeddings=True)
        for mode in args.modes:
            readings = served(folder, args.requests) if mode == "served" else _offline_elsewhere(folder, args.requests)
            before: dict[str, int] = {}
            for number, held in readings:
                for process, size in held.items():
                    row = {"mode": mode, "process": process, "requests": number, "KiB": size >> 10}
                    growth = (size - before.get(process, size)) / (args.requests / ROWS) * 1000 / 1024
                    recorder.add({**row, "KiB per 1,000": round(growth, 1) if process in before else None})
                before = held


def offline(folder: str, num_requests: int) -> None:
    """Serve `num_requests` with `LLM.generate`, a hundred at a time; after each tenth print [requests so far, resident
    anonymous bytes] as JSON.

    folder: of the model.
    """
    from jaxengine import LLM, SamplingParams

    llm = LLM(folder, **ENGINE)
    each = num_requests // ROWS
    for row in range(ROWS):
        end = (row + 1) * each
        for first in range(row * each, end, 100):
            prompts = [{"prompt_token_ids": _prompt(number)} for number in range(first, min(first + 100, end))]
            llm.generate(prompts, SamplingParams(**_fields(first)), use_tqdm=False)
        print(json.dumps([end, memory(kind="RssAnon")]), flush=True)


def _offline_elsewhere(folder: str, num_requests: int) -> Iterator[tuple[int, dict[str, int]]]:
    """Run `offline` in a separate process; yield (requests so far, {"LLM": resident anonymous bytes}) for each line it
    prints.

    Raises SystemExit if the process fails.
    """
    here = command(offline, folder=folder, num_requests=num_requests)
    with subprocess.Popen(here, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            number, size = json.loads(line)
            yield number, {"LLM": size}
    if process.returncode:
        raise SystemExit(f"the process that serves offline ended with status {process.returncode}")


def served(folder: str, num_requests: int) -> Iterator[tuple[int, dict[str, int]]]:
    """Start `jaxengine serve` and stream `num_requests` over HTTP; after each tenth yield (requests so far, resident
    anonymous bytes of "engine" and "API").

    As many requests run at once as the engine allows. folder: of the model.
    """
    with serving({**ENGINE, "model": folder}) as running:
        each = num_requests // ROWS
        for row in range(ROWS):
            asyncio.run(_send(running.base_url, row * each, each))
            (api,) = running.api_pids
            yield (row + 1) * each, {"engine": memory(running.engine_pid, "RssAnon"), "API": memory(api, "RssAnon")}


async def _send(url: str, first: int, count: int) -> None:
    """Stream requests `first` to `first + count - 1` from as many concurrent clients as the engine has sequences.

    url: of the server, without /v1. Raises SystemExit at the first request that fails.
    """
    from jaxengine.bench.serve_client import Connections, Server, get_json, stream

    server = Server.at(f"{url}/v1")
    model = (await get_json(server, "/models"))["data"][0]["id"]
    connections, numbers = Connections(server), iter(range(first, first + count))

    async def client() -> None:
        for number in numbers:
            body = {"model": model, "prompt": _prompt(number), "stream": True, "return_token_ids": True}
            sample = await stream(connections, "/completions", body | _fields(number), 120.0)
            if sample.error not in (None, "empty"):  # without a tokenizer there is no text
                raise SystemExit(f"request {number}: {sample.error} {sample.message}")

    await asyncio.gather(*(client() for _ in range(ENGINE["max_num_seqs"])))
    connections.close()


def _prompt(number: int) -> list[int]:
    """Return six token ids for request `number`, such that some prefixes are shared between requests and most are
    not.
    """
    return [(number * 31 + place * (number % 97 + 1)) % 120 + 3 for place in range(6)]


def _fields(number: int) -> dict[str, Any]:
    """Return sampling fields for request `number`. top_k varies between requests, and every 300th requests logprobs."""
    return {"max_tokens": 2, "temperature": 1.0, "top_k": 5 + number % 7, "logprobs": 1 if number % 300 == 0 else None}
