"""Costs of steps: seconds on the device, by a roofline or by a table that was measured, and on the host."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from math import exp
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from jaxengine.config.base.errors import ConfigError
from jaxengine.config.base.files import named_path
from jaxengine.scheduler.batches.buckets import Bucket

if TYPE_CHECKING:
    from jaxengine.plan.plan import SplitPlan

VERSION = 4
# Shares of the measured steps at which a StepSpread has its factors. The last ones decide the 99th percentile of what
# takes a few steps, such as a first token.
SPREAD_SHARES = (0.005, *(share / 20 for share in range(1, 20)), 0.99, 0.995, 0.998)
# Context lengths for which a roofline's attention is computed; between them it is interpolated.
_CONTEXTS = (0, *(1 << power for power in range(4, 25)))


@dataclass(frozen=True)
class HostCosts:
    """Seconds of the host's work on a step.

    Attributes:
      dispatch: from the beginning of scheduling until the forward pass is dispatched.
      dispatch_row, dispatch_prompts: additional to dispatch, for each row, and for a step with prompts.
      dispatch_cold: additional to dispatch of a step whose caches are cold, see `Costs.cold_after`.
      after: from the arrival of the tokens until the next step is scheduled.
      after_row: additional to after, for each row.
    """

    dispatch: float = 0.0
    dispatch_row: float = 0.0
    dispatch_prompts: float = 0.0
    dispatch_cold: float = 0.0
    after: float = 0.0
    after_row: float = 0.0


@dataclass(frozen=True)
class Cold:
    """How the caches lose what steps need, to prompts and while the engine is idle, and get it back.

    Attributes:
      tokens: tokens of a step with prompts after which 1 / e of what was warm is still warm; positive.
      idle: seconds without work after which 1 / e of what was warm is still warm; 0 if they change nothing.
      remains: factor by which the cold share shrinks with each decode step.
    """

    tokens: float = 1.0
    idle: float = 0.0
    remains: float = 0.0

    def after(self, cold: float, bucket: Bucket) -> float:
        """Return the cold share of the caches after a step in `bucket` that began with a share of `cold`: cold *
        remains after decodes, 1 - (1 - cold) * exp(-num_tokens / tokens) after others.
        """
        if bucket.decode_only:
            return cold * self.remains
        return 1.0 - (1.0 - cold) * exp(-bucket.num_tokens / self.tokens)

    def paused(self, cold: float, seconds: float) -> float:
        """Return the cold share after `seconds` without work, before which it was `cold`: 1 - (1 - cold) * exp(-seconds
        / idle), or `cold` if `idle` is 0.
        """
        return 1.0 - (1.0 - cold) * exp(-seconds / self.idle) if self.idle else cold


@dataclass(frozen=True)
class StepSpread:
    """Factors of the seconds of steps without prompts (decode) and with prompts (mixed), at SPREAD_SHARES, ascending,
    from which each step's is drawn; empty for steps that take their seconds exactly.
    """

    decode: tuple[float, ...] = ()
    mixed: tuple[float, ...] = ()

    def factor(self, bucket: Bucket, share: float) -> float:
        """Return the factor of a step in `bucket` that a share of the steps, 0 to 1, does not exceed, interpolated
        between SPREAD_SHARES; 1 without factors.
        """
        factors = self.decode if bucket.decode_only else self.mixed
        return float(np.interp(share, SPREAD_SHARES, factors)) if factors else 1.0


@dataclass(frozen=True)
class Pause:
    """Cost of a pause of `length` seconds without requests: the additional seconds of the first step after it, on the
    device and of the host.
    """

    length: float
    device: float
    host: float


@dataclass(frozen=True)
class Tiles:
    """Sizes of the tiles in which attention computes; each tile counts as full. All 1: no padding.

    Attributes:
      rows: number of one-token rows in a tile, all padded to the longest of them.
      tokens: query tokens in a tile of a row with several tokens.
      keys: keys in a block.
      keys_alone: keys in a block for one-token rows, in a bucket of one row.
    """

    rows: int = 1
    tokens: int = 1
    keys: int = 1
    keys_alone: int = 1

    def attended(self, bucket: Bucket, counts: np.ndarray, lengths: np.ndarray) -> tuple[float, float]:
        """Return (keys that one-token rows read, pairs of a query and a key in rows of several tokens), both with
        padding to full tiles. One-token rows are tiled from the longest to the shortest; each tile of queries reads the
        keys up to its last token. bucket: shape of the step. counts, lengths: i64[rows], tokens that each row computes,
        and its tokens after the step.
        """
        block = self.keys if bucket.num_seqs > 1 else self.keys_alone
        rows, tokens = min(self.rows, bucket.num_seqs), min(self.tokens, bucket.num_tokens)
        longest = np.sort(lengths[counts == 1])[::-1][::rows]
        pairs = 0
        for count, length in zip(counts[counts > 1].tolist(), lengths[counts > 1].tolist(), strict=True):
            ends = np.minimum(np.arange(tokens, count + tokens, tokens), count) + (length - count)
            pairs += tokens * _ceil(ends, self.keys)
        return float(rows * _ceil(longest, block)), float(pairs)


def _ceil(values: np.ndarray, block: int) -> int:
    """Return the sum over i64[n] `values` of each value rounded up to a multiple of `block`."""
    return int((-(-values // block) * block).sum())


class Costs(Protocol):
    """Interface of the costs of steps."""

    @property
    def tiles(self) -> Tiles:
        """Tiles in which attention computes."""
        ...

    @property
    def host(self) -> HostCosts:
        """Costs of the host's work."""
        ...

    @property
    def spread(self) -> StepSpread:
        """Factors of steps' seconds."""
        ...

    @property
    def about(self) -> str:
        """Line for a report that says where the costs come from and how exact they are."""
        ...

    def seconds(self, bucket: Bucket, counts: np.ndarray, lengths: np.ndarray, cold: float = 0.0) -> Sequence[float]:
        """Return the seconds that a step takes on each pipeline stage.

        bucket: shape in which the step runs. counts: i64[rows of a replica], tokens that each row computes in this
        step. lengths: i64[rows], tokens of each row after it. Empty arrays give the seconds of the bucket without rows.
        cold: share of the caches that lack what the step needs, see `cold_after`.
        """
        ...

    def cold_after(self, cold: float, bucket: Bucket) -> float:
        """Return the share, 0 to 1, of the caches that lack what steps need, after a step in `bucket` that began with a
        share of `cold`.
        """
        ...

    def idle(self, cold: float, seconds: float) -> tuple[float, float, float]:
        """Return (cold share of the caches after the engine had nothing to do for `seconds`, additional seconds of the
        device for the next step, additional seconds of the host before its dispatch). cold: share before.
        """
        ...


class RooflineCosts:
    """Least seconds of steps by a chip's memory bandwidth and rate of operations, both times an efficiency. Work is
    counted as in `jaxengine check`.

    Only attention depends on the rows' lengths. All other work is computed once for each bucket.
    """

    tiles, spread = Tiles(), StepSpread()

    def __init__(self, plan: SplitPlan, efficiency: float = 1.0, host: HostCosts | None = None):
        """Compute the work of attention by context length for all stages.

        plan: plan of a split that fits, on a chip whose figures are known. efficiency: share of bandwidth and
        operations that is reached, above 0 and at most 1. host: None for a host that takes no time. Raises ConfigError
        for a chip without figures.
        """
        from jaxengine.check.model.roofline import Work, attention_work, epilogue_work, step_work

        chip, config = plan.chips.chip, plan.config
        if not chip.bandwidth:
            raise ConfigError("chips", chip.name, "chips with known figures, or a file of jaxengine calibrate-costs")
        self.host = host or HostCosts()
        self.about = f"roofline of {plan.chips}, {efficiency:.0%} of it reached: as it would be, nothing was measured"
        self._rates = chip.bandwidth * efficiency, chip.flops * efficiency
        types = config.kv_cache_dtype, config.dtype
        models = [stage.programs.model for stage in plan.stages]
        buckets = plan.stages[0].programs.packer.buckets

        def attention(model: Any, bucket: Bucket, context: int) -> Work:
            """Return the work of attention on one device, over all layers of a stage, with `context` tokens in each
            row.
            """
            own = [model.config.attention[layer] for layer in model.stage.layers]
            each = [attention_work(layer, bucket, *types, context) for layer in own if layer.attends]
            share = model.mesh.model
            return Work(sum(one.num_bytes // share for one in each), sum(one.flops // share for one in each))

        @cache
        def base(stage: int, bucket: Bucket) -> Work:
            """Return the work of a stage's step without that of attention, its sampler included on the last stage.
            Results are cached.
            """
            model = models[stage]
            whole, own = step_work(model, bucket, *types, 0), attention(model, bucket, 0)
            sampler = Work(0, 0)
            if model.stage.is_last:
                sampler = epilogue_work(model, "sample", buckets.sample_size(bucket), 1)
            return Work(whole.num_bytes - own.num_bytes + sampler.num_bytes, whole.flops - own.flops + sampler.flops)

        self._base = base
        one = Bucket(1, 1)
        self._attention = []
        for model in models:
            works = [attention(model, one, context) for context in _CONTEXTS]
            self._attention.append(
                tuple(
                    [getattr(work, name) - getattr(works[0], name) for work in works] for name in ("num_bytes", "flops")
                )
            )

    def seconds(self, bucket: Bucket, counts: np.ndarray, lengths: np.ndarray, cold: float = 0.0) -> Sequence[float]:
        """Return the least seconds of each pipeline stage: the larger of bytes over bandwidth and operations over their
        rate. Those of attention are interpolated between lengths of _CONTEXTS, and constant beyond the last. bucket:
        shape of the step. counts, lengths: i64[rows], tokens that each row computes, and its tokens after the step.
        cold: not used.
        """
        found, middle = [], lengths - (counts - 1) / 2
        bandwidth, flops = self._rates
        for stage, (num_bytes, operations) in enumerate(self._attention):
            base = self._base(stage, bucket)
            read = base.num_bytes + np.interp(lengths, _CONTEXTS, num_bytes).sum()
            done = base.flops + (counts * np.interp(middle, _CONTEXTS, operations)).sum()
            found.append(max(read / bandwidth, done / flops))
        return found

    def cold_after(self, cold: float, bucket: Bucket) -> float:
        """Return 0: a roofline has no caches."""
        return 0.0

    def idle(self, cold: float, seconds: float) -> tuple[float, float, float]:
        """Return no cold share and no additional seconds: a roofline's chip is always awake."""
        return 0.0, 0.0, 0.0


@dataclass(frozen=True)
class MeasuredCosts:
    """Costs that `jaxengine calibrate-costs` measured on a running engine, and what they are valid for.

    Attributes:
      model, platform, options: what was measured: the model's name, jax's name of the platform, and engine options.
      num_pages: pages in each replica's pool.
      decode, mixed: (T, seconds) of decode-only and of mixed buckets, by T; others are interpolated.
      tiles: tiles of the attention that was measured.
      per_key, per_pair: seconds per key and per pair of `Tiles.attended`.
      cold: how caches cool down and warm up.
      cold_decode, cold_mixed: (T, additional seconds of a step with cold caches), as for decode and mixed.
      pauses: what the first step after a pause takes longer, see Pause, by the length of the pause, ascending; between
        them, and from no pause on, it is interpolated, and longer pauses cost as much as the last.
      errors: median and 90th percentile of the relative error of a step's seconds, on steps that were not fitted.
      host: seconds of the host's work.
      num_steps: steps that were measured.
      spread: measured over fitted seconds of these steps, see `Costs.spread`.
    """

    model: str
    platform: str
    options: dict[str, Any]
    num_pages: int
    decode: tuple[tuple[int, float], ...]
    mixed: tuple[tuple[int, float], ...]
    tiles: Tiles
    per_key: float
    per_pair: float
    cold: Cold
    cold_decode: tuple[tuple[int, float], ...]
    cold_mixed: tuple[tuple[int, float], ...]
    host: HostCosts
    errors: tuple[float, float]
    num_steps: int
    pauses: tuple[Pause, ...] = ()
    spread: StepSpread = StepSpread()

    @property
    def about(self) -> str:
        """Line for a report that says where the costs come from and how exact they are."""
        return (
            f"measured on {self.platform} over {self.num_steps} steps; a step's seconds are off by "
            f"{self.errors[0]:.0%} in the median, {self.errors[1]:.0%} at the 90th percentile"
        )

    def seconds(self, bucket: Bucket, counts: np.ndarray, lengths: np.ndarray, cold: float = 0.0) -> Sequence[float]:
        """Return [seconds], for the only stage: the seconds of the bucket's size (`_between`), plus those for the keys
        and pairs of attention, plus those that it loses to cold caches, times `cold`.

        Decode-only buckets use the `decode` table, others `mixed`; all use `decode` if `mixed` is empty. counts,
        lengths: i64[rows], tokens that each row computes, and its tokens after the step. cold: see `Costs.seconds`.
        """
        decodes = bucket.decode_only or not self.mixed
        keys, pairs = self.tiles.attended(bucket, counts, lengths)
        table = self.decode if decodes else self.mixed
        lost = self.cold_decode if decodes else self.cold_mixed
        more = keys * self.per_key + pairs * self.per_pair + cold * _between(lost, bucket.num_tokens)
        return [_between(table, bucket.num_tokens) + more]

    def cold_after(self, cold: float, bucket: Bucket) -> float:
        """Return the share of cold caches after a step in `bucket` that began with a share of `cold`."""
        return self.cold.after(cold, bucket)

    def idle(self, cold: float, seconds: float) -> tuple[float, float, float]:
        """Return (cold share, additional seconds of the device, of the host) after an idle time of `seconds`, the
        latter two interpolated between `pauses`, and constant after the longest.
        """
        lengths = [0.0, *(pause.length for pause in self.pauses)]
        device = float(np.interp(seconds, lengths, [0.0, *(pause.device for pause in self.pauses)]))
        host = float(np.interp(seconds, lengths, [0.0, *(pause.host for pause in self.pauses)]))
        return self.cold.paused(cold, seconds), device, host

    def write(self, path: str) -> None:
        """Write the costs as JSON to a file, for `read_costs`. An existing file is replaced. Raises OSError."""
        Path(path).write_text(json.dumps({"jaxengine_costs": VERSION, **asdict(self)}, indent=1) + "\n")


def _between(table: Sequence[tuple[int, float]], size: int) -> float:
    """Return the seconds of a bucket of `size` tokens from a table of (tokens, seconds) in ascending order. Sizes
    between entries are interpolated, smaller ones cost as much as the first entry, larger ones in proportion to the
    last entry. An empty table is one of zeros.
    """
    if not table:
        return 0.0
    sizes, seconds = zip(*table, strict=True)
    if size > sizes[-1]:
        return seconds[-1] * size / sizes[-1]
    return float(np.interp(size, sizes, seconds))


def read_costs(path: str) -> MeasuredCosts:
    """Return the costs in a file that `jaxengine calibrate-costs` wrote.

    Raises ConfigError if it is not such a file or has another version, if its sizes do not rise or its values are out
    of range, negative or not finite; OSError if it cannot be read.
    """
    allowed = "a file that jaxengine calibrate-costs wrote"
    file = named_path("costs", path)
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
        if value.pop("jaxengine_costs") != VERSION:
            raise ValueError("another version")
        tables = {
            name: tuple((int(size), float(cost)) for size, cost in value[name])
            for name in ("decode", "mixed", "cold_decode", "cold_mixed")
        }
        host = HostCosts(**{name: float(cost) for name, cost in value["host"].items()})
        cold = Cold(**{name: float(cost) for name, cost in value["cold"].items()})
        pauses = tuple(Pause(*(float(each[name]) for name in ("length", "device", "host"))) for each in value["pauses"])
        errors = tuple(float(share) for share in value["errors"])
        spread = StepSpread(**{name: tuple(map(float, factors)) for name, factors in value["spread"].items()})
        tiles = Tiles(**{name: int(size) for name, size in value["tiles"].items()})
        read = {"tiles": tiles, "host": host, "cold": cold, "pauses": pauses, "errors": errors, "spread": spread}
        found = MeasuredCosts(**{**value, **tables, **read})
        numbers = [cost for table in tables.values() for _, cost in table] + [found.per_key, found.per_pair]
        numbers += [cost for each in (host, cold, *pauses) for cost in vars(each).values()] + [
            *errors,
            *spread.decode,
            *spread.mixed,
        ]
        sizes = [[size for size, _ in table] for table in tables.values()] + [[each.length for each in pauses]]
        if not found.decode or any(own != sorted(set(own)) for own in sizes) or not np.isfinite(numbers).all():
            raise ValueError("sizes and seconds")
        if (
            min(numbers) < 0
            or not 0 <= cold.remains < 1
            or not cold.tokens
            or not all(1 <= size < 1 << 31 for size in vars(tiles).values())
        ):
            raise ValueError("values")
        for factors in (spread.decode, spread.mixed):
            if factors and len(factors) != len(SPREAD_SHARES) or list(factors) != sorted(factors):
                raise ValueError("spread")
        if not isinstance(found.options, dict) or not 1 <= found.num_pages < 1 << 40:
            raise ValueError("values")
    except OSError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError):
        raise ConfigError("costs", path, allowed) from None
    return found
