"""BLIP-2 (Li et al. 2023, arXiv:2301.12597): OPT with a vision tower that gives each image a fixed number of
embeddings.
"""

from __future__ import annotations

from typing import Any, ClassVar

from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.readers.hf import text_fields
from jaxengine.models.families.declared import declared_class
from jaxengine.models.families.declared_rows import ROWS_BY_NAME
from jaxengine.models.families.llava import FLATTENED
from jaxengine.models.params.source import CheckpointNames
from jaxengine.models.vision.blip2 import PROJECTION, QFORMER, QUERIES, TOWER, read_blip2

_OPT = "OPTForCausalLM"
_Opt: Any = declared_class(_OPT, ROWS_BY_NAME[_OPT])
_NAMES: CheckpointNames = _Opt.checkpoint_names
_LANGUAGE = "language_model."


class Blip2ForConditionalGeneration(_Opt):
    """OPT with a vision tower. Models whose text part is a T5, or has embeddings of another size than its layers, are
    not supported.
    """

    checkpoint_names: ClassVar[CheckpointNames] = _NAMES._replace(
        prefixes=(
            *((f"{_LANGUAGE}{old}", new) for old, new in _NAMES.prefixes),
            (f"{_LANGUAGE}lm_head.", "lm_head."),
        ),
        tower=tuple(f"{part}." for part in (TOWER, QFORMER, PROJECTION)) + (QUERIES,),
        flattened=(*FLATTENED, ".class_embedding", ".position_embedding", QUERIES),
    )

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        text = text_fields(fields)
        if text.text("model_type", "opt") != "opt":
            raise text.fail("model_type", "opt in text_config")
        shared = super().read_hf(text)
        text.require(word_embed_proj_dim=shared["hidden_size"])  # embeddings of images have this size
        return shared | {"tower": read_blip2(fields)}
