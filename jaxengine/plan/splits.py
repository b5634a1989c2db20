"""Every way to split a model over chips, planned and put in order: those that fit, the best first."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from jaxengine.config.engine_config import ConfigError
from jaxengine.plan.chips import Chips
from jaxengine.plan.model import PlannedModel
from jaxengine.plan.plan import LEFT, CompiledNeeds, Split, SplitPlan, plan_split
from jaxengine.plan.speed import Speed, speed_of

# Speeds that are below a faster split's by at most this share count as equal to it: a bound is not that exact.
_EQUAL = 0.02


@dataclass(frozen=True)
class Ranked:
    """A split with its plan.

    Attributes:
      plan: None if the model cannot be split so.
      speed: upper bounds; None where they are not known, and for a plan that does not fit.
      error: reason why the model cannot be split so, or does not fit; None if an engine would start.
    """

    split: Split
    plan: SplitPlan | None
    speed: Speed | None
    error: ConfigError | None

    @property
    def fits(self) -> bool:
        """Whether an engine would start."""
        return self.error is None


def possible_splits(count: int, given: Mapping[str, object], *, has_experts: bool, drafts: bool) -> Iterator[Split]:
    """Yield the splits that use all `count` devices and agree with the engine options in `given`.

    With all three sizes given, only that split is yielded, which may use fewer or more devices. Nothing is yielded if
    other given sizes do not divide `count`, or if expert parallelism is requested without experts. given: engine
    options by name; sizes that it lacks, or that are None, are free. has_experts: whether the model has experts; unless
    enable_expert_parallel is given, splits of more than one tensor or data rank are then yielded with and without
    expert parallelism. drafts: whether the draft method has weights; then no split with several stages is yielded
    unless their number is given.
    """
    names = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
    wanted = [given.get(name) for name in names]
    experts = [bool(given["enable_expert_parallel"])] if "enable_expert_parallel" in given else [False, True]
    if all(size is not None for size in wanted):
        count = Split(*wanted).size  # type: ignore[arg-type]
    for tensor in _divisors(count):
        for pipeline in _divisors(count // tensor):
            sizes = tensor, pipeline, count // tensor // pipeline
            agrees = all(size in (None, own) for size, own in zip(wanted, sizes, strict=True))
            if agrees and not (drafts and pipeline > 1 and wanted[1] is None):
                for whole in experts:
                    if not whole or (has_experts and (sizes[0] * sizes[2] > 1 or len(experts) == 1)):
                        yield Split(*sizes, whole)


def rank_splits(
    model: PlannedModel,
    chips: Chips,
    given: Mapping[str, object],
    length: int,
    progress: Callable[[str], None] = lambda what: None,
    compiled: CompiledNeeds | None = None,
) -> list[Ranked]:
    """Plan every split that `possible_splits` yields, and return the plans, the best first; there is at least one.

    The order is that of `in_order`. length: tokens of a sequence. progress(what) is called before each split is
    planned. compiled: source of compiled memory needs; None estimates them. Raises ConfigError if there is no such
    split, or if the given sizes need more devices than there are. Any other ConfigError becomes the `error` of its
    split.
    """
    config = model.source.config
    drafting = model.config.speculative_config is not None and model.config.speculative_config.has_model
    how = {"has_experts": config.experts is not None, "drafts": drafting}
    splits = list(possible_splits(chips.count, given, **how))
    if not splits or splits[0].size > chips.count:
        sizes = {name: value for name, value in given.items() if name.endswith("parallel_size")}
        name = next(iter(sizes), "enable_expert_parallel")
        allowed = f"parallel sizes whose product is {chips.count}, the devices of {chips}; given are {sizes}"
        raise ConfigError(name, given.get(name), allowed)
    found = []
    for split in splits:
        progress(f"{chips} {split.flags}")
        found.append(_ranked(model, chips, split, length, compiled))
    return in_order(found)


def in_order(found: Sequence[Ranked]) -> list[Ranked]:
    """Return splits sorted, the best first: those that fit, by decoding speed, then by sequences of 1,024 tokens; then
    those that lack memory, by how much; then those that cannot be split so. Smaller pipelines come first among equals.

    Speeds are compared in levels: the fastest split and all that are at most _EQUAL slower, then the fastest of the
    others with all that are at most _EQUAL slower, and so on.
    """
    levels, top = dict[float, float](), 0.0
    for speed in sorted((one.speed.decode for one in found if one.speed is not None), reverse=True):
        top = top if speed >= top * (1 - _EQUAL) and levels else speed
        levels[speed] = top
    return sorted(found, key=lambda one: _order(one, 0.0 if one.speed is None else levels[one.speed.decode]))


def _ranked(model: PlannedModel, chips: Chips, split: Split, length: int, compiled: CompiledNeeds | None) -> Ranked:
    """Plan one split, and unless the plan has an error, estimate its speed at `length` tokens. A ConfigError of
    `plan_split` is returned as its error. compiled: see `plan_split`.
    """
    try:
        plan = plan_split(model, chips, split, compiled)
    except ConfigError as error:
        return Ranked(split, None, None, error)
    return Ranked(split, plan, None if plan.error else speed_of(plan, length), plan.error)


def _order(one: Ranked, speed: float) -> tuple[object, ...]:
    """Return the sorting key of a split for `in_order`. speed: level of its decoding speed. Splits that fit are first,
    by speed and number of sequences; then those that do not, by what lacks; then those without a plan.
    """
    if one.plan is None:
        return 2, 0, 0, one.split.pipeline
    if not one.fits:
        return 1, -one.plan.parts()[LEFT], 0, one.split.pipeline
    return 0, -speed, -one.plan.pages_for_sequences(1024), one.split.pipeline


def _divisors(number: int) -> list[int]:
    """Return the divisors of a number, ascending."""
    return [size for size in range(1, number + 1) if number % size == 0]
