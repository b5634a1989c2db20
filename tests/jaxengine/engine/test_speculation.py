"""Drafts change no token: everything that a request may ask for, compared with an engine that has none."""

from __future__ import annotations

import dataclasses
import json

import jax
import numpy as np
import pytest

from jaxengine import LLM, RequestError, SamplingParams
from jaxengine.config.base.platforms import PLATFORMS
from jaxengine.config.engine_config import ConfigError, EngineConfig
from jaxengine.config.features.speculation import SpeculativeConfig
from jaxengine.engine.extensions import structured as structured_module
from jaxengine.engine.extensions.drafts import Drafts
from jaxengine.engine.stats.metric_types import Vector
from jaxengine.grammars.grammar_worker import GrammarWorker, NextMask
from jaxengine.models.registry import read_folder
from tests.fixtures.drawn_weights import checkpoint
from tests.sharding.parallel_cases import OPTIONS, write_tokenizer
from tests.sharding.parallel_models import DENSE

DRAFTS = {"method": "ngram", "num_speculative_tokens": 7, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
# Families of every kind of attention and experts that keep pages alone; of these --thorough takes all.
FAMILIES = ("llama", "gemma2", "gemma3", "gpt_oss", "mistral", "qwen3_moe", "deepseek_v3", "phi3")

GRAMMAR = {"method": "grammar", "num_speculative_tokens": 1}
OF_STATES = (
    ({"pipeline_parallel_size": 2}, "pipeline_parallel_size is 2, and Qwen3NextForCausalLM keeps states"),
    ({"rl_exact": True}, "rl_exact is given, which writes the states of Qwen3NextForCausalLM"),
)
WITHOUT = (({"nnodes": 2}, "nnodes is 2"), ({"max_num_batched_tokens": 1, "max_num_seqs": 1}, "no draft"))


def make_folder(folder):
    (folder / "config.json").write_text(json.dumps(DENSE))
    write_tokenizer(folder)
    return str(folder)


@pytest.fixture(scope="module")
def engines(tmp_path_factory, executables_dir, thorough):
    """Without drafts and with them, in a pool that is too small for all."""
    drafts = DRAFTS if thorough else DRAFTS | {"num_speculative_tokens": 3}
    options = OPTIONS | {
        "model": make_folder(tmp_path_factory.mktemp("drafts")),
        "compile_cache_dir": executables_dir,
        "num_gpu_blocks_override": 40,
        "enable_trace_replay": True,
    }
    return LLM(**options), LLM(**options, speculative_config=drafts)


def force(llm, width: int | None) -> None:
    """Steps of this width wherever one can have it; None for the engine's own choice."""
    choice = llm.core.engine.scheduler.extension("drafts").width
    choice.__dict__.pop("choose", None)
    if width is not None:
        most = {each: rows for each, rows in choice._most_rows.items() if each <= width}
        choice.choose = lambda rows, runs: max((each for each in most if rows <= most[each]), default=1)


def workload(temperature: float, vocab_size: int = 257, text: bool = True):
    """Prompts that repeat themselves, and parameters of every kind."""
    rng = np.random.default_rng(1)
    few = {int(token): 30.0 for token in rng.integers(64, 96, 3)}
    kinds = [
        {},
        {"repetition_penalty": 1.3, "presence_penalty": 0.5, "logit_bias": few},
        {"frequency_penalty": -1.5, "logprobs": 2},
        {"top_k": 20, "top_p": 0.9, "logprobs": 3, "prompt_logprobs": 1},
        {"min_p": 0.05},
        {"logit_bias": few, "logprobs": 0},
        {"min_tokens": 7, "stop_token_ids": [*few][:2], "logit_bias": few},
        {"bad_words": ["zz"], "logit_bias": few} if text else {"min_tokens": 2},
        {"logit_bias": few, "stop": ["".join(map(chr, [66, 66, 66]))]} if text else {"logit_bias": few},
        {"structured_outputs": {"regex": "[a-z]{2,20}( [0-9]+)+"}} if text else {},
        {"logit_bias": few, "n": 2 if temperature else 1},
        {"allowed_token_ids": [*few]},
        {"extra_args": {"ngram_size": 3, "window_size": 16}, "logit_bias": few},
    ]
    prompts, params = [], []
    for index in range(24):
        base = rng.integers(0, vocab_size, int(rng.integers(2, 9))).tolist()
        chosen = {"temperature": temperature, "seed": index, "max_tokens": int(rng.integers(4, 24)), "ignore_eos": True}
        prompts.append({"prompt_token_ids": (base * 10)[: int(rng.integers(3, 36))]})
        params.append(SamplingParams(**chosen, detokenize=text, **kinds[index % len(kinds)]))
    return prompts, params


def told(output):
    """What a caller sees, but for logprobs."""
    return [(each.token_ids, each.text, each.finish_reason, each.stop_reason) for each in output.outputs]


def scores(output):
    """Tokens of all logprobs, and their values."""
    steps = [step for each in output.outputs for step in each.logprobs or ()]
    steps += [step for step in output.prompt_logprobs or () if step]
    pairs = [(token, entry.rank, entry.logprob) for step in steps for token, entry in step.items()]
    return [pair[:2] for pair in pairs], [pair[2] for pair in pairs]


def assert_same(found, expected):
    for one, other in zip(found, expected, strict=True):
        assert told(one) == told(other)
        (tokens, values), (wanted, rounded) = scores(one), scores(other)
        assert tokens == wanted
        np.testing.assert_allclose(values, rounded, atol=1e-4)


def num_accepted(llm) -> list[int]:
    name = "vllm:spec_decode_num_accepted_tokens_per_pos"
    (found,) = [each for each in llm.get_metrics() if each.name == name]
    shown = [each for each in llm.core.metrics.snapshot() if each["name"] == name]
    assert [each["value"] for each in shown] == found.values and isinstance(found, Vector)
    assert [each["labels"] for each in shown] == [{"position": str(at)} for at in range(len(found.values))]
    return found.values


@pytest.mark.parametrize("temperature", [0.0, 0.7, pytest.param(1.0, marks=pytest.mark.thorough("as 0.7"))])
def test_everything_is_as_without_drafts(engines, temperature, thorough):
    plain, drafting = engines
    prompts, params = workload(temperature)
    expected = plain.generate(prompts, params, use_tqdm=False)
    before = num_accepted(drafting)
    for width in (2, 4, 8, None) if thorough else (8,) if temperature else (2, 8):
        force(drafting, width)
        drafting.reset_prefix_cache()
        assert_same(drafting.generate(prompts, params, use_tqdm=False), expected)
    force(drafting, 8)
    for index in range(12) if thorough else (2, 6, 8):  # alone, and with known prefixes
        assert_same(drafting.generate(prompts[index], params[index], use_tqdm=False), expected[index : index + 1])
    metrics = {metric.name: metric.value for metric in drafting.get_metrics()}
    assert metrics["jaxengine:compilations_since_ready"] == 0
    assert metrics["vllm:num_preemptions"] > 0
    assert all(np.array(num_accepted(drafting))[:2] > before[:2])
    assert metrics["vllm:spec_decode_num_draft_tokens"] > metrics["vllm:spec_decode_num_accepted_tokens"]
    assert drafting.core.engine.scheduler.num_free_pages == 40


def test_a_stop_string_cuts_a_run_of_accepted_tokens(engines):
    plain, drafting = engines
    force(drafting, 8)
    steps = drafting.core.engine.stats.num_steps
    params = SamplingParams(temperature=0, max_tokens=30, logit_bias={65: 100.0}, stop=["b" * 12])
    prompts = [{"prompt_token_ids": [65] * 6}]
    found, expected = (llm.generate(prompts, params, use_tqdm=False) for llm in (drafting, plain))
    assert_same(found, expected)
    text = chr(found[0].outputs[0].token_ids[0] + 33)  # the tokenizer's first bytes begin with "!"
    params.stop = [text * 12]
    found, expected = (llm.generate(prompts, params, use_tqdm=False) for llm in (drafting, plain))
    assert_same(found, expected)
    (output,) = found[0].outputs
    assert output.finish_reason == "stop" and len(output.token_ids) == 12 and output.text == ""
    # 30 and 12 tokens, four and more a step, and the steps for prompts and in flight at the ends.
    assert drafting.core.engine.stats.num_steps - steps < 18


def names(count: int) -> dict:
    """An object whose names and signs are most of it, without white space."""
    names = [f"property_{index}" for index in range(count)]
    return {"type": "object", "properties": {name: {"type": "boolean"} for name in names}, "required": names}


def forced_workload(vocab_size: int):
    """Grammars that leave no choice for whole words, under parameters of every kind, and requests without any."""
    text = "".join(map(chr, [66] * 3))
    kinds = [
        {"logprobs": 2},
        {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2, "logprobs": 0},
        {"temperature": 0},
        {"max_tokens": 9},  # within a name
        {"stop": ["erty_1"]},  # likewise
        {"stop": ['e,"prop'], "include_stop_str_in_output": True},
        {"min_tokens": 7},
        {"bad_words": [text]},
        {"stop_token_ids": [ord("_") - 33]},  # the tokenizer's first bytes begin with "!"
        {"bad_words": ["y"]},  # which the grammar needs: nothing can come
        {"structured_outputs": {"choice": ["the only one"]}},  # ends where it must
        {"structured_outputs": {"regex": "(ab|cd)(000){1,3}"}, "top_p": 0.9},
        {"structured_outputs": None, "logprobs": 1},
        # What must come ends the text and may not yet, while it is known what would come behind it.
        {"structured_outputs": {"choice": ["abc"]}, "stop_token_ids": [ord("b") - 33], "min_tokens": 2},
    ]
    prompts, params = [], []
    for index, own in enumerate([*kinds, {}, {}, {}]):
        json_of = {"json": names(index % 3 + 1), "disable_any_whitespace": True}
        chosen = {"temperature": (0.7, 1.0)[index % 2], "seed": index, "max_tokens": 60, "structured_outputs": json_of}
        params.append(SamplingParams(**chosen | own))
        prompts.append({"prompt_token_ids": [(7 * index + at % 4) % vocab_size for at in range(2 + index)]})
    return prompts, params


def test_what_a_grammar_leaves_no_choice_comes_at_once(engines, thorough, monkeypatch):
    """The same tokens in fewer steps: alone, in a crowd, preempted, cut within a run, beside requests with guesses."""
    monkeypatch.setattr(structured_module, "_MASK_SECONDS", 60.0)  # a mask that is late costs no steps
    plain, drafting = engines
    prompts, params = forced_workload(257)
    expected = plain.generate(prompts, params, use_tqdm=False)
    ends = [(each.outputs[0].finish_reason, each.outputs[0].stop_reason) for each in expected]
    assert ends[3][0] == "length" and ends[4] == ("stop", "erty_1") and ends[8] == ("stop", ord("_") - 33)
    for index in (9, 13):
        assert ends[index][0] == "error" and "no token is allowed by structured_outputs" in ends[index][1]
    drafts = drafting.core.engine.extensions.by_name["drafts"].stats
    for width in (2, 4, 8, None) if thorough else (8, None):
        force(drafting, width)
        drafting.reset_prefix_cache()
        before = drafts.num_forced
        assert_same(drafting.generate(prompts, params, use_tqdm=False), expected)
        assert drafts.num_forced - before > 100 or width is None
    force(drafting, 8)
    for index in range(len(prompts)) if thorough else (0, 4, 10):
        found, steps = [], []
        for llm in engines:
            before = llm.core.engine.stats.num_steps
            found.append(llm.generate(prompts[index], params[index], use_tqdm=False))
            steps.append(llm.core.engine.stats.num_steps - before)
        assert_same(found[1], found[0])
        assert_same(found[1], expected[index : index + 1])
        # Four tokens a step at most, and of each run the first one, which is sampled before it is known what it is.
        assert steps[1] < 0.6 * steps[0] or params[index].max_tokens == 9
    metrics = {metric.name: metric.value for metric in drafting.get_metrics()}
    assert metrics["jaxengine:forced_tokens"] == drafts.num_forced
    assert metrics["jaxengine:compilations_since_ready"] == 0
    assert drafting.core.engine.scheduler.num_free_pages == 40


def test_traces_go_through_grammars(engines, monkeypatch):
    """With what must come and drafts that have masks, behind reasoning, and up to the end of a text."""
    monkeypatch.setattr(structured_module, "_MASK_SECONDS", 60.0)
    plain, drafting = engines
    prompts, params = guided_workload(1.0)
    params = [each.clone_with(logprobs=0) for each in params]
    expected = plain.generate(prompts, params, use_tqdm=False)
    traces = [each.outputs[0].token_ids for each in expected]
    changes = [{"seed": 50 + index, "trace_decode_token_ids": own or None} for index, own in enumerate(traces)]
    asked = [each.clone_with(**own) for each, own in zip(params, changes, strict=True)]
    for llm in engines:
        force(drafting, 8)
        for one, other in zip(llm.generate(prompts, asked, use_tqdm=False), expected, strict=True):
            if other.outputs[0].finish_reason in ("stop", "length"):
                assert one.outputs[0].token_ids == other.outputs[0].token_ids
                np.testing.assert_allclose(scores(one)[1], scores(other)[1], atol=1e-4)
    wrong = {"structured_outputs": {"regex": "[ab]{9}"}, "trace_decode_token_ids": [97 - 33, 98 - 33, 99 - 33]}
    behind = wrong | {"structured_outputs": {"regex": "[ab]{9}", "reasoning_end": "b"}}
    for own, said in ((wrong, "token 66 .*after 2 tokens"), (behind, "token 66 .*after 0 tokens")):
        with pytest.raises(RequestError, match="structured_outputs cannot be used: it does not allow " + said):
            drafting.generate([{"prompt_token_ids": [65]}], SamplingParams(**own), use_tqdm=False)


def guided_workload(temperature: float):
    """Grammars that leave a choice, behind prompts that say what comes, some of it, or something else."""
    spoken = '{"property_0":true,"property_1":false}'
    kinds = [
        ("ab" * 4, "[ab]{30}", {"logit_bias": {ord("a") - 33: 60.0}, "logprobs": 2}),  # all guesses are right
        ("abc", "([ab]{5}[cd]){5}", {"logit_bias": {ord("a") - 33: 60.0, ord("c") - 33: 60.0}}),  # cut by the grammar
        ("0123" * 3, "[0-9]{24}", {"logprobs": 1}),  # few are right
        (spoken + spoken[:2], None, {"logprobs": 0}),  # the guess is what must come, and goes on
        ('{"prop{"prop', None, {"penalties": None}),  # it is not
        ("a0b0a0", "a(0000b|0000c)[ab]{8}", {"stop": ["ab"], "include_stop_str_in_output": True}),
        ("ab" * 4, "[ab]{30}", {"bad_words": ["ab"]}),  # no guesses
        (spoken, None, {"bad_words": ["y"]}),  # what must come may not
        ("ab" * 4, None, {"structured_outputs": None}),
        ("ab" * 4, None, {"structured_outputs": {"regex": "[ab]{30}", "reasoning_end": "b"}}),
    ]
    prompts, params = [], []
    for index, (prompt, regex, own) in enumerate(kinds * 2):
        own = own | {"repetition_penalty": 1.2, "frequency_penalty": 0.1} if own.pop("penalties", 1) is None else own
        grammar = {"regex": regex} if regex else {"json": names(2), "disable_any_whitespace": True}
        chosen = {"temperature": temperature, "seed": index, "max_tokens": 38, "structured_outputs": grammar}
        params.append(SamplingParams(**chosen | own))
        prompts.append({"prompt_token_ids": [ord(char) - 33 for char in prompt[: 20 + index]]})
    return prompts, params


@pytest.mark.parametrize(
    "temperature", [0.7, *(pytest.param(each, marks=pytest.mark.thorough("as 0.7")) for each in (0.0, 1.0))]
)
def test_guesses_under_a_grammar(engines, temperature, monkeypatch):
    """The same tokens: in a crowd that is preempted, alone in fewer steps, and where masks of guesses do not come."""
    monkeypatch.setattr(structured_module, "_MASK_SECONDS", 60.0)  # a mask that is late costs no steps
    plain, drafting = engines
    prompts, params = guided_workload(temperature)
    expected = plain.generate(prompts, params, use_tqdm=False)
    stats, drafts = drafting.core.engine.stats, drafting.core.engine.extensions.by_name["drafts"].stats
    force(drafting, 8)
    drafting.reset_prefix_cache()
    assert_same(drafting.generate(prompts, params, use_tqdm=False), expected)
    for index, most in ((0, 0.6), (1, 0.75), (3, 0.6)):  # timing moves a few steps
        steps, tokens = stats.num_steps, drafts.num_tokens
        found = drafting.generate(prompts[index], params[index], use_tqdm=False)
        assert_same(found, expected[index : index + 1])
        assert stats.num_steps - steps < most * len(found[0].outputs[0].token_ids)
        assert drafts.num_tokens > tokens
    rng, guess, take = np.random.default_rng(2), Drafts.of_newest, GrammarWorker.take

    def cut(each):
        return each._replace(guessed=each.guessed[: rng.integers(3)]) if isinstance(each, NextMask) else each

    monkeypatch.setattr(Drafts, "of_newest", lambda *given: guess(*given) if rng.random() < 0.7 else None)
    monkeypatch.setattr(GrammarWorker, "take", lambda self: [*map(cut, take(self))])
    assert_same(drafting.generate(prompts, params, use_tqdm=False), expected)
    assert {each.name: each.value for each in drafting.get_metrics()}["jaxengine:compilations_since_ready"] == 0


@pytest.mark.thorough("what must come comes above, beside guesses; an engine more")
def test_a_grammar_needs_no_guesses(engines, executables_dir, monkeypatch):
    """A method that guesses nothing: what must come comes at once, other requests take steps of one token."""
    monkeypatch.setattr(structured_module, "_MASK_SECONDS", 60.0)
    plain = engines[0]
    options = OPTIONS | {"model": plain.core.config.model, "compile_cache_dir": executables_dir}
    forcing = LLM(**options, speculative_config=GRAMMAR)
    assert not forcing.core.runner.extension("drafts").keeps_history
    prompts, params = forced_workload(257)
    force(forcing, 8)
    for index in (0, 10, 12):
        steps = forcing.core.engine.stats.num_steps
        found = forcing.generate(prompts[index], params[index], use_tqdm=False)
        assert_same(found, plain.generate(prompts[index], params[index], use_tqdm=False))
        steps, count = forcing.core.engine.stats.num_steps - steps, len(found[0].outputs[0].token_ids)
        assert steps < 0.75 * count if params[index].structured_outputs else steps >= count
    assert_same(forcing.generate(prompts, params, use_tqdm=False), plain.generate(prompts, params, use_tqdm=False))
    metrics = {metric.name: metric.value for metric in forcing.get_metrics()}
    assert metrics["jaxengine:forced_tokens"] > 100 and metrics["jaxengine:compilations_since_ready"] == 0
    assert metrics["vllm:spec_decode_num_draft_tokens"] == 0


def test_steps_without_drafts_are_the_same_programs(engines):
    plain, drafting = (llm.core.runner.stages[0] for llm in engines)

    def text(stage, bucket):
        program = stage.programs.forward(bucket, stage.params, stage._kv_shapes)
        return jax.jit(program.function, donate_argnums=program.donate).lower(*program.arguments).as_text()

    buckets = list(plain.programs.packer.buckets)
    assert buckets == [bucket for bucket in drafting.programs.packer.buckets if bucket.width == 1]
    for bucket in buckets:
        assert text(plain, bucket) == text(drafting, bucket)
    assert text(drafting, drafting.programs.packer.buckets.wide[0]) != text(plain, buckets[0])
    assert "drafts" not in engines[0].core.runner.extensions
    assert not any("verify" in name for name, _ in plain._epilogues)


@pytest.mark.thorough("a minute of compiling")
@pytest.mark.parametrize("family", FAMILIES)
def test_families(family, executables_dir):
    options = OPTIONS | {"model": str(checkpoint(family)), "compile_cache_dir": executables_dir}
    options |= {"load_format": "auto", "skip_tokenizer_init": True, "num_gpu_blocks_override": 60}
    plain = LLM(**options)
    for count in (1, 3, 7):
        drafting = LLM(**options, speculative_config=DRAFTS | {"num_speculative_tokens": count})
        force(drafting, 8 if count == 7 else None)
        for temperature in (0.0, 0.7, 1.0):
            prompts, params = workload(temperature, 100, text=False)
            expected = plain.generate(prompts, params, use_tqdm=False)
            assert_same(drafting.generate(prompts, params, use_tqdm=False), expected)
        assert sum(num_accepted(drafting)) > 10


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"speculative_config": 3}, "a dict of its fields"),
        ({"speculative_config": {"method": "ngram"}}, "num_speculative_tokens is not given"),
        ({"speculative_config": {"num_speculative_tokens": 2}}, "no method"),
        (
            {"speculative_config": {"method": "medusa", "num_speculative_tokens": 2}},
            "'medusa'; give one of 'ngram'",
        ),
        ({"speculative_config": DRAFTS | {"model": "x"}}, "model is 'x', and 'ngram' has no model"),
        (
            {"speculative_config": DRAFTS | {"num_speculative_tokens": 16}},
            "tokens is 16; allowed: 1 to 15",
        ),
        ({"speculative_config": DRAFTS | {"prompt_lookup_min": 4}}, "at most prompt_lookup_max, 3"),
        ({"speculative_config": DRAFTS | {"prompt_lookup_max": True}}, "prompt_lookup_max is True"),
        ({"speculative_config": DRAFTS | {"top": 1}}, "has no 'top'; it has method, num_speculative_tokens"),
        *(
            ({"speculative_config": named | DRAFTS | {name: value} | named}, f"{name} is {value!r}, and 'ngram' has no")
            for name, value in (("revision", "main"), ("draft_tensor_parallel_size", 1))
            for named in ({"model": "[ngram]"}, {})
        ),
        (
            {"speculative_config": {"method": "grammar", "model": "[ngram]"}},
            r"model is '\[ngram\]', and 'grammar' has no model",
        ),
        ({"speculative_model": "[ngram]"}, "num_speculative_tokens is not given"),
        ({"speculative_model": "[ngram]", "speculative_config": DRAFTS}, "given together with speculative_config"),
        ({"num_speculative_tokens": 3, "spec_tokens": 4}, "given twice"),
    ],
)
def test_bad_options_are_refused(options, said):
    with pytest.raises(ConfigError, match=said) as error:
        EngineConfig.from_options(**options)
    assert error.value.param.partition(".")[0] in options


def test_flat_options_are_the_same():
    flat = EngineConfig.from_options(speculative_model="[ngram]", num_speculative_tokens=4)
    assert flat.speculative_config == SpeculativeConfig("ngram", 4, 3, 2)
    assert flat.speculative_config.widths == (2, 4, 5)
    read = SpeculativeConfig.read({"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 4})
    assert read == SpeculativeConfig("ngram", 2, 4, 4) and read.widths == (2, 3)


@pytest.mark.parametrize(
    "chosen",
    [
        {"method": "ngram", "prompt_lookup_max": 4},
        {"method": "mtp"},
        {"method": "mtp", "model": "org/layer"},
        {"method": "draft_model", "model": "org/small", "draft_tensor_parallel_size": 1},
        {"method": "eagle3", "model": "org/head", "streams": (2, 16, 29)},
    ],
)
def test_options_go_from_process_to_process(chosen):
    config = EngineConfig(speculative_config=chosen | {"num_speculative_tokens": 2})
    assert EngineConfig(**json.loads(json.dumps(dataclasses.asdict(config)))) == config


def test_models_and_engines_without_drafts_say_why(engines):
    model = engines[0].core.inputs.model_config
    for options, said in WITHOUT:
        with pytest.raises(ConfigError, match=said):
            EngineConfig(speculative_config=DRAFTS, **options).resolved(model, PLATFORMS["cpu"])
    with pytest.raises(ConfigError, match="without a tokenizer no request has a grammar"):
        EngineConfig(speculative_config=GRAMMAR, skip_tokenizer_init=True).resolved(model, PLATFORMS["cpu"])
    model = read_folder(checkpoint("qwen3_next"))
    for options, said in OF_STATES:
        with pytest.raises(ConfigError, match=said):
            EngineConfig(speculative_config=DRAFTS, **options).resolved(model, PLATFORMS["cpu"])
