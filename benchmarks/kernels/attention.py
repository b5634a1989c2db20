"""Paged attention on the default device, compared with the device's limits and with other implementations.

--cases device has the sizes that accelerators serve, --cases steps the layers of a small model's steps, which write
their keys first, for a CPU. --of jax is dot_product_attention over contiguous keys; FlashInfer, SDPA and flex are
torch's, and run in a process of their own, because torch and jax share one card's memory badly.

Bytes are compared with a measured copy and products with a measured matmul, in this process. A row is the median of
several timings of one jitted chain of layers; nothing is subtracted, so a chain's schedule and dispatch are in it. The
layers of a chain read different parts of the pool, so that no cache holds a small one.
"""

from __future__ import annotations

import dataclasses
import os
import statistics
import time
from argparse import Namespace
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.harness import Option, OptionError, shared
from benchmarks.kernels.attention_cases import (
    CHAIN_BYTES,
    MAX_LAYERS,
    POOL_LIMIT,
    AttentionCase,
    Timed,
    all_cases,
    shares,
    step_cases,
)
from benchmarks.recorder import Recorder
from jaxengine.pallas_kernels.attention.op import AttentionSpec, RaggedBatch, attention_schedule, ragged_paged_attention
from jaxengine.pallas_kernels.kv.pages import KVSpec, alloc, bits, storage_dtype
from jaxengine.pallas_kernels.kv.update import kv_cache_update
from jaxengine.pallas_kernels.registry import platform_of
from jaxengine.results import machine as host

ROUNDS = 5
JAX, TORCH = ("ours", "jax"), ("flashinfer", "sdpa", "flex")
OPTIONS = {
    "cases": Option("device", "which attentions", choices=("device", "steps")),
    "of": Option(JAX, "whose", choices=(*JAX, *TORCH)),
    "kv_dtype": Option("float32", "of the pool of --cases steps"),
    "layers": Option(MAX_LAYERS, "most layers of a chain"),
    **shared(only="", budget_s=1e9, tiny=False),
}


def run(args: Namespace, recorder: Recorder) -> None:
    """Measure the limits of the device, then each case with each implementation of `args.of`, and for args.cases
    "device" the KV write of some numbers of tokens; each result is a row.

    Raises OptionError if jax's and torch's implementations are requested together.
    """
    cases = all_cases(args.tiny) if args.cases == "device" else step_cases(args.kv_dtype)
    cases = [case for case in cases if args.only in case.name]
    if set(args.of) & set(TORCH):
        if set(args.of) & set(JAX):
            raise OptionError(f"--of is {' '.join(args.of)}: {', '.join(TORCH)} run in a process of their own")
        from benchmarks.kernels import attention_torch

        attention_torch.measure(recorder, cases, args.of)
        return
    # Leave memory for torch, which runs in the next process.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    recorder.describe = machine
    recorder.resume()
    probe_bytes, probe_width = (1 << 20, 64) if args.tiny else (4 << 30, 8192)
    if jax.devices()[0].platform == "cpu" and not args.tiny:
        probe_bytes, probe_width = 1 << 30, 2048
    copy = recorder.measure("copy bandwidth", lambda: copy_bandwidth(probe_bytes)) or {}
    matmul = recorder.measure("matmul rate", lambda: matmul_rate(probe_width)) or {}
    limits = {"bytes_per_s": copy.get("bytes_per_s"), "flops_per_s": matmul.get("flops_per_s")}
    least, implementations = 0 if args.tiny else CHAIN_BYTES, {"ours": paged, "jax": contiguous}
    for case in cases:
        chain = _chain_of(case, least, args.layers)
        for label in args.of:
            measure = implementations[label]
            recorder.measure(f"{case.name}, {label}", lambda m=measure, c=case, n=chain: shares(c, m(c, n), limits))
    if args.cases == "device":
        for num_tokens in (4,) if args.tiny else (256, 2048):
            if args.only in (name := f"kv write {num_tokens} tokens"):
                recorder.measure(name, lambda n=num_tokens: kv_write(n, least, limits["bytes_per_s"]))


def machine() -> dict[str, Any]:
    """Return a dict of the host, the default device, and versions."""
    device = jax.devices()[0]
    return {**host(), "device": device.device_kind, "platform": str(device.client.platform_version).splitlines()[0]}


def median_seconds(run: Callable[[], Any], least: float = 0.02) -> float:
    """Return the seconds of one call of `run`: the median of ROUNDS rounds of as many calls as fill `least` seconds.

    Calls `run` twice before, to warm up and to choose the number of calls.
    """
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
    """Measure an elementwise operation that reads and writes `num_bytes`, half each; return {"bytes_per_s",
    "GB_per_s"}. The latter is rounded.
    """
    step = jax.jit(lambda x: x + 1, donate_argnums=0)
    x = jnp.zeros(num_bytes // 8, jnp.float32)

    def run():
        nonlocal x
        x = step(x)
        return x

    seconds = median_seconds(run)
    return {"bytes_per_s": num_bytes / seconds, "GB_per_s": round(num_bytes / seconds / 1e9, 1)}


def matmul_rate(width: int) -> dict[str, float]:
    """Measure a bfloat16 product of two [width, width] matrices, summed in float32; return {"flops_per_s",
    "TFLOP_per_s"}. The latter is rounded.
    """
    keys = jax.random.split(jax.random.key(0))
    x, y = (jax.random.normal(key, (width, width), jnp.bfloat16) for key in keys)
    step = jax.jit(lambda x, y: jnp.dot(x, y, preferred_element_type=jnp.float32).astype(jnp.bfloat16))
    seconds = median_seconds(lambda: step(x, y))
    return {"flops_per_s": 2 * width**3 / seconds, "TFLOP_per_s": round(2 * width**3 / seconds / 1e12, 1)}


def paged(case: AttentionCase, chain: tuple[int, int]) -> Timed:
    """Time our ragged paged attention, in a chain of layers with one schedule, as in a model's step; return a Timed.

    chain: (number of layers, number of distinct parts of the pool). Raises ValueError for keys and values over
    POOL_LIMIT.
    """
    num_layers, num_pools = _limited(case, chain)
    kv, batch = _random_pool(case, num_pools), _batch(case)
    heads, kv_heads, head_dim = case.num_q_heads, case.num_kv_heads, case.head_dim
    spec = AttentionSpec(heads, kv_heads, head_dim, head_dim, head_dim**-0.5)
    pages_per_layer, (num_tokens, *_) = kv.num_pages // num_pools, case.room
    q = jax.random.normal(jax.random.key(1), (num_tokens, heads, head_dim), case.dtype)

    @jax.jit
    def layer(q, kv, batch, schedule, first):
        slots = batch.slot_mapping
        slots = jnp.where(slots < 0, -1, slots + first * case.page_size)
        local = batch._replace(page_table=batch.page_table + first, slot_mapping=slots)
        if case.writes:
            # As in a model, keys follow from the layer before: a write that did not would force XLA to copy the pool,
            # because nothing orders it after the reads of the layer before.
            kv = kv_cache_update(kv, q[:, :kv_heads], q[:, -kv_heads:], local.slot_mapping)
        # Each layer waits for the previous one, and its queries stay as large as the first ones.
        return q + ragged_paged_attention(q, kv, local, spec=spec, schedule=schedule), kv

    def step(q, kv, batch):
        schedule = attention_schedule(
            batch, spec, num_tokens=num_tokens, page_size=case.page_size, platform=kv.platform
        )
        for index in range(num_layers):
            q, kv = layer(q, kv, batch, schedule, jnp.int32(index % num_pools * pages_per_layer))
        return q, kv if case.writes else None

    compiled, compile_s = _compile(step, (q, kv, batch), donate=(1,) if case.writes else ())

    def run():
        nonlocal kv
        out, written = compiled(q, kv, batch)
        kv = kv if written is None else written
        return out

    return Timed(median_seconds(run) / num_layers, compile_s)


def contiguous(case: AttentionCase, chain: tuple[int, int]) -> Timed:
    """Time jax.nn.dot_product_attention over contiguous keys, padded to the longest; return a Timed.

    It uses cuDNN on a GPU and XLA elsewhere. chain: (number of layers, number of distinct arrays of keys). Raises
    ValueError for a case that it cannot compute.
    """
    implementation: Any = "cudnn" if jax.devices()[0].platform in ("gpu", "cuda") else "xla"
    if case.kv_dtype not in ("bfloat16", "float32"):
        raise ValueError(f"dot_product_attention has no keys of {case.kv_dtype}")
    if {q_len for q_len, _ in case.lengths} != {case.q_len}:
        raise ValueError("sequences with different numbers of queries have no dense form")
    if implementation == "cudnn" and 1 < case.q_len < case.kv_len:
        raise ValueError("cuDNN counts causal positions from the first key")
    num_layers, num_pools = _limited(case, chain)
    keys = jax.random.split(jax.random.key(2), 3)
    shape = (num_pools, case.num_seqs, case.kv_len, case.num_kv_heads, case.head_dim)
    k, v = (list(jax.random.normal(key, shape, case.kv_dtype)) for key in keys[:2])  # a slice would be copied
    q = jax.random.normal(keys[2], (case.num_seqs, case.q_len, case.num_q_heads, case.head_dim), case.dtype)
    kv_lens = jnp.array([kv_len for _, kv_len in case.lengths])
    options: dict[str, Any] = {"implementation": implementation, "is_causal": case.q_len > 1}
    if implementation == "xla" and (case.ragged or 1 < case.q_len < case.kv_len):
        positions = kv_lens[:, None] - case.q_len + jnp.arange(case.q_len)
        seen = jnp.arange(case.kv_len) <= positions[:, None, :, None]
        options |= {"is_causal": False, "mask": seen}

    def step(q, k, v):
        for layer in range(num_layers):
            at = layer % num_pools
            q = q + jax.nn.dot_product_attention(q, k[at].astype(q.dtype), v[at].astype(q.dtype), **options)
        return q

    compiled, compile_s = _compile(step, (q, k, v))
    return Timed(median_seconds(lambda: compiled(q, k, v)) / num_layers, compile_s)


def kv_write(num_tokens: int, least: int, bytes_per_s: float | None) -> dict[str, Any]:
    """Time the write of the keys and values of `num_tokens` tokens, 8 heads of 128 in bfloat16, into a donated pool.

    least: the pool takes about half as many bytes, or room for 2 * num_tokens if that is more. bytes_per_s: of a copy,
    None if it was not measured. Returns "us", "GB_per_s" and, if bytes_per_s is known, "percent_of_copy". Numbers are
    rounded.
    """
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


def _compile(step: Callable, args: tuple, donate: tuple[int, ...] = ()) -> tuple[Callable, float]:
    """Compile a function for `args`; return (compiled function, seconds that tracing, lowering and compiling took).

    donate: indices of donated arguments.
    """
    start = time.perf_counter()
    compiled = jax.jit(step, donate_argnums=donate).lower(*args).compile()
    return compiled, time.perf_counter() - start


def _chain_of(case: AttentionCase, least: int, most: int) -> tuple[int, int]:
    """Return (number of layers, number of distinct parts of the pool) of a chain of layers that reads at least `least`
    bytes.

    There are at most `most` parts, which may be fewer bytes, and at least 4 layers, 2 if `least` is 0. Layers beyond
    the parts read the first ones again.
    """
    num_pools = min(most, max(1, -(-least // case.kv_bytes)))
    return max(num_pools, 4 if least else 2), num_pools


def _limited(case: AttentionCase, chain: tuple[int, int]) -> tuple[int, int]:
    """Return `chain`. Raises ValueError if the case's keys and values take more than POOL_LIMIT bytes."""
    if case.kv_bytes > POOL_LIMIT:
        raise ValueError(f"keys and values take {case.kv_bytes >> 30} GiB, more than {POOL_LIMIT >> 30}")
    return chain


def _random_pool(case: AttentionCase, num_pools: int):
    """Return a pool of normally distributed keys and values in the default device's layout, with `num_pools` parts."""
    num_pages = num_pools * case.num_pages
    spec = KVSpec(num_pages, case.page_size, case.num_kv_heads, case.head_dim, case.head_dim, case.kv_dtype)
    kv = jax.eval_shape(lambda: alloc(spec, platform=platform_of(jax.devices()[0])))  # allocates no second pool

    @jax.jit
    def fill(key):
        values = jax.random.normal(key, kv.data.shape, jnp.bfloat16).astype(spec.dtype)
        return bits(values, storage_dtype(spec, kv.layout))

    scale = None if kv.k_scale is None else jnp.ones(kv.k_scale.shape, jnp.float32)
    return dataclasses.replace(kv, data=fill(jax.random.key(0)), k_scale=scale, v_scale=scale)


def _batch(case: AttentionCase) -> RaggedBatch:
    """Return the batch of a case's step, padded to its bucket. The pages of a sequence are scattered, as in a busy
    server.

    slot_mapping is -1 unless the case writes.
    """
    num_tokens, num_seqs, max_pages = case.room
    starts, kv_lens = np.full(num_seqs + 1, case.num_tokens, np.int32), np.zeros(num_seqs, np.int32)
    table, slots = np.zeros((num_seqs, max_pages), np.int32), np.full(num_tokens, -1, np.int32)
    pages, first = iter(np.random.default_rng(0).permutation(case.num_pages)), 0
    for row, (q_len, kv_len) in enumerate(case.lengths):
        starts[row], kv_lens[row] = first, kv_len
        used = -(-kv_len // case.page_size)
        table[row, :used] = [next(pages) for _ in range(used)]
        if case.writes:
            positions = np.arange(kv_len - q_len, kv_len)
            slots[first : first + q_len] = (
                table[row, positions // case.page_size] * case.page_size + positions % case.page_size
            )
        first += q_len
    num_decode = next((row for row, (q_len, _) in enumerate(case.lengths) if q_len != 1), case.num_seqs)
    counts = np.int32(case.num_seqs), np.int32(num_decode)
    return RaggedBatch(*map(jnp.asarray, (starts, kv_lens, table, slots, *counts)))
