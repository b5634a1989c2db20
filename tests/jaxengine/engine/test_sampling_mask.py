"""return_sampling_mask: the tokens that could have been sampled, against a truncation in numpy."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jaxengine
from jaxengine import LLM, RequestError, SamplingParams
from jaxengine.engine.extensions.mass import ids_of
from jaxengine.requests.output.sampling_mask import MaskRows
from jaxengine.requests.params.sampling_params import RequestOutputKind
from tests.conftest import compiled_programs, use_scheduler
from tests.jaxengine.engine.test_logprobs import ENGINES, VOCAB, bits, prompts_of, rollout_params

DOCUMENT = Path(__file__).parents[3] / "docs" / "reinforcement_learning.md"
ENGINE: dict[str, Any] = {**ENGINES["processed, with drafts"], "return_sampling_mask": True}
KINDS: list[dict[str, Any]] = [
    {"temperature": 1.0, "top_k": 1},
    {"temperature": 0.7, "top_k": 5},
    {"temperature": 1.3, "top_k": 100, "top_p": 0.6},
    {"temperature": 1.0, "top_k": 50, "min_p": 0.3},
    {"temperature": 0.9, "top_k": 20, "top_p": 0.8, "min_p": 0.02, "logit_bias": {7: 3.0}},
    {"temperature": 1.0, "top_k": 128, "top_p": 0.9, "allowed_token_ids": list(range(40))},
    {"temperature": 1.5, "top_k": 128},
    {"temperature": 0.8, "top_k": 9, "frequency_penalty": 0.5, "presence_penalty": 0.2},
]


def kept(raw: np.ndarray, kind: dict[str, Any], before: list[int]) -> tuple[list[int], float]:
    """The tokens that a request may sample, from raw log-probabilities f64[V] and its output so far, and the log of
    their probability without truncation.
    """
    logits = raw.copy()
    if allowed := kind.get("allowed_token_ids"):
        logits[np.setdiff1d(np.arange(VOCAB), allowed)] = -np.inf
    for token, bias in kind.get("logit_bias", {}).items():
        logits[token] += bias
    counts = np.bincount(before, minlength=VOCAB)
    logits -= counts * kind.get("frequency_penalty", 0.0) + (counts > 0) * kind.get("presence_penalty", 0.0)
    logits /= kind["temperature"]
    probs = np.exp(logits - logits.max())
    left = probs >= kind.get("min_p", 0.0) * probs.max()
    left &= probs >= np.sort(probs[left])[-min(kind["top_k"], left.sum())]
    order = np.argsort(-probs * left, kind="stable")
    mass = np.cumsum((probs * left)[order]) / (probs * left).sum()
    if "top_p" in kind:  # a sum of all may round to one before its last terms
        left[order[1:][mass[:-1] >= kind["top_p"]]] = False
    left &= probs > 0
    return np.flatnonzero(left).tolist(), float(np.log(probs[left].sum() / probs.sum()))


@pytest.fixture
def llm(make_llm) -> LLM:
    llm = make_llm(**ENGINE)
    use_scheduler(llm)
    return llm


def test_masks_are_those_of_numpy(make_llm, llm):
    """In a crowd, with drafts, through preemption, chunks and cached prefixes, and beside requests without masks."""
    prompts = prompts_of(5)
    params = [
        each.clone_with(**{"top_p": 1.0, "top_k": 0, "repetition_penalty": 1.0, "logit_bias": None} | kind, logprobs=-1)
        for each, kind in zip(rollout_params(), KINDS, strict=True)
    ]
    plain = make_llm(**ENGINES["raw"]).generate(prompts, params, use_tqdm=False)
    before = compiled_programs()
    for changes in ({}, {"num_pages": 30, "long_prefill_token_threshold": 5}):
        use_scheduler(llm, **changes)
        asked = [each.clone_with(return_sampling_mass=True) for each in params]
        asked[2].return_sampling_mask = False
        for index, output in enumerate(llm.generate(prompts, asked, use_tqdm=False)):
            (own,), (known,), kind = output.outputs, plain[index].outputs, KINDS[index]
            assert own.token_ids == known.token_ids
            if index == 2:
                assert own.sampling_mask is None
                continue
            assert len(own.sampling_mask) == len(own.token_ids)
            for at, (row, positions) in enumerate(zip(own.sampling_mask.token_ids, known.logprobs, strict=True)):
                raw = np.array([positions[token].logprob for token in range(VOCAB)], np.float64)
                wanted, log_mass = kept(raw, kind, own.token_ids[:at])
                assert row == wanted and abs(own.sampling_log_mass[at] - log_mass) < 1e-4, (index, at)
                mass = sum(np.exp(own.logprobs[at][token].logprob) for token in row)
                assert own.token_ids[at] in row and abs(mass - 1) < 1e-5
    use_scheduler(llm)
    assert compiled_programs() == before


def test_pieces_several_outputs_and_traces(llm):
    asked = SamplingParams(n=3, max_tokens=7, seed=1, top_k=3, ignore_eos=True, stop_token_ids=[])
    (whole,) = llm.generate([[3, 4]], asked, use_tqdm=False)
    assert [len(each.sampling_mask) for each in whole.outputs] == [7] * 3
    # Nobody asked for log-probabilities.
    assert all(each.logprobs is None and each.cumulative_logprob is None for each in whole.outputs)
    core = llm.core
    core.add(core.inputs.prepare({"prompt_token_ids": [3, 4]}, asked.clone_with(output_kind=RequestOutputKind.DELTA)))
    joined = {}
    while core.has_unfinished:
        for each in (output.outputs[0] for output in core.step()):
            assert len(each.sampling_mask) == len(each.token_ids)
            if each.index in joined:
                joined[each.index]._append(each)
            else:
                joined[each.index] = each
    for each in whole.outputs:
        mask = joined[each.index].sampling_mask
        assert mask.token_ids == each.sampling_mask.token_ids
        assert mask.values[mask.cu_lens[2] : mask.cu_lens[3]].tolist() == mask[2].tolist()
    # A forced token changes nothing about what could have been drawn in its place.
    first = whole.outputs[0]
    trace = [*first.token_ids[:3], next(token for token in range(3, VOCAB) if token not in first.sampling_mask[3])]
    forced = asked.clone_with(n=1, trace_decode_token_ids=trace, logprobs=0)
    (forced,) = llm.generate([[3, 4]], forced, use_tqdm=False)[0].outputs
    assert forced.token_ids == trace and forced.sampling_mask.token_ids == first.sampling_mask.token_ids[:4]
    assert bits([forced.logprobs[3][trace[3]].logprob]) == bits([-np.inf])


def test_the_block_of_the_document_runs(llm, monkeypatch):
    (block,) = re.findall(r"```python\n([^`]*return_sampling_mask=True.*?)```", DOCUMENT.read_text(), re.DOTALL)
    monkeypatch.setattr(jaxengine, "LLM", lambda **options: llm)
    found: dict[str, Any] = {}
    exec(block, found)  # noqa: S102
    logits = np.random.default_rng(0).normal(size=(8, VOCAB))
    probs = np.exp(found["support_logprobs"](logits))
    assert [np.flatnonzero(row).tolist() for row in probs] == found["output"].sampling_mask.token_ids
    np.testing.assert_allclose(probs.sum(axis=1), 1.0)


def test_requests_that_are_refused(make_llm, llm):
    for changes, param in (({"temperature": 0.0}, "temperature"), ({}, "top_k"), ({"top_k": 2049}, "top_k")):
        with pytest.raises(RequestError, match="with sampling masks") as refused:
            llm.generate([[3]], SamplingParams(max_tokens=1, **changes), use_tqdm=False)
        assert refused.value.param == param
        llm.generate([[3]], SamplingParams(max_tokens=1, return_sampling_mask=False, **changes), use_tqdm=False)
    assert len(llm.get_logprobs([[3, 4]], [[5, 6]])[0]) == 2
    with pytest.raises(RequestError, match="started without return_sampling_mask") as refused:
        asked = SamplingParams(max_tokens=1, top_k=3, return_sampling_mask=True)
        make_llm().generate([[3]], asked, use_tqdm=False)
    assert refused.value.param == "return_sampling_mask"


def test_supports_become_ids_and_are_cut_with_the_tokens():
    rng = np.random.default_rng(0)
    wanted = rng.random((6, 160)) < np.array([0.0, 0.01, 0.1, 0.9, 1.0, 0.02])[:, None]
    found = ids_of(np.packbits(wanted, axis=1, bitorder="little").view("<u4"))
    assert found.dtype == np.int32 and found.shape == (6, 160)
    assert [row[row >= 0].tolist() for row in found] == [np.flatnonzero(row).tolist() for row in wanted]
    for only_new, sizes in ((True, [2, 1, 2]), (False, [2, 3, 5])):
        rows = MaskRows()
        rows.add(found[1:4])
        got = [len(rows.take(2, only_new)), len(rows.take(3, only_new))]
        rows.add(found[4:])
        assert [*got, len(rows.take(5, only_new))] == sizes
    assert rows.take(9, False).token_ids == [np.flatnonzero(row).tolist() for row in wanted[1:]]
