"""Vision tower of Granite 4 Vision (IBM 2026): CLIP or SigLIP, whose hidden states after several layers queries read in
windows (Q-Former, Li et al. 2023, arXiv:2301.12597). What they find is added to the hidden states before several layers
of the text model (DeepStack, Meng et al. 2024, arXiv:2406.04334).

Shape letters: U units of G x G patches, S = G / 2 rows and columns of queries of a unit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.layers.base.norm import LayerNorm
from jaxengine.models.vision.base.clip import ClipEncoder
from jaxengine.models.vision.base.qformer import QueryConfig, QueryFormer, read_query_config
from jaxengine.models.vision.base.vit import VitConfig, VitTowerConfig, linear, read_layer_index, table, vector
from jaxengine.models.vision.llava import NEWLINE, TOWER, read_llava

LAYERWISE, SPATIAL = "layerwise_projectors", "spatial_projectors"
_EPS = 1e-6
_HALF = 2  # sides of a unit's queries are the patches' sides divided by this
_CORNERS = 4
_MOST_WINDOW = 64
# transformers' values without a qformer_config, and its defaults of fields that one lacks.
_ALONE = {"num_hidden_layers": 1, "intermediate_size": 3072, "cross_attention_frequency": 1}
_LACKING = {
    "num_hidden_layers": 12,
    "intermediate_size": 3072,
    "cross_attention_frequency": 2,
    "layer_norm_eps": 1e-12,
    "hidden_act": "gelu",
}


@dataclass(frozen=True, kw_only=True)
class Part:
    """One part of the embeddings.

    Attributes:
      source: prefix of its projector's tensors.
      depth: number of the tower's layers before the hidden state that it is made of.
      layer: number of the text model's layers before it is added.
      corner: of each square of 2 x 2 patches the one that a query begins with, line by line; None for their mean.
    """

    source: str
    depth: int
    layer: int
    corner: int | None


@dataclass(frozen=True, kw_only=True)
class Granite4TowerConfig(VitTowerConfig):
    """Sizes of the tower. A unit has room for the ends of its lines; their features are not read.

    Attributes:
      vit: sizes of the encoder.
      queries: sizes of the Q-Formers, which are alike.
      parts: parts of the embeddings, in the order of the text model's layers. One that is added before the first layer
        replaces what tokens have there; without it that is zeros.
      skipped: prefixes of the projectors' tensors that no part uses.
    """

    queries: QueryConfig
    parts: tuple[Part, ...]
    skipped: tuple[str, ...]

    @property
    def lines(self) -> int:
        """Lines and columns of a unit's rows."""
        return self.vit.grid // _HALF

    @property
    def unused(self) -> tuple[str, ...]:
        layers = self.unused_layers(f"{TOWER}.encoder.layers", max(part.depth for part in self.parts))
        return (f"{TOWER}.post_layernorm.", f"{TOWER}.head.", *layers, *self.skipped)

    def make(self, hidden_size: int, build: Build) -> nnx.Module:
        return Granite4Tower(self, hidden_size, build)


def read_granite4_vision(fields: ConfigFields, num_layers: int) -> Granite4TowerConfig:
    """Return the tower's configuration from a config.json. num_layers: number of the text model's layers.

    Raises ModelConfigError for wrong fields, for a downsample_rate other than one half, for windows that do not divide
    a unit, and if no layer of the text model is named.
    """
    fields.require(use_spatial_sampling=True, use_image_newline_parameter=True)
    vit = read_llava(fields).vit
    query, window = _read_rate(fields, vit)
    parts, skipped = _read_parts(fields, vit.num_layers, num_layers)
    layers = [part.layer for part in parts]
    side = vit.grid // _HALF
    first = () if layers[0] == 0 else (0,)
    return Granite4TowerConfig(
        num_features=vit.num_features,
        columns=(),
        merge=_HALF**2,
        unit=_HALF**2 * side * (side + 1),
        num_parts=len(first) + len(parts),
        part_layers=tuple(layers[1 - len(first) :]),
        vit=vit,
        queries=_read_queries(fields, vit.hidden_size, query**2, window**2),
        parts=parts,
        skipped=skipped,
    )


def _read_rate(fields: ConfigFields, vit: VitConfig) -> tuple[int, int]:
    """Return the sides of a window's queries and patches, the two numbers of `downsample_rate`. Raises ModelConfigError
    unless it is n/2n, where n is at least 1 and 2n is at most _MOST_WINDOW and divides the patches of a line.
    """
    query, slash, window = fields.text("downsample_rate").partition("/")
    right = bool(slash) and all(each.isdecimal() and 1 <= len(each) <= 3 for each in (query, window))
    right = right and _HALF * int(query) == int(window) and 0 < int(window) <= _MOST_WINDOW
    if not right or vit.grid % int(window):
        allowed = f"of the form n/2n, where 2n is at most {_MOST_WINDOW} and divides the {vit.grid} patches of a line"
        raise fields.fail("downsample_rate", allowed)
    return int(query), int(window)


def _read_parts(fields: ConfigFields, depth: int, num_layers: int) -> tuple[tuple[Part, ...], tuple[str, ...]]:
    """Return the parts of the embeddings in the order of the text model's layers, from `deepstack_layer_map`,
    `spatial_vision_layer` (default: -1) and `spatial_target_layers` (default: 12, 15, 18 and 21), and the prefixes of
    the tensors of projectors that no part uses.

    depth, num_layers: number of layers of the tower, and of the text model. As in transformers, of projectors with the
    same layer of the text model the last counts, and those with a layer that it lacks do not. Raises ModelConfigError
    for a field that is missing or wrong, and if no projector counts.
    """
    pairs = fields.value("deepstack_layer_map", None)
    pairs = [list(pair) if isinstance(pair, list | tuple) else pair for pair in pairs] if _is_list(pairs) else pairs
    if not _is_list(pairs) or any(not _are_integers(pair) or len(pair) != 2 for pair in pairs):
        raise fields.fail("deepstack_layer_map", "a list of pairs [vision layer, text layer]")
    targets = fields.value("spatial_target_layers", None)
    targets = [12, 15, 18, 21] if targets is None else targets
    if not _are_integers(targets) or len(targets) > _CORNERS:
        raise fields.fail("spatial_target_layers", f"a list of up to {_CORNERS} layers")
    last = read_layer_index(fields, fields.value("spatial_vision_layer", -1), depth, "spatial_vision_layer")
    named = [
        Part(
            source=f"{LAYERWISE}.{number}",
            depth=read_layer_index(fields, vision, depth, "deepstack_layer_map"),
            layer=layer,
            corner=None,
        )
        for number, (vision, layer) in enumerate(pairs)
    ]
    named += [Part(source=f"{SPATIAL}.{n}", depth=last, layer=layer, corner=n) for n, layer in enumerate(targets)]
    found = {part.layer: part for part in named if 0 <= part.layer < num_layers}
    if not found:
        raise fields.fail("deepstack_layer_map", f"with a layer of the text model, 0 to {num_layers - 1}")
    sources = [f"{LAYERWISE}.{number}" for number in range(len(pairs))] + [f"{SPATIAL}.{n}" for n in range(_CORNERS)]
    used = {part.source for part in found.values()}
    skipped = tuple(f"{source}." for source in sources if source not in used)
    return tuple(found[layer] for layer in sorted(found)), skipped


def _is_list(value: Any) -> bool:
    """Return whether a field's value is a list or a tuple."""
    return isinstance(value, list | tuple)


def _are_integers(value: Any) -> bool:
    """Return whether a field's value is a list of integers."""
    return _is_list(value) and all(type(each) is int for each in value)


def _read_queries(fields: ConfigFields, size: int, num_queries: int, window: int) -> QueryConfig:
    """Return the sizes of the Q-Formers from `qformer_config`, whose hidden size and heads follow from the tower's
    `size`, whatever the file says: size // 64 heads. num_queries, window: number of queries, and of patches, of a
    window. Without `qformer_config` its fields are _LACKING and _ALONE; fields that it lacks are those of _LACKING.
    Raises ModelConfigError for wrong fields, and for a `size` below 64 or that its heads do not divide.
    """
    given = fields.mapping("qformer_config")
    raw = ConfigFields({"qformer_config": _LACKING | _ALONE if given is None else given})
    own = raw.part("qformer_config", **_LACKING)
    own.require(model_type="blip_2_qformer", use_qformer_text_input=False)
    heads = size // 64
    if not heads or size % heads:
        allowed = "64 or more and divisible by hidden_size // 64, its heads, for qformer_config"
        raise fields.part("vision_config").fail("hidden_size", allowed)
    return read_query_config(own, size, heads, window, num_queries)


def _in_windows(x: jax.Array, window: int) -> jax.Array:
    """Return x [U, R, R, D], rows of units line by line, as windows [U * (R / window)**2, window**2, D]."""
    count = x.shape[1] // window
    split = x.reshape(len(x), count, window, count, window, x.shape[3])
    return split.swapaxes(2, 3).reshape(-1, window * window, x.shape[3])


def _in_lines(x: jax.Array, lines: int) -> jax.Array:
    """Return windows x [U * windows, window**2, D] as rows of units line by line, [U, lines**2, D]."""
    window = round(x.shape[1] ** 0.5)
    count = lines // window
    split = x.reshape(-1, count, count, window, window, x.shape[2]).swapaxes(2, 3)
    return split.reshape(-1, lines * lines, x.shape[2])


class WindowProjector(nnx.Module):
    """Projector of one part: queries, each of which begins with a square of 2 x 2 patches, read their window."""

    def __init__(self, config: Granite4TowerConfig, part: Part, hidden_size: int, build: Build):
        size, source, queries = config.vit.hidden_size, part.source, config.queries
        self.queries, self.lines, self.corner = queries, config.lines, part.corner
        self.norm = LayerNorm(size, _EPS, source=f"{source}.norm", build=build)
        self.query = table(queries.num_queries, size, f"{source}.query", build, flat=True)
        self.positions = table(queries.window, size, f"{source}.image_positions", build, flat=True)
        self.qformer = QueryFormer(queries, size, f"{source}.qformer", build)
        self.output = linear(size, f"{source}.out_linear", hidden_size, ("embed", "embed"), build)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return the rows [U, S * S, D of the model] of hidden states x [U, G * G, D of the tower], normed: learned
        queries plus each square's mean, or its patch at `corner`, read their windows.
        """
        queries, size, side = self.queries, x.shape[2], self.lines
        x = self.norm(x)
        squares = x.reshape(len(x), side, _HALF, side, _HALF, size)
        if self.corner is None:
            first = squares.astype(jnp.float32).mean(axis=(2, 4)).astype(x.dtype)
        else:
            first = squares[:, :, self.corner // _HALF, :, self.corner % _HALF]
        query = self.query[...].reshape(queries.num_queries, size)
        positions = self.positions[...].reshape(queries.window, size)
        window = round(queries.window**0.5)
        windows = _in_windows(x.reshape(len(x), _HALF * side, _HALF * side, size), window) + positions
        y = _in_lines(self.qformer(query + _in_windows(first, window // _HALF), windows), side)
        return self.output(y.reshape(-1, size)).reshape(len(x), side * side, -1)


class Granite4Tower(nnx.Module):
    """Vision tower of Granite 4 Vision.

    A call maps patches f32[P, F] and columns i32[C, P] to embeddings [P / merge, num_parts * D].
    """

    def __init__(self, config: Granite4TowerConfig, hidden_size: int, build: Build):
        self.config = config
        self.depths = tuple(sorted({part.depth for part in config.parts}))
        self.encoder = ClipEncoder(config.vit, self.depths, TOWER, build)
        self.newline = vector(hidden_size, NEWLINE, build)
        self.projectors = nnx.List([WindowProjector(config, part, hidden_size, build) for part in config.parts])

    def __call__(self, patches: jax.Array, columns: jax.Array) -> jax.Array:
        del columns  # there are none: all units are alike
        config = self.config
        units = patches.reshape(-1, config.unit, patches.shape[1])[:, : config.vit.num_patches]
        states = self.encoder(units.reshape(-1, patches.shape[1]))
        states = states.reshape(len(units), config.vit.num_patches, len(self.depths), -1)
        ends = jnp.broadcast_to(self.newline[...], (len(units), config.lines, self.newline.shape[0]))
        parts = []
        for part, projector in zip(config.parts, self.projectors, strict=True):
            with jax.named_scope(f"projector_{part.layer}"):
                rows = projector(states[:, :, self.depths.index(part.depth)])
            parts.append(jnp.concatenate([rows, ends.astype(rows.dtype)], axis=1))
        if len(parts) < config.num_parts:
            parts.insert(0, jnp.zeros_like(parts[0]))
        return jnp.concatenate(parts, axis=-1).reshape(len(patches) // config.merge, -1)
