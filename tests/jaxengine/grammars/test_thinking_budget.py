"""A limit of the reasoning in tokens: the closing words come behind so many, and nothing else changes."""

from __future__ import annotations

import re

import pytest

from jaxengine.parsers.registry import REASONING_PARSERS
from jaxengine.requests.params.sampling_params import SamplingParams
from jaxengine.scheduler.base.errors import RequestError
from tests.jaxengine.grammars.test_constraints import generate, nothing_is_left, tokens_of
from tests.jaxengine.grammars.test_reasoning_first import same_in_any_company
from tests.tables import each_row

__all__ = ["nothing_is_left"]

END = "<file_sep>"
WORDS = {"reasoning_end": END}


def limited(budget: int, *, words=WORDS, **fields) -> SamplingParams:
    fields = {"max_tokens": 40, "skip_special_tokens": False, "ignore_eos": True, **fields}
    return SamplingParams(thinking_token_budget=budget, thinking_words=words, **fields)


def unlimited(params: SamplingParams) -> SamplingParams:
    return params.clone_with(thinking_token_budget=-1)


def ids_of(llm, text: str) -> list[int]:
    return llm.core.inputs.require_tokenizer().encode(text, add_special_tokens=False)


def test_so_many_tokens_and_the_words(chat_llm):
    """Each request has its own limit. Before it, and without it, the tokens are those of a plain request."""
    many = [limited(budget, seed=budget) for budget in (0, 1, 2, 7, 39, 1000)]
    found, plain = generate(chat_llm, *many), generate(chat_llm, *map(unlimited, many))
    (end,) = ids_of(chat_llm, END)
    for params, each, alike in zip(many, found, plain, strict=True):
        budget = params.thinking_token_budget
        assert list(each.token_ids[:budget]) == list(alike.token_ids[:budget])
        assert end not in each.token_ids[:budget] and len(each.token_ids) == 40
        if budget < 40:
            assert each.token_ids[budget] == end


def test_words_of_several_tokens_before_free_text_or_a_form(chat_llm):
    closing = "\nthat is enough</done>\n"
    ids = ids_of(chat_llm, closing)
    assert len(ids) > 3
    words = {"reasoning_end": "</done>", "closing": closing}
    form = {"regex": "[0-9]{5}", "reasoning_end": "</done>"}
    free, formed = generate(
        chat_llm, limited(5, words=words, seed=1), limited(5, words=words, seed=1, structured_outputs=form)
    )
    assert [*free.token_ids[5 : 5 + len(ids)]] == [*formed.token_ids[5 : 5 + len(ids)]] == ids
    assert [*free.token_ids[:5]] == [*formed.token_ids[:5]]
    assert re.fullmatch("[0-9]{5}", formed.text.partition(closing)[2]) and formed.finish_reason == "stop"


def test_reasoning_that_ends_by_itself_is_left_alone(chat_llm):
    """Also at the last token that the budget has; words that come later are the answer's."""
    (end,) = ids_of(chat_llm, END)
    many = [limited(12, seed=seed, logit_bias={end: 8.0}) for seed in range(24)]
    at = [[*each.token_ids].index(end) for each in generate(chat_llm, *map(unlimited, many)) if end in each.token_ids]
    assert min(at) < 11 < max(at)
    for params, place in zip(many, at, strict=False):
        for budget in (place + 1, place + 9):
            own = params.clone_with(thinking_token_budget=budget)
            assert tokens_of(generate(chat_llm, own)) == tokens_of(generate(chat_llm, unlimited(own)))
        if len(at) > 3:
            break


def test_an_output_that_does_not_reason_is_not_limited(chat_llm):
    begin, words = "<repo_name>", {**WORDS, "reasoning_begin": "<repo_name>"}
    (opening,), (end,) = ids_of(chat_llm, begin), ids_of(chat_llm, END)
    plain, opened = (limited(3, words=words, seed=5, logit_bias=bias) for bias in (None, {opening: 100.0}))
    (free,), (alike,) = generate(chat_llm, plain), generate(chat_llm, unlimited(plain))
    assert free.token_ids == alike.token_ids
    (inside,) = generate(chat_llm, opened)
    assert inside.token_ids[0] == opening and inside.token_ids[4] == end and end not in inside.token_ids[:4]


def test_alone_in_a_crowd_preempted_and_in_step(chat_llm, step_by_step):
    same_in_any_company(chat_llm, step_by_step, [limited(20 + seed, seed=seed, max_tokens=50) for seed in range(8)])


REFUSED = {
    "a budget below -1": ({"thinking_token_budget": -2, "thinking_words": WORDS}, "thinking_token_budget must be"),
    "half a token": ({"thinking_token_budget": 1.5, "thinking_words": WORDS}, "thinking_token_budget must be"),
    "no words": ({"thinking_token_budget": 3}, "None without thinking_words"),
    "no end": ({"thinking_words": {"closing": "x"}}, "a dict with reasoning_end"),
    "an unknown key": ({"thinking_words": {**WORDS, "begin": "x"}}, "a dict with reasoning_end"),
    "an empty end": ({"thinking_words": {"reasoning_end": ""}}, r"thinking_words\.reasoning_end must be a string"),
    "a long closing": ({"thinking_words": {**WORDS, "closing": "x" * 257}}, r"thinking_words\.closing must be a text"),
    "a number": ({"thinking_words": {**WORDS, "reasoning_begin": 3}}, r"thinking_words\.reasoning_begin must be"),
}


@each_row("fields, message", REFUSED.values(), REFUSED)
def test_what_is_refused(fields, message):
    with pytest.raises(RequestError, match=message):
        SamplingParams(**fields)


def test_a_form_for_the_whole_output_leaves_nothing_to_limit(chat_llm):
    with pytest.raises(RequestError, match="thinking_token_budget has no effect.*reasoning_end"):
        generate(chat_llm, limited(3, structured_outputs={"regex": "[0-9]{5}"}))


def test_every_format_has_words_that_its_parser_reads():
    """The closing words end the reasoning for the format's own parser, also when nothing has been thought."""
    for name, row in REASONING_PARSERS.items():
        prompt = "".join(row.format.limited_by("")["reasoning_begin"] or "")
        words = row.format.limited_by(prompt) or {}
        SamplingParams(thinking_token_budget=0, thinking_words=words)
        for thought in ("", "so it is"):
            parser = row.format.open(prompt)
            begin = "" if words["reasoning_begin"] is None else words["reasoning_begin"]
            events = parser.feed(f"{begin}{thought}{words['closing']}the answer") + parser.finish()
            content = "".join(each.text for each in events if type(each).__name__ == "ContentDelta")
            assert content.strip().endswith("the answer"), name
            reasoning = "".join(each.text for each in events if type(each).__name__ == "ReasoningDelta")
            assert reasoning.strip() in (thought, ""), name
