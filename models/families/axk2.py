"""A.X K2 (SK Telecom 2026): DeepSeek-V3.2 with gated norms, and with gates of the heads' outputs that are projected
from the latent of queries.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.config.attention import LayerAttention
from jaxengine.models.config.fields import ConfigFields
from jaxengine.models.config.model_config import ModelConfig
from jaxengine.models.families.deepseek_v32 import DeepseekV32ForCausalLM
from jaxengine.models.families.llama import LAYER
from jaxengine.models.layers.attention.attention import StepInputs
from jaxengine.models.layers.attention.mla import times_gate
from jaxengine.models.layers.attention.sparse_mla import SparseLatentAttention
from jaxengine.models.layers.base.linear import Linear
from jaxengine.models.layers.base.norm import RMSNorm
from jaxengine.models.params.declare import Source
from jaxengine.models.params.source import CheckpointNames

_RENAMED = (
    (".q_gate_proj", ".q_b_proj"),
    ("layernorm.mlp.fc1", "layernorm.W_down"),
    ("layernorm.mlp.fc2", "layernorm.W_up"),
)


class GatedNorm(nnx.Module):
    """RMS norm multiplied by a low-rank gate: y * sigmoid(up(silu(down(y)))), y = norm(x). Its weights are replicated
    over devices, and take no adapters.
    """

    def __init__(self, config: ModelConfig, *, source: str, build: Build):
        size, rank, build = config.hidden_size, config.norm_gate_rank, replace(build, lora=None)
        self.norm = RMSNorm(size, config.rms_norm_eps, source=f"{source}.norm", build=build)
        self.down = Linear(size, (Source(f"{source}.W_down", rank),), axes=("embed", "latent"), build=build)
        self.up = Linear(rank, (Source(f"{source}.W_up", size),), axes=("latent", "embed"), build=build)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return y * sigmoid(up(silu(down(y)))) for y = norm(x), [T, D] -> [T, D]. The activation and the gate are
        computed in float32.
        """
        y = self.norm(x)
        inner = jax.nn.silu(self.down(y, out_dtype=jnp.float32)).astype(x.dtype)
        return (y * jax.nn.sigmoid(self.up(inner, out_dtype=jnp.float32))).astype(x.dtype)


class Axk2Attention(SparseLatentAttention):
    """Sparse latent attention in which queries, and gates of the heads' outputs, are projected from the latent of
    queries joined with its value before the norm.
    """

    def __init__(self, attention: LayerAttention, hidden_size: int, *, source: str, build: Build):
        super().__init__(attention, hidden_size, source=source, build=build)
        latent, heads = self.latent, attention.num_heads
        assert latent.q_lora_rank is not None
        size, value = latent.qk_nope_head_dim + latent.qk_rope_head_dim, latent.v_head_dim
        # The checkpoint's rows alternate between a head's query and its gate.
        turns = {"tensor_rows": heads * (size + value), "stride": size + value}
        rows = {"q": (heads * size, size, 0), "gate": (heads * value, value, size)}
        self.q, self.gate = (
            Linear(
                2 * latent.q_lora_rank,
                (Source(f"{source}.q_b_proj", count, group=group, first=first, **turns),),
                axes=("embed", "heads"),
                build=build,
            )
            for count, group, first in rows.values()
        )

    def normed(self, q_latent: jax.Array) -> jax.Array:
        """Return the latent of queries [T, R] as [T, 2 * R]: its norm, followed by the latent itself."""
        return jnp.concatenate([super().normed(q_latent), q_latent], axis=-1)

    def gated(self, o: jax.Array, x: jax.Array, q_latent: jax.Array, step: StepInputs) -> jax.Array:
        """Return the heads' outputs o [T, N * Hv] multiplied by sigmoid gates of the latent of queries, as `normed`
        returns it, one for each element. Computed in float32; returned in the dtype of o.
        """
        return times_gate(o, self.gate(q_latent, step.rows).astype(jnp.float32))


class AXK2ForCausalLM(DeepseekV32ForCausalLM):
    """DeepSeek-V3.2 with Axk2Attention, and GatedNorms before attention and before experts."""

    index_heads: ClassVar[int] = 16
    # transformers renames these modules of published checkpoints, so adapters and trainers use the new names.
    checkpoint_names: ClassVar[CheckpointNames] = CheckpointNames(parts=_RENAMED)

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        # In transformers experts of groups that are not chosen score 0, and not minus infinity.
        fields.require(n_group=1, topk_group=1, indexer_rope_interleave=False)
        defaults = {"first_k_dense_replace": 1, "q_lora_rank": 384, "n_group": 1, "topk_group": 1}
        shared = super().read_hf(fields.with_defaults(**defaults))
        return shared | {"norm_gate_rank": fields.integer("gated_norm_rank", 16)}

    def make_attention(self, layer: int, build: Build) -> nnx.Module:
        sizes = self.config.attention[layer], self.config.hidden_size
        return Axk2Attention(*sizes, source=f"{LAYER}.self_attn", build=build)

    def make_layer(self, layer: int, build: Build) -> nnx.Module:
        config = self.config
        made: Any = super().make_layer(layer, build)
        made.input_norm = GatedNorm(config, source=f"{LAYER}.input_layernorm", build=build)
        if config.experts is not None and layer not in config.experts.dense_layers:
            source = f"{LAYER}.post_attention_layernorm"
            made.mlp_norm = GatedNorm(config, source=source, build=build)
        return made
