"""Mistral AI's own tokenizer files and chat formats, against what its library makes of conversations."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest

from jaxengine.models.params.errors import ModelFileError
from jaxengine.scheduler.base.errors import RequestError
from jaxengine.tokens.mistral.dialect import GUARD
from jaxengine.tokens.mistral.template import MistralFormat
from jaxengine.tokens.tokenizer import Tokenizer
from tests.fixtures.mistral_chats import CONVERSATIONS, RECORDED, TOOLS, tekken
from tests.tables import each_row

FIXTURES = Path(__file__).parents[2] / "fixtures"
CHATS = json.loads((FIXTURES / RECORDED).read_text())
PIECES = json.loads((FIXTURES / "vocabularies.json").read_text())["sentencepiece"]
# What the library refuses and a template writes: an answer's thoughts are left out where the format has no place, and
# version 15 may have some in a system message too.
LOOSER = {*(f"v{version} thought" for version in (3, 7, 11)), "v15 thinking parts"}


def folder_of(path: Path, version: int, **changes) -> Path:
    (path / "tekken.json").write_text(json.dumps(tekken(version) | changes))
    return path


def request(name: str):
    """Messages as a server passes them on, and tools."""
    messages, has_tools = CONVERSATIONS[name]
    shown = json.loads(json.dumps(messages))
    for message in shown:
        if isinstance(message["content"], list):
            message["content"] = [{"type": "image"} if "image_url" in part else part for part in message["content"]]
    return shown, TOOLS if has_tools else None


def test_conversations_are_those_of_the_library(tmp_path):
    for version, expected in CHATS["ids"].items():
        tokenizer = Tokenizer.from_hf_folder(folder_of(tmp_path, int(version[1:])))
        assert (tokenizer.bos_token_id, tokenizer.eos_token_ids, tokenizer.pad_token_id) == (1, (2,), 11)
        for name, ids in expected.items():
            messages, tools = request(name)
            if ids is None and f"{version} {name}" not in LOOSER:
                with pytest.raises(RequestError, match="does not take the messages"):
                    tokenizer.apply_chat_template(messages, tools=tools)
                continue
            text = tokenizer.apply_chat_template(messages, tools=tools, placeholder=lambda kind: "[IMG]")
            if ids is not None:
                assert tokenizer.encode(text, add_special_tokens=False) == ids, (version, name, text)


def test_templates_of_sentencepiece_versions(tmp_path):
    """The library puts a space before each text, as the vocabulary does here."""
    path = tmp_path / "chat_template.jinja"
    for version, expected in CHATS["texts"].items():
        tokenizer = Tokenizer.from_hf_folder(folder_of(tmp_path, int(version[1:])))
        template = MistralFormat(int(version[1:])).template()
        for name, text in expected.items():
            messages, tools = request(name)
            if text is not None:
                own = tokenizer.apply_chat_template(messages, tools=tools, chat_template=template)
                assert own.replace(" ", "").replace(GUARD, "") == text.replace(" ", ""), (version, name)
    path.write_text("{{ 'own' }}")  # a folder's own template counts
    assert Tokenizer.from_hf_folder(tmp_path).chat_template == "{{ 'own' }}"


def test_reasoning_effort_and_continued_answers(tmp_path):
    tokenizer = Tokenizer.from_hf_folder(folder_of(tmp_path, 15))
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b "}]
    text = tokenizer.apply_chat_template(messages[:1], chat_template_kwargs={"reasoning_effort": "high"})
    assert text == '<s>[MODEL_SETTINGS]{"reasoning_effort": "high"}[/MODEL_SETTINGS][INST]a[/INST]'
    with pytest.raises(RequestError, match="reasoning_effort must be one of none, high, got low"):
        tokenizer.apply_chat_template(messages[:1], chat_template_kwargs={"reasoning_effort": "low"})
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=False, continue_final_message=True)
    assert text.endswith("[/INST]b")
    for roles in (("user", "tool"), ("user", "assistant", "nobody")):
        with pytest.raises(RequestError, match="is not supported"):
            tokenizer.apply_chat_template([{"role": role, "content": "x", "tool_call_id": "y"} for role in roles])


def test_modes_choose_a_file(tmp_path):
    folder_of(tmp_path, 7)
    own = Tokenizer.from_hf_folder(tmp_path, mode="mistral")
    with pytest.raises(ModelFileError, match="has no tokenizer.json"):
        Tokenizer.from_hf_folder(tmp_path, mode="hf")
    (tmp_path / "tokenizer.json").write_text(own.backend.to_str())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "[INST]"}))
    usual = Tokenizer.from_hf_folder(tmp_path)
    assert (usual.eos_token_id, own.eos_token_id) == (3, 2)
    assert Tokenizer.from_hf_folder(tmp_path, mode="mistral").eos_token_id == 2
    assert (
        usual.chat_template == own.chat_template and Tokenizer.from_hf_folder(tmp_path, mode="hf").chat_template is None
    )
    messages = [{"role": "user", "content": "[/INST]"}]  # stays text with the format's template
    ids = [each.encode(each.apply_chat_template(messages), False) for each in (usual, own)]
    assert ids[0] == ids[1][1:] and ids[0].count(4) == 1  # the usual files name no <s>
    for name in ("tekken.json", "tokenizer.json"):
        (tmp_path / name).unlink()
    with pytest.raises(ModelFileError, match="has no tekken.json or tokenizer.model.v3"):
        Tokenizer.from_hf_folder(tmp_path, mode="mistral")


def test_sentencepiece_files_with_versions(tmp_path):
    for version in (2, 3):
        (tmp_path / f"tokenizer.model.v{version}").write_bytes(base64.b64decode(PIECES["bpe"]["model"]))
    tokenizer = Tokenizer.from_hf_folder(tmp_path)
    assert tokenizer.chat_template == MistralFormat(3).template()
    text = tokenizer.apply_chat_template([{"role": "user", "content": "</s>a b"}])
    assert tokenizer.eos_token_id not in tokenizer.encode(text, False)[1:]
    assert tokenizer.encode("a b")[0] == tokenizer.bos_token_id and tokenizer.decode(tokenizer.encode("a b")) == "a b"
    (tmp_path / "tokenizer.model.v3").rename(tmp_path / "tokenizer.model.v9")
    with pytest.raises(ModelFileError, match="the version must be one of v1, v2, .*, got 9"):
        Tokenizer.from_hf_folder(tmp_path)


def _changed(**config) -> dict:
    return {"config": tekken(7)["config"] | config}


@each_row(
    ("changes", "message"),
    [
        ({"config": []}, "must have a mapping, config, and a list, vocab"),
        (_changed(pattern="("), "tekken.json"),
        (_changed(pattern=""), "must be a regular expression .*pattern"),
        (_changed(version="v9"), "the version must be one of v1, .*, got 9"),
        (_changed(default_vocab_size=5000), "must be more than default_num_special_tokens .*, got 5000"),
        (_changed(default_num_special_tokens=-1), "must be an integer >= 0, got -1 .*default_num_special_tokens"),
        ({"special_tokens": [{"rank": 0}]}, "must be a list of tokens with rank and token_str"),
        ({"special_tokens": [{"rank": 0, "token_str": "ab"}]}, "must have the special tokens <s> and </s>"),
        ({"special_tokens": [{"rank": 99, "token_str": "a"}]}, "must have distinct tokens of ranks below 40"),
        ({"special_tokens": [{"rank": at, "token_str": "a"} for at in (0, 1)]}, "must have distinct tokens"),
        ({"special_tokens": [{"rank": 0, "token_str": "["}]}, "must have tokens of 2 to 128 characters"),
        ({"special_tokens": None} | _changed(version="v11"), "must be a list in version 11"),
        ({"vocab": [{"rank": 0, "token_bytes": "?"}] * 400}, "must have rank and token_bytes in base64"),
        ({"vocab": tekken(7)["vocab"][::-1]}, "must have distinct tokens with the ranks from 0 on"),
    ],
)
def test_faults_of_tekken_json(tmp_path, changes, message):
    with pytest.raises(ModelFileError, match=message):
        Tokenizer.from_hf_folder(folder_of(tmp_path, 7, **changes))
