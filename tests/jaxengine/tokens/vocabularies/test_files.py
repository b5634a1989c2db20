"""Vocabularies that stand alone in a folder or a GGUF file, against ids recorded from their libraries."""

from __future__ import annotations

import base64
import json
import math
import struct
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxengine.models.params.errors import ModelFileError
from jaxengine.tokens.tokenizer import Tokenizer
from jaxengine.tokens.vocabularies.byte_pairs import spelt
from jaxengine.tokens.vocabularies.pieces import (
    BYTE,
    NORMAL,
    UNKNOWN,
    USER_DEFINED,
    Pieces,
    byte_pair_pieces,
    unigram_pieces,
)
from jaxengine.tokens.vocabularies.sentencepiece import read_sentencepiece
from tests.tables import each_row

FIXTURES = Path(__file__).parents[3] / "fixtures"
RECORDED = json.loads((FIXTURES / "vocabularies.json").read_text())
TEXTS = json.loads((FIXTURES / "tokenizer_ids.json").read_text())["texts"]
PIECES = {name: (base64.b64decode(given["model"]), given["ids"]) for name, given in RECORDED["sentencepiece"].items()}
RANKS, RANK_IDS = RECORDED["tiktoken"]["ranks"], RECORDED["tiktoken"]["ids"]
NUM_RANKS = RANKS.count("\n")
PLAIN = {"add_bos_token": False}
KIMI = {
    "tokenizer_class": "TikTokenTokenizer",
    "bos_token": "[BOS]",
    "eos_token": "[EOS]",
    "added_tokens_decoder": {
        str(NUM_RANKS): {"content": "[BOS]", "special": True},
        str(NUM_RANKS + 1): {"content": "[EOS]", "special": True},
        str(NUM_RANKS + 4): {"content": "<|im_end|>", "special": True},
    },
}


def folder_with(path: Path, config: dict[str, Any], **files: bytes | str) -> Path:
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    for name, content in files.items():
        (path / name.replace("_", ".")).write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def is_plain(text: str) -> bool:
    """Whether a text has nothing that is a special token or a text that names a byte."""
    return not any(mark in text for mark in ("<|", "<s>", "</s>", "<unk>"))


def check_ids(tokenizer: Tokenizer, name: str) -> None:
    for text, expected in zip(TEXTS, PIECES[name][1], strict=True):
        ids = tokenizer.encode(text)
        # Three dots are one token and two, in either order, whose sums of scores are the same but for rounding.
        same = (sorted(ids), sorted(expected)) if (name, "..." in text) == ("unigram bytes", True) else (ids, expected)
        assert same[0] == same[1], repr(text)


@pytest.mark.parametrize("name", PIECES)
def test_a_sentencepiece_model_alone(tmp_path, name):
    tokenizer = Tokenizer.from_hf_folder(folder_with(tmp_path, PLAIN, tokenizer_model=PIECES[name][0]))
    assert (tokenizer.unk_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1, 2)
    check_ids(tokenizer, name)


def test_beginning_and_end_of_a_sentencepiece_model(tmp_path):
    source, recorded = PIECES["bpe"]
    text, ids = TEXTS[0], recorded[0]
    for config, expected in (
        ({}, [1, *ids]),
        ({"add_bos_token": True, "add_eos_token": True}, [1, *ids, 2]),
        ({"add_bos_token": False, "add_eos_token": True}, [*ids, 2]),
        ({"tokenizer_class": "LlamaTokenizer", "bos_token": "</s>"}, [2, *ids]),
    ):
        tokenizer = Tokenizer.from_hf_folder(folder_with(tmp_path, config, tokenizer_model=source))
        assert tokenizer.encode(text) == expected
        assert tokenizer.decode(expected) == text


def test_ids_of_xlm_roberta(tmp_path):
    """The ids are those of its SentencePiece file plus one, between <s> and </s>; <unk> has another."""
    source, recorded = PIECES["unigram"]
    (tmp_path / "config.json").write_text('{"model_type": "xlm-roberta"}')
    (tmp_path / "sentencepiece.bpe.model").write_bytes(source)
    tokenizer = Tokenizer.from_hf_folder(tmp_path)
    tokens = tokenizer.bos_token_id, tokenizer.pad_token_id, tokenizer.eos_token_ids, tokenizer.unk_token_id
    assert tokens == (0, 1, (2,), 3) and tokenizer.encode("<mask>", False) == [tokenizer.vocab_size - 1]
    plain = [(text, ids) for text, ids in zip(TEXTS, recorded, strict=True) if is_plain(text) and text]
    for text, ids in plain:
        assert tokenizer.encode(text) == [0, *(number + 1 if number else 3 for number in ids), 2], repr(text)
    first, second = (tokenizer.encode(text, False) for text, _ in plain[:2])
    assert tokenizer.encode_pair(plain[0][0], plain[1][0], 0) == [0, *first, 2, 2, *second, 2]
    (tmp_path / "sentencepiece.bpe.model").write_bytes(PIECES["bpe"][0])
    with pytest.raises(ModelFileError, match="must be a unigram model"):
        Tokenizer.from_hf_folder(tmp_path)


def test_legacy_false_puts_a_space_in_front_of_the_text_alone(tmp_path):
    """As transformers' LlamaTokenizerFast: none behind a special token, and none before a space."""
    source, _ = PIECES["bpe"]
    old = Tokenizer.from_hf_folder(folder_with(tmp_path, PLAIN, tokenizer_model=source))
    new = Tokenizer.from_hf_folder(folder_with(tmp_path, PLAIN | {"legacy": False}, tokenizer_model=source))
    for tokenizer, behind in ((old, "\u2581ab"), (new, "ab")):
        assert "".join(tokenizer.backend.encode("ab").tokens) == "\u2581ab"
        assert "".join(tokenizer.backend.encode("ab</s>ab").tokens) == f"\u2581ab</s>{behind}"
    assert "".join(new.backend.encode(" ab").tokens) == "\u2581ab"


def test_added_tokens_stand_behind_the_pieces(tmp_path):
    source, recorded = PIECES["bpe"]
    size = len(read_sentencepiece(source, tmp_path).pieces.names)
    config = PLAIN | {"added_tokens_decoder": {str(size): {"content": "<|im_end|>", "special": True}}}
    tokenizer = Tokenizer.from_hf_folder(folder_with(tmp_path, config, tokenizer_model=source))
    assert tokenizer.encode("<|im_end|>") == [size] and size in tokenizer.all_special_ids
    assert tokenizer.encode(TEXTS[0]) == recorded[0]


def test_spare_pieces_have_the_names_of_the_configuration(tmp_path):
    """As in InternLM2, whose turns begin with a piece that the vocabulary calls unused."""
    source, recorded = PIECES["bpe"]
    names = read_sentencepiece(source, tmp_path).pieces.names
    spare = max(at for at in range(len(names)) if at not in {token for ids in recorded for token in ids})
    config = PLAIN | {"added_tokens_decoder": {str(spare): {"content": "<|im_start|>", "special": True}}}
    tokenizer = Tokenizer.from_hf_folder(folder_with(tmp_path, config, tokenizer_model=source))
    assert tokenizer.encode("<|im_start|>") == [spare] and spare in tokenizer.all_special_ids
    assert len(tokenizer) == len(names) and tokenizer.encode(TEXTS[0]) == recorded[0]
    clash = PLAIN | {"added_tokens_decoder": {str(spare): {"content": names[spare - 1]}}}
    with pytest.raises(ModelFileError, match=f"has id {spare} here, but {spare - 1}"):
        Tokenizer.from_hf_folder(folder_with(tmp_path, clash, tokenizer_model=source))


def gguf_of(name: str, model: str, **more: Any) -> Tokenizer:
    pieces, *_ = read_sentencepiece(PIECES[name][0], Path("tokenizer.model"))
    values = {
        "model": model,
        "tokens": list(pieces.names),
        "scores": np.array(pieces.scores, np.float32),
        "token_type": np.array(pieces.types, np.int32),
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
        "precompiled_charsmap": np.frombuffer(pieces.char_map, np.uint8),
        "add_space_prefix": pieces.adds_space,
        "remove_extra_whitespaces": pieces.strips,
        **more,
    }
    return Tokenizer.from_gguf({f"tokenizer.ggml.{key}": value for key, value in values.items()})


@pytest.mark.parametrize("name", [name for name in PIECES if "defined" not in name])
def test_pieces_of_a_gguf_file(name):
    """But for user-defined ones, which llama.cpp finds in the text before anything else."""
    model = "t5" if name.startswith("unigram") else "llama"
    check_ids(gguf_of(name, model, add_bos_token=False, add_eos_token=False), name)


def test_unigrams_of_a_gguf_file_end_with_eos_alone_unless_it_says_otherwise():
    ids = PIECES["unigram"][1][0]
    assert gguf_of("unigram", "t5").encode(TEXTS[0]) == [*ids, 2]
    assert gguf_of("unigram", "t5", add_bos_token=True).encode(TEXTS[0]) == [1, *ids, 2]


def test_ranks_of_kimi(tmp_path):
    tokenizer = Tokenizer.from_hf_folder(folder_with(tmp_path, KIMI, tiktoken_model=RANKS))
    for text, expected in zip(TEXTS, RANK_IDS, strict=True):
        if is_plain(text):
            assert tokenizer.encode(text) == expected, repr(text)
        assert tokenizer.decode(expected, skip_special_tokens=False) == text
    assert len(tokenizer) == NUM_RANKS + 256
    assert tokenizer.encode("<|im_end|>[EOS]") == [NUM_RANKS + 4, NUM_RANKS + 1]
    assert tokenizer.encode(f"<|reserved_token_{NUM_RANKS + 2}|>") == [NUM_RANKS + 2]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (NUM_RANKS, NUM_RANKS + 1)


def test_ranks_of_a_gguf_file_without_merges():
    tokens = [base64.b64decode(line.split()[0]) for line in RANKS.splitlines()]
    values = {
        "model": "gpt2",
        "pre": "kimi-k2",
        "tokens": [*spelt(tokens), "[EOS]"],
        "token_type": np.array([1] * len(tokens) + [3], np.int32),
    }
    tokenizer = Tokenizer.from_gguf({f"tokenizer.ggml.{key}": value for key, value in values.items()})
    for text, expected in zip(TEXTS, RANK_IDS, strict=True):
        assert tokenizer.encode(text) == expected, repr(text)


def test_ranks_of_llama_3_qwen_and_glm_4(tmp_path):
    """The special tokens that the code of the repositories names, at their places."""
    llama = Tokenizer.from_hf_folder(folder_with(tmp_path, {}, tokenizer_model=RANKS))
    names = llama.convert_ids_to_tokens(range(NUM_RANKS, len(llama)))
    assert (
        len(names) == 256
        and names[0] == "<|begin_of_text|>"
        and names[9:12]
        == [
            "<|eot_id|>",
            "<|python_tag|>",
            "<|reserved_special_token_2|>",
        ]
    )
    assert llama.encode("a")[0] == NUM_RANKS == llama.bos_token_id
    (tmp_path / "tokenizer.model").unlink()
    qwen = Tokenizer.from_hf_folder(folder_with(tmp_path, {"tokenizer_class": "QWenTokenizer"}, qwen_tiktoken=RANKS))
    names = qwen.convert_ids_to_tokens(range(NUM_RANKS, len(qwen)))
    assert names[:4] == ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|extra_0|>"] and names[-1] == "<|extra_204|>"
    assert qwen.encode("a1") == [*qwen.encode("a"), *qwen.encode("1")]
    glm = Tokenizer.from_hf_folder(
        folder_with(tmp_path, {"tokenizer_class": "ChatGLM4Tokenizer"}, tokenizer_model=RANKS)
    )
    assert glm.convert_ids_to_tokens(glm.encode("<|user|>"))[:3] == ["[gMASK]", "<sop>", "<|user|>"]
    assert len(glm) == NUM_RANKS + 14 and glm.eos_token_id == NUM_RANKS == glm.encode("<|endoftext|>")[2]
    assert glm.encode("a", add_special_tokens=False) == glm.encode("a")[2:] == llama.encode("a")[1:]


def words_of(names: list[str]) -> Tokenizer:
    """A GGUF file of words, spelt as its converter does."""
    marked = [
        name if name.startswith("[") else name[2:] if name.startswith("##") else f"\u2581{name}" for name in names
    ]
    values = {
        "model": "bert",
        "tokens": marked,
        "token_type": np.array([3 if name.startswith("[") else 1 for name in names], np.int32),
        **{f"{role}_token_id": at for at, role in enumerate(("padding", "unknown", "cls", "seperator", "mask"))},
    }
    return Tokenizer.from_gguf({f"tokenizer.ggml.{key}": value for key, value in values.items()})


def test_words_of_a_gguf_file_are_those_of_a_vocab_txt(tmp_path):
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghijklmnopqrstuvwxyz.,!?'0123456789"]
    names += [f"##{name}" for name in "abcdefghijklmnopqrstuvwxyz0123456789"] + ["hello", "world", "##ing", "\u4e2d"]
    (tmp_path / "vocab.txt").write_text("\n".join(names) + "\n")
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    expected, ours = Tokenizer.from_hf_folder(tmp_path), words_of(names)
    for text in [*TEXTS, "Hello, worlding \u4e2d\u56fd [MASK] na\u00efve"]:
        assert ours.encode(text) == expected.encode(text), repr(text)
        assert ours.decode(ours.encode(text)) == expected.decode(expected.encode(text))
    assert ours.encode_pair("a", "b", 100) == expected.encode_pair("a", "b", 100)


def test_characters_of_gemma_4():
    """Spaces are marks, bytes of unknown characters are tokens, and runs of line ends are tokens of their own."""
    names = ["<unk>", "<bos>", "a", "b", "ab", "\u2581", "\u2581ab", "\n", "\n\n"]
    names += [f"<0x{byte:02X}>" for byte in range(256)]
    values = {
        "model": "gemma4",
        "tokens": names,
        "merges": ["a b", "\u2581 ab"],
        "token_type": np.array([2, 3, *[1] * 7, *[6] * 256], np.int32),
        "bos_token_id": 1,
    }
    tokenizer = Tokenizer.from_gguf({f"tokenizer.ggml.{key}": value for key, value in values.items()})
    ids = tokenizer.encode("ab ab\n\nb\u00e9")
    assert ids == [1, 4, 6, 8, 3, 9 + 0xC3, 9 + 0xA9] and tokenizer.decode(ids) == "ab ab\n\nb\u00e9"


@pytest.mark.parametrize("name", ["$A", "$B", "begin of text", "a:1", "<s>"])
def test_any_name_may_begin_a_text(name):
    values = GEMMA | {"tokens": [*GEMMA["tokens"], name], "bos_token_id": 3, "eos_token_id": 3}
    for asked, ids in (({}, [3, 2]), ({"add_eos_token": True}, [3, 2, 3]), ({"add_bos_token": False}, [2])):
        tokenizer = Tokenizer.from_gguf({f"tokenizer.ggml.{key}": own for key, own in (values | asked).items()})
        assert tokenizer.encode("ab") == ids
        assert tokenizer.encode("") == [each for each in ids if each == 3]


def test_named_chat_templates_of_a_gguf_file():
    values = {"tokenizer.chat_template": "D", "tokenizer.chat_template.tool_use": "T"}
    messages = [{"role": "user", "content": "Hi"}]
    tokenizer = words_of(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a"])
    assert tokenizer.chat_template is None
    named = {f"tokenizer.ggml.{key}": value for key, value in GEMMA.items()} | values
    tokenizer = Tokenizer.from_gguf(named)
    assert tokenizer.apply_chat_template(messages) == "D"
    assert tokenizer.apply_chat_template(messages, tools=[{"type": "function"}]) == "T"
    with pytest.raises(ModelFileError, match=r"must be a text, got int .*tokenizer\.chat_template\.rag"):
        Tokenizer.from_gguf(named | {"tokenizer.chat_template.rag": 3})


def test_runs_of_spaces_take_time_by_their_length():
    pieces = Pieces(["<unk>", "\u2581", "a"], [0.0, -1.0, -1.0], [UNKNOWN, NORMAL, NORMAL], strips=True)
    tokenizer, start = unigram_pieces(pieces), time.process_time()
    assert tokenizer.encode("  a" + " " * 40_000 + "a  ").tokens == ["\u2581", "a", "\u2581", "a"]
    assert time.process_time() - start < 3


def test_a_byte_that_is_written_out_is_text():
    """Also where user-defined pieces are found whole, and no space comes before the first character."""
    names = ["<unk>", "<0x0A>", "\t\t", *"<0xA>"]
    types = [UNKNOWN, BYTE, USER_DEFINED, *[NORMAL] * 5]
    pieces = Pieces(names, [0.0] * 8, types, adds_space=False, isolates=True)
    tokenizer = byte_pair_pieces(pieces)
    assert tokenizer.encode("<0x0A>\t\t<0x0A>\n").tokens == [*"<0x0A>", "\t\t", *"<0x0A>", "<0x0A>"]


def test_user_defined_pieces_are_found_whole_the_longest_first():
    """The last text takes seconds where all of these are tried at each of its characters."""
    defined = ["<", "<un", *(f"<un{at}>" for at in range(4000)), *("\n" * count for count in range(1, 1025))]
    types = [UNKNOWN, NORMAL, *[USER_DEFINED] * len(defined)]
    pieces = Pieces(["<unk>", "u", *defined], [0.0] * len(types), types, adds_space=False, isolates=True)
    tokenizer = byte_pair_pieces(pieces)
    text = "u<un3999><un4000>" + "\n" * 1030
    assert tokenizer.encode(text).tokens == ["u", "<un3999>", "<un", "<unk>", "\n" * 1024, "\n" * 6]
    start = time.process_time()
    assert tokenizer.encode("<u" * 20_000).tokens == ["<", "u"] * 20_000
    assert time.process_time() - start < 1


def sentencepiece_file(*pieces: tuple[str, float, int], trainer: bytes = b"") -> bytes:
    """A tokenizer.model of these texts, scores and types. trainer: fields of how it was trained."""

    def message(field: int, content: bytes) -> bytes:
        assert len(content) < 1 << 14
        return bytes([field << 3 | 2, len(content) & 0x7F | 0x80, len(content) >> 7]) + content

    known = [
        message(1, message(1, text.encode()) + b"\x15" + struct.pack("<f", score) + bytes([3 << 3, kind]))
        for text, score, kind in (("<unk>", 0.0, UNKNOWN), *pieces)
    ]
    return b"".join(known) + message(2, trainer)


def test_an_id_of_another_kind_is_none():
    found = read_sentencepiece(sentencepiece_file(trainer=b"\xc2\x02\x01\x00"), Path("x"))
    assert found.tokens == {}


GEMMA = {"model": "gemma4", "tokens": ["a", "b", "ab"], "merges": ["a b"]}
BROKEN = PIECES["bpe"][0]


@each_row(
    ("config", "files", "message"),
    [
        ({}, {"tokenizer_model": BROKEN[:-3]}, "tokenizer.model: not a SentencePiece model: .* announced"),
        ({}, {"tokenizer_model": b"\xff" * 40}, "a number without an end"),
        ({}, {"tokenizer_model": sentencepiece_file(("a", math.nan, 1))}, "a score is not a finite float"),
        ({}, {"tokenizer_model": sentencepiece_file(("a", math.inf, 1))}, "a score is not a finite float"),
        ({}, {"tokenizer_model": sentencepiece_file(("", 0.0, 1))}, "must have distinct pieces"),
        ({}, {"tokenizer_model": sentencepiece_file(("a" * 1025, 0.0, 1))}, "at most 1024 characters each .* got 1025"),
        ({}, {"tokenizer_model": sentencepiece_file(("a", 0.0, 0))}, "a piece's type must be 1 to 6, got 0"),
        ({}, {"tokenizer_model": sentencepiece_file(("a", 0.0, 7))}, "a piece's type must be 1 to 6, got 7"),
        ({}, {"tokenizer_model": b"\x0a\x05\x0a\x01a\x1a\x00"}, "a piece's type must be 1 to 6, got 0 bytes"),
        ({}, {"tokenizer_model": b"text"}, "not a SentencePiece model"),
        (
            {},
            {"tokenizer_model": sentencepiece_file(("ab", 0.0, 1)).replace(b"ab", b"\xffb")},
            "a piece is not UTF-8 text",
        ),
        ({}, {"tokenizer_model": b""}, "must have distinct pieces, one of them unknown"),
        (PLAIN | {"legacy": 1}, {"tokenizer_model": BROKEN}, "must be true or false, got 1 .*legacy"),
        (
            {"tokenizer_class": "XGLMTokenizer"},
            {"tokenizer_model": BROKEN},
            "tokenizer.model alone is not read for this",
        ),
        ({"tokenizer_class": "OwnTokenizer"}, {"tiktoken_model": RANKS}, "tiktoken.model alone is not read for this"),
        (KIMI, {"tiktoken_model": "YQ== 0\n"}, "a token and a rank in each of 256 to"),
        (KIMI, {"tiktoken_model": RANKS.replace(" 7\n", " 8\n", 1)}, "400 distinct tokens with the ranks from 0 on"),
        (KIMI, {"tiktoken_model": RANKS.replace("=", "*", 1)}, "tokens in base64 and ranks"),
        (KIMI, {"tiktoken_model": RANKS.replace(" 7\n", " seven\n", 1)}, "tokens in base64 and ranks: invalid literal"),
        (
            KIMI | {"added_tokens_decoder": {"999999999": {"content": "<far>"}}},
            {"tiktoken_model": RANKS},
            "at most 4096 special tokens",
        ),
    ],
)
def test_files_that_are_refused(tmp_path_factory, config, files, message):
    with pytest.raises(ModelFileError, match=message):
        Tokenizer.from_hf_folder(folder_with(tmp_path_factory.mktemp("folder"), config, **files))
