"""What the benchmark of updates says of the weights that an engine should have."""

from __future__ import annotations

import numpy as np

from benchmarks.weights.weight_updates import KINDS, KV, is_third, milliseconds, moved, state_after


def test_an_update_changes_what_it_brings_and_nothing_else():
    brought = {"all": {0, 1}, "third": {0}, "all again": {0, 1}, "adapter": {2}}
    state = state_after(-1)
    assert state == (0, 0, 0)
    for number in range(1, 4 * len(KINDS) * len(KV)):
        before, state = state_after(number - 1), state_after(number)
        changed = {at for at in range(3) if state[at] != before[at]}
        assert changed and changed <= brought[KINDS[number % len(KINDS)]], number


def test_numbers_are_all_different_ones():
    array = np.ones((7, 2), np.float32)
    found = [moved(array, number).tobytes() for number in range(3)]
    assert len(set(found)) == 3 and found[0] == array.tobytes() and (array == 1).all()
    assert [is_third(f"model.layers.{layer}.mlp.up_proj.weight") for layer in range(4)] == [True, False, False, True]
    assert not is_third("model.norm.weight")


def test_a_row_may_be_of_an_adapter_alone():
    assert milliseconds([0.003, 0.001, 0.0021]) == 2.1 and milliseconds([]) is None
