"""Vision tower of Qwen3-VL (Bai et al. 2025, arXiv:2511.21631).

It is Qwen2-VL's with learned positions, stretched to an image's size, and with embeddings of states from its middle
that the text model's first layers add (DeepStack, Meng et al. 2024, arXiv:2406.04334).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.vision.base.vit import read_deepstack, table
from jaxengine.models.vision.qwen2_vl import VISUAL, Qwen2VLTower, Qwen2VLTowerConfig, read_sizes


@dataclass(frozen=True, kw_only=True)
class Qwen3VLTowerConfig(Qwen2VLTowerConfig):
    """Sizes of the tower, in addition to Qwen2-VL's.

    Attributes:
      side: rows and columns of the learned positions.
      deepstack_layers: ascending indices of the layers whose states become further parts of an embedding.
      deepstack_mergers: number, in the checkpoint's list of mergers, of the merger of each of these layers.
      unused_mergers: numbers, in that list, of mergers of layers that the tower does not have.
    """

    # Checkpoint name of the list of mergers for DeepStack.
    merger_list: ClassVar[str] = "deepstack_merger_list"
    side: int
    deepstack_layers: tuple[int, ...]
    deepstack_mergers: tuple[int, ...]
    unused_mergers: tuple[int, ...] = ()

    @property
    def unused(self) -> tuple[str, ...]:
        return tuple(f"{VISUAL}.{self.merger_list}.{number}." for number in self.unused_mergers)

    def make(self, hidden_size: int, build: Build) -> nnx.Module:
        return Qwen3VLTower(self, hidden_size, build)


class Qwen3OmniTowerConfig(Qwen3VLTowerConfig):
    """Sizes of the tower of Qwen3-Omni, which is Qwen3-VL's with other checkpoint names of its mergers."""

    merger_list: ClassVar[str] = "merger_list"

    def make(self, hidden_size: int, build: Build) -> nnx.Module:
        return Qwen3OmniTower(self, hidden_size, build)


def read_qwen3_vl(
    fields: ConfigFields, hidden_size: int, kind: type[Qwen3VLTowerConfig] = Qwen3VLTowerConfig
) -> Qwen3VLTowerConfig:
    """Return the tower's configuration, of class `kind`, from a vision_config, for a text model of this hidden size.

    Raises ModelConfigError for wrong fields, and if `out_hidden_size` differs from hidden_size or
    `num_position_embeddings` (default: 2304) is not a square.
    """
    defaults = {"depth": 27, "hidden_size": 1152, "num_heads": 16, "patch_size": 16, "hidden_act": "gelu_pytorch_tanh"}
    sizes = read_sizes(fields, **defaults)
    if fields.integer("out_hidden_size", hidden_size) != hidden_size:
        raise fields.fail("out_hidden_size", f"the hidden_size of the text, {hidden_size}")
    positions = fields.integer("num_position_embeddings", 2304)
    if math.isqrt(positions) ** 2 != positions:
        raise fields.fail("num_position_embeddings", "a square")
    layers, used = read_deepstack(fields, [8, 16, 24], sizes["num_layers"])
    mergers = tuple(layers.index(layer) for layer in used)
    sizes |= {"columns": ("segment", "row", "column", "height", "width"), "num_parts": 1 + len(used)}
    return kind(
        intermediate_size=fields.integer("intermediate_size", 4304),
        side=math.isqrt(positions),
        deepstack_layers=used,
        deepstack_mergers=mergers,
        unused_mergers=tuple(number for number in range(len(layers)) if number not in mergers),
        **sizes,
    )


def read_qwen3_5(fields: ConfigFields, hidden_size: int) -> Qwen3VLTowerConfig:
    """Return the configuration of Qwen3.5's tower from a vision_config: Qwen3-VL's without DeepStack.
    `deepstack_visual_indexes` is ignored. Raises the same errors.
    """
    return read_qwen3_vl(ConfigFields({**fields.raw, "deepstack_visual_indexes": []}), hidden_size)


def read_qwen3_omni(fields: ConfigFields, hidden_size: int) -> Qwen3VLTowerConfig:
    """Return the configuration of Qwen3-Omni's tower from a vision_config: that of `read_qwen3_vl` as a
    Qwen3OmniTowerConfig. Raises the same errors.
    """
    return read_qwen3_vl(fields, hidden_size, Qwen3OmniTowerConfig)


class Qwen3VLTower(Qwen2VLTower):
    """Vision tower of Qwen3-VL: Qwen2-VL's with biases everywhere, learned positions and mergers for DeepStack."""

    patch_bias: ClassVar[bool] = True
    mlp_names: ClassVar[tuple[tuple[str, ...], str]] = (("linear_fc1",), "linear_fc2")
    merger_names: ClassVar[tuple[str, str, str]] = ("merger.norm", "merger.linear_fc1", "merger.linear_fc2")
    # Names of the parts of the mergers for DeepStack.
    deepstack_names: ClassVar[tuple[str, str, str]] = ("norm", "linear_fc1", "linear_fc2")
    config: Qwen3VLTowerConfig

    def __init__(self, config: Qwen3VLTowerConfig, hidden_size: int, build: Build):
        super().__init__(config, hidden_size, build)
        self.positions = table(config.side**2, config.hidden_size, f"{VISUAL}.pos_embed.weight", build)
        self.mergers = nnx.List([self._deepstack_merger(n, hidden_size, build) for n in config.deepstack_mergers])

    def _deepstack_merger(self, number: int, hidden_size: int, build: Build) -> Any:
        """Return a new merger for DeepStack, whose norm is over all patches that it merges.

        number: place in the checkpoint's list of mergers. hidden_size: size of the text model's hidden states.
        """
        norm, first, second = (f"{self.config.merger_list}.{number}.{name}" for name in self.deepstack_names)
        return self.make_merger(hidden_size, (norm, first, second), build, joined=True)

    def embed(self, patches: jax.Array, columns: dict[str, jax.Array]) -> jax.Array:
        x = self.patches(patches)
        with jax.named_scope("positions"):
            return x + self._stretched(columns).astype(x.dtype)

    def _stretched(self, columns: dict[str, jax.Array]) -> jax.Array:
        """Return the learned positions interpolated to images of other sizes, bilinearly with aligned corners: f32[P, D
        of the tower].

        columns: i32[P] by name, of which "row", "column", "height" and "width" are read.
        """
        side = self.config.side
        rows, row_shares = _between(columns["row"], columns["height"], side)
        places, place_shares = _between(columns["column"], columns["width"], side)
        index = (rows[:, :, None] * side + places[:, None, :]).reshape(-1, 4)
        shares = (row_shares[:, :, None] * place_shares[:, None, :]).reshape(-1, 4)
        return jnp.sum(self.positions[...][index].astype(jnp.float32) * shares[..., None], axis=1)

    def run(self, x: jax.Array, turns: tuple[jax.Array, jax.Array], columns: dict[str, jax.Array]) -> jax.Array:
        """Run the layers and the mergers on x [P, D of the tower]; return embeddings [P / merge, num_parts * D], the
        last layer's first, then those of the deepstack_layers.

        turns: cos and sin of the patches. columns: i32[P] by name.
        """
        parts = []
        for index, layer in enumerate(self.layers):
            with jax.named_scope(f"layer_{index}"):
                x = layer(x, turns, self.attend(index, columns))
            if index in self.config.deepstack_layers:
                with jax.named_scope("deepstack"):
                    parts.append(self.mergers[len(parts)](x))
        with jax.named_scope("merger"):
            return jnp.concatenate([self.merger(x), *parts], axis=-1)


class Qwen3OmniTower(Qwen3VLTower):
    """Vision tower of Qwen3-Omni: Qwen3-VL's with other checkpoint names of the mergers."""

    merger_names: ClassVar[tuple[str, str, str]] = ("merger.ln_q", "merger.mlp.0", "merger.mlp.2")
    deepstack_names: ClassVar[tuple[str, str, str]] = ("ln_q", "mlp.0", "mlp.2")


def _between(places: jax.Array, sizes: jax.Array, side: int) -> tuple[jax.Array, jax.Array]:
    """Return, for each patch, the two of `side` learned positions around it, i32[P, 2], and their weights, f32[P, 2],
    for linear interpolation with aligned corners.

    places: i32[P], indices of patches along sides of `sizes` i32[P] patches.
    """
    spot = places.astype(jnp.float32) * (side - 1) / jnp.maximum(sizes - 1, 1).astype(jnp.float32)
    low = jnp.floor(spot)
    both = low[:, None] + jnp.arange(2, dtype=jnp.float32)
    shares = jnp.maximum(1 - jnp.abs(spot[:, None] - both), 0.0)
    return jnp.clip(both.astype(jnp.int32), 0, side - 1), shares
