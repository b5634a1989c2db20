"""Flags of vLLM's `bench serve` about sampling, headers, warm-up and results, and the file of --save-result."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import math
import re
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxengine.results import percentile
from jaxengine.scheduler.base.sampling_fields import ROWS

if TYPE_CHECKING:
    from jaxengine.bench.serve_client import Server

METRICS = ("ttft", "tpot", "itl", "e2el")
# Field of a request -> how its flag is read.
_FIELDS = {name: type(row.neutral) for name, row in ROWS.items() if name != "temperature"} | {"logprobs": int}
_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_OF_THE_BODY = ("content-length", "content-type", "transfer-encoding")
# Flags about the client's own tokenizer and progress bar: prompts are made without the one, and there is no other.
_WITHOUT_EFFECT = ("--tokenizer", "--tokenizer-mode")
_SWITCHES_WITHOUT_EFFECT = ("--skip-tokenizer-init", "--trust-remote-code", "--disable-tqdm", "--disable-shuffle")


def add_vllm_flags(parser: argparse.ArgumentParser, an_object: Any) -> None:
    """Add vLLM's flags about sampling, headers, warm-up and results to a parser; some have no effect here.

    an_object: parses a JSON object.
    """
    for name, kind in _FIELDS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, help=f"field {name} of each request")
    parser.add_argument(
        "--chat-template-kwargs", type=an_object, metavar="JSON", help="field chat_template_kwargs of each request"
    )
    parser.add_argument("--served-model-name", metavar="NAME", help="name of the model in requests, before --model")
    parser.add_argument("--header", type=_header, nargs="+", default=[], metavar="NAME=VALUE", help="headers to send")
    parser.add_argument("--num-warmups", type=_whole, default=0, help="requests before the measurement")
    parser.add_argument(
        "--ready-check-timeout-sec", type=_whole, default=0, help="seconds to wait for the server; 0: not at all"
    )
    parser.add_argument(
        "--percentile-metrics", type=_metrics, default=METRICS, metavar="M,M", help="latencies to print"
    )
    parser.add_argument(
        "--metric-percentiles", type=_shares, default=(), metavar="P,P", help="percentiles beside 50, 90 and 99"
    )
    parser.add_argument("--save-result", action="store_true", help="write a file with vLLM's keys")
    parser.add_argument("--result-dir", metavar="DIR", help="with --save-result: its folder (default: here)")
    parser.add_argument("--result-filename", metavar="NAME", help="with --save-result: its name")
    parser.add_argument("--label", help="with --save-result: beginning of its name, and in it")
    parser.add_argument(
        "--metadata", type=_pair, nargs="+", default=[], metavar="KEY=VALUE", help="with --save-result: further keys"
    )
    for flag in _WITHOUT_EFFECT:
        parser.add_argument(flag, help=argparse.SUPPRESS)
    for flag in _SWITCHES_WITHOUT_EFFECT:
        parser.add_argument(flag, action="store_true", help=argparse.SUPPRESS)


def sampling(args: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of each request that the flags set; a chat has the number of its logprobs as top_logprobs."""
    found = {name: value for name in _FIELDS if (value := getattr(args, name)) is not None}
    if args.route == "chat/completions" and "logprobs" in found:
        found |= {"logprobs": True, "top_logprobs": found["logprobs"]}
    if args.chat_template_kwargs:
        found["chat_template_kwargs"] = args.chat_template_kwargs
    return found


def result_path(args: argparse.Namespace, model: str) -> Path:
    """Return the path of the file of --save-result, which need not exist, nor its folder.

    Its name is the given one, or consists of the label or backend, the rate, the limit of open requests, the model and
    the time.
    """
    folder = Path(args.result_dir or ".")
    if args.result_filename:
        return folder / args.result_filename
    most = "" if args.max_concurrency is None else f"-concurrency{args.max_concurrency}"
    head = f"{args.label or args.backend or 'vllm'}-{args.request_rate}qps{most}"
    return folder / f"{head}-{Path(model).name}-{time.strftime('%Y%m%d-%H%M%S')}.json"


def flat_result(
    args: argparse.Namespace, model: str, result: Mapping[str, Any], values: Mapping[str, Sequence[float]]
) -> dict[str, Any]:
    """Return the figures of one rate under vLLM's keys, such as mean_ttft_ms, with those of --metadata.

    Mean, median, standard deviation and percentiles (p99 unless args.metric_percentiles names others) are those of the
    metrics in args.percentile_metrics. result: what `serve_report.summary` returns. values: milliseconds by metric. A
    figure without values is 0.0, as in vLLM.
    """
    rate = args.request_rate
    found = {
        "date": time.strftime("%Y%m%d-%H%M%S"),
        "backend": args.backend or "vllm",
        "label": args.label,
        "model_id": model,
        "num_prompts": args.num_prompts,
        **dict(args.metadata),
        "request_rate": rate if math.isfinite(rate) else "inf",
        "burstiness": args.burstiness,
        "max_concurrency": args.max_concurrency,
        "duration": result["benchmark_duration_s"],
        "completed": result["successful_requests"],
        "failed": result["failed_requests"],
        "total_input_tokens": result["total_input_tokens"],
        "total_output_tokens": result["total_generated_tokens"],
        "request_throughput": result["request_throughput"],
        "request_goodput": result["request_goodput"],
        "output_throughput": result["output_throughput"],
        "total_token_throughput": result["total_token_throughput"],
        "max_concurrent_requests": result["peak_concurrent_requests"],
    }
    for name in args.percentile_metrics:
        own = values.get(name) or [0.0]
        found[f"mean_{name}_ms"] = statistics.fmean(own)
        found[f"median_{name}_ms"] = statistics.median(own)
        found[f"std_{name}_ms"] = statistics.pstdev(own)
        found |= {f"p{share:g}_{name}_ms": percentile(own, share / 100) for share in args.metric_percentiles or (99,)}
    return found


async def ready(server: Server, seconds: float, headers: Sequence[tuple[str, str]]) -> Server:
    """Return the server with `headers` added, which replace its own of the same names, once it lists its models or
    `seconds` are over; 0 does not wait.

    It is asked every second, or every tenth of `seconds` if that is less. A server that has not answered in time raises
    nothing here.
    """
    from jaxengine.bench.serve_client import get_json

    given = {name.lower() for name, _ in headers}
    kept = (each for each in server.headers if each[0].lower() not in given)
    server = replace(server, headers=(*kept, *headers))
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while seconds:
                try:
                    await get_json(server, "/models")
                    break
                except (OSError, ValueError):
                    await asyncio.sleep(min(1.0, seconds / 10))
    return server


def _pair(text: str) -> tuple[str, str]:
    """Parse NAME=VALUE; return both without surrounding white space. Raises ArgumentTypeError for any other text."""
    name, equals, value = text.partition("=")
    if not name.strip() or not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return name.strip(), value.strip()


def _header(text: str) -> tuple[str, str]:
    """Parse NAME=VALUE, a header of HTTP. Raises ArgumentTypeError for any other text, and for the headers that depend
    on the body.
    """
    name, value = _pair(text)
    if name.lower() in _OF_THE_BODY or not _NAME.fullmatch(name) or not (value.isascii() and value.isprintable()):
        allowed = f"a header of HTTP other than {', '.join(_OF_THE_BODY)}"
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE, {allowed}")
    return name, value


def _whole(text: str) -> int:
    """Parse a whole number from 0. Raises ArgumentTypeError for any other text."""
    if not text.isascii() or not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0")
    return int(text)


def _metrics(text: str) -> tuple[str, ...]:
    """Parse names of METRICS that are separated by commas. Raises ArgumentTypeError for any other text."""
    names = tuple(text.split(","))
    if wrong := [name for name in names if name not in METRICS]:
        raise argparse.ArgumentTypeError(f"{wrong[0]!r} is no latency; allowed: {', '.join(METRICS)}")
    return names


def _shares(text: str) -> tuple[float, ...]:
    """Parse percentiles, 0 to 100, that are separated by commas. Raises ArgumentTypeError for any other text."""
    try:
        found = tuple(map(float, text.split(",")))
    except ValueError:
        found = (math.nan,)
    if not all(0 <= share <= 100 for share in found):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers from 0 to 100, such as 50,99")
    return found
