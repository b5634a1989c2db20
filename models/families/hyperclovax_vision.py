"""HyperCLOVA X SEED Think 32B (NAVER 2025): HyperCLOVA X with Qwen2.5-VL's vision tower and a linear projector."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.readers.hf import text_fields
from jaxengine.models.families.declared import DeclaredForCausalLM
from jaxengine.models.families.declared_dense import DENSE_ROWS
from jaxengine.models.families.declared_row import Row
from jaxengine.models.params.source import CheckpointNames
from jaxengine.models.vision.hyperclovax import PROJECTOR, read_hyperclovax
from jaxengine.models.vision.qwen2_vl import VISUAL


class HyperCLOVAXVisionV2ForConditionalGeneration(DeclaredForCausalLM):
    """HyperCLOVA X with a vision tower, whose embeddings are multiplied as those of tokens are, and have the positions
    of tokens.
    """

    row: ClassVar[Row] = DENSE_ROWS["HyperCLOVAXForCausalLM"]
    # Names of transformers 5, and of the published files.
    checkpoint_names: ClassVar[CheckpointNames] = CheckpointNames(
        prefixes=(
            ("model.language_model.lm_head.", "lm_head."),
            ("model.language_model.model.", "model."),
            ("model.language_model.", "model."),
            ("model.vision_model.", f"{VISUAL}."),
            ("model.vision_projector.", f"{PROJECTOR}."),
            ("model.projector.", f"{PROJECTOR}."),
        ),
        tower=(f"{VISUAL}.", f"{PROJECTOR}."),
        flattened=(".patch_embed.proj.weight",),
    )

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        text, vision = text_fields(fields), fields.mapping("vision_config")
        text.require(model_type="hyperclovax")
        if vision is None:
            raise fields.fail("vision_config", "a mapping")
        fields.require(mm_projector_type="linear")
        shared = super().read_hf(text)
        tower = read_hyperclovax(ConfigFields(vision))
        return shared | {"tower": replace(tower, multiplier=shared["embedding_multiplier"])}
