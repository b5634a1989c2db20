"""Phi-3-vision and Phi-3.5-vision (Abdin et al. 2024, arXiv:2404.14219): Phi-3 with a vision tower."""

from __future__ import annotations

from typing import Any, ClassVar

from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.families.phi3 import Phi3ForCausalLM
from jaxengine.models.params.source import CheckpointNames
from jaxengine.models.vision.phi3_v import BETWEEN, LINE_END, TOWER, read_phi3_vision


class Phi3VForCausalLM(Phi3ForCausalLM):
    """Phi-3 with a vision tower over an image and its tiles."""

    checkpoint_names: ClassVar[CheckpointNames] = CheckpointNames(
        prefixes=((f"model.{TOWER}.", f"{TOWER}."),),
        tower=(f"{TOWER}.",),
        raveled=(LINE_END, BETWEEN),
        flattened=("embeddings.patch_embedding.weight",),
    )

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        return super().read_hf(fields) | {"tower": read_phi3_vision(fields)}
