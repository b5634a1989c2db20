"""Outputs: entries per position, joining the pieces of a stream, derived times."""

from __future__ import annotations

import pytest

from jaxengine.requests.output.outputs import (
    CompletionOutput,
    Logprob,
    RequestMetrics,
    RequestOutput,
    position_logprobs,
)


def piece(text: str, token_ids: list[int], *, index: int = 0, reason: str | None = None, **fields) -> RequestOutput:
    output = CompletionOutput(index, text, token_ids, finish_reason=reason, **fields)
    return RequestOutput("r", "p", [1, 2], [output], finished=reason is not None)


def test_entry_holds_the_chosen_token_and_the_best():
    entry = position_logprobs(9, -4.0, 17, [3, 5, 8], [-0.1, -2.0, -3.0], 2, decode=lambda i: f"<{i}>")
    assert entry == {9: Logprob(-4.0, 17, "<9>"), 3: Logprob(-0.1, 1, "<3>"), 5: Logprob(-2.0, 2, "<5>")}
    assert list(entry)[0] == 9


def test_entry_does_not_repeat_the_chosen_token_and_keeps_its_rank():
    entry = position_logprobs(5, -2.0, 1, [3, 5], [-2.0, -2.0], 2)
    assert entry == {5: Logprob(-2.0, 1), 3: Logprob(-2.0, 1)}


def test_entry_holds_given_tokens_without_a_rank_of_their_own():
    given = [(8, -3.0), (3, -0.1), (9, -4.0), (2, float("-inf"))]
    entry = position_logprobs(9, -4.0, 17, [3, 5], [-0.1, -2.0], 1, decode=str, given=given)
    expected = {9: Logprob(-4.0, 17, "9"), 3: Logprob(-0.1, 1, "3"), 8: Logprob(-3.0, None, "8")}
    assert entry == {**expected, 2: Logprob(float("-inf"), None, "2")} and list(entry) == [9, 3, 8, 2]


@pytest.mark.parametrize(("asked", "ids"), [(0, [9]), (1, [9, 3]), (-1, [9, 3, 5, 8])])
def test_entry_length_follows_what_was_asked(asked, ids):
    assert list(position_logprobs(9, -4.0, 17, [3, 5, 8], [-0.1, -2.0, -3.0], asked)) == ids


def test_deltas_add_up():
    first = piece("He", [1], cumulative_logprob=-1.0, logprobs=[{1: Logprob(-1.0, 1)}])
    first.add(
        piece("y", [2], reason="stop", stop_reason=2, cumulative_logprob=-3.0, logprobs=[{2: Logprob(-2.0, 4)}]),
        aggregate=True,
    )
    joined = first.outputs[0]
    assert (joined.text, joined.token_ids, joined.cumulative_logprob) == ("Hey", [1, 2], -3.0)
    assert joined.logprobs == [{1: Logprob(-1.0, 1)}, {2: Logprob(-2.0, 4)}]
    assert (joined.finish_reason, joined.stop_reason, joined.finished(), first.finished) == ("stop", 2, True, True)


def test_adding_a_delta_leaves_the_later_piece_alone():
    first, second, third = piece("a", [1]), piece("b", [2], index=1), piece("c", [3], index=1)
    first.add(second, aggregate=True)
    first.add(third, aggregate=True)
    assert [(o.index, o.text, o.token_ids) for o in first.outputs] == [(0, "a", [1]), (1, "bc", [2, 3])]
    assert third.outputs[0].token_ids == [3]


def test_cumulative_output_replaces():
    first = piece("H", [1])
    first.add(piece("He", [1, 2]), aggregate=False)
    first.add(piece("x", [7], index=1), aggregate=False)
    assert [(o.index, o.text, o.token_ids) for o in first.outputs] == [(0, "He", [1, 2]), (1, "x", [7])]
    assert not first.finished


def test_later_metrics_and_prompt_logprobs_win_and_missing_ones_do_not():
    first, later = piece("a", [1]), piece("b", [2])
    first.metrics, first.num_cached_tokens = RequestMetrics(1.0), 16
    later.prompt_logprobs = [None, {2: Logprob(-1.0, 1)}]
    first.add(later, aggregate=True)
    assert first.metrics == RequestMetrics(1.0) and first.num_cached_tokens == 16
    assert first.prompt_logprobs == [None, {2: Logprob(-1.0, 1)}]


def test_output_of_another_request_is_refused():
    other = piece("a", [1])
    other.request_id = "s"
    with pytest.raises(ValueError, match="'s'.*'r'"):
        piece("a", [1]).add(other, aggregate=True)


def test_times_are_none_until_they_happened():
    metrics = RequestMetrics(arrival_time=10.0)
    assert metrics.time_in_queue is None and metrics.time_to_first_token is None
    metrics.queued_time, metrics.first_scheduled_time, metrics.first_token_time = 10.25, 10.75, 12.0
    assert metrics.time_in_queue == 0.5 and metrics.time_to_first_token == metrics.first_token_latency == 2.0
    assert (metrics.queued_ts, metrics.scheduled_ts, metrics.first_token_ts, metrics.last_token_ts) == (
        *(10.25, 10.75, 12.0),
        None,
    )
