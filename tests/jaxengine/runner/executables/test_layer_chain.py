"""Programs in parts do what they do as wholes: same results, in place where that was said, from files too."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxengine import LLM, SamplingParams
from jaxengine.runner.executables import layer_chain
from jaxengine.runner.executables.cache import ExecutableCache
from jaxengine.runner.executables.layer_chain import InParts
from tests.conftest import TINY_OPTIONS

ROOT = Path(__file__).parents[4]
FIXTURES = ROOT / "tests" / "fixtures" / "models"
NUM_LAYERS, TOKENS = 12, 32


@partial(jax.jit, static_argnums=0)
def run_layer(kind, x, weight, table, pool, number):
    x = (jnp.tanh(x @ weight) if kind else x @ weight) + table
    return x, pool.at[number].add(x[0])


def make_step(kinds=(1,) * NUM_LAYERS):
    def step(params, pool, offset, kept):
        x, table = jnp.arange(TOKENS * 8.0).reshape(TOKENS, 8) / 99 + offset, jnp.cos(offset + jnp.arange(8))
        for layer, (kind, weight) in enumerate(zip(kinds, params, strict=True)):
            x, pool = run_layer(kind, x, weight, table, pool, jnp.int32(layer))
        return {"pool": pool, "kept": kept, "x": x.sum(1), "one": 1.0}

    return step


def arguments(seed=0):
    rng = np.random.default_rng(seed)
    params = [jnp.asarray(rng.normal(size=(8, 8)) / 3, jnp.float32) for _ in range(NUM_LAYERS)]
    return params, jnp.zeros((NUM_LAYERS + 1, 8)), jnp.float32(0.5), jnp.arange(3)


def shapes():
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), arguments())


def get(directory, step, donate=(1,)):
    cache = ExecutableCache(str(directory), jax.devices()[:1])
    return cache, cache.get("step", step, shapes(), jax.eval_shape(step, *shapes()), donate=donate)


def test_equal_layers_are_one_program_and_results_are_those_of_the_whole(tmp_path):
    whole = jax.jit(make_step())(*arguments())
    for made in (True, False):
        cache, compiled = get(tmp_path, make_step())
        assert isinstance(compiled, InParts)
        # What comes before, groups of equal layers, and what comes after.
        assert len(compiled.programs) == 3 and len(compiled.chain.calls) == 8
        assert (cache.num_compiled, cache.num_loaded) == ((1, 0) if made else (0, 1))
        for seed in (0, 0, 1):
            found = compiled(*arguments(seed))
            if seed == 0:
                jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6), found, whole)
            else:
                assert np.abs(found["x"] - whole["x"]).max() > 0.01


def test_the_peak_has_the_temporaries_of_two_programs_that_follow_each_other(tmp_path):
    for sizes, peak in (((3, 3), 6), ((3, 50), 53)):
        calls = [SimpleNamespace(program=index, outputs=(), last=()) for index in (0, 1, 0)]
        programs = [SimpleNamespace(memory_analysis=partial(layer_chain.Analysis, size)) for size in sizes]
        plan: Any = SimpleNamespace(_calls=calls, _constants={}, _results=())
        assert layer_chain._Plan.chain(plan, programs).peak_bytes == peak
    _, compiled = get(tmp_path, make_step())
    assert layer_chain.num_blocks(compiled) == 2 and layer_chain.num_blocks(compiled.programs[0]) == 1


@pytest.mark.parametrize(
    "kinds, num_programs, num_calls",
    [
        ((1, 0) * 6, 3, 8),  # whose period a group keeps
        ((0, 0) + (1,) * 10, 4, 8),
        ((0,) * 6 + (1,) * 6, 4, 8),
    ],
    ids=["alternating", "first two", "halves"],
)
def test_layers_of_several_kinds(tmp_path, kinds, num_programs, num_calls):
    _, compiled = get(tmp_path, make_step(kinds))
    assert isinstance(compiled, InParts)
    assert (len(compiled.programs), len(compiled.chain.calls)) == (num_programs, num_calls)
    whole = jax.jit(make_step(kinds))(*arguments())
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6), compiled(*arguments()), whole)


def test_only_what_was_given_away_is_overwritten(tmp_path):
    for donate, in_place in (((1,), True), ((), False)):
        _, compiled = get(tmp_path, make_step(), donate)
        given = jax.block_until_ready(arguments())
        address = given[1].unsafe_buffer_pointer()
        result = compiled(*given)
        assert (result["pool"].unsafe_buffer_pointer() == address) == in_place == given[1].is_deleted()
        assert not any(leaf.is_deleted() for leaf in jax.tree.leaves((given[0], given[2:])))
        assert np.asarray(result["kept"]).tolist() == [0, 1, 2]


def test_every_result_may_be_given_away(tmp_path):
    """Numbers, arguments that were not given away, and what is there twice."""

    def step(params, pool, offset, kept):
        results = make_step()(params, pool, offset, kept)
        return {**results, "again": results["x"], "table": np.arange(5), "offset": offset}

    give_away = jax.jit(lambda results: jax.tree.map(lambda leaf: leaf + 1, results), donate_argnums=0)
    _, compiled = get(tmp_path, step)
    want = give_away(jax.jit(step)(*arguments()))
    given = arguments()
    for _ in range(2):
        found = give_away(compiled(given[0], jnp.copy(given[1]), *given[2:]))
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6), found, want)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(given))


def test_numbers_lie_where_the_program_runs():
    """Also where that is not the first device: a stage of several, say."""
    code = """
import jax
from jax.sharding import SingleDeviceSharding
from tests.jaxengine.runner.executables.test_layer_chain import ExecutableCache, InParts, arguments, make_step
device = jax.devices()[1]
given = jax.device_put(arguments(), device)
shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), given)
compiled = ExecutableCache("", [device]).compile(make_step(), shapes, donate=(1,))
assert isinstance(compiled, InParts) and compiled.chain.constants
with jax.transfer_guard_device_to_device("disallow"):
    results = compiled(*given)
assert {leaf.device for leaf in jax.tree.leaves(results)} == {device}
"""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2"
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_values_are_let_go_behind_their_last_part(tmp_path):
    _, compiled = get(tmp_path, make_step())
    assert isinstance(compiled, InParts)
    last = [place for call in compiled.chain.calls for place in call.last]
    read = {place for call in compiled.chain.calls for place in call.inputs}
    stay = set(compiled.chain.results) | {place for place, _ in compiled.chain.constants}
    assert len(last) == len(set(last)) and set(last) == read - stay
    # x and the table of one part, and x of the next.
    assert TOKENS * 8 * 4 < compiled.memory_analysis().temp_size_in_bytes < 20 * TOKENS * 8 * 4


def test_other_arguments_are_refused(tmp_path):
    _, compiled = get(tmp_path, make_step())
    with pytest.raises(TypeError, match="compiled for"):
        compiled(*arguments()[:3])


def test_short_steps_have_fewer_calls_and_few_layers_stay_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(layer_chain, "FEW_TOKENS", TOKENS + 1)
    short = get(tmp_path / "short", make_step())[1]
    assert isinstance(short, InParts) and len(short.chain.calls) == 5
    # Other steps compile two of these layers, so that half as many calls would take three times as many.
    uneven = get(tmp_path / "uneven", make_step((0,) * 5 + (1,) * 7))[1]
    assert isinstance(uneven, InParts) and (len(uneven.programs), len(uneven.chain.calls)) == (4, 14)
    monkeypatch.setattr(layer_chain, "_LEAST_LAYERS", NUM_LAYERS + 1)
    assert not isinstance(get(tmp_path / "few", make_step())[1], InParts)


@pytest.mark.thorough("layers of several kinds are above; the default model runs in parts with recorded tokens")
@pytest.mark.parametrize("name", ["qwen3_next", "gemma3"])
def test_models_give_the_same_tokens(tmp_path, monkeypatch, executables_dir, name):
    """Layers with states and experts; with windows."""
    options = {
        **TINY_OPTIONS,
        "model": str(FIXTURES / name),
        "max_num_seqs": 4,
        "max_model_len": 64,
        "compilation_config": {"cudagraph_capture_sizes": [4], "prefill_sizes": [32]},
        "load_format": "dummy",
    }
    prompts = [{"prompt_token_ids": [5 + n * i % 40 for i in range(9 * n)]} for n in (1, 2, 3)]
    params = SamplingParams(max_tokens=8, temperature=0, logprobs=2)

    def run(directory):
        llm = LLM(**options, compile_cache_dir=str(directory))
        (stage,) = llm.core.engine.runner.stages
        assert stage.estimate_needs().programs >= stage.program_bytes
        in_parts = [isinstance(program, InParts) for program in stage._forwards.values()]
        outputs = [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)]
        tokens = [output.token_ids for output in outputs]
        logprobs = [[entry.logprob for each in output.logprobs for entry in each.values()] for output in outputs]
        return in_parts, tokens, logprobs, stage.executables.num_compiled

    in_parts, tokens, logprobs, _ = run(executables_dir)
    assert not any(in_parts)
    monkeypatch.setattr(layer_chain, "_LEAST_LAYERS", 2)
    for loaded in (False, True):
        in_parts, own_tokens, own_logprobs, num_compiled = run(tmp_path)
        assert all(in_parts) and (num_compiled == 0) == loaded
        assert own_tokens == tokens
        jax.tree.map(partial(np.testing.assert_allclose, atol=1e-5), own_logprobs, logprobs)


def test_layers_that_call_python_run_in_parts_and_are_not_stored(tmp_path):
    seen: list[int] = []

    @partial(jax.jit, static_argnums=0)
    def run_layer(kind, x, weight, table, pool, number):
        jax.debug.callback(lambda value: seen.append(int(value)), number)
        return x @ weight + table, pool.at[number].add(x[0])

    def step(params, pool, offset, kept):
        x = jnp.ones((TOKENS, 8)) + offset
        for layer, weight in enumerate(params):
            x, pool = run_layer(1, x, weight, offset + jnp.zeros(8), pool, jnp.int32(layer))
        return {"pool": pool, "x": x.sum(1)}

    cache, compiled = get(tmp_path, step)
    assert isinstance(compiled, InParts)
    jax.block_until_ready(compiled(*arguments()))
    jax.effects_barrier()
    assert sorted(seen) == list(range(NUM_LAYERS))
    assert layer_chain.serialized_bytes(compiled)[0] > 1000
    assert cache.num_compiled == 1 and not list(tmp_path.glob("*.xla"))
