"""What is compiled for a model under a config: the closed set of steps, their arguments as shapes, nothing allocated.

The runner compiles these for the devices it has, `jaxengine check` for devices that are not there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from jaxengine.config import Platform, ResolvedConfig
from jaxengine.step import SlotState, StepSpec, init_state, make_step
from models.causal_lm import CausalLM
from models.kv_cache import KVPages, abstract_kv, page_bytes_all_layers
from scheduler.buckets import Bucket
from scheduler.packing import Packer


class StepPrograms:
    """The steps of one model, one for each bucket of `packer.buckets`.

    Attributes:
      num_columns: columns of the page table.
      paging: page_size, dtype and layout of the KV pool, as models.kv_cache takes them.
      state_shapes: the slot state, abstract.
      description: everything static that the shapes do not tell; part of the key of a stored executable.
    """

    def __init__(self, model: CausalLM, config: ResolvedConfig, platform: Platform):
        """model is abstract; config resolved for the platform."""
        self.model = model
        self.packer = Packer(config.buckets(platform), config.block_size)
        self.paging: dict[str, Any] = {
            "page_size": config.block_size,
            "dtype": config.kv_cache_dtype,
            "layout": platform.name,
        }
        # Whole kernel blocks of 128 tokens, so that no implementation needs to clip the last one.
        pages, block_pages = math.ceil(config.max_model_len / config.block_size), max(1, 128 // config.block_size)
        self.num_columns = math.ceil(pages / block_pages) * block_pages
        vocab_size = model.config.vocab_size
        self.state_shapes: SlotState = jax.eval_shape(
            lambda: init_state(config.max_num_seqs, self.num_columns, vocab_size)
        )
        self._graph, abstract_params = nnx.split(model)
        self._params_tree = jax.tree.structure(abstract_params)
        self._spec = StepSpec(config.block_size, config.max_logprobs, config.logprobs_mode)
        self.description = repr((model.config, config.dtype, self.paging, self._spec))

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all layers."""
        return page_bytes_all_layers(self.model, **self.paging)

    def kv_shapes(self, num_pages: int) -> KVPages:
        """The pool of `num_pages` pages per layer, abstract."""
        return abstract_kv(self.model, num_pages, **self.paging)

    def step(self, bucket: Bucket) -> Callable:
        """The function to compile; donate arguments 1 and 2."""
        return make_step(self._graph, self._params_tree, self.packer.layouts[bucket], self._spec)

    def arguments(self, bucket: Bucket, params: Sequence[Any], kv: KVPages) -> tuple[Any, ...]:
        """Its arguments: params (the model's leaves, arrays or shapes) as shapes that keep their shardings."""
        message = jax.ShapeDtypeStruct((self.packer.layouts[bucket].size,), np.int32)
        shapes = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding) for leaf in params]
        return shapes, kv, self.state_shapes, message
