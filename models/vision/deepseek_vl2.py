"""Vision tower of DeepSeek-VL2 (Wu et al. 2024, arXiv:2412.10302): SigLIP over a whole image and its tiles, squares of
patches side by side, and an MLP. Learned embeddings follow each line, and stand between the whole and the tiles.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.config.fields import MAX_INTERMEDIATE, ConfigFields
from jaxengine.models.layers.base.activations import ACTIVATIONS
from jaxengine.models.layers.base.norm import LayerNorm
from jaxengine.models.vision.base.layers import PatchEmbedding
from jaxengine.models.vision.base.vit import (
    VitLayer,
    VitNames,
    VitTowerConfig,
    linear,
    read_vit,
    run_layers,
    table,
    vector,
)

TOWER, PROJECTOR = "vision", "projector"
POSITIONS, NEWLINE = f"{TOWER}.pos_embed", "image_newline"
SEPARATOR = "view_seperator"  # as checkpoints spell it
_MOST_FACTOR, _MOST_PRODUCTS = 8, 8


@dataclass(frozen=True, kw_only=True)
class DeepseekVL2TowerConfig(VitTowerConfig):
    """SigLIP with a projector of squares of patches. A unit's rows are those of its squares, line by line, then an end
    of each line, then what stands between the whole and the tiles; the last two are learned and read no features.

    Attributes:
      factor: patches along a side of the square that becomes one row. The last square of a line may have fewer, with
        zeros in place of the others.
      num_products: products of the projector.
      projector_size: outputs of all of them but the last.
    """

    factor: int
    num_products: int
    projector_size: int

    @property
    def lines(self) -> int:
        """Lines and columns of a unit's rows."""
        return -(-self.vit.grid // self.factor)

    @property
    def unused(self) -> tuple[str, ...]:
        return (f"{TOWER}.attn_pool.",)

    def make(self, hidden_size: int, build: Build) -> DeepseekVL2Tower:
        return DeepseekVL2Tower(self, hidden_size, build)


def read_deepseek_vl2(fields: ConfigFields, hidden_size: int) -> DeepseekVL2TowerConfig:
    """Return the vision tower's configuration from a config.json, for a text model of this hidden size: sizes of SigLIP
    from `vision_config` (`width`, `layers`, `heads`, `mlp_ratio`, `image_size` and `patch_size`, by default those of
    SigLIP-SO400M/14 for 384 pixels), those of the projector from `projector_config` (`depth`, `downsample_ratio` and
    `mlp_ratio`; by default 2, 2 and 1).

    Raises ModelConfigError for wrong fields, for another projector than downsample_mlp_gelu, a `depth` or
    `downsample_ratio` above the limits of this module, and for another order of an image's embeddings than the whole
    before the tiles.
    """
    fields.require(tile_tag="2D", global_view_pos="head")
    vision, projector = fields.part_or_empty("vision_config"), fields.part_or_empty("projector_config")
    vision.require(class_token=False)
    width = vision.integer("width", 1152)
    inner = int(width * vision.number("mlp_ratio", 3.7362))
    if not 1 <= inner <= MAX_INTERMEDIATE:
        raise vision.fail("mlp_ratio", f"1 to {MAX_INTERMEDIATE}, times width {width}")
    named = {
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": vision.integer("layers", 27),
        "num_attention_heads": vision.integer("heads", 16),
        "image_size": vision.integer("image_size", 384),
        "patch_size": vision.integer("patch_size", 14),
        "hidden_act": "gelu_pytorch_tanh",
        "layer_norm_eps": 1e-6,
    }
    vit = read_vit(ConfigFields(named))
    projector.require(projector_type="downsample_mlp_gelu", input_dim=width, n_embed=hidden_size, token_pooling=False)
    factor, depth = projector.integer("downsample_ratio", 2), projector.integer("depth", 2, minimum=2)
    if factor > _MOST_FACTOR:
        raise projector.fail("downsample_ratio", f"an integer from 1 to {_MOST_FACTOR}")
    if depth > _MOST_PRODUCTS:
        raise projector.fail("depth", f"an integer from 2 to {_MOST_PRODUCTS}")
    lines, merge = -(-vit.grid // factor), factor**2
    return DeepseekVL2TowerConfig(
        num_features=vit.num_features,
        columns=(),
        merge=merge,
        unit=merge * (lines * (lines + 1) + 1),
        vit=vit,
        factor=factor,
        num_products=depth,
        projector_size=hidden_size * projector.integer("mlp_ratio", 1),
    )


class DeepseekVL2Tower(nnx.Module):
    """Vision tower of DeepSeek-VL2.

    A call maps patches f32[P, F] and columns i32[C, P] to embeddings [P / merge, D].
    """

    def __init__(self, config: DeepseekVL2TowerConfig, hidden_size: int, build: Build):
        self.config, vit = config, config.vit
        size = vit.hidden_size
        source = f"{TOWER}.patch_embed.proj"
        self.patches = PatchEmbedding(vit.num_features, size, source=source, bias=True, build=build)
        self.positions = table(vit.num_patches, size, POSITIONS, build, flat=True)
        names = VitNames(f"{TOWER}.blocks", attention_norm="norm1", mlp_norm="norm2", attention="attn", out="proj")
        sources = [f"{names.layers}.{number}" for number in range(vit.num_layers)]
        self.layers = nnx.List([VitLayer(vit, source, names, build) for source in sources])
        self.norm = LayerNorm(size, vit.norm_eps, source=f"{TOWER}.norm", build=build)
        inner, count = config.projector_size, config.num_products
        sizes = [size * config.merge, *[inner] * (count - 1), hidden_size]
        # Between the products of a list there are activations, which count, too.
        self.products = nnx.List(
            [
                linear(sizes[number], f"{PROJECTOR}.layers.{2 * number}", sizes[number + 1], ("embed", "embed"), build)
                for number in range(count)
            ]
        )
        self.newline, self.separator = (vector(hidden_size, name, build) for name in (NEWLINE, SEPARATOR))

    def __call__(self, patches: jax.Array, columns: jax.Array) -> jax.Array:
        del columns  # there are none: all units are alike
        config, vit = self.config, self.config.vit
        units = patches.reshape(-1, config.unit, patches.shape[1])[:, : vit.num_patches]
        with jax.named_scope("patches"):
            x = self.patches(units.reshape(-1, patches.shape[1])).reshape(len(units), vit.num_patches, -1)
            x = (x + self.positions[...].reshape(vit.num_patches, -1)).reshape(-1, vit.hidden_size)
        x = self.norm(run_layers(self.layers, x, len(units), (vit.num_layers,))[0])
        with jax.named_scope("projector"):
            rows = self._projected(x.reshape(len(units), vit.grid, vit.grid, -1))
            ends = jnp.concatenate([jnp.tile(self.newline[...], (config.lines, 1)), self.separator[...][None]])
            ends = jnp.broadcast_to(ends, (len(units), *ends.shape))
            return jnp.concatenate([rows, ends], axis=1).reshape(-1, rows.shape[-1])

    def _projected(self, x: jax.Array) -> jax.Array:
        """Return the embeddings [U, L * L, D of the model] of states [U, G, G, D of the tower]: the products, with GELU
        between them, of each square's patches, element by element and in each row by row.
        """
        config, (units, grid, _, size) = self.config, x.shape
        lines, factor = config.lines, config.factor
        missing = lines * factor - grid
        x = jnp.pad(x, ((0, 0), (0, missing), (0, missing), (0, 0)))
        x = x.reshape(units, lines, factor, lines, factor, size).transpose(0, 1, 3, 5, 2, 4)
        x = x.reshape(units * lines * lines, -1)
        for number, product in enumerate(self.products):
            x = product(ACTIVATIONS["gelu"](x.astype(jnp.float32)).astype(x.dtype) if number else x)
        return x.reshape(units, lines * lines, -1)
