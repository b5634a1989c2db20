"""RemBERT (Chung et al. 2020, arXiv:2010.12821): BERT's encoder after embeddings narrower than its hidden states."""

from __future__ import annotations

from typing import Any, ClassVar

from jaxengine.models.build import Build
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.families.bert import NAMES, BertModel
from jaxengine.models.families.electra import ProjectedEmbeddings, read_embedding_size
from jaxengine.models.layers.encoder import EncoderNames
from jaxengine.models.params.source import CheckpointNames

# transformers' sizes of a model whose config.json has none.
_SIZES = {"hidden_size": 1152, "num_hidden_layers": 32, "num_attention_heads": 18, "intermediate_size": 4608}


class RemBertModel(BertModel):
    """BERT's encoder after projected embeddings, with a dense layer, tanh and scores of labels if it classifies."""

    # The head of its masked language model is not tied to the embeddings.
    names: ClassVar[EncoderNames] = NAMES._replace(masked=None)
    checkpoint_names: ClassVar[CheckpointNames] = BertModel.checkpoint_names._replace(
        prefixes=(("model.rembert.", "model."),)
    )

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        shape = super().read_hf(fields.with_defaults(**_SIZES, vocab_size=250300))
        size = read_embedding_size(fields, "input_embedding_size", 256)
        return shape | {"encoder": shape["encoder"]._replace(embedding_size=size)}

    def make_embedding(self, build: Build) -> ProjectedEmbeddings:
        source = "model.encoder.embedding_hidden_mapping_in"
        return ProjectedEmbeddings(super().make_embedding(build), self.config, source=source, build=build)
