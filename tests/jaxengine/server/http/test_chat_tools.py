"""Tool calls and reasoning through the real OpenAI client; what the model writes is scripted."""

from __future__ import annotations

import json

import openai
import pytest

from jaxengine.config.engine_config import ConfigError
from jaxengine.schema_references import SchemaDocument
from jaxengine.server.base.options import ServerConfig
from jaxengine.server.http.app import create_app
from tests.jaxengine.server.asgi_client import post
from tests.jaxengine.server.openai_client import openai_client
from tests.jaxengine.server.scripted_engine import ScriptedEngine
from tests.tables import each_row

PATH = "/v1/chat/completions"
HI = [{"role": "user", "content": "Hi"}]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "d", "parameters": PARAMETERS}}
NOW = {"type": "function", "function": {"name": "now"}}
ASK = {"model": "tiny", "messages": HI, "tools": [WEATHER, NOW]}
CALLS = (
    'Sure.<tool_call>{"name": "weather", "arguments": {"city": "Zürich"}}</tool_call>\n'
    '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
)
FORCED = '[{"name": "weather", "parameters": {"city": "Zürich"}}, {"name": "now", "parameters": {}}]'
KINDS = ["string", "number"]
THOUGHT = "<think>Hm, ü.</think>\n\nYes."


@pytest.fixture
def scripted(chat_engine):
    """scripted(texts, options): a client, and the engine behind it."""

    def build(*texts: str, **options):
        engine = ScriptedEngine(chat_engine, *texts)
        return openai_client(create_app(engine, ServerConfig(served_model_name="tiny", **options))), engine

    return build


AUTO = {"enable_auto_tool_choice": True, "tool_call_parser": "hermes"}


def allowing(mode, *names):
    """OpenAI's tool_choice that allows some functions."""
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def schema_asked_for(engine):
    return json.loads(engine.calls[-1][1].structured_outputs.json)


async def collected(stream):
    """(content, reasoning, calls by index, finish reasons, last chunk) of a stream of one answer."""
    content, reasoning, calls, reasons, chunk = "", "", {}, [], None
    async for chunk in stream:
        for choice in chunk.choices:
            delta = choice.delta
            content += delta.content or ""
            reasoning += getattr(delta, "reasoning", None) or ""
            reasons.append(choice.finish_reason)
            for call in delta.tool_calls or ():
                if call.id is not None:
                    assert call.index == len(calls) and call.type == "function"
                    calls[call.index] = [call.id, call.function.name, ""]
                calls[call.index][2] += call.function.arguments
    assert all(reason is None for reason in reasons[:-1])
    return content, reasoning, list(calls.values()), reasons[-1], chunk


async def test_calls_the_model_chose(scripted):
    client, engine = scripted(CALLS, **AUTO)
    (choice,) = (await client.chat.completions.create(**ASK)).choices
    assert choice.finish_reason == "tool_calls" and choice.message.content == "Sure."
    found = [(call.function.name, json.loads(call.function.arguments)) for call in choice.message.tool_calls]
    assert found == [("weather", {"city": "Zürich"}), ("now", {})]
    assert len({call.id for call in choice.message.tool_calls}) == 2
    assert engine.calls[-1][1].structured_outputs is None
    content, _, calls, reason, _ = await collected(await client.chat.completions.create(**ASK, stream=True))
    assert (content, reason) == ("Sure.", "tool_calls")
    assert [(name, json.loads(text)) for _, name, text in calls] == found
    counted = [*map(list, client._client._transport.app.state.traffic.http.take()[1])]
    assert counted == [[mode, "tool_call", "chat_completions", 1] for mode in ("non_streaming", "streaming")]


@pytest.mark.parametrize(
    ("text", "extra"),
    [(CALLS, {}), (CALLS.removeprefix("Sure."), {}), (FORCED, {"tool_choice": "required"}), (CALLS, {"n": 2})],
)
@pytest.mark.parametrize("at_once", [False, True])
async def test_the_clients_own_stream_adds_calls_up(scripted, monkeypatch, text, extra, at_once):
    """at_once: the whole answer is one piece, as a fast engine and a slow reader make it."""
    client, engine = scripted(text, **AUTO)
    if at_once:
        monkeypatch.setattr(engine, "_pieces", lambda text, ids: [text])
    done = []
    async with client.chat.completions.stream(**{**ASK, **extra}) as stream:
        async for event in stream:
            if event.type == "chunk":
                for choice in event.chunk.choices:
                    assert len(choice.delta.tool_calls or ()) <= 1
            if event.type == "tool_calls.function.arguments.done":
                done.append((event.name, json.loads(event.arguments)))
        answer = await stream.get_final_completion()
    found = [("weather", {"city": "Zürich"}), ("now", {})]
    assert sorted(done) == sorted(found * extra.get("n", 1))
    for choice in answer.choices:
        calls = [(call.function.name, json.loads(call.function.arguments)) for call in choice.message.tool_calls]
        assert calls == found and choice.finish_reason == "tool_calls"


@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": [{"type": "refusal", "refusal": "no"}]}])
async def test_the_second_turn_of_an_agent(scripted, content):
    """With the embedded model's template, which adds content to a text; arguments are as they were cut, or worse."""
    client, engine = scripted("Fine.", **AUTO)
    for arguments in ('{"city": "Zürich"}', '{"city": "Zür', '{"city"', "", "null", "[1]", "oops", '{"a": "\\ud800"}'):
        call = {"id": "a", "type": "function", "function": {"name": "weather", "arguments": arguments}}
        said = {"role": "assistant", **content, "tool_calls": [call]}
        messages = [*HI, said, {"role": "tool", "tool_call_id": "a", "content": "Rain."}]
        answer = await client.chat.completions.create(**{**ASK, "messages": messages})
        assert answer.choices[0].message.content == "Fine."
        written = "no" if content.get("content") else ""
        assert f"<|im_start|>assistant\n{written}<|im_end|>" in engine.calls[-1][0]["prompt"]


async def test_an_answer_without_calls_stays_an_answer(scripted):
    client, _ = scripted("<tool_call> is a word.", **AUTO)
    (choice,) = (await client.chat.completions.create(**ASK)).choices
    assert (choice.finish_reason, choice.message.content) == ("stop", "<tool_call> is a word.")
    assert choice.message.tool_calls is None


@pytest.mark.parametrize("extra", [{"tool_choice": "none"}, {"tools": None}])
async def test_calls_nobody_asked_for_are_content(scripted, extra):
    client, _ = scripted(CALLS, **AUTO)
    (choice,) = (await client.chat.completions.create(**{**ASK, **extra})).choices
    assert (choice.finish_reason, choice.message.content) == ("stop", CALLS)


async def test_one_call_at_most(scripted):
    client, _ = scripted(CALLS, **AUTO)
    whole = await client.chat.completions.create(**ASK, parallel_tool_calls=False)
    assert [call.function.name for call in whole.choices[0].message.tool_calls] == ["weather"]
    stream = await client.chat.completions.create(**ASK, parallel_tool_calls=False, stream=True)
    assert [name for _, name, _ in (await collected(stream))[2]] == ["weather"]


async def test_answers_of_one_request_are_read_apart(scripted):
    client, _ = scripted(CALLS, "No.", **AUTO)
    choices = (await client.chat.completions.create(**ASK, n=2)).choices
    assert [choice.finish_reason for choice in choices] == ["tool_calls", "stop"]
    assert [choice.message.content for choice in choices] == ["Sure.", "No."]
    last: dict[int, str] = {}
    async for chunk in await client.chat.completions.create(**ASK, n=2, stream=True):
        last |= {choice.index: choice.finish_reason for choice in chunk.choices}
    assert last == {0: "tool_calls", 1: "stop"}


async def test_calls_that_are_required(scripted):
    client, engine = scripted(f"Hm.</think>{FORCED}", reasoning_parser="deepseek_r1")
    (choice,) = (await client.chat.completions.create(**ASK, tool_choice="required")).choices
    assert choice.finish_reason == "tool_calls" and choice.message.content is None
    found = [(call.function.name, json.loads(call.function.arguments)) for call in choice.message.tool_calls]
    assert found == [("weather", {"city": "Zürich"}), ("now", {})]
    schema = schema_asked_for(engine)
    assert choice.message.reasoning == "Hm."
    assert schema["minItems"] == 1 and len(schema["items"]["anyOf"]) == 2 and "maxItems" not in schema
    _, _, calls, _, _ = await collected(
        await client.chat.completions.create(**ASK, tool_choice="required", stream=True)
    )
    assert [(name, json.loads(text)) for _, name, text in calls] == found
    await client.chat.completions.create(**ASK, tool_choice="required", parallel_tool_calls=False)
    assert schema_asked_for(engine)["maxItems"] == 1


async def test_the_function_that_is_named(scripted):
    client, engine = scripted('{"city": "Zürich"}')
    named = {"type": "function", "function": {"name": "weather"}}
    (choice,) = (await client.chat.completions.create(**ASK, tool_choice=named)).choices
    (call,) = choice.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "Zürich"})
    # As of OpenAI and vLLM: the model did not choose to call.
    assert choice.finish_reason == "stop"
    assert schema_asked_for(engine) == {**PARAMETERS, "additionalProperties": False}


async def test_only_functions_that_are_allowed_are_called(scripted):
    """OpenAI's allowed_tools: the prompt has all functions, and a call of another one is text."""
    client, engine = scripted(CALLS, **AUTO)
    await client.chat.completions.create(**ASK)
    for mode in ("auto", "required"):
        (answer,) = (await client.chat.completions.create(**ASK, tool_choice=allowing(mode, "now"))).choices
        assert engine.calls[-1][0]["prompt"] == engine.calls[0][0]["prompt"]
        if mode == "auto":
            assert [call.function.name for call in answer.message.tool_calls] == ["now"]
            assert answer.message.content == 'Sure.{"name": "weather", "arguments": {"city": "Zürich"}}'
            assert engine.calls[-1][1].structured_outputs is None
            streamed = await client.chat.completions.create(**ASK, tool_choice=allowing(mode, "now"), stream=True)
            content, _, calls, reason, _ = await collected(streamed)
            assert (content, reason) == (answer.message.content, "tool_calls")
            assert [call[1:] for call in calls] == [["now", "{}"]]
    (call,) = schema_asked_for(engine)["items"]["anyOf"]
    assert "now" in json.dumps(call)


async def test_a_call_in_thoughts_is_not_the_one_that_is_forced(scripted):
    thoughts = '<think>So.\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    named = {"type": "function", "function": {"name": "weather"}}
    options = {"enable_auto_tool_choice": True, "tool_call_parser": "hermes", "reasoning_parser": "qwen3"}
    for choice in (named, "required", "none"):
        client, _ = scripted(thoughts, **options)
        (answer,) = (await client.chat.completions.create(**ASK, tool_choice=choice)).choices
        assert "<tool_call>" not in (answer.message.content or "")
        assert not [call for call in answer.message.tool_calls or () if call.function.arguments]
    client, _ = scripted(thoughts, **options)
    (answer,) = (await client.chat.completions.create(**ASK, tool_choice="auto")).choices
    assert [call.function.name for call in answer.message.tool_calls] == ["now"]


async def test_a_function_that_requires_more_than_it_lists_can_be_called(scripted):
    client, engine = scripted('{"city": "Zürich", "day": 1}')
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city", "day"]}
    tool = {"type": "function", "function": {"name": "weather", "parameters": parameters}}
    named = {"type": "function", "function": {"name": "weather"}}
    await client.chat.completions.create(**{**ASK, "tools": [tool]}, tool_choice=named)
    assert schema_asked_for(engine) == parameters


async def test_a_forced_call_goes_before_response_format(scripted):
    client, engine = scripted(FORCED)
    answer = await client.chat.completions.create(
        **ASK,
        tool_choice="required",
        response_format={"type": "json_schema", "json_schema": {"schema": {"enum": [7]}, "name": "a"}},
    )
    assert [call.function.name for call in answer.choices[0].message.tool_calls] == ["weather", "now"]
    assert schema_asked_for(engine)["type"] == "array"


async def test_a_long_answer_is_read_as_a_short_one(scripted):
    client, _ = scripted("word " * 10_000 + CALLS, **AUTO)
    (choice,) = (await client.chat.completions.create(**ASK)).choices
    assert choice.message.content == "word " * 10_000 + "Sure." and len(choice.message.tool_calls) == 2


async def test_special_tokens_are_shown_to_parsers_that_need_them(scripted):
    client, engine = scripted(
        '[TOOL_CALLS][{"name": "now", "arguments": {}}]', **{**AUTO, "tool_call_parser": "mistral"}
    )
    (choice,) = (await client.chat.completions.create(**ASK)).choices
    assert choice.message.tool_calls[0].function.name == "now" and len(choice.message.tool_calls[0].id) == 9
    assert engine.calls[-1][1].skip_special_tokens is False
    await client.chat.completions.create(**{**ASK, "tool_choice": "none"})
    assert engine.calls[-1][1].skip_special_tokens is True


@pytest.mark.parametrize("stream", [False, True])
async def test_reasoning_is_told_apart_and_counted(scripted, stream):
    client, engine = scripted(THOUGHT, reasoning_parser="qwen3")
    ask = {"model": "tiny", "messages": HI}
    if stream:
        options = {"include_usage": True}
        answer = await client.chat.completions.create(**ask, stream=True, stream_options=options)
        content, reasoning, _, reason, last = await collected(answer)
    else:
        last = await client.chat.completions.create(**ask)
        (choice,) = last.choices
        content, reasoning, reason = choice.message.content, choice.message.reasoning, choice.finish_reason
        assert choice.message.reasoning_content == reasoning
    assert (content, reasoning, reason) == ("\n\nYes.", "Hm, ü.", "stop")
    expected = len(engine.inputs.tokenizer.encode("Hm, ü."))
    assert last.usage.completion_tokens_details.reasoning_tokens == expected


async def test_reasoning_may_be_left_out(scripted):
    client, engine = scripted(THOUGHT, reasoning_parser="qwen3")
    answer = await client.chat.completions.create(model="tiny", messages=HI, extra_body={"include_reasoning": False})
    assert answer.choices[0].message.content == "\n\nYes."
    assert answer.choices[0].message.reasoning is None
    assert answer.usage.completion_tokens_details.reasoning_tokens > 0
    # Tokens, which would tell it, are left out too, as in vLLM.
    for include in (False, True):
        fields = {"include_reasoning": include, "return_token_ids": True, "return_sampling_mass": True}
        fields["return_sampling_mask"] = True
        answer = await client.chat.completions.create(model="tiny", messages=HI, logprobs=True, extra_body=fields)
        stream = await client.chat.completions.create(
            model="tiny", messages=HI, logprobs=True, stream=True, extra_body=fields
        )
        choices = [answer.choices[0], *[choice async for chunk in stream for choice in chunk.choices]]
        assert any(getattr(each, "token_ids", None) or each.logprobs for each in choices) is include
        assert "Hm" not in "".join(str(each) for each in choices) or include
        assert engine.calls[-1][1].return_sampling_mass is engine.calls[-1][1].return_sampling_mask is include


async def test_reasoning_is_the_content_where_a_request_asks_for_some(scripted):
    fields: dict = {"model": "tiny", "messages": HI}
    asked = {"chat_template_kwargs": {"force_nonempty_content": True}}
    client, _ = scripted("<think>Hm.</think>", reasoning_parser="nemotron_v3")
    for extra, content in ((asked, "Hm."), ({}, None)):
        message = (await client.chat.completions.create(**fields, extra_body=extra)).choices[0].message
        assert (message.reasoning, message.content) == ("Hm.", content)
        found = await collected(await client.chat.completions.create(**fields, stream=True, extra_body=extra))
        assert found[:2] == (content or "", "Hm.")
    default = {"default_chat_template_kwargs": asked["chat_template_kwargs"]}
    client, _ = scripted("<think>Hm.", reasoning_parser="nemotron_v3", **default)
    assert (await client.chat.completions.create(**fields)).choices[0].message.content == "Hm."


async def test_reasoning_that_a_message_has_begun(scripted):
    client, _ = scripted("more.</think>Yes.", reasoning_parser="qwen3")
    messages = [*HI, {"role": "assistant", "content": "<think>Some and"}]
    answer = await client.chat.completions.create(
        model="tiny", messages=messages, extra_body={"continue_final_message": True}
    )
    assert (answer.choices[0].message.reasoning, answer.choices[0].message.content) == ("more.", "Yes.")


@each_row(
    "parser, fields, words",
    [
        ("qwen3", {"stop": ["x"]}, ((("</think>",),), ("<think>",))),
        ("deepseek_r1", {"stop": ["x"]}, ((("</think>",),), None)),
        ("qwen3", {"stop": ["x"], "stop_in_reasoning": False}, ((("</think>",),), ("<think>",))),
        ("qwen3", {"stop": ["x"], "stop_in_reasoning": True}, None),
        ("kimi_k2", {"stop": ["x"]}, ((("</think>",),), ("<think>",))),
        (
            "kimi_k2",
            {"stop": ["x"], "tools": [NOW]},
            ((("</think>",), ("<|tool_calls_section_begin|>",)), ("<think>",)),
        ),
        ("qwen3", {}, None),
        (None, {"stop": ["x"]}, None),
    ],
)
async def test_stop_strings_wait_for_the_end_of_reasoning(scripted, parser, fields, words):
    client, engine = scripted(THOUGHT, reasoning_parser=parser, **{**AUTO, "tool_call_parser": "kimi_k2"})
    await client.chat.completions.create(model="tiny", messages=HI, extra_body=fields)
    after = engine.calls[-1][1].stop_after
    assert (None if after is None else (after.reasoning_end, after.reasoning_begin)) == words


FINAL = "<|end|><|start|>assistant<|channel|>final<|message|>"


@each_row(
    "parser, fields, words",
    [
        ("qwen3", {"thinking_token_budget": 9}, (9, "<think>", "</think>")),
        ("deepseek_r1", {"thinking_token_budget": 0}, (0, None, "</think>")),
        ("openai_gptoss", {"thinking_token_budget": 9}, (9, "<|channel|>analysis<|message|>", FINAL)),
        ("qwen3", {"thinking_token_budget": 9, "response_format": {"type": "json_object"}}, (9, "<think>", "</think>")),
        ("qwen3", {"thinking_token_budget": -1}, None),
        (None, {"thinking_token_budget": -1}, None),
        ("qwen3", {}, None),
    ],
)
async def test_reasoning_is_limited_by_the_words_of_its_format(scripted, parser, fields, words):
    client, engine = scripted(THOUGHT, reasoning_parser=parser)
    await client.chat.completions.create(model="tiny", messages=HI, extra_body=fields)
    params = engine.calls[-1][1]
    found, budget = params.thinking_words, params.thinking_token_budget
    assert (None if budget is None else (budget, found.reasoning_begin, found.closing)) == words


@each_row(
    "parser, fields, message",
    [
        (None, {"thinking_token_budget": 9}, "needs a server with --reasoning-parser"),
        ("qwen3", {"thinking_token_budget": -2}, "an int >= 0"),
        ("qwen3", {"thinking_token_budget": 2**31}, "at most 2147483647"),
    ],
)
async def test_a_limit_that_cannot_hold_is_refused(scripted, parser, fields, message):
    client, _ = scripted(THOUGHT, reasoning_parser=parser)
    with pytest.raises(openai.BadRequestError, match=message) as caught:
        await client.chat.completions.create(model="tiny", messages=HI, extra_body=fields)
    assert caught.value.param == "thinking_token_budget"


ANSWER = {"type": "json_schema", "json_schema": {"schema": {"enum": [7]}, "name": "a"}}


@pytest.mark.parametrize(
    ("parser", "messages", "fields", "begin", "end"),
    [
        ("qwen3", HI, {"response_format": ANSWER}, "<think>", (("</think>",),)),
        ("deepseek_r1", HI, {"response_format": {"type": "json_object"}}, None, (("</think>",),)),
        ("deepseek_r1", HI, {"structured_outputs": {"regex": "a"}}, None, (("</think>",),)),
        ("deepseek_r1", HI, {"tools": [NOW], "tool_choice": "required"}, None, (("</think>",),)),
        ("openai_gptoss", HI, {"response_format": ANSWER}, None, (("<|channel|>final", "<|message|>"),)),
        ("qwen3", HI, {"structured_outputs": {"regex": "a", "reasoning_end": "x"}}, None, (("x",),)),
        (
            "qwen3",
            [*HI, {"role": "assistant", "content": "<think>a"}],
            {"response_format": ANSWER},
            None,
            (("</think>",),),
        ),
        ("qwen3", [*HI, {"role": "assistant", "content": "a"}], {"response_format": ANSWER}, None, None),
        (None, HI, {"response_format": ANSWER}, None, None),
    ],
)
async def test_a_grammar_waits_for_the_end_of_reasoning(scripted, parser, messages, fields, begin, end):
    client, engine = scripted("a</think>7", reasoning_parser=parser)
    extra = {"continue_final_message": messages[-1]["role"] == "assistant", **fields}
    await client.chat.completions.create(model="tiny", messages=messages, extra_body=extra)
    structure = engine.calls[-1][1].structured_outputs
    assert (structure.reasoning_begin, structure.reasoning_end) == (begin, end)


async def test_structured_outputs_allow_calls_too(scripted):
    client, engine = scripted("yes", **AUTO)
    asked = {"choice": ["yes", "no"], "reasoning_end": "</think>"}
    await client.chat.completions.create(**ASK, extra_body={"structured_outputs": asked})
    structure = engine.calls[-1][1].structured_outputs
    assert '\nanswer: ("yes" | "no")\n' in structure.grammar and structure.grammar.startswith("start: answer | calls")
    assert structure.reasoning_end == (("</think>",),)
    for wrong in ({"grammar": "start: /a/"}, {"regex": 3}, {"regex": "a", "choice": ["a"]}):
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(**ASK, extra_body={"structured_outputs": wrong})
        assert caught.value.param == "structured_outputs"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": []}, "tools"),
        ({"tools": [WEATHER] * 2}, "tools"),
        ({"tools": [WEATHER] * 129}, "tools"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools"),
        ({"tools": None, "tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"tool_choice": allowing("auto", "weather", "other")}, "tool_choice"),
        ({"tool_choice": allowing("never", "weather")}, "tool_choice"),
        ({"tool_choice": allowing("auto")}, "tool_choice"),
        ({"structured_outputs": {"regex": "a"}, "tool_choice": "required"}, "structured_outputs"),
        ({}, "tool_choice"),
    ],
)
async def test_what_is_wrong_is_named(chat_engine, fields, param):
    app = create_app(chat_engine, ServerConfig(served_model_name="tiny"))
    answer = await post(app, PATH, **{**ASK, **fields})
    assert answer.status == 400 and answer.error["param"] == param, answer.error


async def test_references_of_a_forced_call_are_those_of_its_function(scripted):
    """Also where two functions have different definitions of one name, and where a schema refers to its root."""
    client, engine = scripted(FORCED)

    def tool(name: str, **schema):
        return {"type": "function", "function": {"name": name, "parameters": {"type": "object", **schema}}}

    link = {"c": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}, "d": {"$ref": "#/properties/c"}}
    tools = [tool(kind, properties={"a": {"$ref": "#/$defs/A"}}, **{"$defs": {"A": {"type": kind}}}) for kind in KINDS]
    tools.append(tool("link", properties=link))
    ask = {"model": "tiny", "messages": HI}
    await client.chat.completions.create(**ask, tools=tools, tool_choice="required")
    document = SchemaDocument(schema_asked_for(engine))
    *first, last = (each["properties"]["parameters"] for each in document.root.schema["items"]["anyOf"])
    assert [document.resolve(each["properties"]["a"]["$ref"]).schema["type"] for each in first] == KINDS
    root = document.resolve(last["properties"]["c"]["anyOf"][0]["$ref"]).schema
    assert root["properties"] == last["properties"]
    assert document.resolve(last["properties"]["d"]["$ref"]).schema == last["properties"]["c"]
    app = create_app(engine, ServerConfig(served_model_name="tiny"))
    for choice in ("required", {"type": "function", "function": {"name": "f"}}):
        wrong = tool("f", properties={"a": {"$ref": "#/$defs/Nowhere"}})
        answer = await post(app, PATH, **ask, tools=[wrong], tool_choice=choice)
        assert answer.error["param"] == "tools" and "#/$defs/Nowhere" in answer.error["message"]


@pytest.mark.parametrize("option", ["tool_call_parser", "reasoning_parser"])
def test_an_unknown_parser_ends_the_start(chat_engine, option):
    with pytest.raises(ConfigError, match=f"{option} is 'other'; allowed: .*mistral"):
        create_app(chat_engine, ServerConfig(**{option: "other"}))
