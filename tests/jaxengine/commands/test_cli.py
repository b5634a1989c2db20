"""The command line: every engine option is a flag, wrong ones are one clear line, and saying so loads nothing heavy.

The engine behind the commands is replaced here; its own behaviour is tested elsewhere.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import io
import json
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import pytest

import jaxengine.api.llm
from jaxengine import __version__
from jaxengine.commands.cli import OUTPUT_OPTIONS, SAMPLING_OPTIONS, build_parser, main
from jaxengine.config.command_line import add_options, given_options
from jaxengine.config.engine_config import EngineConfig
from jaxengine.requests.output.outputs import CompletionOutput, Logprob, RequestOutput
from jaxengine.requests.params.sampling_params import SamplingParams
from jaxengine.scheduler.base.errors import RequestError

ROOT = Path(__file__).resolve().parents[3]


@dataclasses.dataclass
class Options:
    """Every kind of field there is.

    Attributes:
      number: how many,
        told over two lines.
      share: 50% of it.
    """

    number: int = 3
    share: float | None = None
    name: str | None = None
    switch: bool = True
    kind: Literal["a", "b"] = "a"
    words: Sequence[str] = ()
    ids: Sequence[int] | None = None
    bias: Mapping[int, float] | None = None
    nested: dict | None = None


def parse(*arguments: str) -> dict:
    parser = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False)
    add_options(parser, "options", Options)
    return given_options(parser.parse_args(list(arguments)), Options)


def test_only_what_was_given_is_passed_on():
    assert parse() == {}
    assert parse("--number", "3") == {"number": 3}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--number", "7"], {"number": 7}),
        (["--share", "0.5"], {"share": 0.5}),
        (["--name", "x y"], {"name": "x y"}),
        (["--switch"], {"switch": True}),
        (["--no-switch"], {"switch": False}),
        (["--kind", "b"], {"kind": "b"}),
        (["--words", "a b", "--words", "c"], {"words": ["a b", "c"]}),
        (["--ids", "1,2,30"], {"ids": (1, 2, 30)}),
        (["--bias", '{"5": -1.5}'], {"bias": {5: -1.5}}),
        (["--nested", '{"sizes": [1, 2]}'], {"nested": {"sizes": [1, 2]}}),
    ],
)
def test_values_are_read_by_type(arguments, expected):
    assert parse(*arguments) == expected


@pytest.mark.parametrize(
    "arguments",
    [
        ["--number", "x"],
        ["--kind", "c"],
        ["--ids", "1,x"],
        ["--bias", "[1]"],
        ["--bias", '{"a": 1}'],
        ["--nested", "{"],
    ],
)
def test_a_wrong_value_is_an_error_of_its_flag(arguments):
    with pytest.raises(argparse.ArgumentError) as error:
        parse(*arguments)
    assert arguments[0] in str(error.value)


def test_help_comes_from_the_docstring():
    parser = argparse.ArgumentParser()
    add_options(parser, "options", Options)
    text = " ".join(parser.format_help().split())
    assert "how many, told over two lines. (default: 3)" in text
    assert "50% of it." in text


def test_every_engine_option_is_a_flag_with_a_text():
    parser = argparse.ArgumentParser()
    add_options(parser, "engine options", EngineConfig)
    actions = {action.option_strings[0]: action for action in parser._actions}
    for field in dataclasses.fields(EngineConfig):
        action = actions["--" + field.name.replace("_", "-")]
        assert len(action.help or "") > 10, f"{field.name} has no line in EngineConfig's docstring"


def test_every_supported_sampling_option_is_a_flag():
    """A field that SamplingParams takes and the command line does not know would be missing from `generate`."""
    unreachable = {"seed", "detokenize", "output_kind", "return_hidden_states", "capture", "steer"}
    unreachable |= {"trace_decode_token_ids", "return_sampling_mass", "prompt_logprob_start"}  # for trainers
    unreachable |= {"return_sampling_mask"}
    unreachable |= {"routed_experts_prompt_start", "prompt_logprob_token_ids"}
    unreachable |= {"stream_interval", "flat_logprobs", "skip_reading_prefix_cache", "repetition_detection"}
    for field in dataclasses.fields(SamplingParams):
        if field.name in {*SAMPLING_OPTIONS, *OUTPUT_OPTIONS, *unreachable}:
            continue
        with pytest.raises(RequestError, match="not supported yet"):
            SamplingParams(**{field.name: object()})


def test_version_is_quick_and_right():
    """Next to nothing is collected during imports, and what they have made is never looked at again."""
    code = """
import atexit, gc, sys
count = lambda: gc.get_stats()[1]["collections"]
before = count()
atexit.register(lambda: print(gc.isenabled(), gc.get_freeze_count() > 50_000, count() - before < 5))
sys.argv[1:] = ["--version"]
from jaxengine.commands.process import main; main()
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines() == [f"jaxengine {__version__}", "True True True"], done.stderr


def test_public_names_are_imported_without_collections(monkeypatch, tmp_path):
    """Whether the import succeeds or not; a program that collects nothing does not begin to."""
    (tmp_path / "probe.py").write_text("import gc\nVALUE = gc.isenabled()\n")
    (tmp_path / "fails.py").write_text("raise ImportError('fails')\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(jaxengine._HOMES, "PROBE", "probe:VALUE")
    monkeypatch.setitem(jaxengine._HOMES, "FAILS", "fails")
    try:
        with pytest.raises(ImportError, match="fails"):
            _ = jaxengine.FAILS
        assert gc.isenabled() and jaxengine.PROBE is False and gc.isenabled()
        gc.disable()
        del jaxengine.PROBE
        assert jaxengine.PROBE is False and not gc.isenabled()
    finally:
        gc.enable()
        vars(jaxengine).pop("PROBE", None)
        sys.modules.pop("probe", None)


@pytest.mark.parametrize(
    "arguments",
    [
        ["generate", "--no-such-option", "x"],
        ["generate", "--max-model-length", "5", "x"],
        ["chat", "--max-model", "5"],
        ["bench", "throughput", "--workload", "W9"],
        ["bench", "throughput", "--workload", "W1", "--trace"],
        ["bench", "host", "--num-seqs", "0"],
        ["bench", "latency", "--num-runs", "-1"],
        ["no-such-command"],
        [],
    ],
)
def test_unknown_arguments_are_refused(arguments, capsys):
    with pytest.raises(SystemExit) as error:
        main(arguments)
    assert error.value.code == 2
    assert "error" in capsys.readouterr().err


class FakeLLM:
    """Answers every prompt with its length, and remembers how it was made and asked."""

    made: list[dict]

    def __init__(self, **options):
        FakeLLM.made.append(options)

    def get_default_sampling_params(self):
        return SamplingParams(max_tokens=99, temperature=0.5)

    def generate(self, prompts, params, use_tqdm=True):
        FakeLLM.made.append({"prompts": prompts, "params": params})
        return [
            RequestOutput(
                request_id=str(index),
                prompt=prompt,
                prompt_token_ids=[1, 2],
                outputs=[CompletionOutput(0, f"<{len(prompt)}>", [7], 0.0, [{7: Logprob(-0.5, 1)}], "length")],
                finished=True,
                num_cached_tokens=1,
            )
            for index, prompt in enumerate(prompts)
        ]

    def chat(self, messages, params, use_tqdm=True):
        return self.generate([conversation[-1]["content"] for conversation in messages], params)


@pytest.fixture
def fake_llm(monkeypatch):
    FakeLLM.made = []
    monkeypatch.setattr(jaxengine.api.llm, "LLM", FakeLLM)
    return FakeLLM.made


def test_generate_from_arguments(fake_llm, capsys):
    flags = ["--max-tokens", "5", "--max-model-len", "64", "--no-enable-prefix-caching"]
    assert main(["generate", *flags, "ab", "c"]) == 0
    assert fake_llm[0] == {"max_model_len": 64, "enable_prefix_caching": False}
    assert fake_llm[1] == {"prompts": ["ab", "c"], "params": SamplingParams(max_tokens=5, temperature=0.5)}
    captured = capsys.readouterr()
    assert captured.out == "ab<2>\nc<1>\n"
    assert re.search(
        r"^2 prompts of 4 tokens answered with 2 in [\d.]+ s; est. speed input: [\d.]+ toks/s, output: [\d.]+ toks/s$",
        captured.err,
        re.MULTILINE,
    )


def test_generate_says_nothing_more_where_no_figures_are_wanted(fake_llm, capsys):
    assert main(["generate", "--disable-log-stats", "ab"]) == 0
    assert capsys.readouterr().err == ""


def test_generate_without_sampling_options_takes_the_models_defaults(fake_llm):
    assert main(["generate", "x"]) == 0
    assert fake_llm[1]["params"] == SamplingParams(max_tokens=99, temperature=0.5)


@pytest.mark.parametrize("flags", [[], ["--file", "-"]])
def test_generate_from_standard_input(fake_llm, capsys, monkeypatch, flags):
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\n\ntwo\n"))
    assert main(["generate", *flags]) == 0
    assert fake_llm[1]["prompts"] == ["one", "two"]


def test_generate_from_a_file_as_json(fake_llm, capsys, tmp_path):
    (tmp_path / "prompts.txt").write_text("one\n")
    assert main(["generate", "--json", "--chat", "--logprobs", "1", "--file", str(tmp_path / "prompts.txt")]) == 0
    line = json.loads(capsys.readouterr().out)
    assert line["prompt"] == "one" and line["text"] == "<3>" and line["token_ids"] == [7]
    assert line["logprobs"] == [{"7": -0.5}] and line["finish_reason"] == "length" and line["num_cached_tokens"] == 1


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["generate", "--temperature", "nan", "x"], "temperature"),
        (["generate", "--file", "/no/such/file"], "/no/such/file"),
        (["generate", "--file", "f", "x"], "--file"),
        (["generate", "--dtype", "float8", "x"], "dtype"),
    ],
)
def test_a_bad_value_is_one_line_and_status_2(arguments, named, capsys):
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("jaxengine: error: ") and named in captured.err
    assert captured.err.count("\n") == 1 and "Traceback" not in captured.err


def test_no_prompt_is_refused(capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    assert main(["generate"]) == 2
    assert "no prompt" in capsys.readouterr().err


def test_the_parser_lists_its_commands():
    text = build_parser().format_help()
    assert all(command in text for command in ("chat", "generate", "demo", "bench"))


def test_bench_serve_takes_flags_cut_short(capsys):
    """As scripts that were written for vLLM's have them; other commands, where a flag may be added, do not."""
    args = build_parser().parse_args(["bench", "serve", "--random-in", "3", "--request", "2"])
    assert (args.input_len, args.request_rate) == (3, 2)
    for words, said in (
        (["bench", "serve", "--rand", "1"], "ambiguous option"),
        (["bench", "latency", "--input", "3"], "--input"),
        (["serve", "--max-model", "3"], "--max-model"),
    ):
        with pytest.raises(SystemExit):
            build_parser().parse_args(words)
        assert said in capsys.readouterr().err


def test_a_parser_for_some_words_has_the_commands_that_they_name():
    """As whole as in the parser of all commands; the others are known, without options."""
    everything = commands_of(build_parser())
    for words in (["--config", "file", "serve", "model"], ["bench", "latency"], ["generate", "a prompt"]):
        known = commands_of(build_parser(words))
        assert known.keys() == everything.keys()
        for name, command in known.items():
            flags = everything[name]._option_string_actions.keys() if name in words else {"-h", "--help"}
            assert command._option_string_actions.keys() == flags, (words, name)


def commands_of(parser):
    """Parsers of commands by name, those of benchmarks too."""
    (group,) = (each for each in parser._actions if isinstance(each, argparse._SubParsersAction))
    (benchmarks,) = (each for each in group.choices["bench"]._actions if isinstance(each, argparse._SubParsersAction))
    return {**benchmarks.choices, **{name: each for name, each in group.choices.items() if name != "bench"}}


@pytest.mark.parametrize("words", ["check --json", "check --save", "bench host --json", "bench serve --url x --svg"])
def test_where_results_go_is_looked_at_before_there_are_any(words, tmp_path, capsys):
    for place in (tmp_path, tmp_path / "no" / "file"):
        with pytest.raises(SystemExit, match="2"):
            main([*words.split(), str(place)])
        (line,) = capsys.readouterr().err.splitlines()
        assert f"{str(place)!r} cannot be written; name a file in a folder that is there" in line
