"""/generative_scoring: the probabilities that /v1/completions reports for the same prompts."""

from __future__ import annotations

import dataclasses
import math

import pytest

from jaxengine.requests.output.outputs import Logprob
from jaxengine.server.base.options import ServerConfig
from jaxengine.server.http.app import create_app
from jaxengine.server.http.completions.generative_scoring import score
from tests.jaxengine.server.asgi_client import idle, post
from tests.tables import each_row

PATH = "/generative_scoring"
QUERY, ITEMS, LABELS = "The quick brown", [" fox", " dog runs", " cat"], [7, 300, 7, 12]


@pytest.fixture(scope="module")
def app(chat_engine):
    return create_app(chat_engine, ServerConfig(served_model_name=("tiny",), max_prompts=4))


async def expected(app, prompt):
    """Probabilities of the labels behind a prompt, in their order."""
    fields = {"max_tokens": 1, "seed": 5, "logprobs": 1, "logprob_token_ids": [7, 300, 12]}
    answer = await post(app, "/v1/completions", prompt=prompt, return_tokens_as_token_ids=True, **fields)
    assert answer.status == 200, answer.json
    (found,) = answer.json["choices"][0]["logprobs"]["top_logprobs"]
    return [math.exp(found[f"token_id:{label}"]) for label in (7, 300, 12)]


async def test_scores_are_probabilities_of_the_first_label(app, chat_engine):
    encode = chat_engine.inputs.require_tokenizer().encode
    query, items = encode(QUERY), [encode(item, add_special_tokens=False) for item in ITEMS]
    reversed_query, first_items = encode(QUERY, add_special_tokens=False), [encode(item) for item in ITEMS]
    answer = await post(app, PATH, query=QUERY, items=ITEMS, label_token_ids=LABELS)
    assert answer.status == 200, answer.json
    assert answer.json["id"].startswith("generative-scoring-") and answer.json["object"] == "list"
    assert [(each["index"], each["object"]) for each in answer.json["data"]] == [(n, "score") for n in range(3)]
    usage = answer.json["usage"]
    assert usage["prompt_tokens"] == 3 * len(query) + sum(map(len, items)) and usage["completion_tokens"] == 3
    assert usage["total_tokens"] == usage["prompt_tokens"] + 3
    as_ids = await post(app, PATH, query=query, items=items, label_token_ids=LABELS)
    plain = await post(app, PATH, query=QUERY, items=ITEMS, label_token_ids=LABELS, apply_softmax=False)
    first = await post(app, PATH, query=QUERY, items=ITEMS, label_token_ids=LABELS, item_first=True)
    for number, item in enumerate(items):
        shares = await expected(app, query + item)
        assert answer.json["data"][number]["score"] == pytest.approx(shares[0] / sum(shares), rel=1e-5)
        assert as_ids.json["data"][number]["score"] == pytest.approx(shares[0] / sum(shares), rel=1e-5)
        assert plain.json["data"][number]["score"] == pytest.approx(shares[0], rel=1e-5)
        shares = await expected(app, first_items[number] + reversed_query)
        assert first.json["data"][number]["score"] == pytest.approx(shares[0] / sum(shares), rel=1e-5)


@each_row(
    "changes, words",
    [
        ({"items": []}, "items holds 0 prompts; allowed: 1 to 4"),
        ({"items": ["a"] * 5}, "items holds 5 prompts; allowed: 1 to 4"),
        ({"items": [1, 2]}, "items must be a list of texts or of lists of token ids"),
        ({"items": "a"}, "items must be a list of texts or of lists of token ids, got 'a'"),
        ({"items": ["a", [1]]}, "items must be"),
        ({"items": ["a", ""]}, "items is empty"),
        ({"query": {"a": 1}}, "query must be"),
        ({"query": [1 << 40]}, "query holds the token id"),
        ({"label_token_ids": []}, "label_token_ids is empty"),
        ({"label_token_ids": [-1]}, "label_token_ids holds the token id -1"),
        ({"label_token_ids": [1 << 40]}, "label_token_ids holds the token id"),
        ({"label_token_ids": [1] * 129}, "at most 128 entries"),
        ({"label_token_ids": None}, "label_token_ids"),
        ({"model": "other"}, "other"),
    ],
)
async def test_what_cannot_be_scored_is_refused(app, chat_engine, changes, words):
    answer = await post(app, PATH, **({"query": QUERY, "items": ITEMS, "label_token_ids": LABELS} | changes))
    assert answer.status in (400, 404) and words in answer.json["error"]["message"], answer.json
    await idle(chat_engine)


async def test_a_timeout_is_told(app, chat_engine):
    answer = await post(app, PATH, query=QUERY, items=ITEMS, label_token_ids=LABELS, timeout=1e-6)
    assert answer.status == 504 and "timeout" in answer.json["error"]["message"]
    await idle(chat_engine)


def test_logits_have_shares_and_no_probabilities():
    logprobs = {1: Logprob(3.0, None, None), 2: Logprob(5.0, None, None)}
    assert score(logprobs, [1, 2], True) == pytest.approx(1 / (1 + math.exp(2)))
    impossible = {each: Logprob(-math.inf, None, None) for each in (1, 2)}
    assert score(impossible, [1, 2], True) == 0.5 and score(impossible, [1, 2], False) == 0


async def test_the_longest_prompt_leaves_room_for_a_token(app, chat_engine):
    query, fields = [5] * (chat_engine.inputs.config.max_model_len - 3), {"label_token_ids": LABELS}
    assert (await post(app, PATH, query=query, items=[[5], [6, 7]], **fields)).status == 200
    answer = await post(app, PATH, query=query, items=[[5], [6, 7, 8]], **fields)
    assert answer.status == 400 and "items[1]: prompt is too long" in answer.json["error"]["message"]


async def test_logits_are_refused_as_probabilities(app, chat_engine, monkeypatch):
    config = dataclasses.replace(chat_engine.inputs.config, logprobs_mode="raw_logits")
    monkeypatch.setattr(chat_engine.inputs, "config", config)
    answer = await post(app, PATH, query=QUERY, items=ITEMS, label_token_ids=LABELS, apply_softmax=False)
    assert answer.status == 400 and "logprobs_mode='raw_logits'" in answer.json["error"]["message"]
