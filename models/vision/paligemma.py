"""Vision tower of PaliGemma (Beyer et al. 2024, arXiv:2407.07726): SigLIP and one matrix."""

from __future__ import annotations

from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.vision.base.clip import read_siglip
from jaxengine.models.vision.deepseek_vl import AlignedTowerConfig, aligned
from jaxengine.models.vision.llava import PROJECTOR, TOWER


def read_paligemma(fields: ConfigFields, most: int) -> AlignedTowerConfig:
    """Return the configuration from a config.json of SigLIP as a tower without merging whose tokens attend to each
    other. most: the most tokens of a prompt with images. Raises ModelConfigError for wrong fields.
    """
    both = {"attends_both_ways": True, "whole_prompt": most}
    return aligned(read_siglip(fields), (f"{PROJECTOR}.linear",), encoder=TOWER, **both)
