"""Judgement of a kernel on the device at hand: compiled, run and timed beside plain XLA over the same inputs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxengine.pallas_kernels.proof.attention import attention_case, update_case
from jaxengine.pallas_kernels.proof.calls import Call
from jaxengine.pallas_kernels.proof.case import Case, Maker
from jaxengine.pallas_kernels.proof.products import ARGUMENTS, lora_case, product_case
from jaxengine.pallas_kernels.registry import PLAIN_KINDS, PLATFORMS, without_rows

# Operations without a case of their own: built, and so proven, with those that read them.
_SCHEDULES = {"attention_schedule", "kv_update_schedule"}
_CASES: dict[str, Maker] = {
    "ragged_paged_attention": attention_case,
    "kv_cache_update": update_case,
    "lora_product": lora_case,
    **dict.fromkeys(ARGUMENTS, product_case),
}
# Most that a row may differ from plain XLA's, as a share of its largest value, by the bytes of an element. Results of
# 16 bits are rounded to 1/256, and are sums of rounded factors; matrix units may round the factors of others, too.
LIMITS = {2: 0.04, 4: 0.02}
_MOST = float(np.finfo(np.float32).max)
# Runs of a measurement, launches of a run, and how much longer than plain XLA all calls of a kernel may take.
_RUNS, _LAUNCHES = 5, 4
MOST_TIME = 1.25

Compiler = Callable[[Any], Any]


class Verdict(NamedTuple):
    """Outcome of a call's proof.

    Attributes:
      error: why the kernel must not be used; "" if it may.
      note: why the call was not compared; "" if it was.
      difference: largest difference, as LIMITS counts it.
      seconds, plain_seconds: of one launch of the kernel and of plain XLA; 0 if they were not measured.
    """

    error: str = ""
    note: str = ""
    difference: float = 0.0
    seconds: float = 0.0
    plain_seconds: float = 0.0


def judged_calls(calls: Iterable[Call]) -> list[Call]:
    """Return the calls that `judge` is to judge: all but schedules."""
    return [call for call in calls if call.op not in _SCHEDULES]


def judge(call: Call, *, thorough: bool, timed: bool, compile_lowered: Compiler) -> Verdict:
    """Run a call's kernel on random inputs of its shapes, on jax's default device, and compare it with plain XLA.

    thorough: with all mixes of lengths, not one. timed: measure both. compile_lowered: from jax.stages.Lowered to
    jax.stages.Compiled. Never raises: an error of the kernel is the verdict's error, one of plain XLA its note.
    """
    if (make := _CASES.get(call.op)) is None:
        return Verdict(note=f"no inputs are known for {call.op}")
    try:
        case = make(call)
        mixes = case.mixes if thorough else case.mixes[:1]
        inputs = [case.inputs(mix, np.random.default_rng(7)) for mix in mixes]
        plain = _compiled(case, inputs[0], _kernel_rows(call), compile_lowered)
        wanted = [jax.device_get(plain(*each)) for each in inputs]
    except Exception as error:  # says nothing of the kernel
        return Verdict(note=f"plain XLA cannot be run: {_first_line(error)}")
    try:
        kernel = _compiled(case, inputs[0], (), compile_lowered)
    except Exception as error:
        return Verdict(error=f"does not compile: {_first_line(error)}")
    difference = 0.0
    try:
        for mix, each, want in zip(mixes, inputs, wanted, strict=True):
            found, wrong = compare(jax.device_get(kernel(*each)), want)
            difference = max(difference, found)
            if wrong:
                return Verdict(error=f"{wrong} ({mix} lengths)", difference=difference)
        if not timed:
            return Verdict(difference=difference)
        return Verdict("", "", difference, _seconds(kernel, inputs[0]), _seconds(plain, inputs[0]))
    except Exception as error:
        return Verdict(error=f"fails: {_first_line(error)}", difference=difference)


def compare(got: Any, want: Any) -> tuple[float, str]:
    """Return the largest difference of two pytrees of results, a kernel's and plain XLA's, as LIMITS counts it, and
    what is wrong, "" for nothing. NaN in `got`, and a row that differs by more than its limit, are wrong; the first
    array with one ends the comparison. Raises ValueError for pytrees of different sizes.
    """
    largest = 0.0
    for own, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        limit = LIMITS.get(own.dtype.itemsize, LIMITS[2])
        a, b = (np.asarray(x, np.float32).reshape(len(x), -1) for x in (own, other))
        if np.isnan(a).any():
            return _MOST, f"is wrong: {int(np.isnan(a).sum())} values are NaN"
        # Of tokens that see nothing both are -inf.
        same = a == b
        with np.errstate(invalid="ignore"):
            apart = np.where(same, 0.0, np.abs(a - b))
            size = np.where(np.isfinite(b), np.abs(b), 0.0).max(axis=1, initial=0.0)
        with np.errstate(over="ignore"):
            share = apart.max(axis=1, initial=0.0) / np.maximum(size, np.finfo(np.float32).tiny)
        largest = max(largest, min(float(share.max(initial=0.0)), _MOST))
        if largest > limit:
            text = (
                f"is wrong: row {int(share.argmax())} differs by {largest:.3g} of its largest value, more than {limit}"
            )
            return largest, text
    return largest, ""


def too_slow(verdicts: Iterable[Verdict]) -> str:
    """Return why a kernel is not worth its calls, given their verdicts; "" if it is, or nothing was measured."""
    timed = [each for each in verdicts if each.plain_seconds and not each.error]
    own, plain = sum(each.seconds for each in timed), sum(each.plain_seconds for each in timed)
    if own <= MOST_TIME * plain:
        return ""
    return f"takes {own * 1e3:.3g} ms where plain XLA takes {plain * 1e3:.3g}"


def _kernel_rows(call: Call) -> list[tuple[str, str]]:
    """Return the rows of kernels, without which all of the call is plain XLA."""
    others = PLATFORMS[call.platform].kinds if call.platform in PLATFORMS else ()
    kinds = [kind for kind in (call.kind, *others) if kind not in PLAIN_KINDS]
    return [(op, kind) for kind in kinds for op in (call.op, *_CASES)]


def _compiled(case: Case, inputs: tuple[Any, ...], unused: Iterable[tuple[str, str]], compile_lowered: Compiler) -> Any:
    """Trace a case for these inputs, without the rows `unused` of the registry, and return what compile_lowered makes
    of it, a function of the inputs.
    """
    with without_rows(unused):
        # A function of its own: jax remembers traces by function, and does not see which rows it was traced with.
        traced = jax.jit(lambda *arguments: case.run(*arguments)).trace(*inputs)
    return compile_lowered(traced.lower())


def _seconds(program: Any, inputs: tuple[Any, ...]) -> float:
    """Return the median, over _RUNS runs, of the seconds of a launch of `program(*inputs)`, _LAUNCHES of which follow
    each other in a run. Blocks until they are done.
    """
    found = []
    for _ in range(_RUNS):
        begin = time.perf_counter()
        results = [program(*inputs) for _ in range(_LAUNCHES)]
        jax.block_until_ready(results)
        found.append((time.perf_counter() - begin) / _LAUNCHES)
    return statistics.median(found)


def _first_line(error: Exception) -> str:
    """Return the type of an error and the first line of its message, at most 300 characters."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:300] if lines else 'no message'}"
