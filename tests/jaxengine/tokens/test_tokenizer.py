"""Tokenizers built from GGUF metadata, against ids recorded from llama.cpp and the reference workloads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers

from jaxengine.bench.workloads import recorded
from jaxengine.checkpoint.default_model import default_model_path
from jaxengine.models.params.errors import ModelFileError
from jaxengine.models.weights.gguf.file import GGUFFile
from jaxengine.scheduler.base.errors import RequestError
from jaxengine.tokens.special_tokens import SpecialTokens
from jaxengine.tokens.tokenizer import Tokenizer
from tests.tables import each_row

FIXTURES = Path(__file__).parents[2] / "fixtures"
RECORDED = json.loads((FIXTURES / "tokenizer_ids.json").read_text())
TEXTS = RECORDED["texts"]
SPLITTINGS = RECORDED["splittings"]
ACCENTS = TEXTS.index("e\u0301 nul\u0300")


def small_metadata(prefix: bool = True, **changes: Any) -> dict[str, Any]:
    """A SentencePiece vocabulary of 600 pieces as GGUF metadata; a change to None takes the key out."""
    pieces = RECORDED["sentencepiece"]
    values = {
        "model": "llama",
        "tokens": pieces["tokens"],
        "scores": np.array(pieces["scores"], np.float32),
        "token_type": np.array(pieces["token_type"], np.int32),
        "bos_token_id": 1,
        "eos_token_id": 2,
        "add_space_prefix": prefix,
        **changes,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in values.items() if value is not None}


@pytest.fixture(scope="module")
def smollm_metadata() -> dict[str, Any]:
    with GGUFFile(default_model_path()) as file:
        return file.metadata


@pytest.fixture(scope="module")
def smollm(smollm_metadata) -> Tokenizer:
    return Tokenizer.from_gguf(smollm_metadata)


@pytest.mark.parametrize("splitting", SPLITTINGS)
def test_ids_are_those_of_llama_cpp(smollm_metadata, splitting):
    # The recorder's files ask for no beginning of text; llama-bpe adds it all the same.
    metadata = smollm_metadata | {"tokenizer.ggml.pre": splitting}
    metadata.pop("tokenizer.ggml.add_bos_token")
    tokenizer = Tokenizer.from_gguf(metadata)
    for number, (text, expected) in enumerate(zip(TEXTS, SPLITTINGS[splitting], strict=True)):
        if (splitting, number) != ("qwen2", ACCENTS):
            assert tokenizer.encode(text) == expected, repr(text)
            own = expected[1:] if splitting == "llama-bpe" else expected
            assert tokenizer.decode(own, skip_special_tokens=False) == text


def test_the_recorded_splittings_differ():
    # A recorder that lost the splitting would make the test above pass with one recipe for all.
    assert len({json.dumps(SPLITTINGS[splitting]) for splitting in SPLITTINGS}) == len(SPLITTINGS)


def test_qwen_composes_accents(smollm_metadata, smollm):
    qwen = Tokenizer.from_gguf(smollm_metadata | {"tokenizer.ggml.pre": "qwen2"})
    assert qwen.encode("e\u0301") == qwen.encode("\u00e9") == smollm.encode("\u00e9") != smollm.encode("e\u0301")


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_ids_are_those_of_llama_cpp(prefix):
    tokenizer = Tokenizer.from_gguf(small_metadata(prefix))
    recorded = RECORDED["sentencepiece"]["ids"]["space" if prefix else "none"]
    for text, expected in zip(TEXTS, recorded, strict=True):
        assert expected[0] == tokenizer.bos_token_id == 1
        assert tokenizer.encode(text) == expected, repr(text)
        assert tokenizer.encode(text, add_special_tokens=False) == expected[1:]
        assert tokenizer.decode(expected) == text


def test_the_chat_workload(smollm):
    chat = json.loads((FIXTURES / "chat_workload.json").read_text())
    for messages, text, ids in zip(chat["messages"], chat["texts"], recorded("CHAT").prompts, strict=True):
        assert smollm.apply_chat_template(messages) == text
        assert smollm.encode(text, add_special_tokens=False) == list(ids)
        assert smollm.decode(ids, skip_special_tokens=False) == text


def test_the_prompts_of_the_workloads_are_reproduced_from_their_text(smollm):
    for name in ("W1", "W2", "W3"):
        prompts = recorded(name).prompts
        # Prompts are cut out of longer texts, so their first and last tokens need not be the best ones.
        same = [smollm.encode(smollm.decode(ids))[4:-4] == list(ids[4:-4]) for ids in prompts if len(ids) > 16]
        assert np.mean(same) > 0.8, name


def test_special_ids(smollm):
    assert (smollm.bos_token_id, smollm.eos_token_id, smollm.pad_token_id, smollm.unk_token_id) == (1, 2, 2, 0)
    assert smollm.eos_token_ids == (2,)
    assert smollm.vocab_size == len(smollm) == 49152
    assert smollm.all_special_ids == smollm.added_token_ids == frozenset(range(17))
    assert smollm.convert_ids_to_tokens([1, 17, 49151, 49152])[:2] == ["<|im_start|>", "!"]
    assert smollm.convert_ids_to_tokens([49152]) == [None]
    assert smollm.decode([1, 19, 2]) == "#" and smollm.decode([1, 19, 2], False) == "<|im_start|>#<|im_end|>"


def test_user_defined_tokens_are_found_but_not_special():
    tokenizer = Tokenizer.from_gguf(small_metadata())
    tool = RECORDED["sentencepiece"]["tokens"].index("<tool>")
    assert tool in tokenizer.encode("a<tool>b") and tool in tokenizer.added_token_ids
    assert tool not in tokenizer.all_special_ids and "<tool>" in tokenizer.decode([tool])


def test_turn_ends_and_frame():
    tokenizer = Tokenizer.from_gguf(small_metadata(eot_token_id=7, eom_token_id=2, add_eos_token=True))
    assert tokenizer.eos_token_ids == (2, 7)
    ids = tokenizer.encode("a")
    assert ids[0] == 1 and ids[-1] == 2
    assert Tokenizer.from_gguf(small_metadata(add_bos_token=False)).encode("a") == ids[1:-1]
    assert Tokenizer.from_gguf(small_metadata(bos_token_id=None)).encode("a") == ids[1:-1]


@pytest.mark.parametrize("wanted, sep", [(True, [2]), (False, []), (None, [])])
def test_pairs_are_joined_as_a_reranker_of_llama_cpp_joins_them(wanted, sep):
    """BOS, the first text, EOS, SEP if the file requests it, the second text, EOS: XLM-R's with two ends between."""
    changes = {"add_eos_token": True, "seperator_token_id": 2, "add_sep_token": wanted}
    tokenizer = Tokenizer.from_gguf(small_metadata(**changes))
    first, second = (tokenizer.encode(text, add_special_tokens=False) for text in ("a", "b a"))
    begin, *_, end = tokenizer.encode("a")
    assert tokenizer.encode_pair("a", "b a", 0) == [begin, *first, end, *sep, *second, end]


def test_token_bytes_spell_the_text(smollm):
    assert smollm.is_byte_level and not Tokenizer.from_gguf(small_metadata()).is_byte_level
    for text in TEXTS:
        assert b"".join(smollm.token_bytes(number) for number in smollm.encode(text)) == text.encode()
    assert smollm.token_bytes(10**6) == b""


def test_batches_are_the_same_as_single_texts(smollm):
    assert smollm.encode_batch(TEXTS) == [smollm.encode(text) for text in TEXTS]
    assert smollm.encode_batch([]) == []


def test_transformers_wrapper_agrees(smollm):
    for tokenizer in (smollm, Tokenizer.from_gguf(small_metadata())):
        assert tokenizer.hf.bos_token_id == 1 and tokenizer.hf.eos_token_id == 2
        assert len(tokenizer.hf) == len(tokenizer)
        for text in TEXTS[:12]:
            assert tokenizer.hf.encode(text) == tokenizer.encode(text)
            ids = tokenizer.encode(text)
            assert tokenizer.hf.decode(ids, skip_special_tokens=True) == tokenizer.decode(ids)


@pytest.mark.parametrize("text", ["a\ud800", None, 3, b"bytes", ["list"]])
def test_what_is_no_text(smollm, text):
    with pytest.raises(RequestError) as refusal:
        smollm.encode(text)
    assert refusal.value.param == "prompt"
    assert smollm.encode("still works") == smollm.encode("still works")
    with pytest.raises(TypeError, match="add_special_tokens"):  # what is wrong is not the text
        smollm.encode("a", "yes")


@each_row(
    ("changes", "message"),
    [
        ({"tokens": None}, "list of strings"),
        ({"tokens": []}, "list of strings"),
        ({"tokens": np.arange(3)}, "must be list"),
        ({"tokens": ["a", 3]}, "list of strings"),
        ({"tokens": ["a"] * 600}, "only 1 of 600 tokens are distinct"),
        ({"tokens": ["a" * 200_000]}, "at most 1024 characters each"),
        ({"model": "wordpiece"}, "'wordpiece' is not supported; supported: 'gpt2', 'llama', 't5'"),
        ({"model": None}, "None is not supported"),
        ({"model": "rwkv"}, "'rwkv' is not supported; .* --tokenizer org/name"),
        (
            {"model": "gpt2", "pre": "unheard-of", "merges": ["a b"]},
            "'unheard-of' is not known; .* --tokenizer org/name",
        ),
        ({"model": "gpt2", "merges": None}, "list of strings"),
        ({"model": "gpt2", "merges": ["ab"]}, "two tokens with a space between"),
        ({"model": "gpt2", "merges": ["a b c"]}, "two tokens with a space between"),
        ({"model": "gpt2", "merges": ["a \u4e00"]}, "not in the vocabulary"),
        ({"scores": None}, "finite score"),
        ({"scores": np.zeros(3, np.float32)}, "one entry for each of 600 tokens, got 3"),
        ({"scores": np.full(600, np.nan, np.float32)}, "finite score"),
        ({"token_type": np.ones(601, np.int32)}, "one entry for each of 600 tokens, got 601"),
        ({"bos_token_id": 600}, "from 0 to 599, got 600"),
        ({"eos_token_id": -1}, "from 0 to 599, got -1"),
        ({"eos_token_id": "2"}, "must be int, got str"),
        ({"add_bos_token": 1}, "must be bool, got int"),
    ],
)
def test_metadata_that_is_refused(changes, message):
    with pytest.raises(ModelFileError, match=message) as refusal:
        Tokenizer.from_gguf(small_metadata(**changes), path="some.gguf")
    assert refusal.value.path == "some.gguf" and str(refusal.value.where).startswith("tokenizer.ggml.")


def test_a_chat_template_that_is_no_text():
    with pytest.raises(ModelFileError, match="must be a text, got list"):
        Tokenizer.from_gguf(small_metadata() | {"tokenizer.chat_template": ["a"]})


def test_the_beginning_of_a_lower_cased_text(monkeypatch):
    """Lower-case dotted i's are two characters, so places in the lower-cased text are not those in the text."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({"i": 0, "\u0307": 1, "a": 2}, []))
    tokenizer, encode, counted = Tokenizer(backend, SpecialTokens(), lowers=True), Tokenizer._encodings, []

    def counting(*args, **kwargs):
        counted.append(args)
        return encode(*args, **kwargs)

    monkeypatch.setattr(Tokenizer, "_encodings", counting)
    assert tokenizer.beginning("\u0130" * 1000, 10) == "i\u0307" * 5
    assert len(counted) == 2
    assert tokenizer.beginning("A", 1) == "a"
