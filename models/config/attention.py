"""LayerAttention: one layer's attention as data, for kernels, caches and step inputs.

Contains the checks that concern one layer. Norms, activations and multipliers around attention are code in the family's
file.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from jaxengine.models.config.compressed import CompressedKeys, LayerConvolutions, QueryKeyConvolutions, RecentPlaces
from jaxengine.models.config.fields import (
    MAX_HEAD_DIM,
    MAX_HEADS,
    MAX_HIDDEN,
    MAX_INTEGER,
    ModelConfigError,
    check_size,
)
from jaxengine.models.config.rope import Rope
from jaxengine.models.config.state import (
    GatedDelta,
    GatedRecurrence,
    LinearState,
    NGrams,
    SelectiveScan,
    ShortConvolution,
    StateSpace,
)

_MOST_POOLED = 4096  # tokens of a group of keys

# Recurrent state that a layer may have instead of attention, or in addition to it.
LayerState = (
    GatedDelta
    | GatedRecurrence
    | LinearState
    | ShortConvolution
    | StateSpace
    | SelectiveScan
    | CompressedKeys
    | RecentPlaces
    | LayerConvolutions
    | QueryKeyConvolutions
)


@dataclass(frozen=True)
class TemperatureTuning:
    """Factor of queries, 1 + attn_scale * ln(1 + floor((position + offset) / floor_scale)). The longer the context, the
    sharper the softmax (Nakanishi 2025, arXiv:2501.19399, as in Llama 4).

    offset: 1 where the first position counts as one token, else 0. power: whether the factor is (1 + (position +
    offset) / floor_scale) ** attn_scale instead. begins: whether it is 1 + attn_scale * ln((position + offset) /
    floor_scale) instead, from where this is 1 or more, and 1 before. Raises ModelConfigError unless both numbers are
    finite and above 0.
    """

    floor_scale: float
    attn_scale: float
    offset: int = 0
    power: bool = False
    begins: bool = False

    def __post_init__(self) -> None:
        for name in ("floor_scale", "attn_scale"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ModelConfigError(f"{name} must be a finite number > 0, got {getattr(self, name)!r}")


class RelativeBias(NamedTuple):
    """Numbers that a token adds to the logits of keys by their distance (Inkling): in each head, products of a learned
    matrix with `size` numbers that are projected from the token's hidden state.

    extent: distances that have a number, those below it; 0 is added to the logits of farther keys.
    """

    size: int
    extent: int


@dataclass(frozen=True)
class Latent:
    """Sizes of multi-head latent attention (DeepSeek-AI 2024, arXiv:2405.04434), in which all keys and values are
    computed from a latent.

    A token's cached key is its latent followed by the rotated part that all heads share; its value is the latent. So
    there is one KV head. Names are those of config.json.

    Attributes:
      kv_lora_rank: elements of the latent.
      qk_nope_head_dim, qk_rope_head_dim: elements of a head's query without and with rope.
      v_head_dim: elements of a head's value, computed from the latent.
      q_lora_rank: elements of the latent of queries; None where queries are projected from the hidden state.

    Raises ModelConfigError for sizes that are not integers from 1 (qk_rope_head_dim: 0) to MAX_HEAD_DIM (q_lora_rank:
    MAX_HIDDEN).
    """

    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    q_lora_rank: int | None = None

    def __post_init__(self) -> None:
        for name in ("kv_lora_rank", "qk_nope_head_dim", "v_head_dim"):
            check_size(name, getattr(self, name), MAX_HEAD_DIM)
        check_size("qk_rope_head_dim", self.qk_rope_head_dim, MAX_HEAD_DIM, 0)
        if self.q_lora_rank is not None:
            check_size("q_lora_rank", self.q_lora_rank, MAX_HIDDEN)


@dataclass(frozen=True)
class KeyIndex:
    """Indexer of a layer with sparse attention (DeepSeek-AI 2025, "DeepSeek-V3.2-Exp"): a token attends to the `top_k`
    keys that it scores highest.

    With a `block` (MiniMax M3) it selects blocks of keys for each KV head of a layer without a latent, by queries of
    its own for each of these heads; then the fields from `interleaved` on have their defaults.

    Attributes:
      num_heads: heads of its queries.
      head_dim: elements of a query, and of its one key for each token, which is cached in addition to the layer's keys.
      top_k: number of keys that a token attends to; all of them if there are no more.
      block: tokens of a block of keys, counted from the first one, of which all are selected if the best of them scores
        high; None where keys are selected one by one.
      local: number of blocks, the last of which has the token's own key, that are always selected.
      interleaved: Rope.interleaved of its rope, which otherwise equals the layer's.
      rotates_last: whether the last elements of its queries and keys are rotated instead of the first.
      norm_eps: epsilon of the norm of its keys.
      pool: tokens of a group that has one key, the mean of its tokens' keys with learned weights, and of which all
        tokens are selected (GLM-5.3); those after the last whole group are always selected. None for keys of tokens.
      source: number of the earlier layer whose selection of keys is used; the indexer then has no weights. None for its
        own selection.
      reads_hidden: whether its queries are projected from the hidden state instead of the latent of queries.

    Raises ModelConfigError for sizes out of their limits, a top_k that is no multiple of `pool`, and more `local`
    blocks than num_blocks.
    """

    num_heads: int
    head_dim: int
    top_k: int
    block: int | None = None
    local: int = 0
    interleaved: bool = False
    rotates_last: bool = False
    norm_eps: float = 1e-6
    pool: int | None = None
    source: int | None = None
    reads_hidden: bool = False

    def __post_init__(self) -> None:
        check_size("index_n_heads", self.num_heads, MAX_HEADS)
        check_size("index_head_dim", self.head_dim, MAX_HEAD_DIM)
        name = "index_topk" if self.block is None else "index_topk_blocks * index_block_size"
        check_size(name, self.top_k, MAX_INTEGER)
        if self.pool is not None:
            check_size("index_kpool", self.pool, _MOST_POOLED)
            if self.top_k % self.pool:
                raise ModelConfigError(f"index_topk must be a multiple of index_kpool = {self.pool}, got {self.top_k}")
        if self.block is not None:
            check_size("index_block_size", self.block, MAX_INTEGER)
            check_size("index_local_blocks", self.local, self.top_k // self.block, 0)

    @property
    def num_blocks(self) -> int:
        """Number of blocks that a token attends to; top_k where keys are selected one by one."""
        return self.top_k // (self.block or 1)

    @property
    def stored_size(self) -> int:
        """Number of cached elements of a token: of its key and, where keys are pooled, of its gates."""
        return self.head_dim * (1 if self.pool is None else 2)


@dataclass(frozen=True)
class KeyBlocks:
    """Blocks of keys of which a token attends to those that an indexer scores highest (Qwen4-Exp), and to the tokens
    after its last whole block. A block's key of the indexer is the normed mean of its tokens' keys; blocks of
    KeyIndex.block have no key of their own, and score as their best token.

    Attributes:
      num_heads: heads of the indexer's queries.
      head_dim: elements of a query, and of its one key for each token, cached after the layer's values.
      size: tokens of a block.
      top_k: number of blocks that a token attends to; all of them if there are no more.

    Raises ModelConfigError for sizes that are not positive or out of their limits.
    """

    num_heads: int
    head_dim: int
    size: int
    top_k: int

    def __post_init__(self) -> None:
        check_size("indexer_n_heads", self.num_heads, MAX_HEADS)
        check_size("indexer_head_dim", self.head_dim, MAX_HEAD_DIM)
        check_size("indexer_compress_ratio", self.size, _MOST_POOLED)
        check_size("indexer_budget / indexer_compress_ratio", self.top_k, MAX_INTEGER)


@lru_cache(maxsize=8)
def alibi_slopes(num_heads: int, largest: float = 8.0) -> tuple[float, ...]:
    """Return the ALiBi slope of each head (Press et al. 2021, arXiv:2108.12409): 2 ** e with the exponents e in equal
    steps, the last of which is -largest.

    If the number of heads is not a power of two, the slopes for the next power of two are computed. Of these the 2nd,
    4th, ... come first, then the 1st, 3rd, ..., until there is one for each head. Results are cached.
    """
    count = 1 << (num_heads - 1).bit_length()
    slopes = [2.0 ** (-largest * (index + 1) / count) for index in range(count)]
    return tuple(slopes if count == num_heads else (slopes[1::2] + slopes[::2])[:num_heads])


@dataclass(frozen=True)
class LayerAttention:
    """Attention of one layer. Layers with equal values share rope tables, schedules and a trace.

    Attributes:
      num_heads, num_kv_heads: heads of queries, and of keys and values.
      head_dim: size of a query, key and value; of a cached key where there is a latent.
      rope: rotation of q and k; None for none.
      scale: factor of the products of queries and keys; None for head_dim ** -0.5.
      window: a token attends to keys less than this many positions away; None for all of them.
      chunk: a token attends to the keys from the last multiple of this position on; None for all of them.
      lookback: chunks before it, to whose keys a token attends, too; 0 without chunk.
      causal: whether a token attends to itself and earlier tokens only; otherwise to its whole sequence, whose tokens
        are then in one step.
      soft_cap: products become soft_cap * tanh(product / soft_cap) before the softmax, None for no cap.
      clip: bound of queries and keys after their norms, and of values; None for none.
      qk_norm: whether each head of q and k has an RMS norm before rope, unless the family passes other norms to
        Attention.
      sinks: whether each head has a learned logit that takes a share of the softmax and adds no value (Xiao et al.
        2023, arXiv:2309.17453).
      bias: whether the projections to q, k and v have a bias.
      output_bias: whether the projection after attention has a bias.
      temperature: factor of queries by their positions; None for none.
      index: indexer that selects the keys that a token attends to; None for all keys. With a latent it selects single
        keys, without one blocks of them.
      blocks: blocks of keys, of which an indexer selects those that a token attends to; None for none. `value_size`
        then counts the indexer's key, too.
      latent: latent that keys and values are computed from, None where they are projected directly.
      state: recurrent state instead of attention; None for a layer that only attends. With a state, the sizes equal
        those of the attending layers, and the other fields have their defaults.
      beside_state: whether the layer has both a state and attention.
      feed_forward_only: whether the layer has only a feed-forward part, and neither attention nor a state.
      mixer_only: whether the layer has only attention or a state, and no feed-forward part.
      kv_source: number of the layer before this one whose keys and values it attends to, as that layer has cached them;
        None for its own. It projects queries only and has no pages.
      keys_as_values: whether values are the projected keys before norm and rope, so that there is no projection to
        values.
      value_size: elements of a value if they are not head_dim; None if they are, or with a latent.
      slopes: for each head, the number that is subtracted from its logits for each position between query and key,
        after scale and cap (ALiBi, see `alibi_slopes`); None for none.
      selected_by: number of the earlier layer whose selection of blocks, or whose candidates for it, the layer uses
        (see SharedKeys); None for neither.
      learned_positions: whether the effect of positions has weights, of which all layers share those of rope. The layer
        then computes its rope itself (Mistral Large 4).
      relative: what a token adds to logits by the distance of a key; None for nothing.
      mutual: whether, of the keys after their own, tokens of images see only those of tokens that see later keys, too
        (jaxengine.pallas_kernels.attention.ragged_batch.AttentionSpec).
      paged: whether keys are read from pages even if the layer is not causal, since some are of earlier steps, as in a
        head that drafts a block.

    Raises ModelConfigError for sizes out of their limits, a num_heads that is no multiple of num_kv_heads, factors and
    caps that are not finite and above 0, a rope of more elements than a head has, and for fields that exclude each
    other.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: Rope | None
    scale: float | None = None
    window: int | None = None
    chunk: int | None = None
    lookback: int = 0
    causal: bool = True
    soft_cap: float | None = None
    clip: float | None = None
    qk_norm: bool = False
    sinks: bool = False
    bias: bool = False
    output_bias: bool = False
    temperature: TemperatureTuning | None = None
    latent: Latent | None = None
    index: KeyIndex | None = None
    blocks: KeyBlocks | None = None
    state: LayerState | None = None
    beside_state: bool = False
    feed_forward_only: bool = False
    mixer_only: bool = False
    kv_source: int | None = None
    keys_as_values: bool = False
    value_size: int | None = None
    slopes: tuple[float, ...] | None = None
    selected_by: int | None = None
    learned_positions: bool = False
    relative: RelativeBias | None = None
    mutual: bool = False
    paged: bool = False

    def __post_init__(self) -> None:
        check_size("num_heads", self.num_heads, MAX_HEADS)
        check_size("num_kv_heads", self.num_kv_heads, MAX_HEADS)
        check_size("head_dim", self.head_dim, MAX_HEAD_DIM)
        for name in ("window", "chunk"):
            if getattr(self, name) is not None:
                check_size(name, getattr(self, name), MAX_INTEGER)
        if self.window is not None and self.chunk is not None:
            raise ModelConfigError(f"window must be None where chunk is {self.chunk}, got {self.window}")
        if self.lookback < 0 or (self.lookback and self.chunk is None):
            raise ModelConfigError(f"lookback must be at least 0, and 0 without chunk, got {self.lookback}")
        if not self.causal and not (self.chunk is self.state is None):
            raise ModelConfigError("attention to later tokens takes no chunk and no state")
        for name in ("scale", "soft_cap", "clip"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise ModelConfigError(f"{name} must be a finite number > 0, got {value!r}")
        if self.num_heads % self.num_kv_heads:
            raise ModelConfigError(
                f"num_heads must be a multiple of num_kv_heads, got {self.num_heads} and {self.num_kv_heads}"
            )
        own = self.latent if self.state is None else None  # states have sizes of their own
        rotated = self.head_dim if own is None else own.qk_rope_head_dim
        if self.rope is not None and self.rope.num_rotated > rotated:
            allowed = f"even and at most head_dim = {rotated}, or odd and less"
            text = f"rotary_dim, head_dim or a part of it, must be {allowed}, got {self.rope.rotary_dim}"
            raise ModelConfigError(text)
        if self.slopes is not None:
            if len(self.slopes) != self.num_heads or not all(0 <= each < float("inf") for each in self.slopes):
                text = f"slopes must be a finite number >= 0 for each of {self.num_heads} heads, got {self.slopes}"
                raise ModelConfigError(text)
            if self.latent is not None or self.state is not None:
                raise ModelConfigError("attention with slopes takes no latent and no state")
        if self.relative is not None:
            check_size("d_rel", self.relative.size, MAX_HEAD_DIM)
            check_size("rel_extent", self.relative.extent, MAX_INTEGER)
            if self.latent is not None or not self.causal:
                raise ModelConfigError("attention with biases by distance takes no latent, and sees no later tokens")
        if self.value_size is not None:
            check_size("v_head_dim", self.value_size, MAX_HEAD_DIM)
            if self.latent is not None or self.keys_as_values:
                raise ModelConfigError("values computed from a latent, or that are keys, have no size of their own")
        if self.latent is not None:
            width = self.latent.kv_lora_rank + self.latent.qk_rope_head_dim
            if (self.num_kv_heads, self.head_dim) != (1, width):
                raise ModelConfigError(
                    f"a latent needs one kv head of kv_lora_rank + qk_rope_head_dim = {width}, got num_kv_heads "
                    f"{self.num_kv_heads} and head_dim {self.head_dim}"
                )
            if self.qk_norm or (self.sinks and self.index is None):
                raise ModelConfigError("latent attention takes no qk_norm, and sinks only with an indexer")
        if self.compressed is not None:
            self._check_compressed(self.compressed)
        if self.blocks is not None:
            self._check_blocks(self.blocks)
        if self.index is not None:
            self._check_index(self.index)

    def _check_index(self, index: KeyIndex) -> None:
        """Raise ModelConfigError if the layer cannot attend to the keys that its indexer selects.

        It takes no window, chunk, soft cap or temperature. With selected blocks it takes no latent, sinks, slopes or
        kv_source, and the indexer has one head per KV head; otherwise it needs a latent, of queries too if the indexer
        reads that. index_head_dim must not be below the number of rotated elements.
        """
        if self.reach is not None or self.soft_cap is not None or self.temperature is not None:
            raise ModelConfigError("attention to selected keys takes no window, chunk, soft cap or temperature")
        if index.block is not None:
            if self.latent is not None or self.sinks or self.slopes is not None or self.kv_source is not None:
                raise ModelConfigError("attention to blocks of keys takes no latent, sinks, slopes or kv_source")
            if index.num_heads != self.num_kv_heads:
                allowed = f"num_key_value_heads = {self.num_kv_heads}, each of which selects its own blocks"
                raise ModelConfigError(f"index_n_heads must be {allowed}, got {index.num_heads}")
        elif self.latent is None or (self.latent.q_lora_rank is None and not index.reads_hidden):
            raise ModelConfigError("q_lora_rank must be set where an indexer reads the latent of queries, got None")
        rotated = 0 if self.rope is None else self.rope.num_rotated
        size = rotated if self.latent is None else self.latent.qk_rope_head_dim
        if size > index.head_dim:
            name = "the rotated part of a head" if self.latent is None else "qk_rope_head_dim"
            raise ModelConfigError(f"index_head_dim must be at least {name} = {size}, got {index.head_dim}")

    def _check_compressed(self, compressed: CompressedKeys) -> None:
        """Raise ModelConfigError if the layer's other fields do not suit its compressed keys.

        It needs one KV head of their head_dim, pages if and only if blocks have keys, a rope that fits their widths,
        and heads that out_groups divides, and takes no window, chunk, soft cap or temperature.
        """
        kept = (self.num_kv_heads, self.head_dim, self.beside_state)
        if kept != (1, compressed.head_dim, compressed.rate is not None):
            raise ModelConfigError(f"compressed keys need one kv head, and pages where blocks have keys, got {kept}")
        if self.rope is None or min(compressed.widths) < self.rope.num_rotated:
            raise ModelConfigError(f"compressed keys need a rope of at most their {compressed.widths} elements")
        if self.num_heads % compressed.out_groups:
            text = f"o_groups must divide num_attention_heads = {self.num_heads}, got {compressed.out_groups}"
            raise ModelConfigError(text)
        if self.reach is not None or self.soft_cap is not None or self.temperature is not None:
            raise ModelConfigError("attention to compressed keys takes no window of pages, soft cap or temperature")

    def _check_blocks(self, blocks: KeyBlocks) -> None:
        """Raise ModelConfigError if the layer's other fields do not suit `blocks`.

        It needs values with the indexer's keys after them and a rope within their head_dim, and takes no latent,
        window, chunk, soft cap, temperature or sinks.
        """
        if self.latent is not None or self.value_size != self.head_dim + blocks.head_dim:
            raise ModelConfigError("blocks of keys need values followed by the indexer's keys, and no latent")
        if self.rope is None or self.rope.num_rotated > blocks.head_dim:
            least = 0 if self.rope is None else self.rope.num_rotated
            raise ModelConfigError(f"indexer_head_dim must be at least {least}, of rope, got {blocks.head_dim}")
        if self.reach is not None or self.soft_cap is not None or self.temperature is not None or self.sinks:
            raise ModelConfigError("attention to selected blocks takes no window, soft cap, temperature or sinks")

    @property
    def attends(self) -> bool:
        """Whether the layer has attention; otherwise it has a state alone, or a feed-forward part only."""
        return not self.feed_forward_only and (self.state is None or self.beside_state)

    @property
    def has_pages(self) -> bool:
        """Whether the layer caches its own keys and values. A layer with a kv_source attends without pages."""
        return self.attends and self.kv_source is None

    @property
    def v_head_dim(self) -> int:
        """Number of elements of a value: value_size, or head_dim without one.

        With a latent these are the first kv_lora_rank elements of the key; with a latent and an indexer, its key, and
        its gates if it has any, are cached in place of the value.
        """
        if self.index is not None and self.latent is not None:
            return self.index.stored_size
        return (self.value_size or self.head_dim) if self.latent is None else self.latent.kv_lora_rank

    @property
    def values_in_keys(self) -> bool:
        """Whether the first elements of a cached key are the value, so that pages hold no values."""
        return self.latent is not None and self.index is None

    @property
    def has_blocks(self) -> bool:
        """Whether the layer has keys of blocks of tokens: compressed keys, or those of an indexer."""
        return self.blocks is not None or self.compressed is not None

    @property
    def compressed(self) -> CompressedKeys | None:
        """Compressed keys that the layer attends to; None if each token has its own key."""
        return self.state if isinstance(self.state, CompressedKeys) else None

    @property
    def ngrams(self) -> NGrams | None:
        """Embeddings of n-grams of token ids that the layer adds; None for none."""
        return self.state.ngrams if isinstance(self.state, GatedDelta) else None

    @property
    def selection_source(self) -> int | None:
        """Number of the earlier layer whose selection of keys or blocks the layer uses; None for its own."""
        return self.selected_by if self.index is None else self.index.source

    @property
    def cached(self) -> tuple[int, int, bool]:
        """Number of elements of a KV head's key in a page, and of its value, and whether values are parts of keys, for
        a layer without compressed keys.

        Where blocks of keys are selected, keys and values are joined in place of the key, and every KV head has the
        indexer's key in place of the value.
        """
        if self.index is not None and self.index.block is not None:
            return self.head_dim + self.v_head_dim, self.index.head_dim, False
        return self.head_dim, self.v_head_dim, self.values_in_keys

    def page_sizes(self, page_size: int) -> dict[str, Any]:
        """Return fields of KVSpec by name: the sizes of a cached key and value, whether values are part of the keys,
        and whether kernels copy values alone, as they do with an indexer's keys. Raises ModelConfigError if the layer
        does not support pages of `page_size` tokens.
        """
        if (compressed := self.compressed) is not None:
            return compressed.page_sizes(page_size)
        names = "head_dim", "v_head_dim", "values_in_keys", "aligned_values"
        return dict(zip(names, (*self.cached, self.index is not None), strict=True))

    @property
    def reach(self) -> int | None:
        """Number of latest keys, its own included, that a token attends to and that a cache must keep: the window, or
        `chunk` * (1 + `lookback`). None for all, always if not causal.
        """
        if not self.causal or self.chunk is None:
            return self.window if self.causal else None
        return self.chunk * (1 + self.lookback)

    @property
    def sm_scale(self) -> float:
        """Factor of the products of queries and keys: `scale`, or head_dim ** -0.5 if that is None."""
        return self.head_dim**-0.5 if self.scale is None else self.scale
