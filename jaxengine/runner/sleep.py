"""Device memory of an engine that sleeps: weights and pools are given up and come back, compiled programs stay.

A sleeping array is described, so that what is to take its place can be checked.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import numpy as np

from jaxengine.models.lora import declared_pools
from jaxengine.models.weights.huge_pages import HugePages
from jaxengine.runner.memory import return_free_memory
from jaxengine.runner.model_runner import ModelRunner


class Absent(NamedTuple):
    """An array whose memory was given up, as it was and is to be again.

    Attributes:
      host: its parts by device, where they are kept; None where nothing is. Equal parts are one array.
    """

    shape: tuple[int, ...]
    dtype: Any
    format: Any
    sharding: Any
    host: list[tuple[Any, np.ndarray]] | None = None

    def restored(self, memory: HugePages | None) -> jax.Array:
        """The array, on its devices again. memory: for devices whose memory is the host's."""
        assert self.host is not None
        parts = [jax.device_put(part if memory is None else memory.copy(part), device) for device, part in self.host]
        array = jax.make_array_from_single_device_arrays(self.shape, self.sharding, parts, dtype=self.dtype)
        return array if array.format == self.format else jax.device_put(array, self.format)


def release_weights(runner: ModelRunner, *, keep: bool) -> None:
    """Gives up the weights' memory on the devices: each leaf of the stages becomes an Absent. keep: copies stay in host
    memory; those of adapters always do. Where only copies are left, keep=False gives them up.

    Arrays that somebody else holds too, as a trainer does that gave them, keep their memory.
    """
    for stage in runner.stages:
        adapters = {pool.index for pool in declared_pools(stage.programs.model)}
        for index in range(len(stage.params)):
            stage.params[index] = _absent(stage.params[index], keep or index in adapters)
    return_free_memory()


def restore_weights(runner: ModelRunner) -> bool:
    """Puts the weights back on the devices, and waits for that. Returns False, with nothing changed, if there are some
    of which host memory has no copies: these must be replaced first.

    Raises jax's RuntimeError if memory is not to be had. Weights that are on the devices by then stay there.
    """
    params = (each for stage in runner.stages for each in stage.params)
    if any(isinstance(each, Absent) and each.host is None for each in params):
        return False
    memory = HugePages() if runner.on_cpu else None
    for stage in runner.stages:
        for index, each in enumerate(stage.params):
            if isinstance(each, Absent):  # whose copies are given up once the array is there
                stage.params[index] = jax.block_until_ready(each.restored(memory))
    return True


def are_present(runner: ModelRunner) -> bool:
    """Whether no weight is absent."""
    return not any(isinstance(each, Absent) for stage in runner.stages for each in stage.params)


def release_pools(runner: ModelRunner) -> None:
    """Gives up the memory of keys, values and embeddings."""
    for stage in runner.stages:
        stage.release_pools()
    return_free_memory()


def allocate_pools(runner: ModelRunner) -> None:
    """Makes the pools again; they are empty."""
    for stage in runner.stages:
        stage.allocate_pools()


def _absent(array: Any, keep: bool) -> Absent:
    if isinstance(array, Absent):
        return array if keep else array._replace(host=None)
    host = _parts(array) if keep else None
    return Absent(array.shape, array.dtype, array.format, array.sharding, host)


def _parts(array: Any) -> list[tuple[Any, np.ndarray]]:
    """Copies in host memory of an array's parts by device, one for all devices that have the same part."""
    copies: dict[tuple[tuple[Any, Any], ...], np.ndarray] = {}
    parts = []
    for shard in array.addressable_shards:
        place = tuple((each.start, each.stop) for each in shard.index)
        if place not in copies:
            copies[place] = np.array(shard.data)
        parts.append((shard.device, copies[place]))
    return parts
