"""Copies that host memory keeps of weights that are given up, and those that a device with too little memory gets."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from jaxengine.runner.weights import sleep
from jaxengine.runner.weights.sleep import Absent


def test_equal_parts_are_kept_once():
    values = np.arange(6.0).reshape(2, 3)
    upper, lower, whole = (slice(0, 1), slice(None)), (slice(1, 2), slice(None)), (slice(None), slice(None))
    for places, num_copies in (((upper, lower, upper, lower), 2), ((whole,) * 4, 1), ((upper, lower), 2)):
        shards = [SimpleNamespace(device=at, index=place, data=values[place]) for at, place in enumerate(places)]
        array: Any = SimpleNamespace(addressable_shards=shards, shape=(2, 3), dtype=None, format=None, sharding=None)
        host = sleep._absent(array, keep=True).host
        assert host is not None and len({id(part) for _, part in host}) == num_copies
        for (device, part), shard in zip(host, shards, strict=True):
            assert device == shard.device
            np.testing.assert_array_equal(part, shard.data)


def test_weights_come_back_one_by_one(monkeypatch):
    """A copy is given up once its array is there, so that a failure loses none; without all copies nothing changes."""
    arrays = [jax.device_put(np.full(2, value, np.float32)) for value in (1, 2, 3)]
    stage: Any = SimpleNamespace(params=[sleep._absent(each, keep=True) for each in arrays])
    runner: Any = SimpleNamespace(stages=[stage], on_cpu=False)
    restored = Absent.restored

    def fail(self, memory):
        if self is stage.params[1]:
            raise RuntimeError("RESOURCE_EXHAUSTED")
        return restored(self, memory)

    with monkeypatch.context() as patched:
        patched.setattr(Absent, "restored", fail)
        with pytest.raises(RuntimeError):
            sleep.restore_weights(runner)
    assert [isinstance(each, Absent) for each in stage.params] == [False, True, True]
    kept, stage.params[2] = stage.params[2], stage.params[2]._replace(host=None)
    assert not sleep.restore_weights(runner) and isinstance(stage.params[1], Absent)
    stage.params[2] = kept
    assert sleep.restore_weights(runner) and sleep.are_present(runner)
    assert [float(each[0]) for each in stage.params] == [1, 2, 3]
