"""logprobs.text_offset of completions: characters of the text that is returned."""

from __future__ import annotations

import pytest

from jaxengine.checkpoint.default_model import default_model_path
from jaxengine.models.weights.gguf.file import GGUFFile
from jaxengine.requests.output.outputs import CompletionOutput, Logprob, RequestOutput
from jaxengine.requests.params.sampling_params import SamplingParams
from jaxengine.server.http.completions.output import ChoiceWriter
from jaxengine.server.http.completions.protocol import CompletionRequest
from jaxengine.tokens.tokenizer import Tokenizer
from tests.tables import each_row

TEXT = "Hi 😀 there<|im_end|> friend"


@pytest.fixture(scope="module")
def tokenizer():
    with GGUFFile(default_model_path()) as file:
        return Tokenizer.from_gguf(file.metadata)


def written(tokenizer, ids, text, sizes, prompt=None, by_id=False, params=None, **fields):
    """(text, tokens, offsets) of one choice, whose ids come in chunks of these sizes, the text with the last."""
    body = CompletionRequest(prompt="p", logprobs=0, **fields)
    writer = ChoiceWriter(body, params or SamplingParams(), tokenizer, by_id)
    prompt_text, prompt_ids = prompt or (None, [])
    scores = [None, *({each: Logprob(-1.0, 1, tokenizer.decode([each], False))} for each in prompt_ids[1:])]
    said, tokens, offsets, at = "", [], [], 0
    for size in sizes:
        part = ids[at : at + size]
        at += size
        logprobs = [{each: Logprob(-1.0, 1, tokenizer.decode([each], False))} for each in part]
        completion = CompletionOutput(0, text if at >= len(ids) else "", part, logprobs=logprobs)
        output = RequestOutput("r", prompt_text, prompt_ids, [completion], False, prompt_logprobs=scores)
        choice = writer.choice(0, output, completion)
        said += choice["text"]
        tokens += choice["logprobs"]["tokens"]
        offsets += choice["logprobs"]["text_offset"]
    assert at >= len(ids) and len(tokens) == len(offsets)
    return said, tokens, offsets


@each_row(("by_id", "whole"), [(False, True), (True, True), (False, False), (True, False)])
def test_offsets_are_characters_of_the_text(tokenizer, by_id, whole):
    """However tokens are named and chunks are cut, and where several tokens are one character."""
    for skip, text in ((True, TEXT.replace("<|im_end|>", "")), (False, TEXT)):
        ids = tokenizer.encode(TEXT)
        params = SamplingParams(skip_special_tokens=skip)
        sizes = [len(ids)] if whole else [1] * len(ids)
        said, tokens, offsets = written(tokenizer, ids, text, sizes, by_id=by_id, params=params)
        assert said == text and all(each.startswith("token_id:") for each in tokens) == by_id
        names = [tokenizer.decode([each], False) for each in ids]
        for word in ("Hi", " there", " friend"):
            assert offsets[names.index(word)] == text.index(word), word
        assert offsets[names.index("<|im_end|>")] == text.index(" there") + len(" there")
        begin, end = names.index("Hi") + 1, names.index(" there")
        assert end - begin >= 2 and {text[each] for each in offsets[begin:end]} <= {" ", "😀"}


def test_an_output_follows_its_echoed_prompt(tokenizer):
    """Special tokens count where the text of the prompt has them."""
    ids, output = tokenizer.encode("Hi 😀 there"), tokenizer.encode(" friend")
    started = [1, *ids]
    assert tokenizer.decode([1], False) == "<|im_start|>"
    for prompt, prompt_ids, second in (
        ("Hi 😀 there", ids, 2),
        ("Hi 😀 there", started, 0),
        ("<|im_start|>Hi 😀 there", started, 12),
        (None, started, 12),
    ):
        said, tokens, offsets = written(tokenizer, output, " friend", [len(output)], (prompt, prompt_ids), echo=True)
        assert offsets[0] == 0 and offsets[1] == second, (prompt, offsets)
        assert offsets[tokens.index(" there")] == said.index(" there")
        assert offsets[tokens.index(" friend")] == said.index(" friend")


def test_a_text_without_a_detokenizer_has_no_places(tokenizer):
    ids = tokenizer.encode("Hi there")
    _, _, offsets = written(tokenizer, ids, "", [len(ids)], params=SamplingParams(detokenize=False))
    assert set(offsets) == {0}
