"""Faults of sparse attention in Triton kernels: lists of slots, parts of them, what is added up."""

from __future__ import annotations

from tests.pallas_kernels.mutants.mutant import Mutant
from tests.pallas_kernels.worker import Job

SECONDS = 45

_SELECTED = "attention/triton/selected"


def _on(*cases: str) -> tuple[Job, ...]:
    return tuple(("attention_to_selected", "triton", case) for case in cases)


_SINKS, _NEAR, _HEADS = _on("keys, mixed, with sinks"), _on("keys of decodes, near each other"), _on("blocks, mixed")
_CODES = _on("keys, codes")

MUTANTS = [
    Mutant("page of the slot before", _SELECTED, "slot // plan.page_size,", "(slot - 1) // plan.page_size,", _SINKS),
    Mutant("slot of the page's start", _SELECTED, "slot % plan.page_size * plan.stride", "slot * 0", _SINKS),
    Mutant(
        "slots of the table's first page", _SELECTED, "positions // page_size, axis=1", "positions * 0, axis=1", _NEAR
    ),
    Mutant("unused slots read", _SELECTED, "positions % page_size, -1)", "positions % page_size, 0)", _SINKS),
    Mutant("padding attends", _SELECTED, "(positions >= 0) & (ends > 0)", "(positions >= 0) & (ends > -1)", _SINKS),
    Mutant("keys after the token's own", _SELECTED, "(positions < ends[", "(positions <= ends[", _HEADS),
    Mutant(
        "unused blocks attended to",
        _SELECTED,
        "blocks[..., None] * size + jnp.arange(size, dtype=jnp.int32)\n        seen = (blocks >= 0)[",
        "jnp.maximum(blocks, 0)[..., None] * size + jnp.arange(size, dtype=jnp.int32)\n        seen = (blocks >= -1)[",
        _HEADS,
    ),
    Mutant("blocks one too short", _SELECTED, "blocks[..., None] * size +", "blocks[..., None] * (size - 1) +", _HEADS),
    Mutant(
        "queries of the token before",
        _SELECTED,
        "token, head = entry // spec.num_kv_heads,",
        "token, head = jnp.maximum(entry // spec.num_kv_heads - 1, 0),",
        _HEADS,
    ),
    Mutant("keys of the first head for all", _SELECTED, "refs.pool, page, head,", "refs.pool, page, head * 0,", _HEADS),
    Mutant("queries of another head", _SELECTED, "head * spec.group_size + lane", "head + lane", _HEADS),
    Mutant("queries of the first heads for all", _SELECTED, "pl.program_id(1) * plan.rows", "0 * plan.rows", _NEAR),
    Mutant("a value in place of the rest of a key", _SELECTED, "start + first, width", "start, width", _SINKS),
    Mutant("keys for values", _SELECTED, "else (key, inner)", "else (0, inner)", _HEADS),
    Mutant("keys of the first part for all", _SELECTED, "first = part * plan.part", "first = 0 * plan.part", _NEAR),
    Mutant("first block of a part for all", _SELECTED, "first + block * plan.block", "first + 0 * block", _NEAR),
    Mutant("a list of one key is none", _SELECTED, "(listed >= 0, number + 1, 0)", "(listed >= 0, number, 0)", _NEAR),
    Mutant("the last block left out", _SELECTED, "pl.cdiv(stop, plan.block)", "stop // plan.block", _NEAR),
    Mutant("scale dropped", _SELECTED, "products * scale, -jnp.inf", "products, -jnp.inf", _SINKS),
    Mutant("powers of e for powers of two", _SELECTED, "refs.scale[0] * LOG2E", "refs.scale[0]", _SINKS),
    Mutant("unused keys have weight", _SELECTED, "jnp.where(seen[None], ", "jnp.where(seen[None] | True, ", _SINKS),
    Mutant("decay of sums dropped", _SELECTED, "acc * decay[:, None] + plt.dot", "acc + plt.dot", _NEAR),
    Mutant("decay of totals dropped", _SELECTED, "total * decay + jnp.sum", "total + jnp.sum", _NEAR),
    Mutant("parts of equal weight", _SELECTED, "jnp.exp2(most - top), 0.0)", "1.0, 0.0)", _NEAR),
    Mutant(
        "sums of empty parts added",
        _SELECTED,
        "live[part], sums[part], 0.0",
        "live[part] | True, sums[part], 0.0",
        _NEAR,
    ),
    Mutant("sinks in powers of e", _SELECTED, "jnp.maximum(sinks * LOG2E,", "jnp.maximum(sinks,", _SINKS),
    Mutant("sinks not in the denominator", _SELECTED, "jnp.where(sinks > NOTHING,", "jnp.where(sinks > 1e30,", _SINKS),
    Mutant("scale of keys' codes dropped", _SELECTED, "scale * kv.k_scale[:1]", "scale", _CODES),
    Mutant("scale of values' codes dropped", _SELECTED, "else o * scale[0]", "else o", _CODES),
]
