"""Mistral (Jiang et al. 2023, arXiv:2310.06825): Llama without biases and with one sliding window for all layers."""

from __future__ import annotations

from typing import Any

from jaxengine.models.config.fields import ConfigFields, ModelConfigError
from jaxengine.models.families.llama import LlamaForCausalLM, gated_fields


class MistralForCausalLM(LlamaForCausalLM):
    """Llama without biases and with one sliding window for all layers."""

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        if "sliding_window" not in fields.raw:
            raise ModelConfigError("sliding_window is missing: null (no window) or an integer >= 1 is allowed")
        return gated_fields(fields, windows=fields.integer("sliding_window", None))
