"""The default model against recorded references: Hugging Face float32, token for token, however the work is cut.

One engine serves all cases: what differs between them is decided by the scheduler, so each case brings its own.
"""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from jaxengine.bench.workloads import recorded
from jaxengine.requests.params.sampling_params import SamplingParams
from jaxengine.scheduler.rank import Rank
from tests.conftest import use_scheduler

NAMES = ("CHAT", "W1", "W2", "W3")


@pytest.fixture(scope="module")
def llm(smollm):
    return smollm


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


def first(workload, num_prompts: int, num_tokens: int):
    """The first prompts of a workload, and so many tokens of each answer."""
    return dataclasses.replace(
        workload,
        prompts=workload.prompts[:num_prompts],
        max_tokens=(num_tokens,) * num_prompts,
        reference=tuple(each[:num_tokens] for each in workload.reference[:num_prompts]),
    )


MANY = pytest.mark.thorough("prompts as long, in chunks and behind each other, are in the batch of W3")


@pytest.mark.parametrize("name", [pytest.param(name, marks=MANY if name in ("W2", "W3") else ()) for name in NAMES])
def test_alone(llm, name, thorough):
    """CHAT to its end; of the one answer of W1, twice as long, as many tokens as tell, or all with --thorough."""
    use_scheduler(llm)
    workload = recorded(name)
    for single in one_by_one(workload if thorough or name != "W1" else first(workload, 1, 16)):
        check(llm, single)


MODES = {
    "all at once": {},
    "chunks of 16, no cache": {"long_prefill_token_threshold": 16, "enable_prefix_caching": False},
    "chunks of 64": {"long_prefill_token_threshold": 64},
    "chunks of 64, no cache": {"long_prefill_token_threshold": 64, "enable_prefix_caching": False},
    "chunks of 16": {"long_prefill_token_threshold": 16},
    "no cache": {"enable_prefix_caching": False},
}
# Of W2 the short ones under preemption, of W3 a few; --thorough runs everything. Chunks of few tokens are what tiny
# models are tried with.
SHORT = {("W3", "all at once")}


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        pytest.param(*row, marks=[] if row in SHORT else pytest.mark.thorough("tiny models are tried with it"))
        for row in itertools.product(("W2", "W3"), MODES)
    ],
)
def test_all_at_once(llm, name, mode, thorough):
    scheduler = use_scheduler(llm, **MODES[mode])
    check(llm, recorded(name) if thorough else first(recorded(name), 4, 8))
    assert (scheduler.num_prefix_hits > 0) == (name == "W3" and scheduler.config.enable_prefix_caching)


@pytest.mark.thorough("the mixed crowd below is preempted, and tiny models are in many tests of engines")
def test_constant_preemption(llm, report, monkeypatch):
    """Pools that hold a few of the requests: whoever is preempted is computed again, and says the same."""
    # Admission that keeps nothing back for those that run, or few would be preempted.
    monkeypatch.setattr(Rank, "num_reserved", property(lambda self: self._num_promised))
    crowd, preemptions = many_short_ones(), {}
    cases = [
        (crowd, 9, True),
        (crowd, 16, False),
        (recorded("W2"), 56, True),
        (recorded("W2"), 56, False),
        (recorded("W3"), 70, True),
    ]
    for workload, num_pages, caching in cases:
        scheduler = use_scheduler(llm, num_pages=num_pages, enable_prefix_caching=caching)
        check(llm, workload)
        preemptions[workload.name, "cache" if caching else "no cache"] = scheduler.num_preemptions
        assert scheduler.num_free_pages == num_pages
    report(f"preemptions on pools too small, every token right: {preemptions}")
    assert sum(preemptions.values()) > 15
    use_scheduler(llm)


def many_short_ones():
    """The two shortest prompts of W2, eight times each, and 24 tokens of each answer."""
    whole = recorded("W2")
    order = sorted(range(len(whole.prompts)), key=lambda index: len(whole.prompts[index]))[:2] * 8
    return dataclasses.replace(
        whole,
        name="short W2",
        prompts=tuple(whole.prompts[index] for index in order),
        max_tokens=(24,) * len(order),
        reference=tuple(whole.reference[index][:24] for index in order),
    )


def test_a_mixed_crowd_is_seeded(llm):
    """Seeded sampling with the real vocabulary: alone, and among others, after preemption."""
    # Short prompts that outgrow the pool together: what would not fit as it is known is not admitted.
    prompts = [{"prompt_token_ids": list(prompt[:14])} for prompt in recorded("W2").prompts[:8]]
    params = [SamplingParams(temperature=0.8, top_p=0.95, top_k=50, seed=i, max_tokens=20) for i in range(8)]

    def tokens(outputs):
        return [output.outputs[0].token_ids for output in outputs]

    use_scheduler(llm)
    crowd = tokens(llm.generate(prompts, params, use_tqdm=False))
    scheduler = use_scheduler(llm, num_pages=12)
    assert tokens(llm.generate(prompts, params, use_tqdm=False)) == crowd
    assert scheduler.num_preemptions > 0
    use_scheduler(llm)
    assert tokens(llm.generate(prompts[4], params[4], use_tqdm=False)) == crowd[4:5]


def test_nothing_was_compiled(llm):
    assert {metric.name: metric.value for metric in llm.get_metrics()}["jaxengine:compilations_since_ready"] == 0
