"""Jina Embeddings v3 (Sturua et al. 2024, arXiv:2409.10173): XLM-RoBERTa with rope in place of learned positions."""

from __future__ import annotations

from typing import Any, ClassVar

from jaxengine.models.config.encoder import EncoderConfig, read_activation
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.hf import read_head_dim, read_rope
from jaxengine.models.layers.encoder import HIDDEN_ACT, EncoderNames, PostNormEncoder, encoder_fields
from jaxengine.models.params.source import CheckpointNames


class JinaEmbeddingsV3Model(PostNormEncoder):
    """Post-norm encoder with rope, with a tanh layer and scores of labels where it classifies."""

    names: ClassVar[EncoderNames] = EncoderNames(
        layer="model.encoder.layers.{layer}",
        qkv=("mixer.Wqkv",),
        out="mixer.out_proj",
        attention_norm="norm1",
        up="mlp.fc1",
        down="mlp.fc2",
        mlp_norm="norm2",
        dense="model.classifier.dense",
        labels="model.classifier.out_proj",
        embedding_norm="model.emb_ln",
    )
    checkpoint_names: ClassVar[CheckpointNames] = CheckpointNames(
        prefixes=(("model.roberta.", "model."),),
        heads=("model.pooler.", "model.lm_head.", "lm_head.", "model.classifier."),
    )

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        fields = fields.with_defaults(
            vocab_size=250002,
            hidden_size=1024,
            num_hidden_layers=24,
            num_attention_heads=16,
            intermediate_size=4096,
            max_position_embeddings=8194,
            layer_norm_eps=1e-5,
            rope_theta=20_000.0,
        )
        types = fields.integer("type_vocab_size", 1, minimum=0)
        encoder = EncoderConfig(read_activation(fields), num_token_types=types, num_positions=0)
        rope = read_rope(fields, read_head_dim(fields))
        return encoder_fields(fields, encoder, rope=rope, activation=HIDDEN_ACT, eps="layer_norm_eps")
