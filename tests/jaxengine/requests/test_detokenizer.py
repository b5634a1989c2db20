"""Streaming text: the pieces make up the whole, characters stay whole, stop strings are found however they are cut."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxengine.checkpoint.default_model import default_model_path
from jaxengine.models.weights.gguf.file import GGUFFile
from jaxengine.requests.output.detokenizer import IncrementalDetokenizer
from jaxengine.requests.params.stop_strings import StopStrings
from jaxengine.tokens.special_tokens import SpecialTokens
from jaxengine.tokens.tokenizer import Tokenizer

RECORDED = json.loads((Path(__file__).parents[2] / "fixtures" / "tokenizer_ids.json").read_text())
VOCAB = 49152
# Single bytes that are no characters by themselves, special tokens, ordinary ones, ids outside the vocabulary.
any_id = st.one_of(
    st.integers(0, 16), st.integers(17, 17 + 256), st.integers(0, VOCAB - 1), st.integers(VOCAB, VOCAB + 500)
)


@pytest.fixture(scope="module")
def smollm() -> Tokenizer:
    with GGUFFile(default_model_path()) as file:
        return Tokenizer.from_gguf(file.metadata)


@pytest.fixture(scope="module")
def pieces() -> Tokenizer:
    """A SentencePiece vocabulary with byte fallback, whose decoder looks at more than one token."""
    recorded = RECORDED["sentencepiece"]
    values = {
        "model": "llama",
        "tokens": recorded["tokens"],
        "scores": np.array(recorded["scores"], np.float32),
        "token_type": np.array(recorded["token_type"], np.int32),
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return Tokenizer.from_gguf({f"tokenizer.ggml.{key}": value for key, value in values.items()})


def streamed(tokenizer: Tokenizer, chunks: list[list[int]], **options: Any) -> tuple[str, str, str | None]:
    """Everything `delta` gave, the final text, and the stop string met; checks that settled text never changes."""
    detokenizer = IncrementalDetokenizer(tokenizer, **options)
    deltas, met = "", None
    for chunk in chunks:
        met = detokenizer.append(chunk)
        before = detokenizer.text
        deltas += detokenizer.delta()
        assert before == deltas
        if met is not None:
            break
    met = detokenizer.finish() or met
    return deltas + detokenizer.delta(), detokenizer.text, met


@settings(max_examples=300, deadline=None)
@given(st.lists(st.lists(any_id, max_size=4), max_size=12), st.booleans())
def test_deltas_make_up_the_decoded_text(smollm, chunks, skip):
    deltas, text, met = streamed(smollm, chunks, skip_special_tokens=skip)
    ids = [number for chunk in chunks for number in chunk]
    assert deltas == text == smollm.decode(ids, skip_special_tokens=skip)
    assert met is None


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=30), st.booleans())
def test_deltas_of_a_window_decoder_make_up_the_decoded_text(pieces, text, skip):
    ids = pieces.encode(text)
    deltas, whole, _ = streamed(pieces, [[number] for number in ids], skip_special_tokens=skip)
    assert deltas == whole == pieces.decode(ids, skip_special_tokens=skip)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 599), max_size=30), st.lists(st.integers(0, 30)))
def test_a_window_decoder_takes_any_ids(pieces, ids, cuts):
    # Here only the pieces are compared: Hugging Face decodes a run of wrong bytes looking ahead to its end.
    bounds = sorted({0, len(ids), *(cut for cut in cuts if cut < len(ids))})
    one_by_one = streamed(pieces, [[number] for number in ids])
    assert streamed(pieces, [ids[start:end] for start, end in pairwise(bounds)]) == one_by_one
    assert one_by_one[0] == one_by_one[1]


def test_no_character_is_shown_by_halves(smollm, pieces):
    for tokenizer in (smollm, pieces):
        detokenizer = IncrementalDetokenizer(tokenizer)
        seen = set()
        for number in tokenizer.encode("a🦄é漢👩‍👧", add_special_tokens=False):
            detokenizer.append([number])
            seen.add(detokenizer.text)
            assert "\ufffd" not in detokenizer.text
        assert {"a", "a🦄", "a🦄é", "a🦄é漢"} <= seen


def test_an_unfinished_character_shows_at_the_end(smollm):
    ids = smollm.encode("ok🦄")
    detokenizer = IncrementalDetokenizer(smollm)
    detokenizer.append(ids[:-1])
    assert detokenizer.text == "ok"
    detokenizer.finish()
    assert detokenizer.text == smollm.decode(ids[:-1]) != "ok"


def test_bytes_that_make_no_character_do_not_pile_up(pieces):
    wrong = pieces.backend.token_to_id("<0xF0>")
    detokenizer = IncrementalDetokenizer(pieces)
    for _ in range(20):
        detokenizer.append([wrong])
    assert len(detokenizer.text) >= 16


def test_the_prompt_decides_about_a_leading_space(pieces):
    prompt, answer = pieces.encode("and the"), pieces.encode(" naïve", add_special_tokens=False)[1:]
    assert streamed(pieces, [answer])[1] == "naïve"
    assert streamed(pieces, [answer], prompt_tail_ids=prompt)[1] == " naïve"


def test_spaces_between_special_tokens():
    # Without a decoder, tokens are joined by spaces.
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1, "[X]": 2, "[Y]": 3}, unk_token="a"))
    backend.add_special_tokens(["[X]", "[Y]"])
    tokenizer = Tokenizer(backend, SpecialTokens())
    ids = [[0], [2], [3], [2], [1], [3]]
    assert streamed(tokenizer, ids, skip_special_tokens=False)[0] == "a [X] [Y] [X] b [Y]"
    joined = streamed(tokenizer, ids, skip_special_tokens=False, spaces_between_special_tokens=False)
    assert joined[0] == "a [X][Y][X] b [Y]"
    assert streamed(tokenizer, ids)[0] == "a b"


def first_completed(text: str, stop: tuple[str, ...]) -> tuple[int, int, str] | None:
    """Start, end and stop string of the match that ends first, the longest of those."""
    for end in range(1, len(text) + 1):
        found = [pattern for pattern in stop if text[:end].endswith(pattern)]
        if found:
            longest = max(found, key=len)
            return end - len(longest), end, longest
    return None


short_text = st.text(alphabet="ab\n", max_size=40)
stop_strings = st.lists(st.text(alphabet="ab\n", min_size=1, max_size=6), min_size=1, max_size=4).map(tuple)


@settings(max_examples=500, deadline=None)
@given(short_text, stop_strings, st.booleans(), st.lists(st.integers(0, 40)))
def test_stop_strings_are_found_however_text_is_cut(text, stop, keep, cuts):
    finder = StopStrings(stop, keep=keep)
    bounds = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    passed = "".join(finder.feed(text[start:end]) for start, end in pairwise(bounds))
    expected = first_completed(text, stop)
    if expected is None:
        assert finder.met is None
        held = finder.release()
        assert passed + held == text
        # Exactly what may become a stop string is held back, nothing when that one would be shown anyway.
        beginnings = {pattern[:size] for pattern in stop for size in range(1, len(pattern))}
        longest = max((len(beginning) for beginning in beginnings if text.endswith(beginning)), default=0)
        assert len(held) == (0 if keep else longest)
    else:
        start, end, pattern = expected
        assert finder.met == pattern
        assert passed == text[: end if keep else start]
        assert finder.feed("more") == "" and finder.release() == ""


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=20), st.text(min_size=1, max_size=4), st.booleans(), st.data())
def test_stop_strings_span_tokens(smollm, pieces, text, stop, keep, data):
    at = data.draw(st.integers(0, len(text)))
    whole = text[:at] + stop + text[at:]
    for tokenizer in (smollm, pieces):
        ids = tokenizer.encode(whole, add_special_tokens=False)
        decoded = tokenizer.decode(ids)
        expected = first_completed(decoded, (stop,))
        options = {"stop": (stop,), "include_stop_str_in_output": keep}
        results = {streamed(tokenizer, chunks, **options) for chunks in ([[number] for number in ids], [ids])}
        if expected is None:
            assert results == {(decoded, decoded, None)}
        else:
            cut = decoded[: expected[1] if keep else expected[0]]
            assert results == {(cut, cut, stop)}


def test_text_that_may_become_a_stop_string_is_held_back(smollm):
    detokenizer = IncrementalDetokenizer(smollm, stop=("\nUser:",))
    seen = []
    for word in ("Yes", ".", "\n", "User", " and", "\n", "User", ":", " no"):
        met = detokenizer.append(smollm.encode(word))
        seen.append(detokenizer.delta())
    assert seen == ["Yes", ".", "", "", "\nUser and", "", "", "", ""]
    assert met == "\nUser:" and detokenizer.text == "Yes.\nUser and"
    assert detokenizer.finish() == "\nUser:" and detokenizer.delta() == ""


def test_a_stop_string_counts_when_it_ends_behind_min_tokens(smollm):
    detokenizer = IncrementalDetokenizer(smollm, stop=("ab",))
    assert detokenizer.append(smollm.encode("ab a"), check_stop=False) is None
    assert detokenizer.text == "ab "
    assert detokenizer.append(smollm.encode("b")) == "ab"
    assert detokenizer.text == "ab "


@settings(max_examples=500, deadline=None)
@given(short_text, stop_strings, st.booleans(), st.integers(0, 40), st.integers(0, 40))
def test_matches_that_do_not_count_hide_none_that_do(text, stop, keep, boundary, cut):
    finder = StopStrings(stop, keep=keep)
    early, late = text[:boundary], text[boundary:]
    passed = finder.feed(early[:cut], counts=False) + finder.feed(early[cut:], counts=False) + finder.feed(late)
    ends = range(len(early) + 1, len(text) + 1)
    found = [(end, pattern) for end in ends for pattern in stop if text[:end].endswith(pattern)]
    if not found:
        assert finder.met is None and passed + finder.release() == text
        return
    first = min(end for end, _ in found)
    pattern = max((pattern for end, pattern in found if end == first), key=len)
    assert finder.met == pattern
    assert passed == text[: first if keep else first - len(pattern)]


def test_an_empty_stop_string_is_refused(smollm):
    with pytest.raises(ValueError, match="must not be empty"):
        IncrementalDetokenizer(smollm, stop=("a", ""))
