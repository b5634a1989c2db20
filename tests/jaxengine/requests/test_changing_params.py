"""SamplingParams may be changed as vLLM's may: a field is checked when it is set, the whole when a request is made."""

from __future__ import annotations

import copy

import pytest

from jaxengine.requests.params.sampling_params import SamplingParams
from jaxengine.scheduler.base.errors import RequestError


def test_fields_can_be_set_and_are_normalised():
    params = SamplingParams()
    params.max_tokens = 5
    params.stop = "end"  # pyright: ignore[reportAttributeAccessIssue]
    params.top_k = -1
    params.seed = -1
    params.logprobs = True
    params.structured_outputs = {"choice": ["a", "b"]}
    assert params == SamplingParams(max_tokens=5, stop=["end"], logprobs=1, structured_outputs={"choice": ["a", "b"]})
    assert (params.stop, params.top_k, params.seed, params.logprobs) == (("end",), 0, None, 1)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("max_tokens", 0, "max_tokens must be an int >= 1"),
        ("max_tokens", 2**63, "max_tokens must be at most 2147483647, got 9223372036854775808"),
        ("temperature", 3, "temperature must be a number from 0 to 2, got 3"),
        ("n", True, "n must be an int"),
        ("logit_bias", {1: "x"}, "logit_bias"),
        ("logits_processors", [len], "logits_processors is not supported yet"),
        ("stream_interval", 0, "stream_interval must be None or an int >= 1, got 0"),
        ("structured_outputs", {"json": "{"}, "structured_outputs.json"),
    ],
)
def test_a_wrong_value_is_refused_and_changes_nothing(name, value, said):
    params = SamplingParams()
    with pytest.raises(RequestError, match=said) as error:
        setattr(params, name, value)
    assert error.value.param is not None and params == SamplingParams()


def test_a_name_that_is_no_field_is_refused():
    with pytest.raises(AttributeError, match="has no field 'max_token'; it has 'max_tokens'"):
        SamplingParams().max_token = 5  # pyright: ignore[reportAttributeAccessIssue]


def test_fields_may_be_set_in_any_order_and_are_checked_together():
    params = SamplingParams(max_tokens=16)
    params.min_tokens = 20
    with pytest.raises(RequestError, match="min_tokens must be at most max_tokens .16., got 20"):
        params.checked()
    params.max_tokens = 50
    assert params.checked() == SamplingParams(max_tokens=50, min_tokens=20)
    params.temperature, params.top_p, params.top_k = 0.0, 0.5, 3
    assert (params.checked().top_p, params.checked().top_k) == (1.0, 0)
    assert (params.top_p, params.top_k) == (0.5, 3)


@pytest.mark.parametrize("copied", [SamplingParams.clone, copy.copy, copy.deepcopy, SamplingParams.checked])
def test_a_copy_is_its_own(copied):
    params = SamplingParams(temperature=0.5, stop="x", seed=3)
    other = copied(params)
    assert other == params
    other.max_tokens = 99
    assert params.max_tokens == 16


def test_a_clone_has_its_own_biases_and_a_request_checks_them():
    params = SamplingParams(logit_bias={1: 1.0})
    other = params.clone()
    other.logit_bias[2] = "much"  # type: ignore[index]
    assert params.logit_bias == {1: 1.0}
    with pytest.raises(RequestError, match="logit_bias"):
        other.checked()


def test_a_request_keeps_what_its_params_were(make_llm):
    llm = make_llm()
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    prepared = llm.core.inputs.prepare({"prompt_token_ids": [5, 6, 7]}, params)
    params.max_tokens, params.temperature = 9, 1.0
    assert (prepared.params.max_tokens, prepared.params.temperature) == (3, 0.0)
    assert [len(output.outputs[0].token_ids) for output in llm.generate([[5, 6, 7]], params, use_tqdm=False)] == [9]
    assert params.output_kind is SamplingParams().output_kind


def test_each_prompt_may_have_the_same_params_changed_in_between(make_llm):
    params = SamplingParams(temperature=0.0, ignore_eos=True)
    lengths = []
    for length in (1, 4, 2):
        params.max_tokens = length
        lengths.append(len(make_llm().generate([5, 6, 7], params, use_tqdm=False)[0].outputs[0].token_ids))
    assert lengths == [1, 4, 2]
