"""CPU time that serving adds to the engine's process, compared with offline generation, under one load and with a model
that costs nothing.

The real Engine, EngineServer, RemoteEngine and HTTP application run over a device that answers `step-ms` after each
dispatch with ids from a random generator. An engine's process is measured offline, as `LLM.generate` runs it, then with
every token made into text and handed on in this process, as AsyncLLM does, and then as `num-seqs` streams of real HTTP
clients behind an API process. It has a core of its own, with all its threads; all other processes share the other
cores. The clients stream in the first two as well, from a second engine's process on the other cores, so that the
machine is equally busy in all three.

Figures are medians in microseconds from one dispatch to the next, over steps in which all sequences decode: `main` is
the CPU time of the thread that steps, `cpu` that of the process with ZeroMQ's thread, `clock` the elapsed time without
the waits for the device. The `more` columns are the excess of a mode over offline. Everything is measured `rounds`
times over, mode after mode, because a shared processor is twice as fast in one minute as in the next: a row shows the
medians of the rounds, of `more` those of the differences within a round, and the least and the most that `cpu_more`
was. The longer the device takes, the colder are the caches, and the more a line of Python costs: hence several
`step-ms`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from argparse import Namespace
from collections.abc import Callable, Coroutine, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import uvicorn

from benchmarks.engines import greedy_traffic
from benchmarks.harness import Option, OptionError, shared
from benchmarks.processes import command
from benchmarks.recorder import Recorder
from jaxengine.api import core as api_core
from jaxengine.api.core import EngineCore
from jaxengine.bench.host import FreeRunner
from jaxengine.bench.serve_load import Load, LoadResult, Traffic, plan, send
from jaxengine.checkpoint.model_source import ModelSource
from jaxengine.config.engine_config import EngineConfig, ResolvedConfig
from jaxengine.requests.params.sampling_params import RequestOutputKind, SamplingParams
from jaxengine.scheduler.batches.buckets import Buckets
from jaxengine.scheduler.batches.packing import Packer
from jaxengine.server.base.options import ServerConfig
from jaxengine.server.http.app import create_app
from jaxengine.server.link.remote_engine import RemoteEngine
from jaxengine.server.processes.engine_process import EngineServer

PROMPT_TOKENS = 16
OFFLINE, IN_PROCESS, SERVED = MODES = ("offline", "in one process", "served")
FIGURES = ("main", "cpu", "clock")


@dataclasses.dataclass(frozen=True)
class Mark:
    """Clocks at the dispatch of a step.

    Attributes:
      rows: sequences that decode; 0 in a step with prompts.
      seconds: readings of the clocks of FIGURES.
    """

    rows: int
    seconds: tuple[float, ...]


class TimedRunner(FreeRunner):
    """Stand-in for ModelRunner without a model; a step is done `step_seconds` after the previous one.

    Attributes:
      marks: a Mark of each step so far, in order.
    """

    def __init__(self, config: ResolvedConfig, vocab_size: int, step_seconds: float):
        """Create a runner for the engine of `config`, which samples the same drawn ids in [1000, 40000) each time."""
        packer = Packer(Buckets(config.max_num_seqs, config.max_num_batched_tokens, [], []), config.block_size)
        ids = np.random.default_rng(0).integers(1000, 40_000, (64, 1, config.max_num_seqs)).astype(np.int32)
        super().__init__(config.scheduler_config(config.num_gpu_blocks_override or 0), packer, ids)
        self.config, self.vocab_size, self.num_words = config, vocab_size, -(-vocab_size // 32)
        self.marks: list[Mark] = []
        self._step_seconds, self._ready_at, self._asleep = step_seconds, 0.0, 0.0

    def execute(self, step: Any) -> SimpleNamespace:
        """Record a Mark, and return the step's pending result, which is ready `step_seconds` after the previous
        step's.
        """
        rows = int(self.packer.layouts[step.bucket].view(step.buffer[0], "header")[1])
        decoding = rows if step.bucket.decode_only else 0
        awake = time.perf_counter() - self._asleep
        self.marks.append(Mark(decoding, (time.thread_time(), time.process_time(), awake)))
        ready_at = self._ready_at = max(self._ready_at, time.perf_counter()) + self._step_seconds
        pending = super().execute(step)

        def token_ids() -> np.ndarray:
            start = time.perf_counter()
            time.sleep(max(0.0, ready_at - start))
            self._asleep += time.perf_counter() - start
            return ids()

        ids, pending.token_ids = pending.token_ids, token_ids
        pending.is_ready = lambda: time.perf_counter() >= ready_at
        return pending

    def costs(self, rows: int) -> dict[str, float]:
        """Return the median of each of FIGURES, in microseconds from one dispatch to the next, and the number of such
        "steps".

        Only pairs of steps in which `rows` sequences decode count. Times are rounded.
        """
        steps = [
            np.subtract(late.seconds, early.seconds)
            for early, late in zip(self.marks, self.marks[1:], strict=False)
            if early.rows == late.rows == rows
        ]
        medians = (np.median(steps, axis=0) * 1e6).round(1).tolist()
        return {"steps": len(steps), **dict(zip(FIGURES, medians, strict=True))}


def free_core(num_seqs: int, num_tokens: int, step_seconds: float) -> EngineCore:
    """Return an EngineCore with the embedded model's tokenizer and config, and a TimedRunner in place of the model.

    num_seqs: sequences at the same time. num_tokens: output tokens of each. step_seconds: of TimedRunner.
    """
    pages = num_seqs * (-(-(PROMPT_TOKENS + num_tokens) // 16) + 1)
    config = EngineConfig(
        max_model_len=max(256, PROMPT_TOKENS + num_tokens + 1),
        max_num_seqs=num_seqs,
        max_num_batched_tokens=max(512, num_seqs * PROMPT_TOKENS),
        block_size=16,
        num_gpu_blocks_override=max(pages, 64),
        disable_log_stats=True,
    )

    def load_runner(source: ModelSource, config: ResolvedConfig, *_: Any, **__: Any) -> Any:
        return TimedRunner(config, source.config.vocab_size, step_seconds)

    with patch.object(api_core, "load_runner", load_runner):
        return EngineCore(config)


def engine(**job: Any) -> None:
    """Run an engine in this process and print its costs as JSON.

    It serves until standard input ends, or in other modes runs its own requests to their end. job: "num_seqs", "steps",
    "step_seconds", "mode", and for a server "address".
    """
    num_seqs, steps, mode = job["num_seqs"], job["steps"], job["mode"]
    core = free_core(num_seqs, steps, job["step_seconds"])
    if mode == SERVED:
        _serve_until_input_ends(core, job["address"])
    else:
        kind = RequestOutputKind.FINAL_ONLY if mode == OFFLINE else RequestOutputKind.DELTA
        params = SamplingParams(max_tokens=steps, ignore_eos=True, temperature=0.0, output_kind=kind)
        for number in range(num_seqs):
            ids = [1000 + number] * PROMPT_TOKENS
            core.add(core.inputs.prepare({"prompt_token_ids": ids}, params, request_id=str(number)))
        while core.has_unfinished:
            core.step()
    runner: Any = core.runner
    print(json.dumps(runner.costs(num_seqs)), flush=True)


def _serve_until_input_ends(core: EngineCore, address: str) -> None:
    """Serve an engine at a ZeroMQ address, after printing "serving", until standard input ends."""
    server = EngineServer(core, address, ServerConfig(max_num_queued_reqs=4096), lambda event: None)

    def stop_with_input() -> None:
        sys.stdin.read()
        server.order({"order": "stop"})

    threading.Thread(target=stop_with_input).start()
    print("serving", flush=True)
    server.run()


def api(address: str, **_: Any) -> None:
    """Run an API process for the engine at `address`, on a free port that it prints, until standard input ends."""
    asyncio.run(_serve_http(address))


async def _serve_http(address: str) -> None:
    """Serve HTTP for the engine at `address`, after printing the port, until standard input ends."""
    config = ServerConfig(max_num_queued_reqs=4096)
    remote = await RemoteEngine.connect(address, config)
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


def measure(num_seqs: int, steps: int, step_seconds: float, cores: list[int]) -> dict[str, dict[str, float]]:
    """Measure each mode's costs once; return the figures by mode.

    steps: output tokens of each sequence. step_seconds: of the device. cores: the first is for the measured engine, the
    others for all other processes.
    """
    own, others = cores[:1], cores[1:]
    job = {"num_seqs": num_seqs, "steps": steps, "step_seconds": step_seconds}
    planned = plan(Load(num_seqs, PROMPT_TOKENS, steps, vocab_size=40_000))
    results: dict[str, dict[str, float]] = {}

    async def send_once(traffic: Traffic) -> None:
        _check(await send(traffic, planned, [0.0] * num_seqs))

    async def send_beside(traffic: Traffic, mode: str) -> None:
        """Send requests for as long as a separate, measured engine without a server runs in `mode`, and store its
        figures.
        """
        with _role(engine, {**job, "mode": mode}, own) as process:
            result = asyncio.create_task(asyncio.to_thread(_line, process))
            while not result.done():
                sending = asyncio.create_task(send(traffic, planned, [0.0] * num_seqs))
                await asyncio.wait((sending, result), return_when=asyncio.FIRST_COMPLETED)
                if sending.done():
                    _check(sending.result())
                sending.cancel()
                await asyncio.wait((sending,))
            results[mode] = json.loads(result.result())

    for mode in (IN_PROCESS, OFFLINE):
        _serve(job, others, others, lambda traffic, mode=mode: send_beside(traffic, mode))
    results[SERVED] = _serve(job, own, others, send_once)
    return results


def rows_of(rounds: list[dict[str, dict[str, float]]]) -> list[dict[str, Any]]:
    """Return a row for each mode: medians over the rounds of its figures and of their differences from offline. Numbers
    are rounded.
    """
    rows = []
    for mode in MODES:
        costs = [results[mode] for results in rounds]
        more = {name: [results[mode][name] - results[OFFLINE][name] for results in rounds] for name in FIGURES}
        row: dict[str, Any] = {"mode": mode, "steps": sum(cost["steps"] for cost in costs)}
        row |= {name: _median([cost[name] for cost in costs]) for name in FIGURES}
        row |= {f"{name}_more": _median(differences) for name, differences in more.items()}
        row |= {"least": round(min(more["cpu"]), 1), "most": round(max(more["cpu"]), 1)}
        rows.append(row)
    return rows


def _median(values: list[float]) -> float:
    """Return the median, rounded to one decimal."""
    return round(float(np.median(values)), 1)


def _serve(
    job: dict[str, Any], cores: Iterable[int], others: Iterable[int], drive: Callable[[Traffic], Coroutine]
) -> dict[str, float]:
    """Measure an engine on `cores` while it serves what `drive` sends to an API process; return its figures.

    job: arguments of `engine`. All other processes run on `others`, including this one, whose affinity stays changed.
    """
    os.sched_setaffinity(0, others)
    with tempfile.TemporaryDirectory() as folder:
        job = {**job, "mode": SERVED, "address": f"ipc://{Path(folder) / 'engine'}"}
        with _role(engine, job, cores) as engine_process:
            assert _line(engine_process) == "serving\n", "the engine's process ended"
            with _role(api, job, others) as api_process:
                traffic = greedy_traffic(f"http://127.0.0.1:{int(_line(api_process))}", None)
                asyncio.run(drive(traffic))
                _end_input(api_process)
            _end_input(engine_process)
            return json.loads(_line(engine_process))


def _check(run: LoadResult) -> None:
    """Raise AssertionError if a request of a load has failed."""
    failed = [sample for sample in run.samples if sample.error]
    assert not failed, failed[0].message


def _role(role: Callable[..., None], job: dict[str, Any], cores: Iterable[int]) -> subprocess.Popen[str]:
    """Start a process that runs a function of this file on some cores, with all threads that it starts; return the
    process.

    role: the function. job: its arguments. The affinity of this process is restored.
    """
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        return subprocess.Popen(command(role, **job), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    finally:
        os.sched_setaffinity(0, before)


def _line(process: subprocess.Popen[str]) -> str:
    """Return the next line of a process's output; "" at its end."""
    assert process.stdout is not None
    return process.stdout.readline()


def _end_input(process: subprocess.Popen[str]) -> None:
    """Close a process's standard input."""
    assert process.stdin is not None
    process.stdin.close()


OPTIONS = {
    "num_seqs": Option((1, 256), "sequences at once"),
    "step_ms": Option((3.0, 10.0, 30.0), "of the device, a step"),
    "steps": Option(300, "tokens of each request"),
    **shared(rounds=5),
}


def run(args: Namespace, recorder: Recorder) -> None:
    """Measure each step time and number of sequences for all rounds; add the rows of the medians.

    Raises OptionError if the process may use fewer than two cores. Prints each round.
    """
    cores = sorted(os.sched_getaffinity(0), reverse=True)
    if len(cores) < 2:
        raise OptionError("it needs two cores: what is measured has one of its own")
    for step_ms, num_seqs in itertools.product(args.step_ms, args.num_seqs):
        rounds = []
        for number in range(args.rounds):
            rounds.append(measure(num_seqs, args.steps, step_ms / 1e3, cores))
            cpu = ", ".join(f"{mode} {costs['cpu']:.0f}" for mode, costs in rounds[-1].items())
            print(f"{num_seqs} x {step_ms:g} ms, round {number + 1} of {args.rounds}: cpu {cpu} us", flush=True)
        for row in rows_of(rounds):
            recorder.add({"step_ms": step_ms, "num_seqs": num_seqs, **row})
