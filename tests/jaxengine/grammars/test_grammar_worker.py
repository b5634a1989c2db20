"""The process that computes masks: its masks are llguidance's, its limits hold, and its end harms nobody else.

The vocabulary is the bytes, so that a test's tokens are its text.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import sys
import time
from pathlib import Path

import llguidance
import numpy as np
import pytest

from jaxengine.grammars import grammar_worker, worker_process
from jaxengine.grammars.grammar_worker import GrammarFailure, GrammarWorker, NextMask
from jaxengine.grammars.worker_process import Advance, Matchers, Open, Start, compile_grammar
from jaxengine.requests.structured.closed_objects import forbid_additional_properties

BYTES = llguidance.LLTokenizer("byte")
EOS = BYTES.eos_token
NUM_WORDS = -(-BYTES.vocab_size // 32) + 2  # some of padding
NAME = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
GRAMMARS = {
    "json": ("json", json.dumps(NAME), {}),
    "closed": ("json", forbid_additional_properties(json.dumps({"items": NAME, "type": "array"})), {}),
    "no spaces": ("json", '{"type":"array"}', {"whitespace_flexible": False}),
    "own spaces": ("json", '{"type":"array"}', {"whitespace_pattern": "[ ]?"}),
    "regex": ("regex", "[a-z]{2,5}(-[0-9]+)?", {}),
    "choice": ("choice", json.dumps(["yes", "no (really)", "a.b", "é"]), {}),
    "lark": ("grammar", 'start: "a" start "b" | "c"', {}),
    "lark inlined": ("grammar", '# rules\n?start: "a" start "b" | "c"', {}),
    "gbnf": ("grammar", 'root ::= "x" [0-9]+ | "y"', {}),
}
REFUSED = {
    "unclosed": ("regex", "(a", {}),
    "look-ahead": ("regex", "(?=a)b", {}),
    "unknown name": ("grammar", "start: nothing", {}),
    "no grammar": ("grammar", "\x00\x01", {}),
    "type": ("json", '{"type": "nonsense"}', {}),
    "format": ("json", '{"type": "string", "format": "nonsense"}', {}),
    "pattern": ("json", '{"type": "string", "pattern": "("}', {}),
    "remote": ("json", '{"$ref": "http://127.0.0.1:9/schema.json"}', {}),
    "nowhere": ("json", '{"$ref": "#/definitions/nowhere"}', {}),
    "unsatisfiable": ("json", "false", {}),
    "unsupported": ("json", '{"not": {"type": "string"}}', {}),
    "deep": ("json", '{"items":' * 300 + "{}" + "}" * 300, {}),
    "spaces": ("json", '{"type": "array"}', {"whitespace_pattern": "("}),
}


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """On a busy machine a mask may take seconds: tests of limits have their own."""
    monkeypatch.setattr(grammar_worker, "MASK_SECONDS", 60.0)
    monkeypatch.setattr(grammar_worker, "COMPILE_SECONDS", 120.0)


@pytest.fixture(scope="module")
def shared_worker():
    made = GrammarWorker("byte", BYTES.vocab_size, NUM_WORDS, [EOS], looks_ahead=True)
    yield made
    made.shutdown()


@pytest.fixture
def worker(shared_worker):
    yield shared_worker
    for key in list(shared_worker._sequences):
        shared_worker.close(key)
    shared_worker.take()


@pytest.fixture(scope="module")
def keys():
    return iter(range(10**6))


# What came for a sequence while a test waited for another.
ARRIVED = {}


def next_of(worker, *keys, seconds=120.0):
    """What comes of these sequences, one thing each."""
    end = time.monotonic() + seconds
    while set(keys) - ARRIVED.keys():
        assert time.monotonic() < end, "nothing came"
        worker.wait(0.05)
        for each in worker.take():
            assert each.key not in ARRIVED, "a second answer, and nobody has taken the first"
            ARRIVED[each.key] = each
    return [ARRIVED.pop(key) for key in keys]


def matcher_of(grammar):
    matcher = llguidance.LLMatcher(BYTES, compile_grammar(*grammar), log_level=0)
    assert not matcher.is_error()
    return matcher


def expected_words(matcher):
    words = np.frombuffer(matcher.compute_bitmask(), np.int32)[:NUM_WORDS]
    return np.pad(words, (0, NUM_WORDS - len(words)))


def allowed_by(words):
    return np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist()


def take_mask(worker, key, matcher):
    """Checks the mask that is due, and returns the tokens it allows; none at the end of the text.

    Where it tells what must come first, each of these must be all that llguidance allows in its place.
    """
    (mask,) = next_of(worker, key)
    assert isinstance(mask, NextMask), mask
    matcher = matcher.deep_copy()
    for token in mask.forced:
        assert allowed_by(expected_words(matcher)) == [token]
        matcher.consume_token(token)
    expected = expected_words(matcher)
    if matcher.is_stopped() or allowed_by(expected) == [EOS]:
        assert mask.words is None
        return list(mask.forced[:1])
    np.testing.assert_array_equal(mask.words, expected)
    return list(mask.forced[:1]) or allowed_by(expected)


@pytest.mark.versions
@pytest.mark.parametrize("name", GRAMMARS)
def test_masks_are_those_of_llguidance(worker, keys, name):
    for seed in range(3):
        key, matcher, rng = next(keys), matcher_of(GRAMMARS[name]), np.random.default_rng(seed)
        worker.open(key, *GRAMMARS[name])
        for _ in range(40):
            allowed = [token for token in take_mask(worker, key, matcher) if token != EOS]
            if not allowed:
                break
            token = int(rng.choice(allowed))
            assert matcher.consume_token(token)
            worker.advance(key, token)
        worker.close(key)


@pytest.mark.parametrize(
    ("grammar", "taken", "forced", "ends"),
    [
        (
            ("json", forbid_additional_properties(json.dumps(NAME)), {"whitespace_flexible": False}),
            b"{",
            b'"name":"',
            False,
        ),
        (
            ("json", forbid_additional_properties(json.dumps(NAME)), {"whitespace_flexible": False}),
            b'{"',
            b'name":"',
            False,
        ),
        (("choice", '["the only one"]', {}), b"t", b"he only one", True),
        (("regex", "a{100}", {}), b"a", b"a" * 32, False),
        (("regex", "a(bc|bd)e", {}), b"a", b"b", False),
        (("regex", "a(b|c)d", {}), b"a", b"", False),
        (("regex", "[xy]z", {}), b"x", b"z", True),
    ],
    ids=["json", "within a name", "choice", "long", "until a choice", "a choice first", "one token"],
)
def test_what_must_come_is_known_ahead(worker, keys, grammar, taken, forced, ends):
    """As far as no other token may stand there, from wherever it is asked; and it is gone on from at once."""
    key, matcher = next(keys), matcher_of(grammar)
    worker.open(key, *grammar)
    (mask,) = next_of(worker, key)
    assert mask.forced == ()
    worker.advance(key, *taken)
    (mask,) = next_of(worker, key)
    assert bytes(mask.forced) == forced and (mask.words is None) == ends
    if not ends:
        choice = allowed_by(mask.words)[0]
        assert matcher.consume_tokens([*taken, *forced, choice])
        worker.advance(key, *forced, choice)
        take_mask(worker, key, matcher)


def test_nobody_looks_ahead_who_was_not_asked_to():
    start = "byte", BYTES.vocab_size, NUM_WORDS, [EOS]
    for looks_ahead in (False, True):
        matchers = Matchers(Start(*start, looks_ahead=looks_ahead))
        matchers.expect(1)
        matchers.open(Open(1, "regex", "ab{50}c", {}, []))
        mask = matchers.advance(Advance(1, [ord("a")]))
        assert mask.forced == [ord("b")] * 32 * looks_ahead


def test_a_grammar_says_which_token_of_a_trace_it_does_not_allow():
    matchers = Matchers(Start("byte", BYTES.vocab_size, NUM_WORDS, [EOS]))
    for key, (text, said) in enumerate(
        [
            ("abbb", None),
            ("ab", None),
            ("abx", f"it does not allow token {ord('x')} of trace_decode_token_ids after 2 tokens of its text"),
            ("b", f"it does not allow token {ord('b')} of trace_decode_token_ids after 0 tokens of its text"),
        ]
    ):
        matchers.expect(key)
        answer = matchers.open(Open(key, "regex", "ab{3}c?", {}, [], [*text.encode()]))
        assert getattr(answer, "reason", None) == said
        if said is None:  # it is where it begins
            assert matchers.advance(Advance(key, [ord("a")])).num_tokens == 1


def test_ends_that_the_tokenizer_lacks_are_ignored():
    """A model's padded vocabulary may have them."""
    matchers = Matchers(Start("byte", EOS + 60, NUM_WORDS + 2, [EOS + 40, EOS]))
    for key, (taken, allowed) in enumerate((([], [ord("a")]), ([ord("a")], [ord("b"), EOS]))):
        matchers.expect(key)
        mask = matchers.open(Open(key, "regex", "ab?", {}, taken))
        assert allowed_by(np.frombuffer(mask.words, np.uint32)) == allowed


def test_those_who_wait_share_the_time_to_look_ahead(monkeypatch):
    clock = itertools.count()  # a second each time that it is asked
    monkeypatch.setattr(worker_process.time, "thread_time", lambda: float(next(clock)))
    monkeypatch.setattr(worker_process, "_QUICK_SECONDS", 1.5)
    monkeypatch.setattr(worker_process, "_AHEAD_SECONDS", 5.0)
    matchers = Matchers(Start("byte", BYTES.vocab_size, NUM_WORDS, [EOS], looks_ahead=True))
    for key in range(4):
        matchers.expect(key)
        matchers.open(Open(key, "regex", "ab{50}c", {}, []))
    found = [len(matchers.advance(Advance(key, [ord("a")]), others_wait=key in (1, 2)).forced) for key in range(4)]
    assert found == [4, 0, 0, 4]


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_used_fails_alone(worker, keys, name):
    key, matcher, bad = next(keys), matcher_of(GRAMMARS["regex"]), next(keys)
    worker.open(key, *GRAMMARS["regex"])
    take_mask(worker, key, matcher)
    process = worker._process
    worker.open(bad, *REFUSED[name])
    (failure,) = next_of(worker, bad)
    assert isinstance(failure, GrammarFailure) and not failure.compiled and 0 < len(failure.reason) <= 500
    matcher.consume_token(ord("q"))
    worker.advance(key, ord("q"))
    take_mask(worker, key, matcher)
    assert worker._process is process
    worker.close(key)


@pytest.mark.parametrize(
    "grammar",
    [
        ("regex", "(a|b)*a(a|b){20,}", {}),
        ("json", json.dumps({"enum": [f"v{index}" for index in range(20_000)]}), {}),
        ("choice", json.dumps([f"v{index}" for index in range(10_000)]), {}),
        ("json", '{"items":' * 60 + "{}" + "}" * 60, {}),
    ],
    ids=["exponential automaton", "large enumeration", "many choices", "deep"],
)
def test_what_only_looks_hostile_works(worker, keys, grammar):
    key, matcher, rng = next(keys), matcher_of(grammar), np.random.default_rng(1)
    worker.open(key, *grammar)
    for _ in range(30):
        allowed = [token for token in take_mask(worker, key, matcher) if token != EOS]
        if not allowed:
            break
        token = int(rng.choice(allowed))
        matcher.consume_token(token)
        worker.advance(key, token)
    worker.close(key)


def advanced(worker, keys, text="ab"):
    """An open sequence, its mask taken, and its matcher, after `text`."""
    key, matcher = next(keys), matcher_of(GRAMMARS["regex"])
    worker.open(key, *GRAMMARS["regex"])
    take_mask(worker, key, matcher)
    for token in text.encode():
        matcher.consume_token(token)
        worker.advance(key, token)
        take_mask(worker, key, matcher)
    return key, matcher


def stop(process):
    """Stops all threads of a process; returns when they are: one may go on until another has taken the signal."""
    os.kill(process.pid, signal.SIGSTOP)
    _, status = os.waitpid(process.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)


def go_on(worker, key, matcher, token="c"):
    matcher.consume_token(ord(token))
    worker.advance(key, ord(token))
    take_mask(worker, key, matcher)


def test_a_slow_compilation_delays_no_masks(worker, keys, monkeypatch):
    """Nested repeats take a second; what comes of them is a mask or a failure."""
    monkeypatch.setattr(grammar_worker, "COMPILE_SECONDS", 10.0)
    other, slow = advanced(worker, keys, ""), next(keys)
    start = time.monotonic()
    worker.open(slow, "regex", "((((a{100}){100}){100}){100})", {})
    for token in "abcd":
        go_on(worker, *other, token=token)
    others, found = time.monotonic() - start, next_of(worker, slow)
    compiled = time.monotonic() - start
    assert others < compiled / 2 and compiled < grammar_worker.COMPILE_SECONDS + 1
    assert isinstance(found[0], GrammarFailure) or found[0].words is not None


@pytest.mark.skipif(sys.platform != "linux", reason="threads have no priorities of their own")
def test_a_long_compilation_gives_way_to_everybody_and_the_next_one_begins_anew(keys, monkeypatch):
    worker = GrammarWorker("byte", BYTES.vocab_size, NUM_WORDS, [EOS])
    monkeypatch.setattr(grammar_worker, "COMPILE_SECONDS", 120.0)
    advanced(worker, keys)

    def priorities():
        """The niceness of each thread, field 19 of its `stat`."""
        found = []
        for path in Path(f"/proc/{worker._process.process.pid}/task").glob("*/stat"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
                found.append(int(path.read_text().rpartition(")")[2].split()[16]))
        return sorted(found)

    others = [os.nice(0)] * 3  # these tests' own
    seen, lowest = [], [*others, 19]
    for repeats in range(80, 100):  # mostly the second is enough
        key = next(keys)
        worker.open(key, "regex", f"((((a{{{repeats}}}){{100}}){{100}}){{100}})", {})
        while worker._sequences[key].awaited:
            seen.append(priorities())
            worker.wait(0.005)
        next_of(worker, key)
        if lowest in seen and [*others, 10] in seen[seen.index(lowest) :]:
            break
    else:
        pytest.fail(f"seen were {seen}")
    worker.shutdown()


def test_a_process_that_takes_too_long_is_replaced(worker, keys, monkeypatch):
    """The first in line for a mask fails; all others go on where they were, those that wait and those that do not."""
    slow, other, idle = (advanced(worker, keys) for _ in range(3))
    process = worker._process
    stop(process.process)
    monkeypatch.setattr(grammar_worker, "MASK_SECONDS", 0.2)
    worker.advance(slow[0], ord("x"))
    worker.advance(other[0], ord("y"))
    other[1].consume_token(ord("y"))
    (failure,) = next_of(worker, slow[0])
    assert failure == GrammarFailure(slow[0], True, "took more than 0.2 s for the mask of one token")
    monkeypatch.undo()
    take_mask(worker, other[0], other[1])
    assert process.process.wait(60) == -signal.SIGKILL and worker._process is not process
    go_on(worker, *other)
    go_on(worker, *idle)


def test_a_compilation_that_takes_too_long_is_ended(worker, keys, monkeypatch):
    other, slow, late = advanced(worker, keys), next(keys), next(keys)
    monkeypatch.setattr(grammar_worker, "COMPILE_SECONDS", 0.2)
    stop(worker._process.process)
    worker.open(slow, *GRAMMARS["json"])
    worker.open(late, *GRAMMARS["lark"])
    worker.advance(other[0], ord("c"))
    other[1].consume_token(ord("c"))
    (failure,) = next_of(worker, slow)
    assert failure == GrammarFailure(slow, False, "took more than 0.2 s to compile")
    monkeypatch.undo()
    take_mask(worker, *other)
    take_mask(worker, late, matcher_of(GRAMMARS["lark"]))


@pytest.mark.versions
def test_a_killed_process_is_replaced_and_nobody_fails(worker, keys):
    waiting, idle = advanced(worker, keys), advanced(worker, keys)
    for _ in range(2):  # not at the first time, and not where another one is at work at the second
        waiting, idle = idle, waiting
        worker._process.process.kill()
        worker._process.process.wait(60)
        go_on(worker, *waiting, token="d")
    go_on(worker, *idle, token="d")


def test_who_ends_the_process_twice_fails(worker, keys):
    guilty, other = advanced(worker, keys), advanced(worker, keys)
    stop(worker._process.process)
    worker.advance(guilty[0], ord("x"))
    for _ in range(2):
        assert guilty[0] in worker._sequences
        worker._process.process.kill()
        worker._process.process.wait(60)
        while worker._process is not None and worker._process.process.poll() is not None:
            worker.wait(0.01)
        worker._is_ready = True  # as if it had begun with the first sequence already
    (failure,) = next_of(worker, guilty[0])
    assert failure == GrammarFailure(guilty[0], True, "twice ended the process that worked on it")
    go_on(worker, *other)


def test_closed_sequences_say_nothing(worker, keys):
    closed, other = next(keys), next(keys)
    worker.open(closed, *GRAMMARS["json"])
    worker.open(other, *GRAMMARS["lark"])
    worker.close(closed)
    take_mask(worker, other, matcher_of(GRAMMARS["lark"]))
    worker.advance(other, ord("a"))
    worker.close(other)
    again, matcher = advanced(worker, keys)
    assert worker.take() == []
    go_on(worker, again, matcher)
