"""The sampler under masks: only allowed tokens are drawn, as if the others had no probability."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jaxengine.requests.params.sampling_params import SamplingParams
from jaxengine.sampling import sampler
from jaxengine.sampling import state as sampling_state
from jaxengine.sampling.sampler import SamplerFlags
from tests.jaxengine.sampling.test_sampler import ALL_OFF, ALL_ON, NUM_SLOTS, run, state_of


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_mask_decides_what_may_be_drawn(temperature):
    """With and without biases and penalties beside it; what is reported stays the raw distribution."""
    vocab_size, rng = 300, np.random.default_rng(9)
    allowed = rng.random((NUM_SLOTS, vocab_size)) < 0.02
    allowed[:, 7] |= ~allowed.any(axis=1)
    allowed[::5] = True
    allowed[3] = False
    padding = 32 * sampling_state.mask_words(vocab_size) - vocab_size
    words = np.packbits(np.pad(allowed, ((0, 0), (0, padding))), axis=1, bitorder="little").view(np.int32)
    bare = state_of(vocab_size, *[SamplingParams(temperature=temperature)] * NUM_SLOTS)
    state = sampling_state.set_mask_rows(bare, jnp.arange(NUM_SLOTS), jnp.asarray(words))
    logits = rng.normal(0, 3, (NUM_SLOTS, vocab_size)).astype(np.float32)
    slots, positions = rng.permutation(NUM_SLOTS), rng.integers(0, 99, NUM_SLOTS)

    only_mask = SamplerFlags(*map(jnp.array, (temperature > 0, False, False, False, True, True)))
    got = run(logits, state, slots, positions, only_mask)
    for one, other in zip(got, run(logits, state, slots, positions, ALL_ON), strict=True):
        np.testing.assert_array_equal(one, other)
    masked = np.where(allowed[slots], logits, -np.inf)
    np.testing.assert_array_equal(got.token_ids, run(masked, bare, slots, positions).token_ids)
    assert got.token_ids[slots == 3].tolist() == [-1] and (got.token_ids[slots != 3] >= 0).all()
    raw = run(logits, state, slots, positions, ALL_OFF._replace(any_logprobs=jnp.array(True)))
    np.testing.assert_array_equal(got.top_logprobs, raw.top_logprobs)
    np.testing.assert_array_equal(raw.token_ids, logits.argmax(axis=1))


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_a_mask_hides_no_poison(poison):
    logits = np.zeros((1, 300), np.float32)
    logits[0, 5] = poison
    words = np.full((1, sampling_state.mask_words(300)), -1, np.int32)
    words[0, 0] = ~(1 << 5)
    state = sampling_state.set_mask_rows(state_of(300, SamplingParams()), jnp.array([0]), jnp.asarray(words))
    assert run(logits, state, 0, 0).token_ids.tolist() == [-1]


def test_the_mask_of_one_token():
    """As stored masks are read, of each word's first and last bit; none for a token of another device."""
    token_ids = np.array([0, 31, 32, 299, -1, 5 * 32, -40, 320], np.int32)
    words = np.asarray(sampler._only_rows(jnp.asarray(token_ids), 10))
    allowed = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")
    np.testing.assert_array_equal(allowed, token_ids[:, None] == np.arange(320))
