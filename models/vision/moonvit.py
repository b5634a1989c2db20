"""MoonViT, the vision tower of Kimi-VL (Kimi Team 2025, arXiv:2504.07491), of Kimi K3 and, with an axis for time,
of Kimi K2.5 (Kimi Team 2026).

Learned positions are stretched to an image's size, queries and keys are rotated by column and row, patches attend to
those of the same image, and a square of them becomes one embedding. In Kimi K2.5 patches attend to those of a few
frames of a video, and of a square in all of these the mean becomes one embedding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.tower import TowerConfig
from jaxengine.models.layers.base.mlp import gelu_tanh
from jaxengine.models.layers.base.norm import Identity, LayerNorm, RMSNorm
from jaxengine.models.vision.base.attention import UNIT, segment_attention
from jaxengine.models.vision.base.layers import (
    PatchEmbedding,
    PatchMerger,
    TowerAttention,
    TowerLayer,
    TowerMLP,
    axial_rope,
    in_turn,
    joined_qkv,
    read_axial_theta,
    rope_frequencies,
    stretched,
)
from jaxengine.models.vision.base.vit import table

TOWER, PROJECTOR = "vision_tower", "multi_modal_projector"
POSITIONS = f"{TOWER}.patch_embed.pos_emb.weight"
LAYER = f"{TOWER}.encoder.blocks.{{layer}}"
# torch's epsilon of norms, and MoonViT's base of rope.
EPS, THETA = 1e-5, 10000.0
RMS_EPS = float(np.finfo(np.float32).eps)  # of torch's RMS norm where none is given
_MOST_PLACES, _MOST_FRAMES = 1024, 16
# Names in files of Kimi K2.5, as published and as transformers writes them, of the sizes of Kimi-VL's tower.
_NAMES = {
    name: (f"vt_{name}", name)
    for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
} | {f"init_pos_emb_{axis}": (f"init_pos_emb_{axis}", f"pos_emb_{axis}") for axis in ("height", "width", "time")}


@dataclass(frozen=True, kw_only=True)
class MoonVitTowerConfig(TowerConfig):
    """Sizes of the tower. jaxengine.media.processors.grids writes its `columns`.

    Attributes:
      hidden_size, intermediate_size, num_layers, num_heads: sizes of the tower's layers.
      patch_size: pixels of a patch's side.
      temporal_patch_size: frames of a patch.
      spatial_merge_size: patches along a side of the square that becomes one embedding.
      sides: rows and columns of the learned positions.
      projector: names of the projector's norm and its two products.
      projector_eps: epsilon of this norm.
      most_frames: the most frames that attend to each other and become one; 1 for images alone.
      attention_size: elements of all heads of a patch; None for hidden_size.
      rms: whether norms are RMS norms, and the projector's one is of its results instead of its inputs.
      biases: whether the embedding of patches, attention, and MLPs have biases. The projector has them unless `rms`.
      linear: whether positions are interpolated linearly instead of by cubic convolution.
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    patch_size: int
    spatial_merge_size: int
    sides: tuple[int, int]
    projector: tuple[str, str, str] = (f"{PROJECTOR}.pre_norm", f"{PROJECTOR}.linear_1", f"{PROJECTOR}.linear_2")
    projector_eps: float = EPS
    most_frames: int = 1
    temporal_patch_size: int = 1
    attention_size: int | None = None
    rms: bool = False
    biases: tuple[bool, bool, bool] = (True, True, True)
    linear: bool = False

    @property
    def head_dim(self) -> int:
        """Elements of a head of a patch."""
        return (self.attention_size or self.hidden_size) // self.num_heads

    def make(self, hidden_size: int, build: Build) -> nnx.Module:
        return MoonVitTower(self, hidden_size, build)


def read_moonvit(fields: ConfigFields) -> MoonVitTowerConfig:
    """Return MoonViT's configuration from the config.json of Kimi-VL. Raises ModelConfigError for wrong fields, and for
    a vision_config of another model_type.
    """
    vision = fields.part_or_empty("vision_config")
    vision.require(model_type="moonvit")
    return _read_sizes(vision)


def read_moonvit_3d(fields: ConfigFields, hidden_size: int) -> MoonVitTowerConfig:
    """Return the configuration of Kimi K2.5's tower from its config.json, with published or transformers' field names.

    Up to `init_pos_emb_time` frames (2 to 16; default: 4) become one. hidden_size: size of the text model's hidden
    states. Raises ModelConfigError for wrong fields, for a setting that the tower does not have, if `text_hidden_size`
    differs from hidden_size, and if the projector's input size differs from the tower's.
    """
    vision = _named(fields)
    vision.require(
        hidden_act="gelu_pytorch_tanh",
        projector_hidden_act="gelu",
        merge_type="sd2_tpool",
        pos_emb_type="divided_fixed",
        video_attn_type="spatial_temporal",
        mm_projector_type="patchmerger",
        text_hidden_size=hidden_size,
    )
    if read_axial_theta(vision, THETA) != THETA:
        raise vision.fail("rope_parameters", f'a mapping with the rope_theta {THETA} and the rope_type "axial"')
    sizes = _read_sizes(vision)
    for owner, name in ((fields, "projection_hidden_size"), (vision, "mm_hidden_size")):
        if owner.integer(name, sizes.hidden_size) != sizes.hidden_size:
            raise owner.fail(name, f"{sizes.hidden_size}, hidden_size of vision_config")
    frames = vision.integer("init_pos_emb_time", 4)
    if not 2 <= frames <= _MOST_FRAMES:
        raise vision.fail("init_pos_emb_time", f"2 to {_MOST_FRAMES}")
    eps = fields.number("projection_layer_norm_eps", vision.number("projector_ln_eps", EPS))
    return replace(
        sizes,
        columns=(*sizes.columns, "frame", "frames"),
        projector=tuple(f"mm_projector.{name}" for name in ("pre_norm", "proj.0", "proj.2")),
        projector_eps=eps,
        most_frames=frames,
    )


def read_kimi_k3(fields: ConfigFields) -> MoonVitTowerConfig:
    """Return the configuration of Kimi K3's tower, for images alone, from its config.json. Sizes are those of MoonViT,
    by default 1024, MLPs of 4096 and 12 heads, which have `qkv_hidden_size` elements together (default: 1536). Biases
    are absent unless `patch_embed_proj_bias`, `attn_bias` or `linear_bias` says so; `projector_ln_eps` is EPS by
    default. Raises ModelConfigError for wrong fields, for heads whose number of elements is not a multiple of 4, for an
    `mm_hidden_size` that is not the hidden size, and for a setting that the tower does not have.
    """
    vision = _named(fields).with_defaults(hidden_size=1024, intermediate_size=4096, num_attention_heads=12)
    vision.require(
        activation_func="gelu_pytorch_tanh",
        projector_hidden_act="gelu",
        merge_type="sd2_tpool",
        mlp_type="mlp2",
        mm_projector_type="patchmergerv2",
        norm_type="rmsnorm",
        pos_emb_interpolation_mode="bilinear",
        pos_emb_type="divided_fixed",
        video_attn_type="spatial_temporal",
    )
    inner, heads = vision.integer("qkv_hidden_size", 1536), vision.integer("num_attention_heads")
    if inner % heads or inner // heads % 4:
        raise vision.fail("qkv_hidden_size", f"a multiple of 4 * num_attention_heads = {4 * heads}")
    sizes = _read_sizes(vision, inner)
    if vision.integer("mm_hidden_size", sizes.hidden_size) != sizes.hidden_size:
        raise vision.fail("mm_hidden_size", f"{sizes.hidden_size}, hidden_size of vision_config")
    patches, attention, mlp = (
        vision.boolean(name, False) for name in ("patch_embed_proj_bias", "attn_bias", "linear_bias")
    )
    return replace(
        sizes,
        attention_size=inner,
        rms=True,
        biases=(patches, attention, mlp),
        linear=True,
        projector=tuple(f"mm_projector.{name}" for name in ("post_norm", "proj.0", "proj.2")),
        projector_eps=vision.number("projector_ln_eps", EPS),
    )


def _named(fields: ConfigFields) -> ConfigFields:
    """Return the fields of vision_config, of none if it is absent, with those of _NAMES under Kimi-VL's names, too.
    Raises ModelConfigError if it is no mapping.
    """
    given = fields.mapping("vision_config") or {}
    raw = {ours: given[name] for ours, known in _NAMES.items() for name in known if given.get(name) is not None}
    return ConfigFields({**given, **raw})


def _read_sizes(vision: ConfigFields, attention_size: int | None = None) -> MoonVitTowerConfig:
    """Return the configuration of a tower for images from a vision_config, with Kimi-VL's defaults for absent fields:
    the usual sizes, `patch_size`, `merge_kernel_size`, `init_pos_emb_height` and `init_pos_emb_width`. attention_size:
    elements of all heads; None for hidden_size. Raises ModelConfigError for wrong fields, for heads whose number of
    elements is not a multiple of 4, for more than 1024 positions a side, and unless `merge_kernel_size` is two equal
    numbers from 1 to 8.
    """
    size, heads = vision.integer("hidden_size", 1152), vision.integer("num_attention_heads", 16)
    if attention_size is None and (size % heads or size // heads % 4):
        raise vision.fail("hidden_size", f"a multiple of 4 * num_attention_heads = {4 * heads}")
    merge = vision.value("merge_kernel_size", [2, 2])
    # By their kinds as well: 2.0 and true are equal to integers.
    if merge not in [[side, side] for side in range(1, 9)] or any(type(side) is not int for side in merge):
        raise vision.fail("merge_kernel_size", "a list of two equal numbers from 1 to 8")
    patch = vision.integer("patch_size", 14)
    sides = ["init_pos_emb_height", "init_pos_emb_width"]
    for name in sides:
        if vision.integer(name, 64) > _MOST_PLACES:
            raise vision.fail(name, f"1 to {_MOST_PLACES}")
    height, width = (vision.integer(name, 64) for name in sides)
    return MoonVitTowerConfig(
        num_features=3 * patch * patch,
        columns=("segment", "row", "column", "height", "width"),
        merge=merge[0] ** 2,
        unit=math.lcm(UNIT, merge[0] ** 2),
        hidden_size=size,
        intermediate_size=vision.integer("intermediate_size", 4304),
        num_layers=vision.integer("num_hidden_layers", 27),
        num_heads=heads,
        patch_size=patch,
        spatial_merge_size=merge[0],
        sides=(height, width),
    )


class MoonVitTower(nnx.Module):
    """MoonViT: learned positions, layers with norms and MLPs of two matrices, and a projector.

    Queries and keys are rotated by column and row.
    """

    def __init__(self, config: MoonVitTowerConfig, hidden_size: int, build: Build):
        self.config = config
        size, source = config.hidden_size, f"{TOWER}.patch_embed.proj"
        self.patches = PatchEmbedding(config.num_features, size, source=source, bias=config.biases[0], build=build)
        # A row of positions is a row of the matrix.
        height, width = config.sides
        self.positions = table(height, width * size, POSITIONS, build)
        self.layers = nnx.List([self._make_layer(replace(build, layer=layer)) for layer in range(config.num_layers)])
        self.last_norm = self._make_norm(f"{TOWER}.encoder.final_layernorm", build)
        norm, *products = config.projector
        eps = config.projector_eps
        self.projector = PatchMerger(
            size,
            config.merge,
            hidden_size,
            norm=Identity() if config.rms else LayerNorm(size, eps, source=norm, build=build),
            joined=False,
            names=(products[0], products[1]),
            bias=not config.rms,
            build=build,
        )
        self.projected_norm = RMSNorm(hidden_size, eps, source=norm, build=build) if config.rms else Identity()

    def _make_norm(self, source: str, build: Build) -> nnx.Module:
        """Return a new norm of patches, the checkpoint's module `source`."""
        size = self.config.hidden_size
        if self.config.rms:
            return RMSNorm(size, RMS_EPS, source=source, build=build)
        return LayerNorm(size, EPS, source=source, build=build)

    def _make_layer(self, build: Build) -> TowerLayer:
        """Return a new layer, number `build.layer` of the tower."""
        config, size = self.config, self.config.hidden_size
        before_attention, before_mlp = (self._make_norm(f"{LAYER}.norm{n}", build) for n in (0, 1))
        _, of_attention, of_mlp = config.biases
        attention = TowerAttention(
            size,
            config.num_heads,
            qkv=joined_qkv(f"{LAYER}.wqkv", config.attention_size or size),
            out=f"{LAYER}.wo",
            bias=of_attention,
            out_bias=of_attention,
            interleaved=True,
            inner=config.attention_size,
            build=build,
        )
        mlp = TowerMLP(
            size,
            config.intermediate_size,
            up=[f"{LAYER}.mlp.fc0"],
            down=f"{LAYER}.mlp.fc1",
            activation=gelu_tanh,
            bias=of_mlp,
            build=build,
        )
        return TowerLayer((before_attention, before_mlp), attention, mlp)

    def __call__(self, patches: jax.Array, columns: jax.Array) -> jax.Array:
        """Return the embeddings [P / merge, D] of patches f32[P, F]: interpolated learned positions and those of
        frames, layers with rope that attend within segments, means of frames, and the projector.

        columns: i32[C, P], those of config.columns, in order.
        """
        segment, row, column, height, width, *times = columns
        config, head_dim = self.config, self.config.head_dim
        with jax.named_scope("rope_table"):
            # Pairs take turns: one by the column, the next by the row, with the same frequency.
            freqs = rope_frequencies(head_dim // 2, THETA)
            turns = [
                each.reshape(len(each), 2, -1).swapaxes(1, 2).reshape(each.shape)
                for each in axial_rope(column, row, freqs, freqs)
            ]
        with jax.named_scope("patches"):
            x = self.patches(patches)
        with jax.named_scope("positions"):
            positions = self.positions[...].reshape(-1, config.hidden_size)
            added = stretched(positions, config.sides, (row, height), (column, width), linear=config.linear)
            if times:
                # Row 0 is for images, which have no time.
                moments = np.pad(sinusoids(config.most_frames, config.hidden_size), ((1, 0), (0, 0)))
                added += jnp.asarray(moments)[jnp.maximum(times[0], 0)]
            x = x + added.astype(x.dtype)
        attend = partial(segment_attention, segment=segment, scale=head_dim**-0.5)
        x = in_turn(self.layers, x, (turns[0], turns[1]), attend)
        x = self.last_norm(x)
        if times:
            with jax.named_scope("mean_of_frames"):
                x = self._mean_of_frames(x, times[1])
        with jax.named_scope("projector"):
            return self.projected_norm(self.projector(x))

    def _mean_of_frames(self, x: jax.Array, frames: jax.Array) -> jax.Array:
        """Return x [P, D] with the first of the squares of patches at one place in successive frames replaced by the
        mean of these squares, which follow each other in x.

        frames: i32[P], the number of these frames. The other squares are not used.
        """
        squares = x.astype(jnp.float32).reshape(-1, self.config.merge, x.shape[1])
        count = frames.reshape(-1, self.config.merge)[:, :1, None]
        ahead = jnp.pad(squares, ((0, self.config.most_frames - 1), (0, 0), (0, 0)))
        total = squares
        for further in range(1, self.config.most_frames):
            total += jnp.where(further < count, ahead[further : further + len(squares)], 0)
        return (total / jnp.maximum(count, 1)).astype(x.dtype).reshape(x.shape)


def sinusoids(count: int, size: int) -> np.ndarray:
    """Return f32[count, size]: the sines of positions 0 to count - 1 at the size / 2 frequencies of rope with base
    THETA, followed by their cosines.
    """
    angles = np.arange(count)[:, None] * rope_frequencies(size, THETA)
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=1).astype(np.float32)
