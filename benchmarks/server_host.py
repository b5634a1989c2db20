"""What serving costs the engine's process, beside offline, in one run and with a model that costs nothing.

    python -m benchmarks.server_host [--num-seqs 1 64 256] [--steps 100] [--rounds 3] [--step-ms 30] [--json FILE]

The real Engine, EngineServer, RemoteEngine and HTTP application run over a device that answers `step-ms` after each
dispatch with ids from a random generator. The same engine process measures first itself offline, as `LLM.generate` runs
it, then with every token made into text and handed on in this process, as AsyncLLM does, and then as
`num-seqs` streams of real HTTP clients behind an API process. From one dispatch to the next, of steps in which all
sequences decode: CPU time of the process with all its threads, and time on the clock without waiting for the device; a
quarter of the steps took less than the figure, for what disturbs a step makes it slower.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import uvicorn

from jaxengine.bench.report import table, write_json
from jaxengine.bench.serve_client import Server
from jaxengine.bench.serve_load import Load, Traffic, plan, send
from jaxengine.compile_watch import CompileWatch
from jaxengine.config import EngineConfig
from jaxengine.core import EngineCore, input_processor, open_resolved
from jaxengine.engine import Engine
from jaxengine.metrics import Metrics
from jaxengine.output_processor import OutputProcessor
from jaxengine.server.engine_process import EngineServer
from jaxengine.server.http.app import create_app
from jaxengine.server.options import ServerConfig
from jaxengine.server.remote_engine import RemoteEngine
from scheduler.buckets import Buckets
from scheduler.packing import Packer
from scheduler.sampling_params import RequestOutputKind, SamplingParams

PROMPT_TOKENS = 16
MODES = ("offline", "in one process", "served")


@dataclasses.dataclass(frozen=True)
class Mark:
    """A dispatch: rows that decode, 0 in a step with prompts; seconds of the clock, of CPU time, and asleep so far."""

    rows: int
    clock: float
    cpu: float
    asleep: float


class FreeRunner:
    """Looks like a ModelRunner to the engine; a step is done `step_seconds` after the one before it."""

    def __init__(self, config: Any, vocab_size: int, step_seconds: float):
        self.config, self.vocab_size, self.num_ranks = config, vocab_size, 1
        self.packer = Packer(Buckets(config.max_num_seqs, config.max_num_batched_tokens, [], []), config.block_size)
        self.buckets, self.compiles = self.packer.buckets, CompileWatch()
        self.plan = SimpleNamespace(num_pages=config.num_gpu_blocks_override)
        self.marks: list[Mark] = []
        ids = np.random.default_rng(0).integers(1000, 40_000, (64, 1, config.max_num_seqs))
        self._ids = ids.astype(np.int32)
        self._step_seconds, self._ready_at, self._asleep = step_seconds, 0.0, 0.0

    def execute(self, step: Any) -> FreeStep:
        rows = int(self.packer.layouts[step.bucket].view(step.buffer[0], "header")[1])
        decoding = rows if step.bucket.decode_only else 0
        self.marks.append(Mark(decoding, time.perf_counter(), time.process_time(), self._asleep))
        self._ready_at = max(self._ready_at, time.perf_counter()) + self._step_seconds
        ids = self._ids[len(self.marks) % len(self._ids)]
        return FreeStep(self, self._ready_at, ids[:, : step.bucket.num_seqs])

    def wait_until(self, moment: float) -> None:
        start = time.perf_counter()
        time.sleep(max(0.0, moment - start))
        self._asleep += time.perf_counter() - start

    def set_params(self, rows: Any) -> None: ...

    def set_bias(self, slot: int, row: Any) -> None: ...

    def set_masks(self, rows: Any) -> None: ...

    def costs(self, rows: int) -> dict[str, float]:
        """Of the steps marked since the last call in which `rows` sequences decode, microseconds."""
        marks, self.marks = self.marks, []
        pairs = [
            (early, late) for early, late in zip(marks, marks[1:], strict=False) if early.rows == late.rows == rows
        ]
        cpu = [late.cpu - early.cpu for early, late in pairs]
        clock = [late.clock - early.clock - (late.asleep - early.asleep) for early, late in pairs]
        figures = {"cpu_us": np.quantile(cpu, 0.25), "clock_us": np.quantile(clock, 0.25)}
        return {"steps": len(pairs), **{name: round(float(value) * 1e6, 1) for name, value in figures.items()}}


@dataclasses.dataclass(frozen=True)
class FreeStep:
    """Looks like a PendingStep."""

    runner: FreeRunner
    ready_at: float
    ids: np.ndarray

    def is_ready(self) -> bool:
        return time.perf_counter() >= self.ready_at

    def token_ids(self) -> np.ndarray:
        self.runner.wait_until(self.ready_at)
        return self.ids


class FreeCore(EngineCore):
    """The embedded model's tokenizer and config, and no model."""

    def __init__(self, num_seqs: int, num_tokens: int, step_seconds: float):
        self._cluster = None
        pages = num_seqs * (-(-(PROMPT_TOKENS + num_tokens) // 16) + 1)
        config = EngineConfig(
            max_model_len=max(256, PROMPT_TOKENS + num_tokens + 1),
            max_num_seqs=num_seqs,
            max_num_batched_tokens=max(512, num_seqs * PROMPT_TOKENS),
            block_size=16,
            num_gpu_blocks_override=max(pages, 64),
            disable_log_stats=True,
        )
        opened = open_resolved(config)
        self.config, self.model_path = opened.config, opened.source.path
        self.inputs = input_processor(opened.source, self.config)
        self.runner: Any = FreeRunner(self.config, self.inputs.model_config.vocab_size, step_seconds)
        self.engine = Engine(self.runner)
        self.metrics = Metrics(self.engine, log_stats=False)
        self._processor = OutputProcessor(self.inputs.tokenizer)


def engine(job: dict[str, Any]) -> None:
    """The engine's process: measures itself twice, then serves until its standard input ends."""
    num_seqs, steps = job["num_seqs"], job["steps"]
    core = FreeCore(num_seqs, steps, job["step_seconds"])
    results = {}
    for mode, kind in zip(MODES, (RequestOutputKind.FINAL_ONLY, RequestOutputKind.DELTA), strict=False):
        params = SamplingParams(max_tokens=steps, ignore_eos=True, temperature=0.0, output_kind=kind)
        for number in range(num_seqs * job["rounds"]):
            ids = [1000 + number] * PROMPT_TOKENS
            core.add(core.inputs.prepare({"prompt_token_ids": ids}, params, request_id=f"{mode}-{number}"))
        while core.has_unfinished:
            core.step()
        results[mode] = core.runner.costs(num_seqs)
    server = EngineServer(core, job["address"], ServerConfig(max_num_queued_reqs=4096), lambda: None)

    def stop_with_input() -> None:
        sys.stdin.read()
        server.order({"order": "stop"})

    threading.Thread(target=stop_with_input).start()
    print("serving", flush=True)
    server.run()
    print(json.dumps({**results, "served": core.runner.costs(num_seqs)}), flush=True)


async def api(job: dict[str, Any]) -> None:
    """An API process, on a free port that it prints."""
    config = ServerConfig(max_num_queued_reqs=4096)
    remote = await RemoteEngine.connect(job["address"], config)
    options = uvicorn.Config(create_app(remote, config), port=0, http="h11", access_log=False, log_level="warning")
    server = uvicorn.Server(options)
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    print(server.servers[0].sockets[0].getsockname()[1], flush=True)
    await asyncio.to_thread(sys.stdin.read)
    server.should_exit = True
    await serving
    remote.close()


def measure(num_seqs: int, steps: int, step_seconds: float, rounds: int) -> list[dict[str, Any]]:
    """A row for each way to run."""
    with tempfile.TemporaryDirectory() as folder:
        job = {"num_seqs": num_seqs, "steps": steps, "step_seconds": step_seconds, "rounds": rounds}
        job["address"] = f"ipc://{Path(folder) / 'engine'}"
        with _role("engine", job) as engine_process:
            assert engine_process.stdout is not None and engine_process.stdin is not None
            assert engine_process.stdout.readline() == "serving\n", "the engine's process ended"
            with _role("api", job) as api_process:
                assert api_process.stdout is not None and api_process.stdin is not None
                port = int(api_process.stdout.readline())
                server = Server.at(f"http://127.0.0.1:{port}/v1")
                load = plan(Load(num_seqs, PROMPT_TOKENS, steps, vocab_size=40_000))
                traffic = Traffic(server, "completions", _model(server), {"temperature": 0.0, "ignore_eos": True})
                for _ in range(rounds):
                    done = asyncio.run(send(traffic, load, [0.0] * num_seqs))
                    failed = [sample for sample in done.samples if sample.error]
                    assert not failed, failed[0].message
                api_process.stdin.close()
            engine_process.stdin.close()
            results = json.loads(engine_process.stdout.readline())
    return [
        {
            "num_seqs": num_seqs,
            "mode": mode,
            **results[mode],
            "cpu_more_us": round(results[mode]["cpu_us"] - results["offline"]["cpu_us"], 1),
            "clock_more_us": round(results[mode]["clock_us"] - results["offline"]["clock_us"], 1),
        }
        for mode in MODES
    ]


def _model(server: Server) -> str:
    from jaxengine.bench.serve_client import get_json

    return asyncio.run(get_json(server, "/models"))["data"][0]["id"]


def _role(name: str, job: dict[str, Any]) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "benchmarks.server_host", "--role", name, "--job", json.dumps(job)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-seqs", type=int, nargs="+", default=[1, 64, 256])
    parser.add_argument("--steps", type=int, default=100, help="tokens of each request")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--step-ms", type=float, default=30.0, help="what the device takes for a step")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--role", choices=("engine", "api"), help=argparse.SUPPRESS)
    parser.add_argument("--job", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.role == "engine":
        engine(args.job)
    elif args.role == "api":
        asyncio.run(api(args.job))
    else:
        rows = [row for count in args.num_seqs for row in measure(count, args.steps, args.step_ms / 1e3, args.rounds)]
        print(table(rows))
        write_json(args.json, {"step_ms": args.step_ms, "results": rows})


if __name__ == "__main__":
    main()
