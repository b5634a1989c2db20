"""How the process that computes masks begins and ends."""

from __future__ import annotations

import itertools

import pytest

from jaxengine.grammars.grammar_worker import GrammarFailure, GrammarWorker
from tests.jaxengine.grammars.test_grammar_worker import (
    BYTES,
    EOS,
    GRAMMARS,
    NUM_WORDS,
    advanced,
    matcher_of,
    next_of,
    take_mask,
)


@pytest.fixture
def keys():
    return itertools.count(10**6)


@pytest.mark.parametrize("ends", [1, 2])
def test_a_process_that_ends_before_it_is_ready_is_started_once_more(keys, ends):
    worker, key = GrammarWorker("byte", BYTES.vocab_size, NUM_WORDS, [EOS]), next(keys)
    worker.open(key, *GRAMMARS["regex"])
    for _ in range(ends):
        lost = worker._process
        lost.process.kill()
        lost.process.wait(60)
        while worker._process is lost:
            worker.wait(0.01)
    if ends == 2:
        (failure,) = next_of(worker, key)
        assert failure == GrammarFailure(key, False, "the process that computes masks does not start")
        key = next(keys)  # the next one may try as often
        worker.open(key, *GRAMMARS["regex"])
    take_mask(worker, key, matcher_of(GRAMMARS["regex"]))
    assert worker._num_lost_starts == 0
    worker.shutdown()


def test_the_process_ends_with_its_parent(keys):
    worker = GrammarWorker("byte", BYTES.vocab_size, NUM_WORDS, [EOS])
    advanced(worker, keys)
    process = worker._process
    process._connection.close()
    assert process.process.wait(60) == 0


@pytest.mark.parametrize(("tokenizer", "ends"), [("{}", [3]), ("byte", []), ("byte", [10**6])])
def test_without_a_usable_tokenizer_everybody_fails(keys, tokenizer, ends):
    worker = GrammarWorker(tokenizer, BYTES.vocab_size, NUM_WORDS, ends)
    for _ in range(2):
        key = next(keys)
        worker.open(key, *GRAMMARS["regex"])
        (failure,) = next_of(worker, key)
        reason = "tokenizer cannot be used" if ends == [3] else "the model has no end-of-sequence token"
        assert isinstance(failure, GrammarFailure) and reason in failure.reason
    worker.shutdown()
