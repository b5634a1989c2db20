"""`jaxengine serve` compared with llama.cpp's own HTTP server: same weights, same requests, alternately in one run.

Both are processes with as many threads as there are cores; the clients are on the same cores. In each round each server
answers the same requests once, so that a slow minute of the machine affects both; the round with the most output tokens
a second counts. llama.cpp is the PyPI wheel xllamacpp in the environment of `jaxengine bench peers`; neither server
keeps a request's prompt for the next one.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.engines import greedy_traffic, serving
from benchmarks.harness import CACHE, Option, shared
from benchmarks.recorder import Recorder
from jaxengine.bench.peer_process import PEERS, PeerProcess, install
from jaxengine.bench.serve_load import Load, plan, send
from jaxengine.bench.serve_report import summary
from jaxengine.checkpoint.default_model import default_model_path

LLAMA = PEERS["llama.cpp"]
CONTEXT = 512
# Runs in the environment of the peer.
SERVE_LLAMA = """
import json, sys, xllamacpp
job, params = json.loads(sys.argv[1]), xllamacpp.CommonParams()
params.model.path, params.model_alias = job["path"], {"llama"}
params.n_parallel, params.n_ctx = job["places"], job["places"] * job["context"]
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = job["threads"]
params.port, params.verbosity = 0, 0
server = xllamacpp.Server(params)
print("\\nlistening " + server.listening_address, flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def llama_server(variant: str, places: int, folder: Path, log: Path) -> Iterator[str]:
    """Context in which llama.cpp's server runs; yields its URL. Raises RuntimeError if it does not start.

    variant: weight format, in which the weights are written to `folder` first. places: requests at the same time.
    folder: for the environment and weights. log: file for its output.
    """
    python, gguf = install(LLAMA, folder), Path(default_model_path())
    job: dict[str, Any] = {"gguf": str(gguf), "threads": os.cpu_count(), "folder": str(folder)}
    # Starting it writes the weights in this form.
    PeerProcess(LLAMA, variant, python, job, log).close()
    path = gguf if variant == "q4_1" else folder / f"{gguf.stem}.{variant}.gguf"
    job |= {"path": str(path), "places": places, "context": CONTEXT}
    with log.open("w") as errors:
        process = subprocess.Popen(
            [str(python), "-c", SERVE_LLAMA, json.dumps(job)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("listening "):
                yield line.split()[1].rstrip("/")
                return
        raise RuntimeError(f"llama.cpp's server ended: {log.read_text()[-2000:]}")
    finally:
        process.kill()
        process.wait()


def own(variant: str, places: int) -> dict[str, Any]:
    """Return the options of jaxengine's server. variant: dtype of the weights. places: requests at the same time."""
    options = {"model": str(default_model_path()), "dtype": variant, "max_model_len": CONTEXT, "max_num_seqs": places}
    return {
        **options,
        "max_num_batched_tokens": 512,
        "kv_cache_memory_bytes": 1 << 29,
        "enable_prefix_caching": False,
        "disable_log_stats": True,
    }


def measure(url: str, load: Load, concurrency: int, fields: dict[str, Any]) -> dict[str, Any]:
    """Send a load, at most `concurrency` requests at once; return its summary. fields: further fields of the
    requests.
    """
    traffic = greedy_traffic(url, 600.0, **fields)
    return summary(asyncio.run(send(traffic, plan(load), [0.0] * load.num_prompts, concurrency)))


def compare(variant: str, args: Namespace, recorder: Recorder) -> None:
    """Measure both servers with weights in one format; add a row for each server and concurrency, of its round with the
    most output tokens a second. Prints each result.
    """
    places = max(args.concurrency)
    log = args.venv_dir / "serve-llama.log"
    with serving(own(variant, places)) as server, llama_server(variant, places, args.venv_dir, log) as theirs:
        ours = server.base_url
        for concurrency in args.concurrency:
            best: dict[str, dict[str, Any]] = {}
            for number in range(args.rounds):
                for name, url, fields in (("jaxengine", ours, {}), ("llama.cpp", theirs, {"cache_prompt": False})):
                    load = Load(4 * concurrency, args.input_len, args.output_len, seed=number)
                    done = measure(url, load, concurrency, fields)
                    print(f"{variant} {concurrency} at once: {name} {done['output_throughput']} tok/s", flush=True)
                    if name not in best or done["output_throughput"] > best[name]["output_throughput"]:
                        best[name] = done
            for name, done in best.items():
                recorder.add(_row(variant, concurrency, name, done, best["llama.cpp"]))


def _row(variant: str, concurrency: int, name: str, done: dict[str, Any], peer: dict[str, Any]) -> dict[str, Any]:
    """Return the row of a server. done: its summary. peer: the summary of llama.cpp, over which "ratio" is. The ratio
    is rounded.
    """
    latency = done["latency_ms"]
    return {
        "weights": variant,
        "at once": concurrency,
        "server": name,
        "requests": done["successful_requests"],
        "failed": done["failed_requests"],
        "output_tok_s": done["output_throughput"],
        "TTFT ms": latency["ttft"]["median"],
        "TPOT ms": latency["tpot"]["median"],
        "ITL p99 ms": latency["itl"]["p99"],
        "ratio": round(done["output_throughput"] / peer["output_throughput"], 2),
    }


VARIANTS = ("float32", "bfloat16")
OPTIONS = {
    "variants": Option(VARIANTS, "forms of the weights", choices=VARIANTS),
    "concurrency": Option((1, 8, 16), "requests at once"),
    "input_len": Option(128),
    "output_len": Option(64),
    **shared(rounds=2, venv_dir=CACHE / "peers"),
}


def run(args: Namespace, recorder: Recorder) -> None:
    args.venv_dir.mkdir(parents=True, exist_ok=True)
    for variant in args.variants:
        compare(variant, args, recorder)
