"""Granite 3 with experts (IBM 2024, "Granite 3.0 Language Models"), and PowerMoE: Granite with experts in every layer,
in some checkpoints with a shared MLP.
"""

from __future__ import annotations

from typing import Any, ClassVar

from jaxengine.models.config.experts import ExpertsConfig
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.readers.gguf import WITH_EXPERTS, GGUFConfig, gguf_experts
from jaxengine.models.families.declared_dense import gguf_swash, ropes_of_layers
from jaxengine.models.families.declared_rows import full_first_of_four
from jaxengine.models.families.granite import granite_gguf_fields, granite_multipliers
from jaxengine.models.families.granite_moe_hybrid import GraniteMoeHybridForCausalLM
from jaxengine.models.families.llama import gated_fields


class GraniteMoeForCausalLM(GraniteMoeHybridForCausalLM):
    """Granite 4's layers, with attention and rope in all of them, and experts."""

    gguf_architecture: ClassVar[str | None] = "granitemoe"

    @classmethod
    def read_gguf(cls, gguf: GGUFConfig) -> dict[str, Any]:
        size = gguf.fields.integer("expert_shared_feed_forward_length", 0, minimum=0)
        experts = gguf_experts(gguf.fields, norm_weights=True, shared_intermediate_size=size)
        shared = granite_gguf_fields(gguf, experts)
        return shared | {"intermediate_size": size or shared["intermediate_size"]}

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        bias, scale = fields.boolean("attention_bias", False), fields.number("attention_multiplier", 1.0)
        shared = gated_fields(fields, bias=bias, output_bias=bias, scale=scale)
        shared_size = cls.shared_size(fields)
        experts = ExpertsConfig(
            num_experts=fields.integer("num_local_experts", 8),
            num_per_token=fields.integer("num_experts_per_tok", 2),
            intermediate_size=fields.integer("intermediate_size"),
            shared_intermediate_size=shared_size,
        )
        sizes = {"intermediate_size": shared_size or shared["intermediate_size"], "experts": experts}
        return shared | granite_multipliers(fields) | sizes

    @classmethod
    def shared_size(cls, fields: ConfigFields) -> int:
        """Return the feed-forward size of the shared MLP; 0 for none, as here. Overrides that read it from `fields`
        raise ModelConfigError for a wrong field.
        """
        return 0


class GraniteMoeSharedForCausalLM(GraniteMoeForCausalLM):
    """Granite with experts and a shared MLP."""

    @classmethod
    def shared_size(cls, fields: ConfigFields) -> int:
        """Return `shared_intermediate_size`; 0, for no shared MLP, if it is absent. Raises ModelConfigError for a wrong
        value.
        """
        return fields.integer("shared_intermediate_size", 0, minimum=0)


class GraniteMoeSWAForCausalLM(GraniteMoeSharedForCausalLM):
    """Granite with experts, sinks, windows in three of four layers, and a base of rope by layer (Granite Swash)."""

    gguf_architecture: ClassVar[str | None] = WITH_EXPERTS["granite_swa"]

    @classmethod
    def read_gguf(cls, gguf: GGUFConfig) -> dict[str, Any]:
        shared = super().read_gguf(gguf)
        return shared | {"attention": gguf_swash(gguf.fields, shared["attention"])}

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        fields = fields.with_defaults(sliding_window=128, attention_multiplier=1.0)
        fields = ConfigFields({**fields.raw, **full_first_of_four(fields)})
        shared = super().read_hf(fields)
        layers = (ropes_of_layers(fields, number, layer) for number, layer in enumerate(shared["attention"]))
        return shared | {"attention": tuple(layers)}
