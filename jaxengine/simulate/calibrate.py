"""`jaxengine calibrate-costs`: measures the steps of a running engine and fits the costs that `simulate` takes.

Loads arrive at once, so their steps do not depend on how long any takes: the simulator runs the same steps, and says
what the rows of each one held. A step's seconds are those of its bucket, plus shares for the keys that its attention
reads, padding included, plus what remains of the last step with prompts.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from jaxengine.config.engine_config import ConfigError, EngineConfig
from jaxengine.models.kernel_rows import kernel_rows, tuning_of
from jaxengine.simulate.costs import HostCosts, MeasuredCosts, Tiles
from jaxengine.simulate.loop import Outcome, StepTime, check_simulated, run_trace
from jaxengine.simulate.trace import Trace, trace_of

if TYPE_CHECKING:
    from jaxengine.api.llm import LLM
    from jaxengine.runner.model_runner import ModelRunner

# Most output tokens of a load: steps of each decode shape. The first dozen or two are slower (`after_prompts`).
_STEPS = 48
_PROMPT = 32
# Most rows at once of a load whose requests come and go.
_COMING = 16
# Shares of what a step with prompts leaves that may remain after each further step.
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
    )


def loads_of(runner: ModelRunner) -> Iterator[Load]:
    """Yield loads that use every bucket of an engine: decode shapes with short and long contexts, steps of one prompt,
    and of prompts beside decodes, from requests of all lengths that come and go.

    Token ids and lengths are random from a fixed seed; lengths are cut to the context and the pages of the engine.
    """
    config, buckets = runner.config, runner.buckets
    rng = np.random.default_rng(0)
    room = runner.plan.num_pages * config.block_size * runner.num_ranks

    def load(count: int, length: int, output: int, least: float = 1.0) -> Load:
        """Return `count` requests with random prompts of `length` tokens and `output` output tokens, as far as these
        fit.

        least: share of both lengths from which they are random, up to all of them.
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
    """Run a load, from an empty prefix cache, on the engine and in the simulator; return its steps as both saw them.
    Tokens are sampled at random, as most requests' are: greedy ones cost less.

    Raises RuntimeError if the two ran other steps. llm: without requests; its prefix cache is reset.
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
    """Run a trace in the simulator of an engine that runs here.

    costs: None for steps that take no time. num_pages: of each replica; None for those that the engine has. Raises
    ConfigError as `run_trace`.
    """
    none = 0.0, 0.0, 0.0, 0.0
    nothing = MeasuredCosts("", "", {}, 1, ((1, 0.0),), (), tiles_of(runner), *none, HostCosts(), (0.0, 0.0), 0)
    num_pages = num_pages or runner.plan.num_pages
    return run_trace(trace, runner.config, runner.packer, num_pages, runner.windows, costs or nothing)


def tiles_of(runner: ModelRunner) -> Tiles:
    """Return the tiles of an engine's attention: plain XLA's pad rows and keys; kernels read what there is."""
    platform, page_size = runner.stages[0].programs.platform, runner.config.block_size
    if kernel_rows(platform).get("ragged_paged_attention") != "attention.xla.attend":
        return Tiles()
    sizes = tuning_of(platform).xla_attention
    return Tiles(sizes.block_seqs, sizes.block_q, *(sizes.block_kv_of(page_size, rows) for rows in (2, 1)))


def text(costs: MeasuredCosts) -> str:
    """Return the costs for people."""
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


class Fit(NamedTuple):
    """Costs of steps on the device: fields of MeasuredCosts, the tables as seconds by tokens."""

    decode: dict[int, float]
    mixed: dict[int, float]
    per_key: float
    per_pair: float
    after_prompts: float
    remains: float

    def seconds(self, step: StepTime) -> float | None:
        """Return the seconds of a step; None for a bucket that was not measured."""
        base = (self.decode if step.bucket.decode_only else self.mixed).get(step.bucket.num_tokens)
        if base is None:
            return None
        more = step.keys * self.per_key + step.pairs * self.per_pair
        return base + more + self.after_prompts * self.remains**step.since_prompts


def _fit(measured: Sequence[MeasuredStep]) -> Fit:
    """Return the costs with the least sum of relative errors, not of their squares, so that a step that something else
    on the machine held up counts little.

    No larger bucket costs less than a smaller one, and no share is negative.
    """
    names = sorted({(each.step.bucket.decode_only, each.step.bucket.num_tokens) for each in measured})
    place = {name: index for index, name in enumerate(names)}
    rows = np.zeros((len(measured), len(names) + 3))
    seconds = np.maximum([each.seconds for each in measured], 1e-9)
    for index, each in enumerate(measured):
        rows[index, place[each.step.bucket.decode_only, each.step.bucket.num_tokens]] = 1.0
    held = np.array([(each.step.keys, each.step.pairs, 1.0) for each in measured])
    since = np.array([each.step.since_prompts for each in measured])
    # Of equal fits the one with the least norm is taken: what may be a bucket's or its keys' share is the bucket's.
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
    """Return f64[n], none negative, with the least sum of relative errors of rows f64[m, n] @ it against f64[m].

    Times below a nanosecond, which a coarse clock gives, count as one.
    """
    seconds = np.maximum(seconds, 1e-9)
    rows, found = rows.copy(), _least(rows, seconds)
    while (found < 0).any():  # what would be negative is left out, and the rest fitted again
        rows[:, found < 0] = 0.0
        found = np.where(rows.any(axis=0), _least(rows, seconds), 0.0)
    return found


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


def _errors(fit: Fit, steps: Sequence[MeasuredStep]) -> tuple[float, float]:
    """Return the median and the 90th percentile of the relative errors of a fit on steps."""
    errors = _relative(fit, steps)
    return float(np.median(errors)), float(np.percentile(errors, 90))


def _relative(fit: Fit, steps: Sequence[MeasuredStep]) -> list[float]:
    """Return the relative errors of a fit on steps; those of a bucket that the fit lacks are left out."""
    pairs = [(fit.seconds(each.step), max(each.seconds, 1e-9)) for each in steps]
    return [abs(predicted - seconds) / seconds for predicted, seconds in pairs if predicted is not None]


def _host(measured: Sequence[MeasuredStep]) -> HostCosts:
    """Fit the host's parts by the number of rows, and for dispatch by whether the step has prompts. The last step,
    without `after`, counts for dispatch only.
    """
    rows = np.array([[1.0, each.step.most_rows, not each.step.bucket.decode_only] for each in measured])
    dispatch = _shares(rows, np.array([each.dispatch for each in measured]))
    known = [index for index, each in enumerate(measured) if each.after is not None]
    after = _shares(rows[known, :2], np.array([measured[index].after for index in known]))
    return HostCosts(*dispatch.tolist(), *after.tolist())
