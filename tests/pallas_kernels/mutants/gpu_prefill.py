"""Faults of the Mosaic GPU prefill kernel and of the warpgroup that feeds it."""

from __future__ import annotations

from tests.pallas_kernels.mutants.mutant import Mutant, attention

SECONDS = 45

_PREFILL = "attention/hopper/prefill*"


def _on(*cases: str):
    return attention("mgpu", "bfloat16", *cases)


_ANY = _on("q tile straddles a kv block")
_LONG = _on("long runs")
_WINDOW = _on("window 16")
_SINKS = _on("sinks and window")
_CODES = _on("fp8 e4m3 keys and values")

MUTANTS = [
    Mutant("keys not waited for", _PREFILL, "    plgpu.barrier_wait(refs.k_full.at[slot])\n", "", _ANY),
    Mutant("values not waited for", _PREFILL, "    plgpu.barrier_wait(refs.v_full.at[slot])\n", "", _ANY),
    Mutant("queries not waited for", _PREFILL, "    plgpu.barrier_wait(refs.q_full.at[warpgroup])\n", "", _ANY),
    Mutant(
        "keys or values overwritten early", _PREFILL, "@pl.when(step + block >= stages)", "@pl.when(step < 0)", _LONG
    ),
    Mutant("queries overwritten early", _PREFILL, "pl.when(index > 0)(", "pl.when(index < 0)(", _ANY),
    Mutant("masked values not waited for", _PREFILL, "        plgpu.barrier_wait(refs.raw_full)\n", "", _ANY),
    Mutant(
        "commit of masked values missing",
        _PREFILL,
        "        plgpu.commit_smem()\n        for _box",
        "        for _box",
        _ANY,
    ),
    Mutant(
        "commit of widened values missing",
        _PREFILL,
        "        plgpu.commit_smem()\n        plgpu.barrier_arrive(full)",
        "        plgpu.barrier_arrive(full)",
        _CODES,
    ),
    Mutant(
        "commit of results missing",
        _PREFILL,
        "        plgpu.commit_smem()\n        if column",
        "        if column",
        _ANY,
    ),
    Mutant(
        "results overwritten while they leave",
        _PREFILL,
        "        plgpu.wait_smem_to_gmem(0)\n        if column",
        "        if column",
        _ANY,
    ),
    Mutant(
        "values handed back before they are read",
        _PREFILL,
        "    acc = add(plgpu",
        "    plgpu.barrier_arrive(refs.v_free.at[slot])\n    acc = add(plgpu",
        _ANY,
    ),
    Mutant(
        "keys handed back twice",
        _PREFILL,
        "    _take_turn(refs)\n        return",
        "    plgpu.barrier_arrive(refs.k_free.at[slot])\n        _take_turn(refs)\n        return",
        _ANY,
    ),
    Mutant("block repeated", _PREFILL, "tile.first_box + block * shape", "tile.first_box + (block // 2) * shape", _ANY),
    Mutant("page off by one", _PREFILL, "tile.seq, lax.div(box, boxes", "tile.seq, lax.div(box + 1, boxes", _ANY),
    Mutant("page table read past the end", _PREFILL, "lax.div(tile.end - 1, jnp", "lax.div(tile.end + 99, jnp", _ANY),
    Mutant("keys and values swapped", _PREFILL, "tile.kv_head) * 2 + kind", "tile.kv_head) * 2 + 1 - kind", _ANY),
    Mutant("wrong query head", _PREFILL, "tile.group * shape.heads + head]", "tile.group * shape.heads]", _ANY),
    Mutant("causal sees one too many", _PREFILL, "key <= position\n", "key <= position + 1\n", _ANY),
    Mutant("causal drops the last key", _PREFILL, "key <= position\n", "key < position\n", _ANY),
    Mutant("whole blocks end one late", _PREFILL, "(tile.position + 1 if", "(tile.position + 64 if", _ANY),
    Mutant(
        "window ignored for whole blocks",
        _PREFILL,
        "        hidden = jnp.maximum(tile.position + tile.num_rows - spec.window - begin, 0)\n",
        "        hidden = jnp.int32(0)\n",
        _on("window 400 of 900"),
    ),
    Mutant("window one too wide", _PREFILL, "key > position - spec", "key >= position - spec", _WINDOW),
    Mutant("stale values", _PREFILL, "keep = row < end\n", "keep = row < end + 1\n", _ANY),
    Mutant(
        "unwritten values of the last block kept",
        _PREFILL,
        "has_unwritten = end < shape",
        "has_unwritten = end < 0 * shape",
        _ANY,
    ),
    Mutant(
        "decay dropped", _PREFILL, "acc = acc * lax.broadcast_in_dim(decay, acc.shape, [0])", "acc = acc * 1.0", _ANY
    ),
    Mutant("scale dropped", _PREFILL, "spec.sm_scale * LOG2E)", "LOG2E)", _ANY),
    Mutant("scale of keys dropped", _PREFILL, "scale = scale * refs.scales[tile.kv_head]", "scale = scale * 1", _CODES),
    Mutant("scale of keys for values", _PREFILL, "scales[shape.spec.num_kv_heads + tile", "scales[tile", _CODES),
    Mutant("sink counted twice", _PREFILL, "jnp.exp2(sink - new", "2 * jnp.exp2(sink - new", _SINKS),
    Mutant(
        "neighbour's rows overwritten",
        _PREFILL,
        "tile.token + tile.num_rows - first",
        "tile.token + tile.num_rows + 1 - first",
        _on("single tokens behind runs", "q tile straddles a kv block"),
    ),
    Mutant(
        "last row not stored",
        _PREFILL,
        "tile.token + tile.num_rows - first",
        "tile.token + tile.num_rows - 1 - first",
        _ANY,
    ),
    Mutant("log-sum-exp in base 2", _PREFILL, "largest * (1 / LOG2E) + jnp.log", "largest + jnp.log", _ANY),
]
