"""ModernVBERT (Teiletche et al. 2025, arXiv:2510.01149): ModernBERT with a vision tower over tiles, whose embeddings
are normed with those of tokens.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import jax

from jaxengine.models.build import Build
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.readers.hf import text_fields
from jaxengine.models.families.llava import FLATTENED
from jaxengine.models.families.modernbert import ModernBertModel, NormedEmbedding
from jaxengine.models.forward_batch import ForwardBatch
from jaxengine.models.params.source import CheckpointNames
from jaxengine.models.vision.idefics3 import CONNECTOR, TOWER, read_modernvbert


class _LateNorm(NormedEmbedding):
    """Token embedding, and the norm that follows once embeddings of images are in place."""

    def __call__(self, token_ids: jax.Array, positions: jax.Array) -> jax.Array:
        """Return the embeddings [T, D] of tokens i32[T] before the norm. positions: not used."""
        return self.tokens(token_ids)


class ModernVBertModel(ModernBertModel):
    """ModernBERT with Idefics3's vision tower."""

    checkpoint_names: ClassVar[CheckpointNames] = CheckpointNames(
        prefixes=tuple(
            (outer + old, new)
            for outer in ("", "model.")
            for old, new in (
                ("text_model.", "model."),
                (f"{TOWER}.{TOWER}.", f"{TOWER}."),
                (f"{TOWER}.", f"{TOWER}."),
                (f"{CONNECTOR}.", f"{CONNECTOR}."),
            )
        ),
        suffixes=((".modality_projection.weight", ".modality_projection.proj.weight"),),
        unused_parts=(f"{TOWER}.head.",),
        tower=(f"{TOWER}.", f"{CONNECTOR}."),
        flattened=FLATTENED,
        heads=ModernBertModel.checkpoint_names.heads,
    )

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        shared, tower = super().read_hf(text_fields(fields)), read_modernvbert(fields)
        return shared | {"tower": replace(tower, whole_prompt=shared["max_position_embeddings"])}

    def make_embedding(self, build: Build) -> NormedEmbedding:
        return _LateNorm(self.config, norm=self.norm_of("model.embeddings.norm", build), build=build)

    def first_input(self, x: jax.Array, batch: ForwardBatch) -> jax.Array:
        """Return the normed embeddings of a step's tokens and images, x [T, D]."""
        return self.embed.norm(x)
