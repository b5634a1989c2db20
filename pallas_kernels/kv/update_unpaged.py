"""Keys and values of whole sequences: those of the step are all there are, and nothing else is kept.

`KVPages.data` of this layout is [B * T, K, H + Hv], a token's key followed by its value, or [B * T, K, H] where values
lie in keys. `KVPages.page_size` is T.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxengine.pallas_kernels.kv.pages import KVPages
from jaxengine.pallas_kernels.tuning import Tuning


def kv_update_schedule(slot_mapping: jax.Array, *, page_size: int, tuning: Tuning) -> None:
    """Implement jaxengine.pallas_kernels.kv.update.kv_update_schedule: there is nothing to plan."""
    del slot_mapping, page_size, tuning


def kv_cache_update(
    kv: KVPages, k: jax.Array, v: jax.Array | None, slot_mapping: jax.Array, *, schedule: Any
) -> KVPages:
    """Implement jaxengine.pallas_kernels.kv.update.kv_cache_update."""
    del slot_mapping, schedule
    return replace(kv, data=k if v is None else jnp.concatenate([k, v], axis=-1))
