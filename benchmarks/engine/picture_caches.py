"""Where preprocessed images are kept in running servers, for each kind of cache (mm_processor_cache_type).

A tiny model is served as a user starts it. Measured for each kind: what GET /server_info says about it; the bytes of
pixels that are sent to the engine at an image's first and second use; resident memory of the API processes and the
engine's after a fifth of many distinct images and after all, ten times what fits into the cache; and what is left in
/dev/shm after the end.

The exit status is 1 if a second use sent pixels that it should not, more was kept than allowed, memory kept growing by
more than the bound, or something was left.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import tempfile
from argparse import Namespace
from pathlib import Path
from typing import Any

from benchmarks.engine.pictures import Client, picture, question
from benchmarks.engines import ask, engine_options, serving
from benchmarks.harness import Option
from benchmarks.processes import memory
from benchmarks.recorder import Recorder
from jaxengine.bench.serve_client import Sample
from jaxengine.config.inputs.encoder import KEY_REPLICATED, SHARED_MEMORY
from tests.fixtures.picture_checkpoints import whole_checkpoint
from tests.jaxengine.server.server_process import ServerProcess

OPTIONS = {
    "pictures": Option(1000, "distinct ones of each server"),
    "gb": Option(0.01, "mm_processor_cache_gb"),
}
ENGINE = engine_options(
    dtype="float32",
    max_model_len=256,
    max_num_seqs=4,
    max_num_batched_tokens=64,
    block_size=8,
    num_gpu_blocks_override=200,
)
SERVERS: dict[str, dict[str, Any]] = {
    "lru": {},
    "shm": {"mm_processor_cache_type": "shm"},
    "two API processes": {"api_server_count": 2},
    "off": {"mm_processor_cache_gb": 0},
}
KEY = "the operator"  # GET /server_info is for operators
SIDES = 40, 48  # of an image, pixels: 256 patches
# Resident memory goes up and down by what the allocator keeps.
SLACK = 48 << 20


def fetched(server: ServerProcess, path: str) -> str:
    """Return the body of a GET with the operator's key."""
    return ask(server.base_url, path, Authorization=f"Bearer {KEY}")[1]


def moved(server: ServerProcess) -> dict[str, int]:
    """Return the bytes of pixels that have been sent to the engine so far, by transport, from /metrics."""
    found = re.findall(r"^jaxengine:mm_ipc_bytes_total{(.*?)} (\S+)$", fetched(server, "/metrics"), re.MULTILINE)
    return {re.findall(r'(?<!engine)="(.*?)"', labels)[-1]: int(float(value)) for labels, value in found}


def resident(server: ServerProcess) -> int:
    """Return the resident bytes of the API processes and the engine's process together.

    Memory that they share is counted once for each process.
    """
    return sum(map(memory, (server.engine_pid, *server.api_pids)))


async def measure(server: ServerProcess, count: int) -> tuple[dict[str, Any], bool]:
    """Ask about one image twice, then about `count` distinct ones; return (row of figures, whether all limits were
    kept).

    The limits: no request failed, the engine's cache stays within its size, a second use sends no pixels over the
    socket where the cache kind promises that, and memory grows by at most the cache's size plus SLACK.
    """
    client, rng = Client(server), random.Random(0)
    placement = json.loads(fetched(server, "/server_info"))["mm_cache"]
    row: dict[str, Any] = dict(placement)
    bodies = [question([picture(rng, *SIDES, "PNG")], 1) for _ in range(count + 1)]
    samples: list[Sample] = []
    for name in ("first", "second"):
        before = moved(server)
        samples.append(await client.ask(bodies[0]))
        row |= {f"{name}_use_{way}_bytes": value - before[way] for way, value in moved(server).items()}
    grown = []
    for part in (bodies[1 : 1 + count // 5], bodies[1 + count // 5 :]):
        samples += await client.ask_all(part, 4)
        grown.append(resident(server))
    failed = sum(sample.error not in (None, "empty") for sample in samples)  # some tokens have no text
    row |= {"pictures": count, "failed": failed, "resident_after_a_fifth": grown[0], "resident_after_all": grown[1]}
    row["engine_bytes"] = json.loads(fetched(server, "/server_info"))["mm_cache"]["engine_bytes"]
    once = placement["kind"] in (KEY_REPLICATED, SHARED_MEMORY)
    right = not failed and row["engine_bytes"] <= placement["max_bytes"]
    right = right and not (once and row["second_use_socket_bytes"])
    return row, right and grown[1] - grown[0] <= placement["max_bytes"] + SLACK


def run(args: Namespace, recorder: Recorder) -> None:
    """Serve the tiny model with each kind of cache in SERVERS, and add a row for each, with what it left in /dev/shm.
    "kept" is whether all limits of `measure` were kept and nothing was left.
    """
    with tempfile.TemporaryDirectory() as folder:
        model = whole_checkpoint("qwen2_5_vl_vision", Path(folder) / "model")
        keys = Path(folder) / "keys"
        keys.write_text(f"{KEY}\n")
        keys.chmod(0o600)
        admin = {"enable_admin": True, "admin_key_file": str(keys)}
        options = {**ENGINE, **admin, "model": str(model), "compile_cache_dir": f"{folder}/cache"}
        for name, changes in SERVERS.items():
            before = set(os.listdir("/dev/shm"))
            with serving(options, **{"mm_processor_cache_gb": args.gb, **changes}) as server:
                row, right = asyncio.run(measure(server, args.pictures))
            left = sorted(set(os.listdir("/dev/shm")) - before)
            recorder.add({"name": name, "kept": right and not left, **row, "left_in_shared_memory": left})
