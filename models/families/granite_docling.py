"""Granite Docling (IBM 2026): Granite with a vision tower over the tiles of a page, whose embeddings come in parts,
each for another layer.
"""

from __future__ import annotations

from typing import Any, ClassVar

from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.readers.hf import text_of_type
from jaxengine.models.families.granite import GraniteForCausalLM
from jaxengine.models.families.llava import FLATTENED
from jaxengine.models.params.source import CheckpointNames
from jaxengine.models.vision.granite_docling import read_granite_docling
from jaxengine.models.vision.idefics3 import CONNECTOR, TOWER

_TEXT = "granite_docling_text"
# transformers' defaults of fields that the text part lacks.
_DEFAULTS: dict[str, Any] = {
    "vocab_size": 133800,
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 100257,
    "eos_token_id": 100257,
    "tie_word_embeddings": True,
    "embedding_multiplier": 12.0,
    "logits_scaling": 4.0,
    "residual_multiplier": 0.263,
    "attention_multiplier": 0.015625,
}


class GraniteDoclingForConditionalGeneration(GraniteForCausalLM):
    """Granite with a vision tower, whose embeddings are multiplied as those of tokens are. What makes four times as
    many embeddings of a tile is not read.
    """

    checkpoint_names: ClassVar[CheckpointNames] = CheckpointNames(
        prefixes=(
            ("model.text_model.", "model."),
            (f"model.{TOWER}.{CONNECTOR}.", f"{CONNECTOR}."),
            (f"model.{TOWER}.", f"{TOWER}."),
        ),
        tower=(f"{TOWER}.", f"{CONNECTOR}."),
        flattened=FLATTENED,
        # What makes four times as many embeddings, what chooses between both, what drafts.
        unused=(f"model.{TOWER}.{CONNECTOR}.fine.", "model.density_router.", "mtp."),
    )

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        text = text_of_type(fields, _TEXT).with_defaults(**_DEFAULTS)
        shared = super().read_hf(text)
        return shared | {"tower": read_granite_docling(fields, shared["hidden_size"], shared["embedding_multiplier"])}
