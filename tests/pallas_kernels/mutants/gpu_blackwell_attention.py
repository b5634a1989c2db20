"""Faults of the warpgroups that attend on Blackwell cards; loads and stores are `gpu_decode`'s and `gpu_prefill`'s."""

from __future__ import annotations

from tests.pallas_kernels.findings import NO_TCGEN05
from tests.pallas_kernels.mutants.mutant import Mutant, attention

SECONDS = 60
UNLESS = NO_TCGEN05

_DECODE, _PREFILL, _SUMS = "attention/blackwell/decode", "attention/blackwell/prefill", "attention/blackwell/sums"


def _on(*cases: str):
    return attention("mgpu-blackwell-attention", "bfloat16", *cases)


_ROWS, _CODES, _RUNS = _on("decode bucket"), _on("codes of decodes"), _on("q tile straddles a kv block")
_LOADED = "    plgpu.wait_load_tmem()\n    if shape.converts"

MUTANTS = [
    Mutant("blocks not waited for", _DECODE, "        plgpu.barrier_wait(refs.kv_full.at[slot])\n", "", _ROWS),
    Mutant("queries not waited for", _DECODE, "        plgpu.barrier_wait(refs.q_full.at[q_slot])\n", "", _ROWS),
    Mutant("scores read before they are made", _DECODE, "    plgpu.barrier_wait(refs.scored)\n", "", _ROWS),
    Mutant("scores overwritten as they are read", _DECODE, _LOADED, "    if shape.converts", _ROWS),
    Mutant("weights overwritten as they are read", _DECODE, "    if not shape.converts:", "    if False:", _ROWS),
    Mutant("sums read before they are made", _DECODE, "        plgpu.barrier_wait(refs.added)\n", "", _ROWS),
    Mutant("weights not committed", _DECODE, "    plgpu.commit_smem()\n", "", _ROWS),
    Mutant("sums that nothing began", _DECODE, "accumulate=block > first_block", "accumulate=True", _ROWS),
    Mutant("last block alone", _DECODE, "accumulate=block > first_block", "accumulate=False", _ROWS),
    Mutant("widened where it is multiplied", _DECODE, "    if shape.converts:  #", "    if False:  #", _CODES),
    Mutant(
        "one bank of widened blocks",
        _DECODE,
        "jnp.int32(blocks)), lax.rem(step + block, jnp.int32(2))",
        "jnp.int32(blocks)), 0",
        _CODES,
    ),
    Mutant("values of the other bank", _DECODE, "(bank * 2 if", "(2 - bank * 2 if", _CODES),
    Mutant("keys for values", _DECODE, "* DECODE_KEYS + DECODE_KEYS, DECODE_KEYS", "* DECODE_KEYS, DECODE_KEYS", _ROWS),
    Mutant(
        "sums keep their scale",
        _DECODE,
        "scale_sums(refs.o_tmem, decay)",
        "scale_sums(refs.o_tmem, decay * 0 + 1)",
        _ROWS,
    ),
    Mutant("total keeps its scale", _DECODE, "total * decay + weights", "total + weights", _ROWS),
    Mutant(
        "scale of keys dropped",
        _DECODE,
        "scale = refs.scale[refs.items[item, DECODE_HEAD]]",
        "scale = shape.spec.sm_scale",
        _CODES,
    ),
    Mutant("ring begins anew with each item", _DECODE, "return step + end_block - first_block", "return step", _ROWS),
    Mutant("mask of the next block", _DECODE, "edges = (edge - block *", "edges = (edge - (block + 1) *", _ROWS),
    Mutant(
        "every piece the first's columns",
        _SUMS,
        "sums.at[:, pl.ds(first, end - first)])",
        "sums.at[:, pl.ds(0, end - first)])",
        _ROWS,
    ),
    Mutant("piece not awaited", _SUMS, "    plgpu.wait_load_tmem()\n", "", _ROWS),
    Mutant("scaled sums not committed", _SUMS, "    plgpu.commit_tmem()\n", "", _ROWS),
    Mutant("keys of runs not waited for", _PREFILL, "        plgpu.barrier_wait(own.k_full.at[slot])\n", "", _RUNS),
    Mutant("values of runs not waited for", _PREFILL, "    plgpu.barrier_wait(own.v_full.at[slot])\n", "", _RUNS),
    Mutant("scores of runs read before they are made", _PREFILL, "    plgpu.barrier_wait(own.scored)\n", "", _RUNS),
    Mutant("scores of runs overwritten as they are read", _PREFILL, "    plgpu.wait_load_tmem()\n", "", _RUNS),
    Mutant(
        "weights of runs overwritten as they are read",
        _PREFILL,
        "        plgpu.barrier_wait(own.added)  #",
        "        pass  #",
        _RUNS,
    ),
    Mutant("weights of runs not committed", _PREFILL, "    plgpu.commit_smem()\n", "", _RUNS),
    Mutant("sums of runs that nothing began", _PREFILL, "accumulate=block > 0", "accumulate=True", _RUNS),
    Mutant("last block of runs alone", _PREFILL, "accumulate=block > 0", "accumulate=False", _RUNS),
    Mutant("end of a tile not waited for", _PREFILL, "block + 1 == tile.num_blocks", "block < 0", _RUNS),
    Mutant(
        "rows of the first warpgroup for both",
        _PREFILL,
        "rows = pl.ds(warpgroup * shape",
        "rows = pl.ds(0 * shape",
        _RUNS,
    ),
    Mutant(
        "sums of both warpgroups in one place", _PREFILL, "pl.ds(warpgroup * count, count)", "pl.ds(0, count)", _RUNS
    ),
    Mutant(
        "sums of runs keep their scale",
        _PREFILL,
        "scale_sums(own.o_tmem, decay)",
        "scale_sums(own.o_tmem, decay * 0 + 1)",
        _RUNS,
    ),
]
