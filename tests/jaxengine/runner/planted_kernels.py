"""Kernels with planted faults: plain XLA in the place of kernels, wrong as `FAULTS` says, for platform "cpu"."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxengine.pallas_kernels import registry
from jaxengine.pallas_kernels.attention.xla import attend, schedule
from jaxengine.pallas_kernels.kv import update_xla
from jaxengine.pallas_kernels.matmul.cpu import dense

KIND = "planted"
FAULTS: dict[str, str] = {}
attention_schedule = schedule.attention_schedule
kv_update_schedule = update_xla.kv_update_schedule
OPS = ("attention_schedule", "ragged_paged_attention", "kv_update_schedule", "kv_cache_update", "matmul")


def ragged_paged_attention(q, kv, batch, schedule, *, spec, **options: Any) -> Any:
    if FAULTS.get("attention") == "wrong scale":
        spec = replace(spec, sm_scale=1.3 * spec.sm_scale)
    return attend.ragged_paged_attention(q, kv, batch, schedule, spec=spec, **options)


def kv_cache_update(kv, k, v, slot_mapping, *, schedule) -> Any:
    if FAULTS.get("update") == "does not compile":
        raise NotImplementedError("no lowering of this primitive")
    return update_xla.kv_cache_update(kv, k, v, slot_mapping, schedule=schedule)


def matmul(x: jax.Array, weight: jax.Array, *, contract: int = 0) -> jax.Array:
    y = dense.matmul(x, weight, contract=contract)
    if FAULTS.get("matmul") == "NaN at one shape" and len(x) == 32 and y.shape[1] == 64:
        return y.at[-1, -1].set(jnp.nan)
    if FAULTS.get("matmul") == "slow":
        return jax.lax.fori_loop(0, 200, lambda i, y: y * 0.5 + 0.5 * dense.matmul(x, weight, contract=contract), y)
    return y


def plant(monkeypatch, **faults: str) -> None:
    """Make the kernels of this module those of CPUs, with these faults by operation, until the test ends."""
    monkeypatch.setitem(sys.modules, "jaxengine.pallas_kernels.planted", sys.modules[__name__])
    kinds = (KIND, *registry.PLATFORMS["cpu"].kinds)
    monkeypatch.setitem(registry.PLATFORMS, "cpu", replace(registry.PLATFORMS["cpu"], kinds=kinds))
    monkeypatch.setitem(registry._KINDS, "cpu", kinds)
    for op in OPS:
        monkeypatch.setitem(registry._ROWS, (op, KIND), KIND)
    monkeypatch.setattr(sys.modules[__name__], "FAULTS", faults)
