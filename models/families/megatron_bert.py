"""Megatron's BERT (Shoeybi et al. 2019, arXiv:1909.08053): BERT's encoder with norms before a layer's parts."""

from __future__ import annotations

from typing import Any, ClassVar

from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.families.bert import NAMES, BertModel
from jaxengine.models.layers.encoder import EncoderNames

# transformers' sizes of a model whose config.json has none.
_LARGE = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}


class MegatronBertModel(BertModel):
    """BERT's encoder with norms before a layer's parts and after the last layer, and none after the embeddings."""

    names: ClassVar[EncoderNames] = NAMES._replace(
        attention_norm="attention.ln", mlp_norm="ln", embedding_norm=None, last_norm="model.encoder.ln"
    )

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        return super().read_hf(fields.with_defaults(**_LARGE, vocab_size=29056))
