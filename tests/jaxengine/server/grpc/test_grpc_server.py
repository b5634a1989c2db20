"""The server around the services: keys, certificates, health, reflection, limits, its end."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.json_format import MessageToDict, ParseDict
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from jaxengine import __version__
from jaxengine.api.engine_client import EngineDeadError, EngineDrainingError
from jaxengine.config.engine_config import ConfigError
from jaxengine.scheduler.base.errors import OverloadedError
from jaxengine.server.grpc import admin_pb2, server
from jaxengine.server.grpc import inference_pb2 as pb
from jaxengine.server.grpc.admin_pb2_grpc import AdminStub
from jaxengine.server.grpc.client import Client
from jaxengine.server.grpc.inference_pb2_grpc import InferenceStub
from jaxengine.server.grpc.server import ADMIN, INFERENCE
from tests.jaxengine.server.grpc.grpc_rig import certificates, connected, idle, refusal, request, serving

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
LONG = request(stopping={"max_new_tokens": 250, "ignore_eos": True})
REFLECTION = "grpc.reflection.v1alpha.ServerReflection"


def bearer(key: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {key}"),)


class Broken:
    """An engine whose requests and calls end with this error."""

    def __init__(self, engine: Any, error: Exception):
        self.inputs = engine.inputs
        self._error = error

    async def stream(self, *_: Any, **__: Any) -> Any:
        raise self._error
        yield

    async def check_health(self) -> None:
        if isinstance(self._error, EngineDeadError | ValueError):
            raise self._error

    async def utility(self, name: str) -> Any:
        raise self._error


@pytest.fixture
def admin(tmp_path) -> dict[str, Any]:
    (tmp_path / "admin").write_text("operator\n")
    return {"enable_admin": True, "admin_key_file": str(tmp_path / "admin")}


async def code_of(channel: grpc.aio.Channel, path: str, metadata: Any = None) -> grpc.StatusCode:
    """What a call without a message's contents ends with."""
    # All that is sent goes with the call: a write that meets its end would be an error of the client's own.
    return await _code(channel.unary_stream(path)(b"", metadata=metadata))


async def test_every_method_asks_for_a_key(chat_engine, admin):
    """Methods of all services the server says it has, and of none."""
    async with connected(chat_engine, api_key=("first", "second"), **admin) as (channel, _):
        listed = [f"/{service.full_name}/{name}" for service in (INFERENCE, ADMIN) for name in service.methods_by_name]
        paths = [*listed, f"/{REFLECTION}/ServerReflectionInfo", "/jaxengine.v1.Inference/No", "/no.Service/No"]
        assert len(paths) == 24
        wrong = ["", "firs", "first2", "FIRST", "x" * 500]
        strangers = [None, (("authorization", "first"),), (("authorization", "Basic first"),), *map(bearer, wrong)]
        strangers.append(bearer("first") + bearer("second"))
        for path in paths:
            for metadata in strangers:
                assert await code_of(channel, path, metadata) is grpc.StatusCode.UNAUTHENTICATED, (path, metadata)
            for key in ("first", "second", "operator"):
                code = await code_of(channel, path, bearer(key))
                if path.startswith("/jaxengine.v1.Admin/") and key != "operator":
                    assert code is grpc.StatusCode.PERMISSION_DENIED, path
                elif path.endswith("/No"):
                    assert code is grpc.StatusCode.UNIMPLEMENTED
                else:
                    assert code in (grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT), (path, code)
        assert await code_of(channel, "/grpc.health.v1.Health/Check") is grpc.StatusCode.OK


async def test_without_keys_the_admin_service_still_asks_for_its_own(chat_engine, admin):
    async with connected(chat_engine, **admin) as (channel, stub):
        assert (await stub.Tokenize(pb.TokenizeRequest(text="Hello"))).count == 1
        for metadata in (None, bearer("x")):
            code = await code_of(channel, "/jaxengine.v1.Admin/GetLoad", metadata)
            assert code is grpc.StatusCode.UNAUTHENTICATED
        assert await code_of(channel, "/jaxengine.v1.Admin/GetLoad", bearer("operator")) is grpc.StatusCode.OK


async def test_the_admin_service_is_off_by_default(chat_engine):
    async with connected(chat_engine, api_key="key") as (channel, _):
        assert await code_of(channel, "/jaxengine.v1.Admin/GetLoad") is grpc.StatusCode.UNAUTHENTICATED
        assert await code_of(channel, "/jaxengine.v1.Admin/GetLoad", bearer("key")) is grpc.StatusCode.PERMISSION_DENIED


async def test_what_an_operator_sees_and_changes(chat_engine, admin, monkeypatch):
    async with connected(chat_engine, served_model_name=("a", "b"), **admin) as (channel, stub):
        operator, key = AdminStub(channel), {"metadata": bearer("operator")}
        info = await operator.GetServerInfo(admin_pb2.GetServerInfoRequest(), **key)
        assert (info.engine_version, info.api_version) == (__version__, "jaxengine.v1")
        sizes = (info.max_model_len, info.kv_block_size, info.total_kv_blocks, info.max_running_requests)
        assert sizes == (256, 8, 160, 8) and info.parallelism.tensor_parallel_size == 1
        model = await operator.GetModelInfo(admin_pb2.GetModelInfoRequest(), **key)
        assert (model.served_model_name, list(model.served_model_aliases), model.vocab_size) == ("a", ["b"], 49152)
        assert model.supports_text_input and chat_engine.inputs.tokenizer.eos_token_id in model.eos_token_ids

        call = stub.GenerateStream(pb.GenerateRequest(request_id="mine", text="Hi", stopping=LONG.stopping))
        await call.read()
        load = await operator.GetLoad(admin_pb2.GetLoadRequest(), **key)
        assert load.num_requests_running == 1 and load.num_open_calls == 2 and 0 < load.kv_cache_usage < 1
        await operator.Abort(admin_pb2.AbortRequest(request_ids=["nobody", "mine"]), **key)
        last = None
        while (chunk := await call.read()) is not grpc.aio.EOF:
            last = chunk
        assert last is not None and last.outputs.finish_info.finish_reason == pb.FinishInfo.ABORTED
        assert await call.code() is grpc.StatusCode.OK and last.usage.num_output_tokens < 250
        assert (await refusal(operator.Abort(admin_pb2.AbortRequest(), **key)))[2] == ["request_ids"]

        text = request("A prompt that fills several pages of eight tokens, and then some more of them.")
        await stub.Generate(text)
        assert (await stub.Generate(text)).usage.num_cached_tokens > 0
        asked, utility = [], chat_engine.utility
        monkeypatch.setattr(chat_engine, "utility", lambda name, *more: asked.append(name) or utility(name, *more))
        assert (await operator.FlushCache(admin_pb2.FlushCacheRequest(), **key)).success
        assert asked == ["reset_prefix_cache", "reset_mm_cache"]
        assert (await stub.Generate(text)).usage.num_cached_tokens == 0


async def test_errors_of_the_engine(chat_engine):
    secret = RuntimeError("/root/secret/file.py at 0x7f00deadbeef")
    cases = {
        grpc.StatusCode.RESOURCE_EXHAUSTED: OverloadedError("too many wait", retry_after=1.25),
        grpc.StatusCode.UNAVAILABLE: EngineDeadError("the engine has failed: /root/secret"),
        grpc.StatusCode.INTERNAL: secret,
    }
    for code, error in cases.items():
        async with connected(Broken(chat_engine, error)) as (_, stub):
            for call in (
                stub.Generate(request()),
                stub.GenerateStream(request()),
                stub.Score(pb.ScoreRequest(text="Hi there")),
            ):
                refused = await refusal(call)
                assert refused[0] is code and not refused[2]
                assert "secret" not in refused[1] and "0x" not in refused[1]
                after = dict(await call.trailing_metadata()).get("retry-after-ms")
                assert after == ("1250" if code is grpc.StatusCode.RESOURCE_EXHAUSTED else None)


async def test_health_follows_the_engine(chat_engine, monkeypatch):
    monkeypatch.setattr("jaxengine.server.grpc.health.HEALTH_INTERVAL", 0.005)
    engine = Broken(chat_engine, RuntimeError())
    async with connected(engine, api_key="key") as (channel, _):
        health = health_pb2_grpc.HealthStub(channel)
        for name in ("", INFERENCE.full_name):
            watch = health.Watch(health_pb2.HealthCheckRequest(service=name))
            assert (await watch.read()).status == SERVING
            ends = ((EngineDeadError(), NOT_SERVING), (RuntimeError(), SERVING), (ValueError(), NOT_SERVING))
            for error, status in (*ends, (RuntimeError(), SERVING)):
                engine._error = error
                assert (await asyncio.wait_for(watch.read(), 30)).status == status
                assert (await health.Check(health_pb2.HealthCheckRequest(service=name))).status == status
                assert (await health.Check(health_pb2.HealthCheckRequest(service="live"))).status == SERVING
            watch.cancel()
        unknown = await refusal(health.Check(health_pb2.HealthCheckRequest(service=ADMIN.full_name)))
        assert unknown[0] is grpc.StatusCode.NOT_FOUND


async def test_the_end_lets_calls_finish_and_takes_no_new_ones(chat_engine):
    async with serving(chat_engine) as running, grpc.aio.insecure_channel(f"127.0.0.1:{running.port}") as channel:
        stub, watch = InferenceStub(channel), health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == SERVING
        call = stub.GenerateStream(LONG)
        await call.read()
        ending = asyncio.create_task(running.stop(60))
        assert (await watch.read()).status == NOT_SERVING
        assert (await refusal(stub.Generate(request())))[0] is grpc.StatusCode.UNAVAILABLE
        count = 0
        while (chunk := await call.read()) is not grpc.aio.EOF:
            count = chunk.usage.num_output_tokens
        assert count == 250 and await call.code() is grpc.StatusCode.OK
        # The watcher of our health is no reason to wait.
        await asyncio.wait_for(ending, 30)
    await idle(chat_engine)


async def test_the_end_does_not_wait_longer_than_it_may(chat_engine):
    async with serving(chat_engine) as running, grpc.aio.insecure_channel(f"127.0.0.1:{running.port}") as channel:
        call = InferenceStub(channel).GenerateStream(LONG)
        await call.read()
        await asyncio.wait_for(running.stop(0.0), 30)
        assert (await refusal(call))[0] in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
    await idle(chat_engine)


async def test_a_draining_engine_is_unavailable(chat_engine):
    async with connected(Broken(chat_engine, EngineDrainingError("x"))) as (_, stub):
        assert (await refusal(stub.Generate(request())))[:2] == (
            grpc.StatusCode.UNAVAILABLE,
            "the server is shutting down",
        )


async def test_messages_have_a_largest_size(chat_engine):
    async with serving(chat_engine, max_request_bytes=4096) as running:
        address, long = f"127.0.0.1:{running.port}", pb.TokenizeRequest(text="x" * 5000)
        async with grpc.aio.insecure_channel(address) as channel:
            stub = InferenceStub(channel)
            assert (await refusal(stub.Tokenize(long)))[0] is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert (await stub.Tokenize(pb.TokenizeRequest(text="Hello"))).count == 1
            packed = stub.Tokenize(pb.TokenizeRequest(text="x" * 3000), compression=grpc.Compression.Gzip)
            assert (await refusal(packed))[0] is grpc.StatusCode.UNIMPLEMENTED
        huge = (("x-header", "x" * 70_000),)
        async with grpc.aio.insecure_channel(address) as channel:
            refused = await refusal(InferenceStub(channel).Tokenize(pb.TokenizeRequest(text="a"), metadata=huge))
            assert refused[0] is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_more_calls_than_may_be_open_are_refused(chat_engine, monkeypatch):
    monkeypatch.setattr(server, "SPARE_CALLS", 0)
    some = request(stopping={"max_new_tokens": 60, "ignore_eos": True})
    async with connected(chat_engine, max_num_queued_reqs=2) as (_, stub):
        calls = await asyncio.gather(*(_code(stub.GenerateStream(some)) for _ in range(30)))
    assert calls.count(grpc.StatusCode.OK) == 10 and calls.count(grpc.StatusCode.RESOURCE_EXHAUSTED) == 20
    await idle(chat_engine)


async def _code(call: Any) -> grpc.StatusCode:
    with contextlib.suppress(grpc.aio.AioRpcError):
        while await call.read() is not grpc.aio.EOF:
            pass
    return await call.code()


async def test_a_client_that_knows_nothing_but_reflection(chat_engine):
    """As grpcurl: list the services, describe a method, make the messages, call."""

    def use(port: int) -> dict[str, Any]:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            database = ProtoReflectionDescriptorDatabase(channel)
            assert sorted(database.get_services()) == ["grpc.health.v1.Health", REFLECTION, "jaxengine.v1.Inference"]
            pool = DescriptorPool(database)
            method = pool.FindServiceByName("jaxengine.v1.Inference").FindMethodByName("Generate")
            asked = {"text": "Hello there", "temperature": 0, "stopping": {"max_new_tokens": 3}}
            message = ParseDict(asked, GetMessageClass(method.input_type)())
            answer = GetMessageClass(method.output_type)
            call = channel.unary_unary(
                f"/{method.containing_service.full_name}/{method.name}",
                request_serializer=type(message).SerializeToString,
                response_deserializer=answer.FromString,
            )
            return MessageToDict(call(message), preserving_proto_field_name=True)

    async with serving(chat_engine) as running:
        answer = await asyncio.to_thread(use, running.port)
    assert (answer["usage"]["num_prompt_tokens"], answer["usage"]["num_output_tokens"]) == (2, 3)
    assert answer["outputs"][0]["finish_info"]["finish_reason"] == "LENGTH"


@pytest.mark.parametrize(
    ("host", "option", "there"), [("127.0.0.1", False, False), ("0.0.0.0", None, False), ("0.0.0.0", True, True)]
)
async def test_reflection_is_for_this_machine_unless_asked_for(chat_engine, host, option, there):
    async with connected(chat_engine, host=host, enable_reflection=option) as (channel, _):
        code = await code_of(channel, f"/{REFLECTION}/ServerReflectionInfo")
        assert code is (grpc.StatusCode.OK if there else grpc.StatusCode.UNIMPLEMENTED)


async def test_certificates(chat_engine, tmp_path):
    files = certificates(tmp_path)
    read = {name: path.read_bytes() for name, path in files.items()}
    options = {"ssl_certfile": str(files["server.pem"]), "ssl_keyfile": str(files["server.key"])}

    def greet(port: int, **credentials: bytes) -> bool:
        with Client(f"127.0.0.1:{port}", **credentials) as client:
            try:
                return client.tokenize("Hello") == chat_engine.inputs.tokenizer.encode("Hello")
            except grpc.RpcError as error:
                assert error.code() is grpc.StatusCode.UNAVAILABLE  # pyright: ignore
                return False

    known = {"root_certificates": read["ca.pem"]}
    own = {"private_key": read["client.key"], "certificate_chain": read["client.pem"]}
    async with serving(chat_engine, **options) as running:
        assert await asyncio.to_thread(greet, running.port, **known)
        assert not await asyncio.to_thread(greet, running.port)
        assert not await asyncio.to_thread(greet, running.port, root_certificates=read["client.pem"])
        # A new certificate, of another authority, without a restart.
        renewed = certificates((tmp_path / "renewed").absolute())
        for name in ("server.pem", "server.key"):
            shutil.copy(renewed[name], files[name])
        assert not await asyncio.to_thread(greet, running.port, **known)
        assert await asyncio.to_thread(greet, running.port, root_certificates=renewed["ca.pem"].read_bytes())
        # Half of a pair is no reason to stop serving.
        files["server.key"].unlink()
        assert await asyncio.to_thread(greet, running.port, root_certificates=renewed["ca.pem"].read_bytes())
    for name in ("server.pem", "server.key"):
        files[name].write_bytes(read[name])
    async with serving(chat_engine, **options, ssl_ca_certs=str(files["ca.pem"])) as running:
        assert await asyncio.to_thread(greet, running.port, **known, **own)
        assert not await asyncio.to_thread(greet, running.port, **known)
        stranger = {
            "private_key": renewed["client.key"].read_bytes(),
            "certificate_chain": renewed["client.pem"].read_bytes(),
        }
        assert not await asyncio.to_thread(greet, running.port, **known, **stranger)


async def test_what_cannot_be_listened_on_names_its_option(chat_engine, tmp_path):
    (tmp_path / "bad.pem").write_text("no certificate")
    bad = {"ssl_certfile": str(tmp_path / "bad.pem"), "ssl_keyfile": str(tmp_path / "bad.pem")}
    missing = {"ssl_certfile": str(tmp_path / "none"), "ssl_keyfile": str(tmp_path / "bad.pem")}
    cases = {
        "ssl_certfile": missing,
        "grpc_port": {"grpc_port": None},
        "api_key_file": {"api_key_file": str(tmp_path / "none")},
        "grpc_port ": {"host": "203.0.113.1"},
    }
    for name, options in cases.items():
        with pytest.raises(ConfigError, match=name.strip()):
            async with serving(chat_engine, **options):
                pass
    with pytest.raises(ConfigError, match="ssl_certfile|grpc_port"):
        async with serving(chat_engine, **bad):
            pass
