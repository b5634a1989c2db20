"""A draft model changes no token, and one that is the model itself is always right: positions, noise, keys and values
are then those of the model, wherever a prompt is cut, a prefix is found again, or a request begins anew."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
import pytest

from jaxengine import LLM, SamplingParams
from jaxengine.config.base.platforms import PLATFORMS
from jaxengine.config.engine_config import ConfigError, EngineConfig
from jaxengine.config.features.speculation import DRAFT_MODEL, SpeculativeConfig
from jaxengine.engine.extensions import structured as structured_module
from jaxengine.models.registry import read_hf
from jaxengine.runner.extensions.drafts.open import open_draft
from tests.fixtures.drawn_weights import checkpoint
from tests.jaxengine.engine.test_speculation import (
    assert_same,
    force,
    guided_workload,
    make_folder,
    names,
    workload,
)
from tests.sharding.parallel_cases import OPTIONS
from tests.sharding.parallel_models import DENSE

# Another shape of everything but the vocabulary.
SMALL = DENSE | {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
# The model and who drafts for it, of the recorded checkpoints, whose vocabularies are all the same.
PAIRS = (
    *(("llama", "llama"), ("gemma2", "gemma2"), ("gemma3", "gemma3"), ("gpt_oss", "gpt_oss"), ("phi3", "phi3")),
    *(("deepseek_v3", "deepseek_v3"), ("qwen3_moe", "qwen3_moe"), ("exaone4", "exaone4")),
    *(("llama", "gemma2"), ("gemma3", "qwen3"), ("deepseek_v3", "llama"), ("qwen3_moe", "deepseek_v3")),
)
KNOWN = {"skip_tokenizer_init": True, "load_format": "auto", "num_gpu_blocks_override": 60}


def drafted(llm) -> tuple[int, np.ndarray]:
    """Drafts so far, and those that were right by their place; of steps in flight, too."""
    while llm.core.engine.has_unfinished:
        llm.core.engine.step()
    drafts = llm.core.engine.extensions.by_name["drafts"].stats
    return drafts.num_tokens, drafts.accepted.copy()


def assert_counts_on(llm: LLM, size: int, widths: Sequence[int]) -> None:
    """Of a model of which token t + 1 follows t, modulo `size`: nothing is drafted in vain."""
    prompts = [{"prompt_token_ids": [(3 * each + at) % size for at in range(1 + 4 * each)]} for each in range(10)]
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, detokenize=False)
    before = llm.core.engine.extensions.by_name["drafts"].stats
    for width in widths:
        force(llm, width)
        tokens, right = before.num_tokens, int(before.accepted.sum())
        outputs = llm.generate(prompts, params, use_tqdm=False)
        for prompt, output in zip(prompts, outputs, strict=True):
            last = prompt["prompt_token_ids"][-1]
            assert list(output.outputs[0].token_ids) == [(last + 1 + at) % size for at in range(20)]
        assert before.num_tokens - tokens == int(before.accepted.sum()) - right > 64
    metrics = {metric.name: metric.value for metric in llm.get_metrics()}
    assert metrics["vllm:num_preemptions"] > 0 and metrics["jaxengine:compilations_since_ready"] == 0


def accepted_share(llm, prompts, params, expected) -> float:
    """Of the drafts that are made for these prompts, which must be many; what comes out must be as expected."""
    before, right = drafted(llm)
    assert_same(llm.generate(prompts, params, use_tqdm=False), expected)
    after, right_after = drafted(llm)
    assert after - before > 64
    return float((right_after - right).sum()) / (after - before)


def assert_told(llm: LLM, formats: dict[str, str]) -> None:
    """What drafts has these modules of these formats in the table of weights, with the bytes that are loaded."""
    rows = {row["modules"]: row for row in llm.core.utility("weights") if row["modules"].startswith("draft: ")}
    assert {name.removeprefix("draft: "): row["format"] for name, row in rows.items()} == formats
    matrices = [leaf for leaf in llm.core.runner.stages[-1].extensions["drafts"].params if leaf.ndim > 1]
    assert sum(row["bytes"] for row in rows.values()) == sum(leaf.nbytes for leaf in matrices)


@pytest.fixture(scope="module")
def options(tmp_path_factory, executables_dir):
    return OPTIONS | {
        "model": make_folder(tmp_path_factory.mktemp("target")),
        "compile_cache_dir": executables_dir,
        "num_gpu_blocks_override": 40,
        "enable_trace_replay": True,  # as the engines of test_speculation.py, which have the plain one's programs
    }


@pytest.fixture(scope="module")
def plain(options):
    return LLM(**options)


@pytest.fixture(scope="module")
def own(options, thorough):
    """Drafted by the model itself: weights of the same seed."""
    count = 7 if thorough else 3
    return LLM(**options, speculative_config={"model": options["model"], "num_speculative_tokens": count})


def test_a_model_that_drafts_for_itself_is_always_right(plain, own, thorough):
    for temperature in (0.0, 0.7, 1.0) if thorough else (0.7,):
        pairs = [pair for pair in zip(*workload(temperature), strict=True) if pair[1].structured_outputs is None]
        prompts, params = ([*each] for each in zip(*pairs, strict=True))
        expected = plain.generate(prompts, params, use_tqdm=False)
        for width in (2, 4, 8, None) if thorough else (8,):
            force(own, width)
            own.reset_prefix_cache()
            for _ in range(2):  # the second time with known prefixes
                share = accepted_share(own, prompts, params, expected)
                assert share >= 0.99, (temperature, width, share)
    metrics = {metric.name: metric.value for metric in own.get_metrics()}
    assert metrics["jaxengine:compilations_since_ready"] == 0
    assert metrics["vllm:num_preemptions"] > 0 and metrics["vllm:prefix_cache_hits"] > 0
    assert max(len(prompt["prompt_token_ids"]) for prompt in prompts) > OPTIONS["max_num_batched_tokens"]
    assert own.core.engine.scheduler.num_free_pages == 40


def test_a_draft_model_knows_what_a_grammar_left_no_choice(plain, own):
    """Requests that go on from such tokens find its keys and values: nothing is drafted in vain."""
    prompts = [{"prompt_token_ids": [7 * index + at for at in range(4)]} for index in range(3)]
    grammar = {"json": names(1), "disable_any_whitespace": True}
    params = SamplingParams(temperature=0.7, seed=1, max_tokens=30, structured_outputs=grammar)
    force(own, 8)
    own.reset_prefix_cache()
    forced, hits = (
        own.core.engine.extensions.by_name["drafts"].stats.num_forced,
        own.core.engine.scheduler.num_prefix_hits,
    )
    outputs = own.generate(prompts, params, use_tqdm=False)
    assert own.core.engine.extensions.by_name["drafts"].stats.num_forced - forced > 20
    known = [{"prompt_token_ids": [*each.prompt_token_ids, *each.outputs[0].token_ids]} for each in outputs] * 4
    params = [SamplingParams(temperature=0.7, seed=seed, max_tokens=24, ignore_eos=True) for seed in range(12)]
    expected = plain.generate(known, params, use_tqdm=False)
    assert accepted_share(own, known, params, expected) >= 0.99
    assert own.core.engine.scheduler.num_prefix_hits - hits > 60


def test_guesses_of_a_draft_model_under_a_grammar(plain, own, monkeypatch):
    """They are read from the devices; where the model chooses what it may all are right, else they end there."""
    monkeypatch.setattr(structured_module, "_MASK_SECONDS", 60.0)  # a mask that is late costs no steps
    prompts, params = guided_workload(0.7)
    expected = plain.generate(prompts, params, use_tqdm=False)
    force(own, 8)
    own.reset_prefix_cache()
    assert_same(own.generate(prompts, params, use_tqdm=False), expected)
    stats, drafts = own.core.engine.stats, own.core.engine.extensions.by_name["drafts"].stats
    first, num_tokens = stats.num_steps, 0
    for index in (0, 3, 1):
        tokens = drafts.num_tokens
        assert_same(own.generate(prompts[index], params[index], use_tqdm=False), expected[index : index + 1])
        assert drafts.num_tokens > tokens
        num_tokens += len(expected[index].outputs[0].token_ids)
    # 0.55 on a quiet machine; how many masks arrive in time changes it by a few steps. Without drafts it is 1.
    assert stats.num_steps - first < 0.7 * num_tokens
    assert {each.name: each.value for each in own.get_metrics()}["jaxengine:compilations_since_ready"] == 0


def test_a_stop_string_cuts_what_a_draft_model_drafts(plain, own):
    prompts, params = [{"prompt_token_ids": [3, 5, 8]}], SamplingParams(temperature=0.7, seed=4, max_tokens=30)
    (whole,) = plain.generate(prompts, params, use_tqdm=False)
    params.stop = [whole.outputs[0].text[9:13]]
    for width in (8, 2):
        force(own, width)
        (found,), (expected,) = (llm.generate(prompts, params, use_tqdm=False) for llm in (own, plain))
        assert_same([found], [expected])
        assert found.outputs[0].stop_reason == params.stop[0] and 0 < len(found.outputs[0].text) < 10


def test_memory_is_planned_for_both(plain, own):
    (stage,) = own.core.runner.stages
    (alone,) = plain.core.runner.stages
    assert own.core.runner.plan.page_bytes == 2 * plain.core.runner.plan.page_bytes == 2 * alone.page_bytes
    assert own.core.runner.plan.weights == 2 * plain.core.runner.plan.weights
    assert stage.extensions["drafts"]._kept.num_pages == stage._kv.num_pages
    assert not own.core.runner.extension("drafts").keeps_history
    assert_told(own, {row["modules"]: "as it is" for row in plain.core.utility("weights")})


def test_steps_without_drafts_are_the_same_forward_passes(plain, own):
    (alone,), (stage,) = plain.core.runner.stages, own.core.runner.stages
    for bucket in plain.core.runner.buckets:
        programs = [each.programs.forward(bucket, each.params, each._kv_shapes) for each in (alone, stage)]
        assert repr(programs[0].arguments) == repr(programs[1].arguments) and programs[0].name == programs[1].name
        assert alone.programs.description == stage.programs.description


@pytest.mark.thorough("ten seconds of compiling; what is drafted in vain is looked at by n-grams, too")
def test_a_model_that_is_mostly_wrong_changes_nothing(plain, options, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    drafting = LLM(**options, speculative_config={"model": str(tmp_path), "num_speculative_tokens": 1})
    force(drafting, 2)
    prompts, params = workload(0.7)
    share = accepted_share(drafting, prompts, params, plain.generate(prompts, params, use_tqdm=False))
    assert 0 < share < 0.8


@pytest.mark.thorough("minutes of compiling")
@pytest.mark.parametrize(("target", "draft"), PAIRS)
def test_families(target, draft, executables_dir):
    options = OPTIONS | KNOWN | {"model": str(checkpoint(target)), "compile_cache_dir": executables_dir}
    plain = LLM(**options)
    for count in (1, 3, 7):
        chosen = {"method": "draft_model", "model": str(checkpoint(draft)), "num_speculative_tokens": count}
        drafting = LLM(**options, speculative_config=chosen)
        force(drafting, 8 if count == 7 else None)
        for temperature in (0.0, 0.7, 1.0):
            prompts, params = workload(temperature, 100, text=False)
            expected = plain.generate(prompts, params, use_tqdm=False)
            share = accepted_share(drafting, prompts, params, expected)
            assert share >= 0.99 or target != draft, (count, temperature, share)


@pytest.mark.parametrize(
    ("chosen", "said"),
    [
        ({"method": "draft_model"}, "draft_model' without a model; name it in speculative_config.model"),
        ({"model": "x", "prompt_lookup_max": 3}, "prompt_lookup_max is 3, and 'draft_model' has no prompt_lookup_max"),
        ({"method": "ngram", "revision": "main"}, "revision is 'main', and 'ngram' has no revision"),
        ({"model": 3}, "speculative_config.model is 3; allowed: a text"),
    ],
)
def test_bad_options_are_refused(chosen, said):
    with pytest.raises(ConfigError, match=said) as error:
        EngineConfig(speculative_config=chosen | {"num_speculative_tokens": 2})
    assert error.value.param.partition(".")[0] == "speculative_config"


def test_a_model_without_a_method_is_a_draft_model():
    read = EngineConfig.from_options(speculative_model="org/small", num_speculative_tokens=2).speculative_config
    assert read == SpeculativeConfig(DRAFT_MODEL, 2, model="org/small") and read.has_model
    assert read == SpeculativeConfig.read({"method": "draft_model", "model": "org/small", "num_speculative_tokens": 2})


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size is 2, and draft_model needs a single stage"),
        ({"draft": 2}, "draft_tensor_parallel_size is 2; allowed: 1, tensor_parallel_size"),
        ({"sliding_window": 8}, "frees keys that draft_model needs; give disable_hybrid_kv_cache_manager"),
        ({"nnodes": 2}, "nnodes is 2"),
    ],
)
def test_engines_without_draft_models_say_why(options, said):
    chosen = {"model": "x", "num_speculative_tokens": 2}
    if "draft" in options:
        chosen["draft_tensor_parallel_size"] = options.pop("draft")
    window = options.pop("sliding_window", None)
    name = "MistralForCausalLM" if window else "LlamaForCausalLM"
    model = read_hf(DENSE | {"architectures": [name], "sliding_window": window})
    config = EngineConfig(speculative_config=chosen, **options)
    with pytest.raises(ConfigError, match=said):
        config.resolved(model, PLATFORMS["cpu"])
    if window:
        EngineConfig(speculative_config=chosen, disable_hybrid_kv_cache_manager=True).resolved(model, PLATFORMS["cpu"])


@pytest.mark.parametrize(
    ("draft", "said"),
    [
        ("llama", "has a vocabulary of 128 tokens, and LlamaForCausalLM one of 300; name a text model"),
        ("qwen3_next", "keeps states of sequences, which cannot be rolled back"),
        ("nowhere/at/all", "speculative_config.model: there is no model at 'nowhere"),
    ],
)
def test_models_that_cannot_draft_are_refused(draft, said, options):
    target = {"model": str(checkpoint("llama"))} if draft == "qwen3_next" else {}
    path = draft if "/" in draft else str(checkpoint(draft))
    with pytest.raises(ConfigError, match=said):
        LLM(**options | target, speculative_config={"model": path, "num_speculative_tokens": 2})


def test_formats_of_files_are_the_targets_own():
    path = checkpoint("llama")
    chosen = {"model": str(path), "num_speculative_tokens": 2}
    config = EngineConfig(config_format="mistral", load_format="mistral", speculative_config=chosen)
    draft = open_draft(config, read_hf(json.loads((path / "config.json").read_text())))
    draft.close()
    assert draft.path == path
