"""Models, adapters and compiled steps at an S3 server on this machine (moto), through a proxy that fails as real ones,
and at a server of GCS's JSON API.

Both are in no extra, for they are fifty packages: `pip install "moto[server]" s3fs gcsfs gcp-storage-emulator`, then
`--thorough`.
"""

from __future__ import annotations

import http.client
import http.server
import importlib
import importlib.util
import socket
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxengine.checkpoint import remote
from jaxengine.checkpoint.model_source import open_model
from jaxengine.checkpoint.remote import local_adapter
from jaxengine.config.base.errors import ConfigError
from jaxengine.config.engine_config import EngineConfig
from jaxengine.models.build import Build
from jaxengine.models.params.errors import ModelFileError
from jaxengine.models.params.files import ADAPTER_FILES
from jaxengine.models.params.source import WHOLE
from jaxengine.models.registry import build_model
from jaxengine.models.weights.formats.safetensors import SafetensorsCheckpoint
from jaxengine.models.weights.load import load_params
from jaxengine.runner.executables.executable_files import ExecutableFiles

pytestmark = pytest.mark.thorough
FIXTURES = Path(__file__).parents[2] / "fixtures"
FOLDER = FIXTURES / "models" / "llama3_sharded"
SLOW_DOWN = b"<?xml version='1.0'?><Error><Code>SlowDown</Code><Message>hunter2</Message></Error>"


class Proxy(http.server.ThreadingHTTPServer):
    """A proxy of an S3 server. how: "" to pass on; "slow" answers every other GET of weights 503 SlowDown, "denied"
    each 403, "cut" cuts answers short, "dead" closes connections. sent: bytes of weights.
    """

    how, sent, count = "", 0, 0

    def __init__(self, port: int):
        self.port = port
        super().__init__(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.serve_forever, daemon=True).start()


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Proxy

    def do_GET(self) -> None:
        inner = http.client.HTTPConnection("127.0.0.1", self.server.port)
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        inner.request(self.command, self.path, body, dict(self.headers.items()))
        answer = inner.getresponse()
        data, status, is_data = answer.read(), answer.status, ".safetensors" in self.path and self.command == "GET"
        self.server.count += is_data
        how = self.server.how if is_data else ""
        if how == "dead":
            self.close_connection = True
            self.connection.close()
            return
        if how == "denied" or (how == "slow" and self.server.count % 2):
            data, status = SLOW_DOWN, 403 if how == "denied" else 503
        self.server.sent += len(data) if is_data else 0
        self.send_response(status)
        for name, value in answer.getheaders():
            if name.lower() not in ("content-length", "transfer-encoding", "connection", "date", "server"):
                self.send_header(name, value)
        length = answer.getheader("Content-Length") if self.command == "HEAD" else str(len(data))
        self.send_header("Content-Length", length or "0")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data[: len(data) // 2] if how == "cut" else data)
        if how == "cut":
            self.close_connection = True

    do_HEAD = do_PUT = do_GET

    def log_message(self, format: str, *args: object) -> None: ...


@pytest.fixture(scope="module")
def proxy():
    """A server with a model and an adapter in its bucket."""
    if missing := [name for name in ("moto", "s3fs", "flask") if importlib.util.find_spec(name) is None]:
        pytest.skip(f"an S3 server needs {', '.join(missing)}: pip install 'moto[server]' s3fs")
    boto3, server = importlib.import_module("boto3"), importlib.import_module("moto.server")
    inner = server.ThreadedMotoServer("127.0.0.1", 0)
    inner.start()
    port = inner.get_host_and_port()[1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", "name")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "hunter2")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        patch.setattr(remote, "_WAIT_SECONDS", 0.0)
        store = boto3.client("s3", endpoint_url=f"http://127.0.0.1:{port}")
        store.create_bucket(Bucket="bucket")
        for folder, name in ((FOLDER, "model"), (next(iter(sorted((FIXTURES / "peft_adapters").iterdir()))), "one")):
            for file in folder.iterdir():
                store.put_object(Bucket="bucket", Key=f"{name}/{file.name}", Body=file.read_bytes())
        own = Proxy(port)
        patch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{own.server_address[1]}")
        yield own
        own.shutdown()
    inner.stop()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


def options(tmp_path: Path) -> EngineConfig:
    return EngineConfig(model="s3://bucket/model", download_dir=str(tmp_path), skip_tokenizer_init=True)


def test_a_model_is_read_by_its_parts(proxy, tmp_path):
    """Reads fetch each byte of the weights once, and of a shard its own; throttled answers change no array."""
    source, local = open_model(options(tmp_path)), SafetensorsCheckpoint(FOLDER)
    assert isinstance(source.weights, SafetensorsCheckpoint)
    size = sum(file.stat().st_size for file in FOLDER.glob("*.safetensors"))
    load_params(build_model(source.config, Build(np.float32)), source.weights)
    assert source.weights.bytes_read <= proxy.sent <= 1.02 * size
    name = "model.layers.0.mlp.down_proj.weight"
    rows = source.weights.shape(name)[0]
    before, part = proxy.sent, (slice(0, rows // 2), WHOLE)
    np.testing.assert_array_equal(source.weights.read(name, *part), local.read(name, *part))
    assert proxy.sent - before <= 1.02 * local.read(name, *part).nbytes
    proxy.how = "slow"
    np.testing.assert_array_equal(source.weights.read(name), local.read(name))
    for how in ("denied", "cut", "dead"):
        proxy.how = how
        with pytest.raises(ModelFileError, match="4 times") as error:
            source.weights.read(name)
        assert "hunter2" not in str(error.value)
    proxy.how = ""
    source.close()


def test_an_adapter_comes_whole_or_not_at_all(proxy, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    folder = next(iter(sorted((FIXTURES / "peft_adapters").iterdir())))
    for how in ("denied", "cut", "dead"):
        proxy.how = how
        with pytest.raises(ModelFileError, match=r"adapter_model\.safetensors of lora_path .* cannot be read") as error:
            local_adapter("s3://bucket/one")
        assert not [*tmp_path.iterdir()] and "hunter2" not in str(error.value)
    proxy.how = "slow"
    found = Path(local_adapter("s3://bucket/one"))
    assert all((found / name).read_bytes() == (folder / name).read_bytes() for name in ADAPTER_FILES)
    assert [*tmp_path.iterdir()] == [found]
    proxy.how = ""
    with pytest.raises(ModelFileError, match="cannot be read"):
        local_adapter("s3://bucket/nothing")
    with pytest.raises(ConfigError, match="cannot be read|has no config.json"):
        open_model(EngineConfig(model="s3://nowhere/model", download_dir=str(tmp_path)))
    s3fs: Any = importlib.import_module("s3fs")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    s3fs.S3FileSystem.clear_instance_cache()
    with pytest.raises(ConfigError, match=r"cannot be read \(.*; .*credentials of the store|cannot be read"):
        open_model(options(tmp_path))
    s3fs.S3FileSystem.clear_instance_cache()


def test_compiled_steps_are_kept_in_a_bucket(proxy, caplog):
    ExecutableFiles("s3://bucket/steps/own").write("name", b"code")
    files = ExecutableFiles("s3://bucket/steps/own")
    assert files.read("name") == b"code" and files.read("other") is None and files.names("n") == ["name"]
    nowhere = ExecutableFiles("s3://nowhere/steps")
    nowhere.write("name", b"code")
    assert nowhere.read("name") is None and not nowhere.can_keep()
    assert [record.levelname for record in caplog.records if record.name.startswith("jaxengine")] == ["WARNING"]


@pytest.fixture
def bucket(monkeypatch):
    """gcsfs's file system, at a server of GCS's JSON API with an empty bucket."""
    if missing := [name for name in ("gcsfs", "gcp_storage_emulator") if importlib.util.find_spec(name) is None]:
        pytest.skip(f"a GCS server needs {', '.join(missing)}: pip install gcsfs gcp-storage-emulator")
    server = importlib.import_module("gcp_storage_emulator.server")
    port = free_port()
    inner = server.create_server("127.0.0.1", port, in_memory=True, default_bucket="bucket")
    inner.start()
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")  # it asks by gRPC, which that server has not
    monkeypatch.setitem(importlib.import_module("fsspec.config").conf, "gs", {"token": "anon"})
    monkeypatch.setattr(remote, "_WAIT_SECONDS", 0.0)
    fs: Any = importlib.import_module("fsspec").filesystem("gs")
    yield fs
    inner.stop()


def test_gs(bucket, tmp_path, monkeypatch, caplog):
    """A model's weights by range, its other files and an adapter whole, and compiled steps, with what is not there."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    adapter = next(iter(sorted((FIXTURES / "peft_adapters").iterdir())))
    for folder, name in ((FOLDER, "model"), (adapter, "one")):
        for file in folder.iterdir():
            bucket.pipe_file(f"bucket/{name}/{file.name}", file.read_bytes())
    source = open_model(EngineConfig(model="gs://bucket/model", download_dir=str(tmp_path), skip_tokenizer_init=True))
    local = SafetensorsCheckpoint(FOLDER)
    assert isinstance(source.weights, SafetensorsCheckpoint)
    name = "model.layers.0.mlp.down_proj.weight"
    before, part = source.weights.bytes_read, (slice(0, source.weights.shape(name)[0] // 2), WHOLE)
    np.testing.assert_array_equal(source.weights.read(name, *part), local.read(name, *part))
    assert source.weights.bytes_read - before <= 1.02 * local.read(name, *part).nbytes
    load_params(build_model(source.config, Build(np.float32)), source.weights)
    source.close()
    found = Path(local_adapter("gs://bucket/one"))
    assert all((found / name).read_bytes() == (adapter / name).read_bytes() for name in ADAPTER_FILES)
    with pytest.raises(ModelFileError, match="cannot be read|has no adapter_config.json"):
        local_adapter("gs://bucket/nothing")
    ExecutableFiles("gs://bucket/steps/own").write("name", b"code")
    files = ExecutableFiles("gs://bucket/steps/own")
    assert files.read("name") == b"code" and files.read("other") is None and files.names("n") == ["name"]
    assert not [record for record in caplog.records if record.name.startswith("jaxengine")]
    nowhere = ExecutableFiles("gs://nowhere/steps")
    nowhere.write("name", b"code")
    assert nowhere.read("name") is None and not nowhere.can_keep()
