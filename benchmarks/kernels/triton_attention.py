"""Attention in Triton kernels on CUDA cards that are not here, as compiled: launches of a layer, registers and spills
of the kernel that attends, its shared memory, and how often it loads a key; needs jax's CUDA compiler, no card.

Keys of a prefill are loaded once for each tile of queries that sees them, from the L2 cache as a rule.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from argparse import Namespace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.harness import shared
from benchmarks.kernels.gpu_launches import PAGE_SIZE, STEPS, batch_of, launches_of, on_target
from benchmarks.recorder import Recorder
from jaxengine.check.compiled import hlo
from jaxengine.pallas_kernels.attention.op import attention_schedule, ragged_paged_attention
from jaxengine.pallas_kernels.attention.ragged_batch import AttentionSpec
from jaxengine.pallas_kernels.kv.pages import KVSpec, alloc
from jaxengine.pallas_kernels.tuning import Tuning

PLATFORM, KERNEL = "gpu_triton", "paged_attention_rows"
NUM_PAGES = 1 << 17  # a pool of more than 4 GiB: offsets take 64 bits
# Query heads, KV heads, their width, dtype of the pool, and further fields of AttentionSpec. A latent's first
# LATENT_VALUE elements are its value.
SHAPES: dict[str, tuple[int, int, int, str, dict[str, Any]]] = {
    "32/8 heads of 128": (32, 8, 128, "bfloat16", {}),
    "32/8 heads of 128, soft cap": (32, 8, 128, "bfloat16", {"soft_cap": 50.0}),
    "32/8 heads of 128, e4m3": (32, 8, 128, "float8_e4m3fn", {}),
    "32/8 heads of 128, int8": (32, 8, 128, "int8", {}),
    "32/2 heads of 128": (32, 2, 128, "bfloat16", {}),
    "64/8 heads of 64, window": (64, 8, 64, "bfloat16", {"window": 128}),
    "32/32 heads of 96": (32, 32, 96, "bfloat16", {}),
    "16/8 heads of 256": (16, 8, 256, "bfloat16", {}),
    "16/8 heads of 256, e4m3": (16, 8, 256, "float8_e4m3fn", {}),
    "128 heads, latents of 512 and 64": (128, 1, 576, "bfloat16", {"values_in_keys": True}),
    "16 heads, latents of 512 and 64": (16, 1, 576, "bfloat16", {"values_in_keys": True}),
    "16 heads, latents of 512 and 64, e4m3": (16, 1, 576, "float8_e4m3fn", {"values_in_keys": True}),
}
LATENT_VALUE = 512
OF_STEPS = ("decode 64 x 2,048", "prefill 1 x 2,048")
_TARGET = re.compile(r"^\.target (\w+)", re.MULTILINE)
_USED = re.compile(r"Used (\d+) registers")
_SPILLS = re.compile(r"(\d+) bytes spill stores")


def ptxas_figures(ptx: Path) -> tuple[int, int]:
    """Assemble a PTX file for the card it names; return (registers of a thread, bytes of spill stores), each the
    largest of its kernels. Runs the ptxas of the installed nvidia packages and writes a .cubin.
    """
    folder = find_spec("nvidia")
    assert folder is not None and folder.submodule_search_locations
    tool = next(path for at in folder.submodule_search_locations for path in Path(at).glob("*/bin/ptxas"))
    target = _TARGET.search(ptx.read_text())
    assert target is not None, ptx
    command = [tool, "-v", f"-arch={target[1]}", ptx, "-o", ptx.with_suffix(".cubin")]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    return max(map(int, _USED.findall(said))), max(map(int, _SPILLS.findall(said)))


def kernel_figures(folder: str, kernel: str) -> dict[str, int]:
    """Return the "registers", "spilled bytes" and "KiB of shared memory" of a compiled kernel; {} if there is none.

    folder: to which XLA dumped one program. kernel: name.
    """
    ptx = next((each for each in Path(folder).glob("*.ptx") if f".entry {kernel}(" in each.read_text()), None)
    if ptx is None:
        return {}
    registers, spills = ptxas_figures(ptx)
    sequence = next(Path(folder).glob("*.thunk_sequence.txt")).read_text()
    said = re.search(rf"{kernel}\b.*shared_memory: (\d+) bytes", sequence)
    shared_kib = 0 if said is None else int(said[1]) >> 10
    return {"registers": registers, "spilled bytes": spills, "KiB of shared memory": shared_kib}


def keys_loaded(items: Any, spec: AttentionSpec, lengths: list[tuple[int, int]]) -> float:
    """Return how often a schedule's items load a visible key, on average.

    lengths: (new tokens, keys) of each sequence.
    """
    rows = np.asarray(items.items)[: int(items.pair_items[-1])]
    first, end_block, begin, end = rows[:, 3:7].T
    loaded = np.minimum(end, 64 * end_block) - np.maximum(begin, 64 * first)
    seen = sum(keys if spec.window is None else min(keys, new + spec.window - 1) for new, keys in lengths)
    return float(loaded.sum()) / (seen * spec.num_kv_heads)


def measure(target: str, shape: str, step: str) -> dict[str, Any]:
    """Compile one layer's attention for a target and return its figures: "launches", "MiB" of temporaries, the kernel's
    "registers", "spilled bytes" and "KiB of shared memory", and "loads of a key". shape, step: keys of SHAPES and
    STEPS. Numbers are rounded.
    """
    lengths, num_tokens, num_seqs = STEPS[step]
    num_heads, num_kv_heads, width, dtype, options = SHAPES[shape]
    latent = options.get("values_in_keys", False)
    value = LATENT_VALUE if latent else width
    batch, spec = (
        batch_of(lengths, num_tokens, num_seqs),
        AttentionSpec(num_heads, num_kv_heads, width, value, width**-0.5, **options),
    )
    sizes: dict[str, Any] = {"num_tokens": num_tokens, "page_size": PAGE_SIZE, "platform": PLATFORM, "tuning": Tuning()}
    plan = partial(attention_schedule, spec=spec, **sizes)
    pool = KVSpec(NUM_PAGES, PAGE_SIZE, num_kv_heads, width, value, dtype, values_in_keys=latent)
    q = jax.ShapeDtypeStruct((num_tokens, num_heads, width), jnp.bfloat16)
    arguments = q, jax.eval_shape(partial(alloc, pool, platform=PLATFORM)), batch, jax.eval_shape(plan, batch)
    mesh, there = on_target(target, arguments)

    def attend(q, kv, batch, schedule):
        rest = {"q_rest": q[..., value:]} if latent else {}
        return ragged_paged_attention(q[..., :value], kv, batch, spec=spec, schedule=schedule, **rest)

    with tempfile.TemporaryDirectory() as folder, jax.set_mesh(mesh):
        lowered = jax.jit(attend).trace(*there).lower(lowering_platforms=("cuda",))
        compiled = lowered.compile({"xla_dump_to": folder})
        figures = kernel_figures(folder, KERNEL)
    module = hlo.parse(compiled.as_text() or "")
    analysis: Any = compiled.memory_analysis()
    loaded = keys_loaded(plan(jax.tree.map(jnp.asarray, batch)).items, spec, lengths)
    return {
        "launches": launches_of(module, module.entry),
        "MiB": round(analysis.temp_size_in_bytes / 2**20, 1),
        **figures,
        "loads of a key": round(loaded, 2),
    }


OPTIONS = shared(targets=("sm_80", "sm_86", "sm_89", "sm_120"), only="")


def run(args: Namespace, recorder: Recorder) -> None:
    recorder.take_over()
    for target in args.targets:
        for shape in SHAPES:
            for step in OF_STEPS:
                if args.only in f"{shape}, {step}":
                    row = {"target": target, "shape": shape, "step": step, **measure(target, shape, step)}
                    recorder.add(row, ("target", "shape", "step"))
