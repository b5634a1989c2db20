"""The engine's options on the command line: short forms, a model as a word, vLLM's names, a file of options."""

from __future__ import annotations

import json
import shlex

import pytest

from jaxengine.commands.cli import build_parser, main
from jaxengine.config import vllm_options
from jaxengine.config.command_line import given_options
from jaxengine.config.engine_config import ConfigError, EngineConfig
from jaxengine.config.engine_flags import looks_like_model, with_config_file
from jaxengine.server.base.options import ServerConfig

PARSER = build_parser()


def parse(line: str) -> dict:
    """What a command line gives of the engine's and the server's options."""
    args = PARSER.parse_args(with_config_file(shlex.split(line), PARSER))
    return given_options(args, EngineConfig) | given_options(args, ServerConfig)


@pytest.mark.parametrize("command", ["serve", "chat", "demo", "bench throughput", "bench latency"])
def test_the_model_is_a_word_or_an_option(command):
    assert parse(f"{command} a/b --max-num-seqs 4") == parse(f"{command} --max-num-seqs 4 --model a/b")
    assert parse(f"{command} --max-num-seqs 4 a/b") == {"max_num_seqs": 4, "model": "a/b"}


@pytest.mark.parametrize("command", ["chat", "complete"])
def test_q_is_a_quick_message_where_the_command_takes_one(command):
    args = PARSER.parse_args([command, "a/b", "-q", "Hi"])
    assert args.quick == "Hi" and given_options(args, EngineConfig) == {"model": "a/b"}
    assert parse("serve a/b -q fp8") == {"model": "a/b", "quantization": "fp8"}


def test_check_and_convert_take_the_model_as_a_word():
    assert PARSER.parse_args(["check", "llama-3.1-8b"]).model == "llama-3.1-8b"
    args = PARSER.parse_args(["convert", "a/b", "out"])
    assert (given_options(args, EngineConfig), args.output) == ({"model": "a/b"}, "out")


@pytest.mark.parametrize("line", ["serve a/b --model c/d", "serve --model c/d a/b"])
def test_two_models_are_refused(line, capsys):
    with pytest.raises(SystemExit):
        parse(line)
    assert "the model is given twice" in capsys.readouterr().err


def test_a_word_after_an_unknown_option_is_not_said_to_be_a_second_model_for_certain(capsys):
    with pytest.raises(SystemExit):
        parse("run-batch -i a -o b --model c/d --max-inflight 8")
    assert "as 'c/d' and as '8'; or an option before it does not exist" in capsys.readouterr().err


def test_generate_takes_a_first_word_that_names_a_model(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    assert not looks_like_model(str(folder))
    (folder / "config.json").write_text("{}")
    for word in (str(folder), "a/b", "x.gguf", "Qwen/Qwen3-0.6B"):
        assert looks_like_model(word), word
    for word in ("Once upon a time", "2/3 of it", "either/or, that is", "", "a/b/c", "x" * 5000):
        assert not looks_like_model(word), word


def test_a_file_of_a_folder_is_named_as_in_earlier_vllm():
    options = parse("serve org/name-GGUF --quantization gguf --gguf-file sub/name.Q4_K_M.gguf")
    config = EngineConfig.from_options(**options)
    assert (config.model, config.quantization) == ("org/name-GGUF/sub/name.Q4_K_M.gguf", "gguf")
    for file, said in (
        ("x.bin", "allowed: the name of a .gguf"),
        ("/a.gguf", "within the"),
        ("../a.gguf", "within the"),
    ):
        with pytest.raises(ConfigError, match=said):
            EngineConfig.from_options(model="org/name", gguf_file=file)
    with pytest.raises(ConfigError, match="gguf_file is 'a.gguf', but no model is named; name its folder"):
        EngineConfig.from_options(gguf_file="a.gguf")


def test_short_forms_sizes_and_underscores():
    assert parse("serve -tp 2 -pp=3 -dp 4 -ep -n 2 -cc 3 --max_model_len 4k --kv-cache-memory-bytes=4G") == {
        "tensor_parallel_size": 2,
        "pipeline_parallel_size": 3,
        "data_parallel_size": 4,
        "enable_expert_parallel": True,
        "nnodes": 2,
        "compilation_config": 3,
        "max_model_len": 4000,
        "kv_cache_memory_bytes": 1 << 32,
    }


def test_flags_of_lists_take_several_words():
    """As vLLM's; or one word, a list."""
    sizes = "serve m --cudagraph-capture-sizes"
    assert parse(f"{sizes} 1 2 4 --numa-bind-nodes 0 1 --ignore-patterns a b") == {
        "model": "m",
        "cudagraph_capture_sizes": [1, 2, 4],
        "numa_bind_nodes": [0, 1],
        "ignore_patterns": ["a", "b"],
    }
    for line, expected in ((f"{sizes} 8", [8]), (f"{sizes} [1,2]", [1, 2]), (f"{sizes}=1 {sizes[8:]}=2", [1, 2])):
        assert parse(line)["cudagraph_capture_sizes"] == expected
    assert parse("serve m --numa-bind-nodes 0,1")["numa_bind_nodes"] == [0, 1]
    assert not vllm_options.LISTS - vllm_options.NAMES


def test_names_of_vllm_reach_the_engine_and_not_the_help():
    line = "serve -q awq --enable-sleep-mode --no-trust-remote-code -O3 --swap-space 4 --hf-overrides '{\"a\": 1}'"
    assert parse(line) == {
        "quantization": "awq",
        "enable_sleep_mode": True,
        "trust_remote_code": False,
        "optimization_level": 3,
        "swap_space": 4,
        "hf_overrides": {"a": 1},
    }
    assert "--enable-sleep-mode" not in PARSER.format_help()


@pytest.mark.parametrize("command", ["serve", "generate x", "chat", "convert m out", "calibrate m texts out"])
def test_ropes_are_options_of_commands_that_open_a_model(command):
    rope = '{"rope_type": "yarn", "factor": 4.0}'
    given = parse(f"{command} --rope-scaling '{rope}' --rope-theta 5e4")
    assert EngineConfig.from_options(**given).hf_overrides == {"rope_scaling": json.loads(rope), "rope_theta": 5e4}


@pytest.mark.parametrize("command", ["serve", "generate --file nothing", "chat", "convert out"])
def test_what_is_not_supported_is_one_line(command, capsys, monkeypatch):
    option = "--dtype fp6" if command == "convert out" else "--enable-eplb"
    if command != "convert out":
        monkeypatch.setattr("jaxengine.commands.cli._prompts", lambda args: ["x"])
    assert main([*command.split(), *option.split()]) == 2
    said = capsys.readouterr().err
    assert said.startswith("jaxengine: error: ") and said.count("\n") == 1
    assert ("enable_eplb is True, which is not supported yet" in said) == (option == "--enable-eplb")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("serve --max-model-length 5", "there is no '--max-model-length' here, but --max-model-len; "),
        ("chat m --zzz", "there is no '--zzz' here; "),
        # No flag that is only a little similar, and none of one letter: -n is the number of nodes.
        (
            "bench serve --ramp-up-strategy x",
            "bench serve: error: there is no '--ramp-up-strategy' here; see jax",
        ),
        ("bench latency --n 2", "there is no '--n' here; see jaxengine bench latency --help"),
        ("serve --max-model-len 4x", "argument --max-model-len: '4x' is not a whole number"),
        ("bench host --num-seqs 0", "'0' is not a whole number of at least 1"),
        ("plan ~nobody.here/x", "model '~nobody.here/x' cannot be the name of a file (Could not determine home dir"),
        ("check ~nobody.here/x", "model '~nobody.here/x' cannot be the name of a file (Could not determine home dir"),
        ("replay ~nobody.here/x", "folder '~nobody.here/x' cannot be the name of a file (Could not determine home dir"),
        *(
            (f"generate x --{option.replace('_', '-')} ~nobody.here/x", f"{option} '~nobody.here/x' cannot be the name")
            for option in ("bundle", "compile_cache_dir", "download_dir", "record_steps", "record_trace")
        ),
        (f"generate x --hf-overrides{'.a' * 20_000} 1", "argument --hf-overrides: a key has too many dots"),
        (
            f"generate x --hf-overrides {'[' * 100_000}",
            "[' is not the JSON expected here; see",
        ),
        ("generate --file /no/such\x0bfile\udcff", "the prompts in /no/such\\x0bfile\\udcff cannot be read"),
        (
            "generate --file /no/such/file",
            "the prompts in /no/such/file cannot be read (No such file or directory); name",
        ),
    ],
)
def test_a_wrong_command_line_is_one_line(line, said, capsys):
    try:
        status = main(line.split(" "))
    except SystemExit as end:
        status = end.code
    told = capsys.readouterr().err
    assert status == 2 and said in told and told.count("\n") == 1 and told.startswith("jaxengine")
    assert len(told) < 5000


def write(tmp_path, text: str) -> str:
    (tmp_path / "options.yaml").write_text(text)
    return str(tmp_path / "options.yaml")


OPTIONS = """
model: a/b
max-model-len: 4K
max_num_seqs: 8
enable-prefix-caching: false
enforce-eager: true
api-key: [k1, k2]
pipeline-layers: [3, 4]
compilation-config: {cudagraph_capture_sizes: [1, 2]}
chat-template: null
port: 81
"""


def test_a_file_of_options_and_the_command_line_before_it(tmp_path):
    path = write(tmp_path, OPTIONS)
    read = {
        "model": "a/b",
        "max_model_len": 4096,
        "max_num_seqs": 8,
        "enable_prefix_caching": False,
        "enforce_eager": True,
        "api_key": ["k1", "k2"],
        "pipeline_layers": (3, 4),
        "compilation_config": {"cudagraph_capture_sizes": [1, 2]},
        "port": 81,
    }
    assert parse(f"serve --config {path}") == read
    given = parse(f"serve c/d --config={path} --max-num-seqs 9 --api-key k3 --enable-prefix-caching --no-enforce-eager")
    changed = {"model": "c/d", "max_num_seqs": 9, "api_key": ["k3"]}
    assert given == {**read, **changed, "enable_prefix_caching": True, "enforce_eager": False}


def test_a_file_has_vllms_spellings_and_dicts_in_lists(tmp_path):
    path = write(tmp_path, "disable_prefix_caching: true\ndisable-chunked-prefill: false\nlora-modules: [{name: a}]")
    assert parse(f"serve --config {path}") == {"enable_prefix_caching": False, "lora_modules": ['{"name": "a"}']}


@pytest.mark.parametrize("command", ["generate", "chat", "serve", "bench latency", "check"])
def test_every_command_takes_a_file(tmp_path, command):
    path = write(tmp_path, "max-num-seqs: 3")
    assert parse(f"{command} --config {path}")["max_num_seqs"] == 3


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("max-model-length: 5", "'max-model-length' in the --config file .* is not an option of jaxengine serve"),
        ("[1, 2]", "holds no options"),
        ("a: b: c", "is not YAML"),
        ("a: !!python/object:os.system x", "is not YAML"),
        ("hf-overrides: {2024-01-01: 1}", "hf-overrides is .*; allowed: keys that are text"),
        (
            "hf-overrides: &a {b: *a}",
            "hf-overrides has more than 64 levels, or a number of thousands of digits; give less",
        ),
        pytest.param("dtype: auto\n" * 100_000, "has more than 1048576 characters", id="cut in the middle"),
    ],
)
def test_a_wrong_file_is_one_clear_error(tmp_path, text, said):
    with pytest.raises(ConfigError, match=said):
        parse(f"serve --config {write(tmp_path, text)}")
    with pytest.raises(ConfigError, match="cannot be read"):
        parse(f"serve --config {tmp_path}/none.yaml")


def test_an_empty_file_says_nothing(tmp_path):
    assert parse(f"serve --config {write(tmp_path, '')}") == {}


def test_dates_in_a_file_are_text(tmp_path):
    path = write(tmp_path, "revision: 2024-01-01\nhf-overrides: {a: 2024-01-02}\nlora-modules: [{name: a, path: b}]")
    assert parse(f"serve --config {path}") == {
        "revision": "2024-01-01",
        "hf_overrides": {"a": "2024-01-02"},
        "lora_modules": ['{"name": "a", "path": "b"}'],
    }


def test_a_model_may_have_several_names(tmp_path, capsys):
    (tmp_path / "options.yaml").write_text("served-model-name: [a, b]")
    for line in ("--served-model-name a b", "--served-model-name a --served-model-name=b", "--config options.yaml"):
        line = line.replace("options.yaml", str(tmp_path / "options.yaml"))
        assert parse(f"serve c/d {line}") == {"model": "c/d", "served_model_name": ["a", "b"]}, line
    # A model behind the names would be one of them.
    assert main(["serve", "--served-model-name", "a", "c/d"]) == 2
    assert "served_model_name has taken 'c/d', and no model is given; give the model before" in capsys.readouterr().err
    assert main(["serve", "--api-key", "a", "c/d"]) == 2  # nor may it become a key
    assert "api_key has taken 'c/d'" in capsys.readouterr().err


def test_short_form_of_the_servers_processes_and_origins():
    assert parse("serve a/b -asc 4") == {"model": "a/b", "api_server_count": 4}
    assert ServerConfig(**parse("serve --allowed-origins '[\"*\"]'")).allowed_origins == ("*",)
    assert parse("serve --default-chat-template-kwargs '{\"a\": 1}'") == {"default_chat_template_kwargs": {"a": 1}}
    for origin in ("https://a.example/", "a.example", "https://a.example/chat"):
        with pytest.raises(ConfigError, match="allowed_origins"):
            ServerConfig(allowed_origins=(origin,))
