"""What is compiled for a model under a config: a closed set of programs, their arguments as shapes, nothing allocated.

A step is a forward pass, one for each bucket, and then its heads (jaxengine.runner.heads), each for few sizes.

The runner compiles these for the devices it has, `jaxengine check` for devices that are not there. On a mesh a program
is one `jax.shard_map`: each device runs it on its own parts, and what devices exchange is written in the layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxengine.config.engine_config import ResolvedConfig
from jaxengine.config.platforms import Platform
from jaxengine.drafts.proposer import Drafts, Proposer
from jaxengine.drafts.registry import proposer_of
from jaxengine.runner.device_state import DeviceState, SlotState, TokenState, init_state
from jaxengine.runner.encoder import EncoderLayout
from jaxengine.runner.encoder_programs import EncoderPrograms
from jaxengine.runner.heads import HEADS, HeadSpec, heads_of
from jaxengine.runner.program import Program, abstract_params, on_devices, program_on, shape_on
from jaxengine.runner.state_changes import STATE_CHANGES, StateChange, StateSizes
from jaxengine.runner.step import Forwarded, SampledRows, StepSpec, make_forward
from jaxengine.sampling.state import NEUTRAL, RowParams, SamplingState, mask_words
from models.cache import (
    KVPages,
    abstract_kv,
    device_kv,
    largest,
    num_places,
    page_bytes_of_group,
    paged_groups,
    state_partition,
    state_rows,
)
from models.causal_lm import CausalLM
from models.layers.lora import write_slot
from models.lora import declared_pools
from models.weights.lora_pools import slot_shape
from scheduler.buckets import Bucket
from scheduler.packing import Packer
from sharding.collectives import stack_ranks
from sharding.rules import logical_to_spec, part_bytes, whole_shape

_EVERYWHERE = PartitionSpec()
# Rows of the call that takes embeddings as they came; more take several.
_MAX_PLACED = 512
_RANKS = logical_to_spec(("batch",))
_RANKS_VOCAB = logical_to_spec(("batch", "sampled_vocab"))


class StepPrograms:
    """The programs of one model, or of one of its pipeline stages.

    Attributes:
      mesh: the devices.
      groups: cache groups of the whole model, with the layers of this stage.
      layout: of the KV pool.
      num_columns: columns of a page table.
      encoder: the programs that encode pictures, in a first stage that sees some; else None.
      adapter_pools: the arrays of pools of adapters, none without room for any.
      state_shapes: what is kept between steps, abstract.
      vocab_size: tokens the sampler knows, those that only fill up the last device's part included.
      own_vocab_size: those of one device.
      num_vocab_parts: devices that share the vocabulary.
      stored_mask_words: of the mask of one slot as they store it, one part after the other.
      num_masks: of a rank, one for each slot, and where guesses have masks for each place of a step with drafts.
      description: everything static that the shapes do not tell; part of the key of a stored executable.
    """

    def __init__(self, model: CausalLM, config: ResolvedConfig, platform: Platform, mesh: Mesh):
        """model is abstract and made for the mesh; config resolved for the platform."""
        self.model = model
        self.mesh = mesh
        hybrid = not config.disable_hybrid_kv_cache_manager
        self.groups = model.cache_groups(config.block_size, config.kv_cache_dtype, hybrid=hybrid)
        self.layout = platform.name
        self._num_slots, self._num_snapshots = config.max_num_seqs, config.num_state_snapshots
        num_tables = len(paged_groups(self.groups)) + (self._num_snapshots > 0)
        self._sees, self._places = model.config.tower is not None, model.config.sees_places
        sections = {"pictures": 4 if self._places else 1} if self._sees else {}
        buckets, num_ranks = config.buckets(platform, sections=tuple(sections)), model.mesh.num_ranks
        self.packer = Packer(buckets, config.block_size, num_ranks, num_tables, sections)
        self.encoder: EncoderPrograms | None = None
        if model.config.tower is not None and model.stage.is_first:
            parts = 1 if model.build.split_tower else model.mesh.model
            limits = config.num_encoder_rows, config.max_encoder_patches
            placed = min(config.num_encoder_rows, _MAX_PLACED) if config.enable_mm_embeds else 0
            layout = EncoderLayout(model.config.tower, *limits, num_ranks, parts, placed)
            self.encoder = EncoderPrograms(model, layout, config.dtype, mesh)
        # Whole kernel blocks of 128 tokens, so that no implementation needs to clip the last one.
        pages, block_pages = math.ceil(config.max_model_len / config.block_size), max(1, 128 // config.block_size)
        pages = max(pages, 3 * (self._num_snapshots > 0))  # columns that name snapshots
        self.num_columns = math.ceil(pages / block_pages) * block_pages
        self.vocab_size = model.mesh.padded_vocab_size(model.config.vocab_size)
        self.num_vocab_parts = model.mesh.num_shards("sampled_vocab")
        self.own_vocab_size = self.vocab_size // self.num_vocab_parts
        self.stored_mask_words = self.num_vocab_parts * mask_words(self.own_vocab_size)
        self.adapter_pools = list(declared_pools(model))
        self._dtype, self._max_model_len = config.dtype, config.max_model_len
        self._slack = (max(config.widths, default=1) - 1) * config.max_in_flight
        self._proposer: Proposer | None = None
        drafts = config.speculative_config
        self._takes_drafts, self._is_read = drafts is not None and drafts.has_model, False
        self._streams: tuple[int, ...] = ()
        if drafts is not None:
            self._is_read, self._streams = drafts.reads_hidden, drafts.streams or ()
            self._proposer = proposer_of(drafts) if config.pipeline_parallel_size == 1 else None
        guided = drafts is not None and drafts.guides(config.pipeline_parallel_size, config.max_in_flight)
        self.num_masks = self._num_slots + max([0, *(each.num_tokens for each in buckets.wide if guided)])
        self._experts = _count_experts(model)
        self.state_shapes: DeviceState = self._state_shapes()
        self._graph, abstract_params = nnx.split(model)
        self._params_tree = jax.tree.structure(abstract_params)
        self._heads = HeadSpec(self._graph, self._params_tree, config.max_logprobs, config.logprobs_mode)
        settings = self.groups, self.layout, config.max_logprobs, config.logprobs_mode
        self.description = repr((model.config, model.build, *settings))

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Of the cache groups with pages: keys that must stay for a token, None for all: those that it sees, and those
        that one sees which comes in its place where drafts before it turn out to be wrong."""
        windows = (group.window for group in paged_groups(self.groups))
        return tuple(None if window is None else window + self._slack for window in windows)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page on one device, in all layers of a group."""
        return page_bytes_of_group(self.groups, layout=self.layout)

    @property
    def state_bytes(self) -> int:
        """Bytes of one device that layers keep of slots in place of pages."""
        return sum(map(part_bytes, jax.tree.leaves(self.state_shapes.slots.states)))

    def kv_shapes(self, num_pages: int) -> KVPages:
        """The pool of `num_pages` pages per rank, abstract."""
        return abstract_kv(self.groups, num_pages, layout=self.layout, mesh=self.mesh)

    def forward(self, bucket: Bucket, params: Sequence[Any], kv: KVPages) -> Program:
        """A bucket's forward pass: (params, kv, slots, last_token, message[, hidden, or the encoder's rows]) -> (kv,
        slots, Forwarded).

        params: the model's leaves, arrays or shapes; kv: as `kv_shapes` gives it. Of a stage that is not the last the
        third result is hidden states.
        """
        stage, num_logits, scores = self.model.stage, self.num_logits(bucket), bucket in self.packer.buckets.prompt
        layout = self.packer.layouts[bucket]
        proposer = self._proposer if bucket.width > 1 else None
        takes_drafts = self._takes_drafts and bucket.width > 1
        made = bucket.width, proposer, takes_drafts, self._is_read, self._streams
        spec = StepSpec(layout, self.packer.page_size, num_logits, scores, *made)
        function = make_forward(self._graph, self._params_tree, spec)
        state = self.state_shapes
        last_token = known_tokens(state.tokens, bucket, self.draft_shapes(bucket) if takes_drafts else None)
        message = self.message_shape(bucket)
        hidden = self._hidden(bucket.num_tokens)
        more = [] if stage.is_first else [hidden]
        if bucket.sections and self.encoder is not None:
            more = [self.encoder.rows]
        arguments = (abstract_params(params), kv, state.slots, last_token, message, *more)
        output: Any = hidden
        if stage.is_last:
            size = num_logits if bucket.width == 1 else bucket.num_seqs
            output = self._forwarded(bucket.num_tokens, size, bucket.width)
            if self._samples and not scores:
                output = output._replace(hidden=None, targets=None)
            if self._is_read:
                output = output._replace(read=self.read_shape(bucket))
        name = str(bucket) if proposer is None else f"{bucket}, {proposer}"
        name += ", of drafts" * takes_drafts + f", read behind {self._streams}" * bool(self._streams)
        return self._program(name, function, arguments, (kv, state.slots, output), donate=(1, 2))

    def message_shape(self, bucket: Bucket) -> Any:
        """What the host sends for a step: i32[ranks, size]."""
        return self._shape((self.model.mesh.num_ranks, self.packer.layouts[bucket].size), np.int32, _RANKS)

    def rows_shape(self, bucket: Bucket) -> SampledRows:
        """What a bucket's forward pass tells of its rows, abstract."""
        size = self.num_logits(bucket) if bucket.width == 1 else bucket.num_seqs
        return self._forwarded(bucket.num_tokens, size, bucket.width).rows

    def read_shape(self, bucket: Bucket) -> Any:
        """What it leaves to a head that drafts, abstract."""
        return self._hidden(bucket.num_tokens, max(1, len(self._streams)))

    def slot_shape(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """An array of this shape for each slot, abstract."""
        return self._shape((self.model.mesh.num_ranks * self._num_slots, *shape), dtype, _RANKS)

    def draft_shapes(self, bucket: Bucket) -> Drafts:
        """The drafts of a wide bucket's rows, abstract."""
        rows = self.model.mesh.num_ranks * bucket.num_seqs
        return Drafts(*(self._shape((rows, *more), np.int32, _RANKS) for more in ((bucket.width - 1,), ())))

    def heads(self) -> list[tuple[str, int]]:
        """The name and size of every head of this stage."""
        if not self.model.stage.is_last:
            return []
        heads = heads_of(self.model.config)
        return [(name, size) for name, head in heads.items() for size in head.sizes(self.packer.buckets)]

    def head(self, name: str, size: int, params: Sequence[Any]) -> Program:
        """A head of `HEADS` of a size: (arguments as the head names them) -> (what it changes, its output)."""
        head = HEADS[name]
        shapes = {"params": abstract_params(params), **self.state_shapes._asdict()}
        shapes |= self._forwarded(size, size, head.width)._asdict()
        everywhere = self._shape((), np.int32)  # only where it lies matters
        output = head.output(*[everywhere] * len(head.output._fields))
        results = (*(shapes[change] for change in head.changes), output)
        donate = tuple(head.arguments.index(change) for change in head.changes)
        arguments = tuple(shapes[argument] for argument in head.arguments)
        return self._program(f"{name} {size}", head.make(self._heads), arguments, results, donate)

    def forwarded_bytes(self, name: str, size: int) -> int:
        """Bytes of one device that forward passes leave to a head of this size."""
        forwarded = self._forwarded(size, size, HEADS[name].width)._asdict()
        taken = [forwarded[argument] for argument in HEADS[name].arguments if argument in forwarded]
        return sum(map(part_bytes, jax.tree.leaves(taken)))

    def state_changes(self) -> dict[str, Program]:
        """The programs that change the state between steps, by name: (state, their arguments) -> state."""
        history = self._max_model_len if self._keeps_history else 0
        sizes = StateSizes(
            self.vocab_size,
            self.stored_mask_words,
            self._samples,
            history,
            adapters=bool(self.adapter_pools),
            places=self._places,
        )
        changes = {name: change for name, change in STATE_CHANGES.items() if change.is_of(sizes)}
        return {name: self._state_change(name, change, sizes) for name, change in changes.items()}

    def _state_change(self, name: str, change: StateChange, sizes: StateSizes) -> Program:
        arguments = (self._shape(*argument) for argument in change.arguments(sizes))
        state = self.state_shapes
        return self._program(f"{name} of {self.model.stage}", change.function, (state, *arguments), state, donate=(0,))

    def _program(
        self, name: str, function: Callable, arguments: tuple[Any, ...], results: Any, donate: tuple[int, ...]
    ) -> Program:
        return program_on(self.mesh, name, function, arguments, results, donate)

    @property
    def _samples(self) -> bool:
        """Whether tokens are chosen here."""
        return self.model.stage.is_last and self.model.config.pooler is None

    @property
    def _keeps_history(self) -> bool:
        """Whether the tokens of all slots are kept: n-grams are looked up, or a head reads which came next."""
        return self._proposer is not None or self._is_read

    @property
    def _kept_size(self) -> int | None:
        """Numbers that pooling keeps of each slot here."""
        pooler = self.model.config.pooler
        keeps = self.model.stage.is_last and pooler is not None and pooler.reads_all
        return self.model.config.hidden_size if keeps else None

    def num_logits(self, bucket: Bucket) -> int:
        """Rows of logits that a bucket's forward pass gives."""
        return self.packer.buckets.sample_size(bucket) if bucket.width == 1 else bucket.num_tokens

    def _hidden(self, num_tokens: int, count: int = 1) -> Any:
        shape = self.model.mesh.num_ranks * num_tokens, count * self.model.config.hidden_size
        return self._shape(shape, self._dtype, _RANKS)

    def _forwarded(self, num_tokens: int, num_rows: int, width: int = 1) -> Forwarded:
        """What a forward pass of so many tokens, and rows with logits at `width` places, leaves to the heads,
        abstract."""
        ranks = self.model.mesh.num_ranks
        row = self._shape((ranks * num_rows,), np.int32, _RANKS)
        rows = SampledRows(
            slot=row,
            position=row,
            is_sampled=self._shape((ranks * num_rows,), np.bool_, _RANKS),
            features=self._shape((ranks,), np.int32, _RANKS),
            drafts=None if width == 1 else self._shape((ranks * num_rows, width - 1), np.int32, _RANKS),
            num_drafts=None if width == 1 else row,
            is_forced=None if width == 1 else self._shape((ranks * num_rows,), np.bool_, _RANKS),
            is_guided=None if width == 1 else self._shape((ranks * num_rows,), np.bool_, _RANKS),
        )
        if not self._samples:
            pooled = self._shape((ranks * num_rows, self.model.config.hidden_size), np.float32, _RANKS)
            return Forwarded(rows, None, pooled, None)
        logits = self._shape((ranks * num_rows * width, self.vocab_size), np.float32, _RANKS_VOCAB)
        targets = self._shape((ranks * num_tokens,), np.int32, _RANKS)
        return Forwarded(rows, logits, self._hidden(num_tokens), targets)

    def _shape(self, shape: tuple[int, ...], dtype: Any, spec: PartitionSpec = _EVERYWHERE) -> Any:
        return shape_on(self.mesh, shape, dtype, spec)

    def _state_partition(self) -> DeviceState:
        """PartitionSpecs in the places of arrays."""
        ranks: Any = _RANKS
        vocab: Any = _RANKS_VOCAB
        slots = SlotState(
            page_table=ranks,
            num_computed=ranks,
            expert_load=None if self._experts is None else ranks,
            pooled=None if self._kept_size is None else ranks,
            states=state_partition(self.groups),
            adapter=ranks if self.adapter_pools else None,
            rope_delta=ranks if self._places else None,
        )
        if not self._samples:
            return DeviceState(slots, None, None)
        sampling = SamplingState(RowParams(*[ranks] * len(NEUTRAL)), logit_bias=vocab, token_mask=vocab)
        history = ranks if self._keeps_history else None
        return DeviceState(slots, TokenState(last_token=ranks, token_counts=vocab, history=history), sampling)

    def _own_state(self) -> DeviceState:
        vocab_size = self.own_vocab_size if self._samples else None
        sizes = self._num_slots, self.num_columns, vocab_size
        states = state_rows(self.groups, self._num_slots + self._num_snapshots)
        counts = self._experts, self.packer.num_groups, self._kept_size
        history = self._max_model_len if self._keeps_history else None
        return init_state(*sizes, *counts, states, history, bool(self.adapter_pools), self._places, self.num_masks)

    def _state_shapes(self) -> DeviceState:
        def whole(leaf: Any, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
            return self._shape(whole_shape(leaf.shape, NamedSharding(self.mesh, spec)), leaf.dtype, spec)

        return jax.tree.map(whole, jax.eval_shape(self._own_state), self._state_partition())

    def write_adapter(self, params: Sequence[Any]) -> Program:
        """(the arrays of adapter_pools, slot, what one adapter has of each) -> the arrays with it in the slot."""
        spec, pools = self.model.build.lora, self.adapter_pools
        assert spec is not None
        arrays = [abstract_params(params)[pool.index] for pool in pools]
        new = [
            self._shape(slot_shape(pool, spec), pool.dtype, array.sharding.spec)
            for pool, array in zip(pools, arrays, strict=True)
        ]
        arguments = arrays, self._shape((), np.int32), new
        return self._program(
            f"adapter of {self.model.stage}", partial(write_slot, pools, spec), arguments, arrays, (0,)
        )

    def pool(self, kv: KVPages) -> Program:
        """() -> the KV pool of these shapes, as it begins, each device making its own part."""
        return self._program("pool", partial(device_kv, kv), (), kv, donate=())

    @property
    def paged_layers(self) -> list[int]:
        """Layers with pages, by their numbers in the whole model."""
        return sorted(layer for group in paged_groups(self.groups) for layer in group.layers)

    def largest(self, kv: KVPages) -> Program:
        """(pool) -> the largest magnitudes of keys and of values, f32[ranks, layers with pages, K] each."""
        place = {layer: place for group in paged_groups(self.groups) for place, layer in enumerate(group.layers)}
        of_heads = self._shape((1, 1, 1), np.float32, logical_to_spec(("batch", None, "kv_heads")))

        def function(kv: KVPages) -> tuple[jax.Array, jax.Array | None]:
            count = kv.num_pages // num_places(self.groups)
            found = [largest(kv, jnp.int32(place[layer] * count), count) for layer in self.paged_layers]
            k, v = jnp.stack([k for k, _ in found])[None], [v for _, v in found if v is not None]
            return k, jnp.stack(v)[None] if v else None

        results = of_heads, None if kv.spec.values_in_keys else of_heads
        return self._program("largest in the pool", function, (kv,), results, donate=())

    def state(self) -> Program:
        """() -> what is kept, before the first request."""
        return self._program(f"state of {self.model.stage}", self._own_state, (), self.state_shapes, donate=())

    def gather_ranks(self, x: jax.Array) -> jax.Array:
        """x [ranks, ...], a part on each rank, on every device."""
        gather = on_devices(self.mesh, lambda part: stack_ranks(part[0]), (_RANKS,), _EVERYWHERE)
        return jax.jit(gather)(x)


def known_tokens(tokens: TokenState | None, bucket: Bucket, drafts: Drafts | None = None) -> Any:
    """What a bucket's forward pass takes of TokenState, arrays or shapes: the last tokens, and where it drafts the
    history, or the drafts if there are some; None of none."""
    if tokens is None:
        return None
    if drafts is not None:
        return tokens.last_token, drafts
    wide = bucket.width > 1 and tokens.history is not None
    return (tokens.last_token, tokens.history) if wide else tokens.last_token


def _count_experts(model: CausalLM) -> tuple[int, int] | None:
    """Layers with experts in this stage, and the experts of a layer; None where there are none."""
    experts = model.config.experts
    if experts is None:
        return None
    num_layers = sum(layer not in experts.dense_layers for layer in model.stage.layers)
    return (num_layers, experts.num_experts) if num_layers else None
