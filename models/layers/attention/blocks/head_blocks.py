"""Attention to the blocks of keys that an indexer selects, a selection for each KV head (MiniMax 2026, MiniMax M3).

The indexer has a query for each KV head, and one key for each token, which every KV head caches after its own key and
value: devices that split the heads need no exchange, and where each has one head, no key is cached twice.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.config.attention import KeyIndex, LayerAttention
from jaxengine.models.config.fields import ModelConfigError
from jaxengine.models.layers.attention.attention import Attention, LayerPages, StepInputs, head_copies
from jaxengine.models.layers.base.linear import Linear
from jaxengine.models.layers.base.norm import NormClass
from jaxengine.models.layers.base.rope import apply_rope
from jaxengine.models.params.declare import Source
from jaxengine.pallas_kernels.attention.selected import block_attention, select_blocks
from jaxengine.pallas_kernels.kv.pages import KVPages
from jaxengine.pallas_kernels.kv.update import kv_cache_update


class HeadBlockIndexer(nnx.Module):
    """Projections `index_q_proj` and `index_k_proj` of an indexer from the hidden state, each with a norm after it.

    copies: how many devices have the same KV head. A device has the queries of its KV heads, and the whole key.
    """

    def __init__(
        self,
        index: KeyIndex,
        hidden_size: int,
        *,
        eps: float,
        source: str,
        build: Build,
        copies: int,
        norm_class: NormClass,
    ):
        self.head_dim = size = index.head_dim
        heads = Source(f"{source}.index_q_proj", index.num_heads * size, group=size, repeat=copies)
        self.q = Linear(hidden_size, (heads,), axes=("embed", "heads"), build=build)
        key = Source(f"{source}.index_k_proj", size)
        self.k = Linear(hidden_size, (key,), axes=("embed", "latent"), build=build)
        self.q_norm, self.k_norm = (
            norm_class(size, eps, source=f"{source}.index_{name}_norm", build=build) for name in "qk"
        )

    def __call__(self, x: jax.Array, step: StepInputs) -> tuple[jax.Array, jax.Array]:
        """Return queries [T, K, J] and keys [T, 1, J] of hidden states x [T, D], normed, and rotated if the step has
        rope.
        """
        q = self.q_norm(self.q(x, step.rows).reshape(x.shape[0], -1, self.head_dim))
        k = self.k_norm(self.k(x, step.rows))[:, None]
        return (q, k) if step.rope is None else (apply_rope(q, *step.rope), apply_rope(k, *step.rope))


class HeadBlockAttention(Attention):
    """Grouped-query attention to the blocks of keys that each KV head selects by its HeadBlockIndexer.

    norm_class: class of the indexer's norms. Raises ModelConfigError without an indexer of blocks in the configuration.
    """

    def __init__(
        self,
        attention: LayerAttention,
        hidden_size: int,
        *,
        eps: float,
        source: str,
        build: Build,
        norm_class: NormClass,
        **options: Any,
    ):
        index = attention.index
        if index is None or index.block is None:
            raise ModelConfigError("index must have a block for attention to blocks of keys, got none")
        super().__init__(attention, hidden_size, eps=eps, source=source, build=build, **options)
        self.size, self.num_blocks, self.local = index.block, index.num_blocks, index.local
        copies = head_copies(attention, build.mesh)
        self.indexer = HeadBlockIndexer(
            index, hidden_size, eps=eps, source=source, build=build, copies=copies, norm_class=norm_class
        )

    def __call__(self, x: jax.Array, kv: KVPages, pages: LayerPages, step: StepInputs) -> tuple[jax.Array, KVPages]:
        """Map x[T, D] to ([T, D], the pool with this layer's keys, values and keys of the indexer written). Each KV
        head attends to the blocks of keys that its indexer head selects, the `local` latest ones always among them.
        """
        with jax.named_scope("qkv"):
            q, k, v, _ = self._heads(self.qkv(x, step.rows))
            q, k = self.rotate(q, k, step)
        with jax.named_scope("indexer"):
            index_q, index_k = self.indexer(x, step)
        ragged = pages.in_pool(kv.page_size)
        with jax.named_scope("kv_cache_update"):
            own = jnp.concatenate([k, v], axis=-1), jnp.broadcast_to(index_k, (*k.shape[:2], index_k.shape[2]))
            kv = kv_cache_update(kv, *own, ragged.slot_mapping, schedule=pages.update_schedule)
        with jax.named_scope("select_blocks"):
            longest = ragged.page_table.shape[1] * kv.page_size
            count = min(self.num_blocks, -(-longest // self.size))
            sizes = {"size": self.size, "count": count, "local": min(self.local, count)}
            blocks = select_blocks(index_q, kv, ragged, schedule=step.schedule, **sizes)
        with jax.named_scope("block_attention"):
            o = block_attention(q, kv, ragged, blocks, spec=self.spec, size=self.size)
        with jax.named_scope("o_proj"):
            return self.out(o.reshape(x.shape[0], -1), step.rows), kv
