"""What lm_eval 0.4.13 sends as `local-completions` is scored as the engine scores prompts, and its own class agrees."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from jaxengine.requests.params.sampling_params import SamplingParams

PAIRS = (
    ("The capital of France is", " Paris, which lies on the river Seine."),
    ("Question: what is two plus two?\nAnswer:", " four"),
    ("Ünïcödé and 漢字 are", " no trouble 🙂 at all"),
    ("A", " b"),
)


def split_pairs(tokenizer) -> list[tuple[list[int], list[int]]]:
    """(context, continuation) as lm_eval cuts them: the whole is tokenised, and the context's tokens come off."""
    pairs = []
    for context, continuation in PAIRS:
        whole, head = (tokenizer.encode(text, add_special_tokens=False) for text in (context + continuation, context))
        pairs.append((whole[: len(head)], whole[len(head) :]))
    return pairs


async def engine_scores(engine, prompt: list[int], first: int) -> tuple[float, bool]:
    """(sum of the logprobs from `first` on, whether each of them is the best token's)."""
    async for output in engine.generate(
        {"prompt_token_ids": prompt}, SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=1)
    ):
        final = output
    positions = list(zip(prompt, final.prompt_logprobs, strict=True))[first:]
    return sum(scores[token].logprob for token, scores in positions), all(
        scores[token].rank == 1 for token, scores in positions
    )


@pytest.fixture(scope="module")
def expected(chat_engine):
    pairs = split_pairs(chat_engine.inputs.tokenizer)
    # Continuations that the model itself would choose, so that some are greedy.
    greedy = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)

    async def gather():
        for context, _ in list(pairs)[:2]:
            async for output in chat_engine.generate({"prompt_token_ids": context}, greedy):
                chosen = output.outputs[0].token_ids
            pairs.append((context, chosen))
        return [await engine_scores(chat_engine, head + tail, len(head)) for head, tail in pairs]

    scores = asyncio.run(gather())
    assert [is_greedy for _, is_greedy in scores][-2:] == [True, True] and not scores[0][1]
    return pairs, scores


def test_its_payload_is_scored_as_the_engine_scores_prompts(server, chat_model, expected, report):
    pairs, scores = expected
    payload = {
        "model": chat_model,
        "prompt": [head + tail for head, tail in pairs],
        "temperature": 0,
        "max_tokens": 1,
        "logprobs": 1,
        "seed": 1234,
        "echo": True,
    }
    answer = httpx.post(server.base_url + "/v1/completions", json=payload, timeout=60)
    assert answer.status_code == 200, answer.text
    choices = sorted(answer.json()["choices"], key=lambda choice: choice["index"])
    assert len(choices) == len(pairs)
    largest = 0.0
    for choice, (head, tail), (total, is_greedy) in zip(choices, pairs, scores, strict=True):
        found = choice["logprobs"]
        assert len(found["token_logprobs"]) == len(found["top_logprobs"]) == len(head) + len(tail) + 1
        assert found["token_logprobs"][0] is None
        # Of the continuation: the one token that was generated is left out.
        logprobs = found["token_logprobs"][len(head) : -1]
        best = [max(top.values()) for top in found["top_logprobs"][len(head) : -1]]
        assert sum(logprobs) == pytest.approx(total, abs=1e-4)
        assert (logprobs == best) == is_greedy
        largest = max(largest, abs(sum(logprobs) - total))
    report(f"lm_eval's payload: largest difference to prompt_logprobs {largest:.1e}")


@pytest.mark.parametrize("num_concurrent", [1, 4])
def test_its_own_class_gets_the_same(server, chat_model, expected, num_concurrent):
    completions = pytest.importorskip("lm_eval.models.openai_completions", reason="lm_eval is not installed")
    from lm_eval.api.instance import Instance

    model = completions.LocalCompletionsAPI(
        base_url=server.base_url + "/v1/completions",
        model=chat_model,
        tokenizer_backend="huggingface",
        num_concurrent=num_concurrent,
        batch_size=3,
        max_length=256,
        max_retries=1,
    )
    requests = [
        Instance(request_type="loglikelihood", doc={}, arguments=pair, idx=index) for index, pair in enumerate(PAIRS)
    ]
    found = model.loglikelihood(requests)
    for (total, is_greedy), (expected_total, expected_greedy) in zip(found, expected[1], strict=False):
        assert total == pytest.approx(expected_total, abs=1e-4) and is_greedy == expected_greedy
    assert len(found) == len(PAIRS)
    stop = [Instance("generate_until", {}, ("The capital of France is", {"until": ["\n\n"], "max_gen_toks": 8}), 0)]
    assert isinstance(model.generate_until(stop)[0], str)
