"""Tests of the kernels that an engine is about to use, before it compiles its steps.

Each call of a kernel in the engine's programs, found by tracing them, is run on random inputs of its shapes and
compared with plain XLA. If a kernel does not compile, fails, is wrong or is slower, this engine does not use it: the
operation runs as the next kind of its platform. Verdicts are stored with the executables, by device and versions.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import jax

from jaxengine.models.cache import platform_of, product_platform_of
from jaxengine.models.kernel_proof import (
    Call,
    Trial,
    Verdict,
    compiled_trial,
    judged_calls,
    lowered_trial,
    recorded_calls,
    too_slow,
    verdict_of,
)
from jaxengine.models.kernel_rows import without_rows
from jaxengine.runner.executables.cache import compile_program
from jaxengine.runner.executables.verdicts import Verdicts
from jaxengine.runner.stage_runner import StageRunner
from jaxengine.runner.start.ends import ends_heard

logger = logging.getLogger(__name__)

Rows = frozenset[tuple[str, str]]
Progress = Callable[[int, int, str], None]

FULL = "full"
# Seconds after which a proof may be hanging. A compiler may take a minute.
_LONG = 120.0
# Number of unfinished proofs of a call after which it counts as failed. One may have another reason, two hardly.
_MAX_UNFINISHED = 2
# A note that is stored while all calls are compiled at once: a start that finds it compiles them one by one.
_TOGETHER = "compiled together"
_MAX_THREADS = 8
_UNFINISHED = "ended the process, or hung: it was not finished when the process ended"


class _Proof(NamedTuple):
    """Settings and verdicts that the functions of a proof share.

    Attributes:
      verdicts: stored verdicts, to which new ones are added.
      thorough: whether all mixes of lengths are run, instead of one.
      timed: whether kernels are timed. They are not on a CPU, where times depend on other load, and not with several
        processes, whose verdicts must be the same.
      device: the device that runs the kernels.
      progress: called with (done, total, what).
    """

    verdicts: Verdicts
    thorough: bool
    timed: bool
    device: Any
    progress: Progress


def prove_kernels(
    stages: Sequence[StageRunner], mode: str, directory: str | None, progress: Progress, left_out: Rows = frozenset()
) -> Rows:
    """Return the rows of kernels, (operation, kind), that the engine must not use, and set them as `unused` of the
    stages' caches.

    Runs every call of a kernel that has no stored verdict on a device of this process, stores the verdicts, and logs
    each row that failed. The replacement of a failed kernel is proven in the same way. An equal engine whose calls all
    have verdicts is not traced again.

    Args:
      stages: the engine's stages.
      mode: "quick" to prove the calls of the largest and the smallest steps with one mix of lengths, "full" for those
        of all steps with all mixes.
      directory: folder of executables, where verdicts are stored too; None for the user's cache folder.
      progress: called with (done, total, what).
      left_out: rows that the engine does not use in any case; they are among those returned.

    Raises:
      ConfigError: a directory that others may write to, or that is a URL.
    """
    device = stages[0].programs.mesh.local_devices[0]
    verdicts = Verdicts(directory, stages[0].executables.environment)
    processes = {each.process_index for stage in stages for each in stage.programs.mesh.devices.flat}
    timed = device.platform != "cpu" and len(processes) == 1
    proof = _Proof(verdicts, mode == FULL, timed, device, progress)
    engine = _digest(stages, mode, left_out)
    unused = left_out
    if (known := verdicts.calls_of(engine)) is not None:
        unused |= _failed(known, verdicts).keys()
    else:
        known = []
        # The replacement of a failed kernel may be another kernel, which is then proven, too.
        while True:
            with without_rows(unused):
                calls = judged_calls(_calls(stages, proof))
            _judge_all(calls, proof)
            judged = verdicts.known()
            known += [text for call in calls if (text := _text(call, proof)) in judged and text not in known]
            failed = {row: why for row, why in _failed(known, verdicts).items() if row not in unused}
            if not failed:
                break
            for row, why in failed.items():
                _report(row, *why)
            unused |= failed.keys()
        verdicts.engine(engine, known)
    for cache in [cache for stage in stages for cache in stage.caches]:
        cache.unused = unused
    if unused > left_out:
        names = ", ".join(sorted(f"{op} ({kind})" for op, kind in unused - left_out))
        logger.warning("kernels that failed their proof and are not used: %s", names)
    return unused


def _calls(stages: Sequence[StageRunner], proof: _Proof) -> list[Call]:
    """Trace the forward passes of each stage and the extensions' programs; return their distinct calls of kernels.

    If the proof is thorough, the forward passes are those of all buckets; otherwise those of the largest bucket, the
    largest bucket of decodes and the smallest bucket.
    """
    platforms = {platform_of(proof.device), product_platform_of(proof.device)}
    found: dict[str, Call] = {}
    for stage in stages:
        programs = stage.programs
        buckets = list(programs.packer.buckets)
        if not proof.thorough:
            decodes = [bucket for bucket in buckets if bucket.num_tokens == bucket.num_seqs]
            buckets = list(dict.fromkeys([max(buckets), max(decodes or buckets), min(buckets)]))
        kv = programs.kv_shapes(programs.num_columns)
        traced = [programs.forward(bucket, stage.params, kv) for bucket in buckets]
        traced += [program for extension in programs.extensions for program in extension.programs(stage.params)]
        for program in traced:
            calls = recorded_calls(program.function, program.arguments, platforms)
            found |= {call.text: call for call in calls}
    return list(found.values())


def _judge_all(calls: Sequence[Call], proof: _Proof) -> None:
    """Judge the calls that have no verdict, and store the verdicts.

    A call whose proof was begun twice and never finished counts as failed. Once a kernel has failed, its other calls
    are skipped. Reports progress, and logs the number of proven calls and a warning for each verdict with a note.
    """
    verdicts, unfinished = proof.verdicts, Counter(proof.verdicts.unfinished())
    for call in calls:
        if unfinished[text := _text(call, proof)] >= _MAX_UNFINISHED:
            verdicts.end(text, Verdict(error=_UNFINISHED)._asdict())
    known = verdicts.known()
    failed = {call[:3] for call in calls if known.get(_text(call, proof), {}).get("error")}
    start, proven = time.monotonic(), 0
    due = {text: call for call in calls if (text := _text(call, proof)) not in known and call[:3] not in failed}
    trials = {} if unfinished[_TOGETHER] else _compiled_together(due, proof)
    for index, call in enumerate(calls):
        proof.progress(index, len(calls), f"{call.op} ({call.kind})")
        if (text := _text(call, proof)) not in due or call[:3] in failed:
            continue
        slow = f"proving the kernel of {call.short}", "counts the kernel as failed and runs plain XLA in its place"
        with _noted(text, *slow, verdicts), jax.default_device(proof.device):
            trial = trials.pop(text, None) or _compiled(lowered_trial(call, thorough=proof.thorough), proof)
            verdict = verdict_of(trial, timed=proof.timed)
        verdicts.end(text, verdict._asdict())
        proven += 1
        if verdict.error:
            failed.add(call[:3])
        if verdict.note:
            logger.warning("the kernel of %s is used without a proof: %s", call.short, verdict.note)
    proof.progress(len(calls), len(calls), "done")
    if unfinished[_TOGETHER]:
        verdicts.forget(_TOGETHER)
    if proven:
        logger.info("%d calls of kernels were proven in %.0f s", proven, time.monotonic() - start)


def _compiled_together(calls: Mapping[str, Call], proof: _Proof) -> dict[str, Trial]:
    """Compile the trial programs of several calls on several threads. Return the compiled trials by the call's text; {}
    for fewer than two calls or on one core.

    Kernels run only afterwards, so that each is timed alone. A note is stored in the meantime: if the process does not
    survive, the next start compiles them one by one.
    """
    num_threads = min(_MAX_THREADS, os.cpu_count() or 1, len(calls))
    if num_threads < 2:
        return {}
    compiling: dict[str, Future[Trial]] = {}
    threads = ThreadPoolExecutor(num_threads, "kernel-proof")
    try:
        slow = f"compiling the kernels of {len(calls)} calls", "compiles them one by one"
        with _noted(_TOGETHER, *slow, proof.verdicts), jax.default_device(proof.device):
            for index, (text, call) in enumerate(calls.items()):
                proof.progress(index, len(calls), "compiling")
                compiling[text] = threads.submit(_compiled, lowered_trial(call, thorough=proof.thorough), proof)
            found = {text: each.result() for text, each in compiling.items()}
    finally:
        threads.shutdown(wait=False, cancel_futures=True)
    proof.verdicts.forget(_TOGETHER)
    return found


@jax.transfer_guard("allow")
def _compiled(trial: Trial, proof: _Proof) -> Trial:
    """Return a lowered trial compiled for the proof's device: the kernel as in the engine's programs, and so plain XLA
    if both are timed. Otherwise plain XLA runs once, for its results. Any thread may call it.

    On a CPU they are compiled for one run, too.
    """
    as_used = partial(compile_program, backend=proof.device.platform, once=proof.device.platform == "cpu")
    return compiled_trial(trial, as_used, as_used if proof.timed else partial(as_used, once=True))


@contextlib.contextmanager
def _noted(text: str, what: str, then: str, verdicts: Verdicts) -> Iterator[None]:
    """Context of work that may hang in a kernel. Stores a note under `text` first, which the caller replaces by a
    verdict or deletes.

    After _LONG seconds, logs a warning and stores that the work takes long. If SIGTERM, SIGINT or SystemExit ends the
    process before that, the note is deleted. what: the work, in words for the warning. then: in words, what the next
    start does if this process is ended.
    """

    def warn() -> None:
        verdicts.takes_long(text)
        message = "%s has taken %.0f s: if it hangs, end this process and start again; the next start %s"
        logger.warning(message, what, _LONG, then)

    verdicts.begin(text)
    timer = threading.Timer(_LONG, warn)
    timer.daemon = True
    begin = time.monotonic()
    with ends_heard(partial(_forget_if_brief, text, verdicts, begin)):
        timer.start()
        try:
            yield
        except (KeyboardInterrupt, SystemExit):
            _forget_if_brief(text, verdicts, begin)
            raise
        finally:
            timer.cancel()
            timer.join()  # `warn` must not write after the verdict


def _forget_if_brief(text: str, verdicts: Verdicts, begin: float) -> None:
    """Delete the note that a proof has begun, unless it began at least _LONG seconds ago: then the kernel may be the
    reason why the process ends.

    text: text of the call. begin: time.monotonic() at the beginning of its proof, in seconds.
    """
    if time.monotonic() - begin < _LONG:
        verdicts.forget(text)


def _failed(texts: Sequence[str], verdicts: Verdicts) -> dict[tuple[str, str], tuple[str, str]]:
    """Return the failed rows (operation, kind), each with the text and the error of one call. A row has failed if any
    of its calls has an error, or if all its calls together take longer than plain XLA.

    texts: texts of the engine's calls; those without a verdict are ignored.
    """
    known = verdicts.known()
    of_row: dict[tuple[str, str], list[tuple[str, Verdict]]] = {}
    for text in texts:
        op, _, rest = text.partition(" (")
        of_row.setdefault((op, rest.partition(")")[0]), []).append((text, Verdict(**known.get(text, {}))))
    failed = {}
    for row, calls in of_row.items():
        wrong = [(text, verdict.error) for text, verdict in calls if verdict.error]
        if not wrong and (slow := too_slow(verdict for _, verdict in calls)):
            wrong = [(text, f"{slow}, over all shapes") for text, _ in calls]
        if wrong:
            failed[row] = wrong[0]
    return failed


def _report(row: tuple[str, str], text: str, error: str) -> None:
    """Log as an error that a row (operation, kind) is not used. text: text of a call that failed. error: its error."""
    logger.error(
        "the %s kernel of %s is replaced: it %s. Shapes: %s. Please report this with the file that "
        "`jaxengine report` writes",
        row[1],
        row[0],
        error,
        text.partition("; ")[0].partition(": ")[2],
    )


def _text(call: Call, proof: _Proof) -> str:
    """Return the text under which a call's verdict is stored: the call, and whether one or all mixes of lengths are
    run.
    """
    return f"{call.text}; {'all mixes' if proof.thorough else 'one mix'}"


def _digest(stages: Sequence[StageRunner], mode: str, left_out: Rows) -> str:
    """Return a digest of the facts that determine an engine's calls of kernels, without its environment. mode: of
    proving, part of the digest. left_out: rows that it does not use, in any order.
    """
    facts = [(each.programs.description, list(each.programs.packer.buckets), each.programs.num_columns,
              each.programs.model.mesh, [own.name for own in each.programs.extensions]) for each in stages]  # fmt: skip
    return hashlib.sha256(repr((mode, facts, sorted(left_out))).encode()).hexdigest()
