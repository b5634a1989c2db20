"""Vision tower of Granite Docling (IBM 2026): SigLIP over tiles, whose neighbouring patches become one embedding.

Hidden states after some layers become further parts of an embedding, for the first layers of the text model (DeepStack,
Meng et al. 2024, arXiv:2406.04334).
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.layers.base.norm import LayerNorm
from jaxengine.models.layers.base.scale import scaled
from jaxengine.models.vision.base.clip import ClipEncoder
from jaxengine.models.vision.base.vit import (
    VitTowerConfig,
    joined_neighbours,
    linear,
    read_deepstack,
    read_merge,
    read_vit,
)
from jaxengine.models.vision.idefics3 import CONNECTOR, TOWER

_COARSE = f"{CONNECTOR}.coarse"
_MERGERS = f"{_COARSE}.deepstack_mergers"
_MOST_FREQUENCY = 10000.0
_EPS = 1e-5
# transformers' defaults of fields that a file lacks.
_DEFAULTS = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "image_size": 512,
    "patch_size": 16,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
}
_OUT_SIZE, _SCALE, _DEEPSTACK = 1024, 4, [3, 7, 10]


@dataclass(frozen=True, kw_only=True)
class GraniteDoclingTowerConfig(VitTowerConfig):
    """SigLIP with Granite Docling's connector.

    Attributes:
      scale_factor: number of patches along a side of the square that becomes one embedding.
      deepstack_layers: ascending indices of the layers whose outputs become further parts of an embedding.
      num_mergers: number of mergers for DeepStack in the checkpoint, of which the first are of these layers.
      first_multiplier: factor of the first part of an embedding.
    """

    scale_factor: int
    deepstack_layers: tuple[int, ...]
    num_mergers: int
    first_multiplier: float = 1.0

    @property
    def unused(self) -> tuple[str, ...]:
        return tuple(f"{_MERGERS}.{number}." for number in range(len(self.deepstack_layers), self.num_mergers))

    def make(self, hidden_size: int, build: Build) -> nnx.Module:
        return GraniteDoclingTower(self, hidden_size, build)


def read_granite_docling(fields: ConfigFields, hidden_size: int, multiplier: float) -> GraniteDoclingTowerConfig:
    """Return the vision tower's configuration from a config.json, for a text model of this hidden size that multiplies
    embeddings by `multiplier`.

    Raises ModelConfigError for wrong fields, if `out_hidden_size` (default: 1024) differs from hidden_size, a multiple
    of 4, and if `scale_factor` (default: 4) does not divide the number of patches along a tile's side.
    """
    vision = fields.part("vision_config", **_DEFAULTS)
    if vision.integer("out_hidden_size", _OUT_SIZE) != hidden_size or hidden_size % 4:
        raise vision.fail("out_hidden_size", f"the hidden_size of the text, {hidden_size}, and a multiple of 4")
    vit = read_vit(vision)
    factor = read_merge(vision, "scale_factor", vision.integer("scale_factor", _SCALE), vit)
    layers, used = read_deepstack(vision, _DEEPSTACK, vit.num_layers)
    return GraniteDoclingTowerConfig(
        num_features=vit.num_features,
        columns=(),
        merge=factor**2,
        unit=vit.num_patches,
        num_parts=1 + len(used),
        vit=vit,
        scale_factor=factor,
        deepstack_layers=used,
        num_mergers=len(layers),
        first_multiplier=multiplier,
    )


class DeepStackMerger(nnx.Module):
    """Norm over the patches of a square side by side, and an MLP: linear_2(gelu(linear_1(norm(x)))). source: prefix of
    the names of its tensors.
    """

    def __init__(self, in_size: int, hidden_size: int, source: str, build: Build):
        self.norm = LayerNorm(in_size, _EPS, source=f"{source}.layer_norm", build=build)
        self.up = linear(in_size, f"{source}.linear_1", hidden_size, ("embed", "ffn"), build)
        self.down = linear(hidden_size, f"{source}.linear_2", hidden_size, ("ffn", "embed"), build)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return linear_2(gelu(linear_1(norm(x)))), [R, D], for squares x [R, in_size]."""
        inner = jax.nn.gelu(self.up(self.norm(x), out_dtype=jnp.float32), approximate=False)
        return self.down(inner.astype(x.dtype))


class GraniteDoclingTower(nnx.Module):
    """Vision tower of Granite Docling: SigLIP, a connector and mergers for DeepStack.

    A call maps patches f32[P, F] and columns i32[C, P] to embeddings [P / merge, num_parts * D].
    """

    def __init__(self, config: GraniteDoclingTowerConfig, hidden_size: int, build: Build):
        vit = config.vit
        self.config = config
        wanted = (vit.num_layers, *(layer + 1 for layer in config.deepstack_layers))
        self.encoder = ClipEncoder(vit, wanted, TOWER, build)
        joined = vit.hidden_size * config.merge
        self.last_norm, self.norm_in = (
            LayerNorm(vit.hidden_size, eps, source=source, build=build)
            for eps, source in ((vit.norm_eps, f"{TOWER}.post_layernorm"), (_EPS, f"{CONNECTOR}.ln_in"))
        )
        self.projection = linear(joined, f"{_COARSE}.projection", hidden_size, ("embed", "embed"), build, bias=False)
        self.mergers = nnx.List(
            DeepStackMerger(joined, hidden_size, f"{_MERGERS}.{number}", build)
            for number in range(config.num_parts - 1)
        )
        self.norm_between, self.norm_out = (
            LayerNorm(hidden_size, _EPS, source=f"{CONNECTOR}.{name}", build=build) for name in ("ln_mid", "ln_out")
        )
        self.fc2 = linear(hidden_size, f"{CONNECTOR}.mlp_fc2", hidden_size, ("embed", "embed"), build, bias=False)

    def __call__(self, patches: jax.Array, columns: jax.Array) -> jax.Array:
        del columns  # there are none: all units are alike
        last, *taps = jnp.split(self.encoder(patches), self.config.num_parts, axis=-1)
        with jax.named_scope("connector"):
            x = self.projection(self._joined(self.norm_in(self.last_norm(last))))
            places = positions_of_squares(self.config.vit.grid // self.config.scale_factor, x.shape[1])
            x = (x.reshape(-1, *places.shape) + places.astype(x.dtype)).reshape(x.shape)
            inner = jax.nn.gelu(self.norm_between(x).astype(jnp.float32), approximate=False)
            x = scaled(self.norm_out(self.fc2(inner.astype(x.dtype))), self.config.first_multiplier)
        with jax.named_scope("deepstack"):
            parts = [merger(self._joined(tap)) for merger, tap in zip(self.mergers, taps, strict=True)]
        return jnp.concatenate([x, *parts], axis=-1)

    def _joined(self, x: jax.Array) -> jax.Array:
        """Return the hidden states [P, D of the tower] of each square of patches side by side."""
        return joined_neighbours(x, self.config.vit.grid, self.config.scale_factor)


def positions_of_squares(side: int, size: int) -> np.ndarray:
    """Return the fixed positions of a tile's side x side embeddings, line by line, f32[side * side, size]: sines, then
    cosines, of the column times size / 4 frequencies that fall from 1 towards 1 / 10000, then those of the row.
    """
    frequencies = _MOST_FREQUENCY ** -(np.arange(size // 4) / (size // 4))
    rows, columns = np.divmod(np.arange(side * side), side)
    angles = [np.outer(place, frequencies) for place in (columns, rows)]
    return np.concatenate([turn(each) for each in angles for turn in (np.sin, np.cos)], axis=1).astype(np.float32)
