"""StepPrograms: the fixed set of programs of a model and a config, with their arguments as shapes.

A step consists of a forward pass, which has a program for each bucket, and of epilogues, which have programs for a few
sizes (jaxengine.runner.programs.epilogues). Optional capabilities add to them by extensions
(jaxengine.runner.base.extension). Nothing is compiled or allocated here: the runner compiles the programs for the
devices that it has, `jaxengine check` for devices that are not present.

On a mesh a program is one `jax.shard_map`: each device runs it on its own parts, and the layers contain the
communication between devices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxengine.models.cache import (
    KVPages,
    abstract_kv,
    device_kv,
    largest_of_layer,
    layer_locations,
    num_pages_of,
    page_bytes_of_group,
    paged_groups,
)
from jaxengine.runner.base.device_state import DeviceState, SlotState, TokenState, init_slots, init_tokens
from jaxengine.runner.base.extension import (
    EVERYWHERE,
    RANKS,
    DeviceExtension,
    Epilogue,
    EpilogueSpec,
    Kept,
    StageShape,
    StateChange,
    is_in_samplers,
)
from jaxengine.runner.base.forward_pass import SampledRows, StepSpec
from jaxengine.runner.base.program import Program, abstract_params, on_devices, program_on
from jaxengine.runner.programs.epilogues import SAMPLE, SAMPLER
from jaxengine.runner.programs.state_changes import state_changes
from jaxengine.runner.programs.step import Forwarded, StageOutput, make_forward
from jaxengine.sampling import state as sampling_state
from jaxengine.scheduler.batches.buckets import Bucket
from jaxengine.scheduler.batches.packing import Packer
from jaxengine.sharding.collectives import stack_ranks
from jaxengine.sharding.rules import logical_to_spec, part_bytes

_RANKS_VOCAB = logical_to_spec(("batch", "sampled_vocab"))


class StepPrograms:
    """Programs of one model, or of one of its pipeline stages.

    Attributes:
      shape: model, config and mesh that they are built for; model, mesh, groups: fields of it.
      extensions: the optional capabilities of the stage.
      platform: name of the platform whose kernels run and whose layout the KV pool has.
      num_columns: columns of a page table.
      packer: packs the messages of steps.
      epilogues: the stage's epilogues, by name.
      state_shapes: the state that is kept between steps, abstract.
      vocab_size: size of the sampler's vocabulary, including the padding of the last device's part.
      own_vocab_size: size of the part of it that one device has.
      description: static facts that the shapes do not show; part of the key of a stored executable.
      shared_description: the same for programs that do not depend on the model, which engines of many models share.
    """

    def __init__(self, shape: StageShape, extensions: Sequence[DeviceExtension]):
        """Compute sizes, epilogues, the abstract state, and the descriptions that tell the programs from those of
        others.

        shape: the stage's model, config, platform and mesh. extensions: in the order in which they take part in traced
        programs.
        """
        config, model = shape.config, shape.model
        self.shape, self.extensions = shape, tuple(extensions)
        self.model, self.mesh, self.groups = model, shape.mesh, shape.groups
        self.platform = shape.platform.name
        num_tables = len(paged_groups(self.groups)) + sum(each.num_tables for each in extensions)
        fields = {each.name: each.message for each in extensions}
        self.packer = Packer(shape.buckets, config.block_size, shape.num_ranks, num_tables, fields)
        # A multiple of a kernel's block of 128 tokens, so that no implementation has to clip the last block.
        pages, block_pages = math.ceil(config.max_model_len / config.block_size), max(1, 128 // config.block_size)
        pages = max([pages, *(each.least_columns for each in extensions)])
        self.num_columns = math.ceil(pages / block_pages) * block_pages
        self.vocab_size = model.mesh.padded_vocab_size(model.config.vocab_size)
        self.own_vocab_size = self.vocab_size // model.mesh.num_shards("sampled_vocab")
        self._slack = (max(config.widths, default=1) - 1) * config.max_in_flight
        self.epilogues: dict[str, Epilogue] = {SAMPLE: SAMPLER} if shape.samples else {}
        for each in extensions:
            self.epilogues |= each.epilogues
        self.state_shapes: DeviceState = self._state_shapes()
        self._graph, params = nnx.split(model)
        self._params_tree = jax.tree.structure(params)
        settings = config.max_logprobs, config.logprobs_mode, model.config.suppressed_tokens
        self._epilogue_spec = EpilogueSpec(self._graph, self._params_tree, *settings, self.extensions)
        added = tuple(each.description for each in extensions if each.description)
        self.description = repr((model.config, model.build, self.groups, self.platform, *settings, *added))
        in_samplers = tuple(each.name for each in extensions if is_in_samplers(each))
        # The first layer tells stages apart in a bundle, whose keys do not include the stages' devices.
        first = model.stage.layers[0]
        self.shared_description = repr((model.config.vocab_size, first, model.mesh, *settings, in_samplers, *added))

    def extension(self, name: str) -> Any:
        """Return the DeviceExtension of this name. Raises KeyError if there is none."""
        return {each.name: each for each in self.extensions}[name]

    @property
    def windows(self) -> tuple[int | None, ...]:
        """For each cache group with pages, the number of keys that must be kept for a token; None for all.

        These are the keys that the token attends to and, because tokens before it may be rejected, the keys that the
        token in its place may then attend to.
        """
        windows = (group.window for group in paged_groups(self.groups))
        return tuple(None if window is None else window + self._slack for window in windows)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page on one device, in all layers of a group."""
        return page_bytes_of_group(self.groups, platform=self.platform)

    def memory(self, further: Iterable[Any] = ()) -> dict[str, int]:
        """Return the bytes on one device that extensions hold in addition to weights and workspace, by purpose, without
        zeros. further: StageExtensions, or DraftPrograms, whose `memory` is added.
        """
        held = (each.memory() for each in (*self.extensions, *further))
        return {purpose: size for own in held for purpose, size in own.items() if size}

    @property
    def slot_bytes(self) -> int:
        """Bytes of one device that the slots' state takes, without those sections that `memory` counts."""
        leaves = jax.tree.leaves(self.state_shapes)
        sections = self.state_shapes.slots.sections
        counted = [sections.get(each.name) for each in self.extensions if each.counts_slots]
        return sum(map(part_bytes, leaves)) - sum(map(part_bytes, jax.tree.leaves(counted)))

    def kv_shapes(self, num_pages: int) -> KVPages:
        """Return the abstract KV pool with `num_pages` pages per replica."""
        return abstract_kv(self.groups, num_pages, platform=self.platform, mesh=self.mesh)

    def forward(self, bucket: Bucket, params: Sequence[Any], kv: KVPages) -> Program:
        """Return a bucket's forward pass: (params, kv, slots, last_token, message, given[, hidden]) -> (kv, slots,
        Forwarded). kv and slots are donated.

        params: the model's leaves, arrays or shapes. kv: result of `kv_shapes`. A stage that is not the first takes
        hidden states; the third result of a stage that is not the last is StageOutput.
        """
        stage, state = self.model.stage, self.state_shapes
        groups = range(len(paged_groups(self.groups)))
        sizes = groups, self.num_logits(bucket), self.shape.samples
        spec = StepSpec(bucket, self.packer.layouts[bucket], self.packer.page_size, *sizes, self.extensions)
        function = make_forward(self._graph, self._params_tree, spec)
        last_token = None if state.tokens is None else state.tokens.last_token
        given = {each.name: shapes for each in self.extensions if (shapes := each.given(bucket)) is not None}
        hidden = self.shape.stage_output(bucket.num_tokens)
        arguments = (abstract_params(params), kv, state.slots, last_token, self.message_shape(bucket), given)
        arguments = (*arguments, *([] if stage.is_first else [hidden]))
        output: Any = self.forwarded(bucket)
        output = output if stage.is_last else StageOutput(hidden, output.sections)
        name = "".join([str(bucket), *(each.label(bucket) for each in self.extensions)])
        return self._program(name, function, arguments, (kv, state.slots, output), donate=(1, 2))

    def message_shape(self, bucket: Bucket) -> Any:
        """Return the abstract message that the host sends for a step: i32[replicas, size]."""
        return self.shape.rows(1, np.int32, self.packer.layouts[bucket].size)

    def forwarded(self, bucket: Bucket) -> Forwarded:
        """Return the abstract Forwarded of a bucket's forward pass."""
        size = self.num_logits(bucket) if bucket.width == 1 else bucket.num_seqs
        left = [each for each in self.extensions if each.leaves(bucket)]
        return self._forwarded(bucket.num_tokens, size, bucket.width, left)

    def epilogue_sizes(self) -> list[tuple[str, int]]:
        """Return (name, size) of every compiled epilogue of this stage."""
        return [(name, size) for name, each in self.epilogues.items() for size in each.sizes(self.packer.buckets)]

    def last_epilogue(self, bucket: Bucket) -> str:
        """Return the name of the epilogue that ends a bucket's steps."""
        ends = ((name, each) for name, each in self.epilogues.items() if each.ends)
        return next(name for name, each in ends if each.size_of(self.packer.buckets, bucket) is not None)

    def epilogue(self, name: str, size: int, params: Sequence[Any]) -> Program:
        """Return the program of an epilogue in one of `epilogue_sizes`. It takes Epilogue.arguments and returns the
        state that it changes, which is donated, followed by its output.

        params: the model's leaves, arrays or shapes.
        """
        epilogue = self.epilogues[name]
        shapes = {"params": abstract_params(params), **self.state_shapes._asdict()}
        shapes |= self._forwarded(size, size, epilogue.width, self.extensions).fields()
        everywhere = self.shape.shape((), np.int32)  # only its sharding matters
        output = epilogue.output(**dict.fromkeys(epilogue.outputs(self._epilogue_spec), everywhere))
        results = (*(shapes[change] for change in epilogue.changes), output)
        donate = tuple(epilogue.arguments.index(change) for change in epilogue.changes)
        arguments = tuple(shapes[argument] for argument in epilogue.arguments)
        program = self._program(f"{name} {size}", epilogue.make(self._epilogue_spec), arguments, results, donate)
        return program._replace(of_model=epilogue.of_model)

    def forwarded_bytes(self, name: str, size: int) -> int:
        """Return the bytes on one device of the results of a forward pass that an epilogue of this size takes."""
        epilogue = self.epilogues[name]
        fields = self._forwarded(size, size, epilogue.width, self.extensions).fields()
        taken = [fields[argument] for argument in epilogue.arguments if argument in fields]
        return sum(map(part_bytes, jax.tree.leaves(taken)))

    def state_changes(self) -> dict[str, Program]:
        """Return the programs that change the state between steps, by name: (state, *arguments) -> state."""
        changes = state_changes(self.vocab_size if self.shape.samples else None)
        for each in self.extensions:
            changes |= each.changes
        return {name: self._state_change(name, change) for name, change in changes.items()}

    def _state_change(self, name: str, change: StateChange) -> Program:
        """Return the program of a state change, with the state donated."""
        arguments = (self.shape.shape(*argument) for argument in change.arguments)
        state = self.state_shapes
        program = self._program(name, change.function, (state, *arguments), state, donate=(0,))
        return program._replace(of_model=False)

    def _program(
        self, name: str, function: Callable, arguments: tuple[Any, ...], results: Any, donate: tuple[int, ...]
    ) -> Program:
        """Return a Program on the stage's mesh; see `program_on` for the arguments."""
        return program_on(self.mesh, name, function, arguments, results, donate)

    def num_logits(self, bucket: Bucket) -> int:
        """Return the number of rows of logits of a bucket's forward pass on a replica: one for each token of a wide
        bucket, else `sample_size`.
        """
        return self.packer.buckets.sample_size(bucket) if bucket.width == 1 else bucket.num_tokens

    def _forwarded(
        self, num_tokens: int, num_rows: int, width: int, extensions: Sequence[DeviceExtension]
    ) -> Forwarded:
        """Return an abstract Forwarded: rows, logits f32[replicas * num_rows * width, V] (None in a stage that does not
        sample), and the sections of these extensions.

        num_tokens, num_rows: numbers of tokens and rows of one replica. width: number of positions of a row that have
        logits.
        """
        shape = self.shape
        added = {each.name: new for each in self.extensions if (new := each.row_section(num_rows, width)) is not None}
        row = shape.rows(num_rows, np.int32)
        rows = SampledRows(row, row, shape.rows(num_rows, np.bool_), shape.rows(1, np.int32), added)
        left = {each.name: new for each in extensions if (new := each.left(num_tokens, num_rows)) is not None}
        size = shape.num_ranks * num_rows * width, self.vocab_size
        return Forwarded(rows, shape.shape(size, np.float32, _RANKS_VOCAB) if shape.samples else None, left)

    def _sections(self, of: Callable[[DeviceExtension], Any]) -> dict[str, Any]:
        """Return the pytrees of Kept that `of` returns for extensions, by the extension's name; those for which it
        returns None are left out.
        """
        return {each.name: kept for each in self.extensions if (kept := of(each)) is not None}

    def _state_partition(self) -> DeviceState:
        """Return a DeviceState with a PartitionSpec in place of each array; without `tokens` and `sampling` in a stage
        that does not sample.
        """
        ranks: Any = RANKS
        vocab: Any = _RANKS_VOCAB
        slots, tokens = (
            jax.tree.map(lambda kept: kept.spec, self._sections(of))
            for of in (lambda each: each.slots(), lambda each: each.tokens())
        )
        slot_state = SlotState(ranks, ranks, slots)
        if not self.shape.samples:
            return DeviceState(slot_state, None, None)
        return DeviceState(slot_state, TokenState(ranks, vocab, tokens), sampling_state.partition(ranks, vocab))

    def _own_state(self) -> DeviceState:
        """Return one device's part of the initial state; without `tokens` and `sampling` in a stage that does not
        sample.
        """
        num_slots = self.shape.num_slots
        slots, tokens = (
            jax.tree.map(Kept.begin, self._sections(of))
            for of in (lambda each: each.slots(), lambda each: each.tokens())
        )
        slot_state = init_slots(num_slots, self.packer.num_groups, self.num_columns, slots)
        if not self.shape.samples:
            return DeviceState(slot_state, None, None)
        more = sum(each.num_position_rows for each in self.extensions)
        sampling = sampling_state.init_state(num_slots, self.own_vocab_size, more)
        return DeviceState(slot_state, init_tokens(num_slots, self.own_vocab_size, tokens), sampling)

    def _state_shapes(self) -> DeviceState:
        """Return the abstract state, over all devices."""
        own, spec = jax.eval_shape(self._own_state), self._state_partition()
        return jax.tree.map(lambda leaf, spec: self.shape.whole(leaf.shape, leaf.dtype, spec), own, spec)

    def pool(self, kv: KVPages) -> Program:
        """Return the program () -> initial KV pool of these shapes. Each device creates its own part."""
        return self._program("pool", partial(device_kv, kv), (), kv, donate=())

    @property
    def paged_layers(self) -> list[int]:
        """Numbers in the whole model of this stage's layers that have pages, ascending."""
        return sorted(layer for group in paged_groups(self.groups) for layer in group.layers)

    def largest(self, kv: KVPages) -> Program:
        """Return the program (pool) -> largest magnitudes of keys and of values, each f32[replicas, layers with pages,
        heads]. The latter is None if values are stored within keys in all layers, and 0 for such layers among others.
        The heads are those of the pool, in which a KV head may be stored several times. kv: result of `kv_shapes`.
        """
        locations = layer_locations(self.groups)
        of_heads = self.shape.shape((1, 1, 1), np.float32, logical_to_spec(("batch", None, "kv_heads")))

        def function(kv: KVPages) -> tuple[jax.Array, jax.Array | None]:
            count = num_pages_of(kv, self.groups)
            found = [largest_of_layer(kv, locations[layer], count) for layer in self.paged_layers]
            k = jnp.stack([k for k, _ in found])[None]
            if all(v is None for _, v in found):
                return k, None
            return k, jnp.stack([jnp.zeros_like(k) if v is None else v for k, v in found])[None]

        results = of_heads, None if kv.spec.values_in_keys else of_heads
        return self._program("largest in the pool", function, (kv,), results, donate=())

    def state(self) -> Program:
        """Return the program () -> initial DeviceState."""
        program = self._program("state", self._own_state, (), self.state_shapes, donate=())
        return program._replace(of_model=False)

    def gather_ranks(self, x: jax.Array) -> jax.Array:
        """Return x [replicas, ...], which is sharded by replica, replicated on every device."""
        gather = on_devices(self.mesh, lambda part: stack_ranks(part[0]), (RANKS,), EVERYWHERE)
        return jax.jit(gather)(x)
