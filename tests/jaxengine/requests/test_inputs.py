"""What the tokens of a request's bad words are."""

from __future__ import annotations

from typing import Any

import pytest

from jaxengine import SamplingParams
from jaxengine.checkpoint.default_model import default_model_path
from jaxengine.models.weights.gguf.file import GGUFFile
from jaxengine.requests.inputs import InputProcessor
from jaxengine.tokens.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    with GGUFFile(default_model_path()) as file:
        return Tokenizer.from_gguf(file.metadata)


def bad_words(tokenizer: Tokenizer, *words: str) -> list[list[int]]:
    nothing: Any = None  # bad words need a tokenizer, and neither an engine nor a model
    return InputProcessor(nothing, nothing, tokenizer, {})._tokenize_bad_words(SamplingParams(bad_words=words))


def completes(token_ids: list[int], sequences: list[list[int]]) -> bool:
    """Whether an output that goes through `token_ids` meets one of the sequences."""
    ends = range(1, len(token_ids) + 1)
    return any(token_ids[:end][-len(each) :] == each for each in sequences for end in ends)


def test_a_word_is_forbidden_at_a_start_and_after_a_space(tokenizer):
    """Of all words that are one token after a space, those too that are several without."""
    ids = [tokenizer.token_bytes(token_id).decode(errors="ignore") for token_id in range(300, 20_000)]
    words = [text[1:] for text in ids if text.startswith(" ") and text[1:].isalpha()]
    several = [word for word in words if len(tokenizer.encode(word, add_special_tokens=False)) > 1]
    assert len(several) > 3000
    for word in [*several[::10], "two words", "Zyxw"]:
        sequences = bad_words(tokenizer, word)
        for text in (word, " " + word):
            assert completes(tokenizer.encode(text, add_special_tokens=False), sequences), (word, text)


def test_no_sequence_is_there_twice(tokenizer):
    for word in ("fox", " fox", "antidisestablishment"):
        sequences = bad_words(tokenizer, word)
        assert 1 <= len(sequences) <= 2 and len(set(map(tuple, sequences))) == len(sequences)
