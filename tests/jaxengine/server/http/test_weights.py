"""Pauses, sleep and new weights over HTTP."""

from __future__ import annotations

import asyncio
import itertools
import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxengine import AsyncLLM
from jaxengine.server.http.app import create_app
from jaxengine.server.options import ServerConfig
from tests.conftest import TINY_CHECKPOINT
from tests.jaxengine.engine.test_weight_updates import changed
from tests.jaxengine.server.asgi_client import http_client

BODY = {"prompt": [5, 6, 7, 8, 9], "max_tokens": 6, "temperature": 0, "ignore_eos": True, "return_token_ids": True}


@pytest.fixture(scope="module")
def engine(tiny_options):
    engine = AsyncLLM(**tiny_options)
    yield engine
    engine.shutdown()


@pytest.fixture
def app(engine, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("root\n")
    return create_app(engine, ServerConfig(enable_admin=True, admin_key_file=str(keys)))


def write(folder, tensors) -> str:
    folder.mkdir()
    (folder / "config.json").write_bytes((TINY_CHECKPOINT / "config.json").read_bytes())
    save_file(tensors, folder / "model.safetensors")
    return str(folder)


async def tokens(client, **more) -> list[int]:
    answer = await client.post("/v1/completions", json=BODY | more)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["token_ids"]


async def test_weights_are_replaced(app, tmp_path):
    new, old = write(tmp_path / "new", changed(1)), write(tmp_path / "old", changed(0))
    broken = write(tmp_path / "broken", {**changed(1), "model.norm.weight": np.full(64, np.nan, np.float32)})
    async with http_client(app, "root") as client:
        first = await tokens(client)
        answer = await client.post("/update_weights", json={"path": new, "weight_version": "new", "kv": "drop"})
        assert answer.status_code == 200 and answer.json()["version"] == "new" and answer.json()["leaves"] > 3
        second = await tokens(client)
        sums = (await client.get("/weight_info?checksum=true")).json()
        assert second != first and sums["weight_version"] == "new"
        for path, fault in ((broken, "finite"), (str(tmp_path / "nowhere"), "cannot be read")):
            answer = await client.post("/update_weights", json={"path": path})
            assert answer.status_code == 400 and fault in answer.json()["error"]["message"], answer.text
        answer = await client.post("/update_weights", json={"path": new, "mode": "stop"})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "mode"
        assert (await client.get("/weight_info?checksum=true")).json() == sums
        assert (await client.post("/update_weights", json={"path": old})).status_code == 200
        assert await tokens(client) == first and (await client.get("/weight_info")).json() == {"weight_version": 2}
        assert not (await client.get("/is_paused")).json()["is_paused"]


async def test_pause_and_sleep(app):
    async with http_client(app, "root") as client:
        first = await tokens(client)
        for begin, end, state in (
            ("/pause?mode=keep", "/resume", "/is_paused"),
            ("/sleep?level=1&mode=wait", "/wake_up", "/is_sleeping"),
            ("/sleep?level=1", "/wake_up?tags=weights&tags=kv_cache", "/is_sleeping"),
        ):
            assert (await client.post(begin)).status_code == 200
            assert list((await client.get(state)).json().values()) == [True]
            waiting = asyncio.create_task(tokens(client))
            await asyncio.sleep(0.1)
            assert not waiting.done()
            assert (await client.post(end)).status_code == 200
            assert list((await client.get(state)).json().values()) == [False]
            assert await waiting == first
        for path in ("/sleep?level=3", "/sleep?mode=never", "/pause?mode=", "/wake_up?tags=all"):
            assert (await client.post(path)).status_code == 400, path
        await client.post("/sleep?level=2")
        for path in ("/wake_up", "/resume"):
            answer = await client.post(path)
            assert answer.status_code == 400 and "weights" in json.loads(answer.text)["error"]["message"]
        assert (await client.get("/weight_info?checksum=true")).status_code == 400
        assert (await client.post("/update_weights", json={"path": str(TINY_CHECKPOINT)})).status_code == 200
        assert (await client.post("/wake_up")).json() == {"asleep": []}
        assert await tokens(client) == first


async def test_answers_say_which_weights_made_them(app, tmp_path):
    """Whole and streamed, one of several, and across a switch; not unless it is asked for."""
    folders = [write(tmp_path / str(seed), changed(seed)) for seed in (1, 2)]
    long = {**BODY, "max_tokens": 60, "return_weight_versions": True, "n": 2, "temperature": 1, "seed": 3}
    async with http_client(app, "root") as client:

        async def switch(folder, version):
            answer = await client.post("/update_weights", json={"path": folder, "weight_version": version})
            assert answer.status_code == 200, answer.text

        await switch(folders[0], "a")
        plain = (await client.post("/v1/completions", json=BODY)).json()["choices"][0]
        assert "weight_versions" not in plain
        whole = (await client.post("/v1/completions", json=long)).json()["choices"]
        assert [each["weight_versions"] for each in whole] == [[{"version": "a", "start": 0, "end": 60}]] * 2
        spans: dict[int, list] = {}
        async with client.stream("POST", "/v1/completions", json={**long, "stream": True}) as response:
            number = 0
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                for choice in json.loads(line[6:])["choices"]:
                    if "weight_versions" in choice:
                        assert choice["finish_reason"] == "length" and choice["index"] not in spans
                        spans[choice["index"]] = choice["weight_versions"]
                number += 1
                if number == 4:
                    switching = asyncio.create_task(switch(folders[1], "b"))
            await switching
        assert spans.keys() == {0, 1}
        for found in spans.values():
            assert [each["version"] for each in found] in (["a", "b"], ["a"])
            assert found[0]["start"] == 0 and found[-1]["end"] == 60
            assert all(one["end"] == other["start"] for one, other in itertools.pairwise(found))
        await switch(str(TINY_CHECKPOINT), 0)
