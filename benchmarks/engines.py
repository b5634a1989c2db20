"""Engines and servers that benchmarks start: their options, checkpoints without weights, and requests to a server."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from jaxengine.bench.serve_client import Server, get_json
from jaxengine.bench.serve_load import Traffic
from tests.jaxengine.server.server_process import ServerProcess, start_server

SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "max_position_embeddings",
)
LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "rms_norm_eps": 1e-5, "rope_theta": 10000.0}
LLAMA |= {"hidden_act": "silu", "bos_token_id": 1, "eos_token_id": 2}


def engine_options(decodes: tuple[int, ...] = (), prefills: tuple[int, ...] = (), **options: Any) -> dict[str, Any]:
    """Return options of an engine that logs no statistics and compiles few programs.

    decodes, prefills: sizes of decode steps and of steps with prefill to compile, in addition to the largest ones.
    options: further engine options.
    """
    sizes = {"cudagraph_capture_sizes": [*decodes], "prefill_sizes": [*prefills]}
    return {"compilation_config": sizes, "disable_log_stats": True, **options}


def write_config(folder: str | Path, sizes: tuple[int, ...], **more: Any) -> None:
    """Write config.json of a Llama model to `folder`, which exists, for load_format="dummy".

    sizes: values of the fields named in SIZES, in their order. more: fields that are added or replaced.
    """
    config = LLAMA | dict(zip(SIZES, sizes, strict=True)) | more
    (Path(folder) / "config.json").write_text(json.dumps(config))


@contextlib.contextmanager
def serving(options: dict[str, Any], *, wait: float = 600.0, **changes: Any) -> Iterator[ServerProcess]:
    """Context manager that starts `jaxengine serve` as a user does and yields its process, which it stops and removes
    at the end.

    options: of the engine. wait: seconds that the start may take. changes: further arguments of `start_server`.
    """
    server = start_server(options, wait=wait, **changes)
    try:
        yield server
    finally:
        server.remove()


def ask(url: str, path: str, body: bytes | None = None, timeout: float = 60.0, **headers: str) -> tuple[int, str]:
    """Send a request on a new connection; return (HTTP status, text of the answer), or (0, reason) if the connection
    fails or the answer is cut or no HTTP.

    It is a POST if there is a body and a GET otherwise. timeout: seconds. headers: further headers.
    """
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=timeout)
    try:
        headers = {"Content-Type": "application/json", **headers}
        connection.request("GET" if body is None else "POST", path, body, headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    except (OSError, http.client.HTTPException) as error:
        return 0, str(error)
    finally:
        connection.close()


def greedy_traffic(url: str, timeout: float | None = 120.0, **fields: Any) -> Traffic:
    """Return traffic of completions at temperature 0 that run to max_tokens, for the first model that the server lists.

    url: of the server, without a path. timeout: seconds of a request. fields: further fields of each request.
    """
    server = Server.at(f"{url}/v1")
    model = asyncio.run(get_json(server, "/models"))["data"][0]["id"]
    return Traffic(server, "completions", model, {"temperature": 0.0, "ignore_eos": True, **fields}, timeout=timeout)
