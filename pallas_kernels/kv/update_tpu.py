"""Write of new keys and values on TPUs: a Mosaic kernel that moves aligned groups of eight tokens of a page.

It writes to the layout TOKEN_ROWS, [P, page_size, C], in place.

A token is one row of a page, but a DMA cannot address fewer than eight rows, whatever the dtype. So the unit of work is
a run: consecutive tokens that are written to consecutive rows of one group of eight. The kernel reads the group (unless
the run fills it), inserts the new rows and writes the group back, with many groups in flight. Rows of 8 and 16 bits
share 32-bit words with their neighbours. All arithmetic is on words, so that no bit of the other rows changes.

The division into runs does not change if a layer shifts all slots by whole pages. So the step builds the list of runs
once, and each layer looks up the destination of a run in its own slot_mapping.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxengine.pallas_kernels.kv.pages import LANES, KVPages, rows_of_tokens, to_storage
from jaxengine.pallas_kernels.mosaic_tpu import compiler_params
from jaxengine.pallas_kernels.tuning import TpuUpdate, Tuning

GROUP = 8  # rows of a page that one DMA moves


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class UpdateRuns:
    """Runs of one step, in token order. Entries from `count` on are never read.

    Attributes:
      first: i32 [T], first token of each run.
      length: i32 [T], number of tokens of each run, 1 to GROUP.
      count: i32 [], number of runs.
      reads_ahead: i32 [], number of reads that may overtake a write; 0 if two runs are in the same group.
      sizes: sizes of buffers.
    """

    first: jax.Array
    length: jax.Array
    count: jax.Array
    reads_ahead: jax.Array
    sizes: TpuUpdate = field(metadata={"static": True})


def kv_update_schedule(slot_mapping: jax.Array, *, page_size: int, tuning: Tuning) -> UpdateRuns:
    """Return the runs of slot_mapping i32 [T]: neighbouring tokens in successive slots of one aligned group of eight.
    Negative slots do not belong to any run. Raises ValueError for a page size that is not a multiple
    of 8.
    """
    if page_size % GROUP:
        raise ValueError(f"the TPU KV write needs a page_size that is a multiple of {GROUP}, got {page_size}")
    sizes = tuning.tpu_update
    real = slot_mapping >= 0
    previous = jnp.concatenate([jnp.full((1,), -2, jnp.int32), slot_mapping[:-1]])
    starts = real & ((slot_mapping != previous + 1) | (slot_mapping % GROUP == 0))
    run_of_token = jnp.cumsum(starts, dtype=jnp.int32) - 1
    run = jnp.arange(slot_mapping.shape[0], dtype=jnp.int32)[:, None]
    group = jnp.where(starts, slot_mapping // GROUP, -1)
    # Sequences never share a page that is being written, so two runs are in the same group only in artificial batches.
    meets = (group[:, None] == group) & starts & (run < run[:, 0])
    return UpdateRuns(
        first=jnp.sum(run_of_token < run, axis=1, dtype=jnp.int32),
        length=jnp.sum((run_of_token == run) & real, axis=1, dtype=jnp.int32),
        count=jnp.sum(starts, dtype=jnp.int32),
        reads_ahead=jnp.where(jnp.any(meets), 0, sizes.reads_ahead).astype(jnp.int32),
        sizes=sizes,
    )


def kv_cache_update(
    kv: KVPages,
    k: jax.Array,
    v: jax.Array | None,
    slot_mapping: jax.Array,
    *,
    schedule: UpdateRuns,
    interpret: Any = False,
) -> KVPages:
    """Write k [T, K, H] and v [T, K, Hv] to the slots i32 [T] of the pool on a TPU, in place, and return the pool.

    Arguments are those of kv.update.kv_cache_update, which has checked them. schedule: result of `kv_update_schedule`
    for slot_mapping, or for one that differs by a multiple of the page size. interpret: argument of `pl.pallas_call`,
    for a run on a CPU. Raises ValueError for a pool of float16, which TPUs do not support.
    """
    if kv.data.dtype == jnp.float16:
        raise ValueError("the TPU KV write cannot store float16: there is no such type on TPU, use bfloat16")
    keys = to_storage(k, kv.spec, kv.layout, kv.k_scale)
    values = None if v is None else to_storage(v, kv.spec, kv.layout, kv.v_scale)
    first_lane, end_lane = kv.lanes_of_page
    width = end_lane - first_lane
    num_tokens, num_tiles, sizes = k.shape[0], width // LANES, schedule.sizes
    most_groups = max(sizes.window_bytes // (4 * LANES * num_tiles) // GROUP, 1)
    window = min(pl.cdiv(num_tokens, GROUP), most_groups) * GROUP
    num_windows = pl.cdiv(num_tokens, window)
    words = _token_words(rows_of_tokens(keys, values, kv.spec))
    # A window also has the groups before and after its tokens, since a run is read as all eight rows of its group.
    words = jnp.pad(words, ((GROUP, num_windows * window + GROUP - num_tokens), (0, width - words.shape[1])))
    words = words.reshape(-1, num_tiles, LANES).swapaxes(0, 1)
    in_hbm = pl.BlockSpec(memory_space=pl.ANY)
    scalars = jnp.stack([schedule.count, schedule.reads_ahead])
    data = pl.pallas_call(
        functools.partial(_write_runs, page_size=kv.page_size, window=window, first_lane=first_lane),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(num_windows,),
            in_specs=[
                pl.BlockSpec(
                    (pl.Element(num_tiles), pl.Element(window + 2 * GROUP), pl.Element(LANES)),
                    lambda step, *_: (0, step * window, 0),
                ),
                in_hbm,
            ],
            out_specs=in_hbm,
            scratch_shapes=[
                pltpu.VMEM((sizes.groups_in_flight, GROUP, width), kv.data.dtype),
                pltpu.SemaphoreType.DMA((sizes.groups_in_flight,)),
                pltpu.SemaphoreType.DMA((sizes.groups_in_flight,)),
                pltpu.SMEM((1,), jnp.int32),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct(kv.data.shape, kv.data.dtype),
        input_output_aliases={5: 0},
        # Slots have been compared with the pool's size. Checking every copy again would cost as much as the copy.
        compiler_params=compiler_params(interpret, vmem_limit_bytes=sizes.vmem_limit_bytes),
        interpret=interpret,
        name="kv_cache_update",
    )(scalars, schedule.first, schedule.length, slot_mapping, words, kv.data)
    return replace(kv, data=data)


def _token_words(rows: jax.Array) -> jax.Array:
    """Return the bits of each element of `rows`, repeated to fill a 32-bit word, as u32 of the same shape."""
    bits = lax.bitcast_convert_type(rows, jnp.dtype(f"uint{8 * rows.dtype.itemsize}")).astype(jnp.uint32)
    return bits * jnp.uint32({1: 0x01010101, 2: 0x00010001, 4: 1}[rows.dtype.itemsize])


def _write_runs(
    scalars,
    first,
    length,
    slots,
    words,
    _,
    pool,
    groups,
    read_sems,
    write_sems,
    next_run,
    *,
    page_size: int,
    window: int,
    first_lane: int,
):
    """Body of the kernel: write the runs that start in this grid step's window of new tokens to `pool`, and start the
    reads for later runs. Runs whose first slot is outside of the pool are skipped. The last grid step waits for all
    writes.

    In SMEM: scalars: number of runs, and of reads ahead; first, length: first token and number of tokens of each run;
    slots: i32 slot of each token; next_run: first run that is not written yet, kept across grid steps. words: keys and
    values of tokens from window * step - GROUP on, u32 [tiles, window + 2 * GROUP, LANES] in VMEM. pool: [P, page_size,
    C] in HBM. groups: buffers [groups in flight, GROUP, C] in VMEM; run r uses buffer r modulo their number, with
    semaphores in read_sems and write_sems. window: tokens of a grid step. first_lane: first lane of the words in a row
    of the pool.
    """
    step, count, reads_ahead = pl.program_id(0), scalars[0], scalars[1]
    overlapped = reads_ahead > 0
    in_flight, lanes = groups.shape[0], pl.ds(first_lane, groups.shape[2])

    def stored(run):
        slot = slots[first[run]]
        return (slot >= 0) & (slot < pool.shape[0] * page_size)

    def destination(run):
        slot = slots[first[run]]
        row = pl.multiple_of(lax.div(lax.rem(slot, page_size), GROUP) * GROUP, GROUP)
        return pool.at[lax.div(slot, page_size), pl.ds(row, GROUP), lanes]

    anywhere = pool.at[0, pl.ds(0, GROUP), lanes]  # a wait counts bytes, whatever their destination

    def read(run, at):
        buffer = lax.rem(run, in_flight)
        return pltpu.make_async_copy(at, groups.at[buffer], read_sems.at[buffer])

    def write(run, at):
        buffer = lax.rem(run, in_flight)
        return pltpu.make_async_copy(groups.at[buffer], at, write_sems.at[buffer])

    def start_read(run):
        pl.when(stored(run) & (length[run] < GROUP))(lambda: read(run, destination(run)).start())

    def wait_write(run):
        pl.when(stored(run))(lambda: write(run, anywhere).wait())

    @pl.when(step == 0)
    def _():
        next_run[0] = 0

        @pl.loop(0, jnp.minimum(count, reads_ahead))
        def _(run):
            start_read(run)

    def body(run):
        ahead = run + reads_ahead

        @pl.when(ahead < count)
        def _():
            pl.when(overlapped & (ahead >= in_flight))(lambda: wait_write(ahead - in_flight))
            start_read(ahead)

        @pl.when(stored(run))
        def _():
            pl.when(length[run] < GROUP)(lambda: read(run, anywhere).wait())
            row = lax.rem(slots[first[run]], GROUP)
            source = first[run] - row + GROUP - step * window
            _put_rows(groups, lax.rem(run, in_flight), words, source, row, length[run])
            write(run, destination(run)).start()
            pl.when(~overlapped)(lambda: write(run, anywhere).wait())

        return run + 1

    def starts_here(run):
        return (run < count) & (first[jnp.minimum(run, first.shape[0] - 1)] < (step + 1) * window)

    next_run[0] = lax.while_loop(starts_here, body, next_run[0])

    @pl.when(overlapped & (step == pl.num_programs(0) - 1))
    def _():
        @pl.loop(jnp.maximum(count - in_flight, 0), count)
        def _(run):
            wait_write(run)


def _put_rows(groups, buffer, words, source, row, length):
    """Overwrite rows [row, row + length) of group `buffer` in VMEM: row r gets the bits of token source + r in
    `words`.
    """
    per_word = 4 // groups.dtype.itemsize
    bits = 32 // per_word
    masks = []
    for part in range(per_word):  # row per_word * i + part of the group lies in these bits of word i
        index = lax.broadcasted_iota(jnp.int32, (GROUP // per_word, LANES), 0) * per_word + part
        field = jnp.uint32((2**bits - 1) << bits * part)
        masks.append(jnp.where((index >= row) & (index < row + length), field, jnp.uint32(0)))
    unchanged = ~functools.reduce(jnp.bitwise_or, masks)
    for tile in range(words.shape[0]):
        lanes = slice(tile * LANES, (tile + 1) * LANES)
        old = pltpu.bitcast(groups[buffer, :, lanes], jnp.uint32)
        new = old & unchanged
        for part, mask in enumerate(masks):
            rows = pl.ds(source + part, GROUP // per_word, stride=per_word)
            new |= words[tile, rows, :] & mask
        groups[buffer, :, lanes] = pltpu.bitcast(new, groups.dtype)
