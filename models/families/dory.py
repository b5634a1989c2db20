"""Dory (NVIDIA 2026): nGPT (Loshchilov et al. 2024, arXiv:2410.01131), whose hidden states have a length of one, with
windows in most layers and a loop over the middle ones.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.config.altup import DoryLoops
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.model_config import ModelConfig
from jaxengine.models.config.readers.hf import FULL, SLIDING, layer_kinds, ropes_by_kind, windows_by_kind
from jaxengine.models.config.taps import ATTENTION, MLP
from jaxengine.models.families.llama import LAYER, gated_fields
from jaxengine.models.forward_batch import ForwardBatch
from jaxengine.models.layers.attention.attention import Attention, LayerPages, StepInputs
from jaxengine.models.layers.base.activations import ACTIVATIONS
from jaxengine.models.layers.base.embedding import vocab_source
from jaxengine.models.layers.base.linear import Linear
from jaxengine.models.layers.base.mlp import GatedMLP
from jaxengine.models.layers.base.norm import NormOfFirst, UnitNorm, unit
from jaxengine.models.layers.decoder import Decoder
from jaxengine.models.layers.looped import share_blocks
from jaxengine.models.params.declare import ParamDecl, Source, declare
from jaxengine.models.params.source import CheckpointNames
from jaxengine.pallas_kernels.kv.pages import KVPages

_EPS = 1e-6  # of every norm, that of `unit`
_MLP = "mlp"
_DEFAULTS: dict[str, Any] = {
    "vocab_size": 131072,
    "hidden_size": 2560,
    "intermediate_size": 7168,
    "num_hidden_layers": 36,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 8192,
    "sliding_window": 1024,
    "rope_theta": 10000.0,
}
_ROPES = {
    SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
    FULL: {"rope_type": "default", "rope_theta": 10000000.0},
}


class Factors(nnx.Module):
    """Learned factors of elements: `scale` times the numbers that are stored under `source`.

    group: number of neighbouring elements that devices do not split. axis: logical axis of the elements.
    """

    def __init__(self, size: int, scale: float, *, source: str, build: Build, axis: str | None = None, group: int = 1):
        decl = ParamDecl((axis,), (Source(source, size, group=group),), init_value=1 / scale)
        self.values, self.scale = declare((size,), build.dtype, decl), scale

    def __call__(self) -> jax.Array:
        """Return the factors f32[size], or this device's part of them."""
        return self.values[...].astype(jnp.float32) * self.scale


class DoryAttention(Attention):
    """Attention of unit queries and keys. Squares of learned factors multiply queries after rope, and a gate before its
    sigmoid, which multiplies the outputs of heads. The projection gets these at a length of one for all heads together.
    """

    def __init__(self, config: ModelConfig, layer: int, build: Build):
        own, size, loops, source = config.attention[layer], config.hidden_size, config.loops, f"{LAYER}.self_attn"
        assert isinstance(loops, DoryLoops)
        norms = (UnitNorm(), UnitNorm())
        super().__init__(own, size, eps=_EPS, source=source, build=build, qk_norms=norms)
        width, dim = own.num_heads * own.head_dim, own.head_dim
        gate = Source(f"{source}.gate_proj", width, group=dim)
        self.gate = Linear(size, (gate,), axes=("embed", "heads"), build=build)

        def factors(name: str, scale: float) -> Factors:
            scale /= loops.weight_scale
            return Factors(width, scale, source=f"{source}.{name}", build=build, axis="heads", group=dim)

        self.query_factors, self.gate_factors = factors("sqk", dim**0.5), factors("s_gate", size**0.25)

    def rotate(self, q: jax.Array, k: jax.Array, step: StepInputs) -> tuple[jax.Array, jax.Array]:
        q, k = super().rotate(q, k, step)
        factors = jnp.square(self.query_factors()).reshape(q.shape[1:])
        return (q.astype(jnp.float32) * factors).astype(q.dtype), k

    def gated(self, o: jax.Array, gate: jax.Array, x: jax.Array, step: StepInputs) -> jax.Array:
        scores = self.gate(x, step.rows, out_dtype=jnp.float32) * jnp.square(self.gate_factors())
        gated = o.astype(jnp.float32) * jax.nn.sigmoid(scores).reshape(o.shape)
        return unit(gated, "heads").astype(o.dtype)


class GateAndUp(nnx.Module):
    """Function activation(g * gate) * (u * up) of gate and up f32[T, F], with learned factors g and u. activation: its
    name.
    """

    def __init__(self, size: int, scale: float, activation: str, build: Build):
        self.activation = ACTIVATIONS[activation]
        self.gate, self.up = (
            Factors(size, scale, source=f"{LAYER}.mlp.suv_{name}", build=build, axis="ffn") for name in ("gate", "up")
        )

    def __call__(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        return self.activation(gate * self.gate()) * (up * self.up())


class DoryBlock(nnx.Module):
    """A checkpoint's layer: x becomes x + r * (f(x) - x) for its attention and then its MLP as f, with f's input and
    output at a length of one and a learned rate |r| for each element.
    """

    def __init__(self, config: ModelConfig, layer: int, build: Build):
        loops, size, ffn = config.loops, config.hidden_size, config.intermediate_size
        assert isinstance(loops, DoryLoops)
        self.attention = DoryAttention(config, layer, build)
        self.mlp = GatedMLP(
            size,
            ffn,
            source=f"{LAYER}.mlp",
            bias=config.mlp_bias,
            build=build,
            clamped=GateAndUp(ffn, size**0.5, config.activation, build),
            inner_norm=UnitNorm("ffn"),
        )
        self.rates = nnx.List(
            [
                Factors(size, loops.rate / loops.weight_scale, source=f"{LAYER}.{name}", build=build)
                for name in ("lambda_1", "lambda_2")
            ]
        )

    def __call__(self, x: jax.Array, kv: KVPages, pages: LayerPages, step: StepInputs) -> tuple[jax.Array, KVPages]:
        """Map x [T, D] to ([T, D], the pool with this step's keys and values of the layer written). x, at a length of
        one, is moved towards the output of attention, then, at a length of one again, towards that of the MLP.
        """
        with jax.named_scope("attention"):
            x = unit(x)
            attended, kv = self.attention(x, kv, pages, step)
            x = unit(self._mixed(x, attended, 0))
        with jax.named_scope("mlp"):
            return self._mixed(x, self.mlp(x, step.rows), 1), kv

    def _mixed(self, x: jax.Array, result: jax.Array, part: int) -> jax.Array:
        """Return x + |rate| * (unit(result) - x), [T, D], for the result of x's attention (part 0) or MLP (part 1)."""
        rate, y = jnp.abs(self.rates[part]()), x.astype(jnp.float32)
        return (y + rate * (unit(result).astype(jnp.float32) - y)).astype(x.dtype)


class DoryLayer(nnx.Module):
    """A run of a block, which passes on two hidden states of each token: the current one, and the loop's input.

    loop: number of the loop that begins with it. The first one begins with the hidden state at a length of one, which
    is its input, as if this were the result of a loop before it; each adds its input to the last one's result at a
    length of one. None if no loop begins.
    """

    # Where taps find the layer's parts (jaxengine.models.layers.taps.path_of).
    parts: ClassVar[dict[str, tuple[str, ...]]] = {ATTENTION: ("block", "attention"), MLP: ("block", "mlp")}

    def __init__(self, block: DoryBlock, loop: int | None):
        self.block, self.loop = block, loop

    def __call__(self, x: jax.Array, kv: KVPages, pages: LayerPages, step: StepInputs) -> tuple[jax.Array, KVPages]:
        """Map x [T, 2 * D] to ([T, 2 * D], the pool with this step's keys and values of the layer written).

        The halves of x are the hidden state, which the block maps, and the input of the loop. Where a loop begins, the
        hidden state at a length of one becomes that input in the first loop, and the input is added to it in each.
        """
        hidden, start = jnp.split(x, 2, axis=-1)
        if self.loop is not None:
            hidden = unit(hidden)
            start = hidden if self.loop == 0 else start
            hidden = hidden + start
        hidden, kv = self.block(hidden, kv, pages, step)
        return jnp.concatenate([hidden, start], axis=-1), kv


class DoryForCausalLM(Decoder):
    """Decoder of DoryLayers. Those of a stage that run the same block have its weights, and its pools for adapters,
    once, in the first of them. Learned factors multiply the logits.
    """

    checkpoint_names: ClassVar[CheckpointNames] = CheckpointNames(
        prefixes=(("backbone.embeddings.", "model.embed_tokens."), ("backbone.", "model.")),
        parts=((".self_attn.g_proj.", ".self_attn.gate_proj."),),
        halves=({"mixer": "self_attn", "attn_alpha": "lambda_1"}, {"mixer": _MLP, "mlp_alpha": "lambda_2"}),
    )

    def __init__(self, config: ModelConfig, build: Build):
        super().__init__(config, build)
        share_blocks(self)
        if self.stage.is_last and config.pooler is None:
            assert isinstance(config.loops, DoryLoops)
            rows = vocab_source("lm_head.logit_scale", config.vocab_size, self.mesh, config.num_logits)
            decl = ParamDecl(("vocab",), (rows,), init_value=config.loops.weight_scale)
            self.logit_factors = declare((rows.num_contributed,), build.dtype, decl)

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        fields = fields.with_defaults(**_DEFAULTS)
        fields.require(recurrent_kv_cache_mode="per_loop", rope_scaling=None)
        gate, usual = (
            fields.number("attention_output_gate_logit_scale_init", None),
            fields.integer("hidden_size") ** 0.5,
        )
        if gate not in (None, usual):  # transformers does not read it
            raise fields.fail("attention_output_gate_logit_scale_init", f"absent, or the root of hidden_size, {usual}")
        fields, loops = _read_loops(fields)
        kinds = layer_kinds(fields, 4)
        kinds, bias = [kinds[layer] for layer in loops.stored], fields.boolean("attention_bias", False)
        fields = ConfigFields({**fields.raw, "num_hidden_layers": len(kinds)})
        ropes = fields if fields.mapping("rope_parameters") else ConfigFields({**fields.raw, "rope_parameters": _ROPES})
        shared = gated_fields(
            fields,
            windows=windows_by_kind(kinds, fields.integer("sliding_window")),
            ropes=ropes_by_kind(ropes, fields.integer("head_dim"), kinds),
            bias=bias,
            output_bias=bias,
        )
        more = {"mlp_bias": fields.boolean("mlp_bias", False), "rms_norm_eps": _EPS, "loops": loops}
        return shared | more

    def make_layer(self, layer: int, build: Build) -> nnx.Module:
        assert self.config.loops is not None
        stored = replace(build, layer=self.config.stored_layer(layer))
        return DoryLayer(DoryBlock(self.config, layer, stored), self.config.loops.loop(layer))

    def make_norm(self, build: Build) -> nnx.Module:
        return NormOfFirst(UnitNorm(), 2)

    def first_input(self, x: jax.Array, batch: ForwardBatch) -> jax.Array:
        """Return a step's embeddings x [T, D] twice, side by side. The second ones are not read."""
        return jnp.concatenate([x, x], axis=-1)

    def token_logits(self, hidden: jax.Array) -> jax.Array:
        assert isinstance(self.config.loops, DoryLoops)
        return super().token_logits(hidden) * (
            self.logit_factors[...].astype(jnp.float32) / self.config.loops.weight_scale
        )


def _read_loops(fields: ConfigFields) -> tuple[ConfigFields, DoryLoops]:
    """Return the fields with the number and the kinds of the checkpoint's layers, and the loop over some of them, by
    default twice (`n_recurrent_loops`) over all but the first eight and the last eight.

    Where `layer_types` lists attention and "mlp" in turn, as published files do, each pair of them is a layer, and all
    numbers of layers count both. Raises ModelConfigError for other lists, for odd numbers of layers then, and unless
    n_input_layers, n_recurrent_layers (at least 1) and n_output_layers add up to num_hidden_layers.
    """
    names = ("num_hidden_layers", "n_input_layers", "n_recurrent_layers", "n_output_layers")
    own = fields.with_defaults(n_input_layers=8, n_output_layers=8)
    kinds = own.value("layer_types", None)
    if isinstance(kinds, list) and _MLP in kinds:
        if set(kinds[1::2]) != {_MLP} or len(kinds) != own.integer("num_hidden_layers"):
            count = own.integer("num_hidden_layers")
            raise own.fail("layer_types", f"a list of {count} of {FULL} or {SLIDING}, each followed by {_MLP}")
        halves = {}
        for name in filter(own.has, names):
            if own.integer(name, minimum=0) % 2:
                raise own.fail(name, f"an even number where layer_types has {_MLP}")
            halves[name] = own.integer(name, minimum=0) // 2
        own = ConfigFields({**own.raw, **halves, "layer_types": kinds[::2]})
    count = own.integer("num_hidden_layers")
    first, after = (own.integer(name, minimum=0) for name in ("n_input_layers", "n_output_layers"))
    looped = own.integer("n_recurrent_layers", max(count - first - after, 0), minimum=0)
    if looped < 1 or first + looped + after != count:
        text = f"at least 1, and with n_input_layers, {first}, and n_output_layers, {after}, all {count} layers"
        raise own.fail("n_recurrent_layers", text)
    return own, DoryLoops(
        first=first,
        count=looped,
        num_loops=own.integer("n_recurrent_loops", 2),
        num_after=after,
        weight_scale=own.number("initializer_range", 0.0177),
        rate=own.number("ngpt_alpha_init", 0.05),
    )
