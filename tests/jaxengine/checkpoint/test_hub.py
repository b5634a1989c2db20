"""Models on the hub: what is asked of it, and what is said when it gives nothing."""

from __future__ import annotations

import dataclasses
import os
import shutil
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import errors

from jaxengine.check.model.shapes import model_config
from jaxengine.checkpoint.model_source import open_model
from jaxengine.config.engine_config import ConfigError, EngineConfig
from tests.conftest import TINY_CHECKPOINT


@pytest.fixture
def asked(monkeypatch, tmp_path) -> list[dict]:
    """A hub that has every model under every name; what it was asked for."""
    calls = []

    def give(name, **options):
        calls.append({"name": name, **options})
        folder = tmp_path / name.replace("/", "--")
        shutil.copytree(TINY_CHECKPOINT, folder, dirs_exist_ok=True)
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", give)
    return calls


def test_token_revisions_and_folder_reach_the_hub(asked, tmp_path):
    config = EngineConfig(
        model="org/model",
        revision="r1",
        tokenizer="org/tokenizer",
        tokenizer_revision="r2",
        hf_token="secret",
        download_dir=str(tmp_path / "cache"),
    )
    source = open_model(config)
    model, weights, tokenizer = asked
    assert [(call["name"], call["revision"]) for call in (model, weights)] == [("org/model", "r1")] * 2
    assert (tokenizer["name"], tokenizer["revision"]) == ("org/tokenizer", "r2")
    assert all((call["token"], call["cache_dir"]) == ("secret", str(tmp_path / "cache")) for call in asked)
    assert not [pattern for pattern in tokenizer["allow_patterns"] if "safetensors" in pattern]
    assert source.tokenizer_path == tmp_path / "org--tokenizer"


def test_a_revision_of_the_tokenizer_alone_is_the_models(asked, tmp_path):
    source = open_model(EngineConfig(model="org/model", tokenizer_revision="r2"))
    assert [(call["name"], call["revision"]) for call in asked] == [
        ("org/model", None),
        ("org/model", None),
        ("org/model", "r2"),
    ]
    assert source.tokenizer_path is not None
    assert open_model(EngineConfig(model="org/model", tokenizer_revision="r2", skip_tokenizer_init=True))
    assert len(asked) == 5


@pytest.mark.parametrize("model", [None, str(TINY_CHECKPOINT)])
def test_a_revision_of_a_tokenizer_that_is_here_is_refused(model):
    with pytest.raises(ConfigError, match="tokenizer_revision is 'r'.*on this machine") as error:
        open_model(EngineConfig(model=model, tokenizer_revision="r"))
    assert error.value.param == "tokenizer_revision"


def test_the_token_stays_with_who_downloads(asked, tiny_options):
    from jaxengine.cluster.host0 import _options
    from jaxengine.runner.start.open import open_resolved

    options = {**tiny_options, "model": "org/model", "max_model_len": 64, "hf_token": "secret"}
    config = EngineConfig.from_options(**{**options, "skip_tokenizer_init": False, "tokenizer": "org/tokenizer"})
    settled = open_resolved(config).config
    assert "secret" not in str(dataclasses.asdict(settled)) and "secret" not in str(_options(config))
    assert settled.tokenizer is not None and os.path.isdir(settled.tokenizer)


def failing(monkeypatch, kind: type[Exception]) -> None:
    """A hub whose client raises an error of its own kind."""

    def fail(*_: object, **__: object):
        raise kind.__new__(kind, "as the hub's client says it")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (
            errors.GatedRepoError,
            "'org/model' is gated on the hub, .*; request access at https://huggingface.co/org/model, then",
        ),
        (errors.RepositoryNotFoundError, "the hub has no such model that you can access; check the spelling"),
        (errors.RevisionNotFoundError, "no branch, tag or commit 'r1' on the hub; leave the revision out"),
        (errors.LocalEntryNotFoundError, "the hub cannot be reached .*; connect this machine, set HF_ENDPOINT"),
        (errors.HFValidationError, "the hub refuses it .HFValidationError"),
    ],
)
@pytest.mark.parametrize("param", ["model", "tokenizer"])
def test_what_the_hub_refuses_is_said_with_the_way_out(monkeypatch, kind, said, param):
    failing(monkeypatch, kind)
    options = (
        {"model": str(TINY_CHECKPOINT), "tokenizer_revision": "r1"} if param == "tokenizer" else {"revision": "r1"}
    )
    with pytest.raises(ConfigError, match=said) as error:
        open_model(EngineConfig(**{**options, param: "org/model"}))
    assert error.value.param == param and "\n" not in str(error.value)


def test_an_unreachable_hub_is_one_short_line(monkeypatch):
    """As the hub's own client tells of it."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match="the hub cannot be reached") as error:
        open_model(EngineConfig(model="org/no-such-model"))
    assert len(str(error.value)) < 500
    with pytest.raises(ConfigError, match="the hub cannot be reached"):
        model_config("org/no-such-model")


@pytest.mark.parametrize("name", ["/nowhere/at/all", "nothing", "./x/y", "a/b/c"])
def test_a_tokenizer_that_is_nowhere(name):
    with pytest.raises(ConfigError, match="there is no tokenizer at .*; name a folder with a tokenizer.json") as error:
        open_model(EngineConfig(model=str(Path(TINY_CHECKPOINT)), tokenizer=name))
    assert error.value.param == "tokenizer"
