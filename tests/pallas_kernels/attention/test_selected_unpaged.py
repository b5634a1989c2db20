"""Keys that are selected in whole sequences without pages, and attention to them, against float64."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxengine.pallas_kernels.attention import selected_unpaged
from jaxengine.pallas_kernels.attention.op import AttentionSpec, RaggedBatch
from jaxengine.pallas_kernels.attention.selected import (
    block_attention,
    select_blocks,
    select_keys,
    selected_attention,
)
from jaxengine.pallas_kernels.kv.pages import KVPages, KVSpec
from jaxengine.pallas_kernels.registry import UNPAGED

ROWS, LENGTH, WIDTH, RANK, REST = 2, 13, 6, 8, 4
COUNT = ROWS * LENGTH
STARTS = [0, 5, 6, 13, 22]  # of runs
RNG = np.random.default_rng(0)


def drawn(*shape: int) -> jax.Array:
    return jnp.asarray(RNG.standard_normal(shape), jnp.float32)


def batch() -> RaggedBatch:
    cu = np.append(STARTS, [COUNT] * (COUNT + 1 - len(STARTS))).astype(np.int32)
    slots = np.arange(COUNT, dtype=np.int32)
    arrays = cu, np.diff(cu), np.zeros((COUNT, 1), np.int32), slots, np.int32(len(STARTS)), np.int32(0)
    return RaggedBatch(*map(jnp.asarray, arrays))


def pool(heads: int, key: int, value: int) -> KVPages:
    spec = KVSpec(1, LENGTH, heads, key, value, "float32")
    return KVPages(drawn(COUNT, heads, key + value), None, None, spec, UNPAGED)


def runs() -> Any:
    """Each token, the first token of its run, and its index there."""
    for start, end in zip(STARTS, [*STARTS[1:], COUNT], strict=True):
        for token in range(start, end):
            yield token, start, token - start


def best(scores: np.ndarray, count: int) -> set[int]:
    return {int(index) for index in np.argsort(-scores, kind="stable")[:count]}


def wide(values: Any) -> np.ndarray:
    return np.asarray(values, np.float64)


def softmax(logits: np.ndarray) -> np.ndarray:
    shares = np.exp(logits - logits.max())
    return shares / shares.sum()


def chosen(found: jax.Array) -> list[Any]:
    """Sets of the numbers of each row, without -1."""
    rows = np.asarray(found)
    return [{int(each) for each in row if each >= 0} if row.ndim == 1 else chosen(row) for row in rows]


@pytest.fixture(params=[4, 64])
def block(request, monkeypatch):
    """Queries that select at a time: some of a row, or all."""
    monkeypatch.setattr(selected_unpaged, "BLOCK", request.param)


@pytest.mark.usefixtures("block")
@pytest.mark.parametrize("group", [1, 3])
def test_keys(group):
    pooling, heads = None if group == 1 else drawn(group, WIDTH), 3
    kv, q, weights = pool(1, RANK + REST, WIDTH * min(group, 2)), drawn(COUNT, heads, WIDTH), drawn(COUNT, heads)
    found = chosen(select_keys(q, weights, kv, batch(), count=2, pooling=pooling))
    rows, q, weights = wide(kv.data[:, 0, RANK + REST :]), wide(q), wide(weights)
    pooling = None if pooling is None else wide(pooling)
    for token, start, index in runs():
        keys = rows[start : token + 1]
        if pooling is not None:
            whole = keys[: (index + 1) // group * group].reshape(-1, group, 2, WIDTH)
            gates = np.exp(whole[:, :, 1] + pooling)
            keys = (gates / gates.sum(1, keepdims=True) * whole[:, :, 0]).sum(1)
        scores = np.maximum(q[token] @ keys.T, 0).T @ weights[token]
        assert found[token] == best(scores, 2), token


def test_attention_to_keys():
    kv, spec = pool(1, RANK + REST, WIDTH), AttentionSpec(3, 1, RANK + REST, RANK, 0.3, values_in_keys=True)
    q, rest, sinks = drawn(COUNT, 3, RANK), drawn(COUNT, 3, REST), drawn(3)
    positions = np.full((COUNT, 3), -1, np.int32)
    for token, _, index in runs():
        positions[token, : min(index + 1, 3)] = RNG.permutation(index + 1)[:3]

    def attend(latents: jax.Array) -> jax.Array:
        own = KVPages(latents, None, None, kv.spec, UNPAGED)
        return selected_attention(q, rest, own, batch(), jnp.asarray(positions), spec=spec, sinks=sinks)

    o, back = jax.vjp(attend, kv.data)
    (gradient,) = back(jnp.ones_like(o))
    read, data, joined = np.zeros(COUNT, bool), wide(kv.data), wide(jnp.concatenate([q, rest], -1))
    o, logit, gradient = np.asarray(o), wide(sinks), np.asarray(gradient)
    for token, start, _ in runs():
        own = start + positions[token][positions[token] >= 0]
        read[own] = True
        keys = data[own, 0, : RANK + REST]
        logits = joined[token] @ keys.T * 0.3
        for head in range(3):
            shares = softmax(np.append(logits[head], logit[head]))[:-1]
            np.testing.assert_allclose(o[token, head], shares @ keys[:, :RANK], atol=1e-5)
    assert (np.abs(gradient[:, 0, : RANK + REST]).max(-1) > 0).tolist() == read.tolist()
    assert not gradient[..., RANK + REST :].any()


@pytest.mark.usefixtures("block")
def test_blocks_and_attention_to_them():
    size, heads, dim = 2, 2, 4
    kv, q, index_q = pool(heads, 2 * dim, WIDTH), drawn(COUNT, 4, dim), drawn(COUNT, heads, WIDTH)
    blocks = select_blocks(index_q, kv, batch(), size=size, count=2, local=1)
    found, spec = chosen(blocks), AttentionSpec(4, heads, dim, dim, 0.5)
    o = np.asarray(block_attention(q, kv, batch(), blocks, spec=spec, size=size))
    data, q, index_q = wide(kv.data), wide(q), wide(index_q)
    for token, start, index in runs():
        index_keys = data[start : token + 1, 0, 2 * dim :]
        for head in range(heads):
            products = index_keys @ index_q[token, head]
            scores = np.array([products[first : first + size].max() for first in range(0, index + 1, size)])
            scores[-1] = np.inf
            assert found[token][head] == best(scores, 2), (token, head)
            own = [start + place for place in range(index + 1) if place // size in found[token][head]]
            keys, values = np.split(data[own, head, : 2 * dim], 2, axis=-1)
            for query in range(2 * head, 2 * head + 2):
                shares = softmax(keys @ q[token, query] * 0.5)
                np.testing.assert_allclose(o[token, query], shares @ values, atol=1e-5)
