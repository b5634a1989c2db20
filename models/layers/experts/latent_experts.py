"""Experts whose input and output are smaller than the hidden state, with an MLP beside them (LatentMoE)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.config.model_config import ModelConfig
from jaxengine.models.layers.base.linear import Linear
from jaxengine.models.layers.base.norm import RMSNorm
from jaxengine.models.layers.base.rows import Rows
from jaxengine.models.layers.experts.moe import MixtureOfExperts
from jaxengine.models.params.declare import Source


class LatentExperts(nnx.Module):
    """Experts and an MLP that is applied to every token in addition. Experts with a `latent_size` read and write
    vectors of this size, which are projected from and to the hidden state.

    Args:
      shared: the MLP, a module of (x [T, D], rows); None for none.
      source: the checkpoint's module of experts and router.
      latent: checkpoint modules of the projections to and from the latent size.
      norm: checkpoint module of the norm of the experts' sum before it is projected to the hidden state; None for none,
        and without a latent size.
      bias: whether the projections have biases.
      options: of MixtureOfExperts.
    """

    def __init__(
        self,
        config: ModelConfig,
        shared: nnx.Module | None,
        *,
        source: str,
        latent: tuple[str, str],
        norm: str | None = None,
        bias: bool = False,
        build: Build,
        **options: Any,
    ):
        assert config.experts is not None
        size, own_size = config.hidden_size, config.experts.latent_size
        experts = replace(config.experts, shared_intermediate_size=0)
        own = replace(config, hidden_size=own_size or size, experts=experts)
        self.experts = MixtureOfExperts(own, source=source, build=build, router_size=size, **options)
        whole: dict[str, Any] = {"axes": ("embed", "latent"), "bias": bias, "build": build}
        self.into = None if own_size is None else Linear(size, (Source(latent[0], own_size),), **whole)
        self.back = None if own_size is None else Linear(own_size, (Source(latent[1], size),), **whole)
        eps = config.rms_norm_eps
        self.norm = None if norm is None else RMSNorm(own_size or size, eps, source=norm, build=build)
        self.shared = shared

    def __call__(self, x: jax.Array, rows: Rows) -> jax.Array:
        """Return experts(x) + shared(x) or, with a latent size, back(norm(experts(into(x)))) + shared(x), [T, D] ->
        [T, D], without `shared` or the norm if the layer lacks it. The router always gets the hidden state x.
        """
        if self.into is None or self.back is None:
            mixed = self.experts(x, rows)
        else:
            with jax.named_scope("latent"):
                latent = self.into(x, rows)
            mixed = self.experts(latent, rows, routed_by=x)
            with jax.named_scope("latent"):
                mixed = self.back(mixed if self.norm is None else self.norm(mixed), rows)
        if self.shared is None:
            return mixed
        with jax.named_scope("shared"):
            return mixed + self.shared(x, rows)
