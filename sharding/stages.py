"""Pipeline stages: the layers that each stage runs, and its devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Stage:
    """Pipeline stage: layers [first_layer, end_layer) of a model. The first stage also embeds the tokens, the last one
    also computes the logits.
    """

    first_layer: int
    end_layer: int
    is_first: bool = True
    is_last: bool = True

    @property
    def layers(self) -> range:
        """Indices of the stage's layers."""
        return range(self.first_layer, self.end_layer)


def split_layers(sizes: Sequence[int], num_stages: int, *, before: int = 0, after: int = 0) -> list[Stage]:
    """Return stages of consecutive layers such that the largest stage, in bytes, is as small as possible. Earlier
    stages are as full as that allows.

    Args:
      sizes: bytes of each layer.
      num_stages: number of stages, each with at least one layer.
      before, after: bytes that the first and the last stage hold in addition (embedding, LM head).

    Raises ValueError if there are fewer layers than stages, or no stage.
    """
    if not 1 <= num_stages <= len(sizes):
        raise ValueError(f"{len(sizes)} layers cannot be split into {num_stages} stages; allowed: 1 to {len(sizes)}")

    def counts_within(limit: int) -> list[int] | None:
        """Return the number of layers of each stage if no stage may exceed `limit` bytes, earlier stages as full as
        possible; None if the layers do not fit.
        """
        counts, layer = [], 0
        for stage in range(num_stages):
            held = (before if stage == 0 else 0) + (after if stage == num_stages - 1 else 0)
            most = len(sizes) - (num_stages - 1 - stage)
            first = layer
            while layer < most and held + sizes[layer] <= limit:
                held += sizes[layer]
                layer += 1
            if layer == first or held > limit:
                return None
            counts.append(layer - first)
        return counts if layer == len(sizes) else None

    low, high = 0, sum(sizes) + before + after
    while low + 1 < high:
        middle = (low + high) // 2
        low, high = (low, middle) if counts_within(middle) else (middle, high)
    counts = counts_within(high)
    assert counts is not None
    return stages_of(counts)


def stages_of(counts: Sequence[int]) -> list[Stage]:
    """Return consecutive stages, one with counts[i] layers for each i."""
    stages, first = [], 0
    for index, count in enumerate(counts):
        stages.append(Stage(first, first + count, index == 0, index == len(counts) - 1))
        first += count
    return stages


def devices_of_stages(devices: Sequence[Any], num_stages: int) -> list[Sequence[Any]]:
    """Return a list with len(devices) // num_stages consecutive devices for each stage. Remaining devices are not
    used.
    """
    size = len(devices) // num_stages
    return [devices[stage * size : (stage + 1) * size] for stage in range(num_stages)]
