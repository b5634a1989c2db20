"""Paged attention on the default device against what the device can do, and against the other attentions jax has.

    python -m benchmarks.attention [--only decode] [--budget-s 540] [--out FILE] [--platform cpu --tiny]

Bytes are compared with a measured copy and products with a measured matmul, in this process. A row is the median of
several timings of one jitted chain of layers; nothing is subtracted, so a chain's schedule and dispatch are in it. The
layers of a chain read different parts of the pool, so that no cache holds a small one.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.attention_cases import AttentionCase, all_cases
from benchmarks.recorder import Recorder

# A chain reads at least this much, more than any cache holds, over at most MAX_LAYERS layers.
CHAIN_BYTES = 1 << 30
MAX_LAYERS = 32
POOL_LIMIT = 48 << 30
ROUNDS = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="rows whose name contains this")
    parser.add_argument("--budget-s", type=float, default=1e9, help="begin no row after this many seconds")
    parser.add_argument("--out", default="benchmarks/results/attention.json")
    parser.add_argument("--platform", help="a jax platform, such as cpu")
    parser.add_argument("--tiny", action="store_true", help="sizes for a test of this program")
    args = parser.parse_args()
    # Torch, in the next process, gets what is left.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if args.platform:
        os.environ["JAX_PLATFORMS"] = args.platform
    recorder = Recorder(args.out, machine(), args.budget_s)
    probe_bytes, probe_width = (1 << 20, 64) if args.tiny else (4 << 30, 8192)
    copy = recorder.measure("copy bandwidth", lambda: copy_bandwidth(probe_bytes)) or {}
    matmul = recorder.measure("matmul rate", lambda: matmul_rate(probe_width)) or {}
    limits = {"bytes_per_s": copy.get("bytes_per_s"), "flops_per_s": matmul.get("flops_per_s")}
    least = 0 if args.tiny else CHAIN_BYTES
    for case in all_cases(args.tiny):
        if args.only in case.name:
            for label, measure in (("ours", paged), ("jax", contiguous)):
                recorder.measure(f"{case.name}, {label}", lambda m=measure, c=case: shares(c, m(c, least), limits))
    for num_tokens in (4,) if args.tiny else (256, 2048):
        if args.only in (name := f"kv write {num_tokens} tokens"):
            recorder.measure(name, lambda n=num_tokens: kv_write(n, least, limits["bytes_per_s"]))


def machine() -> dict[str, Any]:
    """Host, device and versions."""
    import jax

    from jaxengine.bench.report import machine as host

    device = jax.devices()[0]
    return {**host(), "device": device.device_kind, "platform": str(device.client.platform_version).splitlines()[0]}


def shares(case: AttentionCase, seconds: float, limits: dict[str, float | None]) -> dict[str, Any]:
    """Time of one layer and what part of the measured limits it reaches."""
    row: dict[str, Any] = {"us": round(seconds * 1e6, 1), "GB_per_s": round(case.bytes / seconds / 1e9, 1)}
    row["TFLOP_per_s"] = round(case.flops / seconds / 1e12, 3)
    for name, rate in (("bytes_per_s", case.bytes / seconds), ("flops_per_s", case.flops / seconds)):
        if limits[name]:
            row[f"percent_of_{'copy' if name == 'bytes_per_s' else 'matmul'}"] = round(100 * rate / limits[name], 1)
    return row


def median_seconds(run: Callable[[], Any], least: float = 0.02) -> float:
    """Median over ROUNDS of the seconds a call takes, as many calls in flight as make up `least` seconds."""
    import jax

    jax.block_until_ready(run())
    start = time.perf_counter()
    jax.block_until_ready(run())
    count = max(1, int(least / (time.perf_counter() - start + 1e-9)))
    times = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        for _ in range(count):
            out = run()
        jax.block_until_ready(out)
        times.append((time.perf_counter() - start) / count)
    return statistics.median(times)


def copy_bandwidth(num_bytes: int) -> dict[str, float]:
    """Bytes a second read and written by an elementwise pass, half of `num_bytes` each."""
    import jax
    import jax.numpy as jnp

    step = jax.jit(lambda x: x + 1, donate_argnums=0)
    x = jnp.zeros(num_bytes // 8, jnp.float32)

    def run():
        nonlocal x
        x = step(x)
        return x

    seconds = median_seconds(run)
    return {"bytes_per_s": num_bytes / seconds, "GB_per_s": round(num_bytes / seconds / 1e9, 1)}


def matmul_rate(width: int) -> dict[str, float]:
    """Operations a second of a bfloat16 product of two [width, width] matrices, float32 inside."""
    import jax
    import jax.numpy as jnp

    keys = jax.random.split(jax.random.key(0))
    x, y = (jax.random.normal(key, (width, width), jnp.bfloat16) for key in keys)
    step = jax.jit(lambda x, y: jnp.dot(x, y, preferred_element_type=jnp.float32).astype(jnp.bfloat16))
    seconds = median_seconds(lambda: step(x, y))
    return {"flops_per_s": 2 * width**3 / seconds, "TFLOP_per_s": round(2 * width**3 / seconds / 1e12, 1)}


def paged(case: AttentionCase, least: int) -> float:
    """Seconds a layer of our ragged paged attention, in a chain with one schedule, as a model step has it."""
    import jax
    import jax.numpy as jnp

    from pallas_kernels.attention.op import AttentionSpec, attention_schedule, ragged_paged_attention

    num_layers, num_pools = _chain(case, least)
    kv, batch = _random_pool(case, num_pools), _batch(case)
    heads, head_dim = case.num_q_heads, case.head_dim
    spec = AttentionSpec(heads, case.num_kv_heads, head_dim, head_dim, head_dim**-0.5)
    pages_per_layer = kv.num_pages // num_pools
    num_tokens = case.num_seqs * case.q_len
    q = jax.random.normal(jax.random.key(1), (num_tokens, heads, head_dim), jnp.bfloat16)

    @jax.jit
    def chain(q, kv, batch):
        schedule = attention_schedule(batch, spec, num_tokens=num_tokens, page_size=case.page_size, platform=kv.layout)
        for layer in range(num_layers):
            first = layer % num_pools * pages_per_layer
            local = batch._replace(page_table=batch.page_table + first)
            # Each layer waits for the one before, and its queries stay as large as the first ones.
            q = q + ragged_paged_attention(q, kv, local, spec=spec, schedule=schedule)
        return q

    return median_seconds(lambda: chain(q, kv, batch)) / num_layers


def contiguous(case: AttentionCase, least: int) -> float:
    """Seconds a layer of jax.nn.dot_product_attention over contiguous keys: cuDNN on a GPU, XLA elsewhere."""
    import jax
    import jax.numpy as jnp

    if case.kv_dtype != "bfloat16":
        raise ValueError(f"dot_product_attention has no keys of {case.kv_dtype}")
    implementation: Any = "cudnn" if jax.devices()[0].platform in ("gpu", "cuda") else "xla"
    num_layers, num_pools = _chain(case, least)
    keys = jax.random.split(jax.random.key(2), 3)
    shape = (num_pools, case.num_seqs, case.kv_len, case.num_kv_heads, case.head_dim)
    k, v = (list(jax.random.normal(key, shape, jnp.bfloat16)) for key in keys[:2])
    q = jax.random.normal(keys[2], (case.num_seqs, case.q_len, case.num_q_heads, case.head_dim), jnp.bfloat16)

    @jax.jit
    def chain(q, k, v):
        for layer in range(num_layers):
            at = layer % num_pools
            # A query of one token sees every key; longer ones start at the end of the keys only when they are whole.
            q = q + jax.nn.dot_product_attention(
                q, k[at], v[at], is_causal=case.q_len > 1, implementation=implementation
            )
        return q

    if 1 < case.q_len < case.kv_len:
        raise ValueError("dot_product_attention counts causal positions from the first key")
    return median_seconds(lambda: chain(q, k, v)) / num_layers


def kv_write(num_tokens: int, least: int, bytes_per_s: float | None) -> dict[str, Any]:
    """Time of writing a step's keys and values, 8 heads of 128 in bfloat16, into a donated pool."""
    import jax
    import jax.numpy as jnp

    from pallas_kernels.kv.update import kv_cache_update

    case = AttentionCase(1, 1, max(2 * num_tokens, least // 8192))
    kv = _random_pool(case, 1)
    slots = np.random.default_rng(0).permutation(case.kv_len)[:num_tokens].astype(np.int32)
    k, v = (jax.random.normal(jax.random.key(n), (num_tokens, 8, 128), jnp.bfloat16) for n in (3, 4))
    write = jax.jit(lambda kv, k, v, slots: kv_cache_update(kv, k, v, slots), donate_argnums=0)

    def run():
        nonlocal kv
        kv = write(kv, k, v, slots)
        return kv.data

    seconds, num_bytes = median_seconds(run), 2 * (k.nbytes + v.nbytes)
    row = {"us": round(seconds * 1e6, 1), "GB_per_s": round(num_bytes / seconds / 1e9, 1)}
    if bytes_per_s:
        row["percent_of_copy"] = round(100 * num_bytes / seconds / bytes_per_s, 1)
    return row


def _chain(case: AttentionCase, least: int) -> tuple[int, int]:
    """(layers, distinct parts of the pool) of a chain; raises ValueError for a case that is too large."""
    if case.kv_bytes > POOL_LIMIT:
        raise ValueError(f"keys and values take {case.kv_bytes >> 30} GiB, more than {POOL_LIMIT >> 30}")
    num_pools = min(MAX_LAYERS, max(1, -(-least // case.kv_bytes)))
    return max(num_pools, 4 if least else 2), num_pools


def _random_pool(case: AttentionCase, num_pools: int):
    """Normal keys and values in the layout of the default device."""
    import jax
    import jax.numpy as jnp

    from pallas_kernels.kv.pages import KVSpec, alloc, bits, storage_dtype
    from pallas_kernels.registry import platform_of

    num_pages = num_pools * case.num_seqs * -(-case.kv_len // case.page_size)
    spec = KVSpec(num_pages, case.page_size, case.num_kv_heads, case.head_dim, case.head_dim, case.kv_dtype)
    kv = jax.eval_shape(lambda: alloc(spec, layout=platform_of(jax.devices()[0])))  # no second pool beside the filled

    @jax.jit
    def fill(key):
        values = jax.random.normal(key, kv.data.shape, jnp.bfloat16).astype(spec.dtype)
        return bits(values, storage_dtype(spec, kv.layout))

    scale = None if kv.k_scale is None else jnp.ones(kv.k_scale.shape, jnp.float32)
    return dataclasses.replace(kv, data=fill(jax.random.key(0)), k_scale=scale, v_scale=scale)


def _batch(case: AttentionCase):
    import jax.numpy as jnp

    from pallas_kernels.attention.op import RaggedBatch

    pages_per_seq = -(-case.kv_len // case.page_size)
    # Pages of a sequence lie anywhere: the tables of a busy server.
    pages = np.random.default_rng(0).permutation(case.num_seqs * pages_per_seq).astype(np.int32)
    num_tokens, decode = case.num_seqs * case.q_len, case.q_len == 1
    return RaggedBatch(
        cu_q_lens=jnp.arange(case.num_seqs + 1, dtype=jnp.int32) * case.q_len,
        kv_lens=jnp.full(case.num_seqs, case.kv_len, jnp.int32),
        page_table=jnp.asarray(pages.reshape(case.num_seqs, pages_per_seq)),
        slot_mapping=jnp.full(num_tokens, -1, jnp.int32),
        num_seqs=jnp.int32(case.num_seqs),
        num_decode=jnp.int32(case.num_seqs if decode else 0),
    )


if __name__ == "__main__":
    main()
