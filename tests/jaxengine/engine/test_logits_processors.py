"""A user's own logits processors: tokens are those that numpy predicts from the raw logits, in any batch, with drafts,
and nothing changes for requests and engines without them.
"""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jaxengine import LLM, Column, ConfigError, LogitsProcessor, RequestError, SamplingParams
from jaxengine.config.base.platforms import PLATFORMS
from jaxengine.config.engine_config import EngineConfig
from jaxengine.config.features.logits_processors import processors_digest, read_processors, source_file
from jaxengine.models.registry import read_folder

TINY = Path(__file__).resolve().parents[2] / "fixtures" / "models" / "llama"
OPTIONS = {
    "max_model_len": 64,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 16,
    "num_gpu_blocks_override": 32,
    "skip_tokenizer_init": True,
    "dtype": "float32",
    "max_logprobs": -1,
    "logprobs_mode": "raw_logits",
    "disable_log_stats": True,
    "compilation_config": {"cudagraph_capture_sizes": [], "prefill_sizes": []},
}
ACCEPTED = "vllm:spec_decode_num_accepted_tokens"
# Parameters that every engine takes.
OF_ALL = "ngram_size, window_size, whitelist_token_ids"
PROMPT = {"prompt_token_ids": [5, 6, 7, 8]}


class Favour(LogitsProcessor):
    """Adds to the logits of every third token."""

    columns = {
        "favour": Column(0.0, "what is added", low=-10, high=10),
        "third": Column(0, "which third", values=(0, 1, 2)),
        "negate": Column(False, "subtract instead"),
    }

    @staticmethod
    def process(logits, columns, vocab):
        added = jnp.where(columns["negate"], -columns["favour"], columns["favour"])
        return logits + jnp.where(vocab.token_ids % 3 == columns["third"], added, 0.0)


class MaxRepeats(LogitsProcessor):
    """Forbids tokens that are in the output often."""

    columns = {"max_repeats": Column(0, "times", low=0, high=1000)}
    uses_counts = True

    @staticmethod
    def process(logits, columns, vocab):
        limit = columns["max_repeats"]
        return jnp.where((limit > 0) & (vocab.output_counts >= limit), -jnp.inf, logits)


LIMIT = 1.0


class Limited(LogitsProcessor):
    """Keeps logits under a value of this module."""

    columns = {"limited": Column(False, "whether to do so")}

    @staticmethod
    def process(logits, columns, vocab):
        return jnp.where(columns["limited"], jnp.minimum(logits, LIMIT), logits)


def test_values_that_a_processor_reads_are_in_the_key_of_programs(monkeypatch):
    names = read_processors([Limited])
    before = processors_digest(names)
    assert before == processors_digest(names)
    monkeypatch.setitem(globals(), "LIMIT", 2.0)
    assert processors_digest(names) not in (before, None)
    monkeypatch.setitem(globals(), "LIMIT", iter("a"))
    assert processors_digest(names) is None


@pytest.fixture(scope="module")
def options(executables_dir):
    return OPTIONS | {"compile_cache_dir": executables_dir}


@pytest.fixture(scope="module")
def llm(options):
    return LLM(str(TINY), logits_processors=[Favour, MaxRepeats], **options)


@pytest.fixture(scope="module")
def plain_llm(options):
    return LLM(str(TINY), **options)


def greedy(extra_args=None, **more) -> SamplingParams:
    chosen = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True, "logprobs": -1}
    return SamplingParams(extra_args=extra_args, **chosen | more)


def generate(llm, params: list[SamplingParams]) -> list:
    return [output.outputs[0] for output in llm.generate([PROMPT] * len(params), params, use_tqdm=False)]


def predicted(completion, favour=0.0, third=0, negate=False, max_repeats=0) -> list[int]:
    """The best token at each position by numpy, from the raw logits that the engine reports."""
    counts, found = np.zeros(len(completion.logprobs[0]), np.int64), []
    for position, token in zip(completion.logprobs, completion.token_ids, strict=True):
        logits = np.array([position[each].logprob for each in range(len(counts))], np.float32)
        logits[third::3] += np.float32(-favour if negate else favour)
        if max_repeats:
            logits[counts >= max_repeats] = -np.inf
        found.append(int(logits.argmax()))
        counts[token] += 1
    return found


CASES = [
    {"favour": 2.5},
    {"favour": 2.5, "third": 2},
    {"favour": 10.0, "negate": True, "third": 0},
    {"max_repeats": 1},
    {"max_repeats": 2, "favour": 1.5, "third": 1},
]


def test_tokens_are_those_that_numpy_predicts_in_one_batch(llm, plain_llm):
    (plain,) = generate(plain_llm, [greedy()])
    completions = generate(llm, [greedy(), *map(greedy, CASES)])
    assert completions[0].token_ids == plain.token_ids  # beside rows that use processors
    changed = [completion.token_ids != plain.token_ids for completion in completions[1:]]
    assert all(changed), changed
    for case, completion in zip(CASES, completions[1:], strict=True):
        assert completion.token_ids == predicted(completion, **case), case
    # A slot that had parameters gives them up.
    assert [each.token_ids for each in generate(llm, [greedy()] * 5)] == [plain.token_ids] * 5


def test_seeds_reproduce_and_penalties_follow(llm, plain_llm):
    drawn = greedy({"max_repeats": 1}, temperature=1.0, seed=7)
    (alone,), crowd = generate(llm, [drawn]), generate(llm, [greedy({"favour": 9.0}), drawn, greedy()])
    assert alone.token_ids == crowd[1].token_ids and len(set(alone.token_ids)) == len(alone.token_ids)
    penalised = {"presence_penalty": 1.0, "repetition_penalty": 1.3}
    ours, theirs = generate(llm, [greedy(**penalised)]), generate(plain_llm, [greedy(**penalised)])
    assert ours[0].token_ids == theirs[0].token_ids


def test_drafts_change_nothing(llm, options):
    drafts = {"method": "ngram", "num_speculative_tokens": 1, "prompt_lookup_min": 1, "prompt_lookup_max": 2}
    drafting = LLM(str(TINY), logits_processors=[Favour, MaxRepeats], speculative_config=drafts, **options)
    params = [greedy(case, max_tokens=24) for case in [{"favour": 10.0}, *CASES]]
    assert [each.token_ids for each in generate(drafting, params)] == [each.token_ids for each in generate(llm, params)]
    accepted = [each for each in drafting.get_metrics() if each.name == ACCEPTED]
    assert sum(each.value for each in accepted) > 0


@pytest.mark.parametrize(
    ("extra_args", "said"),
    [
        ({"favour": 11}, "extra_args.favour must be a number from -10 to 10, got 11"),
        ({"favour": float("nan")}, "extra_args.favour must be a number from -10 to 10, got nan"),
        ({"third": 3}, "extra_args.third must be one of 0, 1, 2, got 3"),
        ({"third": 1.0}, "extra_args.third must be one of 0, 1, 2, got 1.0"),
        ({"negate": 1}, "extra_args.negate must be True or False, got 1"),
        ({"max_repeat": 1}, f"extra_args has 'max_repeat'; allowed: {OF_ALL}, favour, third, negate, max_repeats"),
    ],
)
def test_a_bad_value_is_one_error(llm, extra_args, said):
    with pytest.raises(RequestError) as caught:
        generate(llm, [greedy(extra_args)])
    assert str(caught.value) == said


def test_an_engine_without_processors_has_no_such_parameters(plain_llm):
    with pytest.raises(RequestError, match=f"has 'favour'; allowed: {OF_ALL}; the engine has no logits_processors"):
        generate(plain_llm, [greedy({"favour": 1.0})])


def test_programs_without_processors_are_the_same_and_the_key_tells_sources(llm, plain_llm, tmp_path, monkeypatch):
    def programs(llm):
        return llm.core.runner.last.programs

    assert "logits_processors" not in {each.name for each in programs(plain_llm).extensions}
    assert programs(llm).description.startswith(programs(plain_llm).description[:-1])
    assert str(processors_digest(llm.core.config.logits_processors)) in programs(llm).description
    monkeypatch.syspath_prepend(tmp_path)
    digests = set()
    for added in ("1.0", "2.0", "2.0  # again"):
        (tmp_path / "own_processor.py").write_text(_SOURCE.format(added=added))
        sys.modules.pop("own_processor", None)
        own = EngineConfig.from_options(logits_processors=["own_processor:Own"]).logits_processors
        assert own == ("own_processor:Own",)
        digests.add(processors_digest(own))
    assert len(digests) == 2 and None not in digests  # a comment is no change


_SOURCE = textwrap.dedent("""
    from jaxengine import Column, LogitsProcessor

    class Own(LogitsProcessor):
        columns = {{"own": Column(0.0)}}

        @staticmethod
        def process(logits, columns, vocab):
            return logits + {added}
""")


def test_a_class_without_a_file_is_not_kept_on_disk():
    class Local(LogitsProcessor):
        columns = {"local": Column(0.0)}

        @staticmethod
        def process(logits, columns, vocab):
            return logits

    assert source_file(Local) is None and source_file(Favour) == Path(__file__)
    config = EngineConfig.from_options(
        model=str(TINY), logits_processors=[Local], **OPTIONS | {"compile_cache_dir": "x"}
    )
    assert config.resolved(read_folder(TINY), PLATFORMS["cpu"]).compile_cache_dir == ""


class Twice(Favour):
    """Has the columns of another one."""


class Shapeless(LogitsProcessor):
    columns = {"shapeless": Column(1.0)}

    @staticmethod
    def process(logits, columns, vocab):
        return logits[:, 0]


@pytest.mark.parametrize(
    ("processors", "said"),
    [
        ([int], "logits_processors is <class 'int'>; allowed: subclasses of jaxengine.LogitsProcessor"),
        ([Favour, Twice], "Favour and Twice both have the column 'favour'"),
        (
            ["no_such_module:Own"],
            "logits_processors has 'no_such_module:Own', which cannot be imported: No module named",
        ),
        (["jaxengine:LLM"], "logits_processors is 'jaxengine:LLM'; allowed: names of subclasses of"),
        ([LogitsProcessor], "LogitsProcessor.columns is None; it must be a dict from name to Column"),
    ],
)
def test_bad_processors_are_refused(processors, said):
    with pytest.raises(ConfigError) as caught:
        LLM(str(TINY), logits_processors=processors, **OPTIONS)
    assert str(caught.value).startswith(said)


def test_a_result_of_another_shape_is_refused():
    with pytest.raises(ValueError, match=r"Shapeless.process must return float32\[\d+, 128\], got float32\[\d+\]"):
        LLM(str(TINY), logits_processors=[Shapeless], **OPTIONS)
