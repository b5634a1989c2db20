"""ESM-2 and ESM-1b (Lin et al. 2023, doi:10.1126/science.ade2574; Rives et al. 2021, doi:10.1073/pnas.2016239118):
encoders of proteins, whose tokens are amino acids.
"""

from __future__ import annotations

from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jaxengine.models.build import Build
from jaxengine.models.config.encoder import EncoderConfig
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.pooler import CLS, MEAN
from jaxengine.models.config.readers.hf import hf_architecture, read_head_dim
from jaxengine.models.config.rope import Rope
from jaxengine.models.families.bert import BASE
from jaxengine.models.families.roberta import RobertaModel
from jaxengine.models.layers.encoder import HIDDEN_ACT, EncoderEmbeddings, EncoderNames, encoder_fields
from jaxengine.models.params.source import CheckpointNames

# Ratio of tokens whose embeddings were 0 in training.
_DROPPED = 0.15 * 0.8
_CONTACTS = "contact_head.regression.weight", "contact_head.regression.bias"
_FREQUENCIES = "rotary_embeddings.inv_freq"


class EsmEmbeddings(EncoderEmbeddings):
    """EncoderEmbeddings in which, with `dropped_token`, the embedding of this token is 0, and those of the other tokens
    are scaled by (1 - 0.12) / (1 - r); r is the ratio of that token in the prompt.
    """

    def __init__(self, *args: Any, dropped_token: int | None, **names: Any):
        super().__init__(*args, **names)
        self.dropped_token = dropped_token

    def token_rows(self, token_ids: jax.Array, positions: jax.Array) -> jax.Array:
        x = super().token_rows(token_ids, positions)
        if self.dropped_token is None:
            return x
        kept, count = token_ids != self.dropped_token, len(token_ids)
        first = jnp.arange(count) - positions  # of the token's prompt
        kept_ratio = jnp.zeros(count).at[first].add(kept) / jnp.zeros(count).at[first].add(1.0)
        return x * jnp.where(kept, (1 - _DROPPED) / kept_ratio[first], 0.0)[:, None]


class EsmModel(RobertaModel):
    """Encoder with norms before a layer's parts, and rope or RoBERTa's learned positions, with a dense layer, tanh and
    scores of labels if it classifies.
    """

    names: ClassVar[EncoderNames] = RobertaModel.names._replace(
        attention_norm="attention.LayerNorm",
        mlp_norm="LayerNorm",
        embedding_norm="model.embeddings.layer_norm",
        last_norm="model.encoder.emb_layer_norm_after",
    )
    checkpoint_names: ClassVar[CheckpointNames] = RobertaModel.checkpoint_names._replace(
        prefixes=(("model.esm.", "model."),),
        unused_ends=(_FREQUENCIES, ".embeddings.position_ids", *_CONTACTS),
        frequencies=_FREQUENCIES,
    )

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        fields.require(is_decoder=False, is_folding_model=False)
        fields = fields.with_defaults(**BASE, max_position_embeddings=1026, layer_norm_eps=1e-12)
        kind = fields.text("position_embedding_type", "absolute")
        if kind not in ("absolute", "rotary"):
            raise fields.fail("position_embedding_type", "absolute or rotary")
        rope = Rope(read_head_dim(fields), fields.number("rope_theta", 10000.0)) if kind == "rotary" else None
        dropped = fields.integer("mask_token_id", minimum=0) if fields.boolean("token_dropout", False) else None
        encoder = EncoderConfig(
            "gelu",
            num_token_types=0,
            num_positions=0 if rope else fields.integer("max_position_embeddings"),
            first_position=0 if rope else cls.first_position(fields),
            embedding_norm=fields.boolean("emb_layer_norm_before", False),
            dropped_token=dropped,
        )
        return encoder_fields(fields, encoder, rope=rope, activation=HIDDEN_ACT, eps="layer_norm_eps")

    @classmethod
    def usual_pooling(cls, fields: ConfigFields) -> str:
        """Return CLS for a model that classifies sequences, MEAN for others. Raises ModelConfigError unless
        `architectures` is a list of one class name.
        """
        return CLS if hf_architecture(fields).endswith("ForSequenceClassification") else MEAN

    def make_embedding(self, build: Build) -> EsmEmbeddings:
        config, encoder = self.config, self.config.encoder
        assert encoder is not None
        norm = self.names.embedding_norm if encoder.embedding_norm else None
        options: dict[str, Any] = {"source": "model.embeddings", "norm": norm, "build": build}
        return EsmEmbeddings(config, encoder, dropped_token=encoder.dropped_token, **options)
