"""LFM3-VL (Liquid AI 2026): LFM3 with a vision tower of convolutions and attention, whose embeddings have the positions
of tokens.
"""

from __future__ import annotations

from typing import Any, ClassVar

from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.readers.hf import text_of_type
from jaxengine.models.families.declared import declared_class
from jaxengine.models.families.declared_states import STATE_ROWS
from jaxengine.models.params.source import CheckpointNames
from jaxengine.models.vision.lfm3_vl import read_lfm3_vl
from jaxengine.models.vision.llava import PROJECTOR, TOWER

_LFM3 = "Lfm3ForCausalLM"
_Lfm3: Any = declared_class(_LFM3, STATE_ROWS[_LFM3])
_TEXT = "model.language_model."
_NAMES: CheckpointNames = _Lfm3.checkpoint_names


class Lfm3VlForConditionalGeneration(_Lfm3):
    """LFM3 with a vision tower."""

    checkpoint_names: ClassVar[CheckpointNames] = _NAMES._replace(
        prefixes=(
            (f"{_TEXT}embedding_norm.", "model.norm."),
            (_TEXT, "model."),
            (f"model.{TOWER}.", f"{TOWER}."),
            (f"model.{PROJECTOR}.", f"{PROJECTOR}."),
            *_NAMES.prefixes,
        ),
        tower=(f"{TOWER}.", f"{PROJECTOR}."),
        flattened=(".spatial_conv.weight",),
        # Names in published files -> those that transformers has in memory.
        parts=(
            (".patchifier.", ".patch_embed."),
            (".q_layernorm.", ".q_norm."),
            (".k_layernorm.", ".k_norm."),
            *_NAMES.parts,
        ),
    )

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        text = text_of_type(fields.with_defaults(tie_word_embeddings=True), "lfm3")
        return super().read_hf(text) | {"tower": read_lfm3_vl(fields)}
