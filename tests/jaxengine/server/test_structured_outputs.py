"""Structured outputs from an engine in another process: the same tokens, and refusals that come late."""

from __future__ import annotations

import asyncio
import copy

import pytest

from jaxengine.requests.params.sampling_params import RequestOutputKind, SamplingParams
from jaxengine.scheduler.base.errors import RequestError
from tests.jaxengine.server.processes.test_processes import collect, connected, everything, idle

CONSTRAINED = SamplingParams(max_tokens=40, seed=3, structured_outputs={"regex": "[a-z]{3,6}( [a-z]{3,6}){0,3}"})


def joined(outputs):
    """What a stream of new pieces, cut wherever its reader was slow, amounts to."""
    whole = copy.deepcopy(outputs[0])
    for output in outputs[1:]:
        whole.add(output, aggregate=True)
    return [whole]


@pytest.mark.parametrize("kind", RequestOutputKind)
def test_tokens_equal_those_of_one_process(server, chat_engine, kind):
    async def run():
        async with connected(server) as engine:
            params = CONSTRAINED.clone_with(output_kind=kind, n=1 if kind is RequestOutputKind.DELTA else 3)
            here, there = await collect(chat_engine, params), await collect(engine, params)
            if kind is RequestOutputKind.DELTA:
                here, there = joined(here), joined(there)
            assert everything(there) == everything(here)
            await idle(engine)

    asyncio.run(run())


def test_a_grammar_that_cannot_be_used_is_an_error_of_its_request_only(server, chat_engine):
    async def refused(engine, n):
        with pytest.raises(RequestError, match="structured_outputs cannot be used") as caught:
            await collect(engine, CONSTRAINED.clone_with(structured_outputs={"regex": "(a"}, n=n))
        assert caught.value.param == "structured_outputs"

    async def run():
        async with connected(server) as engine:
            for each in (engine, chat_engine):
                running = asyncio.ensure_future(collect(each, CONSTRAINED))
                for n in (1, 3):
                    await refused(each, n)
                assert (await running)[-1].outputs[0].finish_reason == "stop"
            await idle(engine)

    asyncio.run(run())
