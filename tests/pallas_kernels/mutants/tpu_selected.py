"""Faults of sparse attention on TPUs: lists of selected rows, what the kernel sees of them, and indexers' scores."""

from __future__ import annotations

from tests.pallas_kernels.mutants.mutant import Mutant
from tests.pallas_kernels.worker import Job

SECONDS = 60

_SELECTED, _INDEX, _KERNEL = "attention/tpu/selected", "attention/tpu/index", "attention/tpu/kernel"
_BATCH = "attention/ragged_batch"


def _on(*cases: str, implementation: str = "tpu-lazy") -> tuple[Job, ...]:
    return tuple(("attention_to_selected", implementation, case) for case in cases)


def _indexer(*cases: str, implementation: str = "tpu-lazy") -> tuple[Job, ...]:
    return tuple(("selected_by_indexer", implementation, case) for case in cases)


_NEAR, _STRADDLE = _on("keys of decodes, near each other"), _on("blocks that straddle pages, one head")
_HEADS = _on("blocks, mixed")
_KEYS, _BLOCKS = _indexer("indexer of keys"), _indexer("indexer of blocks")

MUTANTS = [
    Mutant("rows that are not selected seen", _KERNEL, "    if plan.has_seen:\n", "    if False:\n", _NEAR),
    Mutant(
        "mask of the first block for all",
        _KERNEL,
        "pl.ds(pl.multiple_of(first_key, LANES), plan.block_kv)]",
        "pl.ds(pl.multiple_of(first_key * 0, LANES), plan.block_kv)]",
        _NEAR,
    ),
    Mutant(
        "mask of the tile's first token for all",
        _KERNEL,
        "refs.seen[pl.ds(sub, 1)",
        "refs.seen[pl.ds(sub * 0, 1)",
        _NEAR,
    ),
    Mutant("bits of the groups before, too", _SELECTED, "(sums - before)", "(sums & 255)", _NEAR),
    Mutant(
        "groups next to each other taken for one",
        _SELECTED,
        "live & (numbers != jnp.pad(",
        "live & (numbers + 1 != jnp.pad(",
        _NEAR,
    ),
    Mutant(
        "bits in the opposite order",
        _SELECTED,
        "repeated >> lane % GROUP",
        "repeated >> (GROUP - 1 - lane % GROUP)",
        _NEAR,
    ),
    Mutant(
        "a group past the sequence's end",
        _SELECTED,
        "clip(ends - last * GROUP, 1, GROUP)",
        "clip(ends * 0 + GROUP, 1, GROUP)",
        _NEAR,
    ),
    Mutant("the last group left out", _SELECTED, "(count - 1) * GROUP + inner", "(count - 1) * GROUP", _NEAR),
    Mutant("runs of the page's start", _SELECTED, " + firsts % page_size // run", "", _STRADDLE),
    Mutant(
        "pages of the next column",
        _SELECTED,
        "(firsts // page_size)[..., None] == columns",
        "(firsts // page_size)[..., None] == columns + 1",
        _STRADDLE,
    ),
    Mutant(
        "keys after the token's own",
        _SELECTED,
        "jnp.clip(ends[:, None] - firsts, 0, run)",
        "jnp.clip(ends[:, None] + 1 - firsts, 0, run)",
        _STRADDLE,
    ),
    Mutant(
        "a part of a run not last",
        _SELECTED,
        "jnp.where(seen == run, numbers, ",
        "jnp.where(seen > 0, numbers, ",
        _STRADDLE,
    ),
    Mutant(
        "unused blocks attended to",
        _SELECTED,
        "jnp.where(live, jnp.clip(ends[:, None]",
        "jnp.where(live | True, jnp.clip(ends[:, None]",
        _HEADS,
    ),
    Mutant(
        "lanes of the first head for all",
        _SELECTED,
        "kv.lanes_of_page[0] + head * stride",
        "kv.lanes_of_page[0] + head * 0",
        _HEADS,
    ),
    Mutant("blocks of the first head for all", _SELECTED, "_pieces(blocks[:, head]", "_pieces(blocks[:, 0]", _HEADS),
    Mutant(
        "tokens without keys not zeroed",
        _SELECTED,
        "    return jnp.where(num_keys[:, None, None] > 0, o, 0)",
        "    return jnp.where(num_keys[:, None, None] > -1, o, 0)",
        _HEADS,
    ),
    Mutant(
        "padding reads keys",
        _BATCH,
        "batch.cu_q_lens[batch.num_seqs], ends, 0)",
        "batch.cu_q_lens[batch.num_seqs], ends, 9)",
        _HEADS,
    ),
    Mutant(
        "the last tokens at a time left out",
        "attention/xla/selected",
        "lax.fori_loop(0, -(-num_live // size), some",
        "lax.fori_loop(0, num_live // size, some",
        _HEADS,
    ),
    Mutant(
        "sequence of the next token",
        _BATCH,
        "batch.cu_q_lens[seqs + 1] - 1 - tokens",
        "batch.cu_q_lens[seqs + 1] - tokens",
        _STRADDLE,
    ),
    Mutant(
        "the next chunk's copies overwrite",
        _INDEX,
        "        slot = lax.rem(index, 2)\n\n        def copy",
        "        slot = lax.rem(index * 0, 2)\n\n        def copy",
        _KEYS + _indexer("indexer of keys", implementation="tpu-eager"),
    ),
    Mutant(
        "scores without a wait",
        _INDEX,
        "        pltpu.make_async_copy(pages, pages, arrived.at[slot]).wait()\n",
        "",
        _KEYS,
    ),
    Mutant(
        "pages of the first chunk for all",
        _INDEX,
        "(seq * plan.chunks + own) * plan.pages",
        "seq * plan.chunks * plan.pages",
        _KEYS,
    ),
    Mutant(
        "the last page not copied",
        _INDEX,
        "counts = -(-jnp.max(ends, axis=1) // kv.page_size)",
        "counts = jnp.max(ends, axis=1) // kv.page_size",
        _KEYS,
    ),
    Mutant("negative scores kept", _INDEX, "jax.nn.relu(products)", "products", _KEYS),
    Mutant(
        "latents scored",
        _INDEX,
        "first = kv.lanes_of_page[0] + kv.spec.value_column",
        "first = kv.lanes_of_page[0]",
        _BLOCKS,
    ),
    Mutant(
        "the first span's pages for all",
        _INDEX,
        "column = span.first * (span.size // kv.page_size) + ",
        "column = ",
        _KEYS,
    ),
]
