"""Faults that begin at a large count: of whatever a kernel counts, those beyond the first few, or the last few.

A table of 32 entries that clamps its index, a loop over two strips, a ring that is emptied by half: small problems do
not show them. Each is caught by one case of every run of the suite; test_counts.py says how large those are.
"""

from __future__ import annotations

from tests.pallas_kernels.mutants.mutant import Mutant, attention
from tests.pallas_kernels.worker import Job

SECONDS = 60

_TPU, _HOPPER = "matmul/tpu", "matmul/hopper"
_LATENT, _DECODE, _MERGE = (f"attention/hopper/{module}" for module in ("latent", "decode", "merge"))


def _tpu(check: str, case: str) -> tuple[Job, ...]:
    return ((check, "tpu-lazy", case),)


def _hopper(check: str, case: str) -> tuple[Job, ...]:
    return ((check, "mgpu", case),)


def _attends(case: str, implementation: str = "mgpu") -> tuple[Job, ...]:
    return attention(implementation, "bfloat16", case)


_MANY_GROUPS, _STRIPS = (
    _tpu("gated_product", "more groups than biases at once"),
    _tpu("gated_product", "strips of columns"),
)
_PIECES = _tpu("grouped_product", "pieces of columns, a group of several blocks")
_SLOTS, _SLOTS_OF_HOPPER = _tpu("lora_product", "decodes of many"), _hopper("lora_product", "decodes of many, Hopper")
_COLUMNS, _ROWS = "nvfp4, tiles of columns and steps that overlap", "nvfp4, tiles of rows"
_RING, _OUT_TILES = _hopper("hopper_product", "int8 in groups of 32"), _hopper("hopper_product", "e4m3 as it is")
_LONG, _CODES, _LATENTS = _attends("long runs"), _attends("codes of decodes"), _attends("latent decodes")

_OF_PRODUCTS = [
    Mutant(
        "biases of groups beyond the 32nd",
        f"{_TPU}/grouped",
        "(lax.div(group[v], _BIASES), strip",
        "(jnp.minimum(lax.div(group[v], _BIASES), 1), strip",
        _MANY_GROUPS,
    ),
    Mutant(
        "matrices of groups beyond the 32nd",
        f"{_TPU}/grouped",
        "(group[v], 0, strip",
        "(jnp.minimum(group[v], 31), 0, strip",
        _MANY_GROUPS,
    ),
    Mutant(
        "scales of sums beyond the 32nd",
        f"{_TPU}/widened",
        "* scales[pl.ds(index, 1), :]",
        "* scales[pl.ds(jnp.minimum(index, 31), 1), :]",
        _tpu("product", "sums of 32"),
    ),
    Mutant(
        "scales of weights beyond the 32nd",
        f"{_TPU}/widened",
        "scales[pl.ds((first + at) // group, 1), :]",
        "scales[pl.ds(jnp.minimum((first + at) // group, 31), 1), :]",
        _tpu("product", "weights of 32"),
    ),
    Mutant(
        "scales of rows beyond the 32nd",
        f"{_TPU}/widened",
        "array.shape, 1) == index",
        "array.shape, 1) == jnp.minimum(index, 31)",
        _tpu("product", "e4m3 rows by groups"),
    ),
    Mutant(
        "zeros beyond the 32nd",
        f"{_TPU}/quantized",
        "== jnp.arange(size // step)",
        "== jnp.minimum(jnp.arange(size // step), 31)",
        _tpu("product", "one row"),
    ),
    Mutant(
        "strips beyond the second",
        f"{_TPU}/grouped",
        "half * strips + n",
        "half * strips + jnp.minimum(n, 1)",
        _STRIPS,
    ),
    Mutant(
        "strips of results beyond the fourth",
        f"{_TPU}/grouped",
        "lambda n, v, _, tile, *__: (tile[v], n)",
        "lambda n, v, _, tile, *__: (tile[v], jnp.minimum(n, 3))",
        _tpu("grouped_product", "whole tiles, weights"),
    ),
    Mutant(
        "pieces of a strip beyond the third",
        f"{_TPU}/grouped",
        "pl.multiple_of(index * shape.piece",
        "pl.multiple_of(jnp.minimum(index, 2) * shape.piece",
        _PIECES,
    ),
    Mutant(
        "blocks of a visit beyond the third",
        f"{_TPU}/grouped",
        "at = begin + index * most",
        "at = begin + jnp.minimum(index, 2) * most",
        _tpu("grouped_product", "rounded rows"),
    ),
    Mutant(
        "tiles of rows beyond the third",
        f"{_TPU}/grouped",
        "lambda n, v, _, tile, *__: (tile[v], 0)",
        "lambda n, v, _, tile, *__: (jnp.minimum(tile[v], 2), 0)",
        _PIECES,
    ),
    Mutant(
        "column tiles beyond the fourth",
        f"{_TPU}/quantized",
        "lambda m, n: (0, n)",
        "lambda m, n: (0, jnp.minimum(n, 3))",
        _tpu("product", "sums of 32"),
    ),
    Mutant(
        "row tiles beyond the third",
        f"{_TPU}/quantized",
        "lambda m, n: (m, 0)",
        "lambda m, n: (jnp.minimum(m, 2), 0)",
        _tpu("product", "weights of 128"),
    ),
    Mutant(
        "passes beyond the third",
        f"{_TPU}/widened",
        "add(first + at, chunk)",
        "add(jnp.minimum(first, 2 * span) + at, chunk)",
        _tpu("product", "weights of 32"),
    ),
    Mutant(
        "slots beyond the 32nd",
        f"{_TPU}/lora",
        "row_and_column(slots[slot_tile[v] * each + at], n)",
        "row_and_column(jnp.minimum(slots[slot_tile[v] * each + at], 31), n)",
        _SLOTS,
    ),
    Mutant(
        "modules beyond the third",
        f"{_TPU}/lora",
        "m * num_slots + slot, 0",
        "jnp.minimum(m, 2) * num_slots + slot, 0",
        _SLOTS,
    ),
    Mutant(
        "outputs beyond the fourth strip",
        f"{_TPU}/lora",
        "first // width + n)",
        "first // width + jnp.minimum(n, 3))",
        _SLOTS,
    ),
    Mutant(
        "columns of rows beyond the fourth tile",
        f"{_TPU}/microscaled",
        "lambda m, n: (m, n)",
        "lambda m, n: (m, jnp.minimum(n, 3))",
        _tpu("microscaled", _COLUMNS),
    ),
    Mutant(
        "rows beyond the fourth tile",
        f"{_TPU}/microscaled",
        "(0 if one else m, 0)",
        "(0 if one else jnp.minimum(m, 3), 0)",
        _tpu("microscaled", _ROWS),
    ),
]
_OF_HOPPER_PRODUCTS = [
    Mutant("half of a ring drained", f"{_HOPPER}/ring", "in range(stages):", "in range(stages // 2):", _RING),
    Mutant("a ring's last stage not drained", f"{_HOPPER}/ring", "in range(stages):", "in range(stages - 1):", _RING),
    Mutant(
        "scales beyond the 32nd",
        f"{_HOPPER}/quantized",
        "shape.num_scales + group, shape.sums)",
        "shape.num_scales + jnp.minimum(group, 31), shape.sums)",
        _RING,
    ),
    Mutant(
        "scales of rows beyond the 32nd, Hopper",
        f"{_HOPPER}/quantized",
        "pl.ds(group, shape.sums)",
        "pl.ds(jnp.minimum(group, 30), shape.sums)",
        _hopper("hopper_product", "int8 rows by coarser groups"),
    ),
    Mutant(
        "sums of rows beyond the 32nd",
        f"{_HOPPER}/quantized",
        "pl.ds(tile * shape.sums, shape.sums)",
        "pl.ds(jnp.minimum(tile, 31) * shape.sums, shape.sums)",
        _hopper("hopper_product", "one row, inputs split"),
    ),
    Mutant(
        "output tiles beyond the second",
        f"{_HOPPER}/quantized",
        "jnp.minimum(item.out_tile * (shape",
        "jnp.minimum(jnp.minimum(item.out_tile, 1) * (shape",
        _OUT_TILES,
    ),
    Mutant(
        "results beyond the fourth output tile",
        f"{_HOPPER}/quantized",
        "item.out_tile * shape.outputs +",
        "jnp.minimum(item.out_tile, 3) * shape.outputs +",
        _OUT_TILES,
    ),
    Mutant(
        "matrices of groups beyond the 32nd, Hopper",
        f"{_HOPPER}/quantized",
        "(item.matrix * shape.halves + half)",
        "(jnp.minimum(item.matrix, 31) * shape.halves + half)",
        _hopper("hopper_grouped", "one row of many groups"),
    ),
    Mutant(
        "scales of groups beyond the 32nd",
        f"{_HOPPER}/quantized",
        "pl.ds(item.matrix * shape.num_scales",
        "pl.ds(jnp.minimum(item.matrix, 31) * shape.num_scales",
        _hopper("hopper_grouped", "one row of many groups, codes"),
    ),
    Mutant(
        "biases of groups beyond the 32nd, Hopper",
        f"{_HOPPER}/quantized",
        "pl.ds(item.matrix * 2, 2)",
        "pl.ds(jnp.minimum(item.matrix, 31) * 2, 2)",
        _hopper("hopper_gated", "one row of many groups"),
    ),
    Mutant(
        "tiles of a group beyond the third",
        f"{_HOPPER}/grouped",
        "before = (tile - (last_tiles - each)[group])",
        "before = jnp.minimum(tile - (last_tiles - each)[group], 2)",
        _hopper("hopper_grouped", "all rows of one group"),
    ),
    Mutant(
        "pieces beyond the third",
        f"{_HOPPER}/gated",
        "send(part, first)",
        "send(part, min(first, 2 * PIECE))",
        _hopper("hopper_gated", "e4m3 of groups, rounded rows"),
    ),
    Mutant(
        "slots beyond the 32nd, Hopper",
        f"{_HOPPER}/lora",
        "refs.slots[tile * shape.each + at] *",
        "jnp.minimum(refs.slots[tile * shape.each + at], 31) *",
        _SLOTS_OF_HOPPER,
    ),
]
_OF_ATTENTION = [
    Mutant(
        "a latent block's last unseen slots",
        _LATENT,
        "unseen = end < DECODE_KEYS",
        "unseen = end < DECODE_KEYS - 3",
        _LATENTS,
    ),
    Mutant(
        "a latent block's last slots",
        _LATENT,
        "        seen = row < end\n",
        "        seen = (row < end) | (row >= DECODE_KEYS - 1)\n",
        _LATENTS,
    ),
    Mutant(
        "tiles of heads beyond the second",
        _DECODE,
        "jnp.int32(shape.head_tiles))",
        "jnp.int32(2))",
        _attends("latent of many heads"),
    ),
    Mutant(
        "half of the blocks' ring drained",
        _DECODE,
        "in range(most):",
        "in range(most // 2):",
        _attends("decode bucket"),
    ),
    Mutant("half of the latents' ring drained", _DECODE, "in range(most):", "in range((most + 1) // 2):", _LATENTS),
    Mutant(
        "a block's last unseen slots",
        _DECODE,
        "unseen = end < block",
        "unseen = end < block - 3",
        _attends("decode bucket"),
    ),
    Mutant(
        "kv heads beyond the third",
        _DECODE,
        "(page * num_heads + head)",
        "(page * num_heads + jnp.minimum(head, 2))",
        _CODES,
    ),
    Mutant(
        "scales of kv heads beyond the third",
        _MERGE,
        "refs.v_scale[head] / jnp",
        "refs.v_scale[jnp.minimum(head, 2)] / jnp",
        _CODES,
    ),
    Mutant(
        "sinks of kv heads beyond the third",
        _MERGE,
        "refs.sinks[head, group",
        "refs.sinks[jnp.minimum(head, 2), group",
        _attends("decode window and sinks"),
    ),
    Mutant(
        "partials beyond the eighth",
        _MERGE,
        "fori_loop(first, end, merge_item",
        "fori_loop(first, jnp.minimum(end, first + stages), merge_item",
        (("many_parts", "mgpu"),),
    ),
    Mutant(
        "half of the prefill's ring drained",
        "attention/hopper/prefill_load",
        "in range(stages):",
        "in range(stages // 2):",
        _LONG,
    ),
    Mutant(
        "a prefill block's last unseen slots",
        "attention/hopper/prefill_load",
        "has_unwritten = end < shape.block_kv",
        "has_unwritten = end < shape.block_kv - 3",
        _LONG,
    ),
    Mutant(
        "kv heads of runs beyond the third",
        "attention/hopper/prefill_load",
        "shape.spec.num_kv_heads + tile.kv_head)",
        "shape.spec.num_kv_heads + jnp.minimum(tile.kv_head, 2))",
        _attends("fp8 e4m3 keys and values"),
    ),
    Mutant(
        "a page's last unseen slots",
        "attention/tpu/pages",
        "(word + row >= low) & (word + row < high)",
        "(word + row >= low) & ((word + row < high) | (word + row >= plan.block_kv - 3))",
        _attends("block edges", "tpu-lazy"),
    ),
    Mutant(
        "windows of new tokens beyond the fourth",
        "kv/update_tpu",
        "GROUP - step * window",
        "GROUP - jnp.minimum(step, 3) * window",
        (("update", "tpu-lazy", "bfloat16", "scattered 40"),),
    ),
    Mutant(
        "half of the writes awaited at the end",
        "kv/update_tpu",
        "jnp.maximum(count - in_flight, 0), count",
        "jnp.maximum(count - in_flight // 2, 0), count",
        (("update", "tpu-lazy", "bfloat16", "runs"),),
    ),
]
MUTANTS = _OF_PRODUCTS + _OF_HOPPER_PRODUCTS + _OF_ATTENTION
