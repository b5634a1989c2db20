"""How much each implementation works on at a time: one table, by chip.

Owns every size that is a choice and not a fact of an implementation's structure. How a shape (heads, dtype, page,
tokens) divides these sizes into tiles is a rule beside its kernel, which is handed its sizes as an argument. Knows
nothing of kernels. Sizes change how long a step takes and in which order sums are taken, never what is computed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import jax

from pallas_kernels.registry import has_mosaic, has_tcgen05

# What CUDA calls the cards of compute capability 9.0: H20, H100, H200, H800, GH200; and of 10.0: B100, B200, GB200.
_CARDS = {"9.0": re.compile(r"NVIDIA G?H\d+\b"), "10.0": re.compile(r"NVIDIA G?B[12]00\b")}


class _Sizes:
    """Whole numbers of at least 1; raises ValueError for others."""

    def __post_init__(self) -> None:
        for field in fields(self):  # pyright: ignore[reportArgumentType] - every subclass is a dataclass
            value = getattr(self, field.name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{type(self).__name__}.{field.name} must be a whole number from 1 on, got {value!r}")


@dataclass(frozen=True)
class XlaAttention(_Sizes):
    """Of attention.xla."""

    block_seqs: int = 16  # sequences of a tile of single tokens
    block_q: int = 128  # tokens of a tile of one sequence
    block_kv: int = 128  # keys of a block; twice that for a tile of one row


@dataclass(frozen=True)
class TpuAttention(_Sizes):
    """Of attention.tpu. `single` tiles hold one token and are bound by bandwidth, `run` tiles several."""

    max_block_q: int = 128  # tokens of a run tile
    run_tiles: int = 8  # that the tokens of a step make at least, unless they are smallest tiles
    min_block_q: int = 16  # rows of a bfloat16 tile: with fewer the heads of a group could not be stacked as they are
    run_rows: int = 512  # query rows (tokens x heads of a group) that keep the matrix unit busy on one tile of keys
    single_tiles: int = 8  # of a grid step
    single_keys: int = 1024  # of a block: long blocks amortise the work per block
    run_keys: int = 512  # of a block: short ones waste less on keys past the causal edge
    max_heads: int = 8  # kv heads worked on together
    max_buffers: int = 8  # blocks in VMEM
    buffer_bytes: int = 24 << 20  # for all blocks in VMEM together
    single_parts: int = 4  # blocks of single_keys at a time, where a single kv head would wait for each of its steps
    part_rows: int = 512  # of a run tile with a single kv head, worked on at a time
    score_bytes: int = 3 << 20  # for scores and weights of the heads worked on together; twice that is alive
    # A block in flight hides the latency of the next: about 2 us at the 3 TB/s of the fastest chip.
    in_flight_bytes: int = 6 << 20
    # v5p and tpu7x have 64 MiB of VMEM a core, v5e and v6e twice that. The rest is left to XLA's own fusions.
    vmem_limit_bytes: int = 56 << 20
    smem_table_bytes: int = 900 << 10  # the largest page table in scalar memory, which has 1 MiB on all chips
    cores: int = 1  # that share a kernel call
    mxu_columns: int = 128  # of a matrix unit


@dataclass(frozen=True)
class HopperAttention(_Sizes):
    """Of attention.hopper."""

    num_ctas: int = 132  # persistent ones of each kernel: one per SM, of which H100 SXM and H200 have 132
    decode_tokens: int = 8  # most new tokens of a decode row
    pair_cost: int = 2  # what a (row, kv head) pair costs besides its blocks (queries in, results out), in blocks
    min_part_cost: int = 4  # a CTA's part is not cut smaller than this, in blocks
    decode_stages: int = 6  # most blocks in shared memory
    prefill_stages: int = 4
    merge_stages: int = 8  # partials in flight
    merge_ctas_per_sm: int = 4  # a unit of merging is mostly latency: several at a time


@dataclass(frozen=True)
class TpuUpdate(_Sizes):
    """Of kv.update_tpu."""

    groups_in_flight: int = 32
    reads_ahead: int = 16  # less than groups_in_flight: a read waits for the write of the group it replaces
    window_bytes: int = 2 << 20  # of new tokens held in VMEM, twice
    vmem_limit_bytes: int = 40 << 20  # the default does not hold the groups of very wide rows

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.reads_ahead >= self.groups_in_flight:
            raise ValueError(
                f"TpuUpdate.reads_ahead must be less than groups_in_flight ({self.groups_in_flight}), "
                f"got {self.reads_ahead}"
            )


@dataclass(frozen=True)
class TpuProducts(_Sizes):
    """Of matmul.tpu: products with quantised matrices."""

    rows: int = 512  # of a tile
    columns: int = 512  # of codes of eight bits, twice that of four
    group_rows: int = 512  # of a tile where groups have matrices of their own
    # Of codes and scales of such matrices that two visits hold, or one piece each; twice that of numbers in bfloat16.
    group_bytes: int = 8 << 20
    tile_bytes: int = 40 << 20  # for the operands of two tiles
    vmem_limit_bytes: int = 56 << 20
    sum_rows: int = 64  # up to so many, or half a group, sums of groups are scaled, with more the matrix is
    int8_products: int = 2  # times those of bfloat16 in the same time; 1 where there are none
    cores: int = 1  # that share a kernel call, each with columns of its own


@dataclass(frozen=True)
class HopperProducts(_Sizes):
    """Of matmul.hopper: products with quantised matrices."""

    num_ctas: int = 132  # that inputs are split for: one per SM, of which H100 SXM and H200 have 132
    shared: int = 1  # CTAs of an SM that inputs are split for
    rows: int = 128  # of a tile; an accumulator and a sum of them have a register each
    stages: int = 8  # most tiles in flight
    least_tiles: int = 4  # of inputs, that a CTA adds up: fewer do not hide the latency of the first


@dataclass(frozen=True)
class LoraTiles(_Sizes):
    """Of matmul.lora, on all platforms: visits are made by them."""

    rows: int = 256  # of a tile
    columns: int = 128  # of slots that are brought together, about
    width: int = 2048  # most outputs at a time
    vmem_limit_bytes: int = 56 << 20


@dataclass(frozen=True)
class Tuning:
    """The sizes of all implementations; each reads its own part."""

    xla_attention: XlaAttention = XlaAttention()
    tpu_attention: TpuAttention = TpuAttention()
    hopper_attention: HopperAttention = HopperAttention()
    tpu_update: TpuUpdate = TpuUpdate()
    tpu_products: TpuProducts = TpuProducts()
    hopper_products: HopperProducts = HopperProducts()
    lora_tiles: LoraTiles = LoraTiles()


class Card(NamedTuple):
    """A CUDA card.

    Attributes:
      hopper: of compute capability 9.0, for which the Mosaic GPU kernels are written; not among `plain_cards`.
      blackwell: of 10.0, for which those of products with matrices are; not among `plain_cards`.
    """

    hopper: bool
    num_sms: int
    blackwell: bool = False

    @property
    def multiplies(self) -> bool:
        """Whether products with matrices have a kernel."""
        return self.hopper or self.blackwell


def card_of_trace() -> Card | None:
    """The CUDA card that the current trace is for: of the ambient mesh, else of this process; None for another device.

    A mesh tells a card's name only.
    """
    if (chip := getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)) is not None:
        named = chip.device_kind.startswith("NVIDIA")
        capability = next((each for each, names in _CARDS.items() if names.match(chip.device_kind)), "")
        return _card(capability, chip.num_cores) if named else None
    device = jax.devices()[0]
    if device.platform not in ("gpu", "cuda"):
        return None
    return _card(device.compute_capability, device.core_count)


def _card(capability: str, num_sms: int) -> Card:
    return Card(has_mosaic(capability), num_sms, has_tcgen05(capability))


def tuning_of(platform: str) -> Tuning:
    """The sizes for the chip that the current trace is for, or the usual ones where no such chip is known.

    platform: a row of `registry.KERNELS`.
    """
    table = Tuning()
    if platform == "tpu":
        from jax.experimental.pallas import tpu as pltpu

        if pltpu.is_tpu_device():
            chip = pltpu.get_tpu_info()
            sizes = replace(table.tpu_attention, cores=chip.num_cores, mxu_columns=chip.mxu_column_size)
            # Where a chip is not said to multiply eight bits faster, it does not at all.
            faster = chip.int8_ops_per_second > chip.bf16_ops_per_second
            products = replace(table.tpu_products, int8_products=2 if faster else 1, cores=chip.num_cores)
            return replace(table, tpu_attention=sizes, tpu_products=products)
    if platform == "gpu":
        if num_sms := getattr(jax.devices()[0], "core_count", None):
            table = replace(table, hopper_attention=replace(table.hopper_attention, num_ctas=num_sms))
        if (card := card_of_trace()) is not None and card.num_sms:
            table = replace(table, hopper_products=replace(table.hopper_products, num_ctas=card.num_sms))
    return table
