"""The default model against recorded references: Hugging Face float32, token for token, however the work is cut.

One engine serves all cases: what differs between them is decided by the scheduler, so each case brings its own.
"""

from __future__ import annotations

import dataclasses

import pytest

from jaxengine.bench.workloads import recorded
from scheduler.sampling_params import SamplingParams
from scheduler.scheduler import Scheduler

NAMES = ("CHAT", "W1", "W2", "W3")


@pytest.fixture(scope="module")
def llm(smollm):
    return smollm


def use_scheduler(llm, **changes) -> Scheduler:
    """Gives the engine a fresh scheduler: an empty prefix cache, and other limits if asked for."""
    engine = llm.core.engine
    config = engine.runner.config.scheduler_config(engine.runner.plan.num_pages)
    engine.scheduler = Scheduler(dataclasses.replace(config, **changes))
    return engine.scheduler


def run(llm, workload):
    """Token ids of each prompt's continuation."""
    params = [
        SamplingParams(
            temperature=0,
            max_tokens=count,
            ignore_eos=not workload.stop_token_ids,
            stop_token_ids=workload.stop_token_ids,
            detokenize=False,
        )
        for count in workload.max_tokens
    ]
    prompts = [{"prompt_token_ids": list(prompt)} for prompt in workload.prompts]
    return [list(output.outputs[0].token_ids) for output in llm.generate(prompts, params, use_tqdm=False)]


def check(llm, workload):
    for index, (tokens, reference) in enumerate(zip(run(llm, workload), workload.reference, strict=True)):
        assert tokens == list(reference), f"{workload.name}[{index}]"


def one_by_one(workload):
    for prompt, count, reference in zip(workload.prompts, workload.max_tokens, workload.reference, strict=True):
        yield dataclasses.replace(workload, prompts=(prompt,), max_tokens=(count,), reference=(reference,))


@pytest.mark.parametrize("name", NAMES)
def test_alone(llm, name):
    use_scheduler(llm)
    for single in one_by_one(recorded(name)):
        check(llm, single)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"enable_prefix_caching": False},
        {"long_prefill_token_threshold": 16},
        {"long_prefill_token_threshold": 64},
    ],
    ids=str,
)
def test_all_at_once(llm, name, changes):
    if changes and name in ("CHAT", "W1"):
        pytest.skip("one request of one chunk: nothing of this changes it")
    scheduler = use_scheduler(llm, **changes)
    check(llm, recorded(name))
    assert (scheduler.num_prefix_hits > 0) == (name == "W3" and scheduler.config.enable_prefix_caching)


def test_constant_preemption(llm, report):
    """A pool that holds two or three of the 32 requests, with and without a prefix cache to come back to."""
    preemptions = {}
    for name, num_pages in (("W2", 56), ("W3", 110)):
        for caching in (True, False):
            scheduler = use_scheduler(llm, num_pages=num_pages, enable_prefix_caching=caching)
            check(llm, recorded(name))
            preemptions[name, caching] = scheduler.num_preemptions
            assert scheduler.pool.num_free == num_pages
    report(f"preemptions in W2 and W3 on small pools, by prefix caching: {preemptions}")
    assert sum(preemptions.values()) > 50
    use_scheduler(llm)


def test_a_mixed_crowd_is_seeded(llm):
    """Seeded sampling with the real vocabulary: alone, and among others, after preemption."""
    prompts = [{"prompt_token_ids": list(prompt)} for prompt in recorded("W2").prompts[:8]]
    params = [SamplingParams(temperature=0.8, top_p=0.95, top_k=50, seed=i, max_tokens=24) for i in range(8)]

    def tokens(outputs):
        return [output.outputs[0].token_ids for output in outputs]

    use_scheduler(llm)
    crowd = tokens(llm.generate(prompts, params, use_tqdm=False))
    scheduler = use_scheduler(llm, num_pages=56)
    assert tokens(llm.generate(prompts, params, use_tqdm=False)) == crowd
    assert scheduler.num_preemptions > 0
    use_scheduler(llm)
    assert [tokens(llm.generate(p, s, use_tqdm=False))[0] for p, s in zip(prompts, params, strict=True)] == crowd


def test_nothing_was_compiled(llm):
    assert {metric.name: metric.value for metric in llm.get_metrics()}["jaxengine:compilations_since_ready"] == 0
