"""Falcon-H1 (Zuo et al. 2025, arXiv:2507.22448): attention and Mamba-2 in parallel in every layer, and multipliers of
the inputs and outputs of a layer's parts.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import jax
from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.cache import StateRows
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.model_config import ModelConfig, Multipliers
from jaxengine.models.config.readers.gguf import GGUFConfig, gguf_fields
from jaxengine.models.config.readers.gguf_states import gguf_state_space
from jaxengine.models.config.readers.state_space import read_state_space
from jaxengine.models.config.state import StateSpace
from jaxengine.models.families.llama import LAYER, LlamaForCausalLM, gated_fields
from jaxengine.models.layers.attention.attention import Attention, LayerPages, StepInputs
from jaxengine.models.layers.base.activations import ACTIVATIONS
from jaxengine.models.layers.base.mlp import GatedMLP, OfScaled
from jaxengine.models.layers.base.norm import RMSNorm
from jaxengine.models.layers.base.scale import scaled
from jaxengine.models.layers.states.mamba2 import Mamba2, States
from jaxengine.models.params.source import CheckpointNames
from jaxengine.pallas_kernels.kv.pages import KVPages

NUM_PROJECTED = 5  # gate, inputs, B, C and time steps


class ParallelLayer(nnx.Module):
    """Layer x + mamba(norm(x)) + attention(norm(x)), then x + mlp(norm(x)), with multipliers before and after every
    part.
    """

    def __init__(self, config: ModelConfig, attention: nnx.Module, mamba: nnx.Module, mlp: nnx.Module, build: Build):
        assert config.multipliers is not None
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_norm = RMSNorm(size, eps, source=f"{LAYER}.input_layernorm", build=build)
        self.attention, self.mamba = attention, mamba
        self.mlp_norm = RMSNorm(size, eps, source=f"{LAYER}.pre_ff_layernorm", build=build)
        self.mlp = mlp
        self.multipliers = config.multipliers

    def __call__(
        self, x: jax.Array, kv: tuple[KVPages, States], pages: tuple[LayerPages, StateRows], step: StepInputs
    ) -> tuple[jax.Array, tuple[KVPages, States]]:
        by, (pool, kept), (own_pages, rows) = self.multipliers, kv, pages
        normed = self.input_norm(x)
        with jax.named_scope("attention"):
            attended, pool = self.attention(scaled(normed, by.attention_in), pool, own_pages, step)
        with jax.named_scope("mamba"):
            mixed, kept = self.mamba(scaled(normed, by.state_in), kept, rows, step)
        x = x + (scaled(mixed, by.state_out) + scaled(attended, by.attention_out))
        with jax.named_scope("mlp"):
            return x + scaled(self.mlp(self.mlp_norm(x), step.rows), by.mlp_out), (pool, kept)


class ScaledKeysAttention(Attention):
    """Attention whose keys are multiplied by a constant before rope, so that cached keys are scaled too."""

    def __init__(self, multiplier: float, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.multiplier = multiplier

    def rotate(self, q: jax.Array, k: jax.Array, step: StepInputs) -> tuple[jax.Array, jax.Array]:
        return super().rotate(q, scaled(k, self.multiplier), step)


class FalconH1ForCausalLM(LlamaForCausalLM):
    """Llama of ParallelLayers."""

    gguf_architecture: ClassVar[str | None] = "falcon-h1"
    checkpoint_names: ClassVar[CheckpointNames] = CheckpointNames(squeezed=(".conv1d.weight",))

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        bias, fields = fields.boolean("attention_bias", False), fields.with_defaults(rms_norm_eps=1e-5)
        shared = gated_fields(fields, bias=bias, output_bias=bias)
        inner_size = fields.integer("mamba_d_ssm", None) or fields.integer("mamba_expand", 2) * shared["hidden_size"]
        norm = "before" if fields.boolean("mamba_norm_before_gate", True, null_is_false=True) else "after"
        norm = norm if fields.boolean("mamba_rms_norm", False) else None
        state = replace(
            read_state_space(fields, inner_size, norm=norm),
            output_bias=fields.boolean("projectors_bias", False),
            multipliers=_numbers(fields, "ssm_multipliers", NUM_PROJECTED),
        )
        mlp_gate, mlp_out = _numbers(fields, "mlp_multipliers", 2)
        multipliers = Multipliers(
            attention_in=fields.number("attention_in_multiplier", 1.0),
            attention_out=fields.number("attention_out_multiplier", 1.0),
            keys=fields.number("key_multiplier", 1.0),
            state_in=fields.number("ssm_in_multiplier", 1.0),
            state_out=fields.number("ssm_out_multiplier", 1.0),
            mlp_gate=mlp_gate,
            mlp_out=mlp_out,
        )
        return shared | {
            "attention": tuple(replace(each, state=state, beside_state=True) for each in shared["attention"]),
            "mlp_bias": fields.boolean("mlp_bias", False),
            "embedding_multiplier": fields.number("embedding_multiplier", 1.0),
            "logit_scale": fields.number("lm_head_multiplier", 1.0),
            "multipliers": multipliers,
        }

    @classmethod
    def read_gguf(cls, gguf: GGUFConfig) -> dict[str, Any]:
        # A file's matrices include all multipliers, and its tensors say whether there is a norm (with_stored_biases).
        shared, state = gguf_fields(gguf), replace(gguf_state_space(gguf.fields), norm=None)
        layers = tuple(replace(each, state=state, beside_state=True) for each in shared["attention"])
        return shared | {"attention": layers, "multipliers": Multipliers(*[1.0] * len(Multipliers._fields))}

    def make_attention(self, layer: int, build: Build) -> nnx.Module:
        config, source = self.config, f"{LAYER}.self_attn"
        assert config.multipliers is not None
        own, eps = config.attention[layer], config.rms_norm_eps
        return ScaledKeysAttention(
            config.multipliers.keys, own, config.hidden_size, eps=eps, source=source, build=build
        )

    def make_layer(self, layer: int, build: Build) -> nnx.Module:
        config, state = self.config, self.config.attention[layer].state
        assert isinstance(state, StateSpace)
        mamba = Mamba2(state, config.hidden_size, eps=config.rms_norm_eps, source=f"{LAYER}.mamba", build=build)
        return ParallelLayer(config, self.make_attention(layer, build), mamba, self.make_mlp(layer, build), build)

    def make_mlp(self, layer: int, build: Build) -> nnx.Module:
        config = self.config
        assert config.multipliers is not None
        activation = OfScaled(config.multipliers.mlp_gate, ACTIVATIONS[config.activation])
        sizes = config.hidden_size, config.intermediate_size
        return GatedMLP(
            *sizes, source=f"{LAYER}.feed_forward", bias=config.mlp_bias, activation=activation, build=build
        )

    def make_norm(self, build: Build) -> nnx.Module:
        return RMSNorm(self.config.hidden_size, self.config.rms_norm_eps, source="model.final_layernorm", build=build)


def _numbers(fields: ConfigFields, name: str, count: int) -> tuple[float, ...]:
    """Return the field `name`, a list of `count` numbers above zero, as a tuple; all 1 if it is absent. Raises
    ModelConfigError for any other value.
    """
    given = fields.value(name, [1.0] * count)
    if not isinstance(given, list) or len(given) != count:
        raise fields.fail(name, f"a list of {count} numbers")
    return tuple(ConfigFields({name: each}).number(name) for each in given)
