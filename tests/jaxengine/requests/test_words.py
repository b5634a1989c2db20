"""Words of transcripts: their grouping as transformers recorded it (tests/fixtures/recorders/whisper.py), the path
through an alignment, and what is not a word."""

from __future__ import annotations

import itertools

import numpy as np

from jaxengine.requests.media.words import find_words, group_words, token_positions
from tests.fixtures import whisper_checkpoints as whisper

NAME = "whisper_sound"
CODES = {"english": "en", "french": "fr", "chinese": "zh", "japanese": "ja", "thai": "th", "cantonese": "yue"}
TOKENIZER = whisper.tokenizer(NAME)


def test_texts_are_cut_into_the_words_of_transformers():
    with np.load(whisper.golden_path(NAME)) as golden:
        counts, words, lengths = (golden[f"grouped_{name}"].tolist() for name in ("counts", "words", "tokens"))
    found = []
    for language, text in whisper.TEXTS:
        ids = TOKENIZER.encode(text).ids
        found.append(group_words(TOKENIZER.decode, ids, CODES.get(language, "de")))
        assert [number for _, own in found[-1] for number in own] == list(range(len(ids)))
    assert list(map(len, found)) == counts and len(counts) == len(whisper.TEXTS)
    together = [word for own in found for word in own]
    assert [(text, len(own)) for text, own in together] == list(zip(words, lengths, strict=True))


def test_words_have_no_punctuation_around_them():
    ids = TOKENIZER.encode(' He said: "Well, (ever) pay?!" - \u201cnow\u201d...').ids
    times = np.stack([np.arange(len(ids)), np.arange(len(ids)) + 1.001], axis=1)
    words = list(find_words(TOKENIZER.decode, ids, times, "en"))
    assert [word.text for word in words] == ["He", "said", "Well", "ever", "pay", "now"]
    assert words[:2] == [("He", 0.0, 3.0), ("said", 3.0, 9.0)]  # with the colon
    for language, text, expected in (
        ("en", " It's 3.14, -5 or $5 (99%) in real-time 'n' roll.", "It's 3.14 -5 or $5 99 in real time n roll"),
        ("en", " 1,000,000 at 12:30; Covid-19\u2026", "1,000,000 at 12:30 Covid 19"),
        ("fr", " \u00ab L'\u00e9t\u00e9 \u00bb, dit-il", "L'\u00e9t\u00e9 dit il"),
        ("hi", " \u0928\u092e\u0938\u094d\u0924\u0947\u0964", "\u0928\u092e\u0938\u094d\u0924\u0947"),
        ("zh", "\u300c\u4f60\u597d\u300d\uff0c3.5\u3002", "\u4f60 \u597d 3.5"),
    ):
        ids = TOKENIZER.encode(text).ids
        own = find_words(TOKENIZER.decode, ids, np.zeros((len(ids), 2)), language)
        assert " ".join(word.text for word in own) == expected
    for text in ("", " ", " - ?!", " \u2014 % \u300d"):
        none = TOKENIZER.encode(text).ids
        assert not list(find_words(TOKENIZER.decode, none, np.zeros((len(none), 2)), "en"))


def test_the_path_is_the_best_one():
    rng = np.random.RandomState(2)
    for num_tokens, num_positions in ((1, 1), (1, 5), (4, 1), (3, 5), (4, 3)):
        alignment = rng.randint(-3, 3, (num_tokens, num_positions)).astype(np.float32)
        found = token_positions(alignment)
        assert found[0] == 0 and (np.diff(found) >= 0).all() and found[-1] < num_positions

        def best(begins, alignment=alignment) -> float:
            """Sum of the best path whose tokens begin there; each ends where the next one begins, or just before."""
            total, ends = 0.0, [*begins[1:], len(alignment[0]) - 1]
            for token, (begin, end) in enumerate(zip(begins, ends, strict=True)):
                stays = alignment[token, begin : end + 1].sum()
                is_last = token == len(begins) - 1
                # The next token may begin at this one's last position, or after it.
                shorter = alignment[token, begin:end].sum() if not is_last and end > begin else -np.inf
                total += max(stays, shorter)
            return total

        every = itertools.product(range(num_positions), repeat=num_tokens - 1)
        allowed = [(0, *rest) for rest in every if (np.diff((0, *rest)) >= 0).all()]
        assert best(tuple(found)) == max(map(best, allowed))
