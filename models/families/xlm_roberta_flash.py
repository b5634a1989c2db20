"""XLM-RoBERTa as Jina AI's own code stores it, for example jinaai/jina-reranker-v2-base-multilingual: the names of
Jina Embeddings v3, but with XLM-RoBERTa's learned positions.
"""

from __future__ import annotations

from typing import ClassVar

from jaxengine.models.families.jina_embeddings_v3 import JinaEmbeddingsV3Model
from jaxengine.models.families.roberta import RobertaModel
from jaxengine.models.layers.encoder import EncoderNames


class XLMRobertaFlashModel(RobertaModel):
    """RoBERTa's layers under the names of Jina Embeddings v3."""

    names: ClassVar[EncoderNames] = JinaEmbeddingsV3Model.names
