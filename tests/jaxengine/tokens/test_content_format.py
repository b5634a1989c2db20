"""Pictures in conversations: what templates of the usual kinds make of them, and how such a template is known."""

from __future__ import annotations

from typing import Any

import pytest

from jaxengine.config.inputs import chat_template
from jaxengine.scheduler.base.errors import RequestError
from jaxengine.tokens.content_format import CONTENT_FORMATS, takes_parts
from jaxengine.tokens.tokenizer import Tokenizer
from tests.jaxengine.tokens.test_tokenizer_chat import CHATML, TEMPLATES, tokenizer_with
from tests.tables import each_row

# In the manner of Qwen2-VL's, with a test for every spelling of a picture.
QWEN = """{% for message in messages %}<|im_start|>{{ message['role'] }}
{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for content in message['content'] -%}
{% if content['type'] == 'image' or 'image' in content or 'image_url' in content %}<|vision_start|><|image_pad|>
{%- elif content['type'] == 'video' or 'video' in content %}<|video_pad|>
{%- elif 'text' in content %}{{ content['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>
{% endfor %}"""
# Of LLaVA's: pictures first, and no content is a text.
LLAVA = """{% for message in messages %}{{ message.role | upper }}: {% for content in message['content'] |
selectattr('type', 'equalto', 'image') %}<image>
{% endfor %}{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}{{ content['text'] }}
{%- endfor %}
{% endfor %}"""
# Of Gemma 3's: a system message goes into the next one.
GEMMA = """{% if messages[0]['role'] == 'system' %}{% if messages[0]['content'] is string %}
{%- set first = messages[0]['content'] %}{% else %}{% set first = messages[0]['content'][0]['text'] %}{% endif %}
{%- set rest = messages[1:] %}{% else %}{% set first = '' %}{% set rest = messages %}{% endif %}
{%- for message in rest %}{{ first if loop.first }}{% if message['content'] is string %}{{ message['content'] | trim }}
{%- elif message['content'] is iterable %}{% for item in message['content'] %}{% if item['type'] == 'image' %}<img>
{%- elif item['type'] == 'text' %}{{ item['text'] | trim }}{% endif %}{% endfor %}{% endif %}|{% endfor %}"""
# Of Qwen3-VL's: the content goes through a macro.
MACRO = """{% macro shown(content) %}{% if content is string %}{{ content }}{% else %}{% for item in content %}
{%- if item.type == 'image' %}<img>{% else %}{{ item.text }}{% endif %}{% endfor %}{% endif %}{% endmacro %}
{%- for m in messages %}{{ m.role }}:{{ shown(m.content) }};{% endfor %}"""
SET = "{% for m in messages %}{% set parts = m.content %}{% for p in parts[0:] %}{{ p.type }} {% endfor %}{% endfor %}"
IMAGE, VIDEO, TEXT = {"type": "image"}, {"type": "video"}, {"type": "text", "text": "What?"}
ASK = [{"role": "system", "content": "Look."}, {"role": "user", "content": [IMAGE, TEXT, VIDEO, "And?"]}]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return tokenizer_with(CHATML)


def render(tokenizer: Tokenizer, messages: Any, template: str, **options: Any) -> str:
    options = {"add_generation_prompt": False, **options}
    return tokenizer.apply_chat_template(messages, chat_template=template, placeholder="<{}>".format, **options)


@pytest.mark.parametrize("template", [QWEN, LLAVA, GEMMA, MACRO, SET])
def test_templates_that_go_over_parts_are_known(template):
    assert takes_parts(template)


@pytest.mark.parametrize(
    "template",
    [
        CHATML,
        *TEMPLATES.values(),
        "{% for m in messages %}{% for line in m.content.split('\\n') %}{{ line }}{% endfor %}{% endfor %}",
        "{% for m in messages if m.content %}{{ m.content }}{% endfor %}",
        "{% for m in messages %}{% for call in m.tool_calls %}{{ call }}{% endfor %}{{ m.content }}{% endfor %}",
        "{% if %}",
        "{{ " + "(" * 5000,
        "x" * (2 << 20),
        "",
    ],
)
def test_templates_that_take_texts_are_known(template):
    assert not takes_parts(template)


def test_the_parts_of_a_content(tokenizer):
    assert render(tokenizer, ASK, QWEN) == (
        "<|im_start|>system\nLook.<|im_end|>\n"
        "<|im_start|>user\n<|vision_start|><|image_pad|>What?<|video_pad|>And?<|im_end|>\n"
    )
    # What has words for pictures alone gets a text in the place of a video.
    assert render(tokenizer, ASK, GEMMA) == "Look.<img>What?<video>And?|"
    assert render(tokenizer, ASK[1:], MACRO).startswith("user:<img>What?<video>And?")


def test_a_sound_is_a_part_or_a_text(tokenizer):
    ask = [{"role": "user", "content": [{"type": "audio"}, TEXT]}]
    known = "{% for m in messages %}{% for p in m.content %}{{ p.type }};{% endfor %}{% endfor %}{# audio #}"
    assert render(tokenizer, ask, known) == "audio;text;"
    # What has no word for sounds gets a text in the place of one.
    assert render(tokenizer, ask, GEMMA) == "<audio>What?|"
    assert render(tokenizer, ask, CHATML).endswith("<|im_start|>user\n<audio>\nWhat?<|im_end|>\n")


def test_a_template_that_takes_nothing_but_parts_gets_its_texts_as_parts(tokenizer):
    assert render(tokenizer, ASK, LLAVA) == "SYSTEM: Look.USER: <image>\nWhat?<video>And?"
    texts = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": [TEXT, TEXT]}]
    assert render(tokenizer, texts, LLAVA) == "USER: HiASSISTANT: What?What?"
    # A model of text alone, too: the template would go over the letters of a text.
    assert tokenizer.apply_chat_template(texts, chat_template=LLAVA, add_generation_prompt=False) == (
        "USER: HiASSISTANT: What?What?"
    )


@pytest.mark.parametrize("template", [QWEN, LLAVA, GEMMA, MACRO])
def test_several_texts_are_those_of_transformers(tokenizer, template):
    """A template that takes parts writes them one after the other, whatever the model takes besides text."""
    parts = [TEXT, {"type": "text", "text": " Hi "}]
    messages = [{"role": "user", "content": parts}]
    if template is not GEMMA:  # whose instructions are their first part
        messages.insert(0, {"role": "system", "content": parts})
    expected = tokenizer.hf.apply_chat_template(messages, chat_template=template, tokenize=False)
    assert render(tokenizer, messages, template) == expected
    options = {"chat_template": template, "add_generation_prompt": False}
    assert tokenizer.apply_chat_template(messages, **options) == expected


# A template with another way to write the contents of one role.
OTHER = """{% for m in messages %}{{ m.role }}:{% if m.content is string %}{{ m.content }}{% elif m.role == 'ROLE' %}WAY
{%- else %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %};{% endfor %}"""


@each_row(
    ("template", "role"),
    [
        (GEMMA, "system"),  # looks at the first part alone, as those of Gemma 3, Llama 3.1 and Mistral Small do
        (OTHER.replace("WAY", "{{ m.content }}"), "assistant"),
        (OTHER.replace("WAY", "{{ 'I' + m.content }}"), "user"),
        (OTHER.replace("WAY", "{% for p in m.content %}({{ p.text }}){% endfor %}"), "system"),
    ],
)
def test_texts_are_joined_where_the_template_does_not_write_each(tokenizer, template, role):
    """Texts are joined for a template that drops parts, prints a list or fails; transformers and vLLM pass it parts."""
    template = template.replace("ROLE", role)
    assert takes_parts(template)
    contents = "What?\nHi", [TEXT, "Hi"]
    text, parts = ([{"role": role, "content": each}, {"role": "user", "content": "Ho"}] for each in contents)
    assert render(tokenizer, parts, template) == render(tokenizer, text, template)
    last = [{"role": "user", "content": "Ho"}, parts[0]] if role == "assistant" else parts
    assert "What?\nHi" in render(tokenizer, last, template, continue_final_message=True)


def test_texts_of_tools_are_joined(tokenizer):
    """As in vLLM: templates seldom look for parts there."""
    messages = [{"role": "tool", "content": [TEXT, "Hi"]}]
    assert render(tokenizer, messages, MACRO) == "tool:What?\nHi;"
    assert render(tokenizer, messages, MACRO, content_format="openai") == "tool:What?\nHi;"


@pytest.mark.parametrize("template", [QWEN, LLAVA, GEMMA, MACRO])
def test_the_text_is_that_of_transformers(tokenizer, template):
    messages = [{"role": each["role"], "content": each["content"]} for each in ASK]
    messages[1]["content"] = [IMAGE, TEXT, VIDEO] if template is QWEN else [IMAGE, TEXT]
    if template is LLAVA:
        messages[0]["content"] = [{"type": "text", "text": "Look."}]
    expected = tokenizer.hf.apply_chat_template(messages, chat_template=template, tokenize=False)
    assert render(tokenizer, messages, template) == expected


def test_a_template_that_takes_texts_gets_placeholders_in_place(tokenizer):
    text = render(tokenizer, ASK, CHATML)
    assert text.endswith("<|im_start|>user\n<image>\nWhat?\n<video>\nAnd?<|im_end|>\n")
    with pytest.raises(RequestError, match="the chat template takes texts only, and messages has a part") as refusal:
        tokenizer.apply_chat_template(ASK, chat_template=CHATML)
    assert refusal.value.param == "messages"


def test_several_texts_are_joined_where_the_template_takes_none(tokenizer):
    as_text = tokenizer.apply_chat_template([{"role": "user", "content": "What?\nHi"}], chat_template=CHATML)
    for name in ("text", "input_text", "output_text"):  # as /v1/responses calls them
        parts = [{"role": "user", "content": [{**TEXT, "type": name}, "Hi"]}]
        assert tokenizer.apply_chat_template(parts, chat_template=CHATML) == as_text


def test_a_content_format_that_is_given(tokenizer):
    assert CONTENT_FORMATS == chat_template.CONTENT_FORMATS
    several = [{"role": "user", "content": [TEXT, "Hi"]}]
    single = [{"role": "user", "content": "Hi"}]
    for template in (CHATML, QWEN):
        assert "What?\nHi" in render(tokenizer, several, template, content_format="string")
    types = "{% for m in messages %}{{ 'text' if m.content is string else m.content | length }}{% endfor %}"
    assert render(tokenizer, several + single, types) == "texttext"
    assert render(tokenizer, several + single, types, content_format="openai") == "21"
    assert render(tokenizer, several + single, types, content_format="string") == "texttext"


def test_instructions_of_several_texts_are_merged(tokenizer):
    """Where the template refuses a second system message, as of one text."""
    first = "{% for m in messages %}{% if m.role == 'system' and loop.index > 1 %}{{ raise_exception(0) }}{% endif %}"
    texts = first + "{{ m.content }};{% endfor %}"
    parts = first + "{% for p in m.content %}{{ p.text }}{% endfor %};{% endfor %}"
    messages = [{"role": "user", "content": "Hi"}, {"role": "system", "content": [TEXT, "Now."]}]
    assert render(tokenizer, [{"role": "system", "content": "Be."}, *messages], texts) == "Be.\n\nWhat?\nNow.;Hi;"
    assert render(tokenizer, [{"role": "system", "content": "Be."}, *messages], parts) == "Be.\n\nWhat?\nNow.;Hi;"


def test_continuing_a_message_with_a_picture(tokenizer):
    options = {"continue_final_message": True}
    for template, end in ((QWEN, "<|image_pad|>What?"), (CHATML, "<image>\nWhat?"), (LLAVA, "<image>\nWhat?")):
        assert render(tokenizer, [{"role": "user", "content": [IMAGE, TEXT]}], template, **options).endswith(end)
    with pytest.raises(RequestError, match="the last message has no text to continue"):
        render(tokenizer, [{"role": "user", "content": [TEXT, IMAGE]}], QWEN, **options)


def test_parts_of_thinking_are_for_templates_that_take_them(tokenizer):
    parts = [{"type": "thinking", "thinking": "a"}, TEXT]
    template = "{% for part in messages[0]['content'] %}{{ part | tojson }}{{ part['thinking'] }}{% endfor %}"
    text = render(tokenizer, [{"role": "assistant", "content": parts}], template, add_generation_prompt=False)
    assert '"closed": true}a{' in text
    for template in (QWEN, CHATML):
        with pytest.raises(RequestError, match="the chat template takes no content part of type 'thinking'"):
            render(tokenizer, [{"role": "assistant", "content": parts}], template)
    with pytest.raises(RequestError, match=r"content\[0\] must have a text, thinking, and may have a bool, closed"):
        render(tokenizer, [{"role": "assistant", "content": [{"type": "thinking", "thinking": 1}]}], QWEN)


def test_parts_with_a_language_are_for_templates_that_take_them(tokenizer):
    parts = [{"type": "language", "language": "French"}, TEXT]
    template = "{% for part in messages[0]['content'] %}{{ part['type'] }}:{{ part['language'] }};{% endfor %}"
    messages = [{"role": "user", "content": parts}]
    assert render(tokenizer, messages, template).startswith("language:French;text:")
    with pytest.raises(RequestError, match="the chat template takes no content part of type 'language'"):
        render(tokenizer, messages, QWEN)
    with pytest.raises(RequestError, match=r"content\[0\]\.language must be a text"):
        render(tokenizer, [{"role": "user", "content": [{"type": "language", "language": 1}]}], template)


def test_a_part_of_a_picture_has_nothing_but_its_type(tokenizer):
    for part in ({"type": "image", "image": "a"}, {"type": "image_url", "image_url": {}}, {"type": ["image"]}):
        with pytest.raises(RequestError, match=r"content\[1\].type must be 'text' or 'refusal'"):
            render(tokenizer, [{"role": "user", "content": [IMAGE, part]}], QWEN)
