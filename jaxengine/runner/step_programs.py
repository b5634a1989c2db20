"""What is compiled for a model under a config: the closed set of steps, their arguments as shapes, nothing allocated.

The runner compiles these for the devices it has, `jaxengine check` for devices that are not there. On a mesh a program
is one `jax.shard_map`: each device runs it on its own parts, and what devices exchange is written in the layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxengine.config.engine_config import ResolvedConfig
from jaxengine.config.platforms import Platform
from jaxengine.runner.step import (
    DeviceState,
    SlotState,
    StepSpec,
    init_state,
    make_step,
    own_slots,
    write_page_deltas,
)
from jaxengine.sampling import sampler
from models.cache import KVPages, abstract_kv, kv_partition, page_bytes_of_group
from models.causal_lm import CausalLM
from models.weights.declare import declared_params
from scheduler.buckets import Bucket
from scheduler.packing import Packer
from sharding.collectives import stack_ranks
from sharding.rules import logical_to_spec, whole_shape

_EVERYWHERE = PartitionSpec()
_RANKS = logical_to_spec(("batch",))
_VOCAB = logical_to_spec(("sampled_vocab",))
_RANKS_VOCAB = logical_to_spec(("batch", "sampled_vocab"))
_ROWS_VOCAB = logical_to_spec((None, "sampled_vocab"))


class StepPrograms:
    """The steps of one model, or of one of its pipeline stages: one for each bucket of `packer.buckets`.

    Attributes:
      mesh: the devices.
      groups: cache groups of the whole model, with the layers of this stage.
      layout: of the KV pool.
      num_columns: columns of a page table.
      state_shapes: what is kept between steps, abstract.
      vocab_size: tokens the sampler knows, those that only fill up the last device's part included.
      own_vocab_size: those of one device.
      num_vocab_parts: devices that share the vocabulary.
      stored_mask_words: of the mask of one slot as they store it, one part after the other.
      description: everything static that the shapes do not tell; part of the key of a stored executable.
    """

    def __init__(self, model: CausalLM, config: ResolvedConfig, platform: Platform, mesh: Mesh):
        """model is abstract and made for the mesh; config resolved for the platform."""
        self.model = model
        self.mesh = mesh
        hybrid = not config.disable_hybrid_kv_cache_manager
        self.groups = model.cache_groups(config.block_size, config.kv_cache_dtype, hybrid=hybrid)
        self.layout = platform.name
        self.packer = Packer(config.buckets(platform), config.block_size, model.mesh.num_ranks, len(self.groups))
        # Whole kernel blocks of 128 tokens, so that no implementation needs to clip the last one.
        pages, block_pages = math.ceil(config.max_model_len / config.block_size), max(1, 128 // config.block_size)
        self.num_columns = math.ceil(pages / block_pages) * block_pages
        self.vocab_size = model.mesh.padded_vocab_size(model.config.vocab_size)
        self.num_vocab_parts = model.mesh.num_shards("sampled_vocab")
        self.own_vocab_size = self.vocab_size // self.num_vocab_parts
        self.stored_mask_words = self.num_vocab_parts * sampler.mask_words(self.own_vocab_size)
        self._num_slots = config.max_num_seqs
        self._experts = _count_experts(model)
        self.state_shapes: DeviceState = self._state_shapes()
        self._graph, abstract_params = nnx.split(model)
        self._params_tree = jax.tree.structure(abstract_params)
        self._spec = StepSpec(config.block_size, config.max_logprobs, config.logprobs_mode)
        self.description = repr(
            (model.config, model.mesh, model.stage, config.dtype, self.groups, self.layout, self._spec)
        )

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Of the cache groups: keys that a token sees, None for all."""
        return tuple(group.window for group in self.groups)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page on one device, in all layers of a group."""
        return page_bytes_of_group(self.groups, layout=self.layout)

    def kv_shapes(self, num_pages: int) -> KVPages:
        """The pool of `num_pages` pages per rank, abstract."""
        return abstract_kv(self.groups, num_pages, layout=self.layout, mesh=self.mesh)

    def step(self, bucket: Bucket, kv: KVPages) -> Callable:
        """The function to compile, for a pool as `kv_shapes` gives it; donate arguments 1 and 2."""
        step = make_step(self._graph, self._params_tree, self.packer.layouts[bucket], self._spec)
        stage, kv = self.model.stage, kv_partition(kv)
        params = [logical_to_spec(param.decl.axes) for param in declared_params(self.model)]
        state = self._state_partition()
        arguments = (params, kv, *state, _RANKS, *([] if stage.is_first else [_RANKS]))
        results = (kv, state.slots, _EVERYWHERE if stage.is_last else _RANKS)
        return self._on_devices(step, arguments, results)

    def arguments(self, bucket: Bucket, params: Sequence[Any], kv: KVPages) -> tuple[Any, ...]:
        """Its arguments: params (the model's leaves, arrays or shapes) as shapes with their shardings and layouts."""
        ranks, config = self.model.mesh.num_ranks, self.model.config
        message = self._shape((ranks, self.packer.layouts[bucket].size), np.int32, _RANKS)
        shapes = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.format) for leaf in params]
        hidden = self._shape((ranks * bucket.num_tokens, config.hidden_size), params[0].dtype, _RANKS)
        return shapes, kv, *self.state_shapes, message, *([] if self.model.stage.is_first else [hidden])

    def state_changes(
        self, num_deltas: int, num_rows: int, num_masks: int
    ) -> dict[str, tuple[Callable, tuple[Any, ...]]]:
        """The programs that change the state between steps, by name: (function, arguments after the state).

        All name slots as numbered over all ranks. num_deltas, num_rows, num_masks: how many entries a call
        brings.
        """
        shape = self._shape
        changes = {"page deltas": (_write_deltas, [shape((3, num_deltas), np.int32)])}
        if self.model.stage.is_last:
            ints, floats = shape((num_rows, 3), np.int32), shape((num_rows, 6), np.float32)
            slot, vocab = shape((), np.int32), (self.vocab_size,)
            masks = shape((num_masks, self.stored_mask_words), np.int32, _ROWS_VOCAB)
            changes |= {
                "parameters": (_on_sampling(sampler.write_params), [shape((num_rows,), np.int32), ints, floats]),
                "bias row": (_on_sampling(sampler.set_bias_row), [slot, shape(vocab, np.float32, _VOCAB)]),
                "mask rows": (_on_sampling(sampler.set_mask_rows), [shape((num_masks,), np.int32), masks]),
                "counts row": (_set_counts, [slot, shape(vocab, np.int32, _VOCAB)]),
            }
        partition = self._state_partition()
        return {
            name: (
                self._on_devices(change, (partition, *(leaf.sharding.spec for leaf in arguments)), partition),
                tuple(arguments),
            )
            for name, (change, arguments) in changes.items()
        }

    def _on_devices(self, function: Callable, arguments: Any, results: Any) -> Callable:
        if self.mesh.size == 1:
            return function
        return jax.shard_map(function, mesh=self.mesh, in_specs=arguments, out_specs=results, check_vma=False)

    def _shape(self, shape: tuple[int, ...], dtype: Any, spec: PartitionSpec = _EVERYWHERE) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(self.mesh, spec))

    def _state_partition(self) -> DeviceState:
        """PartitionSpecs in the places of arrays."""
        ranks: Any = _RANKS
        counts: Any = None
        sampling = None
        if self.model.stage.is_last:
            counts = _RANKS_VOCAB
            parameters = [ranks] * len(sampler.SamplingState._fields)
            sampling = sampler.SamplingState(*parameters)._replace(logit_bias=counts, token_mask=counts)
        return DeviceState(SlotState(ranks, ranks, ranks, counts, None if self._experts is None else ranks), sampling)

    def _own_state(self) -> DeviceState:
        vocab_size = self.own_vocab_size if self.model.stage.is_last else None
        return init_state(self._num_slots, self.num_columns, vocab_size, self._experts, len(self.groups))

    def _state_shapes(self) -> DeviceState:
        def whole(leaf: Any, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
            return self._shape(whole_shape(leaf.shape, NamedSharding(self.mesh, spec)), leaf.dtype, spec)

        return jax.tree.map(whole, jax.eval_shape(self._own_state), self._state_partition())

    def gather_ranks(self, x: jax.Array) -> jax.Array:
        """x [ranks, ...], a part on each rank, on every device."""
        gather = self._on_devices(lambda part: stack_ranks(part[0]), (_RANKS,), _EVERYWHERE)
        return jax.jit(gather)(x)

    def make_state(self) -> DeviceState:
        """What is kept, before the first request."""
        make = self._on_devices(self._own_state, (), self._state_partition())
        shardings = jax.tree.map(lambda leaf: leaf.sharding, self.state_shapes)
        return jax.jit(make, out_shardings=shardings)()


def _count_experts(model: CausalLM) -> tuple[int, int] | None:
    """Layers with experts in this stage, and the experts of a layer; None where there are none."""
    experts = model.config.experts
    if experts is None:
        return None
    num_layers = sum(layer not in experts.dense_layers for layer in model.stage.layers)
    return (num_layers, experts.num_experts) if num_layers else None


def _write_deltas(state: DeviceState, deltas: jax.Array) -> DeviceState:
    deltas = deltas.at[0].set(own_slots(deltas[0], state.slots.page_table.shape[0]))
    return state._replace(slots=write_page_deltas(state.slots, deltas))


def _set_counts(state: DeviceState, slot: jax.Array, row: jax.Array) -> DeviceState:
    assert state.slots.token_counts is not None
    counts = sampler.set_row(state.slots.token_counts, _own(state, slot), row)
    return state._replace(slots=state.slots._replace(token_counts=counts))


def _on_sampling(function: Callable) -> Callable:
    """A change of the sampling parameters of some slots as a change of all that is kept."""

    def change(state: DeviceState, slots: jax.Array, *arguments: jax.Array) -> DeviceState:
        return state._replace(sampling=function(state.sampling, _own(state, slots), *arguments))

    return change


def _own(state: DeviceState, slots: jax.Array) -> jax.Array:
    return own_slots(slots, state.slots.last_token.shape[0])
