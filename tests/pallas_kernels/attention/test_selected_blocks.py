"""Selection of blocks of keys by each KV head, and attention to these alone, against float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxengine.pallas_kernels.attention.op import AttentionSpec
from jaxengine.pallas_kernels.attention.selected import block_attention, select_blocks, selection_schedule
from jaxengine.pallas_kernels.registry import KERNELS, kernel
from tests.pallas_kernels import reference
from tests.pallas_kernels.attention.test_selected import BATCHES, PAGE, PAGES, TUNING, batch_of
from tests.pallas_kernels.pools import make_pool
from tests.tables import each_row

OPS = ("select_blocks", "block_attention")
IMPLEMENTATIONS = {kernel(op, platform) for op, platform in KERNELS if op in OPS}
PLATFORMS = sorted({platform for op, platform in KERNELS if op == "select_blocks"})
HEADS, GROUP, SIZE, VALUE, WIDTH = 2, 3, 5, 4, 6
SPEC = AttentionSpec(HEADS * GROUP, HEADS, SIZE, VALUE, 0.3)


def check(name: str, dtype: str, platform: str, size: int, count: int, local: int, *, equal: bool = False) -> None:
    """equal: keys of few values, so that many blocks score alike."""
    batch, num_tokens = batch_of(name)
    rng, stored = np.random.default_rng(5), jnp.dtype(dtype)
    joined = rng.standard_normal((PAGES, PAGE, HEADS, SIZE + VALUE)).astype(stored)
    keys = rng.standard_normal((PAGES, PAGE, 1, WIDTH))
    keys = np.repeat((np.sign(keys) if equal else keys).astype(stored), HEADS, axis=2)
    unseen = np.ones((PAGES, PAGE), bool)
    for row in range(int(batch.num_seqs)):
        seen = np.arange(int(batch.kv_lens[row]))
        unseen[np.asarray(batch.page_table)[row, seen // PAGE], seen % PAGE] = False
    joined[unseen], keys[unseen] = np.nan, np.nan
    kv = make_pool(joined, keys, platform, aligned_values=True)
    index_q = rng.standard_normal((num_tokens, HEADS, WIDTH))
    index_q = jnp.asarray(np.sign(index_q) if equal else index_q, stored)
    q = jnp.asarray(rng.standard_normal((num_tokens, HEADS * GROUP, SIZE)), stored)

    @jax.jit
    def run(index_q, q, kv, batch):
        sizes = {"num_tokens": num_tokens, "page_size": PAGE, "platform": platform, "tuning": TUNING}
        schedule = selection_schedule(batch, **sizes)
        found = select_blocks(index_q, kv, batch, size=size, count=count, local=local, schedule=schedule)
        return found, block_attention(q, kv, batch, found, spec=SPEC, size=size, tuning=TUNING)

    found, o = map(np.asarray, run(index_q, q, kv, batch))
    cu, lens, table = np.asarray(batch.cu_q_lens), np.asarray(batch.kv_lens), np.asarray(batch.page_table)
    rows = cu, lens, table, int(batch.num_seqs)
    inputs = np.asarray(index_q, np.float32), keys[:, :, 0].astype(np.float32)
    exact = reference.select_blocks(*inputs, *rows, size=size, count=count, local=local)
    np.testing.assert_array_equal(found, exact)
    sizes: dict[str, Any] = {"size": size, "sm_scale": SPEC.sm_scale}
    exact = reference.block_attention(
        np.asarray(q, np.float32), joined.astype(np.float32), *rows, np.asarray(found), **sizes
    )
    np.testing.assert_allclose(o.astype(np.float32), exact, atol=3e-2 if dtype == "bfloat16" else 3e-5)


@each_row(
    ("name", "dtype", "platform", "size", "count", "local", "equal"),
    # Of equal scores the lowest number comes first.
    [("chunks and decodes", "float32", "cpu", 6, 2, 1, True), ("decodes", "bfloat16", "tpu", 8, 3, 2, False)],
)
def test_against_float64(name, dtype, platform, size, count, local, equal):
    check(name, dtype, platform, size, count, local, equal=equal)


@pytest.mark.thorough("further batches and dtypes, and other sizes of blocks")
@each_row(("name", "platform"), [(name, platform) for name in BATCHES for platform in PLATFORMS])
def test_further_against_float64(name, platform):
    for dtype, size, count, local in (("float32", 3, 4, 0), ("bfloat16", 3, 60, 1), ("float32", 16, 1, 1)):
        check(name, dtype, platform, size, count, local)


def test_shapes_that_do_not_fit():
    batch, num_tokens = batch_of("decodes")
    joined, keys = (np.zeros((PAGES, PAGE, HEADS, width), np.float32) for width in (SIZE + VALUE, WIDTH))
    kv = make_pool(joined, keys, "cpu")
    codes = replace(kv, spec=replace(kv.spec, dtype="int8"))
    given: dict[str, Any] = {
        "q": jnp.zeros((num_tokens, HEADS, WIDTH)),
        "kv": kv,
        "batch": batch,
        "size": 4,
        "count": 2,
        "local": 1,
    }
    for change, said in (
        ({"q": given["q"][..., :-1]}, "q must be"),
        ({"q": given["q"].astype(int)}, "q must be float32"),
        ({"kv": codes}, "the pool must have"),
        ({"local": 3}, "size and count must be at least 1, and local from 0 to count, got 4, 2 and 3"),
        ({"size": 0}, "size and count"),
    ):
        changed: dict[str, Any] = {**given, **change}
        with pytest.raises(ValueError, match=f"select_blocks: {said}"):
            select_blocks(**changed)
    blocks = jnp.zeros((num_tokens, HEADS, 2), jnp.int32)
    attended: dict[str, Any] = {
        "q": jnp.zeros((num_tokens, HEADS * GROUP, SIZE)),
        "kv": kv,
        "batch": batch,
        "blocks": blocks,
        "spec": SPEC,
        "size": 4,
    }
    for change, said in (
        ({"q": attended["q"][:, :-1]}, "q must be"),
        ({"blocks": blocks[:, :1]}, "blocks must be"),
        ({"spec": replace(SPEC, window=3)}, "needs causal attention without"),
        ({"spec": replace(SPEC, v_head_dim=5)}, "the pool must hold keys of 5 [+] 5 elements, got 9"),
        ({"kv": codes}, "the pool must have"),
    ):
        changed: dict[str, Any] = {**attended, **change}
        with pytest.raises(ValueError, match=f"block_attention: {said}"):
            block_attention(**changed)
