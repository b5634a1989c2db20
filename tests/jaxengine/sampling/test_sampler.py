"""The sampler against a float64 oracle, its distribution, its independence of the crowd, and its hostile rows."""

from __future__ import annotations

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxengine.requests.params.sampling_params import SamplingParams
from jaxengine.sampling import sampler
from jaxengine.sampling import state as sampling_state
from jaxengine.sampling.sampler import SampleOutput, SamplerFlags
from jaxengine.sampling.state import SamplingState
from jaxengine.scheduler.base.token_params import row_words
from tests.jaxengine.sampling.draw_oracle import gumbel

NUM_SLOTS = 40
MODES = ("raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits")
ALL_ON = SamplerFlags(*[jnp.array(True)] * 6)
OTHER_MODE = pytest.mark.thorough("values of each mode are test_pipeline_is_the_oracles")
OTHER = pytest.mark.thorough("these parameters with what else varies")
ALL_OFF = SamplerFlags(*[jnp.array(False)] * 6)


@partial(jax.jit, static_argnames=("max_logprobs", "logprobs_mode", "suppressed_tokens"))
def jit_sample(
    logits, state, counts, slots, positions, flags, max_logprobs=5, logprobs_mode="raw_logprobs", suppressed_tokens=()
) -> SampleOutput:
    static = {"max_logprobs": max_logprobs, "logprobs_mode": logprobs_mode, "suppressed_tokens": suppressed_tokens}
    return sampler.sample(logits, state, counts, slots, positions, flags, **static)


def run(logits, state, slots, positions, flags=ALL_ON, *, counts=(), **static) -> SampleOutput:
    """Samples `logits` as the first rows of a batch of NUM_SLOTS (one shape for all: compiling is what takes time).

    counts: token_counts of the first slots.
    """
    num_rows, padding = len(logits), (0, max(0, NUM_SLOTS - len(logits)))
    slots, positions = (np.broadcast_to(np.asarray(x, np.int32), num_rows) for x in (slots, positions))
    slots, positions = np.pad(slots, padding, constant_values=NUM_SLOTS), np.pad(positions, padding)
    logits = np.pad(np.asarray(logits, np.float32), (padding, (0, 0)))
    token_counts = np.zeros(state.logit_bias.shape, np.int32)
    token_counts[: len(counts)] = counts if len(counts) else 0
    output = jit_sample(logits, state, token_counts, slots, positions, flags, **static)
    return jax.tree.map(lambda leaf: np.asarray(leaf)[:num_rows], output)


def state_of(vocab_size: int, *params: SamplingParams, seeds=None, bias=()) -> SamplingState:
    """A state whose slot i holds params[i] and bias[i]."""
    seeds = range(len(params)) if seeds is None else seeds
    words = np.array([row_words(one, seed) for one, seed in zip(params, seeds, strict=True)], np.int32)
    logit_bias = np.zeros((NUM_SLOTS, vocab_size), np.float32)
    if len(bias):
        logit_bias[: len(bias)] = bias
    state = sampling_state.init_state(NUM_SLOTS, vocab_size)._replace(logit_bias=jnp.asarray(logit_bias))
    return sampling_state.write_params(state, np.arange(len(params)), words)


class OracleRow:
    """One row in float64, with a sort."""

    def __init__(self, logits, params: SamplingParams, counts, bias):
        raw = logits.astype(np.float64)
        x = raw + bias.astype(np.float64)
        times, seen = counts >> 1, counts > 0
        x = np.where(seen, np.where(x > 0, x / params.repetition_penalty, x * params.repetition_penalty), x)
        x = x - params.frequency_penalty * times - params.presence_penalty * (times > 0)
        self.greedy_id = int(np.argmax(x))
        scaled = x / (params.temperature or 1.0)
        kept = np.isfinite(scaled)
        kept &= np.exp(scaled - scaled.max()) >= params.min_p
        if 0 < params.top_k < kept.sum():
            kept &= scaled >= np.sort(scaled)[-params.top_k]
        mass = softmax(np.where(kept, scaled, -np.inf))
        order = np.argsort(-mass, kind="stable")
        above = np.empty_like(mass)
        above[order] = np.cumsum(mass[order]) - mass[order]  # logits differ, so "above" is "before in the order"
        kept &= (above < params.top_p) | (params.top_p == 1)
        processed = np.where(kept, scaled, -np.inf)
        self.probs = softmax(processed)
        self.values = {
            "raw_logits": raw,
            "raw_logprobs": np.log(softmax(raw)),
            "processed_logits": processed,
            "processed_logprobs": processed - scaled.max() - np.log(np.exp(processed - scaled.max()).sum()),
        }

    def token(self, params: SamplingParams, seed: int, position: int) -> tuple[int, float]:
        """The token drawn, and by how much it is ahead of the next one."""
        if params.is_greedy:
            return self.greedy_id, 1.0
        with np.errstate(divide="ignore"):
            scores = np.log(self.probs) + gumbel(seed, position, len(self.probs))
        *_, second, best = np.sort(scores)
        return int(np.argmax(scores)), float(best - second)


def softmax(x):
    weights = np.exp(x - x.max())
    return weights / weights.sum()


def random_params(rng: np.random.Generator) -> SamplingParams:
    def sometimes(value, off):
        return value if rng.random() < 0.5 else off

    return SamplingParams(
        temperature=sometimes(float(rng.uniform(0.3, 2)), float(rng.integers(2))),
        top_k=sometimes(int(rng.integers(1, 60)), 0),
        top_p=sometimes(float(rng.uniform(0.2, 1)), 1.0),
        min_p=sometimes(float(rng.uniform(0, 0.3)), 0.0),
        presence_penalty=sometimes(float(rng.uniform(-2, 2)), 0.0),
        frequency_penalty=sometimes(float(rng.uniform(-2, 2)), 0.0),
        repetition_penalty=sometimes(float(rng.uniform(0.5, 2)), 1.0),
    )


@pytest.mark.parametrize("mode", MODES)
def test_pipeline_is_the_oracles(mode):
    rng = np.random.default_rng(MODES.index(mode))
    vocab_size, num_rows, tokens_checked = 300, NUM_SLOTS, 0
    for trial in range(6):
        params = [random_params(rng) for _ in range(num_rows)]
        seeds = rng.integers(-(2**63), 2**63, num_rows).tolist()
        logits = rng.normal(0, 3, (num_rows, vocab_size)).astype(np.float32)
        counts = rng.integers(0, 8, (num_rows, vocab_size)) * (rng.random((num_rows, vocab_size)) < 0.2)
        bias = np.where(rng.random((num_rows, vocab_size)) < 0.1, rng.normal(0, 4, (num_rows, vocab_size)), 0)
        bias = np.where(rng.random((num_rows, vocab_size)) < 0.1, -np.inf, bias).astype(np.float32)
        slots, positions = rng.permutation(num_rows), rng.integers(0, 2**31, num_rows)
        state = state_of(vocab_size, *params, seeds=seeds, bias=bias)
        got = run(logits, state, slots, positions, counts=counts, logprobs_mode=mode)
        for row, slot in enumerate(slots):
            oracle = OracleRow(logits[row], params[slot], counts[slot], bias[slot])
            token, lead = oracle.token(params[slot], seeds[slot], int(positions[row]))
            if lead < 1e-5:
                continue
            tokens_checked += 1
            assert got.token_ids[row] == token, (trial, row, params[slot])
            values = oracle.values[mode]
            np.testing.assert_allclose(got.logprob[row], values[token], rtol=2e-5, atol=2e-5)
            assert got.rank[row] == 1 + (values > values[token]).sum()
            best = np.sort(values)[::-1][:5]
            np.testing.assert_allclose(got.top_logprobs[row], best, rtol=2e-5, atol=2e-5)
            finite = np.isfinite(best)
            np.testing.assert_allclose(values[got.top_ids[row]][finite], best[finite], rtol=2e-5, atol=2e-5)
    assert tokens_checked > 220


@pytest.mark.parametrize(
    "mode",
    [
        *("raw_logprobs", "processed_logits"),
        *(pytest.param(mode, marks=OTHER_MODE) for mode in ("raw_logits", "processed_logprobs")),
    ],
)
def test_given_tokens_have_the_logprobs_of_the_whole_list(mode):
    """Bit for bit those that the list of all tokens has, whatever was drawn; -inf for none."""
    rng = np.random.default_rng(3)
    vocab_size, num_rows = 60, 8
    params = [random_params(rng) for _ in range(num_rows)]
    ids = np.full((num_rows, sampling_state.MAX_LOGPROB_TOKEN_IDS), -1, np.int32)
    ids[:, :5] = rng.integers(0, vocab_size, (num_rows, 5))
    ids[1], ids[2, :60] = -1, np.arange(vocab_size)
    state = sampling_state.set_logprob_ids(state_of(vocab_size, *params), jnp.arange(num_rows), jnp.asarray(ids))
    slots = rng.permutation(num_rows)
    logits = rng.normal(0, 3, (num_rows, vocab_size))
    got = run(logits, state, slots, 7, max_logprobs=vocab_size, logprobs_mode=mode)
    for row, slot in enumerate(slots):
        values = dict(zip(got.top_ids[row].tolist(), got.top_logprobs[row], strict=True))
        values[-1] = np.float32(-np.inf)
        expected = np.array([values[token_id] for token_id in ids[slot].tolist()], np.float32)
        np.testing.assert_array_equal(got.given_logprobs[row].view(np.int32), expected.view(np.int32))


@pytest.mark.parametrize(
    ("params", "varied"),
    [
        (SamplingParams(temperature=1.0), "position"),
        (SamplingParams(temperature=0.6, top_k=12, top_p=0.9), "seed"),
        (SamplingParams(temperature=1.7, min_p=0.1), "position"),
        pytest.param(SamplingParams(temperature=1.0), "seed", marks=OTHER),
        pytest.param(SamplingParams(temperature=0.6, top_k=12, top_p=0.9), "position", marks=OTHER),
        pytest.param(SamplingParams(temperature=1.7, min_p=0.1), "seed", marks=OTHER),
    ],
)
def test_draws_follow_the_distribution(params, varied):
    """Chi-square over 50,000 draws: one seed at many positions, and many seeds at one position."""
    vocab_size, num_draws = 40, 50_000
    logits = np.random.default_rng(8).normal(0, 1, vocab_size).astype(np.float32)
    nothing = np.zeros(vocab_size, np.int64)
    probs = OracleRow(logits, params, nothing, np.zeros(vocab_size)).probs
    one_slot = state_of(vocab_size, params, seeds=[1234])
    state = jax.tree.map(lambda leaf: jnp.repeat(leaf[:1], num_draws, axis=0), one_slot)
    slots, positions = np.zeros(num_draws, np.int32), np.arange(num_draws)
    if varied == "seed":
        seeds = jnp.arange(num_draws, dtype=jnp.uint32)
        state = state._replace(params=state.params._replace(seed_low=seeds))
        slots, positions = positions, slots + 9
    drawn = run(np.tile(logits, (num_draws, 1)), state, slots, positions).token_ids
    observed = np.bincount(drawn, minlength=vocab_size)
    assert observed[probs == 0].sum() == 0
    expected = (probs * num_draws)[probs > 0]
    chi_square = ((observed[probs > 0] - expected) ** 2 / expected).sum()
    freedom = len(expected) - 1
    # Mean and spread of the chi-square distribution; 5 sigma is p < 1e-5 here.
    assert chi_square < freedom + 5 * np.sqrt(2 * freedom)


@pytest.mark.parametrize("num_rows", [1, 7, 40])
def test_token_does_not_depend_on_the_crowd(num_rows):
    """The same request alone, with nothing switched on that it does not need, and in a crowd that needs everything."""
    vocab_size, rng = 300, np.random.default_rng(4)
    mine = [SamplingParams(temperature=0.8), SamplingParams(temperature=1.3, top_p=0.8, top_k=100)]
    others = [random_params(rng) for _ in range(NUM_SLOTS - 2)]
    crowd_bias = rng.normal(0, 1, (NUM_SLOTS, vocab_size))
    crowd_counts, no_counts = rng.integers(0, 4, (NUM_SLOTS, vocab_size)), np.zeros((NUM_SLOTS, vocab_size), np.int64)
    crowd_bias[-2:], crowd_counts[-2:] = 0, 0
    crowd = state_of(vocab_size, *others, *mine, seeds=range(NUM_SLOTS), bias=crowd_bias)
    alone = state_of(vocab_size, *mine, seeds=[NUM_SLOTS - 2, NUM_SLOTS - 1])
    for position in range(40):
        which = position % 2
        logits = rng.normal(0, 2, (num_rows, vocab_size)).astype(np.float32)
        flags = SamplerFlags(*(jnp.array(flag) for flag in (True, which == 1, False, False, False, True)))
        single = jit_sample(logits[-1:], alone, no_counts, np.array([which]), np.array([position]), flags)
        slots = rng.integers(0, NUM_SLOTS - 2, num_rows)
        slots[-1] = NUM_SLOTS - 2 + which
        positions = rng.integers(0, 1000, num_rows)
        positions[-1] = position
        together = jit_sample(logits, crowd, crowd_counts, slots, positions, ALL_ON)
        for mine_alone, mine_together in zip(*map(jax.tree.leaves, (single, together)), strict=True):
            np.testing.assert_array_equal(mine_together[-1], mine_alone[0])


@pytest.mark.parametrize(
    "change",
    [
        {"temperature": 1.9},
        {"temperature": 0.0},
        {"top_p": 0.5},
        {"top_k": 3},
        {"min_p": 0.3},
        {"presence_penalty": 2.0},
        {"frequency_penalty": -1.0},
        {"repetition_penalty": 1.8},
        {"seed": 5},
    ],
    ids=str,
)
def test_every_parameter_acts(change):
    rng = np.random.default_rng(5)
    counts = rng.integers(0, 4, (1, 300))
    logits = np.tile(rng.normal(0, 1, 300), (NUM_SLOTS, 1))
    params = [SamplingParams(seed=1), SamplingParams(seed=1).clone_with(**change)]
    drawn = [
        run(logits, state_of(300, one, seeds=[one.seed]), 0, np.arange(NUM_SLOTS), counts=counts).token_ids
        for one in params
    ]
    assert (drawn[0] != drawn[1]).any()


def test_prompt_tokens_count_for_repetition_only():
    """Token 0 is in the prompt (1), token 1 once in the output (2), token 2 in both, twice in the output (5)."""
    params = SamplingParams(temperature=0, repetition_penalty=2.0, presence_penalty=0.25, frequency_penalty=0.5)
    logits, counts = np.full((1, 300), -99.0), np.zeros((1, 300))
    logits[0, :5], counts[0, :5] = [4, 4, 4, 1, -4], [1, 2, 5, 0, 1]
    got = run(logits, state_of(300, params), 0, 0, counts=counts, logprobs_mode="processed_logits")
    values = dict(zip(got.top_ids[0].tolist(), got.top_logprobs[0].tolist(), strict=True))
    assert values == {0: 2.0, 1: 2.0 - 0.25 - 0.5, 2: 2.0 - 0.25 - 1.0, 3: 1.0, 4: -8.0}


def test_greedy_takes_the_smallest_of_equals_beside_random_rows():
    logits = np.zeros((3, 300), np.float32)
    logits[:, [140, 150]] = 7.0
    state = state_of(300, SamplingParams(temperature=0), SamplingParams(), SamplingParams(temperature=0))
    assert run(logits, state, [0, 1, 2], 3).token_ids[[0, 2]].tolist() == [140, 140]


@pytest.mark.parametrize("flags", [ALL_ON, ALL_OFF], ids=["everything on", "all greedy"])
@pytest.mark.parametrize("poison", [np.nan, -np.nan, np.inf, "forbidden"], ids=str)
def test_poisoned_row_gives_minus_one_and_harms_nobody(poison, flags):
    rng = np.random.default_rng(6)
    heat = 1.0 if flags is ALL_ON else 0.0
    state = state_of(300, *[SamplingParams(temperature=heat, top_p=0.9, repetition_penalty=1.3)] * 3)
    logits = rng.normal(0, 2, (3, 300)).astype(np.float32)
    clean = run(logits, state, [0, 1, 2], 4, flags)
    for column in (0, 77, 299):
        hurt = logits.copy()
        if poison == "forbidden":
            hurt[1] = -np.inf
        else:
            hurt[1, column] = poison
        got = run(hurt, state, [0, 1, 2], 4, flags)
        assert got.token_ids.tolist() == [clean.token_ids[0], -1, clean.token_ids[2]]
        np.testing.assert_array_equal(got.logprob[[0, 2]], clean.logprob[[0, 2]])
        assert got.rank[1] == 0 and got.logprob[1] == -np.inf


def test_row_with_everything_forbidden_by_its_bias():
    state = state_of(300, SamplingParams(), bias=[np.full(300, -np.inf)])
    assert run(np.zeros((1, 300)), state, 0, 0).token_ids.tolist() == [-1]


def test_padding_rows_read_no_state_and_change_nothing():
    rng = np.random.default_rng(7)
    hostile = [SamplingParams(temperature=2.0, repetition_penalty=1e20, top_k=1)] * NUM_SLOTS
    state = state_of(300, *hostile, bias=np.full((NUM_SLOTS, 300), np.nan))
    state = sampling_state.write_params(state, jnp.array([0]), np.array([row_words(SamplingParams(), 3)], np.int32))
    state = sampling_state.set_bias_rows(state, jnp.array([0]), jnp.zeros((1, 300)))
    logits = rng.normal(0, 2, (4, 300)).astype(np.float32)
    settings = {"counts": np.full((NUM_SLOTS, 300), 3), "logprobs_mode": "processed_logits"}
    got = run(logits, state, [NUM_SLOTS, 0, NUM_SLOTS + 7, NUM_SLOTS], 11, **settings)
    assert got.token_ids[[0, 2, 3]].tolist() == logits.argmax(axis=1)[[0, 2, 3]].tolist()
    np.testing.assert_array_equal(got.logprob[[0, 2, 3]], logits.max(axis=1)[[0, 2, 3]])
    logits[[0, 2, 3]] = np.nan
    poisoned = run(logits, state, [NUM_SLOTS, 0, NUM_SLOTS + 7, NUM_SLOTS], 11, **settings)
    assert poisoned.token_ids[1] == got.token_ids[1]
    np.testing.assert_array_equal(poisoned.top_logprobs[1], got.top_logprobs[1])


def test_flags_skip_what_nobody_asked_for():
    logits = np.arange(300, dtype=np.float32)[None]
    bias, counts = np.zeros((1, 300)), np.zeros((1, 300))
    bias[0, 299], counts[0, 299] = -np.inf, 9
    got = run(logits, state_of(300, SamplingParams(temperature=2.0), bias=bias), 0, 0, ALL_OFF, counts=counts)
    assert got.token_ids.tolist() == [299]
    assert got.rank.tolist() == [0] and np.isneginf(got.logprob).all() and np.isneginf(got.top_logprobs).all()


@pytest.mark.parametrize(("max_logprobs", "width"), [(0, 0), (3, 3), (50, 7)])
def test_number_of_reported_tokens(max_logprobs, width):
    state = jax.eval_shape(lambda: sampling_state.init_state(NUM_SLOTS, 7))
    counts = jax.ShapeDtypeStruct((NUM_SLOTS, 7), jnp.int32)
    rows = jax.ShapeDtypeStruct((2,), jnp.int32)
    settings = {"max_logprobs": max_logprobs, "logprobs_mode": "raw_logprobs"}
    logits = jax.ShapeDtypeStruct((2, 7), jnp.float32)
    got = jax.eval_shape(partial(sampler.sample, **settings), logits, state, counts, rows, rows, ALL_ON)
    assert [(leaf.shape, leaf.dtype.name) for leaf in jax.tree.leaves(got)] == [
        ((2,), "int32"),
        ((2,), "float32"),
        ((2,), "int32"),
        ((2, width), "int32"),
        ((2, width), "float32"),
        ((2, sampling_state.MAX_LOGPROB_TOKEN_IDS), "float32"),
    ]


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_vocabulary_is_never_sorted(platform):
    """Neither by a sort nor by a top_k, which is a sort on a GPU: only rows much shorter than the vocabulary are."""
    vocab_size = 32_000
    state = jax.eval_shape(lambda: sampling_state.init_state(4, vocab_size))
    counts = jax.ShapeDtypeStruct((4, vocab_size), jnp.int32)
    rows = jax.ShapeDtypeStruct((4,), jnp.int32)
    arguments = (jax.ShapeDtypeStruct((4, vocab_size), jnp.float32), state, counts, rows, rows, ALL_ON)
    lowered = jit_sample.trace(*arguments, max_logprobs=20).lower(lowering_platforms=(platform,))
    ordering = [line for line in lowered.as_text().splitlines() if re.search(r"stablehlo\.sort|top_?k\b", line, re.I)]
    widths = [int(width) for line in ordering for width in re.findall(r"tensor<4x(\d+)xf32>", line)]
    assert widths and max(widths) <= vocab_size // 8, ordering


def test_columns_survive_the_state():
    params = SamplingParams(
        temperature=0.5,
        top_p=0.25,
        min_p=0.125,
        top_k=-1,
        presence_penalty=-1,
        frequency_penalty=1.5,
        repetition_penalty=2,
    )
    state = state_of(3, SamplingParams(temperature=0), params, seeds=[-1, -(2**63) + 5])
    assert [float(column[1]) for column in state.params[:6]] == [0.5, 0.25, 0.125, -1.0, 1.5, 2.0]
    assert state.params.top_k[:2].tolist() == [0, 0]
    assert [column[:2].tolist() for column in state.params[7:]] == [[2**32 - 1, 5], [2**32 - 1, 2**31]]


def test_smallest_top_p_keeps_the_best_token():
    params = SamplingParams(top_p=5e-324)
    got = run(np.arange(300.0)[None].repeat(40, 0) / 300, state_of(300, params), 0, np.arange(40))
    assert set(got.token_ids) == {299}


def test_writes_beyond_the_last_slot_are_dropped():
    state = state_of(6, *[SamplingParams(top_k=3, temperature=0.5)] * NUM_SLOTS)
    words = np.array(row_words(SamplingParams(temperature=1.5, top_k=2), 8), np.int32)
    beyond = jnp.array([NUM_SLOTS, NUM_SLOTS + 3])
    written = sampling_state.write_params(state, beyond, jnp.stack([words] * 2))
    written = sampling_state.set_bias_rows(written, jnp.array([NUM_SLOTS]), jnp.ones((1, 6)))
    for before, after in zip(jax.tree.leaves(state), jax.tree.leaves(written), strict=True):
        np.testing.assert_array_equal(before, after)
    counts = jnp.full((NUM_SLOTS, 6), 3)
    np.testing.assert_array_equal(
        sampling_state.set_rows(counts, jnp.array([NUM_SLOTS + 1]), jnp.ones((1, 6), jnp.int32)), counts
    )


@pytest.mark.parametrize("num_rows", [1, 4])
def test_counting_tokens(num_rows):
    counts = jnp.zeros((NUM_SLOTS, 6), jnp.int32).at[:3, 0].set(1)
    slots = jnp.array([2, 1, NUM_SLOTS, 0][:num_rows])
    tokens = jnp.array([0, 5, 3, -1][:num_rows])
    counted = sampling_state.count_tokens(counts, slots, tokens, jnp.ones(num_rows, bool))
    expected = np.array(counts)
    expected[2, 0] += 2
    if num_rows > 1:
        expected[1, 5] += 2
    np.testing.assert_array_equal(counted, expected)
    unchanged = sampling_state.count_tokens(counts, slots, tokens, jnp.zeros(num_rows, bool))
    np.testing.assert_array_equal(unchanged, counts)


def test_suppressed_tokens_are_sampled_by_no_row_and_keep_their_raw_logprobs():
    suppressed, params = (0, 33, 299), [SamplingParams(temperature=0), SamplingParams(temperature=1, seed=1)]
    logits = np.random.default_rng(5).normal(size=(2, 300)).astype(np.float32)
    logits[:, suppressed] += 9
    forbidding = np.zeros((2, 300), np.float32)
    forbidding[:, suppressed] = -np.inf
    biased = state_of(300, *params, bias=forbidding)
    mode = {"logprobs_mode": MODES[0]}  # its program without suppressed tokens is that of test_pipeline_is_the_oracles
    free = ALL_OFF._replace(any_random=ALL_ON.any_random, any_logprobs=ALL_ON.any_logprobs)
    for flags in (ALL_ON, free, free._replace(any_random=ALL_OFF.any_random)):
        got = run(logits, state_of(300, *params), [0, 1], [7, 8], flags, suppressed_tokens=suppressed, **mode)
        expected = run(logits, biased, [0, 1], [7, 8], flags._replace(any_bias=jnp.array(True)), **mode)
        assert not set(got.token_ids.tolist()) & set(suppressed)
        for name, ours, theirs in zip(SampleOutput._fields, got, expected, strict=True):
            np.testing.assert_array_equal(ours, theirs, err_msg=name)
        assert set(got.top_ids[0, :3].tolist()) == set(suppressed) and np.isfinite(got.top_logprobs).all()
