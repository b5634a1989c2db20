"""Time of a router's choice by the number of replicas (jaxengine/server/base/routing.py), and of what they publish.

Each replica has some of 256 prefixes of 30 pages, the n-th with a weight of 1 / n, and pages that nobody else has.
A row is a number of replicas. `known` and `new` are the median microseconds of a choice for prompts that begin with
such a prefix, and for others; `digest` is the mean of noting that a replica has a page or has it no longer.
"""

from __future__ import annotations

import random
import statistics
import time
from argparse import Namespace

from benchmarks.harness import Option, shared
from benchmarks.recorder import Recorder
from jaxengine.server.base.routing import Replicas

OPTIONS = {
    "replicas": Option((10, 100, 1000, 10_000)),
    "pages": Option(1300, "pages of a replica, at most 1,300,000 in all"),
    "prompt": Option(126, "pages of a prompt"),
    "choices": Option(400),
    **shared(tiny=False),
}
_PREFIXES, _MOST_PAGES = 256, 1_300_000


def measure(num_replicas: int, args: Namespace) -> dict[str, float]:
    """Fill an index of `num_replicas` replicas and return its row: "replicas"; "pages" of each, at most args.pages;
    "known" and "new", the median microseconds of a choice for prompts with and without a prefix that replicas have; and
    "digest", the mean microseconds of a page's update. Times are rounded.
    """
    draw, index = random.Random(0), Replicas()
    pages = min(args.pages, _MOST_PAGES // num_replicas)
    prefixes = [[draw.getrandbits(64) for _ in range(30)] for _ in range(_PREFIXES)]
    weights = [1 / (number + 1) for number in range(_PREFIXES)]

    def prefix() -> list[int]:
        return draw.choices(prefixes, weights)[0]

    def own(count: int) -> list[int]:
        return [draw.getrandbits(64) for _ in range(max(0, count))]

    spent = 0.0
    for number in range(num_replicas):
        index.add(name := f"r{number}")
        index.set_queue(name, draw.randrange(8))
        held = [page for _ in range(8) for page in prefix()]
        held += own(pages - len(held))
        start = time.thread_time()
        index.learn(name, held)
        index.forget(name, held[-len(held) // 4 :])
        spent += (time.thread_time() - start) / (1.25 * len(held))

    def choice(prompt: list[int], key: str) -> float:
        start = time.thread_time()
        index.choose(prompt, None, None, key=key)
        return time.thread_time() - start

    found = {
        kind: statistics.median(
            choice([*(head := prefix() if kind == "known" else []), *own(args.prompt - len(head))], str(number))
            for number in range(args.choices)
        )
        for kind in ("known", "new")
    }
    found["digest"] = spent / num_replicas
    return {"replicas": num_replicas, "pages": pages, **{name: round(1e6 * each, 2) for name, each in found.items()}}


def run(args: Namespace, recorder: Recorder) -> None:
    if args.tiny:
        args.replicas, args.choices = (10, 100), 20
    for num_replicas in args.replicas:
        recorder.add(measure(num_replicas, args))
