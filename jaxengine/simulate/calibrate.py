"""`jaxengine calibrate-costs`: measures the steps of a running engine and fits the costs that `simulate` takes.

The requests of a load arrive at once, so its steps do not depend on how long any step takes. The simulator therefore
runs the same steps and reports the lengths of their rows. A step's seconds are those of its bucket, plus a cost per key
that its attention reads, padding included, plus what cold caches cost after steps with prompts, plus what the first
step after a pause takes longer.
"""

from __future__ import annotations

import bisect
import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from jaxengine.config.engine_config import ConfigError, EngineConfig
from jaxengine.models.kernel_rows import kernel_rows, tuning_of
from jaxengine.simulate.costs import SPREAD_SHARES, Cold, HostCosts, MeasuredCosts, Pause, StepSpread, Tiles
from jaxengine.simulate.loop import Outcome, StepTime, check_simulated, run_trace
from jaxengine.simulate.trace import Trace, trace_of

if TYPE_CHECKING:
    from jaxengine.api.llm import LLM
    from jaxengine.runner.model_runner import ModelRunner

# Most output tokens of a request, so that each decode shape runs this many steps. The first dozen or two after a
# prompt are slower (`Cold`).
_STEPS = 48
_PROMPT = 32
# Output tokens of a load with one prompt, enough for its caches to warm up again.
_WARM = 16
# Most rows at once of a load whose requests come and go.
_COMING = 16
# Seconds before a load in which the engine has nothing to do: one after the other, load by load.
_PAUSES = (0.0, 0.02, 0.1, 0.5)
# Candidates for MeasuredCosts.cold: tokens, idle seconds and the share that remains.
_COLD = tuple(
    itertools.starmap(Cold, itertools.product((64.0, 256.0, 1024.0), (0.0, 0.05, 0.2), (0.3, 0.5, 0.6, 0.7, 0.8)))
)
# Options that do not change a step's costs, or that must not be published.
_LEFT_OUT = (
    "record_trace",
    "hf_token",
    "download_dir",
    "compile_cache_dir",
    "disable_log_stats",
    "plugins",
    "skip_tokenizer_init",
)


class Load(NamedTuple):
    """Requests that arrive at once: token ids of their prompts, and the number of output tokens of each."""

    prompts: list[list[int]]
    outputs: list[int]


@dataclass(frozen=True)
class MeasuredStep:
    """Step with its measured times.

    Attributes:
      step: the same step in the simulator.
      seconds: time on the device, as measured by the host.
      dispatch, after: seconds of the host's work before and after the step, see HostCosts; after is None for the last
        step.
      colds: f64[len(_COLD)], the share of cold caches before the step under each candidate.
      idle: seconds in which the engine had nothing to do before the step.
    """

    step: StepTime
    seconds: float
    dispatch: float
    after: float | None
    colds: np.ndarray
    idle: float = 0.0


def calibrate_costs(options: Mapping[str, Any], rounds: int = 2) -> MeasuredCosts:
    """Start an engine with these options, run loads that use each of its step shapes, shut the engine down, and return
    the measured costs of its steps.

    rounds: how often each load is measured, after one more round that only warms up. Raises ConfigError for invalid
    options, for pipeline stages, and for options whose effect a trace does not determine (`check_simulated`); the
    errors of `LLM` for a model that cannot be loaded; RuntimeError if the simulator runs other steps than the engine.
    """
    from jaxengine.api.llm import LLM

    check_simulated(EngineConfig.from_options(**options))
    llm = LLM(**options)
    try:
        return costs_of(llm, options, rounds)
    finally:
        llm.shutdown()


def costs_of(llm: LLM, options: Mapping[str, Any], rounds: int = 2) -> MeasuredCosts:
    """Measure and return the costs of the steps of a running engine, which was started with `options` and has no
    requests.

    rounds: how often each load is measured, after one more round that only warms up. Raises the errors of
    `measured_round`.
    """
    measured_round(llm)
    steps = [step for number in range(rounds) for step in measured_round(llm, number)]
    return fitted_costs(llm.core.runner, options, steps)


def measured_round(llm: LLM, number: int = 0) -> list[MeasuredStep]:
    """Run each load of a running engine that has no requests once, and return its steps with their measured times.

    number: of the round; in each, a load comes after another of the _PAUSES. The loads are simulated after all have
    run. Raises ConfigError with pipeline stages, RuntimeError if the simulator runs other steps than the engine.
    """
    runner = llm.core.runner
    if runner.config.pipeline_parallel_size > 1:
        size = runner.config.pipeline_parallel_size
        raise ConfigError("pipeline_parallel_size", size, "1: the host sees the time of all stages together")
    loads = list(loads_of(runner))
    runs = [run_load(llm, load, _PAUSES[(index + number) % len(_PAUSES)]) for index, load in enumerate(loads)]
    return [step for load, run in zip(loads, runs, strict=True) for step in matched(runner, load, *run)]


def fitted_costs(runner: ModelRunner, options: Mapping[str, Any], measured: Sequence[MeasuredStep]) -> MeasuredCosts:
    """Return the costs that are fitted to an engine's measured steps. Half of these serve to estimate the error of a
    fit to the others. The returned options leave out those in _LEFT_OUT, such as secrets. options: those that the
    engine was started with.
    """
    fitted, held_out = measured[::2], measured[1::2]
    errors = _errors(_fit(fitted), held_out or fitted)
    fit = _fit(measured)
    host, paused = _host(measured, fit)
    kept = {name: value for name, value in options.items() if name not in _LEFT_OUT and value is not None}
    return MeasuredCosts(
        model=runner.config.model or "",
        platform=runner.device.platform if runner.device.platform != "gpu" else "cuda",
        options=kept,
        num_pages=runner.plan.num_pages,
        decode=tuple(sorted(fit.decode.items())),
        mixed=tuple(sorted(fit.mixed.items())),
        tiles=tiles_of(runner),
        per_key=fit.per_key,
        per_pair=fit.per_pair,
        cold=_COLD[fit.cold],
        cold_decode=tuple(sorted(fit.cold_decode.items())),
        cold_mixed=tuple(sorted(fit.cold_mixed.items())),
        host=host,
        errors=errors,
        num_steps=len(measured),
        pauses=tuple(map(Pause, _PAUSES[1:], fit.pauses, paused)),
        spread=_spread(fit, measured),
    )


def loads_of(runner: ModelRunner) -> Iterator[Load]:
    """Yield loads that use every bucket of an engine: for each decode bucket one with short and one with long contexts,
    and for each mixed bucket three with one prompt per replica and one with requests of random lengths, whose prompts
    run together with decodes. Three more have one prompt per replica of two, four and eight times the largest bucket.

    Token ids and lengths are random from a fixed seed. Lengths are cut to the context length and the pages of the
    engine.
    """
    config, buckets = runner.config, runner.buckets
    rng = np.random.default_rng(0)
    room = runner.plan.num_pages * config.block_size * runner.num_ranks

    def load(count: int, length: int, output: int, least: float = 1.0) -> Load:
        """Return `count` requests with prompts of at most `length` random tokens and at most `output` output tokens,
        cut to what fits. Both lengths are drawn uniformly from a share `least` of the maximum up to the maximum.
        """
        most = min(config.max_model_len, room // count - config.block_size) - output
        lengths = [max(1, min(length, most)), max(1, min(output, config.max_model_len - 1))]
        prompts, outputs = (
            rng.integers(max(1, int(least * longest)), longest, count, endpoint=True).tolist() for longest in lengths
        )
        ids = [rng.integers(2, runner.vocab_size, each).tolist() for each in prompts]
        return Load(ids, [min(own, config.max_model_len - len(each)) for own, each in zip(outputs, ids, strict=True)])

    for size in sorted({bucket.num_seqs for bucket in buckets.decode}):
        for length in (_PROMPT, 16 * _PROMPT):
            yield load(size * runner.num_ranks, length, _STEPS)
    for bucket in buckets.mixed:
        for _ in range(3):
            yield load(runner.num_ranks, bucket.num_tokens, _WARM)
        yield load(2 * min(_COMING, config.max_num_seqs) * runner.num_ranks, bucket.num_tokens, _STEPS, 0.0)
    for times in (2, 4, 8):
        yield load(runner.num_ranks, times * config.max_num_batched_tokens, _WARM)


def run_load(llm: LLM, load: Load, pause: float = 0.0) -> tuple[list[dict[str, Any]], float]:
    """Run a load on the engine, from an empty prefix cache, and return (the timeline's records of its steps, the
    seconds in which the engine had nothing to do before them). Tokens are sampled randomly (temperature 1), as for most
    requests.

    llm: must have no requests; its prefix cache is reset. pause: seconds to wait first.
    """
    from jaxengine.requests.params.sampling_params import SamplingParams

    core = llm.core
    params = [
        SamplingParams(temperature=1.0, max_tokens=count, ignore_eos=True, detokenize=False) for count in load.outputs
    ]
    llm.reset_prefix_cache()
    before = core.engine.stats.num_steps
    prompts: Any = [{"prompt_token_ids": prompt} for prompt in load.prompts]
    time.sleep(pause)
    llm.generate(prompts, params, use_tqdm=False)
    while core.has_unfinished:  # the step that was in flight when the last request ended
        core.step()
    records = core.engine.timeline.last(1e9, [])["steps"]
    own = [step for step in records if step["number"] > before]
    last = max((step["arrived"] for step in records if step["number"] <= before), default=own[0]["start"])
    return own, own[0]["start"] - last


def matched(runner: ModelRunner, load: Load, records: Sequence[Mapping[str, Any]], idle: float) -> list[MeasuredStep]:
    """Return the steps of a load that `run_load` has run, with their measured times. records: of these steps, in order.
    idle: seconds without work before the first. Raises RuntimeError if the simulator runs other steps for it.
    """
    outcome = simulated(runner, trace_of("load", load.prompts, load.outputs, runner.config.block_size))
    real = [(record["bucket"], record["num_tokens"], record["num_rows"]) for record in records]
    if real != [(str(step.bucket), step.num_tokens, step.num_rows) for step in outcome.steps]:
        raise RuntimeError(f"the engine ran {len(real)} steps that the simulator, with {len(outcome.steps)}, did not")
    return _measured(outcome.steps, records, idle)


def simulated(
    runner: ModelRunner, trace: Trace, costs: MeasuredCosts | None = None, num_pages: int | None = None
) -> Outcome:
    """Run a trace in a simulator with the config, packer and windows of a running engine, and return the outcome.
    costs: None for steps that take no time. num_pages: pages of each replica; None for the engine's number. Raises
    ConfigError for a config that `check_simulated` refuses.
    """
    none = 0.0, 0.0, Cold(), (), (), HostCosts()
    nothing = MeasuredCosts("", "", {}, 1, ((1, 0.0),), (), tiles_of(runner), *none, (0.0, 0.0), 0)
    num_pages = num_pages or runner.plan.num_pages
    return run_trace(trace, runner.config, runner.packer, num_pages, runner.windows, costs or nothing)


def tiles_of(runner: ModelRunner) -> Tiles:
    """Return the tiles of an engine's attention. Plain XLA attention pads rows and keys to tiles; kernels do not, so
    theirs are all 1.
    """
    platform, page_size = runner.stages[0].programs.platform, runner.config.block_size
    if kernel_rows(platform).get("ragged_paged_attention") != "attention.xla.attend":
        return Tiles()
    sizes = tuning_of(platform).xla_attention
    return Tiles(sizes.block_seqs, sizes.block_q, *(sizes.block_kv_of(page_size, rows) for rows in (2, 1)))


def text(costs: MeasuredCosts) -> str:
    """Return the costs as readable text: the model, each bucket's milliseconds, costs of keys and pairs, of cold caches
    and of pauses, and the host's microseconds.
    """
    host = costs.host
    lines = [f"{costs.model or 'the embedded model'}: {costs.about}"]
    for name, table in (("decode S", costs.decode), ("mixed T", costs.mixed)):
        lines += [f"  {name}={size:<8}{seconds * 1e3:>10.3f} ms" for size, seconds in table]
    lines.append(f"  and {costs.per_key * 1e9:.3g} ns a key, {costs.per_pair * 1e9:.3g} ns a pair of query and key")
    cold = costs.cold
    lost = [
        f"{name}={size} {seconds * 1e3:.3f} ms"
        for name, table in (("S", costs.cold_decode), ("T", costs.cold_mixed))
        for size, seconds in table
    ]
    lines.append(f"  more with cold caches: {', '.join(lost)}, {host.dispatch_cold * 1e6:.0f} us of the host")
    lines.append(
        f"  they are cold after some {cold.tokens:.0f} tokens of prompts or {cold.idle * 1e3:.0f} ms without work "
        f"(0: never), and {cold.remains:.0%} of that remains after each decode"
    )
    for each in costs.pauses:
        lines.append(
            f"  after a pause of {each.length * 1e3:.0f} ms: {each.device * 1e3:.3f} ms more, {each.host * 1e6:.0f} us "
            "of the host"
        )
    lines.append(
        f"  host: {host.dispatch * 1e6:.0f} us before a step, {host.dispatch_prompts * 1e6:.0f} us more with prompts, "
        f"and {host.after * 1e6:.0f} us after it; {(host.dispatch_row + host.after_row) * 1e6:.2f} us more for each row"
    )
    return "\n".join(lines)


def _measured(steps: Sequence[StepTime], records: Sequence[Mapping[str, Any]], idle: float) -> list[MeasuredStep]:
    """Return the steps with their times, computed from the timeline's records of the same steps. idle: seconds without
    work before the first of them; before these, the caches were warm.

    A step's seconds count from its dispatch or from the arrival of the previous step's tokens, whichever is later, to
    the arrival of its own tokens. Its `after` is the time from the arrival of its tokens to the start of the next
    step, plus the time that its sampler took to dispatch before the wait for them; None if no later step starts once
    its tokens have arrived. records: times in seconds, one record for each step, in order.
    """
    starts, dispatched = ([record[name] for record in records] for name in ("start", "dispatched"))
    found, free_at, colds = [], 0.0, [each.paused(0.0, idle) for each in _COLD]
    for step, record in zip(steps, records, strict=True):
        arrived, waiting = record["arrived"], record["waiting"]
        seconds = arrived - max(free_at, record["dispatched"])
        free_at = arrived
        following = bisect.bisect_right(starts, arrived)
        after = None
        if following < len(starts):
            # Time of its sampler, plus the time between the arrival of its tokens and the next scheduling.
            last = dispatched[bisect.bisect_right(dispatched, waiting) - 1]
            after = starts[following] - arrived + waiting - last
        found.append(MeasuredStep(step, seconds, record["dispatched"] - record["start"], after, np.array(colds), idle))
        colds, idle = [each.after(own, step.bucket) for each, own in zip(_COLD, colds, strict=True)], 0.0
    return found


class Fit(NamedTuple):
    """Costs of steps on the device, with the fields of MeasuredCosts. `decode` and `mixed` map a bucket's tokens to
    seconds, `cold_decode` and `cold_mixed` to the additional seconds if all caches are cold. per_key and per_pair are
    seconds; cold is a place in _COLD; pauses has the additional seconds after each of _PAUSES but the first.
    """

    decode: dict[int, float]
    mixed: dict[int, float]
    per_key: float
    per_pair: float
    cold: int
    cold_decode: dict[int, float]
    cold_mixed: dict[int, float]
    pauses: tuple[float, ...]

    def seconds(self, measured: MeasuredStep) -> float | None:
        """Return the predicted seconds of a step on the device; None if its bucket was not measured."""
        step = measured.step
        size, is_decode = step.bucket.num_tokens, step.bucket.decode_only
        base = (self.decode if is_decode else self.mixed).get(size)
        if base is None:
            return None
        more = step.keys * self.per_key + step.pairs * self.per_pair
        more += measured.colds[self.cold] * (self.cold_decode if is_decode else self.cold_mixed)[size]
        return base + more + float(_paused(measured.idle) @ self.pauses)


def _paused(idle: float) -> np.ndarray:
    """Return the weights f64[len(_PAUSES) - 1] with which what the pauses cost is added up after `idle` seconds without
    work, by linear interpolation.
    """
    return np.array([np.interp(idle, _PAUSES, row) for row in np.eye(len(_PAUSES))[1:]])


def _fit(measured: Sequence[MeasuredStep]) -> Fit:
    """Return costs with about the least mean relative error on the steps; of those for each candidate in _COLD, the
    ones with the least. The errors are absolute, not squared. No larger bucket costs less than a smaller one, no longer
    pause less than a shorter one, and no coefficient is negative. measured: at least one step.
    """
    names = sorted({(each.step.bucket.decode_only, each.step.bucket.num_tokens) for each in measured})
    place = {name: index for index, name in enumerate(names)}
    seconds = np.maximum([each.seconds for each in measured], 1e-9)
    own = np.zeros((len(measured), len(names)))  # the bucket of each step
    for index, each in enumerate(measured):
        own[index, place[each.step.bucket.decode_only, each.step.bucket.num_tokens]] = 1.0
    held = np.array([(each.step.keys, each.step.pairs, *_paused(each.idle)) for each in measured])
    colds = np.array([each.colds for each in measured])
    best: tuple[float, Fit] | None = None
    for candidate in range(len(_COLD)):
        rows = np.concatenate([held, colds[:, candidate, None] * own], axis=1)
        # lstsq takes the least norm among equal fits. Scaling down makes it attribute time that could be either a
        # bucket's or its keys' to the bucket.
        scale = 1e3 * np.maximum(rows.max(axis=0), 1.0)
        slopes = _shares(np.concatenate([own, rows / scale], axis=1), seconds)[len(names) :] / scale
        bases = seconds - rows @ slopes
        tables: list[dict[int, float]] = []
        for is_decode in (True, False):
            sizes = sorted(size for kind, size in names if kind == is_decode)
            left = [bases[own[:, place[is_decode, size]] > 0] for size in sizes]
            costs = _rising([float(np.median(each)) for each in left], [len(each) for each in left])
            tables.append(dict(zip(sizes, costs, strict=True)))
        (per_key, per_pair), pauses = slopes[:2].tolist(), np.maximum.accumulate(slopes[2 : held.shape[1]]).tolist()
        for is_decode in (True, False):
            lost = zip(names, slopes[held.shape[1] :].tolist(), strict=True)
            tables.append({size: cost for (kind, size), cost in lost if kind == is_decode})
        fit = Fit(tables[0], tables[1], per_key, per_pair, candidate, tables[2], tables[3], tuple(pauses))
        error = float(np.mean(_relative(fit, measured)))
        best = (error, fit) if best is None or error < best[0] else best
    assert best is not None
    return best[1]


def _shares(rows: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """Return coefficients f64[n], none negative, that approximately minimise the sum of relative errors of rows @
    coefficients against `seconds`. rows: f64[m, n]. seconds: f64[m]; values below a nanosecond, which a coarse clock
    gives, count as one.
    """
    seconds = np.maximum(seconds, 1e-9)
    rows, found = rows.copy(), _least(rows, seconds)
    while (found < 0).any():  # leave out negative coefficients, and fit the rest again
        rows[:, found < 0] = 0.0
        found = np.where(rows.any(axis=0), _least(rows, seconds), 0.0)
    return found


def _least(rows: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """Return coefficients f64[n] that approximately minimise the sum of absolute relative errors of rows @ coefficients
    against `seconds`, by 30 rounds of iteratively reweighted least squares. rows: f64[m, n]. seconds: f64[m], positive.
    """
    scaled, found = rows / seconds[:, None], np.zeros(rows.shape[1])
    weights = np.ones(len(rows))
    for _ in range(30):  # each squared error is weighted by the inverse of its previous size
        root = np.sqrt(weights)
        found = np.linalg.lstsq(scaled * root[:, None], root, rcond=None)[0]
        weights = 1.0 / np.maximum(np.abs(scaled @ found - 1.0), 1e-3)
    return found


def _rising(costs: Sequence[float], counts: Sequence[int]) -> list[float]:
    """Return the costs made non-decreasing and non-negative (isotonic regression): negative ones become 0, and
    neighbours in falling order are replaced by their mean weighted by `counts`, the number of steps behind each cost.
    """
    pools: list[tuple[float, int, int]] = []  # mean, steps, number of costs
    for cost, count in zip(costs, counts, strict=True):
        pools.append((max(0.0, cost), count, 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (first, many, width), (second, more, wide) = pools[-2:]
            pools[-2:] = [((first * many + second * more) / (many + more), many + more, width + wide)]
    return [cost for cost, _, width in pools for _ in range(width)]


def _errors(fit: Fit, steps: Sequence[MeasuredStep]) -> tuple[float, float]:
    """Return (median, 90th percentile) of the absolute relative errors of a fit on steps, leaving out buckets that the
    fit lacks.
    """
    errors = _relative(fit, steps)
    return float(np.median(errors)), float(np.percentile(errors, 90))


def _spread(fit: Fit, steps: Sequence[MeasuredStep]) -> StepSpread:
    """Return measured over predicted seconds of the steps without and with prompts at SPREAD_SHARES. Steps in a bucket
    that the fit lacks, or of which it predicts no time, are left out; a kind without others has no factors.
    """
    ratios: dict[bool, list[float]] = {True: [], False: []}
    for each in steps:
        if predicted := fit.seconds(each):
            ratios[each.step.bucket.decode_only].append(each.seconds / predicted)
    return StepSpread(*(tuple(np.quantile(own, SPREAD_SHARES).tolist()) if own else () for own in ratios.values()))


def _relative(fit: Fit, steps: Sequence[MeasuredStep]) -> list[float]:
    """Return the absolute relative errors of a fit on steps. Steps in a bucket that the fit lacks are left out."""
    pairs = [(fit.seconds(each), max(each.seconds, 1e-9)) for each in steps]
    return [abs(predicted - seconds) / seconds for predicted, seconds in pairs if predicted is not None]


def _host(measured: Sequence[MeasuredStep], fit: Fit) -> tuple[HostCosts, tuple[float, ...]]:
    """Return (the host's costs, seconds that it takes longer before the first step after each of _PAUSES but the
    first). They are fitted to the largest number of rows of a replica in each step and, for dispatch, to whether a step
    has prompts, to its cold caches under `fit`, and to the pause before it. Steps whose `after` is None count for
    dispatch only.
    """
    rows = np.array(
        [
            [1.0, each.step.most_rows, not each.step.bucket.decode_only, each.colds[fit.cold], *_paused(each.idle)]
            for each in measured
        ]
    )
    dispatch = _shares(rows, np.array([each.dispatch for each in measured])).tolist()
    known = [index for index, each in enumerate(measured) if each.after is not None]
    after = _shares(rows[known, :2], np.array([measured[index].after for index in known]))
    return HostCosts(*dispatch[:4], *after.tolist()), tuple(np.maximum.accumulate(dispatch[4:]).tolist())
