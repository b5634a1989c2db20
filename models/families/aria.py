"""Aria (Li et al. 2024, arXiv:2410.05993): Llama with experts beside a shared MLP in all layers, and a vision tower."""

from __future__ import annotations

from typing import Any, ClassVar

from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.config.experts import ExpertsConfig
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.readers.hf import text_fields
from jaxengine.models.families.llama import LAYER, LlamaForCausalLM
from jaxengine.models.families.llava import NAMES, PROJECTOR
from jaxengine.models.layers.base.activations import SILU, gated_by
from jaxengine.models.layers.experts.moe import ExpertNames, MixtureOfExperts
from jaxengine.models.params.source import CheckpointNames, StackedExperts
from jaxengine.models.vision.aria import read_aria_tower

_TEXT = "aria_text"
# transformers' defaults of fields that a file lacks.
_DEFAULTS: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_JOINED = f"{PROJECTOR}.cross_attn.multihead_attn.in_proj"
_STACKED = StackedExperts(out_first=False)
# As published -> as transformers 5 has them.
_EXPERTS = ((".experts.fc1.weight", ".experts.gate_up_proj"), (".experts.fc2.weight", ".experts.down_proj"))


class AriaTextForCausalLM(LlamaForCausalLM):
    """Llama whose layers have experts, and a shared MLP of as many of them."""

    checkpoint_names: ClassVar[CheckpointNames] = CheckpointNames(suffixes=_EXPERTS, stacked_experts=_STACKED)

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        fields = fields.with_defaults(**_DEFAULTS)
        shared, size = super().read_hf(fields), fields.integer("intermediate_size")
        experts = ExpertsConfig(
            num_experts=fields.integer("moe_num_experts", 8),
            num_per_token=fields.integer("moe_topk", 2),
            intermediate_size=size,
            shared_intermediate_size=size * fields.integer("moe_num_shared_experts", 2),
        )
        return shared | {"experts": experts}

    def make_mlp(self, layer: int, build: Build) -> nnx.Module:
        # Experts have a SiLU, whatever the activation of the shared MLP.
        options: dict[str, Any] = {"names": ExpertNames(router="router"), "activation": gated_by(SILU)}
        return MixtureOfExperts(self.config, source=f"{LAYER}.mlp", build=build, **options)


class AriaForConditionalGeneration(AriaTextForCausalLM):
    """Aria with its vision tower."""

    checkpoint_names: ClassVar[CheckpointNames] = NAMES._replace(
        prefixes=(*((f"{outer}{_JOINED}_", f"{_JOINED}.") for outer in ("model.", "")), *NAMES.prefixes),
        suffixes=_EXPERTS,
        stacked_experts=_STACKED,
        plain=(_JOINED,),  # a parameter of torch's MultiheadAttention, and no Linear
    )

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        text = text_fields(fields, optional=True)
        if text.text("model_type", _TEXT) != _TEXT:
            raise text.fail("model_type", _TEXT)
        return super().read_hf(text) | {"tower": read_aria_tower(fields)}
