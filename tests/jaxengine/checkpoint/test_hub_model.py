"""Which files of a hub repository are downloaded, against a hub that is a folder."""

from __future__ import annotations

import json
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub.utils import filter_repo_objects

from jaxengine.checkpoint.model_source import open_model
from jaxengine.config.engine_config import ConfigError, EngineConfig
from tests.conftest import TINY_CHECKPOINT
from tests.fixtures.drawn_weights import FOLDER
from tests.jaxengine.checkpoint.test_mistral_format import written
from tests.models.weights.gguf.gguf_conversion import converted
from tests.models.weights.gguf.test_gguf_families import tensors_of
from tests.tables import each_row

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A repository of these files; what is downloaded of it is linked into a snapshot, as the client does."""
    repository, snapshot = tmp_path / "repository", tmp_path / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    revisions = []

    def give(name, *, allow_patterns, revision, **_):
        assert name == "org/model"
        revisions.append(revision)
        files = [str(path.relative_to(repository)) for path in repository.rglob("*") if path.is_file()]
        for file in filter_repo_objects(files, allow_patterns=allow_patterns):
            target = snapshot / file
            target.parent.mkdir(parents=True, exist_ok=True)
            if not target.exists():
                target.write_bytes((repository / file).read_bytes())
        return str(snapshot)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", give)

    def put(**files: bytes | str | Path):
        for name, content in files.items():
            path = repository / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(content, Path):
                content = content.read_bytes()
            path.write_bytes(content.encode() if isinstance(content, str) else content)

    def downloaded() -> set[str]:
        return {str(path.relative_to(snapshot)) for path in snapshot.rglob("*") if path.is_file()}

    put.downloaded, put.revisions = downloaded, revisions
    return put


def opened(**options):
    source = open_model(EngineConfig(**{"model": "org/model", "skip_tokenizer_init": True, **options}))
    source.close()
    return source


COPIES = {
    "consolidated.safetensors": b"the same again",
    "consolidated.00.pth": b"the same again",
    "original/model.safetensors": b"the same again",
    "pytorch_model.bin": b"the same again",
    "model.gguf": b"the same again",
    "README.md": b"about",
}


def test_one_file_of_weights_and_no_copies(hub):
    folder = TINY_CHECKPOINT
    hub(**COPIES, **{name: folder / name for name in ("config.json", "model.safetensors")})
    opened()
    assert hub.downloaded() == {"config.json", "model.safetensors"}
    assert hub.revisions == [None, COMMIT]


def test_the_shards_that_the_index_lists(hub):
    folder = FOLDER / "llama3_sharded"
    shards = {path.name: path for path in folder.glob("*.safetensors")}
    assert len(shards) > 1
    index = folder / "model.safetensors.index.json"
    hub(**COPIES, **shards, **{"config.json": folder / "config.json", index.name: index})
    hub(**{"model-00009-of-00009.safetensors": b"of an older version"})
    opened()
    assert hub.downloaded() == {"config.json", index.name, *shards}


def test_only_files_of_mistral_ais_format(hub, tmp_path):
    written("mistral", tmp_path / "native")
    native = {name: tmp_path / "native" / name for name in ("params.json", "consolidated.safetensors")}
    hub(**native, **{"tekken.json": b"{}", "tokenizer.model.v3": b"", "original/model.safetensors": b"again"})
    assert opened().config.architecture == "MistralForCausalLM"
    assert hub.downloaded() == {*native, "tekken.json", "tokenizer.model.v3"}
    with pytest.raises(ConfigError, match="has no config.json on the hub"):
        opened(config_format="hf")


def test_without_weights_none_are_downloaded(hub):
    hub(**COPIES, **{name: TINY_CHECKPOINT / name for name in ("config.json", "model.safetensors")})
    assert opened(load_format="dummy").weights is None
    assert hub.downloaded() == {"config.json"}


@each_row(
    ("files", "message"),
    [
        (["config.json", "onnx/model.bin", "pytorch_model.bin"], r"has pickle weights only \(pytorch_model.bin\)"),
        (
            ["config.json", "original/model.pth", "training_args.bin"],
            "has neither model.safetensors nor model.safetensors.index.json",
        ),
        (None, "has neither model.safetensors .* pickle weights are never read"),  # the hub does not tell
    ],
)
def test_a_repository_without_safetensors(hub, monkeypatch, files, message):
    def listed(name, *, revision, token):
        assert name == "org/model" and revision == COMMIT
        if files is None:
            raise OSError("no network")
        return files

    monkeypatch.setattr(huggingface_hub, "list_repo_files", listed)
    hub(**{"config.json": TINY_CHECKPOINT / "config.json", "pytorch_model.bin": b"weights"})
    with pytest.raises(ConfigError, match=message):
        opened()
    assert hub.downloaded() == {"config.json"} and opened(load_format="dummy").weights is None


@pytest.fixture(scope="module")
def gguf() -> bytes:
    config = json.loads((FOLDER / "granite" / "config.json").read_text())
    return converted(config, tensors_of("granite", config))


@pytest.mark.parametrize("name", ["org/model/some-Q4_K_M.gguf", "org/model:Q4_K_M", "org/model/sub/some[1].Q8_0.gguf"])
def test_a_gguf_file_of_a_repository(hub, gguf, name):
    hub(**{"some-Q4_K_M.gguf": gguf, "some-IQ4_K_M.gguf": b"", "sub/some[1].Q8_0.gguf": gguf, "some-Q8_0.gguf": b""})
    assert opened(model=name).config.architecture == "GraniteForCausalLM"
    assert hub.downloaded() == {"some-Q4_K_M.gguf" if "Q4" in name else "sub/some[1].Q8_0.gguf"}


@pytest.mark.parametrize("name", ["org/model/m-Q4_K_M-00001-of-00002.gguf", "org/model:Q4_K_M"])
def test_all_files_of_a_split_model_are_downloaded(hub, gguf, name):
    parts = {f"m-Q4_K_M-0000{number}-of-00002.gguf": gguf for number in (1, 2)}
    hub(**parts, **{"m-Q8_0-00001-of-00001.gguf": gguf})
    assert opened(model=name).config.architecture == "GraniteForCausalLM"
    assert hub.downloaded() == set(parts)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("org/model:Q5_K_M", "must be one GGUF file of org/model, and these fit: none; name the file itself"),
        ("org/model:Q8_0", "these fit: a-Q8_0.gguf, b.Q8_0.gguf; name the file itself, as org/model/FILE.gguf"),
        ("org/model/absent.gguf", "these fit: none"),
        ("org/model", "no config.json on the hub; name a GGUF file of it, as org/model/FILE.gguf or org/model:Q4_K_M"),
        ("org/model/../x.gguf", "there is no model at"),
        ("org/model/sub/x", "there is no model at"),
        ("org/model:Q4*", "there is no model at|the hub"),
    ],
)
def test_names_of_no_one_file(hub, gguf, name, message):
    hub(**{"a-Q8_0.gguf": gguf, "b.Q8_0.gguf": gguf})
    with pytest.raises(ConfigError, match=message) as error:
        opened(model=name)
    assert error.value.param == "model"
