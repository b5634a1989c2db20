"""Estimated cycles of our TPU attention over a cache of one byte per number and over a bfloat16 one; needs libtpu, not
a TPU.

One block of 1024 keys, with one token (decode) or 128 (prefill) and all heads, profiled as in `tpu_cycles`: the kernel
bare, without its copies; the time of these, bytes over bandwidth, is a separate column. "takes" is the larger of both.
v5p: cycles of one core of two, which share the bandwidth. A file's rows that are not measured are kept.
"""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from benchmarks.harness import Option, shared
from benchmarks.recorder import Recorder
from benchmarks.tpu.tpu_cycles import LATENT, LLAMA, per_trip
from jaxengine.check.targets import CLOCKS, TARGETS

# Dtypes of the cache by chip: e4m3 on a chip that multiplies it, int8 on the others.
KINDS = {"v5e": ("int8",), "v6e": ("int8",), "v5p": ("int8",), "tpu7x": ("fp8_e4m3",)}
DTYPES = {"bfloat16": ("bfloat16", 2), "int8": ("int8", 1), "fp8_e4m3": ("float8_e4m3fn", 1)}
# (query heads, KV heads), width of a head, and for latents how many elements of a key are the value.
HEADS = {"32/8 heads of 128": (*LLAMA, None), "latent, 16 heads": ((16, 1), *LATENT)}
TOKENS = 1024  # of a prefill step


def block_cycles(target: str, heads: str, kind: str, *, decode: bool) -> float:
    """Return the cycles of attention to 1024 keys: by 1 token with a mask for a decode, by 128 tokens without one for a
    prefill.

    target: TPU. heads: key of HEADS. kind: dtype of the cache, a key of DTYPES. Raises Unprofiled.
    """
    (queries, kv), head_dim, in_keys = HEADS[heads]
    arguments = {"heads": (queries, kv), "head_dim": head_dim, "in_keys": in_keys, "decode": decode, "max_pages": 32}
    arguments |= {"num_tokens": 64 if decode else TOKENS, "part": "edge" if decode else "block"}
    cycles, facts = per_trip(target, "ours", kv_dtype=DTYPES[kind][0], **arguments)
    return cycles * 1024 / facts["block_kv"] * (1 if decode else 128 / facts["block_q"])


def copied_cycles(target: str, heads: str, kind: str) -> float:
    """Return the cycles of a core during which HBM delivers the bytes of 1024 keys and values.

    target: TPU. heads: key of HEADS. kind: dtype of the cache, a key of DTYPES.
    """
    (_, kv), head_dim, in_keys = HEADS[heads]
    count = 1024 * kv * (head_dim if in_keys else 2 * head_dim) * DTYPES[kind][1]
    return count / TARGETS[target].hbm_bandwidth * CLOCKS[target]


def measure(target: str, heads: str, mode: str, kind: str) -> dict[str, Any]:
    """Return a row: cycles of a block, cycles of its copies, and "takes", the larger of both.

    A prefill has no cycles of copies (None), because many tokens share them. target: TPU. heads: key of HEADS. mode:
    "decode" or "prefill". kind: dtype of the cache, a key of DTYPES. Raises Unprofiled. Cycles are rounded.
    """
    decode = mode == "decode"
    row: dict[str, Any] = {"target": target, "heads": heads, "step": mode, "kv": kind}
    row["cycles"] = round(block_cycles(target, heads, kind, decode=decode))
    row["copied_cycles"] = round(copied_cycles(target, heads, kind)) if decode else None
    row["takes"] = max(row["cycles"], row["copied_cycles"] or 0)
    return row


OPTIONS = {
    "kinds": Option((), "of the cache, in addition to bfloat16; those of the chip by default"),
    **shared(targets=tuple(KINDS), only=""),
}


def run(args: Namespace, recorder: Recorder) -> None:
    recorder.take_over()
    for target in args.targets:
        for heads, mode in ((heads, mode) for heads in HEADS for mode in ("decode", "prefill")):
            if args.only in f"{heads}, {mode}":
                for kind in ("bfloat16", *(args.kinds or KINDS[target])):
                    recorder.add(measure(target, heads, mode, kind), ("target", "heads", "step", "kv"))
