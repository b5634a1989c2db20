"""What a benchmark run reports, computed from known outputs and statistics; and what it asks of the engine."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from jaxengine.bench.engine_run import Run, run_static, run_workload
from jaxengine.bench.throughput import measure, measure_static
from jaxengine.bench.workloads import Workload
from jaxengine.engine.stats.stats import StepStats
from jaxengine.requests.output.outputs import CompletionOutput, RequestMetrics, RequestOutput


class FakeLLM:
    """Gives every request as many tokens 3 as it may have; a call costs 4 steps and 10 empty of 200 slots."""

    def __init__(self):
        config = SimpleNamespace(dtype="float32", max_num_seqs=2)
        stats = StepStats(5, 50, page_slots_used=7, schedule_seconds=1.0, dispatch_seconds=1.0)
        self.core = SimpleNamespace(engine=SimpleNamespace(stats=stats), runner=SimpleNamespace(config=config))
        self.calls, self.resets = [], 0

    def reset_prefix_cache(self):
        self.resets += 1

    def generate(self, prompts, params, use_tqdm):
        assert not use_tqdm
        self.calls.append((prompts, params))
        stats = self.core.engine.stats
        stats.num_steps += 4
        stats.num_tokens += 40
        stats.num_padding_tokens += 10
        stats.page_slots_used += 200
        stats.page_slots_empty += 10
        stats.schedule_seconds += 0.004
        return [
            RequestOutput(
                str(index),
                None,
                prompt["prompt_token_ids"],
                [CompletionOutput(0, "", [3] * each.max_tokens, finish_reason="length")],
                True,
                metrics=RequestMetrics(10.0, 10.05, 10.1, 10.5, 11.0, 11.5),
                num_cached_tokens=2,
            )
            for index, (prompt, each) in enumerate(zip(prompts, params, strict=True))
        ]


WORKLOAD = Workload("x", ((1, 2), (4, 5, 6), (7,)), (2, 4, 11), reference=((3, 3), (3, 3, 3, 9), (3,) * 11))


def test_a_run_sends_greedy_requests_over_an_empty_cache_and_counts_only_itself():
    llm = FakeLLM()
    done = run_workload(llm, WORKLOAD)
    ((prompts, params),) = llm.calls
    assert llm.resets == 1
    assert prompts == [{"prompt_token_ids": [1, 2]}, {"prompt_token_ids": [4, 5, 6]}, {"prompt_token_ids": [7]}]
    assert [each.max_tokens for each in params] == [2, 4, 11]
    assert all(each.is_greedy and each.ignore_eos and not each.detokenize for each in params)
    assert done.output_tokens == 17 and done.prompt_tokens == 6 and done.cached_tokens == 6
    assert done.stats["num_steps"] == 4 and done.kv_waste == pytest.approx(10 / 200)
    assert done.first_token_seconds == pytest.approx([0.5] * 3)
    assert done.inter_token_seconds == pytest.approx([1.0, 1 / 3, 0.1])


def test_the_timeline_adds_up_to_the_whole():
    stats = {"num_steps": 10, "schedule_seconds": 0.01, "dispatch_seconds": 0.02, "wait_seconds": 0.03}
    timeline = Run(0.1, [], {**stats, "update_seconds": 0.02}).timeline()
    assert timeline == {"steps": 10, "schedule": 1.0, "dispatch": 2.0, "wait": 3.0, "update": 2.0, "outside": 2.0}


def test_a_request_of_one_token_has_no_time_between_tokens():
    output = RequestOutput("1", None, [1], [CompletionOutput(0, "", [3])], True, metrics=RequestMetrics(0.0))
    done = Run(1.0, [output], {})
    assert done.inter_token_seconds == [] and done.first_token_seconds == []


def test_static_batches_run_to_their_longest_and_count_what_was_asked():
    llm = FakeLLM()
    seconds, tokens = run_static(llm, WORKLOAD, 2)
    assert [[each.max_tokens for each in params] for _, params in llm.calls] == [[4, 4], [11]]
    assert tokens == 17 and seconds > 0


def test_throughput_reports_the_fastest_run_and_how_many_outputs_are_right():
    result = measure(FakeLLM(), WORKLOAD, 3)
    assert result["same_as_reference"] == "2 of 3"
    assert result["kv_waste_percent"] == 5.0 and result["padding_percent"] == 25.0
    assert result["requests"] == 3 and result["timeline_ms_per_step"]["schedule"] == 1.0


def test_times_static_is_a_ratio_of_rates():
    llm = FakeLLM()
    result = measure_static(llm, WORKLOAD, 1000.0)
    expected = 1000.0 / result["static_output_tokens_per_second"]
    assert result["static_batch_size"] == 2 and result["times_static"] == pytest.approx(expected, rel=0.05, abs=0.01)
