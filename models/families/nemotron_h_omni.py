"""Nemotron-H Omni (NVIDIA 2026: Nemotron 3 Nano Omni): Nemotron-H with images and videos behind RADIO, and sounds
behind Parakeet's encoder; and Nemotron Nano V2 VL (NVIDIA 2025, arXiv:2511.03929), which has no sounds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.readers.hf import text_fields
from jaxengine.models.config.tower import TOWERS, TowerConfig
from jaxengine.models.families.nemotron_h import NemotronHForCausalLM
from jaxengine.models.params.source import CheckpointNames
from jaxengine.models.sound import nemotron_h_omni as sound
from jaxengine.models.sound.fast_conformer import CONVOLUTIONS
from jaxengine.models.vision.llava import PROJECTOR
from jaxengine.models.vision.radio import (
    EMBEDDINGS,
    LAST_NORM,
    LAYERS,
    POSITIONS,
    TOWER,
    read_radio_tower,
    read_tiled_radio,
)

# Names of fields in published files -> transformers' names, which count where a file has both.
_PUBLISHED = {
    "llm_config": "text_config",
    "vit_hidden_size": "vision_hidden_size",
    "sound_config": "audio_config",
}
# transformers' defaults for fields that text_config lacks.
_DEFAULTS: dict[str, Any] = {
    "vocab_size": 131072,
    "hidden_size": 4096,
    "intermediate_size": 21504,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 4096,
    "mamba_num_heads": 128,
    "mamba_head_dim": 64,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 7688,
    "moe_shared_expert_intermediate_size": 7688,
}
_RADIO, _GENERATOR = f"{TOWER}.radio_model", f"{TOWER}.radio_model.model.patch_generator"
_QKV = {f".attention.qkv.{end}": tuple(f".attention.{part}_proj.{end}" for part in "qkv") for end in ("weight", "bias")}
_TEXT = NemotronHForCausalLM.checkpoint_names
# Names of RADIO and of the projector in published files.
RADIO_NAMES = CheckpointNames(
    prefixes=(
        ("mlp1.0.", f"{PROJECTOR}.layer_norm."),
        ("mlp1.1.", f"{PROJECTOR}.linear_1."),
        ("mlp1.3.", f"{PROJECTOR}.linear_2."),
        (f"vision_projector.{LAST_NORM}.", f"{LAST_NORM}."),
        (f"{_GENERATOR}.video_embedder.", f"{EMBEDDINGS}.video_patch_projection."),
        (f"{_GENERATOR}.embedder.", f"{EMBEDDINGS}.patch_projection."),
        (f"{_GENERATOR}.pos_embed", POSITIONS),
        (f"{_GENERATOR}.cls_token.token", f"{EMBEDDINGS}.cls_register_token"),
        (f"{_RADIO}.model.blocks.", f"{LAYERS}."),
    ),
    tower=(f"{TOWER}.", f"{PROJECTOR}.", f"{LAST_NORM}."),
    tower_parts=((".attn.proj.", ".attention.o_proj."), (".attn.", ".attention.")),
    joined=_QKV,
    flattened=(POSITIONS,),
    # transformers writes scales of layers, which RADIO has not.
    filled={".lambda1": 1.0},
    unused=tuple(f"{part}.{name}" for part in (TOWER, _RADIO) for name in ("input_conditioner.", "summary_idxs")),
)


class NemotronH_Omni_Reasoning_V3(NemotronHForCausalLM):
    """Nemotron-H with a tower of images and videos, which ends with a norm if there are MTP layers, and, if the file
    has its configuration, one of sounds.
    """

    checkpoint_names: ClassVar[CheckpointNames] = _TEXT._replace(
        prefixes=(
            *((f"language_model.{old}", new) for old, new in _TEXT.prefixes),
            ("language_model.lm_head.", "lm_head."),
            *RADIO_NAMES.prefixes,
            ("sound_encoder.encoder.", f"{sound.TOWER}."),
            ("sound_projection.norm.", f"{sound.PROJECTOR}.layer_norm."),
            *((f"sound_projection.linear{n}.", f"{sound.PROJECTOR}.linear_{n}.") for n in (1, 2)),
        ),
        tower=RADIO_NAMES.tower,
        sound_tower=(f"{sound.TOWER}.", f"{sound.PROJECTOR}."),
        tower_parts=(*(RADIO_NAMES.tower_parts or ()), *sound.PARTS),
        joined=RADIO_NAMES.joined,
        flattened=(*RADIO_NAMES.flattened, *CONVOLUTIONS),
        filled=RADIO_NAMES.filled,
        unused=(
            *(f"{part}.feature_extractor." for part in ("sound_encoder.encoder", sound.TOWER)),
            *RADIO_NAMES.unused,
        ),
        unused_ends=(".num_batches_tracked", ".encode_positions.inv_freq"),
    )
    hears: ClassVar[bool] = True
    read_tower: ClassVar[Callable[..., TowerConfig]] = staticmethod(read_radio_tower)

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        fields = as_transformers(fields)
        text = text_fields(fields).with_defaults(**_DEFAULTS)
        last_norm = text.integer("num_nextn_predict_layers", 0, minimum=0) > 0
        towers: list[TowerConfig] = [cls.read_tower(fields, last_norm=last_norm)]
        if cls.hears and fields.has("audio_config"):
            towers.append(sound.read_nemotron_sound(fields))
        return super().read_hf(text) | dict(zip(TOWERS, towers, strict=False))


class NemotronH_Nano_VL_V2(NemotronH_Omni_Reasoning_V3):
    """Nemotron-H with a tower over images in tiles, and frames of one tile each."""

    hears: ClassVar[bool] = False
    read_tower: ClassVar[Callable[..., TowerConfig]] = staticmethod(read_tiled_radio)


def as_transformers(fields: ConfigFields) -> ConfigFields:
    """Return the fields of a published config.json under transformers' names, which count where a file has both."""
    published = {name: fields.value(old) for old, name in _PUBLISHED.items() if fields.has(old)}
    return ConfigFields({**published, **{name: own for name, own in fields.raw.items() if own is not None}})
