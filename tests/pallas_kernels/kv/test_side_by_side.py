"""Layers side by side in the rows of a TPU's pool: each reads and writes its own lanes."""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import tpu as pltpu

from jaxengine.pallas_kernels.attention.op import AttentionSpec, RaggedBatch, ragged_paged_attention
from jaxengine.pallas_kernels.attention.tpu.attend import attention_schedule
from jaxengine.pallas_kernels.attention.tpu.attend import ragged_paged_attention as attend_on_tpu
from jaxengine.pallas_kernels.kv import update_tpu
from jaxengine.pallas_kernels.kv.pages import KVPages, KVSpec, alloc
from jaxengine.pallas_kernels.kv.update import kv_cache_update
from jaxengine.pallas_kernels.registry import without_rows
from jaxengine.pallas_kernels.tuning import TpuAttention, TpuUpdate, Tuning

PAGE, PAGES, DIM = 16, 4, 64
KERNELS = ("ragged_paged_attention", "tpu"), ("kv_cache_update", "tpu")
TUNING = Tuning(
    tpu_attention=TpuAttention(single_keys=32, run_keys=32, single_tiles=1, max_heads=1, max_buffers=2),
    tpu_update=TpuUpdate(groups_in_flight=4, reads_ahead=2, window_bytes=1),
)
SPEC = AttentionSpec(num_q_heads=2, num_kv_heads=1, head_dim=DIM, v_head_dim=DIM, sm_scale=1.0)


def test_each_layer_reads_and_writes_its_own_lanes(thorough):
    rng, interpret = np.random.default_rng(0), pltpu.InterpretParams()
    own = KVSpec(PAGES, PAGE, 1, DIM, DIM, "float32")
    # Two sequences: one new token after 18 that are in pages 2 and 0, and three that begin page 3.
    slots = jnp.asarray([2, 48, 49, 50, -1, -1, -1, -1], jnp.int32)
    table = jnp.asarray([[2, 0], [3, 0]], jnp.int32)
    lengths = jnp.asarray([0, 1, 4], jnp.int32), jnp.asarray([19, 3], jnp.int32)
    batch = RaggedBatch(*lengths, table, slots, jnp.int32(2), jnp.int32(1))
    data = jnp.asarray(rng.standard_normal((PAGES, PAGE, 2 * 2 * DIM)), jnp.float32)
    pool, written = KVPages(data, None, None, own, "tpu"), data
    sizes = {"num_tokens": 8, "page_size": PAGE, "tuning": TUNING}
    schedule = attention_schedule(batch, SPEC, **sizes)
    runs = update_tpu.kv_update_schedule(slots, page_size=PAGE, tuning=TUNING)
    for lanes in ((0, 128), (128, 256)) if thorough else ((128, 256),):
        q, k, v = (
            jnp.asarray(rng.standard_normal((8, heads, DIM)) / 4, jnp.float32) for heads in (SPEC.num_q_heads, 1, 1)
        )
        layer = replace(pool, data=written, lanes=lanes)
        layer = update_tpu.kv_cache_update(layer, k, v, slots, schedule=runs, interpret=interpret)
        before, written = written, layer.data
        alone = _on_cpu(before[..., slice(*lanes)], own)
        alone = kv_cache_update(alone, k, v, slots)
        tokens = np.asarray(alone.data).reshape(PAGES, 2, PAGE, DIM).transpose(0, 2, 1, 3).reshape(PAGES, PAGE, -1)
        expected = np.array(before)
        expected[..., slice(*lanes)] = tokens
        np.testing.assert_array_equal(written, expected)
        wanted = ragged_paged_attention(q, alone, batch, spec=SPEC)
        with without_rows(KERNELS):  # plain XLA, where a device's kernels fail their proof
            plain = kv_cache_update(replace(pool, data=before, lanes=lanes), k, v, slots)
            np.testing.assert_array_equal(plain.data, expected)
            found = ragged_paged_attention(q, plain, batch, spec=SPEC)
        np.testing.assert_allclose(found[:4], wanted[:4], atol=1e-5)
        if lanes[0] == 0:
            continue  # what begins a row is read as a row of one layer is
        found, _ = attend_on_tpu(q, layer, batch, schedule, spec=SPEC, sinks=None, tree_mask=None, interpret=interpret)
        np.testing.assert_allclose(found[:4], wanted[:4], atol=1e-5)


def _on_cpu(rows: jnp.ndarray, spec: KVSpec) -> KVPages:
    """The pool of one layer, as CPUs have it, of pages [P, page_size, keys and values]."""
    data = rows.reshape(PAGES, PAGE, 2, DIM).transpose(0, 2, 1, 3).reshape(PAGES, 1, -1)
    kv = alloc(spec)
    return replace(kv, data=data.view(kv.data.dtype))
