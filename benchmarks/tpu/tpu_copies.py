"""Instruction bundles that copying a block of pages takes in our TPU attention; needs libtpu, not a TPU.

A kernel that does nothing but start the copies of one decode block ("fetch"), or await them ("wait"), is compiled with
one block written out and with two. The difference is what a block takes, including the loop for one that is not full.
It is counted as production compiles the kernel, and with bounds checks. A file's rows that are not measured are kept.
"""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from benchmarks.harness import shared
from benchmarks.recorder import Recorder
from benchmarks.tpu.tpu_cycles import CASES, PAGE_SIZE
from benchmarks.tpu.tpu_profile import Profile, profile
from jaxengine.check.targets import TARGETS

HEADS = {"32/8 heads": (32, 8), "8/1 heads": (8, 1)}  # of 128
PARTS = ("fetch", "wait")
MAX_PAGES = 64  # pages of a sequence: more than a block holds


def count(target: str, heads: str, part: str, checked: bool) -> tuple[int, int]:
    """Return (instruction bundles that copying a block takes, pages of a block).

    target: TPU to compile for. heads: key of HEADS. part: "fetch" or "wait". checked: with bounds checks.
    """
    arguments = {"heads": HEADS[heads], "head_dim": 128, "in_keys": None, "page_size": PAGE_SIZE, "decode": True}
    arguments |= {"max_pages": MAX_PAGES, "num_tokens": 64, "part": part, "checked": checked}

    def compiled(trips: int) -> Profile:
        return profile(f"{CASES}:ours", TARGETS[target].topology, timed=False, trips=trips, **arguments)

    one, two = compiled(1), compiled(2)
    return two.bundles - one.bundles, one.facts["block_kv"] // PAGE_SIZE


def measure(target: str, heads: str, part: str) -> dict[str, Any]:
    """Return a row: the bundles that copying a block takes, without and with bounds checks.

    target: TPU to compile for. heads: key of HEADS. part: "fetch" or "wait".
    """
    (bundles, pages), (checked, _) = (count(target, heads, part, checked) for checked in (False, True))
    return {"target": target, "heads": heads, "part": part, "pages": pages, "bundles": bundles, "checked": checked}


OPTIONS = shared(targets=("v5e", "v6e", "v5p", "tpu7x"), only="")


def run(args: Namespace, recorder: Recorder) -> None:
    recorder.take_over()
    for target in args.targets:
        for heads in HEADS:
            for part in PARTS:
                if args.only in f"{heads}, {part}":
                    recorder.add(measure(target, heads, part), ("target", "heads", "part"))
