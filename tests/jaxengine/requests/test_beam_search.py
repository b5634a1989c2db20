"""Which beams go on, by log-probabilities that are written here."""

from __future__ import annotations

import math

import pytest

from jaxengine.requests.beam_search import BeamSearch, BeamSearchParams, candidates
from jaxengine.requests.output.outputs import CompletionOutput, Logprob, RequestOutput
from jaxengine.scheduler.base.errors import RequestError

END = 9


def position(**probabilities: float) -> dict[int, Logprob]:
    """Candidates by token, t5=0.25 for instance."""
    best = sorted(probabilities.items(), key=lambda each: -each[1])
    return {int(name[1:]): Logprob(math.log(value), rank) for rank, (name, value) in enumerate(best, 1)}


def run(
    penalty: float, *, ignore_eos: bool = False, max_tokens: int = 2, prompt: list[int] | None = None
) -> list[tuple[list[int], str | None]]:
    params = BeamSearchParams(beam_width=2, max_tokens=max_tokens, length_penalty=penalty, ignore_eos=ignore_eos)
    given = prompt or [1]
    search = BeamSearch(given, params, [END], 50)
    assert search.prompts == [given]
    search.advance([position(t9=0.4, t5=0.35, t6=0.2, t7=0.05)])
    if max_tokens > 1:
        assert search.prompts == ([[*given, 9], [*given, 5]] if ignore_eos else [[*given, 5], [*given, 6]])
        search.advance([position(t5=0.9, t6=0.04, t7=0.03, t8=0.02)] * 2)
    assert search.prompts == []
    found = search.result(None).sequences
    assert all(each.stop_reason == (END if each.finish_reason == "stop" else None) for each in found)
    return [(each.tokens[len(given) :], each.finish_reason) for each in found]


def test_the_length_penalty_decides_between_short_and_long():
    # log 0.4 = -0.92 over 1 generated token; log(0.35 * 0.9) = -1.16 over 2; log(0.2 * 0.9) = -1.71 over 2.
    for prompt in ([1], [1] * 40, [END]):  # which does not count
        assert run(0.0, prompt=prompt) == [([END], "stop"), ([5, 5], "length")]
        assert run(0.5, prompt=prompt) == [([5, 5], "length"), ([END], "stop")]
        assert run(1.0, prompt=prompt) == [([5, 5], "length"), ([6, 5], "length")]


@pytest.mark.parametrize("penalty, first", ((100.0, 5), (-100.0, END)))
def test_powers_of_a_long_output_beyond_a_float(penalty, first):
    """1300 ** 100 is more than a float holds; the order of the beams is that of the exact scores."""
    params = BeamSearchParams(beam_width=1, max_tokens=1301, length_penalty=penalty)
    search = BeamSearch([1], params, [END], 2000)
    for _ in range(1299):
        search.advance([position(t5=0.99, t6=0.01)])
    search.advance([position(t9=0.5, t5=0.4)])  # log-probability -13.7 of 1300 tokens
    search.advance([position(t5=0.99, t6=0.01)])  # -14.0 of 1301
    assert search.result(None).sequences[0].tokens[-1] == first


def test_an_end_that_is_ignored_and_few_tokens():
    assert run(0.0, ignore_eos=True) == [([END, 5], "length"), ([5, 5], "length")]
    assert run(0.0, max_tokens=1) == [([END], "stop"), ([5], "length")]


def test_special_tokens_are_in_the_text_if_they_are_wanted():
    class Words:
        def decode(self, token_ids, skip_special_tokens=True):
            return token_ids, skip_special_tokens

    for skip in (True, False):
        params = BeamSearchParams(beam_width=1, max_tokens=1, skip_special_tokens=skip)
        search = BeamSearch([1], params, [END], 50)
        search.advance([position(t5=0.5)])
        assert search.result(Words()).sequences[0].text == ([1, 5], skip)  # pyright: ignore[reportArgumentType]


def test_the_context_ends_a_search():
    search = BeamSearch([1] * 9, BeamSearchParams(beam_width=1, max_tokens=5), [END], 10)
    search.advance([position(t5=0.5, t6=0.5)])
    assert search.prompts == [] and search.result(None).sequences[0].tokens == [1] * 9 + [5]


def test_a_request_without_candidates_ends_the_search():
    output = RequestOutput("a", None, [1], [CompletionOutput(0, "", [], finish_reason="error", stop_reason="x")], True)
    with pytest.raises(RequestError, match=r"the beam search cannot continue: error \(x\)"):
        candidates(output)
