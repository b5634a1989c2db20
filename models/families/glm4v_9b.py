"""GLM-4V-9B (GLM Team 2024, arXiv:2406.12793) and CogAgent-9B: GLM-4-9B as first published with a vision tower. All
patches of an image have one position.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.families.declared import declared_class
from jaxengine.models.families.declared_hub import HUB_ROWS
from jaxengine.models.params.source import CheckpointNames
from jaxengine.models.vision.eva2_clip import TOWER, read_eva2_clip

_ChatGLM: Any = declared_class("ChatGLMTextModel", HUB_ROWS["ChatGLMModel"]._replace(gguf=None))


class GLM4VForCausalLM(_ChatGLM):
    """ChatGLM with a vision tower. Its rope is M-RoPE of time alone, so that several tokens may have one position."""

    checkpoint_names: ClassVar[CheckpointNames] = _ChatGLM.checkpoint_names._replace(
        prefixes=(("transformer.vision.", f"{TOWER}."), *_ChatGLM.checkpoint_names.prefixes),
        tower=(f"{TOWER}.",),
        flattened=(f"{TOWER}.patch_embedding.proj.weight", f"{TOWER}.conv.weight"),
        raveled=(f"{TOWER}.patch_embedding.cls_embedding", f"{TOWER}.boi", f"{TOWER}.eoi"),
    )

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        shared: dict[str, Any] = super().read_hf(fields)
        turned = tuple(
            replace(each, rope=replace(each.rope, sections=(each.rope.rotary_dim // 2, 0, 0)))
            for each in shared["attention"]
        )
        tower = read_eva2_clip(fields, shared["intermediate_size"])
        return {**shared, "attention": turned, "tower": tower}
