"""Phi-4-multimodal (Microsoft 2025, arXiv:2503.01743): Phi-4-mini with a vision tower and a LoRA adapter for prompts
with images; as transformers stores it, and as it was published first (Phi4MMForCausalLM).
"""

from __future__ import annotations

from typing import Any, ClassVar

from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.families.phi3 import Phi3ForCausalLM
from jaxengine.models.params.source import CheckpointNames
from jaxengine.models.vision.phi4_multimodal import BETWEEN, LINE_END, TOWER, read_phi4

_EXTENDED = "model.embed_tokens_extend."
_IMAGES = f"{_EXTENDED}image_embed."
# transformers' defaults for fields that a file lacks.
_DEFAULTS: dict[str, Any] = {
    "vocab_size": 200064,
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "bos_token_id": 199999,
    "eos_token_id": [199999, 200020],
}


class Phi4MultimodalForCausalLM(Phi3ForCausalLM):
    """Phi-4-mini with images. Prompts with images run with the LoRA adapter in the checkpoint's folder vision-lora, if
    there is one. The encoder of sounds is not read.
    """

    # In files as first published, matrices that adapters change are called base_layer, and the adapters' stand beside
    # them; the same are in folders of their own.
    checkpoint_names: ClassVar[CheckpointNames] = CheckpointNames(
        prefixes=(
            (f"{_IMAGES}img_projection.0.", f"{TOWER}.img_projection_up."),
            (f"{_IMAGES}img_projection.2.", f"{TOWER}.img_projection_down."),
            (f"{_IMAGES}sub_GN", LINE_END),
            (f"{_IMAGES}glb_GN", BETWEEN),
            (_IMAGES, f"{TOWER}."),
        ),
        suffixes=((".base_layer.weight", ".weight"),),
        unused=(f"{_EXTENDED}audio_embed.",),
        unused_ends=tuple(f".lora_{side}.{kind}.weight" for side in "AB" for kind in ("speech", "vision")),
        tower=(f"{TOWER}.",),
        raveled=(LINE_END, BETWEEN),
        flattened=("embeddings.patch_embedding.weight",),
    )

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        return super().read_hf(fields.with_defaults(**_DEFAULTS)) | {"tower": read_phi4(fields)}
