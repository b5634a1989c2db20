"""Command lines as vLLM's parser reads them: spelling, dotted keys, help about a word."""

from __future__ import annotations

import dataclasses
import json
import shlex

import pytest

from jaxengine.commands.cli import build_parser
from jaxengine.config.base.flexible_parser import GROUPS, FlexibleArgumentParser
from jaxengine.config.engine_args import EngineArgs
from jaxengine.config.engine_config import EngineConfig
from tests.jaxengine.config.test_engine_flags import parse
from tests.tables import each_row

NGRAM = {"method": "ngram", "num_speculative_tokens": 2}

PARSER = build_parser()


@each_row(
    "line,option,value",
    [
        (
            "--speculative-config.method ngram --speculative_config.num_speculative_tokens=2",
            "speculative_config",
            NGRAM,
        ),
        ("-sc.method ngram -sc.num-speculative-tokens 2", "speculative_config", NGRAM),
        ("-sc.method ngram --speculative-config '{\"num_speculative_tokens\": 2}'", "speculative_config", NGRAM),
        ('--speculative-config=\'{"method": "mtp", "num_speculative_tokens": 2}\' -sc.method ngram', None, NGRAM),
        ("--compilation-config.mode 3", "compilation_config", {"mode": 3}),
        ("-cc.mode=3 -cc.prefill_sizes+ 4 -cc.prefill_sizes+=8", None, {"mode": 3, "prefill_sizes": [4, 8]}),
        ("-O.level=3", "compilation_config", {"level": 3}),
        ("-cc.cudagraph_capture_sizes [1,2]", "compilation_config", {"cudagraph_capture_sizes": [1, 2]}),
        ("--limit-mm-per-prompt.image.count 2", "limit_mm_per_prompt", {"image": {"count": 2}}),
        ("--structured-outputs-config.backend xgrammar", "structured_outputs_config", {"backend": "xgrammar"}),
        ("--hf-overrides.architectures+ A", "hf_overrides", {"architectures": ["A"]}),
        ("--override-generation-config.top_p 0.5", "override_generation_config", {"top_p": 0.5}),
        ("--max_model_len 16", "max_model_len", 16),
        ("--disable-prefix-caching", "enable_prefix_caching", False),
        ("--disable_prefix_caching", "enable_prefix_caching", False),
        ("--enable-hybrid-kv-cache-manager", "disable_hybrid_kv_cache_manager", False),
        ("-O3", "optimization_level", 3),
        ("-cc 3", "compilation_config", 3),
    ],
)
def test_dotted_keys_make_one_dict(line, option, value):
    for command in ("serve a/b", "bench throughput", "generate"):
        given = parse(f"{command} {line}")
        given.pop("model", None)
        found = next(iter(given.values()))
        assert len(given) == 1 and option in (None, *given)
        if isinstance(found, str):  # read by the option's dataclass
            found = json.loads(found)
        assert found == value


@each_row(
    "line,said",
    [
        ("--speculative-config.method", "expected one argument"),
        ("--speculative-konfig.method ngram", "unrecognized arguments"),
        ("--disable-enforce-eager", "unrecognized arguments"),
        ("--speculative-config.a 1 --speculative-config.a.b 2", "a has a value of its own"),
        ("--speculative-config.a 1 --speculative-config.a+ 2", "a has a value that is not a list"),
        ("--help=nothing-like-it", "--help=listgroup has the groups"),
    ],
)
def test_a_wrong_word_is_an_error(line, said, capsys):
    with pytest.raises(SystemExit) as end:
        EngineArgs.add_cli_args(FlexibleArgumentParser()).parse_args(line.split())
    assert end.value.code == 2
    assert said in capsys.readouterr().err


def test_words_after_two_hyphens_stay():
    parser = FlexibleArgumentParser()
    parser.add_argument("words", nargs="*")
    assert parser.parse_args(["--", "--a_b.c", "--help=max"]).words == ["--a_b.c", "--help=max"]


@each_row(
    "line,there,not_there",
    [
        ("serve --help=max", "--max-num-seqs", "--tensor-parallel-size"),
        ("serve --help=max_model_len", "--max-model-len", "--max-num-seqs"),
        ("serve --help=ModelConfig", "--tokenizer-revision", "--block-size"),
        ("serve --help=cacheconfig", "--block-size", "--tokenizer-revision"),
        ("serve --help=listgroup", "SchedulerConfig: 11", "--block-size"),
        ("bench latency --help=all", "--block-size", "SchedulerConfig"),
        ("serve --help=cpu-offload-gb", "without an effect here, or refused: --cpu-offload-gb", "--block-size"),
    ],
)
def test_help_about_a_word(line, there, not_there, capsys):
    with pytest.raises(SystemExit) as end:
        PARSER.parse_args(shlex.split(line))
    text = capsys.readouterr().out
    assert end.value.code == 0 and there in text and not_there not in text


def test_every_engine_option_is_in_one_group():
    grouped = [name for names in GROUPS.values() for name in names.split()]
    assert sorted(grouped) == sorted(field.name for field in dataclasses.fields(EngineConfig))
