"""`--optimise buckets`: the fewest step shapes that lose little of a device's time on a trace.

The loss of a set of shapes is the seconds that a trace's steps take in it, minus the seconds that they would take in
shapes of exactly their sizes. Sizes are chosen by dynamic programming over the sizes that occur: the best k of them,
for each k. Decode and mixed sizes are chosen separately, and then the best pair of the two.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from jaxengine.scheduler.batches.buckets import Bucket
from jaxengine.simulate.costs import Costs
from jaxengine.simulate.loop import StepTime

MOST_SIZES = 512  # largest number of sizes considered; of more, an evenly spaced selection is taken
MOST_CHOSEN = 32  # largest number of chosen sizes of each kind
# Extra cost of each token of size, as a share of the largest step: among equal losses, less padding is chosen.
_TIE = 1e-9


class Needs(NamedTuple):
    """Number of steps by the size that they need.

    Attributes:
      decode: number of decode steps by their rows.
      mixed: number of other steps by their tokens.
    """

    decode: Counter[int]
    mixed: Counter[int]


@dataclass(frozen=True)
class Grid:
    """Chosen sizes of one kind, in ascending order, the largest possible one included. lost: seconds that they lose on
    the trace.
    """

    sizes: tuple[int, ...]
    lost: float


@dataclass(frozen=True)
class Shapes:
    """Chosen shapes.

    Attributes:
      decode, mixed: sizes for compilation_config, without the largest, which is always there.
      lost: seconds that they lose on the trace.
      least: seconds of the trace's steps in shapes of exactly their sizes.
    """

    decode: tuple[int, ...]
    mixed: tuple[int, ...]
    lost: float
    least: float


def needs_of(steps: Sequence[StepTime]) -> Needs:
    """Return the number of steps by the size that they need: for decode steps the largest number of rows of any
    replica, for others the largest number of tokens, but at least one more than the rows.
    """
    decode, mixed = Counter[int](), Counter[int]()
    for step in steps:
        if step.bucket.decode_only:
            decode[step.most_rows] += 1
        else:
            mixed[max(step.most_tokens, step.most_rows + 1)] += 1
    return Needs(decode, mixed)


def choose(
    steps: Sequence[StepTime], costs: Costs | None, max_num_seqs: int, max_num_batched_tokens: int, within: float
) -> Shapes:
    """Return the fewest shapes that lose at most `within` (a share) of the seconds that these steps need at least; of
    equally many, those that lose least. If no choice with up to MOST_CHOSEN sizes of each kind satisfies that, return
    the shapes that lose least.

    costs: seconds of steps; None counts one second for each token, so that the loss is padding. max_num_seqs,
    max_num_batched_tokens: the largest sizes, which the result leaves out, as it does a mixed size of 1.
    """
    needs, nothing, one_token = needs_of(steps), np.empty(0), np.ones(1, int)
    longest = np.array([step.longest for step in steps if step.bucket.decode_only] or [1]).mean(keepdims=True)

    def decode_seconds(size: int) -> float:
        """Return the cost of a decode step in a bucket of `size` rows, computed with the mean longest row of the
        trace's decode steps.
        """
        return size if costs is None else max(costs.seconds(Bucket(size, size), one_token, longest))

    def mixed_seconds(size: int) -> float:
        bucket = Bucket(size, min(size - 1, max_num_seqs))
        return size if costs is None else max(costs.seconds(bucket, nothing, nothing))

    least = sum(step.bucket.num_tokens if costs is None else step.seconds for step in steps)
    least -= sum(lost_by(need, own, seconds) for need, own, seconds in _rounded(steps, decode_seconds, mixed_seconds))
    decode = best_grids(needs.decode, max_num_seqs, decode_seconds)
    mixed = best_grids(needs.mixed, max(max_num_batched_tokens, max_num_seqs + 1), mixed_seconds)
    pairs = sorted(
        ((len(one.sizes) + len(other.sizes), one.lost + other.lost, one, other) for one in decode for other in mixed),
        key=lambda pair: pair[:2],
    )
    allowed = within * least
    _, lost, one, other = next((pair for pair in pairs if pair[1] <= allowed), min(pairs, key=lambda pair: pair[1]))
    sizes = tuple(size for size in other.sizes[:-1] if 1 < size < max_num_batched_tokens)
    return Shapes(one.sizes[:-1], sizes, lost, least)


def _rounded(
    steps: Sequence[StepTime], decode: Callable[[int], float], mixed: Callable[[int], float]
) -> list[tuple[int, int, Callable[[int], float]]]:
    """Return (size that the step needs, size of its bucket, seconds as a function of size) for each step. decode,
    mixed: seconds of a decode and of a mixed bucket as functions of its size.
    """
    found = []
    for step in steps:
        is_decode = step.bucket.decode_only
        need = step.most_rows if is_decode else max(step.most_tokens, step.most_rows + 1)
        found.append((need, step.bucket.num_tokens, decode if is_decode else mixed))
    return found


def lost_by(need: int, size: int, seconds: Callable[[int], float]) -> float:
    """Return `seconds(size) - seconds(need)`, the loss of a step that needs size `need` in a bucket of `size`."""
    return seconds(size) - seconds(need)


def best_grids(needs: Counter[int], largest: int, seconds: Callable[[int], float]) -> list[Grid]:
    """Return one Grid for each number of sizes, from 1 to MOST_CHOSEN or to the number of sizes that occur, with the
    sizes that lose least. `largest` is among the sizes of every Grid.

    Uses dynamic programming over at most MOST_SIZES sizes. Each step runs in the smallest chosen size that holds it.
    The choice treats a size as costing at least as much as any smaller one. needs: number of steps by size.
    seconds(size): seconds of a step in a bucket of that size.
    """
    sizes = np.array(_thinned(sorted({*needs, largest})))
    cost = np.array([seconds(int(size)) for size in sizes])
    weight, spent = np.zeros(len(sizes)), np.zeros(len(sizes))
    places = np.searchsorted(sizes, sorted(needs))
    for place, size in zip(places, sorted(needs), strict=True):
        weight[place] += needs[size]
        spent[place] += needs[size] * seconds(size)
    # Padding counts a little, so that sizes that cost the same are still chosen where steps are.
    priced = np.maximum.accumulate(cost) + _TIE * sizes * cost.max() / sizes[-1]
    steps_before = np.concatenate([[0.0], np.cumsum(weight)])
    # best[j]: least seconds of all steps up to size j, with size j the last of those chosen.
    best = priced * steps_before[1:]
    came, found = [np.full(len(sizes), -1)], []
    last = len(sizes) - 1
    total = spent.sum()
    for count in range(1, min(MOST_CHOSEN, len(sizes)) + 1):
        chosen, at = [], last
        for row in reversed(came):
            chosen.append(int(sizes[at]))
            at = int(row[at])
        own = tuple(reversed(chosen))
        found.append(Grid(own, _cost_of(own, sizes, weight, seconds) - total))
        if count == len(sizes):
            break
        # after[i, j]: least seconds if i and j are successive chosen sizes, so that steps between them run in size j.
        after = best[:, None] + priced[None, :] * (steps_before[None, 1:] - steps_before[1:, None])
        after[np.tril_indices(len(sizes))] = np.inf
        came.append(after.argmin(axis=0))
        best = after.min(axis=0)
    return found


def _cost_of(chosen: Sequence[int], sizes: np.ndarray, weight: np.ndarray, seconds: Callable[[int], float]) -> float:
    """Return the seconds of all steps in total if each runs in the smallest of the `chosen` sizes that holds it.

    chosen: ascending; the last must hold every size that has a weight. sizes: i64[n]. weight: f64[n], the number of
    steps that need each of `sizes`. seconds: returns the time of one step of a size.
    """
    places = np.searchsorted(chosen, sizes)
    return float(sum(count * seconds(chosen[place]) for place, count in zip(places, weight, strict=True) if count))


def _thinned(sizes: list[int]) -> list[int]:
    """Return at most MOST_SIZES of the sorted sizes, evenly spread by index, rounded, with the first and the last."""
    if len(sizes) <= MOST_SIZES:
        return sizes
    places = np.unique(np.linspace(0, len(sizes) - 1, MOST_SIZES).round().astype(int))
    return [sizes[place] for place in places]
