"""Vision tower of Llama 3.2 Vision (Grattafiori et al. 2024, arXiv:2407.21783): a transformer over all tiles of an
image, then one with gates, and the keys and values of the decoder's layers of cross-attention.

Further shape letters: U images, S positions of an image (those of all tiles, used or not, with a class token each).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from jaxengine.models.build import Build
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.layers.base.linear import Linear
from jaxengine.models.layers.base.norm import LayerNorm, RMSNorm
from jaxengine.models.params.declare import Source
from jaxengine.models.vision.base.layers import PatchEmbedding, in_turn
from jaxengine.models.vision.base.vit import VitConfig, VitMLP, VitTowerConfig, linear, read_vit, table, vector

TOWER, PROJECTOR = "vision_model", "multi_modal_projector"
CROSS = "cross_attn"
# transformers' defaults of fields that a file lacks.
_DEFAULTS: dict[str, Any] = {
    "hidden_size": 1280,
    "intermediate_size": 5120,
    "num_hidden_layers": 32,
    "num_global_layers": 8,
    "attention_heads": 16,
    "image_size": 448,
    "patch_size": 14,
    "hidden_act": "gelu",
    "norm_eps": 1e-5,
    "max_num_tiles": 4,
    "intermediate_layers_indices": [3, 7, 15, 23, 30],
    "vision_output_dim": 7680,
}
_EPS, _MAX_TILES, _MAX_LAYERS, _MOST_PATCHES = 1e-5, 16, 256, 1 << 16
# The number of positions of a tile is padded to a multiple of this. Patches attend to the padding.
_MULTIPLE = 8
# Queries whose scores exist at once.
_QUERIES = 512


def _tilings(most: int) -> list[tuple[int, int]]:
    """Return all (rows, columns) of at most `most` tiles, sorted."""
    sides = range(1, most + 1)
    return [(rows, columns) for rows in sides for columns in sides if rows * columns <= most]


@dataclass(frozen=True, kw_only=True)
class MllamaTowerConfig(VitTowerConfig):
    """Sizes of the tower. A unit is an image, with room for the most tiles.

    Attributes:
      num_global: layers of the second transformer.
      taken: numbers of layers of the first, before each of which hidden states are taken.
      max_tiles: most tiles of an image.
      layers: numbers of the decoder's layers with cross-attention.
      num_kv_heads, head_dim, text_eps: of these layers.
    """

    num_global: int
    taken: tuple[int, ...]
    max_tiles: int
    layers: tuple[int, ...]
    num_kv_heads: int
    head_dim: int
    text_eps: float

    @property
    def crossed_layers(self) -> tuple[int, ...]:
        return self.layers

    @property
    def tilings(self) -> list[tuple[int, int]]:
        """The (rows, columns) of an image's tiles, in the order of their numbers, which count from 1."""
        return _tilings(self.max_tiles)

    @property
    def tile_positions(self) -> int:
        """Positions of a tile that layers attend to: its patches, and a class token."""
        return self.vit.num_positions

    @property
    def num_tiles(self) -> tuple[int, ...]:
        """Tiles of each tiling by its number; 1 for number 0."""
        return (1, *(rows * columns for rows, columns in self.tilings))

    def make(self, hidden_size: int, build: Build) -> MllamaTower:
        return MllamaTower(self, hidden_size, build)


def read_mllama_tower(
    fields: ConfigFields, text: ConfigFields, layers: tuple[int, ...], *, num_kv_heads: int, head_dim: int
) -> MllamaTowerConfig:
    """Return the tower's configuration from the `vision_config` of a config.json and its text part's `rms_norm_eps`:
    read_vit's fields, with `attention_heads` for heads and `norm_eps`, and `num_global_layers`,
    `intermediate_layers_indices`, `max_num_tiles`, `supported_aspect_ratios` and `vision_output_dim`, with
    transformers' defaults.

    layers, num_kv_heads, head_dim: of the decoder's cross-attention. Raises ModelConfigError for wrong fields, for more
    than _MAX_TILES tiles or _MOST_PATCHES patches in all of them, for hidden states of layers that it lacks, for a list
    of aspect ratios that is not of all tilings, and for an output size that is not that of all states taken.
    """
    vision = fields.part_or_empty("vision_config", **_DEFAULTS)
    own = {"num_attention_heads": vision.integer("attention_heads"), "layer_norm_eps": vision.number("norm_eps")}
    vit = read_vit(vision.with_defaults(**own), has_class_token=True)
    most = vision.integer("max_num_tiles")
    if most > _MAX_TILES:
        raise vision.fail("max_num_tiles", f"an integer from 1 to {_MAX_TILES}")
    if most * vit.num_patches > _MOST_PATCHES:
        raise vision.fail("image_size", f"such that {most} tiles have at most {_MOST_PATCHES} patches")
    ratios = vision.value("supported_aspect_ratios", None)
    if ratios is not None and ratios != [list(each) for each in _tilings(most)]:
        raise vision.fail("supported_aspect_ratios", f"all tilings of at most {most} tiles, in their order, or absent")
    taken = vision.value("intermediate_layers_indices", _DEFAULTS["intermediate_layers_indices"])  # may be null
    if not isinstance(taken, list) or any(type(n) is not int or not 0 <= n < vit.num_layers for n in taken):
        raise vision.fail("intermediate_layers_indices", f"a list of layers from 0 to {vit.num_layers - 1}")
    if len(taken) > _MAX_LAYERS or vision.integer("vision_output_dim") != vit.hidden_size * (1 + len(taken)):
        raise vision.fail("vision_output_dim", f"hidden_size times {1 + len(taken)}, one for each of the states taken")
    count = most * vit.num_patches
    return MllamaTowerConfig(
        num_features=vit.num_features,
        columns=("tiling",),
        merge=count,
        unit=count,
        crosses=True,
        by_place=True,
        vit=vit,
        num_global=vision.integer("num_global_layers", minimum=0),
        taken=tuple(taken),
        max_tiles=most,
        layers=layers,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        text_eps=text.number("rms_norm_eps", 1e-5),
    )


def _opened(gate: nnx.Param) -> jax.Array:
    """Return the factor f32[1] of what a gate multiplies: its tanh."""
    return jnp.tanh(gate[...].astype(jnp.float32))


class MllamaTower(nnx.Module):
    """Vision tower of Llama 3.2 Vision."""

    def __init__(self, config: MllamaTowerConfig, hidden_size: int, build: Build):
        self.config = config
        vit, tiles = config.vit, config.max_tiles
        size, count, numbers = vit.hidden_size, vit.num_positions, len(config.num_tiles)
        name = f"{TOWER}.patch_embedding"
        self.patches = PatchEmbedding(vit.num_features, size, source=name, bias=False, build=build)
        self.class_token = vector(size, f"{TOWER}.class_embedding", build)
        before, after = (f"{TOWER}.{part}_tile_positional_embedding" for part in ("pre", "post"))
        self.before, self.after = (
            table(numbers, tiles * size, f"{source}.embedding.weight", build) for source in (before, after)
        )
        place = f"{TOWER}.gated_positional_embedding"
        self.positions = table(count, size, f"{place}.embedding", build)
        self.tile_positions = table(numbers, tiles * count * size, f"{place}.tile_embedding.weight", build)
        self.gates = nnx.List([vector(1, f"{source}.gate", build) for source in (before, after, place)])
        self.first_norm, self.last_norm = (
            LayerNorm(size, _EPS, source=f"{TOWER}.layernorm_{part}", build=build) for part in ("pre", "post")
        )
        self.layers = nnx.List(
            [_Layer(vit, f"{TOWER}.transformer.layers.{n}", build, gated=False) for n in range(vit.num_layers)]
        )
        self.more = nnx.List(
            [_Layer(vit, f"{TOWER}.global_transformer.layers.{n}", build, gated=True) for n in range(config.num_global)]
        )
        out = size * (1 + len(config.taken))
        self.project = linear(out, PROJECTOR, hidden_size, ("embed", "embed"), build)
        self.keys_values = nnx.List([_KeysValues(config, layer, hidden_size, build) for layer in config.layers])

    def __call__(self, patches: jax.Array, columns: jax.Array) -> jax.Array:
        """Return the keys and values of U images, [U, 2 L * S * K * H], for their patches f32[U * T * P, F]: for each
        of L layers with cross-attention the keys [S, K, H] and then the values, of this device's K heads alone.

        columns: i32[1, U * T * P], the number of an image's tiling at each of its patches.
        """
        config, vit = self.config, self.config.vit
        tiles, size, count = config.max_tiles, vit.hidden_size, vit.num_positions
        number = jnp.maximum(columns[0].reshape(-1, config.unit)[:, 0], 0)
        shape = len(number), tiles
        before, after, place = (_opened(gate) for gate in self.gates)
        x = self.patches(patches).reshape(*shape, vit.num_patches, size)
        x = _add(x, before * self.before[...][number].reshape(*shape, 1, size))
        first = jnp.broadcast_to(self.class_token[...], (*shape, 1, size))
        x = jnp.concatenate([first, x], axis=2)
        x = _add(x, (1 - place) * self.positions[...])
        x = self.first_norm(_add(x, place * self.tile_positions[...][number].reshape(*shape, count, size)))
        x = jnp.pad(x, ((0, 0), (0, 0), (0, -count % _MULTIPLE), (0, 0)))
        is_patch = jnp.arange(tiles) < jnp.asarray(config.num_tiles)[number][:, None]
        is_patch = (is_patch[..., None] & (jnp.arange(x.shape[2]) < count)).reshape(len(number), -1)
        whole, taken = (*shape, -1, size), []
        x = x.reshape(len(number), -1, size)
        for index, layer in enumerate(self.layers):
            with jax.named_scope(f"layer_{index}"):
                taken += [x.reshape(whole)[:, :, :count]] * config.taken.count(index)
                x = layer(x, is_patch)
        order = np.argsort(np.argsort(config.taken, kind="stable"), kind="stable")
        x = self.last_norm(x).reshape(whole)
        x = _add(x, after * self.after[...][number].reshape(*shape, 1, size)).reshape(len(number), -1, size)
        x = in_turn(self.more, x, is_patch, name="global_layer")
        parts = [x.reshape(whole)[:, :, :count]]
        if taken:  # element by element, the states of all layers side by side
            parts.append(jnp.stack([taken[index] for index in order], axis=-1).reshape(*shape, count, -1))
        with jax.named_scope("keys_and_values"):
            states = self.project(jnp.concatenate(parts, axis=-1).reshape(-1, size * (1 + len(taken))))
            made = [part for project in self.keys_values for part in project(states)]
            return jnp.concatenate([part.reshape(len(number), -1) for part in made], axis=1)


def _add(x: jax.Array, more: jax.Array) -> jax.Array:
    """Return x plus f32 `more`, in x's dtype."""
    return (x.astype(jnp.float32) + more).astype(x.dtype)


class _KeysValues(nnx.Module):
    """Projections to the keys, which are normed, and the values of one layer of cross-attention."""

    def __init__(self, config: MllamaTowerConfig, layer: int, hidden_size: int, build: Build):
        source, self.head_dim = f"model.layers.{layer}.{CROSS}", config.head_dim
        rows, copies = config.num_kv_heads * config.head_dim, max(1, build.mesh.model // config.num_kv_heads)
        self.k, self.v = (
            Linear(
                hidden_size,
                (Source(f"{source}.{name}_proj", rows, group=config.head_dim, repeat=copies),),
                axes=("embed", "heads"),
                build=build,
            )
            for name in "kv"
        )
        self.norm = RMSNorm(config.head_dim, config.text_eps, source=f"{source}.k_norm", build=build)

    def __call__(self, states: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return normed keys [U * S, K, H] and values [U * S, K * H] of projected states [U * S, D]."""
        return self.norm(self.k(states).reshape(len(states), -1, self.head_dim)), self.v(states)


class _Layer(nnx.Module):
    """Layer that computes x + gate(attention(norm(x))), then x + gate(mlp(norm(x))); without gates if not `gated`."""

    def __init__(self, vit: VitConfig, source: str, build: Build, *, gated: bool):
        size, self.head_dim = vit.hidden_size, vit.hidden_size // vit.num_heads
        self.norm1, self.norm2 = (
            LayerNorm(size, vit.norm_eps, source=f"{source}.{name}", build=build)
            for name in ("input_layernorm", "post_attention_layernorm")
        )
        parts = tuple(Source(f"{source}.self_attn.{name}_proj", size, group=self.head_dim) for name in "qkv")
        self.qkv = Linear(size, parts, axes=("embed", "heads"), build=build)
        self.out = linear(size, f"{source}.self_attn.o_proj", size, ("heads", "embed"), build, bias=False)
        self.mlp = VitMLP(vit, source=f"{source}.mlp", build=build)
        self.gates = nnx.List([vector(1, f"{source}.gate_{part}", build) for part in ("attn", "ffn")] if gated else [])

    def __call__(self, x: jax.Array, is_patch: jax.Array) -> jax.Array:
        """Return x + gate(attention(norm(x))), then x + gate(mlp(norm(x))), for x [U, S, D]. is_patch: bool[U, S];
        positions that are not a patch or class token of a used tile do not attend to each other, as published code has
        it, but to those that are, and those to all.
        """
        shape, flat = x.shape, x.reshape(-1, x.shape[2])
        with jax.named_scope("attention"):
            qkv = self.qkv(self.norm1(flat)).reshape(*shape[:2], -1, self.head_dim)
            q, k, v = jnp.split(qkv, 3, axis=2)
            o = lax.map(_attend, (q, k, v, is_patch)).reshape(len(flat), -1)
            flat = self._added(flat, self.out(o), 0)
        with jax.named_scope("mlp"):
            return self._added(flat, self.mlp(self.norm2(flat)), 1).reshape(shape)

    def _added(self, x: jax.Array, more: jax.Array, gate: int) -> jax.Array:
        """Return x + more, the latter multiplied by the tanh of the gate of this number if there are gates."""
        return x + more if not self.gates else _add(x, _opened(self.gates[gate]) * more.astype(jnp.float32))


def _attend(unit: Sequence[jax.Array]) -> jax.Array:
    """Return the attention output [S, N, H] of one image's q, k and v [S, N, H], given is_patch bool[S]: queries of
    patches see all keys, other queries only those of patches.
    """
    q, k, v, is_patch = unit
    blocks = -(-len(q) // _QUERIES)
    rows = -(-len(q) // blocks)
    padded = ((0, blocks * rows - len(q)), (0, 0), (0, 0))

    def block(own: tuple[jax.Array, jax.Array]) -> jax.Array:
        queries, used = own
        scores = jnp.einsum("snh,tnh->nst", queries, k, preferred_element_type=jnp.float32) * q.shape[2] ** -0.5
        scores = jnp.where(used[:, None] | is_patch, scores, jnp.finfo(jnp.float32).min)
        weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
        return jnp.einsum("nst,tnh->snh", weights, v, preferred_element_type=jnp.float32).astype(v.dtype)

    cut = jnp.pad(q, padded).reshape(blocks, rows, *q.shape[1:]), jnp.pad(is_patch, padded[0]).reshape(blocks, rows)
    return lax.map(block, cut).reshape(blocks * rows, *q.shape[1:])[: len(q)]
