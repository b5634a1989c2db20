"""Formats that ask more of a server than to read a text: harmony, typed arguments, parsers by the chat template."""

from __future__ import annotations

import copy
import json
import logging

import openai
import pytest
import tokenizers

from jaxengine.parsers.scan.harmony import END_MESSAGE, END_SAMPLING, INVOKE, MODEL, TEXT, THINKING
from jaxengine.requests.inputs import InputProcessor
from jaxengine.server.base.options import ServerConfig
from jaxengine.server.http.app import create_app
from tests.jaxengine.server.asgi_client import post
from tests.jaxengine.server.http.test_chat_tools import ANSWER, ASK, AUTO, CALLS, HI, PATH, collected, scripted
from tests.jaxengine.server.openai_client import openai_client
from tests.jaxengine.server.scripted_engine import ScriptedEngine

__all__ = ["scripted"]

INKLING = {"tool_call_parser": "inkling", "reasoning_parser": "inkling"}
HARMONY = {**AUTO, "tool_call_parser": "openai", "reasoning_parser": "openai_gptoss"}


@pytest.fixture
def harmony(chat_engine):
    """harmony(text): a client of a model with harmony's and Inkling's words in its vocabulary, and its engine."""
    tokenizer = copy.copy(chat_engine.inputs.require_tokenizer())
    tokenizer.backend = tokenizers.Tokenizer.from_str(tokenizer.backend.to_str())
    words = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")
    words += (MODEL, THINKING, TEXT, INVOKE, END_MESSAGE, END_SAMPLING)
    tokenizer.backend.add_special_tokens(list(words))
    ids = {word: tokenizer.backend.token_to_id(word) for word in words}
    tokenizer.added_token_ids |= frozenset(ids.values())

    def build(text: str, **options):
        engine = ScriptedEngine(chat_engine, text)
        known = engine.inputs
        engine.inputs = InputProcessor(known.config, known.model_config, tokenizer, known.generation_defaults)
        config = ServerConfig(served_model_name="tiny", **{**HARMONY, **options})
        return openai_client(create_app(engine, config)), engine, ids

    return build


HARMONY_CALL = (
    "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.weather "
    '<|constrain|>json<|message|>{"city": "Zürich"}'
)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", ["auto", "required", {"type": "function", "function": {"name": "weather"}}])
async def test_harmony(harmony, choice, stream):
    client, engine, ids = harmony(HARMONY_CALL)
    ask = {**ASK, "tool_choice": choice}
    if stream:
        content, reasoning, calls, reason, _ = await collected(await client.chat.completions.create(**ask, stream=True))
        found = [(name, json.loads(text)) for _, name, text in calls]
    else:
        (answer,) = (await client.chat.completions.create(**ask)).choices
        content, reasoning, reason = answer.message.content or "", answer.message.reasoning, answer.finish_reason
        found = [(call.function.name, json.loads(call.function.arguments)) for call in answer.message.tool_calls]
    ended = "tool_calls" if isinstance(choice, str) else "stop"  # as OpenAI says of a call that was demanded by name
    assert (content, reasoning, reason, found) == ("", "Hm.", ended, [("weather", {"city": "Zürich"})])
    params = engine.calls[-1][1]
    assert params.skip_special_tokens is False
    assert params.stop_token_ids == (ids["<|call|>"], ids["<|return|>"])
    if choice == "auto":
        assert params.structured_outputs is None
    else:  # the model's own form, thought included
        grammar = params.structured_outputs.grammar
        assert grammar.startswith("start: (thought") and params.structured_outputs.reasoning_end is None
        assert ('"now ' in grammar) == (choice == "required")


@pytest.mark.parametrize("choice", ["auto", "required"])
async def test_inkling(harmony, choice):
    call = f'weather{INVOKE}{{"name":"weather","args":{{"city":"Zürich"}}}}{END_MESSAGE}'
    client, engine, ids = harmony(f"{THINKING}Hm.{END_MESSAGE}{MODEL}{call}", **INKLING)
    (answer,) = (await client.chat.completions.create(**{**ASK, "tool_choice": choice})).choices
    found = [(each.function.name, json.loads(each.function.arguments)) for each in answer.message.tool_calls]
    assert (answer.message.content, answer.message.reasoning) == (None, "Hm.")
    assert (answer.finish_reason, found) == ("tool_calls", [("weather", {"city": "Zürich"})])
    params = engine.calls[-1][1]
    assert params.skip_special_tokens is False and params.stop_token_ids == (ids[END_SAMPLING],)
    if choice == "required":
        assert f"(thought <[{ids[MODEL]}]>)? call" in params.structured_outputs.grammar


async def test_inklings_answer_may_have_no_word_of_its_kind(harmony):
    client, engine, _ = harmony(f"7{END_MESSAGE}", **INKLING)
    (answer,) = (await client.chat.completions.create(model="tiny", messages=HI, response_format=ANSWER)).choices
    structure = engine.calls[-1][1].structured_outputs
    assert answer.message.content == "7"
    assert (structure.reasoning_begin, structure.reasoning_end) == (THINKING, ((TEXT,),))


async def test_calls_of_the_requests_tools_need_no_prefix_and_end_thoughts(harmony, scripted):
    thinking = {**AUTO, "tool_call_parser": "glm45", "reasoning_parser": "glm45"}
    for client in (
        harmony(HARMONY_CALL.replace("functions.", ""))[0],
        scripted(
            "<think>Hm.<tool_call>weather<arg_key>city</arg_key><arg_value>Zürich</arg_value></tool_call>", **thinking
        )[0],
    ):
        (choice,) = (await client.chat.completions.create(**ASK)).choices
        (call,) = choice.message.tool_calls
        assert (choice.message.reasoning, choice.finish_reason) == ("Hm.", "tool_calls")
        assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "Zürich"})


async def test_harmonys_answer_keeps_to_a_schema_beside_tools(harmony):
    client, engine, _ = harmony("<|channel|>final<|message|>7")
    (choice,) = (await client.chat.completions.create(**ASK, response_format=ANSWER)).choices
    structure = engine.calls[-1][1].structured_outputs
    assert choice.message.content == "7" and json.loads(structure.json) == {"enum": [7]}
    assert structure.reasoning_end == (("<|channel|>final", "<|message|>"),)
    await client.chat.completions.create(**ASK, extra_body={"ignore_eos": True})
    assert engine.calls[-1][1].stop_token_ids == ()
    client, _, _ = harmony("", reasoning_parser=None)
    with pytest.raises(openai.BadRequestError, match="--reasoning-parser"):
        await client.chat.completions.create(**ASK, response_format=ANSWER)


async def test_arguments_of_plain_text_are_typed_by_the_tools(scripted):
    text = "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n1\n</parameter>\n</function>"
    client, _ = scripted(text, **{**AUTO, "tool_call_parser": "qwen3_coder"})
    schema = {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "integer"}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    (choice,) = (await client.chat.completions.create(**{**ASK, "tools": [tool]})).choices
    assert json.loads(choice.message.tool_calls[0].function.arguments) == {"a": "1", "b": 1}


AUTO_PARSERS = {"enable_auto_tool_choice": True, "tool_call_parser": "auto", "reasoning_parser": "auto"}


async def test_parsers_by_the_chat_template(chat_engine, caplog):
    """SmolLM2's template has words of neither; Qwen3's has both."""
    caplog.set_level(logging.INFO)
    template = '{# <tool_call> "name" "arguments" </think> #}{{ messages[0].content }}'
    engine = ScriptedEngine(chat_engine, f"<think>Hm</think>{CALLS}", chat_template=template)
    config = ServerConfig(served_model_name="tiny", **AUTO_PARSERS)
    (choice,) = (await openai_client(create_app(engine, config)).chat.completions.create(**ASK)).choices
    assert choice.message.reasoning == "Hm" and len(choice.message.tool_calls) == 2
    assert caplog.text.count("--tool-call-parser auto: hermes") == caplog.text.count("auto: qwen3") == 1
    caplog.clear()
    app = create_app(ScriptedEngine(chat_engine, "<think>Hm</think>"), config)
    assert caplog.text.count("the chat template is not recognised") == 2
    answer = await post(app, PATH, messages=HI)
    assert answer.json["choices"][0]["message"]["content"] == "<think>Hm</think>"
    assert (await post(app, PATH, **ASK)).error["param"] == "tool_choice"
