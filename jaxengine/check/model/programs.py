"""Programs to compile for one target: the engine's programs over their bucket grid, and one layer's kernels by
themselves.

Everything is abstract: shapes with shardings over a mesh of devices that need not exist. The programs are those of
jaxengine/runner/programs/step_programs.py and the memory plan is that of memory.py. All sizes are of one device's part
of an array.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxengine.check.compiled.cycles import KEYS, TRIPS
from jaxengine.check.compiled.exchanges import Expected, expected
from jaxengine.check.compiled.hlo import MustNotCopy
from jaxengine.check.model.roofline import (
    DECODE_CONTEXT,
    Products,
    Work,
    attention_work,
    epilogue_work,
    product_work,
    step_work,
    update_work,
)
from jaxengine.check.model.shapes import largest_items
from jaxengine.check.model.sparse import sparse_attention
from jaxengine.checkpoint.model_source import as_it_sees
from jaxengine.config.base.platforms import Platform
from jaxengine.config.engine_config import EngineConfig, ResolvedConfig
from jaxengine.models.cache import as_viewed, block_profile, layer_locations, of_layer, rows_per_page
from jaxengine.models.causal_lm import CausalLM
from jaxengine.models.config.model_config import ModelConfig
from jaxengine.models.layers.attention.attention import (
    AttentionSpec,
    RaggedBatch,
    attention_schedule,
    attention_spec,
    kv_cache_update,
    num_kv_heads,
    ragged_paged_attention,
)
from jaxengine.models.layers.decoder_step import kv_update_schedule
from jaxengine.models.layers.experts.expert_counts import ExpertRows, rows_of_experts
from jaxengine.models.weights.adapters.pools import POOLS, abstract_leaves
from jaxengine.runner.extensions.build import step_programs
from jaxengine.runner.start.devices import build_split, choose_stages
from jaxengine.scheduler.batches.buckets import Bucket
from jaxengine.sharding.layout import ONE_DEVICE
from jaxengine.sharding.mesh import make_mesh
from jaxengine.sharding.rules import part_bytes, part_shape
from jaxengine.sharding.stages import devices_of_stages

# State arrays and adapter pools below this size may be copied.
_SMALL = 1 << 20


class Block(NamedTuple):
    """Block of a kernel, compiled by itself.

    Attributes:
      name: shared by the programs of the block.
      trips: how often this program repeats the block.
      sizes: filled during tracing: `block_q` and `block_kv`, tokens and keys that one repetition handles.
    """

    name: str
    trips: int
    sizes: list[Any]


@dataclass(frozen=True)
class CheckedProgram:
    """Program to compile and check.

    Attributes:
      name: name of its row in the report.
      mesh: mesh to compile under; it determines the chip that kernels are written for.
      is_step: whether it is a forward pass or an epilogue, not a kernel by itself.
      is_largest: whether it is the forward pass that determines the workspace.
      function: to be traced and compiled.
      arguments: arguments of the function, as shapes with shardings.
      donate: indices of donated arguments.
      work: bytes and operations for the roofline.
      must_not_copy: arrays that it must not copy.
      expected: exchanges that it may have; None for a kernel, which runs on one device.
      products: needs of its matrix products; None if they are not compared.
      experts: rows that kernels multiply for a layer's experts, if they do.
      num_attentions: number of its attention layers, without those with an indexer, each of which uses a kernel if the
        platform has one.
      latent_bytes: for latent attention, bytes of the query in latent space, as many as of the result.
      dtype: dtype of the model.
      block: the profiled block; None for a program of the engine.
    """

    name: str
    mesh: Mesh
    is_step: bool
    is_largest: bool
    function: Callable
    arguments: tuple[Any, ...]
    donate: tuple[int, ...]
    work: Work
    must_not_copy: MustNotCopy
    expected: Expected | None
    products: Products | None = None
    experts: ExpertRows | None = None
    num_attentions: int = 0
    latent_bytes: int = 0
    dtype: str = ""
    block: Block | None = None


def checked_step(
    program: Any, mesh: Mesh, *, prefix: str = "", is_largest: bool = False, **others: Any
) -> CheckedProgram:
    """Return a Program of the engine as a step to check. prefix: put before its name. others: further fields."""
    own = program.function, program.arguments, program.donate
    return CheckedProgram(f"{prefix}{program.name}", mesh, True, is_largest, *own, **others)


def open_stages(
    model_config: ModelConfig, config: EngineConfig, platform: Platform, devices: Sequence[Any]
) -> list[StagePrograms]:
    """Build the programs of each pipeline stage on its share of the devices, with abstract weights.

    Raises ConfigError for options that an engine refuses.
    """
    model_config = as_it_sees(model_config, config)
    resolved = config.resolved(model_config, platform, largest_items(model_config))
    layout = resolved.mesh_layout(model_config)
    stages = choose_stages(model_config, resolved, layout)
    opened = []
    for stage, part in zip(stages, devices_of_stages(devices, len(stages)), strict=True):
        model = build_split(model_config, resolved, layout, stage)
        prefix = f"stage {len(opened)}, " if len(stages) > 1 else ""
        opened.append(StagePrograms(model, resolved, platform, make_mesh(layout, part), prefix))
    return opened


class StagePrograms:
    """Programs of a model, or of one of its pipeline stages, under one config on one mesh.

    Attributes:
      model: abstract. mesh: its mesh.
      config: resolved for the platform.
      steps: the engine's own programs.
      params: abstract weights.
      weight_bytes, page_bytes: bytes on one device of the weights, and of a page.
      slot_bytes: bytes of the slots' state, which `steps.memory()` does not include.
      windows: windows of the cache groups.
    """

    def __init__(self, model: CausalLM, config: ResolvedConfig, platform: Platform, mesh: Mesh, prefix: str):
        """Make the abstract weights and the engine's programs for one stage on its mesh. prefix: prefix of the program
        names.
        """
        self.config = config
        self.model = model
        self.mesh = mesh
        self._prefix = prefix
        self.steps = step_programs(model, config, platform, mesh)
        self._platform = platform.name
        leaves = abstract_leaves(model, mesh)
        self._names, self.params = [name for name, _ in leaves], [leaf for _, leaf in leaves]
        self.weight_bytes = sum(part_bytes(leaf) for leaf in self.params)
        self.slot_bytes = self.steps.slot_bytes
        self.page_bytes = self.steps.page_bytes
        self.windows = self.steps.windows

    @property
    def num_columns(self) -> int:
        """Number of page table columns: the pages of the longest sequence."""
        return self.steps.num_columns

    @property
    def largest(self) -> Bucket:
        """Bucket whose forward pass determines the workspace."""
        return max(self.steps.packer.buckets)

    def buckets(self, short: bool) -> list[Bucket]:
        """Return all buckets of the grid; with `short` its four corners, and the smallest and largest with drafts."""
        grid = self.steps.packer.buckets
        if not short:
            return list(grid)
        corners = grid.decode[0], grid.decode[-1], *grid.mixed[:1], *grid.mixed[-1:], *grid.wide[:1], *grid.wide[-1:]
        return list(dict.fromkeys(corners))

    def epilogues(self, short: bool) -> list[tuple[str, int]]:
        """Return (name, size) of every epilogue, those of one name together and by ascending size.

        With `short` only of epilogues that follow the buckets of `buckets(short=True)`.
        """
        grid, found = self.steps.packer.buckets, {}
        for name, epilogue in self.steps.epilogues.items():
            sizes = (epilogue.size_of(grid, bucket) for bucket in self.buckets(short))
            found |= {(name, size): None for size in sorted(size for size in sizes if size is not None)}
        return list(found)

    def forwarded_bytes(self, name: str, size: int) -> int:
        """Return the bytes, on one device, that forward passes leave to the epilogue of this name and size."""
        return self.steps.forwarded_bytes(name, size)

    def epilogue(self, name: str, size: int, num_pages: int) -> CheckedProgram:
        """Return an epilogue as a program to check. An epilogue, such as the sampler, runs on the results of forward
        passes.

        name, size: one of `epilogues`; size is its number of rows. num_pages: number of pages of a pool, which it must
        not copy.
        """
        program, width = self.steps.epilogue(name, size, self.params), self.steps.epilogues[name].width
        positions = size * width
        rows = Bucket(positions, positions)
        return checked_step(
            program,
            self.mesh,
            work=epilogue_work(self.model, name, size, width),
            must_not_copy=self._must_not_copy(positions, self.steps.kv_shapes(num_pages)),
            expected=replace(expected(self.model, rows, self._exchanged_itemsize), layers=()),
            prefix=self._prefix,
        )

    def forward(self, bucket: Bucket, num_pages: int) -> CheckedProgram:
        """Return a bucket's forward pass as a program to check, with its work, needs, expected exchanges, and arrays
        that it must not copy.

        num_pages: number of pages of the pool, per layer and replica.
        """
        kv = self.steps.kv_shapes(num_pages)
        program = self.steps.forward(bucket, self.params, kv)
        # CPUs and GPUs pad a single row to two.
        at_least_two = Bucket(max(2, bucket.num_tokens), max(2, bucket.num_seqs))
        return checked_step(
            program,
            self.mesh,
            prefix=self._prefix,
            is_largest=bucket == self.largest,
            work=step_work(self.model, bucket, self.config.kv_cache_dtype, self.config.dtype, self._context),
            must_not_copy=self._must_not_copy(self.steps.num_logits(bucket), kv),
            expected=expected(self.model, bucket, self._exchanged_itemsize),
            products=product_work(self.model, at_least_two, self.config.dtype, kv),
            experts=rows_of_experts(self.model, bucket.num_tokens, self._platform),
            num_attentions=sum(
                each.attends and each.index is None and not each.has_blocks
                for each in (self.model.config.attention[layer] for layer in self.model.stage.layers)
            ),
            dtype=self.config.dtype,
        )

    def kernels(self, bucket: Bucket, num_pages: int) -> Iterator[CheckedProgram]:
        """Yield the kernels of one layer as separate programs, for a step of `bucket`.

        They are each kind of attention with pages, except with keys of blocks, and the KV write of each page size.
        They run on one device of the mesh, with its heads and its replica's sequences; schedules are arguments.
        num_pages: number of pages of the pool.
        """
        config, shared = self.model.config, self.model.mesh
        dtype, kv_dtype = self.config.dtype, self.config.kv_cache_dtype
        kv: Any = self.steps.kv_shapes(num_pages)
        must_not_copy = self._must_not_copy_pool(kv)
        pool, locations = self._on_one_device(kv), layer_locations(self.steps.groups)

        def pool_of(layer: int) -> Any:
            own = jax.eval_shape(lambda kv: as_viewed(of_layer(kv, locations[layer], 0)), pool)
            return self._on_one_device(own)

        layers = sorted(layer for layer in locations if config.attention[layer].compressed is None)
        with_kernels = (layer for layer in layers if config.attention[layer].blocks is None)
        paged = {(attention_spec(each := config.attention[layer], shared), each.index): layer for layer in with_kernels}
        batch = self._on_one_device(self._abstract_batch(bucket))
        paging = {"page_size": self.config.block_size, "platform": self._platform}

        def heads(count: int, head_dim: int) -> jax.ShapeDtypeStruct:
            return self._on_one_device(jax.ShapeDtypeStruct((bucket.num_tokens, count, head_dim), jnp.dtype(dtype)))

        def kernel(name: str, function: Callable, arguments: tuple[Any, ...], donate: tuple[int, ...], work: Work):
            work = Work(work.num_bytes // shared.model, work.flops // shared.model)
            common = False, False, function, arguments, donate, work, must_not_copy, None
            return CheckedProgram(f"{name}, {bucket}", self._one_device, *common)

        for (spec, _), layer in paged.items():
            attention, kv = config.attention[layer], pool_of(layer)
            if attention.index is not None:
                shape_of = lambda *shape: self._on_one_device(jax.ShapeDtypeStruct(*shape))  # noqa: E731
                function, queries = sparse_attention(attention, shared, shape_of, bucket.num_tokens, dtype)
                work = attention_work(attention, bucket, kv_dtype, dtype, self._context)
                yield kernel("sparse attention", function, (*queries, kv, batch), (), work)
                continue

            def attend(q, q_rest, kv, batch, schedule, rest, spec=spec):
                return ragged_paged_attention(q, kv, batch, spec=spec, q_rest=q_rest, schedule=schedule, **rest)

            plan = partial(attention_schedule, spec=spec, num_tokens=bucket.num_tokens, **paging)
            schedule = self._on_one_device(jax.eval_shape(partial(plan, kv_spec=kv.spec, q_dtype=dtype), batch))
            q, q_rest = (heads(spec.num_q_heads, dim) if dim else None for dim in spec.query_dims)
            rest = self._on_one_device(_of_heads(spec, heads, has_sinks=attention.sinks))
            arguments = q, q_rest, kv, batch, schedule, rest
            work = attention_work(attention, bucket, kv_dtype, dtype, self._context)
            program = kernel(f"attention{_limit(spec)}", attend, arguments, (), work)
            yield replace(program, num_attentions=1, latent_bytes=part_bytes(q) if spec.values_in_keys else 0)

        def write(kv, k, v, slot_mapping, schedule):
            return kv_cache_update(kv, k, v, slot_mapping, schedule=schedule)

        schedule = self._on_one_device(jax.eval_shape(partial(kv_update_schedule, **paging), batch.slot_mapping))
        # All layers with pages of one size write arrays of the same shapes.
        kinds = {locations[layer].spec: layer for layer in reversed(layers)}
        for page, layer in kinds.items():
            attention = config.attention[layer]
            count = num_kv_heads(attention, shared)
            key_size, value_size, in_keys = attention.cached
            k, v = heads(count, key_size), None if in_keys else heads(count, value_size)
            work = update_work(attention, bucket, kv_dtype, dtype)
            name = "kv write" if len(kinds) == 1 else f"kv write of head_dim {page.head_dim}"
            yield kernel(name, write, (pool_of(layer), k, v, batch.slot_mapping, schedule), (0,), work)

    def blocks(self) -> Iterator[CheckedProgram]:
        """Yield blocks of keys of each kind of attention, sized as in the largest decode, mixed and drafting steps.

        Layers with an indexer, blocks, slopes or biases by distance, whose attention has no kernels or no profile, are
        left out.
        There is a program for each number of repetitions in cycles.TRIPS. Yields nothing on a platform whose kernels
        have no profile.
        """
        profile = block_profile(self._platform)
        if profile is None:
            return
        grid, dtype = self.steps.packer.buckets, jnp.dtype(self.config.dtype)
        sizes = {"page_size": self.config.block_size, "max_pages": self.num_columns}
        sizes |= {"dtype": dtype, "kv_dtype": self.config.kv_cache_dtype}
        widest = {bucket.width: bucket for bucket in grid.wide}.values()  # the largest comes last
        parts = [
            (grid.decode[-1], "edge"),
            *((bucket, part) for bucket in grid.mixed[-1:] for part in ("block", "edge")),
            *((bucket, "edge") for bucket in widest),
        ]
        attending = self.model.config.attending
        plain = [each for each in attending if each.index is each.blocks is each.slopes is each.relative is None]
        for spec in dict.fromkeys(attention_spec(each, self.model.mesh) for each in plain):  # others have no profile
            for bucket, part in parts:
                name = f"attention{_limit(spec)} {KEYS} keys{', ' + part if not bucket.decode_only else ''}, {bucket}"
                for trips in TRIPS:
                    step = {"decode": bucket.decode_only, "num_tokens": bucket.num_tokens}
                    with jax.set_mesh(self._one_device):  # sizes are the chip's
                        function, arguments, found = profile(spec, **step, **sizes, part=part, trips=trips)
                    block = Block(name, trips, found)
                    yield CheckedProgram(
                        name=f"{name}, {trips} times",
                        mesh=self._one_device,
                        is_step=False,
                        is_largest=False,
                        function=function,
                        arguments=self._on_one_device(arguments),
                        donate=(),
                        work=Work(0, 0),
                        must_not_copy=MustNotCopy(),
                        expected=None,
                        block=block,
                    )

    @property
    def _exchanged_itemsize(self) -> int:
        """Bytes of an element of activations while devices exchange them: 4 on CPUs, else of the dtype."""
        # XLA:CPU exchanges bfloat16 as float32.
        return 4 if self._platform == "cpu" else jnp.dtype(self.config.dtype).itemsize

    @property
    def _context(self) -> int:
        """Number of keys of a sequence with which a decode step's work is counted."""
        return min(DECODE_CONTEXT, self.config.max_model_len)

    def _must_not_copy(self, num_logits: int, kv: Any) -> MustNotCopy:
        """Return the arrays that a step must not copy: the pool `kv`, weight matrices, and state arrays and adapter
        pools of _SMALL bytes or more.

        num_logits: rows of the step's logits. An array of their type is left out, because the logits may have a state's
        type.
        """
        named = list(zip(self._names, self.params, strict=True))
        pools = [(name, leaf) for name, leaf in named if name.startswith(POOLS)]
        matrices = [(name, leaf) for name, leaf in named if _is_matrix(leaf.shape) and not name.startswith(POOLS)]
        weights = {math.prod(part_shape(leaf)): name for name, leaf in matrices}
        # The logits of a step over all slots have the type of a state array.
        logits = f"f32[{num_logits},{self.steps.own_vocab_size}]"
        kept = jax.tree_util.tree_leaves_with_path(self.steps.state_shapes)
        states = large_types([*pools, *((f"slot state{jax.tree_util.keystr(path)}", leaf) for path, leaf in kept)])
        states.pop(logits, None)
        return replace(self._must_not_copy_pool(kv), weights=weights, states=states)

    def _must_not_copy_pool(self, kv: Any) -> MustNotCopy:
        """Return the pool arrays that must not be copied: the pool on one device, and one layer's part of it. kv: the
        abstract pool.
        """
        elements = math.prod(part_shape(kv.data))
        parts = {location.parts for location in layer_locations(self.steps.groups).values()}
        rows = elements // rows_per_page(self.steps.groups)
        return MustNotCopy({**{rows // count: "a layer's pool" for count in parts}, elements: "pool"})

    def _abstract_batch(self, bucket: Bucket) -> RaggedBatch:
        """Return the shapes of a replica's RaggedBatch for a bucket, all int32.

        cu_q_lens [S + 1], kv_lens [S], page_table [S, columns], slot_mapping [T], num_seqs [], num_decode [].
        """

        def int32(*shape: int) -> Any:  # a shape stands for an array
            return jax.ShapeDtypeStruct(shape, jnp.int32)

        return RaggedBatch(
            cu_q_lens=int32(bucket.num_seqs + 1),
            kv_lens=int32(bucket.num_seqs),
            page_table=int32(bucket.num_seqs, self.num_columns),
            slot_mapping=int32(bucket.num_tokens),
            num_seqs=int32(),
            num_decode=int32(),
        )

    @property
    def _one_device(self) -> Mesh:
        """Mesh of only the first device."""
        return make_mesh(ONE_DEVICE, [self.mesh.devices.flat[0]])

    def _on_one_device(self, tree: Any) -> Any:
        """Return one device's part of abstract arrays, placed on the first device. Arrays without a sharding stay
        whole.
        """
        there = NamedSharding(self._one_device, PartitionSpec())

        def part(leaf: Any) -> jax.ShapeDtypeStruct:
            shape = leaf.shape if leaf.sharding is None else part_shape(leaf)
            return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=there)

        return jax.tree.map(part, tree)


def _of_heads(
    spec: AttentionSpec, heads: Callable[[int, int], jax.ShapeDtypeStruct], *, has_sinks: bool
) -> dict[str, jax.ShapeDtypeStruct | None]:
    """Return attention's operands with a number for each query head, f32[heads]: "sinks" and "slopes", None if
    unused; and "biases", [T, heads, bias_extent]. heads: returns an abstract array [T, heads, size].
    """
    given = {"sinks": has_sinks, "slopes": spec.has_slopes}
    shape = jax.ShapeDtypeStruct((spec.num_q_heads,), jnp.float32)
    biases = {"biases": heads(spec.num_q_heads, spec.bias_extent) if spec.bias_extent else None}
    return {name: shape if has else None for name, has in given.items()} | biases


def _limit(spec: AttentionSpec) -> str:
    """Return the window or chunk of an attention spec as a suffix of program names, such as " window 128"; "" without
    either.
    """
    for name in ("window", "chunk"):
        if getattr(spec, name) is not None:
            return f" {name} {getattr(spec, name)}"
    return ""


def _is_matrix(shape: Sequence[int]) -> bool:
    """Return whether a shape has more than one axis longer than 1."""
    return sum(size > 1 for size in shape) > 1


def large_types(named: Iterable[tuple[str, Any]]) -> dict[str, str]:
    """Return the names of arrays of _SMALL bytes or more by their HLO types, such as "s32[256,128]", on one device; of
    several arrays of a type, the last one's name.
    named: (name, array or shape with a sharding).
    """
    return {
        f"{_hlo_type(leaf.dtype)}[{','.join(map(str, part_shape(leaf)))}]": name
        for name, leaf in named
        if part_bytes(leaf) >= _SMALL
    }


def _hlo_type(dtype: Any) -> str:
    """Return HLO's name of a dtype, or numpy's name if the table here lacks it."""
    name = jnp.dtype(dtype).name
    return {"int32": "s32", "float32": "f32", "uint32": "u32", "bfloat16": "bf16", "bool": "pred"}.get(name, name)
