"""`LLM` called by several threads: everybody gets the tokens of a call alone, and a failure reaches everybody."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

from jaxengine import LLM, SamplingParams
from jaxengine.api import llm as api_llm
from jaxengine.api.engine_client import EngineDeadError
from jaxengine.api.fair_lock import FairLock

rng = np.random.default_rng(8)
PROMPTS = [{"prompt_token_ids": rng.integers(3, 100, 3 + index).tolist()} for index in range(12)]
GREEDY = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
LONG = GREEDY.clone_with(max_tokens=80)


def in_threads(*calls):
    """What each call returned or raised, all called at the same time."""
    results = [None] * len(calls)

    def run(index):
        try:
            results[index] = calls[index]()
        except Exception as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=(index,), daemon=True) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads), "a thread never ended"
    return results


def tokens(outputs):
    return [output.outputs[0].token_ids for output in outputs]


def test_calls_of_several_threads_run_together(make_llm):
    llm = make_llm()
    alone = [tokens(llm.generate(prompt, GREEDY, use_tqdm=False)) for prompt in PROMPTS]
    steps = llm.core.engine.stats.num_steps

    def call(prompt):
        def run():
            llm.get_metrics()
            return tokens(llm.generate(prompt, GREEDY, use_tqdm=False))

        return run

    assert in_threads(*map(call, PROMPTS)) == alone
    # Eight slots, twelve requests of thirty tokens: one by one they would take 360 steps.
    assert llm.core.engine.stats.num_steps - steps < 150
    assert llm._calls == {}


def test_a_call_that_waits_for_a_paused_engine_says_so(make_llm, monkeypatch):
    llm, said = make_llm(), []

    def resume(*words):
        said.append(words[0] % words[1:])
        llm.wake_up() if llm.is_sleeping() else llm.resume_generation()

    monkeypatch.setattr(api_llm, "_WAITS_BEFORE_WARNING", 1)
    monkeypatch.setattr(api_llm._log, "warning", resume)
    for pause in (llm.pause_generation, llm.sleep):
        pause()
        assert llm.generate(PROMPTS[0], GREEDY, use_tqdm=False)[0].finished
    begin, end = "requests wait, because the engine", "lets them run"
    assert said == [f"{begin} is paused: resume_generation() {end}", f"{begin} sleeps: wake_up() {end}"]


def test_one_bad_call_ends_alone(make_llm):
    llm = make_llm()
    alone = tokens(llm.generate(PROMPTS, GREEDY, use_tqdm=False))
    bad = SamplingParams(logit_bias={10**6: 1.0})
    results = in_threads(
        lambda: tokens(llm.generate(PROMPTS, GREEDY, use_tqdm=False)), lambda: llm.generate(PROMPTS, bad)
    )
    assert results[0] == alone and results[1].param == "logit_bias"


def test_a_failed_step_ends_every_call_and_every_later_one(tiny_options):
    llm = LLM(**tiny_options)
    execute, count = llm.core.runner.execute, [0]

    def fail(message):
        count[0] += 1
        if count[0] > 5:
            raise RuntimeError("seeded")
        return execute(message)

    llm.core.runner.execute = fail
    for error in in_threads(*[lambda: llm.generate(PROMPTS, LONG, use_tqdm=False)] * 3):
        assert isinstance(error, EngineDeadError) and "seeded" in str(error)
    llm.core.runner.execute = execute
    with pytest.raises(EngineDeadError, match="seeded"):
        llm.generate(PROMPTS, GREEDY)
    with pytest.raises(EngineDeadError, match="seeded"):
        llm.core.step()


def test_shutdown_ends_calls(tiny_options):
    llm = LLM(**tiny_options)

    def stop():
        while not llm.core.has_unfinished:
            time.sleep(0.001)
        llm.shutdown()

    error, _ = in_threads(lambda: [llm.generate(PROMPTS, LONG, use_tqdm=False) for _ in range(1000)], stop)
    assert isinstance(error, EngineDeadError) and "shut down" in str(error)
    with pytest.raises(EngineDeadError, match="shut down"):
        llm.generate(PROMPTS, GREEDY)
    llm.shutdown()


def test_turns_go_by_arrival():
    lock, order, threads = FairLock(), [], []

    def take(index):
        with lock:
            order.append(index)

    with lock:
        for index in range(5):
            threads.append(threading.Thread(target=take, args=(index,)))
            threads[-1].start()
            while len(lock._queue) <= index:
                time.sleep(0.001)
    for thread in threads:
        thread.join()
    assert order == [0, 1, 2, 3, 4]
    with lock:
        order.append(5)


@pytest.fixture
def ctrl_c(monkeypatch):
    """SIGUSR1 in place of SIGINT, so that a failure is one test's, with the handler that SIGINT has."""
    monkeypatch.setattr(signal, "SIGINT", signal.SIGUSR1)

    def interrupt(*_):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGUSR1, interrupt)
    yield partial(signal.raise_signal, signal.SIGUSR1)
    assert signal.getsignal(signal.SIGUSR1) is interrupt
    signal.signal(signal.SIGUSR1, before)


def test_ctrl_c_in_a_step_leaves_an_engine_that_answers(make_llm, monkeypatch, ctrl_c):
    llm = make_llm()
    alone = tokens(llm.generate(PROMPTS, GREEDY, use_tqdm=False))
    (stage,) = llm.core.engine.runner.stages

    def interrupted(compiled):
        def call(*arguments):
            results = compiled(*arguments)
            ctrl_c()  # the pool has been given away, and its successor is kept nowhere
            return results

        return call

    with monkeypatch.context() as patch:
        patch.setattr(stage, "_forwards", {size: interrupted(each) for size, each in stage._forwards.items()})
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert llm._calls == {}
    assert tokens(llm.generate(PROMPTS, GREEDY, use_tqdm=False)) == alone


def test_a_second_ctrl_c_in_a_step_ends_the_engine(make_llm, monkeypatch, ctrl_c):
    """Later calls say so, and do not run on buffers that the step has lost."""
    llm = make_llm()
    core = llm.core
    with monkeypatch.context() as patch:
        patch.setattr(core.engine, "step", lambda: (ctrl_c(), ctrl_c()))
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPTS[0], GREEDY, use_tqdm=False)
        with pytest.raises(EngineDeadError, match="interrupted in the middle of a call"):
            llm.generate(PROMPTS[0], GREEDY, use_tqdm=False)
    core.dead = None  # nothing was lost this time
    while core.has_unfinished:
        core.step()


def test_ctrl_c_does_not_keep_a_lock_from_the_next_thread(ctrl_c):
    lock = FairLock()
    with pytest.raises(KeyboardInterrupt), lock:
        lock._queue.append(SimpleNamespace(release=ctrl_c))  # another one comes while the lock is passed on
        ctrl_c()
    assert not lock._queue
    with lock._guard:
        lock._pass_on()
    with lock:
        pass


def test_a_time_limit_waits_for_the_end_of_a_step():
    """As signal.alarm sets one around a call."""

    def late(*_):
        raise TimeoutError

    before, lock, done = signal.signal(signal.SIGALRM, late), FairLock(interrupted=lambda: done.append("lost")), []
    try:
        with pytest.raises(TimeoutError), lock:
            signal.raise_signal(signal.SIGALRM)
            done.append("step")
        assert done == ["step"] and not lock._is_taken and signal.getsignal(signal.SIGALRM) is late
        # A second one interrupts, although TimeoutError is an Exception, and even if the step catches it.
        with pytest.raises(TimeoutError), lock, contextlib.suppress(TimeoutError):
            signal.raise_signal(signal.SIGALRM)
            signal.raise_signal(signal.SIGALRM)
        assert done == ["step", "lost"]
    finally:
        signal.signal(signal.SIGALRM, before)
