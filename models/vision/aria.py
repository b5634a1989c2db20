"""Vision tower of Aria (Li et al. 2024, arXiv:2410.05993): SigLIP over images of any shape, and queries that read a
crop each, the more of them the larger the square that crops are fitted into.

Further shape letters: U units, S patches of a unit with its padding, Q queries.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jaxengine.models.build import Build
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.layers.base.activations import ACTIVATIONS
from jaxengine.models.layers.base.linear import Linear
from jaxengine.models.layers.base.norm import LayerNorm
from jaxengine.models.params.declare import parts_of
from jaxengine.models.vision.base.clip import ClipEncoder
from jaxengine.models.vision.base.layers import tower_axis
from jaxengine.models.vision.base.vit import (
    VitTowerConfig,
    linear,
    read_by_queries,
    read_layer_index,
    read_vit,
    table,
)
from jaxengine.models.vision.idefics3 import DEFAULTS
from jaxengine.models.vision.llava import PROJECTOR, TOWER

_EPS = 1e-5
# Field of config.json with the number of queries of each number of patches, and its value where a file has none.
_QUERIES, _USUAL = "projector_patch_to_query_dict", {"1225": 128, "4900": 256}
_MOST_PATCHES, _MOST_QUERIES, _MOST_ENTRIES = 1 << 16, 1024, 64


@dataclass(frozen=True, kw_only=True)
class AriaTowerConfig(VitTowerConfig):
    """Sizes of the tower. A unit is a crop, with room for the most patches that one may have.

    Attributes:
      num_layers: number of layers that are used.
      queries: pairs (patches of a square with its padding, embeddings that such a square has), with fewer patches
        first.
    """

    num_layers: int
    queries: tuple[tuple[int, int], ...]

    @property
    def num_queries(self) -> int:
        """Q, the most embeddings of a crop."""
        return max(count for _, count in self.queries)

    @property
    def unused(self) -> tuple[str, ...]:
        return (f"{TOWER}.post_layernorm.", *self.unused_layers(f"{TOWER}.encoder.layers", self.num_layers))

    def make(self, hidden_size: int, build: Build) -> AriaTower:
        return AriaTower(self, hidden_size, build)


def read_aria_tower(fields: ConfigFields) -> AriaTowerConfig:
    """Return the tower's configuration from a config.json, with transformers' defaults and the hidden states that
    `vision_feature_layer` (default: -1) selects. Raises ModelConfigError for wrong fields, and for another model_type
    of vision_config.
    """
    vision = fields.part_or_empty("vision_config", **DEFAULTS)
    vision.require(model_type="idefics3_vision")
    vit = read_vit(vision)
    queries = _read_queries(fields)
    most = max(count for _, count in queries)
    merge = -(-queries[-1][0] // most)
    return AriaTowerConfig(
        num_features=vit.num_features,
        columns=("place",),
        merge=merge,
        unit=merge * most,
        vit=vit,
        num_layers=read_layer_index(fields, fields.value("vision_feature_layer", -1), vit.num_layers),
        queries=queries,
    )


def _read_queries(fields: ConfigFields) -> tuple[tuple[int, int], ...]:
    """Return the pairs (patches, queries) of `projector_patch_to_query_dict`, sorted; _USUAL if it is absent or null.
    Raises ModelConfigError for anything but a mapping of one to _MOST_ENTRIES such numbers, from 1 to their limits.
    """
    given = fields.value(_QUERIES, None)
    given, found = _USUAL if given is None else given, []
    if isinstance(given, Mapping) and 1 <= len(given) <= _MOST_ENTRIES:
        for patches, count in given.items():
            if str(patches).isascii() and str(patches).isdigit() and len(str(patches)) <= 5 and type(count) is int:
                found.append((int(patches), count))
    within = all(1 <= patches <= _MOST_PATCHES and 1 <= count <= _MOST_QUERIES for patches, count in found)
    if not found or len(dict(found)) != len(given) or not within:
        most = f"1 to {_MOST_PATCHES} patches to 1 to {_MOST_QUERIES} queries, with at most {_MOST_ENTRIES} entries"
        raise fields.fail(_QUERIES, f"a mapping of {most}")
    return tuple(sorted(found))


class AriaTower(nnx.Module):
    """Vision tower of Aria.

    A call maps patches f32[P, F] and columns i32[C, P] to embeddings [P / merge, D]: Q of each unit, of which those of
    crops with fewer patches are the first. "place" is the learned position of a patch; -1 for padding, which no patch
    and no query attends to.
    """

    def __init__(self, config: AriaTowerConfig, hidden_size: int, build: Build):
        self.config = config
        self.encoder = ClipEncoder(config.vit, (config.num_layers,), TOWER, build)
        self.projector = _Projector(config, hidden_size, build)

    def __call__(self, patches: jax.Array, columns: jax.Array) -> jax.Array:
        place, unit = columns[0], self.config.unit
        states = self.encoder(patches, place, unit)
        with jax.named_scope("projector"):
            return self.projector(states, place.reshape(-1, unit) >= 0)


class _Projector(nnx.Module):
    """Learned queries that attend to the patches of a crop, and an MLP. Queries, keys and values pass two matrices, of
    which only the second has a bias.
    """

    def __init__(self, config: AriaTowerConfig, hidden_size: int, build: Build):
        size, source = config.vit.hidden_size, f"{PROJECTOR}.cross_attn"
        self.head_dim, heads = size // config.vit.num_heads, tower_axis("heads", build)
        self.queries = table(config.num_queries, size, f"{PROJECTOR}.query", build)
        names = f"{source}.layer_norm", f"{source}.layer_norm_kv", f"{PROJECTOR}.layer_norm"
        self.query_norm, self.patch_norm, self.last_norm = (
            LayerNorm(size, _EPS, source=name, build=build) for name in names
        )
        whole: dict[str, Any] = {"axes": ("embed", "embed"), "build": build}
        self.first = nnx.List([linear(size, f"{source}.{name}_proj", size, bias=False, **whole) for name in "qkv"])
        parts = parts_of(f"{source}.multihead_attn.in_proj", size, size, size)
        self.second = nnx.List(
            [
                Linear(size, (part._replace(group=self.head_dim),), axes=("embed", heads), bias=True, build=build)
                for part in parts
            ]
        )
        self.out = linear(size, f"{source}.multihead_attn.out_proj", size, ("heads", "embed"), build)
        self.after = linear(size, f"{source}.linear", size, **whole)
        mlp = f"{PROJECTOR}.feed_forward"
        self.up = linear(size, f"{mlp}.linear_in", hidden_size, ("embed", "ffn"), build, bias=False)
        self.down = linear(hidden_size, f"{mlp}.linear_out", hidden_size, ("ffn", "embed"), build, bias=False)

    def __call__(self, states: jax.Array, is_key: jax.Array) -> jax.Array:
        """Return the embeddings [U * Q, D] of the crops with patch states [U * S, E]: what learned queries attend to in
        them, normed, after an MLP. is_key: bool[U, S], patches that are attended to; a crop without any gets the mean
        of its values.
        """
        own, patches = self.query_norm(self.queries[...]), self.patch_norm(states)
        q, k, v = (
            second(first(x)).reshape(len(x), -1, self.head_dim)
            for x, first, second in zip((own, patches, patches), self.first, self.second, strict=True)
        )
        k, v = (each.reshape(*is_key.shape, *each.shape[1:]) for each in (k, v))
        # Scores exist for one crop at a time.
        o = lax.map(lambda unit: read_by_queries(q, *unit), (k, v, is_key))
        x = self.last_norm(self.after(self.out(o.reshape(len(is_key) * len(q), -1))))
        inner = ACTIVATIONS["gelu_new"](self.up(x, out_dtype=jnp.float32)).astype(x.dtype)
        return self.down(inner)
