"""Zamba (Glorioso et al. 2024, arXiv:2405.16712): Mamba of several heads in every layer, and in some layers before
it one transformer block, which reads the hidden state and the token's embedding side by side and which these layers
share.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.config.altup import SharedBlocks
from jaxengine.models.config.attention import LayerState
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.readers.hf import read_each_layer
from jaxengine.models.config.state import SelectiveScan
from jaxengine.models.families.llama import gated_fields
from jaxengine.models.families.zamba2 import HYBRID, MAMBA, Zamba2ForCausalLM, Zamba2Layer
from jaxengine.models.layers.base.activations import SILU, read_activation
from jaxengine.models.layers.states.mamba import HeadedMamba
from jaxengine.models.params.source import CheckpointNames

_DEFAULTS: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 3712,
    "intermediate_size": 14848,
    "num_hidden_layers": 76,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_HEADED = ("x_proj_weight", "dt_proj_weight", "A_log")


class ZambaLayer(Zamba2Layer):
    """Zamba 2's layer with Mamba of several heads."""

    def make_mamba(self, state: LayerState | None, size: int, source: str, build: Build) -> Any:
        assert isinstance(state, SelectiveScan)
        return HeadedMamba(state, size, source=source, build=build)


class ZambaForCausalLM(Zamba2ForCausalLM):
    """Zamba 2 with Mamba of several heads, and one block for all layers that have it, without rope and without low-rank
    products.
    """

    checkpoint_names: ClassVar[CheckpointNames] = CheckpointNames(
        parts=((".shared_transf.", ".shared_transformer."),),
        squeezed=(".conv1d.weight",),
        flattened=tuple(f".mamba.{name}" for name in _HEADED),
    )

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        fields = fields.with_defaults(**_DEFAULTS)
        size, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
        fields.require(attention_hidden_size=2 * size)
        head_dim = fields.integer("attention_head_dim", None) or fields.integer("head_dim", None) or 2 * size // heads
        layers, state = _layers_with_block(fields), _state(fields)
        shared = gated_fields(
            ConfigFields({**fields.raw, "head_dim": head_dim}),
            default="gelu",
            ropes=[None] * fields.integer("num_hidden_layers"),
            tied=True,
            scale=(head_dim / 2) ** -0.5,
        )
        blocks = SharedBlocks(
            layers=layers,
            count=1,
            rank=0,
            in_attention=False,
            activation=shared["activation"],
            tied=fields.boolean("tie_word_embeddings", True),
        )
        own = replace(shared["attention"][0], state=state, beside_state=True)
        plain = replace(own, scale=None, beside_state=False, mixer_only=True)
        kinds = (own if layer in layers else plain for layer in range(len(shared["attention"])))
        return shared | {"attention": tuple(kinds), "shared_blocks": blocks}

    def make_layer(self, layer: int, build: Build) -> nnx.Module:
        return ZambaLayer(self.config, layer, build)


def _layers_with_block(fields: ConfigFields) -> tuple[int, ...]:
    """Return the numbers of the layers that have the block, HYBRID in `layers_block_type`, or in `layer_types`.

    By default these are layer number 2 and, of those after it, counted from 0, each that leaves `attn_layer_offset`
    when divided by `attn_layer_period`. Raises ModelConfigError for other kinds and for a list of another length, and
    without a list for fewer than 3 layers.
    """
    count, allowed = fields.integer("num_hidden_layers"), (HYBRID, *MAMBA)
    period, offset = fields.integer("attn_layer_period", 6), fields.integer("attn_layer_offset", 4, minimum=0)
    names = [name for name in ("layers_block_type", "layer_types") if fields.has(name)]
    if names:
        kinds = read_each_layer(fields, names[0], allowed)
        return tuple(layer for layer, kind in enumerate(kinds or ()) if kind == HYBRID)
    if count < 3:
        raise fields.fail("layers_block_type", f"a list of {count} of {', '.join(allowed)}")
    return (2, *(layer for layer in range(3, count) if (layer - 3) % period == offset))


def _state(fields: ConfigFields) -> SelectiveScan:
    """Return the Mamba of all layers, from `mamba_expand` (default: 2), `n_mamba_heads` (2), `mamba_d_state` (16),
    `mamba_d_conv` (4), `mamba_dt_rank` ("auto", a sixteenth of the hidden size, rounded up), `mamba_conv_bias` (true),
    `mamba_proj_bias` (false) and `hidden_mamba_act`. Raises ModelConfigError for wrong fields, and unless
    `n_mamba_heads` divides the `mamba_expand` * hidden_size inputs of a token.
    """
    size, rank = fields.integer("hidden_size"), fields.value("mamba_dt_rank", "auto")
    inner, heads = fields.integer("mamba_expand", 2) * size, fields.integer("n_mamba_heads", 2)
    if inner % heads:
        raise fields.fail("n_mamba_heads", f"a divisor of the {inner} inputs of Mamba")
    return SelectiveScan(
        channels=inner,
        state_size=fields.integer("mamba_d_state", 16),
        time_rank=-(-size // 16) if rank == "auto" else fields.integer("mamba_dt_rank"),
        conv_kernel=fields.integer("mamba_d_conv", 4),
        conv_bias=fields.boolean("mamba_conv_bias", True),
        bias=fields.boolean("mamba_proj_bias", False),
        num_heads=heads,
        activation=read_activation(fields, "hidden_mamba_act", SILU),
    )
