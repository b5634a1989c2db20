"""Kernels of sparse attention: what indexers select, and attention to it, against the oracles.

Plain XLA is compared in attention/test_selected.py and test_selected_blocks.py. Here attention is to selections that
are drawn, because it must not depend on how they came about.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxengine.pallas_kernels.attention.ragged_batch import AttentionSpec, RaggedBatch
from jaxengine.pallas_kernels.attention.selected import block_attention, select_blocks, select_keys, selected_attention
from jaxengine.pallas_kernels.kv.pages import KVPages, KVSpec, alloc
from jaxengine.pallas_kernels.tuning import XlaSelection
from tests.pallas_kernels import reference
from tests.pallas_kernels.conformance import MAX_OF_V, pool, ragged_batch, watched
from tests.pallas_kernels.implementations import Implementation
from tests.pallas_kernels.problems import Case, Problem, build


class Selection(NamedTuple):
    """A batch whose tokens attend to `count` keys, or, with a `size`, to so many blocks for each KV head.

    case: its dims are those of a pool's rows: a latent, or a key and its value joined; and a key of an indexer.
    width: elements of a value. near: positions are drawn from a range of so many, so that they share groups and pages.
    """

    case: Case
    count: int
    width: int
    size: int | None = None
    near: int | None = None
    refused: str = ""  # why plain XLA must run it on a TPU
    rows: int = 1  # TpuAttention.selected_rows


_MIXED = (1, 1, 6, 0, 1), (100, 17, 30, 0, 140)
_FEW: dict[str, Any] = {"num_tokens": 11, "max_seqs": 7}


def _latents(
    name: str,
    count: int,
    q_lens=_MIXED[0],
    kv_lens=_MIXED[1],
    *,
    near: int | None = None,
    refused: str = "",
    **changes: Any,
):
    fields: dict[str, Any] = {"heads": (16, 1), "dims": (40, 16), **_FEW, **changes}
    return Selection(Case(name, q_lens, kv_lens, **fields), count, 24, None, near, refused)


def _wide(name: str, count: int, *lengths: Any, **changes: Any) -> Selection:
    """Problem over latents in three lane tiles, of which values take two."""
    return _latents(name, count, *lengths, dims=(304, 16), **changes)._replace(width=200)


def _blocks(name: str, count: int, size: int, q_lens=_MIXED[0], kv_lens=_MIXED[1], *, refused="", **changes: Any):
    fields: dict[str, Any] = {"heads": (4, 2), "dims": (256, 128), **_FEW, **changes}
    width = fields["dims"][0] // 2
    return Selection(Case(name, q_lens, kv_lens, **fields), count, width, size, None, refused)


_DECODES = (1,) * 5, (300, 17, 128, 9, 1)
_OF_DECODES: dict[str, Any] = {"num_tokens": 5, "max_seqs": 5}
_LONG: dict[str, Any] = {**_OF_DECODES, "max_pages": 44}


def _by_name(*selections: Selection) -> dict[str, Selection]:
    return {each.case.name: each for each in selections}


QUICK = _by_name(
    _latents("keys, mixed, with sinks", 40, sinks="mixed"),
    # Keys in more groups than a block of copies has.
    _wide("keys of decodes, near each other", 120, _DECODES[0], (700, 17, 128, 9, 1), near=640, heads=(20, 1), **_LONG),
    _wide("keys in tiles of eight", 40, *_DECODES, near=64, heads=(20, 1), **_OF_DECODES)._replace(rows=8),
    _wide("keys, codes in tiles of 32 rows", 40, *_DECODES, kv_dtype="int8", page_size=32, **_OF_DECODES),
    _blocks("blocks, mixed", 4, 32),
    _blocks("blocks that straddle pages, one head", 4, 24, *_DECODES, dims=(64, 32), heads=(3, 1), **_OF_DECODES),
    _blocks("heads between lane tiles", 3, 16, dims=(160, 32), refused="they do not begin at lane tiles"),
    _blocks("blocks of twelve", 3, 12, refused="runs of 4 tokens"),
)
THOROUGH = _by_name(
    _latents("keys, float32", 135, dtypes=("float32",), heads=(8, 1)),  # more copies than are unrolled at a time
    _latents("keys, codes", 40, *_DECODES, kv_dtype="int8", **_OF_DECODES),
    _latents("keys, codes of fp8", 300, *_DECODES, kv_dtype="float8_e4m3fn", **_OF_DECODES),
    _latents("keys in pages of eight", 40, page_size=8, max_pages=40),
    _latents("keys, all pages another's past the end", 40, past_end=3),
    _blocks("blocks, pages of two blocks", 3, 16, page_size=32),
    _blocks("blocks longer than a buffer, float32", 12, 16, *_DECODES, dtypes=("float32",), **_OF_DECODES),
    _blocks("blocks, more than there are", 40, 8),
)
# DeepSeek-V3.2 and MiniMax M3 on as many devices as they have KV heads: few tokens, as each takes seconds.
PRODUCTION = _by_name(
    _latents(
        "DeepSeek-V3.2",
        2048,
        *((1, 1), (5000, 40)),
        dims=(576, 128),
        page_size=128,
        max_pages=40,
        num_tokens=2,
        max_seqs=2,
    )._replace(width=512),
    _blocks(
        "MiniMax M3",
        16,
        128,
        *((1, 2), (5000, 130)),
        heads=(16, 1),
        page_size=64,
        max_pages=80,
        num_tokens=3,
        max_seqs=2,
    ),
)
SELECTIONS = QUICK | THOROUGH | PRODUCTION
# Of indexers: `width` is the number of their heads, and of blocks the number of local ones.
_SEQUENCES = (1, 1, 7, 0, 1), (300, 17, 30, 0, 140)
INDEXERS = _by_name(
    _latents("indexer of keys", 40, *_SEQUENCES)._replace(width=16),
    _latents("indexer of few keys, in several spans", 2, *_SEQUENCES)._replace(width=16),
    _latents("indexer of blocks", 2, *_SEQUENCES, heads=(4, 2))._replace(width=1, size=32),
    _latents("indexer of five heads", 6, refused="its heads fill no sublane tile")._replace(width=5),
)
MORE_INDEXERS = _by_name(
    _latents("indexer of many heads' blocks", 2, (7,), (90,), heads=(32, 32), num_tokens=7, max_seqs=1)._replace(
        width=1, size=32
    ),
    _latents("indexer of keys, float32", 6, *_SEQUENCES, dtypes=("float32",))._replace(width=8),
    _latents("indexer of keys, codes", 6, *_DECODES, kv_dtype="int8", **_OF_DECODES)._replace(width=8),
    _latents(
        "DeepSeek-V3.2's indexer",
        64,
        *((1, 1), (5000, 40)),
        dims=(576, 128),
        page_size=128,
        max_pages=40,
        num_tokens=2,
        max_seqs=2,
    )._replace(width=64),
)
_TILES = XlaSelection(block_seqs=2, block_q=3, block_kv=32)
# Kernels of each platform: of attention and of an indexer's scores.
_KERNELS = {"tpu": ("paged_attention_single", "index_scores"), "gpu_triton": ("selected_rows", "index_scores")}


def _is_refused(given: Selection, dtype: str, implementation: Implementation) -> bool:
    return bool(given.refused) if implementation.platform == "tpu" else dtype == "float32"


def programs_of(platform: str) -> Iterator[tuple[Callable, tuple]]:
    """Each operation of sparse attention, and shapes that the kernels of TPUs and in Triton take."""
    num_tokens, num_seqs = 6, 3

    def shape(*sizes: int, dtype=jnp.bfloat16) -> Any:
        return jax.ShapeDtypeStruct(sizes, dtype)

    counts = (num_seqs + 1,), (num_seqs,), (num_seqs, 3), (num_tokens,), (), ()
    batch = RaggedBatch(*(shape(*sizes, dtype=jnp.int32) for sizes in counts))

    def pool(heads: int, key: int, index: int) -> KVPages:
        return jax.eval_shape(partial(alloc, KVSpec(20, 16, heads, key, index, "bfloat16"), platform=platform))

    latents, joined = pool(1, 40, 16), pool(2, 256, 128)
    spec = AttentionSpec(8, 1, 40, 24, 0.2, values_in_keys=True)
    index = shape(num_tokens, 8, 16), shape(num_tokens, 8, dtype=jnp.float32)
    parts = shape(num_tokens, 8, 24), shape(num_tokens, 8, 16)
    yield partial(select_keys, count=5), (*index, latents, batch)
    positions, blocks = (shape(num_tokens, *sizes, dtype=jnp.int32) for sizes in ((20,), (2, 2)))
    yield partial(selected_attention, spec=spec), (*parts, latents, batch, positions)
    yield partial(select_blocks, size=16, count=2, local=1), (shape(num_tokens, 2, 128), joined, batch)
    attend = partial(block_attention, spec=AttentionSpec(4, 2, 128, 128, 0.1), size=16)
    yield attend, (shape(num_tokens, 4, 128), joined, batch, blocks)


def attention_to_selected(name: str, implementation: Implementation) -> None:
    """All tokens of a batch against the oracle; in mixed ones the last token alone, too, for the same bits."""
    given = SELECTIONS[name]
    (dtype,) = given.case.dtypes if len(given.case.dtypes) == 1 else ("bfloat16",)
    problem = build(given.case, dtype, "normal")
    chosen, ends = _chosen(given, problem)
    kv, batch = pool(problem, implementation.platform, aligned_values=True), ragged_batch(problem)
    run = jax.jit(lambda q, kv, batch, chosen: _attend(given, q, kv, batch, chosen, problem.sinks, implementation))
    q = jnp.asarray(problem.q[..., : _key_dim(given)], dtype)
    program = str(run.trace(q, kv, batch, chosen).jaxpr)
    refused = _is_refused(given, dtype, implementation)
    assert (_KERNELS[implementation.platform][0] in program) != refused, "kernel or plain XLA, unlike what is said"
    if refused:
        return
    with watched(implementation, name):
        got = np.asarray(run(q, kv, batch, chosen), np.float32)
    want = _expected(given, problem, np.asarray(q, np.float32), chosen)
    largest = np.nanmax(np.abs(np.where(np.isfinite(problem.k_pages), problem.k_pages, 0)))
    worst = np.abs(got - want).max(axis=(1, 2))
    assert (worst <= MAX_OF_V[dtype] * largest).all(), f"{name}: tokens {np.argwhere(worst > MAX_OF_V[dtype])[:9, 0]}"
    assert not got[ends == 0].any(), f"{name}: tokens without keys are not exactly 0"
    for token in np.flatnonzero(ends)[[-1]] if "mixed" in name else ():
        own = slice(token, token + 1)
        seq = np.searchsorted(problem.cu_q_lens[: problem.num_seqs + 1], token, side="right") - 1
        arrays = np.array([0, 1]), ends[own], problem.page_table[[seq]], np.array([-1]), 1, 1
        alone = type(batch)(*(jnp.asarray(each, jnp.int32) for each in arrays))
        with watched(implementation, f"{name}, token {token} alone"):
            again = np.asarray(run(q[own], kv, alone, chosen[own]), np.float32)
        np.testing.assert_array_equal(again[0], got[token], f"{name}: token {token} alone")


def selected_by_indexer(name: str, implementation: Implementation) -> None:
    """Every token of a batch selects what the oracle says, exactly."""
    given = (INDEXERS | MORE_INDEXERS)[name]
    case, of_blocks = given.case, given.size is not None
    on_tpu = implementation.platform == "tpu"
    (dtype,) = case.dtypes if len(case.dtypes) == 1 else ("float32" if case.kv_dtype and on_tpu else "bfloat16",)
    problem, rng = build(case, dtype, "normal"), np.random.default_rng(13)
    heads = case.heads[1] if of_blocks else given.width
    q = jnp.asarray(rng.standard_normal((case.num_tokens, heads, case.dims[1])), dtype)
    weights = jnp.asarray(rng.standard_normal(q.shape[:2]), jnp.float32)
    v_pages = problem.v_pages
    if of_blocks:  # all heads have the same key of the indexer
        v_pages = np.repeat(v_pages[:, :, :1], heads, axis=2)
        problem = problem._replace(v_codes=np.repeat(problem.v_codes[:, :, :1], heads, axis=2))
    kv, batch = pool(problem, implementation.platform, aligned_values=True), ragged_batch(problem)
    options: dict[str, Any] = {"count": given.count, **implementation._options()}
    if on_tpu:
        options["sizes"] = implementation._tuning().tpu_attention
    tuning = replace(implementation._tuning(), xla_selection=_TILES)

    @jax.jit
    def run(q, weights, kv, batch):
        shape = {"num_tokens": case.num_tokens, "page_size": case.page_size, "tuning": tuning}
        schedule = implementation._kernel("selection_schedule")(batch, **shape)
        if of_blocks:
            own: dict[str, Any] = {"size": given.size, "local": given.width}
            return implementation._kernel("select_blocks")(q, kv, batch, schedule, **own, **options)
        return implementation._kernel("select_keys")(q, weights, kv, batch, schedule, pooling=None, **options)

    refused = _is_refused(given, dtype, implementation)
    assert (_KERNELS[implementation.platform][1] in str(run.trace(q, weights, kv, batch).jaxpr)) != refused
    if refused:
        return
    with watched(implementation, name):
        got = np.asarray(run(q, weights, kv, batch))
    inputs = np.asarray(q, np.float32), v_pages[:, :, 0]
    rows = problem.cu_q_lens, problem.kv_lens, problem.page_table, problem.num_seqs
    if given.size is not None:
        want = reference.select_blocks(*inputs, *rows, size=given.size, count=given.count, local=given.width)
    else:
        want = reference.select_keys(inputs[0], np.asarray(weights), inputs[1], *rows, given.count)
    np.testing.assert_array_equal(got, want, name)


def _key_dim(given: Selection) -> int:
    return given.case.dims[0] - (0 if given.size is None else given.width)


def _spec(given: Selection) -> AttentionSpec:
    return AttentionSpec(*given.case.heads, _key_dim(given), given.width, 0.2, values_in_keys=given.size is None)


def _chosen(given: Selection, problem: Problem) -> tuple[np.ndarray, np.ndarray]:
    """Positions i32 [T, k], or blocks i32 [T, K, k], in any order, and how many keys a token sees i32 [T]: one token
    has none, and those of no sequence have some that must not be read."""
    rng, case = np.random.default_rng(11), given.case
    heads = 1 if given.size is None else case.heads[1]
    chosen = np.full((case.num_tokens, heads, given.count), -1, np.int32)
    ends = np.zeros(case.num_tokens, np.int32)
    for seq in range(problem.num_seqs):
        for token in range(*problem.cu_q_lens[seq : seq + 2]):
            ends[token] = problem.kv_lens[seq] - (problem.cu_q_lens[seq + 1] - 1 - token)
    for token, end in enumerate(ends):
        most = -(-int(end or 50) // (given.size or 1))
        first = max(most - (given.near or most), 0)
        for head in range(heads):
            drawn = first + rng.permutation(most - first)[: given.count]
            if given.size is not None and most - 1 not in drawn:
                drawn[0] = most - 1  # the last block, of which the token does not see all
            chosen[token, head, : len(drawn)] = drawn
    if ends[1] and case.num_tokens > 5:
        chosen[1], ends[1] = -1, 0
    return chosen[:, 0] if given.size is None else chosen, ends


def _attend(given: Selection, q, kv, batch, chosen, sinks, implementation: Implementation) -> jax.Array:
    sizes = implementation._tuning().tpu_attention
    tuning = replace(implementation._tuning(), tpu_attention=replace(sizes, selected_rows=given.rows))
    options: dict[str, Any] = {"spec": _spec(given), "tuning": tuning, **implementation._options()}
    if given.size is not None:
        return implementation._kernel("block_attention")(q, kv, batch, chosen, size=given.size, **options)
    options["sinks"] = None if sinks is None else jnp.asarray(sinks)
    parts = jnp.split(q, (given.width,), axis=-1)
    return implementation._kernel("selected_attention")(*parts, kv, batch, chosen, **options)


def _expected(given: Selection, problem: Problem, q: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    rows, scale = (problem.cu_q_lens, problem.page_table, problem.num_seqs), _spec(given).sm_scale
    if given.size is None:
        options: dict[str, Any] = {"v_head_dim": given.width, "sm_scale": scale, "sinks": problem.sinks}
        return reference.selected_attention(q, problem.k_pages[:, :, 0], *rows, chosen, **options)
    cu_q_lens, page_table, num_seqs = rows
    options = {"size": given.size, "sm_scale": scale}
    return reference.block_attention(
        q, problem.k_pages, cu_q_lens, problem.kv_lens, page_table, num_seqs, chosen, **options
    )
