"""Engines and servers that benchmarks start: options, checkpoints without weights, requests to a server."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxengine.bench.serve_client import Server, get_json
from jaxengine.bench.serve_load import Traffic
from tests.jaxengine.server.server_process import ServerProcess, start_server

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def engine_options(decodes: tuple[int, ...] = (), prefills: tuple[int, ...] = (), **options: Any) -> dict[str, Any]:
    """Options of an engine that says nothing and has few programs: sizes of decode and of mixed steps, and others."""
    sizes = {"cudagraph_capture_sizes": [*decodes], "prefill_sizes": [*prefills]}
    return {"compilation_config": sizes, "disable_log_stats": True, **options}


def write_config(folder: str | Path, **sizes: Any) -> None:
    """Makes `folder` a checkpoint of Llama's family without weights, for load_format="dummy"."""
    (Path(folder) / "config.json").write_text(json.dumps(LLAMA | sizes))


@contextlib.contextmanager
def serving(options: dict[str, Any], *, wait: float = 600.0, **changes: Any) -> Iterator[ServerProcess]:
    """`jaxengine serve` as a user starts it, removed in the end. wait: seconds that it may take to start."""
    server = start_server(options, wait=wait, **changes)
    try:
        yield server
    finally:
        server.remove()


def greedy_traffic(url: str, timeout: float | None = 120.0, **fields: Any) -> Traffic:
    """Completions at temperature 0, to their last token, of the model that a server has. url: without a path."""
    server = Server.at(f"{url}/v1")
    model = asyncio.run(get_json(server, "/models"))["data"][0]["id"]
    return Traffic(server, "completions", model, {"temperature": 0.0, "ignore_eos": True, **fields}, timeout=timeout)
