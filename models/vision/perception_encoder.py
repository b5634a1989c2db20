"""Vision tower of PerceptionLM (Cho et al. 2025, arXiv:2504.13180): the Perception Encoder (Bolya et al. 2025,
arXiv:2504.13181) as timm has it, whose queries and keys are rotated by column and row, and an MLP over its patches, of
squares of which the mean is taken.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.layers.base.norm import LayerNorm
from jaxengine.models.layers.base.rope import apply_rope
from jaxengine.models.params.declare import ParamDecl, Source, declare
from jaxengine.models.vision.base.layers import PatchEmbedding, axial_rope, joined_qkv, rope_frequencies
from jaxengine.models.vision.base.vit import (
    VitAttention,
    VitMLP,
    VitTowerConfig,
    joined_neighbours,
    read_vit,
    run_layers,
    table,
)
from jaxengine.models.vision.llava import TOWER, Projector

_THETA, _EPS = 10000.0, 1e-5


class _Kind(NamedTuple):
    """Defaults of one of timm's architectures: sizes, the learned token before the patches, the number of the first row
    and column, whether a norm follows the last layer, and initial scales of layers (None for layers without scales).
    """

    embed_dim: int
    depth: int
    img_size: int
    class_token: bool
    first_place: int
    norm: bool
    init_values: float | None
    mlp_ratio: float = 4.0


_GIGANTIC = 8960 / 1536
_KINDS = {
    "vit_pe_core_large_patch14_336": _Kind(1024, 24, 336, True, 1, True, None),
    "vit_pe_core_gigantic_patch14_448": _Kind(1536, 50, 448, False, 0, True, None, _GIGANTIC),
    "vit_pe_lang_large_patch14_448": _Kind(1024, 23, 448, True, 1, False, 0.1),
    "vit_pe_lang_gigantic_patch14_448": _Kind(1536, 47, 448, False, 0, False, 0.1, _GIGANTIC),
}
# Arguments of timm's classes that files may have.
_KNOWN = {"embed_dim", "depth", "img_size", "patch_size", "num_heads", "mlp_ratio", "init_values", "ref_feat_shape"}
_KNOWN |= {"global_pool", "use_post_transformer_norm"}


@dataclass(frozen=True, kw_only=True)
class PerceptionEncoderConfig(VitTowerConfig):
    """Sizes of the tower. A unit is a tile.

    Attributes:
      factor: side, in patches, of the squares that become an embedding.
      first_place: number of the first row and column.
      stretch: patches of the grid that positions are those of, to one of a unit's.
      scaled: whether layers scale what they add by learned vectors.
      norm: whether a norm follows the last layer.
    """

    factor: int
    first_place: int
    stretch: float
    scaled: bool
    norm: bool

    def make(self, hidden_size: int, build: Build) -> PerceptionEncoder:
        return PerceptionEncoder(self, hidden_size, build)


def read_perception_encoder(fields: ConfigFields) -> PerceptionEncoderConfig:
    """Return the tower's configuration from a config.json, whose `vision_config` names one of timm's architectures and
    arguments that differ from its own (`model_args`, whose names are _KNOWN).

    Raises ModelConfigError for wrong fields, for other architectures and arguments, for positions of a grid that is not
    a square (`ref_feat_shape`), for a `vision_use_cls_token` (default: true) that is not the architecture's, and if
    `projector_pooling_ratio` (default: 1) does not divide the patches of a side.
    """
    vision = fields.part("vision_config")
    name = vision.text("architecture")
    if name not in _KINDS:
        raise vision.fail("architecture", f"one of {', '.join(_KINDS)}")
    kind, given = _KINDS[name], vision.mapping("model_args") or {}
    if unknown := sorted(set(given) - _KNOWN):
        raise vision.fail("model_args", f"a mapping of {', '.join(sorted(_KNOWN))}; {unknown[0]} is not supported")
    args = vision.part_or_empty("model_args")
    args.require(global_pool="")
    size = args.integer("embed_dim", kind.embed_dim)
    sizes = {
        "hidden_size": size,
        "num_attention_heads": args.integer("num_heads", 16),
        "num_hidden_layers": args.integer("depth", kind.depth),
        "intermediate_size": int(size * args.number("mlp_ratio", kind.mlp_ratio)),
        "image_size": args.value("img_size", kind.img_size),
        "patch_size": args.integer("patch_size", 14),
        "hidden_act": "gelu",
        "layer_norm_eps": _EPS,
    }
    vit = read_vit(ConfigFields({"model_args": sizes}).part("model_args"), has_class_token=kind.class_token)
    if vit.head_size % 4:
        raise args.fail("embed_dim", "a multiple of four times num_heads")
    reference = args.value("ref_feat_shape", [vit.grid] * 2)
    if not isinstance(reference, list) or len(reference) != 2 or len(set(reference)) != 1:
        raise args.fail("ref_feat_shape", "two equal numbers of patches")
    if type(reference[0]) is not int or reference[0] < 1:
        raise args.fail("ref_feat_shape", "two equal numbers of patches")
    if fields.boolean("vision_use_cls_token", True) != vit.has_class_token:
        shown = str(vit.has_class_token).lower()
        raise fields.fail("vision_use_cls_token", f"{shown}, as the architecture has it")
    factor = fields.integer("projector_pooling_ratio", 1)
    if vit.grid % factor:
        raise fields.fail("projector_pooling_ratio", f"a divisor of the {vit.grid} patches of a tile's side")
    scales = given.get("init_values", kind.init_values)
    return PerceptionEncoderConfig(
        num_features=vit.num_features,
        columns=(),
        merge=factor**2,
        unit=vit.num_patches,
        vit=vit,
        factor=factor,
        first_place=kind.first_place,
        stretch=reference[0] / vit.grid,
        scaled=scales is not None,
        norm=args.boolean("use_post_transformer_norm", kind.norm),
    )


class _Rope(nnx.Module):
    """Rotation of the queries or keys of patches by column and row; a class token is not rotated. It has no weights."""

    def __init__(self, config: PerceptionEncoderConfig):
        self.config = config

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return x [U * S, N, H] rotated by the row and column of each patch; class tokens are not."""
        config, vit = self.config, self.config.vit
        places = np.indices((vit.grid, vit.grid)).reshape(2, -1) + config.first_place
        freqs = rope_frequencies(vit.head_size // 2, _THETA) * config.stretch
        # The first half of the pairs turns by the column.
        cos, sin = axial_rope(jnp.asarray(places[1]), jnp.asarray(places[0]), freqs, freqs)
        if vit.has_class_token:
            cos, sin = (jnp.pad(each, ((1, 0), (0, 0)), constant_values=own) for each, own in ((cos, 1.0), (sin, 0.0)))
        repeats = (len(x) // vit.num_positions, 1)
        return apply_rope(x, jnp.tile(cos, repeats), jnp.tile(sin, repeats), interleaved=True)


class _Layer(nnx.Module):
    """Layer that computes x + scale * attention(norm(x)), then x + scale * mlp(norm(x)), with two learned scales of D
    elements, or without them.
    """

    def __init__(self, config: PerceptionEncoderConfig, source: str, build: Build):
        vit, size, attention = config.vit, config.vit.hidden_size, f"{source}.attn"
        self.attention_norm = LayerNorm(size, vit.norm_eps, source=f"{source}.norm1", build=build)
        qkv, rope = joined_qkv(f"{attention}.qkv", size), _Rope(config)
        options: dict[str, Any] = {"qkv": qkv, "qk_norms": (rope, rope), "build": build}
        self.attention = VitAttention(vit, source=attention, out="proj", **options)
        self.mlp_norm = LayerNorm(size, vit.norm_eps, source=f"{source}.norm2", build=build)
        self.mlp = VitMLP(vit, source=f"{source}.mlp", build=build)
        decls = [ParamDecl((None,), (Source(f"{source}.gamma_{n}", size),), init_value=0.1) for n in (1, 2)]
        scales = [declare((size,), build.dtype, decl) if config.scaled else None for decl in decls]
        self.attention_scale, self.mlp_scale = scales

    def __call__(self, x: jax.Array, num_units: int) -> jax.Array:
        """Return x + scale * attention(norm(x)), then x + scale * mlp(norm(x)), for x [U * S, D] of U = num_units
        units, each of which attends to itself.
        """
        with jax.named_scope("attention"):
            x = x + _scaled(self.attention(self.attention_norm(x), num_units), self.attention_scale)
        with jax.named_scope("mlp"):
            return x + _scaled(self.mlp(self.mlp_norm(x)), self.mlp_scale)


def _scaled(x: jax.Array, scale: nnx.Param | None) -> jax.Array:
    """Return x multiplied by the learned `scale`, or x itself without one."""
    return x if scale is None else x * scale[...]


class PerceptionEncoder(nnx.Module):
    """Vision tower of PerceptionLM.

    A call maps patches f32[P, F] and columns i32[C, P] to embeddings [P / merge, D].
    """

    def __init__(self, config: PerceptionEncoderConfig, hidden_size: int, build: Build):
        self.config = config
        vit, size = config.vit, config.vit.hidden_size
        source = f"{TOWER}.patch_embed.proj"
        self.patches = PatchEmbedding(vit.num_features, size, source=source, bias=False, build=build)
        self.class_token = table(1, size, f"{TOWER}.cls_token", build, flat=True) if vit.has_class_token else None
        self.positions = table(vit.num_positions, size, f"{TOWER}.pos_embed", build, flat=True)
        self.first_norm = LayerNorm(size, vit.norm_eps, source=f"{TOWER}.norm_pre", build=build)
        names = [f"{TOWER}.blocks.{number}" for number in range(vit.num_layers)]
        self.layers = nnx.List([_Layer(config, name, build) for name in names])
        norm = LayerNorm(size, vit.norm_eps, source=f"{TOWER}.norm", build=build) if config.norm else None
        self.last_norm = norm
        self.projector = Projector(size, hidden_size, "gelu", build)

    def __call__(self, patches: jax.Array, columns: jax.Array) -> jax.Array:
        del columns  # there are none: all units are alike
        config, vit = self.config, self.config.vit
        num_units, size = len(patches) // vit.num_patches, vit.hidden_size
        with jax.named_scope("patches"):
            x = self.patches(patches).reshape(num_units, vit.num_patches, size)
            if self.class_token is not None:
                first = jnp.broadcast_to(self.class_token[...], (num_units, 1, size))
                x = jnp.concatenate([first, x], axis=1)
            x = self.first_norm((x + self.positions[...].reshape(-1, size)).reshape(-1, size))
        x = run_layers(self.layers, x, num_units, (vit.num_layers,))[0]
        x = x if self.last_norm is None else self.last_norm(x)
        x = x.reshape(num_units, -1, size)[:, vit.has_class_token :].reshape(len(patches), size)
        with jax.named_scope("projector"):
            x = self.projector(x)
            squares = joined_neighbours(x, vit.grid, config.factor).reshape(-1, config.merge, x.shape[1])
            return jnp.mean(squares, axis=1, dtype=jnp.float32).astype(x.dtype)
