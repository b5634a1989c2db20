"""Faults of the Triton kernel that scores an indexer's keys."""

from __future__ import annotations

from tests.pallas_kernels.mutants.mutant import Mutant
from tests.pallas_kernels.worker import Job

SECONDS = 45

_INDEX = "attention/triton/index"


def _on(*cases: str) -> tuple[Job, ...]:
    return tuple(("selected_by_indexer", "triton", case) for case in cases)


_KEYS, _BLOCKS, _FIVE = (
    _on("indexer of few keys, in several spans"),
    _on("indexer of blocks"),
    _on("indexer of five heads"),
)
_ONE_SPAN = _on("indexer of keys")  # of several blocks
_SEVERAL = _on("indexer of many heads' blocks")

MUTANTS = [
    Mutant("the first span's keys for all", _INDEX, "key = begin + number", "key = number", _KEYS),
    Mutant("span of blocks begins early", _INDEX, "span.first * span.size,", "span.first,", _KEYS),
    Mutant("the first block's keys for all", _INDEX, "number = pl.program_id(1) * plan.keys", "number = 0", _ONE_SPAN),
    Mutant("the span's last block left out", _INDEX, "-(-num_keys // plan.keys)", "num_keys // plan.keys", _KEYS),
    Mutant("page of the next column", _INDEX, "key // spec.page_size]", "key // spec.page_size + 1]", _KEYS),
    Mutant("pages of the row's index", _INDEX, "refs.seqs[index],", "index,", _KEYS),
    Mutant("latents scored", _INDEX, "spec.page_size * spec.key_width +", "0 * spec.key_width +", _KEYS),
    Mutant(
        "rows of latents' width",
        _INDEX,
        "key % spec.page_size * spec.value_width",
        "key % spec.page_size * spec.key_width",
        _KEYS,
    ),
    Mutant(
        "part of a key",
        _INDEX,
        "page, 0, start[:, None], plan.width,",
        "page, 0, start[:, None], plan.width - 8,",
        _KEYS,
    ),
    Mutant("negative scores kept", _INDEX, "jnp.maximum(products, 0.0)", "products", _KEYS),
    Mutant("weights dropped", _INDEX, "weights[:, None] * jnp.maximum", "jnp.maximum", _KEYS),
    Mutant(
        "weights of the first token for all",
        _INDEX,
        "weights.at[index, step, lane]",
        "weights.at[index, 0, lane]",
        _KEYS,
    ),
    Mutant("weights of the first sequence for all", _INDEX, "weights.at[index, step", "weights.at[0, step", _KEYS),
    Mutant("queries of the first sequence for all", _INDEX, "refs.q.at[index,", "refs.q.at[0,", _KEYS),
    Mutant("queries by padded heads", _INDEX, "step * (plan.heads or plan.rows)", "step * plan.rows", _FIVE),
    Mutant("heads of the next token", _INDEX, "(lane < plan.heads) if", "(lane < plan.rows) if", _FIVE),
    Mutant("scores of the first token alone", _INDEX, "refs.o.at[index, step,", "refs.o.at[index, 0,", _KEYS),
    Mutant("scores of the first sequence alone", _INDEX, "refs.o.at[index, row", "refs.o.at[0, row", _BLOCKS),
    Mutant(
        "rows of the first step alone", _INDEX, "index, row[:, None], number", "index, lane[:, None], number", _SEVERAL
    ),
    Mutant("keys of a tile's first token", _INDEX, "jnp.max(ends, axis=1)", "ends[:, 0]", _KEYS),
    Mutant("keys of the first sequence's length", _INDEX, "refs.stop[index]", "refs.stop[0] * 0 + 40", _KEYS),
    Mutant(
        "rows that fill no tile left out",
        _INDEX,
        "-(-num_rows // (heads or rows))",
        "num_rows // (heads or rows)",
        _BLOCKS,
    ),
]
