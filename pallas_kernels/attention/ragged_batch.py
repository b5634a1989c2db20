"""Arguments of attention for one step: the ragged batch and the static shape of the heads.

Contains the two argument types shared by every attention implementation, and their checks.

Shape letters: T new tokens, S sequences, W page-table columns, N query heads, K kv heads, H head dim, Hv value head
dim.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp


class RaggedBatch(NamedTuple):
    """New tokens of S sequences, concatenated. Every array is int32, and every row past `num_seqs` may hold garbage.

    A sequence may have no new token (q_len 0), or neither tokens nor keys (kv_len 0). Entries of `page_table` past
    ceil(kv_len / page_size) are never dereferenced.

    Attributes:
      cu_q_lens: [S + 1] first token of each sequence (vLLM: query_start_loc).
      kv_lens: [S] keys visible, this step's included (vLLM: seq_lens).
      page_table: [S, W] pool rows of each sequence, in order (vLLM: block_table).
      slot_mapping: [T] flat pool slot (page * page_size + offset) of each new token, -1 = padding.
      num_seqs: [] live rows.
      num_decode: [] rows [0, num_decode) have exactly one new token; None: a batch of prefills alone.
    """

    cu_q_lens: jax.Array
    kv_lens: jax.Array
    page_table: jax.Array
    slot_mapping: jax.Array
    num_seqs: jax.Array
    num_decode: jax.Array | None


@dataclass(frozen=True)
class AttentionSpec:
    """Static, hashable description of one attention layer on one device; raises ValueError for an impossible one.

    Attributes:
      num_q_heads, num_kv_heads: query heads N, and the KV heads K that they share.
      head_dim, v_head_dim: elements of a key H, and of a value Hv.
      sm_scale: factor of the products of queries and keys.
      window: a token sees keys less than `window` positions away; None for all.
      soft_cap: logits become soft_cap * tanh(logits / soft_cap); None for none.
      causal: a token sees no key after its own.
      chunk: a token sees the keys from the last multiple of `chunk` on, a window that restarts; None for all.
      lookback: number of chunks before a token's own whose keys it sees, too.
      values_in_keys: a key begins with its value, which is read there.
      has_slopes: logits fall with the distance of a key, by the slope of their head.
      mutual: of later keys (kv_limits), a token sees only those of tokens that see later keys, too.
      has_sinks: each head has a logit that takes a share of the softmax and adds no value.
      bias_extent: each token and head has a number for each distance of a key below this; 0 for none.
      paged: without `causal`, keys of earlier steps count, too, which are in pages.
    """

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    sm_scale: float
    window: int | None = None
    soft_cap: float | None = None
    causal: bool = True
    chunk: int | None = None
    lookback: int = 0
    values_in_keys: bool = False
    has_slopes: bool = False
    mutual: bool = False
    has_sinks: bool = False
    bias_extent: int = 0
    paged: bool = False

    @property
    def stored_width(self) -> int:
        """Number of elements that a page stores for one token: keys and values of all kv heads, without the values if
        values_in_keys.
        """
        return self.num_kv_heads * (self.head_dim + (0 if self.values_in_keys else self.v_head_dim))

    def __post_init__(self) -> None:
        """Raise ValueError, with the field's name, for sizes below 1, query heads that are not a multiple of the kv
        heads, a scale that is not finite, a soft cap that is not positive, or values that contradict each other.
        """
        for field in ("num_q_heads", "num_kv_heads", "head_dim", "v_head_dim"):
            if getattr(self, field) < 1:
                raise ValueError(f"AttentionSpec.{field} must be at least 1, got {getattr(self, field)}")
        if self.num_q_heads % self.num_kv_heads:
            raise ValueError(
                f"AttentionSpec.num_q_heads ({self.num_q_heads}) must be a multiple of num_kv_heads "
                f"({self.num_kv_heads}): query heads share kv heads in equal groups"
            )
        if self.values_in_keys and self.v_head_dim > self.head_dim:
            raise ValueError(
                f"AttentionSpec.v_head_dim must be at most head_dim ({self.head_dim}) where values lie in keys, "
                f"got {self.v_head_dim}"
            )
        if not math.isfinite(self.sm_scale):
            raise ValueError(f"AttentionSpec.sm_scale must be finite, got {self.sm_scale}")
        if self.window is not None and self.window < 1:
            raise ValueError(f"AttentionSpec.window must be at least 1 or None, got {self.window}")
        if self.chunk is not None and (self.chunk < 1 or not self.causal or self.window is not None):
            raise ValueError(
                f"AttentionSpec.chunk must be at least 1 or None, with causal=True and window=None, got {self.chunk}"
            )
        if self.lookback < 0 or (self.lookback and self.chunk is None):
            raise ValueError(f"AttentionSpec.lookback must be at least 0, and 0 without chunk, got {self.lookback}")
        if self.has_slopes and self.values_in_keys:
            raise ValueError("AttentionSpec.has_slopes must be False where values lie in keys, got True")
        if self.bias_extent < 0 or (self.bias_extent and (self.values_in_keys or not self.causal)):
            text = "at least 0, and 0 where values lie in keys or causal is False"
            raise ValueError(f"AttentionSpec.bias_extent must be {text}, got {self.bias_extent}")
        if self.soft_cap is not None and not self.soft_cap > 0:
            raise ValueError(f"AttentionSpec.soft_cap must be positive or None, got {self.soft_cap}")

    @property
    def xla_only(self) -> str | None:
        """Name of what only plain XLA computes: what is added to logits by a key's distance, and chunks before a
        token's own; None for nothing.
        """
        added = "slopes by distance" if self.has_slopes else "biases by distance" if self.bias_extent else None
        return added or ("chunks before a token's own" if self.lookback else None)

    @property
    def group_size(self) -> int:
        """Number of query heads per kv head."""
        return self.num_q_heads // self.num_kv_heads

    @property
    def query_dims(self) -> tuple[int, int]:
        """Numbers of columns of the queries `q` and `q_rest`: (H, 0), or (Hv, H - Hv) if values lie in keys."""
        dim = self.v_head_dim if self.values_in_keys else self.head_dim
        return dim, self.head_dim - dim

    def check_shard(self, num_kv_heads: int, platform: str) -> None:
        """Raise ValueError unless num_kv_heads, the kv heads in a device's shard of the pool, equals that of this spec.
        platform: named in the message.
        """
        if num_kv_heads != self.num_kv_heads:
            raise ValueError(
                f"the pool's shard holds {num_kv_heads} kv heads, AttentionSpec.num_kv_heads is {self.num_kv_heads}: "
                f"on platform {platform!r} schedule and attention take the shard's own spec"
            )


def tokens_of(batch: RaggedBatch, num_tokens: int) -> tuple[jax.Array, jax.Array]:
    """Return, for each of num_tokens tokens, (the row i32 of its sequence, how many keys i32 it sees). A token of no
    sequence has the last row, and sees 0.
    """
    tokens, last = jnp.arange(num_tokens, dtype=jnp.int32), len(batch.kv_lens) - 1
    seqs = jnp.minimum(jnp.sum(tokens[:, None] >= batch.cu_q_lens[1:], axis=1, dtype=jnp.int32), last)
    ends = batch.kv_lens[seqs] - (batch.cu_q_lens[seqs + 1] - 1 - tokens)
    return seqs, jnp.where(tokens < batch.cu_q_lens[batch.num_seqs], ends, 0)


def check_batch(batch: RaggedBatch, num_tokens: int) -> None:
    """Raise ValueError unless the arrays of `batch` are int32 and agree in S >= 1, W >= 1 and T = num_tokens."""
    for field, array in zip(batch._fields, batch, strict=True):
        if array is not None and array.dtype != "int32":
            raise ValueError(f"RaggedBatch.{field} must be int32, got {array.dtype}")
    if batch.page_table.ndim != 2 or 0 in batch.page_table.shape:
        raise ValueError(f"RaggedBatch.page_table must be [S, W] with S, W >= 1, got {batch.page_table.shape}")
    num_seqs = batch.page_table.shape[0]
    wanted = {
        "cu_q_lens": (num_seqs + 1,),
        "kv_lens": (num_seqs,),
        "slot_mapping": (num_tokens,),
        "num_seqs": (),
        "num_decode": (),
    }
    if batch.num_decode is None:
        del wanted["num_decode"]
    for field, shape in wanted.items():
        if getattr(batch, field).shape != shape:
            raise ValueError(
                f"RaggedBatch.{field} must have shape {shape} for {num_tokens} tokens and "
                f"{num_seqs} page-table rows, got {getattr(batch, field).shape}"
            )
