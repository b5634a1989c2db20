"""The KV pool as the engine asks for it: how large a page of all layers is, and the pool itself.

`layout` is the platform whose kernels read the pool: a name of pallas_kernels.registry, see `platform_of`.
"""

from __future__ import annotations

from typing import Any

import jax

from models.causal_lm import CausalLM
from pallas_kernels.kv_pages import KVPages, alloc, page_bytes
from pallas_kernels.registry import platform_of

__all__ = ["KVPages", "abstract_kv", "make_kv", "page_bytes_all_layers", "platform_of"]


def page_bytes_all_layers(model: CausalLM, page_size: int, dtype: Any, *, layout: str) -> int:
    """Bytes that one page of `page_size` tokens takes, over all layers."""
    return page_bytes(model.kv_spec(1, page_size, dtype), layout) * model.config.num_layers


def make_kv(model: CausalLM, pages_per_layer: int, page_size: int, dtype: Any, *, layout: str) -> KVPages:
    """The flat pool, zeroed; page p of layer l is its row l * pages_per_layer + p."""
    return alloc(model.kv_spec(pages_per_layer, page_size, dtype), layout=layout)


def abstract_kv(model: CausalLM, pages_per_layer: int, page_size: int, dtype: Any, *, layout: str) -> KVPages:
    """The pool's shapes, nothing allocated."""
    return jax.eval_shape(lambda: make_kv(model, pages_per_layer, page_size, dtype, layout=layout))
