"""vLLM's FlexibleArgumentParser: underscores in flags, dotted keys of dict options, and help on a word or group."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterable, Sequence
from typing import Any

# vLLM's groups of options for `--help=GROUP`, with the engine options in each.
GROUPS: dict[str, str] = {
    "ModelConfig": """
        model tokenizer tokenizer_mode tokenizer_revision skip_tokenizer_init config_format revision dtype
        quantization seed max_model_len enforce_eager max_logprobs logprobs_mode generation_config
        override_generation_config hf_token hf_overrides
        pooler_config runner convert logits_processors allowed_local_media_path allowed_media_domains chat_template
        chat_template_content_format
        capture capture_layers steer steering_vectors enable_trace_replay enable_sampling_mass
        enable_return_routed_experts return_sampling_mask rl_exact plugins
        sleep_idle_seconds fit enable_prompt_embeds
    """,
    "LoadConfig": "load_format download_dir",
    "LoRAConfig": "enable_lora max_loras max_lora_rank max_cpu_loras",
    "MultiModalConfig": """
        language_model_only limit_mm_per_prompt enable_mm_embeds media_io_kwargs mm_processor_kwargs
        mm_processor_cache_gb mm_processor_cache_type mm_shm_cache_max_object_size_mb mm_encoder_tp_mode
        media_loading_thread_count media_fetch_timeout media_proxy max_media_bytes max_media_pixels
        max_image_pixels encoder_cache_size max_audio_seconds
    """,
    "CacheConfig": """
        block_size gpu_memory_utilization kv_cache_memory_bytes num_gpu_blocks_override kv_cache_dtype kv_cache_scales
        enable_prefix_caching num_state_snapshots kv_offloading_size kv_offloading_path kv_offloading_disk_size
        kv_transfer_config kv_events_config kv_cache_metrics kv_cache_metrics_sample
    """,
    "SchedulerConfig": """
        max_num_seqs max_num_batched_tokens enable_chunked_prefill long_prefill_token_threshold scheduling_policy
        async_scheduling disable_hybrid_kv_cache_manager max_num_batched_encoder_tokens disable_chunked_mm_input
        stream_interval preemption_mode
    """,
    "ParallelConfig": """
        tensor_parallel_size replicate_kv_heads data_parallel_size enable_expert_parallel all2all_backend
        pipeline_parallel_size pipeline_layers decode_context_parallel_size nnodes master_addr master_port
        cluster_key_file cluster_timeout numa_bind numa_bind_nodes numa_bind_cpus
    """,
    "AttentionConfig": "attention_backend",
    "CompilationConfig": "compilation_config compile_cache_dir bundle bundle_key_file",
    "ProfilerConfig": "profiler_config",
    "SpeculativeConfig": "speculative_config",
    "StructuredOutputsConfig": "structured_outputs_config",
    "ObservabilityConfig": """
        disable_log_stats enable_mfu_metrics kernel_proof record_steps record_steps_limit record_steps_bytes
        record_steps_detail record_trace
    """,
}
_DOTTED = re.compile(r"(--[A-Za-z][\w-]*|-[A-Za-z]+)\.([^=]+)(?:=(.*))?", re.DOTALL)
_HELP = "--help="
_OPPOSITES = {"--enable-": "--no-disable-", "--disable-": "--no-enable-"}
_OF_PYTHON = {"True": True, "False": False, "None": None}


class FlexibleArgumentParser(argparse.ArgumentParser):
    """ArgumentParser that accepts vLLM's spellings of options.

    - Flags may be written with underscores or hyphens, and --no-enable-x as --disable-x.
    - `--OPTION.key.other VALUE` sets one key of an option that takes a dict, and `--OPTION.key+ VALUE` appends to a
      list. Values are JSON, or else text. Several such arguments are merged with each other and with the option itself.
    - `--help=WORD` shows the options that contain a word, the options of a group (`--help=CacheConfig`), the names of
      the groups (`--help=listgroup`) or everything (`--help=all`).
    """

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:
        """Parse a command line like argparse's parse_known_args, but accept vLLM's spellings. Return (namespace, list
        of arguments that no option takes).

        args: the arguments; None for sys.argv without the program's name. `--help=WORD` prints help and ends the
        program. A parser with subcommands only checks the first argument for it, and leaves the spelling of the others
        to the subcommand's parser. Arguments after "--" are not translated.
        """
        words = list(sys.argv[1:] if args is None else args)
        has_commands = any(isinstance(action, argparse._SubParsersAction) for action in self._actions)
        end = words.index("--") if "--" in words else len(words)
        for word in words[: 1 if has_commands else end]:
            if word.startswith(_HELP):
                self._print_message(self.help_about(word.removeprefix(_HELP)), sys.stdout)
                self.exit()
        if not has_commands:
            words = self._merge_dotted([known_spelling(self, word) for word in words[:end]]) + words[end:]
        return super().parse_known_args(words, namespace)

    def help_about(self, word: str) -> str:
        """Return the text of `--help=WORD`: everything for "all" or "page", the groups and their sizes for "listgroup",
        a group's options for its name, otherwise the options whose flags contain the word.

        Ends the program with an error (SystemExit) if nothing matches.
        """
        if word in ("all", "page"):
            return self.format_help()
        groups = self._groups()
        if word == "listgroup":
            counts = {title: sum(each.help != argparse.SUPPRESS for each in all_) for title, all_ in groups.items()}
            return "".join(f"{title}: {count}\n" for title, count in counts.items() if count)
        key = word.lower().replace("_", "-")
        found = {title: actions for title, actions in groups.items() if title.lower() == word.lower()} or {
            f"options with {word!r}": [each for each in self._actions if any(key in name for name in names_of(each))]
        }
        formatter = self._get_formatter()
        for title, actions in found.items():
            formatter.start_section(title)
            formatter.add_arguments(actions)
            formatter.end_section()
        hidden = [names_of(each)[0] for actions in found.values() for each in actions if each.help == argparse.SUPPRESS]
        if hidden:
            formatter.add_text(f"Options of vLLM without an effect here, or refused: {', '.join(hidden)}")
        if not any(found.values()):
            self.error(f"no option or group matches {word!r}; --help=listgroup has the groups")
        return formatter.format_help()

    def _groups(self) -> dict[str, list[argparse.Action]]:
        """Return the options (argparse actions) of this parser's groups, and of vLLM's groups of engine options, by
        title.
        """
        groups = {group.title or "": group._group_actions for group in self._action_groups}
        by_name = {action.dest.rpartition(".")[2]: action for action in self._actions}
        for title, names in GROUPS.items():
            groups[title] = [by_name[name] for name in names.split() if name in by_name]
        return groups

    def _merge_dotted(self, words: list[str]) -> list[str]:
        """Return the arguments with all `--OPTION.key VALUE` of an option replaced by one `--OPTION=JSON` at the end.

        Those of options that the parser does not have, and those that are an option's own name, stay where they are.
        The value may follow "=" instead; "-" in a key is "_", and "-O.key" is a key of "-cc". A key that ends with "+"
        appends to a list, which is made if missing.

        If the arguments set the option itself to dicts, anywhere, the keys are merged into the last one, and those
        arguments stay too. Later keys override earlier ones. Ends the program with an error for a missing value, for a
        key inside a value that is not a dict, for appending to a value that is not a list, and for too many dots.
        """
        kept: list[str] = []
        merged: dict[str, dict[str, Any]] = {}
        remaining = iter(words)
        for word in remaining:
            found = _DOTTED.fullmatch(word)
            action = None
            if found is not None and word not in self._option_string_actions:
                # "-O.key" sets a key of the compilation_config; "-O" alone is the optimisation level.
                action = self._option_string_actions.get("-cc" if found[1] == "-O" else found[1])
            if found is None or action is None:
                kept.append(word)
                continue
            value = found[3] if found[3] is not None else next(remaining, None)
            if value is None:
                self.error(f"argument {word}: expected one argument")
            flag = names_of(action)[-1]
            if flag not in merged:
                merged[flag] = _given_dict(words, names_of(action))
            self._set_key(merged[flag], found[2], value, word)
        try:
            return kept + [f"{flag}={json.dumps(value)}" for flag, value in merged.items()]
        except RecursionError:
            self.error(f"argument {', '.join(merged)}: a key has too many dots")

    def _set_key(self, target: dict[str, Any], path: str, text: str, word: str) -> None:
        """Set the value at a dotted path of a dict, or extend the list there if the path ends with "+".

        target: the dict, which is changed in place; missing dicts on the path are added. path: keys, in which "-"
        becomes "_". text: the value, as JSON or else as text. word: the whole argument, for error messages. Ends the
        program with an error if a value on the path is not a dict, or if the value to extend is not a list.
        """
        *keys, last = path.removesuffix("+").replace("-", "_").split(".")
        for key in keys:
            target = target.setdefault(key, {})
            if not isinstance(target, dict):
                self.error(f"argument {word}: {key} has a value of its own")
        value = json_or_text(text)
        if path.endswith("+"):
            if not isinstance(first := target.get(last, []), list):
                self.error(f"argument {word}: {last} has a value that is not a list")
            value = [*first, *(value if isinstance(value, list) else [value])]
        target[last] = value


def known_spelling(parser: argparse.ArgumentParser, word: str) -> str:
    """Return an argument with its flag in the spelling with which the option was added to `parser`.

    Underscores and hyphens are equivalent before the first dot or equals sign, and --disable-x is --no-enable-x, as
    --enable-x is --no-disable-x. Unknown flags, and arguments that are not flags, are returned unchanged.
    """
    found = re.match(r"--[A-Za-z][\w-]*", word)
    if found is None or found[0] in parser._option_string_actions:
        return word
    name = "--" + found[0][2:].replace("_", "-")
    others = [name, "--" + name[2:].replace("-", "_")]
    others += [off + name.removeprefix(on) for on, off in _OPPOSITES.items() if name.startswith(on)]
    return next((each for each in others if each in parser._option_string_actions), found[0]) + word[found.end() :]


def names_of(action: argparse.Action) -> list[str]:
    """Return the flags of an argparse action, without its --no- forms, in the order in which they were added; the usual
    flag is last. For a positional argument, return a list with its name.
    """
    return [name for name in action.option_strings if not name.startswith("--no-")] or [action.dest]


def _given_dict(words: Iterable[str], flags: Sequence[str]) -> dict[str, Any]:
    """Return the last JSON object that the arguments `words` give to an option; an empty dict if there is none.

    flags: the option's flags.
    """
    words, found = list(words), {}
    for index, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name in flags:
            given = json_or_text(value if equals else " ".join(words[index + 1 : index + 2]))
            found = given if isinstance(given, dict) else found
    return found


class Several(argparse._ExtendAction):
    """Action of a flag that takes several words: values, or lists of values, which are joined to one list."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        """Add the values, of lists and tuples their elements, to the flag's list."""
        flat = [each for value in values for each in (value if isinstance(value, list | tuple) else [value])]
        super().__call__(parser, namespace, flat, option_string)


def json_or_text(text: str) -> Any:
    """Return the decoded value of a JSON text, or of Python's True, False or None; else the text itself."""
    if text in _OF_PYTHON:
        return _OF_PYTHON[text]
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
