"""Current state of an engine as plain JSON values, which the status page requests once a second.

Its size is bounded: many pages share a cell of the map, and only some of the running requests are listed.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from jaxengine.engine.engine import Engine
from jaxengine.engine.metrics import Metrics
from jaxengine.runner.start.memory_bar import parts_of, svg
from jaxengine.scheduler.base.request import Request
from jaxengine.scheduler.scheduler import Scheduler

MAX_CELLS = 2000
MAX_REQUESTS = 64
PAGE_STATES = ("free", "cached", "active", "shared")


def engine_status(engine: Engine, metrics: Metrics) -> dict[str, Any]:
    """Return the engine's status as JSON values: times in seconds ("time" of time.monotonic), sizes in bytes, usage as
    a share of 1.

    Counts and rates are "num_running", "num_waiting", "num_preemptions", "kv_usage", "prompt_tokens",
    "generation_tokens", "prompt_throughput", "generation_throughput" (tokens per second), "prefix_cache" ("queries",
    "hits"), "finished" (by reason) and "compilations_since_ready". "time_to_first_token" and "inter_token_latency" have
    "p50" and "p99", None while nothing has been observed. "steps" has their "count" and seconds by part, "buckets" the
    steps and tokens of each compiled shape, "requests" an entry (`_running`) for each of the MAX_REQUESTS running ones
    that arrived first.
    "pages" is the `page_map`, "memory" that of `_memory`. Each extension adds the entries of its `status`; "pictures"
    is None without one for images.
    """
    scheduler, counts, requests = engine.scheduler, engine.stats, engine.request_stats
    prompt_rate, generation_rate = metrics.throughput()
    first_token, intervals = requests.recent_first_token, requests.recent_intervals
    status = {
        "time": time.monotonic(),
        "num_running": scheduler.num_running,
        "num_waiting": scheduler.num_waiting,
        "num_preemptions": scheduler.num_preemptions,
        "kv_usage": scheduler.page_usage,
        "prompt_tokens": requests.num_prompt_tokens,
        "generation_tokens": counts.num_generated_tokens,
        "prompt_throughput": prompt_rate,
        "generation_throughput": generation_rate,
        "time_to_first_token": dict(zip(("p50", "p99"), first_token.percentiles(50, 99), strict=True)),
        "inter_token_latency": dict(zip(("p50", "p99"), intervals.percentiles(50, 99), strict=True)),
        "prefix_cache": {"queries": scheduler.num_prefix_queries, "hits": scheduler.num_prefix_hits},
        "pictures": None,
        "finished": {reason.value: count for reason, count in requests.finished.items()},
        "compilations_since_ready": engine.runner.compiles.count,
        "steps": {
            "count": counts.num_steps,
            "schedule": counts.schedule_seconds,
            "dispatch": counts.dispatch_seconds,
            "wait": counts.wait_seconds,
            "update": counts.update_seconds,
            "idle": counts.idle_seconds,
        },
        "pages": page_map(scheduler),
        "memory": _memory(engine),
        "buckets": [
            {
                "bucket": str(bucket),
                "steps": use.num_steps,
                "tokens": use.num_tokens,
                "padding": use.num_padding_tokens,
            }
            for bucket, use in sorted(engine.stats.buckets.items())
        ],
        "requests": [_running(scheduler, request) for request in _longest_running(scheduler)],
    }
    for each in engine.extensions.by_name.values():
        status |= each.status()
    return status


def page_map(scheduler: Scheduler) -> dict[str, Any]:
    """Return a map of the KV pages of all replicas, in order, with at most MAX_CELLS cells.

    `cells`: one digit per cell, the index into `states` of the commonest state among its `pages_per_cell` pages (of
    equally common ones, the more used). `counts`: number of pages in each of `states`. Also `num_pages` and
    `page_size`, the tokens of a page.
    """
    states = np.concatenate([rank.pool.page_states() for rank in scheduler.ranks])
    per_cell = -(-len(states) // MAX_CELLS)
    num_cells = -(-len(states) // per_cell)
    cell = np.arange(len(states)) // per_cell
    counts = np.bincount(cell * len(PAGE_STATES) + states, minlength=num_cells * len(PAGE_STATES))
    counts = counts.reshape(num_cells, len(PAGE_STATES))
    # Of equal counts the last state: argmax over the states in reverse order.
    most = len(PAGE_STATES) - 1 - counts[:, ::-1].argmax(axis=1)
    return {
        "num_pages": len(states),
        "page_size": scheduler.config.page_size,
        "pages_per_cell": per_cell,
        "states": list(PAGE_STATES),
        "counts": counts.sum(axis=0).tolist(),
        "cells": "".join(map(str, most.tolist())),
    }


def _memory(engine: Engine) -> dict[str, Any]:
    """Return the memory plan of the device with the least free memory, as the status page shows it.

    Sizes are in bytes: each planned part under its own name, "budget" (what the engine may use), "device" (the total)
    and "in_use" (what a device of the first pipeline stage uses now). "counts" is "device", or "process" on a CPU,
    where "in_use" is the process's memory. "svg" is a picture of the plan.
    """
    plan = engine.runner.plan
    return {
        **plan.parts,
        "budget": plan.budget,
        "device": plan.total,
        "in_use": engine.runner.memory_in_use(),
        "counts": "process" if engine.runner.on_cpu else "device",
        "svg": svg("planned memory of a device", parts_of(plan), plan.total),
    }


def _longest_running(scheduler: Scheduler) -> list[Request]:
    """Return the running requests, oldest arrival first, at most MAX_REQUESTS."""
    running = [request for rank in scheduler.ranks for request in rank.slots.requests if request is not None]
    return sorted(running, key=lambda request: request.arrival_index)[:MAX_REQUESTS]


def _running(scheduler: Scheduler, request: Request) -> dict[str, Any]:
    """Return one running request as an entry of the status: "id", the token counts "num_prompt", "num_computed" (tokens
    whose keys and values are computed or being computed), "num_output" and "max_tokens", "num_preemptions", and "age",
    the seconds since its arrival.
    """
    slots, slot = scheduler.ranks[request.rank].slots, request.slot
    return {
        "id": request.request_id,
        "num_prompt": request.num_prompt_tokens,
        "num_computed": int(slots.num_computed[slot]),
        "num_output": int(slots.num_known[slot]) - request.num_prompt_tokens,
        "max_tokens": request.max_tokens,
        "num_preemptions": request.num_preemptions,
        "age": time.monotonic() - request.arrival_time,
    }
