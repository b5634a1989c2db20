"""FlatLogprobs: reads like the list of dicts that it was made of."""

from __future__ import annotations

import numpy as np
import pytest

from jaxengine import FlatLogprobs
from jaxengine.requests.output.outputs import CompletionOutput, Logprob

POSITIONS = [
    None,
    {5: Logprob(-0.5, 1, "a"), 7: Logprob(-1.25, 2, None)},
    {9: Logprob(-2.0, None, "")},
    {3: Logprob(-0.125, 1), 4: Logprob(-4.5, 30, "x"), 0: Logprob(-8.0, 2, "y")},
]


def test_it_reads_like_the_list():
    flat = FlatLogprobs.of(POSITIONS)
    assert len(flat) == 4 and list(flat) == POSITIONS and flat == POSITIONS and flat != POSITIONS[:3]
    assert [list(each or ()) for each in flat] == [list(each or ()) for each in POSITIONS]  # in their order
    assert flat[-1] == POSITIONS[-1] and flat[0] is None
    for part in (slice(1, 3), slice(None, None, 2), slice(-1, None), slice(5, 9), slice(None, None, -1)):
        assert isinstance(flat[part], FlatLogprobs) and flat[part] == POSITIONS[part]
    with pytest.raises(IndexError):
        flat[4]
    assert FlatLogprobs.of(flat) is flat and FlatLogprobs.of([]) == [] and len(FlatLogprobs.of([])) == 0
    assert FlatLogprobs.of([None]) == [None]


def test_its_arrays_hold_all_entries():
    flat = FlatLogprobs.of(POSITIONS)
    assert flat.start_indices.tolist() == [0, 0, 2, 3] and flat.end_indices.tolist() == [0, 2, 3, 6]
    assert flat.token_ids.tolist() == [5, 7, 9, 3, 4, 0] and flat.ranks.tolist() == [1, 2, -1, 1, 30, 2]
    assert flat.logprobs.dtype == np.float32 and flat.logprobs.tolist() == [-0.5, -1.25, -2.0, -0.125, -4.5, -8.0]
    assert flat.decoded_tokens == ["a", None, "", None, "x", "y"]


def test_pieces_of_a_stream_are_joined():
    whole = CompletionOutput(0, "", [], logprobs=FlatLogprobs.of(POSITIONS[1:2]))
    whole._append(CompletionOutput(0, "", [], logprobs=FlatLogprobs.of(POSITIONS[2:])))
    assert isinstance(whole.logprobs, FlatLogprobs) and whole.logprobs == POSITIONS[1:]
    assert whole.logprobs.end_indices.tolist() == [2, 3, 6]
