"""Layers with sliding windows give their pages back, and no token depends on it: pages given back are poisoned."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxengine import LLM, SamplingParams
from jaxengine.scheduler.pages.groups import PageTables
from tests.conftest import TINY_OPTIONS, use_scheduler
from tests.fixtures.drawn_weights import checkpoint

# What the recorded tiny checkpoints have: layers of both kinds, and windows in all layers.
WINDOWS = {"gemma2": (3, 3, None), "gemma3": (3, 3, None), "gpt_oss": (6, 6, None), "mistral": (8,)}
# The other has each of their kinds of layers.
THOROUGH = ("gemma3", "gpt_oss", "mistral")


@partial(jax.jit, donate_argnums=0)
def poison(data: jax.Array, rows: jax.Array) -> jax.Array:
    """NaN in these rows of a pool, i32[n]; numbers past its end are dropped."""
    return data.at[rows].set(jnp.nan, mode="drop")


@pytest.fixture(autouse=True)
def taken():
    """Pages that slots have taken for tokens to come, with whatever they held before.

    Without the fixture monkeypatch: no program reads what is replaced, so engines share theirs.
    """
    pages: list[int] = []

    def watched(take):
        def taking(tables, *arguments):
            before = len(tables.deltas)
            take(tables, *arguments)
            for _, _, found in tables.deltas[before:]:
                pages.extend(found.tolist())

        return taking

    with pytest.MonkeyPatch.context() as patch:
        for name in ("grow", "grow_by_one"):
            patch.setattr(PageTables, name, watched(getattr(PageTables, name)))
        yield pages


def poison_pages(llm, pages: np.ndarray) -> None:
    """NaN in these pages, i32[n]."""
    (stage,) = llm.core.runner.stages
    num_pages = llm.core.runner.plan.num_pages
    places = stage._kv.num_pages // num_pages
    rows = np.full(places * num_pages, places * num_pages, np.int32)
    rows[: places * len(pages)] = (np.arange(places)[:, None] * num_pages + pages).ravel()
    stage._kv = replace(stage._kv, data=poison(stage._kv.data, rows))


def run(llm, prompts, params, taken) -> tuple[list[list[int]], int]:
    """Tokens of each prompt, all at once, and the most pages held at once.

    At every step the pages are poisoned that nobody holds and that hold nothing to be found, and those that are taken
    in it, also the ones that a window has just given back, before its tokens are written.
    """
    core, outputs, most = llm.core, {}, 0
    execute = type(core.runner).execute

    poison_pages(llm, np.empty(0, np.int32))  # compiled here, and not within a step

    def poisoned(step):
        if taken:
            poison_pages(llm, np.array(taken, np.int32))
            taken.clear()
        return execute(core.runner, step)

    core.runner.execute = poisoned
    for index, (prompt, each) in enumerate(zip(prompts, params, strict=True)):
        core.add(core.inputs.prepare({"prompt_token_ids": prompt}, each, request_id=str(index)))
    while core.has_unfinished:
        for output in core.step():
            if output.finished:
                outputs[int(output.request_id)] = list(output.outputs[0].token_ids)
        scheduler = core.engine.scheduler
        most = max(most, scheduler.num_pages - scheduler.num_free_pages)
        (rank,) = scheduler.ranks
        poison_pages(llm, np.flatnonzero(rank.pool.page_states() == 0))
    return [outputs[index] for index in range(len(prompts))], most


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=pytest.mark.thorough("half a minute of compiling") if name in THOROUGH else ())
        for name in WINDOWS
    ],
)
def make(request, executables_dir):
    """Engines of one checkpoint, by their options."""
    few = {"compilation_config": {"cudagraph_capture_sizes": [], "prefill_sizes": []}}
    options = TINY_OPTIONS | few | {"max_model_len": 64, "compile_cache_dir": executables_dir}
    folder = str(checkpoint(request.param))
    return lambda **changes: LLM(**{**options, "model": folder, **changes}), WINDOWS[request.param]


@pytest.fixture(scope="module")
def llm(make):
    """The one that gives pages back."""
    return make[0]()


def workload():
    rng = np.random.default_rng(0)
    shared = rng.integers(0, 128, 24).tolist()
    prompts, params = [], []
    for index in range(24):
        tail = rng.integers(0, 128, int(rng.integers(1, 16))).tolist()
        prompts.append((shared if index % 3 else []) + tail)
        params.append(
            SamplingParams(
                temperature=0.9 * (index % 2), seed=index, max_tokens=int(rng.integers(2, 24)), ignore_eos=True
            )
        )
    return prompts, params


def test_tokens_do_not_depend_on_pages_given_back(make, llm, taken):
    make_llm, windows = make
    prompts, params = workload()
    keeping = make_llm(disable_hybrid_kv_cache_manager=True)
    expected, kept = run(keeping, prompts, params, taken)
    assert llm.core.runner.windows == windows and keeping.core.runner.windows == (None,)
    found, held = run(llm, prompts, params, taken)
    assert found == expected
    assert held < kept * len(windows)
    again, _ = run(llm, prompts, params, taken)
    assert again == expected and llm.core.engine.scheduler.num_prefix_hits > 200
    assert llm.core.engine.runner.compiles.count == 0


def growing():
    """Short prompts that outgrow a pool together."""
    rng = np.random.default_rng(0)
    lengths, outputs = rng.integers(1, 6, 24).tolist(), rng.integers(30, 50, 24).tolist()
    prompts = [rng.integers(0, 128, length).tolist() for length in lengths]
    params = [
        SamplingParams(temperature=0.9 * (index % 2), seed=index, max_tokens=most, ignore_eos=True)
        for index, most in enumerate(outputs)
    ]
    return prompts, params


def test_tokens_are_the_same_alone_and_under_preemption(make, llm, taken):
    _, windows = make
    prompts, params = growing()
    # Pages of one request of the longest there are, and a few more.
    tight = use_scheduler(llm, num_pages=14 if len(windows) == 1 else 44, enable_prefix_caching=False)
    expected = [run(llm, [prompt], [each], taken)[0][0] for prompt, each in zip(prompts, params, strict=True)]
    assert tight.num_preemptions == 0
    found, _ = run(llm, prompts, params, taken)
    assert found == expected and tight.num_preemptions > 3
