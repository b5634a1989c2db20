"""Estimated cycles of our TPU attention over a cache of one byte a number beside bfloat16's; needs libtpu, not a TPU.

    python -m benchmarks.tpu_kv_cycles [--targets v6e,tpu7x] [--kinds int8,fp8_e4m3] [--only decode] [--json FILE]

One block of 1024 keys, with one token (decode) or 128 (prefill) and all heads, profiled as benchmarks.tpu_cycles does:
the kernel bare, without its copies, whose bytes over the bandwidth are put beside. A block "takes" the larger of both.
v5p: cycles of one core of two, which share the bandwidth. Rows of a file that are not measured are kept.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.tpu_cycles import LATENT, LLAMA, per_trip
from jaxengine.bench.report import table, write_json
from jaxengine.check.targets import CLOCKS, TARGETS

# Of a chip that multiplies e4m3 that, and int8 of the others, by default.
KINDS = {"v5e": ("int8",), "v6e": ("int8",), "v5p": ("int8",), "tpu7x": ("fp8_e4m3",)}
DTYPES = {"bfloat16": ("bfloat16", 2), "int8": ("int8", 1), "fp8_e4m3": ("float8_e4m3fn", 1)}
# Heads (queries', kv), width of a head, and of latents how many of a key are the values; tokens of a prefill's step.
HEADS = {"32/8 heads of 128": (*LLAMA, None), "latent, 16 heads": ((16, 1), *LATENT)}
TOKENS = 1024


def block_cycles(target: str, heads: str, kind: str, *, decode: bool) -> float:
    """Of 1024 keys and 1 or 128 tokens, with a mask in a decode and without in a prefill."""
    (queries, kv), head_dim, in_keys = HEADS[heads]
    arguments = {"heads": (queries, kv), "head_dim": head_dim, "in_keys": in_keys, "decode": decode, "max_pages": 32}
    arguments |= {"num_tokens": 64 if decode else TOKENS, "part": "edge" if decode else "block"}
    cycles, facts = per_trip(target, "ours", kv_dtype=DTYPES[kind][0], **arguments)
    return cycles * 1024 / facts["block_kv"] * (1 if decode else 128 / facts["block_q"])


def copied_cycles(target: str, heads: str, kind: str) -> float:
    """What the bytes of 1024 keys and values take, in cycles of a core."""
    (_, kv), head_dim, in_keys = HEADS[heads]
    count = 1024 * kv * (head_dim if in_keys else 2 * head_dim) * DTYPES[kind][1]
    return count / TARGETS[target].hbm_bandwidth * CLOCKS[target]


def measure(target: str, heads: str, mode: str, kind: str) -> dict[str, Any]:
    """A row. Copies are told of a decode, where each sequence has its own."""
    decode = mode == "decode"
    row: dict[str, Any] = {"target": target, "heads": heads, "step": mode, "kv": kind}
    row["cycles"] = round(block_cycles(target, heads, kind, decode=decode))
    row["copied_cycles"] = round(copied_cycles(target, heads, kind)) if decode else None
    row["takes"] = max(row["cycles"], row["copied_cycles"] or 0)
    return row


def _key(row: dict[str, Any]) -> tuple[str, ...]:
    return row["target"], row["heads"], row["step"], row["kv"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", default=",".join(KINDS))
    parser.add_argument("--kinds", help="of the cache, beside bfloat16; those of the chip by default")
    parser.add_argument("--only", default="", help="part of the heads and the step, as 'latent, 16 heads, decode'")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = {}
    if options.json and options.json.exists():
        rows = {_key(row): row for row in json.loads(options.json.read_text())["rows"]}
    for target in options.targets.split(","):
        kinds = options.kinds.split(",") if options.kinds else KINDS[target]
        for heads, mode in ((heads, mode) for heads in HEADS for mode in ("decode", "prefill")):
            if options.only not in f"{heads}, {mode}":
                continue
            for kind in ("bfloat16", *kinds):
                row = measure(target, heads, mode, kind)
                rows[_key(row)] = row
                print(row, flush=True)
                write_json(options.json, {"rows": list(rows.values())})
    print(table(list(rows.values())))


if __name__ == "__main__":
    main()
