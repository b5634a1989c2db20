"""Compilation of every program that serving can need, before anything is served."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice

from jaxengine.runner.base.memory import num_cores
from jaxengine.runner.stage_runner import StageRunner

Progress = Callable[[int, int, str], None]


def warm_up(
    stages: Sequence[StageRunner], num_pages: int, progress: Progress, *, late: bool = False, ahead: int = 0
) -> None:
    """Set the number of pages of each stage's pool, then compile or load every executable of the stages, the largest
    steps first so that failures show early.

    num_pages: KV pages of a replica. progress: called with (programs done, their total number, name of the next). late:
    compile nothing now, as with enforce_eager; each program is then compiled at its first use. ahead: number of forward
    passes that may be traced and compiling before the first of them is waited for, in a context of
    `executables.cache.compiling_ahead`; 0 begins none.
    """
    first, last = stages[0].programs, stages[-1]
    buckets = [] if late else sorted(first.packer.buckets, reverse=True)
    epilogues = [] if late else last.programs.epilogue_sizes()
    own = [] if late else [(stage, *names) for stage in stages for names in stage.own_programs()]
    forwards = [(stage, bucket) for bucket in buckets for stage in stages]
    total = len(forwards) + len(epilogues) + len(own)
    for stage in stages:
        stage.plan_pool(num_pages)
    upcoming = iter(forwards if ahead else ())
    for stage, bucket in islice(upcoming, ahead):
        stage.begin_forward(bucket)
    for index, (stage, bucket) in enumerate(forwards):
        progress(index, total, str(bucket))
        stage.compile_forward(bucket)
        for begun, each in islice(upcoming, 1):
            begun.begin_forward(each)
    for index, (stage, extension, name) in enumerate(own):
        progress(len(forwards) + index, total, name)
        stage.program(extension, name)
    for index, (name, size) in enumerate(epilogues):
        progress(total - len(epilogues) + index, total, f"{name} {size}")
        last.compile_epilogue(name, size)
    progress(total, total, "ready")


def num_compile_threads(platform: str) -> int:
    """Return the number of threads that compile programs for `platform`, jax's name, beside the one that traces.

    Half of this process's cores, rounded down, from 1 to 4 for CPUs and to 16 for TPUs: XLA compiles a program for TPUs
    on hardly more than one core, and one for CPUs on some two. 0 for GPUs, whose compiler measures kernels on the
    device, where others would disturb it.
    """
    cores = num_cores()
    return {"cpu": max(1, min(cores // 2, 4)), "tpu": max(1, min(cores // 2, 16))}.get(platform, 0)
