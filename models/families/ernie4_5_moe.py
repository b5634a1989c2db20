"""ERNIE 4.5 with experts (Baidu 2025, ERNIE 4.5 Technical Report): softmax scores, experts picked with a correction
bias, a shared MLP, rope over neighbouring elements, one switch for all biases.
Multi-token-prediction (MTP) layers are not read.
"""

from __future__ import annotations

from typing import Any, ClassVar

import jax.numpy as jnp
from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.config.experts import ExpertsConfig
from jaxengine.models.config.fields import ConfigFields, ModelConfigError
from jaxengine.models.config.model_config import ModelConfig
from jaxengine.models.config.pooler import Classifier
from jaxengine.models.config.readers.gguf import EXPERT_SIZE, SOFTMAX, GGUFConfig, gguf_experts, gguf_fields
from jaxengine.models.config.readers.hf import read_head_dim, read_rope
from jaxengine.models.families.llama import LAYER, gated_fields
from jaxengine.models.families.qwen3_moe import Qwen3MoeForCausalLM
from jaxengine.models.layers.base.embedding import vocab_bias
from jaxengine.models.layers.experts.moe import ExpertNames, MixtureOfExperts
from jaxengine.models.params.declare import ParamDecl, Source, declare
from jaxengine.models.params.source import CheckpointNames

# Smallest normal number of float32.
_TINY = float(jnp.finfo(jnp.float32).tiny)


class ErnieExperts(MixtureOfExperts):
    """Mixture of experts whose correction bias is stored as a row, [1, E]."""

    def make_correction_bias(self, source: str, num_experts: int) -> nnx.Param:
        tensor = Source(source, 1)
        return declare((1, num_experts), jnp.float32, ParamDecl((None, None), (tensor,), init_std=0.02))


class Ernie4_5_MoeForCausalLM(Qwen3MoeForCausalLM):
    """Llama with rope over neighbouring elements, and experts in some of its layers. Logits have biases where MLPs
    have.
    """

    biases_logits: ClassVar[bool] = True
    gguf_architecture: ClassVar[str | None] = "ernie4_5-moe"
    checkpoint_names: ClassVar[CheckpointNames] = CheckpointNames(
        parts=((".mlp.gate.moe_statics.", ".mlp.moe_statics."),)
    )

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        fields.require(moe_use_aux_free=True)
        bias = fields.boolean("use_bias", False)
        num_layers, size = fields.integer("num_hidden_layers"), fields.integer("moe_intermediate_size")
        first = fields.integer("moe_layer_start_index", 1, minimum=0)
        last = fields.integer("moe_layer_end_index", -1, minimum=-1)
        step, last = fields.integer("moe_layer_interval", 1), num_layers - 1 if last == -1 else last
        experts = ExpertsConfig(
            num_experts=fields.integer("moe_num_experts"),
            num_per_token=fields.integer("moe_k"),
            intermediate_size=size,
            dense_layers=tuple(n for n in range(num_layers) if (n + 1) % step or not first <= n <= last),
            correction_bias=True,
            min_weight_sum=read_least_sum(fields),
            shared_intermediate_size=size * fields.integer("moe_num_shared_experts", 2, minimum=0),
        )
        fields = fields.with_defaults(rope_theta=500000.0, rms_norm_eps=1e-5)
        rope = read_rope(fields, read_head_dim(fields), interleaved=True)
        shared = gated_fields(fields, ropes=[rope] * num_layers, tied=True, bias=bias, output_bias=bias)
        return shared | {"experts": experts, "mlp_bias": bias}

    @classmethod
    def read_gguf(cls, gguf: GGUFConfig) -> dict[str, Any]:
        fields = gguf.fields
        if fields.integer("expert_gating_func", SOFTMAX) != SOFTMAX:
            raise fields.fail("expert_gating_func", f"{SOFTMAX} (softmax) or absent")
        step = fields.integer("interleave_moe_layer_step")
        first = fields.integer("leading_dense_block_count", minimum=0)
        size, layers = fields.integer(EXPERT_SIZE), range(fields.integer("block_count"))
        experts = gguf_experts(
            fields,
            size=EXPERT_SIZE,
            norm_weights=True,
            dense_layers=tuple(n for n in layers if (n + 1) % step or n < first),
            correction_bias=True,
            min_weight_sum=1e-12,
            shared_intermediate_size=size * fields.integer("expert_shared_count", 0, minimum=0),
        )
        return gguf_fields(gguf, interleaved=True, experts=experts)

    def __init__(self, config: ModelConfig, build: Build):
        super().__init__(config, build)
        has_bias = self.stage.is_last and config.mlp_bias and self.biases_logits and config.pooler is None
        self.head_bias = vocab_bias("lm_head", config.vocab_size, self.build) if has_bias else None

    def make_experts(self, build: Build) -> nnx.Module:
        names = ExpertNames(correction_bias="moe_statics.e_score_correction_bias")
        return ErnieExperts(self.config, source=f"{LAYER}.mlp", names=names, router_dtype=jnp.float32, build=build)

    def make_labels(self, classifier: Classifier, build: Build) -> Any:
        """Return the module that scores labels. Raises ModelConfigError for labels that stand for logits of tokens if
        these have a bias.
        """
        if classifier.token_ids and self.config.mlp_bias and self.biases_logits:
            raise ModelConfigError("classifier_from_token must be absent for a model whose logits have a bias")
        return super().make_labels(classifier, build)


def read_least_sum(fields: ConfigFields) -> float:
    """Return `moe_norm_min` (default: 1e-12), the least divisor of a token's weights. For 0, return the smallest normal
    number of float32, so that weights that are all zero stay zero. Raises ModelConfigError for other numbers below.
    """
    given = fields.value("moe_norm_min", None)
    return _TINY if type(given) in (int, float) and given == 0 else fields.number("moe_norm_min", 1e-12)
