"""Estimates of rows that kernels multiply in a layer of experts, padding of tiles included.

Each token goes to its number of experts, all equally likely. Needs no device.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxengine.models.layers.experts.expert_rows import rows_of_own
from jaxengine.models.layers.experts.moe import MixtureOfExperts
from jaxengine.models.quantization.base.quantized import QuantizedWeight
from jaxengine.models.quantization.base.scheme import Weight
from jaxengine.pallas_kernels.registry import group_kernel
from jaxengine.sharding.layout import MeshLayout


class ExpertRows(NamedTuple):
    """Row counts of a device in one layer.

    Attributes:
      rows: number of rows of its tokens.
      average: number of rows of an average expert.
      multiplied: number of rows that the kernels multiply for each of `rows`, averaged over all elements of the
        matrices.
    """

    rows: int
    average: float
    multiplied: float


def routed(num_tokens: int, num_experts: int, num_per_token: int) -> np.ndarray:
    """Return the number of tokens of each expert, i64[num_experts], in a simulated routing of each token to
    num_per_token experts, all equally likely. The result is the same for equal arguments.
    """
    scores = np.random.default_rng(0).random((num_tokens, num_experts))
    picked = np.argpartition(scores, num_per_token - 1, axis=1)[:, :num_per_token]
    return np.bincount(picked.ravel(), minlength=num_experts)


def rows_at_once(num_tokens: int, k: int, own: int, average: int, platform: str) -> int:
    """Return the number of rows of a block on a device that has `own` full experts, for tokens with k experts each,
    padding for the platform's kernel included (see `rows_of_own`).

    average: the device's average number of rows. platform: a row of `jaxengine.pallas_kernels.registry`.
    """
    kernel = group_kernel(platform)
    step = 1 if kernel is None else kernel.group_step(average, own)
    return rows_of_own(num_tokens, min(k, own), own, average, step)[1]


def rows_of_experts(model: Any, num_tokens: int, platform: str) -> ExpertRows | None:
    """Return the ExpertRows of the first layer with experts of an abstract model; those of the other layers are equal.

    Returns None for a model without experts, if activations are not bfloat16, and where `expert_rows` returns None.
    num_tokens, platform: arguments of `expert_rows`.
    """
    layers = (node for _, node in nnx.iter_graph(model) if isinstance(node, MixtureOfExperts))
    layer = next(layers, None)
    if layer is None or jnp.dtype(model.build.dtype) != jnp.bfloat16:
        return None
    return expert_rows(layer, model.mesh, num_tokens, platform)


def expert_rows(layer: MixtureOfExperts, mesh: MeshLayout, num_tokens: int, platform: str) -> ExpertRows | None:
    """Return the ExpertRows of the device with the first experts, for steps of `num_tokens` tokens on each replica.

    Returns None if no kernel for groups exists on the platform or it does not take these operands, so that XLA
    multiplies, and if rows are sent between devices. platform: a row of `jaxengine.pallas_kernels.registry`.
    """
    kernel = group_kernel(platform)
    if kernel is None or layer.sends_rows:
        return None
    experts, num_tokens = layer.experts, num_tokens * mesh.ranks_sharing(layer.axis)
    own = layer.num_stored // (mesh.num_shards("experts") if layer.axis == "experts" else 1)
    sizes = routed(num_tokens, experts.num_routed, experts.num_per_token)[:own]
    if own < experts.num_experts:
        k = experts.num_per_token
        average = -(-num_tokens * k // mesh.num_shards("experts"))
        step, block = kernel.group_step(average, own), rows_at_once(num_tokens, k, own, average, platform)
    else:
        step = kernel.group_step(num_tokens * experts.num_per_token, own)
        block = num_tokens * experts.num_per_token + own * (step - 1)
    ends = np.cumsum(sizes + -sizes % step)
    done = needed = 0
    for weight, gated in ((layer.gate_up, True), (layer.down, False)):
        matrix, numbers = _operands(weight, mesh, block)
        for first in range(0, int(ends[-1]), block):
            parts = np.diff(np.clip(ends - first, 0, block), prepend=0)
            multiplied = kernel.multiplied_rows(parts, *matrix, gated=gated)
            if not multiplied:
                return None
            done += multiplied * numbers
        needed += int(sizes.sum()) * numbers
    return ExpertRows(int(sizes.sum()), float(sizes.mean()), done / needed)


def _operands(weight: Weight, mesh: MeshLayout, num_rows: int) -> tuple[tuple[Any, ...], int]:
    """Return the shapes of a device's operands of the product with `num_rows` rows, and the number of elements of one
    of its matrices.

    Operands: rows, their scales (None if rows have none), codes or values, and their scales (None for plain weights).
    Codes of type u8 are two of four bits in a byte, and count as two elements.
    """

    def part(param: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(mesh.part_of(param.shape, param.get_metadata()["decl"].axes), param.dtype)

    if not isinstance(weight, QuantizedWeight):
        codes, scales, activation = part(weight.values), None, None  # pyright: ignore[reportAttributeAccessIssue]
    else:
        codes, scales, activation = part(weight.codes), part(weight.scales), weight.activation
    size, out = codes.shape[1] * (2 if codes.dtype == jnp.uint8 else 1), codes.shape[2]
    if activation is None or activation.microscaled:
        return (jax.ShapeDtypeStruct((num_rows, size), jnp.bfloat16), None, codes, scales), size * out
    count = 1 if activation.group is None else size // math.gcd(activation.group, size)
    x_scales = jax.ShapeDtypeStruct((num_rows, count), jnp.float32)
    return (jax.ShapeDtypeStruct((num_rows, size), activation.dtype), x_scales, codes, scales), size * out
