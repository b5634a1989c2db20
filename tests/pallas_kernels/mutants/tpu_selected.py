"""Faults of sparse attention on TPUs: lists of selected rows, what the kernel sees of them, and indexers' scores."""

from __future__ import annotations

from tests.pallas_kernels.mutants.mutant import Mutant
from tests.pallas_kernels.worker import Job

SECONDS = 60

_SELECTED, _INDEX, _KERNEL = "attention/tpu/selected", "attention/tpu/index", "attention/tpu/kernel"
_BATCH, _WORDS, _PAGES = "attention/ragged_batch", "attention/tpu/words", "attention/tpu/pages"


def _on(*cases: str, implementation: str = "tpu-lazy") -> tuple[Job, ...]:
    return tuple(("attention_to_selected", implementation, case) for case in cases)


def _indexer(*cases: str, implementation: str = "tpu-lazy") -> tuple[Job, ...]:
    return tuple(("selected_by_indexer", implementation, case) for case in cases)


_NEAR, _STRADDLE = _on("keys of decodes, near each other"), _on("blocks that straddle pages, one head")
_HEADS = _on("blocks, mixed")
_CODES = _on("keys, codes in tiles of 32 rows")
_TILES, _MANY = _on("keys in tiles of eight"), _on("keys, float32")
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
    Mutant("bits of the groups before, too", _SELECTED, "(sums - before)", "(sums & 3)", _NEAR),
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
        "repeated >> lane % group",
        "repeated >> (group - 1 - lane % group)",
        _NEAR,
    ),
    Mutant(
        "a group past the sequence's end",
        _SELECTED,
        "clip(ends - last * group, 1, group)",
        "clip(ends * 0 + group, 1, group)",
        _NEAR,
    ),
    Mutant("the last group left out", _SELECTED, "(count - 1) * group + inner", "(count - 1) * group", _NEAR),
    Mutant(
        "tiles of eight rows with the list of words",
        _SELECTED,
        "if in_words else SUBLANES",
        "if True else SUBLANES",
        _TILES,
    ),
    Mutant("the tile's first words for all", _WORDS, "page & (words - 1)", "page & 0", _NEAR),
    Mutant("pages of the next tile", _WORDS, "(page, words.bit_length() - 1)", "(page, words.bit_length() - 2)", _NEAR),
    Mutant(
        "rows of the tile's first words for all",
        _WORDS,
        "(word * rows, rows), rows)",
        "(word * 0, rows), rows)",
        _CODES,
    ),
    Mutant("words of one lane tile for all", _WORDS, "words[pl.ds(tile, pages", "words[pl.ds(tile * 0, pages", _NEAR),
    Mutant("words of one page for all lane tiles", _WORDS, "words.shape[0] // pages), :]", "1), :]", _NEAR),
    Mutant("rows past the end not zeroed", _WORDS, "words[...] & keep", "words[...] | 0", _NEAR),
    Mutant("the rows that share the last word kept", _WORDS, "row + part < first_row", "row < first_row", _NEAR),
    Mutant("all rows of the last word zeroed", _WORDS, "row + part < first_row", "row + rows - 1 < first_row", _NEAR),
    Mutant(
        "pages after the last whole number not zeroed",
        _WORDS,
        "pl.cdiv(end_page, SUBLANES)",
        "end_page // SUBLANES - 1",
        _NEAR,
    ),
    Mutant(
        "copies past the last whole part left out",
        _PAGES,
        "lax.fori_loop(parts * unrolled, count,",
        "lax.fori_loop(count, count,",
        _MANY,
    ),
    Mutant("the first part's pages for all", _PAGES, "part(number * unrolled)", "part(number * 0)", _MANY),
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
