"""GPT-2's vocab.json and merges.txt without tokenizer.json: ids as transformers finds them, and refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import pre_tokenizers
from transformers import GPT2Tokenizer, RobertaTokenizer, WhisperTokenizer

from jaxengine.models.params.errors import ModelFileError
from jaxengine.models.params.files import read_object
from jaxengine.tokens import hf_tokenizer
from jaxengine.tokens.tokenizer import Tokenizer
from tests.tables import each_row

SPOKEN = ["<|startoftranscript|>", "<|en|>", "<|transcribe|>", "<|notimestamps|>"]
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w", "Ġw o", "r l", "rl d", "Ġ #version", "Ã ©", "Ġ Ġ"]
TEXTS = ["hello world", " hello  world's\n12", "é😀 #version x", "a<mask> b</s>", "<|en|>hello<|notimestamps|>", ""]


def write(folder: Path, first: tuple[str, ...], files: dict[str, Any], merges: str | None = None) -> Path:
    folder.mkdir()
    joined = [line.replace(" ", "") for line in MERGES]
    words = dict.fromkeys([*first, *sorted(pre_tokenizers.ByteLevel.alphabet()), "#version", *joined])
    (folder / "vocab.json").write_text(json.dumps({word: number for number, word in enumerate(words)}))
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *MERGES, ""]) if merges is None else merges)
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    return folder


@each_row(
    ("kind", "first", "files"),
    [
        (GPT2Tokenizer, ("<|endoftext|>",), {"config.json": {"model_type": "gpt2"}}),
        (
            GPT2Tokenizer,
            ("</s>",),
            {
                "config.json": {"model_type": "opt"},
                "tokenizer_config.json": {
                    "tokenizer_class": "GPT2Tokenizer",
                    "add_bos_token": True,
                    "add_prefix_space": True,
                    "bos_token": "</s>",
                    "eos_token": "</s>",
                    "unk_token": "</s>",
                },
            },
        ),
        (
            RobertaTokenizer,
            ("<s>", "<pad>", "</s>", "<unk>", "<mask>"),
            {
                "config.json": {"model_type": "roberta"},
                "tokenizer_config.json": {"add_bos_token": True},  # has no effect: texts are enclosed anyway
                "special_tokens_map.json": {"mask_token": {"content": "<mask>", "lstrip": True}},
            },
        ),
        (
            WhisperTokenizer,
            ("<|endoftext|>",),
            {
                "tokenizer_config.json": {"tokenizer_class": "WhisperTokenizer"},
                "special_tokens_map.json": {"extra_special_tokens": SPOKEN},
                "added_tokens.json": {token: 269 + at for at, token in enumerate(SPOKEN)},
            },
        ),
    ],
)
def test_ids_are_those_of_transformers(tmp_path, kind, first, files, monkeypatch):
    folder = write(tmp_path / str(len([*tmp_path.iterdir()])), first, files)
    read = list[str]()
    with monkeypatch.context() as patch:
        patch.setattr(hf_tokenizer, "read_object", lambda folder, name: read.append(name) or read_object(folder, name))
        ours, theirs = Tokenizer.from_hf_folder(folder), kind.from_pretrained(folder)
    assert len(read) == len({*read})  # each file once
    ends = kind is not WhisperTokenizer  # whose prompts are written token by token
    for text in TEXTS:
        ids = theirs(text, add_special_tokens=ends).input_ids
        assert ours.encode(text, add_special_tokens=ends) == ids, text
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    if kind is RobertaTokenizer:
        assert ours.encode_pair("hello", "world", 0) == theirs("hello", "world").input_ids
    assert ours.eos_token_ids == (theirs.eos_token_id,)
    if kind is WhisperTokenizer:  # as its first checkpoints have them, without an unknown token
        about = {"additional_special_tokens": SPOKEN, "unk_token": {"content": ""}}
        (folder / "special_tokens_map.json").write_text(json.dumps(about))
        first = Tokenizer.from_hf_folder(folder)
        assert first.all_special_ids == ours.all_special_ids > {270, 272} and first.unk_token_id is None


@each_row(
    ("files", "merges", "problem"),
    [
        ({"tokenizer_config.json": {"tokenizer_class": "BertweetTokenizer"}}, None, "vocab.json alone is not read"),
        ({"config.json": {"model_type": "roberta"}}, None, "does not have '<s>', which stands around texts"),
        ({}, "h e\nh\n", "merges.txt: must have two tokens in each line, got 'h'"),
        ({}, "h zz\n", "merges.txt"),
        ({"tokenizer_config.json": {"add_prefix_space": "no"}}, None, "must be true or false, got no"),
        ({"vocab.json": {"a": "b"}}, None, "vocab.json: must map tokens to ids"),
    ],
)
def test_what_is_refused(tmp_path, files, merges, problem):
    files = {"config.json": {"model_type": "gpt2"}, **files}
    folder = write(tmp_path / str(len([*tmp_path.iterdir()])), ("<|endoftext|>",), files, merges)
    with pytest.raises(ModelFileError, match=problem):
        Tokenizer.from_hf_folder(folder)
