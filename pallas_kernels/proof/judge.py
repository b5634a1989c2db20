"""Judgement of a kernel on the present device: it is compiled, run, timed, and compared with plain XLA over the same
inputs.
"""

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
from jaxengine.pallas_kernels.proof.selected import selected_case, selection_case
from jaxengine.pallas_kernels.registry import PLAIN_KINDS, PLATFORMS, without_rows

# Operations without a case: schedules are built, and so proven, in the cases of the operations that use them.
_SCHEDULES = {"attention_schedule", "kv_update_schedule"}
_CASES: dict[str, Maker] = {
    "ragged_paged_attention": attention_case,
    "kv_cache_update": update_case,
    **dict.fromkeys(("select_keys", "select_blocks"), selection_case),
    **dict.fromkeys(("selected_attention", "block_attention"), selected_case),
    "lora_product": lora_case,
    **dict.fromkeys(ARGUMENTS, product_case),
}
# Largest difference of a row from plain XLA's, relative to its largest value, by the bytes of an element. Results of 16
# bits are rounded to 1/256 and are sums of rounded factors; matrix units may round the factors of others, too.
LIMITS = {2: 0.04, 4: 0.02}
_MOST = float(np.finfo(np.float32).max)
# Runs of a measurement, launches of a run, and how many times as long as plain XLA all calls of a kernel may take.
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
    """Return the calls that have to be judged: all but those of schedules, which are proven together with the
    operations that use them.
    """
    return [call for call in calls if call.op not in _SCHEDULES]


class Trial(NamedTuple):
    """Call with its two programs over the same inputs: one with the kernel, and one in plain XLA.

    Attributes:
      call: as recorded.
      note: why there is nothing to run, in which case all other fields have their defaults; "" otherwise.
      case, mixes: source of the inputs, and the mixes that are run.
      plain, kernel: each a jax.stages.Lowered or, once compiled, a jax.stages.Compiled, or the exception that was
        raised instead.
    """

    call: Call
    note: str = ""
    case: Case | None = None
    mixes: tuple[str, ...] = ()
    plain: Any = None
    kernel: Any = None


def lowered_trial(call: Call, *, thorough: bool) -> Trial:
    """Trace and lower the programs of a call, for jax's default device, and return the trial. thorough: whether for all
    mixes of lengths instead of the first. Never raises: a failure is in the trial's note or programs.
    """
    if (make := _CASES.get(call.op)) is None:
        return Trial(call, f"no inputs are known for {call.op}")
    try:
        case = make(call)
        mixes = case.mixes if thorough else case.mixes[:1]
        # Shapes are enough to trace, and cost no device memory and no transfers.
        inputs = jax.eval_shape(lambda: _inputs(case, mixes[0]))
    except Exception as error:  # no fault of the kernel
        return Trial(call, _not_run(error))
    return Trial(call, "", case, mixes, _lowered(case, inputs, _kernel_rows(call)), _lowered(case, inputs, ()))


def compiled_trial(trial: Trial, compile_kernel: Compiler, compile_plain: Compiler) -> Trial:
    """Return the trial with its lowered programs compiled, or replaced by the exception that compiling raised. It may
    run in any thread. compile_kernel, compile_plain: functions from jax.stages.Lowered to jax.stages.Compiled for the
    program with the kernel and the one in plain XLA. Never raises.
    """

    def compiled(program: Any, compile_lowered: Compiler) -> Any:
        try:
            return compile_lowered(program) if isinstance(program, jax.stages.Lowered) else program
        except Exception as error:
            return error

    return trial._replace(plain=compiled(trial.plain, compile_plain), kernel=compiled(trial.kernel, compile_kernel))


def verdict_of(trial: Trial, *, timed: bool) -> Verdict:
    """Run a compiled trial on random inputs, compare the kernel with plain XLA, and return the verdict. timed: whether
    to measure both. Never raises: an error of the kernel is the verdict's error, one of plain XLA its note, and so is
    the note of a trial without a case.
    """
    case, mixes, plain, kernel = trial.case, trial.mixes, trial.plain, trial.kernel
    if case is None:
        return Verdict(note=trial.note)
    try:
        if isinstance(plain, Exception):
            raise plain
        inputs = [_inputs(case, mix) for mix in mixes]
        wanted = [jax.device_get(plain(*each)) for each in inputs]
    except Exception as error:
        return Verdict(note=_not_run(error))
    if isinstance(kernel, Exception):
        return Verdict(error=f"does not compile: {_first_line(kernel)}")
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
    """Compare two pytrees of results, a kernel's and plain XLA's. Return the largest difference, relative to the
    largest value of its row as LIMITS counts it, and a text that says what is wrong, "" if nothing is.

    NaN in one of the two alone, and a row that differs by more than its limit, are wrong; the first array with one ends
    the comparison. NaN in both at the same place, and equal infinities, count as equal; the other values of their row
    are compared. Raises ValueError for pytrees of different sizes, and for arrays of different shapes.
    """
    largest = 0.0
    for own, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        limit = LIMITS.get(own.dtype.itemsize, LIMITS[2])
        if own.shape != other.shape:
            raise ValueError(f"the result has shape {own.shape}, and not {other.shape}")
        a, b = (np.asarray(x, np.float32).reshape(len(x), -1) for x in (own, other))
        for left, right, text in ((a, b, "are NaN"), (b, a, "are not NaN, as they are in plain XLA")):
            if count := int((np.isnan(left) & ~np.isnan(right)).sum()):
                return _MOST, f"is wrong: {count} values {text}"
        # For tokens that see no key both are -inf.
        same = (a == b) | np.isnan(b)
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
    """Return a text with the milliseconds that a kernel and plain XLA take in all timed verdicts without an error; ""
    if the kernel takes at most MOST_TIME times as long, or if nothing was measured.
    """
    timed = [each for each in verdicts if each.plain_seconds and not each.error]
    own, plain = sum(each.seconds for each in timed), sum(each.plain_seconds for each in timed)
    if own <= MOST_TIME * plain:
        return ""
    return f"takes {own * 1e3:.3g} ms where plain XLA takes {plain * 1e3:.3g}"


def _kernel_rows(call: Call) -> list[tuple[str, str]]:
    """Return the registry rows (op, kind) of all kernels of the call's platform and kind; without them the whole call
    is plain XLA.
    """
    others = PLATFORMS[call.platform].kinds if call.platform in PLATFORMS else ()
    kinds = [kind for kind in (call.kind, *others) if kind not in PLAIN_KINDS]
    return [(op, kind) for kind in kinds for op in (call.op, *_CASES)]


def _not_run(error: Exception) -> str:
    """Return a note that says that a call's plain XLA cannot be run, with the error."""
    return f"plain XLA cannot be run: {_first_line(error)}"


def _inputs(case: Case, mix: str) -> tuple[Any, ...]:
    """Return the inputs of a case for a mix. They are the same in every call."""
    return case.inputs(mix, np.random.default_rng(7))


def _lowered(case: Case, inputs: tuple[Any, ...], unused: Iterable[tuple[str, str]]) -> Any:
    """Trace and lower a case for these inputs, without the registry rows `unused`. Return the jax.stages.Lowered, or
    the exception that was raised.
    """
    try:
        with without_rows(unused):
            # A new function: jax caches traces by function, and its key does not include the registry's rows.
            return jax.jit(lambda *arguments: case.run(*arguments)).trace(*inputs).lower()
    except Exception as error:
        return error


def _seconds(program: Any, inputs: tuple[Any, ...]) -> float:
    """Return the seconds of a launch of `program(*inputs)`: the median of _RUNS runs, each of _LAUNCHES launches in a
    row until all are done.
    """
    found = []
    for _ in range(_RUNS):
        begin = time.perf_counter()
        results = [program(*inputs) for _ in range(_LAUNCHES)]
        jax.block_until_ready(results)
        found.append((time.perf_counter() - begin) / _LAUNCHES)
    return statistics.median(found)


def _first_line(error: Exception) -> str:
    """Return "TYPE: LINE", the type of an error and the first line of its message that is not blank, at most 300
    characters of it; "TYPE: no message" without one.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:300] if lines else 'no message'}"
