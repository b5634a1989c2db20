"""Engine options on a command line: flags, vLLM's short forms and names, a positional model, and a config file.

Every command that runs an engine uses them. Values are checked by EngineConfig.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import difflib
import io
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxengine.config import vllm_options
from jaxengine.config.base.errors import printable
from jaxengine.config.base.flexible_parser import Several, json_or_text, known_spelling
from jaxengine.config.command_line import add_options, destination, flag_of
from jaxengine.config.engine_config import ConfigError, EngineConfig
from jaxengine.config.features import gguf_file
from jaxengine.config.features.pooler_config import ROPE_OPTIONS
from jaxengine.config.option_names import CAPTURE_SIZES

# vLLM's short flags.
SHORT = {
    "tensor_parallel_size": "-tp",
    "pipeline_parallel_size": "-pp",
    "data_parallel_size": "-dp",
    "enable_expert_parallel": "-ep",
    "decode_context_parallel_size": "-dcp",
    "nnodes": "-n",
    "compilation_config": "-cc",
    "quantization": "-q",
    "speculative_config": "-sc",
    "plugins": "--plugin",
    "kv_cache_memory_bytes": "--kv-cache-memory",
}
_DATA_PARALLEL = "rank start_rank size_local address rpc_port backend hybrid_lb external_lb multi_port_external_lb"
_SHORT_OF_OTHERS = {
    "optimization_level": "-O",
    "attention_config": "-ac",
    "prefill_context_parallel_size": "-pcp",
    "node_rank": "-r",
    **{f"data_parallel_{name}": f"-dp{one}" for one, name in zip("nrlapbhem", _DATA_PARALLEL.split(), strict=True)},
}
MODEL_HELP = "a GGUF file, a Hugging Face folder, or a hub id (default: the embedded SmolLM2-135M-Instruct)"
MODEL = destination(EngineConfig, "model")
MAX_FILE_BYTES = 1 << 20


def add_engine_options(parser: argparse.ArgumentParser, names: Sequence[str] | None = None) -> None:
    """Add flags to `parser` for all fields of EngineConfig except the model, or only for `names`.

    Without `names`, vLLM's other options are accepted as well, for EngineConfig.from_options to refuse or explain, but
    --help does not list them. If hf_overrides is among `names`, rope_scaling and rope_theta are accepted. A flag that
    the parser already has is not added again.
    """
    fields = [field.name for field in dataclasses.fields(EngineConfig) if field.name != "model"]
    taken = parser._option_string_actions
    short = {name: flag for name, flag in SHORT.items() if flag not in taken}
    add_options(parser, "engine options", EngineConfig, fields if names is None else names, short)
    others = {*vllm_options.NAMES, *CAPTURE_SIZES, gguf_file.NAME}
    if names is not None:
        others = {*ROPE_OPTIONS} if "hf_overrides" in names else set()
    for name in sorted(others):
        flags = [flag for flag in (_SHORT_OF_OTHERS.get(name), flag_of(name)) if flag and flag not in taken]
        if flag_of(name) not in flags:
            continue
        how: dict[str, Any] = {"type": str if vllm_options.KINDS.get(name) in ("str", "str | list") else json_or_text}
        if vllm_options.is_switch(name):
            how = {"action": argparse.BooleanOptionalAction}
        elif name in vllm_options.LISTS or name == CAPTURE_SIZES[0]:
            how |= {"action": Several, "nargs": "+"}
        parser.add_argument(
            *flags, dest=destination(EngineConfig, name), default=argparse.SUPPRESS, help=argparse.SUPPRESS, **how
        )


def add_model(
    parser: argparse.ArgumentParser,
    *,
    dest: str = MODEL,
    default: Any = argparse.SUPPRESS,
    help: str = MODEL_HELP,
) -> None:
    """Add --model, and an optional positional argument with the same meaning, to `parser`. Two different models end the
    program with an error.

    dest: attribute of the parsed arguments that gets the model. default, help: argparse's arguments for --model.
    """

    class Once(argparse.Action):
        def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
            if (first := getattr(namespace, dest, default)) not in (default, values):
                other = "" if option_string else "; or an option before it does not exist"
                parser.error(f"the model is given twice, as {first!r} and as {values!r}{other}")
            setattr(namespace, dest, values)

    parser.add_argument("--model", dest=dest, default=default, action=Once, metavar="MODEL", help=help)
    parser.add_argument(
        dest, nargs="?", default=argparse.SUPPRESS, action=Once, metavar="MODEL", help="same as --model"
    )


def looks_like_model(word: str) -> bool:
    """Return whether a positional argument, which might also be a prompt, names a model: it ends in .gguf, has the form
    org/name, or is a folder with a config.json.
    """
    if word.endswith(".gguf") or re.fullmatch(r"[\w.-]+/[\w.-]+", word, re.ASCII):
        return True
    with contextlib.suppress(OSError, RuntimeError, ValueError):  # not a valid file name
        return (Path(word).expanduser() / "config.json").is_file()
    return False


def add_config_file(parser: argparse.ArgumentParser) -> None:
    """Add the flag --config to `parser`. `with_config_file` handles it before parsing."""
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="YAML file of options, such as `max-model-len: 4096`; the command line overrides it",
    )


def with_config_file(argv: Sequence[str], parser: argparse.ArgumentParser) -> list[str]:
    """Return the arguments with the options of the --config file, if there is one, inserted after the command's name.
    Underscores in flag names become hyphens.

    argv: arguments after the program's name. parser: the parser of all commands. Raises ConfigError for a file that
    cannot be read, and for an option that the command does not have.
    """
    words = with_hyphens(argv)
    path, rest = _take_config(words)
    if path is None:
        return words
    parser, depth = command_of(parser, rest)
    given = _given(parser, rest[depth:])
    return [*rest[:depth], *_as_words(path, _read(path), parser, given), *rest[depth:]]


def near_flag(word: str, words: Sequence[str], parser: argparse.ArgumentParser) -> str | None:
    """Return the "--" flag most similar to `word`, without its "=" and value, of the command with which `words` begin;
    None if none is similar. Options of vLLM without an effect are not suggested.
    """
    without = {destination(EngineConfig, name) for name in vllm_options.WITHOUT_EFFECT}
    actions = command_of(parser, words)[0]._option_string_actions
    known = [flag for flag, action in actions.items() if flag.startswith("--") and action.dest not in without]
    # With the usual 0.6, --ramp-up-strategy would be similar to --request-rate.
    return next(iter(difflib.get_close_matches(word.partition("=")[0], known, 1, 0.75)), None)


def command_of(parser: argparse.ArgumentParser, words: Sequence[str]) -> tuple[argparse.ArgumentParser, int]:
    """Return the parser of the command with which `words` begin, and the number of words in the command's name, 0 for
    no command.
    """
    depth = 0
    while depth < len(words) and (commands := _commands(parser)) is not None and words[depth] in commands:
        parser, depth = commands[words[depth]], depth + 1
    return parser, depth


def with_hyphens(argv: Sequence[str]) -> list[str]:
    """Return the arguments with underscores in flag names replaced by hyphens, since vLLM accepts both spellings. The
    keys of `--OPTION.key` and arguments from "--" on are not changed.
    """
    words = list(argv)
    for index, word in enumerate(words):
        if word == "--":
            break
        if word.startswith("--"):
            name = re.split("[=.]", word, maxsplit=1)[0]
            words[index] = name.replace("_", "-") + word[len(name) :]
    return words


def _take_config(words: list[str]) -> tuple[str | None, list[str]]:
    """Return (value of --config or None, the arguments without it).

    Only the first --config counts, and only before "--". A --config without a value is left to the parser.
    """
    end = words.index("--") if "--" in words else len(words)
    for index, word in enumerate(words[:end]):
        if word.startswith("--config="):
            return word.removeprefix("--config="), words[:index] + words[index + 1 :]
        if word == "--config" and index + 1 < end:
            return words[index + 1], words[:index] + words[index + 2 :]
    return None, words


def _commands(parser: argparse.ArgumentParser) -> Mapping[str, argparse.ArgumentParser] | None:
    """Return the parsers of a parser's subcommands by name; None if it has none."""
    actions = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return actions[0].choices if actions else None


def _given(parser: argparse.ArgumentParser, words: list[str]) -> set[str]:
    """Return the destinations (attribute names) of the options that the arguments contain, and of those that have a
    default; empty if the arguments do not form a complete command. Nothing is printed.

    parser: the command's parser. words: arguments without the command's name.
    """
    try:
        with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
            return set(vars(parser.parse_known_args(words)[0]))
    except SystemExit:
        return set()


def _read(path: str) -> Mapping[str, Any]:
    """Return the options in the YAML file `path` by name; {} for an empty file.

    Raises ConfigError for a file that cannot be read, has more than MAX_FILE_BYTES characters, is not YAML, or has
    anything but options by name.
    """
    import yaml

    try:
        with open(path, encoding="utf-8") as file:
            text = file.read(MAX_FILE_BYTES + 1)
        if len(text) > MAX_FILE_BYTES:
            problem = f"the --config file {path} has more than {MAX_FILE_BYTES} characters"
            raise ConfigError.because("config", problem, "name a file of options")
        content = yaml.safe_load(text)
    except OSError as error:
        problem = f"the --config file {path} cannot be read ({error.strerror})"
        raise ConfigError.because("config", problem, "name a YAML file") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        why = " ".join(str(error).split())[:200]
        problem = f"the --config file {path} is not YAML ({why})"
        raise ConfigError.because("config", problem, "write one option a line, `max-model-len: 4096`") from None
    if content is None:
        return {}
    if not isinstance(content, Mapping) or not all(isinstance(key, str) for key in content):
        problem = f"the --config file {path} holds no options"
        raise ConfigError.because("config", problem, "write one a line, `max-model-len: 4096`")
    return content


def _as_words(path: str, content: Mapping[str, Any], parser: argparse.ArgumentParser, given: set[str]) -> list[str]:
    """Return the options of a config file as arguments of a command line. Options with the value None are left out.

    path: the file's name, for errors. content: options of the file. given: destinations of the options on the command
    line. Options without a default that are in `given` are left out; the command line overrides the others because its
    arguments come later. Raises ConfigError for an option that `parser` does not have.
    """
    words = []
    for key, value in content.items():
        printable(key, value)
        flag = flag_of(key)
        action = parser._option_string_actions.get(known_spelling(parser, flag))
        if action is None or flag == "--config":
            problem = f"{key!r} in the --config file {path} is not an option of {parser.prog}"
            raise ConfigError.because("config", problem, "--help and docs/options.md have all of them")
        if value is None or (action.default is argparse.SUPPRESS and action.dest in given):
            continue
        if isinstance(value, bool) and action.nargs in (0, "?"):
            off = flag_of(f"no-{key}")
            words += [flag] if value else [off] if off in parser._option_string_actions else []
        elif isinstance(value, list) and isinstance(action, (argparse._AppendAction, argparse._ExtendAction)):
            words += [f"{flag}={_as_word(key, item)}" for item in value]
        elif isinstance(value, list) and action.nargs is not None:
            words += [flag, *(_as_word(key, item) for item in value)]
        elif isinstance(value, list) and action.type is not None and action.metavar == "INT,INT,...":
            words.append(f"{flag}={','.join(map(str, value))}")
        else:
            words.append(f"{flag}={_as_word(key, value)}")
    return words


def _as_word(option: str, value: Any) -> str:
    """Return an option's value in a config file as a word of a command line, a list or dict as JSON with dates as text.
    Raises ConfigError for a dict with keys that JSON cannot have.
    """
    try:
        return json.dumps(value, default=str) if isinstance(value, (dict, list)) else str(value)
    except TypeError:
        raise ConfigError(option, value, "keys that are text") from None
