"""Qwen3-ASR (Qwen Team 2026): Qwen3 with sounds in the prompt, which it transcribes."""

from __future__ import annotations

from typing import Any, ClassVar

from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.families.qwen2_audio import AUDIO_NAMES, read_sound_text
from jaxengine.models.families.qwen2_vl import without_mrope
from jaxengine.models.families.qwen3 import Qwen3ForCausalLM
from jaxengine.models.families.wrapped import Wrapper
from jaxengine.models.params.source import CheckpointNames
from jaxengine.models.sound.qwen2_audio import TOWER
from jaxengine.models.sound.qwen3_asr import read_qwen3_asr
from jaxengine.models.vision.llava import PROJECTOR

# Names of the first published checkpoints, which are called after a part of Qwen3-Omni.
_PUBLISHED = (
    ("thinker.model.", "model."),
    ("thinker.lm_head.", "lm_head."),
    *((f"thinker.{TOWER}.proj{number}.", f"{PROJECTOR}.linear_{number}.") for number in (1, 2)),
    (f"thinker.{TOWER}.", f"{TOWER}."),
)


class Qwen3ASRForConditionalGeneration(Wrapper, Qwen3ForCausalLM):
    """Qwen3 with sounds of any length in the prompt."""

    text: ClassVar[str] = "qwen3"
    checkpoint_names: ClassVar[CheckpointNames] = AUDIO_NAMES._replace(
        prefixes=(*_PUBLISHED, *AUDIO_NAMES.prefixes),
        flattened=tuple(f".conv2d{number}.weight" for number in (1, 2, 3)),
    )

    @classmethod
    def text_kind(cls, fields: ConfigFields) -> str:
        return super().text_kind(ConfigFields(fields.mapping("thinker_config") or fields.raw))

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        fields = ConfigFields({**fields.raw, **(fields.mapping("thinker_config") or {})})
        text = fields.mapping("text_config") or {}
        # Sounds have the positions of ordinary tokens, so rope with sections equals plain rope.
        fields = ConfigFields({**fields.raw, "text_config": without_mrope(ConfigFields(text)).raw})
        text = read_sound_text(cls, fields)
        return text | {"tower": read_qwen3_asr(fields, text["hidden_size"])}
