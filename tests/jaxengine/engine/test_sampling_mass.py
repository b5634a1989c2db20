"""return_sampling_mass: raw and processed log-probabilities at once, and the log of what truncation kept."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from jaxengine import LLM, RequestError, SamplingParams
from jaxengine.requests.params.sampling_params import RequestOutputKind
from tests.conftest import compiled_programs, use_scheduler
from tests.jaxengine.engine.test_logprobs import ENGINES, prompts_of, rollout_params

# Every way to truncate, alone and together, with what else changes logits; greedy ones keep all.
KINDS: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.0},
    {"temperature": 0.7, "top_k": 5},
    {"temperature": 1.3, "top_p": 0.6},
    {"temperature": 1.0, "min_p": 0.3},
    {"temperature": 0.9, "top_k": 20, "top_p": 0.8, "min_p": 0.02, "logit_bias": {7: 3.0}},
    {"temperature": 1.0, "top_p": 0.9, "repetition_penalty": 1.4, "allowed_token_ids": list(range(40))},
    {"temperature": 0.0, "logit_bias": {9: 2.0}},
]


def log_softmax(x: np.ndarray) -> np.ndarray:
    x = x - x.max()
    return x - np.log(np.exp(x).sum())


@pytest.mark.parametrize("name", ENGINES)
def test_mass_is_what_truncation_kept(make_llm, name):
    """Beside requests that ask for none, through preemption and chunks, with drafts."""
    llm: LLM = make_llm(**ENGINES[name])
    use_scheduler(llm)
    prompts = prompts_of(5)
    params = [
        each.clone_with(**{"top_p": 1.0, "top_k": 0, "repetition_penalty": 1.0, "logit_bias": None} | kind, logprobs=-1)
        for each, kind in zip(rollout_params(), KINDS, strict=True)
    ]
    plain = llm.generate(prompts, params, use_tqdm=False)
    before = compiled_programs()
    for changes in ({}, {"num_pages": 30, "long_prefill_token_threshold": 5}):
        use_scheduler(llm, **changes)
        asked = [each.clone_with(return_sampling_mass=index != 4) for index, each in enumerate(params)]
        for index, output in enumerate(llm.generate(prompts, asked, use_tqdm=False)):
            (own,), (known,) = output.outputs, plain[index].outputs
            assert own.token_ids == known.token_ids
            if index == 4:
                assert own.sampling_log_mass is None and own.logprobs_raw is None
                continue
            assert own.sampling_log_mass.dtype == np.float32 and len(own.sampling_log_mass) == len(own.token_ids)
            reported = [position[token].logprob for token, position in zip(own.token_ids, own.logprobs, strict=True)]
            mine = own.logprobs_raw if name == "raw" else own.logprobs_processed
            assert mine.tolist() == reported
            truncates = KINDS[index].keys() & {"top_k", "top_p", "min_p"}
            assert (own.sampling_log_mass < 0).any() if truncates else (own.sampling_log_mass == 0).all()
            assert (own.sampling_log_mass <= 0).all()
            if KINDS[index].keys() <= {"temperature", "top_k", "top_p", "min_p"}:
                check_against_raw(own, KINDS[index], whole=name == "raw")
    use_scheduler(llm)
    assert compiled_programs() == before


def check_against_raw(own: Any, kind: dict[str, Any], whole: bool) -> None:
    """By numpy, from the raw log-probabilities of the vocabulary where the engine reports these."""
    temperature = kind["temperature"] or 1.0
    for at, (token, position) in enumerate(zip(own.token_ids, own.logprobs, strict=True)):
        if whole:
            raw = np.array([position[each].logprob for each in range(len(position))])
            drawn = log_softmax(raw / temperature)
            assert abs(own.logprobs_processed[at] + own.sampling_log_mass[at] - drawn[token]) < 1e-4
        elif temperature == 1.0:
            assert abs(own.logprobs_processed[at] + own.sampling_log_mass[at] - own.logprobs_raw[at]) < 1e-4
    if kind.get("top_k") and whole:
        wanted = [
            np.log(
                np.exp(np.sort(log_softmax(np.array([each.logprob for each in position.values()]) / temperature)))[
                    -kind["top_k"] :
                ].sum()
            )
            for position in own.logprobs
        ]
        np.testing.assert_allclose(own.sampling_log_mass, wanted, atol=1e-4)


def test_pieces_of_a_stream_and_other_engines(make_llm):
    llm: LLM = make_llm(**ENGINES["raw"])
    use_scheduler(llm)
    asked = SamplingParams(max_tokens=5, seed=1, top_k=3, return_sampling_mass=True, ignore_eos=True)
    (whole,) = llm.generate([[3, 4]], asked, use_tqdm=False)
    assert whole.outputs[0].logprobs is not None and len(whole.outputs[0].logprobs[0]) == 1
    core = llm.core
    delta = asked.clone_with(output_kind=RequestOutputKind.DELTA)
    core.add(core.inputs.prepare({"prompt_token_ids": [3, 4]}, delta, request_id="piece"))
    pieces = []
    while core.has_unfinished:
        pieces += [output.outputs[0] for output in core.step()]
    joined = pieces[0]
    for each in pieces[1:]:
        assert len(each.sampling_log_mass) == len(each.token_ids)
        joined._append(each)
    for field in ("logprobs_raw", "logprobs_processed", "sampling_log_mass"):
        np.testing.assert_array_equal(getattr(joined, field), getattr(whole.outputs[0], field))
    with pytest.raises(
        RequestError, match="return_sampling_mass: the engine was started without enable_sampling_mass"
    ) as refused:
        make_llm().generate([[3, 4]], asked, use_tqdm=False)
    assert refused.value.param == "return_sampling_mass"
