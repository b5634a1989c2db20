"""RoBERTa (Liu et al. 2019, arXiv:1907.11692) and XLM-RoBERTa: BERT's encoder, with positions that begin after that of
the padding token.
"""

from __future__ import annotations

from typing import Any, ClassVar

from jaxengine.models.config.fields import ConfigFields, ModelConfigError
from jaxengine.models.families.bert import NAMES, BertModel
from jaxengine.models.layers.encoder import EncoderNames
from jaxengine.models.params.source import CheckpointNames


class RobertaModel(BertModel):
    """BERT's layers, where a prompt's first position is the padding token's id plus one."""

    names: ClassVar[EncoderNames] = NAMES._replace(
        dense="model.classifier.dense",
        labels="model.classifier.out_proj",
        masked=("lm_head.dense", "lm_head.layer_norm", "lm_head.bias"),
    )
    checkpoint_names: ClassVar[CheckpointNames] = CheckpointNames(
        prefixes=(("model.roberta.", "model."),),
        heads=("model.pooler.", "lm_head.", "model.lm_head.", "model.classifier."),
    )

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        return super().read_hf(fields.with_defaults(vocab_size=50265))

    @classmethod
    def first_position(cls, fields: ConfigFields) -> int:
        first = fields.integer("pad_token_id", 1, minimum=0) + 1
        if first >= fields.integer("max_position_embeddings"):
            raise ModelConfigError("pad_token_id must leave positions behind it, below max_position_embeddings - 1")
        return first


class XLMRobertaModel(RobertaModel):
    """RoBERTa for a hundred languages (Conneau et al. 2019, arXiv:1911.02116)."""
