"""Faults of the Mosaic GPU decode kernel, the merge of its partial results, and their schedule."""

from __future__ import annotations

from tests.pallas_kernels.mutants.mutant import Mutant, attention

SECONDS = 45

_DECODE, _MERGE = "attention/hopper/decode*", "attention/hopper/merge"
_SCHEDULE, _ROWS = "attention/hopper/schedule", "attention/hopper/attend"


def _on(*cases: str):
    return attention("mgpu", "bfloat16", *cases)


_ANY = _on("decode bucket")
_SPLIT = _on("split decodes")
_PARTS = (("many_parts", "mgpu"),)
_TOKENS = _on("verify tails")
_WINDOW = _on("decode window and sinks")
_SINKS = _on("decode window and sinks")
_CODES = _on("codes of decodes")

MUTANTS = [
    Mutant("blocks not waited for", _DECODE, "            plgpu.barrier_wait(refs.kv_full.at[slot])\n", "", _ANY),
    Mutant("queries not waited for", _DECODE, "        plgpu.barrier_wait(refs.q_full.at[q_slot])\n", "", _ANY),
    Mutant(
        "block overwritten early",
        _DECODE,
        "@pl.when(step >= blocks)",
        "@pl.when(step < 0)",
        _on("skewed decodes"),
    ),
    Mutant(
        "queries overwritten early",
        _DECODE,
        "@pl.when(item - first >= queries)",
        "@pl.when(item < first)",
        _on("skewed decodes"),
    ),
    Mutant(
        "block handed back before its values are read",
        _DECODE,
        "            products = pl.run_scoped(multiply",
        "            plgpu.barrier_arrive(refs.kv_free.at[slot])\n            products = pl.run_scoped(multiply",
        _ANY,
    ),
    Mutant(
        "commit of zeroed values missing",
        _DECODE,
        "        values[...] = seen_only(values[...])\n        plgpu.commit_smem()\n",
        "        values[...] = seen_only(values[...])\n",
        _ANY,
    ),
    Mutant(
        "commit of widened codes missing",
        _DECODE,
        "        plgpu.commit_smem()\n        plgpu.barrier_arrive(refs.kv_free.at[slot])\n    return",
        "        plgpu.barrier_arrive(refs.kv_free.at[slot])\n    return",
        _CODES,
    ),
    Mutant("commit of results missing", _DECODE, "        plgpu.commit_smem()\n        target", "        target", _ANY),
    Mutant(
        "results overwritten while they leave",
        _DECODE,
        "        plgpu.wait_smem_to_gmem(0)  # the last store still reads the buffer\n",
        "",
        _ANY,
    ),
    Mutant(
        "results still leaving at the end",
        _DECODE,
        "attend_item, jnp.int32(0))\n    plgpu.wait_smem_to_gmem(0)\n",
        "attend_item, jnp.int32(0))\n",
        _ANY,
    ),
    Mutant(
        "page off by one", _DECODE, "block * shape.boxes + index, low", "block * shape.boxes + index + 1, low", _ANY
    ),
    Mutant("page table read past the end", _DECODE, "index, low, high) for", "index, low, high + 9) for", _ANY),
    Mutant("keys and values swapped", _DECODE, "+ head) * parts + part)", "+ head) * parts + 1 - part)", _ANY),
    Mutant("wrong key head", _DECODE, "(page * num_heads + head)", "(page * num_heads + head * 0)", _ANY),
    Mutant("last key dropped", _DECODE, "    seen = key < end\n", "    seen = key < end - 1\n", _ANY),
    Mutant("one key too many", _DECODE, "    seen = key < end\n", "    seen = key < end + 1\n", _ANY),
    Mutant("causal off by one", _DECODE, "seen & (key <= last)", "seen & (key < last)", _TOKENS),
    Mutant(
        "window one too wide",
        _DECODE,
        "seen = seen & (key >= begin)\n    else",
        "seen = seen & (key >= begin - 1)\n    else",
        _WINDOW,
    ),
    Mutant("stale values", _DECODE, "seen = row < end\n", "seen = row < end + 1\n", _ANY),
    Mutant("stale values before the window", _DECODE, "unseen = unseen | (begin > 0)", "unseen = unseen", _WINDOW),
    Mutant(
        "decay dropped", _DECODE, "acc = acc * lax.broadcast_in_dim(decay, acc.shape, [0])", "acc = acc * 1.0", _ANY
    ),
    Mutant("scale dropped", _DECODE, "products * (scale * LOG2E)", "products * LOG2E", _ANY),
    Mutant("scale of keys dropped", _ROWS, "scale = scale * kv.k_scale", "scale = scale * 1", _CODES),
    Mutant("scale of values dropped", _MERGE, "refs.v_scale[head] / jnp", "1 / jnp", _CODES),
    Mutant("merge forgets decay", _MERGE, "acc * spread(decay) +", "acc +", _SPLIT),
    Mutant(
        "merge skips the last partial",
        _MERGE,
        "fori_loop(first, end, merge_item",
        "fori_loop(first, end - 1, merge_item",
        _SPLIT,
    ),
    Mutant("ring not filled again", _MERGE, "        load(item + stages - 1)\n", "", _PARTS),
    Mutant(
        "ring overwritten early",
        _MERGE,
        "load(item + stages - 1)",
        "load(item + stages)",
        _PARTS,
    ),
    Mutant("partials not waited for", _MERGE, "        plgpu.barrier_wait(refs.full.at[slot])\n", "", _ANY),
    Mutant("sink counted twice", _MERGE, "sink > NOTHING, 1.0", "sink > NOTHING, 2.0", _SINKS),
    Mutant(
        "commit of merged rows missing",
        _MERGE,
        "    plgpu.commit_smem()\n    plgpu.copy_smem_to_gmem(refs.out_smem",
        "    plgpu.copy_smem_to_gmem(refs.out_smem",
        _ANY,
    ),
    Mutant("log-sum-exp in base 2", _MERGE, "largest / LOG2E + jnp.log", "largest + jnp.log", _ANY),
    Mutant(
        "visible keys end early",
        _SCHEDULE,
        "end = position + counts if spec.causal",
        "end = position + counts - 1 if spec.causal",
        _ANY,
    ),
]
