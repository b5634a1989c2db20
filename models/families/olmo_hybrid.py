"""OLMo Hybrid (OLMo Team 2026): gated delta nets in three of four layers, whose norms come before them, and OLMo 3's
attention in the others, in published checkpoints without rope.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.readers.hf import FULL, read_each_layer
from jaxengine.models.config.state import GatedDelta
from jaxengine.models.families.llama import LAYER, LlamaLayer, gated_fields
from jaxengine.models.families.olmo2 import Olmo2ForCausalLM
from jaxengine.models.layers.states.delta_net import APART, CONVS, JOINED, GatedDeltaNet
from jaxengine.models.params.declare import Source
from jaxengine.models.params.source import CheckpointNames

LINEAR = "linear_attention"
# Epsilon of the norm of delta nets' outputs, whatever the epsilon of the model's other norms.
READ_EPS = 1e-5


class OlmoHybridForCausalLM(Olmo2ForCausalLM):
    """OLMo 2's layers, and Llama's with a delta net in place of attention."""

    checkpoint_names: ClassVar[CheckpointNames] = CheckpointNames(
        suffixes=(
            (".attention_layer_norm.weight", ".input_layernorm.weight"),
            (".feedforward_layer_norm.weight", ".post_attention_layernorm.weight"),
        ),
        squeezed=(*CONVS, *JOINED),
        joined=JOINED,
    )

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        bias, heads = fields.boolean("attention_bias", False), fields.integer("num_attention_heads")
        kinds, rope = _layer_kinds(fields), fields.mapping("rope_parameters") or fields.mapping("rope_scaling") or {}
        # A base of null means no rope; an absent one is the default.
        turns = rope.get("rope_theta", fields.raw.get("rope_theta", 10000.0)) is not None
        shared = gated_fields(fields, ropes=None if turns else [None] * len(kinds), bias=bias, output_bias=bias)
        k_heads = fields.integer("linear_num_key_heads", None) or heads
        key_dim = fields.integer("linear_key_head_dim", None) or int(0.75 * shared["hidden_size"] / k_heads)
        state = GatedDelta(
            num_k_heads=k_heads,
            num_v_heads=fields.integer("linear_num_value_heads", None) or heads,
            k_head_dim=key_dim,
            v_head_dim=fields.integer("linear_value_head_dim", None) or 2 * key_dim,
            conv_kernel=fields.integer("linear_conv_kernel_dim", 4),
            activation=shared["activation"],
            beta_scale=2.0 if fields.boolean("linear_allow_neg_eigval", True) else 1.0,
        )
        layers = zip(shared["attention"], kinds, strict=True)
        attention = (replace(each, rope=None, state=state) if kind == LINEAR else each for each, kind in layers)
        return shared | {"attention": tuple(attention)}

    def make_layer(self, layer: int, build: Build) -> nnx.Module:
        config, state = self.config, self.config.attention[layer].state
        if not isinstance(state, GatedDelta):
            return super().make_layer(layer, build)
        source, heads = f"{LAYER}.linear_attn", state.num_v_heads
        sizes = {"q": state.key_size, "k": state.key_size, "v": state.value_size, "g": state.value_size}
        inputs = [Source(f"{source}.{name}_proj", size) for name, size in {**sizes, "b": heads, "a": heads}.items()]
        options: dict[str, Any] = {"eps": READ_EPS, "source": source, "build": build, "names": APART}
        mixer = GatedDeltaNet(state, config.hidden_size, inputs=inputs, **options)
        return LlamaLayer(config, mixer, self.make_mlp(layer, build), build)


def _layer_kinds(fields: ConfigFields) -> list[str]:
    """Return LINEAR or FULL for each layer, as `layer_types` lists them. Without the list every fourth layer is FULL,
    and in a model of fewer than four layers the last one. Raises ModelConfigError for other kinds or a list of another
    length.
    """
    count = fields.integer("num_hidden_layers")
    full = range(3, count, 4) or [count - 1]
    usual = [FULL if layer in full else LINEAR for layer in range(count)]
    return read_each_layer(fields, "layer_types", (FULL, LINEAR)) or usual
