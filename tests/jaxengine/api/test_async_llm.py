"""Streams over one engine: kinds of output, cancelling, aborting, errors, shutdown."""

from __future__ import annotations

import asyncio

import pytest

from jaxengine import AsyncLLM, SamplingParams
from jaxengine.api.async_llm import EngineDeadError
from jaxengine.requests.params.sampling_params import RequestOutputKind
from jaxengine.scheduler.base.errors import RequestError

PROMPT = {"prompt_token_ids": [5, 6, 7, 8, 9]}
GREEDY = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)


@pytest.fixture(scope="module")
def engine(tiny_options):
    engine = AsyncLLM(**tiny_options)
    yield engine
    engine.shutdown()


async def collect(engine, params=GREEDY, prompt=PROMPT, **options):
    return [output async for output in engine.generate(prompt, params, **options)]


async def idle(engine):
    """Waits until every page is back."""
    scheduler = engine.core.engine.scheduler
    for _ in range(500):
        if scheduler.num_free_pages == scheduler.num_pages and not engine.core.has_unfinished:
            return
        await asyncio.sleep(0.01)
    raise AssertionError("pages were not given back")


def test_kinds_of_output(engine):
    async def run():
        final = await collect(engine, GREEDY.clone_with(output_kind=RequestOutputKind.FINAL_ONLY))
        cumulative = await collect(engine, GREEDY.clone_with(output_kind=RequestOutputKind.CUMULATIVE))
        delta = await collect(engine, GREEDY.clone_with(output_kind=RequestOutputKind.DELTA))
        assert len(final) == 1
        reference = final[0].outputs[0].token_ids
        assert len(reference) == 30
        assert cumulative[-1].outputs[0].token_ids == reference
        lengths = [len(output.outputs[0].token_ids) for output in cumulative]
        assert lengths == sorted(lengths) and len(lengths) > 3
        assert sum((output.outputs[0].token_ids for output in delta), []) == reference
        for outputs in (cumulative, delta):
            assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
        longest = engine.inputs.config.max_model_len
        whole = (await collect(engine, GREEDY.clone_with(max_tokens=longest + 1)))[-1].outputs[0]
        assert (len(whole.token_ids), whole.finish_reason) == (longest - 5, "length")
        *_, cut = await collect(engine, prompt=[5, 6, 7], tokenization_kwargs={"truncate_prompt_tokens": 2})
        assert cut.prompt_token_ids == [6, 7]

    asyncio.run(run())


def test_many_streams_at_once_equal_one_alone(engine):
    async def run():
        params = GREEDY.clone_with(output_kind=RequestOutputKind.FINAL_ONLY)
        alone = (await collect(engine, params))[-1].outputs[0].token_ids
        crowd = await asyncio.gather(*(collect(engine, params) for _ in range(20)))
        assert all(outputs[-1].outputs[0].token_ids == alone for outputs in crowd)

    asyncio.run(run())


def test_cancelling_frees_pages(engine):
    async def run():
        stream = engine.generate(PROMPT, GREEDY.clone_with(max_tokens=90))
        await anext(stream)
        await stream.aclose()
        await idle(engine)
        task = asyncio.create_task(collect(engine, GREEDY.clone_with(max_tokens=90)))
        await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await idle(engine)

    asyncio.run(run())


def test_abort_ends_the_stream(engine):
    async def run():
        stream = engine.generate(PROMPT, GREEDY.clone_with(max_tokens=90), "mine")
        await anext(stream)
        await engine.abort("mine")
        outputs = [output async for output in stream]
        assert outputs[-1].finished and outputs[-1].outputs[0].finish_reason == "abort"
        await engine.abort("nobody")
        streams = [engine.generate(PROMPT, GREEDY.clone_with(max_tokens=90), name) for name in "ab"]
        for each in streams:
            await anext(each)
        await engine.abort(["a", "b"])
        for each in streams:
            assert [output.outputs[0].finish_reason async for output in each][-1] == "abort"
        await idle(engine)

    asyncio.run(run())


def test_a_bad_request_disturbs_nobody(engine):
    async def run():
        good = asyncio.create_task(collect(engine))
        with pytest.raises(RequestError) as error:
            await collect(engine, prompt={"prompt_token_ids": [-1]})
        assert error.value.param == "prompt_token_ids"
        stream = engine.generate(PROMPT, GREEDY.clone_with(max_tokens=90), "twice")
        await anext(stream)
        with pytest.raises(RequestError) as error:
            await collect(engine, request_id="twice")
        assert error.value.param == "request_id"
        rest = [output async for output in stream]
        assert len(rest[-1].outputs[0].token_ids) == 90
        assert len((await good)[-1].outputs[0].token_ids) == 30
        await engine.check_health()

    asyncio.run(run())


def test_timeout_ends_a_request(engine):
    async def run():
        outputs = await collect(engine, GREEDY.clone_with(max_tokens=90), timeout=1e-6)
        assert outputs[-1].outputs[0].finish_reason == "abort"
        assert outputs[-1].outputs[0].stop_reason == "timeout"
        await idle(engine)

    asyncio.run(run())


def test_shutdown_and_failure_end_streams(tiny_options):
    async def run():
        engine = AsyncLLM(**tiny_options)
        stream = engine.generate(PROMPT, GREEDY.clone_with(max_tokens=90))
        await anext(stream)
        engine.shutdown()
        with pytest.raises(EngineDeadError, match="shut down"):
            while True:
                await anext(stream)
        with pytest.raises(EngineDeadError):
            await collect(engine)

        engine = AsyncLLM(**tiny_options)

        def fail():
            raise RuntimeError("seeded")

        engine.core.step = fail
        with pytest.raises(EngineDeadError, match="seeded"):
            await collect(engine)
        with pytest.raises(EngineDeadError, match="seeded"):
            await engine.check_health()
        assert engine.errored

    asyncio.run(run())
