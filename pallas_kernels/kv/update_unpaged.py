"""Keys and values of whole sequences without pages: the step has all of them, and nothing is kept after it.

`KVPages.data` of this layout is [B * T, K, H + Hv], a token's key followed by its value, or [B * T, K, H] where values
lie in keys. `KVPages.page_size` is T.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxengine.pallas_kernels.kv.pages import KVPages


def kv_cache_update(
    kv: KVPages, k: jax.Array, v: jax.Array | None, slot_mapping: jax.Array, *, schedule: Any
) -> KVPages:
    """Return a pool like `kv` whose data is k [B * T, K, H] joined with v [B * T, K, Hv] along the last axis, or k
    alone if v is None. The old data is dropped. slot_mapping and schedule are not used.
    """
    del slot_mapping, schedule
    return replace(kv, data=k if v is None else jnp.concatenate([k, v], axis=-1))
