"""HunyuanOCR (Tencent 2025, arXiv:2511.19575): Hunyuan dense with a vision tower, and M-RoPE by a token's position in
the prompt, its column and row in its image, and the image's number.
"""

from __future__ import annotations

from typing import Any, ClassVar

from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.readers.hf import text_fields
from jaxengine.models.families.hunyuan_dense import HunYuanDenseV1ForCausalLM
from jaxengine.models.families.qwen2_vl import with_sight
from jaxengine.models.params.source import CheckpointNames
from jaxengine.models.vision.hunyuan_vl import MERGER, TOWER, read_hunyuan_vl

_OLD, _NEW = "xdrope_section", "mrope_section"


class HunYuanVLForConditionalGeneration(HunYuanDenseV1ForCausalLM):
    """Hunyuan dense with M-RoPE of three or four sections and a vision tower."""

    # Names in published files, which transformers 5 writes, too.
    checkpoint_names: ClassVar[CheckpointNames] = CheckpointNames(
        prefixes=(  # transformers 5 in memory, and so in adapters and in lists of modules that are not quantised
            ("model.language_model.", "model."),
            ("model.vision_tower.patch_merger.proj_conv.", f"{MERGER}.proj.0."),
            ("model.vision_tower.patch_merger.proj_out.", f"{MERGER}.proj.2."),
            ("model.vision_tower.patch_merger.", f"{MERGER}."),
            ("model.vision_tower.", f"{TOWER}."),
        ),
        parts=(
            (".mlp.fc1", ".mlp.dense_h_to_4h"),
            (".mlp.fc2", ".mlp.dense_4h_to_h"),
            (".layer_norm1", ".input_layernorm"),
            (".layer_norm2", ".post_attention_layernorm"),
        ),
        tower=(f"{TOWER}.",),
        flattened=(".patch_embedding.weight", f"{MERGER}.proj.0.weight", f"{MERGER}.proj.2.weight"),
    )

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        # In the published file the text's fields are not nested.
        text = text_fields(fields) if fields.has("text_config") else fields
        text = _with_usual_rope(text.with_defaults(tie_word_embeddings=True))
        return with_sight(super().read_hf(text), text, fields, read_hunyuan_vl)


def _with_usual_rope(text: ConfigFields) -> ConfigFields:
    """Return a copy of `text` whose rope has the names of transformers 5: the type "dynamic" for "xdrope", and
    `mrope_section`, of integers, for `xdrope_section`. Raises ModelConfigError if a rope has both, and they differ.
    """
    changed = {}
    for name in ("rope_parameters", "rope_scaling"):
        rope = text.mapping(name)
        if rope is None:
            continue
        kinds = {key: "dynamic" for key in ("rope_type", "type") if rope.get(key) == "xdrope"}
        old, new = rope.get(_OLD), rope.get(_NEW)
        if old is not None and new is not None and old != new:
            raise ConfigFields(rope).fail(_OLD, f"that of {_NEW}, {new}")
        sections = old if new is None else new
        if isinstance(sections, list):  # as numbers of pairs may be written
            sections = [int(each) if isinstance(each, float) and each.is_integer() else each for each in sections]
        kept = {key: value for key, value in rope.items() if key != _OLD}
        changed[name] = {**kept, **kinds, **({} if sections is None else {_NEW: sections})}
    return ConfigFields({**text.raw, **changed})
