"""Chat templates: the same text as transformers renders, messages and options that are refused, the sandbox."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jaxengine
from jaxengine.scheduler.base.errors import RequestError
from jaxengine.tokens import chat_sandbox
from jaxengine.tokens.chat_messages import MAX_DEPTH, checked_messages
from jaxengine.tokens.tokenizer import Tokenizer
from tests.tables import each_row

RECORDED = json.loads((Path(__file__).parents[2] / "fixtures" / "tokenizer_ids.json").read_text())
CHATML = """{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
TEMPLATES = {
    "chatml": CHATML,
    "trimming": """{{ bos_token }}{% for m in messages %}
  [{{ m.role }}] {{ m.content | trim }}{{ eos_token }}
{% endfor %}""",
    "tools": """{% if tools %}{% for tool in tools %}{{ tool | tojson(indent=2) }}
{% endfor %}{% else %}none{% endif %}{% for m in messages %}{{ m | tojson }}{% endfor %}""",
    "namespace and loop controls": """{% set ns = namespace(last=none, count=0) %}
{%- for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}
{%- set ns.last = m.content %}{% set ns.count = ns.count + 1 %}{% if ns.count == 2 %}{% break %}{% endif %}
{%- endfor %}{{ ns.count }}: {{ ns.last }} {{ dict(a=1) }} {{ absent }} {{ absent is defined }}""",
    "generation": """{% for m in messages %}{% if m.role == 'assistant' %}
{% generation %}{% set x = 'in' %}{{ m.content }}{{ x }}{% endgeneration %}
{% else %}{{ m.content }}{% endif %}{% endfor %}{{ x }}""",
    "variables": "{{ thinking }} {{ documents }} {% if name is defined %}{{ name }}{% endif %}",
    "absent values": "{% for m in messages %}{{ m.name }}|{{ 'content' in m }}{% endfor %}",
}
MESSAGES = [
    {"role": "system", "content": "  Be <brief> & \u00e9xact. "},
    {"role": "user", "content": "Hi\n\n", "name": None},
    {"role": "assistant", "content": "Hello!  ", "name": "bot"},
]
TOOLS = [{"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}]


def tokenizer_with(template: str | dict[str, str] | None) -> Tokenizer:
    pieces = RECORDED["sentencepiece"]
    values = {
        "model": "llama",
        "tokens": pieces["tokens"],
        "scores": np.array(pieces["scores"], np.float32),
        "token_type": np.array(pieces["token_type"], np.int32),
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    tokenizer = Tokenizer.from_gguf({f"tokenizer.ggml.{key}": value for key, value in values.items()})
    tokenizer.chat_template = template
    return tokenizer


@pytest.fixture(scope="module")
def chatml() -> Tokenizer:
    return tokenizer_with(CHATML)


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES.keys())
@pytest.mark.parametrize(
    "options",
    [
        {"add_generation_prompt": True},
        {"add_generation_prompt": False, "tools": TOOLS},
        {"add_generation_prompt": False, "thinking": True, "name": "x", "documents": [{"title": "t", "text": "x"}]},
    ],
    ids=["prompt", "tools", "variables"],
)
def test_the_text_is_that_of_transformers(chatml, template, options):
    expected = chatml.hf.apply_chat_template(MESSAGES, chat_template=template, tokenize=False, **options)
    assert chatml.apply_chat_template(MESSAGES, chat_template=template, **options) == expected


@pytest.mark.parametrize(
    ("name", "end"), [("chatml", "assistant\nHello!  "), ("trimming", "[assistant] Hello!"), ("generation", "Hello!  ")]
)
def test_continuing_the_last_message(chatml, name, end):
    options: dict[str, Any] = {"add_generation_prompt": False, "continue_final_message": True}
    text = chatml.apply_chat_template(MESSAGES, chat_template=TEMPLATES[name], **options)
    assert text.endswith(end)
    assert text == chatml.hf.apply_chat_template(MESSAGES, chat_template=TEMPLATES[name], tokenize=False, **options)


def test_a_message_the_template_leaves_out_cannot_be_continued(chatml):
    options: dict[str, Any] = {"add_generation_prompt": False, "continue_final_message": True}
    with pytest.raises(RequestError, match="leaves out the last message"):
        chatml.apply_chat_template(MESSAGES, chat_template=TEMPLATES["variables"], **options)


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content", "thinking"])
def test_reasoning_is_found_under_its_names(chatml, name):
    """Whatever the client's name, and that of the template: some read one, some the other. `reasoning` counts first."""
    message = {"role": "assistant", "content": "a", "reasoning_content": "no", name: "because"}
    if name == "thinking":
        del message["reasoning_content"]
    template = "{{ messages[0].reasoning_content }} {{ messages[0].reasoning }} {{ messages[0].thinking }}"
    assert chatml.apply_chat_template([message], chat_template=template) == "because because because"


def test_a_template_that_refuses_reasoning_beside_a_content_of_calls(chatml):
    """gpt-oss's. Where it refuses both, it gets the content; in other answers it gets the reasoning."""
    template = (
        "{% for m in messages %}{% if m.tool_calls and m.content and m.thinking %}{{ raise_exception('both') }}"
        "{% endif %}{{ m.content or m.thinking }}|{% endfor %}"
    )
    calls = {"role": "assistant", "tool_calls": [CALL], "reasoning": "why"}
    for content, text in ((None, "why|why|"), ("", "why|why|"), ("say", "why|say|")):
        messages = [{"role": "assistant", "reasoning": "why"}, {**calls, "content": content}]
        assert chatml.apply_chat_template(messages, chat_template=template) == text


CALL = {"type": "function", "function": {"name": "f", "arguments": '{"a": [1, "x'}}
CALLING = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": None, "tool_calls": [CALL]}]


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{% for m in messages %}{{ '|' + m['content'] }}{% endfor %}", "|Hi|"),
        ("{% for m in messages %}{% if m['content'] is none %}called{% endif %}{% endfor %}", "called"),
        ("{% for m in messages %}{{ 'content' in m }}{% endfor %}", "TrueFalse"),
        ("{{ messages[1].tool_calls[0].function.arguments | tojson }}", '{"a": [1, "x"]}'),
        (
            "{% for k, v in messages[1].tool_calls[0].function.arguments|items %}{{ k }}={{ v }}{% endfor %}",
            "a=[1, 'x']",
        ),
        ("{{ '```' + messages[1].tool_calls[0].function.arguments }}", '```{"a": [1, "x'),
        ("{{ '|' + messages[1].content + messages[1].tool_calls[0].function.arguments }}", '|{"a": [1, "x'),
    ],
)
def test_a_call_is_written_as_the_template_wants_it(chatml, template, text):
    assert chatml.apply_chat_template(CALLING, chat_template=template) == text


_EACH = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
# Qwen3 drops the role, Qwen3.5 refuses it, and a system message in the middle; gpt-oss knows it, at the beginning.
_DROPS = (
    "{% for m in messages %}{% if m.role in ('system', 'user') %}[{{ m.role }}]{{ m.content }}{% endif %}{% endfor %}"
)
_STRICT = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('not first') }}"
    "{% elif m.role not in ('system', 'user') %}{{ raise_exception('role') }}{% endif %}[{{ m.role }}]{{ m.content }}"
    "{% endfor %}"
)
_FIRST = (
    "{% if messages[0].role in ['developer', 'system'] %}# {{ messages[0].content }}{% endif %}"
    "{% for m in messages %}{% if m.role == 'user' %}[user]{{ m.content }}{% endif %}{% endfor %}"
)
_TRIMS = "{% for m in messages %}[{{ m.role }}]{{ m.content | trim }}{% endfor %}"
_DEAF = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"


@each_row(
    ("template", "roles", "text"),
    [
        (_EACH, "du", "[system]0[user]1"),
        (_EACH, "sdud", "[system]0\n\n1[user]2[system]3"),
        (_EACH, "ud", "[user]0[system]1"),
        (_EACH, "ssus", "[system]0[system]1[user]2[system]3"),  # as it is taken
        (_EACH + "{# 'developer' #}", "du", "[developer]0[user]1"),
        (_DROPS, "ddu", "[system]0\n\n1[user]2"),
        (_STRICT, "sddu", "[system]0\n\n1\n\n2[user]3"),
        (_STRICT, "dudu", "[system]0\n\n2[user]1[user]3"),
        (_FIRST, "sdu", "# 0\n\n1[user]2"),
        (_FIRST, "dudu", "# 0\n\n2[user]1[user]3"),
        (_STRICT, "sus", "[system]0\n\n2[user]1"),
        (_STRICT, "us", "[system]1[user]0"),
        (_FIRST, "sus", "# 0\n\n2[user]1"),
        (_TRIMS, "sus", "[system]0[user]1[system]2"),
        (_TRIMS, "dud", "[system]0[user]1[system]2"),
        (_DEAF, "dud", "1"),
    ],
)
def test_instructions_reach_the_model(chatml, template, roles, text):
    names = {"s": "system", "d": "developer", "u": "user"}
    said = " {} " if template == _TRIMS else "{}"
    messages = [{"role": names[role], "content": said.format(at)} for at, role in enumerate(roles)]
    assert chatml.apply_chat_template(messages, chat_template=template) == text


def test_a_template_that_takes_no_way_to_write_a_call_says_why(chatml):
    with pytest.raises(RequestError, match="TemplateRefusal: calls are beyond me"):
        chatml.apply_chat_template(CALLING, chat_template="{{ raise_exception('calls are beyond me') }}")


def test_an_answer_of_reasoning_or_a_refusal_needs_no_content(chatml):
    for said, text in (({"reasoning": "Hm"}, ""), ({"refusal": "No."}, "No.")):
        rendered = chatml.apply_chat_template([{"role": "assistant", "content": None, **said}])
        assert rendered.startswith(f"<|im_start|>assistant\n{text}<|im_end|>")


def test_text_parts_are_joined_by_line_breaks(chatml):
    parts = [{"type": "text", "text": "one"}, "two"]
    joined = chatml.apply_chat_template([{"role": "user", "content": parts}])
    assert joined == chatml.apply_chat_template([{"role": "user", "content": "one\ntwo"}])


def test_callers_messages_are_left_alone(chatml):
    messages = json.loads(json.dumps(MESSAGES))
    chatml.apply_chat_template(messages, add_generation_prompt=False, continue_final_message=True)
    assert messages == MESSAGES


def nested(depth: int) -> Any:
    return [] if depth == 0 else [nested(depth - 1)]


def test_an_answer_may_be_empty():
    """As the API gives it back: an answer that ended at once has the content null."""
    for answer in ({}, {"content": None}, {"content": None, "tool_calls": []}, {"content": ""}):
        assert checked_messages([{"role": "assistant", **answer}]) == [{"role": "assistant", "content": ""}]


@each_row(
    ("messages", "message"),
    [
        ([], "at least one message, got an empty list"),
        ("Hi", "at least one message, got str"),
        (None, "at least one message, got NoneType"),
        (["Hi"], r"messages\[0\] must be a dict"),
        ([{"content": "x"}], r"messages\[0\].role must be a text"),
        ([{"role": "", "content": "x"}], "not empty, got an empty str"),
        ([{"role": 3, "content": "x"}], "role must be a text that is not empty, got int"),
        ([{"role": "user"}], r"messages\[0\].content is missing"),
        ([{"role": "user", "content": 3}], "content must be a text or a list of text parts, got int"),
        ([{"role": "user", "content": [3]}], r"content\[0\] must be"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
            "must be 'text' or 'refusal', got 'image_url'",
        ),
        ([{"role": "user", "content": [{"type": "text"}]}], "text must be a text, got NoneType"),
        ([{"role": "user", "content": "x", "extra": object()}], "JSON values only, got object"),
        ([{"role": "user", "content": "x", "extra": float("nan")}], "JSON values only, got float"),
        ([{"role": "user", "content": "x", "extra": nested(MAX_DEPTH + 1)}], "nested deeper"),
        ([{"role": "user", "content": "x", 3: "y"}], "texts as keys"),
        *[
            ([{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": given}}]}], text)
            for given, text in ((0, "object, got int"), (False, "object, got bool"), ([1], "object, got list"))
        ],
    ],
)
def test_messages_that_are_refused(chatml, messages, message):
    with pytest.raises(RequestError, match=message) as refusal:
        chatml.apply_chat_template(messages)
    assert refusal.value.param == "messages"


def test_a_message_with_tool_calls_needs_no_content(chatml):
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "now", "arguments": {}}}]}
    text = chatml.apply_chat_template([call], chat_template="{{ messages[0] | tojson }}")
    assert json.loads(text) == {"role": "assistant", "tool_calls": call["tool_calls"]}
    for empty in ({}, *({"arguments": given} for given in (None, [], "", "null", "[]"))):
        other = {**call, "tool_calls": [{"function": {"name": "now", **empty}}]}
        assert chatml.apply_chat_template([other], chat_template="{{ messages[0] | tojson }}") == text
    with pytest.raises(RequestError, match="the last message has no text") as refusal:
        chatml.apply_chat_template([call], add_generation_prompt=False, continue_final_message=True)
    assert refusal.value.param == "continue_final_message"


@each_row(
    ("options", "param"),
    [
        ({"continue_final_message": True}, "continue_final_message"),
        ({"continue_final_message": "content", "add_generation_prompt": False}, "continue_final_message"),
        ({"add_generation_prompt": 1}, "add_generation_prompt"),
        ({"tools": []}, "tools"),
        ({"tools": [print]}, "tools"),
        ({"tools": {"type": "function"}}, "tools"),
        ({"chat_template": ""}, "chat_template"),
        ({"chat_template": 3}, "chat_template"),
        ({"chat_template": "{% if %}"}, "chat_template"),
        ({"tokenize": True}, "chat_template_kwargs"),
        ({"raise_exception": "x"}, "chat_template_kwargs"),
        ({"bos_token": "x"}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"x": object()}}, "chat_template_kwargs"),
    ],
)
def test_options_that_are_refused(chatml, options, param):
    with pytest.raises(RequestError) as refusal:
        chatml.apply_chat_template(MESSAGES, **options)
    assert refusal.value.param == param


@pytest.mark.parametrize("template", [None, {}, {"other": "x"}])
def test_no_template(template):
    with pytest.raises(RequestError, match="no default chat template") as refusal:
        tokenizer_with(template).apply_chat_template(MESSAGES)
    assert refusal.value.param == "chat_template"
    assert tokenizer_with(template).apply_chat_template(MESSAGES, chat_template="{{ 1 }}") == "1"


@each_row(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append({}) }}",
        "{{ messages[0].update({}) }}",
        "{{ raise_exception.__globals__.os }}",
        "{{ namespace(__class__=1) }}",
        "{% set ns = namespace() %}{% set ns.__init__ = 1 %}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ '{0.__class__.__mro__}'.format('').upper() }}",
        "{% include 'x' %}",
        "{% for i in range(10**9) %}{% endfor %}",
        "{{ 1 // 0 }}",
        "{{ messages[7].content.x }}",
        "{{ raise_exception('roles must alternate') }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_templates_that_overstep(chatml, template):
    with pytest.raises(RequestError) as refusal:
        chatml.apply_chat_template(MESSAGES, chat_template=template)
    assert refusal.value.param in ("chat_template", "messages") and len(str(refusal.value)) < 500
    assert chatml.apply_chat_template(MESSAGES)


def test_output_is_bounded():
    with pytest.raises(OverflowError, match="more than 16777216 characters"):
        chat_sandbox.render("{{ 'x' * 20000000 }}", {})


def test_chat_does_not_import_transformers():
    # It takes longer to import than everything else a chat needs.
    modules = "jaxengine.tokens.tokenizer, jaxengine.tokens.chat_template"
    code = f"import sys, {modules}; sys.exit('transformers' in sys.modules)"
    root = Path(jaxengine.__file__).parents[1]
    assert subprocess.run([sys.executable, "-c", code], cwd=root, check=False).returncode == 0
