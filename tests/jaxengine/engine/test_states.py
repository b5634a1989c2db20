"""Models whose layers keep states: tokens depend on neither what these held before, nor preemption, nor prefixes."""

from __future__ import annotations

import gc
import math
import weakref
from functools import partial
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxengine import LLM, ConfigError, SamplingParams
from jaxengine.config.base.platforms import PLATFORMS
from jaxengine.config.engine_config import EngineConfig
from jaxengine.models.registry import read_folder
from tests.conftest import TINY_CHECKPOINT, TINY_OPTIONS, use_scheduler
from tests.jaxengine.engine.test_speculation import force
from tests.tables import each_row

MODELS = TINY_CHECKPOINT.parent
MORE = "lfm2", "lfm2_moe", "granite_hybrid", "falcon_h1", "mamba2", "jamba", "deepseek_v4"
OTHER = pytest.mark.thorough("another kind of state")


@partial(jax.jit, donate_argnums=0)
def set_nan(states, empty: jax.Array):
    """NaN in these rows of every array, bool[slots]; what is behind them are snapshots."""

    def of(rows: jax.Array) -> jax.Array:
        mask = jnp.zeros(len(rows), bool).at[: len(empty)].set(empty)
        return jnp.where(mask.reshape(-1, *[1] * (rows.ndim - 1)), jnp.nan, rows)

    return jax.tree.map(of, states)


def poison(llm) -> None:
    """NaN in the states of slots that nobody has."""
    (rank,), (stage,) = llm.core.engine.scheduler.ranks, llm.core.runner.stages
    slots = stage._state.slots
    states = set_nan(slots.sections["states"], ~rank.slots.active)
    stage._state = stage._state._replace(slots=slots._replace(sections={**slots.sections, "states": states}))


def run(llm, prompts, params) -> list[list[int]]:
    """Tokens of each prompt, all at once; states of slots without a request are poisoned at every step."""
    core, outputs = llm.core, {}
    for index, (prompt, each) in enumerate(zip(prompts, params, strict=True)):
        core.add(core.inputs.prepare({"prompt_token_ids": prompt}, each, request_id=str(index)))
    while core.has_unfinished:
        poison(llm)
        for output in core.step():
            if output.finished:
                outputs[int(output.request_id)] = list(output.outputs[0].token_ids)
    return [outputs[index] for index in range(len(prompts))]


def workload():
    rng = np.random.default_rng(0)
    shared = rng.integers(0, 128, 24).tolist()
    prompts, params = [], []
    for index in range(20):
        tail = rng.integers(0, 128, int(rng.integers(1, 16))).tolist()
        prompts.append((shared if index % 3 else []) + tail)
        count, few = int(rng.integers(2, 16)), {7: 40.0, 11: 40.0, 13: 40.0}  # whose drafts are often right
        chosen = {"max_tokens": count, "logit_bias": few if index % 2 else None, "ignore_eos": True}
        params.append(SamplingParams(temperature=0.9 * (index % 2), seed=index, **chosen))
    return prompts, params


@pytest.fixture(scope="module", params=["qwen3_next", *(pytest.param(name, marks=OTHER) for name in MORE)])
def folder(request):
    return MODELS / request.param


@pytest.fixture(scope="module")
def make(executables_dir, folder):
    few = {"compilation_config": {"cudagraph_capture_sizes": [], "prefill_sizes": []}}
    options = TINY_OPTIONS | few | {"max_model_len": 64, "compile_cache_dir": executables_dir, "model": str(folder)}
    return lambda **changes: LLM(**options | {"load_format": "dummy"} | changes)


@pytest.fixture(scope="module")
def llm(make, folder):
    """An engine with drafts, where the model's states can be those after some of a step's tokens."""
    drafts = {"method": "ngram", "num_speculative_tokens": 1, "prompt_lookup_min": 1, "prompt_lookup_max": 2}
    has_drafts = all(state.token_inputs for state in read_folder(folder).states)
    return make(num_state_snapshots=12, **({"speculative_config": drafts} if has_drafts else {}))


def accepted(llm) -> int:
    found = (each.value for each in llm.get_metrics() if each.name == "vllm:spec_decode_num_accepted_tokens")
    return int(next(found, 0))


def test_tokens_do_not_depend_on_what_states_held(llm):
    prompts, params = workload()
    widths = (1, 2) if llm.core.config.speculative_config else (None,)

    def schedule(width, **options):
        """Another scheduler, whose decodes have this many tokens; None if there are no drafts."""
        scheduler = use_scheduler(llm, **options)
        if width is not None:
            force(llm, width)
        return scheduler

    schedule(widths[0], enable_prefix_caching=False, num_snapshots=0)
    expected = [run(llm, [prompt], [each])[0] for prompt, each in zip(prompts, params, strict=True)]
    assert len({tuple(tokens) for tokens in expected}) == len(expected) and accepted(llm) == 0
    for width in widths:
        tight = schedule(width, num_pages=20, num_snapshots=3)
        assert run(llm, prompts, params) == expected and tight.num_preemptions > 0
        roomy = schedule(width)
        assert run(llm, prompts, params) == expected == run(llm, prompts, params)
        assert roomy.num_prefix_hits > 20 * 16
    assert llm.core.runner.compiles.count == 0 and (accepted(llm) > 20) == (len(widths) > 1)


def test_states_after_accepted_tokens_need_no_products_of_layers(llm):
    (stage,) = llm.core.runner.stages
    programs = stage.programs.extension("states").programs(stage.params)
    assert bool(programs) == (llm.core.config.speculative_config is not None)
    weights = {param.shape for param in stage.params if param.ndim == 2 and min(param.shape) > 16}
    for program in programs:
        lowered = jax.jit(program.function).lower(*program.arguments)
        kept = {each.shape for each in jax.tree.leaves(lowered.out_info)}
        text = lowered.as_text()
        assert kept and not [shape for shape in weights if f"tensor<{shape[0]}x{shape[1]}xf32>" in text]


def test_states_sleep_with_the_pages(llm):
    prompts, params = (each[:6] for each in workload())
    use_scheduler(llm)
    expected, (stage,) = run(llm, prompts, params), llm.core.runner.stages
    held = [weakref.ref(each) for each in jax.tree.leaves(stage.slots.sections["states"])]
    change = next(iter(stage.programs.state_changes().values()))
    llm.sleep(level=1, tags=["kv_cache"])
    gc.collect()
    assert held and not any(each() is not None for each in held)
    stage.change_state(change.name, *(np.zeros(each.shape, each.dtype) for each in change.arguments[1:]))
    with pytest.MonkeyPatch.context() as patch, pytest.raises(RuntimeError, match="no memory"):
        patch.setitem(stage._changes, change.name, Mock(side_effect=RuntimeError("no memory")))
        llm.wake_up()
    assert [name for name, _ in stage._waiting] == [change.name]
    llm.wake_up()
    assert stage._waiting is None
    scheduler = use_scheduler(llm)
    assert run(llm, prompts, params) == expected == run(llm, prompts, params)
    assert scheduler.num_prefix_hits > 0 and llm.core.runner.compiles.count == 0


def test_states_are_counted(llm, folder):
    plan, slots = llm.core.runner.plan, llm.core.runner.stages[0]._state.slots
    layers = [layer.state for layer in read_folder(folder).attention if layer.state is not None]
    numbers = sum(math.prod(array.shape) for state in layers for array in state.arrays)
    rows = TINY_OPTIONS["max_num_seqs"] + 12
    held = sum(rows.nbytes for rows in jax.tree.leaves(slots.sections["states"]))
    assert plan.extensions["states"] == 4 * rows * numbers == held
    assert plan.parts["states"] == held and "states" in plan.table()
    inputs = [state.token_inputs or () for state in layers] if llm.core.config.speculative_config else []
    of_token = 4 * sum(math.prod(array.shape) for each in inputs for array in each)
    wide = [(bucket.num_tokens, bucket.num_seqs) for bucket in llm.core.runner.stages[0].programs.packer.buckets.wide]
    largest = max((of_token * num_tokens + 4 * (num_seqs + 1) for num_tokens, num_seqs in wide), default=0)
    assert plan.extensions.get("inputs of states", 0) == largest and bool(largest) == bool(inputs)


@each_row(
    ("name", "options", "said"),
    [
        ("llama", {"num_state_snapshots": 3}, "num_state_snapshots is 3; allowed: 0 or None: LlamaForCausalLM keeps"),
        (
            "qwen3_next",
            {"num_state_snapshots": 3, "enable_prefix_caching": False},
            "num_state_snapshots is 3; allowed: 0 or None, without enable_prefix_caching",
        ),
        ("qwen3_next", {"num_state_snapshots": -1}, "num_state_snapshots is -1; allowed: 0 to"),
        ("qwen3_next", {"tensor_parallel_size": 3}, "tensor_parallel_size"),
        (
            "mamba2",
            {"kv_cache_dtype": "int8"},
            "kv_cache_dtype is 'int8'; .* Mamba2ForCausalLM keeps no keys and values",
        ),
        ("mamba2", {"kv_cache_memory_bytes": 1 << 20}, "kv_cache_memory_bytes is 1048576; allowed: None: Mamba2"),
        ("mamba2", {"kv_offloading_size": 1.0}, "kv_offloading_size is given, but Mamba2ForCausalLM keeps no keys"),
    ],
)
def test_refused(make, name, options, said):
    with pytest.raises(ConfigError, match=said):
        make(model=str(MODELS / name), **options)


def test_nothing_is_known_without_snapshots(folder):
    config = EngineConfig.from_options(num_state_snapshots=0, skip_tokenizer_init=True)
    assert not config.resolved(read_folder(folder), PLATFORMS["cpu"]).enable_prefix_caching
