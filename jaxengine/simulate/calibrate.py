"""`jaxengine calibrate-costs`: measures the steps of a running engine and fits the costs that `simulate` takes.

The requests of a load arrive at once, so its steps do not depend on how long any step takes. The simulator therefore
runs the same steps and reports the lengths of their rows. A step's seconds are those of its bucket, plus a cost per key
that its attention reads, padding included, plus an extra cost that decays with the number of steps since the last one
with prompts.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from jaxengine.config.engine_config import ConfigError, EngineConfig
from jaxengine.models.kernel_rows import kernel_rows, tuning_of
from jaxengine.simulate.costs import SPREAD_SHARES, HostCosts, MeasuredCosts, Tiles
from jaxengine.simulate.loop import Outcome, StepTime, check_simulated, run_trace
from jaxengine.simulate.trace import Trace, trace_of

if TYPE_CHECKING:
    from jaxengine.api.llm import LLM
    from jaxengine.runner.model_runner import ModelRunner

# Most output tokens of a request, so that each decode shape runs this many steps. The first dozen or two after a
# prompt are slower (`after_prompts`).
_STEPS = 48
_PROMPT = 32
# Most rows at once of a load whose requests come and go.
_COMING = 16
# Candidate values of MeasuredCosts.remains.
_REMAINS = (0.0, 0.3, 0.5, 0.6, 0.7, 0.8, 0.9)
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
    """

    step: StepTime
    seconds: float
    dispatch: float
    after: float | None


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
    return fitted_costs(llm.core.runner, options, [step for _ in range(rounds) for step in measured_round(llm)])


def measured_round(llm: LLM) -> list[MeasuredStep]:
    """Run each load of a running engine that has no requests once, and return its steps with their measured times.
    Raises ConfigError with pipeline stages, RuntimeError if the simulator runs other steps than the engine.
    """
    runner = llm.core.runner
    if runner.config.pipeline_parallel_size > 1:
        size = runner.config.pipeline_parallel_size
        raise ConfigError("pipeline_parallel_size", size, "1: the host sees the time of all stages together")
    return [step for load in loads_of(runner) for step in measure(llm, load)]


def fitted_costs(runner: ModelRunner, options: Mapping[str, Any], measured: Sequence[MeasuredStep]) -> MeasuredCosts:
    """Return the costs that are fitted to an engine's measured steps. Half of these serve to estimate the error of a
    fit to the others. The returned options leave out those in _LEFT_OUT, such as secrets. options: those that the
    engine was started with.
    """
    fitted, held_out = measured[::2], measured[1::2]
    errors = _errors(_fit(fitted), held_out or fitted)
    fit = _fit(measured)
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
        after_prompts=fit.after_prompts,
        remains=fit.remains,
        host=_host(measured),
        errors=errors,
        num_steps=len(measured),
        spread=_spread(fit, measured),
    )


def loads_of(runner: ModelRunner) -> Iterator[Load]:
    """Yield loads that use every bucket of an engine: for each decode bucket one with short and one with long contexts,
    and for each mixed bucket three with one prompt per replica and one with requests of random lengths, whose prompts
    run together with decodes.

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
            yield load(runner.num_ranks, bucket.num_tokens, 2)
        yield load(2 * min(_COMING, config.max_num_seqs) * runner.num_ranks, bucket.num_tokens, _STEPS, 0.0)


def measure(llm: LLM, load: Load) -> list[MeasuredStep]:
    """Run a load on the engine, from an empty prefix cache, and in the simulator, and return its steps with their
    measured times. Tokens are sampled randomly (temperature 1), as for most requests; greedy sampling would cost less.

    llm: must have no requests; its prefix cache is reset. Raises RuntimeError if the engine and the simulator ran
    different steps.
    """
    from jaxengine.requests.params.sampling_params import SamplingParams

    core = llm.core
    params = [
        SamplingParams(temperature=1.0, max_tokens=count, ignore_eos=True, detokenize=False) for count in load.outputs
    ]
    llm.reset_prefix_cache()
    before = core.engine.stats.num_steps
    prompts: Any = [{"prompt_token_ids": prompt} for prompt in load.prompts]
    llm.generate(prompts, params, use_tqdm=False)
    while core.has_unfinished:  # the step that was in flight when the last request ended
        core.step()
    records = [step for step in core.engine.timeline.last(1e9, [])["steps"] if step["number"] > before]
    outcome = simulated(core.runner, trace_of("load", load.prompts, load.outputs, core.runner.config.block_size))
    real = [(record["bucket"], record["num_tokens"], record["num_rows"]) for record in records]
    if real != [(str(step.bucket), step.num_tokens, step.num_rows) for step in outcome.steps]:
        raise RuntimeError(f"the engine ran {len(real)} steps that the simulator, with {len(outcome.steps)}, did not")
    return _measured(outcome.steps, records)


def simulated(
    runner: ModelRunner, trace: Trace, costs: MeasuredCosts | None = None, num_pages: int | None = None
) -> Outcome:
    """Run a trace in a simulator with the config, packer and windows of a running engine, and return the outcome.
    costs: None for steps that take no time. num_pages: pages of each replica; None for the engine's number. Raises
    ConfigError for a config that `check_simulated` refuses.
    """
    none = 0.0, 0.0, 0.0, 0.0
    nothing = MeasuredCosts("", "", {}, 1, ((1, 0.0),), (), tiles_of(runner), *none, HostCosts(), (0.0, 0.0), 0)
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
    """Return the costs as readable text of several lines."""
    host = costs.host
    lines = [f"{costs.model or 'the embedded model'}: {costs.about}"]
    for name, table in (("decode S", costs.decode), ("mixed T", costs.mixed)):
        lines += [f"  {name}={size:<8}{seconds * 1e3:>10.3f} ms" for size, seconds in table]
    lines.append(f"  and {costs.per_key * 1e9:.3g} ns a key, {costs.per_pair * 1e9:.3g} ns a pair of query and key")
    lines.append(
        f"  {costs.after_prompts * 1e3:.3f} ms more right after a step with prompts, of which {costs.remains:.0%} "
        "remain from each step to the next"
    )
    lines.append(
        f"  host: {host.dispatch * 1e6:.0f} us before a step, {host.dispatch_prompts * 1e6:.0f} us more with prompts, "
        f"and {host.after * 1e6:.0f} us after it; {(host.dispatch_row + host.after_row) * 1e6:.2f} us more for each row"
    )
    return "\n".join(lines)


def _measured(steps: Sequence[StepTime], records: Sequence[Mapping[str, Any]]) -> list[MeasuredStep]:
    """Return the steps with their times, computed from the timeline's records of the same steps.

    A step's seconds count from its dispatch or from the arrival of the previous step's tokens, whichever is later, to
    the arrival of its own tokens. Its `after` is the time from the arrival of its tokens to the start of the next
    step, plus the time that its sampler took to dispatch before the wait for them; None if no later step starts once
    its tokens have arrived. records: times in seconds, one record for each step, in order.
    """
    starts, dispatched = ([record[name] for record in records] for name in ("start", "dispatched"))
    found, free_at = [], 0.0
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
        found.append(MeasuredStep(step, seconds, record["dispatched"] - record["start"], after))
    return found


class Fit(NamedTuple):
    """Costs of steps on the device. Fields are those of MeasuredCosts; decode and mixed map a bucket's tokens to
    seconds.
    """

    decode: dict[int, float]
    mixed: dict[int, float]
    per_key: float
    per_pair: float
    after_prompts: float
    remains: float

    def seconds(self, step: StepTime) -> float | None:
        """Return the predicted seconds of a step on the device; None if its bucket was not measured."""
        base = (self.decode if step.bucket.decode_only else self.mixed).get(step.bucket.num_tokens)
        if base is None:
            return None
        more = step.keys * self.per_key + step.pairs * self.per_pair
        return base + more + self.after_prompts * self.remains**step.since_prompts


def _fit(measured: Sequence[MeasuredStep]) -> Fit:
    """Return the costs that minimise the mean relative error on the steps, over the candidates _REMAINS. The errors are
    absolute, not squared, so that a step delayed by something else on the machine has little weight. No larger bucket
    costs less than a smaller one, and no coefficient is negative. measured: at least one step.
    """
    names = sorted({(each.step.bucket.decode_only, each.step.bucket.num_tokens) for each in measured})
    place = {name: index for index, name in enumerate(names)}
    rows = np.zeros((len(measured), len(names) + 3))
    seconds = np.maximum([each.seconds for each in measured], 1e-9)
    for index, each in enumerate(measured):
        rows[index, place[each.step.bucket.decode_only, each.step.bucket.num_tokens]] = 1.0
    held = np.array([(each.step.keys, each.step.pairs, 1.0) for each in measured])
    since = np.array([each.step.since_prompts for each in measured])
    # lstsq takes the least norm among equal fits. Scaling down makes it attribute time that could be either a
    # bucket's or its keys' to the bucket.
    scale = 1e3 * np.maximum(held.max(axis=0), 1.0)
    best: tuple[float, Fit] | None = None
    for remains in _REMAINS:
        held[:, -1] = remains**since
        rows[:, -3:] = held / scale
        slopes = _shares(rows, seconds)[-3:] / scale
        bases = seconds - held @ slopes
        tables: list[dict[int, float]] = []
        for is_decode in (True, False):
            sizes = [size for kind, size in names if kind == is_decode]
            own = [bases[rows[:, place[is_decode, size]] > 0] for size in sizes]
            costs = _rising([float(np.median(each)) for each in own], [len(each) for each in own])
            tables.append(dict(zip(sizes, costs, strict=True)))
        per_key, per_pair, after_prompts = slopes.tolist()
        fit = Fit(tables[0], tables[1], per_key, per_pair, after_prompts, remains)
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


def _spread(fit: Fit, steps: Sequence[MeasuredStep]) -> tuple[float, ...]:
    """Return measured over predicted seconds of the steps at SPREAD_SHARES, ascending. Steps in a bucket that the fit
    lacks, or of which it predicts no time, are left out; () if none are left.
    """
    pairs = [(fit.seconds(each.step), each.seconds) for each in steps]
    ratios = [seconds / predicted for predicted, seconds in pairs if predicted]
    return tuple(np.quantile(ratios, SPREAD_SHARES).tolist()) if ratios else ()


def _relative(fit: Fit, steps: Sequence[MeasuredStep]) -> list[float]:
    """Return the absolute relative errors of a fit on steps. Steps in a bucket that the fit lacks are left out."""
    pairs = [(fit.seconds(each.step), max(each.seconds, 1e-9)) for each in steps]
    return [abs(predicted - seconds) / seconds for predicted, seconds in pairs if predicted is not None]


def _host(measured: Sequence[MeasuredStep]) -> HostCosts:
    """Return the host's costs, fitted to the largest number of rows of a replica in each step and, for dispatch, to
    whether a step has prompts. Steps whose `after` is None count for dispatch only.
    """
    rows = np.array([[1.0, each.step.most_rows, not each.step.bucket.decode_only] for each in measured])
    dispatch = _shares(rows, np.array([each.dispatch for each in measured]))
    known = [index for index, each in enumerate(measured) if each.after is not None]
    after = _shares(rows[known, :2], np.array([measured[index].after for index in known]))
    return HostCosts(*dispatch.tolist(), *after.tolist())
