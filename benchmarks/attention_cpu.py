"""Milliseconds per layer of paged attention (write + attend) on the CPU, against dense attention on contiguous keys.

    python -m benchmarks.attention_cpu [--dtype float32] [--only decode] [--layers 8] [--repeats 20]

Each scenario runs a jitted chain of layers over one flat pool, as a model step does, so that no layer finds its keys
in the cache. The dense side is the plain jnp formulation over contiguous, already gathered [S, max kv_len] keys: no
pages, no write, lengths padded to the longest. `compile` is trace + lower + compile of the chain.
"""

from __future__ import annotations

import argparse
import os
import time
from typing import NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.attention.op import AttentionSpec, RaggedBatch, attention_schedule, ragged_paged_attention
from pallas_kernels.kv.pages import KVSpec, alloc
from pallas_kernels.kv.update import kv_cache_update

PAGE_SIZE = 16
SPEC = AttentionSpec(num_q_heads=9, num_kv_heads=3, head_dim=64, v_head_dim=64, sm_scale=0.125)


class Scenario(NamedTuple):
    num_tokens: int  # T of the bucket
    num_seqs: int  # S of the bucket
    max_pages: int  # W of the bucket
    q_lens: list[int]
    kv_lens: list[int]


def scenarios() -> dict[str, Scenario]:
    spread = np.linspace(300, 600, 32).astype(int).tolist()
    return {
        "decode S=1 kv=200": Scenario(1, 1, 512, [1], [200]),
        "decode S=1 kv=2000": Scenario(1, 1, 512, [1], [2000]),
        "decode S=16 kv=1050": Scenario(16, 16, 512, [1] * 16, [1050] * 16),
        "decode S=32 kv=300..600": Scenario(32, 32, 512, [1] * 32, spread),
        "decode S=32 kv=600, W=64": Scenario(32, 32, 64, [1] * 32, [600] * 32),
        "decode 4 of S=32 kv=400": Scenario(32, 32, 512, [1] * 4, [400] * 4),
        "prefill 64": Scenario(64, 1, 512, [64], [64]),
        "prefill 512": Scenario(512, 1, 512, [512], [512]),
        "prefill 512 S=32": Scenario(512, 32, 512, [512], [512]),
        "prefill 16 x 32": Scenario(512, 32, 512, [32] * 16, [32] * 16),
        "chunk 512 at 1024": Scenario(512, 32, 512, [512], [1536]),
        "mixed 16 decodes + 400": Scenario(512, 32, 512, [1] * 16 + [400], [450] * 16 + [400]),
        "verify S=16 q=4 kv=500": Scenario(64, 16, 512, [4] * 16, [500] * 16),
    }


def ragged_batch(case: Scenario, num_pages: int, rng: np.random.Generator) -> RaggedBatch:
    cu_q_lens = np.zeros(case.num_seqs + 1, np.int32)
    kv_lens = np.zeros(case.num_seqs, np.int32)
    page_table = np.zeros((case.num_seqs, case.max_pages), np.int32)
    slots = np.full(case.num_tokens, -1, np.int32)
    pages = iter(rng.permutation(num_pages))
    for seq, (q_len, kv_len) in enumerate(zip(case.q_lens, case.kv_lens, strict=True)):
        kv_lens[seq] = kv_len
        used = -(-kv_len // PAGE_SIZE)
        page_table[seq, :used] = [next(pages) for _ in range(used)]
        positions = np.arange(kv_len - q_len, kv_len)
        first = cu_q_lens[seq]
        slots[first : first + q_len] = page_table[seq, positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE
        cu_q_lens[seq + 1] = first + q_len
    cu_q_lens[len(case.q_lens) :] = cu_q_lens[len(case.q_lens)]
    num_decode = next((i for i, q_len in enumerate(case.q_lens) if q_len != 1), len(case.q_lens))
    arrays = (cu_q_lens, kv_lens, page_table, slots, np.int32(len(case.q_lens)), np.int32(num_decode))
    return RaggedBatch(*map(jnp.asarray, arrays))


def paged_chain(num_layers: int, pages_per_layer: int):
    """A step of `num_layers` attentions, each writing its own part of the pool; the layer is traced once."""

    @jax.jit
    def layer(q, k, v, kv, batch, schedule, first_page):
        local = batch._replace(
            page_table=batch.page_table + first_page,
            slot_mapping=jnp.where(batch.slot_mapping < 0, -1, batch.slot_mapping + first_page * PAGE_SIZE),
        )
        # As in a model, the keys follow from the previous layer's output: a write that did not would force XLA to copy
        # the pool, because nothing orders it behind the previous layer's reads.
        k, v = k + q[:, : SPEC.num_kv_heads], v + q[:, : SPEC.num_kv_heads]
        kv = kv_cache_update(kv, k, v, local.slot_mapping)
        return ragged_paged_attention(q, kv, local, spec=SPEC, schedule=schedule), kv

    def step(q, k, v, kv, batch):
        schedule = attention_schedule(batch, SPEC, num_tokens=q.shape[0], page_size=PAGE_SIZE)
        for index in range(num_layers):
            q, kv = layer(q, k, v, kv, batch, schedule, jnp.int32(index * pages_per_layer))
        return q, kv

    return jax.jit(step, donate_argnums=3)


def dense_chain(num_layers: int, q_len: int):
    """Grouped-query attention of the last q_len positions over padded contiguous keys [L, S, M, K, H]."""

    @jax.jit
    def layer(q, keys, values, kv_lens):
        grouped = q.reshape(*q.shape[:2], SPEC.num_kv_heads, SPEC.group_size, SPEC.head_dim)
        logits = jnp.einsum("sqkgh,smkh->skgqm", grouped, keys, preferred_element_type=jnp.float32) * SPEC.sm_scale
        position = kv_lens[:, None] - q_len + jnp.arange(q_len)
        visible = jnp.arange(keys.shape[1]) <= position[..., None]
        weights = jax.nn.softmax(jnp.where(visible[:, None, None], logits, -jnp.inf), axis=-1)
        return jnp.einsum("skgqm,smkh->sqkgh", weights, values, preferred_element_type=jnp.float32).reshape(q.shape)

    def step(q, keys, values, kv_lens):
        for index in range(num_layers):
            q = layer(q, keys[index], values[index], kv_lens)
        return q

    return jax.jit(step)


def best_ms(run, repeats: int) -> float:
    run()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(run())
        times.append(time.perf_counter() - start)
    return min(times) * 1e3


def measure_paged(case: Scenario, dtype: str, num_layers: int, repeats: int) -> tuple[float, float]:
    rng = np.random.default_rng(0)
    pages_per_layer = sum(-(-n // PAGE_SIZE) for n in case.kv_lens) + 8
    spec = KVSpec(num_layers * pages_per_layer, PAGE_SIZE, SPEC.num_kv_heads, SPEC.head_dim, SPEC.v_head_dim, dtype)
    kv, batch = alloc(spec), ragged_batch(case, pages_per_layer, rng)
    q, k, v = (
        jnp.asarray(rng.standard_normal((case.num_tokens, heads, SPEC.head_dim)), jnp.float32)
        for heads in (SPEC.num_q_heads, SPEC.num_kv_heads, SPEC.num_kv_heads)
    )
    start = time.perf_counter()
    step = paged_chain(num_layers, pages_per_layer).lower(q, k, v, kv, batch).compile()
    compile_s = time.perf_counter() - start

    def run():
        nonlocal kv
        out, kv = step(q, k, v, kv, batch)
        return out

    return best_ms(run, repeats) / num_layers, compile_s


def measure_dense(case: Scenario, num_layers: int, repeats: int) -> float | None:
    """None for a batch of unequal q_lens, which has no dense form."""
    q_len = case.q_lens[0]
    if any(n != q_len for n in case.q_lens):
        return None
    rng = np.random.default_rng(0)
    shape = (num_layers, len(case.q_lens), max(case.kv_lens), SPEC.num_kv_heads, SPEC.head_dim)
    keys, values = (jnp.asarray(rng.standard_normal(shape, np.float32)) for _ in range(2))
    keys, values = list(keys), list(values)  # one array per layer: a slice of a stacked one would be copied
    q = jnp.asarray(rng.standard_normal((len(case.q_lens), q_len, SPEC.num_q_heads, SPEC.head_dim)), jnp.float32)
    kv_lens = jnp.asarray(case.kv_lens, jnp.int32)
    step = dense_chain(num_layers, q_len).lower(q, keys, values, kv_lens).compile()
    return best_ms(lambda: step(q, keys, values, kv_lens), repeats) / num_layers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="float32", help="dtype of the pool")
    parser.add_argument("--only", default="", help="run scenarios whose name contains this")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=20)
    args = parser.parse_args()
    print(f"{'ms per layer':26s} {'paged':>8s} {'dense':>8s} {'ratio':>6s} {'compile':>8s}")
    for name, case in scenarios().items():
        if args.only not in name:
            continue
        paged, compile_s = measure_paged(case, args.dtype, args.layers, args.repeats)
        dense = measure_dense(case, args.layers, args.repeats)
        against = f"{dense:8.3f} {paged / dense:6.2f}" if dense is not None else f"{'-':>8s} {'-':>6s}"
        print(f"{name:26s} {paged:8.3f} {against} {compile_s:7.2f}s", flush=True)


if __name__ == "__main__":
    main()
