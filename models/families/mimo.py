"""MiMo (Xiaomi 2025, arXiv:2505.07608): Qwen2, and a layer that predicts further tokens."""

from __future__ import annotations

from typing import Any, ClassVar

from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.readers.hf import predicting
from jaxengine.models.families.qwen2 import Qwen2ForCausalLM
from jaxengine.models.params.source import CheckpointNames, NextLayer

_LAYER = "model.mtp_layers.0."


class MiMoForCausalLM(Qwen2ForCausalLM):
    """Qwen2 with a layer that predicts further tokens."""

    gguf_architecture: ClassVar[str | None] = None
    checkpoint_names: ClassVar[CheckpointNames] = CheckpointNames(
        next_layer=NextLayer(
            (
                (f"{_LAYER}input_proj", "eh_proj"),
                (f"{_LAYER}token_layernorm", "enorm"),
                (f"{_LAYER}hidden_layernorm", "hnorm"),
                (_LAYER, ""),
            ),
            norm="final_layernorm",
            normed=True,
            hidden_first=True,
        )
    )

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        return predicting(super().read_hf(fields))
