"""Log-probabilities of tokens given by id, and of completions that are known: those of decoding, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxengine import LLM, AsyncLLM, RequestError, SamplingParams
from tests.conftest import compiled_programs, use_scheduler
from tests.fixtures.drawn_weights import checkpoint
from tests.jaxengine.engine.test_eagle3 import attending, write
from tests.jaxengine.engine.test_next_token import TINY as MTP_MODEL
from tests.jaxengine.engine.test_speculation import force
from tests.models.layers.drafts.test_dflash import read as read_head
from tests.sharding.parallel_cases import OPTIONS
from tests.tables import each_row

VOCAB = 128
DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}
ENGINES: dict[str, dict[str, Any]] = {
    "raw": {"max_logprobs": -1, "enable_trace_replay": True, "enable_sampling_mass": True},
    "processed, with drafts": {
        "max_logprobs": -1,
        "logprobs_mode": "processed_logprobs",
        "enable_trace_replay": True,
        "enable_sampling_mass": True,
        "speculative_config": DRAFTS,
    },
}
PREFIX = [9, 8, 7, 6, 5, 4, 9, 8, 7, 6, 5, 4]


def prompts_of(seed: int, count: int = 8) -> list[list[int]]:
    """Prompts that share a prefix of three pages, of lengths from 13 to 40."""
    rng = np.random.default_rng(seed)
    return [PREFIX + rng.integers(3, VOCAB, rng.integers(1, 28)).tolist() for _ in range(count)]


def rollout_params(count: int = 8, **more: Any) -> list[SamplingParams]:
    """Greedy and sampled ones of several lengths."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 0.7, "top_p": 0.9, "top_k": 40},
        {"temperature": 1.0, "repetition_penalty": 1.2, "logit_bias": {5: 2.0}},
    ]
    own = (kinds[index % len(kinds)] | {"seed": index, "max_tokens": 9 + 3 * index % 14} for index in range(count))
    return [SamplingParams(ignore_eos=True, **each, **more) for each in own]


def bits(values: Any) -> list[int]:
    return np.asarray(values, np.float32).view(np.int32).tolist()


@pytest.mark.parametrize("name", ENGINES)
def test_given_tokens_are_those_of_the_whole_vocabulary(make_llm, name):
    """Beside requests with other ids and without any, in the same steps, and in a slot that had others before."""
    llm: LLM = make_llm(**ENGINES[name])
    prompts, params = prompts_of(0), rollout_params()
    whole = llm.generate(prompts, [each.clone_with(logprobs=-1) for each in params], use_tqdm=False)
    rng = np.random.default_rng(1)
    ids = [rng.choice(VOCAB, size, replace=False).tolist() for size in (1, 3, 128, 0, 2, 40, 0, 7)]
    asked = [
        each.clone_with(logprobs=index % 3 or None, logprob_token_ids=own or None)
        for index, (each, own) in enumerate(zip(params, ids, strict=True))
    ]
    before = compiled_programs()
    for _ in range(2):
        outputs = llm.generate(prompts, asked, use_tqdm=False)
        for output, expected, own, each in zip(outputs, whole, ids, asked, strict=True):
            (got,), (all_of,) = output.outputs, expected.outputs
            assert got.token_ids == all_of.token_ids
            if each.num_logprobs is None:
                assert got.logprobs is None
                continue
            for token, position, every in zip(got.token_ids, got.logprobs, all_of.logprobs, strict=True):
                best = [one for one, entry in every.items() if entry.rank <= each.num_logprobs]
                assert {token, *own} <= set(position) <= {token, *own, *every} and len(best) <= len(position)
                assert len(position) <= 1 + each.num_logprobs + len(own)
                for one, entry in position.items():
                    assert bits([entry.logprob]) == bits([every[one].logprob]), (name, token, one)
                    assert entry.rank in (None, every[one].rank)
                assert position[token].rank is not None
        prompts, asked, whole, ids = prompts[::-1], asked[::-1], whole[::-1], ids[::-1]
    assert compiled_programs() == before


def recorded(llm: LLM, prompts: Any, params: Any) -> tuple[list[list[int]], list[np.ndarray]]:
    """Completions, and their log-probabilities as they were while these were generated."""
    outputs = [each.outputs[0] for each in llm.generate(prompts, params, use_tqdm=False)]
    values = [
        [position[token].logprob for token, position in zip(each.token_ids, each.logprobs, strict=True)]
        for each in outputs
    ]
    return [each.token_ids for each in outputs], [np.asarray(each, np.float32) for each in values]


# How rollouts run, and how they are scored: limits of the scheduler, and whether each request is alone.
RUNS: dict[str, tuple[dict[str, Any], bool]] = {
    "in a batch": ({}, False),
    "alone": ({}, True),
    "in chunks": ({"long_prefill_token_threshold": 5}, False),
    "in small steps": ({"max_num_batched_tokens": 9}, False),
    "preempted": ({"num_pages": 30}, False),
    "without prefixes": ({"enable_prefix_caching": False}, False),
}


def assert_scored_as_recorded(llm: LLM, prompts: Any, params: Any, about: str, *, alone: bool = False) -> None:
    """Completions have, bit for bit, the log-probabilities that were recorded while they were generated."""
    parts = [slice(each, each + 1) for each in range(len(prompts))] if alone else [slice(None)]
    runs = [recorded(llm, prompts[part], params[part]) for part in parts]
    completions = [own for tokens, _ in runs for own in tokens]
    values = [own for _, logprobs in runs for own in logprobs]
    got = [own for part in parts for own in llm.get_logprobs(prompts[part], completions[part])]
    assert [len(own) for own in got] == [each.max_tokens for each in params]
    for index, (one, other) in enumerate(zip(got, values, strict=True)):
        assert bits(one) == bits(other), (about, index)


def test_known_completions_have_the_logprobs_of_decoding(make_llm):
    llm: LLM = make_llm(**ENGINES["raw"])
    prompts, params = prompts_of(2), rollout_params(logprobs=0)
    prompts[0] = prompts[0][:13]
    params[0] = params[0].clone_with(max_tokens=96 - 13)  # to the end of the context
    before = None
    for way, (changes, alone) in RUNS.items():
        scheduler = use_scheduler(llm, **changes)
        assert_scored_as_recorded(llm, prompts, params, way, alone=alone)
        before = compiled_programs() if before is None else before
        assert (scheduler.num_preemptions > 0) == (way == "preempted"), (way, scheduler.num_preemptions)
        assert (scheduler.num_prefix_hits > 0) == (way != "without prefixes"), way
    use_scheduler(llm)
    assert compiled_programs() == before


@pytest.mark.thorough("in which order XLA adds depends on the processor")
def test_known_completions_have_the_logprobs_of_decoding_with_experts(executables_dir):
    """Experts multiply few rows while they decode, and many while they score: in blocks of two to sixteen."""
    options = OPTIONS | {"load_format": "auto", "model": str(checkpoint("qwen3_moe")), "num_gpu_blocks_override": 200}
    with LLM(**options, skip_tokenizer_init=True, compile_cache_dir=executables_dir) as llm:
        prompts = [[each % 90 for each in own] for own in prompts_of(7)]
        params = [each.clone_with(max_tokens=12) for each in rollout_params(logprobs=0, detokenize=False)]
        for way in ("in a batch", "alone", "in small steps", "preempted"):
            changes, alone = RUNS[way]
            scheduler = use_scheduler(llm, **changes | ({"num_pages": 40} if way == "preempted" else {}))
            assert_scored_as_recorded(llm, prompts, params, way, alone=alone)
            assert (scheduler.num_preemptions > 0) == (way == "preempted"), way


def head_of(method: str, folder: Path) -> tuple[str, str | None]:
    """A model whose products have the same bits for one row and for many, and a head that drafts for it with `method`;
    None where the head is part of the model.
    """
    if method == "mtp":  # the model and its next layer have experts
        (folder / "config.json").write_text(json.dumps(MTP_MODEL))
        return str(folder), None
    if method == "eagle3":
        return attending(folder, 2)
    raw, tensors = read_head("llama")
    if method == "dflash":  # a DSpark head without what makes it one
        tensors = {name: values for name, values in tensors.items() if not name.startswith(("markov", "confidence"))}
        raw = {name: value for name, value in raw.items() if "markov" not in name and "confidence" not in name}
        drafted = {name: raw.pop(name) for name in ("mask_token_id", "target_layer_ids")}
        raw |= {"architectures": ["DFlashDraftModel"], "dflash_config": drafted}
    return str(checkpoint("llama")), write(folder / "head", raw, tensors)


@pytest.mark.thorough("minutes of compiling; tests/jaxengine/engine/test_dflash.py has a head")
@pytest.mark.parametrize("method", ["dflash", "dspark", "eagle3", "mtp"])
@pytest.mark.parametrize("count", [1, 3])
def test_known_completions_have_the_logprobs_of_decoding_with_heads(method, count, tmp_path, executables_dir):
    """For every way to run and every width of a step."""
    model, head = head_of(method, tmp_path)
    drafts = {"method": method, "num_speculative_tokens": count} | ({"model": head} if head else {})
    options = OPTIONS | {"skip_tokenizer_init": True, "compile_cache_dir": executables_dir, "model": model}
    options |= {"load_format": "auto" if head else "dummy", "num_gpu_blocks_override": 200}
    llm = LLM(**options, speculative_config=drafts)
    size = 32 if method == "eagle3" else 64  # of a vocabulary
    rng, prefix = np.random.default_rng(5), [9, 8, 7, 6, 5, 4] * 2
    prompts = [
        prefix * (index % 2) + (rng.integers(3, size, 4).tolist() * 6)[: int(rng.integers(3, 24))] for index in range(8)
    ]
    kinds = ({"temperature": index % 3 / 2, "seed": index, "max_tokens": 14 + 2 * index} for index in range(8))
    params = [SamplingParams(ignore_eos=True, detokenize=False, logprobs=0, **each) for each in kinds]
    for width in dict.fromkeys((1, 2, count + 1, None)):
        for way, (changes, alone) in RUNS.items():
            scheduler = use_scheduler(llm, **changes | ({"num_pages": 40} if way == "preempted" else {}))
            force(llm, width)
            assert_scored_as_recorded(llm, prompts, params, f"{way}, {width}", alone=alone)
            assert (scheduler.num_preemptions > 0) == (way == "preempted"), (way, scheduler.num_preemptions)
            assert (scheduler.num_prefix_hits > 0) == (way != "without prefixes"), way
    metrics = {each.name: getattr(each, "value", 0) for each in llm.get_metrics()}
    assert metrics["vllm:spec_decode_num_accepted_tokens"] > 0 == metrics["jaxengine:compilations_since_ready"]


def test_known_completions_have_the_logprobs_of_decoding_with_drafts(make_llm):
    """Tokens that came as accepted drafts, several in a step, and at temperature 1, where both modes are the same."""
    llm: LLM = make_llm(**ENGINES["processed, with drafts"])
    use_scheduler(llm)
    prompts = [PREFIX * 3, [*range(20, 24)] * 6, *prompts_of(5, 4)]
    params = [
        SamplingParams(temperature=index % 3 / 2, seed=index, max_tokens=30, ignore_eos=True, logprobs=0)
        for index in (0, 3, 0, 2, 5, 0)
    ]
    completions, values = recorded(llm, prompts, params)
    metrics = {each.name: getattr(each, "value", 0) for each in llm.get_metrics()}
    assert metrics["vllm:spec_decode_num_accepted_tokens"] > 20
    for one, other in zip(llm.get_logprobs(prompts, completions), values, strict=True):
        assert bits(one) == bits(other)


PROMPT_RUNS: dict[str, dict[str, Any]] = {
    "in a batch": {},
    "in chunks": {"long_prefill_token_threshold": 5},
    "preempted": {"num_pages": 30},
}


@pytest.mark.parametrize("name", ENGINES)
def test_given_tokens_of_a_prompt_are_those_of_the_whole_vocabulary(make_llm, name):
    """Beside requests with others or none, from a token on, behind cached prefixes, and with others for the output."""
    llm: LLM = make_llm(**ENGINES[name])
    prompts, params = prompts_of(4), rollout_params()
    whole = llm.generate(prompts, [each.clone_with(prompt_logprobs=-1) for each in params], use_tqdm=False)
    rng, before = np.random.default_rng(2), compiled_programs()
    for way, changes in PROMPT_RUNS.items():
        scheduler = use_scheduler(llm, **changes)
        ids = [rng.choice(VOCAB, size, replace=False).tolist() for size in (1, 3, 120, 0, 2, 40, 0, 7)]
        starts = [None, 0, 5, None, 9, 6, None, 3]
        asked = [
            each.clone_with(
                prompt_logprob_token_ids=own or None,
                prompt_logprob_start=None if start is None else min(start, len(prompt) - 1),
                prompt_logprobs=1 if index % 4 == 1 else None,
                logprob_token_ids=[index, 9] if index % 2 else None,
            )
            for index, (each, own, start, prompt) in enumerate(zip(params, ids, starts, prompts, strict=True))
        ]
        for _ in range(2):  # the second time behind cached prefixes
            outputs = llm.generate(prompts, asked, use_tqdm=False)
            for index, (output, expected, own, each) in enumerate(zip(outputs, whole, ids, asked, strict=True)):
                if not own:
                    assert output.prompt_logprobs is None
                    continue
                first = (each.prompt_logprob_start or 0) + 1
                assert [position is None for position in output.prompt_logprobs[: first + 1]] == (
                    [True] * first + [False] * (first < len(output.prompt_logprobs))
                )
                for token, position, every in list(
                    zip(output.prompt_token_ids, output.prompt_logprobs, expected.prompt_logprobs, strict=True)
                )[first:]:
                    assert {token, *own} <= set(position) and len(position) <= len(own) + 2
                    for one, entry in position.items():
                        assert abs(entry.logprob - every[one].logprob) < 1e-4, (way, index, one)
                        assert entry.rank in (None, every[one].rank)
                if index % 2:
                    assert {index, 9} <= set(output.outputs[0].logprobs[0])
        assert (scheduler.num_preemptions > 0) == (way == "preempted")
        assert scheduler.num_prefix_hits > 0
    use_scheduler(llm)
    assert compiled_programs() == before


def test_a_prompts_logprobs_from_a_token_on(make_llm):
    """In chunks, and behind prefixes that reach up to there and no further."""
    llm: LLM = make_llm(**ENGINES["raw"])
    prompts = prompts_of(6)
    whole = llm.generate(prompts, SamplingParams(max_tokens=1, prompt_logprobs=2), use_tqdm=False)
    for changes in ({}, {"long_prefill_token_threshold": 5}, {"enable_prefix_caching": False}):
        scheduler = use_scheduler(llm, **changes)
        for start in (0, 3, 9, 11, 12):
            params = SamplingParams(max_tokens=1, prompt_logprobs=2, prompt_logprob_start=start)
            for found, known in zip(llm.generate(prompts, params, use_tqdm=False), whole, strict=True):
                assert found.prompt_logprobs[: start + 1] == [None] * (start + 1)
                assert found.prompt_logprobs[start + 1 :] == known.prompt_logprobs[start + 1 :]
                assert found.num_cached_tokens <= start
        assert (scheduler.num_prefix_hits > 0) == ("enable_prefix_caching" not in changes)
    use_scheduler(llm)


def test_the_flat_form(make_llm):
    llm: LLM = make_llm(**ENGINES["raw"])
    use_scheduler(llm)
    completions = [[5, 6, 7], [], np.array([9], np.int64), (1, 2)]
    found = llm.get_logprobs([[3, 4], [5], [6, 7, 8], {"prompt_token_ids": [4], "cache_salt": "a"}], completions)
    assert found.values.dtype == np.float32 and found.cu_lens.tolist() == [0, 3, 3, 4, 6] and len(found) == 4
    assert [len(each) for each in found] == [3, 0, 1, 2] and (found.values < 0).all()
    assert all(np.shares_memory(each, found.values) for each in found if len(each))
    assert bits(found[-1]) == bits(found.values[4:]) and [len(each) for each in found[1:3]] == [0, 1]
    with pytest.raises(IndexError):
        found[4]
    alone = llm.get_logprobs([3, 4], [[5, 6, 7]])
    assert bits(alone[0]) == bits(found[0])
    none = llm.get_logprobs([[3]], [[]])
    assert none.values.shape == (0,) and none.cu_lens.tolist() == [0, 0]


async def test_the_online_api_has_the_same(tiny_options, make_llm):
    llm: LLM = make_llm(**ENGINES["raw"])
    prompts, completions = prompts_of(3, 3), [[5, 6, 7], [8], []]
    expected = llm.get_logprobs(prompts, completions)
    engine = AsyncLLM(**tiny_options, **ENGINES["raw"])
    try:
        found = await engine.get_logprobs(prompts, completions)
    finally:
        engine.shutdown()
    assert bits(found.values) == bits(expected.values) and found.cu_lens.tolist() == expected.cu_lens.tolist()


@each_row(
    ("prompts", "completions", "problem"),
    [
        ([[3], [4]], [[5]], "completions must be a list of token ids for each of the 2 prompts"),
        ([[3]], "5", "completions must be a list, one item for each completion, got '5'"),
        ([[3]], 5, "completions must be a list, one item for each completion, got 5"),
        ([[3]], ["5"], r"completions\[0\] must be a list of token ids"),
        ([[3]], [5], r"completions\[0\] must be a list of token ids"),
        ([[3]], [[5, 1.0]], r"completions\[0\] contains 1.0"),
        ([[3]], [[True]], r"completions\[0\] contains True"),
        ([[3]], [[5, VOCAB]], r"completions\[0\] contains 128; allowed: token ids from 0 to 127"),
        ([[3]], [[5, -1]], r"completions\[0\] contains -1"),
        ([[3], [3] * 90], [[5], [5] * 7], r"completions\[1\] has 7 tokens; allowed: at most 6"),
    ],
)
def test_what_is_no_completion_is_refused(make_llm, prompts, completions, problem):
    with pytest.raises(RequestError, match=problem) as refused:
        make_llm(**ENGINES["raw"]).get_logprobs(prompts, completions)
    assert refused.value.param == "completions"
