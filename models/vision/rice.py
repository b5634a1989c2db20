"""Vision tower of LLaVA-OneVision 1.5 (An et al. 2025, arXiv:2509.23661), RICE-ViT (Xie et al. 2025, arXiv:2507.20025):
Qwen2-VL's with patches of one frame, a norm before the layers, and a class token in each image, which patches see and
which is left out of the result.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.layers.base.norm import LayerNorm
from jaxengine.models.params.declare import ParamDecl, Source, declare
from jaxengine.models.vision.base.attention import UNIT, led_attention
from jaxengine.models.vision.base.layers import Attend
from jaxengine.models.vision.qwen2_vl import VISUAL, Qwen2VLTower, Qwen2VLTowerConfig, read_sizes

_LAYER_EPS = 1e-5


@dataclass(frozen=True, kw_only=True)
class RiceTowerConfig(Qwen2VLTowerConfig):
    """Sizes of the tower, in addition to Qwen2-VL's.

    Attributes:
      norm_eps: epsilon of the norms before the first layer and of the merger.
    """

    norm_eps: float

    def make(self, hidden_size: int, build: Build) -> nnx.Module:
        return RiceTower(self, hidden_size, build)


def read_rice(fields: ConfigFields, hidden_size: int) -> RiceTowerConfig:
    """Return the tower's configuration from a vision_config, for a text model of this hidden size: read_sizes', with
    patches of one frame, `intermediate_size` (default: 4096) and `layer_norm_eps` (1e-5).

    Raises ModelConfigError for wrong fields, for patches of several frames, and if `text_hidden_size`, the merger's
    output size, differs from the text model's.
    """
    fields = fields.with_defaults(hidden_size=1024, temporal_patch_size=1)
    fields.require(temporal_patch_size=1)
    if fields.integer("text_hidden_size", hidden_size) != hidden_size:
        raise fields.fail("text_hidden_size", f"the hidden_size of the text, {hidden_size}")
    sizes = read_sizes(fields, depth=24, num_heads=16, patch_size=14, hidden_act="gelu")
    return RiceTowerConfig(
        intermediate_size=fields.integer("intermediate_size", 4096),
        norm_eps=fields.number("layer_norm_eps", 1e-5),
        **sizes,
    )


class RiceTower(Qwen2VLTower):
    """Vision tower of LLaVA-OneVision 1.5. The class token of an image is computed once for each UNIT of its patches,
    so that the patches of a block of queries find it beside them; the copies are equal.
    """

    config: RiceTowerConfig

    def __init__(self, config: RiceTowerConfig, hidden_size: int, build: Build):
        super().__init__(config, hidden_size, build)
        size, pairs = config.hidden_size, config.hidden_size // config.num_heads // 2
        token, angles = Source(f"{VISUAL}.class_embedding", size), Source(f"{VISUAL}.class_pos_emb", 1)
        self.class_token = declare((size,), build.dtype, ParamDecl((None,), (token,), init_std=0.02))
        self.class_angles = declare((1, pairs), jnp.float32, ParamDecl((None, None), (angles,), init_std=1.0))
        self.first_norm = LayerNorm(size, config.norm_eps, source=f"{VISUAL}.pre_layernorm", build=build)

    def _norm(self, source: str, build: Build, size: int | None = None) -> nnx.Module:
        eps = self.config.norm_eps if source.startswith(f"{VISUAL}.merger.") else _LAYER_EPS
        return LayerNorm(size or self.config.hidden_size, eps, source=source, build=build)

    def run(self, x: jax.Array, turns: tuple[jax.Array, jax.Array], columns: dict[str, jax.Array]) -> jax.Array:
        count, leads = len(x), len(x) // UNIT
        angles = jnp.tile(self.class_angles[...], (leads, 1))
        turns = jnp.concatenate([turns[0], jnp.cos(angles)]), jnp.concatenate([turns[1], jnp.sin(angles)])
        x = jnp.concatenate([x, jnp.tile(self.class_token[...].astype(x.dtype), (leads, 1))])
        x, attend = self.first_norm(x), self.attend(0, columns)
        for index, layer in enumerate(self.layers):
            with jax.named_scope(f"layer_{index}"):
                x = layer(x, turns, attend)
        with jax.named_scope("merger"):
            return self.merger(x[:count])

    def attend(self, layer: int, columns: dict[str, jax.Array]) -> Attend:
        """Return the function (q, k, v) -> attention output, the same for each layer, of P patches followed by P / UNIT
        class tokens.
        """
        del layer
        return partial(led_attention, segment=columns["segment"], scale=self._scale)
