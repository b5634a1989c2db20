"""Pauses and sleep: what becomes of requests that run and of those that come meanwhile."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from jaxengine import AsyncLLM, RequestError
from jaxengine.runner.weights import sleep
from jaxengine.runner.weights.weight_update import WeightUpdateError
from tests.jaxengine.engine.test_weight_updates import NUM_TOKENS, PROMPTS, changed, greedy, tokens_of
from tests.sharding.update_cases import faulty
from tests.tables import each_row


@pytest.fixture(scope="module")
def expected(make_llm) -> list[list[int]]:
    """Tokens of the prompts with the weights of `changed(0)`, which are the checkpoint's."""
    return tokens_of(make_llm())


@pytest.fixture(scope="module")
def engine(tiny_options):
    engine = AsyncLLM(**tiny_options)
    yield engine
    engine.shutdown()


async def begin(engine: AsyncLLM) -> None:
    """The engine as it is after its start, whatever the test before has left."""
    await engine.update_weights(changed(0))
    await engine.resume_generation()
    assert await engine.utility("reset_prefix_cache") and not engine.core.has_unfinished


def test_running_requests_are_computed_again(engine, expected):
    """While steps are in flight, and without any; nothing stays paused, and tokens are the same."""

    async def run() -> None:
        await begin(engine)
        tasks = [asyncio.create_task(_tokens(engine, prompt)) for prompt in PROMPTS]
        for _ in range(20):
            await asyncio.sleep(0.005)
            assert await engine.reset_prefix_cache(reset_running_requests=True)
        assert [await task for task in tasks] == expected
        assert await engine.reset_prefix_cache(reset_running_requests=True) and not await engine.is_paused()
        assert [await _tokens(engine, prompt) for prompt in PROMPTS] == expected
        await engine.pause_generation("keep")
        assert await engine.reset_prefix_cache(reset_running_requests=True) and await engine.is_paused()

    asyncio.run(run())


async def _tokens(engine: AsyncLLM, prompt: list[int]) -> list[int]:
    async for output in engine.generate(prompt, greedy(NUM_TOKENS)):
        newest = output
    return list(newest.outputs[0].token_ids)


@each_row(("mode", "reason"), [("keep", "length"), ("wait", "length"), ("abort", "abort")])
def test_a_pause(engine, mode, reason):
    """Running requests end as the mode says; those that come meanwhile wait for `resume_generation`."""

    async def run() -> None:
        await begin(engine)

        async def last(request_id: str) -> Any:
            async for output in engine.generate(PROMPTS[0], greedy(60), request_id):
                newest = output
            return newest.outputs[0]

        early = asyncio.create_task(last("early"))
        await asyncio.sleep(0.05)
        await engine.pause_generation(mode)
        late = asyncio.create_task(last("late"))
        await asyncio.sleep(0.1)
        assert await engine.is_paused() and not late.done() and early.done() == (mode != "keep")
        await engine.resume_generation()
        assert (await early).finish_reason == reason and len((await late).token_ids) == 60

    asyncio.run(run())


def test_requests_go_on_under_faulty_updates(engine, expected):
    """Tensors that do not fit, a trainer that fails half way, a caller who gives up: one error, and nothing else."""

    async def run() -> None:
        await begin(engine)
        before, found = await engine.weight_info(checksum=True), []

        async def requests() -> None:
            while True:
                async for output in engine.generate(PROMPTS[0], greedy()):
                    last = output
                found.append(last.outputs[0].token_ids)

        task = asyncio.create_task(requests())
        for fault, tensors in faulty(changed(1)):
            with pytest.raises((WeightUpdateError, ConnectionError), match=fault):
                await engine.update_weights(tensors)
        begun, may_end = threading.Event(), threading.Event()

        def slow() -> Iterator[tuple[str, Any]]:
            yield from changed(1).items()
            begun.set()
            assert may_end.wait(30)

        update = asyncio.create_task(engine.update_weights(slow(), version="given up"))
        assert await asyncio.to_thread(begun.wait, 30)
        update.cancel()
        may_end.set()
        await asyncio.wait([update])
        num_found = len(found)
        while len(found) < num_found + 2:
            await asyncio.sleep(0.001)
        task.cancel()
        assert update.cancelled() and await engine.weight_info(checksum=True) == before
        assert all(each == expected[0] for each in found) and engine.core.engine.scheduler.num_preemptions == 0

    asyncio.run(run())


async def kept(engine: AsyncLLM) -> asyncio.Task[Any]:
    """A request that a pause has stopped where it was."""

    async def finish_reason() -> Any:
        async for output in engine.generate(PROMPTS[0], greedy(60), "kept"):
            last = output
        return last.outputs[0].finish_reason

    task = asyncio.create_task(finish_reason())
    while not engine.core.has_unfinished:
        await asyncio.sleep(0.001)
    await engine.pause_generation("keep")
    assert not task.done()
    return task


@each_row(("mode", "reason"), [("wait", "length"), ("abort", "abort")])
def test_a_later_pause_ends_what_an_earlier_one_kept(engine, mode, reason):
    """The operator's own pause, or an update that aborts. One that waits would end the operator's pause: it is refused,
    before it reads, while requests are kept; those that the pause itself holds back are none of them.
    """

    async def run() -> None:
        await begin(engine)
        task = await kept(engine)
        if mode == "wait":
            with pytest.raises(RequestError, match="requests that it keeps .*; allowed: .*resume_generation") as error:
                await engine.update_weights("nowhere", mode=mode)
            assert error.value.param == "mode" and not task.done()
            await engine.pause_generation(mode)
            late = asyncio.create_task(anext(engine.generate(PROMPTS[0], greedy(), "late")))
            await asyncio.sleep(0.05)
        await engine.update_weights(changed(1), mode=mode)
        assert await asyncio.wait_for(task, 30) == reason and await engine.is_paused()
        if mode == "wait":
            assert not late.done()
            # No step runs between the two.
            both = asyncio.gather(engine.resume_generation(), engine.pause_generation(mode))
            await asyncio.wait_for(both, 30)
            assert await asyncio.wait_for(late, 30) and not engine.core.has_unfinished

    asyncio.run(run())


def test_requests_of_a_sleeping_engine(engine):
    """They may be ended or kept; nobody can wait for them."""

    async def run() -> None:
        await begin(engine)
        task = await kept(engine)
        await engine.sleep(2, mode="keep")
        with pytest.raises(RequestError, match="cannot run to their end"):
            await engine.update_weights(changed(1), mode="wait")
        await engine.update_weights(changed(1), mode="abort")
        assert await asyncio.wait_for(task, 30) == "abort" and await engine.is_sleeping()
        await engine.wake_up()
        assert not await engine.is_paused()

    asyncio.run(run())


@pytest.mark.parametrize("level", [1, 2])
def test_an_engine_wakes_under_requests_that_wait(engine, expected, level):
    """One that ran and those that came while it slept have the tokens that they would have had, cached prefixes or not.
    What was in the pages is gone; what they hold afterwards is found."""

    async def run() -> None:
        await begin(engine)

        async def last(prompt: Any, count: int = NUM_TOKENS) -> Any:
            async for output in engine.generate(prompt, greedy(count), f"{prompt} {time.monotonic()}"):
                newest = output
            return newest.outputs[0].token_ids, newest.num_cached_tokens

        assert await last(PROMPTS[0]) == (expected[0], 0)
        early = asyncio.create_task(last(PROMPTS[2], 70))
        while not engine.core.has_unfinished:
            await asyncio.sleep(0.001)
        await engine.sleep(level, mode="keep")
        assert not early.done()
        late = [asyncio.create_task(last(prompt)) for prompt in PROMPTS[:2]]
        await asyncio.sleep(0.1)
        assert not any(each.done() for each in late)
        if level == 2:
            await engine.update_weights(changed(0))
        await engine.wake_up()
        found = [await asyncio.wait_for(each, 60) for each in late]
        assert found == [(expected[0], 0), (expected[1], 0)]
        assert (await asyncio.wait_for(early, 60))[0][:NUM_TOKENS] == expected[2]
        again = [await last(prompt) for prompt in PROMPTS]
        assert [tokens for tokens, _ in again] == expected
        assert [cached for _, cached in again] == [8, 4, 16]

    asyncio.run(run())


def test_parts_sleep_apart(engine, expected):
    """What stays is used again: a request that ran goes on in its pages, prefixes are found. New weights find none."""

    async def run() -> None:
        await begin(engine)
        runner, scheduler = engine.core.runner, engine.core.engine.scheduler
        compiled = runner.compiles.count

        async def last(prompt: Any, count: int = NUM_TOKENS) -> Any:
            async for output in engine.generate(prompt, greedy(count), f"{prompt} {time.monotonic()}"):
                newest = output
            return newest.outputs[0].token_ids, newest.num_cached_tokens

        def held() -> set[str]:
            """The parts of which the devices have memory."""
            present = {"weights": sleep.are_present(runner), "kv_cache": runner.stages[0]._kv is not None}
            return {name for name, is_there in present.items() if is_there}

        whole = (await last(PROMPTS[2], 70))[0]
        assert await last(PROMPTS[0]) == (expected[0], 0)
        for tags, preempted in ((["weights"], 0), (("kv_cache",), 1)):
            early = asyncio.create_task(last(PROMPTS[2], 70))
            while not scheduler.num_running:
                await asyncio.sleep(0.001)
            (request,) = scheduler.requests
            await engine.sleep(1, mode="keep", tags=tags)
            assert await engine.is_sleeping() and held() == {"weights", "kv_cache"} - set(tags)
            assert await engine.wake_up(tags) is True and not await engine.is_paused() and (await early)[0] == whole
            assert request.num_preemptions == preempted
            assert await last(PROMPTS[0]) == (expected[0], 0 if preempted else 8)
        await engine.sleep(2, tags=["weights"])
        await engine.update_weights(changed(1))
        assert held() == {"weights", "kv_cache"} and not await engine.is_sleeping()
        await engine.wake_up()
        changed_tokens = await last(PROMPTS[0])
        assert changed_tokens[0] != expected[0] and changed_tokens[1] == 0
        await engine.update_weights(changed(0))
        with pytest.raises(RequestError, match="release_kv_cache_memory: the engine is not paused"):
            await engine.release_kv_cache_memory()
        await engine.pause_generation()
        await engine.release_kv_cache_memory()
        assert held() == {"weights"}
        await engine.sleep(1, tags=["weights"])
        assert not held()
        await engine.wake_up()
        assert await last(PROMPTS[0]) == (expected[0], 0) and runner.compiles.count == compiled

    asyncio.run(run())


def test_requests_time_out_in_a_pause(engine):
    """Those that ran, in a pause and asleep, and those that have come since; others stay."""

    async def run() -> None:
        await begin(engine)

        async def last(request_id: str, timeout: float | None) -> Any:
            async for output in engine.generate(PROMPTS[0], greedy(60), request_id, timeout=timeout):
                newest = output
            return newest.outputs[0]

        early = asyncio.create_task(last("early", 3600.0))
        while not engine.core.has_unfinished:
            await asyncio.sleep(0.001)
        await engine.pause_generation("keep")
        (request,) = engine.core.engine.scheduler.requests
        for asleep in (False, True):
            if asleep:
                await engine.sleep(1, mode="keep")
            late = await asyncio.wait_for(last(f"late {asleep}", 0.05), 60)
            assert (late.finish_reason, late.stop_reason) == ("abort", "timeout") and not early.done()
        assert engine.core.rest() > 60 and request in engine.core.engine.scheduler.requests
        await engine.wake_up()
        assert (await early).finish_reason == "length" and engine.core.rest() == float("inf")

    asyncio.run(run())
