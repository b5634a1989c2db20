"""trace_decode_token_ids: tokens that are decoded whatever would be sampled, with the log-probabilities of decoding."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from jaxengine import LLM, RequestError, SamplingParams
from tests.conftest import compiled_programs, use_scheduler
from tests.jaxengine.engine.test_logprobs import ENGINES, RUNS, bits, prompts_of, recorded, rollout_params

ACCEPTED = "vllm:spec_decode_num_accepted_tokens"


def replay(llm: LLM, prompts: Any, traces: Any, params: Any) -> tuple[list[list[int]], list[np.ndarray]]:
    """Run as `recorded` does, with known tokens; the seed would draw others."""
    asked = [
        each.clone_with(seed=900 + index, trace_decode_token_ids=trace)
        for index, (each, trace) in enumerate(zip(params, traces, strict=True))
    ]
    return recorded(llm, prompts, asked)


@pytest.mark.parametrize("name", ENGINES)
def test_a_trace_has_the_logprobs_that_were_recorded(make_llm, name):
    """Every other request chooses for itself, and has the tokens that it has without such company."""
    llm: LLM = make_llm(**ENGINES[name])
    use_scheduler(llm)
    prompts, params = prompts_of(7), rollout_params(logprobs=0)
    plain, values = recorded(llm, prompts, params)
    before = compiled_programs()
    for way, (changes, alone) in RUNS.items():
        scheduler = use_scheduler(llm, **changes)
        for first in (0, 1):
            traces = [own if index % 2 == first else None for index, own in enumerate(plain)]
            parts = [slice(each, each + 1) for each in range(len(prompts))] if alone else [slice(None)]
            runs = [replay(llm, prompts[part], traces[part], params[part]) for part in parts]
            tokens, logprobs = ([own for run in runs for own in run[which]] for which in (0, 1))
            for index, trace in enumerate(traces):
                if trace is not None:
                    assert tokens[index] == trace, (way, index)
                    assert bits(logprobs[index]) == bits(values[index]), (way, index)
        assert (scheduler.num_preemptions > 0) == (way == "preempted"), way
    use_scheduler(llm)
    again, same = recorded(llm, prompts, params)  # in slots that had traces
    assert again == plain and [*map(bits, same)] == [*map(bits, values)]
    assert compiled_programs() == before
    if "drafts" in name:
        assert {each.name: getattr(each, "value", 0) for each in llm.get_metrics()}[ACCEPTED] > 0


def test_any_tokens_can_be_traced(make_llm):
    """Penalties and bad words change nothing of raw log-probabilities but by what they count."""
    llm: LLM = make_llm(**ENGINES["raw"])
    use_scheduler(llm)
    prompts, rng = prompts_of(8), np.random.default_rng(8)
    traces = [rng.integers(0, 128, int(size)).tolist() for size in rng.integers(1, 30, len(prompts))]
    params = [each.clone_with(ignore_eos=False, max_tokens=None) for each in rollout_params(logprobs=0)]
    tokens, logprobs = replay(llm, prompts, traces, params)
    assert tokens == traces
    scored = llm.get_logprobs(prompts, traces)
    assert [*map(bits, logprobs)] == [*map(bits, scored)]
    decoded = llm.get_logprobs(prompts, [*traces[:-1], []], decode=True)
    assert [*map(bits, decoded)] == [*map(bits, [*scored[:-1], []])]


def test_how_a_trace_ends(make_llm):
    llm: LLM = make_llm(**ENGINES["raw"])
    use_scheduler(llm)
    trace = [5, 6, 7, 6, 8, 9]

    def run(**more: Any) -> Any:
        asked = SamplingParams(temperature=0, trace_decode_token_ids=trace, **more)
        (output,) = llm.generate([[3, 4]], asked, use_tqdm=False)
        return output.outputs[0]

    for more, count, reason in (
        ({}, 6, "length"),
        ({"max_tokens": None}, 6, "length"),
        ({"max_tokens": 4}, 4, "length"),
        ({"stop_token_ids": [6]}, 2, "stop"),
        ({"stop_token_ids": [6], "min_tokens": 3}, 4, "stop"),
        ({"logit_bias": {5: -100.0}, "allowed_token_ids": [99]}, 6, "length"),
    ):
        output = run(**more)
        assert (output.token_ids, output.finish_reason) == (trace[:count], reason), more
    for more, said in (
        ({"n": 2, "temperature": 1.0}, "n must be 1 with trace_decode_token_ids"),
        ({"min_tokens": 7}, "min_tokens must be at most 6"),
        ({"trace_decode_token_ids": [128]}, "trace_decode_token_ids must be token ids inside the vocabulary"),
        ({"trace_decode_token_ids": [1] * 95}, "trace_decode_token_ids must be at most 94 tokens"),
        ({"trace_decode_token_ids": []}, "trace_decode_token_ids must be None or a list of 1 to"),
        ({"trace_decode_token_ids": [1, 2.0]}, "trace_decode_token_ids must be one flat list of token ids"),
    ):
        with pytest.raises(RequestError, match=said):
            llm.generate([[3, 4]], SamplingParams(**{"trace_decode_token_ids": trace} | more), use_tqdm=False)
    assert SamplingParams(trace_decode_token_ids=np.array([5, 6, 5])).trace_decode_token_ids == (5, 6, 5)


def test_an_engine_without_the_option_refuses_the_field(make_llm):
    with pytest.raises(
        RequestError, match="trace_decode_token_ids: the engine was started without enable_trace_replay"
    ) as refused:
        make_llm().generate([[3, 4]], SamplingParams(trace_decode_token_ids=[5]), use_tqdm=False)
    assert refused.value.param == "trace_decode_token_ids"
    with pytest.raises(RequestError, match="decode needs an engine that was started with enable_trace_replay"):
        make_llm().get_logprobs([[3, 4]], [[5]], decode=True)
