"""GLM-4.7-Flash: DeepSeek-V3 that lists which of its layers have experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.families.deepseek_v3 import DeepseekV3ForCausalLM


class Glm4MoeLiteForCausalLM(DeepseekV3ForCausalLM):
    """DeepSeek-V3, by default with one dense layer."""

    gguf_architecture: ClassVar[str | None] = None  # GGUF files of it say "deepseek2"

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        shared = super().read_hf(fields.with_defaults(first_k_dense_replace=1))
        kinds, num_layers = fields.value("mlp_layer_types", None), fields.integer("num_hidden_layers")
        if kinds is None:
            return shared
        if not isinstance(kinds, list) or len(kinds) != num_layers or any(k not in ("dense", "sparse") for k in kinds):
            raise fields.fail("mlp_layer_types", f"a list of {num_layers} of dense, sparse")
        dense = tuple(layer for layer, kind in enumerate(kinds) if kind == "dense")
        return shared | {"experts": replace(shared["experts"], dense_layers=dense)}
