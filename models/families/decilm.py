"""DeciLM as in NVIDIA's Llama-Nemotron Super and Ultra (Bercovich et al. 2025, arXiv:2505.00949): Llama, pruned layer
by layer. Layers differ in KV heads and in the size of the MLP, and may lack attention, the MLP, or both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import jax
from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.config.fields import MAX_INTERMEDIATE, ConfigFields
from jaxengine.models.config.model_config import ModelConfig
from jaxengine.models.config.readers.gguf import GGUFConfig, gguf_fields, gguf_of_layers
from jaxengine.models.families.llama import LAYER, LlamaForCausalLM
from jaxengine.models.layers.attention.attention import StepInputs
from jaxengine.models.layers.base.activations import ACTIVATIONS
from jaxengine.models.layers.base.mlp import GatedMLP
from jaxengine.models.layers.base.norm import RMSNorm

_STEP = 256  # sizes of MLPs are rounded up to multiples of this
# Settings of a layer's attention and MLP that no published model has, and the only values that are read.
_ATTENTION_ONLY = {
    "replace_with_linear": False,
    "window_length": None,
    "num_sink_tokens": None,
    "unshifted_sink": False,
    "use_prefill_window_in_sink_attention": False,
    "sparsify": None,
}
_MLP_ONLY = {"replace_with_linear": False, "hidden_act": "silu", "sparsify": None}
# Kinds of rope that pair neighbouring elements.
_NEIGHBOURS = ("mistral_yarn", "rope_llama4")


class PrunedLayer(nnx.Module):
    """Layer that computes x + attention(norm(x)), then x + mlp(norm(x)), without those that are None, and their
    norms.
    """

    def __init__(self, config: ModelConfig, attention: nnx.Module | None, mlp: nnx.Module | None, build: Build):
        def norm(name: str) -> RMSNorm:
            return RMSNorm(config.hidden_size, config.rms_norm_eps, source=f"{LAYER}.{name}", build=build)

        self.attention, self.mlp = attention, mlp
        self.input_norm = None if attention is None else norm("input_layernorm")
        self.mlp_norm = None if mlp is None else norm("post_attention_layernorm")

    def __call__(self, x: jax.Array, kv: Any, pages: Any, step: StepInputs) -> tuple[jax.Array, Any]:
        if self.attention is not None and self.input_norm is not None:
            with jax.named_scope("attention"):
                attended, kv = self.attention(self.input_norm(x), kv, pages, step)
                x = x + attended
        if self.mlp is not None and self.mlp_norm is not None:
            with jax.named_scope("mlp"):
                x = x + self.mlp(self.mlp_norm(x), step.rows)
        return x, kv


class DeciLMForCausalLM(LlamaForCausalLM):
    """Llama of PrunedLayers. `ffn_sizes` of its configuration has 0 for a layer without MLP."""

    gguf_architecture: ClassVar[str | None] = "deci"

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        blocks = _blocks(fields)
        if fields.text("position_embedding_type", "rope") in _NEIGHBOURS:
            raise fields.fail("position_embedding_type", f"none of {', '.join(_NEIGHBOURS)}")
        heads, hidden = fields.integer("num_attention_heads"), fields.integer("hidden_size")
        groups = [_group(own, heads) for own, _ in blocks]
        sizes = tuple(_ffn_size(own, hidden) for _, own in blocks)
        if not any(groups):
            raise fields.fail("block_configs", "a list with attention in one layer at least")
        # Absent or null in published files, as layers differ.
        known = {"num_key_value_heads": heads, "intermediate_size": max(*sizes, 1)}
        return _pruned(super().read_hf(ConfigFields({**fields.raw, **known})), groups, sizes)

    @classmethod
    def read_gguf(cls, gguf: GGUFConfig) -> dict[str, Any]:
        fields, names = gguf.fields, ("attention.head_count", "attention.head_count_kv", "feed_forward_length")
        heads, kv_heads, sizes = (gguf_of_layers(fields, name, 0) for name in names)
        groups = [count // (kv_count or 1) for count, kv_count in zip(heads, kv_heads, strict=True)]
        most = max(heads)
        pairs = zip(heads, kv_heads, strict=True)
        if any(count not in (0, most) or count % (kv or 1) or (kv > 0) != (count > 0) for count, kv in pairs):
            raise fields.fail(names[1], "a divisor of attention.head_count, or 0 for both, in each layer")
        known = zip(names, (most, most, max(*sizes, 1)), strict=True)
        own = gguf._replace(metadata={**gguf.metadata, **{f"{fields.prefix}{key}": each for key, each in known}})
        return _pruned(gguf_fields(own), groups, sizes)

    def make_layer(self, layer: int, build: Build) -> nnx.Module:
        config = self.config
        attention = self.make_attention(layer, build) if config.attention[layer].attends else None
        mlp = None
        if size := config.ffn_sizes[layer]:
            options = {"bias": config.mlp_bias, "activation": ACTIVATIONS[config.activation]}
            mlp = GatedMLP(config.hidden_size, size, source=f"{LAYER}.mlp", build=build, **options)
        return PrunedLayer(config, attention, mlp, build)


def _pruned(shared: dict[str, Any], groups: Sequence[int], sizes: tuple[int, ...]) -> dict[str, Any]:
    """Return arguments of ModelConfig, `shared`, with the KV heads and the size of the MLP of each layer. groups:
    numbers of heads that share a KV head, 0 without attention.
    """
    attention = tuple(
        replace(each, num_kv_heads=each.num_heads // (group or 1), feed_forward_only=not group, mixer_only=not size)
        for each, group, size in zip(shared["attention"], groups, sizes, strict=True)
    )
    return shared | {"attention": attention, "ffn_sizes": sizes}


def _blocks(fields: ConfigFields) -> list[tuple[ConfigFields, ConfigFields]]:
    """Return a pair for each layer, the settings of its attention and of its MLP, from `block_configs`. Raises
    ModelConfigError for another number of layers, and for settings that are not supported.
    """
    count, listed = fields.integer("num_hidden_layers"), fields.value("block_configs")
    if not isinstance(listed, list) or len(listed) != count or not all(isinstance(each, dict) for each in listed):
        raise fields.fail("block_configs", f"a list of {count} mappings, one for each layer")
    blocks = []
    for number, given in enumerate(listed):
        prefix = f"block_configs.{number}."
        each = ConfigFields({prefix + name: value for name, value in given.items()}, prefix)
        attention, mlp = (each.part(name) for name in ("attention", "ffn"))
        attention.require(**_ATTENTION_ONLY)
        mlp.require(**_MLP_ONLY)
        blocks.append((attention, mlp))
    return blocks


def _group(own: ConfigFields, num_heads: int) -> int:
    """Return `n_heads_in_group`, the number of heads that share a KV head in a layer with these settings; 0 for one
    without attention (`no_op`). Raises ModelConfigError for a missing or wrong field, and for a number that does not
    divide num_heads.
    """
    if own.boolean("no_op", False):
        return 0
    if num_heads % (group := own.integer("n_heads_in_group")):
        raise own.fail("n_heads_in_group", f"a divisor of num_attention_heads = {num_heads}")
    return group


def _ffn_size(own: ConfigFields, hidden_size: int) -> int:
    """Return the size of the MLP of a layer with these settings: `intermediate_size`, or 2/3 of `ffn_mult` times the
    hidden size, rounded up to a multiple of _STEP; 0 for one without MLP (`no_op`). Raises ModelConfigError for a
    missing or wrong field, and for a result above MAX_INTERMEDIATE.
    """
    if own.boolean("no_op", False):
        return 0
    share = own.number("ffn_mult", None)
    if share is None:
        return own.integer("intermediate_size")
    size = -(-int(2 * share * hidden_size / 3) // _STEP) * _STEP
    if not 1 <= size <= MAX_INTERMEDIATE:
        raise own.fail("ffn_mult", f"such that the MLP has 1 to {MAX_INTERMEDIATE} inner elements")
    return size
