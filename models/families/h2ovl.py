"""H2OVL Mississippi (H2O.ai 2024, arXiv:2410.13611): Danube, a Llama or Mistral, with InternVL's vision tower, over
tiles of an image in two tilings.
"""

from __future__ import annotations

from jaxengine.models.families.internvl import InternVLForConditionalGeneration


class H2OVLChatModel(InternVLForConditionalGeneration):
    """Llama or Mistral with a vision tower, in the form of the first InternVL checkpoints."""
