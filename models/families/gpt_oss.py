"""gpt-oss (OpenAI 2025, arXiv:2508.10925): attention sinks, a window in every second layer, experts with biases and a
clamped activation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.config.experts import ExpertsConfig
from jaxengine.models.config.fields import ConfigFields, ModelConfigError
from jaxengine.models.config.readers.gguf import EXPERT_SIZE, GGUFConfig, gguf_experts, gguf_fields, gguf_layers
from jaxengine.models.config.readers.hf import hf_fields, layer_kinds, require_rope, windows_by_kind
from jaxengine.models.families.llama import LAYER, LlamaForCausalLM
from jaxengine.models.layers.base.mlp import ClampedSwish
from jaxengine.models.layers.experts.moe import ExpertNames, MixtureOfExperts
from jaxengine.models.params.source import CheckpointNames, StackedExperts


class GptOssForCausalLM(LlamaForCausalLM):
    """Llama with biases, sinks and experts."""

    gguf_architecture: ClassVar[str | None] = "gpt-oss"
    checkpoint_names: ClassVar[CheckpointNames] = CheckpointNames(
        stacked_experts=StackedExperts(interleaved=True, out_first=False)
    )

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        require_rope(fields)
        fields = fields.with_defaults(rope_theta=150_000.0, rms_norm_eps=1e-5)
        windows = windows_by_kind(layer_kinds(fields, full_every=2), fields.integer("sliding_window", 128))
        experts = ExpertsConfig(
            num_experts=fields.integer("num_local_experts"),
            num_per_token=fields.integer("num_experts_per_tok"),
            intermediate_size=fields.integer("intermediate_size"),
            bias=True,
            swiglu_alpha=fields.number("swiglu_alpha", 1.702),
            swiglu_limit=fields.number("swiglu_limit", 7.0),
        )
        bias = fields.boolean("attention_bias", True)
        shared = hf_fields(fields, windows=windows, head_dim=64, sinks=True, bias=bias, output_bias=bias)
        return shared | {"experts": experts}

    @classmethod
    def read_gguf(cls, gguf: GGUFConfig) -> dict[str, Any]:
        experts = gguf_experts(gguf.fields, norm_weights=True, size=EXPERT_SIZE, bias=True)
        own: dict[str, Any] = {"sinks": True, "bias": True, "output_bias": True}
        shared = gguf_fields(gguf, experts=experts, yarn={"truncate": False}, **own)
        layer = shared["attention"][0]
        return shared | {"attention": gguf_layers(gguf.fields, layer, replace(layer, window=None), full_every=2)}

    def make_mlp(self, layer: int, build: Build) -> nnx.Module:
        experts = self.config.experts
        if experts is None:
            raise ModelConfigError(f"experts must be set for {self.config.architecture}, got None")
        activation = ClampedSwish(experts.swiglu_alpha, experts.swiglu_limit)
        names = ExpertNames(router="router")
        return MixtureOfExperts(self.config, source=f"{LAYER}.mlp", names=names, activation=activation, build=build)
