"""Sequences of tokens that a request must not repeat (extra_args.ngram_size): tokens are those of their definition."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import pytest

from jaxengine import LLM, RequestError, SamplingParams
from jaxengine.config.features.logits_processors import NO_REPEAT, read_processors
from jaxengine.engine.token_bias import repeating
from jaxengine.scheduler.base.logits_processor import Column, LogitsProcessor
from tests.conftest import TINY_CHECKPOINT, TINY_OPTIONS
from tests.tables import each_row

PROMPTS = [{"prompt_token_ids": [5, 6, 7] * count} for count in (1, 2, 5)]
KINDS: tuple[dict[str, Any], ...] = (
    {"ngram_size": 2, "window_size": 9},
    {"ngram_size": 3, "window_size": 30, "whitelist_token_ids": [7, 11]},
    {"ngram_size": 1, "window_size": 4},
)
DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2, "prompt_lookup_min": 1}


def banned(output: list[int], size: int, window: int, exempt=()) -> set[int]:
    """By the definition: the last tokens of earlier sequences that begin as the output ends."""
    head = output[len(output) - size + 1 :]
    starts = range(max(0, len(output) - window), len(output) - size + 1)
    return {output[at + size - 1] for at in starts if output[at : at + size - 1] == head} - {*exempt}


def test_what_would_repeat_a_sequence():
    rng = np.random.default_rng(0)
    for _ in range(300):
        output = rng.integers(0, 3, rng.integers(0, 30)).tolist()
        size, window, exempt = int(rng.integers(1, 5)), int(rng.integers(1, 40)), (1,) if rng.random() < 0.3 else ()
        assert repeating(np.array(output, np.int32), size, window, exempt) == banned(output, size, window, exempt)


@pytest.fixture(scope="module")
def engine(executables_dir):
    """With drafts, which a request that watches its output must not be changed by."""
    options = {**TINY_OPTIONS, "max_model_len": 64, "compile_cache_dir": executables_dir}
    return LLM(TINY_CHECKPOINT, **options, speculative_config=DRAFTS)


def test_tokens_are_the_likeliest_that_repeat_nothing(engine):
    params = [SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, extra_args=kind) for kind in KINDS]
    outputs = engine.generate(PROMPTS, params, use_tqdm=False)
    for prompt, kind, output in zip(PROMPTS, KINDS, outputs, strict=True):
        tokens = list(output.outputs[0].token_ids)
        size, window, exempt = kind["ngram_size"], kind["window_size"], kind.get("whitelist_token_ids", ())
        befores = [tokens[:count] for count in range(len(tokens))]
        likeliest = engine.generate(
            [{"prompt_token_ids": prompt["prompt_token_ids"] + before} for before in befores],
            [
                SamplingParams(temperature=0, max_tokens=1, logit_bias=dict.fromkeys(forbidden, -100))
                for forbidden in (banned(each, size, window, exempt) for each in befores)
            ],
            use_tqdm=False,
        )
        assert tokens == [each.outputs[0].token_ids[0] for each in likeliest]
        assert any(banned(each, size, window, exempt) for each in befores)


@each_row(
    ("given", "name"),
    [
        ({"ngram_size": 0}, "ngram_size"),
        ({"ngram_size": 257}, "ngram_size"),
        ({"ngram_size": True}, "ngram_size"),
        ({"ngram_size": 3, "window_size": 10**6}, "window_size"),
        ({"ngram_size": 3, "window_size": 2}, r"window_size must be at least ngram_size \(3\), got 2"),
        ({"ngram_size": 101}, "window_size"),
        ({"ngram_size": 3, "whitelist_token_ids": "7"}, "whitelist_token_ids"),
        ({"ngram_size": 3, "whitelist_token_ids": 0}, "whitelist_token_ids"),
        ({"ngram_size": 3, "whitelist_token_ids": False}, "whitelist_token_ids"),
        ({"ngram_size": 3, "whitelist_token_ids": ""}, "whitelist_token_ids"),
        ({"ngram_size": 3, "whitelist_token_ids": [1.5]}, "whitelist_token_ids"),
        ({"ngram_size": 3, "whitelist_token_ids": [-1]}, "whitelist_token_ids"),
        ({"ngram_size": 3, "whitelist_token_ids": [1 << 70]}, "whitelist_token_ids"),
        ({"ngram_size": 3, "whitelist_token_ids": range(1025)}, "whitelist_token_ids"),
        ({"ngram_size": None, "window_size": 3}, "window_size must be left out without ngram_size, got 3"),
        ({"window_size": 3}, "window_size must be left out without ngram_size, got 3"),
        ({"ngram": 3}, "'ngram'; allowed: ngram_size, window_size, whitelist_token_ids; .* no logits_processors"),
    ],
)
def test_what_is_not_allowed_is_named(given, name):
    with pytest.raises(RequestError, match=name):
        SamplingParams(extra_args=given).token_params()


def test_a_processor_may_have_the_names():
    class Windows(LogitsProcessor):
        columns: ClassVar = {"window_size": Column(5)}

    params = SamplingParams(extra_args={"window_size": 3}).token_params(processors=[Windows])
    assert params.no_repeat is None and params.processors == {0: (3,)}
    with pytest.raises(RequestError, match="'ngram_size'; allowed: window_size"):
        SamplingParams(extra_args={"ngram_size": 3}).token_params(processors=[Windows])


def test_what_is_not_given_has_its_default():
    none = {"ngram_size": None, "window_size": None, "whitelist_token_ids": None}
    assert SamplingParams(extra_args=none).token_params().no_repeat is None
    assert SamplingParams(extra_args={**none, "ngram_size": np.int64(3)}).token_params().no_repeat == (3, 100, ())


def test_vllms_processor_is_part_of_every_engine():
    assert read_processors([*NO_REPEAT]) == ()
    set_of_ids = {"ngram_size": 3, "whitelist_token_ids": {7}}  # as vLLM's example has it
    assert SamplingParams(extra_args=set_of_ids).token_params().no_repeat == (3, 100, (7,))
