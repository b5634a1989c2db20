"""Behaviour of a server in trouble: its engine killed, told to end under load, sent ten times the load that it can
serve, sent grammars that take long to compile.

`jaxengine serve` with the embedded model, as a user starts it, with real clients over sockets. Rows are checked against
the limits in them; the exit status is 1 if one is not kept.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import os
import signal
import statistics
import time
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.engines import engine_options, greedy_traffic, serving
from benchmarks.harness import Option
from benchmarks.processes import memory
from benchmarks.recorder import Recorder
from jaxengine.bench.serve_client import Connection, Connections, Sample, Server, get_json, stream
from jaxengine.bench.serve_load import Load, Traffic, arrivals, plan, send
from jaxengine.checkpoint.default_model import default_model_path
from jaxengine.results import percentile
from tests.jaxengine.server.server_process import ServerProcess, is_alive, start_server

ENGINE = engine_options(
    (8, 32),
    (64, 128, 256),
    model=str(default_model_path()),
    max_model_len=512,
    max_num_seqs=32,
    max_num_batched_tokens=256,
    kv_cache_memory_bytes=1 << 29,
)
OPTIONS = {
    "kills": Option(10, "deaths of the engine"),
    "streams": Option(100, "streams that run during each"),
    "overload_seconds": Option(15.0),
    "only": Option(None, "one part", choices=("kills", "ends", "overload", "grammars")),
}


class Findings:
    """Writer of rows: what was measured, over what, the figure, its limit, and whether the limit is kept."""

    def __init__(self, recorder: Recorder):
        self._recorder = recorder

    def add(self, what: str, value: Any, limit: float | None = None, *, at_least: bool = False, of: str = "") -> None:
        """Record a figure, a float rounded to three decimals, and whether it keeps its limit.

        limit: the most that it may be, or with `at_least` the least; None for no limit. of: over what it was measured.
        """
        value = round(value, 3) if isinstance(value, float) else value
        kept = limit is None or (value >= limit if at_least else value <= limit)
        sign = "" if limit is None else f"{'>=' if at_least else '<='} {limit:g}"
        self._recorder.add({"what": what, "of": of, "value": value, "limit": sign, "kept": bool(kept)})

    def add_seconds(self, what: str, seconds: list[float], limit: float | None) -> None:
        """Record the longest of several times in seconds, with their number and median. limit: the most it may be; None
        for none.
        """
        self.add(f"{what}, s", max(seconds), limit, of=f"{len(seconds)}, median {percentile(seconds, 0.5):.3f}")


async def status_of(server: Server, path: str) -> int:
    """Return the HTTP status of a GET on a new connection; 0 if there is no answer."""
    try:
        connection = await Connection.open(server)
    except OSError:
        return 0
    try:
        return (await connection.send("GET", path)).status_code
    except Exception:
        return 0
    finally:
        connection.close()


async def open_streams(traffic: Traffic, count: int, max_tokens: int) -> list[asyncio.Task[Sample]]:
    """Start `count` streams of `max_tokens` tokens each, and return their tasks when the engine runs as many of them as
    it can, according to /status.json. Waits for that without a limit.
    """
    connections = Connections(traffic.server)
    load = Load(count, 16, max_tokens, seed=time.monotonic_ns())
    bodies = [traffic.body(planned) for planned in plan(load)]
    tasks = [asyncio.create_task(stream(connections, "/completions", body, 120.0)) for body in bodies]
    await asyncio.sleep(0.5)
    root = dataclasses.replace(traffic.server, path="")
    while (await get_json(root, "/status.json"))["num_running"] < min(count, ENGINE["max_num_seqs"]):
        await asyncio.sleep(0.05)
    return tasks


async def kill_engine(running: ServerProcess, traffic: Traffic, streams: int) -> dict[str, Any]:
    """Kill the engine under `streams` streams, and wait until the server answers again; return what followed, by name.

    "unhealthy", "ended", "back", "served": seconds from the kill until /health was not 200, until the last stream had
    ended, until /health was 200, and until a new request had ended. "kinds": errors of the streams. "serves": whether
    the new request succeeded. "same_api": whether the API processes are the same as before. Raises TimeoutError if
    /health does not fail within 30 s or does not recover within 120 s.
    """
    tasks = await open_streams(traffic, streams, 400)
    root = dataclasses.replace(traffic.server, path="")
    api, start = running.api_pids, time.perf_counter()
    os.kill(running.engine_pid, signal.SIGKILL)

    async def wait_for(healthy: bool) -> float:
        while ((await status_of(root, "/health")) == 200) is not healthy:
            await asyncio.sleep(0.01)
        return time.perf_counter() - start

    unhealthy = await asyncio.wait_for(wait_for(False), 30)
    samples = await asyncio.gather(*tasks)
    back = await asyncio.wait_for(wait_for(True), 120)
    connections = Connections(traffic.server)
    first = await stream(connections, "/completions", traffic.body(plan(Load(1, 16, 4))[0]), 60.0)
    connections.close()
    return {
        "unhealthy": unhealthy,
        "ended": max(sample.ended for sample in samples) - start,
        "kinds": sorted({str(sample.error) for sample in samples}),
        "back": back,
        "served": time.perf_counter() - start,
        "serves": first.error is None,
        "same_api": running.api_pids == api,
    }


def kills(findings: Findings, count: int, streams: int) -> None:
    """Record figures of `kill_engine` over `count` deaths of the engine under `streams` streams each, and the seconds
    of a start with everything compiled, on which a limit rests. Then kill the supervisor, and record how long its
    children live on and how many files are left.
    """
    # The first start compiles everything, so that the second one only loads.
    start_server(ENGINE, wait=600.0).stop()
    began = time.perf_counter()
    running = start_server(ENGINE)
    load_seconds = time.perf_counter() - began
    traffic = greedy_traffic(running.base_url)
    deaths = [asyncio.run(kill_engine(running, traffic, streams)) for _ in range(count)]
    findings.add_seconds("engine killed: /health is 503 after", [death["unhealthy"] for death in deaths], 1.0)
    findings.add_seconds("engine killed: every stream has ended after", [death["ended"] for death in deaths], 2.0)
    # A stream that had begun ends with an error event; one that waited for its first token gets an HTTP status.
    kinds = {kind for death in deaths for kind in death["kinds"]} - {"stream error", "http 503"}
    findings.add("engine killed: other ends of streams than an error event or 503", len(kinds), 0, of=", ".join(kinds))
    findings.add_seconds("engine killed: serves again after", [death["served"] for death in deaths], load_seconds + 5)
    findings.add("start of the whole server, everything compiled, s", load_seconds)
    served_again = sum(death["serves"] and death["same_api"] for death in deaths)
    findings.add("engine killed: served again by the same API processes", served_again, count, at_least=True)

    children = [running.engine_pid, *running.api_pids]
    began = time.perf_counter()
    running.process.kill()
    running.process.wait()
    while any(map(is_alive, children)) and time.perf_counter() < began + 20:
        time.sleep(0.005)
    findings.add("supervisor killed: no child is left after, s", time.perf_counter() - began, 2.0)
    findings.add("supervisor killed: files left behind", left_behind(running), 0)


def left_behind(running: ServerProcess) -> int:
    """Return how many files a server that has ended left behind, apart from its own standard error."""
    return sum(path.name != "stderr" and path.is_file() for path in Path(running.run_dir_parent).rglob("*"))


async def end_under_load(
    running: ServerProcess, traffic: Traffic, streams: int, max_tokens: int, signals: int
) -> dict[str, Any]:
    """Send SIGTERM under `streams` streams of `max_tokens` tokens, and wait for the server's end; return what followed,
    by name.

    0.3 s after the signal, one new request is sent. signals: 2 for another SIGTERM after it. "seconds",
    "streams_ended": from the first signal until the server, and the last stream, had ended. "status": of the server's
    process. "late": error of the new request. "whole", "aborted": numbers of streams that reached their limit, and that
    ended with "abort". "files": number of those left behind.
    """
    tasks = await open_streams(traffic, streams, max_tokens)
    start = time.perf_counter()
    running.process.send_signal(signal.SIGTERM)
    await asyncio.sleep(0.3)
    connections = Connections(traffic.server)
    late = await stream(connections, "/completions", traffic.body(plan(Load(1, 16, 4))[0]), 10.0)
    if signals == 2:
        running.process.send_signal(signal.SIGTERM)
    samples = await asyncio.gather(*tasks)
    ended = max(sample.ended for sample in samples) - start
    status = await asyncio.to_thread(running.process.wait, 120)
    return {
        "seconds": time.perf_counter() - start,
        "streams_ended": ended,
        "status": status,
        "late": late.error,
        "whole": sum(sample.error is None and sample.finish_reason == "length" for sample in samples),
        "aborted": sum(sample.finish_reason == "abort" for sample in samples),
        "files": left_behind(running),
    }


def ends(findings: Findings, streams: int) -> None:
    """Record how three servers end under load after SIGTERM, by figures of `end_under_load`: with 60 s to finish, after
    a second signal, and with no time.
    """

    def ended(patience: float, max_tokens: int, signals: int) -> dict[str, Any]:
        running = start_server(ENGINE, max_num_queued_reqs=4096, shutdown_timeout=patience)
        traffic = greedy_traffic(running.base_url)
        return asyncio.run(end_under_load(running, traffic, streams, max_tokens, signals))

    done = ended(60.0, 32, 1)
    findings.add("SIGTERM, 60 s to finish: streams that finished", done["whole"], streams, at_least=True)
    findings.add("SIGTERM, 60 s to finish: exit status", done["status"], 0)
    findings.add("SIGTERM, 60 s to finish: s until the server had ended", done["seconds"], 70.0)
    findings.add("SIGTERM, 60 s to finish: a new request is refused", int(bool(done["late"])), 1, at_least=True)
    findings.add("SIGTERM, 60 s to finish: files left behind", done["files"], 0)

    done = ended(60.0, 400, 2)
    findings.add("second SIGTERM: s until the server had ended", done["seconds"] - 0.3, 2.0)

    done = ended(0.0, 400, 1)
    findings.add("SIGTERM, no time to finish: streams that ended with 'abort'", done["aborted"], streams, at_least=True)
    findings.add("SIGTERM, no time to finish: s until all had ended", done["streams_ended"], 2.0)
    findings.add("SIGTERM, no time to finish: exit status", done["status"], 0)


def megabytes(running: ServerProcess) -> int:
    """Return the resident memory of all processes of the server, in MiB."""
    return sum(map(memory, (running.pid, running.engine_pid, *running.api_pids))) >> 20


def pieces_per_second(samples: list[Sample], first: float, last: float) -> float:
    """Return the output chunks per second between `first` (inclusive) and `last` seconds after the first request.

    Both are chosen so as to leave out the start and the end, when not all slots are taken.
    """
    start = min(sample.sent for sample in samples)
    count = sum(first <= moment - start < last for sample in samples for moment in sample.chunk_times)
    return count / (last - first)


async def overload_run(running: ServerProcess, traffic: Traffic, seconds: float) -> dict[str, Any]:
    """Measure a server's rate with all slots taken, then send it ten times as many requests a second for `seconds`.

    Returns by name the rate of the first part in requests a second, and of both parts in chunks of output a second, by
    the times between their beginnings and ends; of the second part the number
    of requests, of those answered, refused (429), refused with Retry-After and ended otherwise, the milliseconds of
    each refusal, and the MiB of memory before it and by which memory grew at most.
    """
    places = ENGINE["max_num_seqs"]
    lengths: dict[str, Any] = {"input_len": 32, "output_len": 32}
    await send(traffic, plan(Load(2 * places, **lengths, seed=1)), [0.0] * 2 * places, places)
    full = await send(traffic, plan(Load(6 * places, **lengths, seed=2)), [0.0] * 6 * places, places)
    rate = len(full.samples) / full.seconds
    tokens = pieces_per_second(full.samples, 0.1 * full.seconds, 0.8 * full.seconds)
    before, peak = megabytes(running), 0
    count = int(10 * rate * seconds)

    async def watch() -> None:
        nonlocal peak
        while True:
            peak = max(peak, await asyncio.to_thread(megabytes, running))
            await asyncio.sleep(0.25)

    watching = asyncio.create_task(watch())
    run = await send(traffic, plan(Load(count, **lengths, seed=3)), arrivals(count, 10 * rate))
    end_task(watching)
    good = [sample for sample in run.samples if sample.error is None]
    refused = [sample for sample in run.samples if sample.error == "http 429"]
    return {
        "saturated_requests_per_second": rate,
        "saturated_tokens_per_second": tokens,
        "tokens_per_second": pieces_per_second(good, 0.2 * seconds, seconds),
        "requests": len(run.samples),
        "answered": len(good),
        "refused": len(refused),
        "other": len(run.samples) - len(good) - len(refused),
        "with_retry_after": sum(sample.retry_after is not None for sample in refused),
        "refusal_ms": [sample.seconds * 1e3 for sample in refused],
        "memory_before_mb": before,
        "memory_grown_mb": peak - before,
    }


def overload(findings: Findings, seconds: float) -> None:
    """Record how a server responds to ten times the requests that it can answer, sent for `seconds`: figures of
    `overload_run`, and its exit status.
    """
    with serving(ENGINE, wait=120.0) as running:
        traffic = greedy_traffic(running.base_url)
        done = asyncio.run(overload_run(running, traffic, seconds))
        of = f"{done['requests']} requests at ten times {done['saturated_requests_per_second']:.1f} a second"
        share = 100 * done["tokens_per_second"] / done["saturated_tokens_per_second"]
        findings.add("overload: tokens a second, percent of what it does at most", share, 90, at_least=True, of=of)
        findings.add("overload: refused with 429", done["refused"], of=f"{done['answered']} answered")
        findings.add("overload: neither answered nor refused", done["other"], 0)
        findings.add("overload: refusals without Retry-After", done["refused"] - done["with_retry_after"], 0)
        if done["refused"]:
            findings.add("overload: ms of a refusal, median", percentile(done["refusal_ms"], 0.5), 20)
            findings.add("overload: ms of a refusal, p99", percentile(done["refusal_ms"], 0.99))
        findings.add("overload: MB that memory grew", done["memory_grown_mb"], 64, of=f"{done['memory_before_mb']} MB")
        findings.add("overload: exit status afterwards", running.stop(), 0)


def end_task(task: asyncio.Task) -> None:
    """Cancel a task that runs during a measurement. Raises the task's exception if it has failed, because the
    measurement is void.
    """
    if task.done():
        task.result()
    task.cancel()


async def beside_grammars(traffic: Traffic, num_tokens: int, grammars: Iterator[str]) -> tuple[list[float], int]:
    """Stream `num_tokens` tokens while another client requests each regex in `grammars`, one after the other.

    Returns the seconds between the stream's tokens, and how many of the grammars were answered meanwhile, with a result
    or with status 400. Raises AssertionError for other answers.
    """
    connections, answered = Connections(traffic.server), 0

    async def ask() -> None:
        nonlocal answered
        for grammar in grammars:
            body = traffic.body(plan(Load(1, 16, 1, seed=answered))[0]) | {"structured_outputs": {"regex": grammar}}
            sample = await stream(connections, "/completions", body, 60.0)
            assert sample.error in (None, "http 400"), sample.error
            answered += 1

    asking = asyncio.create_task(ask())
    sample = await stream(connections, "/completions", traffic.body(plan(Load(1, 16, num_tokens))[0]), 120.0)
    end_task(asking)
    connections.close()
    assert sample.error is None, sample.error
    return [late - early for early, late in itertools.pairwise(sample.chunk_times)], answered


def grammars(findings: Findings, num_tokens: int) -> None:
    """Record by how many percent the mean and median gaps of a stream change while another client requests grammars
    that take a second each to compile, over three rounds of streams alone and next to these.
    """
    with serving(ENGINE, wait=120.0) as running:
        traffic = greedy_traffic(running.base_url)
        hostile = (f"((((a{{{count}}}){{100}}){{100}}){{100}})" for count in itertools.count(90))
        alone, beside, compiled = [], [], 0
        for _ in range(3):
            alone += asyncio.run(beside_grammars(traffic, num_tokens, iter(())))[0]
            gaps, answered = asyncio.run(beside_grammars(traffic, num_tokens, hostile))
            beside, compiled = beside + gaps, compiled + answered
        of = f"{compiled} grammars in {sum(beside):.0f} s"
        for name, figure in (("mean", statistics.fmean), ("median", statistics.median)):
            moved = 100 * (figure(beside) / figure(alone) - 1)
            findings.add(f"hostile grammars: percent that the {name} ITL of a stream moves", moved, 20, of=of)
        findings.add("hostile grammars: p99 of the ITL beside them, ms", 1e3 * percentile(beside, 0.99))
        findings.add("hostile grammars: p99 of the ITL alone, ms", 1e3 * percentile(alone, 0.99))
        running.stop()


def run(args: Namespace, recorder: Recorder) -> None:
    findings = Findings(recorder)
    parts = {
        "kills": lambda: kills(findings, args.kills, args.streams),
        "ends": lambda: ends(findings, args.streams),
        "overload": lambda: overload(findings, args.overload_seconds),
        "grammars": lambda: grammars(findings, 400),
    }
    for name in parts if args.only is None else (args.only,):
        parts[name]()
