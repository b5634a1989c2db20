"""Decoder: what every decoder-only family does around its layers, once per step.

Owns the embedding, step inputs that layers share, the loop over layers, the final norm and the logits. What a layer
does is its family's own file; a family overrides the lines in which it differs.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from models.build import Build
from models.cache import Cache, Paged, State, group_layers, num_places, of_layer, paged_groups
from models.config.attention import LayerAttention
from models.config.gguf import GGUFConfig, gguf_fields
from models.config.model_config import ModelConfig
from models.config.rope import Rope
from models.config.state import LayerState
from models.forward_batch import ForwardBatch
from models.layers.attention import LayerPages, StepInputs, attention_spec, num_kv_heads, query_temperature
from models.layers.classify import LabelScores
from models.layers.embedding import Embedding, own_logits, vocab_source
from models.layers.linear import Linear
from models.layers.lora import with_visits
from models.layers.mla_made import made_rows
from models.layers.moe import ExpertLoad
from models.layers.norm import NormClass, RMSNorm
from models.layers.rope import rope_table
from models.layers.rows import Rows
from models.layers.scale import scaled
from models.weights.source import CheckpointNames
from pallas_kernels.attention.op import attention_schedule
from pallas_kernels.kv.pages import KVPages, KVSpec
from pallas_kernels.kv.update import kv_update_schedule
from sharding.layout import MeshLayout
from sharding.stages import Stage


class DecoderLayer(Protocol):
    """One layer of a family: an nnx.Module.

    A layer that keeps states gets its arrays [R, ...] in the place of the pool, and StateRows in that of pages; one
    that attends as well gets a pair of each.
    """

    def __call__(self, x: jax.Array, kv: KVPages, pages: LayerPages, step: StepInputs) -> tuple[jax.Array, KVPages]:
        """x[T, D] -> [T, D], and the pool with this step's keys and values of this layer written."""
        ...


class Streams(nnx.Variable):
    """[T, n * D]: hidden states behind n numbers of layers, side by side, before any norm."""


class Decoder(nnx.Module):
    """A models.causal_lm.CausalLM whose family reads its configuration and makes its layers."""

    gguf_architecture: ClassVar[str | None] = None  # not read from GGUF
    checkpoint_names: ClassVar[CheckpointNames] = CheckpointNames()
    norm_class: ClassVar[NormClass] = RMSNorm

    @classmethod
    def read_gguf(cls, gguf: GGUFConfig) -> dict[str, Any]:
        return gguf_fields(gguf)

    def __init__(self, config: ModelConfig, build: Build):
        self.config = config
        self.build = build = replace(build, stage=build.stage or Stage(0, config.num_layers))
        stage, size, tied = self.stage, config.hidden_size, config.tie_word_embeddings
        pooler = config.pooler
        classifier = None if pooler is None else pooler.classifier
        scores = pooler is None or (classifier is not None and bool(classifier.token_ids))
        if stage.is_first or (stage.is_last and tied and scores):
            self.embed = Embedding(config.vocab_size, size, source="model.embed_tokens", build=build)
        self.layers = nnx.List([self.make_layer(layer, replace(build, layer=layer)) for layer in stage.layers])
        if stage.is_first and config.tower is not None:
            self.tower = config.tower.make(config.hidden_size, build.for_tower(config.quantization))
        if stage.is_last:
            self.norm = self.make_norm(build)
        if stage.is_last and classifier is not None:
            self.labels = LabelScores(config, classifier, build)
        if stage.is_last and pooler is None and not tied:
            head = vocab_source("lm_head", config.vocab_size, self.mesh)
            self.lm_head = Linear(size, (head,), axes=("embed", "vocab"), build=build)

    @abstractmethod
    def make_layer(self, layer: int, build: Build) -> nnx.Module:
        """The DecoderLayer of this number in the whole model; its sources are under "model.layers.{layer}"."""

    def make_norm(self, build: Build) -> nnx.Module:
        """The norm after the last layer."""
        return self.norm_class(self.config.hidden_size, self.config.rms_norm_eps, source="model.norm", build=build)

    @property
    def mesh(self) -> MeshLayout:
        return self.build.mesh

    @property
    def stage(self) -> Stage:
        assert self.build.stage is not None
        return self.build.stage

    def embed_tokens(self, token_ids: jax.Array) -> jax.Array:
        """i32[T] -> [T, D], what the first layer gets."""
        return scaled(self.embed(token_ids), self.config.embedding_multiplier)

    def embed_batch(self, batch: ForwardBatch) -> jax.Array:
        """[T, D], the embeddings of tokens and, in their places, of pictures."""
        x = self.embed_tokens(batch.token_ids)
        if batch.media is None:
            return x
        assert batch.media.rows is not None, "the first stage has the rows of pictures"
        return jnp.where(batch.media.index[:, None] >= 0, _media_part(batch.media.rows, batch.media.index, 0, x), x)

    def token_logits(self, hidden: jax.Array) -> jax.Array:
        """[R, D] -> f32[R, V] as the devices of the vocabulary compute them."""
        tied = self.config.tie_word_embeddings
        logits = self.embed.logits(hidden) if tied else self.lm_head(hidden, out_dtype=jnp.float32)
        return scaled(logits, self.config.logit_scale)

    def __call__(
        self,
        batch: ForwardBatch,
        kv: KVPages | Cache,
        hidden: jax.Array | None = None,
        *,
        streams: Sequence[int] = (),
    ) -> tuple[jax.Array, KVPages | Cache]:
        """Hidden states [T, D] after the final norm, and the pool holding the KV of this step's tokens.

        The pool is flat (models.cache); with it come the states of layers that keep some. A stage that is not the first
        takes the hidden states of the one before, and one that is not the last gives them without the norm. Of layers
        with experts the module then holds the ExpertLoad, i32[layers, E]; where `streams` names numbers of this stage's
        layers, the Streams behind these.
        """
        pool, states = kv if isinstance(kv, Cache) else (kv, ())
        steps, pages, kept = self._step_inputs(batch, pool), self._pages(batch, pool), list(states)
        own_state = {layer: place for place, layer in enumerate(self._state_layers)}
        num_paged = 0
        with jax.named_scope("embed"):
            x = self.embed_batch(batch) if hidden is None else hidden
        loads: list[jax.Array] = []
        passed = [x]
        for index, (layer, attention) in enumerate(zip(self.layers, self._attention, strict=True)):
            graph, state = nnx.split(layer)
            place = own_state.get(self.stage.layers[index])
            with jax.named_scope(f"layer_{index}"):
                given = [(of_layer(pool, num_paged), pages[index])] if attention.attends else []
                given += [] if place is None else [(kept[place], batch.state_rows)]
                parts = given[0] if len(given) == 1 else tuple(zip(*given, strict=True))
                x, own, load = run_layer(graph, state, x, *parts, steps[attention])
                left = [own] if len(given) == 1 else list(own)
                if attention.attends:
                    pool, num_paged = replace(pool, data=left.pop(0).data), num_paged + 1
                if place is not None:
                    kept[place] = left.pop(0)
            x = _with_part(x, batch, self.stage.layers[index] + 1)
            loads += jax.tree.leaves(load)
            passed.append(x)
        kv = Cache(pool, tuple(kept)) if isinstance(kv, Cache) else pool
        if loads:
            self.load = ExpertLoad(jnp.stack(loads))
        if streams:
            self.streams = Streams(jnp.concatenate([passed[count] for count in streams], axis=-1))
        if not self.stage.is_last:
            return x, kv
        with jax.named_scope("norm"):
            return self.norm(x), kv

    def logits(self, hidden: jax.Array) -> jax.Array:
        """[R, D] -> f32[R, V / n] where n devices share the rows; whole on one device."""
        with jax.named_scope("logits"):
            return own_logits(self.token_logits(hidden), self.config.vocab_size)

    def pool(self, pooled: jax.Array) -> jax.Array:
        """What a pooling model tells of prompts, f32[R, N]: their pooled states f32[R, D], or the scores of labels."""
        assert self.config.pooler is not None
        if self.config.pooler.classifier is None:
            return pooled
        with jax.named_scope("labels"):
            return self.labels(pooled, self.embed if self.config.tie_word_embeddings else None)

    def cache_groups(self, page_size: int, kv_dtype: Any, *, hybrid: bool = True) -> tuple[Paged | State, ...]:
        """The cache groups of the whole model with the layers that are here, `page_size` tokens a page.

        hybrid: as models.cache.group_layers.
        """
        attention = self.config.attention[0]  # all have the same heads, see ModelConfig
        spec = KVSpec(
            num_pages=1,
            page_size=page_size,
            num_kv_heads=num_kv_heads(attention, self.mesh),
            head_dim=attention.head_dim,
            v_head_dim=attention.v_head_dim,
            dtype=kv_dtype,
            values_in_keys=attention.values_in_keys,
        )
        attending = [layer for layer, each in enumerate(self.config.attention) if each.attends]
        groups = group_layers([self.config.attention[layer].reach for layer in attending], hybrid=hybrid)
        here = self.stage.layers
        paged = [
            Paged(tuple(attending[each] for each in layers if attending[each] in here), window, spec)
            for window, layers in groups
        ]
        kinds = dict.fromkeys(each.state for each in self.config.attention if each.state is not None)
        return (*paged, *(self._state_group(state) for state in kinds))

    def _state_group(self, state: LayerState) -> State:
        """The layers here that keep such a state."""
        arrays = tuple(
            array._replace(shape=array.of_device(self.mesh.num_shards), dtype=array.dtype or self.build.dtype)
            for array in state.arrays
        )
        return State(tuple(each for each in self._state_layers if self.config.attention[each].state == state), arrays)

    @property
    def _state_layers(self) -> list[int]:
        """Layers here that keep a state."""
        return [layer for layer in self.stage.layers if self.config.attention[layer].state is not None]

    def _pages(self, batch: ForwardBatch, kv: KVPages) -> list[LayerPages | None]:
        """Where the pages of each layer here are; None for those that have none."""
        groups = paged_groups(self.cache_groups(kv.page_size, kv.dtype, hybrid=len(batch.ragged) > 1))
        num_pages, rest = divmod(kv.num_pages, num_places(groups))
        if rest:
            raise ValueError(f"num_pages must be a multiple of {num_places(groups)} layers, got {kv.num_pages}")
        pages = {}
        for group, ragged in zip(groups, batch.ragged, strict=True):
            with jax.named_scope("kv_update_schedule"):
                schedule = kv_update_schedule(ragged.slot_mapping, page_size=kv.page_size, platform=kv.layout)
            for place, layer in enumerate(group.layers):
                pages[layer] = LayerPages(ragged, jnp.int32(place * num_pages), schedule)
        return [pages.get(layer) for layer in self.stage.layers]

    @property
    def _attention(self) -> list[LayerAttention]:
        """Of the layers here."""
        return [self.config.attention[layer] for layer in self.stage.layers]

    def _step_inputs(self, batch: ForwardBatch, kv: KVPages) -> dict[LayerAttention, StepInputs]:
        """One for each kind of attention; a rope table for each rope, a schedule for each kernel specification."""
        attentions = dict.fromkeys(self._attention)
        tables, temperatures, schedules = {}, {}, {}
        for rope in dict.fromkeys(attention.rope for attention in attentions):
            with jax.named_scope("rope_table"):
                tables[rope] = None if rope is None else rope_table(_turns(batch, rope), rope)
        for tuning in dict.fromkeys(attention.temperature for attention in attentions):
            with jax.named_scope("temperature"):
                temperatures[tuning] = None if tuning is None else query_temperature(batch.positions, tuning)
        limits = None
        if batch.media is not None and self.config.tower is not None and self.config.tower.attends_both_ways:
            with jax.named_scope("picture_limits"):
                limits = picture_limits(batch.media.index, batch.positions)
        specs = {attention: attention_spec(attention, self.mesh) for attention in attentions if attention.attends}
        for spec in dict.fromkeys(specs.values()):
            with jax.named_scope("attention_schedule"):
                schedules[spec] = attention_schedule(
                    batch.ragged[0],  # schedules depend on lengths only
                    spec,
                    num_tokens=batch.token_ids.shape[0],
                    page_size=kv.page_size,
                    platform=kv.layout,
                    kv_limits=limits,
                )
        made = {}
        if limits is None and len(batch.logits_indices) < len(batch.token_ids):  # else rows have one token each
            for attention, spec in specs.items():
                with jax.named_scope("made_rows"):
                    made[attention] = made_rows(attention, spec, batch.ragged[0], kv, batch.token_ids.shape[0])
        adapters = with_visits(batch.adapters, self.build.lora, kv.layout)
        rows = Rows(batch.ragged[0].slot_mapping >= 0, adapters)
        return {
            attention: StepInputs(
                rows,
                tables[attention.rope],
                schedules.get(specs.get(attention)),
                temperatures[attention.temperature],
                made.get(attention),
            )
            for attention in attentions
        }


def picture_limits(index: jax.Array, positions: jax.Array) -> jax.Array:
    """The position behind the picture of each token, i32[T], where it is in one (index >= 0), and else behind its own.

    Two pictures are never neighbours in a prompt; where two prompts are, attention looks at the first one's keys only.
    """
    tokens = jnp.arange(len(index), dtype=jnp.int32)
    behind = lax.cummin(jnp.where(index >= 0, len(index), tokens), reverse=True)
    return positions + jnp.maximum(behind - tokens, 1)


def _turns(batch: ForwardBatch, rope: Rope) -> jax.Array:
    return batch.rope_positions if rope.sections and batch.rope_positions is not None else batch.positions


def _media_part(rows: jax.Array, index: jax.Array, part: int, x: jax.Array) -> jax.Array:
    """A part of the embeddings of pictures (MediaRows), as x [T, D]; of any row for tokens that have none."""
    width = x.shape[1]
    return rows[jnp.maximum(index, 0), part * width : (part + 1) * width].astype(x.dtype)


def _with_part(x: jax.Array, batch: ForwardBatch, part: int) -> jax.Array:
    """x [T, D] behind layer part - 1 with what pictures add there (DeepStack, Meng et al. 2024, arXiv:2406.04334)."""
    media = batch.media
    if media is None or media.rows is None or part * x.shape[1] >= media.rows.shape[1]:
        return x
    with jax.named_scope("deepstack"):
        return jnp.where(media.index[:, None] >= 0, x + _media_part(media.rows, media.index, part, x), x)


@partial(jax.jit, static_argnums=0)
def run_layer(
    graph: Any, state: nnx.State, x: jax.Array, kv: KVPages, pages: LayerPages, step: StepInputs
) -> tuple[jax.Array, KVPages, nnx.State]:
    """One layer as a function of its weights, and its ExpertLoad if it has experts.

    Layers of one kind have equal graphs and share one trace.
    """
    layer = nnx.merge(graph, state)
    x, kv = layer(x, kv, pages, step)
    return x, kv, nnx.pop(layer, ExpertLoad)


# The name that a layer's call has in a trace. Its first result is x [T, D].
LAYER = "run_layer"
