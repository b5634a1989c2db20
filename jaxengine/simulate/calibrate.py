"""`jaxengine calibrate-costs`: measures the steps of a running engine and fits the costs that `simulate` takes.

Loads arrive at once, so their steps do not depend on how long any takes: the simulator runs the same steps, and says
what the rows of each one held. A step's seconds are those of its bucket plus shares for what its rows see.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from jaxengine.config.engine_config import ConfigError, EngineConfig
from jaxengine.simulate.costs import HostCosts, MeasuredCosts
from jaxengine.simulate.loop import Outcome, StepTime, check_simulated, run_trace
from jaxengine.simulate.trace import Trace, trace_of

if TYPE_CHECKING:
    from jaxengine.api.llm import LLM
    from jaxengine.runner.model_runner import ModelRunner

# Output tokens of a load: steps of each decode shape.
_STEPS = 24
_PROMPT = 32
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
    """Requests at once: token ids of their prompts, and the lengths of their outputs."""

    prompts: list[list[int]]
    outputs: list[int]


@dataclass(frozen=True)
class MeasuredStep:
    """A step with its times.

    Attributes:
      step: as the simulator ran it.
      seconds: on the device, as the host measured it.
      dispatch, after: the host's, as of HostCosts; after is None for the last step.
    """

    step: StepTime
    seconds: float
    dispatch: float
    after: float | None


def calibrate_costs(options: Mapping[str, Any], rounds: int = 2) -> MeasuredCosts:
    """Start an engine with these options, run loads that use each of its step shapes, and return the costs of steps.

    rounds: as of `costs_of`. The engine is shut down at the end. Raises ConfigError as an engine, for pipeline stages,
    and for options of which a trace does not say enough (`check_simulated`); RuntimeError as `measure`.
    """
    from jaxengine.api.llm import LLM

    check_simulated(EngineConfig.from_options(**options))
    llm = LLM(**options)
    try:
        return costs_of(llm, options, rounds)
    finally:
        llm.shutdown()


def costs_of(llm: LLM, options: Mapping[str, Any], rounds: int = 2) -> MeasuredCosts:
    """Measure the costs of the steps of a running engine, which was started with `options` and has no requests.

    rounds: times that each load is measured, after one that is not counted. Raises ConfigError with pipeline stages.
    RuntimeError as `measure`.
    """
    runner = llm.core.runner
    if runner.config.pipeline_parallel_size > 1:
        size = runner.config.pipeline_parallel_size
        raise ConfigError("pipeline_parallel_size", size, "1: the host sees the time of all stages together")
    loads, measured = list(loads_of(runner)), []
    for index in range(rounds + 1):
        for load in loads:
            steps = measure(llm, load)
            measured += steps if index else []  # the first round warms caches up
    fitted, held_out = measured[::2], measured[1::2]
    errors = _errors(_fit(fitted), held_out or fitted)
    kept = {name: value for name, value in options.items() if name not in _LEFT_OUT and value is not None}
    tables, slopes = _fit(measured)
    decode, mixed = (tuple(sorted(table.items())) for table in tables)
    return MeasuredCosts(
        model=runner.config.model or "",
        platform=runner.device.platform if runner.device.platform != "gpu" else "cuda",
        options=kept,
        num_pages=runner.plan.num_pages,
        decode=decode,
        mixed=mixed,
        per_key=slopes[0],
        per_pair=slopes[1],
        host=_host(measured),
        errors=errors,
        num_steps=len(measured),
    )


def loads_of(runner: ModelRunner) -> Iterator[Load]:
    """Yield loads that use every bucket of an engine, decode shapes with short and long contexts.

    Token ids are random from a fixed seed; lengths are cut to the context and the pages of the engine.
    """
    config, buckets = runner.config, runner.buckets
    rng = np.random.default_rng(0)
    room = runner.plan.num_pages * config.block_size * runner.num_ranks

    def load(count: int, length: int, output: int) -> Load:
        """Return `count` requests with random prompts of `length` tokens and `output` output tokens, as far as these
        fit.
        """
        most = min(config.max_model_len, room // count - config.block_size) - output
        ids = rng.integers(2, runner.vocab_size, (count, max(1, min(length, most))))
        return Load(ids.tolist(), [max(1, min(output, config.max_model_len - ids.shape[1]))] * count)

    for size in sorted({bucket.num_seqs for bucket in buckets.decode}):
        for length in (_PROMPT, 16 * _PROMPT):
            yield load(size * runner.num_ranks, length, _STEPS)
    for bucket in buckets.mixed:
        for _ in range(3):
            yield load(runner.num_ranks, bucket.num_tokens, 2)


def measure(llm: LLM, load: Load) -> list[MeasuredStep]:
    """Run a load, from an empty prefix cache, on the engine and in the simulator; return its steps as both saw them.

    Raises RuntimeError if the two ran other steps. llm: without requests; its prefix cache is reset.
    """
    from jaxengine.requests.sampling_params import SamplingParams

    core = llm.core
    params = [
        SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False) for count in load.outputs
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
    """Run a trace in the simulator of an engine that runs here.

    costs: None for steps that take no time. num_pages: of each replica; None for those that the engine has. Raises
    ConfigError as `run_trace`.
    """
    nothing = MeasuredCosts("", "", {}, 1, ((1, 0.0),), (), 0.0, 0.0, HostCosts(), (0.0, 0.0), 0)
    num_pages = num_pages or runner.plan.num_pages
    return run_trace(trace, runner.config, runner.packer, num_pages, runner.windows, costs or nothing)


def text(costs: MeasuredCosts) -> str:
    """Return the costs for people."""
    host = costs.host
    lines = [f"{costs.model or 'the embedded model'}: {costs.about}"]
    for name, table in (("decode S", costs.decode), ("mixed T", costs.mixed)):
        lines += [f"  {name}={size:<8}{seconds * 1e3:>10.3f} ms" for size, seconds in table]
    lines.append(f"  and {costs.per_key * 1e9:.3g} ns a key, {costs.per_pair * 1e9:.3g} ns a pair of query and key")
    lines.append(
        f"  host: {host.dispatch * 1e6:.0f} us before a step and {host.after * 1e6:.0f} us after it, "
        f"{(host.dispatch_row + host.after_row) * 1e6:.2f} us more for each row"
    )
    return "\n".join(lines)


def _measured(steps: Sequence[StepTime], records: Sequence[Mapping[str, Any]]) -> list[MeasuredStep]:
    """Return the times of steps from the timeline's records of them.

    A step's seconds count from its dispatch or the end of the one before, whichever is later, to the arrival of its
    tokens. records: in seconds, one for each step, in order.
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
            # Its sampler, and what came between its tokens and the next schedule.
            last = dispatched[bisect.bisect_right(dispatched, waiting) - 1]
            after = starts[following] - arrived + waiting - last
        found.append(MeasuredStep(step, seconds, record["dispatched"] - record["start"], after))
    return found


_Tables = tuple[dict[int, float], dict[int, float]]


def _fit(measured: Sequence[MeasuredStep]) -> tuple[_Tables, tuple[float, float]]:
    """Return seconds by bucket, of decode and of mixed shapes, and seconds per key and per pair.

    They leave the least sum of relative errors, not of their squares, so that a step that something else on the machine
    held up counts little. No larger bucket costs less than a smaller one, and no share is negative.
    """
    names = sorted({(each.step.bucket.decode_only, each.step.bucket.num_tokens) for each in measured})
    place = {name: index for index, name in enumerate(names)}
    rows = np.zeros((len(measured), len(names) + 2))
    seconds = np.maximum([each.seconds for each in measured], 1e-9)
    for index, each in enumerate(measured):
        step = each.step
        rows[index, place[step.bucket.decode_only, step.bucket.num_tokens]] = 1.0
        rows[index, -2:] = step.keys, step.pairs
    slopes = _least(rows, seconds)[-2:]
    while (slopes < 0).any():  # what would be negative is left out, and the rest fitted again
        rows[:, -2:][:, slopes < 0] = 0.0
        slopes = _least(rows, seconds)[-2:]
    bases = seconds - rows[:, -2:] @ slopes
    tables: _Tables = {}, {}
    for is_decode in (True, False):
        sizes = [size for kind, size in names if kind == is_decode]
        own = [bases[rows[:, place[is_decode, size]] > 0] for size in sizes]
        costs = _rising([float(np.median(each)) for each in own], [len(each) for each in own])
        tables[not is_decode].update(zip(sizes, costs, strict=True))
    return tables, (float(slopes[0]), float(slopes[1]))


def _least(rows: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """Return f64[n] with the least sum of relative errors of rows f64[m, n] @ it against seconds f64[m].

    Iteratively reweighted least squares, 30 rounds.
    """
    scaled, found = rows / seconds[:, None], np.zeros(rows.shape[1])
    weights = np.ones(len(rows))
    for _ in range(30):  # least squares, each error divided by what it was
        root = np.sqrt(weights)
        found = np.linalg.lstsq(scaled * root[:, None], root, rcond=None)[0]
        weights = 1.0 / np.maximum(np.abs(scaled @ found - 1.0), 1e-3)
    return found


def _rising(costs: Sequence[float], counts: Sequence[int]) -> list[float]:
    """Return costs that do not fall, none negative: where some do, the mean of those that contradict each other.

    counts: steps that each cost is of.
    """
    pools: list[tuple[float, int, int]] = []  # mean, steps, number of costs
    for cost, count in zip(costs, counts, strict=True):
        pools.append((max(0.0, cost), count, 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (first, many, width), (second, more, wide) = pools[-2:]
            pools[-2:] = [((first * many + second * more) / (many + more), many + more, width + wide)]
    return [cost for cost, _, width in pools for _ in range(width)]


def _errors(fit: tuple[_Tables, tuple[float, float]], steps: Sequence[MeasuredStep]) -> tuple[float, float]:
    """Return the median and the 90th percentile of the relative errors of a fit on steps.

    Steps of a bucket that the fit lacks are left out.
    """
    tables, (per_key, per_pair) = fit
    errors = []
    for each in steps:
        table, size = tables[not each.step.bucket.decode_only], each.step.bucket.num_tokens
        if size in table:
            predicted = table[size] + each.step.keys * per_key + each.step.pairs * per_pair
            errors.append(abs(predicted - each.seconds) / max(each.seconds, 1e-9))
    return float(np.median(errors)), float(np.percentile(errors, 90))


def _host(measured: Sequence[MeasuredStep]) -> HostCosts:
    """Fit the host's parts by the number of rows. The last step, without `after`, counts for dispatch only."""
    dispatch = _line([(each.step.most_rows, each.dispatch) for each in measured])
    after = _line([(each.step.most_rows, each.after) for each in measured if each.after is not None])
    return HostCosts(*dispatch, *after)


def _line(points: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Fit seconds = constant + slope * rows to points (rows, seconds); return (constant, slope), neither negative.

    The line is fitted to the median of each number of rows, by least squares weighted by the number of points. Where it
    would have a negative part, the constant is the weighted mean and the slope 0. (0, 0) without points.
    """
    by_rows: dict[int, list[float]] = defaultdict(list)
    for rows, seconds in points:
        by_rows[rows].append(seconds)
    if not by_rows:
        return 0.0, 0.0
    rows = np.array(sorted(by_rows), float)
    medians = np.array([np.median(by_rows[int(each)]) for each in rows])
    weights = np.sqrt([len(by_rows[int(each)]) for each in rows])
    slope, constant = np.polyfit(rows, medians, 1, w=weights) if len(rows) > 1 else (0.0, medians[0])
    if slope < 0 or constant < 0:
        return float(np.average(medians, weights=weights**2)), 0.0
    return float(constant), float(slope)
