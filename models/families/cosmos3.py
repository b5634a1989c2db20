"""Cosmos 3 (NVIDIA 2026), the part that understands: Qwen3-VL; those that draw, hear and act are not read."""

from __future__ import annotations

from typing import ClassVar

from jaxengine.models.families.qwen2_vl import QWEN_NAMES
from jaxengine.models.families.qwen3_vl import Qwen3VLForConditionalGeneration
from jaxengine.models.params.source import CheckpointNames
from jaxengine.models.vision.qwen2_vl import VISUAL


class Cosmos3OmniForConditionalGeneration(Qwen3VLForConditionalGeneration):
    """Qwen3-VL. Published files have its tensors without beginnings, among those of the other parts."""

    checkpoint_names: ClassVar[CheckpointNames] = Qwen3VLForConditionalGeneration.checkpoint_names._replace(
        prefixes=(
            *((f"{part}.", f"model.{part}.") for part in ("layers", "embed_tokens", "norm")),
            *((f"{part}.", f"{VISUAL}.{part}.") for part in ("blocks", "merger", "patch_embed", "pos_embed")),
            ("deepstack_merger_list.", f"{VISUAL}.deepstack_merger_list."),
            *QWEN_NAMES.prefixes,
        ),
        parts=tuple(
            (f".self_attn.{stored}.", f".self_attn.{ours}.")
            for stored, ours in (
                *((f"to_{part}", f"{part}_proj") for part in "qkv"),
                ("to_out", "o_proj"),
                ("norm_q", "q_norm"),
                ("norm_k", "k_norm"),
            )
        ),
        unused=tuple(f"{part}{end}" for part in ("", "audio_", "action_") for end in ("proj_in.", "proj_out."))
        + ("time_embedder.", "audio_modality_embed", "action_modality_embed"),
        unused_parts=("_moe_gen", ".to_add_out.", ".norm_added_q.", ".norm_added_k.")
        + tuple(f".add_{part}_proj." for part in "qkv"),
    )
