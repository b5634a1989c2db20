"""Qwen3.5 (Qwen Team 2026): Qwen3-Next's layers with dense MLPs and separate projections of the delta nets, and the
vision tower and M-RoPE of Qwen3-VL.
"""

from __future__ import annotations

from typing import Any, ClassVar

from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.readers.gguf import GGUFConfig
from jaxengine.models.config.readers.gguf_states import gguf_delta_fields
from jaxengine.models.config.readers.hf import predicting, text_fields
from jaxengine.models.config.state import GatedDelta
from jaxengine.models.families.llama import LlamaForCausalLM
from jaxengine.models.families.qwen2_vl import QWEN_NAMES, with_sight, without_mrope
from jaxengine.models.families.qwen3_next import Qwen3NextForCausalLM, hybrid_fields
from jaxengine.models.params.declare import Source, parts_of
from jaxengine.models.params.source import MTP_LAYER, CheckpointNames
from jaxengine.models.vision.qwen3_vl import read_qwen3_5


class Qwen3_5ForCausalLM(Qwen3NextForCausalLM):
    """Layers of gated delta nets or gated attention, each with a dense MLP."""

    gguf_architecture: ClassVar[str | None] = "qwen35"

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        return predicting(hybrid_fields(fields))

    @classmethod
    def read_gguf(cls, gguf: GGUFConfig) -> dict[str, Any]:
        return gguf_delta_fields(gguf)

    def make_mlp(self, layer: int, build: Build) -> nnx.Module:
        return LlamaForCausalLM.make_mlp(self, layer, build)

    def delta_inputs(self, state: GatedDelta, source: str) -> list[Source]:
        return separate_inputs(state, source)


class Qwen3_5ForConditionalGeneration(Qwen3_5ForCausalLM):
    """Qwen3.5 with a vision tower, as it is published."""

    checkpoint_names: ClassVar[CheckpointNames] = QWEN_NAMES._replace(
        squeezed=(".conv1d.weight",), next_layer=MTP_LAYER
    )

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        text = without_mrope(text_fields(fields))
        return with_sight(super().read_hf(text), text, fields, read_qwen3_5)


def separate_inputs(state: GatedDelta, source: str) -> list[Source]:
    """Return the sources of q, k, v, z, beta and decay, in this order, of which only q, k and v are in one module.

    source: name of the delta net's checkpoint module.
    """
    apart = {"in_proj_z": state.value_size, "in_proj_b": state.num_v_heads, "in_proj_a": state.num_v_heads}
    return [
        *parts_of(f"{source}.in_proj_qkv", state.key_size, state.key_size, state.value_size),
        *(Source(f"{source}.{name}", rows) for name, rows in apart.items()),
    ]
