"""The text and the JSON of runs of a fleet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxengine.results import table
from jaxengine.simulate.fleet import FleetOutcome
from jaxengine.simulate.report import NONE, Limits, quantiles


def fleet_json(outcome: FleetOutcome, limits: Limits = NONE) -> dict[str, Any]:
    """Return a run of a fleet as JSON values: times in seconds, shares from 0 to 1, None for a quantile of no values.

    "router" is the router's name.

    The keys "requests" (that ended), "refused", "failed" and "retried" count requests, "seconds" is the duration, and
    "requests_per_second", "output_tokens_per_second" and "good_requests_per_second" are None if that is 0.
    "first_token", "between_tokens" and "end" are the quantiles of requests' times. "load" has the largest value and the
    mean over replicas of "queued" and "busy_seconds". Sums over all engines are "steps", "preemptions", "prefix_hits"
    and "prefix_queries", with the share "prefix_hit_rate". "published_digests" is a number, and
    "published_digests_per_second" None if the duration is 0. The fleet's options are "replicas", "deaths", "drains",
    "restart_seconds", "publish_seconds" and "seed". "cost" has the real "router_seconds" of a choice and "cpu_seconds"
    of the simulation. limits: times that a good request must meet; "good_share" is relative to all requests of the
    trace.
    """
    seconds, ended = outcome.seconds, len(outcome.e2e)
    good = (outcome.first_token <= limits.first_token) & (outcome.mean_interval <= limits.interval)
    per_second = {"requests": ended, "output_tokens": outcome.num_output_tokens, "good_requests": int(good.sum())}
    times = {"first_token": outcome.first_token, "between_tokens": outcome.mean_interval, "end": outcome.e2e}
    options, total = outcome.options, len(outcome.trace.requests)
    return {
        "router": outcome.router,
        "requests": ended,
        "refused": len(outcome.refused),
        "failed": outcome.failed,
        "retried": outcome.retried,
        "seconds": seconds,
        **{f"{name}_per_second": count / seconds if seconds else None for name, count in per_second.items()},
        "good_share": float(good.sum()) / total,
        **{name: quantiles(values) for name, values in times.items()},
        "steps": outcome.num_steps,
        "preemptions": outcome.num_preemptions,
        "prefix_hit_rate": outcome.num_prefix_hits / max(1, outcome.num_prefix_queries),
        "prefix_hits": outcome.num_prefix_hits,
        "prefix_queries": outcome.num_prefix_queries,
        "load": {"queued": _most_and_mean(outcome.queued), "busy_seconds": _most_and_mean(outcome.busy)},
        "published_digests": outcome.num_published,
        "published_digests_per_second": outcome.num_published / seconds if seconds else None,
        "cost": {
            "router_seconds": outcome.router_seconds,
            "cpu_seconds": outcome.cpu_seconds,
        },
        "replicas": options.num_replicas,
        "deaths": options.deaths,
        "drains": options.drains,
        "restart_seconds": options.restart_seconds,
        "publish_seconds": options.publish_seconds,
        "seed": options.seed,
    }


def _most_and_mean(values: np.ndarray) -> dict[str, float]:
    """Return {"most": the largest value, "mean": the mean} of f64[n]; n must be at least 1."""
    return {"most": float(values.max()), "mean": float(values.mean())}


def fleet_text(outcomes: Sequence[FleetOutcome], head: Sequence[str], limits: Limits = NONE) -> str:
    """Return runs of one trace as readable text: `head`, lines about the fleet, and a table with a row for each
    router. limits: times that a good request must meet.
    """
    first = outcomes[0]
    options = first.options
    lines = [f"  {options.num_replicas:,} replicas, which publish their caches after {options.publish_seconds:g} s"]
    if options.deaths or options.drains:
        what = f"{options.deaths:,} die and {options.drains:,} drain"
        lines.append(f"  {what}; another one is there after {options.restart_seconds:g} s")
    lines += [f"  the first refused: {first.refused[0]}"] if first.refused else []
    return "\n".join([*head, *lines, table([_row(outcome, limits) for outcome in outcomes])])


def _row(outcome: FleetOutcome, limits: Limits) -> dict[str, Any]:
    """Return one router's run as a row of a table: times in milliseconds, shares in percent, None where there is no
    value.

    The columns are "router", p50 and p99 of "ttft", "itl" and "e2e", "tokens/s", "good %" (None without limits), "hits
    %", "most/mean load", "preempted", "failed", "retried" and "us a choice p50".
    """
    found = fleet_json(outcome, limits)
    times = {"ttft": found["first_token"], "itl": found["between_tokens"], "e2e": found["end"]}
    queued = found["load"]["queued"]
    return {
        "router": outcome.router,
        **{
            f"{name} {share}": None if values[share] is None else values[share] * 1e3
            for name, values in times.items()
            for share in ("p50", "p99")
        },
        "tokens/s": found["output_tokens_per_second"],
        "good %": 100 * found["good_share"] if limits.given else None,
        "hits %": 100 * found["prefix_hit_rate"],
        "most/mean load": queued["most"] / queued["mean"] if queued["mean"] else None,
        "preempted": found["preemptions"],
        "failed": found["failed"],
        "retried": found["retried"],
        "us a choice p50": 1e6 * found["cost"]["router_seconds"],
    }
