"""structured_outputs_config acts on requests that say nothing of the kind."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any, cast

import pytest

from jaxengine import LLM, ConfigError, SamplingParams
from jaxengine.requests.reasoning import after_reasoning
from jaxengine.server.base.options import ServerConfig
from jaxengine.server.http.chat.run import ChatServer

# The request alone would be refused: no grammar can enforce uniqueItems.
SCHEMA = {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 3, "uniqueItems": True}


def test_what_the_engine_sets_reaches_a_request(chat_options):
    config = {"lenient": True, "disable_any_whitespace": True, "reasoning_parser": "qwen3"}
    params = SamplingParams(temperature=1, seed=3, max_tokens=30, structured_outputs={"json": SCHEMA})
    with LLM(**chat_options, structured_outputs_config=config) as llm:
        text = llm.generate("Answers:", params, use_tqdm=False)[0].outputs[0].text
        # A prompt that opens reasoning: the grammar waits for its end; one that has closed it: it does not.
        wanted: dict[str, Any] = {"temperature": 0, "max_tokens": 8, "structured_outputs": {"regex": "[01]+"}}
        ids = llm.get_tokenizer().encode("Hm.<think></think>")
        free, *bound = llm.generate(["Hm.<think>", "Hm.<think></think>", ids], SamplingParams(**wanted), use_tqdm=False)
        assert set(free.outputs[0].text) - set("01")
        assert not {letter for each in bound for letter in each.outputs[0].text} - set("01")
        empty = SamplingParams(max_tokens=8, structured_outputs={"regex": ""})
        (ended,) = llm.generate("Hm.<think></think>", empty, use_tqdm=False)[0].outputs
        assert (ended.text, ended.finish_reason) == ("", "stop")
        with pytest.raises(ConfigError, match="is for engines without a server"):
            ChatServer.open(cast("Any", SimpleNamespace(inputs=llm.core.inputs)), ServerConfig())
    assert json.dumps(json.loads(text), separators=(",", ":")) == text
    with pytest.raises(ConfigError, match="structured_outputs_config.reasoning_parser is 'qwen'; allowed: deepseek_r1"):
        LLM(**chat_options, structured_outputs_config={"reasoning_parser": "qwen"})


def test_of_a_long_prompt_only_the_end_is_decoded():
    def decode(ids: list[int], **_: Any) -> str:
        assert len(ids) < 5000
        return "".join(map(chr, ids))

    tokenizer: Any = SimpleNamespace(added_words=(), decode=decode)
    params = SamplingParams(structured_outputs={"regex": "a"})
    for end, begin in (("<think>\n", None), ("", "<think>")):
        ids = [*map(ord, "b" * 100_000 + end)]
        asked: Any = after_reasoning(params, "qwen3", None, ids, tokenizer).structured_outputs
        assert (asked.reasoning_end, asked.reasoning_begin) == ((("</think>",),), begin)
