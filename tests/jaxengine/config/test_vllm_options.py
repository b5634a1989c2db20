"""Options of vLLM: every name of its EngineArgs is known, and says what it means here."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import shlex
import ssl
from pathlib import Path
from typing import Any

import pytest

from jaxengine.commands.cli import build_parser
from jaxengine.config import vllm_options
from jaxengine.config.command_line import flag_of, given_options
from jaxengine.config.engine_config import ConfigError, EngineConfig
from jaxengine.config.engine_flags import near_flag, with_config_file
from jaxengine.config.vllm_options import ELSEWHERE, HARMLESS, NOT_BUILT
from jaxengine.requests.params.sampling_params import SamplingParams
from jaxengine.server.base.options import ServerConfig
from tests.tables import each_row

FIXTURES = Path(__file__).parents[2] / "fixtures"
# Recorded from the fields of vllm.engine.arg_utils.EngineArgs and AsyncEngineArgs.
NAMES = json.loads((FIXTURES / "vllm_engine_args.json").read_text())["names"]
# And from those of vllm.entrypoints.openai.cli_args.FrontendArgs, with what `vllm serve` has besides.
SERVER_NAMES = json.loads((FIXTURES / "vllm_server_args.json").read_text())["names"]
PARSER = build_parser()
OF_ITS_PROCESSES = {"_api_process_count", "_api_process_rank"}


@each_row("name", [name for name in NAMES if name not in OF_ITS_PROCESSES])
def test_no_name_of_vllm_is_unknown(name):
    """A value that no option takes shows what is said of the name."""
    try:
        EngineConfig.from_options(**{name: {"no": object()}})
    except ConfigError as error:
        assert "there is no option" not in str(error)
        assert error.param.partition(".")[0] in (name, "compilation_config")


@each_row("name", SERVER_NAMES)
def test_no_flag_of_vllms_server_is_unknown(name, tmp_path, monkeypatch):
    """It is taken, or refused by its name."""
    flag = "--" + name.replace("_", "-")
    parser, value = PARSER, {"chat_template": "x", "config": str(tmp_path / "options.yaml")}.get(name, "7")
    (tmp_path / "options.yaml").write_text("port: 0")
    for words in ([flag, value], [flag]):
        try:
            args = parser.parse_args(with_config_file(["serve", "model", *words], parser))
        except SystemExit:  # a switch with a value, or an option without one
            continue
        try:
            ServerConfig(**given_options(args, ServerConfig))
            EngineConfig.from_options(**given_options(args, EngineConfig))
        except ConfigError as error:
            assert error.param == name and "there is no option" not in str(error)
        return
    raise AssertionError(f"{flag} is unknown")


def test_each_name_is_in_one_table():
    assert not set(HARMLESS) & set(NOT_BUILT) and not set(ELSEWHERE) & {*HARMLESS, *NOT_BUILT}
    built = {*EngineConfig.__dataclass_fields__, *ServerConfig.__dataclass_fields__} - set(ELSEWHERE)
    assert not {*HARMLESS, *NOT_BUILT} & built - {"served_model_name"}


@each_row("name", sorted(NOT_BUILT))
def test_options_not_built_are_refused_unless_they_ask_for_nothing(name):
    neutral = (None, "", *NOT_BUILT[name])
    for value in neutral:
        EngineConfig.from_options(**{name: value})
    for value in (7, "x", not NOT_BUILT[name][0]):
        if value is not False or NOT_BUILT[name] == (True,):
            with pytest.raises(ConfigError, match="not supported yet; leave it at") as error:
                EngineConfig.from_options(**{name: value})
            assert error.value.param == name


# Flags of recipes (recipes.vllm.ai) about how vLLM computes, none of which can change a token.
@each_row(
    "line",
    [
        "--mamba-ssm-cache-dtype float32 --mamba-cache-mode align --mamba-backend triton",
        "--enable-flashinfer-autotune --kernel-config.enable_flashinfer_autotune=True",
        "--no-enable-flashinfer-autotune --kernel-config.enable_flashinfer_autotune False",
        '--kernel-config \'{"moe_backend": "auto", "enable_flashinfer_autotune": false}\'',
        "--attention_config.use_fp4_indexer_cache=False",
        "--load-format fastsafetensors --skip-mm-profiling --swap-space 16",
        '--compilation-config \'{"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}\' -cc.mode=VLLM_COMPILE',
        "--chat-template-content-format=string",
        '-sc \'{"method": "mtp", "num_speculative_tokens": 3, "max_model_len": "16384", "enforce_eager": true}\'',
        "-sc.method mtp -sc.num_speculative_tokens 3 -sc.draft_sample_method probabilistic",
    ],
)
def test_flags_of_recipes_are_taken(line):
    EngineConfig.from_options(**given_options(PARSER.parse_args(["serve", "m", *shlex.split(line)]), EngineConfig))


@each_row(
    ("line", "name"),
    [
        ("--kernel-config.moe_backend=triton", "kernel_config"),
        ("--attention_config.use_fp4_indexer_cache=True", "attention_config"),
        ("--mamba-ssm-cache-dtype float16", "mamba_ssm_cache_dtype"),
        ("--expert-placement-strategy '{\"a\": false}'", "expert_placement_strategy"),
        ("--chat-template-content-format parts", "chat_template_content_format"),
        ("-sc.method mtp -sc.num_speculative_tokens 3 -sc.rejection_sample_method synthetic", "speculative_config"),
        ("-ac.use_fp4_indexer_cache=True", "attention_config"),
        ("-dpn 1", "data_parallel_rank"),
        ("-dpr 1", "data_parallel_start_rank"),
        ("-dpl 1", "data_parallel_size_local"),
        ("-dpa node0", "data_parallel_address"),
        ("-dpp 29500", "data_parallel_rpc_port"),
        ("-dph", "data_parallel_hybrid_lb"),
        ("-dpe", "data_parallel_external_lb"),
        ("-dpm", "data_parallel_multi_port_external_lb"),
        ("-pcp 2", "prefill_context_parallel_size"),
        ("-r 1", "node_rank"),
        ("--headless", "headless"),
        ("--grpc", "grpc"),
    ],
)
def test_what_would_change_an_answer_is_refused(line, name):
    args = PARSER.parse_args(["serve", "m", *shlex.split(line)])
    with pytest.raises(ConfigError) as error:
        EngineConfig.from_options(**given_options(args, EngineConfig))
    assert error.value.param == name


def test_of_a_dict_of_options_each_is_judged(caplog):
    caplog.set_level(logging.INFO, logger="jaxengine")
    harmless = {"enable_flashinfer_autotune": True, "moe_backend": "auto"}
    EngineConfig.from_options(kernel_config=harmless)
    assert "enable_flashinfer_autotune=True changes nothing here" in caplog.text
    with pytest.raises(ConfigError, match="kernel_config is {'other': 1}, which is not supported yet"):
        EngineConfig.from_options(kernel_config={**harmless, "other": 1})


def test_modes_that_compile_less_are_said_to_change_nothing(caplog):
    caplog.set_level(logging.INFO, logger="jaxengine")
    for value in (1, {"level": 1}, {"mode": "STOCK_TORCH_COMPILE"}):
        caplog.clear()
        EngineConfig.from_options(compilation_config=value)
        assert "compilation_config.mode=1: changes nothing here" in caplog.text
    caplog.clear()
    for wrong in (-1, {"mode": False}, {"mode": 0, "sizes": [1]}):
        with pytest.raises(ConfigError):
            EngineConfig.from_options(compilation_config=wrong)
    assert not caplog.text


def test_vllms_own_code_of_models_is_what_this_engine_has():
    assert EngineConfig.from_options(model_impl="vllm") == EngineConfig()


# Harmless options that take neither a switch nor any text -> values that vLLM takes, and more that it does not.
KINDS_OF_HARMLESS = {
    "data_parallel_backend": (("ray",), ("uni",)),
    "h11_max_header_count": ((256,), (0,)),
    "h11_max_incomplete_event_size": ((1 << 20,), (-1,)),
    "ignore_patterns": (("*.pt", ["a", "b"]), (["a", 1],)),
    "jit_monitor_mode": (("error",), ("ERROR",)),
    "mamba_cache_mode": (("align", "all"), ("some",)),
    "max_parallel_loading_workers": ((2,), (0, 1.5, "2")),
    "max_seq_len_to_capture": ((8192,), (-1,)),
    "optimization_level": ((2, 3), (4, -1, 1.5)),
    "prefix_caching_hash_algo": (("xxhash_cbor",), ("md5",)),
    "pt_load_map_location": (("cpu", {"cuda:1": "cuda:0"}), (["cpu"],)),
    "safetensors_load_strategy": (("lazy", "prefetch"), ("now",)),
    "safetensors_prefetch_block_size": ((1 << 24,), (0,)),
    "safetensors_prefetch_num_threads": ((8,), (0,)),
    "served_model_name": (("a", ["a", "b"]), ([None],)),
    "ssl_cert_reqs": ((ssl.CERT_REQUIRED, 1), (3,)),
    "swap_space": ((4, 0.5), (math.nan, math.inf, -1, "x")),
    "uvicorn_log_level": (("trace",), ("loud",)),
    "watchdog_config": (({"timeout": 5},), (["timeout"],)),
}


@each_row("name", sorted(HARMLESS))
def test_harmless_options_say_what_they_mean_here(name, caplog):
    """And take what vLLM takes."""
    caplog.set_level(logging.INFO, logger="jaxengine")
    switch = (True,), (1, "yes")
    right, wrong = switch if vllm_options.is_switch(name) else KINDS_OF_HARMLESS.get(name, (("given",), (7, ["a"])))
    for value in right:
        caplog.clear()
        assert EngineConfig.from_options(**{name: value}) == EngineConfig()
        assert f"{name}={value!r} changes nothing here: {HARMLESS[name]}" in caplog.text
    caplog.clear()
    for value in (None, False):  # also of what is on in vLLM
        EngineConfig.from_options(**{name: value})
    for value in (*wrong, math.nan, object):
        with pytest.raises(ConfigError, match="; allowed: ") as error:
            EngineConfig.from_options(**{name: value})
        assert error.value.param.partition(".")[0] == name
    assert not caplog.text


@each_row(
    ("option", "fields", "message"),
    [
        ("compilation_config", {"cudagraph_mode": math.nan}, "compilation_config.cudagraph_mode is nan; allowed: text"),
        ("compilation_config", {"use_inductor": "x"}, "use_inductor is 'x'; allowed: True or False"),
        ("compilation_config", {"splitting_ops": "x"}, "splitting_ops is 'x'; allowed: a list"),
        ("compilation_config", {"pass_config": 3}, "pass_config is 3; allowed: a dict"),
        ("compilation_config", {"cudagraph_num_of_warmups": 0.5}, "warmups is 0.5; allowed: a whole number"),
        ("speculative_config", {"max_model_len": "x"}, "speculative_config.max_model_len is 'x'; allowed: a whole"),
        ("speculative_config", {"max_model_len": -5}, "max_model_len is -5; allowed: at least 1"),
        ("speculative_config", {"draft_sample_method": "x"}, "draft_sample_method is 'x'; allowed: greedy, prob"),
        ("speculative_config", {"enforce_eager": 7}, "enforce_eager is 7; allowed: True or False"),
    ],
)
def test_fields_without_an_effect_take_what_vllm_takes(option, fields, message):
    own = {"method": "ngram", "num_speculative_tokens": 2} if option == "speculative_config" else {}
    with pytest.raises(ConfigError, match=message):
        EngineConfig.from_options(**{option: {**own, **fields}})


def nested(kind: type, levels: int = 100_000) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value] if kind is list else {"a": value}
    return value


def endless() -> dict:
    value: dict = {}
    value.update(a=value, b=value)
    return value


def test_what_cannot_be_shown_or_sent_is_refused_in_a_line():
    """By every option, whatever it takes, also those that engines do not have."""
    said = "has more than 64 levels, or a number of thousands of digits; give less"
    for value in (nested(dict), nested(list), endless(), {"a": 10**5000}):
        for cls in (EngineConfig, ServerConfig):
            for field in dataclasses.fields(cls):
                with pytest.raises(ConfigError, match=f"^{field.name} {said}$"):
                    cls(**{field.name: value})
        for name in ("kernel_config", "watchdog_config", "rope_scaling", "unknown"):
            with pytest.raises(ConfigError, match=f"^{name} {said}$"):
                EngineConfig.from_options(**{name: value})


def test_texts_that_look_like_numbers_are_texts():
    args = PARSER.parse_args(["serve", "m", "--code-revision", "007", "--ignore-patterns", "1", "2"])
    assert given_options(args, EngineConfig) == {"model": "m", "code_revision": "007", "ignore_patterns": ["1", "2"]}


@each_row("name", sorted(ELSEWHERE))
def test_options_of_other_commands_name_them(name):
    with pytest.raises(ConfigError, match="it belongs to another command: jaxengine (serve|worker) --"):
        EngineConfig.from_options(**{name: 3})
    EngineConfig.from_options(**{name: None})


@each_row(
    ("options", "message"),
    [
        (
            {"quantization_param_path": "kv.json"},
            "there is no option quantization_param_path; vLLM has removed it: kv_",
        ),
        ({"torch_dtype": "bfloat16"}, "it is called dtype"),
        ({"cpu_offload": 4}, "there is no option 'cpu_offload'; docs/options.md has all of them"),  # no unbuilt one
        ({"kv_cache_dtyp": "fp8"}, "did you mean kv_cache_dtype"),
        ({"calculate_kv_scales": True, "kv_cache_dtype": "fp8", "kv_cache_scales": "unit"}, "give one of them"),
    ],
)
def test_what_is_refused_says_what_to_write(options, message):
    with pytest.raises(ConfigError, match=message) as error:
        EngineConfig.from_options(**options)
    assert error.value.param == next(iter(options))
    EngineConfig.from_options(calculate_kv_scales=True, kv_cache_dtype="fp8", kv_cache_scales="calibrate")


def test_hints_name_only_what_is_built():
    """Each name that is not, misspelt."""
    parser = PARSER
    for name in sorted(vllm_options.WITHOUT_EFFECT):
        with pytest.raises(ConfigError) as error:
            EngineConfig.from_options(**{f"{name}x": 3})
        hint = str(error.value).partition("did you mean ")[2].rstrip("?")
        assert hint not in vllm_options.WITHOUT_EFFECT, name
        flag = near_flag(f"{flag_of(name)}x", ["generate"], parser)
        assert (
            flag is None or flag.removeprefix("--no-").strip("-").replace("-", "_") not in vllm_options.WITHOUT_EFFECT
        )
    assert near_flag("--shutdown-timeot", ["serve"], parser) == "--shutdown-timeout"  # the server's own option
    with pytest.raises(AttributeError) as unknown:
        SamplingParams().logits_processor = 3
    assert "it has 'logits_processors'" not in str(unknown.value)
