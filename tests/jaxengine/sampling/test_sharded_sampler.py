"""The sampler over a vocabulary that is split over devices: bit for bit the tokens and logprobs of one device.

The devices are those of a process of its own, which forces eight of them on the CPU and runs `main` below.
"""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxengine.requests.params.sampling_params import SamplingParams
from jaxengine.sampling import sampler
from jaxengine.sampling import state as sampling_state
from jaxengine.sampling.logprobs import PROMPT_BLOCK_ROWS, TokenLogprobs, prompt_logprobs, support_words
from jaxengine.sampling.sampler import MoreScores, SamplerFlags
from jaxengine.sampling.state import NEUTRAL, RowParams, SamplingState
from jaxengine.sampling.token_choice import NUM_CANDIDATES
from jaxengine.sampling.top_tokens import best_token, take_tokens, top_tokens, top_values
from jaxengine.scheduler.base.token_params import row_words
from jaxengine.sharding.layout import MeshLayout
from jaxengine.sharding.mesh import make_mesh
from jaxengine.sharding.rules import logical_to_spec

ROOT = Path(__file__).parents[3]
VOCAB_SIZE = 900
NUM_ROWS = 48
NUM_TOP = 5
# Columns on both sides of the borders between 2, 3 and 4 devices.
BORDERS = (255, 256, 383, 384, 511, 512, 767, 768)
MESHES = {
    "2": (MeshLayout(model=2), "raw_logprobs"),
    "3": (MeshLayout(model=3), "processed_logprobs"),
    "4": (MeshLayout(model=4), "raw_logits"),
    "2x2": (MeshLayout(data=2, model=2), "processed_logits"),
}
KINDS = ("spread", "border ties", "rounded", "flat", "forbidden", "poisoned")
ROWS, TABLE, TABLE_ROW, WHOLE = (
    logical_to_spec(axes) for axes in (("batch",), ("batch", "sampled_vocab"), (None, "sampled_vocab"), ())
)
STATE = SamplingState(RowParams(*[ROWS] * len(NEUTRAL)), logit_bias=TABLE, token_mask=TABLE, logprob_ids=ROWS)
FLAGS = SamplerFlags(*[WHOLE] * 6)
FLAGS_ON = SamplerFlags(*[np.array(True)] * 6)


@pytest.mark.parametrize(
    "names", ["2x2", pytest.param("2 3 4", marks=pytest.mark.thorough("as the others"))], ids=lambda names: names
)
def test_split_vocabulary_gives_what_one_device_gives(names):
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, __file__, *names.split()], env=env, capture_output=True, text=True, timeout=560
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["sample"] * len(names.split()) + ["count", "prompt", "top", "collectives"]


def main() -> None:
    assert jax.device_count() == 8
    for name in sys.argv[1:]:
        check_sample(*MESHES[name])
    check_count_tokens()
    check_prompt_logprobs()
    check_top_tokens()
    check_collectives()


def parameters(rank: int) -> list[SamplingParams]:
    """One request per row; rank 1's need none of the searches that rank 0's need."""
    if rank:
        plain = itertools.cycle([SamplingParams(temperature=0), SamplingParams(temperature=0.7, min_p=0.05)])
        return list(itertools.islice(plain, NUM_ROWS))
    chosen = [SamplingParams(temperature=0)]
    for top_k, top_p, min_p in itertools.product(
        (0, 1, 7, 128, 129, 400, VOCAB_SIZE - 1, VOCAB_SIZE, VOCAB_SIZE + 1), (1.0, 0.97, 0.4), (0.0, 0.01)
    ):
        chosen.append(SamplingParams(temperature=0.5 + 0.1 * (len(chosen) % 9), top_k=top_k, top_p=top_p, min_p=min_p))
    penalties = {"presence_penalty": 0.7, "frequency_penalty": -0.4, "repetition_penalty": 1.3}
    return [
        one.clone_with(**penalties) if row % 3 == 2 else one
        for row, one in enumerate([chosen[row % len(chosen)] for row in range(0, 2 * NUM_ROWS, 2)])
    ]


def make_logits(kind: str, rng: np.random.Generator) -> np.ndarray:
    logits = rng.normal(0, 3, (NUM_ROWS, VOCAB_SIZE)).astype(np.float32)
    if kind == "border ties":
        logits[:, BORDERS] = 12.0
        logits[::2, BORDERS[0]] = 0.0
    elif kind == "rounded":
        logits = np.round(logits) + 0.0  # no negative zeros: which of the two zeros is above the other is open
    elif kind == "flat":
        logits *= 0.02
    elif kind == "forbidden":
        logits[rng.random(logits.shape) < 0.97] = -np.inf
        logits[:, 3] = 0.0
        logits[5] = -np.inf
    elif kind == "poisoned":
        for row, (poison, column) in enumerate(itertools.product((np.nan, -np.nan, np.inf), (0, 300, 899))):
            logits[row, column] = poison
    return logits


def make_counts(rng: np.random.Generator) -> np.ndarray:
    shape = (NUM_ROWS, VOCAB_SIZE)
    return (rng.integers(0, 6, shape) * (rng.random(shape) < 0.2)).astype(np.int32)


def make_state(params: list[SamplingParams], rng: np.random.Generator) -> SamplingState:
    shape = (NUM_ROWS, VOCAB_SIZE)
    bias = np.where(rng.random(shape) < 0.2, rng.normal(0, 2, shape), 0.0)
    bias[rng.random(shape) < 0.05] = -np.inf
    bias[::4] = 0.0
    bias[9] = -np.inf
    words = np.array([row_words(one, seed) for seed, one in enumerate(params)], np.int32)
    state = sampling_state.init_state(NUM_ROWS, VOCAB_SIZE)._replace(
        logit_bias=jnp.asarray(bias, jnp.float32),
        token_mask=jnp.asarray(mask_rows(rng)),
    )
    ids = np.where(rng.random(state.logprob_ids.shape) < 0.5, -1, rng.integers(0, VOCAB_SIZE, state.logprob_ids.shape))
    ids[:, : len(BORDERS)] = BORDERS
    state = sampling_state.set_logprob_ids(state, jnp.arange(NUM_ROWS), jnp.asarray(ids, jnp.int32))
    return sampling_state.write_params(state, jnp.arange(NUM_ROWS), jnp.asarray(words))


def mask_rows(rng: np.random.Generator) -> np.ndarray:
    """Few tokens, those at the borders, none, or all, by row; i32 words."""
    allowed = rng.random((NUM_ROWS, VOCAB_SIZE)) < 0.03
    allowed[1::4], allowed[2::4], allowed[11] = False, True, False
    allowed[1::4, BORDERS] = True
    allowed = np.pad(allowed, ((0, 0), (0, -VOCAB_SIZE % 32)))
    return np.packbits(allowed, axis=1, bitorder="little").view(np.int32)


def widen_mask(words: jax.Array, layout: MeshLayout) -> np.ndarray:
    """Each device's words begin at a multiple of what one stores."""
    parts, vocab_size = layout.num_shards("sampled_vocab"), layout.padded_vocab_size(VOCAB_SIZE)
    whole = np.pad(np.asarray(words), ((0, 0), (0, -(-vocab_size // 32) - words.shape[1])))
    whole = whole.reshape(len(whole), parts, -1)
    stored = sampling_state.mask_words(vocab_size // parts)
    return np.pad(whole, ((0, 0), (0, 0), (0, stored - whole.shape[2]))).reshape(len(whole), -1)


def widen(array: np.ndarray | jax.Array, layout: MeshLayout, fill: float) -> np.ndarray:
    padding = layout.padded_vocab_size(VOCAB_SIZE) - VOCAB_SIZE
    return np.pad(np.asarray(array), ((0, 0), (0, padding)), constant_values=fill)


def joined(states: list[SamplingState], layout: MeshLayout) -> SamplingState:
    """The ranks' states one after the other, as the mesh holds them."""
    wide = [
        state._replace(
            logit_bias=widen(state.logit_bias, layout, 0),
            token_mask=widen_mask(state.token_mask, layout),
        )
        for state in states
    ]
    return jax.tree.map(lambda *parts: np.concatenate(parts), *wide)


def on_mesh(layout: MeshLayout, function, in_specs, out_specs):
    function = jax.shard_map(function, mesh=make_mesh(layout), in_specs=in_specs, out_specs=out_specs, check_vma=False)
    return jax.jit(function)


def rows_of(arrays, rows: np.ndarray):
    return jax.tree.map(lambda array: np.asarray(array)[rows], arrays)


def check_same(got, expected, context) -> None:
    assert [part is None for part in got] == [part is None for part in expected], context
    for name in (name for name, part in zip(expected._fields, expected, strict=True) if part is not None):
        one, other = (np.asarray(getattr(part, name)) for part in (got, expected))
        assert (one.shape, one.dtype) == (other.shape, other.dtype), (context, name)
        differ = np.flatnonzero((one.view(np.int32) != other.view(np.int32)).reshape(len(one), -1).any(axis=1))
        assert not differ.size, (context, name, differ, one[differ], other[differ])


def check_sample(layout: MeshLayout, mode: str) -> None:
    rng = np.random.default_rng(1)
    states = [make_state(parameters(rank), rng) for rank in range(layout.num_ranks)]
    counts = [make_counts(rng) for _ in states]

    def sample(logits, state, counts, slots, positions, only, flags):
        chosen = {"max_logprobs": NUM_TOP, "logprobs_mode": mode, "only": only}
        chosen["more"] = MoreScores(support=support_words)
        chosen["suppressed_tokens"] = tuple(BORDERS[::3]) if mode.startswith("processed") else ()
        return sampler.sample(logits, state, counts, slots, positions, flags, **chosen)

    alone = jax.jit(sample)
    specs = (TABLE, STATE, TABLE, ROWS, ROWS, ROWS, FLAGS)
    together = on_mesh(layout, sample, specs, sampler.SampleOutput(*[ROWS] * 7))
    state = joined(states, layout)
    wide_counts = np.concatenate([widen(own, layout, 0) for own in counts])
    slots = [rng.permutation(NUM_ROWS).astype(np.int32) for _ in states]
    slots[0][-1] = NUM_ROWS  # a padding row
    only = [np.where(rng.random(NUM_ROWS) < 0.2, rng.choice(BORDERS, NUM_ROWS), -1).astype(np.int32) for _ in states]
    drawn = []
    for kind, random, (adjusted, masked) in itertools.product(
        KINDS, (True, False), ((True, True), (False, True), (False, False))
    ):
        flags = SamplerFlags(*(jnp.array(flag) for flag in (random, random, adjusted, adjusted, masked, True)))
        logits = [make_logits(kind, rng) for _ in states]
        positions = [rng.integers(0, 10**6, NUM_ROWS).astype(np.int32) for _ in states]
        wide = np.concatenate([widen(own, layout, -np.inf) for own in logits])
        got = together(wide, state, wide_counts, *map(np.concatenate, (slots, positions, only)), flags)
        parts = [alone(*own, flags) for own in zip(logits, states, counts, slots, positions, only, strict=True)]
        expected = jax.tree.map(lambda *arrays: np.concatenate(arrays), *parts)
        num_words = expected.support.shape[1]
        assert expected.support.any() and not got.support[:, num_words:].any()
        got = got._replace(support=got.support[:, :num_words])
        # Which tokens are the best of a row with NaN is nobody's business.
        defined = ~np.isnan(wide).any(axis=1)
        assert (np.asarray(got.token_ids)[~defined] == -1).all() and (~defined).any() == (kind == "poisoned")
        check_same(rows_of(got, defined), rows_of(expected, defined), (kind, random, adjusted, masked, layout))
        drawn.append(np.asarray(got.token_ids))
    # Tokens of every part, and rows without one.
    assert set(np.concatenate(drawn) * layout.model // widen(logits[0], layout, 0).shape[1]) == {
        *range(-1, layout.model)
    }
    print("sample")


def check_count_tokens() -> None:
    layout, rng = MeshLayout(model=3), np.random.default_rng(2)
    counts = make_counts(rng)
    slots, valid = rng.permutation(NUM_ROWS).astype(np.int32), rng.random(NUM_ROWS) < 0.8
    token_ids = rng.integers(-1, VOCAB_SIZE, NUM_ROWS).astype(np.int32)
    token_ids[: len(BORDERS)], valid[: len(BORDERS)] = BORDERS, True
    together = on_mesh(layout, sampling_state.count_tokens, (TABLE, ROWS, ROWS, ROWS), TABLE)
    for num_rows in (1, NUM_ROWS):
        batch = (slots[:num_rows], token_ids[:num_rows], valid[:num_rows])
        got = together(widen(counts, layout, 0), *batch)
        counted = widen(sampling_state.count_tokens(jnp.asarray(counts), *batch), layout, 0)
        np.testing.assert_array_equal(got, counted)
        assert (counted != widen(counts, layout, 0)).any()
    print("count")


def check_prompt_logprobs() -> None:
    """Ranks that want the logits of different blocks, from a model that exchanges between the ranks: logits are wrong
    where two ranks do not make those of one block at the same time."""
    layout, rng = MeshLayout(data=2, model=2), np.random.default_rng(3)
    weights = rng.normal(0, 2, (1, VOCAB_SIZE)).astype(np.float32)
    hidden = rng.normal(0, 1, (layout.num_ranks, 3 * PROMPT_BLOCK_ROWS, 2)).astype(np.float32)
    hidden[:, :, 1] = np.arange(3 * PROMPT_BLOCK_ROWS)
    targets = np.full(hidden.shape[:2], -1, np.int32)
    targets[0, : len(BORDERS)] = BORDERS
    targets[1, -3:] = 0, 700, VOCAB_SIZE - 1
    score = partial(prompt_logprobs, max_logprobs=NUM_TOP, logprobs_mode="raw_logprobs")

    def score_part(hidden, targets, weights):
        def logits_fn(rows):
            value, index = rows[:, :1], rows[:, 1:]
            value = value + (lax.psum(index, "data") - layout.data * index)
            return jnp.where(jnp.isnan(weights), -jnp.inf, jnp.maximum(value, weights))

        return score(hidden, targets, logits_fn)

    together = on_mesh(layout, score_part, (ROWS, ROWS, TABLE_ROW), TokenLogprobs(*[ROWS] * 5))
    got = together(hidden.reshape(-1, 2), targets.reshape(-1), widen(weights, layout, np.nan))
    alone = jax.jit(lambda hidden, targets: score(hidden, targets, lambda rows: jnp.maximum(rows[:, :1], weights)))
    parts = [alone(*own) for own in zip(hidden, targets, strict=True)]
    asked = targets.reshape(-1) >= 0
    expected = jax.tree.map(lambda *arrays: np.concatenate(arrays)[asked], *parts)
    check_same(rows_of(got, asked), expected, "prompt_logprobs")
    assert (np.asarray(got.rank)[~asked] == 0).all()
    print("prompt")


def check_top_tokens() -> None:
    """Equal values everywhere, more tokens wanted than one device has, ids of all parts."""
    layout = MeshLayout(model=4)
    num_top, width = 150, 512
    logits = np.round(np.random.default_rng(4).normal(0, 2, (8, width))).astype(np.float32)
    logits[:, 120:140], logits[3] = -np.inf, 1.0
    ids = np.array([[0, 127, 128, 300, 511, 512, 600]] * 8, np.int32)

    def look(logits, ids):
        return *top_tokens(logits, num_top), top_values(logits, num_top), *best_token(logits), take_tokens(logits, ids)

    got = [np.asarray(part) for part in on_mesh(layout, look, (TABLE, ROWS), (ROWS,) * 6)(logits, ids)]
    order = np.argsort(-logits, axis=1, kind="stable")[:, :num_top]
    values = np.take_along_axis(logits, order, axis=1)
    taken = np.concatenate([logits[:, ids[0, :5]], np.full((8, 2), -np.inf, np.float32)], axis=1)
    for part, expected in zip(got, (values, order, values, values[:, :1], order[:, 0], taken), strict=True):
        np.testing.assert_array_equal(part, expected)
    print("top")


def check_collectives() -> None:
    """A greedy step exchanges once; nothing nearly as long as a part of the vocabulary is ever exchanged; branches that
    depend on a rank's rows and hold exchanges are taken by all ranks together."""
    layout = MeshLayout(data=2, model=4)
    width = layout.padded_vocab_size(32_000)
    num_rows = layout.data * NUM_ROWS
    state = jax.eval_shape(lambda: sampling_state.init_state(num_rows, width))
    rows = jax.ShapeDtypeStruct((num_rows,), jnp.int32)
    counts = jax.ShapeDtypeStruct((num_rows, width), jnp.int32)
    batch = jax.ShapeDtypeStruct((num_rows, width), jnp.float32), state, counts, rows, rows
    sample = partial(sampler.sample, max_logprobs=NUM_TOP, logprobs_mode="raw_logprobs")

    def greedy(*batch):
        return sample(*batch, SamplerFlags(*[jnp.array(False)] * 6)).token_ids

    specs = (TABLE, STATE, TABLE, ROWS, ROWS)
    compiled = on_mesh(layout, greedy, specs, ROWS).lower(*batch).compile().as_text()
    found = re.findall(r" (all-[a-z]+|reduce-scatter|collective-[a-z]+)(?:-start)?\(", compiled)
    assert found == ["all-gather"], found

    results = sampler.SampleOutput(*[ROWS] * 6)
    traced = str(on_mesh(layout, sample, (*specs, FLAGS), results).trace(*batch, FLAGS_ON).jaxpr)
    shapes = re.findall(r":\w+\[([\d,]*)\] = (?:all_gather|psum)\w*\[", traced)
    longest = max(int(np.prod([int(size) for size in shape.split(",") if size])) for shape in shapes)
    assert len(shapes) > 10 and longest <= NUM_ROWS * layout.model * NUM_CANDIDATES < NUM_ROWS * width // 8, shapes
    # Is top_k beyond the candidates and is top_p on, both at once, and of both searches: another pass?
    assert len(re.findall(r"psum\w*\[\s*axes=\('data', 'model'\)", traced)) == 3
    print("collectives")


if __name__ == "__main__":
    main()
