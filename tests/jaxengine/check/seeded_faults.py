"""Faults that make a step slow and not wrong, each seeded in a copy of the sources, and `jaxengine check` run on it.

    python -m tests.jaxengine.check.seeded_faults [NAME ...]

Each is one replaced piece of a module's source, as the conformance suite's mutants are, and what `check` must say of
it. Needs the compilers of the fault's target (`make check-deps`) and no device. A pattern that no longer occurs exactly
once is an error.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[3]
PACKAGES = ("jaxengine",)
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 4096,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}
OPTIONS = ("--buckets=short", "--max-num-seqs=8", "--max-num-batched-tokens=128", "--num-gpu-blocks-override=1000")


class Fault(NamedTuple):
    """Attributes: file and what is replaced in it; the target; part of a program's name, and of what is said of it."""

    file: str
    old: str
    new: str
    target: str
    only: str
    says: str


KV_UPDATE = "                kv = kv_cache_update(kv, *own, ragged.slot_mapping, schedule=pages.update_schedule)\n"
SLAB = """\
                pages_here = kv.data.shape[0] // 2
                slab = jax.lax.dynamic_slice_in_dim(kv.data, pages.first_page, pages_here)
                slab = jax.lax.optimization_barrier(slab)
                data = jax.lax.dynamic_update_slice_in_dim(kv.data, slab, pages.first_page, 0)
                kv = __import__("dataclasses").replace(kv, data=data)
"""
# Scores that are used again after the values have been added up.
BARRIER = """\
    acc, new_largest, total, weights = lax.optimization_barrier((acc, new_largest, total, weights))
    plgpu.barrier_arrive(refs.turn)
    plgpu.barrier_wait(refs.v_full.at[slot])
    plgpu.barrier_wait(refs.turn)
    add = pl.run_state(lambda acc_ref: plgpu.wgmma(acc_ref, weights, refs.v_smem.at[slot]))
    acc = add(plgpu.WGMMAAccumulatorRef.init(acc))
"""
FIRST = "    acc, new_largest, total, weights = lax.optimization_barrier((acc, new_largest, total, weights))\n"
KEPT = (
    "    kept = [jnp.exp2(logits * (index + 2.0)) for index in range(4)]\n"
    "    acc, new_largest, total, weights, *kept = lax.optimization_barrier(\n"
    "        (acc, new_largest, total, weights, *kept)\n    )\n"
    f"{BARRIER.removeprefix(FIRST)}"
    "    total = total + sum((each * acc).sum(axis=1) for each in kept) * 1e-30\n"
)
LINEAR = "    return lax.dot_general(x, weight, "
FAULTS = {
    "six passes of float32 in the prefill kernel": Fault(
        "jaxengine/pallas_kernels/attention/tpu/attend.py",
        "jnp.bfloat16 if q.dtype == jnp.bfloat16 and kv.data",
        "jnp.bfloat16 if block_q == 1 and q.dtype == jnp.bfloat16 and kv.data",
        "v6e",
        "attention 1024 keys, block",
        "cycles was",
    ),
    "blocks of 128 keys": Fault(
        "jaxengine/pallas_kernels/tuning.py",
        "single_keys: int = 1024",
        "single_keys: int = 128",
        "v6e",
        "attention 1024 keys, decode",
        "cycles was",
    ),
    "spilled registers, seen on a mesh": Fault(
        "jaxengine/pallas_kernels/attention/hopper/prefill.py",
        BARRIER,
        KEPT,
        "sm_90-2",
        "attention, mixed T=128",
        "a kernel spills",
    ),
    "float32 in every product": Fault(
        "jaxengine/pallas_kernels/matmul/xla/dense.py",
        LINEAR,
        "    x, weight = x.astype(jnp.float32), weight.astype(jnp.float32)\n" + LINEAR,
        "sm_90",
        "mixed T=128",
        "operations of a bfloat16 model in f32",
    ),
    "float32 between devices": Fault(
        "jaxengine/models/layers/base/linear.py",
        "own_dtype = x.dtype if split else",
        "own_dtype = jnp.float32 if split else",
        "sm_90-2",
        "mixed T=128",
        "exchanges: layer 0 exchanges",
    ),
    "a layer's part of the pool copied": Fault(
        "jaxengine/models/layers/attention/attention.py",
        KV_UPDATE,
        KV_UPDATE + SLAB,
        "v6e",
        "decode S=8",
        "copies a layer's pool",
    ),
    "attention that fell back to XLA": Fault(
        "jaxengine/pallas_kernels/cards.py",
        '_MOSAIC_CAPABILITIES = ("9.0",)',
        "_MOSAIC_CAPABILITIES = ()",
        "sm_90",
        "decode S=8",
        "0 of 2 layers attend with a kernel",
    ),
}


def faulty_source(fault: Fault) -> str:
    """The file with the fault in it; ValueError if its pattern does not occur exactly once."""
    text = (ROOT / fault.file).read_text()
    if (times := text.count(fault.old)) != 1:
        raise ValueError(f"{fault.old!r} occurs {times} times in {fault.file}")
    return text.replace(fault.old, fault.new)


def copy_sources(folder: Path) -> None:
    for package in PACKAGES:
        shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(CONFIG))


def check(folder: Path, target: str, *arguments: str) -> tuple[int, str]:
    """Exit status and output of `jaxengine check` of the sources in `folder`."""
    command = [sys.executable, "-m", "jaxengine", "check", "--targets", target, "--model", "model", *OPTIONS]
    done = subprocess.run(
        [*command, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout + (done.stderr if done.returncode > 1 else "")


@cache
def clean(target: str, *arguments: str) -> str:
    """What `check` saves of the sources as they are, in which it must find nothing."""
    with tempfile.TemporaryDirectory() as folder:
        copy_sources(Path(folder))
        status, output = check(Path(folder), target, *arguments, "--save=clean.json")
        assert status == 0, f"the sources as they are: {output}"
        return Path(folder, "clean.json").read_text()


def judgement(fault: Fault) -> str | None:
    """What `check` says of the seeded fault and not of the sources as they are; None where it does not find it."""
    arguments = (f"--only={fault.only}",)
    before = clean(fault.target, *arguments)
    with tempfile.TemporaryDirectory() as folder:
        copy_sources(Path(folder))
        Path(folder, "clean.json").write_text(before)
        Path(folder, fault.file).write_text(faulty_source(fault))
        status, output = check(Path(folder), fault.target, *arguments, "--against=clean.json")
    failures = [line for line in output.splitlines() if line.startswith("FAIL")]
    told = [line for line in failures if fault.only in line and fault.says in line]
    return told[0] if status == 1 and told else None


def main(names: Sequence[str]) -> int:
    missed = 0
    for name in names or FAULTS:
        told = judgement(FAULTS[name])
        missed += told is None
        print(f"{name}: {told or 'NOT FOUND'}", flush=True)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
