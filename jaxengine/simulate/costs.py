"""Costs of steps: seconds on the device, by a roofline or by a table that was measured, and on the host."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from jaxengine.config.base.errors import ConfigError
from jaxengine.config.base.files import named_path
from jaxengine.scheduler.batches.buckets import Bucket

if TYPE_CHECKING:
    from jaxengine.plan.plan import SplitPlan

VERSION = 2
# Contexts at which a roofline's attention is counted; between them it is interpolated.
_CONTEXTS = (0, *(1 << power for power in range(4, 25)))


@dataclass(frozen=True)
class HostCosts:
    """Seconds of the host's work on a step.

    Attributes:
      dispatch, dispatch_row, dispatch_prompts: from the beginning of scheduling until the forward pass is dispatched,
        more per row, and more in a step with prompts.
      after, after_row: from the arrival of the tokens until the next step is scheduled, and more per row.
    """

    dispatch: float = 0.0
    dispatch_row: float = 0.0
    dispatch_prompts: float = 0.0
    after: float = 0.0
    after_row: float = 0.0


@dataclass(frozen=True)
class Tiles:
    """Tiles in which attention computes: their rows and keys count as full. All 1: just what the rows hold.

    Attributes:
      rows: rows of one token that share a tile, as wide as its longest; at most those of the step's shape.
      tokens: of a row of several tokens.
      keys, keys_alone: of a block of keys; the latter for rows of one token in a shape of one row.
    """

    rows: int = 1
    tokens: int = 1
    keys: int = 1
    keys_alone: int = 1

    def attended(self, bucket: Bucket, counts: np.ndarray, lengths: np.ndarray) -> tuple[float, float]:
        """Return the keys that rows of one token read, and the pairs of a query and a key in rows of several.

        bucket, counts, lengths: as of `Costs.seconds`.
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
    """Return the sum of values i64[n], each rounded up to a multiple of `block`."""
    return int((-(-values // block) * block).sum())


class Costs(Protocol):
    """Costs of steps."""

    @property
    def tiles(self) -> Tiles:
        """Tiles of attention."""
        ...

    @property
    def host(self) -> HostCosts:
        """The host's part."""
        ...

    @property
    def about(self) -> str:
        """One line for a report: where the costs come from, and how exact they are."""
        ...

    def seconds(
        self, bucket: Bucket, counts: np.ndarray, lengths: np.ndarray, since_prompts: float = inf
    ) -> Sequence[float]:
        """Return the seconds of a step on each pipeline stage.

        counts, lengths: i64[rows of a replica], the tokens that each row computes, and those that it has then. bucket:
        the shape in which it runs. Empty arrays count a bucket without rows. since_prompts: decode steps since the last
        one with prompts; inf for a step with prompts, or if there was none.
        """
        ...


class RooflineCosts:
    """Least seconds by a chip's bandwidth and operations, counted as `jaxengine check` counts a step, over a share.

    Only attention depends on what rows hold; all else is counted once for each bucket.
    """

    tiles = Tiles()

    def __init__(self, plan: SplitPlan, efficiency: float = 1.0, host: HostCosts | None = None):
        """plan: one that fits, on a chip whose figures are known. efficiency: share of bandwidth and operations that is
        reached, above 0 to 1. host: None for a host that takes no time.

        Raises ConfigError for a chip without figures.
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

    def seconds(
        self, bucket: Bucket, counts: np.ndarray, lengths: np.ndarray, since_prompts: float = inf
    ) -> Sequence[float]:
        """Return the least seconds of each stage, as `Costs.seconds`: the larger of bytes over bandwidth and operations
        over rate. since_prompts: of no account.
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
      tiles: of the attention that was measured.
      per_key, per_pair: seconds per key and per pair of `Tiles.attended`.
      after_prompts, remains: seconds that a step takes more right after one with prompts, which leaves other things in
        the caches, and the share of them that remains from each step to the next.
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
    tiles: Tiles
    per_key: float
    per_pair: float
    after_prompts: float
    remains: float
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

    def seconds(
        self, bucket: Bucket, counts: np.ndarray, lengths: np.ndarray, since_prompts: float = inf
    ) -> Sequence[float]:
        """Return [seconds], as `Costs.seconds` for one stage: the bucket's by its size, plus shares for its keys and
        pairs, plus what remains of the last prompts.

        Decode-only buckets take the `decode` table, others `mixed`; all take `decode` where `mixed` is empty.
        """
        decodes = bucket.decode_only or not self.mixed
        keys, pairs = self.tiles.attended(bucket, counts, lengths)
        table = self.decode if decodes else self.mixed
        more = keys * self.per_key + pairs * self.per_pair + self.after_prompts * self.remains**since_prompts
        return [_between(table, bucket.num_tokens) + more]

    def write(self, path: str) -> None:
        """Write the costs as JSON to a file for `read_costs`, over what is there. Raises OSError."""
        Path(path).write_text(json.dumps({"jaxengine_costs": VERSION, **asdict(self)}, indent=1) + "\n")


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
    file = named_path("costs", path)
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
        if value.pop("jaxengine_costs") != VERSION:
            raise ValueError("another version")
        tables = {name: tuple((int(size), float(cost)) for size, cost in value[name]) for name in ("decode", "mixed")}
        host = HostCosts(**{name: float(cost) for name, cost in value["host"].items()})
        errors = tuple(float(share) for share in value["errors"])
        tiles = Tiles(**{name: int(size) for name, size in value["tiles"].items()})
        found = MeasuredCosts(**{**value, **tables, "tiles": tiles, "host": host, "errors": errors})
        numbers = [cost for table in tables.values() for _, cost in table]
        numbers += [found.per_key, found.per_pair, found.after_prompts, *asdict(host).values(), *errors]
        sizes = [[size for size, _ in table] for table in tables.values()]
        if not found.decode or any(own != sorted(set(own)) for own in sizes) or not np.isfinite(numbers).all():
            raise ValueError("sizes and seconds")
        if (
            min(numbers) < 0
            or not 0 <= found.remains < 1
            or not all(1 <= size < 1 << 31 for size in vars(tiles).values())
        ):
            raise ValueError("values")
        if not isinstance(found.options, dict) or not 1 <= found.num_pages < 1 << 40:
            raise ValueError("values")
    except OSError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError):
        raise ConfigError("costs", path, allowed) from None
    return found
