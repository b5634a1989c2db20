"""The scheduler against a device that keeps token ids in real pages: every output must equal that of a solo run."""

from __future__ import annotations

import logging
import subprocess
import sys

import numpy as np
import pytest

from jaxengine.scheduler.base.errors import RequestError
from jaxengine.scheduler.base.request import FinishReason, RequestStatus
from jaxengine.scheduler.base.token_params import TokenParams
from tests.scheduler.fake_device import VOCAB_SIZE, expected_output
from tests.scheduler.loop import Loop, check_output, make, random_request


@pytest.mark.parametrize("sync", [False, True])
@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize(("num_pages", "threshold"), [(200, 0), (18, 0), (18, 5)])
def test_outputs_do_not_depend_on_the_crowd(sync, caching, num_pages, threshold):
    rng = np.random.default_rng(num_pages + threshold)
    loop = Loop(sync=sync, enable_prefix_caching=caching, num_pages=num_pages, long_prefill_token_threshold=threshold)
    shared = rng.integers(0, VOCAB_SIZE, 40).astype(np.int32)
    requests = [random_request(rng, index, shared=shared) for index in range(80)]
    for request in requests:
        loop.scheduler.add_request(request)
        if rng.random() < 0.5:
            loop.step()
    loop.run()
    assert len(loop.finished) == len(requests) == len(set(loop.finished))
    for request in requests:
        check_output(request)
    assert loop.pool.num_free == num_pages
    assert (loop.scheduler.num_prefix_hits > 0) == caching
    assert (loop.scheduler.num_preemptions > 5) == (num_pages == 18)
    assert loop.largest_batch <= 8 and loop.most_tokens <= 24


def test_storm_with_aborts_leaves_no_page():
    rng = np.random.default_rng(3)
    loop = Loop(num_pages=20)
    alive, done = [], 0
    for index in range(500):
        request = random_request(rng, index)
        loop.scheduler.add_request(request)
        alive.append(request)
        if rng.random() < 0.2:
            victim = alive[int(rng.integers(len(alive)))]
            loop.scheduler.finish(victim, FinishReason.ABORT)
        for _ in range(int(rng.integers(0, 4))):
            loop.step()
        alive = [request for request in alive if request.status is not RequestStatus.FINISHED] or [request]
    loop.run()
    assert loop.scheduler.num_preemptions > 50
    assert loop.scheduler.num_waiting == loop.scheduler.num_running == 0
    assert loop.pool.num_free == 20
    for request in loop.finished:
        check_output(request)
        done += 1
    assert done > 300


def test_decodes_come_first_and_prompts_are_chunked():
    loop = Loop(max_num_batched_tokens=8)
    loop.scheduler.add_request(make("a", [1, 2, 3], 10))
    loop.step()
    loop.scheduler.add_request(make("b", range(20), 4))
    (batch,) = loop.step().batches
    assert batch.num_decode == 1
    assert batch.num_scheduled.tolist() == [1, 7]
    assert batch.sample.tolist() == [True, False]
    assert batch.start.tolist() == [-1, 0]
    (batch,) = loop.step().batches
    assert batch.num_scheduled.tolist() == [1, 7]
    assert batch.start.tolist() == [-1, -1]
    (batch,) = loop.step().batches
    assert batch.num_scheduled.tolist() == [1, 6]
    assert batch.sample.tolist() == [True, True]


def test_prompts_wait_whole_without_chunked_prefill():
    loop = Loop(enable_chunked_prefill=False, max_num_batched_tokens=64)
    loop.scheduler.add_request(make("a", range(40), 4))
    loop.scheduler.add_request(make("b", range(1, 41), 4))
    assert loop.step().batches[0].num_scheduled.tolist() == [40]
    assert loop.step().batches[0].num_scheduled.tolist() == [1, 40]
    loop.run()
    for request in loop.finished:
        check_output(request)


def test_same_step_shares_a_prefix():
    loop = Loop()
    prompt = list(range(10))
    loop.scheduler.add_request(make("a", prompt))
    loop.scheduler.add_request(make("b", prompt))
    (batch,) = loop.step().batches
    assert batch.num_scheduled.tolist() == [2, 10]  # long chunks come last
    loop.run()
    for request in loop.finished:
        check_output(request)
    assert sorted(request.num_cached_tokens for request in loop.finished) == [0, 8]


def test_cache_salt_separates():
    loop = Loop()
    for name, salt in (("a", None), ("b", "x"), ("c", "x"), ("d", "y")):
        request = make(name, range(12), cache_salt=salt)
        loop.scheduler.add_request(request)
        loop.run()
        check_output(request)
    assert [request.num_cached_tokens for request in loop.finished] == [0, 0, 8, 0]


def test_generated_pages_are_found_by_the_next_turn():
    loop = Loop()
    first = make("a", range(6), 10)
    loop.scheduler.add_request(first)
    loop.run()
    second = make("b", [*range(6), *first.output_token_ids.tolist(), 5, 6], 4)
    loop.scheduler.add_request(second)
    loop.run()
    # 15 of the 16 tokens had their KV written (the last one was never fed): three full pages.
    assert second.num_cached_tokens == 12
    check_output(second)


def test_least_recently_freed_prefix_goes_first():
    loop = Loop(num_pages=8, max_model_len=32)
    for name, start in (("a", 0), ("b", 20)):
        loop.scheduler.add_request(make(name, range(start, start + 9), 1))
        loop.run()
    loop.scheduler.add_request(make("c", range(25, 46), 1))  # 6 pages: the 4 blank ones and a's two
    loop.run()
    for name, start, cached in (("b", 20, 8), ("a", 0, 0)):
        again = make(f"{name}2", range(start, start + 9), 1)
        loop.scheduler.add_request(again)
        loop.run()
        assert again.num_cached_tokens == cached, name


def test_priority_policy_runs_smaller_first():
    loop = Loop(policy="priority", max_num_seqs=1)
    for name, priority in (("low", 5), ("high", -1), ("mid", 0)):
        loop.scheduler.add_request(make(name, [1, 2], 2, priority=priority))
    loop.run()
    assert [request.request_id for request in loop.finished] == ["high", "mid", "low"]


def test_preemption_takes_the_lowest_priority_and_warns(caplog):
    loop = Loop(policy="priority", num_pages=8, max_model_len=32)
    vip = make("vip", range(12), 16, priority=-1)
    loop.scheduler.add_request(make("other", range(1, 13), 16, priority=3))
    loop.step()
    loop.scheduler.add_request(vip)
    with caplog.at_level(logging.WARNING):
        loop.run()
    assert vip.num_preemptions == 0
    assert loop.scheduler.num_preemptions >= 1
    text = caplog.text
    for remedy in ("gpu_memory_utilization", "tensor_parallel_size", "max_num_seqs", "RECOMPUTE"):
        assert remedy in text
    assert "total_num_cumulative_preemption=1" in text
    for request in loop.finished:
        check_output(request)


def test_deadline_ends_waiting_and_running():
    loop = Loop(max_num_seqs=1)
    running, waiting = make("r", [1], 30, deadline=5.0), make("w", [2], 30, deadline=4.0)
    loop.scheduler.add_request(running)
    loop.scheduler.add_request(waiting)
    loop.step(1.0)
    loop.step(4.5)
    assert (waiting.finish_reason, waiting.stop_reason) == ("abort", "timeout")
    assert running.status is RequestStatus.RUNNING
    loop.step(5.5)
    assert running.finish_reason == "abort"
    assert loop.pool.num_free == loop.config.num_pages


def test_min_tokens_outlasts_stop_tokens():
    prompt = np.array([3, 1], np.int32)
    stop = tuple(expected_output(prompt, 2))
    request = make("a", prompt, 9, params=TokenParams(temperature=0, min_tokens=4), stop_token_ids=stop)
    loop = Loop()
    loop.scheduler.add_request(request)
    loop.run()
    assert request.output_token_ids.tolist() == expected_output(prompt, 9, stop, min_tokens=4)


def test_poisoned_row_ends_alone():
    loop = Loop(sync=True)
    good, bad = make("good", [1, 2], 5), make("bad", [3], 5)
    loop.scheduler.add_request(good)
    loop.scheduler.add_request(bad)
    step = loop.scheduler.schedule()
    tokens, _ = loop.device.execute(loop.packer.pack(step))
    tokens[0, list(step.batches[0].slots).index(bad.slot)] = -1
    assert loop.scheduler.update(step, tokens).finished == [bad]
    assert (bad.finish_reason, bad.stop_reason) == ("error", "logits are not finite")
    loop.run()
    check_output(good)


def test_bad_requests_change_nothing():
    loop = Loop(num_pages=10)
    loop.scheduler.add_request(make("a", [1, 2], 3))
    for request, param in (
        (make("a", [1], 3), "request_id"),
        (make("b", [], 3), "prompt"),
        (make("c", [1] * 64, 3), "prompt"),
        (make("d", [1] * 30, 30), "max_tokens"),
        (make("e", [1], 3, priority=2), "priority"),
    ):
        with pytest.raises(RequestError) as error:
            loop.scheduler.add_request(request)
        assert error.value.param == param
    assert loop.scheduler.num_unfinished == loop.scheduler.num_waiting == 1
    loop.run()
    check_output(loop.finished[0])
    loop = Loop(num_pages=20, windows=(None, None))  # whose pages are those of both groups
    with pytest.raises(RequestError, match=r"30 tokens and max_tokens 30 need 30 pages of a pool's 20; lower"):
        loop.scheduler.add_request(make("d", [1] * 30, 30))


def test_a_value_without_a_column_ends_its_request_and_no_other_error_does(monkeypatch):
    loop = Loop(policy="fair")
    bad, good, last = make("bad", [1, 2], 3, tag=1 << 70), make("good", [1, 2], 3), make("last", [1, 2], 3)
    for request in (bad, good):
        loop.scheduler.add_request(request)
    assert loop.step().expired == [bad] and bad.finish_reason == "error"
    assert "OverflowError" in str(bad.stop_reason) and loop.scheduler.num_waiting == 0
    loop.run()
    check_output(good)
    assert loop.scheduler._fair is not None and loop.scheduler._fair.service == {}
    # Pages of a request with a slot may be in the prefix cache already, and no step would fill them.
    loop.scheduler.add_request(last)
    monkeypatch.setattr(loop.scheduler.ranks[0].pages, "register", lambda *_: int("x"))
    with pytest.raises(ValueError, match="invalid literal"):
        loop.scheduler.schedule()
    assert last.finish_reason is None


def test_finishing_twice_is_harmless():
    loop = Loop()
    request = make("a", [1, 2], 9)
    loop.scheduler.add_request(request)
    loop.step()
    loop.scheduler.finish(request, FinishReason.STOP, "text")
    loop.scheduler.finish(request, FinishReason.ABORT)
    loop.run()
    assert (request.finish_reason, request.stop_reason) == ("stop", "text")
    assert loop.finished == []


def test_scheduler_needs_no_jax():
    code = "import sys, jaxengine.scheduler.scheduler, jaxengine.scheduler.batches.packing; print('jax' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONPATH": ":".join(sys.path)}
    )
    assert done.stdout.strip() == "False"
