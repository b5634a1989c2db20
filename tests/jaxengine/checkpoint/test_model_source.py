"""What a model's name may be, and what is said of one that cannot be used."""

from __future__ import annotations

import json
import os
import shutil
import tracemalloc
from pathlib import Path

import pytest

from jaxengine import LLM
from jaxengine.checkpoint.model_source import as_it_sees, open_model
from jaxengine.commands.calibrate import calibrate
from jaxengine.commands.cli import main
from jaxengine.config.base.platforms import PLATFORMS
from jaxengine.config.engine_config import ConfigError, EngineConfig
from jaxengine.models.params.errors import ModelFileError
from jaxengine.models.registry import read_hf
from jaxengine.models.weights.formats.orbax import read_layout
from jaxengine.models.weights.formats.safetensors import LocalFile
from tests.conftest import TINY_CHECKPOINT
from tests.fixtures import unit_pictures
from tests.fixtures.drawn_weights import checkpoint
from tests.models.config.test_sounds import GEMMA4
from tests.tables import each_row


def copy(tmp_path) -> Path:
    # Without what heads were recorded with.
    shutil.copytree(TINY_CHECKPOINT, tmp_path / "model", ignore=shutil.ignore_patterns("eagle*.*", "dflash.*"))
    return tmp_path / "model"


def test_no_name_is_the_default_model():
    source = open_model(EngineConfig())
    assert (source.config.num_layers, source.config.vocab_size) == (30, 49152)
    tokenizer = source.load_tokenizer(EngineConfig(chat_template_content_format="openai"))
    assert tokenizer.eos_token_id == 2 and tokenizer.content_format == "openai"
    assert source.generation_defaults == {"temperature": 0.2, "top_p": 0.9}
    assert open_model(EngineConfig(generation_config="vllm")).generation_defaults == {}
    assert source.load_tokenizer(EngineConfig(skip_tokenizer_init=True)) is None


@pytest.mark.parametrize("name", ["/nowhere/at/all", "nothing", "./x/y", "a/b/c"])
def test_a_name_of_nothing_is_refused(name):
    with pytest.raises(ConfigError, match="GGUF file, a Hugging Face folder, or a hub id"):
        open_model(EngineConfig(model=name))


def test_the_files_of_a_refused_model_are_closed(tmp_path, monkeypatch):
    folder, opened, init = copy(tmp_path), [], LocalFile.__init__

    def opening(self, path):
        init(self, path)
        opened.append(self)

    def closed() -> bool:
        each, opened[:] = list(opened), []
        return bool(each) and all(file._fd < 0 for file in each)

    monkeypatch.setattr(LocalFile, "__init__", opening)
    for options in (
        {"quantization": "gguf"},
        {"tokenizer": "/nowhere/at/all"},
        {"steering_vectors": {"a": "/nowhere"}},
    ):
        with pytest.raises((ConfigError, ModelFileError)):
            open_model(EngineConfig(model=str(folder), **options))
        assert closed(), options
    assert main(["convert", str(folder), str(tmp_path)]) == 2  # a folder that is there
    assert closed()
    (tmp_path / "texts").write_text("a text")
    with pytest.raises(ModelFileError, match="has no tokenizer.json"):
        calibrate(EngineConfig(model=str(folder)), tmp_path / "texts", tmp_path / "largest")
    assert closed()


def test_load_format_must_fit(tmp_path):
    folder = copy(tmp_path)
    with pytest.raises(ConfigError) as error:
        open_model(EngineConfig(model=str(folder), load_format="gguf"))
    assert error.value.param == "load_format"
    for options in ({"load_format": "safetensors"}, {"config_format": "mistral"}, {"tokenizer_mode": "mistral"}):
        with pytest.raises(ConfigError, match="for a file, ") as error:  # the default model, a GGUF file
            open_model(EngineConfig(**options))
        assert error.value.param == next(iter(options))
    assert open_model(EngineConfig(model=str(folder), load_format="dummy")).weights is None


def test_generation_config_gives_defaults(tmp_path):
    folder = copy(tmp_path)
    path = folder / "generation_config.json"
    given = {"temperature": 0.6, "top_p": 0.9, "max_new_tokens": 7, "skip_special_tokens": False, "do_sample": True}
    path.write_text(json.dumps(given))
    assert open_model(EngineConfig(model=str(folder))).generation_defaults == {
        "temperature": 0.6,
        "top_p": 0.9,
        "max_tokens": 7,
        "skip_special_tokens": False,
    }
    assert open_model(EngineConfig(model=str(folder), generation_config="vllm")).generation_defaults == {}
    path.write_text("[")
    with pytest.raises(ModelFileError, match="not JSON"):
        open_model(EngineConfig(model=str(folder)))


def test_ends_of_generation_config_are_the_models(tmp_path):
    folder, other = copy(tmp_path), tmp_path / "other"
    shutil.copytree(folder, other)
    own = open_model(EngineConfig(model=str(folder))).config.eos_token_ids
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))

    def ends(**options):
        return open_model(EngineConfig(model=str(folder), **options)).config.eos_token_ids

    for options in ({}, {"skip_tokenizer_init": True}, {"tokenizer": str(other)}, {"generation_config": "vllm"}):
        assert ends(**options) == (*own, 7, 9), options
    (other / "generation_config.json").write_text(json.dumps({"eos_token_id": 11}))
    assert ends(generation_config=str(other)) == (*own, 11)
    (other / "generation_config.json").write_text(json.dumps({"temperature": 0.5}))
    assert ends(generation_config=str(other)) == own
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 1 << 20]}))
    assert ends() == (*own, 7)  # no token has the other
    for wrong in (True, "7", [-1]):
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": wrong}))
        with pytest.raises(ModelFileError, match="generation_config.json: eos_token_id must be"):
            ends(skip_tokenizer_init=True)


def test_suppressed_tokens_of_generation_config_are_the_models(tmp_path):
    folder = copy(tmp_path)
    cases = (
        ([5, 3, 1 << 20, 5], (5, 3)),
        (4, (4,)),
        (None, ()),
        ([-1], ()),
        (-1, ()),
        ([*range(99)] * 20, (*range(99),)),
    )
    for given, expected in cases:
        (folder / "generation_config.json").write_text(json.dumps({"suppress_tokens": given}))
        for source in "auto", "vllm":
            config = EngineConfig(model=str(folder), generation_config=source)
            assert open_model(config).config.suppressed_tokens == expected
    for wrong in ["a"], [-2], [True], [*range(128)]:
        (folder / "generation_config.json").write_text(json.dumps({"suppress_tokens": wrong}))
        with pytest.raises(ModelFileError, match="generation_config.json: suppress_tokens must be"):
            open_model(EngineConfig(model=str(folder)))


def test_defaults_of_another_folder_and_of_the_user_go_before_the_models(tmp_path):
    folder, other = copy(tmp_path), tmp_path / "other"
    other.mkdir()
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.6, "top_p": 0.9}))
    (other / "generation_config.json").write_text(json.dumps({"top_k": 5, "presence_penalty": 0.5}))

    def defaults(**options):
        return open_model(EngineConfig(model=str(folder), **options)).generation_defaults

    assert defaults(generation_config=str(other)) == {"top_k": 5, "presence_penalty": 0.5}
    override = {"temperature": 0.1, "max_new_tokens": 9}
    assert defaults(override_generation_config=override) == {"temperature": 0.1, "top_p": 0.9, "max_tokens": 9}
    assert defaults(generation_config="vllm", override_generation_config=override) == {
        "temperature": 0.1,
        "max_tokens": 9,
    }
    with pytest.raises(ConfigError, match="there is no .*nowhere/generation_config.json; name a folder"):
        defaults(generation_config="nowhere")
    with pytest.raises(ConfigError, match="override_generation_config has 'top'; it may have temperature"):
        defaults(override_generation_config={"top": 1})
    with pytest.raises(ConfigError, match="temperature must be a number from 0 to 2, got 3; set override") as error:
        LLM(str(folder), skip_tokenizer_init=True, override_generation_config={"temperature": 3})
    assert error.value.param == "override_generation_config"


def test_a_folder_that_is_no_model_says_what_to_name(tmp_path):
    with pytest.raises(ModelFileError, match="has no config.json; name a folder with config.json, tokenizer.json"):
        open_model(EngineConfig(model=str(tmp_path)))
    folder = copy(tmp_path)
    with pytest.raises(ModelFileError, match=f"has no config.json; name the model inside, '{folder}'"):
        open_model(EngineConfig(model=str(tmp_path)))
    (tmp_path / "x.gguf").touch()
    with pytest.raises(ModelFileError, match="has no config.json; name the GGUF file itself, '.*x.gguf'"):
        open_model(EngineConfig(model=str(tmp_path)))
    with pytest.raises(ConfigError, match=f"is one file of a Hugging Face folder; name the folder, '{folder}'"):
        open_model(EngineConfig(model=str(folder / "model.safetensors")))


def test_ropes_and_other_fields_of_the_user(tmp_path):
    """As options of their own, as vLLM once had them, or in hf_overrides; a context length follows."""
    folder, yarn = str(copy(tmp_path)), {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    for options in (
        {"rope_scaling": yarn, "rope_theta": 5000},
        {"hf_overrides": {"rope_scaling": yarn, "rope_theta": 5000}},
        {"hf_overrides": {"rope_parameters": yarn | {"rope_theta": 5000}}},
        {"hf_overrides": {"rope_theta": 5000}, "rope_scaling": yarn},
    ):
        model = open_model(EngineConfig.from_options(model=folder, **options)).config
        rope = model.attention[0].rope
        assert (rope.theta, rope.scaling.factor, model.max_position_embeddings) == (5000, 4.0, 128), options
    gguf = open_model(EngineConfig.from_options(rope_theta=5000, max_model_len=100)).config
    assert gguf.attention[0].rope.theta == 5000
    for options, says in (
        ({"rope_theta": 5000, "hf_overrides": {"rope_theta": 1}}, "rope_theta is given twice"),
        ({"hf_overrides": {"rope_thetas": 1}}, "hf_overrides has 'rope_thetas', which this model's configuration"),
        ({"hf_overrides": [1]}, "hf_overrides is .*a dict of fields"),
        ({"hf_overrides": {1: 1}}, "hf_overrides is 1; allowed: names of fields"),
        ({"model": None, "hf_overrides": {"vocab_size": 1}}, "'vocab_size', which is not read of a GGUF file"),
    ):
        with pytest.raises(ConfigError, match=says):
            open_model(EngineConfig.from_options(**{"model": folder, **options}))
    with pytest.raises(ModelFileError, match=r"rope_type must be one of .*'x' \(with hf_overrides, rope_scaling\)"):
        open_model(EngineConfig.from_options(model=folder, rope_scaling={"rope_type": "x"}))


def test_an_unknown_architecture_names_file_and_way_out(tmp_path):
    folder = copy(tmp_path)
    unknown(folder)
    said = f"{folder}/config.json: the architecture 'FuyuForCausalLM' is not supported; .*register_model"
    with pytest.raises(ModelFileError, match=said):
        open_model(EngineConfig(model=str(folder)))


def test_a_missing_tokenizer_names_folder_and_way_out(tmp_path):
    folder = copy(tmp_path)
    source = open_model(EngineConfig(model=str(folder)))
    with pytest.raises(ModelFileError, match=f"^{folder}: has no tokenizer.json; name another with the option"):
        source.load_tokenizer(EngineConfig())
    (folder / "tiktoken.model").touch()
    with pytest.raises(ModelFileError, match="tiktoken.model alone is not read for .*: transformers.AutoTokenizer"):
        source.load_tokenizer(EngineConfig())


def test_a_family_without_chat_templates_has_the_usual_one(tmp_path):
    """Unless its folder has one."""
    name = "deepseek_ocr_vision"
    folder = unit_pictures.write_checkpoint(tmp_path / "model", name, checkpoint(name))
    messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "w3"}]}]

    def written() -> str:
        config = EngineConfig(model=str(folder))
        return open_model(config).load_tokenizer(config).apply_chat_template(messages, placeholder=lambda _: "<image>")

    assert written() == "<image>\nw3"
    (folder / "chat_template.jinja").write_text("w4{{ messages[0]['content'] }}")
    assert written() == "w4<image>\nw3"


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
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["FuyuForCausalLM"]}))


def remote_code(folder):
    config = json.loads((folder / "config.json").read_text())
    canary = folder / "canary"
    (folder / "modeling.py").write_text(f"open({str(canary)!r}, 'w').close()")
    auto = {"AutoConfig": "modeling.Config", "AutoModelForCausalLM": "modeling.Model"}
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["Model"], "auto_map": auto}))


@pytest.mark.parametrize(
    ("damage", "file"),
    [
        (truncated, "model.safetensors"),
        (lambda folder: (folder / "model.safetensors").unlink(), "model.safetensors"),
        (lambda folder: (folder / "config.json").unlink(), "config.json"),
        (lambda folder: (folder / "config.json").write_text("{"), "config.json"),
        (unknown, "config.json"),
        (remote_code, "config.json"),
    ],
)
def test_a_damaged_folder_is_one_clear_error(tmp_path, tiny_options, damage, file):
    folder = copy(tmp_path)
    damage(folder)
    with pytest.raises(ModelFileError, match=file):
        LLM(**{**tiny_options, "model": str(folder), "max_model_len": 32})
    assert not (folder / "canary").exists()


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "layout.json"])
def test_files_that_never_end_or_lie_elsewhere(tmp_path, name):
    """A pipe would wait for ever, /dev/zero fills the memory, and what a link leads to is nobody's business."""
    folder = copy(tmp_path)
    file = folder / name
    for make, message in (
        (os.mkfifo, "must be a regular file"),
        (lambda path: path.symlink_to("/dev/zero"), "links must not lead out"),
        (lambda path: path.symlink_to("/etc/passwd"), "links must not lead out"),
        (Path.mkdir, "must be a regular file"),
    ):
        file.unlink(missing_ok=True)
        make(file)
        with pytest.raises(ModelFileError, match=message):
            open_model(EngineConfig(model=str(folder), load_format="dummy"))
            read_layout(folder)


def test_a_link_out_of_the_folder_is_not_copied(tmp_path):
    folder = copy(tmp_path)
    source = open_model(EngineConfig(model=str(folder), load_format="dummy"))
    assert source.files_beside_weights() == [folder / "config.json"]
    (folder / "chat_template.jinja").symlink_to("/etc/passwd")
    with pytest.raises(ModelFileError, match="links must not lead out.*chat_template.jinja"):
        source.files_beside_weights()


def test_sizes_are_bounded_before_anything_is_made_of_them(tmp_path):
    folder = copy(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    tracemalloc.start()
    try:
        for field, value in (
            *((name, 2**28) for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")),
            *((name, 2**28) for name in ("num_attention_heads", "num_key_value_heads", "head_dim")),
            ("max_position_embeddings", 2**31),
            ("rms_norm_eps", 10**400),
            ("num_attention_heads", 10**400),
            ("eos_token_id", [1] * 10_000),
        ):
            (folder / "config.json").write_text(json.dumps({**config, field: value}))
            with pytest.raises(ModelFileError, match=r"config\.json: "):
                open_model(EngineConfig(model=str(folder), load_format="dummy"))
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", ["a\0b/c", "/" + "a" * 5000, "~nobody-of-this-name/model", "\ud800", "/dev/zero"])
def test_names_that_no_file_can_have(name):
    with pytest.raises((ConfigError, ModelFileError)) as error:
        open_model(EngineConfig(model=name))
    assert len(str(error.value)) < 1000


@pytest.mark.parametrize("content", [b"", b"GGUF", b"GGUF\x03\x00\x00\x00" + b"\xff" * 16, b"x" * 1000])
def test_a_damaged_file_is_one_clear_error(tmp_path, content):
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelFileError, match=r"model\.gguf"):
        LLM(model=str(path))


@each_row(
    ("limits", "hears"),
    [
        ({}, [False, True]),
        ({"image": 0}, [False, True]),  # videos are seen
        ({"audio": 0}, [False]),
        ({"image": 0, "video": 0}, [True]),
        ({"image": 0, "video": 0, "audio": 0}, []),
    ],
)
def test_towers_of_what_requests_may_not_have_are_left_out(limits, hears):
    model = as_it_sees(read_hf(GEMMA4), EngineConfig(limit_mm_per_prompt=limits))
    assert [tower.hears for tower in model.towers] == hears
    assert (model.tower is None) == (not hears) and (model.sound_tower is None) == (len(hears) < 2)


def test_no_images_and_a_tower_that_takes_nothing_else():
    model = as_it_sees(read_hf({**GEMMA4, "audio_config": None}), config := EngineConfig(limit_mm_per_prompt="image=0"))
    with pytest.raises(ConfigError, match="is image=0, but images are all that this model.s tower takes; add video=0"):
        config.resolved(model, PLATFORMS["cpu"], {})
