"""A decoder layer of the usual shape, and the call that traces equal layers once."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
from flax import nnx

from models.config.model_config import ModelConfig
from models.layers.attention import Attention, StepInputs
from models.layers.moe import ExpertLoad
from models.layers.norm import RMSNorm
from pallas_kernels.kv.pages import KVPages
from sharding.layout import MeshLayout


class DecoderLayer(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: ModelConfig, window: int | None, mlp: nnx.Module, *, dtype: Any, mesh: MeshLayout):
        source, size, eps = "model.layers.{layer}", config.hidden_size, config.rms_norm_eps
        self.input_norm = RMSNorm(size, eps, source=f"{source}.input_layernorm", dtype=dtype)
        self.attention = Attention(config, window, source=f"{source}.self_attn", dtype=dtype, mesh=mesh)
        self.mlp_norm = RMSNorm(size, eps, source=f"{source}.post_attention_layernorm", dtype=dtype)
        self.mlp = mlp

    def __call__(
        self, x: jax.Array, kv: KVPages, page_offset: jax.Array, step: StepInputs
    ) -> tuple[jax.Array, KVPages]:
        with jax.named_scope("attention"):
            attended, kv = self.attention(self.input_norm(x), kv, page_offset, step)
            x = x + attended
        with jax.named_scope("mlp"):
            return x + self.mlp(self.mlp_norm(x), step.ragged.slot_mapping >= 0), kv


@partial(jax.jit, static_argnums=0)
def _run_layer(
    graph: Any, state: nnx.State, x: jax.Array, kv: KVPages, page_offset: jax.Array, step: StepInputs
) -> tuple[jax.Array, KVPages, nnx.State]:
    """One layer as a function of its weights, and its ExpertLoad if it has experts.

    Layers of one kind have equal graphs and share one trace.
    """
    layer = nnx.merge(graph, state)
    x, kv = layer(x, kv, page_offset, step)
    return x, kv, nnx.pop(layer, ExpertLoad)
