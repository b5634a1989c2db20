"""Cases of attention and of the write of keys and values, with pools in which slots that may not be read are NaN."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxengine.pallas_kernels.attention.ragged_batch import AttentionSpec, RaggedBatch
from jaxengine.pallas_kernels.kv.pages import KVPages, bits
from jaxengine.pallas_kernels.proof.calls import Call
from jaxengine.pallas_kernels.proof.case import Case
from jaxengine.pallas_kernels.proof.ragged import MIXES, Sizes, least_pages, ragged_batch, written_slots
from jaxengine.pallas_kernels.proof.random_arrays import normal, typical, uniform
from jaxengine.pallas_kernels.registry import TOKEN_ROWS, kernel
from jaxengine.pallas_kernels.tuning import tuning_of

# Bytes of a pool that is read, and of one that is written, unless the sequences need more.
_POOL_BYTES, _WRITTEN_BYTES = 256 << 20, 32 << 20


def attention_case(call: Call) -> Case:
    """Return the case of a call of `ragged_paged_attention`: it builds the schedule and runs the attention on random
    ragged batches of the call's shapes, one for each of MIXES. Pool slots that no token sees are NaN.
    """
    names = "q", "kv", "batch", "schedule"
    given = dict(zip(names, call.arguments, strict=True)) | call.options
    spec, q, kv = given["spec"], given["q"], given["kv"]
    num_seqs, num_columns = given["batch"].page_table.shape
    sizes = Sizes(q.shape[0], num_seqs, num_columns, kv.page_size, pages_to_read(kv, num_seqs))

    def run(q: Any, kv: KVPages, batch: RaggedBatch, rest: dict[str, Any]) -> Any:
        shape = {"num_tokens": q.shape[0], "page_size": kv.page_size, "tuning": tuning_of(call.platform)}
        schedule = kernel("attention_schedule", call.platform)(batch, spec, **shape)
        return kernel(call.op, call.platform)(q, kv, batch, schedule, spec=spec, **rest)

    def inputs(mix: str, rng: np.random.Generator) -> tuple[Any, ...]:
        tree = given["tree_mask"]
        most = None if tree is None else max(min(32 * tree.shape[1], sizes.num_tokens // num_seqs), 1)
        made = ragged_batch(mix, sizes, spec, rng, most_new=most)
        fields: dict[str, Any] = {name: jax.device_put(getattr(made, name)) for name in RaggedBatch._fields}
        if given["batch"].num_decode is None:
            fields["num_decode"] = None
        names = [name for name in ("q_rest", "sinks", "slopes", "biases", "tree_mask") if name in given]
        rest = {name: _further(name, given[name], made, rng) for name in names}
        query = normal(rng, q.shape, q.dtype)
        return query, random_pool(kv, sizes.num_pages, spec, made.unseen, rng), RaggedBatch(**fields), rest

    return Case(run, inputs, MIXES)


def update_case(call: Call) -> Case:
    """Return the case of a call of `kv_cache_update`: it builds the schedule and writes random keys and values to
    random slots of a random pool, whose data is the result. It has one mix, "ragged".
    """
    kv, k, v, slot_mapping = call.arguments
    num_tokens, page_size = slot_mapping.shape[0], kv.page_size
    num_pages = max(2 * (num_tokens // page_size + 1) + num_tokens, 4)
    num_pages = min(num_pages, max(_WRITTEN_BYTES // _page_bytes(kv), num_tokens // page_size + 3))

    def run(kv: KVPages, k: Any, v: Any, slot_mapping: Any) -> Any:
        build = kernel("kv_update_schedule", call.platform)
        schedule = build(slot_mapping, page_size=page_size, tuning=tuning_of(call.platform))
        return kernel(call.op, call.platform)(kv, k, v, slot_mapping, schedule=schedule).data

    def inputs(mix: str, rng: np.random.Generator) -> tuple[Any, ...]:
        new = [None if x is None else normal(rng, x.shape, x.dtype) for x in (k, v)]
        slots = written_slots(num_tokens, page_size, num_pages, rng)
        return random_pool(kv, num_pages, None, None, rng), *new, jax.device_put(slots)

    return Case(run, inputs, ("ragged",))


def _page_bytes(kv: KVPages) -> int:
    """Return the bytes of a page of a pool `kv`, whose data may be a ShapeDtypeStruct."""
    return int(np.prod(kv.data.shape[1:])) * kv.data.dtype.itemsize


def pages_to_read(kv: KVPages, num_seqs: int) -> int:
    """Return the number of pages of a pool to read: 2 * num_seqs + 64, or fewer if these exceed _POOL_BYTES, but
    never fewer than `num_seqs` sequences need.
    """
    return max(least_pages(num_seqs), min(2 * num_seqs + 64, _POOL_BYTES // _page_bytes(kv)))


def _further(name: str, shape: Any, made: Any, rng: np.random.Generator) -> Any:
    """Return a random operand of attention by its name, q_rest, sinks, slopes, biases or tree_mask, of this shape and
    dtype for the batch `made`; None if `shape` is.

    In a tree_mask a token sees itself, and each of its sequence's earlier new tokens with probability 1/2. The other
    operands are normally distributed.
    """
    if shape is None:
        return None
    if name != "tree_mask":
        return normal(rng, shape.shape, shape.dtype)
    mask = np.zeros(shape.shape, np.uint32)  # a token sees itself and some of those before it
    for first, end in zip(made.cu_q_lens, made.cu_q_lens[1 : int(made.num_seqs) + 1], strict=False):
        for column, token in enumerate(range(first, end)):
            for seen in range(column + 1):
                if seen == column or rng.random() < 0.5:
                    mask[token, seen // 32] |= np.uint32(1 << seen % 32)
    return jax.device_put(mask)


def random_pool(
    kv: KVPages, num_pages: int, spec: AttentionSpec | None, unseen: np.ndarray | None, rng: np.random.Generator
) -> KVPages:
    """Return a pool like `kv`, which may hold shapes instead of arrays, with `num_pages` random pages.

    unseen: bool [pages, page_size], slots that become NaN if the dtype has NaN, or None. spec: AttentionSpec that
    counts the heads; may be None if `unseen` is.
    """
    shape, dtype = (num_pages, *kv.data.shape[1:]), kv.dtype
    values = normal(rng, shape, dtype)
    if unseen is not None and spec is not None and jnp.issubdtype(dtype, jnp.floating):
        values = jnp.where(_slots_of(kv, spec, unseen), jnp.asarray(jnp.nan, dtype), values)
    data, own = bits(values, kv.data.dtype), replace(kv.spec, num_pages=num_pages)
    return KVPages(data, _scale(kv.k_scale, dtype, rng), _scale(kv.v_scale, dtype, rng), own, kv.platform, kv.lanes)


def _scale(shape: Any, dtype: Any, rng: np.random.Generator) -> jax.Array | None:
    """Return random scales with which codes of `dtype` represent values of about 1; None if `shape` is.

    shape: an array or ShapeDtypeStruct of the scales' shape and dtype.
    """
    return None if shape is None else uniform(rng, shape.shape, shape.dtype, 1 / typical(dtype))


def _slots_of(kv: KVPages, spec: AttentionSpec, slots: np.ndarray) -> jax.Array:
    """Return bool, in a shape that broadcasts to the data of a pool like `kv`, whether each element belongs to a slot
    that is True in `slots`, bool [pages, page_size]. spec: AttentionSpec that counts the heads.
    """
    if kv.layout == TOKEN_ROWS:
        first, _ = kv.lanes_of_page
        lane = np.arange(kv.data.shape[2])
        own = (lane >= first) & (lane < first + spec.num_kv_heads * kv.spec.row_width)
        return jax.device_put(slots[:, :, None] & own)
    widths = [kv.spec.key_width] if kv.spec.values_in_keys else [kv.spec.key_width, kv.spec.value_width]
    columns = np.concatenate([np.repeat(np.arange(kv.page_size), width) for width in widths])
    return jax.device_put(slots[:, None, columns])
