"""RoBERTa (Liu et al. 2019, arXiv:1907.11692) and XLM-RoBERTa: BERT's encoder, with positions that begin after that of
the padding token.
"""

from __future__ import annotations

from typing import Any, ClassVar

from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.families.bert import NAMES, NORM_SUFFIXES, BertModel
from jaxengine.models.layers.encoder import EncoderNames
from jaxengine.models.params.source import CheckpointNames


class RobertaModel(BertModel):
    """BERT's layers, where a prompt's first position is the padding token's id plus one."""

    masked_gelu: ClassVar[bool] = True
    names: ClassVar[EncoderNames] = NAMES._replace(
        dense="model.classifier.dense",
        labels="model.classifier.out_proj",
        masked=("lm_head.dense", "lm_head.layer_norm", "lm_head.bias"),
    )
    checkpoint_names: ClassVar[CheckpointNames] = CheckpointNames(
        prefixes=(("model.roberta.", "model."), ("model.data2vec_text.", "model.")),
        suffixes=NORM_SUFFIXES,
        heads=("model.pooler.", "lm_head.", "model.lm_head.", "model.classifier."),
    )

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        return super().read_hf(fields.with_defaults(vocab_size=50265))

    @classmethod
    def first_position(cls, fields: ConfigFields) -> int:
        first = fields.integer("pad_token_id", 1, minimum=0) + 1
        if first >= (count := fields.integer("max_position_embeddings")):
            raise fields.fail("pad_token_id", f"at most max_position_embeddings - 2, {count - 2}")
        return first


class XLMRobertaModel(RobertaModel):
    """RoBERTa for a hundred languages (Conneau et al. 2019, arXiv:1911.02116)."""


class XLMRobertaXLModel(RobertaModel):
    """XLM-RoBERTa-XL (Goyal et al. 2021, arXiv:2105.00572): RoBERTa with norms before a layer's parts, and none after
    the embeddings.
    """

    names: ClassVar[EncoderNames] = RobertaModel.names._replace(
        attention_norm="attention.self_attn_layer_norm",
        mlp_norm="LayerNorm",
        embedding_norm=None,
        last_norm="model.encoder.LayerNorm",
    )

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        sizes = {"hidden_size": 2560, "num_hidden_layers": 36, "num_attention_heads": 32, "intermediate_size": 10240}
        others = {"max_position_embeddings": 514, "type_vocab_size": 1, "layer_norm_eps": 1e-5}
        return super().read_hf(fields.with_defaults(**sizes, **others, vocab_size=250880))


class RobertaPreLayerNormModel(RobertaModel):
    """RoBERTa with norms before a layer's parts, as fairseq's `encoder-normalize-before` trains it."""

    names: ClassVar[EncoderNames] = RobertaModel.names._replace(
        attention_norm="attention.LayerNorm", mlp_norm="intermediate.LayerNorm", last_norm="model.LayerNorm"
    )
    checkpoint_names: ClassVar[CheckpointNames] = RobertaModel.checkpoint_names._replace(
        prefixes=(("model.roberta_prelayernorm.", "model."),)
    )
