"""Costs of steps: seconds on the device, by a roofline or by a table that was measured, and on the host."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from jaxengine.config.errors import ConfigError
from jaxengine.scheduler.buckets import Bucket

if TYPE_CHECKING:
    from jaxengine.plan.plan import SplitPlan

VERSION = 1
# Contexts at which a roofline's attention is counted; between them it is interpolated.
_CONTEXTS = (0, *(1 << power for power in range(4, 25)))


@dataclass(frozen=True)
class HostCosts:
    """Seconds of the host's work on a step.

    Attributes:
      dispatch, dispatch_row: from the beginning of scheduling until the forward pass is dispatched, and more per row.
      after, after_row: from the arrival of the tokens until the next step is scheduled, and more per row.
    """

    dispatch: float = 0.0
    dispatch_row: float = 0.0
    after: float = 0.0
    after_row: float = 0.0


class Costs(Protocol):
    """Costs of steps."""

    @property
    def host(self) -> HostCosts:
        """The host's part."""
        ...

    @property
    def about(self) -> str:
        """One line for a report: where the costs come from, and how exact they are."""
        ...

    def seconds(self, bucket: Bucket, counts: np.ndarray, lengths: np.ndarray) -> Sequence[float]:
        """Return the seconds of a step on each pipeline stage.

        counts, lengths: i64[rows of a replica], the tokens that each row computes, and those that it has then. bucket:
        the shape in which it runs. Empty arrays count a bucket without rows.
        """
        ...


class RooflineCosts:
    """Least seconds by a chip's bandwidth and operations, counted as `jaxengine check` counts a step, over a share.

    Only attention depends on what rows hold; all else is counted once for each bucket.
    """

    def __init__(self, plan: SplitPlan, efficiency: float = 1.0, host: HostCosts | None = None):
        """plan: one that fits, on a chip whose figures are known. efficiency: share of bandwidth and operations that is
        reached, above 0 to 1. host: None for a host that takes no time.

        Raises ConfigError for a chip without figures.
        """
        from jaxengine.check.roofline import Work, attention_work, epilogue_work, step_work

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
            """Return a device's share of the work of attention in all layers of a stage."""
            own = [model.config.attention[layer] for layer in model.stage.layers]
            each = [attention_work(layer, bucket, *types, context) for layer in own if layer.attends]
            share = model.mesh.model
            return Work(sum(one.num_bytes // share for one in each), sum(one.flops // share for one in each))

        @cache
        def base(stage: int, bucket: Bucket) -> Work:
            """Return the work of a step of a stage without keys, its sampler included; counted once for each bucket."""
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

    def seconds(self, bucket: Bucket, counts: np.ndarray, lengths: np.ndarray) -> Sequence[float]:
        """Return the least seconds of each stage, as `Costs.seconds`: the larger of bytes over bandwidth and operations
        over rate.
        """
        found, middle = [], lengths - (counts - 1) / 2
        bandwidth, flops = self._rates
        for stage, (num_bytes, operations) in enumerate(self._attention):
            base = self._base(stage, bucket)
            read = base.num_bytes + np.interp(lengths, _CONTEXTS, num_bytes).sum()
            done = base.flops + (counts * np.interp(middle, _CONTEXTS, operations)).sum()
            found.append(max(read / bandwidth, done / flops))
        return found


@dataclass(frozen=True)
class MeasuredCosts:
    """Costs that `jaxengine calibrate-costs` measured on a running engine, and what they are valid for.

    Attributes:
      model, platform, options: what was measured: the model's name, jax's name of the platform, and engine options.
      num_pages: of each replica's pool.
      decode, mixed: (T, seconds) of decode-only and of mixed buckets, by T; others are interpolated.
      per_key, per_pair: seconds per key that a step's rows see, and per pair of a query and a key of rows with prompt.
      errors: median and 90th percentile of the relative error of a step's seconds, on steps that were not fitted.
      host: seconds of the host's work.
      num_steps: steps that were measured.
    """

    model: str
    platform: str
    options: dict[str, Any]
    num_pages: int
    decode: tuple[tuple[int, float], ...]
    mixed: tuple[tuple[int, float], ...]
    per_key: float
    per_pair: float
    host: HostCosts
    errors: tuple[float, float]
    num_steps: int

    @property
    def about(self) -> str:
        """One line for a report: where the costs come from, and how exact they are."""
        return (
            f"measured on {self.platform} over {self.num_steps} steps; a step's seconds are off by "
            f"{self.errors[0]:.0%} in the median, {self.errors[1]:.0%} at the 90th percentile"
        )

    def seconds(self, bucket: Bucket, counts: np.ndarray, lengths: np.ndarray) -> Sequence[float]:
        """Return [seconds], as `Costs.seconds` for one stage: the bucket's by its size, plus shares for its keys and
        pairs.

        Decode-only buckets take the `decode` table, others `mixed`; all take `decode` where `mixed` is empty.
        """
        decodes = bucket.decode_only or not self.mixed
        keys, pairs = keys_and_pairs(counts, lengths)
        table = self.decode if decodes else self.mixed
        return [_between(table, bucket.num_tokens) + keys * self.per_key + pairs * self.per_pair]

    def write(self, path: str) -> None:
        """Write the costs as JSON to a file for `read_costs`, over what is there. Raises OSError."""
        Path(path).write_text(json.dumps({"jaxengine_costs": VERSION, **asdict(self)}, indent=1) + "\n")


def keys_and_pairs(counts: np.ndarray, lengths: np.ndarray) -> tuple[float, float]:
    """Return the keys that the rows of a step see, and the pairs of a query and a key in rows of several tokens.

    counts, lengths: as of `Costs.seconds`.
    """
    several = counts > 1
    pairs = (counts * (lengths - (counts - 1) / 2))[several].sum()
    return float(lengths.sum()), float(pairs)


def _between(table: Sequence[tuple[int, float]], size: int) -> float:
    """Return the seconds of a bucket of `size` tokens from a table of (tokens, seconds) in rising order.

    Sizes between entries are interpolated, smaller ones cost as the first entry, larger ones in proportion to the last.
    """
    sizes, seconds = zip(*table, strict=True)
    if size > sizes[-1]:
        return seconds[-1] * size / sizes[-1]
    return float(np.interp(size, sizes, seconds))


def read_costs(path: str) -> MeasuredCosts:
    """Read a file of `jaxengine calibrate-costs`.

    Raises ConfigError if it is not one or is of another version, or if its sizes do not rise or its seconds are
    negative or not finite; OSError if it cannot be read.
    """
    allowed = "a file that jaxengine calibrate-costs wrote"
    try:
        value = json.loads(Path(path).expanduser().read_text(encoding="utf-8"))
        if value.pop("jaxengine_costs") != VERSION:
            raise ValueError("another version")
        tables = {name: tuple((int(size), float(cost)) for size, cost in value[name]) for name in ("decode", "mixed")}
        host = HostCosts(**{name: float(cost) for name, cost in value["host"].items()})
        errors = tuple(float(share) for share in value["errors"])
        found = MeasuredCosts(**{**value, **tables, "host": host, "errors": errors})
        numbers = [cost for table in tables.values() for _, cost in table]
        numbers += [found.per_key, found.per_pair, *asdict(host).values(), *errors]
        sizes = [[size for size, _ in table] for table in tables.values()]
        if not found.decode or any(own != sorted(set(own)) for own in sizes) or not np.isfinite(numbers).all():
            raise ValueError("sizes and seconds")
        if min(numbers) < 0 or not isinstance(found.options, dict) or not 1 <= found.num_pages < 1 << 40:
            raise ValueError("values")
    except OSError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError):
        raise ConfigError("costs", path, allowed) from None
    return found
