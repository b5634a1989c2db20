"""Ray Serve: two replicas of a model that sees, with adapters, behind two ingresses; one replica is killed while both
work; a pooling model; an engine over two hosts.
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
from tests.jaxengine.server.test_pooling_server import GOLDENS

ray = pytest.importorskip("ray", reason="pip install 'jaxengine[ray]'")

NUM_REQUESTS = 100
# By then replicas have published, several times, what they have.
PUBLISHED_SECONDS = 1.5
SHAPES = {f"model.layers.{layer}.self_attn.o_proj": (64, 64) for layer in range(2)}


@pytest.fixture(scope="module")
def url():
    """Of Ray Serve's HTTP proxy."""
    from ray import serve

    # On a busy machine a proxy takes long to start; Serve would end it and fail.
    with pytest.MonkeyPatch.context() as patch:
        for name in ("READY", "HEALTH"):
            patch.setenv(f"RAY_SERVE_PROXY_{name}_CHECK_TIMEOUT_S", "120")
        patch.setenv("RAY_worker_niceness", "0")  # of replicas, which else give way to whatever runs beside the tests
        start_ray()
    port = free_port()
    with contextlib.suppress(TimeoutError):  # it waits a minute for its proxies, and the one below another
        serve.start(http_options={"host": "127.0.0.1", "port": port})
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    yield f"http://127.0.0.1:{port}"
    serve.shutdown()
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
    options = {**OPTIONS, "model": str(model), "compile_cache_dir": executables_dir}
    adapters = {
        "enable_lora": True,
        "max_loras": 2,
        "max_lora_rank": 8,
        "lora_modules": [f"{name}={folder}/{name}" for name in ("v1", "v2")],
        "lora_routes": {"acme": [["v1", 0.5], ["v2", 0.5]]},
    }

    def start(name, *, alone=False, **changes):
        for other in serve.status().applications if alone else ():
            serve.delete(other)
        serve.run(app({**options, "num_cpus": 0.5, **changes}), name=name, route_prefix=changes.get("root_path", "/"))

    return start, adapters, str(folder / "batches")


@pytest.fixture(scope="module")
def two(run):
    """Processes of two replicas."""
    from ray import serve

    start, adapters, folder = run
    batches = {"enable_batch_api": "true", "batch_storage_dir": folder}
    replicas = {"min_replicas": "2", "max_replicas": 2, "num_ingresses": 2, "routing_period": 0.2}
    start("two", served_model_name=["tiny"], target_ongoing_requests=8, **adapters, **batches, **replicas)
    handle = serve.get_deployment_handle("Replica", "two")
    pids: set[int] = set()
    while len(pids) < 2:
        asked = [handle.describe.remote() for _ in range(4)]
        pids |= {json.loads(each.result(timeout_s=60))["pid"] for each in asked}
    return pids


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
        content = [{"type": "text", "text": "What?"}, {"type": "image_url", "image_url": {"url": data_url(image)}}]
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": 6, "temperature": 0}
        return client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]

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


def hit_rate(client, num_prefixes, rounds, length=96):
    """Share of the tokens of prompts that were in a cache, after the first prompt of each prefix."""
    drawn = np.random.default_rng(rounds).integers(3, 250, (num_prefixes, length)).tolist()
    found = 0
    for number in range(rounds):
        time.sleep(PUBLISHED_SECONDS * (number == 1))
        for prefix in drawn:
            usage = completion(client, [*prefix, 3 + number], max_tokens=1)["usage"]
            found += usage["prompt_tokens_details"]["cached_tokens"]
    return found / (num_prefixes * length * (rounds - 1))


def test_prefixes_are_found_by_both_ingresses(client):
    """But for what a busy machine publishes late; a router without digests finds three quarters."""
    assert hit_rate(client, num_prefixes=6, rounds=5) > 0.9


@pytest.mark.thorough("tests/jaxengine/server/ray/test_ingress.py loses replicas without Ray")
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

    killed = asyncio.run(ask_all(kill=True))
    assert killed == asyncio.run(ask_all(kill=False))


@pytest.mark.thorough("tests/jaxengine/cluster has engines over two hosts, and the tests above replicas")
def test_an_engine_over_two_hosts_is_one_replica(url, run, client):
    start, *_ = run
    tokens = tokens_of(client)
    over_two = {"nnodes": 2, "tensor_parallel_size": 2, "placement_strategy": "PACK"}
    start("over two", alone=True, **over_two, limit_mm_per_prompt={"image": 0, "video": 0})
    assert tokens_of(client) == tokens


@pytest.mark.thorough("replicas pass on what the application says; test_pooling_server.py has embeddings")
def test_a_pooling_model_is_served(url, run, pooling_folder, pooling_options):
    start, *_ = run
    pools = {"model": pooling_folder("mean"), "pooler_config": {"use_activation": True}}
    start("pooling", alone=True, **{**pooling_options, **pools, "root_path": "/pool"})
    answer = httpx.post(f"{url}/pool/v1/embeddings", json={"input": TEXTS}, timeout=120).json()
    found = np.array([entry["embedding"] for entry in answer["data"]])
    expected = GOLDENS["mean"] / np.linalg.norm(GOLDENS["mean"], axis=1, keepdims=True)
    np.testing.assert_allclose(found, expected, atol=1e-4)


@pytest.mark.thorough("test_routing.py compares the policies, and a test above finds prefixes over Ray")
def test_prefixes_are_found_more_often_than_without_digests(url, run, report):
    """Twelve prefixes, of which a replica has room for eleven: a hash of Ray's names for them divides the prefixes."""
    start, *_ = run
    rates = {}
    for digests in (1 << 16, 0):
        pool = {"num_gpu_blocks_override": 11 * 13 + 4, "max_num_seqs": 2, "routing_digest_bytes": digests}
        start("routed", alone=True, min_replicas=2, max_replicas=2, routing_period=0.2, **pool)
        with httpx.Client(base_url=url, timeout=120) as client:
            rates[digests] = hit_rate(client, num_prefixes=12, rounds=8)
    report(f"hit rate over two replicas: {rates[1 << 16]:.2f} by published digests, {rates[0]:.2f} without")
    assert rates[1 << 16] > 0.9 > rates[0]


@pytest.mark.thorough("a test of Ray's own; ours are the options that it is given")
def test_load_adds_a_replica(url, run):
    from ray import serve

    start, *_ = run
    start("scaled", alone=True, min_replicas=1, max_replicas=2, target_ongoing_requests=1)

    def num_running():
        return serve.status().applications["scaled"].deployments["Replica"].replica_states.get("RUNNING", 0)

    async def load():
        async with httpx.AsyncClient(base_url=url, timeout=300) as client:
            deadline = time.monotonic() + 240
            body = {"prompt": [5, 6, 7], "max_tokens": 200, "ignore_eos": True}
            while num_running() < 2 and time.monotonic() < deadline:
                answers = await asyncio.gather(*(client.post("/v1/completions", json=body) for _ in range(8)))
                assert {each.status_code for each in answers} == {200}
        return num_running()

    assert asyncio.run(load()) == 2
