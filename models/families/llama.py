"""Llama and the models shaped like it (Llama 2/3, SmolLM2, Mistral); other families subclass and say what differs.

The whole forward pass is here: embedding, L layers, final norm, logits. Config-driven, no sampling, no batching policy.
"""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from models.cache import Paged, group_layers, num_places
from models.config.fields import ConfigFields
from models.config.model_config import ModelConfig
from models.forward_batch import ForwardBatch
from models.layers.attention import StepInputs, attention_spec, num_kv_heads
from models.layers.decoder import DecoderLayer, _run_layer
from models.layers.embedding import Embedding, own_logits, vocab_source
from models.layers.linear import Linear
from models.layers.mlp import GatedMLP
from models.layers.moe import ExpertLoad
from models.layers.norm import RMSNorm
from models.layers.rope import rope_table
from pallas_kernels.attention.op import attention_schedule
from pallas_kernels.kv.pages import KVPages, KVSpec
from pallas_kernels.kv.update import kv_update_schedule
from sharding.layout import ONE_DEVICE, MeshLayout
from sharding.stages import Stage


class LlamaForCausalLM(nnx.Module):
    """Decoder-only transformer: pre-norm, rope, grouped-query attention, gated MLP."""

    gguf_architecture: ClassVar[str | None] = "llama"

    def __init__(self, config: ModelConfig, *, dtype: Any, mesh: MeshLayout = ONE_DEVICE, stage: Stage | None = None):
        self.config, self.mesh = config, mesh
        self.stage = stage = stage or Stage(0, config.num_layers)
        size, tied = config.hidden_size, config.tie_word_embeddings
        if stage.is_first or (stage.is_last and tied):
            source = "model.embed_tokens"
            self.embed = Embedding(config.vocab_size, size, source=source, dtype=dtype, mesh=mesh)
        make_mlp = partial(self.make_mlp, config, source="model.layers.{layer}.mlp", dtype=dtype, mesh=mesh)
        self.layers = nnx.List(
            [
                DecoderLayer(config, config.sliding_window[index], make_mlp(layer=index), dtype=dtype, mesh=mesh)
                for index in stage.layers
            ]
        )
        if stage.is_last:
            self.norm = RMSNorm(size, config.rms_norm_eps, source="model.norm", dtype=dtype)
        if stage.is_last and not tied:
            head = vocab_source("lm_head", config.vocab_size, mesh)
            self.lm_head = Linear(size, (head,), axes=("embed", "vocab"), dtype=dtype)

    @classmethod
    def make_mlp(cls, config: ModelConfig, *, layer: int, source: str, dtype: Any, mesh: MeshLayout) -> nnx.Module:
        """The feed-forward part of a layer: ([T, D], bool[T], False for padding) -> [T, D]."""
        return GatedMLP(config.hidden_size, config.intermediate_size, source=source, bias=config.mlp_bias, dtype=dtype)

    @classmethod
    def read_hf(cls, fields: ConfigFields) -> dict[str, Any]:
        """What this family adds to the shared fields of a config.json."""
        bias = fields.boolean("attention_bias", False)
        return {"attention_bias": bias, "output_bias": bias, "mlp_bias": fields.boolean("mlp_bias", False)}

    @classmethod
    def read_gguf(cls, fields: ConfigFields) -> dict[str, Any]:
        """What this family adds to the shared fields of GGUF metadata."""
        return {}

    def __call__(self, batch: ForwardBatch, kv: KVPages, hidden: jax.Array | None = None) -> tuple[jax.Array, KVPages]:
        """Hidden states [T, D] after the final norm, and the pool holding the KV of this step's tokens.

        The pool is flat (models.cache). A stage that is not the first takes the hidden states of the one before, and
        one that is not the last gives them without the norm. Of layers with experts the module then holds the
        ExpertLoad, i32[layers, E].
        """
        config, windows = self.config, [self.config.sliding_window[index] for index in self.stage.layers]
        groups = self.cache_groups(kv.page_size, kv.dtype, hybrid=len(batch.ragged) > 1)
        num_pages, rest = divmod(kv.num_pages, num_places(groups))
        if rest:
            raise ValueError(f"num_pages must be a multiple of {num_places(groups)} layers, got {kv.num_pages}")
        places = {layer: (group, place) for group, each in enumerate(groups) for place, layer in enumerate(each.layers)}
        with jax.named_scope("rope_table"):
            cos, sin = rope_table(batch.positions, config.head_dim, config.rope_theta, config.rope_scaling)
        with jax.named_scope("kv_update_schedule"):
            updates = [
                kv_update_schedule(ragged.slot_mapping, page_size=kv.page_size, platform=kv.layout)
                for ragged in batch.ragged
            ]
        schedules = {}
        for window in dict.fromkeys(windows):
            with jax.named_scope("attention_schedule"):
                schedules[window] = attention_schedule(
                    batch.ragged[0],
                    attention_spec(config, window, self.mesh),
                    num_tokens=batch.token_ids.shape[0],
                    page_size=kv.page_size,
                    platform=kv.layout,
                )
        with jax.named_scope("embed"):
            x = self.embed(batch.token_ids) if hidden is None else hidden
        loads: list[jax.Array] = []
        for index, (layer, window) in enumerate(zip(self.layers, windows, strict=True)):
            group, place = places[self.stage.first_layer + index]
            step = StepInputs(cos, sin, batch.ragged[group], schedules[window], updates[group])
            graph, state = nnx.split(layer)
            with jax.named_scope(f"layer_{index}"):
                x, kv, load = _run_layer(graph, state, x, kv, jnp.int32(place * num_pages), step)
            loads += jax.tree.leaves(load)
        if loads:
            self.load = ExpertLoad(jnp.stack(loads))
        if not self.stage.is_last:
            return x, kv
        with jax.named_scope("norm"):
            return self.norm(x), kv

    def logits(self, hidden: jax.Array) -> jax.Array:
        """[R, D] -> f32[R, V / n] where n devices share the rows; whole on one device."""
        with jax.named_scope("logits"):
            if self.config.tie_word_embeddings:
                logits = self.embed.logits(hidden)
            else:
                logits = self.lm_head(hidden, out_dtype=jnp.float32)
            return own_logits(logits, self.config.vocab_size)

    def cache_groups(self, page_size: int, kv_dtype: Any, *, hybrid: bool = True) -> tuple[Paged, ...]:
        """The cache groups of the whole model with the layers that are here, `page_size` tokens a page."""
        config, here = self.config, self.stage.layers
        spec = KVSpec(
            num_pages=1,
            page_size=page_size,
            num_kv_heads=num_kv_heads(config, self.mesh),
            head_dim=config.head_dim,
            v_head_dim=config.head_dim,
            dtype=kv_dtype,
        )
        groups = group_layers(config.sliding_window, hybrid=hybrid)
        return tuple(Paged(tuple(each for each in layers if each in here), window, spec) for window, layers in groups)
