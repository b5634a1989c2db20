"""Phi-4-reasoning-vision (Microsoft 2026): Phi-4, which has Phi-3's layers, with SigLIP 2 over images of any size."""

from __future__ import annotations

from typing import Any, ClassVar

from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.families.phi3 import Phi3ForCausalLM
from jaxengine.models.params.source import CheckpointNames
from jaxengine.models.vision.lfm2_vl import read_phi4_reasoning_vision
from jaxengine.models.vision.llava import PROJECTOR, TOWER

_STORED = "model.mm_projector"


class Phi4ForCausalLMV(Phi3ForCausalLM):
    """Phi-3 with a vision tower that has a row for each patch."""

    checkpoint_names: ClassVar[CheckpointNames] = CheckpointNames(
        prefixes=(
            (f"model.{TOWER}.{TOWER}.vision_model.", f"{TOWER}."),
            (f"{_STORED}.0.", f"{PROJECTOR}.linear_1."),
            (f"{_STORED}.2.", f"{PROJECTOR}.linear_2."),
        ),
        tower=(f"{TOWER}.", f"{PROJECTOR}."),
    )

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        shared = super().read_hf(fields)
        return shared | {"tower": read_phi4_reasoning_vision(fields, shared["hidden_size"])}
