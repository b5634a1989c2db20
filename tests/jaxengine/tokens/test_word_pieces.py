"""BERT's tokenizer from a vocab.txt: the ids that transformers finds, what is read beside it, what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import BertTokenizer

from jaxengine.models.params.errors import ModelFileError
from jaxengine.tokens.tokenizer import Tokenizer
from tests.tables import each_row

# A line separator within a word parts no line of the file.
VOCAB = "\n".join(
    """[PAD] [UNK] [CLS] [SEP] [MASK] ! , . ' the The cafe café CAFÉ uber über ##s ##ing play Play naïve naive i ı 东 京
东京 ##京 中 a\u2028b ß ss mask [ ] sep q ##q q\u0301
""".replace("\n", " ").split(" ")
)
TEXTS = [
    "The cafe, the Café and CAFÉ!",
    "cafe\u0301s naïve Naive Über ubers",
    "playing Plays ß ẞ İ I ı",
    "东京中x 东 a东b",
    "[CLS] the [MASK] [SEP] [sep]",
    "unseen \u0000\ufffd the\u200b \t\n\r the\u00a0the",
    "q" * 100 + " " + "q" * 101,
    "e\u0301\u0302 q\u0301 😀 a\u2028b",
    " ",
]


def write(folder: Path, files: dict[str, Any], vocab: str = VOCAB) -> Path:
    folder.mkdir()
    (folder / "vocab.txt").write_text(vocab, newline="")
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    return folder


@each_row(
    "config",
    [
        {},
        {"do_lower_case": False},
        {"do_lower_case": True, "strip_accents": False, "tokenize_chinese_chars": False},
        {
            "do_lower_case": False,
            "strip_accents": True,
            "tokenize_chinese_chars": True,
            "tokenizer_class": "BertTokenizer",
        },
    ],
)
def test_ids_and_types_are_those_of_transformers(tmp_path, config):
    folder = write(tmp_path / str(len([*tmp_path.iterdir()])), {"tokenizer_config.json": config})
    vocab = {word: number for number, word in enumerate(VOCAB.split("\n")[:-1])}
    theirs = BertTokenizer(vocab=vocab, **{name: value for name, value in config.items() if name != "tokenizer_class"})
    ours = Tokenizer.from_hf_folder(folder)
    for text in TEXTS:
        assert ours.encode(text) == theirs(text).input_ids, text
        assert ours.encode(text, add_special_tokens=False) == theirs(text, add_special_tokens=False).input_ids
        assert ours.decode(ours.encode(text)) == theirs.decode(theirs(text).input_ids, skip_special_tokens=True)
        pair = theirs(text, TEXTS[0])
        ids = [one + 1000 * kind for one, kind in zip(pair.input_ids, pair.token_type_ids, strict=True)]
        assert ours.encode_pair(text, TEXTS[0], 1000) == ids
    assert (ours.pad_token_id, ours.unk_token_id, ours.bos_token_id, ours.eos_token_ids) == (0, 1, None, ())
    assert ours.all_special_ids == {0, 1, 2, 3, 4} and ours.hf(TEXTS[0]).input_ids == ours.encode(TEXTS[0])


def test_other_names_of_special_tokens_and_added_ones(tmp_path):
    files = {
        "config.json": {"model_type": "distilbert"},
        "special_tokens_map.json": {"cls_token": "<c>", "sep_token": {"content": "<e>"}},
        "added_tokens.json": {"<new>": 5},
    }
    vocab = "[PAD]\r\n[UNK]\r\n<c>\r\n<e>\r\nhi"
    electra = {**files, "config.json": {}, "tokenizer_config.json": {"tokenizer_class": "ElectraTokenizer"}}
    for name, own in (("distilbert", files), ("electra", electra)):
        tokenizer = Tokenizer.from_hf_folder(write(tmp_path / name, own, vocab))
        assert tokenizer.encode("HI<new>x") == [2, 4, 5, 1, 3], name


@each_row(
    ("files", "vocab", "problem"),
    [
        ({"tokenizer_config.json": {"tokenizer_class": "BertJapaneseTokenizer"}}, VOCAB, "vocab.txt alone is not read"),
        ({"config.json": {"tokenizer_class": "BertweetTokenizer"}}, VOCAB, "vocab.txt alone is not read"),
        ({"config.json": {"model_type": "mpnet"}}, VOCAB, "vocab.txt alone is not read"),
        ({}, "hi\n[UNK]\n[CLS]", r"vocab.txt: does not have the sep_token, '\[SEP\]'"),
        ({"tokenizer_config.json": {"do_lower_case": "no"}}, VOCAB, "must be true or false, got no"),
        ({"tokenizer_config.json": {"do_basic_tokenize": False}}, VOCAB, "do_basic_tokenize must be true"),
        ({"tokenizer_config.json": {"never_split": ["a"]}}, VOCAB, "never_split empty"),
        ({"added_tokens.json": {"<new>": 5000}}, VOCAB, "has id 5000 here"),
        ({"added_tokens.json": {"<new>": "a"}}, VOCAB, "must map tokens to ids"),
    ],
)
def test_what_is_refused(tmp_path, files, vocab, problem):
    with pytest.raises(ModelFileError, match=problem):
        Tokenizer.from_hf_folder(write(tmp_path / str(len([*tmp_path.iterdir()])), files, vocab))


def test_esm_finds_its_tokens_anywhere_in_a_text(tmp_path):
    """The ids are those of transformers 5.24's EsmTokenizer."""
    tokens = ["<cls>", "<pad>", "<eos>", "<unk>", *"LAGVSERTIDPKQNFYMHWCXBUZO", ".", "-", "<null_1>", "<mask>"]
    (tmp_path / "vocab.txt").write_text("\n".join(tokens))
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "EsmTokenizer"}')
    tokenizer = Tokenizer.from_hf_folder(tmp_path)
    rows = {
        "MKTAYIAKQR": [20, 15, 11, 5, 19, 12, 5, 15, 16, 10],
        "M K T<mask>A j foo": [20, 15, 11, 32, 5, 3, 3],
        "": [],
        "mkX..-": [3, 24, 29, 29, 30],
        "MK\nTT <null_1>x": [20, 15, 11, 11, 31, 3],
        "O<unk>U": [28, 3, 26],
    }
    assert {text: tokenizer.encode(text) for text in rows} == {text: [0, *ids, 2] for text, ids in rows.items()}
    assert tokenizer.encode_pair("MK", "TT", 0) == [0, 20, 15, 2, 11, 11, 2]
