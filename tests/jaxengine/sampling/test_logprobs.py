"""Prompt logprobs: block by block, against float64."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxengine.sampling.logprobs import PROMPT_BLOCK_ROWS, prompt_logprobs

WEIGHT = np.random.default_rng(0).normal(0, 1, (8, 130)).astype(np.float32)


@partial(jax.jit, static_argnames=("max_logprobs", "logprobs_mode"))
def score(hidden, targets, max_logprobs=3, logprobs_mode="raw_logprobs"):
    return prompt_logprobs(
        hidden, targets, lambda x: x @ WEIGHT, max_logprobs=max_logprobs, logprobs_mode=logprobs_mode
    )


def case(num_tokens: int):
    rng = np.random.default_rng(num_tokens)
    hidden = rng.normal(0, 1, (num_tokens, 8)).astype(np.float32)
    targets = np.where(rng.random(num_tokens) < 0.3, -1, rng.integers(0, 130, num_tokens)).astype(np.int32)
    logits = hidden.astype(np.float64) @ WEIGHT.astype(np.float64)
    logprobs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    return hidden, targets, logits, logprobs


@pytest.mark.parametrize("num_tokens", [1, PROMPT_BLOCK_ROWS - 1, PROMPT_BLOCK_ROWS, 2 * PROMPT_BLOCK_ROWS + 5])
@pytest.mark.parametrize("mode", ["raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits"])
def test_scores_are_the_oracles(num_tokens, mode):
    hidden, targets, logits, logprobs = case(num_tokens)
    got = jax.tree.map(np.asarray, score(hidden, targets, logprobs_mode=mode))
    values = logits if mode.endswith("logits") else logprobs
    for row, target in enumerate(targets):
        if target < 0:
            assert got.logprob[row] == -np.inf and got.rank[row] == 0
            continue
        np.testing.assert_allclose(got.logprob[row], values[row, target], rtol=1e-4, atol=1e-4)
        assert got.rank[row] == 1 + (values[row] > values[row, target]).sum()
        order = np.argsort(-values[row])[:3]
        assert got.top_ids[row].tolist() == order.tolist()
        np.testing.assert_allclose(got.top_logprobs[row], values[row, order], rtol=1e-4, atol=1e-4)


def test_logits_of_the_whole_prompt_never_exist():
    rows = []

    def logits_fn(hidden):
        rows.append(hidden.shape[0])
        return hidden @ WEIGHT

    hidden, targets, _, _ = case(500)
    jax.jit(partial(prompt_logprobs, logits_fn=logits_fn, max_logprobs=1, logprobs_mode="raw_logprobs")).lower(
        hidden, targets
    )
    assert rows and max(rows) == PROMPT_BLOCK_ROWS


def test_blocks_nobody_asked_about_are_skipped():
    seen = []

    def logits_fn(hidden):
        jax.debug.callback(lambda x: seen.append(float(x)), hidden[0, 0])
        return hidden @ WEIGHT

    hidden = np.repeat(np.arange(3, dtype=np.float32), PROMPT_BLOCK_ROWS)[:, None] * np.ones((1, 8), np.float32)
    targets = np.full(len(hidden), -1, np.int32)
    targets[PROMPT_BLOCK_ROWS + 3] = 7
    got = prompt_logprobs(
        jnp.asarray(hidden), jnp.asarray(targets), logits_fn, max_logprobs=0, logprobs_mode="raw_logits"
    )
    jax.effects_barrier()
    assert seen == [1.0]
    np.testing.assert_allclose(got.logprob[PROMPT_BLOCK_ROWS + 3], WEIGHT[:, 7].sum(), rtol=1e-5)
    assert (np.asarray(got.rank) > 0).sum() == 1
