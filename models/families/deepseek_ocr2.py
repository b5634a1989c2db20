"""DeepSeek-OCR 2 (Wei et al. 2026), as transformers stores it: DeepSeek-V2's experts with Llama's attention, and a
vision tower that encodes an image as a whole and in tiles.
"""

from __future__ import annotations

from typing import Any, ClassVar

import jax.numpy as jnp
from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.readers.hf import hf_fields, text_fields
from jaxengine.models.families.deepseek_v2 import read_experts
from jaxengine.models.families.llama import LAYER, LlamaForCausalLM
from jaxengine.models.layers.experts.moe import MixtureOfExperts
from jaxengine.models.params.source import CheckpointNames
from jaxengine.models.vision.deepseek_ocr import KERNELS, PROJECTOR, SEPARATOR, TOWER, read_deepseek_ocr2

_SAM, _ENCODER = f"{TOWER}.sam_encoder", f"{TOWER}.vision_encoder"
# (Prefix of names in published files, which follow the model's original code, prefix in transformers).
_STORED = (
    ("sam_model.blocks.", f"{_SAM}.layers."),
    ("sam_model.patch_embed.proj.", f"{_SAM}.patch_embed.projection."),
    ("sam_model.neck.0.", f"{_SAM}.neck.conv1."),
    ("sam_model.neck.1.", f"{_SAM}.neck.layer_norm1."),
    ("sam_model.neck.2.", f"{_SAM}.neck.conv2."),
    ("sam_model.neck.3.", f"{_SAM}.neck.layer_norm2."),
    ("sam_model.net_2.", f"{_SAM}.proj.conv1."),
    ("sam_model.net_3.", f"{_SAM}.proj.conv2."),
    ("sam_model.", f"{_SAM}."),
    ("qwen2_model.model.model.", f"{_ENCODER}."),
    ("qwen2_model.query_768.", f"{TOWER}.query_768_resolution."),
    ("qwen2_model.query_1024.", f"{TOWER}.query_1024_resolution."),
    ("projector.layers.", f"{PROJECTOR}."),
    ("view_seperator", SEPARATOR),
)
_DENSE, _SPARSE = "dense", "sparse"
# transformers' defaults for fields that a file lacks.
_DEFAULTS = {
    "vocab_size": 102400,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "moe_intermediate_size": 1407,
}


class DeepseekOcr2ForConditionalGeneration(LlamaForCausalLM):
    """Llama's attention with DeepSeek-V2's experts, and a vision tower."""

    gguf_architecture: ClassVar[str | None] = None  # not read from GGUF
    checkpoint_names: ClassVar[CheckpointNames] = CheckpointNames(
        prefixes=(
            ("model.language_model.", "model."),
            *((f"model.{part}", part) for part in (TOWER, PROJECTOR, SEPARATOR)),
            *((f"model.{stored}", name) for stored, name in _STORED),
        ),
        suffixes=tuple(
            (f".norm{number}.{end}", f".layer_norm{number}.{end}") for number in (1, 2) for end in ("weight", "bias")
        ),
        tower=(f"{TOWER}.", f"{PROJECTOR}.", SEPARATOR),
        flattened=KERNELS,
    )

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        text = text_fields(fields).with_defaults(**_DEFAULTS)
        if text.text("model_type", "deepseek_ocr2_text") != "deepseek_ocr2_text":
            raise text.fail("model_type", "deepseek_ocr2_text in text_config")
        bias = text.boolean("attention_bias", False)
        experts = read_experts(text, _dense_layers(text))
        shared = hf_fields(text, bias=bias, output_bias=bias)
        return shared | {"experts": experts, "tower": read_deepseek_ocr2(fields)}

    def make_mlp(self, layer: int, build: Build) -> nnx.Module:
        assert self.config.experts is not None
        if layer in self.config.experts.dense_layers:
            return super().make_mlp(layer, build)
        return MixtureOfExperts(self.config, source=f"{LAYER}.mlp", router_dtype=jnp.float32, build=build)


def _dense_layers(fields: ConfigFields) -> tuple[int, ...]:
    """Return the indices of the layers without experts, "dense" in the list `mlp_layer_types`. Raises ModelConfigError
    for another form of that field.
    """
    kinds, count = fields.value("mlp_layer_types"), fields.integer("num_hidden_layers")
    if not isinstance(kinds, list) or len(kinds) != count or any(kind not in (_DENSE, _SPARSE) for kind in kinds):
        raise fields.fail("mlp_layer_types", f"a list of {count} of {_DENSE}, {_SPARSE}")
    return tuple(layer for layer, kind in enumerate(kinds) if kind == _DENSE)
