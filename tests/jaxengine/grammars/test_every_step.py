"""Structured requests advance in every step, as others do, and nobody's tokens change: steps are counted, not time."""

from __future__ import annotations

import pytest

from jaxengine.engine.extensions import structured as structured_module
from jaxengine.requests.params.sampling_params import RequestOutputKind, SamplingParams

NUM_TOKENS = 24
PROMPT = "Once upon a time"


def plain(seed: int) -> SamplingParams:
    return SamplingParams(max_tokens=2 * NUM_TOKENS, seed=seed, ignore_eos=True)


def structured(seed: int, **fields) -> SamplingParams:
    return SamplingParams(
        max_tokens=NUM_TOKENS, seed=seed, structured_outputs={"regex": "[a-z ]{600,}"}, **{"temperature": 1.0, **fields}
    )


def run(llm, requests: dict[str, SamplingParams]) -> tuple[dict[str, list[int]], dict[str, float]]:
    """Each request's tokens, and for each the steps from its first token to its last, a token."""
    core, stats = llm.core, llm.core.engine.stats
    for name, params in requests.items():
        params = params.clone_with(output_kind=RequestOutputKind.CUMULATIVE)
        core.add(core.inputs.prepare({"prompt": PROMPT}, params, request_id=name))
    first: dict[str, int] = {}
    tokens: dict[str, list[int]] = {}
    steps: dict[str, float] = {}
    while core.has_unfinished:
        for output in core.step():
            name, tokens[output.request_id] = output.request_id, output.outputs[0].token_ids
            first.setdefault(name, stats.num_steps)
            if output.finished:
                steps[name] = (stats.num_steps - first[name]) / (len(tokens[name]) - 1)
    assert core.runner.compiles.count == 0
    return tokens, steps


@pytest.fixture(scope="module")
def alone(chat_llm) -> dict[str, list[int]]:
    """What each request gives when it is the only one."""
    requests = {f"plain {seed}": plain(seed) for seed in range(8)}
    requests |= {f"structured {seed}": structured(seed) for seed in range(8)}
    return {name: run(chat_llm, {name: params})[0][name] for name, params in requests.items()}


@pytest.mark.parametrize(
    ("num_structured", "num_plain"),
    [
        (8, 8),
        (1, 1),
        *(pytest.param(*counts, marks=pytest.mark.thorough("between these")) for counts in [(1, 8), (8, 1)]),
    ],
)
def test_a_step_a_token(chat_llm, alone, num_structured, num_plain, monkeypatch):
    # A machine that is busy with other things makes masks late; here the sampler waits for them.
    monkeypatch.setattr(structured_module, "_MASK_SECONDS", 5.0)
    requests = {f"plain {seed}": plain(seed) for seed in range(num_plain)}
    requests |= {f"structured {seed}": structured(seed) for seed in range(num_structured)}
    tokens, steps = run(chat_llm, requests)
    assert tokens == {name: alone[name] for name in requests}
    assert all(len(tokens[name]) == NUM_TOKENS for name in requests if name.startswith("structured"))
    assert max(steps.values()) <= 1.1, steps


def test_bad_words_of_several_tokens_cost_no_steps(chat_llm):
    """What is forbidden follows from the token before, which the sampler waits for and the forward pass does not."""
    greedy = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    ((_, free),) = run(chat_llm, {"free": greedy})[0].items()
    tokenizer = chat_llm.core.inputs.require_tokenizer()
    params = greedy.clone_with(bad_words=[tokenizer.decode(free[at : at + 2]) for at in range(0, 20, 2)])
    (request,) = chat_llm.core.inputs.prepare({"prompt": PROMPT}, params).requests
    words = [word for word in request.params.bad_words if len(word) > 1]
    tokens, steps = run(chat_llm, {"careful": params})
    assert any(occurs(word, free) for word in words)
    assert not any(occurs(word, tokens["careful"]) for word in words)
    assert steps["careful"] <= 1.1


def occurs(word: tuple[int, ...], tokens: list[int]) -> bool:
    return any(tuple(tokens[at : at + len(word)]) == word for at in range(len(tokens)))


@pytest.mark.parametrize("async_scheduling", [True, False])
def test_late_masks_hold_up_nobody(chat_llm, step_by_step, alone, async_scheduling, monkeypatch):
    """A request whose mask does not come in time leaves the step, comes back, and its tokens are the same."""
    monkeypatch.setattr(structured_module, "_MASK_SECONDS", 0.0)
    requests = {"plain 0": plain(0), "plain 1": plain(1), "structured 0": structured(0), "structured 1": structured(1)}
    llm = chat_llm if async_scheduling else step_by_step
    held = []
    hold = llm.core.engine.scheduler.hold
    scheduler = llm.core.engine.scheduler
    monkeypatch.setattr(scheduler, "hold", lambda request: (held.append(request), hold(request)))
    tokens, steps = run(llm, requests)
    assert held and tokens == {name: alone[name] for name in requests}
    assert max(steps["plain 0"], steps["plain 1"]) <= 1.1
    scheduler = llm.core.engine.scheduler
    assert scheduler.num_free_pages == scheduler.num_pages and not scheduler.num_waiting


def test_penalties_survive_a_late_mask(chat_llm, monkeypatch):
    """A token that was sampled without its mask is not counted."""
    params = structured(3, repetition_penalty=1.7, presence_penalty=0.5, logprobs=2)
    expected = run(chat_llm, {"structured": params})[0]
    monkeypatch.setattr(structured_module, "_MASK_SECONDS", 0.0)
    assert run(chat_llm, {"structured": params, "plain": plain(1)})[0]["structured"] == expected["structured"]
