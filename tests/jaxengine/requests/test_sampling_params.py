"""SamplingParams: every field's rule, the rules between fields, and those that need the engine's sizes."""

from __future__ import annotations

import copy
import dataclasses
import logging
import re
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxengine.requests.params.bad_word_tokens import verify_bad_word_tokens
from jaxengine.requests.params.param_limits import MAX_BAD_WORDS, MAX_BAD_WORDS_TOKENS, MAX_N, MAX_STOP_STRINGS
from jaxengine.requests.params.sampling_params import RequestOutputKind, SamplingParams
from jaxengine.scheduler.base.errors import RequestError
from jaxengine.scheduler.base.sampling_fields import PENALTIES, TRUNCATION
from jaxengine.scheduler.base.token_params import LOGPROBS
from tests.tables import each_row

INT64 = 2**63
NO_NUMBERS = st.one_of(st.booleans(), st.text(max_size=3), st.lists(st.integers(), max_size=2), st.just(object()))
NO_INTS = st.one_of(NO_NUMBERS, st.floats())
NO_FLOATS = st.one_of(NO_NUMBERS, st.sampled_from([float("nan"), float("inf"), float("-inf"), 1e308, -1e308, 10**400]))
NO_FLAGS = st.one_of(st.integers(), st.none(), st.text(max_size=3), st.floats())
NO_IDS = st.one_of(
    st.integers(),
    st.text(max_size=3),
    st.lists(st.one_of(NO_INTS, st.none(), st.integers(max_value=-1), st.integers(min_value=2**31)), min_size=1),
)


def floats_outside(low: float, high: float):
    return st.one_of(st.floats(max_value=low, exclude_max=True), st.floats(min_value=high, exclude_min=True))


def ints_outside(low: int, high: int):
    return st.one_of(st.integers(max_value=low - 1), st.integers(min_value=high + 1), st.just(10**6000))


def texts_outside(most: int):
    return st.one_of(
        st.just(""),
        st.integers(),
        st.lists(st.one_of(st.just(""), st.integers(), st.none(), st.binary()), min_size=1),
        st.just(["x"] * (most + 1)),
        st.just({"a": 1}),
    )


WRONG = {
    "n": st.one_of(NO_INTS, st.none(), ints_outside(1, MAX_N)),
    "presence_penalty": st.one_of(NO_FLOATS, st.none(), floats_outside(-2, 2)),
    "frequency_penalty": st.one_of(NO_FLOATS, st.none(), floats_outside(-2, 2)),
    "repetition_penalty": st.one_of(NO_FLOATS, st.none(), st.floats(max_value=0), st.just(1e-300)),
    "temperature": st.one_of(NO_FLOATS, st.none(), floats_outside(0, 2)),
    "top_p": st.one_of(NO_FLOATS, st.none(), st.floats(max_value=0), st.floats(min_value=1, exclude_min=True)),
    "top_k": st.one_of(NO_INTS, st.none(), ints_outside(-1, 2**31 - 1)),
    "min_p": st.one_of(NO_FLOATS, st.none(), floats_outside(0, 1)),
    "seed": st.one_of(NO_INTS, ints_outside(-INT64, INT64 - 1)),
    "stop": texts_outside(MAX_STOP_STRINGS),
    "stop_after": st.sampled_from(["x", ["x"], {}, {"reasoning_begin": "x"}, {"reasoning_end": "x", "y": 1}]),
    "stop_token_ids": NO_IDS,
    "return_hidden_states": NO_FLAGS,
    "capture": st.sampled_from(["residual", ["residual:x"], [3], 3, {"residual:1": 1}, ["hidden_states"], [""]]),
    "steer": st.sampled_from([3, "calm", {}, [3], [{}], [{"vector": [1.0]}], [{"at": "residual:1"}]]),
    "ignore_eos": NO_FLAGS,
    "max_tokens": st.one_of(NO_INTS, ints_outside(1, 2**31 - 1)),
    "min_tokens": st.one_of(NO_INTS, st.none(), ints_outside(0, 2**31 - 1)),
    "logprobs": st.one_of(NO_INTS.filter(lambda value: value is not True), ints_outside(-1, 2**31 - 1)),
    "prompt_logprobs": st.one_of(NO_INTS.filter(lambda value: value is not True), ints_outside(-1, 2**31 - 1)),
    "prompt_logprob_start": st.one_of(NO_INTS, ints_outside(0, 2**31 - 1)),
    "logprob_token_ids": st.one_of(NO_IDS.filter(lambda value: value is not None), st.just(list(range(129)))),
    "prompt_logprob_token_ids": st.one_of(NO_IDS.filter(lambda value: value is not None), st.just(list(range(129)))),
    "routed_experts_prompt_start": st.one_of(NO_INTS, st.none(), ints_outside(0, 2**31 - 1)),
    "return_sampling_mass": NO_FLAGS,
    "return_sampling_mask": NO_FLAGS.filter(lambda value: value is not None),
    "trace_decode_token_ids": NO_IDS.filter(lambda value: value is not None),
    "detokenize": NO_FLAGS,
    "skip_special_tokens": NO_FLAGS,
    "spaces_between_special_tokens": NO_FLAGS,
    "include_stop_str_in_output": NO_FLAGS,
    "output_kind": st.one_of(st.integers(), st.none(), st.just("DELTA")),
    "logit_bias": st.one_of(
        st.integers(),
        st.lists(st.integers()),
        st.dictionaries(st.integers(max_value=-1) | st.text(max_size=2) | st.booleans(), st.just(1.0), min_size=1),
        st.dictionaries(st.integers(0, 9), NO_FLOATS | st.none(), min_size=1),
    ),
    "allowed_token_ids": st.one_of(NO_IDS, st.just([])),
    "bad_words": texts_outside(MAX_BAD_WORDS),
    "stream_interval": st.one_of(NO_INTS, ints_outside(1, 2**31 - 1)),
    "flat_logprobs": NO_FLAGS,
    "skip_reading_prefix_cache": NO_FLAGS.filter(lambda value: value is not None),
    "repetition_detection": st.sampled_from([3, "x", True, [1, 2, 3], [], 0.5]),
    "extra_args": st.one_of(st.just("a"), st.just([1]), st.just({1: 2}), st.just({str(i): i for i in range(257)})),
    "thinking_token_budget": st.one_of(NO_INTS, ints_outside(-1, 2**31 - 1)),
    "thinking_words": st.one_of(
        NO_NUMBERS, st.just("</think>"), st.dictionaries(st.just("closing"), st.text(), min_size=1)
    ),
    "structured_outputs": st.one_of(
        NO_NUMBERS, st.just("json"), st.dictionaries(st.integers() | st.just("schema"), st.just("a"), min_size=1)
    ),
}
NOT_BUILT = {
    "logits_processors": [len],
}


def refused(**options) -> RequestError:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**options)
    return caught.value


@each_row("field", WRONG)
def test_wrong_value_is_refused_by_name(field):
    @settings(max_examples=25)
    @given(WRONG[field])
    def check(value):
        error = refused(**{field: value})
        assert error.param == field
        assert str(error).startswith(f"{field} must be ") and ", got " in str(error)
        assert len(str(error)) < 400

    check()


@pytest.mark.parametrize(("field", "value"), NOT_BUILT.items())
def test_what_is_not_built_is_refused_by_name(field, value):
    error = refused(**{field: value})
    assert error.param == field and error.value is value
    assert str(error).startswith(f"{field} is not supported yet")


def test_every_field_is_covered_here():
    assert {field.name for field in dataclasses.fields(SamplingParams)} == WRONG.keys() | NOT_BUILT.keys()


@each_row(
    "name,said",
    {
        "best_of": "; use n",
        "guided_decoding": "; use structured_outputs",
        "truncate_prompt_tokens": "; use tokenization_kwargs of LLM.generate",
        "max_token": "; it has 'max_tokens'",
        "xyzzy": "",
    }.items(),
)
def test_unknown_field_is_refused(name, said):
    text = re.escape(f"SamplingParams has no field {name!r}{said}") + "$"
    with pytest.raises(TypeError, match=text):
        SamplingParams(**{name: 2})
    with pytest.raises(AttributeError, match=text):
        setattr(SamplingParams(), name, 2)


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "presence_penalty": st.floats(-2, 2) | st.integers(-2, 2),
            "repetition_penalty": st.floats(1e-20, 1e20),
            "temperature": st.floats(0.01, 2),
            "top_p": st.floats(0, 1, exclude_min=True),
            "top_k": st.integers(-1, 2**31 - 1),
            "min_p": st.floats(0, 1),
            "seed": st.none() | st.integers(-INT64, INT64 - 1),
            "stop": st.none() | st.text(min_size=1) | st.lists(st.text(min_size=1), max_size=MAX_STOP_STRINGS),
            "max_tokens": st.none() | st.integers(1, 2**31 - 1),
            "logprobs": st.none() | st.integers(-1, 20),
            "logit_bias": st.none() | st.dictionaries(st.integers(0, 9), st.floats(-100, 100)),
            "allowed_token_ids": st.none() | st.lists(st.integers(0, 9), min_size=1),
        },
    )
)
def test_right_values_are_taken_and_survive_copies(options):
    params = SamplingParams(**options)
    assert copy.deepcopy(params) == params.clone_with() == params
    for name in ("presence_penalty", "temperature", "top_p", "min_p"):
        assert type(getattr(params, name)) is float
        assert getattr(params, name) == options.get(name, getattr(SamplingParams(), name))


def test_values_are_normalised():
    params = SamplingParams(
        top_k=-1,
        seed=-1,
        stop="end",
        stop_token_ids=[5, 3, 5],
        bad_words=["a", "b"],
        allowed_token_ids=range(3),
        logprobs=True,
        logit_bias={4: 1},
    )
    assert (params.top_k, params.seed, params.logprobs) == (0, None, 1)
    assert params.stop == ("end",) and params.stop_token_ids == (5, 3) and params.bad_words == ("a", "b")
    assert params.allowed_token_ids == (0, 1, 2) and params.logit_bias == {4: 1.0}
    empty = SamplingParams(stop=None, stop_token_ids=None, bad_words=None)  # pyright: ignore[reportArgumentType]
    assert (empty.stop, empty.stop_token_ids, empty.bad_words) == ((), (), ())
    given = {"temperature": None, "n": None, "top_p": 0.5, "max_tokens": None}
    assert SamplingParams.from_optional(**given) == SamplingParams(top_p=0.5, max_tokens=None)


def test_tokens_with_logprobs_by_id():
    for ids, logprobs, expected in (
        (None, None, None),
        ([], None, None),
        ([5, 3, 5], None, 0),
        ([5, 3], 0, 0),
        ([5, 3], 2, 0),
        ([5, 3], -1, 0),
        ([], 2, 2),
    ):
        params = SamplingParams(logprob_token_ids=ids, logprobs=logprobs)
        own = params.token_params()
        assert (params.logprob_token_ids, own.logprob_token_ids) == (((5, 3), (5, 3)) if ids else (None, ()))
        assert params.num_logprobs == own.logprobs == expected and params.logprobs == logprobs
        assert (own.features & LOGPROBS > 0) == (expected is not None)
    with pytest.raises(RequestError, match="logprob_token_ids must be token ids inside the vocabulary"):
        SamplingParams(logprob_token_ids=[5, 9]).verify_against(9, 20, 32, True)


def test_prompt_logprob_token_ids_ask_for_logprobs_and_share_the_limit():
    for ids, prompt_logprobs, expected in (([5, 3, 5], None, 0), ([5], 2, 2), ([], None, None), (None, 1, 1)):
        params = SamplingParams(prompt_logprob_token_ids=ids, prompt_logprobs=prompt_logprobs)
        own = params.token_params()
        assert own.prompt_logprob_token_ids == tuple(dict.fromkeys(ids or ()))
        assert params.num_prompt_logprobs == own.prompt_logprobs == expected
    both = SamplingParams(logprob_token_ids=range(100), prompt_logprob_token_ids=[9], prompt_logprob_start=3)
    assert both.token_params().given_token_ids == (*range(100), 9)
    assert refused(logprob_token_ids=range(100), prompt_logprob_token_ids=range(29)).param == "prompt_logprob_token_ids"
    with pytest.raises(RequestError, match="prompt_logprob_token_ids must be token ids inside the vocabulary"):
        SamplingParams(prompt_logprob_token_ids=[5, 9]).verify_against(9, 20, 32, True)


@each_row("name", ["prompt_logprob_token_ids", "logprob_token_ids", "stop_token_ids", "allowed_token_ids"])
def test_token_ids_are_one_list_or_array(name):
    """vLLM's rows of ids, one for each position of a prompt, are refused; so are arrays of more axes or of floats."""
    for ids in ([5, 6], np.array([5, 6]), np.array([5, 6], np.uint64), [np.int32(5), 6]):
        assert list(getattr(SamplingParams(**{name: ids}), name)) == [5, 6]
    for ids in ([[5, 6], [7]], [5, [6]], [[]], np.array([[5], [6]])):
        assert "one flat list of token ids" in str(refused(**{name: ids}))
    for ids in (np.array(5), np.array([5.0]), np.array([2**40]), np.array([True])):
        assert refused(**{name: ids}).param == name


def test_where_a_prompts_logprobs_begin():
    assert SamplingParams(prompt_logprobs=1).token_params().most_cached == 0
    assert SamplingParams(prompt_logprobs=1, prompt_logprob_start=7).token_params().most_cached == 7
    assert SamplingParams().token_params().most_cached is None
    assert refused(prompt_logprob_start=0).param == "prompt_logprob_start"
    params = SamplingParams(prompt_logprobs=0, prompt_logprob_start=7)
    params.verify_against(9, 20, 32, True, 8)
    with pytest.raises(RequestError, match="prompt_logprob_start must be at most 6, the prompt.s last token, got"):
        params.verify_against(9, 20, 32, True, 7)


def test_later_changes_of_the_callers_objects_do_not_reach_in():
    stop, bias = ["a"], {1: 2.0}
    params = SamplingParams(stop=stop, logit_bias=bias)
    stop.append("b")
    bias[2] = 1.0
    assert params.stop == ("a",) and params.logit_bias == {1: 2.0}


def test_numpy_scalars_are_numbers():
    numpy = pytest.importorskip("numpy")
    params = SamplingParams(temperature=numpy.float32(0.5), top_k=numpy.int64(4), stop_token_ids=[numpy.int32(7)])
    assert (params.temperature, params.top_k, params.stop_token_ids) == (0.5, 4, (7,))
    assert [type(x) for x in (params.temperature, params.top_k, params.stop_token_ids[0])] == [float, int, int]
    assert refused(temperature=numpy.float32("nan")).param == "temperature"
    assert refused(n=numpy.bool_(True)).param == "n"


def test_greedy_switches_truncation_off():
    params = SamplingParams(temperature=0, top_p=0.5, top_k=7, min_p=0.2)
    assert params.is_greedy and not params.token_params().features & TRUNCATION
    assert (params.top_p, params.top_k, params.min_p) == (1.0, 0, 0.0)
    assert not SamplingParams(temperature=0.01).is_greedy


@pytest.mark.parametrize("temperature", [1e-6, 0.005])
def test_tiny_temperature_is_raised_with_a_warning(temperature, caplog):
    with caplog.at_level(logging.WARNING):
        assert SamplingParams(temperature=temperature).temperature == 0.01
    assert "raised to 0.01" in caplog.text
    caplog.clear()
    SamplingParams(temperature=0.01).clone_with(max_tokens=3)
    assert not caplog.text


@pytest.mark.parametrize(
    ("options", "truncation", "penalties"),
    [
        ({}, False, False),
        ({"top_k": 1}, True, False),
        ({"top_p": 0.99}, True, False),
        ({"min_p": 0.01}, True, False),
        ({"presence_penalty": -0.1}, False, True),
        ({"frequency_penalty": 0.1}, False, True),
        ({"repetition_penalty": 1.1}, False, True),
    ],
)
def test_needs(options, truncation, penalties):
    params = SamplingParams(**options)
    features = params.token_params().features
    assert (features & TRUNCATION > 0, features & PENALTIES > 0) == (truncation, penalties)


@pytest.mark.parametrize(
    ("options", "field", "allowed"),
    [
        ({"n": 2, "temperature": 0}, "n", "1 when temperature is 0"),
        ({"min_tokens": 17}, "min_tokens", "at most max_tokens (16)"),
        ({"stop": "a", "detokenize": False}, "stop", "detokenize"),
    ],
)
def test_fields_that_contradict_each_other(options, field, allowed):
    error = refused(**options)
    assert error.param == field and allowed in str(error)


def test_clone_is_checked_as_a_whole():
    params = SamplingParams(max_tokens=5, min_tokens=4)
    assert params.clone_with(max_tokens=9) == SamplingParams(max_tokens=9, min_tokens=4)
    with pytest.raises(RequestError, match="min_tokens"):
        params.clone_with(max_tokens=3)


@given(st.integers(-INT64, INT64 - 1), st.integers(2, 40))
def test_children_have_seeds_of_their_own(seed, n):
    params = SamplingParams(n=n, seed=seed)
    seeds = [params.child_seed(index) for index in range(n)]
    if params.seed is None:
        assert seeds == [None] * n
    else:
        assert None not in seeds and len(set(seeds)) == n and seeds[0] == seed
        if 0 <= seed < 2**62:
            assert seeds == list(range(seed, seed + n))


ENGINE = {"vocab_size": 100, "max_logprobs": 20, "max_model_len": 64, "has_tokenizer": True}


@each_row(
    ("options", "engine", "field"),
    [
        ({"logprobs": 21}, {}, "logprobs"),
        ({"prompt_logprobs": 21}, {}, "prompt_logprobs"),
        ({"logprobs": -1}, {}, "logprobs"),
        ({"prompt_logprobs": -1}, {"max_logprobs": 99}, "prompt_logprobs"),
        ({"logprobs": 101}, {"max_logprobs": -1}, "logprobs"),
        ({"stop_token_ids": [3, 100]}, {}, "stop_token_ids"),
        ({"allowed_token_ids": [100]}, {}, "allowed_token_ids"),
        ({"logit_bias": {100: 1.0}}, {}, "logit_bias"),
        ({"stop": "x"}, {"has_tokenizer": False}, "stop"),
        ({"bad_words": ["x"]}, {"has_tokenizer": False}, "bad_words"),
        ({"max_tokens": 65}, {}, "max_tokens"),
        ({"max_tokens": None, "min_tokens": 64}, {}, "min_tokens"),
        ({"max_tokens": None, "min_tokens": 5}, {"num_prompt_tokens": 60}, "min_tokens"),
    ],
)
def test_what_the_engine_cannot_do_is_refused(options, engine, field):
    with pytest.raises(RequestError) as caught:
        SamplingParams(**options).verify_against(**(ENGINE | engine))
    assert caught.value.param == field and str(caught.value).startswith(f"{field} must be ")


@pytest.mark.parametrize(
    ("options", "engine"),
    [
        ({"logprobs": 20, "prompt_logprobs": 0}, {}),
        ({"logprobs": -1}, {"max_logprobs": 100}),
        ({"prompt_logprobs": -1}, {"max_logprobs": -1}),
        ({"stop_token_ids": [99], "allowed_token_ids": [0, 99], "logit_bias": {99: -1}}, {}),
        ({"stop": "x", "bad_words": ["y"]}, {}),
        ({"max_tokens": 64, "min_tokens": 63}, {}),
        ({}, {"has_tokenizer": False}),
    ],
)
def test_what_the_engine_can_do_passes(options, engine):
    SamplingParams(**options).verify_against(**(ENGINE | engine))


@pytest.mark.parametrize(
    ("vocab_size", "advice"),
    [(100, "needs an engine with max_logprobs=-1"), (1025, "is more than any engine here reports")],
)
def test_the_advice_about_the_whole_vocabulary_can_be_followed(vocab_size, advice):
    with pytest.raises(RequestError, match=f"of {vocab_size} tokens, {advice}"):
        SamplingParams(logprobs=-1).verify_against(**(ENGINE | {"vocab_size": vocab_size}))


def test_bad_words_are_limited_in_tokens():
    verify_bad_word_tokens([[1] * (MAX_BAD_WORDS_TOKENS - 1), [2]])
    with pytest.raises(RequestError, match="at most 1024 tokens") as caught:
        verify_bad_word_tokens([[1] * MAX_BAD_WORDS_TOKENS, [2]])
    assert caught.value.param == "bad_words"


def test_output_kinds_are_vllms():
    assert [(kind.name, kind.value) for kind in RequestOutputKind] == [
        ("CUMULATIVE", 0),
        ("DELTA", 1),
        ("FINAL_ONLY", 2),
    ]


def test_importing_it_imports_no_jax():
    code = "import sys, jaxengine.requests.params.sampling_params; sys.exit(bool({'jax', 'numpy'} & set(sys.modules)))"
    root = SamplingParams.__init__.__globals__["__file__"].rsplit("jaxengine", 1)[0]
    assert subprocess.run([sys.executable, "-c", code], cwd=root, check=False).returncode == 0
