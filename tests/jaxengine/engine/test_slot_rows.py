"""Launches that bring the parameters, biases and counts of a step's new requests to the devices: few for many."""

from __future__ import annotations

from collections import Counter

import pytest

from jaxengine import SamplingParams
from tests.conftest import use_scheduler

PROMPT = [5, 6, 7]


@pytest.fixture
def launches(make_llm, monkeypatch) -> Counter:
    counts: Counter = Counter()
    runner = make_llm().core.runner
    change = runner.change_state

    def counted(name, *arguments):
        counts[name] += 1
        change(name, *arguments)

    monkeypatch.setattr(runner, "change_state", counted)
    return counts


def generate(llm, params):
    prompts = [{"prompt_token_ids": PROMPT}] * len(params)
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]


def test_a_message_of_each_kind_serves_all_requests_of_a_step(make_llm, launches):
    llm = make_llm()
    use_scheduler(llm)
    common = {"max_tokens": 3, "temperature": 0.0, "ignore_eos": True}
    own = [{"logit_bias": {20 + each: 100.0}, "repetition_penalty": 1.1 + each / 8} for each in range(8)]
    params = [SamplingParams(**common, **each) for each in own]
    found = generate(llm, params)
    # Each row has its own bias: a row that went to another's slot would show.
    assert [tokens[0] for tokens in found] == [20 + each for each in range(8)]
    assert launches["parameters"] == 1
    assert {name: count for name, count in launches.items() if "rows" in name} == {
        "bias rows, 8 at once": 1,
        "counts rows, 8 at once": 1,
    }
    launches.clear()
    assert [generate(llm, [each])[0] for each in params[:2]] == found[:2]
    assert launches["bias rows, 1 at once"] == launches["counts rows, 1 at once"] == 2
