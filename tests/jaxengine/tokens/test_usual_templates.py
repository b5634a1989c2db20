"""Chat templates of DeepSeek V3.2, V4 and V4.1, against what DeepSeek's own encoders make of conversations."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import tokenizers
import tokenizers.models

from jaxengine.checkpoint.input_source import InputSource
from jaxengine.config.checks import TOKENIZER_MODES
from jaxengine.config.engine_config import EngineConfig
from jaxengine.models.params.files import FORMATS
from jaxengine.parsers.reasoning_rows import REASONING_PARSERS
from jaxengine.parsers.registry import TOOL_PARSERS, by_template
from jaxengine.scheduler.base.errors import RequestError
from jaxengine.tokens.chat_template import render_chat
from jaxengine.tokens.template_renderer import TemplateRenderer
from jaxengine.tokens.usual_templates.registry import TEMPLATE_MODES, USUAL_TEMPLATES, usual_template
from tests.fixtures.deepseek_chats import CONVERSATIONS, PREAMBLE, RECORDED, SETTINGS, TOOLS

CHATS = json.loads((Path(__file__).parents[2] / "fixtures" / RECORDED).read_text())
RENDERER = TemplateRenderer()
# What V3.2's program refuses, ends without the beginning of an answer, or, of results, writes as they come.
LOOSER = {"answer last", "instruction alone", "instruction last", "not an object", "results in another order"}


def rendered(model: str, messages, tools=None, *, continues: bool = False, prompts: bool = True, **variables) -> str:
    usual = usual_template(f"deepseek_{model}", "", True)
    assert usual is not None
    return render_chat(
        RENDERER,
        usual.source,
        {"bos_token": "<｜begin▁of▁sentence｜>", "eos_token": "<｜end▁of▁sentence｜>"},
        messages,
        add_generation_prompt=prompts and not continues,
        continue_final_message=continues,
        tools=tools,
        chat_template=None,
        variables=variables,
        dialect=usual.dialect,
    )


@pytest.mark.parametrize("model", ["v4", "v41", "v32"])
def test_conversations_are_those_of_the_encoders(model):
    for setting, expected in CHATS[model].items():
        for name, prompt in expected.items():
            messages, has_tools = CONVERSATIONS[name]
            if prompt is None and name not in LOOSER:
                with pytest.raises(RequestError, match="is not supported there"):
                    rendered(model, messages, **SETTINGS[setting])
                continue
            text = rendered(model, messages, TOOLS if has_tools else None, **SETTINGS[setting])
            if model != "v32" or name not in LOOSER:
                assert text == prompt.replace(PREAMBLE, CHATS["preambles"][model]), (setting, name)


def test_ends_efforts_and_continued_answers():
    user, answer = {"role": "user", "content": "x"}, {"role": "assistant", "content": "c ", "reasoning": "R"}
    for model in ("v4", "v41"):
        thought = rendered(model, [user])
        assert thought.endswith("<｜User｜>x<｜Assistant｜><think>")
        assert thought == rendered(model, [user], enable_thinking=True, reasoning_effort="xhigh")
        short = rendered(model, [user], reasoning_effort="low")
        assert short != thought and short == rendered(model, [user], reasoning_effort="medium")
        unthought = rendered(model, [user], thinking=True, reasoning_effort="none")
        assert unthought == "<｜begin▁of▁sentence｜><｜User｜>x<｜Assistant｜></think>"
        whole = rendered(model, [user, answer, user, answer], prompts=False, drop_thinking=False)
        assert whole.count("<think>R</think>c <｜end▁of▁sentence｜>") == 2
        assert rendered(model, [user, answer], continues=True).endswith("<｜Assistant｜><think>R</think>c ")
        for wrong in ("most", 101, True, 0.5):
            with pytest.raises(RequestError, match="reasoning_effort must be one of none, minimal, low, .*max"):
                rendered(model, [user], reasoning_effort=wrong)
    assert "<｜System｜>Reasoning Effort: 42 (" in rendered("v41", [user], reasoning_effort=42)
    assert rendered("v32", [user]).endswith("<｜User｜>x<｜Assistant｜></think>")
    assert rendered("v32", [user], enable_thinking=True).endswith("<｜Assistant｜><think>")
    assert rendered("v32", [user, answer], continues=True, thinking=True).endswith("<think>R</think>c ")


def test_templates_are_chosen_by_mode_or_class():
    """A checkpoint's own template counts unless a mode names another; `auto` finds the model's own parsers in it."""
    assert (*FORMATS, *TEMPLATE_MODES, "inkling") == TOKENIZER_MODES
    for mode, architecture in TEMPLATE_MODES.items():
        usual = usual_template("auto", architecture, False)
        assert usual is usual_template(mode, "LlamaForCausalLM", True) is USUAL_TEMPLATES[architecture]
        assert usual_template("auto", architecture, True) is usual_template("hf", "LlamaForCausalLM", False) is None
        assert usual is not None and by_template(TOOL_PARSERS, usual.source) == mode
        reasoning = by_template(REASONING_PARSERS, usual.source)
        assert reasoning == ("deepseek_v3" if mode == "deepseek_v32" else mode)


def test_a_models_tokenizer_has_the_template_and_what_goes_with_it(tmp_path):
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, "a"))
    backend.save(str(tmp_path / "tokenizer.json"))
    parts = [{"type": "text", "text": "x"}, {"type": "text", "text": "y"}]
    for mode, architecture, own, end in (
        ("auto", "DeepseekV4ForCausalLM", None, "<｜User｜>x\n\ny<｜Assistant｜><think>"),
        ("auto", "DeepseekV4ForCausalLM", "{{ messages[0]['content'] }}", "x\ny"),
        ("deepseek_v32", "LlamaForCausalLM", "{{ messages[0]['content'] }}", "<｜User｜>x\ny<｜Assistant｜></think>"),
        ("inkling", "InklingForConditionalGeneration", "{{ messages[0]['content'] }}", "x\ny"),
    ):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": own} if own else {}))
        source = InputSource(path=tmp_path, config=SimpleNamespace(architecture=architecture), generation_defaults={})
        tokenizer = source.load_tokenizer(EngineConfig(tokenizer_mode=mode))
        for format_ in ("auto", "openai") if "<｜User｜>" in end else ("auto",):  # whose contents are texts
            text = tokenizer.apply_chat_template([{"role": "user", "content": parts}], content_format=format_)
            assert text.endswith(end), (mode, format_, text)


def test_deepseek_vl2_writes_roles_with_colons():
    usual = usual_template("auto", "DeepseekVLV2ForCausalLM", False)
    assert usual is not None
    options = {"add_generation_prompt": True, "continue_final_message": False, "tools": None, "chat_template": None}
    tokens = {"bos_token": "<b>", "eos_token": "<e>"}
    turns = (("system", "S"), ("user", "<image>\nQ"), ("assistant", "A"), ("user", "R"))
    messages = [{"role": role, "content": text} for role, text in turns]
    options |= {"variables": {}, "dialect": usual.dialect}
    text = render_chat(RENDERER, usual.source, tokens, messages, **options)
    assert text == "<b>S\n\n<|User|>: <image>\nQ\n\n<|Assistant|>: A<e><|User|>: R\n\n<|Assistant|>:"
    with pytest.raises(RequestError, match="a message of tool is not supported there"):
        render_chat(RENDERER, usual.source, tokens, [*messages, {"role": "tool", "content": "x"}], **options)
