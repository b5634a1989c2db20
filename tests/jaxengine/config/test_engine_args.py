"""EngineArgs, as programs written for vLLM use it: keyword options, assignment, dicts, and a command line."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from jaxengine.config.base.flexible_parser import FlexibleArgumentParser
from jaxengine.config.engine_args import EngineArgs, engine_options
from jaxengine.config.engine_config import ConfigError, EngineConfig
from jaxengine.config.execution.compilation_config import CompilationConfig, CompilationLevel, CompilationMode

OPTIONS = {
    "max_model_len": "4k",
    "limit_mm_per_prompt": {"image": 2},
    "speculative_config": {"method": "ngram", "num_speculative_tokens": 3},
    "compilation_config": {"level": 3},
    "enable_lora": True,
    "pooler_config": {"task": "embed"},
    "structured_outputs_config": {"lenient": True},
    "capture_layers": [0, -1],
}


def test_vllms_other_options_are_taken():
    assert engine_options(EngineArgs("m", trust_remote_code=True, seed=3)) == engine_options(EngineConfig("m", seed=3))
    with pytest.raises(ConfigError, match="there is no option 'max_num_seq'; did you mean max_num_seqs"):
        EngineArgs("m", max_num_seq=3)


def test_a_dict_of_it_makes_the_same_options():
    wanted = EngineConfig.from_options(model="m", **OPTIONS)
    args = EngineArgs("m", **OPTIONS)
    assert EngineConfig.from_options(**dataclasses.asdict(args)) == wanted
    assert EngineConfig.from_options(**dataclasses.asdict(args) | {"seed": 0}) == wanted
    assert EngineConfig.from_options(**engine_options(args)) == wanted
    assert dataclasses.replace(args, seed=4).seed == 4


def test_options_may_be_assigned():
    args = EngineArgs("m")
    args.tensor_parallel_size, args.limit_mm_per_prompt, args.swap_space = 2, {"image": 1}, 4
    args.task = "embed"
    config = EngineConfig.from_options(**engine_options(args))
    assert (config.tensor_parallel_size, config.limit_mm_per_prompt) == (2, {"image": {"count": 1}})
    assert (config.runner, config.convert) == ("pooling", "embed")
    with pytest.raises(ConfigError, match="did you mean max_num_seqs"):
        args.max_num_seq = 3
    args.seed = "a"
    with pytest.raises(ConfigError, match="seed is 'a'"):
        EngineConfig.from_options(**engine_options(args))


def test_options_come_from_a_programs_own_command_line():
    parser = FlexibleArgumentParser()
    parser.add_argument("--max_tokens", type=int, default=5)
    parser = EngineArgs.add_cli_args(parser)
    parser.set_defaults(model="org/name")
    plain = vars(parser.parse_args([]))
    assert plain.pop("max_tokens") == 5
    assert (plain["tensor_parallel_size"], plain["trust_remote_code"], plain["seed"]) == (1, False, 0)
    assert EngineConfig.from_options(**plain) == EngineConfig("org/name")
    args = parser.parse_args(
        ["--max-tokens", "7", "--max_model_len", "1k", "-tp", "2", "--trust-remote-code", "--no-async-scheduling"]
    )
    wanted = EngineArgs("org/name", max_model_len=1000, tensor_parallel_size=2, async_scheduling=False)
    assert (args.max_tokens, EngineArgs.from_cli_args(args)) == (7, wanted)


def test_compilation_modes_have_vllms_names():
    whole = CompilationConfig(mode=3)
    for value in (
        CompilationConfig(level=CompilationLevel.PIECEWISE),
        CompilationConfig(mode=CompilationMode.VLLM_COMPILE),
        CompilationConfig(mode=3, level=3),
        CompilationConfig.read({"level": "PIECEWISE"}),
        CompilationConfig.read({"mode": "VLLM_COMPILE"}),
        CompilationConfig.read(CompilationMode.VLLM_COMPILE),
        dataclasses.replace(whole),
    ):
        assert value == whole and type(value.mode) is int
    assert CompilationConfig(level=CompilationLevel.DYNAMO_ONCE).mode == 2
    assert type(CompilationConfig(mode=np.int64(1)).mode) is int
    for wrong in ({"mode": 4}, {"mode": 3, "level": 2}, {"mode": True}, {"mode": "FULL"}, {"mode": 1.0}, {"mode": [1]}):
        with pytest.raises(ConfigError, match="compilation_config"):
            CompilationConfig(**wrong)
