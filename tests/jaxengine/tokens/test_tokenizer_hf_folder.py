"""Tokenizers read from Hugging Face folders: what is read, what is ignored, what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxengine.models.params.errors import ModelFileError
from jaxengine.tokens.tokenizer import Tokenizer

RECORDED = json.loads((Path(__file__).parents[2] / "fixtures" / "tokenizer_ids.json").read_text())
CONFIG = {"bos_token": "<s>", "eos_token": {"content": "</s>", "special": True}, "unk_token": "<unk>"}


@pytest.fixture(scope="module")
def original() -> Tokenizer:
    pieces = RECORDED["sentencepiece"]
    values = {
        "model": "llama",
        "tokens": pieces["tokens"],
        "scores": np.array(pieces["scores"], np.float32),
        "token_type": np.array(pieces["token_type"], np.int32),
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return Tokenizer.from_gguf({f"tokenizer.ggml.{key}": value for key, value in values.items()})


@pytest.fixture
def folder(tmp_path, original):
    """Writes the small vocabulary as a folder; further files by name, given as objects or text."""

    def write(files: dict[str, Any] | None = None, **changes: Any) -> Path:
        content = json.loads(original.backend.to_str()) | changes
        contents = {"tokenizer.json": content, "tokenizer_config.json": CONFIG, **(files or {})}
        for name, value in contents.items():
            (tmp_path / name).write_text(value if isinstance(value, str) else json.dumps(value))
        return tmp_path

    return write


def test_ids_and_roles(folder, original):
    tokenizer = Tokenizer.from_hf_folder(folder())
    for text, expected in zip(RECORDED["texts"], RECORDED["sentencepiece"]["ids"]["space"], strict=True):
        assert tokenizer.encode(text) == expected
        assert tokenizer.decode(expected) == text
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id) == (1, 2, 0)
    assert tokenizer.pad_token_id is None and tokenizer.eos_token_ids == (2,)
    assert tokenizer.all_special_ids == original.all_special_ids and len(tokenizer) == len(original)


def test_roles_from_the_older_map(folder):
    tokenizer = Tokenizer.from_hf_folder(
        folder({"tokenizer_config.json": {"eos_token": None}, "special_tokens_map.json": CONFIG})
    )
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)


@pytest.mark.parametrize(("value", "expected"), [(7, (2, 7)), ([7, 2, 9], (2, 7, 9)), ([7, 600], (2, 7)), (None, (2,))])
def test_further_ends_from_generation_config(folder, value, expected):
    tokenizer = Tokenizer.from_hf_folder(folder({"generation_config.json": {"eos_token_id": value}}))
    assert tokenizer.eos_token_ids == expected


def test_truncation_and_padding_of_the_training_are_dropped(folder):
    truncation = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    padding = {
        "strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": None,
        "pad_id": 0, "pad_type_id": 0, "pad_token": "<unk>",
    }  # fmt: skip
    tokenizer = Tokenizer.from_hf_folder(folder(truncation=truncation, padding=padding))
    assert tokenizer.encode(RECORDED["texts"][1]) == RECORDED["sentencepiece"]["ids"]["space"][1]


def test_tokens_only_the_configuration_knows_are_added(folder):
    added = {"600": {"content": "<|end|>", "special": True}, "601": {"content": "<box>", "special": False}}
    tokenizer = Tokenizer.from_hf_folder(folder({"tokenizer_config.json": CONFIG | {"added_tokens_decoder": added}}))
    assert tokenizer.encode("<|end|><box>", add_special_tokens=False)[:2] == [600, 601]
    assert len(tokenizer) == 602 and 600 in tokenizer.all_special_ids and 601 not in tokenizer.all_special_ids


def test_code_of_the_folder_is_never_run(folder):
    path = folder()
    canary = path / "canary"
    module = f"open({str(canary)!r}, 'w')\nclass Own: pass\n"
    config = CONFIG | {"auto_map": {"AutoTokenizer": ["tokenization_own.Own", None]}, "tokenizer_class": "Own"}
    path = folder({"tokenization_own.py": module, "tokenizer_config.json": config})
    assert Tokenizer.from_hf_folder(path).encode("a") == Tokenizer.from_hf_folder(folder()).encode("a")
    assert not canary.exists()


def test_chat_templates(folder):
    messages = [{"role": "user", "content": "Hi"}]
    named = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]
    in_config = folder({"tokenizer_config.json": CONFIG | {"chat_template": "{{ bos_token }}C"}})
    assert Tokenizer.from_hf_folder(in_config).apply_chat_template(messages) == "<s>C"
    several = Tokenizer.from_hf_folder(folder({"tokenizer_config.json": CONFIG | {"chat_template": named}}))
    assert several.apply_chat_template(messages) == "D"
    assert several.apply_chat_template(messages, tools=[{"type": "function"}]) == "T"
    assert several.apply_chat_template(messages, chat_template="tool_use") == "T"
    assert several.apply_chat_template(messages, chat_template="{{ 1 + 1 }}") == "2"
    own_file = Tokenizer.from_hf_folder(folder({"chat_template.jinja": "F"}))
    assert own_file.apply_chat_template(messages) == "F"


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"tokenizer.json": "{"}, "cannot be used"),
        ({"tokenizer.json": {"model": {"type": "Own"}}}, "cannot be used"),
        ({"tokenizer_config.json": "{"}, "not JSON"),
        ({"tokenizer_config.json": "[" * 100_000}, "not JSON"),
        ({"tokenizer_config.json": []}, "must hold a JSON object, got list"),
        ({"tokenizer_config.json": {"eos_token": "<absent>"}}, "vocabulary does not have"),
        ({"tokenizer_config.json": {"eos_token": 2}}, "must be a token, got 2"),
        ({"tokenizer_config.json": {"added_tokens_decoder": {"x": {}}}}, "must map token ids"),
        ({"tokenizer_config.json": {"added_tokens_decoder": [1]}}, "must map token ids"),
        ({"tokenizer_config.json": {"added_tokens_decoder": {"5": {"content": "<s>"}}}}, "has id 5 here, but 1"),
        (
            {"tokenizer_config.json": {"added_tokens_decoder": {"700": {"content": "<gap>"}}}},
            "has id 700 here, but 600",
        ),
        ({"tokenizer_config.json": {"chat_template": 3}}, "text or a list of named texts"),
        ({"tokenizer_config.json": {"chat_template": [{"name": "default"}]}}, "text or a list of named texts"),
        ({"generation_config.json": {"eos_token_id": [2, -600]}}, "must be token ids >= 0"),
        ({"generation_config.json": {"eos_token_id": True}}, "must be token ids >= 0"),
    ],
)
def test_files_that_are_refused(folder, files, message):
    with pytest.raises(ModelFileError, match=message) as refusal:
        Tokenizer.from_hf_folder(folder(files))
    assert refusal.value.path.endswith(next(iter(files)))


def test_no_tokenizer_and_no_utf8(folder, tmp_path):
    with pytest.raises(ModelFileError, match="has no tokenizer.json"):
        Tokenizer.from_hf_folder(tmp_path)
    with pytest.raises(ModelFileError, match="has no tokenizer.json"):
        Tokenizer.from_hf_folder(tmp_path / "absent")
    path = folder()
    (path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ModelFileError, match="not UTF-8"):
        Tokenizer.from_hf_folder(path)
    (path / "chat_template.jinja").unlink()
    (path / "chat_template.jinja").mkdir()
    with pytest.raises(ModelFileError, match="must be a regular file"):
        Tokenizer.from_hf_folder(path)


def test_a_template_of_elsewhere_is_not_shown(folder, tmp_path_factory):
    secret = tmp_path_factory.mktemp("elsewhere") / "secret"
    secret.write_text("a key")
    path = folder()
    (path / "chat_template.jinja").symlink_to(secret)
    with pytest.raises(ModelFileError, match="links must not lead out"):
        Tokenizer.from_hf_folder(path)


def test_a_panic_of_the_library_is_an_error_like_others(folder):
    """A decoder that takes a letter off a token that has none: Rust panics, and Python gets a BaseException."""
    nothing = {"type": "Replace", "pattern": {"String": "\u2581"}, "content": ""}
    strip = {"type": "Strip", "content": "a", "start": 0, "stop": 1}
    tokenizer = Tokenizer.from_hf_folder(folder(decoder={"type": "Sequence", "decoders": [nothing, strip]}))
    assert tokenizer.decode(tokenizer.encode(" ")) == "\ufffd"
