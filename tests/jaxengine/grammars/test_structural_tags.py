"""Structural tags: what a model may write under each format, token by token, and tags that are refused."""

from __future__ import annotations

import json

import llguidance
import pytest

from jaxengine.checkpoint.default_model import default_model_path
from jaxengine.grammars.tag_rules import lark_of
from jaxengine.grammars.worker_process import compile_grammar
from jaxengine.models.weights.gguf.file import GGUFFile
from jaxengine.requests.structured.params import StructuredOutputsParams
from jaxengine.scheduler.base.errors import RequestError
from jaxengine.tokens.tokenizer import Tokenizer
from tests.tables import each_row

CITY = {"type": "object", "properties": {"city": {"type": "string"}}}
CALL = '<f=weather>{"city": "Zürich"}</f>'
ANY, NUMBER = {"type": "any_text"}, {"type": "regex", "pattern": "[0-9]/[a-z]+"}
WEATHER = {"begin": "<f=weather>", "content": {"type": "json_schema", "json_schema": CITY}, "end": "</f>"}
TIME = {"begin": "<t=", "content": NUMBER, "end": ["</t>", "|"]}
CALLS = {"type": "triggered_tags", "triggers": ["<f=", "<t="], "tags": [WEATHER, TIME]}
ONE = {"type": "const_string", "value": "1"}


def tagged(begin, content, end):
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def copied(depth):
    """Tags in tags with two ends each, so that the innermost content is needed 2 ** depth times."""
    return tagged("a", copied(depth - 1), ["b", "c"]) if depth else ANY


# Text without a form, of which nothing says where it ends.
ENDLESS = [
    tagged("<a>", {"type": "star", "content": ANY}, "</a>"),
    {"type": "sequence", "elements": [{"type": "or", "elements": [ANY, ONE]}, ONE]},
    {"type": "sequence", "elements": [tagged("<a>", ANY, ""), ONE]},
    {"type": "tags_with_separator", "tags": [tagged("<a>", ANY, "")], "separator": ";"},
]
# Format -> outputs that it takes, and others, of which some may go on.
FORMATS = [
    (CALLS, ["", "Hi <f", CALL, f"Hi {CALL} and <t=3/a| {CALL}."], ["<f=x", CALL[:-1], "<t=33", f"{CALL}<t=3/a</"]),
    (CALLS | {"at_least_one": True}, [CALL, f"{CALL} Hi <t=3/a|"], ["", "Hi", f"{CALL}<f=x"]),
    (CALLS | {"stop_after_first": True}, ["Hi", f"Hi {CALL}"], [f"{CALL} Hi", "<f=x"]),
    (CALLS | {"stop_after_first": True, "at_least_one": True}, [CALL], ["Hi", f"{CALL} "]),
    (tagged("<a>", CALLS, "</a>"), ["<a></a>", f"<a>Hi {CALL}</a>"], ["<a>", "Hi", f"<a>{CALL}</a>."]),
    (tagged("<a>", ANY, "</a>"), ["<a></a>", "<a> <b </a>"], ["<a>b", "<a></a>b", "a"]),
    # A token of the vocabulary, which no text can write, by its text and as a part of a word.
    (tagged("<|im_start|>think\n", ANY, "<file_sep>"), ["<|im_start|>think\nHm <file_sep>"], ["<|im_start|>t", "Hm"]),
    (
        CALLS | {"triggers": ["<|im_start|>"], "tags": [tagged("<|im_start|>f", ONE, "<file_sep>\n")]},
        ["Hi", "Hi <|im_start|>f1<file_sep>\n ok"],
        ["Hi <|im_start|>g", "<|im_start|>f1<file_sep>"],
    ),
    (
        tagged({"type": "token", "token": "<|im_start|>"}, ONE, {"type": "token", "token": 5}),
        ["<|im_start|>1<file_sep>"],
        ["1", "<|im_start|>1"],
    ),
    (
        {"type": "sequence", "elements": [tagged("<a>", ANY, "</a>"), {"type": "or", "elements": [ONE, NUMBER]}]},
        ["<a>b</a>1", "<a></a>3/xy"],
        ["<a>b</a>", "1", "<a></a>2"],
    ),
    ({"type": "sequence", "elements": [ANY, ONE, ANY]}, ["a1", "1", "a1b1"], ["a"]),
    ({"type": "sequence", "elements": [ANY, tagged("<a>", ANY, "</a>")]}, ["b<a>c</a>"], ["b", "<a>c</a>d"]),
    ({"type": "tags_with_separator", "tags": [TIME], "separator": ", "}, ["", "<t=3/a|, <t=3/a</t>"], ["<t=3/a|, "]),
    (
        {"type": "tags_with_separator", "tags": [TIME], "separator": ";"}
        | dict.fromkeys(("at_least_one", "stop_after_first"), True),
        ["<t=3/a|"],
        ["", "<t=3/a|;"],
    ),
    # The token that ends sequences comes where a format may end.
    (tagged("<a>", ANY, "<|im_end|>"), ["<a>", "<a>b"], ["", "b"]),
    ({"type": "regex", "pattern": r"a\/b/\\"}, ["a/b/\\"], [r"a\/b/"]),
    # What follows ends a tag without an end of its own, and optional text.
    (tagged("<b>", tagged("<a>", ANY, ""), "</b>"), ["<b><a>c</b>"], ["<b><a>c", "<b><a>c</b>d"]),
    (tagged("<b>", {"type": "optional", "content": ANY}, "</b>"), ["<b></b>", "<b>c</b>"], ["<b>c", "<b></b>d"]),
    ({"type": "sequence", "elements": [ANY, ONE | {"value": ""}]}, ["", "a"], []),
    ({"type": "optional", "content": ONE}, ["", "1"], ["11"]),
    ({"type": "plus", "content": ONE}, ["1", "111"], ["", "2"]),
    ({"type": "star", "content": ONE}, ["", "11"], ["2"]),
    ({"type": "repeat", "content": ONE, "min": 2, "max": 3}, ["11", "111"], ["1", "1111"]),
    ({"type": "repeat", "content": ONE, "min": 0, "max": -1, "unknown": None}, ["", "1111"], ["2"]),
]


@pytest.fixture(scope="module")
def vocabulary():
    with GGUFFile(default_model_path()) as file:
        tokenizer = Tokenizer.from_gguf(file.metadata)
    return tokenizer.backend, llguidance.LLTokenizer(tokenizer.backend.to_str(), eos_token=tokenizer.eos_token_id)


def takes(vocabulary, tag, texts):
    """Whether the tag allows each text, and its end after it."""
    backend, tokens = vocabulary
    grammar = StructuredOutputsParams(structural_tag=tag).compiled_from(lambda text: ())
    matcher = llguidance.LLMatcher(tokens, compile_grammar(grammar.kind, grammar.text, {}, tokens), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    found = []
    for text in texts:
        one, ids = matcher.deep_copy(), backend.encode(text, add_special_tokens=False).ids
        found.append(one.try_consume_tokens(ids) == len(ids) and one.is_accepting())
    return found


@each_row(("form", "right", "wrong"), FORMATS)
def test_what_a_format_allows(vocabulary, form, right, wrong):
    found = takes(vocabulary, {"type": "structural_tag", "format": form}, [*right, *wrong])
    assert found == [True] * len(right) + [False] * len(wrong)


def test_the_earlier_form_and_options_of_json(vocabulary):
    structures = [{"begin": "<f=weather>", "schema": CITY, "end": "</f>"}]
    tag = {"type": "structural_tag", "structures": structures, "triggers": ["<f="]}
    more = CALL.replace("}", ', "a": 1}')
    assert takes(vocabulary, json.dumps(tag), ["Hi", CALL, more, "<f=x"]) == [True, True, True, False]
    params = StructuredOutputsParams(structural_tag=tag)
    assert (
        "additionalProperties"
        in params.switched_on(["disable_additional_properties"]).compiled_from(lambda text: ()).text
    )


@each_row(
    ("tag", "field"),
    [
        ({}, "type must be 'structural_tag'"),
        ({"type": "structural_tag"}, "structures must be"),
        ({"type": "structural_tag", "structures": [{"begin": "a"}], "triggers": ["a"]}, "end must be a text"),
        ({"type": "structural_tag", "format": ANY, "triggers": ["a"]}, "triggers must be left out"),
        ({"type": "structural_tag", "structures": [{"begin": "a", "name": "b"}]}, "name must be left out"),
        *(
            ({"type": "structural_tag", "format": form}, field)
            for form, field in [
                (3, "the type of a format must be one of const_string, json_schema,"),
                ({"type": "grammar", "grammar": "x"}, "the type of a format must be one of"),
                ({"type": "const_string"}, "const_string.value must be given"),
                (ANY | {"max_chars": 3}, "any_text.max_chars must be left out"),
                ({"type": "json_schema", "json_schema": CITY, "style": "qwen_xml"}, "json_schema.style must be"),
                ({"type": "or", "elements": []}, "elements must be a list"),
                ({"type": "sequence", "elements": [ANY, ANY]}, "elements must be a const_string or a tag after"),
                (CALLS | {"triggers": ["<x"]}, "begin must be a text that begins with one of the triggers"),
                (CALLS | {"triggers": [""]}, "triggers must be a text"),
                (tagged("a", ANY, []), "end must be a text, or a list"),
                ({"type": "repeat", "content": ONE, "min": 2, "max": 1}, "repeat must be"),
                (CALLS | {"tags": [ANY]}, "tags must be a list of formats of the type tag, got 'any_text'"),
                (CALLS | {"at_least_one": "no"}, "triggered_tags.at_least_one must be true or false"),
                ({"type": "json_schema", "json_schema": [1]}, "json_schema must be a JSON schema"),
                *((form, "format must be followed by a const_string") for form in ENDLESS),
                (copied(30), "format must be smaller"),
            ]
        ),
    ],
)
def test_refused_by_name(tag, field):
    with pytest.raises(RequestError, match=f"^structured_outputs.structural_tag.{field}") as caught:
        StructuredOutputsParams(structural_tag=tag)
    assert caught.value.param == "structured_outputs"


def test_a_tag_is_cut_into_the_same_tokens_as_a_call():
    """PLaMo's and MiniMax M3's markers consist of tokens that stand in no brackets of their own."""

    class Vocabulary:
        eos_tokens = ()
        words = ("<|plamo:begin_", ":plamo|>", "]<]minimax[>[", "[ARGS]")

        def tokenize_str(self, text):
            return [self.words.index(text)] if text in self.words else [9, 9]

        def is_special_token(self, token_id):
            return token_id < len(self.words)

    text = "<|plamo:begin_tool_calls:plamo|>]<]minimax[>[<tool_call>[ARGS]"
    rules = lark_of(json.dumps([[{"word": text}]]), Vocabulary())
    assert rules == '<[0]> "tool_calls" <[1]> <[2]> "<tool_call>" <[3]>'
