"""Heads of EAGLE 1 and 2: layers of Llama that draft from a model's last hidden states (Li et al. 2024,
arXiv:2401.15077).

For each token they take the model's hidden state after its final norm and the embedding of the next token, projected to
one. What the layers return stands for the model's hidden state at the next token: the model's LM head gives the logits,
and for further tokens it replaces the hidden state. In most heads no norm precedes the first layer, nor follows the
last.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.config.drafts.draft_heads import DraftHeadConfig
from jaxengine.models.config.drafts.eagle import EagleConfig
from jaxengine.models.forward_batch import ForwardBatch
from jaxengine.models.layers.attention.attention import Attention
from jaxengine.models.layers.base.activations import ACTIVATIONS
from jaxengine.models.layers.base.linear import Linear
from jaxengine.models.layers.base.mlp import GatedMLP
from jaxengine.models.layers.base.norm import Identity, RMSNorm
from jaxengine.models.layers.decoder import Decoder
from jaxengine.models.layers.drafts.draft_head import LM_HEAD, DraftHead, DraftHeadSource
from jaxengine.models.layers.pre_norm import PreNormLayer
from jaxengine.models.params.declare import Source
from jaxengine.pallas_kernels.kv.pages import KVPages

_LAYER, _JOINED = "model.layers.{layer}", "model.fc"


class Eagle(DraftHead):
    """Head of EAGLE 1 or 2. jaxengine.runner.extensions.drafts.head_step runs it next to its target model."""

    sizes: EagleConfig

    def __init__(self, config: EagleConfig, build: Build):
        super().__init__(config, build)
        if not config.last_norm:
            self.head_norm = Identity()
        size, joined = config.hidden_size, (Source(_JOINED, config.hidden_size),)
        self.joined = Linear(2 * size, joined, axes=("latent", "embed"), bias=config.joined_bias, build=build)

    def make_layer(self, layer: int, build: Build) -> nnx.Module:
        """Return layer number `layer`: Llama's, without the norm before attention if it is the first and the config has
        no first_norm.
        """
        config, eps = self.sizes, self.sizes.rms_norm_eps
        norm = partial(RMSNorm, config.hidden_size, eps, build=build)
        has_norm = layer > 0 or config.first_norm
        input_norm = norm(source=f"{_LAYER}.input_layernorm") if has_norm else Identity()
        sizes = config.attention[layer], config.hidden_size
        attention = Attention(*sizes, eps=eps, source=f"{_LAYER}.self_attn", build=build)
        options = {"bias": config.mlp_bias, "activation": ACTIVATIONS[config.activation], "build": build}
        mlp = GatedMLP(config.hidden_size, config.intermediate_size, source=f"{_LAYER}.mlp", **options)
        return PreNormLayer(input_norm, attention, norm(source=f"{_LAYER}.post_attention_layernorm"), mlp)

    def read(self, hidden: jax.Array) -> jax.Array:
        """Return the model's hidden states [T, D] after its final norm, in the form that this head takes: unchanged."""
        return hidden

    def __call__(
        self, batch: ForwardBatch, kv: KVPages, hidden: jax.Array, embeddings: jax.Array
    ) -> tuple[jax.Array, KVPages]:
        """Return hidden states [T, D], after the last norm if there is one, given each token's hidden state [T, D] and
        the next token's embedding [T, D], and the head's own pool `kv` with the keys and values of these tokens
        written.

        The result replaces `hidden` when drafting further tokens.
        """
        with jax.named_scope("join"):
            x = self.joined(jnp.concatenate([embeddings, hidden], axis=-1))
        x, pool = super().__call__(batch, kv, x)
        assert isinstance(pool, KVPages)
        return self.head_norm(x), pool

    def draft_logits(self, hidden: jax.Array, model: Decoder) -> jax.Array:
        """Return logits f32[R, V / n] of the tokens after the next ones, split over n devices as the model's logits
        are.

        hidden: [R, D], results of a call. model: the target.
        """
        return self.logits_of(self.products(hidden, model), model)


class EagleSource(DraftHeadSource):
    """DraftHeadSource whose names are those of a head of EAGLE 1 or 2."""

    def settled(self, config: DraftHeadConfig, *, partial: bool) -> DraftHeadConfig:
        """Return the config with the norms, the bias and the LM head that the checkpoint stores."""
        assert isinstance(config, EagleConfig)
        return replace(
            config,
            own_head=config.own_head or self.stores(LM_HEAD),
            joined_bias=config.joined_bias or self.stores(f"{_JOINED}.bias"),
            first_norm=config.first_norm or self.stores(f"{_LAYER.format(layer=0)}.input_layernorm.weight"),
            last_norm=config.last_norm or self.stores("model.norm.weight"),
        )
