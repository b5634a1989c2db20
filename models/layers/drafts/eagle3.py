"""EAGLE-3 heads: one decoder layer that drafts from hidden states of several of a model's layers (Li et al. 2025,
arXiv:2503.01840).

For each token it takes these hidden states, projected to one, and the embedding of the next token. Its
attention reads both, each normed and concatenated; the output is added to the hidden state alone. A head of its own,
over a part of the vocabulary, gives the logits of the token after the next. For further tokens the layer's output
replaces the model's hidden states.
"""

from __future__ import annotations

from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.config.drafts.eagle3 import Eagle3Config
from jaxengine.models.forward_batch import ForwardBatch
from jaxengine.models.layers.attention.attention import Attention, LayerPages, StepInputs
from jaxengine.models.layers.base.linear import Linear
from jaxengine.models.layers.base.mlp import GatedMLP
from jaxengine.models.layers.base.norm import RMSNorm
from jaxengine.models.layers.decoder import Decoder
from jaxengine.models.layers.drafts.draft_head import DraftHead, DraftHeadSource
from jaxengine.models.params.declare import Source
from jaxengine.pallas_kernels.kv.pages import KVPages

_LAYER = "model.layers.0"


class Eagle3Layer(nnx.Module):
    """Llama or Qwen3 layer whose attention reads embeddings [T, D] and hidden states [T, D], concatenated."""

    def __init__(self, config: Eagle3Config, build: Build):
        size, eps = config.hidden_size, config.rms_norm_eps
        self.embed_norm = RMSNorm(size, eps, source=f"{_LAYER}.input_layernorm", build=build)
        self.hidden_norm = RMSNorm(size, eps, source=f"{_LAYER}.hidden_norm", build=build)
        source, out = f"{_LAYER}.self_attn", Source(f"{_LAYER}.self_attn.o_proj", size)
        self.attention = Attention(config.attention[0], 2 * size, eps=eps, source=source, build=build, out=out)
        self.mlp_norm = RMSNorm(size, eps, source=f"{_LAYER}.post_attention_layernorm", build=build)
        sizes = size, config.intermediate_size
        self.mlp = GatedMLP(*sizes, source=f"{_LAYER}.mlp", bias=config.mlp_bias, build=build)
        self.norm_before_residual = config.norm_before_residual

    def __call__(self, x: jax.Array, kv: KVPages, pages: LayerPages, step: StepInputs) -> tuple[jax.Array, KVPages]:
        """Map x [T, 2 * D], embeddings followed by hidden states, to (hidden states [T, D], the pool with this step's
        keys and values written).

        Attention gets the norms of both; its output is added to the hidden states, normed if `norm_before_residual`,
        and an MLP follows.
        """
        with jax.named_scope("attention"):
            embeddings, hidden = jnp.split(x, 2, axis=-1)
            normed = self.hidden_norm(hidden)
            both = jnp.concatenate([self.embed_norm(embeddings), normed], axis=-1)
            attended, kv = self.attention(both, kv, pages, step)
            x = (normed if self.norm_before_residual else hidden) + attended
        with jax.named_scope("mlp"):
            return x + self.mlp(self.mlp_norm(x), step.rows), kv


class Eagle3(DraftHead):
    """EAGLE-3 head. jaxengine.runner.extensions.drafts.head_step runs it next to its target model."""

    sizes: Eagle3Config

    def __init__(self, config: Eagle3Config, build: Build):
        super().__init__(config, build)
        size, eps = config.hidden_size, config.rms_norm_eps
        count, target = len(config.streams), config.target_size
        joined, each = count * target, range(count) if config.stream_norms else ()
        norm = RMSNorm(joined, eps, source="model.input_norm", build=build) if config.joined_norm else None
        self.joined_norm = norm
        self.stream_norms = nnx.List(
            [RMSNorm(target, eps, source=f"model.fc_norm.{number}", build=build) for number in each]
        )
        self.joined = Linear(joined, (Source("model.fc", size),), axes=("latent", "embed"), build=build)

    def make_layer(self, layer: int, build: Build) -> nnx.Module:
        return Eagle3Layer(self.sizes, build)

    def read(self, hidden: jax.Array) -> jax.Array:
        """Return the model's hidden states of each token, [T, streams * target_size], normed as the config says and
        projected to [T, D].
        """
        with jax.named_scope("join"):
            if self.joined_norm is not None:
                hidden = self.joined_norm(hidden)
            if self.stream_norms:
                streams = jnp.split(hidden, len(self.stream_norms), axis=-1)
                parts = [norm(stream) for norm, stream in zip(self.stream_norms, streams, strict=True)]
                hidden = jnp.concatenate(parts, axis=-1)
            return self.joined(hidden)

    def __call__(
        self, batch: ForwardBatch, kv: KVPages, hidden: jax.Array, embeddings: jax.Array
    ) -> tuple[jax.Array, KVPages]:
        """Return hidden states [T, D], given each token's hidden state [T, D] and the next token's embedding [T, D],
        and the head's own pool `kv` with the keys and values of these tokens written. They are after the head's norm if
        the config has norm_output.

        hidden: result of `read`, or of the last call when drafting further tokens.
        """
        x, pool = super().__call__(batch, kv, jnp.concatenate([embeddings, hidden], axis=-1))
        assert isinstance(pool, KVPages)
        return self.head_norm(x) if self.sizes.norm_output else x, pool

    def draft_logits(self, hidden: jax.Array, model: Decoder) -> jax.Array:
        """Return logits f32[R, V / n] of the tokens after the next ones, split over n devices as the model's logits
        are; -inf for tokens that are never drafted.

        hidden: [R, D], results of a call. model: the target.
        """
        normed = hidden if self.sizes.norm_output else self.head_norm(hidden)
        return self.logits_of(self.products(normed, model), model)


class Eagle3Source(DraftHeadSource):
    """DraftHeadSource whose names are those of an EAGLE-3 head."""

    PREFIXES: ClassVar[tuple[tuple[str, str], ...]] = (
        *(("midlayer.", f"{_LAYER}."), ("layers.0.", f"{_LAYER}."), ("model.midlayer.", f"{_LAYER}.")),
        *DraftHeadSource.PREFIXES,
    )
