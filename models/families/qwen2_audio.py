"""Qwen2-Audio (Chu et al. 2024, arXiv:2407.10759) and Voxtral (Liu et al. 2025, arXiv:2507.13264): Qwen2 and Llama with
sounds in the prompt.
"""

from __future__ import annotations

from typing import Any, ClassVar

from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.families.llama import LlamaForCausalLM
from jaxengine.models.families.wrapped import Wrapper
from jaxengine.models.params.source import CheckpointNames
from jaxengine.models.sound.qwen2_audio import TOWER, read_qwen2_audio
from jaxengine.models.sound.voxtral import read_voxtral
from jaxengine.models.vision.llava import PROJECTOR

# Names of published checkpoints, and of those that transformers 5 has in memory.
AUDIO_NAMES = CheckpointNames(
    prefixes=(
        ("language_model.model.", "model."),
        ("language_model.lm_head.", "lm_head."),
        ("model.language_model.", "model."),
        *((f"model.{part}.", f"{part}.") for part in (TOWER, PROJECTOR)),
    ),
    tower=(f"{TOWER}.", f"{PROJECTOR}."),
    flattened=(".conv1.weight", ".conv2.weight"),
)
# transformers' defaults of fields of the text part that a file lacks.
_VOXTRAL: dict[str, Any] = {
    "vocab_size": 131072,
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_hidden_layers": 30,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e8,
}


def read_sound_text(
    model: type[Wrapper], fields: ConfigFields, defaults: dict[str, Any] | None = None, tied: bool | None = None
) -> dict[str, Any]:
    """Return keyword arguments of ModelConfig that `model` reads from the text part, `text_config`, of a config.json.

    `defaults` are used for fields that the text part lacks. A `rope_theta` among them is not used if the text part has
    `rope_parameters`. tied: tie_word_embeddings, whatever the text part says; None for what it says. Raises
    ModelConfigError for wrong fields.
    """
    text = fields.mapping("text_config") or {}
    text = text if tied is None else {**text, "tie_word_embeddings": tied}
    given = {
        name: value for name, value in (defaults or {}).items() if name != "rope_theta" or "rope_parameters" not in text
    }
    return model.read_text(ConfigFields({**fields.raw, "text_config": {**given, **text}}))


class Qwen2AudioForConditionalGeneration(Wrapper, LlamaForCausalLM):
    """Qwen2 with sounds of up to 30 seconds in the prompt."""

    text: ClassVar[str] = "qwen2"
    checkpoint_names: ClassVar[CheckpointNames] = AUDIO_NAMES

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        return read_sound_text(cls, fields) | {"tower": read_qwen2_audio(fields)}


class VoxtralForConditionalGeneration(Qwen2AudioForConditionalGeneration):
    """Llama with sounds of any length in the prompt."""

    text: ClassVar[str] = "llama"

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        return read_sound_text(cls, fields, _VOXTRAL) | {"tower": read_voxtral(fields)}
