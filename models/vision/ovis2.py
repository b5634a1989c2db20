"""Vision tower of Ovis2 (Lu et al. 2024, arXiv:2405.20797): AIMv2 (Fini et al. 2024, arXiv:2411.14402), whose states
become probabilities of visual words, and these a mean of the words' embeddings, or that of the likeliest word.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.layers.base.activations import ACTIVATIONS
from jaxengine.models.layers.base.norm import LayerNorm, RMSNorm
from jaxengine.models.vision.base.layers import PatchEmbedding, TowerMLP
from jaxengine.models.vision.base.vit import (
    VitAttention,
    VitLayer,
    VitTowerConfig,
    joined_neighbours,
    linear,
    read_merge,
    read_vit,
    run_layers,
    table,
)
from jaxengine.models.vision.llava import TOWER

WORDS = "visual_embeddings_table"
_ENCODER = f"{TOWER}.transformer"
# transformers' defaults of fields that a file lacks.
_DEFAULTS: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 24,
    "num_attention_heads": 8,
    "image_size": 224,
    "patch_size": 14,
    "hidden_act": "silu",
    "vocab_size": 16384,
    "num_visual_indicator_tokens": 5,
}
_HEAD_EPS = 1e-5
_LIKELIEST = "st_argmax"
# What stands around and between the tiles of an image, in the order of the last visual words.
NUM_INDICATORS = 5


@dataclass(frozen=True, kw_only=True)
class Ovis2TowerConfig(VitTowerConfig):
    """Sizes of Ovis2's tower. After each unit's patches come NUM_INDICATORS rows, the last visual words.

    Attributes:
      vit: sizes of AIMv2.
      factor: number of patches along a side of the square that becomes one embedding.
      num_words: number of visual words, those of indicators included.
      attention_bias, mlp_bias: presence of biases in the layers.
      likeliest: whether an embedding is that of the likeliest word alone.
      as_first: whether checkpoints are as first published, whose code chooses words by the states before the last norm.
    """

    factor: int
    num_words: int
    attention_bias: bool
    mlp_bias: bool
    likeliest: bool
    as_first: bool = False

    @property
    def unused(self) -> tuple[str, ...]:
        return (f"{_ENCODER}.rms_norm.",) if self.as_first else ()

    def make(self, hidden_size: int, build: Build) -> Ovis2Tower:
        return Ovis2Tower(self, hidden_size, build)


def read_ovis2(fields: ConfigFields) -> Ovis2TowerConfig:
    """Return the tower's configuration from the `vision_config` of a config.json: sizes of the layers, `rms_norm_eps`
    (default: 1e-5), `qkv_bias` and `mlp_bias` (both false), and `vocab_size`, the number of visual words. Raises
    ModelConfigError for wrong fields, for another number of indicators than NUM_INDICATORS, no more words than these, a
    `tokenize_function` other than softmax and st_argmax, and a `hidden_stride` (default: 1) that does not divide the
    patches of a side.
    """
    vision = fields.part("vision_config", **_DEFAULTS)
    vision.require(num_visual_indicator_tokens=NUM_INDICATORS)
    if (function := vision.text("tokenize_function", "softmax")) not in ("softmax", _LIKELIEST):
        raise vision.fail("tokenize_function", f"softmax or {_LIKELIEST}")
    vit = read_vit(vision.with_defaults(layer_norm_eps=vision.number("rms_norm_eps", 1e-5)))
    factor = read_merge(vision, "hidden_stride", vision.integer("hidden_stride", 1), vit)
    num_words = vision.integer("vocab_size")
    if num_words <= NUM_INDICATORS:
        raise vision.fail("vocab_size", f"more than {NUM_INDICATORS}")
    return Ovis2TowerConfig(
        num_features=vit.num_features,
        columns=(),
        merge=factor**2,
        unit=vit.num_patches + NUM_INDICATORS * factor**2,
        vit=vit,
        factor=factor,
        num_words=num_words,
        attention_bias=vision.boolean("qkv_bias", False),
        mlp_bias=vision.boolean("mlp_bias", False),
        likeliest=function == _LIKELIEST,
    )


def mean_of_words(logits: jax.Array, words: jax.Array) -> jax.Array:
    """Return the mean of visual words [W, D], weighted by the softmax of logits [R, W]: [R, D]."""
    shares = jax.nn.softmax(logits.astype(jnp.float32), axis=-1).astype(logits.dtype)
    return jnp.dot(shares, words, preferred_element_type=jnp.float32).astype(words.dtype)


class _Layer(VitLayer):
    """Layer of AIMv2: x + attention(norm(x)), then x + mlp(norm(x)) with a gated MLP."""

    def __init__(self, config: Ovis2TowerConfig, source: str, build: Build):
        vit, ffn, bias = config.vit, f"{source}.ffn", config.attention_bias
        self.attention_norm, self.mlp_norm = (
            RMSNorm(vit.hidden_size, vit.norm_eps, source=f"{source}.rms_norm{number}", build=build)
            for number in (1, 2)
        )
        names: dict[str, Any] = {"source": f"{source}.attention", "out": "out_proj"}
        self.attention = VitAttention(vit, **names, build=build, bias=bias, out_bias=bias)
        self.mlp = TowerMLP(
            vit.hidden_size,
            vit.intermediate_size,
            up=(f"{ffn}.gate_proj", f"{ffn}.up_proj"),
            down=f"{ffn}.down_proj",
            activation=ACTIVATIONS[vit.activation],
            build=build,
            bias=config.mlp_bias,
        )


class Ovis2Tower(nnx.Module):
    """Vision tower of Ovis2.

    A call maps patches f32[P, F] and columns i32[C, P] to embeddings [P / merge, D].
    """

    def __init__(self, config: Ovis2TowerConfig, hidden_size: int, build: Build):
        self.config = config
        vit, source = config.vit, f"{_ENCODER}.embeddings"
        size, eps, words = vit.hidden_size, vit.norm_eps, config.num_words - NUM_INDICATORS
        features = vit.num_features, size
        self.patches = PatchEmbedding(*features, source=f"{source}.patch_embedding", bias=True, build=build)
        self.first_norm = RMSNorm(size, eps, source=f"{source}.rms_norm", build=build)
        positions = f"{source}.position_embedding.weight"
        self.positions = table(vit.num_patches, size, positions, build, flat=config.as_first)
        layers = range(vit.num_layers)
        self.layers = nnx.List([_Layer(config, f"{_ENCODER}.encoder.layers.{n}", build) for n in layers])
        norm = None if config.as_first else RMSNorm(size, eps, source=f"{_ENCODER}.rms_norm", build=build)
        self.last_norm = norm
        axes = ("embed", "embed")
        self.head = linear(size * config.merge, f"{TOWER}.head_linear", words, axes, build, bias=False)
        self.head_norm = LayerNorm(words, _HEAD_EPS, source=f"{TOWER}.head_norm", build=build)
        self.words = table(config.num_words, hidden_size, f"{WORDS}.weight", build)

    def __call__(self, patches: jax.Array, columns: jax.Array) -> jax.Array:
        del columns  # there are none: all units are alike
        config, vit = self.config, self.config.vit
        units = patches.reshape(-1, config.unit, patches.shape[1])[:, : vit.num_patches]
        num_units, words = len(units), self.words[...]
        with jax.named_scope("patches"):
            x = self.first_norm(self.patches(units.reshape(-1, patches.shape[1])))
            positions = self.positions[...].reshape(vit.num_patches, -1)
            x = (x.reshape(num_units, vit.num_patches, -1) + positions).reshape(len(x), -1)
        x = run_layers(self.layers, x, num_units, (vit.num_layers,))[0]
        if self.last_norm is not None:
            x = self.last_norm(x)
        with jax.named_scope("words"):
            logits = self.head_norm(self.head(joined_neighbours(x, vit.grid, config.factor)))
            own = words[:-NUM_INDICATORS]
            rows = own[logits.argmax(axis=-1)] if config.likeliest else mean_of_words(logits, own)
        rows = rows.reshape(num_units, -1, words.shape[1])
        ends = jnp.broadcast_to(words[-NUM_INDICATORS:], (num_units, NUM_INDICATORS, words.shape[1]))
        return jnp.concatenate([rows, ends], axis=1).reshape(-1, words.shape[1])
