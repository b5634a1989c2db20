"""What a request says of its output: where a repetition ends it, flat log-probabilities, tokens sent together, and a
prompt that is computed whole."""

from __future__ import annotations

import numpy as np

from jaxengine import LLM, FlatLogprobs, RequestOutput, SamplingParams
from jaxengine.requests.output.repetition_detector import RepetitionDetector
from jaxengine.requests.params.repetition import RepetitionDetectionParams
from jaxengine.requests.params.sampling_params import RequestOutputKind
from jaxengine.scheduler.base.request import FinishReason
from tests.conftest import use_scheduler
from tests.jaxengine.engine.test_logprobs import ENGINES, prompts_of

LONG = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, logit_bias={5: 3.0, 6: 3.0})


def end_of(token_ids: list[int], params: RepetitionDetectionParams, least: int = 0) -> int | None:
    """Number of tokens at which a repetition ends an output of these tokens; None where none does before the last."""
    detector = RepetitionDetector(params)
    ends = [count for count, token_id in enumerate(token_ids, 1) if detector.append(token_id) and count >= least]
    return ends[0] if ends and ends[0] < len(token_ids) else None


def test_a_repetition_ends_an_output(make_llm):
    """Beside others, with drafts, which propose what repeats."""
    prompts = prompts_of(7)
    for options in ENGINES.values():
        llm: LLM = make_llm(**options)
        use_scheduler(llm)
        whole = [output.outputs[0].token_ids for output in llm.generate(prompts, LONG, use_tqdm=False)]
        num_ended, num_sent, counted = 0, 0, llm.core.engine.request_stats
        before, tokens = counted.finished[FinishReason.REPETITION], counted.generation_tokens.sum
        for least in (0, 30):
            asked = RepetitionDetectionParams(max_pattern_size=6, min_count=3)
            params = [LONG.clone_with(repetition_detection=asked, min_tokens=least), LONG] * 4
            for index, output in enumerate(llm.generate(prompts, params, use_tqdm=False)):
                end = end_of(whole[index], asked, least) if index % 2 == 0 else None
                (own,) = output.outputs
                assert own.token_ids == whole[index][:end]
                expected = ("length", None) if end is None else ("repetition", "repetition_detected")
                assert (own.finish_reason, own.stop_reason) == expected
                num_ended += end is not None
                num_sent += len(own.token_ids)
        assert num_ended > 1
        # As callers saw them: steps ahead may have made more tokens.
        assert counted.finished[FinishReason.REPETITION] - before == num_ended
        assert counted.generation_tokens.sum - tokens == num_sent
        assert not llm.core.engine.scheduler.num_unfinished


def test_flat_logprobs_are_the_same(make_llm):
    llm: LLM = make_llm(**ENGINES["raw"])
    use_scheduler(llm)
    prompts = prompts_of(8, 3)
    params = SamplingParams(max_tokens=6, seed=3, logprobs=2, prompt_logprobs=1, logprob_token_ids=[7, 9])
    known = llm.generate(prompts, params, use_tqdm=False)
    for own, flat in zip(
        known, llm.generate(prompts, params.clone_with(flat_logprobs=True), use_tqdm=False), strict=True
    ):
        found, prompt = flat.outputs[0].logprobs, flat.prompt_logprobs
        assert isinstance(found, FlatLogprobs) and isinstance(prompt, FlatLogprobs)
        assert found == own.outputs[0].logprobs and prompt == own.prompt_logprobs and prompt[0] is None
        chosen = found.logprobs[found.start_indices]
        assert found.token_ids[found.start_indices].tolist() == own.outputs[0].token_ids
        assert np.isclose(chosen.sum(dtype=np.float64), own.outputs[0].cumulative_logprob)


def pieces_of(llm: LLM, params: SamplingParams) -> list[RequestOutput]:
    core = llm.core
    core.add(core.inputs.prepare({"prompt_token_ids": [3, 4]}, params, request_id="stream"))
    found: list[RequestOutput] = []
    while core.has_unfinished:
        found += core.step()  # pyright: ignore[reportArgumentType]
    return found


def test_a_request_says_how_many_tokens_are_sent_together(make_llm):
    llm: LLM = make_llm(**ENGINES["raw"])
    use_scheduler(llm)
    params = LONG.clone_with(max_tokens=12, output_kind=RequestOutputKind.DELTA)
    sizes = [[len(each.outputs[0].token_ids) for each in pieces_of(llm, params)]]
    sizes += [[len(each.outputs[0].token_ids) for each in pieces_of(llm, params.clone_with(stream_interval=5))]]
    assert sizes == [[1] * 12, [1, 5, 5, 1]]
    flat = pieces_of(llm, params.clone_with(prompt_logprobs=1, flat_logprobs=True))
    assert len(flat) == 12 and isinstance(flat[0].prompt_logprobs, FlatLogprobs)
    assert all(each.prompt_logprobs is flat[0].prompt_logprobs for each in flat)  # made once


def test_a_prompt_is_computed_whole_where_the_request_says_so(make_llm):
    llm: LLM = make_llm(**ENGINES["raw"])
    use_scheduler(llm)
    prompt, params = prompts_of(9, 1), SamplingParams(max_tokens=3, temperature=0.0)
    cached = [
        llm.generate(prompt, params.clone_with(skip_reading_prefix_cache=skip), use_tqdm=False)[0].num_cached_tokens
        for skip in (None, True, False, None)
    ]
    assert cached[:2] == [0, 0] and cached[2] == cached[3] and cached[2]
