"""RoFormer (Su et al. 2021, arXiv:2104.09864): BERT's encoder with rope in place of learned positions."""

from __future__ import annotations

from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jaxengine.models.build import Build
from jaxengine.models.config.encoder import EncoderConfig
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.pooler import Classifier
from jaxengine.models.config.readers.hf import read_head_dim
from jaxengine.models.config.rope import Rope
from jaxengine.models.families.bert import BASE, NAMES, NORM_SUFFIXES
from jaxengine.models.families.electra import ElectraModel, read_embedding_size
from jaxengine.models.layers.attention.attention import Attention, LayerPages, StepInputs
from jaxengine.models.layers.base.activations import read_activation
from jaxengine.models.layers.base.rope import apply_rope
from jaxengine.models.layers.classify import DenseLabelScores
from jaxengine.models.layers.encoder import HIDDEN_ACT, EncoderNames, encoder_fields
from jaxengine.models.params.source import CheckpointNames
from jaxengine.pallas_kernels.kv.pages import KVPages


class RotatedValuesAttention(Attention):
    """Attention whose values are rotated like its keys."""

    def attend(
        self,
        q: jax.Array,
        own: tuple[jax.Array, jax.Array] | None,
        kv: KVPages,
        pages: LayerPages,
        step: StepInputs,
    ) -> tuple[jax.Array, KVPages]:
        assert own is not None and step.rope is not None
        values = apply_rope(own[1], *step.rope, interleaved=True)
        # apply_rope puts the first elements of all pairs before the second ones; the projection after attention has
        # them in turns.
        values = jnp.stack(jnp.split(values, 2, axis=-1), axis=-1).reshape(values.shape)
        return super().attend(q, (own[0], values), kv, pages, step)


class RoFormerModel(ElectraModel):
    """Post-norm encoder whose rope rotates pairs of adjacent elements, after embeddings that may be narrower. If it
    classifies, it has a dense layer, the activation of its MLPs and scores of labels.
    """

    masked_gelu: ClassVar[bool] = False
    names: ClassVar[EncoderNames] = NAMES._replace(dense="model.classifier.dense", labels="model.classifier.out_proj")
    checkpoint_names: ClassVar[CheckpointNames] = CheckpointNames(
        prefixes=(("model.roformer.", "model."),),
        suffixes=NORM_SUFFIXES,
        unused_ends=(".encoder.embed_positions.weight",),  # sines and cosines
        heads=("model.pooler.", "model.cls.", "model.classifier."),
    )

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        fields.require(is_decoder=False)
        fields = fields.with_defaults(**BASE, vocab_size=50000, max_position_embeddings=1536, layer_norm_eps=1e-12)
        size = read_embedding_size(fields, default=fields.integer("hidden_size"))
        types = fields.integer("type_vocab_size", 2)
        encoder = EncoderConfig(read_activation(fields), types, num_positions=0, embedding_size=size)
        encoder = encoder._replace(rotates_values=fields.boolean("rotary_value", False))
        rope = Rope(read_head_dim(fields), interleaved=True)
        return encoder_fields(fields, encoder, rope=rope, activation=HIDDEN_ACT, eps="layer_norm_eps")

    def make_attention(self, layer: int, build: Build, **names: Any) -> Attention:
        assert self.config.encoder is not None
        attention_class = RotatedValuesAttention if self.config.encoder.rotates_values else Attention
        return attention_class(self.config.attention[layer], self.config.hidden_size, build=build, **names)

    def make_labels(self, classifier: Classifier, build: Build) -> DenseLabelScores:
        sources = self.names.dense, self.names.labels
        return DenseLabelScores(self.config.hidden_size, classifier, sources, activation=self.activation, build=build)
