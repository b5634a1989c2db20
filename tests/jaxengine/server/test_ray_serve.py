"""Ray Serve: a model that sees, with adapters, behind two ingresses, and beside it a model that pools.

Load adds the second of two replicas, which loads the programs that the first one has compiled; the last test that uses
them kills one.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import time

import httpx
import numpy as np
import pytest

from tests.fixtures.adapters import write_adapter
from tests.fixtures.picture_checkpoints import whole_checkpoint
from tests.fixtures.pooling_models import TEXTS
from tests.jaxengine.media.pictures import PICTURE, PNG, data_url, saved
from tests.jaxengine.server.processes.test_media_caches import OPTIONS
from tests.jaxengine.server.server_process import is_alive
from tests.jaxengine.server.test_pooling_server import GOLDENS

ray = pytest.importorskip("ray", reason="pip install 'jaxengine[ray]'")

NUM_REQUESTS = 60
# Requests at once that one replica is to have, and those that are load for two.
TARGET, NUM_AT_ONCE = 8, 64
# By the first one replicas have published, several times, what they have; by the others where the machine is busy.
PUBLISHED_SECONDS = (1.5, 6.0, 24.0, 60.0)
SHAPES = {f"model.layers.{layer}.self_attn.o_proj": (64, 64) for layer in range(2)}


@pytest.fixture(scope="module")
def url():
    """Of Ray Serve's HTTP proxy."""
    from ray import serve

    # On a busy machine a proxy takes long to start; Serve would end it and fail.
    with pytest.MonkeyPatch.context() as patch:
        for name in ("READY", "HEALTH"):
            patch.setenv(f"RAY_SERVE_PROXY_{name}_CHECK_TIMEOUT_S", "120")
        patch.setenv("RAY_SERVE_CONTROL_LOOP_INTERVAL_S", "0.3")
        patch.setenv("RAY_SERVE_HANDLE_AUTOSCALING_METRIC_PUSH_INTERVAL_S", "0.2")  # how soon load is seen
        patch.setenv("RAY_worker_niceness", "0")  # of replicas, which else give way to whatever runs beside the tests
        start_ray()
    port = free_port()
    with contextlib.suppress(TimeoutError):  # it waits a minute for its proxies, and the one below another
        serve.start(http_options={"host": "127.0.0.1", "port": port})
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    yield f"http://127.0.0.1:{port}"
    serve.shutdown()  # ends the threads of this process that report to it
    ray.shutdown()


def start_ray() -> None:
    """Start a node. On a busy machine it may take longer than Ray waits for it, and less the next time."""
    for last in (False, False, True):
        try:
            ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
            return
        except Exception as error:
            ray.shutdown()
            if last or "timed out during startup" not in str(error):
                raise


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


@pytest.fixture(scope="module")
def run(url, tmp_path_factory, executables_dir):
    """Applications of a tiny model that sees, by options."""
    from ray import serve

    from jaxengine.server.ray_serve import app

    folder = tmp_path_factory.mktemp("sees")
    model = whole_checkpoint("qwen2_5_vl_vision", folder / "model")
    for seed, name in enumerate(("v1", "v2")):
        write_adapter(folder / name, SHAPES, seed=seed, std=2.0, target_modules=["o_proj"])
    options = {**OPTIONS, "model": str(model), "compile_cache_dir": executables_dir, "num_cpus": 0.1}
    adapters = {
        "enable_lora": True,
        "max_loras": 2,
        "max_lora_rank": 8,
        "lora_modules": [f"{name}={folder}/{name}" for name in ("v1", "v2")],
        "lora_routes": {"acme": [["v1", 0.5], ["v2", 0.5]]},
    }

    def start(name, *, alone=False, wait=True, **changes):
        for other in serve.status().applications if alone else ():
            serve.delete(other)
        prefix = changes.get("root_path", "/")
        target = serve.RunTarget(app({**options, **changes}), name=name, route_prefix=prefix)
        serve.run_many([target], wait_for_applications_running=wait)

    return start, adapters, str(folder / "batches")


def chat_with(picture):
    """A request about the picture at a URL."""
    content = [{"type": "text", "text": "What?"}, {"type": "image_url", "image_url": {"url": picture}}]
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 6, "temperature": 0}


def states_of(name):
    """How many replicas an application's engines have, by state; {} while there are none."""
    from ray import serve

    deployments = serve.status().applications[name].deployments
    return deployments["Replica"].replica_states if "Replica" in deployments else {}


@pytest.fixture(scope="module")
def pools(run, pooling_folder, pooling_options):
    """An application of a pooling model, which starts while the others' first replica does."""
    start, *_ = run
    options = {"model": pooling_folder("mean"), "pooler_config": {"use_activation": True}, "root_path": "/pool"}
    start("pooling", wait=False, **pooling_options, **options)


@pytest.fixture(scope="module")
def scaled(url, run, pools):
    """States of the replicas of `two` before load and under it: requests whose picture does not come, which take no
    processor time.
    """
    start, adapters, folder = run
    batches = {"enable_batch_api": "true", "batch_storage_dir": folder}
    replicas = {"min_replicas": "1", "max_replicas": 2, "num_ingresses": 2, "routing_period": 0.2, "upscale_delay": 0}
    media = {"allowed_media_domains": ["127.0.0.1"], "media_fetch_timeout": 300}
    options = {**adapters, **batches, **media, **replicas}
    start("two", served_model_name=["tiny"], target_ongoing_requests=TARGET, **options)
    before, deadline = states_of("two"), time.monotonic() + 240

    async def load(address):
        body = chat_with(f"http://127.0.0.1:{address[1]}/")
        async with httpx.AsyncClient(base_url=url, timeout=300) as client:
            asked = [asyncio.ensure_future(client.post("/v1/chat/completions", json=body)) for _ in range(NUM_AT_ONCE)]
            while sum((await asyncio.to_thread(states_of, "two")).values()) < 2 and time.monotonic() < deadline:
                ended, _ = await asyncio.wait(asked, timeout=0.3)
                assert not ended, ended.pop().result().text
            for each in asked:
                each.cancel()

    with socket.create_server(("127.0.0.1", 0), backlog=NUM_AT_ONCE) as silent:
        asyncio.run(load(silent.getsockname()))
    while states_of("two").get("RUNNING") != 2 and time.monotonic() < deadline:
        time.sleep(0.5)
    return before, states_of("two")


@pytest.fixture(scope="module")
def two(scaled):
    """Processes of two replicas."""
    from ray import serve

    from jaxengine.server.ray.messages import decode_description

    handle = serve.get_deployment_handle("Replica", "two")
    pids: set[int] = set()
    while len(pids) < 2:
        asked = [handle.describe.remote() for _ in range(4)]
        pids |= {decode_description(each.result(timeout_s=60))["pid"] for each in asked}
    return pids


def test_load_adds_a_replica(scaled):
    assert [{str(state): count for state, count in states.items() if count} for states in scaled] == [
        {"RUNNING": 1},
        {"RUNNING": 2},
    ]


@pytest.fixture
def client(url, two):
    with httpx.Client(base_url=url, timeout=120) as client:
        yield client


def completion(client, prompt, **fields):
    body = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "return_token_ids": True, **fields}
    answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def tokens_of(client, prompt=(5, 6, 7), **fields):
    return completion(client, list(prompt), **fields)["choices"][0]["token_ids"]


def test_replicas_are_whole_servers(client):
    """Images, streams, conversations over replicas, adapters by name and by weight, files and batches."""

    def sees(image):
        answer = client.post("/v1/chat/completions", json=chat_with(data_url(image)))
        return answer.json()["choices"][0]["message"]["content"]

    turned = saved(PICTURE.transpose(0), "PNG")
    assert sees(PNG) == sees(PNG) != sees(turned)
    # Each turn may be another replica's, which knows what was said from the store.
    first = client.post("/v1/responses", json={"input": "One", "max_output_tokens": 4}).json()
    texts, previous = {first["id"]}, first["id"]
    for _ in range(6):
        body = {"input": "More", "previous_response_id": previous, "max_output_tokens": 4}
        previous = client.post("/v1/responses", json=body).json()["id"]
        texts.add(previous)
    assert len(texts) == 7 and len(client.get(f"/v1/responses/{previous}/input_items").json()["data"]) >= 1
    late = client.post("/v1/responses", json={"input": "x", "max_output_tokens": 200, "background": True}).json()
    stopped = client.post(f"/v1/responses/{late['id']}/cancel").json()
    assert stopped["status"] in ("cancelled", "incomplete", "completed")
    base, v1, v2 = (tokens_of(client, model=model) for model in ("tiny", "v1", "v2"))
    assert base != v1 != v2 != base
    arms = {}
    for number in range(16):
        answer = completion(client, [5, 6, 7], model="acme", request_id=f"r{number}")
        arms[answer["model"]] = answer["choices"][0]["token_ids"]
    assert arms == {"v1": v1, "v2": v2}
    assert {row["id"] for row in client.get("/v1/models").json()["data"]} == {"tiny", "v1", "v2", "acme"}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "Hi", "max_tokens": 2}}
    sent = {"file": ("a.jsonl", json.dumps(line))}
    file = client.post("/v1/files", files=sent, data={"purpose": "batch"}).json()["id"]
    asked = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
    batch = client.post("/v1/batches", json=asked).json()["id"]
    while (status := client.get(f"/v1/batches/{batch}").json()["status"]) not in ("completed", "failed"):
        time.sleep(0.2)
    assert status == "completed"


def hit_rate(client, seed, seconds=PUBLISHED_SECONDS[0], num_prefixes=16, length=48, **fields):
    """Share of the tokens of prompts that were in a cache when each was sent for the second time, `seconds` later."""
    drawn = np.random.default_rng(seed).integers(3, 250, (num_prefixes, length)).tolist()
    for prefix in drawn:
        completion(client, [*prefix, 3], max_tokens=1, **fields)
    time.sleep(seconds)
    usages = [completion(client, [*prefix, 4], max_tokens=1, **fields)["usage"] for prefix in drawn]
    return sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages) / (num_prefixes * length)


def test_prefixes_are_found_by_both_ingresses(client, report):
    """A busy machine publishes late: other prompts give it more time. Prompts that ingresses do not read, as of
    pictures, are spread by their ids alone: half of them come to the same replica again.
    """
    found = 0.0
    for seed, seconds in enumerate(PUBLISHED_SECONDS, 1):
        if (found := hit_rate(client, seed, seconds)) > 0.9:
            break
    # Only now: one replica may have had the load until here that made the other one.
    without = hit_rate(client, 0, metadata={"type": "image"})
    report(f"hit rate over two replicas: {found:.2f} by published digests, {without:.2f} without")
    assert found > 0.9 > without


def test_a_pooling_model_is_served(url, pools):
    from ray import serve

    deadline = time.monotonic() + 240
    while serve.status().applications["pooling"].status != "RUNNING" and time.monotonic() < deadline:
        time.sleep(0.1)
    answer = httpx.post(f"{url}/pool/v1/embeddings", json={"input": TEXTS}, timeout=120).json()
    found = np.array([entry["embedding"] for entry in answer["data"]])
    expected = GOLDENS["mean"] / np.linalg.norm(GOLDENS["mean"], axis=1, keepdims=True)
    np.testing.assert_allclose(found, expected, atol=1e-4)


def test_a_killed_replica_costs_no_request_that_had_not_begun(url, two):
    prompts = [[number % 97 + 3, number % 89 + 5, 7] for number in range(NUM_REQUESTS)]

    async def ask(client, prompt):
        body = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "return_token_ids": True}
        answer = await client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["token_ids"]

    async def ask_all(kill):
        limits = httpx.Limits(max_connections=64)
        async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as client:
            tasks = [asyncio.ensure_future(ask(client, prompt)) for prompt in prompts]
            if kill:
                while sum(task.done() for task in tasks) < NUM_REQUESTS // 10:
                    await asyncio.sleep(0.01)
                os.kill(min(two), signal.SIGKILL)
            return await asyncio.gather(*tasks)

    expected = asyncio.run(ask_all(kill=False))
    assert asyncio.run(ask_all(kill=True)) == expected
    assert not is_alive(min(two))


@pytest.mark.thorough("tests/jaxengine/cluster has engines over two hosts, and the tests above replicas")
def test_an_engine_over_two_hosts_is_one_replica(url, run, client):
    start, *_ = run
    tokens = tokens_of(client)
    over_two = {"nnodes": 2, "tensor_parallel_size": 2, "placement_strategy": "PACK"}
    start("over two", alone=True, **over_two, limit_mm_per_prompt={"image": 0, "video": 0})
    assert tokens_of(client) == tokens
