"""Parts of arrays that are split over devices: only what is asked for is copied to host memory, and nothing is kept."""

from __future__ import annotations

import os
import subprocess
import sys
import tracemalloc
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

DEVICES = 8


def test_over_eight_devices():
    env = {**os.environ, "XLA_FLAGS": f"--xla_force_host_platform_device_count={DEVICES}", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-m", __name__], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]


def check_slices(mesh: jax.sharding.Mesh) -> None:
    from jaxengine.models.weights.formats.arrays import ArraySource, read_slice

    rng = np.random.default_rng(0)
    numbers = rng.standard_normal((16, 24)).astype(np.float32)
    parts = [slice(None), slice(0, 5), slice(3, 9), slice(8, 16), slice(7, 7)]
    for spec in ((), ("a",), (None, "a"), ("a", "b"), (("b", "a"),), ("b", None)):
        array = jax.device_put(numbers, NamedSharding(mesh, PartitionSpec(*spec)))
        source = ArraySource({"x": array})
        for rows in parts:
            for columns in parts:
                np.testing.assert_array_equal(read_slice(array, (rows, columns)), numbers[rows, columns])
                np.testing.assert_array_equal(source.read("x", rows, columns), numbers[rows, columns])
        assert array._npy_value is None, spec
    line = jax.device_put(numbers[:, 0], NamedSharding(mesh, PartitionSpec("a")))
    np.testing.assert_array_equal(ArraySource({"x": line}).read("x", slice(2, 11)), numbers[2:11, 0])


def check_moves(mesh: jax.sharding.Mesh) -> None:
    """From every split to every other, holding no more than a device's part beside the array and its copy."""
    from jaxengine.models.weights.moved import moved

    numbers = np.arange(1 << 20, dtype=np.float32).reshape(1024, 1024)
    splits = [NamedSharding(mesh, PartitionSpec(*spec)) for spec in (("a",), (None, "a"), ("a", "b"), ("b",))]
    for ours in splits:
        for theirs in splits:
            array = jax.device_put(numbers, theirs)
            old = SimpleNamespace(shape=array.shape, dtype=array.dtype, sharding=ours)
            old.format = jax.device_put(numbers, ours).format
            tracemalloc.start()
            placed = moved(array, old)
            _, peak = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            part = placed.addressable_shards[0].data.nbytes
            assert peak < part + (64 << 10), (ours.spec, theirs.spec, peak, part)
            assert placed.sharding == ours and array._npy_value is None
            np.testing.assert_array_equal(np.asarray(placed), numbers)
            short = moved(jax.device_put(numbers[:1000], SingleDeviceSharding(jax.devices()[0])), old)
            np.testing.assert_array_equal(np.asarray(short), np.pad(numbers[:1000], ((0, 24), (0, 0))))


def check_wholes(mesh: jax.sharding.Mesh) -> None:
    """A weight that is looked at leaves no copy in host memory, nor do its parts."""
    from jaxengine.models.weights.moved import is_finite
    from jaxengine.runner.weights.process_weights import bytes_of_part, whole

    numbers = np.arange(48, dtype=np.float32).reshape(8, 6)
    array = jax.device_put(numbers, NamedSharding(mesh, PartitionSpec("a", "b")))
    runner: Any = SimpleNamespace(stages=[SimpleNamespace(params=[array])])
    np.testing.assert_array_equal(whole(runner, 0, 0), numbers)
    parts = [bytes_of_part(runner, stage=0, index=0, part=part) for part in range(8)]
    assert [part.view(np.float32).tolist() for part in parts] == [
        numbers[row : row + 2, column : column + 3].ravel().tolist() for row in (0, 2, 4, 6) for column in (0, 3)
    ]
    assert is_finite(array, 8)
    assert all(each._npy_value is None for each in (array, *(shard.data for shard in array.addressable_shards)))


if __name__ == "__main__":
    assert jax.device_count() == DEVICES
    devices = jax.sharding.Mesh(np.array(jax.devices()).reshape(4, 2), ("a", "b"))
    check_slices(devices)
    check_moves(devices)
    check_wholes(devices)
