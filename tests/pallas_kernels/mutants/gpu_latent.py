"""Faults of the Mosaic GPU kernel over latents, and of the rows that all new tokens are cut into for it."""

from __future__ import annotations

from tests.pallas_kernels.mutants.mutant import Mutant, attention

SECONDS = 60

_LATENT, _DECODE, _MERGE = (f"attention/hopper/{module}" for module in ("latent", "decode", "merge"))
_SCHEDULE = "attention/hopper/schedule"


def _on(*cases: str):
    return attention("mgpu", "bfloat16", *cases)


_ANY = _on("latent decodes")
_RUNS = _on("latent mixed")
_TILES = _on("latent of many heads")

MUTANTS = [
    Mutant("blocks not waited for", _LATENT, "            plgpu.barrier_wait(refs.kv_full.at[slot])\n", "", _ANY),
    Mutant("queries not waited for", _LATENT, "        plgpu.barrier_wait(refs.q_full.at[q_slot])\n", "", _ANY),
    Mutant(
        "block handed back before its values are read",
        _LATENT,
        "            values = refs.kv_smem.at[slot, :, columns]\n",
        "            plgpu.barrier_arrive(refs.kv_free.at[slot])\n"
        "            values = refs.kv_smem.at[slot, :, columns]\n",
        _ANY,
    ),
    Mutant(
        "maxima of the other warpgroup's keys ignored",
        _LATENT,
        "jnp.maximum(maxima, refs.statistics_smem[pl.ds((1 - own) * WARPGROUP_ROWS, WARPGROUP_ROWS)])",
        "maxima",
        _ANY,
    ),
    Mutant(
        "weights taken before they are there",
        _LATENT,
        "            _meet(refs.weights_ready)\n",
        "            plgpu.commit_smem()\n",
        _ANY,
    ),
    Mutant(
        "commit before warpgroups meet missing",
        _LATENT,
        "    plgpu.commit_smem()\n    plgpu.barrier_arrive(barrier)\n",
        "    plgpu.barrier_arrive(barrier)\n",
        _ANY,
    ),
    Mutant("stale values", _LATENT, "        seen = row < end\n", "        seen = row < end + 1\n", _ANY),
    Mutant(
        "zeroed values taken before they are there",
        _LATENT,
        "        _meet(refs.values_ready)",
        "        plgpu.commit_smem()",
        _ANY,
    ),
    Mutant(
        "half of the unseen values not zeroed",
        _LATENT,
        "range(own * shape.columns, (own + 1) * shape.columns, width)",
        "range(own * shape.columns, shape.columns, width)",
        _ANY,
    ),
    Mutant(
        "both warpgroups' keys at the places of the first's",
        _LATENT,
        "edge - (start + own * half)",
        "edge - start",
        _ANY,
    ),
    Mutant(
        "decay dropped", _LATENT, "acc = acc * lax.broadcast_in_dim(decay, acc.shape, [0])", "acc = acc * 1.0", _ANY
    ),
    Mutant(
        "sums of one warpgroup's keys only",
        _LATENT,
        "total = total + refs.statistics_smem[of[1]]",
        "total = total * 2 + 0 * refs.statistics_smem[of[1]]",
        _ANY,
    ),
    Mutant(
        "results still leaving when the next queries come",
        _LATENT,
        "(refs.part_o, refs.part_lse, part))\n    plgpu.wait_smem_to_gmem(0)\n",
        "(refs.part_o, refs.part_lse, part))\n",
        _ANY,
    ),
    Mutant(
        "commit of results missing",
        _LATENT,
        "    plgpu.commit_smem()\n\n    def send(",
        "\n    def send(",
        _ANY,
    ),
    Mutant(
        "tiles of heads read other pages",
        _DECODE,
        "head = lax.div(head, jnp.int32(shape.head_tiles))",
        "head = head * 1",
        _TILES,
    ),
    Mutant(
        "rows begin where their sequence does",
        _SCHEDULE,
        "kv_lens[seq] - q_lens[seq] + first, counts",
        "kv_lens[seq] - q_lens[seq], counts",
        _RUNS,
    ),
    Mutant(
        "last row of a run dropped",
        _SCHEDULE,
        "row_counts = (q_lens + width - 1) // width",
        "row_counts = q_lens // width",
        _RUNS,
    ),
    Mutant(
        "halves of wide rows with the maxima of others",
        _MERGE,
        "jnp.repeat(x, parts, axis=1)",
        "jnp.tile(x, (1, parts))",
        _on("production 16/1 heads of 576, pages of 64"),
    ),
    Mutant(
        "rest of the queries not multiplied",
        _LATENT,
        "(refs.q_smem.at[query_slot], refs.q_rest_smem.at[query_slot])",
        "(refs.q_smem.at[query_slot],)",
        _ANY,
    ),
    Mutant(
        "rest of the queries not waited for",
        _LATENT,
        "num_barriers=queries, num_arrivals=2)",
        "num_barriers=queries)",
        _ANY,
    ),
    Mutant("parts stored as whole pairs", _LATENT, "refs.item_parts[item]\n", "refs.item_parts[item] * 0 - 1\n", _ANY),
    Mutant("merged pairs not put in place", _MERGE, 'o.at[cuts.pairs].set(merged_o, mode="drop")', "o", _ANY),
    Mutant(
        "log-sum-exp of merged pairs not put in place",
        _MERGE,
        '(lse / LOG2E).at[cuts.pairs].set(merged_lse, mode="drop")',
        "lse / LOG2E",
        _ANY,
    ),
    Mutant("last part of a pair not merged", _SCHEDULE, "counts[of], 0), (0, 1)", "counts[of] - 1, 0), (0, 1)", _ANY),
    Mutant("sinks in no denominator", _MERGE, "o * share[..., None]", "o * 1.0", _on("latent window, sinks")),
]
