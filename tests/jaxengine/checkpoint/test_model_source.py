"""What a model's name may be, and what is said of one that cannot be used."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from jaxengine import LLM
from jaxengine.checkpoint.model_source import open_model
from jaxengine.config.engine_config import ConfigError, EngineConfig
from models.config.fields import ModelConfigError
from models.weights.errors import ModelFileError
from tests.conftest import TINY_CHECKPOINT


def copy(tmp_path) -> Path:
    shutil.copytree(TINY_CHECKPOINT, tmp_path / "model")
    return tmp_path / "model"


def test_no_name_is_the_default_model():
    source = open_model(EngineConfig())
    assert (source.config.num_layers, source.config.vocab_size) == (30, 49152)
    assert source.load_tokenizer(EngineConfig()).eos_token_id == 2
    assert source.generation_defaults == {"temperature": 0.2, "top_p": 0.9}
    assert open_model(EngineConfig(generation_config="vllm")).generation_defaults == {}
    assert source.load_tokenizer(EngineConfig(skip_tokenizer_init=True)) is None


@pytest.mark.parametrize("name", ["/nowhere/at/all", "nothing", "./x/y", "a/b/c"])
def test_a_name_of_nothing_is_refused(name):
    with pytest.raises(ConfigError, match="GGUF file, a Hugging Face folder, or a hub id"):
        open_model(EngineConfig(model=name))


def test_load_format_must_fit(tmp_path):
    folder = copy(tmp_path)
    with pytest.raises(ConfigError) as error:
        open_model(EngineConfig(model=str(folder), load_format="gguf"))
    assert error.value.param == "load_format"
    with pytest.raises(ConfigError):
        open_model(EngineConfig(load_format="safetensors"))
    assert open_model(EngineConfig(model=str(folder), load_format="dummy")).weights is None


def test_generation_config_gives_defaults(tmp_path):
    folder = copy(tmp_path)
    path = folder / "generation_config.json"
    path.write_text(json.dumps({"temperature": 0.6, "top_p": 0.9, "max_new_tokens": 7, "do_sample": True}))
    assert open_model(EngineConfig(model=str(folder))).generation_defaults == {
        "temperature": 0.6,
        "top_p": 0.9,
        "max_tokens": 7,
    }
    assert open_model(EngineConfig(model=str(folder), generation_config="vllm")).generation_defaults == {}
    path.write_text("[")
    with pytest.raises(ModelFileError, match="not JSON"):
        open_model(EngineConfig(model=str(folder)))


def test_default_params_are_used(tmp_path, tiny_options):
    folder = Path(tiny_options["model"])
    target = tmp_path / "model"
    shutil.copytree(folder, target)
    (target / "generation_config.json").write_text(json.dumps({"temperature": 0.0, "max_new_tokens": 3}))
    llm = LLM(**{**tiny_options, "model": str(target)})
    assert len(llm.generate({"prompt_token_ids": [5, 6]}, use_tqdm=False)[0].outputs[0].token_ids) == 3


def truncated(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def unknown(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["GPT2LMHeadModel"]}))


def remote_code(folder):
    config = json.loads((folder / "config.json").read_text())
    canary = folder / "canary"
    (folder / "modeling.py").write_text(f"open({str(canary)!r}, 'w').close()")
    auto = {"AutoConfig": "modeling.Config", "AutoModelForCausalLM": "modeling.Model"}
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["Model"], "auto_map": auto}))


@pytest.mark.parametrize(
    ("damage", "error"),
    [
        (truncated, ModelFileError),
        (lambda folder: (folder / "model.safetensors").unlink(), ModelFileError),
        (lambda folder: (folder / "config.json").unlink(), ModelConfigError),
        (lambda folder: (folder / "config.json").write_text("{"), ModelConfigError),
        (unknown, ModelConfigError),
        (remote_code, ModelConfigError),
    ],
)
def test_a_damaged_folder_is_one_clear_error(tmp_path, tiny_options, damage, error):
    folder = copy(tmp_path)
    damage(folder)
    with pytest.raises(error):
        LLM(**{**tiny_options, "model": str(folder), "max_model_len": 32})
    assert not (folder / "canary").exists()


@pytest.mark.parametrize("content", [b"", b"GGUF", b"GGUF\x03\x00\x00\x00" + b"\xff" * 16, b"x" * 1000])
def test_a_damaged_file_is_one_clear_error(tmp_path, content):
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelFileError, match=r"model\.gguf"):
        LLM(model=str(path))
