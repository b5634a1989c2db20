"""Solar Pro (Upstage 2024): Llama that keeps the hidden state before some layers and mixes it into later ones."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.config.altup import BlockSkips
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.families.llama import LlamaForCausalLM, LlamaLayer, gated_fields
from jaxengine.models.forward_batch import ForwardBatch
from jaxengine.models.layers.attention.attention import LayerPages, StepInputs
from jaxengine.models.layers.base.norm import NormOfFirst
from jaxengine.pallas_kernels.kv.pages import KVPages


class SolarLayer(LlamaLayer):
    """Layer of Llama over three hidden states side by side: the current one and the two that are kept.

    kept: for each of the two, whether this layer's input takes its place. mixed: for each, whether it is mixed into
    this layer's input afterwards. share: its factor in the sum, in which the input has the rest.
    """

    def __init__(self, *parts: Any, kept: tuple[bool, ...], mixed: tuple[bool, ...], share: float):
        super().__init__(*parts)
        self.kept, self.mixed, self.share = kept, mixed, share

    def __call__(self, x: jax.Array, kv: KVPages, pages: LayerPages, step: StepInputs) -> tuple[jax.Array, KVPages]:
        """Map x [T, 3 D] to ([T, 3 D], the pool with this step's keys and values of this layer written). x is the
        hidden state and two kept ones, which it replaces where `kept`; where `mixed`, it becomes their mean, with
        weight `share` of the kept.
        """
        x, *others = jnp.split(x, 3, axis=-1)
        others = [x if keeps else other for keeps, other in zip(self.kept, others, strict=True)]
        for mixes, other in zip(self.mixed, others, strict=True):
            if mixes:
                mean = other.astype(jnp.float32) * self.share + x.astype(jnp.float32) * (1 - self.share)
                x = mean.astype(x.dtype)
        x, kv = super().__call__(x, kv, pages, step)
        return jnp.concatenate([x, *others], axis=-1), kv


class SolarForCausalLM(LlamaForCausalLM):
    """Llama in which each of two kept hidden states is mixed into the input of some layers."""

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        bias = fields.boolean("attention_bias", False) or fields.boolean("bias", False)
        window = fields.integer("sliding_window", None)
        shared = gated_fields(fields, windows=window, bias=bias, output_bias=bias)
        lists = [_layers(fields, f"bskcn_{number}") for number in (1, 2, 3, 4)]
        shares = fields.value("bskcn_tv")
        if not isinstance(shares, list) or len(shares) != 2 or any(type(each) not in (int, float) for each in shares):
            raise fields.fail("bskcn_tv", "two numbers, the second of which counts")
        skips = BlockSkips(kept=(lists[0], lists[1]), mixed=(lists[2], lists[3]), share=float(shares[1]))
        scale = fields.number("logit_scale", 1.0)
        return shared | {"mlp_bias": fields.boolean("mlp_bias", False), "skips": skips, "logit_scale": scale}

    def make_layer(self, layer: int, build: Build) -> nnx.Module:
        skips = self.config.skips
        assert skips is not None
        kept, mixed = (tuple(layer in each for each in lists) for lists in (skips.kept, skips.mixed))
        parts = self.config, self.make_attention(layer, build), self.make_mlp(layer, build), build
        return SolarLayer(*parts, kept=kept, mixed=mixed, share=skips.share)

    def make_norm(self, build: Build) -> nnx.Module:
        return NormOfFirst(super().make_norm(build), 3)

    def first_input(self, x: jax.Array, batch: ForwardBatch) -> jax.Array:
        """Return a step's embeddings x [T, D] as all three hidden states, [T, 3 D]."""
        return jnp.tile(x, (1, 3))


def _layers(fields: ConfigFields, name: str) -> tuple[int, ...]:
    """Return the field `name`, a list of numbers of layers, as a tuple. Raises ModelConfigError for anything else."""
    numbers, count = fields.value(name), fields.integer("num_hidden_layers")
    if not isinstance(numbers, list) or any(type(each) is not int or not 0 <= each < count for each in numbers):
        raise fields.fail(name, f"a list of layers from 0 to {count - 1}")
    return tuple(numbers)
