"""Sparse attention of one layer on CUDA cards and TPUs that are not here, as compiled: its kernels beside plain XLA;
needs jax's CUDA compiler or libtpu, no card.

Bytes are those of a decode of SEQUENCES sequences of CONTEXT keys: what the program moves according to its HLO, with
the loops' trips that this context takes, and the rows of the pool that a kernel reads. Query heads that do not fit a
program of a card read a key again, from the L2 cache as a rule; that counts as well. A sort counts as one launch. Of a
TPU's kernels only the bytes that they copy from the pool are counted, beside those of the keys: the size of a copy is
taken from the traced kernel, the number of copies is that of the worst case, where no two selected keys share one.
"""

from __future__ import annotations

import math
import re
import tempfile
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from benchmarks.harness import shared
from benchmarks.kernels.gpu_launches import on_target
from benchmarks.kernels.triton_attention import ptxas_figures
from benchmarks.recorder import Recorder
from jaxengine.check.compiled import counts, hlo
from jaxengine.pallas_kernels.attention import selected
from jaxengine.pallas_kernels.attention.ragged_batch import AttentionSpec, RaggedBatch
from jaxengine.pallas_kernels.kv.pages import KVSpec, alloc
from jaxengine.pallas_kernels.registry import kernel_kind, without_rows
from jaxengine.pallas_kernels.tuning import TritonAttention, XlaAttention, XlaSelection, tuning_of

SEQUENCES, CONTEXT, PAGE_SIZE = 8, 131072, 64
PLATFORMS = dict.fromkeys(("sm_80", "sm_86", "sm_89", "sm_120"), "gpu_triton") | {"sm_90": "gpu"}
PLATFORMS |= {"sm_100": "gpu_blackwell"} | dict.fromkeys(("v6e", "v5p", "tpu7x"), "tpu")


class Model(NamedTuple):
    """Sparse attention of a model on one device.

    Attributes:
      heads: query heads, and KV heads.
      key, value: elements of a key and of a value.
      index: heads of the indexer, and elements of its keys.
      count: keys or blocks that are selected.
      size: tokens of a block; None if keys are selected, which begin with their values.
    """

    heads: tuple[int, int]
    key: int
    value: int
    index: tuple[int, int]
    count: int
    size: int | None = None

    @property
    def operations(self) -> tuple[str, str]:
        """Names of the operation that selects, and of that which attends."""
        return ("select_keys", "selected_attention") if self.size is None else ("select_blocks", "block_attention")


MODELS = {
    "DeepSeek-V3.2, 16 heads": Model((16, 1), 576, 512, (64, 128), 2048),
    "DeepSeek-V3.2, 128 heads": Model((128, 1), 576, 512, (64, 128), 2048),
    "MiniMax M3, 16 heads": Model((16, 1), 128, 128, (1, 128), 16, 128),
}


def shapes_of(model: Model, op: str, platform: str) -> tuple[Callable, tuple[Any, ...]]:
    """Return (function that calls operation `op` of a decode, its arguments as shapes): SEQUENCES tokens with CONTEXT
    keys each, in bfloat16, and a pool of `platform`.
    """
    stored = model.key if model.size is None else model.key + model.value
    kv_heads = model.heads[1]
    num_pages = SEQUENCES * CONTEXT // PAGE_SIZE
    pool = KVSpec(num_pages, PAGE_SIZE, kv_heads, stored, model.index[1], "bfloat16", aligned_values=True)
    kv = jax.eval_shape(partial(alloc, pool, platform=platform))

    def shape(*size: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((SEQUENCES, *size), dtype)

    scalar = jax.ShapeDtypeStruct((), jnp.int32)
    starts: Any = jax.ShapeDtypeStruct((SEQUENCES + 1,), jnp.int32)
    table: Any = shape(CONTEXT // PAGE_SIZE, dtype=jnp.int32)
    row: Any = shape(dtype=jnp.int32)
    batch = RaggedBatch(starts, row, table, row, scalar, scalar)  # pyright: ignore[reportArgumentType]
    spec = AttentionSpec(*model.heads, model.key, model.value, 0.1, values_in_keys=model.size is None)
    index_q = shape(*model.index) if model.size is None else shape(kv_heads, model.index[1])
    if op == "select_keys":
        weights = shape(model.index[0], dtype=jnp.float32)
        return partial(selected.select_keys, count=model.count), (index_q, weights, kv, batch)
    if op == "select_blocks":
        options = {"size": model.size, "count": model.count, "local": 1}
        return partial(selected.select_blocks, **options), (index_q, kv, batch)
    if op == "selected_attention":
        parts = (shape(model.heads[0], width) for width in spec.query_dims)
        return partial(selected.selected_attention, spec=spec), (*parts, kv, batch, shape(model.count, dtype=jnp.int32))
    q, blocks = shape(model.heads[0], model.key), shape(kv_heads, model.count, dtype=jnp.int32)
    return partial(selected.block_attention, spec=spec, size=model.size or 1), (q, kv, batch, blocks)


def needed_bytes(model: Model, op: str) -> tuple[int, int]:
    """Return the bytes of the pool that a decode needs, and of its queries and results."""
    heads, kv_heads = model.heads
    if op.startswith("select_"):
        own = model.index[0] * (model.index[1] * 2 + 4) + kv_heads * model.count * 4
        return SEQUENCES * CONTEXT * model.index[1] * 2, SEQUENCES * own
    keys, width = model.count * (model.size or 1), model.key + (model.value if model.size else 0)
    own = heads * (model.key + model.value) * 2 + kv_heads * model.count * 4
    return SEQUENCES * kv_heads * keys * width * 2, SEQUENCES * own


def trips_of(model: Model, op: str, sizes: XlaSelection, triton: TritonAttention | None) -> tuple[int, ...]:
    """Return how often the loops of a program run, the outermost first. triton: sizes of kernels, None for XLA."""
    if op.startswith("select_"):
        tiles = XlaAttention(sizes.block_seqs, sizes.block_q, sizes.block_kv)
        rows = min(SEQUENCES, sizes.block_seqs)
        unit = math.lcm(PAGE_SIZE, model.size or 1)
        block = max(tiles.block_kv_of(PAGE_SIZE, rows) // unit, 1) * unit
        most = -(-32 * model.count // (block // (model.size or 1)))
        return -(-SEQUENCES // rows), -(-CONTEXT // (block * most)), most
    if triton is not None:
        return ()
    each = 1 if model.size is None else max(sizes.gathered_keys // model.size, 1)
    at_once = sizes.gathered_keys if model.size is None else each
    return -(-SEQUENCES // sizes.block_tokens), -(-model.count // at_once)


def copies_of(model: Model, op: str) -> int:
    """Return how many copies from the pool an operation's kernel for TPUs starts, where no two selected keys share
    one: of pages by an indexer, of keys, or of the parts of blocks that lie in one page.
    """
    if op.startswith("select_"):
        return SEQUENCES * CONTEXT // PAGE_SIZE
    size = model.size or 1
    return SEQUENCES * model.heads[1] * model.count * (size // math.gcd(size, PAGE_SIZE))


@contextmanager
def copied_bytes(pool: Any) -> Iterator[set[int]]:
    """Collect, within the context, the sizes in bytes of the copies that traced kernels of TPUs make from arrays as
    large as `pool`. Replaces pltpu.make_async_copy meanwhile.
    """
    found: set[int] = set()
    make = pltpu.make_async_copy

    def recorded(source: Any, destination: Any, semaphore: Any) -> Any:
        base = getattr(source, "ref", source)
        if math.prod(base.shape) == math.prod(pool.shape):
            found.add(math.prod(source.shape) * pool.dtype.itemsize)
        return make(source, destination, semaphore)

    pltpu.make_async_copy = recorded
    try:
        yield found
    finally:
        pltpu.make_async_copy = make


def measure_tpu(target: str, name: str, op: str) -> dict[str, Any]:
    """Compile an operation's kernel of a model for a TPU and return its figures: "MiB moved", "moved / needed" and
    "MiB" of temporaries. Raises ValueError unless all its copies from the pool have one size. Numbers are rounded.
    """
    model = MODELS[name]
    function, arguments = shapes_of(model, op, "tpu")
    mesh, there = on_target(target, arguments)
    with jax.set_mesh(mesh), copied_bytes(next(each for each in there if hasattr(each, "data")).data) as sizes:
        traced = jax.jit(lambda *given: function(*given)).trace(*there)
        analysis: Any = traced.lower(lowering_platforms=("tpu",)).compile().memory_analysis()
    (size,) = sizes
    moved = size * copies_of(model, op)
    return {
        "MiB moved": round(moved / 2**20, 1),
        "moved / needed": round(moved / needed_bytes(model, op)[0], 2),
        "MiB": round(analysis.temp_size_in_bytes / 2**20, 1),
    }


def measure(target: str, name: str, op: str, *, plain: bool) -> dict[str, Any]:
    """Compile an operation of a model for a CUDA card and return its figures: "launches", "MiB moved", "moved /
    needed", "MiB" of temporaries and, for a kernel, "registers" and "spilled bytes". plain: as plain XLA. Numbers are
    rounded.
    """
    model, platform = MODELS[name], PLATFORMS[target]
    function, arguments = shapes_of(model, op, platform)
    mesh, there = on_target(target, arguments)
    unused = [(op, kernel_kind(op, platform) or "")] if plain else []
    with tempfile.TemporaryDirectory() as folder, jax.set_mesh(mesh), without_rows(unused):
        sizes = tuning_of(platform)
        lowered = jax.jit(lambda *given: function(*given)).trace(*there).lower(lowering_platforms=("cuda",))
        compiled = lowered.compile({"xla_dump_to": folder})
        entry = re.compile(r"\.entry (selected_rows|index_scores)")
        kernels = [each for each in Path(folder).glob("*.ptx") if entry.search(each.read_text())]
        assert bool(kernels) != plain, kernels
        figures = {}
        if kernels:
            registers, spills = ptxas_figures(kernels[0])
            figures = {"registers": registers, "spilled bytes": spills}
    module = hlo.parse(compiled.as_text() or "")
    kv = next(each for each in there if hasattr(each, "data"))
    trips = trips_of(model, op, sizes.xla_selection, None if plain else sizes.triton_attention)
    moved = counts.moved_bytes(module, () if plain else {math.prod(kv.data.shape)}, trips)
    of_pool, own = needed_bytes(model, op)
    if not plain:
        heads = model.heads[0] // model.heads[1]
        tiles = -(-heads // sizes.triton_attention.selected_rows) if op.endswith("_attention") else 1
        moved += of_pool * tiles
    analysis: Any = compiled.memory_analysis()
    return {
        "launches": counts.launches(module, trips=trips),
        "MiB moved": round(moved / 2**20, 1),
        "moved / needed": round(moved / (of_pool + own), 2),
        "MiB": round(analysis.temp_size_in_bytes / 2**20, 1),
        **figures,
    }


OPTIONS = shared(targets=("sm_80", "sm_89", "sm_90", "sm_100", "sm_120", "v6e", "v5p", "tpu7x"), only="")


def run(args: Namespace, recorder: Recorder) -> None:
    recorder.take_over()
    for target in args.targets:
        for name, model in MODELS.items():
            for op in model.operations:
                if args.only not in f"{name}, {op}" or (op == "select_keys" and model.heads[0] > 16):
                    continue  # selection does not depend on the heads that attend
                row = {"target": target, "model": name, "operation": op}
                if PLATFORMS[target] == "tpu":
                    row |= measure_tpu(target, name, op)
                else:
                    row |= measure(target, name, op, plain=False)
                    plain = measure(target, name, op, plain=True)
                    row |= {f"XLA: {key}": value for key, value in plain.items()}
                recorder.add(row, ("target", "model", "operation"))
