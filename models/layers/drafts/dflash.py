"""DFlash and DSpark heads: a few layers that draft a block of tokens in one pass (Chen et al. 2026, arXiv:2602.06036).

The tokens of a block, the last known one and a mask for each token to draft, attend to each other in both directions,
and to keys and values that are projected from the target model's hidden states of all tokens before. These hidden
states are of several layers, joined to one and normed, and are the same for all layers of the head. So a step writes
the keys and values of its tokens without a pass of the layers (`DFlash.write`), and a pass takes a block alone
(`DFlash.__call__`).

A DSpark head also has two matrices by which each token changes the logits of the next one, so that its drafts depend on
each other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import cast

import jax
import jax.numpy as jnp
from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.config.drafts.dflash import DFlashConfig
from jaxengine.models.config.drafts.draft_heads import DraftHeadConfig
from jaxengine.models.forward_batch import ForwardBatch
from jaxengine.models.layers.attention.attention import Attention, LayerPages, StepInputs
from jaxengine.models.layers.base.embedding import Embedding, vocab_source
from jaxengine.models.layers.base.linear import Linear
from jaxengine.models.layers.base.mlp import GatedMLP
from jaxengine.models.layers.base.norm import RMSNorm
from jaxengine.models.layers.decoder import Decoder
from jaxengine.models.layers.decoder_step import DecoderStep
from jaxengine.models.layers.drafts.draft_head import LM_HEAD, DraftHead, DraftHeadSource
from jaxengine.models.layers.pre_norm import PreNormLayer
from jaxengine.models.params.declare import Source
from jaxengine.models.params.errors import ModelFileError
from jaxengine.pallas_kernels.kv.pages import KVPages
from jaxengine.pallas_kernels.kv.update import kv_cache_update

_LAYER = "model.layers.{layer}"


class ContextAttention(Attention):
    """Attention whose keys and values can be written without queries, from hidden states that are not the layer's."""

    def write(self, context: jax.Array, kv: KVPages, pages: LayerPages, step: StepInputs) -> KVPages:
        """Return the pool with the normed, rotated keys and the values of hidden states `context` [T, D] written to
        pages.
        """
        with jax.named_scope("context"):
            q, k, v, _ = self._heads(self.qkv(context, step.rows))
            (_, k), v = self.rotate(q, k, step), self.values(v)
            slots = pages.in_pool(kv.page_size).slot_mapping
            return kv_cache_update(kv, k, v, slots, schedule=pages.update_schedule)


class _Writer(nnx.Module):
    """Layer of a head in a pass that only writes keys and values."""

    def __init__(self, layer: PreNormLayer):
        self.layer = layer

    def __call__(self, x: jax.Array, kv: KVPages, pages: LayerPages, step: StepInputs) -> tuple[jax.Array, KVPages]:
        """Return x [T, D], the context, as it is, and the pool with its keys and values written."""
        return x, self.layer.attention.write(x, kv, pages, step)


class DFlash(DraftHead):
    """DFlash or DSpark head. jaxengine.runner.extensions.drafts.block_step runs it next to its target model."""

    sizes: DFlashConfig

    def __init__(self, config: DFlashConfig, build: Build):
        super().__init__(config, build)
        joined = len(config.streams) * config.target_size
        axes = "latent", "embed"
        self.joined = Linear(joined, (Source("model.fc", config.hidden_size),), axes=axes, build=build)
        eps = config.rms_norm_eps
        self.context_norm = RMSNorm(config.hidden_size, eps, source="model.hidden_norm", build=build)
        if rank := config.markov_rank:
            first, second = (f"model.markov_head.markov_w{number}" for number in (1, 2))
            self.markov_in = Embedding(config.vocab_size, rank, source=first, build=build, of_tokens=False)
            rows = vocab_source(second, config.draft_vocab_size, build.mesh)
            self.markov_out = Linear(rank, (rows,), axes=("embed", "vocab"), build=build)

    def make_layer(self, layer: int, build: Build) -> nnx.Module:
        """Return layer number `layer`, as Qwen3 has them, with ContextAttention."""
        config, eps = self.sizes, self.sizes.rms_norm_eps
        size, norm = config.hidden_size, partial(RMSNorm, config.hidden_size, eps, build=build)
        attention = ContextAttention(config.attention[layer], size, eps=eps, source=f"{_LAYER}.self_attn", build=build)
        sizes = size, config.intermediate_size
        mlp = GatedMLP(*sizes, source=f"{_LAYER}.mlp", bias=config.mlp_bias, build=build)
        norms = [norm(source=f"{_LAYER}.{name}") for name in ("input_layernorm", "post_attention_layernorm")]
        return PreNormLayer(norms[0], attention, norms[1], mlp)

    def write(self, batch: ForwardBatch, kv: KVPages, hidden: jax.Array) -> KVPages:
        """Return the head's own pool with the keys and values of the tokens of `batch` written, given the model's
        hidden states of each token, [T, streams * target_size].
        """
        with jax.named_scope("join"):
            context = self.context_norm(self.joined(hidden))
        return self._run(batch, kv, context, _Writer)[1]

    def __call__(  # type: ignore[override]
        self, batch: ForwardBatch, kv: KVPages, embeddings: jax.Array
    ) -> tuple[jax.Array, KVPages]:
        """Return hidden states [T, D] after the head's norm for blocks whose tokens have these embeddings [T, D], and
        the head's own pool with the keys and values of these tokens written.
        """
        x, kv = self._run(batch, kv, embeddings, lambda layer: layer)
        return self.head_norm(x), kv

    def _run(
        self, batch: ForwardBatch, kv: KVPages, x: jax.Array, of_layer: Callable[[PreNormLayer], nnx.Module]
    ) -> tuple[jax.Array, KVPages]:
        """Run of_layer(layer) of each layer in turn, from x [T, D] on; return the last one's result and the pool."""
        groups = self.cache_groups(kv.page_size, kv.dtype, hybrid=False)
        step = DecoderStep(self.config, self.build, groups, batch, kv)
        for index, layer in enumerate(self.layers):
            x = step.run(index, of_layer(cast(PreNormLayer, layer)), x)
        return x, cast(KVPages, step.cache)

    def draft_logits(self, products: jax.Array, before: jax.Array, model: Decoder) -> jax.Array:
        """Return logits f32[R, V / n] of drafts, split over n devices as the target model's logits are; -inf for tokens
        that are never drafted. products: [R, .] of the drafts' hidden states with the LM head, to which a DSpark head
        adds its bias by the token before each draft, `before` i32[R]. model: the target.
        """
        if self.sizes.markov_rank:
            products = products + self.markov_out(self.markov_in(before), out_dtype=jnp.float32)
        return self.logits_of(products, model)


class DFlashSource(DraftHeadSource):
    """DraftHeadSource of a DFlash or DSpark head. Its config has own_head if the checkpoint has an LM head. A head's
    estimate of its own drafts (`confidence_head`) is left out. Also raises ModelFileError if it has no LM head although
    not all tokens of the vocabulary are drafted.
    """

    PREFIXES = (
        *(("midlayer.", "model.layers.0."), ("encoder.fc.", "model.fc.")),
        *(("encoder.output_norm_enc.", "model.hidden_norm."), *DraftHeadSource.PREFIXES),
    )

    def settled(self, config: DraftHeadConfig, *, partial: bool) -> DraftHeadConfig:
        """Leave out what is not read, and return the config with own_head if the checkpoint has an LM head. Raises
        ModelFileError if it has none although it is whole (not `partial`) and some tokens are not drafted.
        """
        for name in [each for each in self.names() if each.startswith("model.confidence_head.")]:
            self.leave_out(name)
        if not (partial or self.stores(LM_HEAD)) and config.draft_vocab_size < config.vocab_size:
            text = f"is missing: draft_vocab_size is {config.draft_vocab_size}, less than the vocabulary"
            raise ModelFileError(self.path, text, LM_HEAD)
        return replace(config, own_head=config.own_head or self.stores(LM_HEAD))
