"""Attention implementations for torch, for `python -m benchmarks attention`: FlashInfer, SDPA, flex.

An implementation that is not installed, or does not support a case, gets a row that says so. Times are CUDA events
around many calls, the median of several; layers read different keys in turn.
"""

from __future__ import annotations

import importlib
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.kernels.attention_cases import CHAIN_BYTES, MAX_LAYERS, POOL_LIMIT, AttentionCase, Timed, shares
from benchmarks.recorder import Recorder
from jaxengine.results import machine as host

ROUNDS = 5
CALLS = 20


def measure(recorder: Recorder, cases: Sequence[AttentionCase], labels: Sequence[str]) -> None:
    """Measure each implementation in `labels` on each case; every result becomes a row of the recorder.

    An implementation that cannot run at all gets one row that says why.
    """
    recorder.describe = machine
    recorder.resume()
    attentions = {"flashinfer": flashinfer, "sdpa": sdpa, "flex": flex}
    for label in labels:
        missing = why_missing(label)
        if missing:
            recorder.measure(label, lambda reason=missing: {"missing": reason})
            continue
        for case in cases:
            attend = attentions[label]
            recorder.measure(f"{case.name}, {label}", lambda a=attend, c=case: shares(c, Timed(a(c)), {}))


def why_missing(label: str) -> str | None:
    """Return why an implementation cannot run here at all: a failed import, or no CUDA device; None if it can."""
    try:
        torch = importlib.import_module("torch")
        if label == "flashinfer":
            importlib.import_module("flashinfer")
    except ImportError as error:
        return str(error)
    return None if torch.cuda.is_available() else "torch finds no CUDA device"


def machine() -> dict[str, Any]:
    """Return a dict of the host, of the versions of torch and flashinfer (None if missing), and of the CUDA device if
    there is one.
    """
    found = host()
    for name in ("torch", "flashinfer"):
        try:
            found[name] = importlib.import_module(name).__version__
        except ImportError:
            found[name] = None
    if found["torch"] and (torch := importlib.import_module("torch")).cuda.is_available():
        found["device"] = torch.cuda.get_device_name()
    return found


def flashinfer(case: AttentionCase) -> float:
    """Return FlashInfer's seconds per call over a paged pool [P, 2, K, page, D].

    The plan is made once and not timed, as an engine's step makes it once for all layers. All sequences have the case's
    q_len and kv_len. Raises ValueError for keys and values over POOL_LIMIT.
    """
    torch, library = importlib.import_module("torch"), importlib.import_module("flashinfer")
    pages_per_seq = -(-case.kv_len // case.page_size)
    num_pages = case.num_seqs * pages_per_seq
    shape = (num_pages, 2, case.num_kv_heads, case.page_size, case.head_dim)
    q, pools = _queries(torch, case), _pools(torch, case, shape)
    counts = torch.arange(case.num_seqs + 1, dtype=torch.int32, device="cuda")
    pages = torch.randperm(num_pages, device="cuda").to(torch.int32)
    last = torch.full((case.num_seqs,), (case.kv_len - 1) % case.page_size + 1, dtype=torch.int32, device="cuda")
    workspace = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    heads = (case.num_q_heads, case.num_kv_heads, case.head_dim, case.page_size)
    dtypes = {"q_data_type": q.dtype, "kv_data_type": pools[0].dtype}
    if case.q_len == 1:
        wrapper = library.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND", use_tensor_cores=True)
        wrapper.plan(counts * pages_per_seq, pages, last, *heads, **dtypes)
    else:
        wrapper = library.BatchPrefillWithPagedKVCacheWrapper(workspace, "HND")
        wrapper.plan(counts * case.q_len, counts * pages_per_seq, pages, last, *heads, causal=True, **dtypes)
    return _median_seconds(torch, lambda index: wrapper.run(q, pools[index % len(pools)]))


def sdpa(case: AttentionCase) -> float:
    """Return the seconds per call of scaled_dot_product_attention over contiguous keys.

    Raises ValueError for keys that are not bfloat16, chunks of a prompt, and keys and values over POOL_LIMIT.
    """
    torch = importlib.import_module("torch")
    q, keys, values = _contiguous(torch, case)
    attend = torch.nn.functional.scaled_dot_product_attention
    causal = case.q_len > 1
    return _median_seconds(
        torch, lambda at: attend(q, keys[at % len(keys)], values[at % len(keys)], is_causal=causal, enable_gqa=True)
    )


def flex(case: AttentionCase) -> float:
    """Return the seconds per call of compiled flex_attention over contiguous keys.

    Raises ValueError for keys that are not bfloat16, chunks of a prompt, and keys and values over POOL_LIMIT.
    """
    torch = importlib.import_module("torch")
    library = importlib.import_module("torch.nn.attention.flex_attention")
    q, keys, values = _contiguous(torch, case)
    mask = None
    if case.q_len > 1:
        mask = library.create_block_mask(
            lambda batch, head, query, key: query >= key, None, None, case.q_len, case.kv_len, device="cuda"
        )
    attend = torch.compile(library.flex_attention, dynamic=False)
    return _median_seconds(
        torch, lambda at: attend(q, keys[at % len(keys)], values[at % len(keys)], block_mask=mask, enable_gqa=True)
    )


def _contiguous(torch: Any, case: AttentionCase) -> tuple[Any, list, list]:
    """Return random queries [S, N, q_len, D], and lists of keys and of values [S, K, kv_len, D], one for each layer, on
    the GPU.

    Raises ValueError for keys that are not bfloat16, chunks of a prompt, and keys and values over POOL_LIMIT.
    """
    if case.kv_dtype != "bfloat16":
        raise ValueError(f"no keys of {case.kv_dtype}")
    if 1 < case.q_len < case.kv_len:
        raise ValueError("causal positions are counted from the first key")
    q = _queries(torch, case).view(case.num_seqs, case.q_len, case.num_q_heads, case.head_dim).transpose(1, 2)
    shape = (case.num_seqs, case.num_kv_heads, 2, case.kv_len, case.head_dim)
    pools = _pools(torch, case, shape)
    return q.contiguous(), [pool[:, :, 0] for pool in pools], [pool[:, :, 1] for pool in pools]


def _queries(torch: Any, case: AttentionCase) -> Any:
    """Return random queries bfloat16[S * q_len, N, D] on the GPU."""
    shape = (case.num_seqs * case.q_len, case.num_q_heads, case.head_dim)
    return torch.randn(shape, dtype=torch.bfloat16, device="cuda")


def _pools(torch: Any, case: AttentionCase, shape: tuple[int, ...]) -> list:
    """Return random pools of a shape on the GPU, in the case's kv_dtype; together they are larger than the GPU's cache.

    There are at most MAX_LAYERS. Raises ValueError if the case's keys and values take more than POOL_LIMIT bytes.
    """
    if case.kv_bytes > POOL_LIMIT:
        raise ValueError(f"keys and values take {case.kv_bytes >> 30} GiB, more than {POOL_LIMIT >> 30}")
    count = min(MAX_LAYERS, max(1, -(-CHAIN_BYTES // case.kv_bytes)))
    dtype = torch.float8_e4m3fn if case.kv_dtype == "float8_e4m3fn" else torch.bfloat16
    return [torch.randn(shape, dtype=torch.bfloat16, device="cuda").to(dtype) for _ in range(count)]


def _median_seconds(torch: Any, run: Callable[[int], Any]) -> float:
    """Return the median over ROUNDS rounds of the seconds of a call, measured by CUDA events around CALLS calls.

    run: gets the index of the call within its round. It is called three times before, to warm up.
    """
    for index in range(3):
        run(index)
    times = []
    for _ in range(ROUNDS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for index in range(CALLS):
            run(index)
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / CALLS * 1e-3)
    return statistics.median(times)
