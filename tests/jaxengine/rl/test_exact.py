"""rl_exact: an engine, its recomputation and a trainer's forward pass give the same bits.

`python -m benchmarks rl_agreement` has more families, and the bound without rl_exact.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxengine import LLM, SamplingParams, open_model
from jaxengine.engine.extensions import structured as structured_module
from jaxengine.models.build import Build
from jaxengine.models.layers.exact import ROWS, check_exact, in_row_blocks
from jaxengine.models.registry import build_model, read_folder
from jaxengine.rl import Agreement, certify, forward, log_probs
from tests.conftest import compiled_programs, use_scheduler
from tests.fixtures.drawn_weights import FOLDER, checkpoint
from tests.jaxengine.engine.test_speculation import force, forced_workload, make_folder
from tests.models.conftest import load_recorded
from tests.sharding.parallel_cases import OPTIONS
from tests.tables import each_row

VOCAB = 128


def bits(values: Any) -> list[int]:
    return np.asarray(values, np.float32).view(np.int32).tolist()


def prompts_of(seed: int, count: int) -> list[list[int]]:
    """Prompts of 3 to 40 tokens, of which every third begins as the first does."""
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(3, VOCAB, int(rng.integers(3, 28))).tolist() for _ in range(count)]
    return [(prompts[0][:12] if index % 3 == 0 else []) + own for index, own in enumerate(prompts)]


# How rollouts run: limits of the scheduler, and whether each request is alone.
RUNS: dict[str, tuple[dict[str, Any], bool]] = {
    "in a batch": ({}, False),
    "alone": ({}, True),
    "in chunks of 5": ({"long_prefill_token_threshold": 5}, False),
    "in small steps": ({"max_num_batched_tokens": 9}, False),
    "preempted": ({"num_pages": 24}, False),
    "without prefixes": ({"enable_prefix_caching": False}, False),
}


DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2, "prompt_lookup_min": 1}


@pytest.mark.parametrize("drafts", [None, DRAFTS])
def test_however_a_rollout_runs_the_trainer_has_its_bits(make_llm, tiny_model, drafts):
    llm: LLM = make_llm(rl_exact=True, speculative_config=drafts)
    model, prompts = open_model(tiny_model), prompts_of(0, 6)
    params = [
        SamplingParams(temperature=index % 2, seed=index, max_tokens=9 + 5 * index, logprobs=0, ignore_eos=True)
        for index in range(len(prompts))
    ]
    before, known = compiled_programs(), {}
    for way in RUNS if drafts is None else ("in a batch", "preempted"):
        changes, alone = RUNS[way]
        scheduler = use_scheduler(llm, **changes)
        parts = [slice(each, each + 1) for each in range(len(prompts))] if alone else [slice(None)]
        outputs = [own for part in parts for own in llm.generate(prompts[part], params[part], use_tqdm=False)]
        assert (scheduler.num_preemptions > 0) == (way == "preempted"), way
        completions = [list(output.outputs[0].token_ids) for output in outputs]
        rollout = [
            bits(
                [position[token].logprob for token, position in zip(own, output.outputs[0].logprobs or (), strict=True)]
            )
            for own, output in zip(completions, outputs, strict=True)
        ]
        assert [bits(own) for own in llm.get_logprobs(prompts, completions)] == rollout, way
        known[way] = completions, rollout
    use_scheduler(llm)
    assert compiled_programs() == before
    accepted = [each.value for each in llm.get_metrics() if each.name == "vllm:spec_decode_num_accepted_tokens"]
    assert drafts is None or accepted[0] > 0
    completions, rollout = known["in a batch"]
    assert all(each == known["in a batch"] for each in known.values())
    # All in one row, one after the other.
    rows = [[*prompt, *own] for prompt, own in zip(prompts, completions, strict=True)]
    tokens, segments = np.concatenate(rows)[None], np.repeat(np.arange(len(rows)), [len(row) for row in rows])[None]
    found = np.asarray(log_probs(model.module, model.params, tokens, segments, exact=True))[0]
    ends = np.cumsum([len(row) for row in rows])
    for own, end, expected in zip(completions, ends, rollout, strict=True):
        assert bits(found[end - len(own) : end]) == expected


BOTH = [
    "grammar",
    pytest.param("ngram", marks=pytest.mark.thorough("as the first, beside the drafts of the test above")),
]


@pytest.mark.parametrize("method", BOTH)
def test_tokens_that_a_grammar_determines_have_the_bits_of_others(method, tmp_path, executables_dir, monkeypatch):
    """Several in a step, in steps of every width: as one after the other, and as computed again."""
    monkeypatch.setattr(structured_module, "_MASK_SECONDS", 60.0)  # a mask that is late costs no steps
    options = OPTIONS | {"model": make_folder(tmp_path), "compile_cache_dir": executables_dir, "rl_exact": True}
    options |= {"num_gpu_blocks_override": 200}
    prompts, params = forced_workload(257)
    chosen = [index for index in range(len(prompts)) if index not in (9, 13)]  # whose grammar ends with an error
    prompts, params = [prompts[each] for each in chosen], [params[each].clone_with(logprobs=0) for each in chosen]
    with LLM(**options, speculative_config={"method": method, "num_speculative_tokens": 7}) as llm:
        known = []
        for width, pages in ((1, 200), (8, 200), (4, 40)):
            scheduler = use_scheduler(llm, num_pages=pages)
            force(llm, width)
            outputs = [each.outputs[0] for each in llm.generate(prompts, params, use_tqdm=False)]
            completions = [list(each.token_ids) for each in outputs]
            rollout = [
                bits([position[token].logprob for token, position in zip(each.token_ids, each.logprobs, strict=True)])
                for each in outputs
            ]
            assert [bits(own) for own in llm.get_logprobs(prompts, completions)] == rollout, width
            assert scheduler.num_preemptions > 0 or pages == 200
            known.append((completions, rollout))
        assert all(each == known[0] for each in known)
        assert llm.core.engine.extensions.by_name["drafts"].stats.num_forced > 100


ENGINE = {
    "skip_tokenizer_init": True,
    "max_model_len": 64,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 12,
    "block_size": 4,
    "num_gpu_blocks_override": 60,
    "compilation_config": {"cudagraph_capture_sizes": [4], "prefill_sizes": [12]},
    "disable_log_stats": True,
}
# States; then windows, states with experts, latent attention with experts, Mamba-2. The benchmark has others.
FURTHER = pytest.mark.thorough("further kinds of layers")
FAMILIES = [
    pytest.param("lfm2", "bfloat16", marks=FURTHER),
    pytest.param("gemma2", "bfloat16", marks=FURTHER),
    pytest.param("qwen3_next", "float32", marks=FURTHER),
    pytest.param("deepseek_v3", "float32", marks=FURTHER),
    pytest.param("granite_hybrid", "bfloat16", marks=FURTHER),
]


@pytest.mark.parametrize(("name", "dtype"), FAMILIES)
def test_certificates(name, dtype, executables_dir):
    folder = checkpoint(name)
    llm = LLM(str(folder), dtype=dtype, rl_exact=True, compile_cache_dir=executables_dir, **ENGINE)
    try:
        found = certify(llm, open_model(folder, dtype=dtype), prompts_of(1, 5))
    finally:
        llm.shutdown()
    assert found.holds and found.num_tokens == 80, str(found)
    assert found.rollout == found.recomputed == found.trainer < 0
    assert (found.rl_exact, found.dtype, found.weight_version) == (True, dtype, 0)
    lines = str(found).splitlines()
    assert lines[0].endswith("80 tokens") and "0 of 80 bit patterns differ" in lines[2] and "jaxlib" in lines[3]


def test_a_certificate_of_other_weights_does_not_hold(make_llm, tiny_model):
    llm, model = make_llm(rl_exact=True, return_sampling_mask=True), open_model(tiny_model)
    use_scheduler(llm)
    others = jax.tree.map(lambda leaf: leaf * 1.01, model.params)
    short = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    found = certify(llm, model.module, [[5, 6, 7]], params=others, sampling_params=short)
    assert not found.holds and not found.rollout_recomputed.mismatches
    assert found.rollout_trainer.mismatches == 4 and found.rollout_trainer.largest > 1e-4
    with pytest.raises(ValueError, match="params must be given"):
        certify(llm, model.module, [[5]])
    with pytest.raises(ValueError, match="prompts must be lists of token ids, none of them empty"):
        certify(llm, model, [[5], []])


def test_agreement_counts_bit_patterns():
    one, other = np.float32([0.0, 1.0, -2.0]), np.float32([-0.0, 1.0, -2.5])
    assert Agreement.of(one, other) == Agreement(2, 0.5)
    assert Agreement.of(one[:0], other[:0]) == Agreement(0, 0.0)


def test_gradients_are_those_of_the_forward_pass_without_it():
    case = load_recorded("llama")
    params, tokens = nnx.state(case.model), case.prompts[1][None]

    def loss(params: nnx.State, exact: bool) -> jax.Array:
        return -log_probs(case.model, params, tokens, exact=exact).mean()

    ours, theirs = (jax.jit(jax.value_and_grad(loss), static_argnums=1)(params, exact) for exact in (True, False))
    assert abs(ours[0] - theirs[0]) < 1e-5
    for one, two in zip(jax.tree.leaves(ours[1]), jax.tree.leaves(theirs[1]), strict=True):
        assert np.abs(one - two).max() <= 1e-5 * max(np.abs(two).max(), 1e-3)
    along = sum(jnp.vdot(*each) for each in zip(jax.tree.leaves(theirs[1]), jax.tree.leaves(params), strict=True))
    value, slope = jax.jit(lambda params: jax.jvp(lambda params: loss(params, True), (params,), (params,)))(params)
    assert value == ours[0] and abs(slope - along) <= 1e-5 * abs(along)


def test_log_probs_of_segments():
    case = load_recorded("llama")
    tokens = np.array([[5, 6, 7, 8, 9, 10]])
    segments = np.array([[2, 2, 0, 0, 0, -1]])
    found = np.asarray(log_probs(case.model, nnx.state(case.model), tokens, segments))[0]
    logits = np.asarray(forward(case.model, nnx.state(case.model), tokens, segments))[0]
    wanted = np.asarray(jax.nn.log_softmax(logits))[[0, 2, 3], [6, 8, 9]]
    np.testing.assert_allclose(found[[1, 3, 4]], wanted, atol=1e-6)
    assert not found[[0, 2, 5]].any()


@each_row("count", [1, ROWS - 1, ROWS, 2 * ROWS + 3])
def test_rows_in_blocks(count):
    x = jax.random.normal(jax.random.key(0), (count, 8))
    assert bits(in_row_blocks(jnp.tanh, x)) == bits(jnp.tanh(x))
    assert np.isnan(np.asarray(in_row_blocks(lambda rows: rows + 0, x.at[0].set(jnp.nan)))[0]).all()


def test_what_cannot_be_exact_is_refused():
    case = load_recorded("llama")
    params, tokens = nnx.state(case.model), np.zeros((1, 4), np.int32)
    exact = build_model(case.config, Build("float32", exact=True))
    with pytest.raises(ValueError, match="was built for an engine with rl_exact"):
        forward(exact, params, tokens)
    sees: Any = SimpleNamespace(config=SimpleNamespace(architecture="Sees", tower=object()))
    selects: Any = SimpleNamespace(config=read_folder(FOLDER / "minimax_m3"))
    for model in (sees, selects):
        with pytest.raises(ValueError, match="exact must be False for .*: no engine with rl_exact runs it"):
            check_exact(model, {})
