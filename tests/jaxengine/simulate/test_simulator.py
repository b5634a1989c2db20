"""The simulator beside a running engine: the same steps, preemptions and hits where requests come at once."""

from __future__ import annotations

import dataclasses
import json
import stat
from types import SimpleNamespace

import numpy as np
import pytest

from jaxengine.requests.params.sampling_params import SamplingParams
from jaxengine.scheduler.base.request import Request
from jaxengine.scheduler.base.token_params import TokenParams
from jaxengine.simulate.calibrate import costs_of, simulated
from jaxengine.simulate.costs import SPREAD_SHARES, Cold, Pause, StepSpread, read_costs
from jaxengine.simulate.loop import Outcome
from jaxengine.simulate.trace import read_trace, trace_of
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
    assert costs.tiles.rows > 1 and costs.host.dispatch > 0 and costs.host.after > 0 and costs.errors[0] > 0
    file = tmp_path / "costs.json"
    costs.write(str(file))
    assert read_costs(str(file)) == dataclasses.replace(costs, options=json.loads(json.dumps(costs.options)))
    assert "compile_cache_dir" not in costs.options and costs.options["model"] == tiny_options["model"]
    prompts = [[2] * 20, [3] * 9, [4] * 30]
    outcome = simulated(llm.core.runner, trace_of("three", prompts, [8, 20, 4], 4), costs)
    assert outcome.seconds > 0 and (outcome.first_token > 0).all() and len(outcome.intervals) == 29
    for factors in (costs.spread.decode, costs.spread.mixed):
        assert len(factors) == len(SPREAD_SHARES) and list(factors) == sorted(factors)
        assert factors[0] < 1 < factors[-1]

    def of_steps(spread: StepSpread) -> list[float]:
        changed = dataclasses.replace(costs, spread=spread)
        found = simulated(llm.core.runner, trace_of("three", prompts, [8, 20, 4], 4), changed)
        return [step.seconds for step in found.steps]

    exact, drawn = np.array(of_steps(StepSpread())), of_steps(costs.spread)
    assert drawn == [step.seconds for step in outcome.steps] and len(set((drawn / exact).round(9))) > 10
    decodes = np.array([step.bucket.decode_only for step in outcome.steps])
    factors = [(value,) * len(SPREAD_SHARES) for value in (2.0, 3.0)]
    np.testing.assert_allclose(of_steps(StepSpread(*factors)), np.where(decodes, 2.0, 3.0) * exact)

    def apart(**changed) -> Outcome:
        """Run three requests, each long after the one before, and steps without a spread."""
        trace = trace_of("three", prompts, [8, 20, 4], 4)
        requests = [dataclasses.replace(each, arrival=9.0 * index) for index, each in enumerate(trace.requests)]
        fixed = dataclasses.replace(
            costs, **{"spread": StepSpread(), "pauses": (), "cold": Cold(0.1, 0.0, 0.5), **changed}
        )
        return simulated(llm.core.runner, dataclasses.replace(trace, requests=tuple(requests)), fixed)

    more = apart(pauses=(Pause(2.0, 0.5, 0.25),)).first_token - apart().first_token
    np.testing.assert_allclose(more, [0.0, 0.75, 0.75], atol=1e-9)
    warm, cooled = (apart(cold_decode=((1, lost), (64, lost))).intervals for lost in (0.0, 0.8))
    np.testing.assert_allclose((cooled - warm)[:7], 0.8 * 0.5 ** np.arange(7), atol=1e-9)


def test_a_recorded_trace_runs_as_what_was_recorded(make_llm, tmp_path):
    """Later turns find pages of earlier answers, which only the ids of a recorded trace tell."""
    file = tmp_path / "trace.jsonl"
    file.write_text("of an earlier run")
    llm = make_llm(record_trace=str(file))
    engine, runner = llm.core.engine, llm.core.runner
    scheduler, rng, first = engine.scheduler, np.random.default_rng(1), engine.stats.num_steps
    texts = [rng.integers(2, runner.vocab_size, 10).tolist() for _ in range(3)]
    stops = tuple(range(0, runner.vocab_size, 16))
    for turn in range(3):
        params = SamplingParams(temperature=1.0, seed=turn, max_tokens=13, ignore_eos=True, stop_token_ids=stops)
        for index, text in enumerate(texts):
            (output,) = llm.generate([{"prompt_token_ids": text}], params, use_tqdm=False)
            texts[index] = [*text, *output.outputs[0].token_ids, 5, 6]
        while engine.has_unfinished:
            engine.step()
    (recorded,) = tmp_path.glob("trace.jsonl.1")
    assert stat.S_IMODE(recorded.stat().st_mode) == 0o600 and file.read_text() == "of an earlier run"
    trace = read_trace(str(recorded))
    lengths = [(request.num_prompt, request.num_output) for request in trace.requests]
    assert len(lengths) == 9 and {request.max_tokens for request in trace.requests} <= {None, 13}
    assert any(request.max_tokens for request in trace.requests), "no request ended by a stop token"
    apart = dataclasses.replace(
        trace,
        requests=tuple(dataclasses.replace(each, arrival=1.0 * index) for index, each in enumerate(trace.requests)),
    )
    outcome = simulated(runner, apart)
    assert outcome.num_prefix_hits == scheduler.num_prefix_hits > 20
    assert outcome.stats.num_steps == engine.stats.num_steps - first
    assert engine.extensions.by_name["arrivals"].status()["recorded_trace"]["requests"] == 9
    assert not set(json.loads(recorded.read_text().splitlines()[1])) - {
        *("arrival", "prompt_tokens", "output_tokens", "max_tokens", "hash_ids")
    }
    # A disk that is full in the middle of a line: the trace ends with a whole one, and the engine serves on.
    arrivals = engine.extensions.by_name["arrivals"]
    own = arrivals._file
    arrivals._file = SimpleNamespace(write=lambda line: own.write(line[:7]), fileno=own.fileno, close=own.close)
    assert len(llm.generate([{"prompt_token_ids": texts[0]}] * 2, params, use_tqdm=False)) == 2
    assert read_trace(str(recorded)) == trace and own.closed
    assert "No space left" in arrivals.status()["recorded_trace"]["stopped_by"]
