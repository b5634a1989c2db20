"""DeepSeek-VL (Lu et al. 2024, arXiv:2403.05525), in its small size, and Janus (Wu et al. 2024, arXiv:2410.13848;
Janus-Pro: Chen et al. 2025, arXiv:2501.17811), which here sees and answers in text: Llama with a vision tower.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.tower import TowerConfig
from jaxengine.models.families.llama import LlamaForCausalLM
from jaxengine.models.families.llava import FLATTENED
from jaxengine.models.families.wrapped import Wrapper
from jaxengine.models.params.source import CheckpointNames
from jaxengine.models.vision.deepseek_vl import ALIGNER, TOWER, read_deepseek_vl, read_janus

_TIED = "tie_word_embeddings"
# What Janus draws images with.
_DRAWING = ("vqmodel.", "generation_embeddings.", "generation_aligner.", "generation_head.")
NAMES = CheckpointNames(
    prefixes=(
        ("model.language_model.", "model."),
        (f"model.{TOWER}.{TOWER}.", f"{TOWER}."),
        *((f"model.{part}.", f"{part}.") for part in (TOWER, ALIGNER)),
    ),
    tower=(f"{TOWER}.", f"{ALIGNER}."),
    flattened=FLATTENED,
)


class DeepseekVLForConditionalGeneration(Wrapper, LlamaForCausalLM):
    """Llama with SigLIP. Its output head is the token table, unless tie_word_embeddings is false in text_config, or
    outside of it.
    """

    checkpoint_names: ClassVar[CheckpointNames] = NAMES
    read_tower: ClassVar[Callable[[ConfigFields], TowerConfig]] = staticmethod(read_deepseek_vl)

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        outer = fields
        if not (fields.has(_TIED) or ConfigFields(fields.mapping("text_config") or {}).has(_TIED)):
            outer = ConfigFields({**fields.raw, _TIED: True})
        return cls.read_text(outer) | {"tower": cls.read_tower(fields)}


class JanusForConditionalGeneration(DeepseekVLForConditionalGeneration):
    """Llama with SigLIP as Janus has it. The parts that draw images are not read."""

    checkpoint_names: ClassVar[CheckpointNames] = NAMES._replace(
        unused=tuple(f"model.{part}" for part in _DRAWING),
        parts=((".self_attn.projection_layer.", ".self_attn.out_proj."),),
    )
    read_tower: ClassVar[Callable[[ConfigFields], TowerConfig]] = staticmethod(read_janus)
