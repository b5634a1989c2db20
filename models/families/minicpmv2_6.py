"""MiniCPM-V 2.6, 4.0 and 4.5 (Yao et al. 2024, arXiv:2408.01800): Qwen2, Llama and Qwen3 with a vision tower over an
image and its slices.
"""

from __future__ import annotations

from typing import Any, ClassVar

from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.families.llama import LlamaForCausalLM
from jaxengine.models.families.llava import FLATTENED
from jaxengine.models.families.qwen2 import Qwen2ForCausalLM
from jaxengine.models.families.qwen3 import Qwen3ForCausalLM
from jaxengine.models.families.wrapped import of_kind
from jaxengine.models.params.source import CheckpointNames
from jaxengine.models.vision.minicpmv2_6 import RESAMPLER, TOWER, read_resampled

# The language model by `version`.
_TEXTS = {"2.6": ("qwen2", Qwen2ForCausalLM), "4.0": ("llama", LlamaForCausalLM), "4.5": ("qwen3", Qwen3ForCausalLM)}


class MiniCPMV(LlamaForCausalLM):
    """A model with Llama's layers and a vision tower. The fields of the language model are those of the whole
    config.json.
    """

    checkpoint_names: ClassVar[CheckpointNames] = CheckpointNames(
        prefixes=(
            ("llm.model.", "model."),
            ("llm.lm_head.", "lm_head."),
            (f"{RESAMPLER}.attn.in_proj_", f"{RESAMPLER}.attn.in_proj."),
            (f"{RESAMPLER}.proj", f"{RESAMPLER}.proj.weight"),
        ),
        # Of towers that checkpoints for speech have, and of positions that the tower computes.
        unused=("apm.", "audio", "tts", f"{RESAMPLER}.pos_embed"),
        tower=(f"{TOWER}.", f"{RESAMPLER}."),
        transposed=(f"{RESAMPLER}.proj",),
        plain=(f"{RESAMPLER}.attn.in_proj", f"{RESAMPLER}.proj"),  # parameters, and no Linear
        flattened=FLATTENED,
    )

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        if (version := str(fields.value("version", None))) not in _TEXTS:
            raise fields.fail("version", ", ".join(_TEXTS))
        kind, family = _TEXTS[version]
        text = of_kind(fields, kind)
        return family.read_hf(text) | {"tower": read_resampled(text)}
