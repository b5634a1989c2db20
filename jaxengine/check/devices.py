"""Devices of a target; those of accelerators are virtual, as the installed compiler describes them."""

from __future__ import annotations

from typing import Any

import jax
from jax.experimental import topologies

from jaxengine.check.targets import Target, gpu_target_config


def target_devices(target: Target) -> list[Any]:
    """Return the `num_devices` devices for which the target's programs are compiled, or fewer if there are fewer.

    CPU devices are this process's own, which must have been started with that many (children.environment). Others are
    virtual, described by the installed compiler. Raises errors of jax if the compiler is missing.
    """
    if target.backend == "cpu":
        devices = jax.devices("cpu")
    elif target.backend == "tpu":
        devices = chips(target.topology)
    else:
        devices = topologies.get_topology_desc(
            platform="cuda",
            topology_name=target.name,
            topology=f"1x1x{target.num_devices}",  # partitions, hosts, devices of a host
            target_config=gpu_target_config(target),
        ).devices
    return list(devices[: target.num_devices])


def chips(topology: str) -> list[Any]:
    """Return the virtual devices of a topology of TPUs, as libtpu calls it, such as "v6e:1x1". Raises errors of jax if
    libtpu is missing or does not know it.
    """
    # libtpu 0.0.42, which jax 0.10.2 brings, takes each host for one of four chips unless its size is given.
    host = {"chips_per_host_bounds": (1, 1, 1)} if topology.endswith(":1x1") else {}
    return list(topologies.get_topology_desc(platform="tpu", topology_name=topology, **host).devices)
