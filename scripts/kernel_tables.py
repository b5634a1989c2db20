"""Tables of docs/kernels.md: what runs each operation on each kind of device, and what compiled kernels take.

The first table follows from the registry. The others are of programs that were compiled without a device, as recorded
in benchmarks/results; nothing is compiled here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxengine.pallas_kernels.registry import (
    PLATFORMS,
    PRODUCT_PLATFORMS,
    has_machine_code,
    is_kernel,
    kernel_kind,
    kernel_rows,
)

_RESULTS = Path(__file__).resolve().parents[1] / "benchmarks" / "results"
_PLATFORMS = {
    "TPU": "tpu",
    "Hopper": "gpu",
    "Blackwell": "gpu_blackwell",
    "Ampere, Ada, RTX": "gpu_triton",
    "other cards": "gpu_xla",
    "CPU": "cpu",
}
# Records of attention as `jaxengine check` compiled it, with the heads and the dtypes of their models.
_CHECKED = {
    "check_llama-3.1-8b_sm_90.json": "32/8 heads of 128",
    "check_llama-3.1-8b_adapters64_sm_90.json": "32/8 heads of 128, adapters",
    "check_gpt-oss-120b-mxfp4_experts_sm_90.json": "64/8 heads of 64, sinks",
    "check_qwen3-next-80b-a3b_sm_90-4.json": "4/1 heads of 256",
    "check_deepseek-v3-fp8_experts_sm_90.json": "latents of 512 and 64",
    "check_llama-3.1-8b_bf16_sm_100.json": "32/8 heads of 128",
}
_NONE = "–"
_PAGE = """# Kernels
<!-- Written by scripts/write_docs.py from pallas_kernels/registry.py and benchmarks/results; change those. -->

What runs each operation on each kind of device. "XLA" is plain XLA; a dash means that no program of the platform has
the operation. A kernel that does not take some shape or dtype runs that call as plain XLA, and the log says so and why.
"Machine code" is what llvmlite makes at start, with `jaxengine[cpu]`; without it, and for other shapes, XLA runs.
[How it works](architecture.md#the-kv-pool-and-attention) tells how attention works, and [Quantised
weights](quantization.md) products.

{operations}

## What compiled kernels take

No card was available: these are programs as compiled for a chip, with the compilers of `make check-deps`. "Loads of a
key" is how often a kernel reads each key, 1 at best in decode and one for each block of queries in prefill. A dash
means that the record does not have the number.

**Attention**, of one layer, by `python -m benchmarks triton_attention`, `python -m benchmarks gpu_launches` (plain XLA)
and `jaxengine check` (on Hopper and Blackwell):

{attention}

**Sparse attention**, of one layer in a decode of 8 sequences of 131,072 keys, by `python -m benchmarks
sparse_attention`. Bytes include what query heads that do not fit a program read again, from the L2 cache as a rule; a
sort counts as one launch. On TPUs they are those that kernels copy from the pool where no two selected keys share a
copy. A copy moves a pair of bfloat16 keys, which share words of 32 bits: at this context DeepSeek-V3.2's indexer and
attention together read 1.08 times the bytes of the indexer's keys and the selected ones:

{sparse}

**Quantised products** of an 8B, by `python -m benchmarks triton_products` and, on Hopper, `jaxengine check`. Each row
has the range over the model's matrices and 1 to 1,024 rows:

{products}

The TPU's kernels beside those of tpu-inference: `python -m benchmarks tpu_peers`, recorded in
`benchmarks/results/tpu_peers.json`.
"""


def page() -> str:
    """Return the content of docs/kernels.md."""
    tables = {"operations": operation_rows(), "attention": attention_rows()}
    tables |= {"sparse": sparse_rows(), "products": product_rows()}
    return _PAGE.format(**{name: "\n".join(rows) for name, rows in tables.items()})


def operation_rows() -> Iterator[str]:
    """Yield the rows of a table of operations by platform: "kernel", "XLA", or nothing where the platform has no such
    operation.
    """
    yield f"| operation | {' | '.join(_PLATFORMS)} |"
    yield "|---" * (1 + len(_PLATFORMS)) + "|"
    assert set(_PLATFORMS.values()) == PLATFORMS.keys()
    for op in sorted({op for platform in PLATFORMS for op in kernel_rows(platform)}):
        if not op.endswith("_schedule"):
            yield f"| `{op}` | {' | '.join(_runs(op, platform) for platform in _PLATFORMS.values())} |"


def _runs(op: str, platform: str) -> str:
    """Return what runs an operation on a platform: "kernel", "machine code", "XLA" or, where nothing does, a dash."""
    if op.endswith("matmul"):
        platform = PRODUCT_PLATFORMS.get(platform, platform)
    if kernel_kind(op, platform) is None:
        return _NONE
    if has_machine_code(op, platform):
        return "machine code"
    return "kernel" if is_kernel(op, platform) else "XLA"


def attention_rows() -> Iterator[str]:
    """Yield the rows of a table of attention as compiled, one for each chip, shape and step of the records."""
    names = "chip", "heads", "step", "runs as", "launches", "loads of a key", "registers", "spilled bytes"
    yield f"| {' | '.join(names)} |"
    yield "|---" * len(names) + "|"
    for row in _rows("triton_attention.json"):
        found = row["launches"], row["loads of a key"], row["registers"], row["spilled bytes"]
        yield _line(row["target"], row["shape"], row["step"], "kernel", *found)
    for name, shape in _CHECKED.items():
        for row in _rows(name):
            if row["program"].startswith("attention") and row["attention_kernels"]:
                found = row.get("launches"), None, row["registers"], row["spill_bytes"]
                yield _line(
                    row["target"], shape, row["program"].removeprefix("attention").strip(" ,"), "kernel", *found
                )
    for row in _rows("gpu_launches.json"):
        yield _line(row["target"], f"{row['heads']} of 128", row["step"], "XLA", row["launches"], None, None, None)


def sparse_rows() -> Iterator[str]:
    """Yield the rows of a table of sparse attention as compiled, for each chip, model and operation: of the kernel and
    of plain XLA.
    """
    names = "chip", "model on a device", "operation", "runs as", "launches", "bytes moved ÷ needed", "registers"
    names = *names, "spilled bytes"
    yield f"| {' | '.join(names)} |"
    yield "|---" * len(names) + "|"
    for row in _rows("sparse_attention.json"):
        about = row["target"], row["model"], f"`{row['operation']}`"
        figures = "launches", "moved / needed", "registers", "spilled bytes"
        yield _line(*about, "kernel", *map(row.get, figures))
        if any(name.startswith("XLA: ") for name in row):
            yield _line(*about, "XLA", *(row.get(f"XLA: {figure}") for figure in figures))


def product_rows() -> Iterator[str]:
    """Yield the rows of a table of quantised products as compiled for an 8B: for each chip and storage the range over
    its matrices and numbers of rows, of the kernel and of plain XLA.
    """
    names = "chip", "stored as", "runs as", "launches", "bytes moved ÷ needed", "registers", "spilled bytes"
    yield f"| {' | '.join(names)} |"
    yield "|---" * len(names) + "|"
    rows = _rows("triton_products.json")
    for target, codes in dict.fromkeys((row["target"], row["codes"]) for row in rows):
        own = [row for row in rows if (row["target"], row["codes"]) == (target, codes)]
        taken = [row for row in own if "registers" in row]
        figures = "launches", "bytes moved / needed", "registers", "spilled bytes"
        yield _line(target, codes, "kernel", *(_range(taken, name) for name in figures))
        yield _line(target, codes, "XLA", *(_range(own, f"XLA: {name}") for name in figures[:2]), None, None)
    rows = _rows("gpu_products_sm_90.json")
    for stored in dict.fromkeys(row["stored"] for row in rows):
        own = [row for row in rows if row["stored"] == stored]
        yield _line("sm_90", stored, "kernel", None, None, _range(own, "registers"), _range(own, "spill_bytes"))


def _rows(name: str) -> list[dict[str, Any]]:
    """Return the rows of a file of results."""
    return json.loads((_RESULTS / name).read_text())["rows"]


def _range(rows: list[dict[str, Any]], name: str) -> str:
    """Return the least and the largest value of a column as text, one number if they are equal. Rows without it are
    left out.
    """
    values = [row[name] for row in rows if row.get(name) is not None]
    least, most = f"{min(values):,}", f"{max(values):,}"
    return least if least == most else f"{least} to {most}"


def _line(*cells: Any) -> str:
    """Return a row of a table; None becomes a dash."""
    return f"| {' | '.join(_NONE if cell is None else str(cell) for cell in cells)} |"
