"""Llama and the models shaped like it (Llama 2/3, SmolLM2, Mistral); other families subclass and say what differs.

The whole forward pass is here: embedding, L layers, final norm, logits. Config-driven, no sampling, no batching policy.
"""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from models.attention import Attention, StepInputs, attention_spec, num_head_shards
from models.config import ModelConfig
from models.config_fields import ConfigFields, ModelConfigError
from models.forward_batch import ForwardBatch
from models.layers import Embedding, GatedMLP, Linear, RMSNorm
from models.rope import rope_table
from pallas_kernels.kv_pages import KVPages, KVSpec
from pallas_kernels.kv_update import kv_update_schedule
from pallas_kernels.paged_attention import attention_schedule


class DecoderLayer(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: ModelConfig, window: int | None, *, dtype: Any):
        source, size, eps = "model.layers.{layer}", config.hidden_size, config.rms_norm_eps
        self.input_norm = RMSNorm(size, eps, source=f"{source}.input_layernorm", dtype=dtype)
        self.attention = Attention(config, window, source=f"{source}.self_attn", dtype=dtype)
        self.mlp_norm = RMSNorm(size, eps, source=f"{source}.post_attention_layernorm", dtype=dtype)
        self.mlp = GatedMLP(size, config.intermediate_size, source=f"{source}.mlp", bias=config.mlp_bias, dtype=dtype)

    def __call__(
        self, x: jax.Array, kv: KVPages, page_offset: jax.Array, step: StepInputs
    ) -> tuple[jax.Array, KVPages]:
        with jax.named_scope("attention"):
            attended, kv = self.attention(self.input_norm(x), kv, page_offset, step)
            x = x + attended
        with jax.named_scope("mlp"):
            return x + self.mlp(self.mlp_norm(x)), kv


@partial(jax.jit, static_argnums=0)
def _run_layer(
    graph: Any, state: nnx.State, x: jax.Array, kv: KVPages, page_offset: jax.Array, step: StepInputs
) -> tuple[jax.Array, KVPages]:
    """One layer as a function of its weights. Layers of one kind have equal graphs and share one trace."""
    return nnx.merge(graph, state)(x, kv, page_offset, step)


class LlamaForCausalLM(nnx.Module):
    """Decoder-only transformer: pre-norm, rope, grouped-query attention, gated MLP."""

    gguf_architecture: ClassVar[str | None] = "llama"

    def __init__(self, config: ModelConfig, *, dtype: Any):
        self.config = config
        self.embed = Embedding(config.vocab_size, config.hidden_size, source="model.embed_tokens", dtype=dtype)
        self.layers = nnx.List([DecoderLayer(config, window, dtype=dtype) for window in config.sliding_window])
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, source="model.norm", dtype=dtype)
        head = {"lm_head": config.vocab_size}
        self.lm_head = (
            None
            if config.tie_word_embeddings
            else Linear(config.hidden_size, head, axes=("embed", "vocab"), dtype=dtype)
        )

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        """What this family adds to the shared fields of a config.json."""
        bias = fields.boolean("attention_bias", False)
        return {"attention_bias": bias, "output_bias": bias, "mlp_bias": fields.boolean("mlp_bias", False)}

    @classmethod
    def read_gguf(cls, fields: ConfigFields) -> dict[str, Any]:
        """What this family adds to the shared fields of GGUF metadata."""
        return {}

    def __call__(self, batch: ForwardBatch, kv: KVPages) -> tuple[jax.Array, KVPages]:
        """Hidden states [T, D] after the final norm, and the pool holding the KV of this step's tokens.

        The pool is flat: page p of layer l is its row l * pages_per_layer + p.
        """
        config = self.config
        pages_per_layer, rest = divmod(kv.num_pages, config.num_layers)
        if rest:
            raise ValueError(f"num_pages must be a multiple of num_layers = {config.num_layers}, got {kv.num_pages}")
        with jax.named_scope("rope_table"):
            cos, sin = rope_table(batch.positions, config.head_dim, config.rope_theta, config.rope_scaling)
        with jax.named_scope("kv_update_schedule"):
            update = kv_update_schedule(batch.ragged.slot_mapping, page_size=kv.page_size, platform=kv.layout)
        steps = {}
        for window in dict.fromkeys(config.sliding_window):
            with jax.named_scope("attention_schedule"):
                schedule = attention_schedule(
                    batch.ragged,
                    attention_spec(config, window, num_head_shards()),
                    num_tokens=batch.token_ids.shape[0],
                    page_size=kv.page_size,
                    platform=kv.layout,
                )
            steps[window] = StepInputs(cos, sin, batch.ragged, schedule, update)
        with jax.named_scope("embed"):
            x = self.embed(batch.token_ids)
        for index, (layer, window) in enumerate(zip(self.layers, config.sliding_window, strict=True)):
            graph, state = nnx.split(layer)
            with jax.named_scope(f"layer_{index}"):
                x, kv = _run_layer(graph, state, x, kv, jnp.int32(index * pages_per_layer), steps[window])
        with jax.named_scope("norm"):
            return self.norm(x), kv

    def logits(self, hidden: jax.Array) -> jax.Array:
        """[R, D] -> f32[R, V]"""
        with jax.named_scope("logits"):
            if self.lm_head is None:
                return self.embed.logits(hidden)
            return self.lm_head(hidden, out_dtype=jnp.float32)

    def kv_spec(self, pages_per_layer: int, page_size: int, kv_dtype: Any) -> KVSpec:
        """The pool this model needs to hold `pages_per_layer` pages of `page_size` tokens for each of its layers."""
        config = self.config
        return KVSpec(
            num_pages=config.num_layers * pages_per_layer,
            page_size=page_size,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            v_head_dim=config.head_dim,
            dtype=kv_dtype,
        )


class MistralForCausalLM(LlamaForCausalLM):
    """Llama without biases and with one sliding window for all layers (Jiang et al. 2023, arXiv:2310.06825)."""

    gguf_architecture: ClassVar[str | None] = None  # GGUF files of Mistral say "llama"

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        if "sliding_window" not in fields.raw:
            raise ModelConfigError("sliding_window is missing: null (no window) or an integer >= 1 is allowed")
        window = fields.integer("sliding_window", None)
        return {"sliding_window": (window,) * fields.integer("num_hidden_layers")}
