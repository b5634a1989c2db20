"""Zamba 2 (Glorioso et al. 2024, arXiv:2411.15242): Mamba-2 in every layer, and in some layers before it a transformer
block that reads the hidden state and the token's embedding side by side. These layers share a few blocks, in turn, and
have low-rank products of their own beside the blocks' projections.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.cache import StateRows
from jaxengine.models.config.altup import SharedBlocks
from jaxengine.models.config.attention import LayerState
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.model_config import ModelConfig
from jaxengine.models.config.readers.hf import read_each_layer, read_rope
from jaxengine.models.config.state import StateSpace
from jaxengine.models.config.taps import ATTENTION, MLP
from jaxengine.models.families.llama import LAYER, gated_fields
from jaxengine.models.forward_batch import ForwardBatch
from jaxengine.models.layers.attention.attention import Attention, LayerPages, StepInputs, head_copies
from jaxengine.models.layers.base.activations import ACTIVATIONS
from jaxengine.models.layers.base.linear import Linear
from jaxengine.models.layers.base.mlp import GatedMLP
from jaxengine.models.layers.base.norm import NormOfFirst, RMSNorm
from jaxengine.models.layers.base.rows import Rows
from jaxengine.models.layers.decoder import Decoder
from jaxengine.models.layers.states.mamba2 import Mamba2
from jaxengine.models.params.declare import Source, parts_of
from jaxengine.models.params.source import CheckpointNames
from jaxengine.pallas_kernels.kv.pages import KVPages

BLOCK = f"{LAYER}.shared_transformer"
_EPS = 1e-5  # of the norm in Mamba-2, whatever rms_norm_eps
HYBRID, MAMBA = "hybrid", ("mamba", "linear_attention")
# Zamba2-2.7B's layers, transformers' default.
_HYBRID_LAYERS = (6, 12, 18, 24, 30, 36, 42, 47, 51)
_DEFAULTS: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 2560,
    "num_hidden_layers": 54,
    "num_attention_heads": 32,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


class AddedProducts(nnx.Module):
    """Projection base(x) with low-rank products added: one, up(down(x)), for each part of its output.

    downs: checkpoint module of the first factor of each part. ups: those of the second, with the base's rows, or parts
    of them. axis: logical axis of the base's output.
    """

    def __init__(
        self, base: Linear, size: int, downs: Sequence[Source], ups: Sequence[Sequence[Source]], axis: str, build: Build
    ):
        self.base = base
        self.down = Linear(size, tuple(downs), axes=("embed", "latent"), build=build)
        self.ups = nnx.List([Linear(downs[0].rows, tuple(up), axes=("latent", axis), build=build) for up in ups])

    def __call__(self, x: jax.Array, rows: Rows, *, out_dtype: Any = None) -> jax.Array:
        """Return this device's part of the sum of `base` and the low-rank products, [T, N], for x [T, D]. out_dtype:
        its dtype; None for that of x.
        """
        inner = jnp.split(self.down(x, rows), len(self.ups), axis=-1)
        added = [up(part, rows, out_dtype=out_dtype) for up, part in zip(self.ups, inner, strict=True)]
        return self.base(x, rows, out_dtype=out_dtype) + jnp.concatenate(added, axis=-1)

    def share(self, other: AddedProducts) -> None:
        """Take the weights of `other`'s base in place of the own ones."""
        self.base.share(other.base)

    @property
    def lora(self) -> Any:
        """Pools for adapters of the base; None without."""
        return self.base.lora


class TransformerBlock(nnx.Module):
    """Block mlp(norm(attention(norm(x)))) without residuals, followed by a projection. x has two hidden states of a
    token side by side, the current one and the embedding.
    """

    def __init__(self, config: ModelConfig, layer: int, build: Build):
        blocks, own, size, eps = config.shared_blocks, config.attention[layer], config.hidden_size, config.rms_norm_eps
        assert blocks is not None
        self.input_norm = RMSNorm(2 * size, eps, source=f"{BLOCK}.input_layernorm", build=build)
        source = f"{BLOCK}.self_attn"
        out = Source(f"{source}.o_proj", size)
        attention: Any = Attention(own, 2 * size, eps=eps, source=source, build=build, out=out)
        if blocks.in_attention:
            copies, names = head_copies(own, build.mesh), [f"{source}.linear_{part}_adapter" for part in "qkv"]
            up = Source("", own.num_heads * own.head_dim, group=own.head_dim)
            ups = [up._replace(name=f"{name}.1", repeat=copies if part else 1) for part, name in enumerate(names)]
            downs = [Source(f"{name}.0", blocks.rank) for name in names]
            each = [(up,) for up in ups]
            attention.qkv = AddedProducts(attention.qkv, 2 * size, downs, each, "heads", build)
        self.attention = attention
        self.mlp_norm = RMSNorm(size, eps, source=f"{BLOCK}.pre_ff_layernorm", build=build)
        source, ffn = f"{BLOCK}.feed_forward", config.intermediate_size
        mlp: Any = GatedMLP(
            size,
            ffn,
            source=source,
            build=build,
            bias=config.mlp_bias,
            activation=ACTIVATIONS[blocks.activation],
            gate_up=parts_of(f"{source}.gate_up_proj", ffn, ffn) if blocks.rank else None,
        )
        if blocks.rank:
            name = f"{source}.gate_up_proj_adapter"
            ups = [parts_of(f"{name}.1", ffn, ffn)]
            mlp.gate_up = AddedProducts(mlp.gate_up, size, [Source(f"{name}.0", blocks.rank)], ups, "ffn", build)
        self.mlp = mlp
        self.out = Linear(size, (Source(f"{LAYER}.linear", size),), axes=("embed", "latent"), build=build)

    def share(self, other: TransformerBlock) -> None:
        """Take the weights of the block `other` in place of the own ones. The low-rank products, the projection that
        follows the block and the pools for adapters stay those of the layer, as in transformers and PEFT.
        """
        self.input_norm, self.mlp_norm = other.input_norm, other.mlp_norm
        for own, shared in (
            (self.attention.qkv, other.attention.qkv),
            (self.attention.out, other.attention.out),
            (self.mlp.gate_up, other.mlp.gate_up),
            (self.mlp.down, other.mlp.down),
        ):
            own.share(shared)

    def __call__(self, x: jax.Array, kv: KVPages, pages: LayerPages, step: StepInputs) -> tuple[jax.Array, KVPages]:
        """Map x [T, 2 * D] to (out(mlp(norm(attention(norm(x))))) [T, D], the pool with this step's keys and values of
        the layer written).
        """
        with jax.named_scope("attention"):
            x, kv = self.attention(self.input_norm(x), kv, pages, step)
        with jax.named_scope("mlp"):
            return self.out(self.mlp(self.mlp_norm(x), step.rows), step.rows), kv


class Zamba2Layer(nnx.Module):
    """Layer h + mamba(norm(h)), or h + mamba(norm(h + block(x))) in a layer that has a block, for x = h beside the
    token's embedding, which is passed on unchanged.
    """

    def __init__(self, config: ModelConfig, layer: int, build: Build):
        has_block = config.attention[layer].attends
        source = f"{LAYER}.mamba_decoder" if has_block else LAYER
        size = config.hidden_size
        self.norm = RMSNorm(size, config.rms_norm_eps, source=f"{source}.input_layernorm", build=build)
        self.mamba = self.make_mamba(config.attention[layer].state, size, f"{source}.mamba", build)
        self.block = TransformerBlock(config, layer, build) if has_block else None

    @property
    def parts(self) -> dict[str, tuple[str, ...]]:
        """Where taps find the layer's parts (jaxengine.models.layers.taps.path_of): a block's, if there is one."""
        if self.block is None:
            return {ATTENTION: ("mamba",)}
        return {ATTENTION: ("block", "attention"), MLP: ("block", "mlp")}

    def make_mamba(self, state: LayerState | None, size: int, source: str, build: Build) -> Any:
        """Return a new mixer of hidden states of `size` elements, which keeps `state`."""
        assert isinstance(state, StateSpace)
        return Mamba2(state, size, eps=_EPS, source=source, build=build)

    def __call__(self, x: jax.Array, kv: Any, pages: Any, step: StepInputs) -> tuple[jax.Array, Any]:
        """Map x [T, 2 * D] to ([T, 2 * D], the layer's cache after this step's tokens): the states alone or, with a
        block, the pool and the states.

        x is a hidden state h and the token's embedding, which stays; h becomes h + mamba(norm(h + block(x))), without
        block(x) in a layer that has no block.
        """
        hidden, embedding = jnp.split(x, 2, axis=-1)
        kept: Any = kv if self.block is None else kv[1]
        rows: StateRows = pages if self.block is None else pages[1]
        mixed = hidden
        if self.block is not None:
            with jax.named_scope("block"):
                added, pool = self.block(x, kv[0], pages[0], step)
            mixed = hidden + added
        with jax.named_scope("mamba"):
            mixed, kept = self.mamba(self.norm(mixed), kept, rows, step)
        x = jnp.concatenate([hidden + mixed, embedding], axis=-1)
        return x, kept if self.block is None else (pool, kept)


class Zamba2ForCausalLM(Decoder):
    """Decoder of Zamba2Layers, which pass on two hidden states of each token, [T, 2 * D]. If blocks are
    tied, layers of a stage that share one have its weights once, in the first of them.
    """

    checkpoint_names: ClassVar[CheckpointNames] = CheckpointNames(squeezed=(".conv1d.weight",))

    def __init__(self, config: ModelConfig, build: Build):
        super().__init__(config, build)
        assert config.shared_blocks is not None
        if not config.shared_blocks.tied:
            return
        firsts: dict[tuple[int, ...], TransformerBlock] = {}
        for number, layer in zip(self.stage.layers, self.layers, strict=True):
            assert isinstance(layer, Zamba2Layer)
            if (block := layer.block) is not None:
                first = firsts.setdefault(config.shared_blocks.sharing(number), block)
                if first is not block:
                    block.share(first)

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        fields = fields.with_defaults(**_DEFAULTS)
        size, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
        if 2 * size % heads:
            raise fields.fail("hidden_size", f"a number whose double num_attention_heads {heads} divides")
        named = fields.integer("attention_head_dim", None) or fields.integer("head_dim", None)
        own: dict[str, Any] = {"head_dim": named or 2 * size // heads}
        own["intermediate_size"] = fields.integer("intermediate_size", 4 * size)
        if fields.boolean("use_long_context", False):
            own["max_position_embeddings"] = 16384  # transformers', whatever the file says
        fields, layers = ConfigFields({**fields.raw, **own}), _layers_with_block(fields)
        rope = read_rope(fields, own["head_dim"]) if fields.boolean("use_mem_rope", False) else None
        shared = gated_fields(
            fields,
            default="gelu",
            ropes=[rope] * fields.integer("num_hidden_layers"),
            tied=True,
            scale=(own["head_dim"] / 2) ** -0.5,
        )
        in_attention, state = fields.boolean("use_shared_attention_adapter", False), _state(fields)
        if in_attention and fields.integer("num_key_value_heads", heads) != heads:
            raise fields.fail("num_key_value_heads", f"{heads} where use_shared_attention_adapter is true")
        blocks = SharedBlocks(
            layers=layers,
            count=fields.integer("num_mem_blocks", 1),
            rank=fields.integer("adapter_rank", 128),
            in_attention=in_attention,
            activation=shared["activation"],
            tied=fields.boolean("tie_word_embeddings", True),
        )
        attention = enumerate(shared["attention"])
        plain = replace(shared["attention"][0], rope=None, scale=None, mixer_only=True)
        return shared | {
            "attention": tuple(
                replace(each, state=state, beside_state=True) if layer in layers else replace(plain, state=state)
                for layer, each in attention
            ),
            "mlp_bias": fields.boolean("add_bias_linear", False),
            "shared_blocks": blocks,
        }

    def make_layer(self, layer: int, build: Build) -> nnx.Module:
        return Zamba2Layer(self.config, layer, build)

    def make_norm(self, build: Build) -> nnx.Module:
        config, source = self.config, "model.final_layernorm"
        return NormOfFirst(RMSNorm(config.hidden_size, config.rms_norm_eps, source=source, build=build), 2)

    def first_input(self, x: jax.Array, batch: ForwardBatch) -> jax.Array:
        """Return a step's embeddings x [T, D] twice, side by side: the hidden states, and the embeddings that blocks
        read.
        """
        return jnp.concatenate([x, x], axis=-1)


def _layers_with_block(fields: ConfigFields) -> tuple[int, ...]:
    """Return the numbers of the layers that have a transformer block, "hybrid" in `layers_block_type`, or in
    `layer_types`. By default they are Zamba2-2.7B's. Raises ModelConfigError for other kinds, for a list of another
    length, and without a list for another number of layers.
    """
    count, allowed = fields.integer("num_hidden_layers"), (HYBRID, *MAMBA)
    usual = [HYBRID if layer in _HYBRID_LAYERS else MAMBA[0] for layer in range(_DEFAULTS["num_hidden_layers"])]
    names = [name for name in ("layers_block_type", "layer_types") if fields.has(name)]
    if not names and count != len(usual):
        raise fields.fail("layers_block_type", f"a list of {count} of {', '.join(allowed)}")
    kinds = read_each_layer(fields, names[0], allowed) if names else usual
    return tuple(layer for layer, kind in enumerate(kinds or ()) if kind == HYBRID)


def _state(fields: ConfigFields) -> StateSpace:
    """Return the Mamba-2 of all layers, from `mamba_expand` (default: 2), `n_mamba_heads` (8), `mamba_ngroups` (1),
    `mamba_d_state` (64), `mamba_d_conv` (4), `add_bias_linear` (false) and `time_step_min` (0.001), the least time
    step. Raises ModelConfigError for wrong fields, and unless `n_mamba_heads` divides the `mamba_expand` * hidden_size
    inputs of a token.
    """
    inner = int(fields.number("mamba_expand", 2.0) * fields.integer("hidden_size"))
    heads, bias = fields.integer("n_mamba_heads", 8), fields.boolean("add_bias_linear", False)
    if inner % heads:
        raise fields.fail("n_mamba_heads", f"a divisor of the {inner} inputs of Mamba-2")
    return StateSpace(
        num_heads=heads,
        head_dim=inner // heads,
        num_groups=fields.integer("mamba_ngroups", 1),
        state_size=fields.integer("mamba_d_state", 64),
        conv_kernel=fields.integer("mamba_d_conv", 4),
        bias=bias,
        output_bias=bias,
        dt_limits=(fields.number("time_step_min", 0.001), float("inf")),
    )
