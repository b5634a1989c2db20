"""Device memory of a sleeping engine: weights and pools are freed and restored, compiled programs stay.

A freed array leaves a description.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import numpy as np

from jaxengine.models.config.compressed import is_token_map
from jaxengine.models.lora import declared_pools
from jaxengine.models.weights.adapters.pools import abstract_leaves
from jaxengine.models.weights.huge_pages import HugePages
from jaxengine.runner.base.memory import return_free_memory
from jaxengine.runner.model_runner import ModelRunner


class Absent(NamedTuple):
    """Description of a freed array, with the fields of a jax.Array. The array can be restored if its copies are in
    `host`.

    Attributes:
      format: layout on the devices, and sharding.
      host: copies in host memory of its parts, with their devices; None for no copies. Devices with equal parts share a
        copy.
    """

    shape: tuple[int, ...]
    dtype: Any
    format: Any
    sharding: Any
    host: list[tuple[Any, np.ndarray]] | None = None

    def restored(self, memory: HugePages | None) -> jax.Array:
        """Return the array on its devices again, made from its copies in `host`, which must not be None.

        memory: huge pages that are used for devices which share the host's memory; None to use none.
        """
        assert self.host is not None
        parts = [jax.device_put(part if memory is None else memory.copy(part), device) for device, part in self.host]
        array = jax.make_array_from_single_device_arrays(self.shape, self.sharding, parts, dtype=self.dtype)
        return array if array.format == self.format else jax.device_put(array, self.format)

    def whole(self) -> np.ndarray | None:
        """Return the array in host memory, put together from its copies; None if it has none, or other processes have
        some of its parts.
        """
        if self.host is None or not self.sharding.is_fully_addressable:
            return None
        found, places = np.empty(self.shape, self.dtype), self.sharding.devices_indices_map(self.shape)
        for device, part in self.host:
            found[places[device]] = part
        return found


def release_weights(runner: ModelRunner, *, keep: bool) -> None:
    """Free the weights' memory on the devices: replace each leaf of the stages by an Absent, and return free memory to
    the system.

    keep: whether copies stay in host memory; those that no checkpoint has always do (`_own_leaves`). If weights are
    absent already and have copies, keep=False drops the copies. Arrays to which other code, such as a trainer, has
    references keep their memory.
    """
    for stage in runner.stages:
        own = _own_leaves(stage.programs.model, stage.programs.mesh)
        for index in range(len(stage.params)):
            stage.params[index] = _absent(stage.params[index], keep or index in own)
    return_free_memory()


def _own_leaves(model: Any, mesh: Any) -> set[int]:
    """Return the indices of a stage's leaves that new weights need not have: adapters, and maps of tokens."""
    maps = {index for index, (name, _) in enumerate(abstract_leaves(model, mesh)) if is_token_map(name)}
    return maps | {pool.index for pool in declared_pools(model)}


def restore_weights(runner: ModelRunner) -> bool:
    """Put the weights back on the devices from their copies, wait for that, and return True. Return False, with nothing
    changed, if some absent weights have no copies in host memory: these must be replaced first.

    Copies are dropped as their arrays are restored. Raises jax's RuntimeError if memory cannot be allocated; weights
    that are on the devices by then stay there.
    """
    params = (each for stage in runner.stages for each in stage.params)
    if any(isinstance(each, Absent) and each.host is None for each in params):
        return False
    memory = HugePages() if runner.on_cpu else None
    for stage in runner.stages:
        for index, each in enumerate(stage.params):
            if isinstance(each, Absent):  # its copies are dropped once the array is on the devices
                stage.params[index] = jax.block_until_ready(each.restored(memory))
    return True


def are_present(runner: ModelRunner) -> bool:
    """Whether all weights are on the devices."""
    return not any(isinstance(each, Absent) for stage in runner.stages for each in stage.params)


def release_pools(runner: ModelRunner) -> None:
    """Free the device memory of keys and values, and of extensions' arrays whose content can be computed again; return
    free host memory to the system.
    """
    for stage in runner.stages:
        stage.release_pools()
    return_free_memory()


def allocate_pools(runner: ModelRunner) -> None:
    """Allocate empty pools in place of those that `release_pools` freed. Raises jax's RuntimeError if memory cannot be
    allocated.
    """
    for stage in runner.stages:
        stage.allocate_pools()


def _absent(array: Any, keep: bool) -> Absent:
    """Return the description of an array, with copies of its parts in host memory if `keep`. One that is absent already
    is returned as it is, without its copies if not `keep`.
    """
    if isinstance(array, Absent):
        return array if keep else array._replace(host=None)
    host = _parts(array) if keep else None
    return Absent(array.shape, array.dtype, array.format, array.sharding, host)


def _parts(array: Any) -> list[tuple[Any, np.ndarray]]:
    """Return copies in host memory of the parts of an array, each with its device. Devices with equal parts share one
    copy. Only devices of this process are included.
    """
    copies: dict[tuple[tuple[Any, Any], ...], np.ndarray] = {}
    parts = []
    for shard in array.addressable_shards:
        bounds = tuple((each.start, each.stop) for each in shard.index)
        if bounds not in copies:
            copies[bounds] = np.array(shard.data)
        parts.append((shard.device, copies[bounds]))
    return parts
