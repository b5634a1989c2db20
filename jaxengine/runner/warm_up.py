"""Compilation of every program that serving can need, before anything is served."""

from __future__ import annotations

from collections.abc import Callable, Sequence

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
    num_begun = 0
    for index, (stage, bucket) in enumerate(forwards):
        for begun, each in forwards[num_begun : index + ahead]:
            begun.begin_forward(each)
        num_begun = max(num_begun, index + ahead)
        progress(index, total, str(bucket))
        stage.compile_forward(bucket)
    for index, (stage, extension, name) in enumerate(own):
        progress(len(forwards) + index, total, name)
        stage.program(extension, name)
    for index, (name, size) in enumerate(epilogues):
        progress(total - len(epilogues) + index, total, f"{name} {size}")
        last.compile_epilogue(name, size)
    progress(total, total, "ready")
