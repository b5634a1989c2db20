"""The simulator beside a running engine: the same steps, preemptions and hits where requests come at once."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from jaxengine.scheduler.request import Request
from jaxengine.scheduler.token_params import TokenParams
from jaxengine.simulate.calibrate import costs_of, simulated
from jaxengine.simulate.costs import read_costs
from jaxengine.simulate.trace import trace_of
from tests.conftest import use_scheduler


def requests(rng: np.random.Generator, vocab_size: int) -> tuple[list[list[int]], list[int]]:
    """Prompts, some with one of two prefixes of three pages, and output lengths."""
    heads = [rng.integers(2, vocab_size, 12).tolist() for _ in range(2)]
    prompts, outputs = [], []
    for index in range(24):
        own = rng.integers(2, vocab_size, rng.integers(1, 40)).tolist()
        prompts.append(heads[index % 2] + own if index % 3 else own)
        outputs.append(int(rng.integers(1, 40)))
    return prompts, outputs


@pytest.mark.parametrize("num_pages", [200, 40])
def test_a_closed_trace_runs_as_on_the_engine(make_llm, num_pages):
    llm = make_llm()
    scheduler = use_scheduler(llm, num_pages=num_pages)
    engine, runner = llm.core.engine, llm.core.runner
    prompts, outputs = requests(np.random.default_rng(num_pages), runner.vocab_size)
    first = engine.stats.num_steps
    for index, (prompt, count) in enumerate(zip(prompts, outputs, strict=True)):
        engine.queue([Request(str(index), np.array(prompt, np.int32), TokenParams(), count)])
    while engine.has_unfinished:
        engine.step()
    trace = trace_of("closed", prompts, outputs, runner.config.block_size)
    outcome = simulated(runner, trace, num_pages=num_pages)
    records = [step for step in engine.timeline.last(1e9, [])["steps"] if step["number"] > first]
    assert [(str(step.bucket), step.num_tokens, step.num_rows) for step in outcome.steps] == [
        (step["bucket"], step["num_tokens"], step["num_rows"]) for step in records
    ]
    assert outcome.num_preemptions == scheduler.num_preemptions
    assert (outcome.num_preemptions > 0) == (num_pages == 40)
    assert outcome.num_prefix_hits == scheduler.num_prefix_hits > 0
    assert outcome.num_prefix_queries == scheduler.num_prefix_queries
    padding = sum(step["num_padded"] - step["num_tokens"] for step in records)
    assert outcome.stats.num_padding_tokens == padding > 0
    assert not outcome.refused and outcome.stats.num_generated_tokens == sum(outputs)


def test_costs_are_measured_and_read_again(make_llm, tiny_options, tmp_path):
    llm = make_llm()
    use_scheduler(llm)
    options = {name: value for name, value in tiny_options.items() if name != "dtype"}
    costs = costs_of(llm, options, rounds=1)
    buckets = llm.core.runner.buckets
    assert [size for size, _ in costs.decode] == [bucket.num_tokens for bucket in buckets.decode]
    assert [size for size, _ in costs.mixed] == [bucket.num_tokens for bucket in buckets.mixed]
    assert all(seconds > 0 for _, seconds in (*costs.decode, *costs.mixed))
    assert costs.num_pages == llm.core.runner.plan.num_pages and costs.platform == "cpu" and costs.num_steps > 40
    assert costs.host.dispatch > 0 and costs.host.after > 0 and costs.errors[0] > 0
    file = tmp_path / "costs.json"
    costs.write(str(file))
    assert read_costs(str(file)) == dataclasses.replace(costs, options=json.loads(json.dumps(costs.options)))
    assert "compile_cache_dir" not in costs.options and costs.options["model"] == tiny_options["model"]
    prompts = [[2] * 20, [3] * 9, [4] * 30]
    outcome = simulated(llm.core.runner, trace_of("three", prompts, [8, 20, 4], 4), costs)
    assert outcome.seconds > 0 and (outcome.first_token > 0).all() and len(outcome.intervals) == 29
