"""The text and the JSON of simulated runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxengine.results import table
from jaxengine.simulate.loop import Outcome

QUANTILES = (50, 90, 99)


class Limits(NamedTuple):
    """Largest times of a request that counts for goodput.

    Attributes:
      first_token: seconds to its first token.
      interval: mean seconds between its tokens.
    """

    first_token: float = float("inf")
    interval: float = float("inf")

    @property
    def given(self) -> bool:
        """Whether there is any limit."""
        return self != NONE


NONE = Limits()


def as_json(outcome: Outcome, limits: Limits = NONE) -> dict[str, Any]:
    """Return a run as JSON values: times in seconds, shares from 0 to 1, None for a quantile of no values.

    The keys are "trace" (its name), "requests" (that ended), "refused", "seconds" (the duration),
    "requests_per_second", "output_tokens_per_second" and "good_requests_per_second" (None if the duration is 0),
    "good_share", the quantiles of "first_token", "between_tokens" and "end", and then "steps", "tokens",
    "padding_tokens", "padding_share", "preemptions", "prefix_hit_rate", "prefix_hits", "prefix_queries",
    "most_waiting", "device_busy_share" and "buckets", the number of steps by bucket. limits: times that a good request
    must meet; "good_share" is relative to the requests that ended, None if there are none.
    """
    stats, seconds = outcome.stats, outcome.seconds
    good = (outcome.first_token <= limits.first_token) & (outcome.mean_interval <= limits.interval)
    computed = stats.num_tokens + stats.num_padding_tokens
    per_second = {
        "requests": len(outcome.e2e),
        "output_tokens": stats.num_generated_tokens,
        "good_requests": int(good.sum()),
    }
    times = {"first_token": outcome.first_token, "between_tokens": outcome.intervals, "end": outcome.e2e}
    return {
        "trace": outcome.trace.name,
        "requests": len(outcome.e2e),
        "refused": len(outcome.refused),
        "seconds": seconds,
        **{f"{name}_per_second": count / seconds if seconds else None for name, count in per_second.items()},
        "good_share": float(good.mean()) if len(good) else None,
        **{name: quantiles(values) for name, values in times.items()},
        "steps": stats.num_steps,
        "tokens": stats.num_tokens,
        "padding_tokens": stats.num_padding_tokens,
        "padding_share": stats.num_padding_tokens / computed if computed else 0.0,
        "preemptions": outcome.num_preemptions,
        "prefix_hit_rate": outcome.num_prefix_hits / max(1, outcome.num_prefix_queries),
        "prefix_hits": outcome.num_prefix_hits,
        "prefix_queries": outcome.num_prefix_queries,
        "most_waiting": outcome.most_waiting,
        "device_busy_share": outcome.busy,
        "buckets": {str(bucket): use.num_steps for bucket, use in stats.buckets.items() if use.num_steps},
    }


def quantiles(values: np.ndarray) -> dict[str, float | None]:
    """Return the mean and the percentiles QUANTILES of f64[n], by the names "mean", "p50" and so on. All are None if n
    is 0.
    """
    names = ["mean", *(f"p{share}" for share in QUANTILES)]
    if not len(values):
        return dict.fromkeys(names)
    return dict(zip(names, [float(values.mean()), *map(float, np.percentile(values, QUANTILES))], strict=True))


def text(outcome: Outcome, head: Sequence[str], limits: Limits = NONE) -> str:
    """Return a run as readable text. head: first lines, which say what was simulated and with which costs. limits:
    for goodput, which is left out if they are NONE.
    """
    return "\n".join([*head, *_lines(outcome, as_json(outcome, limits), limits)])


def _lines(outcome: Outcome, found: dict[str, Any], limits: Limits) -> Iterator[str]:
    """Yield lines of text about a run: requests and seconds, a table of times in milliseconds, rates, goodput if there
    are limits, steps, and the device's use. found: the result of `as_json`. If no request ended, only the first lines.
    """
    refused = f", {found['refused']:,} refused" if found["refused"] else ""
    yield f"  {found['requests']:,} requests ended in {found['seconds']:,.2f} s{refused}"
    if outcome.refused:
        yield f"    the first refused: {outcome.refused[0]}"
    if not found["requests"]:
        return
    rows = []
    for name, label in (
        ("first_token", "time to first token"),
        ("between_tokens", "between tokens"),
        ("end", "to end"),
    ):
        shown = {each: None if value is None else value * 1e3 for each, value in found[name].items()}
        rows.append({"ms": label, **shown})
    yield from (f"  {line}" for line in table(rows).splitlines())
    yield (
        f"  {found['requests_per_second'] or 0:,.2f} requests and {found['output_tokens_per_second'] or 0:,.1f} output "
        "tokens a second"
    )
    if limits.given:
        yield f"  goodput: {found['good_requests_per_second'] or 0:,.2f} requests a second, {found['good_share']:.1%}"
    yield (
        f"  {found['steps']:,} steps; padding {found['padding_share']:.1%} of computed tokens; "
        f"{found['preemptions']:,} preemptions; {found['prefix_hit_rate']:.1%} of prompt tokens found in the cache"
    )
    busy, waiting = found["device_busy_share"], found["most_waiting"]
    yield f"  the device computed {busy:.1%} of the time; {waiting:,} waited at most"


def row(name: str, outcome: Outcome, limits: Limits = NONE) -> dict[str, Any]:
    """Return a run as one row of a table: median and p99 of the time to the first token and between tokens in
    milliseconds, output tokens and good requests per second, steps, preemptions, and padding and cache hits in percent.
    "good/s" is None without limits.
    """
    found = as_json(outcome, limits)
    first, between = found["first_token"], found["between_tokens"]
    times = {"ttft p50": first["p50"], "ttft p99": first["p99"], "itl p50": between["p50"], "itl p99": between["p99"]}
    return {
        "": name,
        **{each: None if value is None else value * 1e3 for each, value in times.items()},
        "tokens/s": found["output_tokens_per_second"],
        "good/s": found["good_requests_per_second"] if limits.given else None,
        "steps": found["steps"],
        "preempted": found["preemptions"],
        "padding %": 100 * found["padding_share"],
        "hits %": 100 * found["prefix_hit_rate"],
    }
