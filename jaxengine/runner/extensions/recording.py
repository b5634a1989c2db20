"""Recording: copies of a step's inputs and outputs, taken from the devices as it runs.

Everything that a step may overwrite is copied before the step: page tables, counts, the pages that its rows read,
recurrent states. Copies are made by programs compiled at start-up and fetched at once, so steps wait for each other. A
step that would not fit into the folder's limit is not fetched; its size follows from its page tables.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxengine.models.cache import page_bytes_of_group, paged_groups, rows_per_page
from jaxengine.models.layers.base.section import Capture
from jaxengine.records.step_file import num_bytes
from jaxengine.records.step_pages import StepRow, page_tables, pages_of, step_rows
from jaxengine.runner.base.extension import DeviceExtension, HostExtension, StageExtension, StageShape
from jaxengine.runner.base.forward_pass import ForwardPass
from jaxengine.runner.base.program import Program, program_on
from jaxengine.runner.programs.epilogues import SAMPLE
from jaxengine.scheduler.batches.buckets import Bucket
from jaxengine.scheduler.pages.snapshots import LOAD, SAVE

NAME, STATES = "recording", "states"
# Rows that one launch copies: of the pool (a row is a page of one layer), and of states and the sampler's long arrays.
PAGE_ROWS, SLOT_ROWS = 64, 8
# Arrays of SamplingState and TokenState with a long row for each slot.
LONG = ("token_counts", "logit_bias", "token_mask")


class RecordingExtension(DeviceExtension):
    """Device extension of step recording. With record_steps_detail "layers", forward passes leave the hidden states [T,
    (L + 2) * D]: the first layer's input, the output of each of L layers, and the state after the final norm. Otherwise
    programs are the same as without recording.

    Attributes:
      keeps_layers: whether hidden states are left.
      num_kept: L + 2.
    """

    name = NAME

    def __init__(self, shape: StageShape):
        super().__init__(shape)
        self.keeps_layers = shape.config.record_steps_detail == "layers"
        self.num_kept = shape.model.config.num_layers + 2

    def label(self, bucket: Bucket) -> str:
        return ", records layers" if self.keeps_layers else ""

    def left(self, num_tokens: int, num_rows: int) -> Any:
        return self.shape.hidden(num_tokens, self.num_kept) if self.keeps_layers else None

    def memory(self) -> Mapping[str, int]:
        """Return the bytes on one device, under "recorded steps": copies of pages, and with "layers" the hidden states
        of the steps in flight and one more.
        """
        config, model = self.shape.config, self.shape.model.config
        groups = self.shape.groups
        page = page_bytes_of_group(groups, platform=self.shape.platform.name) // rows_per_page(groups)
        of_step = 0
        if self.keeps_layers:
            tokens = max(bucket.num_tokens for bucket in self.shape.buckets)
            of_step = tokens * self.num_kept * model.hidden_size * jnp.dtype(config.dtype).itemsize
        return {"recorded steps": PAGE_ROWS * page + of_step * (config.max_in_flight + 1)}

    def before_model(self, step: ForwardPass) -> ForwardPass:
        return step.with_section(NAME, Capture(range(self.num_kept - 1))) if self.keeps_layers else step

    def after_model(self, step: ForwardPass) -> ForwardPass:
        """Return the pass with the hidden states of all layers left under NAME; unchanged unless they are recorded."""
        if not self.keeps_layers:
            return step
        assert step.hidden is not None
        with jax.named_scope("recording"):
            return step.leaving(NAME, jnp.concatenate([step.batch.sections[NAME].joined(), step.hidden], axis=-1))

    def at_stage(self, stage: Any) -> StageExtension:
        return StepTaker(stage, self)

    def on_host(self, runner: Any) -> HostExtension:
        return StepRecorder(runner)


class StepTaker(StageExtension):
    """Stage extension that copies a step's inputs before its forward pass, and its outputs before its sampler.

    Attributes:
      is_on: whether steps are recorded.
      newest: bucket and arrays of the step dispatched last, a new dict for each step; see docs/troubleshooting.md. None
        for a step that is not recorded; the dict of one that turns out too large later is emptied.
      num_too_large: steps not recorded because they are larger than record_steps_bytes.
    """

    name = NAME

    def __init__(self, stage: Any, extension: RecordingExtension):
        """Start with recording on and no step. stage: the StageRunner that samples."""
        self._stage, self._programs, self._extension = stage, stage.programs, extension
        self._shape: StageShape = stage.programs.shape
        self.is_on, self.num_too_large, self._max_bytes = True, 0, self._shape.config.record_steps_bytes
        self.newest: tuple[Bucket, dict[str, np.ndarray]] | None = None
        self._copies: dict[str, Any] = {}
        self._ranks: list[list[StepRow]] = []
        self._states: list[list[int]] = []

    def plan_pool(self, num_pages: int) -> None:
        self._num_pages = num_pages

    def compile(self, bucket: Bucket, params: Sequence[Any]) -> None:
        """Compile or load the programs that copy pages, rows of slots and of states, and the rest of the state at the
        first call; later calls do nothing.
        """
        if self._copies:
            return
        state = self._programs.state_shapes
        pool = [self._programs.kv_shapes(self._num_pages).data]
        rows = {"pages": (pool, PAGE_ROWS), "long": (_long(state), SLOT_ROWS)}
        if STATES in state.slots.sections:
            rows[STATES] = (jax.tree.leaves(state.slots.sections[STATES]), SLOT_ROWS)
        programs = {name: self._rows_program(name, *own) for name, own in rows.items()}
        programs |= {name: self._copy_program(name, own) for name, own in _short(state).items()}
        self._copies = {name: self._stage.compiled(program) for name, program in programs.items()}

    def before_forward(self, bucket: Bucket, params: Sequence[Any], state: Any, message: Any) -> Any:
        """Copy to the host the arrays that the step reads, and store them in `newest`: None if recording is off or the
        step is too large. Waits for the copies. Returns None.
        """
        self.newest = None
        if not self.is_on:
            return None
        before = self._copies["state"](_short(state)["state"])
        arrays = {"message": np.array(message)}
        arrays |= {f"state/{name}": np.asarray(array) for name, array in before.items()}
        self._find_rows(bucket, arrays)
        places, wanted = self._find_pages(bucket, arrays, written=False)
        if self._is_too_large(arrays, wanted):
            return None
        arrays |= self._take_pages(places, wanted)
        arrays |= self._take_states()
        if (scale := self._stage.pages.k_scale) is not None:
            arrays["pages/k_scale"] = np.asarray(scale)
        if (scale := self._stage.pages.v_scale) is not None:
            arrays["pages/v_scale"] = np.asarray(scale)
        self.newest = bucket, arrays
        return None

    def before_epilogue(self, name: str, state: Any, forwarded: Any) -> None:
        """Add to `newest` the pages, states and results of the forward pass, and the arrays that the sampler reads;
        waits for them. Drops the step, and counts it, if it is too large with these. Does nothing unless `name` is
        SAMPLE and the step is recorded.
        """
        if self.newest is None or name != SAMPLE:
            return
        bucket, arrays = self.newest
        places, wanted = self._find_pages(bucket, arrays, written=True)
        if self._is_too_large(arrays, wanted, _row_bytes([*_long(state), forwarded.logits])):
            arrays.clear()
            self.newest = None
            return
        arrays |= {f"after/{name}": array for name, array in self._take_pages(places, wanted).items()}
        arrays |= {f"after/{name}": array for name, array in self._take_states().items() if name[-1].isdigit()}
        sampling = self._copies["sampling"](_short(state)["sampling"])
        arrays |= {f"sampling/{name}": np.asarray(array) for name, array in sampling.items()}
        slots = [[row.slot for row in rows] for rows in self._ranks]
        long = self._rows("long", _long(state), slots, SLOT_ROWS)
        arrays |= {f"sampling/{name}": array for name, array in zip(LONG, long, strict=True)}
        arrays |= _places("rows", [[(at,) for at in range(len(rows))] for rows in self._ranks], ("row",))
        arrays["rows/slot"] = np.array([slot for own in slots for slot in own], np.int32)
        # Padding is left out.
        rows = arrays["rows/rank"], arrays["rows/row"]
        arrays["logits"] = _by_rank(forwarded.logits, len(self._ranks))[rows]
        counts = [sum(row.count for row in rows) for rows in self._ranks]
        arrays |= _places("tokens", [[(at,) for at in range(count)] for count in counts], ("token",))
        if self._extension.keeps_layers:
            hidden = _by_rank(forwarded.sections[NAME], len(self._ranks))
            hidden = hidden[arrays["tokens/rank"], arrays["tokens/token"]]
            arrays["layers"] = hidden.reshape(len(hidden), self._extension.num_kept, -1)

    def _find_rows(self, bucket: Bucket, arrays: Mapping[str, np.ndarray]) -> None:
        """Store, for each replica, the message's rows and the rows of recurrent states that the step reads or writes.

        arrays: recorded arrays of the step so far, of which "message", "state/num_computed" and "state/page_table" are
        read.
        """
        layout, num_slots = self._programs.packer.layouts[bucket], self._shape.num_slots
        known = arrays["state/num_computed"].reshape(len(arrays["message"]), -1)
        self._ranks = [step_rows(layout, *own) for own in zip(arrays["message"], known, strict=True)]
        self._states = []
        for rows, table in zip(self._ranks, self._tables(bucket, arrays), strict=True):
            found = {row.slot: None for row in rows}
            if self._shape.config.num_state_snapshots:
                of_slots = table[-num_slots:]
                found |= {num_slots + int(of_slots[row.slot, at]): None for row in rows for at in (LOAD, SAVE)}
            most = num_slots + self._shape.config.num_state_snapshots
            self._states.append([row for row in found if 0 <= row < most])

    def _tables(self, bucket: Bucket, arrays: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        """Return the page tables of each replica with the message's new entries, as the forward pass reads them.

        arrays: recorded arrays of the step; "message" and "state/page_table" are read.
        """
        layout, message = self._programs.packer.layouts[bucket], arrays["message"]
        tables = arrays["state/page_table"].reshape(len(message), -1, arrays["state/page_table"].shape[-1])
        return [page_tables(layout, *own) for own in zip(message, tables, strict=True)]

    def _is_too_large(self, arrays: Mapping[str, np.ndarray], pages: Sequence[Sequence[int]], of_row: int = 0) -> bool:
        """Return whether the arrays so far, these pages and the states exceed record_steps_bytes; if so, increment
        num_too_large.

        pages: rows of each replica's pool. of_row: bytes of a row's sampler inputs; 0 before a forward pass, when it is
        unknown whether a sampler follows. Hidden states are counted with the sampler inputs.
        """
        size = num_bytes(arrays) + sum(map(len, pages)) * _row_bytes([self._stage.pages.data])
        if STATES in self._copies:
            leaves = jax.tree.leaves(self._stage.slots.sections[STATES])
            size += sum(map(len, self._states)) * _row_bytes(leaves)
        rows = [row for own in self._ranks for row in own]
        size += len(rows) * of_row
        if of_row and self._extension.keeps_layers:
            itemsize = jnp.dtype(self._shape.config.dtype).itemsize
            width = self._extension.num_kept * self._shape.model.config.hidden_size
            size += sum(row.count for row in rows) * width * itemsize
        is_so = size > self._max_bytes
        self.num_too_large += is_so
        return is_so

    def _find_pages(
        self, bucket: Bucket, arrays: Mapping[str, np.ndarray], *, written: bool
    ) -> tuple[list[list[tuple[int, int]]], list[list[int]]]:
        """Return, for each replica, (layer, page) of each page of a layer that the step reads, and its rows in the pool
        in the same order. written: only pages that the step writes.

        arrays: argument of `_find_rows`, which must have been called before.
        """
        groups, size, num_slots = paged_groups(self._shape.groups), self._shape.config.block_size, self._shape.num_slots
        places: list[list[tuple[int, int]]] = []
        wanted: list[list[int]] = []
        for rows, tables in zip(self._ranks, self._tables(bucket, arrays), strict=True):
            own: list[tuple[int, int]] = []
            pool_rows: list[int] = []
            for number, group in enumerate(groups):
                table = tables[number * num_slots : (number + 1) * num_slots]
                for page in pages_of(table, rows, group.window, size, written=written):
                    own += [(layer, page) for layer in group.layers]
                    pool_rows += [index * self._num_pages + page for index in range(len(group.layers))]
            places.append(own)
            wanted.append(pool_rows)
        return places, wanted

    def _take_pages(
        self, places: Sequence[Sequence[tuple[int, int]]], wanted: Sequence[Sequence[int]]
    ) -> dict[str, np.ndarray]:
        """Return columns "pages/rank", "pages/layer" and "pages/page" for the pages that `_find_pages` returned, and
        "pages/data", their current content; waits for it.
        """
        found = self._rows("pages", [self._stage.pages.data], wanted, PAGE_ROWS)
        return {**_places("pages", places, ("layer", "page")), "pages/data": found[0]}

    def _take_states(self) -> dict[str, np.ndarray]:
        """Return the rows of recurrent states that the step reads or writes, with their current content: columns
        "states/rank" and "states/row", and "states/0", ... for each array. {} for a model without states.
        """
        if STATES not in self._copies:
            return {}
        leaves = jax.tree.leaves(self._stage.slots.sections[STATES])
        found = self._rows(STATES, leaves, self._states, SLOT_ROWS)
        places = _places(STATES, [[(row,) for row in rows] for rows in self._states], ("row",))
        return {**places, **{f"{STATES}/{index}": array for index, array in enumerate(found)}}

    def _rows(self, name: str, arrays: Any, wanted: Sequence[Sequence[int]], size: int) -> list[np.ndarray]:
        """Copy the wanted rows of each array to the host, and return them for each array, in the order of replicas;
        waits for them.

        name: name of the program that copies them, `size` rows of each replica at a time. wanted: row numbers of each
        replica, counted within it.
        """
        parts: list[list[list[np.ndarray]]] = [[[] for _ in wanted] for _ in arrays]
        for first in range(0, max(1, *map(len, wanted)), size):
            chunks = [rows[first : first + size] for rows in wanted]
            ids = np.zeros((len(wanted), size), np.int32)
            for own, chunk in zip(ids, chunks, strict=True):
                own[: len(chunk)] = chunk
            for found, of_array in zip(self._copies[name](arrays, ids.reshape(-1)), parts, strict=True):
                host = _by_rank(found, len(wanted))
                for rank, chunk in enumerate(chunks):
                    of_array[rank].append(host[rank, : len(chunk)])
        return [np.concatenate([part for rank in of_array for part in rank]) for of_array in parts]

    def _rows_program(self, name: str, arrays: Sequence[Any], size: int) -> Program:
        """Return the program (arrays, i32[replicas * size]) -> these rows of each array, numbered within the replica.

        name: name of the arrays, for messages. arrays: shapes, sharded by replica along their first axis.
        """
        ids, num_ranks = self._shape.rows(size, np.int32), self._shape.num_ranks
        results = [
            jax.ShapeDtypeStruct((num_ranks * size, *array.shape[1:]), array.dtype, sharding=array.sharding)
            for array in arrays
        ]

        def function(arrays: Sequence[jax.Array], ids: jax.Array) -> list[jax.Array]:
            return [array[ids] for array in arrays]

        return program_on(self._shape.mesh, f"record {name}", function, (list(arrays), ids), results, ())

    def _copy_program(self, name: str, arrays: Any) -> Program:
        """Return the program (arrays) -> copies of them, which stay valid when steps take the originals as donated
        arguments. name: name of the arrays, for messages.
        """

        def function(arrays: Any) -> Any:
            return jax.tree.map(lax.optimization_barrier, arrays)

        return program_on(self._shape.mesh, f"record {name}", function, (arrays,), arrays, ())


class StepRecorder(HostExtension):
    """Host extension through which the engine's loop gets the newest recorded step and stops the recording."""

    def newest(self) -> tuple[Bucket, dict[str, np.ndarray]] | None:
        """Return the bucket and arrays of the step dispatched last; None if it is not recorded. The arrays of its
        sampler are added to the dict when the sampler is dispatched.
        """
        return self._taker.newest

    @property
    def num_too_large(self) -> int:
        """Number of steps not recorded because they are larger than record_steps_bytes."""
        return self._taker.num_too_large

    def stop(self) -> None:
        """Stop recording: later steps are not copied."""
        self._taker.is_on = False

    @property
    def _taker(self) -> StepTaker:
        """The StepTaker of the stage that samples."""
        return self.runner.last.extensions[NAME]


def _short(state: Any) -> dict[str, dict[str, Any]]:
    """Return the arrays of DeviceState that are copied whole, by name: under "state" those before a forward pass
    (page_table, num_computed, last_token and the slots' sections without recurrent states), under "sampling" those
    before a sampler (each "params/NAME", logprob_ids and the tokens' sections). state: DeviceState of arrays or of
    shapes.
    """
    slots, sampling = state.slots, state.sampling
    found = {"page_table": slots.page_table, "num_computed": slots.num_computed, "last_token": state.tokens.last_token}
    found |= _leaves({name: own for name, own in slots.sections.items() if name != STATES})
    params = {f"params/{name}": column for name, column in sampling.params._asdict().items()}
    return {
        "state": found,
        "sampling": {**params, "logprob_ids": sampling.logprob_ids, **_leaves(state.tokens.sections)},
    }


def _leaves(sections: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arrays of extensions' sections, by the name "sections/EXTENSION/INDEX"."""
    return {
        f"sections/{name}/{at}": leaf for name, own in sections.items() for at, leaf in enumerate(jax.tree.leaves(own))
    }


def _long(state: Any) -> list[Any]:
    """Return the state's arrays named in LONG, of which some rows are copied: token counts, logit biases, masks."""
    return [state.tokens.token_counts, state.sampling.logit_bias, state.sampling.token_mask]


def _row_bytes(arrays: Sequence[Any]) -> int:
    """Return the bytes of one row, along the first axis, summed over the arrays."""
    return sum(array.nbytes // len(array) for array in arrays)


def _by_rank(array: jax.Array, num_ranks: int) -> np.ndarray:
    """Return an array [replicas * n, ...] on the host as [replicas, n, ...]; waits for it."""
    host = np.asarray(array)
    return host.reshape(num_ranks, len(host) // num_ranks, *host.shape[1:])


def _places(name: str, of_ranks: Sequence[Sequence[tuple[int, ...]]], fields: tuple[str, ...]) -> dict[str, np.ndarray]:
    """Return int32 columns, "NAME/rank" and a "NAME/FIELD" for each field, with a row for each element of `of_ranks`.

    of_ranks: tuples of the fields' values for each replica.
    """
    rows = [(rank, *place) for rank, places in enumerate(of_ranks) for place in places]
    columns = np.array(rows, np.int32).reshape(len(rows), 1 + len(fields)).T
    return {f"{name}/{field}": column for field, column in zip(("rank", *fields), columns, strict=True)}
