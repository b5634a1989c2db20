"""ELECTRA's discriminator (Clark et al. 2020, arXiv:2003.10555): BERT's encoder, whose embeddings may be narrower,
and RemBERT, where they always are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import jax
from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.config.fields import MAX_HIDDEN, ConfigFields
from jaxengine.models.config.model_config import ModelConfig
from jaxengine.models.families.bert import NAMES, NORM_SUFFIXES, BertModel
from jaxengine.models.layers.base.embedding import Embedding
from jaxengine.models.layers.base.linear import Linear
from jaxengine.models.layers.base.mlp import gelu
from jaxengine.models.layers.encoder import EncoderEmbeddings, EncoderNames
from jaxengine.models.params.declare import Source
from jaxengine.models.params.source import CheckpointNames

_MASKED = "model.generator_predictions"
# transformers' sizes of a model whose config.json has none.
_SMALL = {"hidden_size": 256, "num_attention_heads": 4, "intermediate_size": 1024}


class ProjectedEmbeddings(nnx.Module):
    """Embeddings of `inner`, [T, E], projected to hidden states [T, D]."""

    def __init__(self, inner: EncoderEmbeddings, config: ModelConfig, *, source: str, build: Build):
        assert config.encoder is not None
        self.inner, own = inner, Source(source, config.hidden_size)
        # Replicated on every device, like the other tables of an encoder.
        axes = "embed", "labels"
        self.project = Linear(config.encoder.embedding_size, (own,), axes=axes, bias=True, build=build)

    def __call__(self, token_ids: jax.Array, positions: jax.Array) -> jax.Array:
        """Return hidden states [T, D] of tokens i32[T], whose ids include their types, at positions i32[T]."""
        return self.project(self.inner(token_ids, positions))

    @property
    def tokens(self) -> Embedding:
        """The table of tokens."""
        return self.inner.tokens


def read_embedding_size(fields: ConfigFields, name: str = "embedding_size", default: int = 128) -> int:
    """Return the field `name`, the width of embeddings; `default` if it is absent. Raises ModelConfigError unless it is
    from 1 to MAX_HIDDEN.
    """
    size: int = fields.integer(name, default)
    if size > MAX_HIDDEN:
        raise fields.fail(name, f"at most {MAX_HIDDEN}")
    return size


class ElectraModel(BertModel):
    """BERT's encoder, with a dense layer, GELU and scores of labels if it classifies."""

    masked_gelu: ClassVar[bool] = True
    names: ClassVar[EncoderNames] = NAMES._replace(
        dense="model.classifier.dense",
        labels="model.classifier.out_proj",
        masked=(f"{_MASKED}.dense", f"{_MASKED}.LayerNorm", "model.generator_lm_head.bias"),
    )
    label_activation: ClassVar[Callable[[jax.Array], jax.Array]] = staticmethod(gelu)
    checkpoint_names: ClassVar[CheckpointNames] = CheckpointNames(
        prefixes=(("model.electra.", "model."),),
        suffixes=NORM_SUFFIXES,
        heads=(
            "model.classifier.",
            "model.generator_predictions.",
            "model.generator_lm_head.",
            "model.discriminator_predictions.",
        ),
    )

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        fields = fields.with_defaults(**_SMALL)
        shape = super().read_hf(fields)
        return shape | {"encoder": shape["encoder"]._replace(embedding_size=read_embedding_size(fields))}

    def make_embedding(self, build: Build) -> Any:
        assert self.config.encoder is not None
        inner, size = super().make_embedding(build), self.config.encoder.embedding_size
        if size == self.config.hidden_size:
            return inner
        return ProjectedEmbeddings(inner, self.config, source="model.embeddings_project", build=build)


class RemBertModel(BertModel):
    """RemBERT (Chung et al. 2020, arXiv:2010.12821): BERT's encoder after projected embeddings."""

    # The head of its masked language model is not tied to the embeddings.
    names: ClassVar[EncoderNames] = NAMES._replace(masked=None)
    checkpoint_names: ClassVar[CheckpointNames] = BertModel.checkpoint_names._replace(
        prefixes=(("model.rembert.", "model."),)
    )

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        sizes = {"hidden_size": 1152, "num_hidden_layers": 32, "num_attention_heads": 18, "intermediate_size": 4608}
        shape = super().read_hf(fields.with_defaults(**sizes, vocab_size=250300))
        size = read_embedding_size(fields, "input_embedding_size", 256)
        return shape | {"encoder": shape["encoder"]._replace(embedding_size=size)}

    def make_embedding(self, build: Build) -> ProjectedEmbeddings:
        source = "model.encoder.embedding_hidden_mapping_in"
        return ProjectedEmbeddings(super().make_embedding(build), self.config, source=source, build=build)
