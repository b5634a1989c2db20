"""/metrics: the names boards ask for, numbers that were observed, and text that its readers can read."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families as parse

from jaxengine.api.engine_client import EngineDeadError
from jaxengine.engine.extensions.adapters import Adapters
from jaxengine.engine.metrics import HELP, Metrics
from jaxengine.engine.stats.stats import Histogram, Recent, bounds_up_to
from jaxengine.server.base.options import ServerConfig
from jaxengine.server.http.app import create_app
from jaxengine.server.processes import api_process
from tests.jaxengine.server.asgi_client import Connection, http_client, idle, post

BOARD = Path(__file__).resolve().parents[4] / "docs" / "grafana.json"
# As vLLM 0.33 spells them in an exposition.
VLLM_NAMES = """
num_requests_running num_requests_waiting num_requests_waiting_by_reason kv_cache_usage_perc prefix_cache_queries_total
prefix_cache_hits_total num_preemptions_total prompt_tokens_total generation_tokens_total request_success_total
corrupted_requests_total mm_cache_queries_total mm_cache_hits_total cache_config_info
time_to_first_token_seconds_bucket inter_token_latency_seconds_bucket
request_time_per_output_token_seconds_bucket e2e_request_latency_seconds_bucket request_queue_time_seconds_bucket
request_prefill_time_seconds_bucket request_decode_time_seconds_bucket request_inference_time_seconds_bucket
request_prompt_tokens_bucket request_generation_tokens_bucket iteration_tokens_total_bucket request_params_n_bucket
request_params_max_tokens_bucket request_max_num_generation_tokens_bucket
"""
ARTICLE_NAMES = """
num_requests_running num_requests_waiting gpu_cache_usage_perc num_preemptions_total avg_prompt_throughput_toks_per_s
avg_generation_throughput_toks_per_s time_to_first_token_seconds_sum time_per_output_token_seconds_sum
e2e_request_latency_seconds_sum
"""
# 0 as long as nothing goes wrong, or where no program had to be compiled or loaded.
MAY_BE_ZERO = {
    "vllm:corrupted_requests_total",
    "vllm:admission_rejections_total",
    "vllm:mm_cache_queries_total",
    "vllm:mm_cache_hits_total",
    "jaxengine:compilations_since_ready_total",
    "jaxengine:executables_compiled_total",
    "jaxengine:executables_loaded_total",
    "jaxengine:engine_restarts_total",
    "vllm:prompt_tokens_cached_total",
    "vllm:request_num_preemptions_sum",
    *(f"vllm:rl_weight_update_operation_duration_seconds_{part}" for part in ("bucket", "count", "sum")),
}
MODEL = 'a "quoted"\\model\n{x="y"}'


def samples(text: str) -> dict[tuple[str, str], float]:
    """(name, labels but the model and the engine) -> value, of an exposition."""
    found = {}
    for family in parse(text):
        for sample in family.samples:
            labels = {name: value for name, value in sample.labels.items() if name not in ("model_name", "engine")}
            found[sample.name, json.dumps(labels, sort_keys=True)] = sample.value
    return found


def total(values: dict[tuple[str, str], float], name: str) -> float:
    matches = [value for (each, _), value in values.items() if each == name]
    assert matches, f"{name} is not there"
    return sum(matches)


@pytest.fixture(scope="module")
def app(chat_engine):
    return create_app(chat_engine, ServerConfig(served_model_name=(MODEL,)))


async def scrape(app, accept: str = "*/*") -> httpx.Response:
    async with http_client(app) as client:
        answer = await client.get("/metrics", headers={"accept": accept})
    assert answer.status_code == 200
    return answer


@pytest.fixture(scope="module")
def served(app, chat_engine):
    """(values before, in the middle of and after a known load, seconds that its clients waited for all outputs)."""

    async def load():
        waited = 0.0

        async def ask(num_outputs=1, **fields):
            nonlocal waited
            start = time.monotonic()
            answer = await post(app, "/v1/completions", **fields)
            waited += num_outputs * (time.monotonic() - start)
            return answer

        await idle(chat_engine)
        before = samples((await scrape(app)).text)
        # More than run at once, and more pages than there are: some wait, some are preempted.
        full = [{"prompt": [[700 + i] * 90], "max_tokens": 100, "ignore_eos": True, "seed": i} for i in range(12)]
        tasks = [asyncio.create_task(ask(**fields)) for fields in full]
        middle = before
        while not (total(middle, "vllm:num_requests_waiting") and total(middle, "vllm:num_preemptions_total")):
            assert not all(task.done() for task in tasks), "nothing was preempted"
            middle = samples((await scrape(app)).text)
        assert all(answer.status == 200 for answer in await asyncio.gather(*tasks))
        again = {"prompt": [[700] * 90], "max_tokens": 5, "n": 3, "seed": 1, "ignore_eos": True}
        text = await ask(3, **again)
        token = (await ask(3, **again, return_token_ids=True)).json["choices"][0]["token_ids"][0]
        assert text.status == 200
        stopped = await ask(**again | {"stop_token_ids": [token], "n": 1})
        assert stopped.json["choices"][0]["finish_reason"] == "stop"
        yes = await ask(prompt=[[700] * 90], structured_outputs={"choice": ["yes"]})
        assert yes.json["choices"][0]["text"] == "yes"
        start = time.monotonic()
        left = Connection.of_json(
            app, "/v1/completions", prompt=[[800] * 90], max_tokens=150, ignore_eos=True, stream=True
        )
        await asyncio.wait_for(left.chunks.get(), 30)
        await left.leave()
        await idle(chat_engine)
        waited += time.monotonic() - start
        return before, middle, samples((await scrape(app)).text), waited

    return asyncio.run(load())


async def test_every_name_is_there_and_was_observed(served):
    _, middle, after, _ = served
    names = {name for name, _ in after}
    assert names.issuperset(f"vllm:{name}" for name in (VLLM_NAMES + ARTICLE_NAMES).split())
    # `_created` is prometheus_client's own.
    moved = {name for values in (middle, after) for (name, _), value in values.items() if value}
    assert names - moved - MAY_BE_ZERO == set(), "always 0"


# What llm-d's picker and that of the Gateway API inference extension read, with the labels that they look for.
PICKED = {
    "vllm:num_requests_waiting": (),
    "vllm:num_requests_running": (),
    "vllm:kv_cache_usage_perc": (),
    "vllm:cache_config_info": ("block_size", "num_gpu_blocks"),
    "vllm:lora_requests_info": ("running_lora_adapters", "waiting_lora_adapters", "max_lora"),
}


async def test_fields_that_pickers_read(app, chat_engine):
    families = {each.name: each for each in parse((await scrape(app)).text)}
    loop = SimpleNamespace(scheduler=SimpleNamespace(requests=()), runner=chat_engine.core.runner)
    (lora,) = Adapters.metrics(SimpleNamespace(loop=loop))  # pyright: ignore[reportArgumentType]
    for name, labels in PICKED.items():
        found = [lora] if name == lora.name else families[name].samples
        assert len(found) == 1 and set(labels) <= found[0].labels.keys(), name
    pages = families["vllm:cache_config_info"].samples[0].labels
    num_tokens = int(pages["block_size"]) * int(pages["num_gpu_blocks"])
    longest = chat_engine.inputs.config.max_model_len
    assert int(pages["kv_cache_size_tokens"]) == float(pages["kv_cache_max_concurrency"]) * longest == num_tokens > 0


async def test_what_was_asked_for_is_what_was_counted(served):
    before, middle, after, waited = served

    def grew(name: str) -> float:
        return total(after, name) - total(before, name)

    def by_label(name: str, **labels: str) -> float:
        key = name, json.dumps(labels)
        return after[key] - before.get(key, 0.0)

    # 12 that run to their end, twice three of five tokens, two that are stopped, one that is left.
    ended = {"length": 12 + 6, "stop": 2, "abort": 1, "error": 0}
    assert {reason: by_label("vllm:request_success_total", finished_reason=reason) for reason in ended} == ended
    num_requests = sum(ended.values())
    assert grew("vllm:prompt_tokens_total") == grew("vllm:prompt_tokens_by_source_total") == 90 * num_requests
    cached = by_label("vllm:prompt_tokens_by_source_total", source="local_cache_hit")
    assert cached == grew("vllm:prompt_tokens_cached_total") > 0
    assert by_label("vllm:prompt_tokens_cached_by_source_total", source="device") == cached
    assert by_label("vllm:prompt_tokens_cached_by_source_total", source="external_unspecified") == 0
    generated = grew("vllm:generation_tokens_total")
    assert generated >= 12 * 100 + 6 * 5 + 1 + 1
    for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds"):
        assert grew(f"vllm:{name}_count") == num_requests, name
    assert grew("vllm:inter_token_latency_seconds_count") == generated - num_requests
    assert grew("vllm:request_generation_tokens_sum") <= generated
    assert grew("vllm:request_prompt_tokens_sum") == 90 * num_requests
    assert by_label("vllm:request_params_n_bucket", le="1.0") == 12 + 3
    assert by_label("vllm:request_params_n_bucket", le="5.0") == 12 + 3 + 2
    # Of the two calls with three outputs of five tokens, one output counts.
    assert grew("vllm:request_max_num_generation_tokens_count") == 12 + 3 + 2
    longest = grew("vllm:request_generation_tokens_sum") - 2 * 2 * 5
    assert grew("vllm:request_max_num_generation_tokens_sum") == longest
    assert grew("vllm:prefix_cache_hits_total") > 0

    def seconds(name: str) -> float:
        return grew(f"vllm:{name}_seconds_sum")

    # A request's time is its parts' and what lies between its last token and its end.
    assert seconds("request_inference_time") == pytest.approx(
        seconds("request_prefill_time") + seconds("request_decode_time")
    )
    assert seconds("inter_token_latency") == pytest.approx(seconds("request_decode_time"))
    preprocessing = grew("jaxengine:request_preprocessing_time_seconds_sum")
    assert seconds("time_to_first_token") == pytest.approx(
        preprocessing + seconds("request_queue_time") + seconds("request_prefill_time")
    )
    parts = preprocessing + seconds("request_queue_time") + seconds("request_inference_time")
    assert parts <= seconds("e2e_request_latency") <= waited
    # Steps: what they held, in sum and by shape.
    assert grew("vllm:iteration_tokens_total_sum") == grew("jaxengine:scheduled_tokens_total")
    for name in ("steps", "tokens", "padding_tokens"):
        whole = "scheduled_tokens" if name == "tokens" else name
        assert grew(f"jaxengine:bucket_{name}_total") == grew(f"jaxengine:{whole}_total"), name
    waiting = total(middle, "vllm:num_requests_waiting_by_reason")
    assert waiting == total(middle, "vllm:num_requests_waiting") > 0
    assert 0 < total(middle, "vllm:kv_cache_usage_perc") <= 1
    assert total(after, "vllm:num_requests_running") == total(after, "vllm:kv_cache_usage_perc") == 0


async def test_older_names_say_the_same(served):
    *_, after, _ = served
    assert total(after, "vllm:time_per_output_token_seconds_sum") == total(
        after, "vllm:inter_token_latency_seconds_sum"
    )
    assert total(after, "vllm:time_per_output_token_seconds_count") > 0
    assert total(after, "vllm:avg_generation_throughput_toks_per_s") > 0


@pytest.mark.parametrize("accept", ["*/*", "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8"])
async def test_labels_are_escaped(app, accept):
    answer = await scrape(app, accept)
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    families = list(parse(answer.text))
    assert {sample.labels["model_name"] for each in families for sample in each.samples} == {MODEL}
    assert {sample.labels["engine"] for each in families for sample in each.samples} == {"0"}
    assert all(each.documentation for each in families)


async def test_what_get_metrics_tells_has_a_meaning_and_vllms_bounds(chat_engine):
    metrics = {metric.name: metric for metric in chat_engine.get_metrics()}
    assert set(metrics) - {name for name in metrics if "bucket" in name} <= set(HELP)
    assert list(metrics["vllm:time_to_first_token_seconds"].buckets)[:3] == ["0.001", "0.005", "0.01"]
    assert list(metrics["vllm:e2e_request_latency_seconds"].buckets)[-2:] == ["7680.0", "+Inf"]
    # max_model_len is 256.
    assert list(metrics["vllm:request_prompt_tokens"].buckets)[-3:] == ["100.0", "200.0", "+Inf"]


def test_every_query_of_the_board_is_answered(served):
    *_, after, _ = served
    names = {name for name, _ in after}
    board = json.loads(BOARD.read_text())
    (row,) = (at for at, panel in enumerate(board["panels"]) if panel["type"] == "row")

    def asked_of(panels: list[dict[str, Any]]) -> list[str]:
        return [target["expr"] for panel in panels for target in panel.get("targets", ())]

    queries, optional = asked_of(board["panels"][:row]), asked_of(board["panels"][row:])
    for query in optional:  # of capabilities that this server lacks
        asked = set(re.findall(r"\b(?:vllm:|jaxengine:)\w+", query))
        assert asked and {name.removesuffix("_total") for name in asked} <= HELP.keys(), query
        counters = {name.removesuffix("_total") for name in re.findall(r"rate\(((?:vllm|jaxengine):\w+)", query)}
        assert counters == {name.removesuffix("_total") for name in asked if name.endswith("_total")}, query
        assert query.count("(") == query.count(")") and query.count("{") == query.count("}"), query
    queries += [variable["query"] for variable in board["templating"]["list"] if variable["type"] == "query"]
    assert len(queries) > 20
    for query in queries:
        asked = re.findall(r"\b(?:vllm:|jaxengine:|http_|process_)\w+", query)
        assert asked and names.issuperset(asked), query
        assert query.count("(") == query.count(")") and query.count("{") == query.count("}"), query
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])


def test_the_log_line(chat_engine, caplog, monkeypatch):
    metrics = Metrics(chat_engine.core.engine, log_stats=True)
    with caplog.at_level(logging.INFO, "jaxengine.engine.metrics"):
        metrics.stepped()
        assert not caplog.records, "too early"
        monkeypatch.setattr("jaxengine.engine.metrics.LOG_INTERVAL_SECONDS", 0.0)
        metrics.stepped()
    (record,) = caplog.records
    assert re.fullmatch(
        r"Avg prompt throughput: [\d.]+ tokens/s, Avg generation throughput: [\d.]+ tokens/s, Running: \d+ reqs, "
        r"Waiting: \d+ reqs, KV cache usage: [\d.]+%, Prefix cache hit rate: [\d.]+%, compilations since ready: 0",
        record.getMessage(),
    )


def test_the_log_lines_rates_leave_out_the_time_without_requests(chat_engine, caplog, monkeypatch):
    """In which somebody types, say."""
    now, engine = 1000.0, chat_engine.core.engine
    monkeypatch.setattr("jaxengine.engine.metrics.time.monotonic", lambda: now)
    monkeypatch.setattr(engine, "busy_since", now)
    metrics = Metrics(engine, log_stats=True)
    with caplog.at_level(logging.INFO, "jaxengine.engine.metrics"):
        for step in range(1, 13):  # a second of work, ninety of quiet
            now += 1
            monkeypatch.setattr(engine.stats, "num_generated_tokens", engine.stats.num_generated_tokens + 50)
            metrics.stepped()
            assert len(caplog.records) == (step >= 10)
            now += 90
            monkeypatch.setattr(engine, "busy_since", now)
    assert "generation throughput: 50.0 tokens/s" in caplog.text


def test_the_engines_process_answers_for_all(server):
    """Across processes: the API process that is asked knows nothing itself."""
    with httpx.Client(base_url=server.base_url, timeout=60) as client:
        before = samples(client.get("/metrics").text)
        fields = {"prompt": [504, 3575], "max_tokens": 7, "ignore_eos": True}
        assert client.post("/v1/completions", json=fields).status_code == 200
        after = samples(client.get("/metrics").text)
    for name, grown in (("generation_tokens_total", 7), ("prompt_tokens_total", 2), ("request_params_n_count", 1)):
        assert total(after, f"vllm:{name}") - total(before, f"vllm:{name}") == grown, name
    assert total(after, "jaxengine:engine_restarts_total") == 0
    processes = {json.loads(labels)["process"] for name, labels in after if name == "process_resident_memory_bytes"}
    assert processes == {"engine", "api 0"}


async def test_requests_are_counted_by_route_and_status(app, chat_engine):
    """Not by paths and methods that clients invent. Counts that could not be reported are reported later. The counter
    of vLLM's name has its classes of statuses.
    """

    def counts(found, counted="jaxengine:http_responses_total"):
        return {
            tuple(json.loads(labels)[name] for name in ("method", "handler", "status")): value
            for (name, labels), value in found.items()
            if name == counted
        }

    before = counts(samples((await scrape(app)).text))
    async with http_client(app) as client:
        for method, path in (("GET", "/v1/models"), ("GET", "/nowhere/1"), ("GET", "/nowhere/2"), ("BREW", "/load")):
            await client.request(method, path)
        await client.post("/v1/completions", json={"prompt": [504], "max_tokens": 0})
    broken = app.state.traffic.http.take()
    app.state.traffic.http.add(broken)
    text = (await scrape(app)).text
    after = counts(samples(text))
    grown = {key: value - before.get(key, 0) for key, value in after.items() if value != before.get(key, 0)}
    assert grown.pop(("GET", "/metrics", "200")) == 1
    assert grown == {
        ("GET", "/v1/models", "200"): 1,
        ("GET", "none", "404"): 2,
        ("other", "/load", "405"): 1,
        ("POST", "/v1/completions", "400"): 1,
    }
    classes = counts(samples(text), "http_requests_total")
    assert classes == {
        (method, route, each): sum(
            number for key, number in after.items() if key[:2] == (method, route) and key[2][0] == each[0]
        )
        for method, route, each in classes
    }
    assert {("GET", "none", "4xx"), ("POST", "/v1/completions", "4xx")} <= set(classes)
    assert "http_request_duration_seconds_bucket{" in text and 'le="+Inf"' in text


def test_a_histogram_counts_one_by_one_and_all_at_once_alike():
    generator = np.random.default_rng(0)
    one, all_at_once = Histogram((0.1, 0.5, 1.0)), Histogram((0.1, 0.5, 1.0))
    for values in (generator.random(100) * 2, np.full(9, 0.1), np.full(4, 3.0), np.array([0.5])):
        all_at_once.observe_all(values)
        for value in values:
            one.observe(value)
    assert one.counts.tolist() == all_at_once.counts.tolist() and one.counts.sum() == 114
    assert one.counts[0] >= 9 and one.counts[3] >= 4
    assert one.sum == pytest.approx(all_at_once.sum)


def test_recent_values_are_the_last_ones():
    recent = Recent(8)
    assert recent.percentiles(50, 99) == [None, None]
    for first in (0, 5, 10):
        recent.add(np.arange(first, first + 5, dtype=float))
    assert recent.percentiles(0, 50, 100) == [7.0, 10.5, 14.0]
    recent.add(np.arange(100.0))
    assert recent.percentiles(0, 100) == [92.0, 99.0]


@pytest.mark.parametrize(("most", "bounds"), [(1, (1,)), (9, (1, 2, 5)), (100, (1, 2, 5, 10, 20, 50, 100))])
def test_bounds_go_as_far_as_lengths_do(most, bounds):
    assert bounds_up_to(most) == bounds


async def test_reports_go_on_after_any_error(monkeypatch, caplog):
    reports: asyncio.Queue[int] = asyncio.Queue()
    errors: list[Exception | None] = [ValueError("a"), ValueError("b"), EngineDeadError("c"), None]

    async def report(*_):
        reports.put_nowait(len(errors))
        if (error := errors.pop(0)) is not None:
            raise error

    monkeypatch.setattr(api_process, "report", report)
    monkeypatch.setattr(api_process, "_REPORT_SECONDS", 0.001)
    engine: Any = None
    traffic: Any = SimpleNamespace(http=SimpleNamespace(has_counts=True))
    task = asyncio.create_task(api_process._report(engine, traffic))
    assert [await asyncio.wait_for(reports.get(), 10) for _ in range(4)] == [4, 3, 2, 1]
    task.cancel()
    await asyncio.wait([task])
    assert [each.message for each in caplog.records] == ["requests could not be added to the metrics"]
