"""NVLM-D (Dai et al. 2024, arXiv:2409.11402): Qwen2 with InternVL's vision tower, over tiles that the prompt names."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.families.internvl import InternVLForConditionalGeneration


class NVLM_D(InternVLForConditionalGeneration):
    """Qwen2 with a vision tower, in the form of the first InternVL checkpoints; its projector is as wide as the text
    model's MLPs and has no biases.
    """

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        shared = super().read_hf(fields)
        tower = replace(shared["tower"], projector_size=shared["intermediate_size"], projector_bias=False)
        return shared | {"tower": tower}
