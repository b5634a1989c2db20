"""Tower of Granite Speech (IBM 2025, arXiv:2505.08699): a conformer, which attends within blocks of positions and adds
its own guess of the text half way (CTC), and queries that read windows of what it finds (Q-Former, Li et al. 2023,
arXiv:2301.12597).

A sound begins with a block and a window, and a call may have several. Further shape letters: P positions, each of a
pair of spectrogram frames, G blocks of S positions, N heads, H elements of a head, U windows of W positions, Q queries.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import lcm

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.config.fields import MAX_BINS, MAX_HEAD_DIM, MAX_HEADS, MAX_HIDDEN, ConfigFields
from jaxengine.models.config.tower import TowerConfig
from jaxengine.models.layers.base.linear import Linear
from jaxengine.models.layers.base.norm import LayerNorm
from jaxengine.models.params.declare import ParamDecl, Source, declare, parts_of
from jaxengine.models.sound.fast_conformer import ConformerLayer
from jaxengine.models.sound.gemma4 import neighbours, shifted
from jaxengine.models.vision.base.layers import PatchEmbedding, TowerMLP, tower_axis
from jaxengine.models.vision.base.qformer import QueryConfig, QueryFormer, read_query_config
from jaxengine.models.vision.base.vit import linear, table

TOWER, PROJECTOR = "encoder", "projector"
_LAYER, _QFORMER = f"{TOWER}.layers.{{layer}}", f"{PROJECTOR}.qformer"
# Ends of the names of tensors of more than two axes.
CONVOLUTIONS = (".up_conv.weight", ".down_conv.weight", ".depth_conv.conv.weight", f"{PROJECTOR}.query")
# transformers' defaults of fields that a file lacks.
_DEFAULTS = {
    "input_dim": 160,
    "num_layers": 10,
    "hidden_dim": 1024,
    "feedforward_mult": 4,
    "num_heads": 8,
    "output_dim": 42,
    "context_size": 200,
    "max_pos_emb": 512,
    "conv_kernel_size": 15,
    "conv_expansion_factor": 2,
}
_QUERY_DEFAULTS = {
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "layer_norm_eps": 1e-12,
    "cross_attention_frequency": 2,
    "encoder_hidden_size": 1408,
}
# Frames of a spectrogram that are joined, and positions of the longest sound, five minutes.
_PAIR, _LONGEST = 2, 15_000
_MOST_TAPS, _MOST_BLOCK, _MOST_UNIT = 64, 1024, 8192
_EPS = 1e-5  # of norms that no configuration gives one


@dataclass(frozen=True, kw_only=True)
class GraniteSpeechConfig(TowerConfig):
    """Sizes of the tower. A patch is a pair of spectrogram frames. Its column "segment" has the number of the pair's
    sound, and -1 in the pairs after it.

    Attributes:
      hidden_size, num_layers, num_heads, head_dim: sizes of the conformer.
      ffn_size, inner_size: inner elements of its MLPs and convolutions.
      num_labels: labels of its guess of the text.
      block: S.
      farthest: largest distance of positions that has a key.
      taps: number of positions that a convolution adds up.
      queries: sizes of the Q-Former.
      joined: numbers of layers, ascending, after which the hidden states are kept; 0 for those before the first. The
        Q-Former reads them side by side, followed by those of the last layer.
    """

    hidden_size: int
    num_layers: int
    num_heads: int
    head_dim: int
    ffn_size: int
    inner_size: int
    num_labels: int
    block: int
    farthest: int
    taps: int
    queries: QueryConfig
    joined: tuple[int, ...] = ()

    @property
    def heard_size(self) -> int:
        """Number of elements of what the Q-Former reads at a position: hidden_size for the last layer and each of
        `joined`.
        """
        return self.hidden_size * (len(self.joined) + 1)

    @property
    def window(self) -> int:
        return -(-_LONGEST // self.unit) * self.unit

    def make(self, hidden_size: int, build: Build) -> nnx.Module:
        return GraniteSpeechTower(self, hidden_size, build)


def _bounded(fields: ConfigFields, name: str, most: int) -> int:
    """Return the field `name`, an integer from 1 to `most`, both included. Raises ModelConfigError for any other
    value.
    """
    if (found := fields.integer(name)) > most:
        raise fields.fail(name, f"an integer >= 1 and <= {most}")
    return found


def read_granite_speech(fields: ConfigFields, *, joins: bool = False) -> GraniteSpeechConfig:
    """Return the tower's configuration from the `encoder_config` of a config.json, with transformers' defaults for
    absent fields, and what `_read_queries` reads. With `has_lora_adapter` (default: true) the base adapter runs where
    there are sounds. joins: whether `cat_hidden_layers` is read. Raises ModelConfigError for wrong fields, and for
    sizes that do not fit each other or are too large.
    """
    audio = fields.part("encoder_config", **_DEFAULTS)
    size, heads = _bounded(audio, "hidden_dim", MAX_HIDDEN), _bounded(audio, "num_heads", MAX_HEADS)
    head_dim = audio.integer("dim_head", size // heads)
    if not 1 <= head_dim <= MAX_HEAD_DIM:
        raise audio.fail("dim_head", f"1 to {MAX_HEAD_DIM}")
    num_layers = _bounded(audio, "num_layers", 1024)
    if (bins := _bounded(audio, "input_dim", MAX_BINS)) % _PAIR:
        raise audio.fail("input_dim", "an even number, the bins of two frames")
    block, farthest = _bounded(audio, "context_size", _MOST_BLOCK), _bounded(audio, "max_pos_emb", 1 << 16)
    if block > farthest:
        raise audio.fail("context_size", f"at most max_pos_emb {farthest}")
    joined = _read_joined(audio, num_layers) if joins else ()
    queries = _read_queries(fields, size, len(joined) + 1)
    if (unit := lcm(block, queries.window)) > _MOST_UNIT:
        allowed = f"such that context_size and window_size {queries.window} have a common multiple <= {_MOST_UNIT}"
        raise audio.fail("context_size", allowed)
    return GraniteSpeechConfig(
        num_features=bins,
        columns=("segment",),
        merge=queries.window // queries.num_queries,
        unit=unit,
        hears=True,
        frames=_PAIR,
        hidden_size=size,
        num_layers=num_layers,
        num_heads=heads,
        head_dim=head_dim,
        ffn_size=size * _bounded(audio, "feedforward_mult", 64),
        inner_size=size * _bounded(audio, "conv_expansion_factor", 64),
        num_labels=_bounded(audio, "output_dim", 1 << 20),
        block=block,
        farthest=farthest,
        taps=_bounded(audio, "conv_kernel_size", _MOST_TAPS),
        queries=queries,
        joined=joined,
        adapter="." if fields.boolean("has_lora_adapter", True) else None,
    )


def _read_joined(audio: ConfigFields, num_layers: int) -> tuple[int, ...]:
    """Return the numbers in `cat_hidden_layers`, ascending; () if it is missing or null. Raises ModelConfigError for
    anything but different integers below the number of layers.
    """
    given = audio.value("cat_hidden_layers", None) or ()
    if not isinstance(given, list | tuple) or any(type(one) is not int or not 0 <= one < num_layers for one in given):
        raise audio.fail("cat_hidden_layers", f"a list of integers >= 0 and < num_layers {num_layers}, or null")
    if len(set(given)) != len(given):
        raise audio.fail("cat_hidden_layers", "a list of different integers")
    return tuple(sorted(given))


def _read_queries(fields: ConfigFields, size: int, num_states: int) -> QueryConfig:
    """Return the sizes of the Q-Former from `projector_config`, `window_size` (default: 15) and `downsample_rate`
    (default: 5).

    size: elements of the conformer's hidden states. num_states: number of hidden states that are read side by side.
    Raises ModelConfigError for wrong fields, and for sizes that do not fit each other.
    """
    own = fields.part("projector_config", **_QUERY_DEFAULTS)
    own.require(use_qformer_text_input=False, model_type="blip_2_qformer")
    fields = fields.with_defaults(window_size=15, downsample_rate=5)
    window, joined = _bounded(fields, "window_size", 512), fields.integer("downsample_rate")
    if window % joined:
        raise fields.fail("downsample_rate", f"a divisor of window_size {window}")
    width, heads = own.integer("hidden_size"), own.integer("num_attention_heads")
    if width % heads:
        raise own.fail("num_attention_heads", f"a divisor of hidden_size {width}")
    if own.integer("encoder_hidden_size") != size * num_states:
        times = "" if num_states == 1 else f", {num_states} times"
        raise own.fail("encoder_hidden_size", f"hidden_dim of encoder_config, {size}{times}")
    return read_query_config(own, width, heads, window, window // joined)


class BlockAttention(nnx.Module):
    """Attention of positions to those of their block, with keys of their distances (Shaw et al. 2018,
    arXiv:1803.02155).
    """

    def __init__(self, config: GraniteSpeechConfig, build: Build):
        self.config, size, source = config, config.hidden_size, f"{_LAYER}.attn"
        inner, heads = config.num_heads * config.head_dim, tower_axis("heads", build)
        self.norm = LayerNorm(size, _EPS, source=f"{source}.pre_norm", build=build)
        parts = (Source(f"{source}.to_q", inner), *parts_of(f"{source}.to_kv", inner, inner))
        parts = tuple(part._replace(group=config.head_dim) for part in parts)
        self.qkv = Linear(size, parts, axes=("embed", heads), bias=False, build=build)
        self.out = linear(inner, f"{source}.to_out", size, ("heads", "embed"), build)
        self.distances = table(2 * config.farthest + 1, config.head_dim, f"{source}.rel_pos_emb.weight", build)

    def __call__(self, x: jax.Array, segment: jax.Array) -> jax.Array:
        """Return the output [P, D], without the residual, of attention within each block of `block` positions of
        norm(x), x [P, D], with products of queries with keys and with vectors of distances.

        segment: i32[P], the sound of each position, -1 for none, which is not attended to.
        """
        config = self.config
        q, k, v = (
            each.reshape(-1, config.block, each.shape[1], config.head_dim)
            for each in jnp.split(self.qkv(self.norm(x)).reshape(len(x), -1, config.head_dim), 3, axis=1)
        )
        place = np.arange(config.block)
        of_distance = self.distances[...][place[:, None] - place + config.farthest]
        exact = {"preferred_element_type": jnp.float32}
        scores = jnp.einsum("gsnh,gtnh->gnst", q, k, **exact) + jnp.einsum("gsnh,sth->gnst", q, of_distance, **exact)
        # Not -inf: a block after a sound has no key at all.
        seen = (segment >= 0).reshape(-1, 1, 1, config.block)
        scores = jnp.where(seen, scores * config.head_dim**-0.5, jnp.finfo(scores.dtype).min)
        weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
        o = jnp.einsum("gnst,gtnh->gsnh", weights, v, **exact).astype(x.dtype)
        return self.out(o.reshape(len(x), -1))


class ConformerConvolution(nnx.Module):
    """Convolution block down(silu(batch_norm(convolution(gated(up(norm(x))))))). The convolution is of each element by
    itself, and the batch norm has the checkpoint's means and variances.
    """

    def __init__(self, config: GraniteSpeechConfig, build: Build):
        self.config, size, inner, source = config, config.hidden_size, config.inner_size, f"{_LAYER}.conv"
        self.norm = LayerNorm(size, _EPS, source=f"{source}.norm", build=build)
        self.up = PatchEmbedding(size, 2 * inner, source=f"{source}.up_conv", bias=True, build=build)
        self.down = PatchEmbedding(inner, size, source=f"{source}.down_conv", bias=True, build=build)
        self.weight = table(inner, config.taps, f"{source}.depth_conv.conv.weight", build)

        def column(name: str) -> nnx.Param:
            return declare((inner,), build.dtype, ParamDecl((None,), (Source(f"{source}.batch_norm.{name}", inner),)))

        self.mean, self.variance = column("running_mean"), column("running_var")
        self.scale, self.bias = column("weight"), column("bias")

    def __call__(self, x: jax.Array, segment: jax.Array) -> jax.Array:
        """Return down(silu(batch_norm(convolution(gated(up(norm(x))))))) for x [P, D]: [P, D], without the residual.

        segment: i32[P], the sound of each position, -1 for none; no position sees another sound's.
        """
        value, gate = jnp.split(self.up(self.norm(x)), 2, axis=-1)
        inner, weight = value.astype(jnp.float32) * jax.nn.sigmoid(gate.astype(jnp.float32)), self.weight[...]
        y = jnp.zeros_like(inner)
        for tap in range(self.config.taps):
            steps = self.config.taps // 2 - tap
            near = jnp.where(neighbours(segment, steps)[:, None], shifted(inner, steps), 0)
            y = y + near * weight[:, tap].astype(jnp.float32)
        mean, variance, scale, bias = (
            each[...].astype(jnp.float32) for each in (self.mean, self.variance, self.scale, self.bias)
        )
        y = (y - mean) * (scale * jax.lax.rsqrt(variance + _EPS)) + bias
        return self.down(jax.nn.silu(y).astype(x.dtype))


class _Layer(ConformerLayer):
    """ConformerLayer over positions [P, D] of several sounds, called with the sound of each, i32[P]."""

    def __init__(self, config: GraniteSpeechConfig, build: Build):
        size = config.hidden_size

        def feed_forward(name: str) -> tuple[nnx.Module, nnx.Module]:
            source = f"{_LAYER}.{name}"
            names = {"up": (f"{source}.up_proj",), "down": f"{source}.down_proj"}
            mlp = TowerMLP(size, config.ffn_size, **names, activation=jax.nn.silu, build=build)
            return LayerNorm(size, _EPS, source=f"{source}.pre_norm", build=build), mlp

        self.norm1, self.mlp1 = feed_forward("ff1")
        self.attention, self.convolution = BlockAttention(config, build), ConformerConvolution(config, build)
        self.norm2, self.mlp2 = feed_forward("ff2")
        self.norm = LayerNorm(size, _EPS, source=f"{_LAYER}.post_norm", build=build)


class GraniteSpeechTower(nnx.Module):
    """Tower of Granite Speech.

    A call maps patches f32[P, F] and columns i32[C, P] to embeddings [P / merge, D].
    """

    def __init__(self, config: GraniteSpeechConfig, hidden_size: int, build: Build):
        self.config, size, axes, queries = config, config.hidden_size, ("embed", "embed"), config.queries
        self.input = linear(config.num_features, f"{TOWER}.input_linear", size, axes, build)
        self.layers = nnx.List([_Layer(config, replace(build, layer=layer)) for layer in range(config.num_layers)])
        self.guess = linear(size, f"{TOWER}.out", config.num_labels, axes, build)
        self.guessed = linear(config.num_labels, f"{TOWER}.out_mid", size, axes, build)
        width = queries.hidden_size
        self.query = table(queries.num_queries, width, f"{PROJECTOR}.query", build, flat=True)
        self.qformer = QueryFormer(queries, config.heard_size, _QFORMER, build)
        self.output = linear(width, f"{PROJECTOR}.linear", hidden_size, axes, build)

    def __call__(self, patches: jax.Array, columns: jax.Array) -> jax.Array:
        config, segment = self.config, columns[0]
        x = self.input(patches.astype(self.query[...].dtype))
        kept = [x] if 0 in config.joined else []
        for index, layer in enumerate(self.layers, 1):
            with jax.named_scope(f"layer_{index - 1}"):
                x = layer(x, segment)
                if index == config.num_layers // 2:
                    labels = jax.nn.softmax(self.guess(x, out_dtype=jnp.float32), axis=-1)
                    x = x + self.guessed(labels.astype(x.dtype))
                if index in config.joined:
                    kept.append(x)
        x = jnp.concatenate([*kept, x], axis=1)
        with jax.named_scope("projector"):
            queries = config.queries
            # What comes after a sound is zeros, also in the sound's last window.
            windows = jnp.where(segment[:, None] >= 0, x, 0).reshape(-1, queries.window, x.shape[1])
            query = self.query[...].reshape(queries.num_queries, queries.hidden_size)
            y = self.qformer(jnp.broadcast_to(query, (len(windows), *query.shape)), windows)
            return self.output(y.reshape(-1, y.shape[2]))
