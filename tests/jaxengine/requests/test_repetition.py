"""repetition_detection: the rules of its fields, and what counts as a repetition."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxengine import RequestError, SamplingParams
from jaxengine.requests.output.repetition_detector import RepetitionDetector
from jaxengine.requests.params.repetition import RepetitionDetectionParams


def ends_in_a_pattern(token_ids: list[int], params: RepetitionDetectionParams) -> bool:
    """By comparing copies of every pattern with the end of the list."""
    sizes = range(max(params.min_pattern_size, 1), params.max_pattern_size + 1)
    return any(
        size * params.min_count <= len(token_ids)
        and token_ids[-size * params.min_count :] == token_ids[-size:] * params.min_count
        for size in sizes
    )


@given(st.lists(st.integers(0, 2), max_size=40), st.integers(1, 9), st.integers(0, 9), st.integers(2, 5))
def test_an_output_is_followed_token_by_token(token_ids, longest, shortest, count):
    params = RepetitionDetectionParams(longest, min(longest, shortest), count)
    detector = RepetitionDetector(params)
    for end, token_id in enumerate(token_ids, 1):
        assert detector.append(token_id) == ends_in_a_pattern(token_ids[:end], params)


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"max_pattern_size": 1025, "min_count": 2}, "max_pattern_size must be an int from 0 to 1024, got 1025"),
        ({"max_pattern_size": True, "min_count": 2}, "max_pattern_size must be an int from 0 to 1024, got True"),
        ({"max_pattern_size": 3, "min_pattern_size": 4, "min_count": 2}, "min_pattern_size must be at most max_patt"),
        ({"max_pattern_size": 3, "min_count": 1}, "min_count must be an int >= 2 with a max_pattern_size, got 1"),
        ({"max_pattern_size": 3, "min_count": 2**31}, "min_count must be an int from 0 to 2147483647"),
        ({"max_pattern_size": 3, "count": 2}, "repetition_detection has 'count'; it may have max_pattern_size"),
    ],
)
def test_wrong_fields_are_refused_by_name(fields, problem):
    with pytest.raises(RequestError, match=f"{problem}") as error:
        SamplingParams(repetition_detection=fields)
    assert error.value.param == "repetition_detection"


def test_what_looks_for_nothing_is_none():
    assert SamplingParams(repetition_detection={}).repetition_detection is None
    assert SamplingParams(repetition_detection=RepetitionDetectionParams()) == SamplingParams()
    asked = RepetitionDetectionParams(5, 2, 3)
    same = {"max_pattern_size": 5, "min_pattern_size": 2, "min_count": 3}
    assert SamplingParams(repetition_detection=same).repetition_detection == asked
