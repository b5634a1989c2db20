"""Offload: copies pages and recurrent states between the devices and host memory, in parallel with steps.

Pages to offload are gathered into an array of their own, in the order of the steps, and copied to the host while later
steps run. Pages to load are first sent to the devices, and written into the pool once they have arrived. The programs
exist in a few sizes, all compiled at start-up. A page's content includes what extensions hold under its number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jaxengine.models.cache import kv_partition, page_bytes_of_group
from jaxengine.runner.base.extension import DeviceExtension, HostExtension, StageExtension, StageShape
from jaxengine.runner.base.memory import workspace_bytes
from jaxengine.runner.base.program import Program, program_on
from jaxengine.scheduler.batches.buckets import Bucket

NAME, STATES = "offload", "states"
# Pages of a replica that one launch copies.
SIZES = (4, 32)
# Largest number of arrays in transit at once, to the host and back.
MAX_LEAVING, MAX_COMING = 4, 2

Entry = tuple[bytes, int]  # key, row


class OffloadExtension(DeviceExtension):
    """Device extension of copies of pages and states. It adds nothing to steps."""

    name = NAME

    def memory(self) -> Mapping[str, int]:
        page = page_bytes_of_group(self.shape.groups, platform=self.shape.platform.name)
        return {"pages on their way": bytes_on_their_way(page)}

    def at_stage(self, stage: Any) -> StageExtension:
        return PageCopies(stage)

    def on_host(self, runner: Any) -> HostExtension:
        return PageMover(runner)


def bytes_on_their_way(page_bytes: int) -> int:
    """Return the bytes on one device of the arrays in which pages of a pool are copied, as many as may be in transit at
    once. page_bytes: bytes of the pool's page on one device.
    """
    return (MAX_LEAVING + MAX_COMING) * SIZES[-1] * page_bytes


class _Pool(NamedTuple):
    """Pool of a stage: the model's, or that of an extension under the same page numbers.

    Attributes:
      owner: has the pool as its attribute `pages`, a KVPages.
      label: text that distinguishes the names of its programs.
      data: the pool's array, abstract.
      num_pages: pages of a replica. rows_per_page: rows of a replica's part of the pool that a page takes.
      spec: PartitionSpec of the array of some pages' contents, [replicas * n, *page_shape].
    """

    owner: Any
    label: str
    data: Any
    num_pages: int
    rows_per_page: int
    spec: PartitionSpec

    @property
    def page_shape(self) -> tuple[int, ...]:
        """Shape of a page of a replica, over all devices and layers of a group."""
        return self.rows_per_page, *self.data.shape[1:]

    @property
    def page_dtype(self) -> np.dtype:
        """Dtype of a page."""
        return np.dtype(self.data.dtype)

    @property
    def page_bytes(self) -> int:
        """Bytes of a page of a replica, over all devices."""
        return int(np.prod(self.page_shape)) * self.page_dtype.itemsize

    def page_rows(self, ids: jax.Array) -> jax.Array:
        """Return i32[n, rows of a page], the indices of the rows of a device's pool that the pages `ids`, i32[n], take.
        For no page (-1) they are the index after the last row.
        """
        rows = jnp.arange(self.rows_per_page)[None] * self.num_pages + ids[:, None]
        return jnp.where(ids[:, None] < 0, self.rows_per_page * self.num_pages, rows)


class PageCopies(StageExtension):
    """Stage extension with the programs that copy rows of one stage's pools and states.

    Attributes:
      pools: the stage's pools, the model's first; set by `plan_pool`.
      state_rows: shape and dtype of one row of each array of states.
    """

    name = NAME

    def __init__(self, stage: Any):
        """Store the shapes of pages and states; nothing is compiled. stage: the StageRunner."""
        self._stage = stage
        self._shape: StageShape = stage.programs.shape
        self._compiled: dict[str, tuple[Program, Any]] = {}
        state = stage.programs.state_shapes.slots.sections.get(STATES, ())
        self._states = jax.tree.leaves(state) if self._shape.config.num_state_snapshots else []
        ranks = self._shape.num_ranks
        self._first_row = self._shape.num_slots
        self.state_rows = [(leaf.shape[1:], np.dtype(leaf.dtype)) for leaf in self._states]
        self._rows = [
            self._shape.shape((ranks, *leaf.shape[1:]), leaf.dtype, leaf.sharding.spec) for leaf in self._states
        ]

    @property
    def program_bytes(self) -> int:
        return sum(self._stage.held(*own) for own in self._compiled.values())

    @property
    def workspace_bytes(self) -> int:
        return max((workspace_bytes(own.memory_analysis()) for _, own in self._compiled.values()), default=0)

    def plan_pool(self, num_pages: int) -> None:
        """Set `pools`: the stage's and those of its extensions that have pages, of `num_pages` pages a replica."""
        found = [(self._stage, "", self._stage.programs.kv_shapes(num_pages))]
        for each in self._stage.extensions.values():
            if (kv := each.page_shapes(num_pages)) is not None:
                found.append((each, f" for {each.name}", kv))
        self.pools = [self._pool(owner, label, kv, num_pages) for owner, label, kv in found]

    def _pool(self, owner: Any, label: str, kv: Any, num_pages: int) -> _Pool:
        """Return the _Pool of abstract KVPages `kv` with `num_pages` pages of a replica."""
        spec = kv_partition(kv).data
        rows_per_page = kv.data.shape[0] // self._shape.num_ranks // num_pages
        return _Pool(owner, label, kv.data, num_pages, rows_per_page, PartitionSpec(spec[0], None, *spec[1:]))

    def compile(self, bucket: Bucket, params: Sequence[Any]) -> None:
        if not self._compiled:
            self._compile()

    def allocate(self) -> None:
        """Compile or load the programs unless `compile` has, as with enforce_eager. No arrays are allocated."""
        if not self._compiled:  # enforce_eager
            self._compile()

    def gather(self, ids: np.ndarray) -> list[jax.Array]:
        """Dispatch the copying of pages i32[replicas * n], -1 for none, and return the array [replicas * n,
        *page_shape] of their contents in each pool. The content is undefined for -1. n: one of SIZES.
        """
        size = len(ids) // self._shape.num_ranks
        return [
            self._launched(self._compiled[f"gather {size}{pool.label}"][1](pool.owner.pages.data, ids))
            for pool in self.pools
        ]

    def place(self, pages: Sequence[np.ndarray]) -> list[jax.Array]:
        """Send pages to the devices, [replicas * n, *page_shape] of each pool; return the arrays for `scatter`.
        Thread-safe.
        """
        size = len(pages[0]) // self._shape.num_ranks
        own = zip(pages, self.pools, strict=True)
        return [jax.device_put(each, self._pages(pool, size).sharding) for each, pool in own]

    def scatter(self, ids: np.ndarray, pages: Sequence[jax.Array]) -> None:
        """Dispatch the writing of the contents `pages`, from `place`, to the pages `ids`, i32[replicas * n], -1 for
        none. The pools are donated, and replaced. n: one of SIZES.
        """
        size = len(ids) // self._shape.num_ranks
        for pool, own in zip(self.pools, pages, strict=True):
            kv, write = pool.owner.pages, self._compiled[f"scatter {size}{pool.label}"][1]
            pool.owner.pages = replace(kv, data=self._launched(write(kv.data, ids, own)))

    def gather_states(self, ids: np.ndarray) -> list[jax.Array]:
        """Dispatch the copying of one snapshot of each replica, `ids` i32[replicas], -1 for none; return arrays
        [replicas, ...], one for each array of states. [] without states.
        """
        if not self._states:
            return []
        leaves = jax.tree.leaves(self._stage.slots.sections[STATES])
        return list(self._launched(self._compiled["gather states"][1](leaves, ids)))

    def place_states(self, rows: Sequence[np.ndarray]) -> list[jax.Array]:
        """Send one state of each replica to the devices; return the arrays for `scatter_states`. rows: for each array
        of states, [replicas, ...]. Thread-safe.
        """
        return [jax.device_put(row, like.sharding) for row, like in zip(rows, self._rows, strict=True)]

    def scatter_states(self, ids: np.ndarray, rows: Sequence[jax.Array]) -> None:
        """Dispatch the writing of states, `rows` from `place_states`, to the snapshots `ids`, i32[replicas], -1 for
        none; nothing without states. The stage's arrays of states are donated, and replaced.
        """
        if self._states:
            sections = self._stage.slots.sections
            leaves, tree = jax.tree.flatten(sections[STATES])
            leaves = self._launched(self._compiled["scatter states"][1](leaves, ids, list(rows)))
            self._stage.slots = self._stage.slots._replace(
                sections={**sections, STATES: jax.tree.unflatten(tree, leaves)}
            )

    def _launched(self, arrays: Any) -> Any:
        """Return `arrays` of a launch. On several CPU devices, wait for them first (see MAX_LAUNCHES_AHEAD of the stage
        runner).
        """
        devices = self._shape.mesh.devices
        return jax.block_until_ready(arrays) if devices.size > 1 and devices.flat[0].platform == "cpu" else arrays

    def _pages(self, pool: _Pool, size: int) -> Any:
        """Return the abstract array of the contents of `size` pages of each replica in a pool."""
        return self._shape.shape((self._shape.num_ranks * size, *pool.page_shape), pool.page_dtype, pool.spec)

    def _compile(self) -> None:
        """Compile or load the programs that copy pages, in all SIZES, and states, if there are any."""
        sizes = [(pool, size) for pool in self.pools for size in SIZES]
        programs = [each for own in sizes for each in (self._gather(*own), self._scatter(*own))]
        if self._states:
            programs += [self._gather_states(), self._scatter_states()]
        names = {f"{each.name} of {self._stage.programs.model.stage}": each for each in programs}
        self._compiled = {own.name: (own, self._stage.compiled(own._replace(name=name))) for name, own in names.items()}

    def _gather(self, pool: _Pool, size: int) -> Program:
        """Return the program (pool, pages i32[replicas * size]) -> contents of these pages; undefined for -1."""

        def gather(data: jax.Array, ids: jax.Array) -> jax.Array:
            return jnp.take(data, pool.page_rows(ids), axis=0, mode="clip")

        arguments = pool.data, self._shape.rows(size, np.int32)
        name = f"gather {size}{pool.label}"
        return program_on(self._shape.mesh, name, gather, arguments, self._pages(pool, size), ())

    def _scatter(self, pool: _Pool, size: int) -> Program:
        """Return the program (pool, pages i32[replicas * size], their contents) -> the pool with these pages written,
        none for -1. The pool is donated.
        """

        def scatter(data: jax.Array, ids: jax.Array, pages: jax.Array) -> jax.Array:
            return data.at[pool.page_rows(ids)].set(pages, mode="drop")

        arguments = pool.data, self._shape.rows(size, np.int32), self._pages(pool, size)
        return program_on(self._shape.mesh, f"scatter {size}{pool.label}", scatter, arguments, pool.data, (0,))

    def _gather_states(self) -> Program:
        """Return the program (arrays of states, snapshots i32[replicas]) -> the rows of these snapshots; undefined for
        -1.
        """

        def gather(leaves: list[jax.Array], ids: jax.Array) -> list[jax.Array]:
            rows = jnp.clip(ids + self._first_row, 0)
            return [leaf[rows] for leaf in leaves]

        arguments = self._states, self._shape.rows(1, np.int32)
        return program_on(self._shape.mesh, "gather states", gather, arguments, self._rows, ())

    def _scatter_states(self) -> Program:
        """Return the program (arrays of states, snapshots i32[replicas], rows) -> the arrays with one row written for
        each replica, none for -1. The arrays are donated.
        """

        def scatter(leaves: list[jax.Array], ids: jax.Array, rows: list[jax.Array]) -> list[jax.Array]:
            targets = jnp.where(ids < 0, leaves[0].shape[0], ids + self._first_row)
            return [leaf.at[targets].set(row, mode="drop") for leaf, row in zip(leaves, rows, strict=True)]

        arguments = self._states, self._shape.rows(1, np.int32), self._rows
        return program_on(self._shape.mesh, "scatter states", scatter, arguments, self._states, (0,))


class Leaving(NamedTuple):
    """Copies in transit to the host.

    Attributes:
      entries: (key, row of the arrays) of each page or state.
      arrays: for each pool of each stage, or for each array of states, an array [rows, ...] of their contents.
      size: pages of a replica in the arrays, padding included; 0 for states.
    """

    entries: Sequence[Entry]
    arrays: Sequence[jax.Array]
    size: int

    def blocks(self) -> dict[bytes, np.ndarray]:
        """Return the content of each key over all stages, u8[n]; waits for the copies. Thread-safe."""
        arrays = [np.asarray(array) for array in self.arrays]
        return {key: np.concatenate([_bytes(array[row]) for array in arrays]) for key, row in self.entries}


class Coming(NamedTuple):
    """Pages or a state of one replica that have been sent to the devices.

    Attributes:
      rank: index of the replica. keys: keys of the pages, or of the state.
      arrays: for each stage, the arguments of `scatter` or `scatter_states` of its PageCopies.
      size: pages of a replica in the arrays; 0 for a state.
    """

    rank: int
    keys: Sequence[bytes]
    arrays: Sequence[Any]
    size: int


class PageMover(HostExtension):
    """Host extension that copies pages and states of all stages. A page's content is that of all layers of a group in
    all pools of all stages, u8[page_bytes], and a state's is u8[state_bytes].
    """

    def __init__(self, runner: Any):
        super().__init__(runner)
        self._stages: list[PageCopies] = [stage.extensions[NAME] for stage in runner.stages]
        self._num_ranks = runner.num_ranks

    @property
    def fills_after_sample(self) -> bool:
        """Whether a step's pages have their content only once the step's sampler has been dispatched."""
        return any(each.fills_after_sample for each in self._holders())

    @property
    def page_bytes(self) -> int:
        """Bytes of a page's content, over all stages."""
        return sum(pool.page_bytes for each in self._stages for pool in each.pools)

    @property
    def state_bytes(self) -> int:
        """Bytes of a state's content, over all stages; 0 without states."""
        rows = [row for each in self._stages for row in each.state_rows]
        return sum(int(np.prod(shape)) * dtype.itemsize for shape, dtype in rows)

    @property
    def block_bytes(self) -> int:
        """Bytes of the larger of the two contents, a page's or a state's."""
        return max(self.page_bytes, self.state_bytes)

    def warm_up(self) -> None:
        """Run each program once with no page or snapshot to copy; waits for the gathers."""
        for size in SIZES:
            nothing = np.full(self._num_ranks * size, -1, np.int32)
            for stage in self._stages:
                pages = [np.zeros((len(nothing), *pool.page_shape), pool.page_dtype) for pool in stage.pools]
                jax.block_until_ready(stage.gather(nothing))
                stage.scatter(nothing, stage.place(pages))
        nothing = np.full(self._num_ranks, -1, np.int32)
        for stage in self._stages:
            states = [np.zeros((self._num_ranks, *shape), dtype) for shape, dtype in stage.state_rows]
            jax.block_until_ready(stage.gather_states(nothing))
            stage.scatter_states(nothing, stage.place_states(states))

    def describe(self) -> str:
        """Return text that is equal for two engines if equal keys have equal content in both, given equal weights of
        the model: page size, shapes, dtypes, scales, the model's settings and how its heads are split, and the weights
        of draft models, which are read. Replicas, samplers and room for adapters make no difference.
        """
        stages = [stage.programs for stage in self.runner.stages]
        more = [each.describe_pages() for each in self._holders()]
        scales = [
            np.asarray(scale).tobytes()
            for stage in self.runner.stages
            for scale in (stage.pages.k_scale, stage.pages.v_scale)
            if scale is not None
        ]
        pools = [(pool, each.state_rows) for each in self._stages for pool in each.pools]
        shapes = [(pool.page_shape, str(pool.page_dtype), state_rows) for pool, state_rows in pools]
        models = [(each.model.config, each.model.build.of_pages, each.groups, each.platform) for each in stages]
        own = self.runner.config.block_size, shapes, scales, models
        return repr((*own, more) if more else own)

    def _holders(self) -> list[StageExtension]:
        """Return the extensions of all stages that hold something under the numbers of pages."""
        found = [pool.owner for each in self._stages for pool in each.pools]
        return [each for each in found if isinstance(each, StageExtension)]

    def save(self, ranks: Sequence[Sequence[Entry]]) -> list[Leaving]:
        """Dispatch the copying of pages to the host, as they are after the newest dispatched step; return the copies in
        transit, each of at most SIZES[-1] pages of a replica.

        ranks: pairs (key, page) to copy of each replica.
        """
        found, most = [], max(map(len, ranks), default=0)
        for first in range(0, most, SIZES[-1]):
            parts = [own[first : first + SIZES[-1]] for own in ranks]
            size = next(size for size in SIZES if size >= max(map(len, parts)))
            entries, ids = self._rows(parts, size)
            arrays = [array for stage in self._stages for array in stage.gather(ids)]
            found.append(_sent(Leaving(entries, arrays, size)))
        return found

    def save_states(self, ranks: Sequence[Sequence[Entry]]) -> list[Leaving]:
        """Dispatch the copying of snapshots to the host, as they are after the newest dispatched step; return the
        copies in transit, each of at most one snapshot of a replica.

        ranks: pairs (key, snapshot) to copy of each replica.
        """
        found = []
        for at in range(max(map(len, ranks), default=0)):
            entries, ids = self._rows([own[at : at + 1] for own in ranks], 1)
            arrays = [array for stage in self._stages for array in stage.gather_states(ids)]
            found.append(_sent(Leaving(entries, arrays, 0)))
        return found

    def send(self, rank: int, blocks: Sequence[tuple[bytes, np.ndarray]]) -> Coming:
        """Send pages to the devices for replica `rank`, wait until they are there, and return them as a Coming for
        `install`. Thread-safe.

        blocks: (key, content u8[page_bytes]), at most SIZES[-1].
        """
        size = next(size for size in SIZES if size >= len(blocks))
        first, arrays, offset = rank * size, [], 0
        for stage in self._stages:
            own = []
            for pool in stage.pools:
                own.append(pages := np.zeros((self._num_ranks * size, *pool.page_shape), pool.page_dtype))
                for row, (_, block) in enumerate(blocks, first):
                    _bytes(pages[row])[:] = block[offset : offset + pool.page_bytes]
                offset += pool.page_bytes
            arrays.append(stage.place(own))
        return Coming(rank, [key for key, _ in blocks], jax.block_until_ready(arrays), size)

    def send_state(self, rank: int, key: bytes, block: np.ndarray) -> Coming:
        """Send a state to the devices for replica `rank`, wait until it is there, and return it as a Coming for
        `install`. Thread-safe.

        block: its content, u8[state_bytes].
        """
        arrays, offset = [], 0
        for stage in self._stages:
            rows = [np.zeros((self._num_ranks, *shape), dtype) for shape, dtype in stage.state_rows]
            for row in rows:
                own = _bytes(row[rank : rank + 1])
                own[:] = block[offset : offset + len(own)]
                offset += len(own)
            arrays.append(stage.place_states(rows))
        return Coming(rank, [key], jax.block_until_ready(arrays), 0)

    def install(self, coming: Coming, pages: Sequence[Entry]) -> None:
        """Dispatch the writing of the pages, or the state, that `send` or `send_state` has sent.

        pages: (key, page), or (key, snapshot), to write to; keys of `coming` that it lacks are dropped.
        """
        row_of = dict(pages)
        ids = np.full(self._num_ranks * max(1, coming.size), -1, np.int32)
        first = coming.rank * max(1, coming.size)
        for row, key in enumerate(coming.keys, first):
            ids[row] = row_of.get(key, -1)
        for stage, array in zip(self._stages, coming.arrays, strict=True):
            write: Callable[..., None] = stage.scatter if coming.size else stage.scatter_states
            write(ids, array)

    def _rows(self, ranks: Sequence[Sequence[Entry]], size: int) -> tuple[list[Entry], np.ndarray]:
        """Return (key, row of the copied arrays) of all entries, and their page or snapshot numbers i32[replicas *
        size], -1 for none.

        ranks: at most `size` pairs (key, page or snapshot) of each replica.
        """
        ids = np.full(self._num_ranks * size, -1, np.int32)
        entries = []
        for rank, own in enumerate(ranks):
            for row, (key, page) in enumerate(own, rank * size):
                ids[row] = page
                entries.append((key, row))
        return entries, ids


def _sent(leaving: Leaving) -> Leaving:
    """Start copying the arrays to the host, and return `leaving`."""
    for array in leaving.arrays:
        array.copy_to_host_async()
    return leaving


def _bytes(array: np.ndarray) -> np.ndarray:
    """Return the bytes of a contiguous array, u8[n], without a copy."""
    return array.reshape(-1).view(np.uint8)
