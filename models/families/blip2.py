"""BLIP-2 (Li et al. 2023, arXiv:2301.12597): OPT, or another decoder, with a vision tower that gives each image a fixed
number of embeddings.
"""

from __future__ import annotations

from typing import Any, ClassVar

from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.readers.hf import text_fields
from jaxengine.models.families.llama import LlamaForCausalLM
from jaxengine.models.families.llava import FLATTENED
from jaxengine.models.families.wrapped import Wrapper
from jaxengine.models.params.source import CheckpointNames
from jaxengine.models.vision.blip2 import PROJECTION, QFORMER, QUERIES, TOWER, read_blip2


class Blip2ForConditionalGeneration(Wrapper, LlamaForCausalLM):
    """OPT, or another text model, with a vision tower. Models whose text part is a T5, or has embeddings of another
    size than its layers, are not supported.
    """

    text: ClassVar[str] = "opt"
    has_own_head: ClassVar[bool] = False
    checkpoint_names: ClassVar[CheckpointNames] = CheckpointNames(
        prefixes=(("language_model.model.", "model."), ("language_model.lm_head.", "lm_head.")),
        tower=(*(f"{part}." for part in (TOWER, QFORMER, PROJECTION)), QUERIES),
        flattened=(*FLATTENED, ".class_embedding", ".position_embedding", QUERIES),
    )

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        shared = cls.read_text(fields)
        # Embeddings of images have this size.
        text_fields(fields).require(word_embed_proj_dim=shared["hidden_size"])
        return shared | {"tower": read_blip2(fields)}
