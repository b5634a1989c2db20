"""Vision tower of LLaVA (Liu et al. 2023, arXiv:2310.03744): CLIP or SigLIP, and an MLP over its patches. LLaVA-NeXT
cuts images into tiles, and has a further embedding for the ends of lines of patches. ViP-LLaVA has a norm before the
MLP."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.layers.base.activations import ACTIVATIONS, read_activation
from jaxengine.models.layers.base.norm import LayerNorm
from jaxengine.models.vision.base.clip import CLIP, SIGLIP, ClipEncoder, read_clip_or_siglip
from jaxengine.models.vision.base.vit import VitTowerConfig, linear, read_layer_index, vector

# Prefixes in the model's names of tensors; some of a checkpoint's names have more before them.
TOWER, PROJECTOR, NEWLINE = "vision_tower", "multi_modal_projector", "image_newline"
# The positions of a unit that are used: all but the first one, which is the class token of CLIP, or all.
_STRATEGIES = ("default", "full")
# What leaves the patches of a unit alone; SigLIP has no class token.
_PATCHES = {CLIP: "default", SIGLIP: "full"}


@dataclass(frozen=True, kw_only=True)
class LlavaTowerConfig(VitTowerConfig):
    """CLIP or SigLIP with LLaVA's projector.

    Attributes:
      layers: for each hidden state used, the number of layers before it; the states are concatenated.
      projector_activation: activation of the projector's MLP.
      projector_bias: whether the projector's products have biases.
      projector_size: outputs of the projector's first product; 0 for the size of the embeddings.
      norm_eps: epsilon of the norm before the projector; None for no norm.
      num_newlines: positions after a unit's patches whose rows are the end-of-line embedding; their features are not
        read.
      with_class: whether the class token has a row, the first one of a unit. A unit then has a position after its
        patches, whose features are not read.
      drops_first: whether the row of a unit's first patch is not in the prompt.
    """

    layers: tuple[int, ...]
    projector_activation: str
    projector_bias: bool = True
    projector_size: int = 0
    norm_eps: float | None = None
    num_newlines: int = 0
    with_class: bool = False
    drops_first: bool = False

    @property
    def lines(self) -> int:
        """Lines and columns of a unit's rows."""
        return self.vit.grid

    @property
    def unused(self) -> tuple[str, ...]:
        layers = self.unused_layers(f"{TOWER}.encoder.layers", max(self.layers))
        return (f"{TOWER}.post_layernorm.", f"{TOWER}.head.", *layers)

    def make(self, hidden_size: int, build: Build) -> LlavaTower:
        return LlavaTower(self, hidden_size, build)


def read_llava(fields: ConfigFields) -> LlavaTowerConfig:
    """Return the vision tower's configuration from a config.json. `vision_feature_layer` (default: -2) may list several
    hidden states, of whose positions `vision_feature_select_strategy` "default" uses all but the first, "full" all.

    `multimodal_projector_bias` is true by default. Raises ModelConfigError for wrong fields.
    """
    kind, vit = read_clip_or_siglip(fields)
    strategy = fields.text("vision_feature_select_strategy", "default")
    if strategy not in _STRATEGIES:
        raise fields.fail("vision_feature_select_strategy", " or ".join(_STRATEGIES))
    with_class = kind == CLIP and strategy == "full"
    wanted = fields.value("vision_feature_layer", -2)
    listed = wanted if isinstance(wanted, list) and wanted else [wanted]
    return LlavaTowerConfig(
        num_features=vit.num_features,
        columns=(),
        merge=1,
        unit=vit.num_patches + with_class,
        vit=vit,
        layers=tuple(read_layer_index(fields, index, vit.num_layers) for index in listed),
        projector_activation=read_activation(fields, "projector_hidden_act"),
        projector_bias=fields.boolean("multimodal_projector_bias", True),
        with_class=with_class,
        drops_first=kind == SIGLIP and strategy == "default",
    )


def _read_patches(fields: ConfigFields) -> LlavaTowerConfig:
    """Return read_llava's configuration of a family whose units have a row for each patch. Raises ModelConfigError for
    wrong fields, and for a `vision_feature_select_strategy` that does not fit CLIP or SigLIP.
    """
    tower = read_llava(fields)
    if tower.with_class or tower.drops_first:
        kind = CLIP if tower.with_class else SIGLIP
        raise fields.fail("vision_feature_select_strategy", f"{_PATCHES[kind]!r} for a {kind}")
    return tower


def read_vip_llava(fields: ConfigFields) -> LlavaTowerConfig:
    """Return the configuration of ViP-LLaVA's tower: CLIP with five hidden states by default, and a norm before the
    projector, whose products always have biases.

    `vision_feature_layers`, as first published, counts where `vision_feature_layer` is absent. Raises ModelConfigError
    for wrong fields, and for another tower than CLIP.
    """
    vision = fields.part("vision_config")
    vision.require(model_type=CLIP)
    name = "vision_feature_layer"
    if not fields.has(name):
        fields = ConfigFields({**fields.raw, name: fields.value(f"{name}s", [-2, -5, -8, -11, 6])})
    return replace(_read_patches(fields), projector_bias=True, norm_eps=fields.number("projector_layernorm_eps", 1e-5))


def read_llava_next(fields: ConfigFields) -> LlavaTowerConfig:
    """Return the configuration of LLaVA-NeXT's tower: LLaVA's, in which a unit also has one position for the end of
    each line of patches. Raises ModelConfigError for wrong fields.
    """
    tower = _read_patches(fields)
    lines = tower.vit.grid
    return replace(tower, unit=tower.vit.num_patches + lines, num_newlines=lines)


class Projector(nnx.Module):
    """Projector from the tower's states to embeddings: linear_2(activation(linear_1(x))). inner: outputs of linear_1; 0
    for the size of the embeddings.
    """

    def __init__(
        self, in_size: int, hidden_size: int, activation: str, build: Build, *, bias: bool = True, inner: int = 0
    ):
        inner = inner or hidden_size
        self.up = linear(in_size, f"{PROJECTOR}.linear_1", inner, ("embed", "ffn"), build, bias=bias)
        self.down = linear(inner, f"{PROJECTOR}.linear_2", hidden_size, ("ffn", "embed"), build, bias=bias)
        self.activation = ACTIVATIONS[activation]

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return linear_2(activation(linear_1(x))) for x [R, in]: [R, D], with the activation in float32."""
        return self.down(self.activation(self.up(x, out_dtype=jnp.float32)).astype(x.dtype))


class LlavaTower(nnx.Module):
    """Vision tower of LLaVA: CLIP or SigLIP and a projector.

    A call maps patches f32[P, F] and columns i32[C, P] to embeddings [P / merge, D].
    """

    def __init__(self, config: LlavaTowerConfig, hidden_size: int, build: Build):
        self.config = config
        self.encoder = ClipEncoder(config.vit, config.layers, TOWER, build)
        size, bias = config.vit.hidden_size * len(config.layers), config.projector_bias
        norm = None
        if config.norm_eps is not None:
            norm = LayerNorm(size, config.norm_eps, source=f"{PROJECTOR}.projector_layernorm", build=build)
        self.norm = norm
        options: dict[str, Any] = {"bias": bias, "inner": config.projector_size}
        self.projector = Projector(size, hidden_size, config.projector_activation, build, **options)
        self.newline = vector(hidden_size, NEWLINE, build) if config.num_newlines else None

    def __call__(self, patches: jax.Array, columns: jax.Array) -> jax.Array:
        config = self.config
        if config.with_class:
            return self._project(self._with_class(patches))
        if self.newline is None:
            return self._project(self.encoded(patches, columns))
        units = patches.reshape(-1, config.unit, patches.shape[1])[:, : config.vit.num_patches]
        rows = self._project(self.encoded(units.reshape(-1, patches.shape[1]), columns))
        rows = rows.reshape(len(units), config.vit.num_patches, -1)
        ends = jnp.broadcast_to(self.newline[...], (len(units), config.num_newlines, rows.shape[-1]))
        return jnp.concatenate([rows, ends], axis=1).reshape(len(patches), -1)

    def encoded(self, units: jax.Array, columns: jax.Array) -> jax.Array:
        """Return the hidden states [U * N, D of the tower] of the patches of units, f32[U * N, F]. columns: i32[C, P],
        also of the ends of lines, for subclasses.
        """
        del columns
        return self.encoder(units)

    def _with_class(self, patches: jax.Array) -> jax.Array:
        """Return the hidden states [U * (N + 1), D of the tower] of units, f32[U * (N + 1), F], with that of the class
        token first.
        """
        units = patches.reshape(-1, self.config.unit, patches.shape[1])[:, : self.config.vit.num_patches]
        return self.encoder.states(units.reshape(-1, patches.shape[1])).reshape(len(patches), -1)

    def _project(self, states: jax.Array) -> jax.Array:
        """Return the embeddings [P, D of the model] of the encoder's states [P, D of the tower], which are normed first
        if there is a norm.
        """
        with jax.named_scope("projector"):
            return self.projector(states if self.norm is None else self.norm(states))
