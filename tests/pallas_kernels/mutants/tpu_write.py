"""Faults of the TPU write of new keys and values."""

from __future__ import annotations

from tests.pallas_kernels.mutants.mutant import Mutant
from tests.pallas_kernels.worker import Job

SECONDS = 40

_UPDATE = "kv/update_tpu"


def _on(*patterns: str, dtype: str = "bfloat16", implementation: str = "tpu-lazy") -> tuple[Job, ...]:
    return tuple(("update", implementation, dtype, pattern) for pattern in patterns)


def _both(*patterns: str) -> tuple[Job, ...]:
    return _on(*patterns) + _on(*patterns, implementation="tpu-eager")


_ANY = _on("runs", "scattered 40")
_MEET = _both("runs that meet")

MUTANTS = [
    Mutant(
        "buffer reused while it is being written",
        _UPDATE,
        "(lambda: wait_write(ahead - in_flight))",
        "(lambda: None)",
        _both("runs"),
    ),
    Mutant(
        "read not waited for",
        _UPDATE,
        "pl.when(length[run] < GROUP)(lambda: read(run, anywhere).wait())",
        "pass",
        _both("runs", "scattered 40"),
    ),
    Mutant("read not started", _UPDATE, "(lambda: read(run, destination(run)).start())", "(lambda: None)", _ANY),
    Mutant("write not started", _UPDATE, "            write(run, destination(run)).start()\n", "", _ANY),
    Mutant(
        "writes not awaited at the end",
        _UPDATE,
        "            wait_write(run)\n\n\ndef",
        "            pass\n\n\ndef",
        _both("runs"),
    ),
    Mutant(
        "full group read all the same",
        _UPDATE,
        "pl.when(stored(run) & (length[run] < GROUP))",
        "pl.when(stored(run))",
        _both("runs"),
    ),
    Mutant(
        "meeting runs overtake",
        _UPDATE,
        "jnp.where(jnp.any(meets), 0, sizes.reads_ahead)",
        "jnp.where(jnp.any(meets), sizes.reads_ahead, sizes.reads_ahead)",
        _MEET,
    ),
    Mutant("run goes on across groups", _UPDATE, "| (slot_mapping % GROUP == 0))", ")", _ANY),
    Mutant(
        "run goes on across a gap", _UPDATE, "(slot_mapping != previous + 1)", "(slot_mapping < previous + 1)", _ANY
    ),
    Mutant(
        "slots outside the pool written",
        _UPDATE,
        "(slot >= 0) & (slot < pool.shape[0] * page_size)",
        "slot >= 0",
        _on("outside the pool"),
    ),
    Mutant("one row too many", _UPDATE, "(index < row + length)", "(index <= row + length)", _ANY),
    Mutant("first row dropped", _UPDATE, "(index >= row) &", "(index > row) &", _ANY),
    Mutant("tokens one late", _UPDATE, "first[run] - row + GROUP -", "first[run] - row + GROUP + 1 -", _ANY),
    Mutant(
        "group off by one",
        _UPDATE,
        "lax.div(lax.rem(slot, page_size), GROUP) * GROUP",
        "lax.div(lax.rem(slot + GROUP, page_size), GROUP) * GROUP",
        _ANY,
    ),
    Mutant(
        "page off by one",
        _UPDATE,
        "pool.at[lax.div(slot, page_size),",
        "pool.at[lax.rem(lax.div(slot, page_size) + 1, 7),",
        _ANY,
    ),
    Mutant("neighbours in the word lost", _UPDATE, "new = old & unchanged", "new = old & jnp.uint32(0)", _ANY),
    Mutant(
        "keys and values swapped",
        _UPDATE,
        "rows_of_tokens(keys, values, kv.spec)",
        "rows_of_tokens(*((keys, None) if values is None else (values, keys)), kv.spec)",
        _ANY,
    ),
    Mutant(
        "scales swapped",
        _UPDATE,
        "to_storage(k, kv.spec, kv.layout, kv.k_scale)",
        "to_storage(k, kv.spec, kv.layout, kv.v_scale)",
        _on("runs", dtype="int8"),
    ),
]
