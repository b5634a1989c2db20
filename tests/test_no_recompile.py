"""Nothing compiles while serving: random requests over the whole request space, and a foreign shape is refused."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from jaxengine.requests.params.options import RequestOptions
from jaxengine.requests.params.sampling_params import RequestOutputKind, SamplingParams

NUM_REQUESTS = {False: 100, True: 300}  # the latter with --thorough


def random_params(rng: np.random.Generator, vocab_size: int, room: int) -> SamplingParams:
    """Any combination of what a request may ask for."""

    def maybe(value, otherwise):
        return value if rng.random() < 0.3 else otherwise

    max_tokens = int(rng.integers(1, min(room, 24) + 1))
    greedy = rng.random() < 0.3
    ids = [int(token) for token in rng.choice(vocab_size, 6, replace=False)]
    return SamplingParams(
        n=1 if greedy else maybe(2, 1),
        temperature=0.0 if greedy else float(rng.uniform(0.2, 2.0)),
        top_p=maybe(float(rng.uniform(0.1, 1.0)), 1.0),
        top_k=maybe(int(rng.integers(1, 40)), 0),
        min_p=maybe(float(rng.uniform(0, 0.5)), 0.0),
        presence_penalty=maybe(float(rng.uniform(-2, 2)), 0.0),
        frequency_penalty=maybe(float(rng.uniform(-2, 2)), 0.0),
        repetition_penalty=maybe(float(rng.uniform(0.5, 2)), 1.0),
        seed=maybe(int(rng.integers(2**40)), None),
        stop_token_ids=maybe(ids[:2], []),
        ignore_eos=bool(rng.random() < 0.5),
        max_tokens=max_tokens,
        min_tokens=maybe(int(rng.integers(0, max_tokens + 1)), 0),
        logprobs=maybe(int(rng.integers(0, 5)), None),
        prompt_logprobs=maybe(int(rng.integers(0, 5)), None),
        logit_bias=maybe({ids[0]: 3.0, ids[1]: -3.0}, None),
        allowed_token_ids=maybe(ids, None),
        detokenize=False,
        output_kind=RequestOutputKind(int(rng.integers(0, 3))),
    )


@pytest.mark.parametrize(
    "async_scheduling", [True, pytest.param(False, marks=pytest.mark.thorough("the same programs, in another order"))]
)
def test_nothing_compiles_after_ready(make_llm, async_scheduling, thorough):
    llm = make_llm(num_gpu_blocks_override=26, scheduling_policy="priority", async_scheduling=async_scheduling)
    core, rng = llm.core, np.random.default_rng(11)
    vocab_size = core.inputs.model_config.vocab_size
    events = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, _, **__: events.append(event) if "backend_compile" in event else None
    )
    before = core.engine.scheduler.num_preemptions
    alive, finished = [], {}
    prefix = rng.integers(0, vocab_size, 60).tolist()
    events.clear()
    for index in range(count := NUM_REQUESTS[thorough]):
        length = int(rng.integers(1, 95))
        token_ids = rng.integers(0, vocab_size, length).tolist()
        if rng.random() < 0.3:
            token_ids[:60] = prefix[:length]
        request = core.inputs.prepare(
            {"prompt_token_ids": token_ids},
            random_params(rng, vocab_size, 96 - length),
            request_id=f"{async_scheduling}-{index}",
            options=RequestOptions(int(rng.integers(-3, 4)), 30.0 if rng.random() < 0.1 else None),
        )
        core.add(request)
        alive.append(request.request_id)
        if rng.random() < 0.1:
            for output in core.abort(alive.pop(int(rng.integers(len(alive))))):
                finished[output.request_id] = output
        for _ in range(int(rng.integers(0, 6))):
            for output in core.step():
                if output.finished:
                    finished[output.request_id] = output
    while core.has_unfinished:
        for output in core.step():
            if output.finished:
                finished[output.request_id] = output
    assert len(finished) == count
    assert core.engine.scheduler.num_preemptions > before
    assert core.engine.scheduler.num_free_pages == 26
    metrics = {metric.name: metric.value for metric in llm.get_metrics()}
    assert metrics["jaxengine:compilations_since_ready"] == 0
    assert events == []


def test_a_foreign_shape_is_refused_not_compiled(make_llm):
    runner = make_llm().core.runner
    bucket = next(iter(runner.buckets))
    stage = runner.stages[0]
    wrong = np.zeros((1, runner.packer.layouts[bucket].size + 1), np.int32)
    with runner.compiles.watch(), pytest.raises(TypeError, match="differ from the types"):
        stage.forward(bucket, wrong, None)
    assert runner.compiles.count == 0


def test_the_watch_sees_a_compilation(make_llm):
    """The counter that is 0 above does count."""
    runner = make_llm().core.runner
    with runner.compiles.watch():
        jax.jit(lambda x: x * 3 + 1)(np.arange(7))
    assert runner.compiles.count > 0
    runner.compiles.count = 0
