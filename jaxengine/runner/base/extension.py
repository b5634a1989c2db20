"""Protocol between the runner and optional capabilities: what a capability adds to the devices' work, in three classes.

- `DeviceExtension`, one for each pipeline stage, declares what is compiled: sections of the device state, fields of the
  message, inputs and outputs of forward passes, epilogues, state changes and further programs. It allocates nothing.
- `StageExtension`, one for each running stage, holds arrays and runs programs before and after forward passes.
- `HostExtension` has the functions that the engine's loop calls. `ModelRunner.extension(name)` returns it.

A capability has the same name in every package that has a part of it. If the engine was started without a capability,
its files are not imported and no step calls it (jaxengine.runner.extensions.build). Extensions handle rows and
messages, never requests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxengine.config.base.platforms import Platform
from jaxengine.config.engine_config import ResolvedConfig
from jaxengine.models.cache import Paged, State
from jaxengine.models.causal_lm import CausalLM
from jaxengine.runner.base.device_state import TokenState
from jaxengine.runner.base.forward_pass import ForwardPass
from jaxengine.runner.base.program import Program, shape_on
from jaxengine.sampling.sampler import MoreScores
from jaxengine.scheduler.batches.buckets import Bucket, Buckets
from jaxengine.sharding.rules import logical_to_spec, part_bytes, whole_shape

EVERYWHERE = PartitionSpec()
RANKS = logical_to_spec(("batch",))

# Shape, dtype and PartitionSpec of an argument.
Shape = tuple[tuple[int, ...], Any, PartitionSpec]


@dataclass(frozen=True)
class Kept:
    """Declaration of an array that devices keep between steps.

    Attributes:
      shape: shape of one device's part.
      dtype: dtype of the elements.
      spec: how the devices' parts form the array.
      fill: initial value of every element.
    """

    shape: tuple[int, ...]
    dtype: Any
    spec: PartitionSpec = RANKS
    fill: int = 0

    def begin(self) -> jax.Array:
        """Return one device's part at the start: `shape` and `dtype`, filled with `fill`."""
        return jnp.full(self.shape, self.fill, self.dtype) if self.fill else jnp.zeros(self.shape, self.dtype)


class StateChange(NamedTuple):
    """A program that the host runs between steps to change the state.

    Attributes:
      function: (DeviceState, *arguments) -> DeviceState. The old state is donated.
      arguments: shapes, dtypes and PartitionSpecs of the arguments.
    """

    function: Callable[..., Any]
    arguments: Sequence[Shape]


@dataclass(frozen=True)
class Epilogue:
    """Kind of program that runs after a forward pass, on its results.

    Attributes:
      make: returns the epilogue's function, which takes `arguments` and returns the new state of `changes`, followed by
        its output.
      arguments: names of the arguments: "params" (the model's leaves), fields of DeviceState, "rows", "logits" or
        sections of Forwarded.
      changes: those arguments, which are fields of DeviceState, that are donated and returned with new values.
      output: class of the output, a NamedTuple of arrays [replicas, ...] for the host. Its field `support`, if any, is
        None unless an extension reports one in samplers.
      size_of: maps (buckets, bucket) to the size of the program for this bucket, that is the number of rows in its
        arguments from Forwarded; None for a bucket that it does not support.
      width: tokens of a row in the steps that it supports; logits have size * width positions.
      ends: whether it is the last epilogue of a step, after which no other can run.
      of_model: whether the program depends on the model; if not, engines of several models share its executable.
    """

    make: Callable[[EpilogueSpec], Callable]
    arguments: tuple[str, ...]
    changes: tuple[str, ...]
    output: Any
    size_of: Callable[[Buckets, Bucket], int | None]
    width: int = 1
    ends: bool = False
    of_model: bool = True

    def outputs(self, spec: EpilogueSpec) -> list[str]:
        """Return the names of the output's fields that are not None: all, but "support" only if the epilogue `ends` a
        step and spec.more_scores has a support.
        """
        more = spec.more_scores if self.ends else None
        has_support = more is not None and more.support is not None
        return [name for name in self.output._fields if has_support or name != "support"]

    def sizes(self, buckets: Buckets) -> list[int]:
        """Return the sizes for which it is compiled, ascending: `size_of` each bucket that it supports."""
        return sorted({size for bucket in buckets if (size := self.size_of(buckets, bucket)) is not None})


@dataclass(frozen=True)
class EpilogueSpec:
    """Static inputs, other than sizes, with which the epilogues of a model are built.

    Attributes:
      graph, params_tree: static parts of the model, for epilogues that need its weights.
      max_logprobs, logprobs_mode: those of EngineConfig.
      suppressed_tokens: tokens that samplers never choose.
      extensions: the stage's DeviceExtensions.
    """

    graph: nnx.GraphDef
    params_tree: Any
    max_logprobs: int
    logprobs_mode: str
    suppressed_tokens: tuple[int, ...] = ()
    extensions: tuple[DeviceExtension, ...] = field(default=(), repr=False)

    def process(self, tokens: TokenState) -> Callable[..., jax.Array] | None:
        """Return the function, bound to `tokens`, by which an extension changes logits inside samplers
        (jaxengine.sampling.sampler). It is that of the first extension that has one; None if none has.
        """
        found = [each.process for each in self.extensions if each.process is not None]
        return partial(found[0], tokens) if found else None

    def replace(self, tokens: TokenState) -> Callable[..., jax.Array] | None:
        """Return the function, bound to `tokens`, by which an extension replaces sampled tokens
        (jaxengine.sampling.sampler). It is that of the first extension that has one; None if none has.
        """
        found = [each.replace for each in self.extensions if each.replace is not None]
        return partial(found[0], tokens) if found else None

    @property
    def more_scores(self) -> MoreScores | None:
        """Report of an extension on sampled tokens in addition to logprobs. It is that of the first extension that
        reports anything; None if none does.
        """
        return next((each.more_scores for each in self.extensions if each.more_scores is not None), None)


@dataclass(frozen=True)
class StageShape:
    """Model, configuration and mesh of a stage, from which its programs and their abstract arrays are built.

    Attributes:
      model: abstract model, built for the mesh.
      config: configuration, resolved for the platform.
      platform: platform whose kernels the programs use.
      mesh: mesh of the stage.
    """

    model: CausalLM
    config: ResolvedConfig
    platform: Platform
    mesh: Mesh

    @cached_property
    def buckets(self) -> Buckets:
        """All step shapes of the configuration on this platform; messages have a section "pictures" if requests may
        have embeddings of media, except those of a tower that layers attend to (`crosses`).
        """
        tower = self.model.config.tower
        has_pictures = self.config.num_encoder_rows and not (tower is not None and tower.crosses)
        return self.config.buckets(self.platform, sections=("pictures",) if has_pictures else ())

    @cached_property
    def groups(self) -> tuple[Paged | State, ...]:
        """Cache groups of the whole model. Each lists only those of its layers that this stage has."""
        hybrid = not self.config.disable_hybrid_kv_cache_manager
        return self.model.cache_groups(self.config.block_size, self.config.kv_cache_dtype, hybrid=hybrid)

    @property
    def num_ranks(self) -> int:
        """Number of data-parallel replicas."""
        return self.model.mesh.num_ranks

    @property
    def num_slots(self) -> int:
        """Number of slots of one replica."""
        return self.config.max_num_seqs

    @property
    def samples(self) -> bool:
        """Whether tokens are sampled in this stage: it is the last one of a model that generates."""
        return self.model.stage.is_last and self.model.config.pooler is None

    def shape(self, shape: tuple[int, ...], dtype: Any, spec: PartitionSpec = EVERYWHERE) -> Any:
        """Return an abstract array on the mesh, sharded by `spec`; by default replicated on every device."""
        return shape_on(self.mesh, shape, dtype, spec)

    def whole(self, part: tuple[int, ...], dtype: Any, spec: PartitionSpec) -> Any:
        """Return an abstract array sharded by `spec`, of which each device has a part of shape `part`."""
        return self.shape(whole_shape(part, NamedSharding(self.mesh, spec)), dtype, spec)

    def rows(self, num_rows: int, dtype: Any, *more: int) -> Any:
        """Return an abstract array [replicas * num_rows, *more], sharded by replica."""
        return self.shape((self.num_ranks * num_rows, *more), dtype, RANKS)

    def hidden(self, num_tokens: int, count: int = 1) -> Any:
        """Return abstract hidden states of `count` layers, joined, [replicas * num_tokens, count * D], sharded by
        replica.
        """
        return self.rows(num_tokens, self.config.dtype, count * self.model.config.hidden_size)

    def stage_output(self, num_tokens: int) -> Any:
        """Return the abstract array [replicas * num_tokens, ...] that a stage passes to the next one: hidden states,
        and after them the per-layer inputs of models that have any.
        """
        model = self.model.config
        return self.rows(num_tokens, self.config.dtype, model.stream_size + model.num_layers * model.layer_input_size)


class DeviceExtension:
    """Declaration of what is compiled for one capability in one stage. A method that is not overridden adds nothing.

    Attributes:
      shape: shape of the stage.
      name: name of the capability, the same in every package.
      num_tables: number of page tables that it adds after those of the cache groups.
      least_columns: least number of columns that a page table must have.
      num_position_rows: number of token masks of a replica that it adds, after those of the slots, for single positions
        of a step's rows.
      counts_slots: whether `memory` includes its section of SlotState.
      is_pool: whether its section of SlotState is freed and allocated anew with the pages, as states of sequences that
        are then computed again.
      description: static facts that its shapes do not show; part of the key of stored programs.
      process: function called in samplers, (TokenState, logits, slots, counts, features) -> logits; None for none.
      replace: function called in samplers, (TokenState, token_ids, slots, positions) -> token ids; None for none.
      more_scores: what samplers report for rows with logprobs in addition; None for nothing.
    """

    name: ClassVar[str]
    num_tables = 0
    least_columns = 0
    num_position_rows = 0
    counts_slots = False
    is_pool = False
    description: str = ""
    process: Callable[..., jax.Array] | None = None
    replace: Callable[..., jax.Array] | None = None
    more_scores: MoreScores | None = None

    def __init__(self, shape: StageShape):
        """Store the shape of the stage."""
        self.shape = shape

    def slots(self) -> Any:
        """Return the declaration of the extension's section of SlotState, which forward passes change: a pytree of
        Kept; None for no section.
        """
        return None

    def tokens(self) -> Any:
        """Return the declaration of the extension's section of TokenState, which samplers change: a pytree of Kept;
        None for no section.
        """
        return None

    @property
    def changes(self) -> Mapping[str, StateChange]:
        """State changes of the extension, by name."""
        return {}

    @property
    def epilogues(self) -> Mapping[str, Epilogue]:
        """Epilogues of the extension that run in this stage, by name."""
        return {}

    def message(self, bucket: Bucket) -> tuple[int, ...] | None:
        """Return the shape of the extension's int32 field in a bucket's messages; None for no field."""
        return None

    def label(self, bucket: Bucket) -> str:
        """Return text to append to the name of a bucket's forward pass, for differences that shapes do not show; ""
        for none.
        """
        return ""

    def given(self, bucket: Bucket) -> Any:
        """Return the abstract arrays that the extension provides for a bucket's forward pass, in addition to the
        message; None for none.
        """
        return None

    def left(self, num_tokens: int, num_rows: int) -> Any:
        """Return the abstract arrays that the extension adds to a forward pass's results for epilogues; None for none.
        num_tokens, num_rows: tokens and rows of logits of one replica.
        """
        return None

    def leaves(self, bucket: Bucket) -> bool:
        """Whether the results of a bucket's forward pass include the arrays that `left` describes."""
        return True

    def row_section(self, num_rows: int, width: int) -> Any:
        """Return the extension's abstract section of SampledRows in steps of `num_rows` rows with `width` tokens each;
        None for none.
        """
        return None

    def programs(self, params: Sequence[Any]) -> Sequence[Program]:
        """Return the programs that the extension runs in addition to forward passes. params: the model's leaves, arrays
        or shapes.
        """
        return ()

    def allocated(self) -> Mapping[str, Any]:
        """Return the abstract arrays, by purpose, that the extension's StageExtension allocates. Its sections of the
        state are not included.
        """
        return {}

    def memory(self) -> Mapping[str, int]:
        """Return the bytes on one device, by purpose, that the extension holds in a stage in addition to weights and
        workspace. By default these are the arrays of `allocated`.
        """
        return {purpose: sum(map(part_bytes, jax.tree.leaves(each))) for purpose, each in self.allocated().items()}

    # Called while programs are traced:

    def fill_tokens(self, step: ForwardPass) -> ForwardPass | None:
        """Return the pass with every token id of -1 (a token that only the device has) replaced by the token; None if
        this extension does not do that.
        """
        return None

    def before_model(self, step: ForwardPass) -> ForwardPass:
        """Return the pass with the extension's inputs for the model added, as sections of its batch."""
        return step

    def after_model(self, step: ForwardPass) -> ForwardPass:
        """Return the pass, after the model has run, with the extension's state updated and its results for epilogues
        added. They are computed from step.hidden and from what layers have stored in the extension's sections.
        """
        return step

    def remember(
        self, tokens: TokenState, slot: jax.Array, position: jax.Array, token_ids: jax.Array, is_kept: jax.Array
    ) -> TokenState:
        """Return the state after an epilogue has chosen tokens, with those that are kept stored at their slots and
        positions. The base class returns `tokens` unchanged.

        slot, position, token_ids: i32[rows]. is_kept: bool[rows]. All are of one device.
        """
        return tokens

    # Called when a stage or runner is built:

    def at_stage(self, stage: Any) -> StageExtension | None:
        """Return a StageExtension for a StageRunner, which has not compiled anything yet; None for none."""
        return None

    def on_host(self, runner: Any) -> HostExtension | None:
        """Return a HostExtension for the ModelRunner of which this is the first or last stage; None for none."""
        return None


def is_in_samplers(extension: DeviceExtension) -> bool:
    """Whether samplers run code of the extension: `process`, `replace`, `more_scores` or an overridden `remember`."""
    hooks = extension.process, extension.replace, extension.more_scores
    return any(each is not None for each in hooks) or type(extension).remember is not DeviceExtension.remember


class StageExtension:
    """Part of a capability in a running stage, which holds arrays and runs programs. Sizes are bytes on one device. A
    method that is not overridden does nothing, and a size or list is then 0 or empty.

    Attributes:
      name: name of the capability.
      weight_bytes: bytes of its own weights.
      page_bytes: bytes that it holds for each KV page.
      models: abstract models whose weights it has. prefix: prefix of their names in tables of weights.
      reads_message: whether its programs before a forward pass read the message, which is then sent to the devices once
        for all programs.
      fills_after_sample: whether `after_sample` writes what its pool of `page_shapes` has of a step's tokens.
    """

    name: str
    weight_bytes = 0
    page_bytes = 0
    models: Sequence[Any] = ()
    prefix = ""
    reads_message = False
    fills_after_sample = False

    def memory(self) -> Mapping[str, int]:
        """Return the bytes, by purpose, that it holds besides weights, pages, programs and what DeviceExtension.memory
        counts.
        """
        return {}

    @property
    def caches(self) -> Sequence[Any]:
        """ExecutableCaches of the extension; none unless overridden."""
        return ()

    @property
    def program_bytes(self) -> int:
        """Bytes that the extension's compiled programs hold."""
        return 0

    @property
    def workspace_bytes(self) -> int:
        """Workspace of the extension's largest program, in bytes. Its programs run before or after a forward pass,
        never during one.
        """
        return 0

    def estimate(self, params: Sequence[Any]) -> tuple[int, int]:
        """Return an estimate of (program_bytes, workspace_bytes) before the number of pages is known. params: the
        model's leaves.
        """
        return 0, 0

    def plan_pool(self, num_pages: int) -> None:
        """Store the number of KV pages, on which the shapes of the extension's programs and arrays depend."""

    def begin(self, bucket: Bucket, params: Sequence[Any]) -> None:
        """Begin to compile or load what `compile` does, if that takes long (ExecutableCache.begin). params: the model's
        leaves.
        """

    def compile(self, bucket: Bucket, params: Sequence[Any]) -> None:
        """Compile or load the programs that the extension runs before and after a bucket's forward pass. params: the
        model's leaves.
        """

    def page_shapes(self, num_pages: int) -> Any:
        """Return the abstract pool, a KVPages of `num_pages` pages of a replica, that the extension holds under the
        page numbers of the model's pool; None for none. An extension with one has it as its attribute `pages`, which
        others may replace between two steps.
        """
        return None

    def describe_pages(self) -> str:
        """Return text that is equal for two engines if their pools of `page_shapes` have equal content, given equal
        model weights and tokens; "" without such a pool.
        """
        return ""

    def allocate(self) -> None:
        """Allocate the extension's arrays; called again after `release`."""

    def release(self) -> None:
        """Free the extension's arrays whose content can be computed again."""

    def before_forward(self, bucket: Bucket, params: Sequence[Any], state: Any, message: Any) -> Any:
        """Dispatch the programs that precede a forward pass, without waiting, and return the arrays that
        `DeviceExtension.given` describes, None if there are none. The base class dispatches nothing and returns None.

        params: the model's leaves. state: DeviceState before the step. message: the step's message, i32[replicas,
        size].
        """
        return None

    def before_epilogue(self, name: str, state: Any, forwarded: Any) -> None:
        """Dispatch what has to run between the newest forward pass and the epilogue `name`, without waiting.

        state: DeviceState before that epilogue. forwarded: results of the pass, a Forwarded.
        """

    def after_sample(self, params: Sequence[Any], state: Any, forwarded: Any) -> None:
        """Dispatch what has to run after the newest forward pass's tokens have been sampled, without waiting.

        params: the model's leaves. state: DeviceState after the sampler. forwarded: results of the pass, a Forwarded.
        """


class HostExtension:
    """Functions of a capability that the engine's loop calls. Those of this class do nothing.

    Attributes:
      runner: the ModelRunner.
    """

    def __init__(self, runner: Any):
        """Store the ModelRunner."""
        self.runner = runner

    def warm_up(self) -> None:
        """Run functions that are slower the first time. Called after everything has been compiled and before anything
        is served.
        """
