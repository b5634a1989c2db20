"""Triton attention: the cards that run it, what it leaves to XLA, how often they load a key, and that they lower.

Their numbers are under conformance: tests/pallas_kernels/test_interpreted.py.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxengine.pallas_kernels import cards
from jaxengine.pallas_kernels.attention.hopper.schedule import (
    DECODE_BEGIN,
    DECODE_END,
    DECODE_END_BLOCK,
    DECODE_FIRST_BLOCK,
    DECODE_KEYS,
)
from jaxengine.pallas_kernels.attention.op import attention_schedule, ragged_paged_attention
from jaxengine.pallas_kernels.attention.ragged_batch import AttentionSpec, RaggedBatch
from jaxengine.pallas_kernels.attention.triton import attend
from jaxengine.pallas_kernels.attention.xla.attend import log_once
from jaxengine.pallas_kernels.cards import lowers_triton, plain_cards, plain_operations, why_no_kernels
from jaxengine.pallas_kernels.kv.pages import KVPages, KVSpec, alloc
from jaxengine.pallas_kernels.registry import platform_of
from jaxengine.pallas_kernels.tuning import Tuning
from tests.pallas_kernels.matmul.test_hopper import mesh_of
from tests.pallas_kernels.selections import programs_of
from tests.tables import each_row

SPEC = AttentionSpec(8, 2, 128, 128, 0.1)
PLATFORM, MARK = "gpu_triton", "@__gpu$xla.gpu.triton"
A100, H100 = "NVIDIA A100-SXM4-80GB", "NVIDIA H100 80GB HBM3"


def test_cards_of_ampere_ada_and_rtx_blackwell_run_them(monkeypatch):
    def platforms() -> list[str]:
        lowers_triton.cache_clear()
        capabilities = ("7.5", "8.0", "8.6", "8.9", "9.0", "10.0", "10.3", "12.0", "12.1")
        return [platform_of(SimpleNamespace(platform="cuda", compute_capability=each)) for each in capabilities]

    found = {}
    for release in ("0.10.2", "0.11.1", "0.11.2", "0.12.0.1"):
        monkeypatch.setattr(cards, "version", lambda name, release=release: release)
        found[release] = platforms()
        with plain_cards():
            assert set(platforms()) == {"gpu_xla"}
    ours = ["gpu_xla", *[PLATFORM] * 3, "gpu", "gpu_blackwell", "gpu_blackwell", PLATFORM, PLATFORM]
    plain = ["gpu_xla" if each == PLATFORM else each for each in ours]
    assert found == {"0.10.2": ours, "0.11.1": plain, "0.11.2": ours, "0.12.0.1": ours}
    assert {plain_operations(each) for each in ("8.9", "9.0", "10.0", "10.3", "12.0")} == {""}
    assert plain_operations("7.5") == "attention and quantised products"
    assert why_no_kernels("7.5") == "compute capability 7.5"
    monkeypatch.setattr(cards, "version", lambda name: "0.11.1")
    lowers_triton.cache_clear()
    assert plain_operations("8.9") == "attention and quantised products"
    assert why_no_kernels("8.9") == "jax 0.11.1 lowers Triton kernels for few cards, 0.11.2 and later for all"
    lowers_triton.cache_clear()


_POOL = KVSpec(4, 16, 2, 128, 128, "bfloat16")
# Spec, dtypes of queries and pool, tree mask; a part of the reason, "" for none.
TAKEN = [
    (SPEC, "bfloat16", _POOL, False, ""),
    (SPEC, "float16", replace(_POOL, dtype="float8_e5m2"), False, ""),
    (replace(SPEC, chunk=8, soft_cap=3.0), "bfloat16", replace(_POOL, dtype="int8"), False, ""),
    (replace(SPEC, causal=False, window=9), "bfloat16", _POOL, False, ""),
    (AttentionSpec(64, 1, 128, 128, 1.0), "bfloat16", _POOL, False, ""),
    (AttentionSpec(32, 1, 256, 136, 1.0), "bfloat16", _POOL, False, ""),
    (AttentionSpec(65, 1, 128, 128, 1.0), "bfloat16", _POOL, False, "65 query heads per kv head are more than 64"),
    (AttentionSpec(33, 1, 136, 128, 1.0), "bfloat16", _POOL, False, "33 query heads per kv head are more than 32"),
    (
        AttentionSpec(8, 2, 100, 128, 1.0),
        "bfloat16",
        _POOL,
        False,
        "head dims 100/128 are not multiples of 8 up to 256",
    ),
    (AttentionSpec(8, 2, 264, 128, 1.0), "bfloat16", _POOL, False, "up to 256"),
    (AttentionSpec(128, 1, 576, 512, 1.0, values_in_keys=True), "bfloat16", _POOL, False, ""),
    (AttentionSpec(4, 2, 768, 512, 1.0, values_in_keys=True), "bfloat16", replace(_POOL, dtype="int8"), False, ""),
    (replace(SPEC, values_in_keys=True), "bfloat16", _POOL, False, "values of 128 in keys of 128"),
    (AttentionSpec(8, 1, 584, 520, 1.0, values_in_keys=True), "bfloat16", _POOL, False, "values of 520 in keys of 584"),
    (AttentionSpec(8, 1, 580, 512, 1.0, values_in_keys=True), "bfloat16", _POOL, False, "values of 512 in keys of 580"),
    (SPEC, "bfloat16", _POOL, True, "a tree mask"),
    (SPEC, "float32", _POOL, False, "queries of float32"),
    (SPEC, "float16", _POOL, False, "queries of float16 over keys and values of bfloat16"),
    (SPEC, "bfloat16", replace(_POOL, dtype="int8_per_token_head"), False, "scales of single tokens"),
]


@each_row("row", TAKEN)
def test_what_they_leave_to_xla(row):
    spec, dtype, pool, tree_mask, reason = row
    found = attend.why_not(spec, dtype, pool, tree_mask=tree_mask)
    assert (found or "").endswith(reason) if reason else found is None, found


def _arguments(spec: AttentionSpec, dtype: str, num_tokens: int, num_pages: int = 64, page_size: int = 16) -> tuple:
    pool = KVSpec(num_pages, page_size, spec.num_kv_heads, spec.head_dim, spec.v_head_dim, dtype)
    sizes = (9,), (8,), (8, 40), (num_tokens,), (), ()
    arrays: Any = [jax.ShapeDtypeStruct(size, jnp.int32) for size in sizes]
    batch = RaggedBatch(*arrays)
    q = jax.ShapeDtypeStruct((num_tokens, spec.num_q_heads, spec.head_dim), jnp.bfloat16)
    return q, jax.eval_shape(partial(alloc, pool, platform=PLATFORM)), batch


def test_pools_of_codes_whose_offsets_do_not_fit_are_left_to_xla(caplog):
    """Of up to 4 GiB jax's lowering keeps offsets in 32 bits, with a sign; beyond it takes 64."""
    programs = {}
    for num_pages in (2**18, 2**18 + 1, 2**19, 2**19 + 1):  # of 8 KiB
        arguments = _arguments(SPEC, "int8", 8, num_pages)
        programs[num_pages] = str(jax.make_jaxpr(partial(ragged_paged_attention, spec=SPEC))(*arguments))
    assert ["paged_attention_rows" in each for each in programs.values()] == [True, False, False, True]
    assert "whose offsets jax's lowering keeps in 32 bits" in caplog.text


def test_a_pool_of_other_heads_is_refused():
    q, kv, batch = _arguments(SPEC, "bfloat16", 8)
    kv = KVPages(jax.ShapeDtypeStruct((64, 1, 4096), jnp.bfloat16), None, None, kv.spec, PLATFORM)  # pyright: ignore
    with pytest.raises(ValueError, match="holds 1 kv heads, AttentionSpec.num_kv_heads is 2: on platform 'gpu_triton'"):
        jax.eval_shape(partial(ragged_paged_attention, spec=SPEC), q, kv, batch)


def test_a_decode_loads_each_key_that_it_sees_once():
    """Of every KV head, in one item or several."""
    keys = np.asarray([384, 1, 64, 65, 300, 129, 0, 63], np.int32)
    starts = np.concatenate([[0], np.cumsum(np.minimum(keys, 1))])
    arrays = starts, keys, np.zeros((8, 24)), np.zeros(8), 8, 0
    batch = RaggedBatch(*(jnp.asarray(each, jnp.int32) for each in arrays))
    sizes: dict[str, Any] = {"num_tokens": 8, "page_size": 16, "platform": PLATFORM, "tuning": Tuning()}
    before = {"": 0, "window": np.maximum(keys - 100, 0), "chunk": np.maximum(keys - 1, 0) // 150 * 150}
    for name, spec in {"": SPEC, "window": replace(SPEC, window=100), "chunk": replace(SPEC, chunk=150)}.items():
        items = jax.jit(partial(attention_schedule, spec=spec, **sizes))(batch).items
        rows = np.asarray(items.items)[: int(items.pair_items[-1])]
        low = np.maximum(rows[:, DECODE_BEGIN], DECODE_KEYS * rows[:, DECODE_FIRST_BLOCK])
        loaded = np.sum(np.minimum(rows[:, DECODE_END], DECODE_KEYS * rows[:, DECODE_END_BLOCK]) - low)
        assert loaded == 2 * np.sum(keys - before[name]), name


@pytest.mark.versions
def test_they_lower_for_a_card():
    """To Triton modules in two custom calls, at the widths, groups, dtypes and pages that change their shapes."""
    for heads, dims, dtype, num_tokens, page_size in (
        ((8, 2), (96, 64), "bfloat16", 40, 48),
        ((16, 1), (256, 256), "float8_e4m3fn", 40, 16),
        ((7, 1), (128, 128), "int8", 8, 64),
    ):
        spec = AttentionSpec(*heads, *dims, 0.1, soft_cap=30.0)
        arguments = _arguments(spec, dtype, num_tokens, 64, page_size)
        assert _lowered(partial(ragged_paged_attention, spec=spec), arguments, A100).count(MARK) == 2


def test_sparse_attention_lowers_for_hopper(monkeypatch, caplog):
    """And is plain XLA where jax does not lower Triton kernels for every card, which the log says."""
    log_once.cache_clear()
    for function, arguments in programs_of("gpu"):
        monkeypatch.setattr(attend, "lowers_triton", lambda: False)
        assert "pallas_call" not in str(jax.make_jaxpr(partial(function))(*arguments))
        assert "lowers Triton kernels for few cards" in caplog.text
        monkeypatch.undo()
        tiles = 2 if "select_" in str(function) else 1  # of single tokens and of runs
        assert _lowered(function, arguments, H100).count(MARK) == tiles


def _lowered(function: Any, arguments: Any, card: str) -> str:
    """Return the text of a program for a card, by name."""
    with mesh_of(card):
        return jax.jit(partial(function)).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
