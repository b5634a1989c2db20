"""The forms in which a prompt may be given are one prompt."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from jaxengine import BeamSearchParams, SamplingParams
from jaxengine.scheduler.base.errors import RequestError

PARAMS = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
IDS = [5, 6, 7]


def answers(llm, prompts) -> list:
    return [
        (output.prompt_token_ids, output.outputs[0].token_ids)
        for output in llm.generate(prompts, PARAMS, use_tqdm=False)
    ]


@pytest.mark.parametrize(
    "prompts",
    [
        IDS,
        (5, 6, 7),
        range(5, 8),
        np.array(IDS),
        np.array(IDS, np.uint8),
        [IDS],
        [np.array(IDS, np.int32)],
        np.array([IDS]),
        [np.int64(5), 6, 7],
        [[np.int32(5), 6, 7]],
        {"prompt_token_ids": np.array(IDS)},
        [{"prompt_token_ids": (5, 6, 7)}],
    ],
    ids=repr,
)
def test_one_prompt_in_many_forms(make_llm, prompts):
    assert answers(make_llm(), prompts) == answers(make_llm(), {"prompt_token_ids": IDS})


def test_several_prompts_keep_their_order(make_llm):
    found = answers(make_llm(), [[5, 6, 7], {"prompt_token_ids": [9]}, np.array([8, 8])])
    assert [ids for ids, _ in found] == [[5, 6, 7], [9], [8, 8]]
    assert answers(make_llm(), np.array([[5, 6], [7, 8]])) == answers(make_llm(), [[5, 6], [7, 8]])


@pytest.mark.parametrize(
    ("prompts", "said"),
    [
        (5, "prompts must be a string, a list of token ids"),
        (iter(["a"]), "prompts must be"),
        ([[]], "at least one token id"),
        ([[5, -1]], "prompt_token_ids holds -1"),
        ([True, False], "prompt_token_ids holds True"),
        ([[5, 6.0]], "prompt_token_ids holds 6.0"),
        (np.array([1.5]), "prompt must be a string"),
        ([5, "a"], "prompt_token_ids holds 'a'"),
        ([None], "prompt must be a string"),
        (b"a", "prompts must be .*, got bytes"),
        (np.array(5), "prompts must be .*, got ndarray"),
        ({"prompt": "a", "multi_modal_data": np.zeros(3)}, "multi_modal_data is given"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Iterator) else repr(value),
)
def test_what_is_no_prompt(make_llm, prompts, said):
    with pytest.raises(RequestError, match=said):
        make_llm().generate(prompts, PARAMS, use_tqdm=False)


def test_one_priority_for_all(make_llm):
    llm = make_llm(scheduling_policy="priority")
    assert len(llm.generate([[5], [6]], PARAMS, use_tqdm=False, priority=3)) == 2
    for priority in (np.int64(3), [np.int64(3), 1], np.array([3, 1])):
        assert len(llm.generate([[5], [6]], PARAMS, use_tqdm=False, priority=priority)) == 2
    with pytest.raises(RequestError, match="priority has 1 values for 2 prompts"):
        llm.generate([[5], [6]], PARAMS, use_tqdm=False, priority=[3])


def test_scalars_of_numpy_are_those_of_python():
    params = SamplingParams(ignore_eos=np.bool_(True), max_tokens=np.int32(3), temperature=np.float32(0.5))
    assert params == SamplingParams(ignore_eos=True, max_tokens=3, temperature=0.5) and params.ignore_eos is True
    beam = BeamSearchParams(beam_width=np.int64(2), max_tokens=np.int8(3), length_penalty=np.float16(0.5))
    assert beam == BeamSearchParams(beam_width=2, max_tokens=3, length_penalty=0.5) and type(beam.beam_width) is int
    beam.verify(20, "raw_logprobs")
    for wrong in (1, "true", np.int64(1), np.array(True)):
        with pytest.raises(RequestError, match="ignore_eos must be True or False"):
            SamplingParams(ignore_eos=wrong)
