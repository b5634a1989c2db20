"""Adapters over HTTP and gRPC: `model` selects one, operators load and unload them, nothing else may."""

from __future__ import annotations

import asyncio
import gc
import threading

import grpc
import pytest

from jaxengine import AsyncLLM, LoRARequest
from jaxengine.config.base.errors import ConfigError
from jaxengine.scheduler.base.errors import RequestError, UnknownAdapterError
from jaxengine.server.adapters import adapter_sources
from jaxengine.server.adapters.lora import read_modules, refuse_models_name, unload
from jaxengine.server.base.options import ServerConfig
from jaxengine.server.grpc import admin_pb2
from jaxengine.server.grpc import inference_pb2 as pb
from jaxengine.server.grpc.admin_pb2_grpc import AdminStub
from jaxengine.server.http.app import create_app
from jaxengine.server.link.messages import error_of
from jaxengine.server.processes.engine_process import _failure
from tests.fixtures.adapters import write_adapter
from tests.jaxengine.server.asgi_client import http_client
from tests.jaxengine.server.grpc.grpc_rig import connected, refusal

SHAPES = {f"model.layers.{layer}.self_attn.o_proj": (32, 32) for layer in range(2)}
BODY = {"prompt": "Hello there", "max_tokens": 6, "temperature": 0, "ignore_eos": True}
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


@pytest.fixture(scope="module")
def engine(chat_options):
    few = {"compilation_config": {"cudagraph_capture_sizes": [], "prefill_sizes": []}}
    engine = AsyncLLM(**{**chat_options, **few}, enable_lora=True, max_lora_rank=8)
    yield engine
    engine.shutdown()


@pytest.fixture
def admin(tmp_path):
    root, keys = tmp_path / "root", tmp_path / "keys"
    keys.write_text("operator\n")
    for seed, name in enumerate(("a", "b"), 1):
        write_adapter(root / name, SHAPES, seed=seed, std=2.0, target_modules=["o_proj"])
    write_adapter(tmp_path / "outside", SHAPES, seed=3, target_modules=["o_proj"])
    (root / "link").symlink_to(tmp_path / "outside")
    return {"enable_admin": True, "admin_key_file": str(keys), "lora_root": str(root), "served_model_name": ("base",)}


async def test_over_http(engine, admin, tmp_path):
    app = create_app(engine, ServerConfig(**admin))
    async with http_client(app) as client, http_client(app, "operator") as operator:

        async def text(model, path="/v1/completions", **body):
            answer = (await client.post(path, json={**BODY, **body, "model": model})).json()
            assert answer["model"] == model, answer
            return answer["choices"][0]["text"] if "text" in answer["choices"][0] else answer["choices"][0]["message"]

        before = await text("base")
        assert (await client.post(LOAD, json={"lora_name": "a", "lora_path": "a"})).status_code in (401, 403)
        (tmp_path / "root" / "circle").symlink_to("circle")
        for path, said in (
            *((path, "leads out of lora_root") for path in ("link", "../outside", str(tmp_path / "outside"))),
            *((path, "has links in a circle, or cannot be the name of a file") for path in ("circle", "a\0")),
        ):
            refused = await operator.post(LOAD, json={"lora_name": "a", "lora_path": path})
            assert refused.status_code == 400 and said in refused.text and str(tmp_path / "root") not in refused.text
        (tmp_path / "root" / "empty").mkdir()
        for name, path, status in (("base", "a", 400), ("a", "empty", 400), ("a", "c", 404), ("a", "é" * 300, 404)):
            refused = await operator.post(LOAD, json={"lora_name": name, "lora_path": path})
            assert refused.status_code == status, refused.text
        assert (await client.post("/v1/completions", json={**BODY, "model": "a"})).status_code == 404
        for name in ("a", "b"):
            done = await operator.post(LOAD, json={"lora_name": name, "lora_path": name})
            assert (done.status_code, done.text) == (200, f"Success: LoRA adapter '{name}' added successfully.")
        again = await operator.post(LOAD, json={"lora_name": "a", "lora_path": "b"})
        assert again.status_code == 400 and "has already been loaded" in again.text
        first = await text("a")
        for route, path in ((LOAD, "b"), ("/load_lora_adapter", "a")):
            body = {"lora_name": "a", "lora_path": "empty", "load_inplace": True}
            before_it = await text("a")
            assert (await operator.post(route, json=body)).status_code == 400 and await text("a") == before_it
            done = await operator.post(route, json=body | {"lora_path": path})
            assert (
                done.status_code == 200 and await text("a") == (await text("b") if path == "b" else first) != before_it
            )
        rows = {row["id"]: (row["parent"], row["root"]) for row in (await client.get("/v1/models")).json()["data"]}
        assert rows["base"] == (None, "base") and rows["a"] == ("base", f"{admin['lora_root']}/a")
        assert (await client.get("/v1/models/b")).json()["parent"] == "base"
        found = [await text(model) for model in ("base", "a", "b")]
        assert found[0] == before and len(set(found)) == 3
        chat = {"messages": [{"role": "user", "content": "Hi"}]}
        assert await text("a", "/v1/chat/completions", **chat) != await text("base", "/v1/chat/completions", **chat)
        metrics = (await client.get("/metrics")).text
        assert 'running_lora_adapters=""' in metrics and 'max_lora="1"' in metrics
        # SageMaker names an adapter in a header, and its routes' fields in its own way.
        named = {"X-Amzn-SageMaker-Adapter-Identifier": "a"}
        invoked = (await client.post("/invocations", json={**BODY, "model": "base"}, headers=named)).json()
        assert (invoked["model"], invoked["choices"][0]["text"]) == ("a", found[1])
        for body, status in (({"name": "s/1", "src": "b"}, 200), ({"name": "s/2", "src": "c"}, 404)):
            assert (await operator.post("/adapters", json=body)).status_code == status
        assert await text("s/1") == found[2]
        statuses = [(await operator.delete("/adapters/s/1")).status_code for _ in range(2)]
        assert statuses == [200, 404]
        for name in ("a", "b"):
            assert (await operator.post(UNLOAD, json={"lora_name": name})).status_code == 200
        gone = await operator.post(UNLOAD, json={"lora_name": "a"})
        assert (gone.status_code, gone.json()["error"]["type"]) == (404, "NotFoundError")
        assert (await client.post("/v1/completions", json={**BODY, "model": "a"})).status_code == 404
        assert await text("base") == before


async def test_a_models_name_finds_an_adapter(engine, admin, tmp_path, monkeypatch):
    """In the folders and among the owners that are allowed, by a name that leads nowhere else."""
    root, asked = admin["lora_root"], []
    write_adapter(tmp_path / "root" / "team" / "wide", SHAPES, seed=4, r=16, target_modules=["o_proj"])

    def download(param, name, patterns):
        asked.append(name)
        if name != "org/sql":
            raise ConfigError(param, name, "a model of the hub")
        return tmp_path / "outside"

    monkeypatch.setattr(adapter_sources, "download", download)
    routes = {"acme": [["b", 1]], "half": [["b", 1], ["base", 1]]}
    options = {"served_model_name": ("base",), "lora_dirs": (root,), "lora_hub_owners": ("org",), "lora_routes": routes}
    async with http_client(create_app(engine, ServerConfig(**options))) as client:

        async def ask(model):
            return await client.post("/v1/completions", json={**BODY, "model": model})

        answers = await asyncio.gather(*(ask(model) for model in ("base", "b", "b", "org/sql")))
        texts = [answer.json()["choices"][0]["text"] for answer in answers]
        assert texts[1] == texts[2] and len(set(texts)) == 3
        routed = (await ask("acme")).json()
        assert (routed["model"], routed["choices"][0]["text"]) == ("b", texts[1])
        for number in range(8):
            body, named = {**BODY, "model": "half"}, {"X-Session-ID": f"s{number}"}
            halves = [(await client.post("/v1/completions", json=body, headers=named)).json() for _ in range(2)]
            assert halves[0]["model"] == halves[1]["model"] in ("b", "base")
            assert halves[0]["choices"][0]["text"] == texts[halves[0]["model"] == "b"]
        assert (await client.get("/v1/models/half")).json()["root"] == "base"
        for name in (
            "link",
            "../outside",
            "b/../a",
            ".",
            "team",
            "other/sql",
            "org/none",
            "org/none",
            "b/",
            "/b",
            "b\0",
        ):
            assert (await ask(name)).status_code == 404, name
        assert asked == ["org/sql", "org/none"]
        wide = await ask("team/wide")
        assert wide.status_code == 400 and "rank" in wide.json()["error"]["message"] and root not in wide.text
        assert {row["id"] for row in (await client.get("/v1/models")).json()["data"]} == {
            *("base", "b", "org/sql", "acme", "half")
        }
    for name in ("b", "org/sql"):
        await unload(engine, name)
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    here = adapter_sources.AdapterSources(ServerConfig(lora_dirs=(str(tmp_path),)))
    assert here._path_of("circle") is None and here._path_of("root/a") is not None
    for name, value in (("lora_dirs", str(tmp_path / "none")), ("lora_hub_owners", "../x")):
        with pytest.raises(ConfigError, match=f"{name} is"):
            adapter_sources.AdapterSources(ServerConfig(**{name: (value,)}))


async def test_the_error_of_a_search_without_callers_is_no_asyncio_error(monkeypatch):
    told, begun, go_on = [], threading.Event(), threading.Event()

    def fails(self, name):
        begun.set()
        go_on.wait(60)
        raise ConfigError("lora_dirs", name, "nothing")

    monkeypatch.setattr(adapter_sources.AdapterSources, "_path_of", fails)
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))
    sources = adapter_sources.AdapterSources(ServerConfig())
    caller = asyncio.create_task(sources.find(None, "x"))
    await asyncio.to_thread(begun.wait, 10)
    caller.cancel()
    await asyncio.wait([caller])
    go_on.set()
    while sources._searches:
        await asyncio.sleep(0.01)
    del caller
    gc.collect()
    assert told == []


async def test_over_grpc(engine, admin):
    key = {"metadata": (("authorization", "Bearer operator"),)}
    async with connected(engine, **admin, lora_routes={"acme": [["a", 1]]}) as (channel, stub):
        operator = AdminStub(channel)
        load = admin_pb2.LoadLoraAdapterRequest(lora_name="a", lora_path="a")
        await operator.LoadLoraAdapter(load, **key)
        assert (await refusal(operator.LoadLoraAdapter(load, **key)))[0] is grpc.StatusCode.INVALID_ARGUMENT
        stopping = {"max_new_tokens": 6, "ignore_eos": True}
        found = []
        for model in ("base", "a"):
            request = pb.GenerateRequest(text="Hello there", model=model, temperature=0, stopping=stopping)
            answer = await stub.Generate(request)
            assert answer.model == model
            found.append(answer.outputs[0].text)
        assert found[0] != found[1]
        assert (await stub.Generate(pb.GenerateRequest(text="Hello there", model="acme"))).model == "a"
        await operator.UnloadLoraAdapter(admin_pb2.UnloadLoraAdapterRequest(lora_name="a"), **key)
        gone = pb.GenerateRequest(text="Hello there", model="a")
        assert (await refusal(stub.Generate(gone)))[0] is grpc.StatusCode.NOT_FOUND


async def test_an_adapter_unloaded_while_its_request_is_read_is_no_such_model(engine, admin, monkeypatch):
    """Between the look at what is loaded and the engine, in whose process it is unloaded."""

    async def loaded_before(engine):
        return [{"name": "gone", "path": "/gone", "number": 1, "rank": 8}]

    monkeypatch.setattr("jaxengine.server.adapters.lora.loaded_adapters", loaded_before)
    for body in (BODY, BODY | {"stream": True}):
        async with http_client(create_app(engine, ServerConfig(**admin))) as client:
            answer = await client.post("/v1/completions", json=body | {"model": "gone"})
        assert answer.status_code == 404 and "'gone' does not exist" in answer.text
    async with connected(engine, **admin) as (_, stub):
        assert (await refusal(stub.Generate(pb.GenerateRequest(text="Hello", model="gone"))))[0].name == "NOT_FOUND"
    with pytest.raises(UnknownAdapterError):
        raise error_of(_failure(UnknownAdapterError("gone", param="model")))


async def test_a_request_of_a_program_loads_its_adapter(engine, admin):
    adapter = LoRARequest("own", 7, f"{admin['lora_root']}/b")
    async for output in engine.generate("Hello there", lora_request=adapter):
        assert output.prompt == "Hello there" and output.lora_request == adapter
    new = f"{admin['lora_root']}/a"
    with pytest.raises(RequestError, match="is taken by the adapter 'own', number 7"):
        await engine.add_lora(LoRARequest("own", 8, new, load_inplace=True))
    assert await engine.add_lora(LoRARequest("own", 7, new, load_inplace=True))
    assert [(each["number"], each["path"]) for each in await engine.utility("adapters")] == [(7, new)]
    assert await engine.list_loras() == {7}
    assert await engine.remove_lora(7) and not await engine.remove_lora(7)


def test_lora_modules_are_read_as_vllm_has_them():
    assert read_modules(("a=/x=y", '{"name": "b", "path": "/z", "base_model_name": "m"}')) == [
        ("a", "/x=y"),
        ("b", "/z"),
    ]
    for wrong in ("a", "=x", "a=", "{", '{"name": "a"}', '{"name": "a", "path": "b", "c": 1}', "[]"):
        with pytest.raises(ConfigError, match="lora_modules"):
            read_modules((wrong,))
    for other in ("a", "A", " a", "\uff41", "a\ufe0f"):
        with pytest.raises(ConfigError, match="each name once"):
            read_modules(("a=x", f"{other}=y"))


def test_an_adapter_does_not_look_like_the_model():
    for name in ("m", " m", "M", "m\t", "\uff4d", "\u24c2", "m\ufe0f", "\ufe0fM\u3000"):
        with pytest.raises(RequestError, match="the model's own") as caught:
            refuse_models_name(name, ("base", "m"))
        assert caught.value.param == "lora_name"
    for name in ("mm", "m-1", "n", "m m", "base2"):
        refuse_models_name(name, ("base", "m"))


@pytest.mark.thorough("another engine; test_lora_beside.py has such vectors without HTTP")
async def test_pooling_by_name(chat_options, admin, tmp_path):
    few = {"compilation_config": {"cudagraph_capture_sizes": [], "prefill_sizes": []}, "runner": "pooling"}
    engine = AsyncLLM(**{**chat_options, **few}, enable_lora=True, max_lora_rank=8)
    try:
        app, request = create_app(engine, ServerConfig(**admin)), LoRARequest("a", 1, str(tmp_path / "root" / "a"))
        async with http_client(app) as client, http_client(app, "operator") as operator:
            (own,) = [each.outputs.data async for each in engine.encode("Hello there", lora_request=request)]
            loaded = await operator.post(LOAD, json={"lora_name": "b", "lora_path": "b"})
            assert loaded.status_code == 200, loaded.text
            found = {}
            for model in ("base", "a", "b"):
                answer = await client.post("/v1/embeddings", json={"model": model, "input": "Hello there"})
                assert answer.json()["model"] == model
                found[model] = answer.json()["data"][0]["embedding"]
            assert found["a"] == pytest.approx(own.tolist(), abs=1e-6)
            assert found["base"] != found["a"] != found["b"]
            for path, body in (
                ("/pooling", {"input": "Hello"}),
                ("/score", {"text_1": "Hello", "text_2": "there"}),
                ("/rerank", {"query": "Hello", "documents": ["there"]}),
                ("/v2/embed", {"texts": ["Hello"], "embedding_types": ["float"]}),
            ):
                assert (await client.post(path, json={**body, "model": "nobody"})).status_code == 404, path
                kept = []
                for model in ("base", "a"):
                    answer = (await client.post(path, json={**body, "model": model})).json()
                    kept.append(
                        {name: value for name, value in answer.items() if name not in ("id", "model", "created")}
                    )
                assert "error" not in kept[0] and kept[0] != kept[1], path
    finally:
        engine.shutdown()
