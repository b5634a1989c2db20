"""Nothing that one request may ask for makes the steps of others dearer: counted in calls and bytes, not in time."""

from __future__ import annotations

import sys
import tracemalloc
from dataclasses import fields, replace

import numpy as np
import pytest

from benchmarks.pages.largest_request import BAD_WORDS, largest
from jaxengine import SamplingParams
from jaxengine.engine.token_bias import TokenBias
from jaxengine.scheduler.base.request import Request
from jaxengine.scheduler.base.token_params import TokenParams
from jaxengine.scheduler.batches.slots import STOP_COLUMNS, Slots

VOCAB, WIDE_VOCAB = 128, 150_000
LARGEST = largest(VOCAB)
# What only the detokenizer and the maker of outputs see; n, which becomes as many requests; bad_words, whose tokens are
# below; grammars and limits of reasoning, which need a tokenizer; and what an engine must have been started with.
ELSEWHERE = {
    *("trace_decode_token_ids", "return_sampling_mass", "return_sampling_mask", "prompt_logprob_start"),
    *("routed_experts_prompt_start", "prompt_logprob_token_ids"),
    *("stop_after", "thinking_token_budget", "thinking_words"),
    *("stop", "detokenize", "skip_special_tokens", "spaces_between_special_tokens", "include_stop_str_in_output"),
    *("output_kind", "ignore_eos", "n", "bad_words", "structured_outputs", "extra_args", "return_hidden_states"),
    *("capture", "steer", "stream_interval", "flat_logprobs", "skip_reading_prefix_cache", "repetition_detection"),
}


def test_every_field_is_here():
    unsupported = set()
    for field in fields(SamplingParams):
        try:
            SamplingParams(**{field.name: object()})
        except ValueError as error:
            if "not supported yet" in str(error):
                unsupported.add(field.name)
    assert set(LARGEST) | ELSEWHERE == {field.name for field in fields(SamplingParams)} - unsupported


def calls_in_steps(core, requests) -> float:
    """Calls of Python and C functions in a step of the middle, the median; all requests run to their end."""
    for index, (params, changes) in enumerate(requests):
        prepared = core.inputs.prepare({"prompt_token_ids": [5, 6, 7]}, params, request_id=f"cost-{index}")
        prepared.requests[0].params = replace(prepared.requests[0].params, **changes)
        core.add(prepared)
    counts = []

    def count(_frame, event, _argument):
        counts[-1] += event in ("call", "c_call")

    while core.has_unfinished:
        counts.append(0)
        sys.setprofile(count)
        try:
            output = core.advance()
        finally:
            sys.setprofile(None)
        core._process(output)
    return float(np.median(counts[6:26]))


PLAIN = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True), {}


@pytest.fixture(scope="module")
def core(make_llm):
    return make_llm().core


@pytest.fixture(scope="module")
def before(core) -> float:
    """Calls in a step of two plain requests."""
    calls_in_steps(core, [PLAIN, PLAIN])
    return calls_in_steps(core, [PLAIN, PLAIN])


@pytest.mark.parametrize("case", [*LARGEST, *BAD_WORDS])
def test_steps_cost_what_they_did(core, before, case):
    params, changes = PLAIN[0], {}
    if case in LARGEST:
        params = SamplingParams(**{"max_tokens": 90, "ignore_eos": True, "min_tokens": 60, case: LARGEST[case]})
    else:
        changes = {"bad_words": BAD_WORDS[case]}
    beside = calls_in_steps(core, [PLAIN, (params, changes)])
    after = calls_in_steps(core, [PLAIN, PLAIN])
    assert beside <= before + 100
    assert abs(after - before) <= 2


def allocated(call) -> int:
    """The most bytes that a call holds at once."""
    call()
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def make_request(**fields) -> Request:
    params = fields.pop("params", TokenParams(temperature=0))
    return Request("a", np.array([1, 2], np.int32), params, 1000, **fields)


def test_many_stop_token_ids_do_not_widen_the_table_of_all():
    slots = Slots(256)
    many = tuple(range(10, 10 + WIDE_VOCAB))
    known = np.array([1, 2], np.int32)
    requests = [make_request(stop_token_ids=(7,) if index else many) for index in range(256)]
    taken = np.array([slots.take(request, known, 0, 1002) for request in requests])
    token_ids = np.full(256, 7, np.int32)
    assert slots.are_stops(taken, token_ids).tolist() == [False] + [True] * 255
    assert slots.are_stops(taken[::-1], token_ids + 5).tolist() == [False] * 255 + [True]
    assert allocated(lambda: slots.are_stops(taken, token_ids)) < 256 * (STOP_COLUMNS + 8) * 8
    slots.release(int(taken[0]))
    slots.take(make_request(stop_token_ids=(7,)), known, 0, 1002)
    assert slots.are_stops(taken, token_ids).all()


def test_only_columns_of_stop_ids_in_use_are_compared():
    slots, known = Slots(4), np.array([1, 2], np.int32)

    def take(*ids):
        return slots.take(make_request(stop_token_ids=ids), known, 0, 1002)

    taken = np.array([take(), take(7), take(5, 6, 7), take(7, 8)])
    for token, stops in ((7, [False, True, True, True]), (6, [False, False, True, False]), (9, [False] * 4)):
        assert slots.are_stops(taken, np.full(4, token, np.int32)).tolist() == stops
    for slot in taken.tolist():
        slots.release(slot)
    again = np.array([take(7), take(9, 6)])
    assert slots.are_stops(again, np.array([7, 6], np.int32)).all()
    assert not slots.are_stops(again, np.array([6, 7], np.int32)).any()


PAIRS, LENGTHS = BAD_WORDS.values()


@pytest.mark.parametrize("bad_words", [(), tuple((*word[:-1], 7) for word in PAIRS), LENGTHS])
def test_what_a_bias_forbids_is_found_without_a_walk(bad_words):
    request = make_request(
        params=TokenParams(min_tokens=900, bad_words=bad_words), stop_token_ids=tuple(range(WIDE_VOCAB))
    )
    bias = TokenBias(request, WIDE_VOCAB)
    output = np.full(800, 5, np.int32)
    forbidden = bias.forbidden(800, output)
    assert forbidden.ends == frozenset(word[-1] for word in bad_words if set(word[:-1]) == {5})
    assert np.isneginf(bias.row(forbidden)).all() and np.isfinite(bias.row(bias.forbidden(900, output[:0]))).all()
    assert allocated(lambda: bias.forbidden(800, output) == forbidden) < 20_000
