"""The most tokens a second that chips could compute, by their bandwidth and operations; and what a token costs then.

An upper bound: every weight that a step needs and every key that it sees is read once, exchanges between devices and
the host's work cost nothing, and pipeline stages are always busy. Counted as `jaxengine check` counts a step.
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxengine.check.model.roofline import Work, step_work
from jaxengine.plan.plan import SplitPlan
from jaxengine.scheduler.batches.buckets import Bucket

_HOUR, _MILLION = 3600, 1_000_000


@dataclass(frozen=True)
class Speed:
    """Upper bounds of a plan's speed.

    Attributes:
      sequences: number of sequences that decode at once, over all replicas.
      decode, prefill: decoded tokens and prompt tokens a second, of all devices together.
      step_bytes, step_flops: bytes and operations of one decode step on a device of the stage that has most of each.
      token_seconds: least time from one token of a sequence to the next.
    """

    sequences: int
    decode: float
    prefill: float
    step_bytes: int
    step_flops: int
    token_seconds: float


def speed_of(plan: SplitPlan, length: int) -> Speed | None:
    """Return the upper bounds of a plan that fits, with as many sequences of `length` tokens as can run, at least one a
    replica.

    Prompts are counted as the largest mixed steps. None if the chip's bandwidth is not known, or the model does not
    generate.
    """
    chip = plan.chips.chip
    if not chip.bandwidth or plan.config.runner != "generate":
        return None
    ranks = plan.layout.num_ranks
    own = max(1, plan.sequences_of(length) // ranks)
    decode = [_work(plan, index, Bucket(own, own), length) for index in range(len(plan.stages))]
    largest = max(plan.stages[0].programs.packer.buckets.mixed)
    prompt = [_work(plan, index, largest, length) for index in range(len(plan.stages))]
    steps, prompts = ([work.seconds(chip.bandwidth, chip.flops) for work in works] for works in (decode, prompt))
    return Speed(
        sequences=own * ranks,
        decode=own * ranks / max(steps),
        prefill=largest.num_tokens * ranks / max(prompts),
        step_bytes=max(work.num_bytes for work in decode),
        step_flops=max(work.flops for work in decode),
        token_seconds=sum(steps),
    )


def cost_of(tokens_per_second: float, price_per_hour: float, count: int) -> float:
    """Return the price of a million tokens. price_per_hour: price of one device for an hour. count: number of devices,
    which compute tokens_per_second together.
    """
    return price_per_hour * count / (tokens_per_second * _HOUR) * _MILLION


def _work(plan: SplitPlan, stage: int, bucket: Bucket, context: int) -> Work:
    """Return the least work of a step of `bucket` on one device of the stage with the index `stage`. context: number of
    keys that each decoding sequence reads.
    """
    config, model = plan.config, plan.stages[stage].programs.model
    return step_work(model, bucket, config.kv_cache_dtype, config.dtype, context)
