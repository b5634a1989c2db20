"""Prompt lookup: the host and the device find the same."""

from __future__ import annotations

from functools import partial

import jax
import numpy as np

from jaxengine.drafts.ngram import Ngram


def test_ngrams_are_what_followed_the_same_tokens_before():
    proposer = Ngram(longest=3, shortest=2)
    for known, drafts in (
        ([1, 2, 3, 4, 5, 1, 2, 3], [4, 5, 1, 2, 3]),
        ([1, 2, 9, 4, 8, 2, 9, 7, 1, 2, 9], [4, 8, 2, 9, 7]),  # three tokens go before two
        ([2, 9, 4, 2, 9, 5, 7, 2, 9], [5, 7, 2, 9, 5]),  # the latest of equals; what is too short is repeated
        ([7, 7, 7], [7, 7, 7, 7, 7]),
        ([1, 2, 3, 2], []),
        ([5], []),
    ):
        assert proposer.propose_one(np.array(known, np.int32), 5).tolist() == drafts
    rng = np.random.default_rng(0)
    propose = jax.jit(partial(proposer.propose, count=5))
    for _ in range(20):
        lengths = rng.integers(1, 40, 8)
        history = rng.integers(0, 4, (8, 40)).astype(np.int32)
        found = propose(history, lengths.astype(np.int32))
        for row, length in enumerate(lengths):
            drafts = proposer.propose_one(history[row, :length], 5).tolist()
            assert found.token_ids[row, : found.counts[row]].tolist() == drafts
