"""The timeline: a trace that Perfetto can read, that tells what happened, and that costs the engine next to nothing."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections import Counter, defaultdict

import numpy as np
import pytest

from jaxengine import SamplingParams
from jaxengine.bench.host import PAGE_SIZE, _buckets, _requests
from jaxengine.commands.cli import main
from jaxengine.engine.stats.timeline import Timeline
from jaxengine.requests.params.sampling_params import RequestOutputKind
from jaxengine.scheduler.base.config import SchedulerConfig
from jaxengine.scheduler.batches.packing import Packer
from jaxengine.scheduler.scheduler import Scheduler
from jaxengine.server.base.options import ServerConfig
from jaxengine.server.http.app import create_app
from tests.jaxengine.server.asgi_client import http_client, idle

NUM_REQUESTS, NUM_PROMPT, NUM_OUTPUT = 12, 90, 100
# Seconds without a step before the load: a question that takes longer is asked again.
GAP = 0.5
# What the format asks of each phase beside name, pid and tid.
PHASES = {
    "X": {"ts": float, "dur": float, "args": dict},
    "C": {"ts": float, "args": dict},
    "M": {"args": dict},
    "s": {"ts": float, "id": int, "cat": str},
    "f": {"ts": float, "id": int, "cat": str, "bp": str},
    "i": {"ts": float, "s": str},
}


def counted(engine) -> dict[str, float]:
    return {metric.name: metric.value for metric in engine.get_metrics()}


@pytest.fixture(scope="module")
def app(chat_engine):
    return create_app(chat_engine, ServerConfig(served_model_name=("tiny",)))


@pytest.fixture(scope="module")
def traced(app, chat_engine):
    """(trace of a load that preempts, what the metrics grew by meanwhile)."""

    async def one(number: int) -> None:
        params = SamplingParams(
            max_tokens=NUM_OUTPUT, ignore_eos=True, seed=number, output_kind=RequestOutputKind.DELTA
        )
        async for _ in chat_engine.generate({"prompt_token_ids": [900 + number] * NUM_PROMPT}, params, f"t{number}"):
            if number == 3:
                return  # it leaves, which aborts

    async def load():
        await idle(chat_engine)
        before, start = counted(chat_engine), time.monotonic()
        await asyncio.sleep(GAP)
        await asyncio.gather(*map(one, range(NUM_REQUESTS)))
        await idle(chat_engine)
        after = counted(chat_engine)
        async with asyncio.timeout(60), http_client(app) as client:
            asked = float("-inf")
            while time.monotonic() - asked > GAP:  # the seconds count from when the engine is asked
                asked = time.monotonic()
                answer = await client.get("/trace", params={"seconds": asked - start})
        assert answer.status_code == 200 and answer.headers["content-type"] == "application/json"
        return answer.json(), {name: after[name] - before.get(name, 0) for name in after}

    return asyncio.run(load())


def slices(trace) -> dict[tuple[int, int], list]:
    tracks = defaultdict(list)
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            tracks[event["pid"], event["tid"]].append(event)
    return tracks


def track_names(trace) -> dict[str, tuple[int, int]]:
    events = [event for event in trace["traceEvents"] if event["name"] == "thread_name"]
    assert len({(event["pid"], event["tid"]) for event in events}) == len(events)
    return {event["args"]["name"]: (event["pid"], event["tid"]) for event in events}


def test_it_is_the_trace_event_format(traced):
    trace, _ = traced
    assert set(trace) == {"traceEvents", "displayTimeUnit", "otherData"} and trace["displayTimeUnit"] in ("ms", "ns")
    kinds = Counter(event["ph"] for event in trace["traceEvents"])
    assert set(kinds) == set(PHASES) and min(kinds.values()) >= 3
    for event in trace["traceEvents"]:
        assert isinstance(event["name"], str) and type(event["pid"]) is type(event["tid"]) is int
        wanted = PHASES[event["ph"]]
        assert set(event) == {"ph", "name", "pid", "tid", *wanted}
        for name, kind in wanted.items():
            allowed = (int, float) if kind is float else kind
            assert isinstance(event[name], allowed), event
            assert kind is not float or event[name] >= 0, event


def test_slices_of_a_track_lie_beside_or_within_each_other(traced):
    trace, _ = traced
    for track, events in slices(trace).items():
        open_until: list[int] = []
        for event in sorted(events, key=lambda event: (event["ts"], -event["dur"])):
            start = round(event["ts"] * 1000)
            end = start + round(event["dur"] * 1000)
            while open_until and open_until[-1] <= start:
                open_until.pop()
            assert not open_until or end <= open_until[-1], (track, event)
            open_until.append(end)


def test_tokens_are_those_of_the_metrics(traced):
    trace, grew = traced
    steps = [event["args"] for event in slices(trace)[track_names(trace)["device"]]]
    assert len(steps) == grew["jaxengine:steps"] > 100
    assert sum(step["num_new_tokens"] for step in steps) == grew["vllm:generation_tokens"] > 0
    assert sum(step["num_tokens"] for step in steps) == grew["jaxengine:scheduled_tokens"]
    padding = sum(step["num_padded"] - step["num_tokens"] for step in steps)
    assert padding == grew["jaxengine:padding_tokens"] > 0
    counters = defaultdict(list)
    for event in trace["traceEvents"]:
        if event["ph"] == "C":
            counters[event["name"]] += event["args"].values()
    assert {"batch_real", "batch_padded", "kv_used", "tokens", "running", "waiting"} == set(counters)
    assert sum(counters["tokens"]) == grew["vllm:generation_tokens"]
    assert all(real <= padded for real, padded in zip(counters["batch_real"], counters["batch_padded"], strict=True))
    assert max(counters["kv_used"]) > 100 and max(counters["waiting"]) > 0 and max(counters["running"]) == 8


def test_every_part_has_its_track(traced):
    trace, grew = traced
    tracks, names = slices(trace), track_names(trace)
    steps = grew["jaxengine:steps"]
    for track, wanted in (
        ("scheduler", {"schedule": steps, "update": steps, "wait for tokens": steps}),
        ("host to device", {"rows and message": steps, "dispatch": steps}),
    ):
        assert Counter(event["name"] for event in tracks[names[track]]) == wanted
    text = tracks[names["detokeniser"]]
    # One for each token, and one for the request that was aborted.
    assert 0 < sum(event["args"]["outputs"] for event in text) <= grew["vllm:generation_tokens"] + 1
    assert "sampler" not in names and "sampler" in trace["otherData"]


def test_a_request_has_a_track_with_arrows_to_its_steps(traced):
    trace, grew = traced
    tracks, names = slices(trace), track_names(trace)
    device = {event["args"]["number"]: event for event in tracks[names["device"]]}
    lives = {number: tracks[names[f"request t{number}"]] for number in range(NUM_REQUESTS)}
    preempted = [event for life in lives.values() for event in life if event["name"] == "preempted"]
    assert len(preempted) == grew["vllm:num_preemptions"] > 0
    for number, life in lives.items():
        phases = {event["name"]: event for event in life if event["name"] in ("queued", "prefill", "decode")}
        assert {"prefill", "decode"} <= set(phases)
        about = phases["decode"]["args"]
        assert about["num_prompt"] == NUM_PROMPT and about["reason"] == ("abort" if number == 3 else "length")
        chunks = [int(event["name"].split()[0]) for event in life if event["name"].endswith(" tokens")]
        if not about["num_preemptions"]:
            assert sum(chunks) == NUM_PROMPT - about["num_cached"]
        assert phases["prefill"]["ts"] + phases["prefill"]["dur"] == pytest.approx(phases["decode"]["ts"])
    flows = defaultdict(dict)
    for event in trace["traceEvents"]:
        if event["ph"] in "sf":
            assert event["ph"] not in flows[event["id"]]
            flows[event["id"]][event["ph"]] = event
    assert len(flows) >= 2 * NUM_REQUESTS
    for flow in flows.values():
        (start, end) = flow["s"], flow["f"]
        inner = [
            each
            for each in tracks[start["pid"], start["tid"]]
            if "step" in each["args"] and each["ts"] <= start["ts"] <= each["ts"] + each["dur"]
        ]
        step = device[inner[-1]["args"]["step"]]
        assert (end["pid"], end["tid"]) == names["device"]
        assert step["ts"] <= end["ts"] <= step["ts"] + step["dur"]


async def test_only_what_was_asked_for_is_told(app, chat_engine):
    await idle(chat_engine)
    async with http_client(app) as client:
        nothing = (await client.get("/trace", params={"seconds": 0.000001})).json()
        assert {event["ph"] for event in nothing["traceEvents"]} == {"M"}
        for wrong in ("0", "-1", "nan", "inf", "601", "x", ""):
            answer = await client.get("/trace", params={"seconds": wrong})
            assert answer.status_code == 400 and answer.json()["error"]["param"] == "seconds", wrong


def test_the_command_writes_what_the_server_tells(server, tmp_path, capsys):
    file = tmp_path / "trace.json"
    assert main(["trace", str(file), "--url", server.base_url + "/", "--seconds", "600"]) == 0
    assert "ui.perfetto.dev" in capsys.readouterr().out
    names = track_names(json.loads(file.read_text()))
    assert {"scheduler", "device", "host to device", "detokeniser"} <= set(names)
    assert main(["trace", str(file), "--url", server.base_url, "--seconds", "-1"]) == 1
    assert "answered 400: seconds" in capsys.readouterr().err
    for wrong, said in (
        ("file:///etc", "url is 'file:///etc'"),
        ("http://[::1", "url is 'http://[::1'"),
        ("http://localhost:port", "no server answers at http://localhost:port"),
    ):
        assert main(["trace", str(file), "--url", wrong]) == 2
        assert said in capsys.readouterr().err
    assert main(["trace", str(file), "--url", server.base_url, "--api-key-file", "/dev/null"]) == 2
    assert "/dev/null contains no key" in capsys.readouterr().err
    (key := tmp_path / "key").write_text("\u043a\u043b\u044e\u0447")
    assert main(["trace", str(file), "--url", server.base_url, "--api-key-file", str(key)]) == 2
    assert "no HTTP header can carry" in capsys.readouterr().err


def test_the_ring_is_bounded_and_cheap():
    """At 256 requests a step costs as many calls as at 16: what it records are arrays."""
    few, many = calls_of_a_step(16), calls_of_a_step(256)
    assert many <= few + 2


def calls_of_a_step(num_seqs: int) -> int:
    """Calls that the timeline makes for a step of `num_seqs` requests in which none begins and none ends."""
    config = SchedulerConfig(
        num_pages=num_seqs * 32,
        page_size=PAGE_SIZE,
        max_num_seqs=num_seqs,
        max_num_batched_tokens=512,
        max_model_len=512,
    )
    scheduler, packer, generator = Scheduler(config), Packer(_buckets(config), PAGE_SIZE), np.random.default_rng(0)
    requests = _requests(generator, 400, 0)
    for _ in range(num_seqs):
        scheduler.add_request(next(requests))
    timeline, counts, calls = Timeline(num_steps=20), [], []

    def count(frame, event, argument) -> None:
        if event in ("call", "c_call"):
            calls.append(event)

    for number in range(160):
        step, tokens = scheduler.schedule(), generator.integers(100, 30_000, (1, num_seqs)).astype(np.int32)
        message, now = packer.pack(step), time.monotonic()
        calls.clear()
        sys.setprofile(count)
        record = timeline.dispatched(step, scheduler, message, number, (now, now, now, now), None)
        sys.setprofile(None)
        result = scheduler.update(step, tokens, now)
        sys.setprofile(count)
        timeline.collected(record, result, (now, now, now))
        sys.setprofile(None)
        counts.append(len(calls))
    last = timeline.last(100.0, list(scheduler.requests))
    assert [step["number"] for step in last["steps"]] == list(range(140, 160))
    assert len(last["requests"]) == num_seqs and last["steps"][-1]["num_rows"] == num_seqs
    return min(counts)
