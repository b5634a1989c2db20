"""Table of tile and buffer sizes of each implementation, by chip.

Contains every size that is a choice and not a fact of an implementation's structure. The rule that divides these sizes
into tiles for a shape (heads, dtype, page, tokens) is in the module of its kernel, which takes its sizes as an
argument. Sizes change how long a step takes and in which order sums are taken, never what is computed.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from jaxengine.pallas_kernels.cards import card_of_trace
from jaxengine.pallas_kernels.registry import backend_of


class _Sizes:
    """Base of the size tables. Constructing one raises ValueError unless every field is an int of at least 1."""

    def __post_init__(self) -> None:
        """Raise ValueError, with the field's name, for a value that is not an int of at least 1."""
        for field in fields(self):  # pyright: ignore[reportArgumentType] - every subclass is a dataclass
            value = getattr(self, field.name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{type(self).__name__}.{field.name} must be a whole number from 1 on, got {value!r}")


@dataclass(frozen=True)
class XlaAttention(_Sizes):
    """Tile and block sizes of attention.xla.

    Attributes:
      block_seqs: sequences of a tile of single tokens.
      block_q: tokens of a tile of one sequence.
      block_kv: keys of a block; twice that for a tile of one row.
      block_bytes: most keys and values that a tile of several sequences gathers at a time.
    """

    block_seqs: int = 16
    block_q: int = 128
    block_kv: int = 128
    block_bytes: int = 1 << 30

    def block_kv_of(self, page_size: int, num_rows: int) -> int:
        """Return the number of keys per block: as many full pages as fit `block_kv`, at least one page. For a tile of
        num_rows = 1 it is twice `block_kv`.
        """
        wanted = self.block_kv if num_rows > 1 else 2 * self.block_kv
        return max(wanted // page_size, 1) * page_size

    def block_seqs_of(self, num_bytes: int) -> int:
        """Return the most sequences of a tile of single tokens: `block_seqs`, or fewer so that their blocks of
        `num_bytes` each fit into `block_bytes`, but at least two.
        """
        return min(self.block_seqs, max(2, self.block_bytes // num_bytes))


# Every operation of a block is a launch, and the host looks at the loop's condition: together a hundred microseconds,
# in which a card reads a hundred megabytes.
_XLA_ON_CUDA = XlaAttention(block_seqs=64, block_q=256, block_kv=1024, block_bytes=256 << 20)


@dataclass(frozen=True)
class XlaSelection(_Sizes):
    """Sizes of attention.xla.selected: for the indexer's scores, and for attention to the keys that it selects.

    Attributes:
      block_seqs, block_q, block_kv: as XlaAttention's, for scores.
      block_tokens: tokens that attend at a time.
      gathered_keys: selected keys of each of these tokens that are gathered at a time.
    """

    block_seqs: int = 8
    block_q: int = 16
    block_kv: int = 512
    block_tokens: int = 8
    gathered_keys: int = 256


# As _XLA_ON_CUDA: fewer and larger blocks.
_SELECTION_ON_CUDA = XlaSelection(block_seqs=64, block_q=64, block_kv=2048, block_tokens=16, gathered_keys=1024)


@dataclass(frozen=True)
class TpuAttention(_Sizes):
    """Tile, block and buffer sizes of attention.tpu. `single` tiles hold one token and are bound by bandwidth, `run`
    tiles several.

    Attributes:
      max_block_q: tokens of a run tile.
      run_tiles: fewest run tiles of a step, unless tiles are already the smallest.
      min_block_q: rows of a bfloat16 tile: with fewer the heads of a group could not be stacked as they are.
      run_rows: query rows (tokens x heads of a group) that keep the matrix unit busy on one tile of keys.
      narrow_rows: the same where results of all heads are few (narrow_bytes): copies and steps take a larger share of a
        block there.
      narrow_bytes: most bytes of the float32 results of a tile of narrow_rows.
      one_head_block_q: most tokens of a run tile where there is one KV head.
      one_head_rows: query rows in the place of narrow_rows there.
      single_tiles: single tiles of a grid step.
      single_keys: keys of a block of single tiles: long blocks amortise the work per block.
      run_keys: keys of a block of run tiles: short blocks waste less on keys past the causal edge.
      max_heads: kv heads processed together.
      max_buffers: blocks in VMEM.
      buffer_bytes: most bytes of all blocks in VMEM: three of single_keys keys of 16 heads of 128 in bfloat16, with a
        lane tile unused.
      single_parts: most blocks of single_keys at a time, where a single kv head would wait for each of its steps.
      part_rows: rows of a run tile with a single kv head that are processed at a time.
      score_bytes: bytes of scores and weights of the heads processed together; twice that is alive.
      in_flight_bytes: bytes of blocks in flight, which hide the latency of the next: about 2 us at the 3 TB/s of the
        fastest chip.
      vmem_limit_bytes: VMEM of a call. v5p and tpu7x have 64 MiB a core, v5e and v6e twice that; the rest is left to
        XLA's own fusions.
      smem_table_bytes: the largest page table in scalar memory, which has 1 MiB on all chips.
      cores: TensorCores that share a kernel call.
      mxu_columns: columns of a matrix unit.
      selected_tokens: tokens whose selected keys are listed at a time.
      selected_rows: 8: selected keys are copied in tiles of eight rows; less: in rows of 32-bit words, pairs of
        bfloat16.
    """

    max_block_q: int = 128
    run_tiles: int = 8
    min_block_q: int = 16
    run_rows: int = 512
    narrow_rows: int = 1024
    narrow_bytes: int = 2 << 20
    one_head_block_q: int = 128
    one_head_rows: int = 1024
    single_tiles: int = 8
    single_keys: int = 1024
    run_keys: int = 512
    max_heads: int = 8
    max_buffers: int = 8
    buffer_bytes: int = 26 << 20
    single_parts: int = 4
    part_rows: int = 512
    score_bytes: int = 3 << 20
    in_flight_bytes: int = 6 << 20
    vmem_limit_bytes: int = 56 << 20
    smem_table_bytes: int = 900 << 10
    cores: int = 1
    mxu_columns: int = 128
    selected_tokens: int = 256
    selected_rows: int = 1


@dataclass(frozen=True)
class HopperAttention(_Sizes):
    """Numbers of CTAs, stages and costs of attention.hopper and attention.blackwell.

    Attributes:
      num_ctas: persistent CTAs of each kernel: one per SM, of which H100 SXM and H200 have 132.
      decode_tokens: most new tokens of a decode row.
      pair_cost: what a (row, kv head) pair costs besides its blocks (queries in, results out), in blocks.
      min_part_cost: blocks below which a CTA's part is not cut.
      decode_stages, prefill_stages: most blocks in shared memory, for decodes and for prefills.
      merge_stages: partials in flight.
      merge_ctas_per_sm: CTAs of a merge per SM: a unit of merging is mostly latency.
    """

    num_ctas: int = 132
    decode_tokens: int = 8
    pair_cost: int = 2
    min_part_cost: int = 4
    decode_stages: int = 6
    prefill_stages: int = 4
    merge_stages: int = 8
    merge_ctas_per_sm: int = 4


@dataclass(frozen=True)
class TritonAttention(_Sizes):
    """Numbers of parts, stages and costs of attention.triton.

    Attributes:
      num_ctas: parts that the blocks of keys are cut into: two per SM, of which A100 has 108.
      pair_cost, min_part_cost: as HopperAttention's.
      num_stages: Triton's stages. Five keep two blocks of keys in flight, as the loads of page ids and of pages share
        them.
      merged_parts: parts that a program of the merge loads at a time; a power of two.
      selected_rows: query heads that share a selected key in a program, a power of two from 16 on: with more, 576
        elements of a key do not fit the shared memory of Ada.
      selected_keys: selected keys that are multiplied at a time; of wide ones half as many. A power of two.
      selected_stages: Triton's stages of attention to selected keys, which are wider.
      least_part, most_part: fewest and most selected keys of a program, powers of two: with more, a decode of few
        tokens leaves multiprocessors idle.
      partial_bytes: most partial results of the tokens that attend to selected keys at a time.
    """

    num_ctas: int = 216
    pair_cost: int = 2
    min_part_cost: int = 4
    num_stages: int = 5
    merged_parts: int = 16
    selected_rows: int = 32
    selected_keys: int = 64
    selected_stages: int = 3
    least_part: int = 128
    most_part: int = 512
    partial_bytes: int = 64 << 20


@dataclass(frozen=True)
class TritonProducts(_Sizes):
    """Sizes of matmul.triton: products with quantised matrices. Rows and inputs are powers of two.

    Attributes:
      num_ctas: programs to spread tiles and inputs over: one per SM, of which A100 has 108.
      rows: most rows of a tile.
      inputs: most inputs of a product.
      stages: most steps in flight.
      least_steps: fewest steps of a program: fewer do not hide the latency of the first.
      most_rows: most rows of a product: with more, XLA's products of widened columns fill the card, and widening costs
        little beside them.
    """

    num_ctas: int = 108
    rows: int = 64
    inputs: int = 128
    stages: int = 4
    least_steps: int = 4
    most_rows: int = 2048


@dataclass(frozen=True)
class TpuUpdate(_Sizes):
    """Buffer sizes of kv.update_tpu.

    Attributes:
      groups_in_flight: groups of eight rows in VMEM.
      reads_ahead: groups read ahead, fewer than groups_in_flight: a read waits for the write of the group it replaces.
      window_bytes: new tokens held in VMEM, in each of two buffers.
      vmem_limit_bytes: VMEM of a call: the default does not hold the groups of very wide rows.
    """

    groups_in_flight: int = 32
    reads_ahead: int = 16
    window_bytes: int = 2 << 20
    vmem_limit_bytes: int = 40 << 20

    def __post_init__(self) -> None:
        """Raise ValueError for a value that is not an int of at least 1, and unless reads_ahead is less than
        groups_in_flight.
        """
        super().__post_init__()
        if self.reads_ahead >= self.groups_in_flight:
            raise ValueError(
                f"TpuUpdate.reads_ahead must be less than groups_in_flight ({self.groups_in_flight}), "
                f"got {self.reads_ahead}"
            )


@dataclass(frozen=True)
class TpuProducts(_Sizes):
    """Tile sizes of matmul.tpu: products with quantised and with grouped matrices.

    Attributes:
      rows: rows of a tile.
      columns: columns of a tile of eight-bit codes; twice that of four bits.
      group_rows: rows of a tile of a grouped product.
      group_bytes: bytes of codes and scales of groups' matrices that two visits hold, or one piece each; matrices in
        bfloat16: twice that.
      tile_bytes: bytes of the operands of two tiles.
      vmem_limit_bytes: as TpuAttention's.
      sum_rows: up to that many rows, or half a group, group sums are scaled; with more, the matrix is.
      int8_products: int8 operations in the time of one in bfloat16; 1 where int8 is not faster.
      cores: TensorCores that share a kernel call, each with columns of its own.
    """

    rows: int = 512
    columns: int = 512
    group_rows: int = 512
    group_bytes: int = 8 << 20
    tile_bytes: int = 40 << 20
    vmem_limit_bytes: int = 56 << 20
    sum_rows: int = 64
    int8_products: int = 2
    cores: int = 1


@dataclass(frozen=True)
class HopperProducts(_Sizes):
    """Tile sizes of matmul.hopper: products with quantised and with grouped matrices.

    Attributes:
      num_ctas: CTAs to split inputs over: one per SM, of which H100 SXM and H200 have 132.
      shared: CTAs per SM to split inputs over.
      rows: rows of a tile; an accumulator and a sum of them have a register each.
      stages: most tiles in flight.
      least_tiles: fewest tiles of inputs that a CTA adds up: fewer do not hide the latency of the first.
    """

    num_ctas: int = 132
    shared: int = 1
    rows: int = 128
    stages: int = 8
    least_tiles: int = 4


@dataclass(frozen=True)
class LoraTiles(_Sizes):
    """Tile sizes of LoRA products on all platforms, by which matmul.lora cuts visits.

    Attributes:
      rows: rows of a tile.
      columns: columns of the slots that are multiplied together, about.
      width: most outputs at a time.
      vmem_limit_bytes: as TpuAttention's.
    """

    rows: int = 256
    columns: int = 128
    width: int = 2048
    vmem_limit_bytes: int = 56 << 20


@dataclass(frozen=True)
class Tuning:
    """Sizes of all implementations, one field for each, named like its module."""

    xla_attention: XlaAttention = XlaAttention()
    xla_selection: XlaSelection = XlaSelection()
    tpu_attention: TpuAttention = TpuAttention()
    hopper_attention: HopperAttention = HopperAttention()
    triton_attention: TritonAttention = TritonAttention()
    triton_products: TritonProducts = TritonProducts()
    tpu_update: TpuUpdate = TpuUpdate()
    tpu_products: TpuProducts = TpuProducts()
    hopper_products: HopperProducts = HopperProducts()
    lora_tiles: LoraTiles = LoraTiles()


def tuning_of(platform: str) -> Tuning:
    """Return the sizes for the chip that the current trace is for: the platform's defaults with the chip's numbers of
    cores or multiprocessors, and on TPUs its matrix units and int8 rate; the defaults alone if the chip is not known.

    platform: one of `registry.PLATFORMS`.
    """
    table = Tuning()
    if platform == "tpu":
        from jax.experimental.pallas import tpu as pltpu

        if pltpu.is_tpu_device():
            chip = pltpu.get_tpu_info()
            sizes = replace(table.tpu_attention, cores=chip.num_cores, mxu_columns=chip.mxu_column_size)
            if sizes.mxu_columns > 128:  # narrower units are busy as it is, and larger tiles hold more sequences
                sizes = replace(sizes, one_head_block_q=256, one_head_rows=2048)
            # A chip without a higher int8 rate gains nothing from int8 products.
            faster = chip.int8_ops_per_second > chip.bf16_ops_per_second
            products = replace(table.tpu_products, int8_products=2 if faster else 1, cores=chip.num_cores)
            return replace(table, tpu_attention=sizes, tpu_products=products)
    if backend_of(platform) == "cuda":
        table = replace(table, xla_attention=_XLA_ON_CUDA, xla_selection=_SELECTION_ON_CUDA)
    if platform == "gpu_triton" and (card := card_of_trace()) is not None and card.num_sms:
        table = replace(
            table,
            triton_attention=replace(table.triton_attention, num_ctas=2 * card.num_sms),
            triton_products=replace(table.triton_products, num_ctas=card.num_sms),
        )
    if platform in ("gpu", "gpu_blackwell") and (card := card_of_trace()) is not None and card.num_sms:
        attention = replace(table.hopper_attention, num_ctas=card.num_sms)
        products = replace(table.hopper_products, num_ctas=card.num_sms)
        beside = replace(table.triton_attention, num_ctas=2 * card.num_sms)
        table = replace(table, hopper_attention=attention, hopper_products=products, triton_attention=beside)
    if platform in ("gpu", "gpu_blackwell"):  # 64 rows are those of a product of theirs
        table = replace(table, triton_attention=replace(table.triton_attention, selected_rows=64))
    return table
