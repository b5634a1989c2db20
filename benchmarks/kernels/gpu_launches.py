"""Launches and memory of plain XLA attention on CUDA cards without a kernel for it; needs jax's CUDA compiler, no card.

The operation is compiled for each target with the sizes that such cards have in tuning, and with those of CPUs. The
lengths of a step then say how often its loops run: launches = loop bodies times runs, and what is outside of the loops.
A conditional counts as one launch, although the host waits for it besides.
"""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks.harness import shared
from benchmarks.recorder import Recorder
from jaxengine.check.compiled import hlo
from jaxengine.check.devices import target_devices
from jaxengine.check.targets import find_target
from jaxengine.pallas_kernels.attention.op import ragged_paged_attention
from jaxengine.pallas_kernels.attention.ragged_batch import AttentionSpec, RaggedBatch
from jaxengine.pallas_kernels.attention.xla.schedule import attention_schedule
from jaxengine.pallas_kernels.kv.pages import KVSpec, alloc
from jaxengine.pallas_kernels.tuning import Tuning, tuning_of

PAGE_SIZE, NUM_PAGES = 64, 4096
PLATFORM = "gpu_xla"
HEADS = {"32/8 heads": (32, 8), "32/32 heads": (32, 32)}  # of 128
# New tokens and length of each sequence; tokens and rows of the bucket.
STEPS = {
    "decode 64 x 2,048": ([(1, 2048)] * 64, 64, 64),
    "decode 1 x 32,768": ([(1, 32768)], 1, 1),
    "prefill 1 x 2,048": ([(2048, 2048)], 2048, 64),
    "prefill 64 x 32": ([(32, 32)] * 64, 2048, 64),
}
_BODY = re.compile(r"body=%?([\w.\-]+)")
_NO_LAUNCH = hlo.PASSIVE - {"conditional"} | {"constant"}


def batch_of(lengths: list[tuple[int, int]], num_tokens: int, num_seqs: int) -> Any:
    """Return a RaggedBatch of numpy arrays for sequences of (new tokens, keys), padded to a bucket.

    All page tables are zeros and all slots -1. num_tokens, num_seqs: of the bucket.
    """
    padding = [(0, 0)] * (num_seqs - len(lengths))
    new, keys = np.array([*lengths, *padding], np.int32).T
    starts = np.concatenate([[0], np.cumsum(new)]).astype(np.int32)
    table = np.zeros((num_seqs, -(-int(keys.max()) // PAGE_SIZE)), np.int32)
    decodes = sum(count == 1 for count, _ in lengths)
    slots = np.full(num_tokens, -1, np.int32)
    arrays: Any = starts, keys, table, slots, np.int32(len(lengths)), np.int32(decodes)
    return RaggedBatch(*arrays)


def runs_of(schedule: Any) -> Iterator[int]:
    """Yield how often each loop over blocks runs by a schedule with concrete arrays, in the program's order: that of
    single tokens, then that of runs, if it has them. A tile in use runs at least once.
    """
    for tiles in (schedule.single, schedule.runs):
        if tiles is not None:
            blocks = np.asarray(tiles.last_block - tiles.first_block + 1)[: int(tiles.num_tiles)]
            yield int(np.maximum(blocks, 1).sum())


def launches_of(module: hlo.Module, computation: str) -> int:
    """Return the number of kernels and copies that one run of a computation launches, loops counted once."""
    return sum(each.opcode not in _NO_LAUNCH for each in module.computations[computation])


def on_target(target: str, arguments: Any) -> tuple[Mesh, Any]:
    """Return (mesh of a target's first device, shapes of `arguments`, a tree of arrays, on it)."""
    mesh = Mesh(np.array(target_devices(find_target(target))[:1]), ("devices",))
    place = NamedSharding(mesh, PartitionSpec())
    return mesh, jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), arguments)


def measure(target: str, heads: str, step: str, tuning: Tuning) -> tuple[int, float]:
    """Compile one layer's attention for a target; return (launches of a step, MiB of temporaries).

    heads, step: keys of HEADS and STEPS.
    """
    lengths, num_tokens, num_seqs = STEPS[step]
    batch, (num_q_heads, num_kv_heads) = batch_of(lengths, num_tokens, num_seqs), HEADS[heads]
    spec = AttentionSpec(num_q_heads, num_kv_heads, 128, 128, 128**-0.5)
    plan = partial(attention_schedule, spec=spec, num_tokens=num_tokens, page_size=PAGE_SIZE, tuning=tuning)
    pool = KVSpec(NUM_PAGES, PAGE_SIZE, num_kv_heads, 128, 128, "bfloat16")
    q = jax.ShapeDtypeStruct((num_tokens, num_q_heads, 128), jnp.bfloat16)
    arguments = q, jax.eval_shape(partial(alloc, pool, platform=PLATFORM)), batch, jax.eval_shape(plan, batch)

    def attend(q, kv, batch, schedule):
        return ragged_paged_attention(q, kv, batch, spec=spec, schedule=schedule)

    compiled = jax.jit(attend).lower(*on_target(target, arguments)[1]).compile()
    module = hlo.parse(compiled.as_text() or "")
    runs = list(runs_of(plan(jax.tree.map(jnp.asarray, batch))))
    whiles = [each for each in module.computations[module.entry] if each.opcode == "while"]
    bodies = [found[1] for each in whiles if (found := _BODY.search(each.rest))]
    assert len(bodies) == len(runs), (bodies, runs)
    launches = launches_of(module, module.entry) - len(whiles)
    launches += sum(count * launches_of(module, body) for count, body in zip(runs, bodies, strict=True))
    analysis: Any = compiled.memory_analysis()
    return launches, analysis.temp_size_in_bytes / 2**20


OPTIONS = shared(targets=("sm_80", "sm_100"), only="")


def run(args: Namespace, recorder: Recorder) -> None:
    """Measure each target, heads and step with the tuning of PLATFORM and with the default one, a CPU's; add a row for
    each to those of the file, or replace the one there of the same target, heads and step. MiB have one decimal.

    args.targets: names of targets. args.only: text that "HEADS, STEP" must contain; it does not look at the target. The
    file is written and the row printed after each.
    """
    recorder.take_over()
    for target in args.targets:
        for heads in HEADS:
            for step in STEPS:
                if args.only not in f"{heads}, {step}":
                    continue
                launches, mib = measure(target, heads, step, tuning_of(PLATFORM))
                before, mib_before = measure(target, heads, step, Tuning())
                row = {"target": target, "heads": heads, "step": step, "launches": launches, "MiB": round(mib, 1)}
                row |= {"CPU's sizes: launches": before, "CPU's sizes: MiB": round(mib_before, 1)}
                recorder.add(row, ("target", "heads", "step"))
