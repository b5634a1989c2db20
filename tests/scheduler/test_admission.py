"""Who is let in: a request whose known tokens have pages, so that a tight pool does not compute its tokens again."""

from __future__ import annotations

import numpy as np
import pytest

from jaxengine.scheduler.base.token_params import TokenParams
from tests.scheduler.fake_device import VOCAB_SIZE
from tests.scheduler.loop import Loop, check_output, make


def recomputed(loop, prompt_lengths, output_lengths, params=None):
    """Tokens that a trace computes, over those that it would compute in a pool without end and without a cache."""
    rng = np.random.default_rng(4)
    params = params or TokenParams(temperature=0)
    requests = [
        make(index, rng.integers(0, VOCAB_SIZE, length), int(count), params=params)
        for index, (length, count) in enumerate(zip(prompt_lengths, output_lengths, strict=True))
    ]
    for request in requests:
        loop.scheduler.add_request(request)
    computed = 0
    while loop.scheduler.num_unfinished or loop.in_flight:
        computed += loop.step().num_tokens
    for request in requests:
        check_output(request)
    return computed / sum(request.num_prompt_tokens + request.max_tokens - 1 for request in requests)


@pytest.mark.parametrize(
    ("caching", "prompt_logprobs", "windows"),
    [(False, None, (None,)), (True, 0, (None,)), (True, None, (None,)), (False, None, (None, 9))],
)
def test_long_prompts_in_a_tight_pool_are_computed_once(caching, prompt_logprobs, windows):
    """A pool that holds little more than the longest request, in which two prompts cannot both grow."""
    rng = np.random.default_rng(5)
    loop = Loop(num_pages=70 * len(windows), max_model_len=256, enable_prefix_caching=caching, windows=windows)
    params = TokenParams(temperature=0, prompt_logprobs=prompt_logprobs)
    assert recomputed(loop, rng.integers(100, 230, 30), rng.integers(4, 12, 30), params) <= 1.1


@pytest.mark.parametrize("caching", [False, True])
def test_chats_in_a_fifth_of_their_pool_lose_half_of_their_work_at_most(caching):
    rng = np.random.default_rng(6)
    prompts, outputs = rng.integers(10, 80, 80), rng.integers(10, 120, 80)
    need = 16 * int((prompts + outputs).mean()) // 4
    loop = Loop(
        num_pages=need // 5,
        max_model_len=200,
        max_num_seqs=16,
        max_num_batched_tokens=48,
        enable_prefix_caching=caching,
    )
    assert recomputed(loop, prompts, outputs) <= 1.5
    assert loop.scheduler.num_preemptions > 0, "the pool was not tight"


def test_pages_that_a_running_prompt_still_needs_are_not_free():
    loop = Loop(num_pages=16, long_prefill_token_threshold=16)
    long, short = make("long", range(50), 4), make("short", range(30, 40), 20)
    loop.scheduler.add_request(long)
    loop.step()
    loop.scheduler.add_request(short)
    loop.step()
    # Eight tokens are left in the step and eight pages in the pool: five are the prompt's, and one its output's.
    assert loop.pool.num_free == 8 and long.slot >= 0 and short.slot < 0
    loop.run()
    assert long.num_preemptions == short.num_preemptions == 0
    for request in loop.finished:
        check_output(request)


def test_admission_leaves_each_running_request_its_next_page():
    loop = Loop(num_pages=8, max_model_len=32, max_num_batched_tokens=32)
    growing, ending = make("growing", range(12), 16), make("ending", range(20, 23), 1)
    third = make("third", range(30, 46), 1)
    for request in (growing, ending, third):
        loop.scheduler.add_request(request)
    loop.step()
    # Four pages are free: third needs four, of which one is kept for growing and none for ending, which has its last.
    assert growing.slot >= 0 and ending.slot >= 0 and third.slot < 0
    assert loop.pool.num_free == 4
    loop.run()
    for request in loop.finished:
        check_output(request)
    assert loop.scheduler.num_preemptions == 0
