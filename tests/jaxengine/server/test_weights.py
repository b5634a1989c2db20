"""Pauses, sleep and new weights over HTTP and gRPC."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator
from typing import Any

import grpc
import numpy as np
import pytest
from safetensors.numpy import save, save_file

from jaxengine import AsyncLLM, RequestError
from jaxengine.server.base.options import ServerConfig
from jaxengine.server.grpc import admin_pb2 as pb
from jaxengine.server.grpc.admin_pb2_grpc import AdminStub
from jaxengine.server.http.app import create_app
from jaxengine.server.weights.weight_upload import MAX_HEADER_BYTES, uploaded
from tests.conftest import TINY_CHECKPOINT
from tests.jaxengine.engine.test_weight_updates import changed
from tests.jaxengine.server.asgi_client import http_client
from tests.jaxengine.server.grpc.grpc_rig import connected, refusal
from tests.tables import each_row

BODY = {"prompt": [5, 6, 7, 8, 9], "max_tokens": 6, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
AWAKE = {"status": "awake", "tags": None, "asleep": []}


@pytest.fixture(scope="module")
def engine(tiny_options):
    engine = AsyncLLM(**tiny_options)
    yield engine
    engine.shutdown()


@pytest.fixture
def admin(tmp_path) -> dict[str, Any]:
    (tmp_path / "keys").write_text("root\n")
    (tmp_path / "uploads").mkdir()
    return {
        "enable_admin": True,
        "admin_key_file": str(tmp_path / "keys"),
        "weight_upload_dir": str(tmp_path / "uploads"),
    }


@pytest.fixture
def app(engine, admin):
    return create_app(engine, ServerConfig(**admin))


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
        given = {"path": new, "weight_version": "new", "kv": "drop"}
        answer = await client.post("/update_weights", json=given | {"chunk_bytes": 1000})
        assert answer.status_code == 200 and answer.json()["version"] == "new" and answer.json()["leaves"] > 3
        second = await tokens(client)
        sums = (await client.get("/weight_info?checksum=true")).json()
        assert second != first and sums["weight_version"] == "new"
        for path, fault in ((broken, "finite"), (str(tmp_path / "nowhere"), "cannot be read"), ("é" * 300, "too long")):
            answer = await client.post("/update_weights", json={"path": path})
            error = answer.json()["error"]
            assert answer.status_code == 400 and fault in error["message"] and error["param"] == "path", answer.text
        for field, value in (
            ("mode", "stop"),
            ("chunk_bytes", 0),
            ("chunk_bytes", 2**63),
            ("chunk_bytes", "many"),
            ("target", "draft"),
        ):
            answer = await client.post("/update_weights", json={"path": new, field: value})
            assert answer.status_code == 400 and answer.json()["error"]["param"] == field
        assert (await client.get("/weight_info?checksum=true")).json() == sums
        for both in ({}, {"path": old, "weight_dir": old}, {"weight_dir": None}, {"path": ""}):
            answer = await client.post("/update_weights", json=both)
            assert answer.status_code == 400 and answer.json()["error"]["param"] == "path", answer.text
        assert (await client.post("/update_weights", json={"weight_dir": old})).status_code == 200
        assert await tokens(client) == first and (await client.get("/weight_info")).json() == {"weight_version": 2}
        assert not (await client.get("/is_paused")).json()["is_paused"]


async def test_updates_at_once(app, tmp_path):
    """Both take place, and leave no pause; an operator's pause of the meantime stays."""
    update = {"path": write(tmp_path / "same", changed(0))}
    async with http_client(app, "root") as client:
        for pause in (False, True):
            calls = [client.post("/update_weights", json=update | {"mode": mode}) for mode in ("keep", "wait")]
            calls += [client.post("/pause?mode=keep") for _ in range(pause)]
            answers = await asyncio.gather(*calls)
            assert [each.status_code for each in answers] == [200] * len(calls), [each.text for each in answers]
            assert (await client.get("/is_paused")).json()["is_paused"] == pause
        assert (await client.post("/resume")).status_code == 200 and len(await tokens(client)) == 6


async def test_weights_are_a_body(engine, admin, tmp_path):
    """A body may have any size and come in pieces; one that is no whole file of the model's tensors leaves nothing."""
    kind = {"Content-Type": "application/octet-stream"}
    app = create_app(engine, ServerConfig(**admin, max_request_bytes=1024))
    new, old = save(changed(1)), save(changed(0))
    async with http_client(app, "root") as client, http_client(app) as stranger:

        async def send(body: bytes, query: str = "", sender=client, headers=kind) -> tuple[int, Any]:
            pieces = (body[at : at + 5_001] for at in range(0, len(body), 5_001))
            answer = await sender.post(f"/update_weights{query}", content=pieces_of(*pieces), headers=headers)
            return answer.status_code, answer.json()

        first = await tokens(client)
        status, found = await send(new, "?weight_version=body&kv=drop&chunk_bytes=1000")
        assert status == 200 and found["version"] == "body" and await tokens(client) != first
        for body, fault in (
            (new[:-9], "ends after"),
            (new + b"1", "goes on"),
            ((2 << 30).to_bytes(8, "little"), "header"),
        ):
            status, found = await send(body)
            assert status == 400 and fault in found["error"]["message"], found
        assert (await send(old, "?mode=stop"))[0] == 400 and (await send(old, sender=stranger))[0] in (401, 403)
        assert (await send(old, headers={"Content-Type": "application/json"}))[0] == 413
        assert (await client.get("/weight_info")).json() == {"weight_version": "body"}
        assert (await send(old))[0] == 200 and await tokens(client) == first
    assert not [*(tmp_path / "uploads").iterdir()]


async def test_pause_and_sleep(app, engine):
    async with http_client(app, "root") as client:
        first = await tokens(client)
        for begin, end, state in (
            ("/pause?mode=keep", "/resume", "/is_paused"),
            ("/sleep?level=1&mode=wait", "/wake_up", "/is_sleeping"),
            ("/sleep?level=1", "/wake_up?tags=weights&tags=kv_cache", "/is_sleeping"),
            ("/sleep?tags=kv_cache", "/wake_up?tags=kv_cache", "/is_sleeping"),
            ("/sleep?level=0&mode=keep", "/wake_up?tags=scheduling", "/is_paused"),
        ):
            assert (await client.post(begin)).status_code == 200
            assert list((await client.get(state)).json().values()) == [True]
            waiting = asyncio.create_task(tokens(client))
            await asyncio.sleep(0.1)
            assert not waiting.done()
            assert (await client.post(end)).status_code == 200
            assert list((await client.get(state)).json().values()) == [False]
            assert await waiting == first
        for method, path in (("GET", "/sleep"), ("POST", "/is_sleeping")):  # served, but not by this method
            answer = await client.request(method, path)
            assert answer.status_code == 405 and answer.headers["allow"] != method, answer.text
        wrong = ("/sleep?level=3", "/sleep?mode=never", "/pause?mode=", "/wake_up?tags=all", "/sleep?tags=all")
        for path in (*wrong, "/sleep?tags=", "/sleep?tags=weights&level=0", "/release_kv_cache_memory"):
            assert (await client.post(path)).status_code == 400, path
        assert not (await client.get("/is_paused")).json()["is_paused"]
        await client.post("/pause?mode=keep")
        assert (await client.post("/release_kv_cache_memory")).json() == {"status": "kv_cache_released"}
        assert (await client.post("/sleep?tags=weights")).json() == {"status": "sleeping", "level": 1}
        part = {"status": "sleeping", "tags": ["kv_cache"], "asleep": ["weights"]}
        assert (await client.post("/wake_up?tags=kv_cache")).json() == part
        assert (await client.post("/wake_up")).json() == AWAKE and await tokens(client) == first
        for path, name in {
            "/resume?now=1": "now",
            "/reset_mm_cache?now=1": "now",
            "/update_weights?level=1": "level",
        }.items():
            answer = await client.post(path, content=b"x", headers={"content-type": "application/octet-stream"})
            assert answer.status_code == 400 and answer.json()["error"]["param"] == name, answer.text
            assert f"'{name}' is not a parameter of {path.partition('?')[0]}; allowed: " in answer.text
        answer = await client.post("/reset_prefix_cache?reset_external=true")
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "reset_external"
        for query in ("", "?reset_external=false", "?reset_running_requests=true"):
            assert (await client.post(f"/reset_prefix_cache{query}")).json() == {"success": True}
        running = asyncio.create_task(client.post("/v1/completions", json=BODY | {"max_tokens": 80}))
        while not engine.core.has_unfinished:
            await asyncio.sleep(0.001)
        assert (await client.post("/areal_pause_generation", json={})).json()["success"]
        assert (await running).json()["choices"][0]["finish_reason"] == "abort"
        waiting = asyncio.create_task(tokens(client))
        answer = await client.post("/areal_update_weights", json={"model_path": str(TINY_CHECKPOINT)})
        assert answer.json()["success"] and not waiting.done() and (await client.get("/is_paused")).json()["is_paused"]
        assert (await client.post("/areal_continue_generation", json={})).json()["success"] and await waiting == first
        await client.post("/sleep?level=2")
        for path in ("/wake_up", "/resume"):
            answer = await client.post(path)
            assert answer.status_code == 400 and "weights" in json.loads(answer.text)["error"]["message"]
        assert (await client.get("/weight_info?checksum=true")).status_code == 400
        assert (await client.post("/update_weights", json={"path": str(TINY_CHECKPOINT)})).status_code == 200
        assert (await client.post("/wake_up")).json() == AWAKE
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


def parts(tensors: dict[str, np.ndarray], **options: Any) -> list[pb.UpdateWeightsPart]:
    """Messages that send these tensors, whose bytes are cut where no tensor ends."""
    named = [pb.TensorInfo(name=name, dtype="F32", shape=each.shape) for name, each in tensors.items()]
    start = pb.UpdateWeightsStart(options=pb.UpdateOptions(**options), tensors=named)
    data = b"".join(each.tobytes() for each in tensors.values())
    pieces = [data[at : at + 50_001] for at in range(0, len(data), 50_001)]
    return [pb.UpdateWeightsPart(start=start), *(pb.UpdateWeightsPart(data=piece) for piece in pieces)]


async def test_the_same_over_grpc(engine, admin, tmp_path):
    """Pauses, sleep, a folder, a stream of tensors; what is wrong leaves the weights, and no file is left."""
    uploads, new = tmp_path / "uploads", write(tmp_path / "new", changed(1))
    async with connected(engine, **admin) as (channel, _), http_client(create_app(engine, ServerConfig())) as client:
        stub, key = AdminStub(channel), {"metadata": (("authorization", "Bearer root"),)}

        async def sums() -> dict[str, str]:
            return dict((await stub.GetWeightInfo(pb.GetWeightInfoRequest(checksum=True), **key)).checksums)

        first, before = await tokens(client), await sums()
        options = pb.UpdateOptions(weight_version="grpc", kv=pb.KV_MODE_DROP, chunk_bytes=1000)
        done = await stub.UpdateWeights(pb.UpdateWeightsRequest(path=new, options=options), **key)
        assert done.weight_version == "grpc" and done.leaves > 3 and await tokens(client) != first
        sent = parts(changed(0), weight_version_number=7)
        done = await stub.UpdateWeightsStream(iter(sent), **key)
        assert done.weight_version_number == 7 and done.num_bytes > 0
        assert await sums() == before and await tokens(client) == first
        lacking = {name: each for name, each in changed(1).items() if name != "model.norm.weight"}
        double = parts(changed(1))
        double[0].start.tensors.append(double[0].start.tensors[0])
        odd = parts(changed(1))
        odd[0].start.tensors[0].dtype = "F31"
        for messages, fault in (
            (parts(lacking), "model.norm.weight"),
            (sent[:-1], "ends after"),
            ([*sent, sent[-1]], "goes on after"),
            ([*sent[:2], sent[0]], "start may only"),
            (sent[1:], "start is missing"),
            (double, "given twice"),
            (odd, "dtype"),
        ):
            code, details, _ = await refusal(stub.UpdateWeightsStream(iter(messages), **key))
            assert code is grpc.StatusCode.INVALID_ARGUMENT and fault in details, details
        assert await sums() == before and not [*uploads.iterdir()]

        await stub.Pause(pb.PauseRequest(mode=pb.PAUSE_MODE_KEEP), **key)
        assert (await stub.IsPaused(pb.IsPausedRequest(), **key)).is_paused
        await stub.Resume(pb.ResumeRequest(), **key)
        await stub.Sleep(pb.SleepRequest(tags=["weights"]), **key)
        answer = await stub.WakeUp(pb.WakeUpRequest(tags=["kv_cache"]), **key)
        assert list(answer.asleep) == ["weights"]
        await stub.Sleep(pb.SleepRequest(), **key)
        assert (await stub.IsSleeping(pb.IsSleepingRequest(), **key)).is_sleeping
        answer = await stub.WakeUp(pb.WakeUpRequest(tags=["weights"]), **key)
        assert list(answer.asleep) == ["kv_cache"] and (await refusal(stub.Resume(pb.ResumeRequest(), **key)))[1]
        assert not (await stub.WakeUp(pb.WakeUpRequest(), **key)).asleep and await tokens(client) == first
        for call, field in (
            (stub.Sleep(pb.SleepRequest(level=3), **key), "level"),
            (stub.Sleep(pb.SleepRequest(tags=["all"]), **key), "tags"),
            (stub.Pause(pb.PauseRequest.FromString(b"\x08\x09"), **key), "mode"),
            (stub.UpdateWeights(pb.UpdateWeightsRequest(), **key), "path"),
            (stub.UpdateWeights(pb.UpdateWeightsRequest(path=new, options={"chunk_bytes": 0}), **key), "chunk_bytes"),
            (stub.UpdateWeights(pb.UpdateWeightsRequest(path=new, options={"draft": True}), **key), "target"),
            (stub.UpdateWeightsStream(iter(parts(changed(1), chunk_bytes=-1)[:1]), **key), "chunk_bytes"),
        ):
            assert (await refusal(call))[2] == [field]


async def pieces_of(*pieces: bytes) -> AsyncIterator[bytes]:
    for piece in pieces:
        yield piece


WHOLE = save({"a": np.zeros((3, 4), np.float32)})


def headed(header: Any) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text


@each_row(
    ("file", "fault"),
    [
        ((2 << 30).to_bytes(8, "little"), f"allowed: {MAX_HEADER_BYTES}"),
        ((2**63).to_bytes(8, "little") + b"{", "allowed:"),
        (headed({"a": {"dtype": "F32", "shape": [2**50], "data_offsets": [0, 2**52]}}), "has room for"),
        (headed({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 1e300]}}), "header of a safetensors"),
        (headed({"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, -4]}}), "header of a safetensors"),
        (headed({"a": 3}), "header of a safetensors"),
        (headed(b"[" * 100_000), "header of a safetensors"),
        (headed(b"[" * 1_000_000), "more than"),
        (headed(b"\xff{}"), "header of a safetensors"),
        (b"", "before its header"),
        (WHOLE[:-1], "ends after"),
        (WHOLE + b"x", "goes on after"),
    ],
)
async def test_a_hostile_file_is_refused_before_it_is_kept(tmp_path, file, fault):
    """At once, and a byte at a time."""
    bytewise = [file[at : at + 1] for at in range(len(file))] if len(file) < 1000 else [file[:9], file[9:]]
    for pieces in ([file], bytewise):
        with pytest.raises(RequestError, match=fault):
            async with uploaded(str(tmp_path), pieces_of(*pieces)):
                raise AssertionError("it was kept")
        assert not [*tmp_path.iterdir()]


async def test_weights_are_only_kept_where_a_folder_is_named(tmp_path):
    with pytest.raises(RequestError, match="weight_upload_dir"):
        async with uploaded(None, pieces_of(WHOLE)):
            pass
    with pytest.raises(RequestError, match="cannot be written"):
        async with uploaded(str(tmp_path / "nowhere"), pieces_of(WHOLE)):
            pass
    async with uploaded(str(tmp_path), pieces_of(WHOLE[:20], WHOLE[20:])) as path:
        with open(path, "rb") as file:
            assert file.read() == WHOLE
    assert not [*tmp_path.iterdir()]
