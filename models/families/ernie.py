"""ERNIE (Sun et al. 2019, arXiv:1904.09223) and ERNIE 2.0 and 3.0: BERT's encoder, whose embeddings may have a part by
task.
"""

from __future__ import annotations

from typing import Any, ClassVar

from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.families.bert import BertModel
from jaxengine.models.params.source import CheckpointNames


class ErnieModel(BertModel):
    """BERT's encoder, with a dense layer, tanh and scores of labels if it classifies. Every token has the first type of
    task.
    """

    checkpoint_names: ClassVar[CheckpointNames] = BertModel.checkpoint_names._replace(
        prefixes=(("model.ernie.", "model."),)
    )

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        shape = super().read_hf(fields)
        count = fields.integer("task_type_vocab_size", 3) if fields.boolean("use_task_id", False) else 0
        return shape | {"encoder": shape["encoder"]._replace(num_task_types=count)}
