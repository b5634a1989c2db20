"""The command `jaxengine check`: its arguments, and its order of work: open, compile, compare, report."""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

from jaxengine.check.targets import TARGETS, find_target, require_compiler, split_targets
from jaxengine.config.base.lengths import AUTO_LENGTH
from jaxengine.config.command_line import given_options, output_file
from jaxengine.config.engine_config import ConfigError, EngineConfig
from jaxengine.config.engine_flags import add_engine_options, add_model
from jaxengine.models.kernel_rows import PLATFORM_OF_OPTION

# Engine options that affect what is compiled.
ENGINE_OPTIONS = (
    "dtype",
    "quantization",
    "kv_cache_dtype",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "block_size",
    "gpu_memory_utilization",
    "kv_cache_memory_bytes",
    "num_gpu_blocks_override",
    "compilation_config",
    "max_logprobs",
    "logprobs_mode",
    "tensor_parallel_size",
    "data_parallel_size",
    "enable_expert_parallel",
    "all2all_backend",
    "replicate_kv_heads",
    "pipeline_parallel_size",
    "pipeline_layers",
    "mm_encoder_tp_mode",
    "max_num_batched_encoder_tokens",
    "encoder_cache_size",
    "limit_mm_per_prompt",
    "language_model_only",
    "speculative_config",
    "enable_lora",
    "max_loras",
    "max_lora_rank",
)
DEFAULT_MODEL_LEN = 8192


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser, with `run` as the function that executes it."""
    parser.add_argument(
        "--targets",
        default="cpu",
        metavar="NAME,NAME,...",
        help=f"{', '.join(TARGETS)}; NAME-N for N devices, else as few as the model fits on (default: cpu)",
    )
    about = (
        "a built-in shape (llama-3.1-8b, or llama-3.1-8b:2 to compile two layers and plan the memory of all), a GGUF "
        "file, a folder or a hub id"
    )
    add_model(parser, dest="model", default="smollm2-135m", help=about)
    parser.add_argument(
        "--buckets", choices=("all", "short"), default="all", help="all steps of the grid, or its four corners"
    )
    parser.add_argument(
        "--kernels",
        choices=tuple(PLATFORM_OF_OPTION),
        help="kernels of another platform than the target's own: xla for plain XLA on a GPU",
    )
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="check only programs whose name contains TEXT, such as 'decode S=1'"
    )
    parser.add_argument("--no-cycles", action="store_true", help="do not profile blocks of TPU kernels")
    parser.add_argument("--save", type=output_file, metavar="FILE", help="record the results as a baseline")
    parser.add_argument("--against", metavar="FILE", help="fail on figures more than 5%% worse than a baseline")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write the results there")
    add_engine_options(parser, ENGINE_OPTIONS)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Check every target in `args.targets` (separated by commas, repeats ignored), print the report, and write the
    files of --save and --json. max_model_len is by default the model's context, at most DEFAULT_MODEL_LEN.

    Returns 1 if anything failed, else 0. Failures are those of programs, overfull devices, figures worse than the
    baseline's, and, in a check of all programs, programs that only the baseline has. Both files are written also after
    a failure. Raises ConfigError for wrong arguments and options before anything is compiled, and OSError if a file
    cannot be written.
    """
    from jaxengine.check import baseline, judge, report
    from jaxengine.check.children import Job, check_smallest
    from jaxengine.check.model.shapes import model_config
    from jaxengine.results import write_json

    targets = [find_target(name) for name in dict.fromkeys(args.targets.split(","))]
    for target in targets:
        require_compiler(target)
    options = given_options(args, EngineConfig)
    if options.get("max_model_len") == AUTO_LENGTH:
        raise ConfigError("max_model_len", "auto", "a number: jaxengine plan finds the longest that fits")
    model = model_config(args.model, options.get("quantization"))
    options.setdefault("max_model_len", min(DEFAULT_MODEL_LEN, model.max_position_embeddings))
    if "pipeline_layers" in options:
        options["pipeline_layers"] = list(options["pipeline_layers"])  # as a baseline stores it
    EngineConfig(**options)  # reports a wrong value before anything is compiled
    places = [split_targets(target, options) for target in targets]
    settings = {"model": args.model, "options": options, "kernels": args.kernels}
    before = baseline.load(args.against, settings) if args.against else None
    job = Job(args.model, options, args.kernels, args.buckets == "short", not args.no_cycles, args.only)

    rows: list[dict[str, Any]] = []
    seconds: dict[str, float] = {}
    instead: list[str] = []
    for own in places:
        start = time.perf_counter()
        found = check_smallest(own, job, _progress)
        name = found.target.name
        seconds[name] = time.perf_counter() - start
        instead += [f"{name} instead of {small}, where {reason}" for small, reason in found.too_small.items()]
        rows.extend(found.rows)

    missing = []
    if before is not None:
        baseline.compare(rows, before)
        missing = baseline.missing(rows, before, list(seconds)) if args.buckets == "all" and not args.only else []
    print(report.table(rows))
    print("\n".join([*instead, report.summary(rows, seconds)]))
    wrong = report.failures(rows) + judge.overfull(rows) + missing
    for line in wrong:
        print(f"FAIL {line}")
    if wrong and args.against and (difference := baseline.other_compilers(args.against)):
        print(difference)
    result = {"settings": settings, "rows": rows, "seconds": seconds, "instead": instead}
    if args.save:
        baseline.save(args.save, settings, rows)
    write_json(args.json, result)
    return 1 if wrong else 0


def _progress(target: str, done: int, total: int, what: str) -> None:
    """Print to stderr which program of a target is compiled now. done: programs before it. total: 0 if not yet
    known.
    """
    of = f"{done + 1}/{total}" if total else "-"
    print(f"{target}  {of}  {what}", file=sys.stderr, flush=True)
