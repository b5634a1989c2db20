"""The offline API on the tiny model: results do not depend on the crowd, and every option acts."""

from __future__ import annotations

import re

import numpy as np
import pytest
from tqdm import tqdm

from jaxengine import LLM, SamplingParams
from jaxengine.scheduler.base.errors import RequestError
from tests.conftest import use_scheduler

rng = np.random.default_rng(5)
PROMPTS = [{"prompt_token_ids": rng.integers(3, 100, int(n)).tolist()} for n in rng.integers(1, 60, 12)]
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)


def tokens(outputs):
    return [[completion.token_ids for completion in output.outputs] for output in outputs]


@pytest.fixture(scope="module")
def alone(make_llm):
    """Greedy continuations, each prompt on its own with pages to spare."""
    llm = make_llm()
    return [tokens(llm.generate(prompt, GREEDY, use_tqdm=False))[0] for prompt in PROMPTS]


@pytest.mark.parametrize(
    ("options", "limits"),
    [
        pytest.param({}, {}, marks=pytest.mark.versions),
        ({}, {"enable_prefix_caching": False}),
        ({}, {"num_pages": 26}),
        ({"async_scheduling": False}, {"num_pages": 26}),
        ({}, {"long_prefill_token_threshold": 3}),
        # No divisor of a kernel block: two pages a request.
        pytest.param({"block_size": 70}, {}, marks=pytest.mark.thorough("an engine for a number")),
    ],
    ids=str,
)
def test_greedy_tokens_do_not_depend_on_the_crowd(make_llm, alone, options, limits):
    """limits: of the scheduler."""
    llm = make_llm(**options)
    scheduler = use_scheduler(llm, **limits)
    assert tokens(llm.generate(PROMPTS, GREEDY, use_tqdm=False)) == alone
    assert (scheduler.num_preemptions > 0) == ("num_pages" in limits)
    use_scheduler(llm)


def test_seeded_tokens_do_not_depend_on_crowd_preemption_or_restart(make_llm, tiny_options):
    params = [SamplingParams(temperature=0.8, top_p=0.9, seed=i, max_tokens=20, ignore_eos=True) for i in range(12)]
    crowd = tokens(make_llm().generate(PROMPTS, params, use_tqdm=False))
    alone = [tokens(make_llm().generate(p, s, use_tqdm=False))[0] for p, s in zip(PROMPTS, params, strict=True)]
    tight = use_scheduler(make_llm(), num_pages=26)
    preempted = tokens(make_llm().generate(PROMPTS, params, use_tqdm=False))
    assert tight.num_preemptions > 0
    use_scheduler(make_llm())
    restarted = tokens(LLM(**tiny_options).generate(PROMPTS, params, use_tqdm=False))
    assert crowd == alone == preempted == restarted
    assert len({str(each) for each in crowd}) == len(crowd)


def test_restart_compiles_nothing(make_llm, tiny_options):
    make_llm()
    again = LLM(**tiny_options)
    metrics = {metric.name: metric.value for metric in again.get_metrics()}
    assert metrics["jaxengine:executables_compiled"] == 0
    assert metrics["jaxengine:executables_loaded"] > 0


def test_unseeded_requests_differ_and_an_engine_seed_repeats_them(make_llm, tiny_options):
    params = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True, n=3)
    first = tokens(LLM(**tiny_options).generate(PROMPTS[:2], params, use_tqdm=False))
    again = tokens(LLM(**tiny_options).generate(PROMPTS[:2], params, use_tqdm=False))
    other = tokens(LLM(**{**tiny_options, "seed": 1}).generate(PROMPTS[:2], params, use_tqdm=False))
    assert first == again != other
    assert len({tuple(each) for group in first for each in group}) == 6


def test_n_gives_n_outputs_sharing_the_prompt(make_llm):
    llm = make_llm()
    prompt = {"prompt_token_ids": rng.integers(3, 100, 40).tolist()}
    params = SamplingParams(n=4, temperature=1.0, seed=3, max_tokens=5, ignore_eos=True)
    hits = llm.core.engine.scheduler.num_prefix_hits
    output = llm.generate(prompt, params, use_tqdm=False)[0]
    assert [each.index for each in output.outputs] == [0, 1, 2, 3]
    assert llm.core.engine.scheduler.num_prefix_hits - hits == 3 * 36
    single = llm.generate(prompt, SamplingParams(temperature=1.0, seed=3, max_tokens=5, ignore_eos=True))[0]
    assert output.outputs[0].token_ids == single.outputs[0].token_ids


@pytest.mark.versions
def test_limits_and_stops(make_llm, alone):
    llm = make_llm()
    reference = alone[0][0]
    stop_at = reference[5]
    count = reference.index(stop_at) + 1
    output = llm.generate(PROMPTS[0], GREEDY.clone_with(stop_token_ids=[stop_at]), use_tqdm=False)[0].outputs[0]
    assert output.token_ids == reference[:count]
    assert (output.finish_reason, output.stop_reason) == ("stop", stop_at)
    longer = llm.generate(PROMPTS[0], GREEDY.clone_with(stop_token_ids=[stop_at], min_tokens=15), use_tqdm=False)
    assert stop_at not in longer[0].outputs[0].token_ids[:14]
    assert len(longer[0].outputs[0].token_ids) >= 15
    short = llm.generate(PROMPTS[0], GREEDY.clone_with(max_tokens=3), use_tqdm=False)[0].outputs[0]
    assert (short.token_ids, short.finish_reason) == (reference[:3], "length")
    full = llm.generate({"prompt_token_ids": [5] * 90}, GREEDY.clone_with(max_tokens=None), use_tqdm=False)[0]
    assert len(full.outputs[0].token_ids) == 6
    one = llm.generate({"prompt_token_ids": [5] * 95}, GREEDY, use_tqdm=False)[0].outputs[0]
    assert len(one.token_ids) == 1


def test_bias_allowed_and_penalties_act(make_llm, alone):
    llm = make_llm()

    def run(**changes):
        return llm.generate(PROMPTS[1], GREEDY.clone_with(**changes), use_tqdm=False)[0].outputs[0].token_ids

    reference = alone[1][0]
    assert set(run(allowed_token_ids=[7, 9, 11])) <= {7, 9, 11}
    assert run(logit_bias={42: 100.0}) == [42] * 20
    assert reference[0] not in run(logit_bias={reference[0]: -100.0})
    heavy = run(frequency_penalty=2.0, presence_penalty=2.0, repetition_penalty=5.0)
    assert len(set(heavy)) > len(set(reference)) or len(set(heavy)) == 20
    assert run() == reference  # nothing of it stays behind in the slot


@pytest.mark.versions
def test_logprobs_agree_with_prompt_logprobs(make_llm, alone):
    """What sampling reports for its tokens is what scoring the same text reports."""
    llm = make_llm()
    output = llm.generate(PROMPTS[2], GREEDY.clone_with(logprobs=3), use_tqdm=False)[0]
    generated = output.outputs[0]
    assert len(generated.logprobs) == 20
    assert generated.cumulative_logprob == pytest.approx(
        sum(entry[token].logprob for entry, token in zip(generated.logprobs, generated.token_ids, strict=True))
    )
    for entry, token in zip(generated.logprobs, generated.token_ids, strict=True):
        assert entry[token].rank == 1 and len(entry) == 3
    whole = PROMPTS[2]["prompt_token_ids"] + generated.token_ids
    scored = llm.generate({"prompt_token_ids": whole}, GREEDY.clone_with(prompt_logprobs=3, max_tokens=1))[0]
    assert scored.prompt_logprobs[0] is None and len(scored.prompt_logprobs) == len(whole)
    first = len(PROMPTS[2]["prompt_token_ids"])
    for entry, again in zip(generated.logprobs, scored.prompt_logprobs[first:], strict=True):
        assert entry.keys() == again.keys()
        for token in entry:
            assert entry[token].logprob == pytest.approx(again[token].logprob, abs=1e-4)


def test_prefix_cache_is_seen_in_outputs_and_can_be_reset(make_llm):
    llm = make_llm()
    prompt = {"prompt_token_ids": rng.integers(3, 100, 33).tolist()}
    first, second = (llm.generate(prompt, GREEDY, use_tqdm=False)[0] for _ in range(2))
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 32)
    salted = llm.generate({**prompt, "cache_salt": "tenant"}, GREEDY, use_tqdm=False)[0]
    assert salted.num_cached_tokens == 0
    assert llm.reset_prefix_cache()
    assert llm.generate(prompt, GREEDY, use_tqdm=False)[0].num_cached_tokens == 0
    assert tokens([first]) == tokens([second]) == tokens([salted])


def test_metrics_of_a_request(make_llm):
    output = make_llm().generate(PROMPTS[0], GREEDY, use_tqdm=False)[0]
    metrics = output.metrics
    assert metrics.arrival_time <= metrics.first_scheduled_time <= metrics.first_token_time <= metrics.finished_time
    assert output.finished and output.prompt_token_ids == PROMPTS[0]["prompt_token_ids"]
    assert metrics.num_generation_tokens == 20 and output.lora_request is None and output.encoder_prompt is None


BAD_PROMPTS = [
    ("", "prompt"),
    ("text", "prompt"),
    (3, "prompt"),
    ({"text": "x"}, "prompt"),
    ({"prompt_token_ids": []}, "prompt_token_ids"),
    ({"prompt_token_ids": [1, -1]}, "prompt_token_ids"),
    ({"prompt_token_ids": [10**6]}, "prompt_token_ids"),
    ({"prompt_token_ids": [True]}, "prompt_token_ids"),
    ({"prompt_token_ids": [1.0]}, "prompt_token_ids"),
    ({"prompt_token_ids": "12"}, "prompt_token_ids"),
    ({"prompt_token_ids": [1] * 96}, "prompt"),
    ({"prompt_token_ids": [1], "cache_salt": ""}, "cache_salt"),
]


@pytest.mark.parametrize(("prompt", "param"), BAD_PROMPTS, ids=str)
def test_a_bad_prompt_is_named_and_nothing_else_happens(make_llm, alone, prompt, param):
    llm = make_llm()
    with pytest.raises(RequestError) as error:
        llm.generate([PROMPTS[0], prompt], GREEDY, use_tqdm=False)
    assert error.value.param == param
    assert not llm.core.has_unfinished
    assert tokens(llm.generate(PROMPTS[0], GREEDY, use_tqdm=False)) == [alone[0]]


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"logprobs": 21}, "logprobs"),
        ({"stop_token_ids": [10**6]}, "stop_token_ids"),
        ({"allowed_token_ids": [10**6]}, "allowed_token_ids"),
        ({"logit_bias": {10**6: 1.0}}, "logit_bias"),
        ({"stop": "x"}, "stop"),
        ({"bad_words": ["x"]}, "bad_words"),
    ],
    ids=str,
)
def test_params_the_engine_cannot_serve_are_named(make_llm, changes, param):
    with pytest.raises(RequestError) as error:
        make_llm().generate(PROMPTS[0], GREEDY.clone_with(**changes), use_tqdm=False)
    assert error.value.param == param


def test_wrong_calls_are_refused(make_llm):
    llm = make_llm()
    with pytest.raises(RequestError, match="one for each"):
        llm.generate(PROMPTS, [GREEDY], use_tqdm=False)
    with pytest.raises(RequestError, match="scheduling_policy"):
        llm.generate(PROMPTS[:1], GREEDY, priority=[1], use_tqdm=False)
    with pytest.raises(RequestError, match="sampling_params"):
        llm.generate(PROMPTS[0], {"temperature": 0}, use_tqdm=False)
    with pytest.raises(RequestError, match="skip_tokenizer_init"):
        llm.chat([{"role": "user", "content": "hi"}])
    assert llm.generate([], GREEDY, use_tqdm=False) == []


def test_the_progress_bar_says_how_fast_it_goes(make_llm):
    class Bar(tqdm):
        last = ""

        def close(self):
            Bar.last = str(self)
            super().close()

    params = SamplingParams(n=2, max_tokens=20, ignore_eos=True)
    make_llm().generate([{"prompt_token_ids": [5, 6]}] * 3, params, use_tqdm=Bar)
    found = re.search(r"3/3 .*est\. speed input: ([\d.]+) toks/s, output: ([\d.]+) toks/s", Bar.last)
    assert found, Bar.last
    # Six prompt tokens for three answers of twice twenty.
    assert float(found[2]) / float(found[1]) == pytest.approx(20, rel=0.02)


@pytest.mark.thorough("tests/jaxengine/api/test_pooling.py starts an engine so")
def test_enforce_eager_compiles_when_needed(tiny_options, alone):
    options = {**tiny_options, "enforce_eager": True, "compile_cache_dir": ""}
    llm = LLM(**options)
    assert tokens(llm.generate(PROMPTS[0], GREEDY, use_tqdm=False)) == [alone[0]]
    metrics = {metric.name: metric.value for metric in llm.get_metrics()}
    assert metrics["jaxengine:compilations_since_ready"] > 0
