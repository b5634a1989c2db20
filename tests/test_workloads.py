"""The default model against recorded references: Hugging Face float32, token for token, however the work is cut.

One engine serves all cases: what differs between them is decided by the scheduler, so each case brings its own.
"""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from jaxengine.bench.workloads import recorded
from jaxengine.requests.sampling_params import SamplingParams
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


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.thorough("as W1") if name == "W2" else ()) for name in NAMES]
)
def test_alone(llm, name, thorough):
    use_scheduler(llm)
    for single in list(one_by_one(recorded(name)))[:: 1 if thorough else 10]:
        check(llm, single)


MODES = {
    "all at once": {},
    "chunks of 16, no cache": {"long_prefill_token_threshold": 16, "enable_prefix_caching": False},
    "chunks of 64": {"long_prefill_token_threshold": 64},
    "chunks of 64, no cache": {"long_prefill_token_threshold": 64, "enable_prefix_caching": False},
    "chunks of 16": {"long_prefill_token_threshold": 16},
    "no cache": {"enable_prefix_caching": False},
}
# Of W2 a few prompts alone and the short ones under preemption; --thorough runs everything. Chunks of few tokens are
# what tiny models are tried with.
SHORT = {("W3", "all at once")}


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        pytest.param(*row, marks=[] if row in SHORT else pytest.mark.thorough("tiny models are tried with it"))
        for row in itertools.product(("W2", "W3"), MODES)
    ],
)
def test_all_at_once(llm, name, mode):
    scheduler = use_scheduler(llm, **MODES[mode])
    check(llm, recorded(name))
    assert (scheduler.num_prefix_hits > 0) == (name == "W3" and scheduler.config.enable_prefix_caching)


def test_constant_preemption(llm, report, thorough, monkeypatch):
    """Pools that hold a few of the requests: whoever is preempted is computed again, and says the same."""
    # Admission that keeps nothing back for those that run, or few would be preempted.
    monkeypatch.setattr(Rank, "_num_kept_free", lambda self: 0)
    crowd, preemptions = many_short_ones(), {}
    cases = [(crowd, 16, True)]
    if thorough:
        cases += [
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
    """The four shortest prompts of W2, four times each, and 40 tokens of each answer."""
    whole = recorded("W2")
    order = sorted(range(len(whole.prompts)), key=lambda index: len(whole.prompts[index]))[:4] * 4
    return dataclasses.replace(
        whole,
        name="short W2",
        prompts=tuple(whole.prompts[index] for index in order),
        max_tokens=(40,) * len(order),
        reference=tuple(whole.reference[index][:40] for index in order),
    )


def test_a_mixed_crowd_is_seeded(llm):
    """Seeded sampling with the real vocabulary: alone, and among others, after preemption."""
    # Short prompts that outgrow the pool together: what would not fit as it is known is not admitted.
    prompts = [{"prompt_token_ids": list(prompt[:40])} for prompt in recorded("W2").prompts[:8]]
    params = [SamplingParams(temperature=0.8, top_p=0.95, top_k=50, seed=i, max_tokens=32) for i in range(8)]

    def tokens(outputs):
        return [output.outputs[0].token_ids for output in outputs]

    use_scheduler(llm)
    crowd = tokens(llm.generate(prompts, params, use_tqdm=False))
    scheduler = use_scheduler(llm, num_pages=24)
    assert tokens(llm.generate(prompts, params, use_tqdm=False)) == crowd
    assert scheduler.num_preemptions > 0
    use_scheduler(llm)
    alone = [tokens(llm.generate(prompts[i], params[i], use_tqdm=False))[0] for i in range(0, 8, 4)]
    assert alone == crowd[::4]


def test_nothing_was_compiled(llm):
    assert {metric.name: metric.value for metric in llm.get_metrics()}["jaxengine:compilations_since_ready"] == 0
