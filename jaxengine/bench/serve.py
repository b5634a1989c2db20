"""`jaxengine bench serve`: open-loop load on a server with OpenAI's completions or chat route, and its latencies.

Requests are sent at random times of a given rate whether or not the server keeps up. Options and figures have the names
of vLLM's `bench serve`. The server may be any, given by its URL.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxengine.bench.serve_address import add_address, settle
from jaxengine.bench.serve_vllm import add_vllm_flags, flat_result, ready, result_path, sampling
from jaxengine.config.base.key_file import read_api_key
from jaxengine.config.command_line import output_file, positive_int

if TYPE_CHECKING:
    from jaxengine.bench.serve_load import Load, Traffic

LENGTHS = ("fixed", "uniform", "lognormal")
SLO_METRICS = ("ttft", "tpot", "e2el")


class BenchError(OSError):
    """Error of a server that cannot be measured, or of options that contradict each other."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser, with `run` as the function that executes it."""
    add_address(parser, _share)
    parser.add_argument("--model", help="name of the model (default: the first one that the server lists)")
    parser.add_argument("--api-key-file", metavar="FILE", help="file whose first word is the API key")
    parser.add_argument("--ca-file", metavar="FILE", help="certificates to trust instead of the system's, PEM")
    parser.add_argument("--num-prompts", type=positive_int, default=200, help="requests of each rate")
    rates = parser.add_mutually_exclusive_group()
    rates.add_argument("--request-rate", type=_rate, default=math.inf, help="requests a second; inf: all at once")
    rates.add_argument("--sweep", type=_rate, nargs="+", metavar="RATE", help="one run for each of these rates")
    parser.add_argument(
        "--burstiness", type=_positive, default=1.0, help="shape of the gamma-distributed gaps; 1 is Poisson"
    )
    parser.add_argument("--max-concurrency", type=positive_int, help="requests open at once; others wait")
    parser.add_argument(
        "--input-len", "--random-input-len", type=positive_int, default=256, help="prompt tokens after the prefix"
    )
    parser.add_argument(
        "--output-len", "--random-output-len", type=positive_int, default=128, help="new tokens of each request"
    )
    parser.add_argument(
        "--lengths",
        choices=LENGTHS,
        default="fixed",
        help="uniform: within --range-ratio around the lengths; lognormal: with them as medians, as chats have them",
    )
    parser.add_argument("--range-ratio", type=_share, default=0.5, help="spread of uniform lengths, 0 to 1")
    parser.add_argument(
        "--max-model-len", type=positive_int, help="limit of a request's length (default: the server's)"
    )
    parser.add_argument("--num-prefixes", type=positive_int, default=0, help="number of prefixes that prompts share")
    parser.add_argument("--prefix-len", type=positive_int, default=0, help="tokens of each prefix")
    parser.add_argument("--vocab-size", type=positive_int, default=10_000, help="token ids of prompts are below it")
    parser.add_argument(
        "--prompts", choices=("auto", "ids", "text"), default="auto", help="auto: ids if the server accepts them"
    )
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--ignore-eos", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument(
        "--extra-body", type=_object, default={}, metavar="JSON", help="additional fields of each request"
    )
    parser.add_argument(
        "--goodput", type=_limit, nargs="+", default=[], metavar="METRIC:MS", help="limits, such as ttft:500 tpot:50"
    )
    add_vllm_flags(parser, _object)
    parser.add_argument("--timeout", type=_positive, default=600.0, help="seconds that a request may take")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write the result there")
    parser.add_argument("--svg", type=output_file, metavar="FILE", help="draw the result there")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure the server at each rate; print the figures and write them to the files of --json, --save-result and
    --svg.

    Settles `args` in place first (see `settle`). Returns 1 if at some rate no request succeeded, else 0. Raises
    BenchError for options that contradict each other and for a server that cannot be measured, ConfigError for a file
    without a usable API key, and another OSError for a server that does not answer or a file or folder that cannot be
    read or written.
    """
    from jaxengine.bench.serve_report import picture, sweep_table, text
    from jaxengine.results import write_json

    try:
        settle(args)
    except ValueError as error:
        raise BenchError(str(error)) from None
    if bool(args.num_prefixes) != bool(args.prefix_len):
        given = f"--num-prefixes {args.num_prefixes} and --prefix-len {args.prefix_len}"
        raise BenchError(f"{given}: give both or neither")
    if args.sweep and args.save_result:
        raise BenchError("--sweep and --save-result are both given; --json has the figures of all rates")
    if args.save_result:  # a folder that cannot be made is an error before the measurement
        Path(args.result_dir or ".").mkdir(parents=True, exist_ok=True)
    results, curves, settings = asyncio.run(_measure(args))
    for result in results:
        print(text(result, args.percentile_metrics) + "\n")
    if len(results) > 1:
        print(sweep_table(results))
    # JSON has no infinity.
    plain = [{**result, "request_rate": _plain(result["request_rate"])} for result in results]
    write_json(args.json, {**settings, "results": plain})
    if args.save_result:
        path = result_path(args, settings["model"])
        path.parent.mkdir(parents=True, exist_ok=True)  # a label or name may have a slash
        write_json(str(path), flat_result(args, settings["model"], results[0], curves))
    if args.svg:
        title = (
            f"{Path(settings['model']).name}: {args.num_prompts} requests, {args.input_len} + {args.output_len} tokens"
        )
        Path(args.svg).write_text(picture(title, results, curves))
    return 0 if all(result["successful_requests"] for result in results) else 1


async def _measure(args: argparse.Namespace) -> tuple[list[dict[str, Any]], dict[str, list[float]], dict[str, Any]]:
    """Send the load of `args` at each rate; return (figures of each rate, milliseconds of the last rate by metric,
    settings).

    Figures are "request_rate" and the keys of `serve_report.summary`. The settings are "url", "route", "model", "load"
    (fields of Load), "fields" of each request, "burstiness", "max_concurrency" and "goodput_ms" (limits by metric).
    Prompts are different at each rate. Warm-up requests come first and are not measured. Raises the errors of
    `prepare`.
    """
    from jaxengine.bench.serve_load import arrivals, plan, send
    from jaxengine.bench.serve_report import series, summary

    traffic, load = await prepare(args)
    if args.num_warmups:
        warm = replace(load, num_prompts=args.num_warmups, seed=load.seed - 2 & 0xFFFFFFFF)
        await send(traffic, plan(warm), [0.0] * args.num_warmups, args.max_concurrency)
    slo, results, curves = dict(args.goodput), [], {}
    for number, rate in enumerate(args.sweep or [args.request_rate]):
        # Different prompts for every rate, so that the server's prefix cache does not help later ones.
        one = replace(load, seed=load.seed + number)
        times = arrivals(load.num_prompts, rate, args.burstiness, one.seed)
        done = await send(traffic, plan(one), times, args.max_concurrency)
        results.append({"request_rate": rate, **summary(done, slo, args.metric_percentiles)})
        curves = series(done.samples)
    settings = {
        "url": args.url,
        "route": args.route,
        "model": traffic.model,
        "load": asdict(load),
        "fields": traffic.fields,
        "burstiness": args.burstiness,
        "max_concurrency": args.max_concurrency,
        "goodput_ms": slo,
    }
    return results, curves, settings


async def prepare(args: argparse.Namespace) -> tuple[Traffic, Load]:
    """Query the server's model and send one request as a probe; return (where and how to send, what to send).

    Waits for the server first (`ready`). The model is args.served_model_name, args.model or the first one listed, the
    limit of lengths args.max_model_len or the listed one. Prompts become texts if the server refuses token ids and
    args.prompts is "auto". Raises BenchError for a server that cannot be measured and for prefixes that leave no room,
    ConfigError for a file without a usable API key, and another OSError for a server that does not answer or a file of
    certificates that cannot be read.
    """
    from jaxengine.bench.serve_client import BadUrlError, Server, get_json
    from jaxengine.bench.serve_load import Load, Traffic

    try:
        key = None if args.api_key_file is None else read_api_key(args.api_key_file)
        server = Server.at(args.url, key, args.ca_file, insecure=args.insecure)
    except BadUrlError as error:
        raise BenchError(str(error)) from None
    server = await ready(server, args.ready_check_timeout_sec, args.header)
    model, longest = args.served_model_name or args.model, args.max_model_len
    if model is None or longest is None:
        try:
            listed = (await get_json(server, "/models"))["data"]
            entry = next((one for one in listed if model in (None, one["id"])), {})
            model, longest = model or entry["id"], longest or entry.get("max_model_len")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if model is None:
                raise BenchError(f"{args.url} lists no models ({error}); name one with --model") from None
    # The length of the shortest prompt: outputs take up to half of the limit.
    if longest is not None and args.prefix_len >= (most := longest - longest // 2):
        raise BenchError(f"--prefix-len is {args.prefix_len}; allowed: less than {most}, half of {longest} tokens")
    fields = {"temperature": args.temperature, **({"ignore_eos": True} if args.ignore_eos else {})}
    fields |= {**sampling(args), **args.extra_body}
    assert model is not None
    traffic = Traffic(server, args.route, model, fields, args.timeout)
    load = Load(
        num_prompts=args.num_prompts,
        input_len=args.input_len,
        output_len=args.output_len,
        lengths=args.lengths,
        range_ratio=args.range_ratio,
        max_model_len=longest,
        num_prefixes=args.num_prefixes,
        prefix_len=args.prefix_len,
        vocab_size=args.vocab_size,
        text=args.prompts == "text" or args.route == "chat/completions",
        seed=args.seed,
    )
    return traffic, await _probed(traffic, load, args.prompts)


async def _probed(traffic: Traffic, load: Load, prompts: str) -> Load:
    """Send one request as a probe; return the load, changed to text prompts if token ids get status 400, 422 or 500.

    prompts: "auto", or a required form, which is not changed. Raises BenchError if the probe fails.
    """
    from jaxengine.bench.serve_load import plan, send

    done = await send(traffic, plan(replace(load, num_prompts=1, seed=load.seed - 1 & 0xFFFFFFFF)), [0.0])
    sample = done.samples[0]
    if sample.error is None:
        return load
    if prompts == "auto" and not load.text and sample.error in ("http 400", "http 422", "http 500"):
        return await _probed(traffic, replace(load, text=True), prompts)
    raise BenchError(f"a first request failed ({sample.error}): {sample.message}")


def _plain(rate: float) -> float | str:
    """Return the rate, or "inf" for infinity, which JSON lacks."""
    return rate if math.isfinite(rate) else "inf"


def _rate(text: str) -> float:
    """Parse a rate above 0; "inf" is infinity. Raises ArgumentTypeError for any other text."""
    return math.inf if text == "inf" else _positive(text)


def _positive(text: str) -> float:
    """Parse a finite number above 0. Raises ArgumentTypeError for any other text."""
    return _number(text, lambda value: 0 < value < math.inf, "a number above 0")


def _share(text: str) -> float:
    """Parse a number from 0 to 1, both inclusive. Raises ArgumentTypeError for any other text."""
    return _number(text, lambda value: 0 <= value <= 1, "a number from 0 to 1")


def _number(text: str, allowed: Any, what: str) -> float:
    """Parse a number. Raises ArgumentTypeError, saying `what` it must be, if it is not a number or not allowed.

    allowed: takes the value, NaN if the text is not a number, and returns whether it is allowed.
    """
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not allowed(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
    return value


def _object(text: str) -> dict[str, Any]:
    """Parse a JSON object. Raises ArgumentTypeError for any other text."""
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object")
    return found


def _limit(text: str) -> tuple[str, float]:
    """Parse "METRIC:MS"; return (metric, milliseconds).

    Raises ArgumentTypeError for a metric that is not in SLO_METRICS, and unless the number is finite and above 0.
    """
    name, _, milliseconds = text.partition(":")
    if name not in SLO_METRICS:
        raise argparse.ArgumentTypeError(f"{text!r} is not a limit; allowed: {', '.join(SLO_METRICS)}, as in ttft:500")
    return name, _positive(milliseconds)
