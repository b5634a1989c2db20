"""Vision towers of Qwen2-VL (Wang et al. 2024, arXiv:2409.12191) and Qwen2.5-VL (Bai et al. 2025, arXiv:2502.13923).

A patch covers two frames. Patches attend to those of the same frame, in Qwen2.5-VL mostly to those of a window of it.
A square of four patches becomes one embedding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import jax
from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.config.fields import MAX_INTERMEDIATE, ConfigFields, ModelConfigError
from jaxengine.models.config.tower import TowerConfig
from jaxengine.models.layers.base.activations import ACTIVATIONS, read_activation
from jaxengine.models.layers.base.norm import LayerNorm, NormClass, RMSNorm
from jaxengine.models.params.declare import Source
from jaxengine.models.vision.base.attention import UNIT, segment_attention, window_attention, window_block
from jaxengine.models.vision.base.layers import (
    Attend,
    PatchEmbedding,
    PatchMerger,
    TowerAttention,
    TowerLayer,
    TowerMLP,
    axial_rope,
    joined_qkv,
    read_axial_theta,
    rope_frequencies,
)

VISUAL = "visual"
LAYER = f"{VISUAL}.blocks.{{layer}}"
EPS = 1e-6


@dataclass(frozen=True, kw_only=True)
class Qwen2VLTowerConfig(TowerConfig):
    """Sizes of the tower. jaxengine.media.processors.qwen2_vl writes its `columns`.

    Attributes:
      hidden_size, intermediate_size, num_layers, num_heads: sizes of the tower's layers.
      activation: a name of jaxengine.models.layers.base.activations.ACTIVATIONS.
      patch_size, temporal_patch_size: pixels of a patch's side, and frames of a patch.
      spatial_merge_size: rows and columns of patches that become one row.
      rope_theta: base of the rotary frequencies.
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    activation: str
    patch_size: int
    temporal_patch_size: int
    spatial_merge_size: int
    rope_theta: float = 10000.0

    def make(self, hidden_size: int, build: Build) -> nnx.Module:
        return Qwen2VLTower(self, hidden_size, build)


@dataclass(frozen=True, kw_only=True)
class Qwen2_5VLTowerConfig(Qwen2VLTowerConfig):
    """Sizes of the tower, in addition to Qwen2-VL's.

    Attributes:
      window_size: rows and columns of patches in a window.
      full_layers: indices of layers whose patches attend to their whole frame, ascending.
      tokens_per_second: M-RoPE positions in time per second of video.
    """

    window_size: int
    full_layers: tuple[int, ...]
    tokens_per_second: float

    def make(self, hidden_size: int, build: Build) -> nnx.Module:
        return Qwen2_5VLTower(self, hidden_size, build)


class Qwen2_5OmniTowerConfig(Qwen2_5VLTowerConfig):
    """Sizes of the tower of Qwen2.5-Omni, which is Qwen2.5-VL's with queries, keys and values stored in separate
    modules.
    """

    def make(self, hidden_size: int, build: Build) -> nnx.Module:
        return Qwen2_5OmniTower(self, hidden_size, build)


def read_sizes(fields: ConfigFields, *, width: str = "hidden_size", **defaults: Any) -> dict[str, Any]:
    """Return the keyword arguments of a Qwen2VLTowerConfig, except intermediate_size, that Qwen2-VL, Qwen2.5-VL and
    Qwen3-VL read from the same fields of vision_config: `depth`, `num_heads`, `patch_size`, `temporal_patch_size` and
    `spatial_merge_size` (both 2 by default), `hidden_act` (gelu) and the base of rope.

    width: name of the field with the tower's hidden size. defaults: values for fields that are absent. Raises
    ModelConfigError for wrong fields, for other than three channels, and for heads whose number of elements is not a
    multiple of 4.
    """
    fields = fields.with_defaults(**{"spatial_merge_size": 2, "temporal_patch_size": 2, **defaults})
    channels = fields.integer("in_channels", None) or fields.integer("in_chans", 3)
    if channels != 3:
        raise ModelConfigError(f"in_channels of vision_config must be 3, got {channels}")
    patch, frames, merge = (
        fields.integer(name) for name in ("patch_size", "temporal_patch_size", "spatial_merge_size")
    )
    size, heads = fields.integer(width), fields.integer("num_heads")
    if size % heads or size // heads % 4:
        raise fields.fail(width, f"a multiple of 4 * num_heads = {4 * heads}")
    return {
        "num_features": channels * frames * patch * patch,
        "columns": ("segment", "row", "column"),
        "merge": merge * merge,
        "unit": math.lcm(UNIT, merge * merge),
        "hidden_size": size,
        "num_layers": fields.integer("depth"),
        "num_heads": heads,
        "activation": read_activation(fields, "hidden_act"),
        "patch_size": patch,
        "temporal_patch_size": frames,
        "spatial_merge_size": merge,
        "rope_theta": read_axial_theta(fields),
    }


def read_qwen2_vl(fields: ConfigFields, hidden_size: int) -> Qwen2VLTowerConfig:
    """Return the tower's configuration from a vision_config, for a text model of this hidden size. MLPs have
    `mlp_ratio` (default: 4) times the tower's width.

    Raises ModelConfigError for wrong fields, and if the field `hidden_size`, that of the text model, differs from the
    argument.
    """
    defaults = {"depth": 32, "embed_dim": 1280, "num_heads": 16, "patch_size": 14, "hidden_act": "quick_gelu"}
    sizes = read_sizes(fields, width="embed_dim", **defaults)
    if fields.integer("hidden_size", hidden_size) != hidden_size:
        raise fields.fail("hidden_size", f"that of the text, {hidden_size}")
    inner = int(sizes["hidden_size"] * fields.number("mlp_ratio", 4))
    if not 1 <= inner <= MAX_INTERMEDIATE:
        raise fields.fail("mlp_ratio", f"1 to {MAX_INTERMEDIATE}, times embed_dim {sizes['hidden_size']}")
    return Qwen2VLTowerConfig(intermediate_size=inner, **sizes)


def read_qwen2_5_vl(
    fields: ConfigFields, hidden_size: int, kind: type[Qwen2_5VLTowerConfig] = Qwen2_5VLTowerConfig
) -> Qwen2_5VLTowerConfig:
    """Return the configuration of Qwen2.5-VL's tower, of class `kind`, from a vision_config, for a text model of this
    hidden size. A window's side is `window_size` pixels (default: 112), rounded down to whole merged squares. Numbers
    in `fullatt_block_indexes` (default: 7, 15, 23, 31) that are not a layer's are left out. `tokens_per_second` is 4 by
    default.

    Raises ModelConfigError for wrong fields, and if `out_hidden_size` differs from hidden_size, or a window's side is
    not 1 to 64 patches.
    """
    sizes = read_sizes(fields, depth=32, num_heads=16, patch_size=14, hidden_act="silu")
    if fields.integer("out_hidden_size", hidden_size) != hidden_size:
        raise fields.fail("out_hidden_size", f"the hidden_size of the text, {hidden_size}")
    patch, merge = sizes["patch_size"], sizes["spatial_merge_size"]
    window = fields.integer("window_size", 112) // merge // patch * merge
    if not 1 <= window <= 64:
        raise fields.fail("window_size", f"1 to 64 times patch_size {patch}, in steps of {merge}")
    full = fields.value("fullatt_block_indexes", [7, 15, 23, 31])
    if not isinstance(full, list) or any(type(layer) is not int for layer in full):
        raise fields.fail("fullatt_block_indexes", "a list of layers")
    sizes |= {
        "columns": ("segment", "window", "row", "column"),
        "unit": math.lcm(UNIT, window_block(window * window), sizes["merge"]),
    }
    return kind(
        intermediate_size=fields.integer("intermediate_size", 3420),
        window_size=window,
        full_layers=tuple(sorted(layer for layer in set(full) if 0 <= layer < sizes["num_layers"])),
        tokens_per_second=fields.number("tokens_per_second", 4.0),
        **sizes,
    )


def read_qwen2_5_omni(fields: ConfigFields, hidden_size: int) -> Qwen2_5VLTowerConfig:
    """Return the configuration of Qwen2.5-Omni's tower from a vision_config: that of `read_qwen2_5_vl` as a
    Qwen2_5OmniTowerConfig. Raises the same errors.
    """
    return read_qwen2_5_vl(fields, hidden_size, Qwen2_5OmniTowerConfig)


class Qwen2VLTower(nnx.Module):
    """Vision tower of Qwen2-VL: layers with layer norms and MLPs of two matrices, and a merger.

    All matrices but that of the patches have biases. Queries and keys are rotated by row and column.

    qkv_names: modules of queries, keys and values: one for all, or one for each. merger_names: norm and products of the
    merger.
    """

    norm_class: ClassVar[NormClass] = LayerNorm
    patch_bias: ClassVar[bool] = False
    mlp_names: ClassVar[tuple[tuple[str, ...], str]] = (("fc1",), "fc2")
    qkv_names: ClassVar[tuple[str, ...]] = ("qkv",)
    merger_names: ClassVar[tuple[str, str, str]] = ("merger.ln_q", "merger.mlp.0", "merger.mlp.2")

    def __init__(self, config: Qwen2VLTowerConfig, hidden_size: int, build: Build):
        self.config = config
        size = config.hidden_size
        self.patches = PatchEmbedding(
            config.num_features, size, source=f"{VISUAL}.patch_embed.proj", bias=self.patch_bias, build=build
        )
        self.layers = nnx.List([self._make_layer(replace(build, layer=layer)) for layer in range(config.num_layers)])
        self.merger = self.make_merger(hidden_size, self.merger_names, build)

    def _make_layer(self, build: Build) -> TowerLayer:
        """Return a new layer, number `build.layer` of the tower."""
        config, size = self.config, self.config.hidden_size
        up, down = self.mlp_names
        return TowerLayer(
            (self._norm(f"{LAYER}.norm1", build), self._norm(f"{LAYER}.norm2", build)),
            TowerAttention(size, config.num_heads, qkv=self.qkv_sources(), out=f"{LAYER}.attn.proj", build=build),
            TowerMLP(
                size,
                config.intermediate_size,
                up=[f"{LAYER}.mlp.{name}" for name in up],
                down=f"{LAYER}.mlp.{down}",
                activation=ACTIVATIONS[config.activation],
                build=build,
            ),
        )

    def qkv_sources(self) -> tuple[Source, ...]:
        """Return the sources of queries, keys and values of a layer, in this order."""
        size, names = self.config.hidden_size, [f"{LAYER}.attn.{name}" for name in self.qkv_names]
        return joined_qkv(names[0], size) if len(names) == 1 else tuple(Source(name, size) for name in names)

    def make_merger(self, hidden_size: int, names: tuple[str, str, str], build: Build, *, joined: bool = False) -> Any:
        """Return a new merger of patches, [P, D of the tower] -> [P / merge, hidden_size].

        names: its norm and its two products. joined: whether the norm is over all merged patches at once.
        """
        size, merge = self.config.hidden_size, self.config.merge
        norm, *products = (f"{VISUAL}.{name}" for name in names)
        return PatchMerger(
            size,
            merge,
            hidden_size,
            norm=self._norm(norm, build, size * merge if joined else size),
            joined=joined,
            names=(products[0], products[1]),
            build=build,
        )

    def _norm(self, source: str, build: Build, size: int | None = None) -> nnx.Module:
        """Return a new norm, of class `norm_class`, over `size` elements; None stands for the tower's hidden size.
        source: its checkpoint module.
        """
        return self.norm_class(size or self.config.hidden_size, EPS, source=source, build=build)

    def __call__(self, patches: jax.Array, columns: jax.Array) -> jax.Array:
        """Return the embeddings [P / merge, num_parts * D] of patches f32[P, F]: `embed`, then `run` with rope by row
        and column.

        columns: i32[C, P], those of config.columns, in order.
        """
        named = dict(zip(self.config.columns, columns, strict=True))
        head_dim = self.config.hidden_size // self.config.num_heads
        with jax.named_scope("patches"):
            x = self.embed(patches, named)
        with jax.named_scope("rope_table"):
            # Rows and columns both have the frequencies of a head of half the size.
            freqs = rope_frequencies(head_dim // 2, self.config.rope_theta)
            turns = axial_rope(named["row"], named["column"], freqs, freqs)
        return self.run(x, turns, named)

    def embed(self, patches: jax.Array, columns: dict[str, jax.Array]) -> jax.Array:
        """Return the first layer's input, [P, D of the tower], for patches f32[P, F]: their projection here. columns:
        i32[P] by name, for subclasses.
        """
        del columns
        return self.patches(patches)

    def run(self, x: jax.Array, turns: tuple[jax.Array, jax.Array], columns: dict[str, jax.Array]) -> jax.Array:
        """Run the layers and the merger on x [P, D of the tower]; return the tower's embeddings [P / merge, num_parts *
        D].

        turns: cos and sin of the patches. columns: i32[P] by name.
        """
        for index, layer in enumerate(self.layers):
            with jax.named_scope(f"layer_{index}"):
                x = layer(x, turns, self.attend(index, columns))
        with jax.named_scope("merger"):
            return self.merger(x)

    def attend(self, layer: int, columns: dict[str, jax.Array]) -> Attend:
        """Return the function (q, k, v) -> attention output for layer number `layer`: here attention to the patches of
        the same segment. columns: i32[P] by name.
        """
        del layer
        return partial(segment_attention, segment=columns["segment"], scale=self._scale)

    @property
    def _scale(self) -> float:
        """Factor of the products of queries and keys: the number of elements of a head ** -0.5."""
        return (self.config.hidden_size // self.config.num_heads) ** -0.5


class Qwen2_5VLTower(Qwen2VLTower):
    """Vision tower of Qwen2.5-VL: Qwen2-VL's with RMS norms, gated MLPs and windows in most layers.

    Its patches must be sorted by window.
    """

    norm_class: ClassVar[NormClass] = RMSNorm
    mlp_names: ClassVar[tuple[tuple[str, ...], str]] = (("gate_proj", "up_proj"), "down_proj")
    config: Qwen2_5VLTowerConfig

    def attend(self, layer: int, columns: dict[str, jax.Array]) -> Attend:
        if layer in self.config.full_layers:
            return super().attend(layer, columns)
        return partial(
            window_attention,
            segment=columns["segment"],
            window=columns["window"],
            longest=self.config.window_size**2,
            scale=self._scale,
        )


class Qwen2_5OmniTower(Qwen2_5VLTower):
    """Vision tower of Qwen2.5-Omni: Qwen2.5-VL's with separate modules of queries, keys and values."""

    qkv_names: ClassVar[tuple[str, ...]] = ("q", "k", "v")
