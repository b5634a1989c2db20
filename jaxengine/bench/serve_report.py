"""Computes figures from request samples: percentiles, throughput, goodput, errors by kind, and an SVG chart.

Names and definitions are those of vLLM's `bench serve`: TTFT is the time from sending to the first piece of output,
TPOT the mean time per token after the first, ITL the time between pieces, E2EL the time of the whole request.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any
from xml.sax.saxutils import escape

from jaxengine.bench.serve_client import Sample
from jaxengine.bench.serve_load import LoadResult
from jaxengine.results import percentile, record, table

METRICS = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2el": "E2EL"}
SHARES = (50, 90, 99)

Points = Sequence[tuple[float, float]]


def series(samples: Sequence[Sample]) -> dict[str, list[float]]:
    """Return the milliseconds of "ttft", "tpot", "itl" and "e2el" over the successful requests.

    There is one value per request, for "itl" one per gap. A request with fewer than two tokens has no "tpot".
    """
    good = [sample for sample in samples if sample.error is None]
    tpot = [value for sample in good if (value := sample.per_token_seconds) is not None]
    seconds = {
        "ttft": [sample.first_token_seconds for sample in good],
        "tpot": tpot,
        "itl": [gap for sample in good for gap in sample.gaps],
        "e2el": [sample.seconds for sample in good],
    }
    return {name: [value * 1e3 for value in values] for name, values in seconds.items()}


def meets(sample: Sample, slo: Mapping[str, float]) -> bool:
    """Return whether a request succeeded within all limits. A metric without a value meets its limit; a failed request
    meets none.

    slo: limits in milliseconds (inclusive) of the metrics "ttft", "tpot" and "e2el".
    """
    if sample.error is not None:
        return False
    values = {
        "ttft": sample.first_token_seconds,
        "tpot": sample.per_token_seconds,
        "e2el": sample.seconds,
    }
    return all((values[name] or 0.0) * 1e3 <= limit for name, limit in slo.items())


def summary(run: LoadResult, slo: Mapping[str, float] | None = None, further: Sequence[float] = ()) -> dict[str, Any]:
    """Return all figures of a load, by the names that `bench serve` prints and writes.

    Requests: "successful_requests", "failed_requests", "errors" (their number by kind), "first_error" (a message),
    "peak_concurrent_requests". Tokens: "total_input_tokens", "total_generated_tokens", "tokens_counted_by" ("usage", or
    "pieces" if a response has none). Per second: "request_throughput", "request_goodput", "output_throughput",
    "total_token_throughput". Times: "benchmark_duration_s", and "latency_ms", the spread of each metric of `series`,
    None without samples. The client: "client_send_lag_ms_p99" and "client_cpu_percent".

    Failed requests count only as errors and in the peak and the lag. slo: limits in milliseconds by metric for the
    goodput, which is None without limits. further: percentiles in addition to SHARES.
    """
    good = [sample for sample in run.samples if sample.error is None]
    failed = [sample for sample in run.samples if sample.error is not None]
    tokens = sum(sample.output_tokens for sample in good)
    prompt_tokens = sum(sample.prompt_tokens for sample in good)
    result: dict[str, Any] = {
        "successful_requests": len(good),
        "failed_requests": len(failed),
        "errors": dict(Counter(str(sample.error) for sample in failed)),
        "first_error": failed[0].message if failed else None,
        "benchmark_duration_s": round(run.seconds, 3),
        "total_input_tokens": prompt_tokens,
        "total_generated_tokens": tokens,
        "tokens_counted_by": "usage" if all(sample.counted for sample in good) else "pieces",
        "request_throughput": _rate(len(good), run.seconds),
        "request_goodput": None,
        "output_throughput": _rate(tokens, run.seconds),
        "total_token_throughput": _rate(tokens + prompt_tokens, run.seconds),
        "peak_concurrent_requests": _peak(run.samples),
        "client_send_lag_ms_p99": round(percentile(run.lags, 0.99) * 1e3, 2) if run.lags else None,
        "client_cpu_percent": round(100 * run.cpu_seconds / run.seconds, 1),
        "latency_ms": {name: _spread(values, further) for name, values in series(run.samples).items()},
    }
    if slo:
        result["request_goodput"] = _rate(sum(meets(sample, slo) for sample in run.samples), run.seconds)
    return result


def _rate(count: float, seconds: float) -> float:
    """Return count / seconds, rounded to three decimals; 0.0 if seconds is 0."""
    return round(count / seconds, 3) if seconds else 0.0


def _spread(values: Sequence[float], further: Sequence[float]) -> dict[str, float | None]:
    """Return the "mean", the "median", and the percentiles of SHARES and `further` ("p90"), rounded to three decimals;
    all None without values.
    """
    wanted = [50, *sorted({*SHARES, *further} - {50})]
    names = ("mean", "median", *(f"p{share:g}" for share in wanted[1:]))
    if not values:
        return dict.fromkeys(names)
    shares = [percentile(values, share / 100) for share in wanted]
    return {name: round(value, 3) for name, value in zip(names, (sum(values) / len(values), *shares), strict=True)}


def _peak(samples: Sequence[Sample]) -> int:
    """Return the largest number of requests that were open at the same time.

    A request that ends at the moment when another is sent is not counted with it.
    """
    changes = sorted([(sample.sent, 1) for sample in samples] + [(sample.ended, -1) for sample in samples])
    most = now = 0
    for _, change in changes:
        now += change
        most = max(most, now)
    return most


def text(result: Mapping[str, Any], metrics: Sequence[str] = tuple(METRICS)) -> str:
    """Return the figures of one rate, as `summary` returns them, as readable text. metrics: latencies to show."""
    plain = {name: value for name, value in result.items() if name not in ("latency_ms", "errors", "first_error")}
    rows = [{"ms": METRICS[name], **spread} for name, spread in result["latency_ms"].items() if name in metrics]
    parts = [record(plain), table(rows)]
    if result["errors"]:
        counts = ", ".join(f"{kind}: {count}" for kind, count in result["errors"].items())
        parts.append(f"failed: {counts}\nfirst of them: {result['first_error']}")
    return "\n\n".join(parts)


def sweep_table(results: Sequence[Mapping[str, Any]]) -> str:
    """Return a text table with one row per rate: rates offered, reached and within limits, tokens per second, failures,
    and median and p99 of each latency.

    results: results of `summary`, each with "request_rate".
    """
    rows = []
    for result in results:
        latency = result["latency_ms"]
        rows.append(
            {
                "rate": result["request_rate"],
                "req/s": result["request_throughput"],
                "goodput": result["request_goodput"],
                "out tok/s": result["output_throughput"],
                "failed": result["failed_requests"],
                **{f"{METRICS[name]} {share}": latency[name][share] for name in METRICS for share in ("median", "p99")},
            }
        )
    return table(rows)


def picture(title: str, results: Sequence[Mapping[str, Any]], curves: Mapping[str, Sequence[float]]) -> str:
    """Return an SVG chart: for one result the cumulative distribution of each latency; for several the median and p99
    of ttft and tpot, and the throughputs, by rate.

    Of several results those with an infinite rate are left out. results: results of `summary`, each with
    "request_rate". curves: milliseconds by metric of one rate; unused for several.
    """
    if len(results) == 1:
        lines = {METRICS[name]: _cumulative(values) for name, values in curves.items() if values}
        panels = [_panel(0, "share of values below", "ms", "%", lines, log=True)]
    else:
        finite = [result for result in results if math.isfinite(result["request_rate"])]
        latency: dict[str, Points] = {}
        for name in ("ttft", "tpot"):
            for share in ("median", "p99"):
                points = [(result["request_rate"], result["latency_ms"][name][share]) for result in finite]
                latency[f"{METRICS[name]} {share}"] = [(x, y) for x, y in points if y is not None]
        offered = {
            "output tok/s": [(result["request_rate"], result["output_throughput"]) for result in finite],
        }
        served = {
            "answered": [(result["request_rate"], result["request_throughput"]) for result in finite],
            "within the limits": [
                (result["request_rate"], result["request_goodput"])
                for result in finite
                if result["request_goodput"] is not None
            ],
        }
        panels = [
            _panel(0, "latency", "requests/s offered", "ms", latency),
            _panel(1, "tokens", "requests/s offered", "tok/s", offered),
            _panel(2, "requests", "requests/s offered", "requests/s", served),
        ]
    width = PANEL_WIDTH * len(panels)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {PANEL_HEIGHT + 30}" width="{width}" '
        f'font-family="sans-serif" font-size="12"><rect width="100%" height="100%" fill="white"/>'
        f'<text x="{LEFT}" y="22" font-size="15">{escape(title)}</text>{"".join(panels)}</svg>\n'
    )


PANEL_WIDTH, PANEL_HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 520, 340, 64, 16, 60, 44
COLOURS = ("#1b6ca8", "#d1495b", "#3d8361", "#8c6bb1", "#e09f3e")


def _cumulative(values: Sequence[float]) -> Points:
    """Return points (value, percent of values not above it), ascending, at most about 400. values: at least one."""
    ordered = sorted(values)
    step = max(1, len(ordered) // 200)
    places = [*range(0, len(ordered), step), len(ordered) - 1]
    return [(ordered[place], 100 * (place + 1) / len(ordered)) for place in places]


def _panel(place: int, title: str, x_name: str, y_name: str, lines: Mapping[str, Points], log: bool = False) -> str:
    """Return the SVG elements of one chart, number `place` from the left; "" without points.

    The x axis is logarithmic with `log`, where values below 0.001 are drawn as 0.001, and otherwise starts at 0, as
    the y axis does. Lines of at most 20 points show them as circles. x_name, y_name: texts at the axes. lines: points
    by the name in the legend.
    """
    points = [point for line in lines.values() for point in line]
    if not points:
        return ""
    xs = [max(x, 1e-3) if log else x for x, _ in points]
    low, high = (min(xs), max(xs)) if log else (0.0, max(xs))
    top = max(y for _, y in points) or 1.0
    left, bottom = place * PANEL_WIDTH + LEFT, PANEL_HEIGHT + 30 - BOTTOM
    width, height = PANEL_WIDTH - LEFT - RIGHT, PANEL_HEIGHT + 30 - BOTTOM - TOP

    def across(x: float) -> float:
        if log:
            span = math.log(high / low) or 1.0
            return left + width * math.log(max(x, 1e-3) / low) / span
        return left + width * (x - low) / ((high - low) or 1.0)

    def down(y: float) -> float:
        return bottom - height * y / top

    parts = [f'<text x="{left}" y="{TOP - 10}">{escape(title)}</text>']
    for tick in _ticks(0.0, top):
        y = down(tick)
        parts.append(f'<line x1="{left}" y1="{y:.1f}" x2="{left + width}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>')
    for tick in _log_ticks(low, high) if log else _ticks(low, high):
        x = across(tick)
        parts.append(f'<line x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{bottom}" stroke="#eee"/>')
        parts.append(f'<text x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{tick:g}</text>')
    parts.append(f'<text x="{left + width}" y="{bottom + 34}" text-anchor="end">{escape(x_name)}</text>')
    parts.append(f'<text x="{left - 6}" y="{TOP - 10}" text-anchor="end">{escape(y_name)}</text>')
    legend = []
    for number, (name, line) in enumerate(lines.items()):
        colour = COLOURS[number % len(COLOURS)]
        path = " ".join(f"{across(x):.1f},{down(y):.1f}" for x, y in line)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        if len(line) <= 20:
            parts += [f'<circle cx="{across(x):.1f}" cy="{down(y):.1f}" r="3" fill="{colour}"/>' for x, y in line]
        legend.append(f'<tspan fill="{colour}" dx="10">{escape(name)}</tspan>')
    parts.append(f'<text x="{left + width}" y="{TOP - 10}" text-anchor="end">{"".join(legend)}</text>')
    return "".join(parts)


def _ticks(low: float, high: float) -> list[float]:
    """Return about five round tick values from `low` to `high`, ascending."""
    step = 10 ** math.floor(math.log10((high - low) or 1.0))
    step = next((step * part for part in (0.2, 0.5, 1.0) if (high - low) / (step * part) <= 6), step * 2)
    return [round(number * step, 10) for number in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    """Return ticks from `low` to `high`, both above 0: 1, 2 and 5 times each power of ten.

    Only the powers themselves if there are more than four of them.
    """
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    parts = (1,) if len(powers) > 4 else (1, 2, 5)
    found = [part * 10.0**power for power in powers for part in parts]
    return [tick for tick in found if low <= tick <= high]
