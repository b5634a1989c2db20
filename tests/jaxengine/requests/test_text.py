"""Text in and out of the default model: chat, stop strings, streaming, bad words, decoded logprobs."""

from __future__ import annotations

import numpy as np
import pytest

from jaxengine import SamplingParams
from jaxengine.bench.workloads import recorded
from jaxengine.requests.params.sampling_params import RequestOutputKind
from jaxengine.scheduler.base.errors import RequestError

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
GREEDY = SamplingParams(temperature=0, max_tokens=40)


@pytest.fixture(scope="module")
def answer(smollm):
    return smollm.chat(QUESTION, GREEDY, use_tqdm=False)[0]


def stream(llm, params, prompt):
    """Steps the engine by hand; returns the outputs of one request."""
    prepared = llm.core.inputs.prepare(prompt, params)
    llm.core.add(prepared)
    outputs = []
    while llm.core.has_unfinished:
        outputs += llm.core.step()
    return outputs


def test_chat_answers_and_ends_at_the_turn(answer):
    completion = answer.outputs[0]
    assert "Paris" in completion.text
    assert (completion.finish_reason, completion.stop_reason) == ("stop", None)
    assert completion.token_ids[-1] == 2 and "<|im_end|>" not in completion.text


@pytest.mark.thorough("tests/test_workloads.py has its tokens, and tests below have texts")
def test_chat_is_the_recorded_one(smollm):
    chat = recorded("CHAT")
    params = SamplingParams(temperature=0, max_tokens=chat.max_tokens[0])
    prompt = {"prompt_token_ids": list(chat.prompts[0])}
    output = smollm.generate(prompt, params, use_tqdm=False)[0].outputs[0]
    assert output.token_ids == list(chat.reference[0])
    assert output.text == smollm.core.inputs.require_tokenizer().decode(output.token_ids)


def test_special_tokens_and_the_end_token_are_shown_when_asked(smollm, answer):
    params = GREEDY.clone_with(skip_special_tokens=False, include_stop_str_in_output=True)
    assert smollm.chat(QUESTION, params, use_tqdm=False)[0].outputs[0].text == answer.outputs[0].text + "<|im_end|>"


@pytest.mark.parametrize("kind", list(RequestOutputKind))
@pytest.mark.parametrize("include", [False, True])
def test_stop_strings_cut_the_text(smollm, answer, kind, include):
    text = answer.outputs[0].text
    stop = text[8:13]  # crosses token borders
    params = GREEDY.clone_with(stop=[stop, "never"], include_stop_str_in_output=include, output_kind=kind)
    prompt = {"prompt_token_ids": answer.prompt_token_ids}
    outputs = stream(smollm, params, prompt)
    expected = text[: text.index(stop) + (len(stop) if include else 0)]
    parts = [output.outputs[0].text for output in outputs]
    assert ("".join(parts) if kind is RequestOutputKind.DELTA else parts[-1]) == expected
    if kind is RequestOutputKind.CUMULATIVE:
        assert all(later.startswith(earlier) for earlier, later in zip(parts, parts[1:], strict=False))
    last = outputs[-1].outputs[0]
    assert (last.finish_reason, last.stop_reason) == ("stop", stop)
    scheduler = smollm.core.engine.scheduler
    assert scheduler.num_free_pages == scheduler.num_pages


def test_stop_strings_may_end_only_what_follows_the_reasoning(smollm, answer):
    text = answer.outputs[0].text
    first, second = text.split()[:2]
    params = GREEDY.clone_with(stop=" ", stop_after={"reasoning_end": f"{first} {second}"})
    output = smollm.chat(QUESTION, params, use_tqdm=False)[0].outputs[0]
    third = text.split()[2]
    assert (output.text, output.stop_reason) == (f"{first} {second} {third}", " ")


def test_min_tokens_holds_stop_strings_back(smollm, answer):
    stop = answer.outputs[0].text[:5]
    params = GREEDY.clone_with(stop=stop, min_tokens=12, max_tokens=16)
    output = smollm.generate({"prompt_token_ids": answer.prompt_token_ids}, params, use_tqdm=False)[0].outputs[0]
    assert len(output.token_ids) >= 12
    assert output.text.startswith(stop)


def test_deltas_join_to_the_whole(smollm):
    params = GREEDY.clone_with(max_tokens=30, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
    outputs = stream(smollm, params, "Zwei Straßen, 三つの道, and a 🦊:")
    whole = smollm.generate("Zwei Straßen, 三つの道, and a 🦊:", params, use_tqdm=False)[0].outputs[0]
    assert "".join(output.outputs[0].text for output in outputs) == whole.text
    assert sum((output.outputs[0].token_ids for output in outputs), []) == whole.token_ids
    assert len(outputs) > 10


def test_bad_words_never_appear(smollm, answer):
    words = ["Paris", " capital of"]
    prompt = {"prompt_token_ids": answer.prompt_token_ids}
    text = smollm.generate(prompt, GREEDY.clone_with(bad_words=words), use_tqdm=False)[0].outputs[0].text
    assert "Paris" not in text and "capital of" not in text
    assert len(text) > 5


def test_logprobs_carry_the_tokens_text(smollm, answer):
    params = GREEDY.clone_with(logprobs=2, max_tokens=4)
    output = smollm.generate({"prompt_token_ids": answer.prompt_token_ids}, params, use_tqdm=False)[0].outputs[0]
    shown = [entry[token].decoded_token for entry, token in zip(output.logprobs, output.token_ids, strict=True)]
    assert "".join(shown) == output.text
    silent = params.clone_with(detokenize=False, prompt_logprobs=1)
    answered = smollm.generate({"prompt_token_ids": answer.prompt_token_ids}, silent, use_tqdm=False)[0]
    assert answered.outputs[0].text == "" and answered.outputs[0].token_ids == output.token_ids
    entries = [*answered.outputs[0].logprobs, *answered.prompt_logprobs[1:]]
    assert all(one.decoded_token is None for entry in entries for one in entry.values())


def test_a_limit_above_the_context_is_the_rest_of_the_context(smollm, answer):
    first = smollm.generate({"prompt_token_ids": answer.prompt_token_ids}, GREEDY, use_tqdm=False)[0].outputs[0]
    most = smollm.core.inputs.config.max_model_len + 10
    params = GREEDY.clone_with(max_tokens=most, stop_token_ids=first.token_ids[:1])
    output = smollm.generate({"prompt_token_ids": answer.prompt_token_ids}, params, use_tqdm=False)[0].outputs[0]
    assert (output.token_ids, output.finish_reason) == (first.token_ids[:1], "stop") and params.max_tokens == most


def test_the_content_format_of_an_engine_and_of_a_call(smollm, monkeypatch):
    inputs, template = smollm.core.inputs, "{{ 'text' if messages[0].content is string else 'parts' }}"
    assert inputs.chat_prompt(QUESTION, chat_template=template)["prompt"] == "text"
    monkeypatch.setattr(inputs.tokenizer, "content_format", "openai")
    assert inputs.chat_prompt(QUESTION, chat_template=template)["prompt"] == "parts"
    assert inputs.chat_prompt(QUESTION, chat_template=template, content_format="string")["prompt"] == "text"


def test_what_is_no_conversation(smollm):
    """Arguments that are no list of messages are refused by the argument's name."""
    message = {"role": "user", "content": "a"}
    for messages in (message, iter([message]), "a", 5, b"a", {"a"}, np.array([message, message])):
        with pytest.raises(RequestError, match="messages must be a list"):
            smollm.chat(messages, GREEDY, use_tqdm=False)
    for messages in (None, [], ()):
        with pytest.raises(RequestError, match="messages is empty"):
            smollm.chat(messages, GREEDY, use_tqdm=False)
    for kwargs in ("a", 5, ["a"]):
        with pytest.raises(RequestError, match="chat_template_kwargs must be a dict"):
            smollm.chat([message], GREEDY, use_tqdm=False, chat_template_kwargs=kwargs)


def test_bad_text_requests_are_named(smollm):
    for call, param in (
        (lambda: smollm.generate("", GREEDY), "prompt"),
        (lambda: smollm.generate("x " * 2000, GREEDY), "prompt"),
        (lambda: smollm.chat([], GREEDY), "messages"),
        (lambda: smollm.chat([{"role": "user"}], GREEDY), "messages"),
        (lambda: smollm.chat(QUESTION, chat_template_content_format="parts"), "chat_template_content_format"),
        (lambda: smollm.generate("x", GREEDY.clone_with(bad_words=["a"] * 129)), "bad_words"),
    ):
        with pytest.raises(RequestError) as error:
            call()
        assert error.value.param == param
    assert smollm.generate("The", GREEDY.clone_with(max_tokens=1), use_tqdm=False)[0].finished
