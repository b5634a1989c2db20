"""Vision tower RADIO (Ranzinger et al. 2024, arXiv:2312.06709) of NVIDIA's Nemotrons: a ViT whose images have learned
class and register tokens before their patches, a table of positions that is stretched to the longer side of an image,
and patches of several frames with a projection of their own. A square of four patches becomes one embedding.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.config.fields import MAX_INTERMEDIATE, MAX_PATCH, ConfigFields
from jaxengine.models.config.tower import TowerConfig
from jaxengine.models.layers.base.activations import ACTIVATIONS, read_activation
from jaxengine.models.layers.base.mlp import relu_squared
from jaxengine.models.layers.base.norm import LayerNorm, RMSNorm
from jaxengine.models.params.declare import Source
from jaxengine.models.vision.base.attention import UNIT, segment_attention
from jaxengine.models.vision.base.layers import (
    PatchEmbedding,
    PatchMerger,
    TowerAttention,
    TowerLayer,
    TowerMLP,
    in_turn,
    stretched,
)
from jaxengine.models.vision.base.vit import table
from jaxengine.models.vision.llava import PROJECTOR

TOWER, LAST_NORM = "vision_model", "vision_final_layernorm"
EMBEDDINGS, LAYERS = f"{TOWER}.embeddings", f"{TOWER}.encoder.layer"
POSITIONS = f"{EMBEDDINGS}.position_embedding"
# Values of the column "kind": what a row is. A token before the patches has its number, counted from _FIRST_TOKEN.
IMAGE, VIDEO, FIRST_TOKEN = 0, 1, 2
_MERGE = 2
_MOST_TOKENS, _MOST_SIDE = 256, 1024
# ViTs by the name that RADIO's configuration has for them -> hidden size, layers, heads. MLPs are four times as wide.
_HUGE = "vit_huge_patch16_224"
_SIZES = {
    "vit_small_patch16_224": (384, 12, 6),
    "vit_base_patch16_224": (768, 12, 12),
    "vit_large_patch16_224": (1024, 24, 16),
    _HUGE: (1280, 32, 16),
}


@dataclass(frozen=True, kw_only=True)
class RadioTowerConfig(TowerConfig):
    """Sizes of the tower. jaxengine.media.processors.radio writes its `columns`.

    Attributes:
      hidden_size, intermediate_size, num_layers, num_heads: sizes of the tower's layers.
      activation: a name of jaxengine.models.layers.base.activations.ACTIVATIONS.
      gated: whether MLPs have a gate.
      bias: whether projections to queries, keys and values have biases.
      norm_eps: epsilon of the layers' norms.
      patch_size, temporal_patch_size: pixels of a patch's side, and frames of a patch of a video.
      spatial_merge_size: rows and columns of patches that become one row.
      side: rows and columns of the table of positions.
      num_tokens: number of learned tokens before the patches of an image.
      projector_size: outputs of the projector's first product.
      last_norm: whether a norm follows the layers.
      plain_projector: whether the projector has a layer norm, GELU and biases, instead of an RMS norm and squared ReLU.
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    activation: str
    gated: bool
    bias: bool
    norm_eps: float
    patch_size: int
    temporal_patch_size: int
    spatial_merge_size: int
    side: int
    num_tokens: int
    projector_size: int
    last_norm: bool
    plain_projector: bool = False

    @property
    def rows_before(self) -> int:
        """Number of rows of the tower that an image's learned tokens take, before those of its patches."""
        return -(-self.num_tokens // self.merge)

    def make(self, hidden_size: int, build: Build) -> nnx.Module:
        return RadioTower(self, hidden_size, build)


def read_radio_tower(fields: ConfigFields, *, last_norm: bool) -> RadioTowerConfig:
    """Return the tower's configuration from a config.json of Nemotron-H Omni, with transformers' defaults for fields
    that it or its vision_config lacks: those of `_read_sizes`, and `video_temporal_patch_size` (2), which both must
    have alike. last_norm: whether a norm follows the layers.

    Raises ModelConfigError for wrong fields, and for sizes that do not fit each other.
    """
    vision = fields.part_or_empty("vision_config")
    vision.require(num_channels=3, layerscale_value=1.0)
    frames = fields.integer("video_temporal_patch_size", 2, minimum=2)
    own = vision.integer("video_temporal_patch_size", None if fields.has("vision_config") else 2)
    if frames > MAX_PATCH or own != frames:
        raise vision.fail("video_temporal_patch_size", f"2 to {MAX_PATCH}, and that of the whole model, {frames}")
    return replace(_read_sizes(fields, vision, frames), last_norm=last_norm)


def read_tiled_radio(fields: ConfigFields, *, last_norm: bool = False) -> RadioTowerConfig:
    """Return the tower's configuration from a config.json whose vision_config is RADIO's own, of a model whose images
    are cut into tiles: sizes from the name of a ViT (`model` of `args`), unless it has them itself, `cpe_max_size`
    (default: 2048), and as many class tokens as `teachers` with different names if `cls_token_per_teacher`, else one,
    filled up with registers, at least one, to a multiple of `register_multiple`, if that is set.

    last_norm: whether a norm follows the layers. Raises ModelConfigError for wrong fields, for another ViT, and for
    images and frames of any shape (min_num_patches, video_target_num_patches, video_target_img_size).
    """
    fields.require(ps_version="v2")
    vision, args = fields.part("vision_config"), fields.part("vision_config").part_or_empty("args")
    vision.require(video_temporal_patch_size=1, video_target_num_patches=None, video_target_img_size=None)
    args.require(min_num_patches=None, cpe_num_registers=None)
    if (kind := args.text("model", _HUGE)) not in _SIZES:
        raise args.fail("model", f"one of {', '.join(_SIZES)}")
    size, layers, heads = _SIZES[kind]
    taught, tokens = args.value("teachers", None) or [], 1
    if not isinstance(taught, list) or any(not isinstance(each, Mapping) for each in taught):
        raise args.fail("teachers", "a list of mappings")
    if args.boolean("cls_token_per_teacher", False):
        tokens = len({str(each.get("name")) for each in taught})
    several = args.integer("register_multiple", None, minimum=1)
    named = {
        "hidden_size": vision.integer("hidden_size", size),
        "num_hidden_layers": vision.integer("num_hidden_layers", layers),
        "num_attention_heads": vision.integer("num_attention_heads", heads),
        "max_img_size": args.integer("cpe_max_size", 2048),
        "patch_size": vision.integer("patch_size", 16),
        "num_cls_tokens": tokens,
        "num_registers": several - tokens % several if several else 0,
    }
    return replace(_read_sizes(fields, ConfigFields(named), 1), last_norm=last_norm)


def _read_sizes(fields: ConfigFields, vision: ConfigFields, frames: int) -> RadioTowerConfig:
    """Return the tower's configuration, without a norm after the layers, from the fields of a config.json and its
    vision_config, under transformers' names and with its defaults: the usual sizes, `mlp_ratio`, `use_swiglu_ffn`,
    `qkv_bias`, `layer_norm_eps`, `patch_size`, `max_img_size`, `num_cls_tokens` and `num_registers`, and beside
    vision_config `vision_hidden_size` and `projector_hidden_size`. frames: number of frames of a patch of a video.
    Raises ModelConfigError for wrong fields, and for sizes that do not fit each other.
    """
    size, heads = vision.integer("hidden_size", 1280), vision.integer("num_attention_heads", 16)
    if size % heads:
        raise vision.fail("num_attention_heads", f"a divisor of hidden_size {size}")
    vision.require(head_dim=size // heads)
    fields.require(downsample_ratio=1 / _MERGE)
    if fields.integer("vision_hidden_size", 1280) != size:
        raise fields.fail("vision_hidden_size", f"the hidden_size of vision_config, {size}")
    patch = vision.integer("patch_size", 16)
    side = vision.integer("max_img_size", 2048) // patch
    if not 1 <= side <= _MOST_SIDE:
        raise vision.fail("max_img_size", f"{patch} to {_MOST_SIDE * patch}, for patch_size {patch}")
    tokens = 0
    for name, default in (("num_cls_tokens", 3), ("num_registers", 7)):
        tokens += (count := vision.integer(name, default, minimum=0))
        if count > _MOST_TOKENS:
            raise vision.fail(name, f"an integer >= 0 and <= {_MOST_TOKENS}")
    inner, gated = int(size * vision.number("mlp_ratio", 4.0)), vision.boolean("use_swiglu_ffn", False)
    inner = (int(inner * 2 / 3) + 7) // 8 * 8 if gated else inner
    if not 1 <= inner <= MAX_INTERMEDIATE:
        raise vision.fail("mlp_ratio", f"1 to {MAX_INTERMEDIATE}, times hidden_size {size}")
    return RadioTowerConfig(
        num_features=3 * frames * patch * patch,
        columns=("segment", "kind", "row", "column", "longer"),
        merge=_MERGE * _MERGE,
        unit=math.lcm(UNIT, _MERGE * _MERGE),
        hidden_size=size,
        intermediate_size=inner,
        num_layers=vision.integer("num_hidden_layers", 32),
        num_heads=heads,
        activation="silu" if gated else read_activation(vision, "hidden_act"),
        gated=gated,
        bias=vision.boolean("qkv_bias", True),
        norm_eps=vision.number("layer_norm_eps", 1e-6),
        patch_size=patch,
        temporal_patch_size=frames,
        spatial_merge_size=_MERGE,
        side=side,
        num_tokens=tokens,
        projector_size=fields.integer("projector_hidden_size", 4096),
        last_norm=False,
    )


class RadioTower(nnx.Module):
    """RADIO with an MLP over squares of patches. Images, and the frames of a video that share patches, are segments of
    their own.
    """

    def __init__(self, config: RadioTowerConfig, hidden_size: int, build: Build):
        self.config, size = config, config.hidden_size
        self.image_features = config.num_features // config.temporal_patch_size
        self.images = PatchEmbedding(
            self.image_features, size, source=f"{EMBEDDINGS}.patch_projection", bias=False, build=build
        )
        names: dict[str, Any] = {"source": f"{EMBEDDINGS}.video_patch_projection", "bias": False, "build": build}
        self.videos = PatchEmbedding(config.num_features, size, **names) if config.temporal_patch_size > 1 else None
        # Stored with a first axis of one.
        self.positions = table(config.side**2, size, POSITIONS, build, flat=True)
        tokens = f"{EMBEDDINGS}.cls_register_token"
        self.tokens = table(config.num_tokens, size, tokens, build) if config.num_tokens else None
        self.layers = nnx.List([self._make_layer(replace(build, layer=layer)) for layer in range(config.num_layers)])
        norm = LayerNorm(size, config.norm_eps, source=LAST_NORM, build=build) if config.last_norm else None
        self.last_norm = norm
        plain = config.plain_projector
        kind = LayerNorm if plain else RMSNorm
        self.merger = PatchMerger(
            size,
            config.merge,
            hidden_size,
            norm=kind(size * config.merge, 1e-5, source=f"{PROJECTOR}.layer_norm", build=build),
            joined=True,
            names=(f"{PROJECTOR}.linear_1", f"{PROJECTOR}.linear_2"),
            ffn_size=config.projector_size,
            activation=ACTIVATIONS["gelu"] if plain else relu_squared,
            bias=plain,
            build=build,
        )

    def _make_layer(self, build: Build) -> TowerLayer:
        """Return a new layer, number `build.layer` of the tower."""
        config, size, source = self.config, self.config.hidden_size, f"{LAYERS}.{{layer}}"
        first, second = (LayerNorm(size, config.norm_eps, source=f"{source}.norm{n}", build=build) for n in (1, 2))
        qkv = tuple(Source(f"{source}.attention.{name}_proj", size) for name in "qkv")
        out = f"{source}.attention.o_proj"
        attention = TowerAttention(size, config.num_heads, qkv=qkv, out=out, bias=config.bias, build=build)
        names, down = (("gate_proj", "up_proj"), "down_proj") if config.gated else (("fc1",), "fc2")
        mlp = TowerMLP(
            size,
            config.intermediate_size,
            up=[f"{source}.mlp.{name}" for name in names],
            down=f"{source}.mlp.{down}",
            activation=ACTIVATIONS[config.activation],
            build=build,
        )
        return TowerLayer((first, second), attention, mlp)

    def __call__(self, patches: jax.Array, columns: jax.Array) -> jax.Array:
        """Return the embeddings [P / merge, D] of patches f32[P, F]: `_embedded`, layers that attend within segments,
        the last norm if the tower has one, and the merger.

        An image's patches have its one frame first; the rest of F is ignored. Embeddings of learned tokens' rows, which
        attend like patches, are meaningless. columns: i32[C, P], those of config.columns, in order.
        """
        segment, *places = columns
        config = self.config
        with jax.named_scope("patches"):
            x = self._embedded(patches, *places)
        attend = partial(segment_attention, segment=segment, scale=(config.hidden_size // config.num_heads) ** -0.5)
        x = in_turn(self.layers, x, None, attend)
        with jax.named_scope("merger"):
            return self.merger(x if self.last_norm is None else self.last_norm(x))

    def _embedded(
        self, patches: jax.Array, kind: jax.Array, row: jax.Array, column: jax.Array, longer: jax.Array
    ) -> jax.Array:
        """Return the first layer's input [P, D of the tower]: projected patches with their positions, and learned
        tokens. kind, row, column: i32[P]. longer: i32[P], the longer side of each patch's image in patches.
        """
        config, size = self.config, self.config.hidden_size
        x = self.images(patches[:, : self.image_features])
        if self.videos is not None:
            x = jnp.where((kind == VIDEO)[:, None], self.videos(patches), x)
        positions = self.positions[...].reshape(-1, size)
        spots = stretched(positions, (config.side, config.side), (row, longer), (column, longer), linear=True)
        x = x + spots.astype(x.dtype)
        if self.tokens is None:
            return x
        tokens = self.tokens[...][jnp.clip(kind - FIRST_TOKEN, 0, config.num_tokens - 1)]
        return jnp.where((kind >= FIRST_TOKEN)[:, None], tokens, x)
