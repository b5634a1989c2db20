"""The fair policy through the engine: who comes when, and that nobody's tokens change."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from jaxengine import AsyncLLM, SamplingParams
from jaxengine.requests.params.options import MAX_CLIENT_LENGTH
from jaxengine.scheduler.base.errors import RequestError
from tests.conftest import use_scheduler

rng = np.random.default_rng(11)
LENGTH, OUTPUTS = 6, 8
FLOOD = [{"prompt_token_ids": rng.integers(3, 100, LENGTH).tolist()} for _ in range(50)]
OTHERS = [{"prompt_token_ids": rng.integers(3, 100, LENGTH).tolist()} for _ in range(20)]


def params_for(prompts, max_tokens=OUTPUTS):
    return [
        SamplingParams(temperature=0.8 * (index % 2), seed=index, max_tokens=max_tokens, ignore_eos=True)
        for index in range(len(prompts))
    ]


def run(llm, prompts, **options):
    return llm.generate(prompts, params_for(prompts), use_tqdm=False, **options)


def tokens(outputs):
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize("policy", ["fair", "fcfs"])
def test_a_flood_gets_no_more_than_its_share(make_llm, policy):
    llm = make_llm(scheduling_policy=policy) if policy == "fair" else make_llm()
    prompts = [*FLOOD, *OTHERS]
    clients = ["flood"] * len(FLOOD) + ["other"] * len(OTHERS)
    outputs = run(llm, prompts, **({"client": clients} if policy == "fair" else {}))
    by_admission = sorted(range(len(prompts)), key=lambda index: outputs[index].metrics.first_scheduled_time)
    order = [clients[index] for index in by_admission]
    served = order.index("other"), len(order) - order[::-1].index("other")
    if policy == "fcfs":
        assert served[0] == len(FLOOD)
        return
    # While both wait, they differ by no more than the paper's bound: one input, or what runs at once, twice.
    slots = llm.core.inputs.config.max_num_seqs
    bound = 2 * max(LENGTH, 2 * slots * (LENGTH + OUTPUTS))
    most = bound // (LENGTH + 2 * OUTPUTS)
    for count in range(served[1]):
        assert abs(order[:count].count("flood") - order[:count].count("other")) <= most
    assert most < len(FLOOD) - len(OTHERS)
    # All came at once, so they take turns: some of the first slots are the other client's, and so on.
    assert served[0] < slots and served[1] <= 2 * len(OTHERS) + slots
    ends = [max(outputs[index].metrics.finished_time for index in part) for part in (range(50), range(50, 70))]
    assert ends[1] < ends[0]


def test_tokens_do_not_depend_on_the_policy_nor_on_preemption(make_llm):
    prompts = [{"prompt_token_ids": rng.integers(3, 100, int(n)).tolist()} for n in rng.integers(1, 50, 24)]
    clients = [f"client {index % 5}" for index in range(24)]
    options = {"sampling_params": params_for(prompts, 20), "use_tqdm": False}
    expected = tokens(make_llm().generate(prompts, **options))
    assert tokens(make_llm(scheduling_policy="fair").generate(prompts, client=clients, **options)) == expected
    tight = make_llm(scheduling_policy="fair")
    scheduler = use_scheduler(tight, num_pages=26)
    assert tokens(tight.generate(prompts, client=clients, **options)) == expected
    assert scheduler.num_preemptions > 5
    assert scheduler._fair.service == {} and scheduler.num_free_pages == scheduler.num_pages
    use_scheduler(tight)


@pytest.mark.parametrize("client", ["", "x" * (MAX_CLIENT_LENGTH + 1), "a\nb", "\ud800", 7, b"a"])
def test_clients_that_cannot_be_are_named(make_llm, client):
    llm = make_llm(scheduling_policy="fair")
    with pytest.raises(RequestError, match="client is .*; allowed: a string of 1 to 256 printable") as error:
        run(llm, FLOOD[:2], client=["good", client])
    assert error.value.param == "client" and not llm.core.has_unfinished
    with pytest.raises(RequestError, match="client has 1 values for 2 prompts"):
        run(llm, FLOOD[:2], client=["good"])
    assert tokens(run(llm, FLOOD[:2], client="x" * MAX_CLIENT_LENGTH)) == tokens(run(llm, FLOOD[:2]))


def test_a_client_under_another_policy_is_refused(make_llm):
    llm = make_llm()
    with pytest.raises(RequestError, match="client is 'me'; it needs scheduling_policy='fair'") as error:
        run(llm, FLOOD[:2], client="me")
    assert error.value.param == "client" and not llm.core.has_unfinished
    with pytest.raises(RequestError, match="priority"):
        run(make_llm(scheduling_policy="fair"), FLOOD[:1], priority=[1])


async def test_streams_of_a_client_do_not_wait_behind_a_flood(tiny_options):
    engine = AsyncLLM(**tiny_options, scheduling_policy="fair")
    ended: list[str] = []

    async def follow(prompt, params, client):
        async for output in engine.generate(prompt, params, client=client):
            assert len(output.outputs) == 1
        ended.append(client)

    try:
        flood = [follow(*pair, "flood") for pair in zip(FLOOD, params_for(FLOOD), strict=True)]
        await asyncio.gather(*flood, follow(OTHERS[0], params_for(OTHERS)[0], "other"))
        assert ended.index("other") <= engine.inputs.config.max_num_seqs * 2
        with pytest.raises(RequestError, match="client"):
            await follow(OTHERS[0], params_for(OTHERS)[0], "")
    finally:
        engine.shutdown()
