"""Splitting layers into pipeline stages."""

from __future__ import annotations

import itertools

import pytest

from jaxengine.sharding.stages import Stage, devices_of_stages, split_layers, stages_of
from tests.tables import each_row


def largest(sizes, stages, before, after):
    held = [sum(sizes[layer] for layer in stage.layers) for stage in stages]
    held[0] += before
    held[-1] += after
    return max(held)


@each_row("before, after", [(0, 0), (7, 0), (3, 9), (40, 2)])
@each_row("num_stages", [1, 2, 3, 6])
def test_no_other_split_has_a_smaller_largest_stage(num_stages, before, after):
    sizes = [3, 1, 4, 1, 5, 9]
    stages = split_layers(sizes, num_stages, before=before, after=after)
    assert [layer for stage in stages for layer in stage.layers] == list(range(6))
    assert [stage.is_first for stage in stages] == [True] + [False] * (num_stages - 1)
    assert [stage.is_last for stage in stages] == [False] * (num_stages - 1) + [True]
    best = min(
        largest(sizes, stages_of([end - start for start, end in itertools.pairwise((0, *cuts, 6))]), before, after)
        for cuts in itertools.combinations(range(1, 6), num_stages - 1)
    )
    assert largest(sizes, stages, before, after) == best


@pytest.mark.parametrize("num_stages", [0, 4])
def test_a_stage_has_a_layer(num_stages):
    with pytest.raises(ValueError, match=f"3 layers cannot be split into {num_stages} stages; allowed: 1 to 3"):
        split_layers([1, 1, 1], num_stages)


def test_stages_take_neighbouring_devices():
    assert devices_of_stages(list(range(8)), 2) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert stages_of([2, 1]) == [Stage(0, 2, True, False), Stage(2, 3, False, True)]
