"""Layer of pre-norm transformers (Xiong et al. 2020, arXiv:2002.04745), made of given parts."""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx

from jaxengine.models.layers.attention.attention import LayerPages, StepInputs
from jaxengine.pallas_kernels.kv.pages import KVPages


class PreNormLayer(nnx.Module):
    """Layer that computes x + attention(input_norm(x)), then x + mlp(mlp_norm(x))."""

    def __init__(self, input_norm: nnx.Module, attention: Any, mlp_norm: nnx.Module, mlp: nnx.Module):
        self.input_norm, self.attention, self.mlp_norm, self.mlp = input_norm, attention, mlp_norm, mlp

    def __call__(self, x: jax.Array, kv: KVPages, pages: LayerPages, step: StepInputs) -> tuple[jax.Array, KVPages]:
        """Map hidden states x [T, D] to (hidden states [T, D], the pool with this step's keys and values written)."""
        with jax.named_scope("attention"):
            attended, kv = self.attention(self.input_norm(x), kv, pages, step)
            x = x + attended
        with jax.named_scope("mlp"):
            return x + self.mlp(self.mlp_norm(x), step.rows), kv
