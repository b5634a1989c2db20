"""Thinkers of Qwen2.5-Omni (Qwen Team 2025, arXiv:2503.20215) and Qwen3-Omni (Qwen Team 2025, arXiv:2509.17765): Qwen2
and Qwen3-MoE with M-RoPE, a tower of images and one of sounds. What makes speech of their answers is not read.
"""

from __future__ import annotations

from typing import Any, ClassVar

from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.readers.hf import text_fields
from jaxengine.models.families.qwen2 import Qwen2ForCausalLM
from jaxengine.models.families.qwen2_vl import with_sight, without_mrope
from jaxengine.models.families.qwen3_moe import Qwen3MoeForCausalLM
from jaxengine.models.params.source import CheckpointNames
from jaxengine.models.sound.qwen2_5_omni import read_qwen2_5_omni_sound
from jaxengine.models.sound.qwen2_audio import TOWER as SOUNDS
from jaxengine.models.sound.qwen3_asr import read_qwen3_asr
from jaxengine.models.vision.llava import PROJECTOR
from jaxengine.models.vision.qwen2_vl import VISUAL, read_qwen2_5_omni
from jaxengine.models.vision.qwen3_vl import read_qwen3_omni

THINKER = "thinker_config"
# Prefixes of whole models, of thinkers alone, and of the names that transformers 5 has in memory.
_OWNERS = ("thinker.", "model.", "")
_NAMES = CheckpointNames(
    prefixes=(
        *(
            (f"{owner}{SOUNDS}.proj{number}.", f"{PROJECTOR}.linear_{number}.")
            for owner in _OWNERS
            for number in (1, 2)
        ),
        *((f"{owner}{part}.", f"{part}.") for owner in _OWNERS[:2] for part in (VISUAL, SOUNDS)),
        ("model.language_model.", "model."),
        ("thinker.model.", "model."),
        ("thinker.lm_head.", "lm_head."),
    ),
    unused=("talker.", "token2wav.", "code2wav."),
    unused_ends=(".audio_bos_eos_token.weight",),
    tower=(f"{VISUAL}.",),
    sound_tower=(f"{SOUNDS}.", f"{PROJECTOR}."),
    flattened=(".patch_embed.proj.weight", *(f".{name}.weight" for name in ("conv1", "conv2"))),
)
# transformers' defaults of fields of the text parts that a file lacks.
_QWEN2_5: dict[str, Any] = {
    "vocab_size": 152064,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
}
_QWEN3: dict[str, Any] = {
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
}

_QWEN3_SOUND = {"d_model": 1280, "encoder_layers": 32, "encoder_attention_heads": 20, "encoder_ffn_dim": 5120}


def thinker_fields(fields: ConfigFields) -> ConfigFields:
    """Return the fields of the thinker. In a configuration of the whole model, those of `thinker_config` take
    precedence over those outside it; a configuration of the thinker alone is returned as it is. Raises ModelConfigError
    if `thinker_config` is not a mapping.
    """
    return ConfigFields({**fields.raw, **(fields.mapping(THINKER) or {})})


def _text(fields: ConfigFields, defaults: dict[str, Any]) -> ConfigFields:
    """Return the fields of the text part, with `defaults` for absent ones and plain rope in place of M-RoPE.
    `tie_word_embeddings` is taken from outside the text part, False if it is absent there. Raises ModelConfigError for
    wrong fields.
    """
    tied = {"tie_word_embeddings": fields.boolean("tie_word_embeddings", False)}
    return without_mrope(ConfigFields({**text_fields(fields).with_defaults(**defaults).raw, **tied}))


class Qwen2_5OmniThinkerForConditionalGeneration(Qwen2ForCausalLM):
    """Qwen2.5 with M-RoPE, images, videos and sounds. It also loads checkpoints of the whole model, without their
    talker.
    """

    checkpoint_names: ClassVar[CheckpointNames] = _NAMES

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        fields = thinker_fields(fields)
        text = _text(fields, _QWEN2_5)
        shared = with_sight(super().read_hf(text), text, fields, read_qwen2_5_omni)
        return shared | {"sound_tower": read_qwen2_5_omni_sound(fields, shared["hidden_size"])}


class Qwen3OmniMoeThinkerForConditionalGeneration(Qwen3MoeForCausalLM):
    """Qwen3-MoE with M-RoPE, images, videos and sounds. It also loads checkpoints of the whole model, without their
    talker.
    """

    checkpoint_names: ClassVar[CheckpointNames] = _NAMES._replace(
        flattened=(".patch_embed.proj.weight", *(f".conv2d{number}.weight" for number in (1, 2, 3)))
    )

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        fields = thinker_fields(fields)
        text = _text(fields, _QWEN3)
        shared = with_sight(super().read_hf(text), text, fields, read_qwen3_omni)
        return shared | {"sound_tower": read_qwen3_asr(fields, shared["hidden_size"], **_QWEN3_SOUND)}
