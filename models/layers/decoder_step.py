"""DecoderStep: what a decoder's layers get in a step besides the hidden states.

Each layer gets the pages of its cache group or the rows of its state, and the inputs that all layers with the same kind
of attention share. Sections of the batch act between the layers. The forward pass itself is in decoder.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from jaxengine.models.build import Build
from jaxengine.models.cache import (
    Cache,
    LayerLocation,
    Paged,
    State,
    as_stored,
    as_viewed,
    first_page,
    layer_locations,
    num_pages_of,
    of_layer,
    paged_groups,
    row_step,
)
from jaxengine.models.config.attention import LayerAttention
from jaxengine.models.config.model_config import ModelConfig
from jaxengine.models.forward_batch import ForwardBatch
from jaxengine.models.layers.attention.attention import POSITIONS, SCHEDULE, TEMPERATURE, LayerPages, StepInputs
from jaxengine.models.layers.attention.blocks.token_blocks import BLOCKS
from jaxengine.models.layers.attention.mla_expanded import EXPANDED_ROWS
from jaxengine.models.layers.base.rope import ROPE
from jaxengine.models.layers.base.rows import step_rows
from jaxengine.models.layers.base.section import Note, SelectedKeys, key_limits_of, notes_of, sections_of
from jaxengine.models.layers.base.step_inputs import StepContext
from jaxengine.pallas_kernels.attention.op import RaggedBatch
from jaxengine.pallas_kernels.kv.pages import KVPages
from jaxengine.pallas_kernels.kv.update import kv_update_schedule
from jaxengine.pallas_kernels.registry import UNPAGED
from jaxengine.sharding.stages import Stage

# The makers of all fields of StepInputs except `rows`.
STEP_INPUTS = {
    "rope": ROPE,
    "schedule": SCHEDULE,
    "temperature": TEMPERATURE,
    "expanded": EXPANDED_ROWS,
    "blocks": BLOCKS,
    "positions": POSITIONS,
}


class DecoderLayer(Protocol):
    """One layer of a family, an nnx.Module.

    A layer that keeps states gets its arrays [R, ...] in place of the pool, and StateRows in place of pages. If it
    attends as well, it gets a pair of pool and arrays, and a pair of pages and StateRows. A layer that only has a
    feed-forward part gets () for both.
    """

    def __call__(self, x: jax.Array, kv: KVPages, pages: LayerPages, step: StepInputs) -> tuple[jax.Array, KVPages]:
        """Map x [T, D] to ([T, D], the pool with this step's keys and values of this layer written)."""
        ...


class DecoderStep:
    """Runner of the layers of one stage in one step, in order and within one trace. It holds the cache, which each
    layer updates.
    """

    def __init__(
        self, config: ModelConfig, build: Build, groups: Sequence[Paged | State], batch: ForwardBatch, kv: Any
    ):
        """Compute the inputs that the layers share.

        build: the model's, with a stage. groups: the cache groups of the stage. kv: the pool, or a Cache if layers keep
        states. Raises ValueError if the numbers of page tables and of groups with pages differ, or if the pool's number
        of pages is not a multiple of the largest group's number of layers.
        """
        assert build.stage is not None
        self._stage: Stage = build.stage
        self._is_cache, self._batch = isinstance(kv, Cache), batch
        self._pool, states = kv if isinstance(kv, Cache) else (kv, ())
        self._states = list(states)
        # [T, L, P], second input of each layer of the model, after the hidden state; None without such inputs.
        self.layer_inputs: jax.Array | None = None
        self._selected: jax.Array | None = None
        self._locations = layer_locations(groups)
        self._scale_index = {layer: index for index, layer in enumerate(sorted(self._locations))}
        self._shared = {each.kv_source for each in config.attention} - {None}
        self._unpaged: dict[int, jax.Array] = {}
        self._input_size = config.layer_input_size
        self._num_layers = config.num_layers
        self._attention = [config.attention[layer] for layer in self._stage.layers]
        with_state = [layer for layer in self._stage.layers if config.attention[layer].state is not None]
        self._state_index = {layer: index for index, layer in enumerate(with_state)}
        self._sections = sections_of(batch)
        limits = key_limits_of(self._sections, config, batch.positions)
        in_windows = config.tower is not None and config.tower.in_windows_only
        step = StepContext(batch, self._pool, build, limits, in_windows_only=in_windows)
        self._inputs = _step_inputs(self._attention, step)
        self.rows = next(iter(self._inputs.values())).rows  # of the step's tokens, the same for all layers
        self._pages = _layer_pages(groups, self._locations, batch, self._pool)
        self._run_layer = layer_runner()
        for section in self._sections:
            self._run_layer = section.around_layer(self._run_layer)

    def embed(self, x: jax.Array) -> jax.Array:
        """Return the first layer's input [T, D]: embeddings x [T, D] after the `embed` of all sections of the batch."""
        for section in self._sections:
            x = section.embed(x)
        return x

    def run(self, index: int, layer: nnx.Module, x: jax.Array) -> jax.Array:
        """Run the stage's layer number `index` on hidden states x [T, D], and return the hidden states after it.

        It must be called once for each layer, in order from 0. The pages and states that the layer writes are stored in
        `cache`. Sections act on the layer and on the hidden states before and after it. Raises ValueError for a
        kv_source that is in another stage.
        """
        if index == 0:
            self._observe(0, x)
        number, attention = self._stage.layers[index], self._attention[index]
        for section in self._sections:
            layer = section.tapped(number, layer)
        graph, state = nnx.split(layer)
        kept = self._state_index.get(number)
        inputs = self._inputs[attention]
        if self.layer_inputs is not None:
            inputs = inputs._replace(of_layer=self.layer_inputs[:, number])
        if attention.selection_source is not None:
            inputs = inputs._replace(selected=self._selected)
        if kept is not None and (recorded := self._batch.sections.get("state_inputs")) is not None:
            inputs = inputs._replace(state_inputs=recorded.layers[kept])
        with jax.named_scope(f"layer_{index}"):
            caches = [self._kv_of(number, attention)] if attention.attends else []
            caches += [] if kept is None else [(self._states[kept], self._batch.sections["states"])]
            parts = caches[0] if len(caches) == 1 else tuple(zip(*caches, strict=True)) or ((), ())
            x, written, notes = self._run_layer(graph, state, x, *parts, inputs)
            updates = [written] if len(caches) == 1 else list(written)
            if attention.attends:
                self._keep(number, attention, updates.pop(0))
            if kept is not None:
                self._states[kept] = updates.pop(0)
        for _, selected in notes_of(notes, SelectedKeys):
            self._selected = selected[...]
        for section in self._sections:
            x = section.after_layer(number + 1, x)
        self._observe(index + 1, x, notes)
        return x

    def _kv_of(self, number: int, attention: LayerAttention) -> tuple[KVPages, LayerPages]:
        """Return the layer's view of the pool and the location of its keys and values, which are those of its kv_source
        if it has one. Raises ValueError if that layer is in another stage.
        """
        source = number if attention.kv_source is None else attention.kv_source
        if source not in self._locations:
            raise ValueError(f"layer {number} reads keys of layer {source}, which is in another stage")
        kv = of_layer(self._pool, self._locations[source], self._scale_index[source])
        if (data := self._unpaged.get(source)) is not None:
            kv = replace(kv, data=data)
        return kv, self._pages[source]

    def _keep(self, number: int, attention: LayerAttention, kv: KVPages) -> None:
        """Store the pool that layer `number` has returned, for the next layer.

        Nothing is stored for a layer with a kv_source, which reads another layer's keys and writes none. Without pages
        (UNPAGED), the keys and values of a layer that other layers read are also stored by its number.
        """
        if attention.kv_source is not None:
            return
        if kv.platform == UNPAGED and number in self._shared:
            self._unpaged[number] = kv.data
        self._pool = replace(self._pool, data=kv.data)

    def to_next_stage(self, x: jax.Array) -> jax.Array:
        """Return what the next stage gets, [T, D + L * P]: hidden states x [T, D], followed by the second inputs of all
        layers. Without such inputs it is x itself.
        """
        if self.layer_inputs is None:
            return x
        return jnp.concatenate([x, self.layer_inputs.reshape(x.shape[0], -1)], axis=-1)

    def from_previous_stage(self, hidden: jax.Array) -> jax.Array:
        """Return the hidden states [T, D] in `hidden`, the result of the previous stage's `to_next_stage`, and set
        `layer_inputs` to the layers' second inputs if the model has any.
        """
        if not self._input_size:
            return hidden
        inputs = hidden[:, hidden.shape[1] - self._num_layers * self._input_size :]
        self.layer_inputs = inputs.reshape(hidden.shape[0], self._num_layers, self._input_size)
        return hidden[:, : hidden.shape[1] - inputs.shape[1]]

    @property
    def cache(self) -> Any:
        """The pool, or the Cache if one was given, with all that the layers have written so far."""
        return Cache(self._pool, tuple(self._states)) if self._is_cache else self._pool

    def _observe(self, count: int, x: jax.Array, notes: nnx.State | None = None) -> None:
        """Call `observe` of all sections with the hidden states x [T, D] after the stage's first `count` layers.
        notes: the last layer's Notes; None before the first layer.
        """
        for section in self._sections:
            section.observe(count, x, notes)


def _step_inputs(layers: Sequence[LayerAttention], step: StepContext) -> dict[LayerAttention, StepInputs]:
    """Return the StepInputs of each distinct attention among `layers`."""
    attentions, rows = list(dict.fromkeys(layers)), step_rows(step)
    columns = {field: maker.values(attentions, step) for field, maker in STEP_INPUTS.items()}
    return {
        attention: StepInputs(rows, **{field: values[index] for field, values in columns.items()})
        for index, attention in enumerate(attentions)
    }


def _layer_pages(
    groups: Sequence[Paged | State], locations: Mapping[int, LayerLocation], batch: ForwardBatch, kv: KVPages
) -> dict[int, LayerPages]:
    """Return the location of the pages of each layer with pages, by the layer's number in the model.

    Raises ValueError if the pool's number of pages is not a multiple of the largest group's number of layers, or if the
    numbers of page tables and of groups with pages differ.
    """
    pages, num_pages = {}, num_pages_of(kv, groups)
    for group, ragged in zip(paged_groups(groups), batch.ragged, strict=True):
        with jax.named_scope("kv_update_schedule"):
            schedule = kv_update_schedule(ragged.slot_mapping, page_size=kv.page_size, platform=kv.platform)
        spread = {1: ragged}
        for layer in group.layers:
            step = row_step(kv, locations[layer])
            if step not in spread:
                spread[step] = _spread(ragged, step, kv.page_size)
            first = first_page(kv, locations[layer], num_pages)
            pages[layer] = LayerPages(spread[step], jnp.int32(first), schedule)
    return pages


def _spread(ragged: RaggedBatch, step: int, page_size: int) -> RaggedBatch:
    """Return the batch with page ids multiplied by `step`, and with its slots at the same offsets in those pages.
    Padding slots stay -1. page_size: tokens of a page.
    """
    slots = ragged.slot_mapping
    moved = (slots // page_size * step) * page_size + slots % page_size
    return ragged._replace(page_table=ragged.page_table * step, slot_mapping=jnp.where(slots < 0, -1, moved))


def layer_runner() -> Callable[..., tuple[jax.Array, Any, nnx.State]]:
    """Return a new function that runs a layer: (graph, state, x, kv, pages, step) -> (x, kv, Notes).

    graph, state: results of `nnx.split` of the layer. The other arguments are those of a DecoderLayer. Notes: an
    nnx.State that contains only the Notes of the layer's modules.

    Layers with equal graphs share one trace. Each step needs a new function, since a user-defined layer may read values
    that have changed.
    """

    @partial(jax.jit, static_argnums=0)
    def run_layer(
        graph: Any, state: nnx.State, x: jax.Array, kv: KVPages, pages: LayerPages, step: StepInputs
    ) -> tuple[jax.Array, KVPages, nnx.State]:
        """Return the layer's hidden states, its cache, and the Notes of its modules."""
        layer = nnx.merge(graph, state)
        x, written = layer(x, as_viewed(kv), pages, step)
        return x, as_stored(written, kv), nnx.pop(layer, Note)

    return run_layer


# The name that a layer's call has in a trace. Its first result is x [T, D].
LAYER = "run_layer"
