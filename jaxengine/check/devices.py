"""Devices that are not there: the topologies of a target's compiler, and the mesh a check lays its arrays out on."""

from __future__ import annotations

import math
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import Mesh

from jaxengine.check.targets import Target, gpu_target_config
from sharding.mesh import make_mesh


def target_devices(target: Target) -> list[Any]:
    """The devices the target's programs are compiled for."""
    if target.backend == "cpu":
        devices = jax.devices("cpu")
    elif target.backend == "tpu":
        devices = topologies.get_topology_desc(platform="tpu", topology_name=target.topology).devices
    else:
        devices = topologies.get_topology_desc(
            platform="cuda",
            topology_name=target.name,
            topology=f"1x1x{target.num_devices}",  # partitions, hosts, devices of a host
            target_config=gpu_target_config(target),
        ).devices
    return list(devices[: target.num_devices])


def target_mesh(target: Target, num_kv_heads: int) -> Mesh:
    """Heads over as many of them as the model has KV heads for, everything else that is dense over all of them.

    Set as the ambient mesh, it tells kernels what chip they are for.
    """
    model = math.gcd(target.num_devices, num_kv_heads)
    return make_mesh(model=model, attn=target.num_devices // model, devices=target_devices(target))
