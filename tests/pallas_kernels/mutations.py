"""Faults planted in the XLA kernel, its schedule and the KV update, each of which the conformance cases must catch.

    python -m tests.pallas_kernels.mutations

A mutation replaces one piece of a module's source; the result is executed as a module of its own and run through the
quick cases until one fails. A pattern that no longer occurs exactly once is an error: the gate must not rot silently.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import jax

from pallas_kernels import kv_update_xla, paged_attention_schedule, paged_attention_xla
from tests.pallas_kernels.cases import QUICK
from tests.pallas_kernels.conformance import Implementation, check_attention, check_update

ORIGINAL = Implementation(
    "cpu", paged_attention_schedule.attention_schedule, paged_attention_xla.ragged_paged_attention
)


class Mutation(NamedTuple):
    name: str
    module: ModuleType
    old: str
    new: str
    cases: tuple[str, ...]  # quick cases, in the order in which they are tried


_ALL = ("mixed", "q tile straddles a kv block")
MUTATIONS = [
    Mutation("causal sees one too many", paged_attention_schedule, "position + 1 if", "position + 2 if", _ALL),
    Mutation("causal drops the last key", paged_attention_schedule, "position + 1 if", "position if", _ALL),
    Mutation("first key dropped", paged_attention_schedule, "jnp.zeros_like(end)", "jnp.ones_like(end)", _ALL),
    Mutation(
        "window one too wide", paged_attention_schedule, "end - spec.window", "end - spec.window - 1", ("window 16",)
    ),
    Mutation(
        "window one too narrow", paged_attention_schedule, "end - spec.window", "end - spec.window + 1", ("window 16",)
    ),
    Mutation(
        "last kv block skipped",
        paged_attention_schedule,
        "high, axis=-1), block_kv) - 1",
        "high, axis=-1), block_kv) - 2",
        ("block edges",),
    ),
    Mutation(
        "block past the end walked as whole",
        paged_attention_schedule,
        "jnp.min(high // block_kv, axis=-1)",
        "jnp.max(_ceil_div(high, block_kv), axis=-1)",
        _ALL,
    ),
    Mutation(
        "last sequence forgotten",
        paged_attention_schedule,
        "< batch.num_seqs\n    q_lens",
        "< batch.num_seqs - 1\n    q_lens",
        _ALL,
    ),
    Mutation(
        "tile follows the wrong sequence",
        paged_attention_schedule,
        "index[:, None] >= ends",
        "index[:, None] > ends",
        _ALL,
    ),
    Mutation(
        "decode bucket: token of the wrong sequence",
        paged_attention_schedule,
        "tokens[:, None] >= batch",
        "tokens[:, None] > batch",
        ("runs in a decode bucket",),
    ),
    Mutation("wrong page", paged_attention_xla, "block * block_pages + jnp", "block * block_pages + 1 + jnp", _ALL),
    Mutation(
        "values read as keys",
        paged_attention_xla,
        "return _gather_columns(flat, rows, 0, key_width), ",
        "return _gather_columns(flat, rows, key_width, value_width), ",
        _ALL,
    ),
    Mutation(
        "head map off by one",
        paged_attention_xla,
        "num_kv_heads + heads[:, None]",
        "num_kv_heads + (heads[:, None] + 1) % num_kv_heads",
        _ALL,
    ),
    Mutation("scale dropped", paged_attention_xla, " * step.scale[:, None, None]", "", _ALL),
    Mutation("scale 5 % too large", paged_attention_xla, "spec.sm_scale, jnp", "1.05 * spec.sm_scale, jnp", _ALL),
    Mutation(
        "accumulator not decayed", paged_attention_xla, "acc * decay[..., None] +", "acc +", ("block edges", *_ALL)
    ),
    Mutation(
        "state not reset between tiles", paged_attention_xla, "jnp.where(is_first, fresh, running)", "running", _ALL
    ),
    Mutation(
        "unseen values not zeroed",
        paged_attention_xla,
        "jnp.where(in_use, values.reshape(shape), 0)",
        "values.reshape(shape)",
        _ALL,
    ),
    Mutation("soft cap not scaled back", paged_attention_xla, "cap * jnp.tanh", "jnp.tanh", ("soft cap 30",)),
    Mutation("sinks forgotten", paged_attention_xla, "else sinks\n", "else sinks - jnp.inf\n", ("sinks and window",)),
    Mutation("tree bits shifted", paged_attention_xla, "(new % 32)", "((new + 1) % 32)", ("tree branches",)),
    Mutation(
        "run written one token late",
        paged_attention_xla,
        "tiles.tokens[tile, 0], axis=1",
        "tiles.tokens[tile, 0] + 1, axis=1",
        _ALL,
    ),
    Mutation(
        "padding written to slot 0",
        kv_update_xla,
        "jnp.where(slot_mapping < 0, num_pages,",
        "jnp.where(slot_mapping < 0, 0,",
        (),
    ),
    Mutation(
        "padding wraps to the last page",
        kv_update_xla,
        "jnp.where(slot_mapping < 0, num_pages,",
        "jnp.where(slot_mapping < 0, num_pages - 1,",
        (),
    ),
    Mutation(
        "values in the next slot",
        kv_update_xla,
        "+ offset * spec.v_head_dim",
        "+ (offset + 1) % spec.page_size * spec.v_head_dim",
        (),
    ),
    Mutation(
        "keys written as values",
        kv_update_xla,
        "to_storage(v, spec, kv.layout, kv.v_scale)",
        "to_storage(v * 0 + 1, spec, kv.layout, kv.v_scale)",
        (),
    ),
]


def mutated(mutation: Mutation) -> Implementation:
    """The implementation with the mutation planted; ValueError if its pattern does not occur exactly once."""
    spec = mutation.module.__spec__
    assert spec is not None and spec.origin is not None
    source = Path(spec.origin).read_text()
    if source.count(mutation.old) != 1:
        raise ValueError(
            f"mutation {mutation.name!r}: pattern occurs {source.count(mutation.old)} times in {spec.name}"
        )
    module = ModuleType(f"{spec.name}_mutated")
    sys.modules[module.__name__] = module  # dataclasses and NamedTuples look their module up
    try:
        exec(compile(source.replace(mutation.old, mutation.new), spec.origin, "exec"), module.__dict__)
    finally:
        del sys.modules[module.__name__]
    field, function = {
        paged_attention_schedule: ("schedule", "attention_schedule"),
        paged_attention_xla: ("attend", "ragged_paged_attention"),
        kv_update: ("update", "kv_cache_update"),
    }[mutation.module]
    return replace(ORIGINAL, name=mutation.name, **{field: getattr(module, function)})


def killer(mutation: Mutation) -> str | None:
    """The check that catches the mutation, None if it survives."""
    implementation = mutated(mutation)
    by_name = {case.name: case for case in QUICK}
    for name in mutation.cases:
        for family in ("uniform", "needle", "normal"):
            if fails(check_attention, by_name[name], "float32", family, implementation):
                return f"{name} {family}"
    if mutation.module is kv_update and fails(check_update, "float32", 9, implementation):
        return "update"
    return None


def fails(check: Callable[..., None], *args: object) -> bool:
    try:
        check(*args)
    except AssertionError:
        return True
    return False


def main() -> int:
    survivors = 0
    for mutation in MUTATIONS:
        start = time.perf_counter()
        caught_by = killer(mutation)
        survivors += caught_by is None
        print(f"{mutation.name:46s} {caught_by or 'SURVIVED':44s} {time.perf_counter() - start:5.1f} s", flush=True)
        jax.clear_caches()
    print(f"{len(MUTATIONS) - survivors} of {len(MUTATIONS)} caught")
    return survivors


if __name__ == "__main__":
    sys.exit(main())
