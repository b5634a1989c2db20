"""Attention residuals over blocks of layers (Kimi Team 2026): each part of a layer reads a mix of the embedding, of the
sums of the outputs of each earlier block, and of the sum so far of its own block.

A token's hidden states are side by side, [T, A * D]: first the sum of the current block, then the embedding and the
sums of the blocks that have ended, oldest first; 0 for blocks that have not.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.config.altup import KimiK3Parts
from jaxengine.models.config.model_config import ModelConfig
from jaxengine.models.layers.attention.attention import LayerPages, StepInputs
from jaxengine.models.layers.base.norm import NormClass, RMSNorm, rms_normalized
from jaxengine.models.params.declare import ParamDecl, Source, declare
from jaxengine.pallas_kernels.kv.pages import KVPages


def first_stream(self: Any, x: jax.Array, batch: Any) -> jax.Array:
    """Return a step's embeddings x [T, D] as hidden states [T, A * D]: the first of a token, beside zeros. It is the
    method `first_input` of decoders.
    """
    return jnp.pad(x, ((0, 0), (0, self.config.stream_size - x.shape[1])))


class StreamMix(nnx.Module):
    """Mix of the first of a token's hidden states, weighted by a softmax over their scores, then a norm.

    num_mixed: number of hidden states that are mixed. name: checkpoint module of the norm of scores is `{name}_norm`,
    that of their projection `{name}_proj`; None without scores, for one hidden state. norm: checkpoint module of the
    norm after the mix. norm_class: its class.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_mixed: int,
        *,
        name: str | None,
        norm: str,
        build: Build,
        norm_class: NormClass = RMSNorm,
    ):
        size, eps = config.hidden_size, config.rms_norm_eps
        self.num_mixed, self.num_streams, self.eps = num_mixed, config.num_streams, eps

        def vector(source: Source) -> nnx.Param:
            return declare((size,), build.dtype, ParamDecl((None,), (source.tensor("weight"),), init_std=0.02))

        joined = config.kimi_k3 is not None and config.kimi_k3.joined_scores
        self.score_norm = None if name is None or joined else vector(Source(f"{name}_norm", size))
        self.score = None if name is None else vector(Source(f"{name}_proj", size))
        self.norm = norm_class(size, eps, source=norm, build=build)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return the norm of the mix of hidden states x [T, A * D]: [T, D]. Scores are the products of `score` and of
        the states' RMS norms, with the weights `score_norm` if it has any; they and the mix are computed in float32,
        and the mix is rounded to x's dtype.
        """
        states = x.reshape(x.shape[0], self.num_streams, -1)[:, : self.num_mixed].astype(jnp.float32)
        if self.score is None:
            return self.norm(states[:, 0].astype(x.dtype))
        weights = self.score[...].astype(jnp.float32)
        if self.score_norm is not None:
            weights = self.score_norm[...].astype(jnp.float32) * weights
        scores = jnp.sum(rms_normalized(states, self.eps) * weights, axis=-1)
        mixed = jnp.sum(jax.nn.softmax(scores)[..., None] * states, axis=1)
        return self.norm(mixed.astype(x.dtype))


class BlockResidualLayer(nnx.Module):
    """Layer of attention, then an MLP or experts, each of which reads a StreamMix and adds its output to the sum of the
    current block. With the first layer of a block, the sum before it is kept, and a new one begins.

    layer: the layer's number. scores_first: whether the first layer's attention, which reads the embedding alone, has
    the weights of a mix. norm_class: class of the norms after mixes.
    """

    def __init__(
        self,
        config: ModelConfig,
        attention: nnx.Module,
        mlp: nnx.Module,
        build: Build,
        *,
        layer: int,
        scores_first: bool = True,
        norm_class: NormClass = RMSNorm,
    ):
        parts = config.kimi_k3
        assert isinstance(parts, KimiK3Parts)
        source, count = "model.layers.{layer}", 1 + parts.num_finished(layer)
        self.place = count if parts.begins(layer) else None
        mix = partial(StreamMix, config, build=build, norm_class=norm_class)
        norms = f"{source}.input_layernorm", f"{source}.post_attention_layernorm"
        name = f"{source}.self_attention_res" if layer or scores_first else None
        self.before_attention = mix(count, name=name, norm=norms[0])
        self.attention = attention
        count += self.place is not None
        self.before_mlp = mix(count, name=f"{source}.mlp_res", norm=norms[1])
        self.mlp = mlp

    def __call__(self, x: jax.Array, kv: KVPages, pages: LayerPages, step: StepInputs) -> tuple[jax.Array, KVPages]:
        """Return the hidden states after the layer, [T, A * D] for x [T, A * D], and the pool with this step's keys and
        values written, or the states in its place. Outputs of attention and MLP are added to the first state; where a
        block begins, at `place`, that is kept there first and attention's output replaces it.
        """
        size = x.shape[1] // self.before_mlp.num_streams
        with jax.named_scope("attention"):
            output, kv = self.attention(self.before_attention(x), kv, pages, step)
            if self.place is None:
                x = x.at[:, :size].add(output)
            else:
                x = x.at[:, self.place * size : (self.place + 1) * size].set(x[:, :size]).at[:, :size].set(output)
        with jax.named_scope("mlp"):
            return x.at[:, :size].add(self.mlp(self.before_mlp(x), step.rows)), kv
