"""DeviceExtension: what an optional capability adds to the devices' work, in three halves.

- `DeviceExtension`, of one pipeline stage, says what is compiled: sections of the state, fields of the message, what
  forward passes are given and leave, epilogues, state changes and programs of its own. Nothing is allocated.
- `StageExtension`, of one stage at work, holds its arrays and runs its programs before and after forward passes.
- `HostExtension` is what the engine's loop calls, found as `ModelRunner.extension(name)`.

A capability has one name on each floor. What an engine was not started with is neither imported nor built nor called:
jaxengine.runner.extensions.build has a row for each. Knows rows and messages, nothing of requests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

from jaxengine.config.engine_config import ResolvedConfig
from jaxengine.config.platforms import Platform
from jaxengine.models.cache import Paged, State
from jaxengine.models.causal_lm import CausalLM
from jaxengine.runner.program import Program, shape_on
from jaxengine.runner.programs.device_state import TokenState
from jaxengine.runner.programs.forward_pass import ForwardPass
from jaxengine.sampling.sampler import MoreScores
from jaxengine.scheduler.buckets import Bucket, Buckets
from jaxengine.sharding.rules import logical_to_spec, part_bytes

EVERYWHERE = PartitionSpec()
RANKS = logical_to_spec(("batch",))

# Shape, dtype and PartitionSpec of an argument.
Shape = tuple[tuple[int, ...], Any, PartitionSpec]


@dataclass(frozen=True)
class Kept:
    """An array that is kept between steps, as one device begins with it: every element is `fill`."""

    shape: tuple[int, ...]
    dtype: Any
    spec: PartitionSpec = RANKS
    fill: int = 0

    def begin(self) -> jax.Array:
        """One device's part as it begins."""
        return jnp.full(self.shape, self.fill, self.dtype) if self.fill else jnp.zeros(self.shape, self.dtype)


class StateChange(NamedTuple):
    """A program that the host runs between steps to change the state.

    Attributes:
      function: (DeviceState, arguments) -> DeviceState, the first donated.
      arguments: their shapes, dtypes and PartitionSpecs.
    """

    function: Callable[..., Any]
    arguments: Sequence[Shape]


@dataclass(frozen=True)
class Epilogue:
    """A kind of program that runs after a forward pass, on what that has left.

    Attributes:
      make: its function; arguments as named, results the state that it changes, then its output.
      arguments: names of what it takes: "params" (the model's leaves), fields of DeviceState, "rows", "logits" or a
        section of Forwarded.
      changes: those arguments, fields of DeviceState, that it gives back changed; they are donated.
      output: the NamedTuple that the host reads: of all replicas, [replicas, ...].
      size_of: the size of the one that serves a bucket, which the arguments from Forwarded have; None where none does.
      width: tokens of a row in the steps that it is for, whose logits are of size * width positions.
      ends: nothing can be done with a step after it.
    """

    make: Callable[[EpilogueSpec], Callable]
    arguments: tuple[str, ...]
    changes: tuple[str, ...]
    output: Any
    size_of: Callable[[Buckets, Bucket], int | None]
    width: int = 1
    ends: bool = False

    def sizes(self, buckets: Buckets) -> list[int]:
        """Sizes in which it is compiled for these buckets, ascending."""
        return sorted({size for bucket in buckets if (size := self.size_of(buckets, bucket)) is not None})


@dataclass(frozen=True)
class EpilogueSpec:
    """Everything static about the epilogues of a model but their sizes.

    Attributes:
      graph, params_tree: of the model, for epilogues that need its weights.
      max_logprobs, logprobs_mode: as EngineConfig's.
      extensions: of the stage.
    """

    graph: nnx.GraphDef
    params_tree: Any
    max_logprobs: int
    logprobs_mode: str
    extensions: tuple[DeviceExtension, ...] = field(default=(), repr=False)

    def process(self, tokens: TokenState) -> Callable[..., jax.Array] | None:
        """Function that changes logits besides the sampler (jaxengine.sampling.sampler); None for nothing."""
        found = [each.process for each in self.extensions if each.process is not None]
        return partial(found[0], tokens) if found else None

    def replace(self, tokens: TokenState) -> Callable[..., jax.Array] | None:
        """Function that changes the tokens that were drawn (jaxengine.sampling.sampler); None for nothing."""
        found = [each.replace for each in self.extensions if each.replace is not None]
        return partial(found[0], tokens) if found else None

    @property
    def more_scores(self) -> MoreScores | None:
        """Scores that are reported of sampled tokens besides their logprobs; None for none."""
        found = [MoreScores(each.num_scores, each.score) for each in self.extensions if each.score is not None]
        return found[0] if found else None


@dataclass(frozen=True)
class StageShape:
    """What the programs of a stage are made for.

    Attributes:
      model: abstract, made for the mesh.
      config: resolved for the platform.
    """

    model: CausalLM
    config: ResolvedConfig
    platform: Platform
    mesh: Mesh

    @cached_property
    def buckets(self) -> Buckets:
        """Buckets of the configuration: the shapes of steps."""
        return self.config.buckets(self.platform, sections=() if self.model.config.tower is None else ("pictures",))

    @cached_property
    def groups(self) -> tuple[Paged | State, ...]:
        """Cache groups of the whole model, with the layers of this stage."""
        hybrid = not self.config.disable_hybrid_kv_cache_manager
        return self.model.cache_groups(self.config.block_size, self.config.kv_cache_dtype, hybrid=hybrid)

    @property
    def num_ranks(self) -> int:
        """Data-parallel replicas."""
        return self.model.mesh.num_ranks

    @property
    def num_slots(self) -> int:
        """Slots of one replica."""
        return self.config.max_num_seqs

    @property
    def samples(self) -> bool:
        """Whether tokens are chosen in this stage."""
        return self.model.stage.is_last and self.model.config.pooler is None

    def shape(self, shape: tuple[int, ...], dtype: Any, spec: PartitionSpec = EVERYWHERE) -> Any:
        """An array of the mesh, abstract."""
        return shape_on(self.mesh, shape, dtype, spec)

    def rows(self, num_rows: int, dtype: Any, *more: int) -> Any:
        """[replicas * num_rows, *more], abstract."""
        return self.shape((self.num_ranks * num_rows, *more), dtype, RANKS)

    def hidden(self, num_tokens: int, count: int = 1) -> Any:
        """Hidden states of so many tokens of each replica after `count` layers side by side, abstract."""
        return self.rows(num_tokens, self.config.dtype, count * self.model.config.hidden_size)

    def handed_over(self, num_tokens: int) -> Any:
        """Abstract array that a stage gives the next one: hidden states, and after them the inputs of each layer."""
        model = self.model.config
        beside = model.num_layers * model.layer_input_size
        return self.rows(num_tokens, self.config.dtype, model.hidden_size + beside)


class DeviceExtension:
    """One capability in one stage: what is compiled for it. A method that is left out adds nothing.

    Attributes:
      name: the capability's, the same on each floor.
      num_tables: page tables that it has after those of the cache groups.
      least_columns: columns that a page table must have for it.
      num_position_rows: rows of the sampler that a replica has for positions of a step, after those of its slots.
      counts_slots: `memory` counts its section of SlotState.
      description: static things that its shapes do not tell; part of the key of stored programs.
      process: (TokenState, logits, slots, counts, features) -> logits, inside samplers; None without one.
      replace: (TokenState, token_ids, slots, positions) -> token ids, inside samplers; None without one.
      num_scores, score: as jaxengine.sampling.sampler.MoreScores; None without any.
    """

    name: ClassVar[str]
    num_tables = 0
    least_columns = 0
    num_position_rows = 0
    counts_slots = False
    description: str = ""
    process: Callable[..., jax.Array] | None = None
    replace: Callable[..., jax.Array] | None = None
    num_scores = 0
    score: Callable[..., jax.Array] | None = None

    def __init__(self, shape: StageShape):
        self.shape = shape

    def slots(self) -> Any:
        """A pytree of Kept: its section of SlotState, which forward passes change; None for none."""
        return None

    def tokens(self) -> Any:
        """A pytree of Kept: its section of TokenState, which samplers change; None for none."""
        return None

    @property
    def changes(self) -> Mapping[str, StateChange]:
        """Its state changes, by name."""
        return {}

    @property
    def epilogues(self) -> Mapping[str, Epilogue]:
        """Its epilogues that run in this stage, by name."""
        return {}

    def message(self, bucket: Bucket) -> tuple[int, ...] | None:
        """The shape of its field in a bucket's messages; None for none."""
        return None

    def label(self, bucket: Bucket) -> str:
        """Text that it adds to the name of a bucket's forward pass, where shapes do not tell what it does; else ""."""
        return ""

    def given(self, bucket: Bucket) -> Any:
        """Abstract arrays that a bucket's forward pass is given in addition to the message; None for nothing."""
        return None

    def left(self, num_tokens: int, num_rows: int) -> Any:
        """Abstract arrays that a forward pass of these sizes leaves to epilogues; None for nothing."""
        return None

    def leaves(self, bucket: Bucket) -> bool:
        """Whether a bucket's forward pass leaves what `left` has."""
        return True

    def row_section(self, num_rows: int, width: int) -> Any:
        """Its section of SampledRows, abstract; None for none."""
        return None

    def programs(self, params: Sequence[Any]) -> Sequence[Program]:
        """Programs that run in addition to forward passes. params: the model's leaves, arrays or shapes."""
        return ()

    def allocated(self) -> Mapping[str, Any]:
        """Abstract arrays by purpose that its half at a stage allocates, beside its sections of the state."""
        return {}

    def memory(self) -> Mapping[str, int]:
        """Bytes of a device by purpose, of what it holds that is neither weights nor workspace."""
        return {purpose: sum(map(part_bytes, jax.tree.leaves(own))) for purpose, own in self.allocated().items()}

    # Traced.

    def fill_tokens(self, step: ForwardPass) -> ForwardPass | None:
        """The pass with a token id in the place of every -1 of the message; None to leave that to others."""
        return None

    def before_model(self, step: ForwardPass) -> ForwardPass:
        """Return the pass with the inputs that it adds for the model."""
        return step

    def after_model(self, step: ForwardPass) -> ForwardPass:
        """Return the pass with what it keeps, and leaves to epilogues, of the model's outputs."""
        return step

    def remember(
        self, tokens: TokenState, slot: jax.Array, position: jax.Array, token_ids: jax.Array, is_kept: jax.Array
    ) -> TokenState:
        """The state with tokens that an epilogue has chosen, each at its slot and position where is_kept."""
        return tokens

    # At work.

    def at_stage(self, stage: Any) -> StageExtension | None:
        """Its half at a StageRunner, before anything is compiled; None without one."""
        return None

    def on_host(self, runner: Any) -> HostExtension | None:
        """What the engine's loop calls of it, of the ModelRunner whose first or last stage this is."""
        return None


class StageExtension:
    """A capability at work in a stage. Sizes are bytes of one device.

    Attributes:
      weight_bytes: bytes of its own weights, and of what it keeps for slots.
      page_bytes: bytes that it keeps for a page.
      models: abstract models whose weights it has; prefix: what these are called in tables of weights.
      reads_message: its programs before a forward pass read the message, which is then sent once for all.
    """

    name: str
    weight_bytes = 0
    page_bytes = 0
    models: Sequence[Any] = ()
    prefix = ""
    reads_message = False

    @property
    def caches(self) -> Sequence[Any]:
        """ExecutableCaches of its own."""
        return ()

    @property
    def program_bytes(self) -> int:
        """Bytes that its own compiled programs hold."""
        return 0

    @property
    def workspace_bytes(self) -> int:
        """Bytes of workspace of its largest program. Programs run before or after a forward pass, never during one."""
        return 0

    def estimate(self, params: Sequence[Any]) -> tuple[int, int]:
        """Estimate program_bytes and workspace_bytes before the number of pages is known."""
        return 0, 0

    def plan_pool(self, num_pages: int) -> None:
        """Takes note of the number of pages."""

    def compile(self, bucket: Bucket, params: Sequence[Any]) -> None:
        """Compiles or loads what runs before and after a bucket's forward pass."""

    def allocate(self) -> None:
        """Makes its arrays; once more after `release`."""

    def release(self) -> None:
        """Gives up the arrays that hold what can be computed again."""

    def before_forward(self, bucket: Bucket, params: Sequence[Any], state: Any, message: Any) -> Any:
        """Dispatches what comes before a forward pass; returns what the pass is given, as `DeviceExtension.given` has
        it.

        None for nothing. params: the model's leaves. state: DeviceState before the step.
        """
        return None

    def before_epilogue(self, name: str, state: Any, forwarded: Any) -> None:
        """Dispatches what comes between the newest forward pass and an epilogue. state: DeviceState before that."""

    def after_sample(self, params: Sequence[Any], state: Any, forwarded: Any) -> None:
        """Dispatches what is done when the tokens of the newest forward pass have been chosen."""


class HostExtension:
    """What the engine's loop calls of a capability."""

    def __init__(self, runner: Any):
        self.runner = runner

    def warm_up(self) -> None:
        """Runs what takes longer the first time; everything has been compiled, and nothing is served yet."""
