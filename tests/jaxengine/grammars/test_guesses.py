"""Masks along a guess: those that llguidance gives behind each token of it, as far as the grammar lets it be."""

from __future__ import annotations

import itertools
import json

import llguidance
import pytest

from jaxengine.grammars import worker_process
from jaxengine.grammars.worker_process import Advance, Matchers, Open, Start, compile_grammar

BYTES = llguidance.LLTokenizer("byte")
NUM_WORDS = -(-BYTES.vocab_size // 32)
NAME = {"type": "object", "properties": {"name": {"type": "string"}}, "additionalProperties": False}
JSON = "json", json.dumps(NAME | {"required": ["name"]}), {"whitespace_flexible": False}


def open_one(grammar, key=1, matchers=None):
    start = Start("byte", BYTES.vocab_size, NUM_WORDS, [BYTES.eos_token], looks_ahead=True)
    matchers = matchers or Matchers(start)
    matchers.expect(key)
    matchers.open(Open(key, *grammar, []))
    return matchers


@pytest.mark.parametrize(
    ("grammar", "taken", "guess", "forced", "num_guessed"),
    [
        (("regex", "[ab]{4}[cd]e", {}), b"a", b"bab", b"", 3),
        (("regex", "[ab]{4}[cd]e", {}), b"a", b"bxab", b"", 1),
        (("regex", "[ab]{4}[cd]e", {}), b"a", b"xbab", b"", 0),
        (("regex", "[ab]{2}[cd]e", {}), b"ab", b"ce", b"", 1),  # behind what ends a text nothing is known
        (("regex", "[ab]{2}[cd]*", {}), b"ab", bytes([BYTES.eos_token % 256]), b"", 0),
        (JSON, b"{", b'"name":"Ada"}', b'"name":"', 4),
        (JSON, b"{", b'"names":"Ada"}', b'"name":"', 0),  # it is another text
        (JSON, b"{", b'"na', b'"name":"', 0),
        (JSON, b'{"name":"', b'Ada"}!', b"", 4),
    ],
)
def test_masks_along_a_guess_are_those_of_llguidance(grammar, taken, guess, forced, num_guessed, monkeypatch):
    monkeypatch.setattr(worker_process, "_QUICK_SECONDS", 60.0)  # a busy machine gives up guesses
    matchers, matcher = open_one(grammar), llguidance.LLMatcher(BYTES, compile_grammar(*grammar))
    mask = matchers.advance(Advance(1, list(taken), list(guess)))
    assert bytes(mask.forced) == forced and len(mask.guessed) == num_guessed
    matcher.consume_tokens([*taken, *forced])
    for token, words in zip([*guess[len(forced) :], None], [mask.words, *mask.guessed], strict=False):
        assert words == matcher.compute_bitmask()[: 4 * NUM_WORDS]
        if token is not None:
            matcher.consume_tokens([token])
    other = matchers.advance(Advance(1, list(forced), []))  # nothing of the guess has been taken
    assert other.num_tokens == len(taken) + len(forced) and other.words == mask.words


def test_guesses_share_the_time_to_look_ahead(monkeypatch):
    clock = itertools.count()  # a second each time that it is asked
    monkeypatch.setattr(worker_process.time, "thread_time", lambda: float(next(clock)))
    monkeypatch.setattr(worker_process, "_QUICK_SECONDS", 1.5)
    monkeypatch.setattr(worker_process, "_AHEAD_SECONDS", 5.0)
    matchers = None
    for key in range(4):
        matchers = open_one(("regex", "[ab]{50}", {}), key, matchers)
    assert matchers is not None
    asked = [Advance(key, list(b"a"), list(b"abababa")) for key in range(4)]
    found = [len(matchers.advance(each, others_wait=each.key in (1, 2)).guessed) for each in asked]
    assert found == [4, 0, 0, 4]
    monkeypatch.setattr(worker_process, "_QUICK_SECONDS", 0.5)  # slow masks are not for looking ahead
    assert matchers.advance(Advance(0, list(b"a"), list(b"aba"))).guessed == []


def test_what_fails_ahead_takes_its_time_too(monkeypatch):
    now, usual = [0.0], Matchers._next

    def next_mask(self, matcher, tokens):
        if tokens == [ord("b")]:
            now[0] += 1.0
            raise worker_process.GrammarError("too much")
        return usual(self, matcher, tokens)

    monkeypatch.setattr(Matchers, "_next", next_mask)
    monkeypatch.setattr(worker_process.time, "thread_time", lambda: now[0])
    matchers = open_one(("regex", "[ab]{50}", {}), 1, open_one(("regex", "[ab]{50}", {}), 0))
    assert matchers.advance(Advance(0, list(b"a"), list(b"ba"))).guessed == []
    asked = Advance(1, list(b"a"), list(b"aa"))
    assert [len(matchers.advance(asked, others_wait).guessed) for others_wait in (True, False)] == [0, 2]
