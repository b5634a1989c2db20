"""Several hidden states of a token, of which a layer computes one and predicts the others (AltUp, Baykal et al. 2023,
arXiv:2301.13310, as in Gemma 3n). A: how many there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.config.altup import AltUp
from jaxengine.models.config.model_config import ModelConfig
from jaxengine.models.layers.base.linear import Linear
from jaxengine.models.layers.base.norm import RMSNorm
from jaxengine.models.layers.base.scale import scaled
from jaxengine.models.params.declare import ParamDecl, Source, declare
from jaxengine.models.quantization.registry import PLAIN

_LEAST_SQUARE = 1e-5  # of a hidden state whose magnitude is changed


class Streams(nnx.Module):
    """Predictor of the A hidden states of a token after a layer from those before it, x [T, A, D], and corrector of the
    predictions once the layer has computed the active one.

    Its matrices are small, so they are never quantised and get no adapters.
    """

    def __init__(self, config: ModelConfig, altup: AltUp, *, source: str, build: Build):
        size, count, self.active = config.hidden_size, altup.num_streams, altup.active
        plain = replace(build, scheme=PLAIN, lora=None)

        def product(name: str, inputs: int, outputs: int) -> Linear:
            return Linear(inputs, (Source(f"{source}.{name}", outputs),), axes=("embed", "embed"), build=plain)

        self.router = product("modality_router", size, count)
        self.norm = RMSNorm(size, config.rms_norm_eps, source=f"{source}.router_norm", build=build)
        self.predictor = product("prediction_coefs", count, count**2)
        self.corrector = product("correction_coefs", count, count)
        scale = ParamDecl((None,), (Source(f"{source}.correct_output_scale", size),))
        self.scale = declare((size,), build.dtype, scale)
        self.scales_active = altup.scales_active

    def _modes(self, x: jax.Array) -> jax.Array:
        """Return the modes [T, A] of hidden states x [T, D], tanh(router(norm(x) / D))."""
        routed = self.router(scaled(self.norm(x), 1 / x.shape[-1]), out_dtype=jnp.float32)
        return jnp.tanh(routed).astype(x.dtype)

    def predict(self, x: jax.Array) -> jax.Array:
        """Return predictions f32[T, A, D] of hidden states x [T, A, D]: each plus a mixture of all A, with weights that
        `predictor` makes of the active one's modes.
        """
        shares = self.predictor(self._modes(x[:, self.active]), out_dtype=jnp.float32)
        shares = shares.reshape(x.shape[0], x.shape[1], x.shape[1])
        wide = x.astype(jnp.float32)
        return wide + jnp.einsum("tqp,tpd->tqd", shares, wide)

    def correct(self, predictions: jax.Array, computed: jax.Array) -> jax.Array:
        """Return `predictions` f32[T, A, D] plus, for each of the A, the difference between `computed` [T, D] and the
        active prediction, times 1 + what `corrector` makes of the modes of `computed`.
        """
        shares = self.corrector(self._modes(computed), out_dtype=jnp.float32) + 1.0
        missed = computed.astype(jnp.float32) - predictions[:, self.active]
        return predictions + shares[:, :, None] * missed[:, None]

    def scaled_active(self, x: jax.Array) -> jax.Array:
        """Return the active hidden state [T, D] of x [T, A, D], multiplied by the learned scale [D] if the model's
        `scales_active` is true.
        """
        own = x[:, self.active]
        return own * self.scale[...].astype(own.dtype) if self.scales_active else own


class Projections(nnx.Module):
    """Projections of A - 1 hidden states, whose results are scaled to the magnitude of the first hidden state."""

    def __init__(self, config: ModelConfig, altup: AltUp, source: str, build: Build):
        size = config.hidden_size
        self.products = nnx.List(
            [
                Linear(size, (Source(f"{source}.{number}", size),), axes=("embed", "embed"), build=build)
                for number in range(altup.num_streams - 1)
            ]
        )

    def __call__(self, first: jax.Array, others: Sequence[jax.Array]) -> list[jax.Array]:
        """Return the projections f32[T, D] of the A - 1 hidden states `others` [T, D], each scaled to the root mean
        square of `first` [T, D]; their own mean square counts as at least _LEAST_SQUARE. Raises ValueError if `others`
        has another number of them.
        """
        wide = [product(x).astype(jnp.float32) for product, x in zip(self.products, others, strict=True)]
        target = _mean_square(first.astype(jnp.float32))
        return [x * jnp.sqrt(target / jnp.maximum(_mean_square(x), _LEAST_SQUARE)) for x in wide]


def _mean_square(x: jax.Array) -> jax.Array:
    """Return the mean of x's squares over the last axis, which remains with size 1."""
    return jnp.mean(jnp.square(x), axis=-1, keepdims=True)
