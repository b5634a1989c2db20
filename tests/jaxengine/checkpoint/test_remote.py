"""Models at URLs: weights are read in ranges, only those that are needed, and what is no model's address is refused."""

from __future__ import annotations

import dataclasses
import importlib.util
import logging
from pathlib import Path

import fsspec
import huggingface_hub.constants
import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from jaxengine.checkpoint import remote
from jaxengine.checkpoint.model_source import open_model
from jaxengine.checkpoint.remote import RemoteFolder, local_adapter
from jaxengine.config.base.errors import ConfigError
from jaxengine.config.engine_config import EngineConfig
from jaxengine.models.build import Build
from jaxengine.models.params.errors import ModelFileError
from jaxengine.models.params.files import ADAPTER_FILES
from jaxengine.models.params.source import WHOLE
from jaxengine.models.registry import build_model
from jaxengine.models.weights.formats.safetensors import SafetensorsCheckpoint
from jaxengine.models.weights.load import load_params
from tests.tables import each_row

FOLDER = Path(__file__).parents[2] / "fixtures" / "models" / "llama3_sharded"
SECRET = "hunter2"


@pytest.fixture
def bucket(tmp_path, monkeypatch):
    """The options of a model in fsspec's memory, and the ranges of weights that were read: (path, bytes)."""
    store, ranges = fsspec.filesystem("memory"), []
    for file in FOLDER.iterdir():
        store.pipe_file(f"/bucket/model/{file.name}", file.read_bytes())
    plain = MemoryFileSystem.cat_file

    def counted(self, path, start=None, end=None, **more):
        data = plain(self, path, start, end, **more)
        if path.endswith(".safetensors"):
            ranges.append((path, len(data)))
        return data

    monkeypatch.setattr(MemoryFileSystem, "cat_file", counted)
    monkeypatch.setattr(remote, "_WAIT_SECONDS", 0.0)
    options = {"model": "memory://bucket/model", "download_dir": str(tmp_path), "skip_tokenizer_init": True}
    yield EngineConfig(**options), ranges
    store.rm("/bucket", recursive=True)


def test_each_byte_is_read_once(bucket, monkeypatch):
    """All weights, in ranges; of a shard its own rows; and rows once for the columns of two devices."""
    config, ranges = bucket
    monkeypatch.setattr(remote, "_RANGE_BYTES", 1000)
    source, local = open_model(config), SafetensorsCheckpoint(FOLDER)
    assert isinstance(source.weights, SafetensorsCheckpoint) and not list(source.path.glob("*.safetensors"))
    size = sum(file.stat().st_size for file in FOLDER.glob("*.safetensors"))
    headers = sum(count for _, count in ranges)
    assert headers < size / 20 and len({path for path, _ in ranges}) > 1
    load_params(build_model(source.config, Build(np.float32)), source.weights)
    assert sum(count for _, count in ranges) == source.weights.bytes_read <= 1.02 * size
    assert max(count for _, count in ranges) <= 1000
    name = "model.layers.0.mlp.down_proj.weight"
    rows, columns = source.weights.shape(name)
    for parts, wanted in (
        ([(slice(0, rows // 2), WHOLE)], 0.5),
        ([(WHOLE, slice(0, columns // 2)), (WHOLE, slice(columns // 2, columns))], 1.0),
    ):
        ranges.clear()
        for part in parts:
            np.testing.assert_array_equal(source.weights.read(name, *part), local.read(name, *part), strict=True)
        assert sum(count for _, count in ranges) == wanted * local.read(name).nbytes
    source.close()
    assert open_model(dataclasses.replace(config, load_format="runai_streamer")).path == source.path
    assert len([*source.path.parent.iterdir()]) == 1


def test_an_adapter_is_downloaded(tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    folder = next(iter(sorted((FOLDER.parents[1] / "peft_adapters").iterdir())))
    store = fsspec.filesystem("memory")
    for file in folder.iterdir():
        store.pipe_file(f"/adapters/one/{file.name}", file.read_bytes())
    found = Path(local_adapter("memory://adapters/one"))
    assert found.parent == tmp_path and {file.name for file in found.iterdir()} == set(ADAPTER_FILES)
    assert all((found / name).read_bytes() == (folder / name).read_bytes() for name in ADAPTER_FILES)
    with monkeypatch.context() as patch, pytest.raises(OSError, match="no space"):
        patch.setattr(remote.os, "replace", lambda made, target: (_ for _ in ()).throw(OSError("no space")))
        store.pipe_file(f"/adapters/one/{ADAPTER_FILES[0]}", b"{}")
        local_adapter("memory://adapters/one")
    assert [*tmp_path.iterdir()] == [found]
    store.rm("/adapters", recursive=True)
    with pytest.raises(ModelFileError, match="lora_path 'memory://adapters/one' cannot be read"):
        local_adapter("memory://adapters/one")
    assert local_adapter("/some/folder") == "/some/folder"


def test_a_folder_of_many_files_is_refused_and_not_cut(bucket, monkeypatch):
    config, _ = bucket
    monkeypatch.setattr(remote, "_MOST_FILES", 7)
    store = fsspec.filesystem("memory")
    for number in range(8):
        store.pipe_file(f"/bucket/model/a{number}.json", b"{}")
    with pytest.raises(ConfigError, match=r"has 1\d files of \*\.json.*allowed: 7"):
        open_model(config)


def test_a_store_that_fails(bucket, monkeypatch, caplog):
    """A range is asked for again; what fails for long is one error, which repeats nothing that the store says."""
    config, _ = bucket
    calls, plain = [], MemoryFileSystem.cat_file

    def failing(self, path, start=None, end=None, **more):
        calls.append(path)
        if path.endswith(".safetensors") and (how["always"] or len(calls) % 2):
            raise RuntimeError(f"Authorization: {SECRET}")
        data = plain(self, path, start, end, **more)
        return data[:-1] if how["cut"] and path.endswith(".safetensors") else data

    how = {"always": False, "cut": False}
    monkeypatch.setattr(MemoryFileSystem, "cat_file", failing)
    source = open_model(config)
    name = "model.norm.weight"
    np.testing.assert_array_equal(source.weights.read(name), SafetensorsCheckpoint(FOLDER).read(name))
    for which in how:
        how = {**dict.fromkeys(how, False), which: True}
        with caplog.at_level(logging.DEBUG), pytest.raises(ModelFileError, match="4 times") as error:
            source.weights.read(name)
        assert SECRET not in str(error.value) + caplog.text
    fsspec.filesystem("memory").rm("/bucket/model/model.safetensors.index.json")
    with pytest.raises(ModelFileError, match=r"model\.safetensors: cannot be read: FileNotFoundError"):
        open_model(config)
    fsspec.filesystem("memory").rm("/bucket/model/config.json")
    with pytest.raises(ConfigError, match=r"model 'memory://bucket/model' has no config\.json"):
        open_model(config)


@each_row(
    ("url", "problem"),
    [
        ("ftp://bucket/model", "allowed: s3://, gs://, https://"),
        ("s3://key:hunter2@bucket/model", "model is a URL of s3 with credentials"),
        ("https://host/model?X-Amz-Signature=hunter2", "model is a URL of https with credentials, a query"),
        ("https://host/mo\ndel", "model is a URL of https"),
        ("s3://", "allowed: the address of a folder, as s3://BUCKET/FOLDER"),
        ("memory://nowhere/model", "cannot be read (FileNotFoundError"),
        ("gs://bucket/model", "needs the package gcsfs, which is not installed; pip install 'jaxengine[gcs]'"),
    ],
)
def test_addresses_that_are_refused(url, problem):
    with pytest.MonkeyPatch.context() as patch, pytest.raises(ConfigError) as error:
        find_spec = importlib.util.find_spec
        patch.setattr(importlib.util, "find_spec", lambda name: None if name == "gcsfs" else find_spec(name))
        RemoteFolder(url).download("/nowhere")
    assert problem in str(error.value) and SECRET not in str(error.value)


def test_formats_that_are_not_read_are_refused_with_the_reason():
    for name, reason in (("pt", "pickles"), ("npcache", "pickles"), ("tensorizer", "a format of their own")):
        with pytest.raises(ConfigError, match=f"load_format '{name}' is not read: its files .*{reason}"):
            EngineConfig(model="m", load_format=name)
    with pytest.raises(ConfigError, match="revision is 'main'; allowed: None for a model at a URL"):
        open_model(EngineConfig(model="s3://bucket/model", revision="main"))
