"""Mixture of experts whose outputs have a norm of their own."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxengine.models.adapters import Adapters
from jaxengine.models.build import Build
from jaxengine.models.config.model_config import ModelConfig
from jaxengine.models.layers.base.norm import InputScaledRMSNorm
from jaxengine.models.layers.experts.moe import MixtureOfExperts, RouterLogits
from jaxengine.sharding.collectives import shard_index, sum_parts


class NormedExperts(MixtureOfExperts):
    """Mixture of experts in which each expert's output for a token has an InputScaledRMSNorm before it is weighted, and
    whose router has float32 weights.

    eps: epsilon of the norm. router_size: number of elements of the router's input. router_scale: factor of the
    router's logits.
    """

    def __init__(
        self, config: ModelConfig, *, source: str, build: Build, eps: float, router_size: int, router_scale: float
    ):
        super().__init__(config, source=source, build=build, router_dtype=jnp.float32, router_size=router_size)
        self.norm = InputScaledRMSNorm(
            config.hidden_size, eps, source=f"{source}.experts.post_expert_norm", build=build
        )
        self.router_scale = router_scale

    def _router_logits(self, x: jax.Array, adapters: Adapters | None) -> jax.Array:
        logits = super()._router_logits(x, adapters) * self.router_scale
        if self.notes_logits:
            self.logits = RouterLogits(logits)
        return logits

    def _multiply(self, rows: jax.Array, sizes: jax.Array, adapters: Adapters | None) -> jax.Array:
        """Return the normed output [M, D] of this device's experts for rows [M, D] sorted by expert; 0 in rows of no
        expert. Devices with slices of all experts add up their slices' outputs, and all but the first return zeros, so
        that the sum over them is the result.
        """
        y = super()._multiply(rows, sizes, adapters)
        with jax.named_scope("expert_norm"):
            if self.axis != "ffn":
                return self.norm(y)
            y = self.norm(sum_parts(y, "ffn"))
            return jnp.where(shard_index("ffn") == 0, y, jnp.zeros_like(y))
