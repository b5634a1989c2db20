"""Roofline: the least time a step can take on a device, from the bytes it must move and the operations it must do.

A decode step is counted with DECODE_CONTEXT keys per sequence, a mixed one as a single prompt of all its tokens. Every
weight is read once per step; of the embedding only the tokens' rows, of the experts only those that tokens reach.
Activations are assumed to stay on the chip, and exchanges between devices to cost nothing.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from jaxengine.models.cache import KVPages, KVSpec
from jaxengine.models.config.attention import KeyBlocks, LayerAttention, LayerState
from jaxengine.models.config.compressed import CompressedKeys
from jaxengine.models.config.tower import TOWERS
from jaxengine.models.layers.attention.attention import gathered_bytes
from jaxengine.models.layers.attention.mla_expanded import may_expand, num_expanded_elements
from jaxengine.models.layers.experts.expert_counts import rows_at_once
from jaxengine.models.lora import declared_pools
from jaxengine.models.params.declare import ParamDecl, declared_params
from jaxengine.runner.extensions.scores import SCORE
from jaxengine.sampling.logprobs import PROMPT_BLOCK_ROWS
from jaxengine.scheduler.batches.buckets import Bucket

DECODE_CONTEXT = 1024
_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_LEAST = {"gpu": 16}  # least rows of a reached expert: the tile of a tensor core


@dataclass(frozen=True)
class Work:
    """Least work of a step, or of one layer's attention.

    Attributes:
      num_bytes: bytes to move between memory and the chip.
      flops: operations, of which a multiplication and an addition are two.
    """

    num_bytes: int
    flops: int

    def seconds(self, bandwidth: float, flops: float) -> float:
        """Return the least seconds on a device: the longer of moving the bytes and doing the operations.

        bandwidth: bytes per second. flops: operations per second.
        """
        return max(self.num_bytes / bandwidth, self.flops / flops)


def visible_keys(bucket: Bucket, context: int, window: int | None) -> tuple[int, int]:
    """Return (keys read from the pool, query-key pairs) of one layer's attention over all sequences of a bucket.

    A decode-only bucket has one token and `context` keys for each sequence, a bucket with drafts `width` tokens for
    each. A mixed bucket is a single prompt of all its tokens, and `context` is ignored. window: number of keys that a
    token attends to; None for all.
    """
    if bucket.decode_only:
        keys = min(context, window or context)
        return bucket.num_seqs * keys, bucket.num_seqs * keys
    if bucket.width > 1:
        keys = bucket.num_seqs * min(context, (window or context) + bucket.width - 1)
        return keys, bucket.num_tokens * min(context, window or context)
    tokens = bucket.num_tokens
    seen = min(tokens, window or tokens)
    return tokens, seen * (seen + 1) // 2 + (tokens - seen) * seen


def attention_work(attention: LayerAttention, bucket: Bucket, kv_dtype: str, dtype: str, context: int) -> Work:
    """Return the work of one layer's attention, of all its heads: queries and outputs, each visible key and value once,
    and both products.

    A layer with an indexer has the work of `_selected_work`, one with compressed keys that of `_compressed_work`, one
    that selects blocks that of `_blocks_work`.
    kv_dtype: dtype of the cache. dtype: dtype of queries and outputs. context: keys per sequence of a decode.
    """
    if attention.index is not None:
        return _selected_work(attention, bucket, kv_dtype, dtype, context)
    if attention.compressed is not None:
        return _compressed_work(attention, attention.compressed, bucket, dtype, context)
    if attention.blocks is not None:
        return _blocks_work(attention, attention.blocks, bucket, kv_dtype, dtype, context)
    keys, pairs = visible_keys(bucket, context, attention.reach)
    both = attention.head_dim + attention.v_head_dim
    queries = bucket.num_tokens * attention.num_heads * both * jnp.dtype(dtype).itemsize
    cache = keys * attention.num_kv_heads * _cached_bytes(attention, kv_dtype)
    return Work(queries + cache, 2 * pairs * attention.num_heads * both)


def _selected_work(attention: LayerAttention, bucket: Bucket, kv_dtype: str, dtype: str, context: int) -> Work:
    """Return the work of the attention of a layer with an indexer.

    Each visible key of the indexer, and each latent or, for each KV head, key and value that may be selected is read
    once. The indexer counts only in layers that select by themselves (index.source None). kv_dtype: dtype of the cache.
    dtype: dtype of queries and outputs. context: keys per sequence of a decode.
    """
    index, latent, itemsize = attention.index, attention.latent, jnp.dtype(dtype).itemsize
    assert index is not None
    spec = KVSpec(1, 1, 1, *attention.cached[:2], kv_dtype)
    cached = jnp.dtype(spec.dtype).itemsize
    both = attention.head_dim + (attention.v_head_dim if latent is None else latent.kv_lora_rank)
    keys, pairs = visible_keys(bucket, context, index.top_k)
    num_bytes = bucket.num_tokens * attention.num_heads * both * itemsize
    num_bytes += keys * attention.num_kv_heads * spec.key_width * cached
    flops = 2 * pairs * attention.num_heads * both
    if index.source is None:
        keys, pairs = visible_keys(bucket, context, None)
        num_bytes += bucket.num_tokens * index.num_heads * index.head_dim * itemsize + keys * spec.value_width * cached
        flops += 2 * (pairs // (index.pool or 1)) * index.num_heads * index.head_dim
    return Work(num_bytes, flops)


def _blocks_work(
    attention: LayerAttention, blocks: KeyBlocks, bucket: Bucket, kv_dtype: str, dtype: str, context: int
) -> Work:
    """Return the work of the attention of a layer that selects blocks of keys.

    Queries and outputs, the keys and values that may be selected, the indexer's queries, and its keys of all blocks are
    read or written once. kv_dtype: dtype of the cache. dtype: dtype of queries and outputs. context: keys per sequence
    of a decode.
    """
    itemsize, cached = jnp.dtype(dtype).itemsize, jnp.dtype(kv_dtype).itemsize
    keys, pairs = visible_keys(bucket, context, blocks.top_k * blocks.size + blocks.size - 1)
    num_bytes = 2 * bucket.num_tokens * attention.num_heads * attention.head_dim * itemsize
    num_bytes += 2 * keys * attention.num_kv_heads * attention.head_dim * cached
    flops = 4 * pairs * attention.num_heads * attention.head_dim
    keys, pairs = visible_keys(bucket, context, None)
    num_bytes += bucket.num_tokens * blocks.num_heads * blocks.head_dim * itemsize
    num_bytes += keys // blocks.size * blocks.head_dim * cached
    return Work(num_bytes, flops + 2 * (pairs // blocks.size) * blocks.num_heads * blocks.head_dim)


def _compressed_work(
    attention: LayerAttention, compressed: CompressedKeys, bucket: Bucket, dtype: str, context: int
) -> Work:
    """Return the work of the attention of a layer with compressed keys.

    Queries, outputs, and the keys of all blocks, or of the blocks that may be selected, are read or written once; so
    are the indexer's queries and its keys of all blocks. The window's keys count only in the operations, because they
    are part of the layer's state, whose bytes `state_work` counts. compressed: compressed keys of the layer. dtype:
    dtype of queries and outputs. context: keys per sequence of a decode.
    """
    itemsize, index, rate = jnp.dtype(dtype).itemsize, compressed.index, compressed.rate
    pairs = visible_keys(bucket, context, compressed.window)[1]
    num_bytes = 2 * bucket.num_tokens * attention.num_heads * attention.head_dim * itemsize
    flops = 0
    if rate is not None:
        blocks, block_pairs = visible_keys(bucket, context, None if index is None else index.top_k * rate)
        pairs += block_pairs // rate
        num_bytes += blocks // rate * attention.head_dim * itemsize
    if rate is not None and index is not None and compressed.has_indexer:
        blocks, block_pairs = visible_keys(bucket, context, None)
        queries = bucket.num_tokens * index.num_heads
        num_bytes += (queries + blocks // rate) * index.head_dim * itemsize
        flops = 2 * (block_pairs // rate) * index.num_heads * index.head_dim
    return Work(num_bytes, flops + 4 * pairs * attention.num_heads * attention.head_dim)


def state_work(state: LayerState, bucket: Bucket, dtype: str) -> Work:
    """Return the work of one layer's recurrent states: each read and written once, and the computation of every token.

    dtype: dtype of activations, and of states without a dtype of their own. A bucket that is not decode-only counts as
    one sequence.
    """
    num_seqs = bucket.num_seqs if bucket.decode_only else 1
    return Work(_state_bytes(state, num_seqs, dtype), bucket.num_tokens * state.flops)


def _state_bytes(state: LayerState, num_seqs: int, dtype: str) -> int:
    """Return the bytes of one layer's recurrent states of `num_seqs` sequences, read and written once.

    dtype: dtype of states without a dtype of their own.
    """
    sizes = ((math.prod(array.shape), jnp.dtype(array.dtype or dtype).itemsize) for array in state.arrays)
    return 2 * num_seqs * sum(size * itemsize for size, itemsize in sizes)


def update_work(attention: LayerAttention, bucket: Bucket, kv_dtype: str, dtype: str) -> Work:
    """Return the work of one layer's KV write for all tokens of a bucket and all KV heads: bytes only, no operations.

    New keys and values are read as `dtype` and stored as `kv_dtype`. In a layer with compressed keys these are the
    entries of whole blocks of tokens.
    """
    if (compressed := attention.compressed) is not None:
        itemsize = jnp.dtype(dtype).itemsize + jnp.dtype(kv_dtype).itemsize
        return Work(bucket.num_tokens * sum(compressed.widths) * itemsize // (compressed.rate or 1), 0)
    key_size, value_size, in_keys = attention.cached
    width = key_size + (0 if in_keys else value_size)
    token = width * jnp.dtype(dtype).itemsize + _cached_bytes(attention, kv_dtype)
    return Work(bucket.num_tokens * attention.num_kv_heads * token, 0)


def written_bytes(attention: LayerAttention, kv_dtype: str) -> float:
    """Return the bytes that one token's keys and values take in a layer's cache of dtype `kv_dtype`: its share of a
    block's entries in a layer with compressed keys.
    """
    if (compressed := attention.compressed) is not None:
        return sum(compressed.widths) * jnp.dtype(kv_dtype).itemsize / (compressed.rate or 1)
    return attention.num_kv_heads * _cached_bytes(attention, kv_dtype)


def _cached_bytes(attention: LayerAttention, kv_dtype: str) -> int:
    """Return the bytes of a key and value in a cache of dtype `kv_dtype`, per token and KV head of a layer."""
    key_size, value_size, in_keys = attention.cached
    spec = KVSpec(1, 1, 1, key_size, value_size, kv_dtype, in_keys)
    return spec.token_width * jnp.dtype(spec.dtype).itemsize


def epilogue_work(model: Any, name: str, size: int, width: int) -> Work:
    """Return a device's share of the work of an epilogue.

    An epilogue such as the sampler reads the float32 logits once and does no operations; the score epilogue computes
    the logits of every token. name: name of the epilogue. size: its rows, for a score its tokens. width: tokens of each
    row of the previous step.
    """
    config, mesh = model.config, model.mesh
    columns = mesh.padded_vocab_size(config.vocab_size) // mesh.num_shards("sampled_vocab")
    if name != SCORE:
        return Work(4 * size * width * columns, 0)
    weight = config.hidden_size * columns
    itemsize = jnp.dtype(model.build.dtype).itemsize
    return Work(-(-size // PROMPT_BLOCK_ROWS) * weight * itemsize, 2 * size * weight)


@dataclass(frozen=True)
class Products:
    """Needs of a step's matrix products on a device, in bytes unless otherwise stated.

    Attributes:
      flops: operations.
      weight_bytes: all weights, including experts that no token reaches: a kernel may have them as operands.
      reached_bytes: weights that tokens reach, once for each layer that multiplies by them.
      expert_bytes, quantized_bytes: the parts of weight_bytes that are experts, and codes with their scales and zeros.
      row_bytes: inputs and outputs of the products, in the model's dtype; for experts split over devices also the
        buffers to which all tokens are gathered and in which they are summed.
      state_bytes: states that layers have instead of pages, each read and written once.
      gathered_bytes: keys and values that all layers' attention copies from pages, one block of each.
    """

    flops: int
    weight_bytes: int
    reached_bytes: int
    expert_bytes: int
    quantized_bytes: int
    row_bytes: int
    state_bytes: int
    gathered_bytes: int


def product_work(model: Any, bucket: Bucket, dtype: str, kv: KVPages | None = None) -> Products:
    """Return what the matrix products of a forward pass need on one device, with a bucket of tokens in every replica.

    Towers are left out. The LM head computes only the rows of logits, an expert the rows that reach it on average.

    model: abstract. dtype: dtype of activations. kv: the abstract pool, whose platform's kernels multiply whole tiles
    of rows and may expand latents to keys; None counts neither.
    """
    config, mesh, itemsize = model.config, model.mesh, jnp.dtype(dtype).itemsize
    weight_bytes = reached_bytes = expert_bytes = quantized_bytes = flops = row_bytes = 0
    block, expert_rows = _expert_rows(model, bucket, kv), _LEAST.get("" if kv is None else kv.platform, 1)
    for param in declared_params(model):
        if param.path[0] in TOWERS or param.path[:2] == ("layer_inputs", "table"):  # only single rows of it are read
            continue
        part = mesh.part_of(param.shape, param.decl.axes)
        size, embedding = math.prod(part), param.path[0] == "embed"
        if embedding and not (model.stage.is_last and config.tie_word_embeddings):
            continue
        rows = bucket.num_seqs * bucket.width if embedding or param.path[0] == "lm_head" else bucket.num_tokens
        rows *= math.prod(mesh.ranks_sharing(axis) for axis in param.decl.axes if axis is not None)
        reached, at_once, sources = 1.0, rows, param.decl.sources
        uses = _num_uses(model, sources[0].name) if sources else 1
        if param.decl.num_experts is not None:
            experts = config.experts if param.layer is None else config.experts.of_layer(param.layer)
            picked = rows * experts.num_per_token / experts.num_routed
            reached = min(1.0, picked)
            rows = max(picked, reached * expert_rows)
            at_once = rows if block is None else block / part[0]
        num_bytes = size * jnp.dtype(param.dtype).itemsize
        weight_bytes += num_bytes
        expert_bytes += num_bytes if param.decl.num_experts is not None else 0
        quantized_bytes += num_bytes if param.path[-1] in ("codes", "scales", "zeros") else 0
        reached_bytes += uses * int(size * reached) * jnp.dtype(param.dtype).itemsize
        scales = param.path[-1] in ("scales", "zeros")
        if len(part) > 1 + (param.decl.num_experts is not None) and not scales:  # a matrix, no biases
            codes = 2 if param.dtype == jnp.uint8 else 1  # of four bits in a byte
            flops += uses * codes * int(2 * size * rows)
            wide = part[-1] * (_num_matrices(param.decl) // mesh.num_shards(param.decl.axes[0]) or 1)
            row_bytes += uses * int(math.prod(part[:-2]) * at_once * (part[-2] + wide)) * itemsize
    of_adapters = _adapter_work(model, bucket, itemsize)
    weight_bytes, reached_bytes = weight_bytes + of_adapters[0], reached_bytes + of_adapters[1]
    flops, row_bytes = flops + of_adapters[2], row_bytes + of_adapters[3]
    if block is not None:
        # The tokens of all replicas and their sums, and a block's results and their sums, in float32.
        gathered = bucket.num_tokens * mesh.ranks_sharing("experts")
        sparse = sum(layer not in config.experts.dense_layers for layer in model.stage.layers)
        row_bytes += sparse * config.hidden_size * (gathered * (itemsize + 4) + block * 8)
    for attention in (config.attention[layer] for layer in model.stage.layers):
        if kv is not None and may_expand(attention, kv, bucket.num_tokens):
            heads = attention.num_heads // mesh.num_shards("heads")
            row_bytes += num_expanded_elements(attention, heads, bucket.num_tokens) * itemsize
    kinds = (config.attention[layer].state for layer in model.stage.layers)
    state_bytes = sum(_state_bytes(state, bucket.num_seqs, dtype) for state in kinds if state) // mesh.model
    sums = weight_bytes, reached_bytes, expert_bytes, quantized_bytes, row_bytes, state_bytes
    return Products(flops, *sums, 0 if kv is None else _gathered_bytes(model, bucket, kv))


def _adapter_work(model: Any, bucket: Bucket, itemsize: int) -> tuple[int, int, int, int]:
    """Return what adapters need on one device: bytes of their pools, bytes that products read of them, operations, and
    bytes of the products' inputs and outputs. Every slot of a pool is read; a row uses one of them.

    model: abstract. itemsize: bytes of an element of the rows.
    """
    config, mesh = model.config, model.mesh
    held = reached = flops = row_bytes = 0
    for pool in declared_pools(model):
        part, item = mesh.part_of(pool.shape, pool.decl.axes), jnp.dtype(pool.dtype).itemsize
        held += math.prod(part) * item
        if pool.decl.num_experts is not None:  # a row is multiplied by one pair of matrices
            own, slots, *pair = part
            sharing = math.prod(mesh.ranks_sharing(axis) for axis in pool.decl.axes if axis is not None)
            rows = bucket.num_tokens * sharing * config.experts.num_per_token * own // config.experts.num_routed
            reached += math.prod(pair) * min(own * slots, rows) * item
        else:
            pair, rows = part, bucket.num_tokens * _num_runs(model, pool.decl.sources[0].name)
            reached += math.prod(part) * rows // bucket.num_tokens * item
        flops += 2 * math.prod(pair) * rows
        row_bytes += rows * sum(pair) * itemsize
    return held, reached, flops, row_bytes


def _num_uses(model: Any, name: str) -> int:
    """Return how many of the stage's layers multiply by the weights of the checkpoint module `name`: more than one for
    those of a block that layers share, and of a layer that runs several times.
    """
    blocks = model.config.shared_blocks
    if blocks is None:
        return _num_runs(model, name)
    return max(1, sum(layer in model.stage.layers for layer in blocks.having(name)))


def _num_runs(model: Any, name: str) -> int:
    """Return how many of the stage's layers are runs of the layer that has the checkpoint module `name`: 1 unless it
    runs several times.
    """
    found = _LAYER.match(name)
    if model.config.loops is None or found is None:
        return 1
    return sum(model.config.stored_layer(layer) == int(found[1]) for layer in model.stage.layers)


def _gathered_bytes(model: Any, bucket: Bucket, kv: KVPages) -> int:
    """Return the bytes of keys and values that the attention of the stage's layers copies from pages, on one device."""
    attending = [each for layer in model.stage.layers if (each := model.config.attention[layer]).attends]
    rows = kv.platform, bucket.num_seqs, kv.spec.page_size
    return sum(gathered_bytes(each, model.mesh, *rows) for each in attending)


def _num_matrices(decl: ParamDecl) -> int:
    """Return the number of matrices stacked in a weight with axes (heads, latent), such as one per head of MLA; 0 for
    other weights.

    Each is applied to its own group of rows. A projection from heads to a latent, such as Mamba's x_proj, has the same
    axes, but its sources are joined along the latent. decl: declaration of the weight.
    """
    if decl.axes != ("heads", "latent") or decl.joined_axis:
        return 0
    return sum(source.rows // source.group for source in decl.sources)


def _expert_rows(model: Any, bucket: Bucket, kv: KVPages | None) -> int | None:
    """Return how many of the rows gathered from all devices a device with whole experts multiplies at once; None if not
    in blocks.

    kv: abstract pool, which names the platform; None for a CPU. Blocks are a loop with a data-dependent trip count, of
    which one is counted.
    """
    experts, mesh = model.config.experts, model.mesh
    if experts is None or not mesh.expert_parallel or mesh.size == 1 or mesh.sends_rows:
        return None
    num_tokens, devices = bucket.num_tokens * mesh.ranks_sharing("experts"), mesh.num_shards("experts")
    k, own = experts.num_per_token, mesh.padded_experts(experts.num_experts) // devices
    return rows_at_once(num_tokens, k, own, -(-num_tokens * k // devices), "cpu" if kv is None else kv.platform)


def step_work(model: Any, bucket: Bucket, kv_dtype: str, dtype: str, context: int) -> Work:
    """Return a device's share of the work of a forward pass of an abstract model, in which every replica has the same
    bucket.

    kv_dtype: dtype of the cache. dtype: dtype of activations. context: keys per sequence of a decode.
    """
    config, mesh = model.config, model.mesh
    products = product_work(model, bucket, dtype)
    num_bytes = bucket.num_tokens * config.hidden_size * jnp.dtype(dtype).itemsize + products.reached_bytes
    flops = products.flops
    for attention in (config.attention[layer] for layer in model.stage.layers):
        if attention.state is not None:
            kept = state_work(attention.state, bucket, dtype)
            num_bytes, flops = num_bytes + kept.num_bytes // mesh.model, flops + kept.flops // mesh.model
        if not attention.attends:
            continue
        attended = attention_work(attention, bucket, kv_dtype, dtype, context)
        num_bytes += attended.num_bytes // mesh.model
        if attention.has_pages:
            num_bytes += update_work(attention, bucket, kv_dtype, dtype).num_bytes // mesh.model
        flops += attended.flops // mesh.model
    return Work(num_bytes, flops)
