"""Hy4 that sees (Tencent 2026): Hy4 with a vision tower and M-RoPE, whose pairs are neighbouring elements and alternate
between time, height and width. An image's lines end with an embedding of their own.
"""

from __future__ import annotations

from typing import Any, ClassVar

from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.readers.hf import text_of_type
from jaxengine.models.families.hy_v4 import HEADS, HYV4Attention, HYV4ForCausalLM
from jaxengine.models.families.llama import LAYER
from jaxengine.models.families.qwen2_vl import with_sight
from jaxengine.models.params.source import CheckpointNames
from jaxengine.models.vision.hunyuan_vl import MERGER, TOWER
from jaxengine.models.vision.hy_v4_vl import read_hy_v4_vl

# transformers' defaults in which this family differs from Hy4.
_DEFAULTS: dict[str, Any] = {
    "hidden_size": 6144,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 78,
    "num_attention_heads": 64,
    "q_lora_rank": 2048,
}
_SECTIONS = [12, 10, 10]
# transformers has the text and the tower elsewhere in memory than files have them.
_TEXT, _SIGHT = "model.language_model.", "model.vision_tower"


class HYV4VLForConditionalGeneration(HYV4ForCausalLM):
    """Hy4 with M-RoPE and a vision tower, for images alone."""

    interleaved: ClassVar[bool] = True
    index_heads: ClassVar[int] = 32
    index_interleaved: ClassVar[bool] = True
    checkpoint_names: ClassVar[CheckpointNames] = HYV4ForCausalLM.checkpoint_names._replace(
        prefixes=(
            *((old.replace("model.", _TEXT, 1), new) for old, new in HEADS),
            (_TEXT, "model."),
            (f"{_SIGHT}.patch_merger.proj_conv.", f"{MERGER}.proj.0."),
            (f"{_SIGHT}.patch_merger.proj_out.", f"{MERGER}.proj.2."),
            (f"{_SIGHT}.patch_merger.", f"{MERGER}."),
            (f"{_SIGHT}.", f"{TOWER}."),
            *HEADS,
        ),
        parts=(
            (f"{MERGER}.before_rms.", f"{MERGER}.norm."),
            (".layer_norm1.", ".input_layernorm."),
            (".layer_norm2.", ".post_attention_layernorm."),
            (".mlp.fc1.", ".mlp.dense_h_to_4h."),
            (".mlp.fc2.", ".mlp.dense_4h_to_h."),
            *HYV4ForCausalLM.checkpoint_names.parts,
        ),
        tower=(f"{TOWER}.",),
        flattened=(".patch_embedding.weight", f"{MERGER}.proj.0.weight", f"{MERGER}.proj.2.weight"),
    )

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        text = text_of_type(fields, "hy_v4_vl_text").with_defaults(**_DEFAULTS)
        name = "rope_parameters" if text.mapping("rope_parameters") is not None else "rope_scaling"
        rope = {"mrope_section": _SECTIONS, **(text.mapping(name) or {}), "mrope_interleaved": True}
        if not isinstance(rope["mrope_section"], list) or len(rope["mrope_section"]) != 3:
            raise ConfigFields(rope).fail("mrope_section", "a list of three numbers of pairs")
        text = ConfigFields({**text.raw, name: rope})
        fields = ConfigFields({**fields.raw, "vision_config": fields.value("vision_config", {})})
        return with_sight(super().read_hf(text), text, fields, read_hy_v4_vl)

    def make_attention(self, layer: int, build: Build) -> nnx.Module:
        sizes = self.config.attention[layer], self.config.hidden_size
        # Norms of latents have the epsilon of all others.
        options = {"notes": self.notes_selection(layer), "eps": self.config.rms_norm_eps}
        return HYV4Attention(*sizes, source=f"{LAYER}.self_attn", build=build, **options)
