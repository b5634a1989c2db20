"""Ovis2.5 (Lu et al. 2025, arXiv:2508.11737) and Ovis2.6 (AIDC 2026): Qwen3, or Qwen3-MoE, with a vision tower for
images of any shape that gives means of visual words.
"""

from __future__ import annotations

from typing import Any, ClassVar

from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.families.llama import LlamaForCausalLM
from jaxengine.models.families.llava import FLATTENED
from jaxengine.models.families.wrapped import Wrapper
from jaxengine.models.params.source import CheckpointNames
from jaxengine.models.vision.llava import TOWER
from jaxengine.models.vision.ovis2 import WORDS
from jaxengine.models.vision.ovis2_5 import HEAD, read_ovis2_5

_NAMES = CheckpointNames(
    prefixes=(
        ("llm.model.", "model."),
        ("llm.lm_head.", "lm_head."),
        ("visual_tokenizer.vit.vision_model.", f"{TOWER}."),
        ("visual_tokenizer.head.", f"{HEAD}."),
        ("vte.", f"{WORDS}."),
    ),
    tower=(f"{TOWER}.", f"{HEAD}.", f"{WORDS}."),
    flattened=FLATTENED,
)


def _with_text(fields: ConfigFields) -> ConfigFields:
    """Return the fields with `llm_config`, if it is present, as `text_config`."""
    return ConfigFields({**fields.raw, "text_config": fields.value("llm_config", fields.value("text_config", None))})


class Ovis2_5(Wrapper, LlamaForCausalLM):
    """Qwen3, Qwen3-MoE or another text model with a vision tower."""

    text: ClassVar[str] = "qwen3"
    checkpoint_names: ClassVar[CheckpointNames] = _NAMES

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        return cls.read_text(_with_text(fields)) | {"tower": read_ovis2_5(fields)}
