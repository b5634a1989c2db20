"""Images and videos in a step: embeddings that replace those of placeholder tokens, and the keys that these tokens see.

models/vision computes the embeddings.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jax import lax

from jaxengine.models.config.model_config import ModelConfig
from jaxengine.models.layers.base.section import Section


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Pictures(Section):
    """Section `ForwardBatch.sections["pictures"]`.

    Attributes:
      rows: [N, E], embeddings from towers (jaxengine.models.config.tower); E is D, or a multiple of it if layers add
        parts of their own. None in a stage that is not the first.
      index: i32[T], the row of each token, -1 for ordinary tokens, BOTH_WAYS for those without a row that attend to the
        tokens of images in both directions.
      part_layers, adds: see jaxengine.models.config.tower.TowerConfig.
    """

    rows: jax.Array | None
    index: jax.Array
    part_layers: tuple[int, ...] = field(default=(), metadata={"static": True})
    adds: bool = field(default=False, metadata={"static": True})

    def embed(self, x: jax.Array) -> jax.Array:
        """Return x [T, D] with the embeddings of placeholder tokens replaced by the first D elements of their image
        embeddings, or with these added to them if `adds`.
        """
        assert self.rows is not None, "the first stage has the rows of pictures"
        own = self._part(0, x)
        return jnp.where(self.index[:, None] >= 0, x + own if self.adds else own, x)

    def key_limits(self, config: ModelConfig, positions: jax.Array) -> jax.Array | None:
        """Return `picture_limits` of the tokens; None if the model has no tower or images are not attended to in both
        directions. If they are attended to across the text between them, return the limit of all positions for tokens
        of images, which attention clips to their sequence, and 0 for others.
        """
        if config.tower is None or not config.tower.attends_both_ways:
            return None
        if config.tower.attends_across:
            return jnp.where(self.index == -1, 0, jnp.iinfo(jnp.int32).max)
        with jax.named_scope("picture_limits"):
            return picture_limits(self.index, positions)

    def after_layer(self, count: int, x: jax.Array) -> jax.Array:
        """Return x [T, D], hidden states after `count` layers, plus the part of the image embeddings that is added
        there, at the tokens of images (DeepStack, Meng et al. 2024, arXiv:2406.04334); x itself if there is none.
        """
        part = count
        if self.part_layers:
            part = 1 + self.part_layers.index(count) if count in self.part_layers else None
        if self.rows is None or part is None or part * x.shape[1] >= self.rows.shape[1]:
            return x
        with jax.named_scope("deepstack"):
            return jnp.where(self.index[:, None] >= 0, x + self._part(part, x), x)

    def _part(self, part: int, x: jax.Array) -> jax.Array:
        """Return part number `part` of the tokens' image embeddings, [T, D] in x's dtype; the part of an arbitrary row
        for ordinary tokens.
        """
        assert self.rows is not None
        width = x.shape[1]
        return self.rows[jnp.maximum(self.index, 0), part * width : (part + 1) * width].astype(x.dtype)


def picture_limits(index: jax.Array, positions: jax.Array) -> jax.Array:
    """Return the position after the last key that each token sees, i32[T].

    For a token of an image or a prefix (index other than -1) it is the position after the last of the adjacent such
    tokens in this step; for others it is the position after their own. index, positions: i32[T]; index as in Pictures.
    Other tokens come between two images of a prompt; where the images of two prompts are adjacent in a step, attention
    clips the limit to the first prompt's keys.
    """
    tokens = jnp.arange(len(index), dtype=jnp.int32)
    behind = lax.cummin(jnp.where(index != -1, len(index), tokens), reverse=True)
    return positions + jnp.maximum(behind - tokens, 1)
