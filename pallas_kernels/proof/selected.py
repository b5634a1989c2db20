"""Cases of sparse attention: selections by an indexer, and attention to keys and blocks that are drawn."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxengine.pallas_kernels.attention.ragged_batch import AttentionSpec, RaggedBatch
from jaxengine.pallas_kernels.kv.pages import KVPages, bits, from_storage
from jaxengine.pallas_kernels.proof.attention import pages_to_read, random_pool
from jaxengine.pallas_kernels.proof.calls import Call
from jaxengine.pallas_kernels.proof.case import Case
from jaxengine.pallas_kernels.proof.ragged import MIXES, MOST_KEYS, Batch, Sizes, ragged_batch
from jaxengine.pallas_kernels.proof.random_arrays import normal
from jaxengine.pallas_kernels.registry import kernel
from jaxengine.pallas_kernels.tuning import tuning_of

_NAMES = {
    "select_keys": ("q", "weights", "kv", "batch", "schedule"),
    "select_blocks": ("q", "kv", "batch", "schedule"),
    "selected_attention": ("q", "q_rest", "kv", "batch", "positions"),
    "block_attention": ("q", "kv", "batch", "blocks"),
}


def selection_case(call: Call) -> Case:
    """Return the case of a call of `select_keys` or `select_blocks`: it builds the schedule and selects, on random
    ragged batches of the call's shapes, one for each of MIXES.

    Queries, weights and keys are small whole numbers: their scores are exact in any order of the sums, so that the
    selections of all implementations are equal.
    """
    given = dict(zip(_NAMES[call.op], call.arguments, strict=True))
    options = {name: value for name, value in call.options.items() if name != "pooling"}

    def run(queries: tuple[Any, ...], kv: KVPages, batch: RaggedBatch, rest: dict[str, Any]) -> Any:
        shape = {"num_tokens": queries[0].shape[0], "page_size": kv.page_size, "tuning": tuning_of(call.platform)}
        schedule = kernel("selection_schedule", call.platform)(batch, **shape)
        return kernel(call.op, call.platform)(*queries, kv, batch, schedule, **options, **rest)

    def inputs(mix: str, rng: np.random.Generator) -> tuple[Any, ...]:
        made, kv = _batch_and_pool(given, mix, rng)
        queries = tuple(jnp.round(normal(rng, given[n].shape, given[n].dtype)) for n in ("q", "weights") if n in given)
        rest = {}
        if "pooling" in call.options:
            pooling = call.options["pooling"]
            rest["pooling"] = None if pooling is None else jnp.zeros(pooling.shape, pooling.dtype)
        whole = jnp.round(jnp.clip(from_storage(kv.data, kv.spec), -3, 3)).astype(kv.dtype)
        return queries, replace(kv, data=bits(whole, kv.data.dtype)), _ragged(made), rest

    return Case(run, inputs, MIXES)


def selected_case(call: Call) -> Case:
    """Return the case of a call of `selected_attention` or `block_attention`: attention to keys or blocks that are
    drawn for each token, on random ragged batches of the call's shapes, one for each of MIXES. Pool slots that no token
    sees are NaN.
    """
    given = dict(zip(_NAMES[call.op], call.arguments, strict=True))
    options = {name: value for name, value in call.options.items() if name not in ("sinks", "tuning")}

    def run(queries: tuple[Any, ...], kv: KVPages, batch: RaggedBatch, chosen: Any, rest: dict[str, Any]) -> Any:
        tuning = tuning_of(call.platform)
        return kernel(call.op, call.platform)(*queries, kv, batch, chosen, tuning=tuning, **options, **rest)

    def inputs(mix: str, rng: np.random.Generator) -> tuple[Any, ...]:
        made, kv = _batch_and_pool(given, mix, rng)
        queries = tuple(normal(rng, given[n].shape, given[n].dtype) for n in ("q", "q_rest") if n in given)
        chosen = _chosen(
            given["positions" if "positions" in given else "blocks"], made, call.options.get("size", 1), rng
        )
        rest = {}
        if "sinks" in call.options:
            sinks = call.options["sinks"]
            rest["sinks"] = None if sinks is None else normal(rng, sinks.shape, sinks.dtype)
        return queries, kv, _ragged(made), jax.device_put(chosen), rest

    return Case(run, inputs, MIXES)


def _batch_and_pool(given: dict[str, Any], mix: str, rng: np.random.Generator) -> tuple[Batch, KVPages]:
    """Return a random batch of this mix and a random pool for a call's arguments by name. Slots that no token sees are
    NaN.
    """
    q, kv = given["q"], given["kv"]
    num_seqs, num_columns = given["batch"].page_table.shape
    sizes = Sizes(q.shape[0], num_seqs, num_columns, kv.page_size, pages_to_read(kv, num_seqs))
    heads = kv.spec.num_kv_heads
    spec = AttentionSpec(heads, heads, 1, 1, 1.0)
    made = ragged_batch(mix, sizes, spec, rng)
    return made, random_pool(kv, sizes.num_pages, spec, made.unseen, rng)


def _ragged(made: Batch) -> RaggedBatch:
    """Return `made` as a RaggedBatch on the device."""
    return RaggedBatch(**{name: jax.device_put(getattr(made, name)) for name in RaggedBatch._fields})


def _chosen(shape: jax.ShapeDtypeStruct, made: Batch, size: int, rng: np.random.Generator) -> np.ndarray:
    """Return distinct positions i32 [T, k], or numbers of blocks of `size` tokens i32 [T, K, k], of which each token
    sees a key, in any order, and -1 after the last. shape: of the result. Tokens of no sequence have -1 alone.
    """
    chosen = np.full(shape.shape, -1, np.int32)
    order = rng.permutation(-(-MOST_KEYS // size))
    for seq, length in enumerate(made.kv_lens[: int(made.num_seqs)]):
        first, end = made.cu_q_lens[seq : seq + 2]
        for token in range(first, end):
            most = -(-(int(length) - int(end - 1 - token)) // size)
            for own in chosen[token].reshape(-1, shape.shape[-1]):
                seen = np.roll(order, rng.integers(len(order)))
                seen = seen[seen < most][: len(own)]
                own[: len(seen)] = seen
    return chosen
