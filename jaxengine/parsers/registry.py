"""Table of the parsers of tool calls, by vLLM's names, and look-up of all parsers."""

from __future__ import annotations

import re
import secrets
import string
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from jaxengine.config.engine_config import ConfigError
from jaxengine.parsers.reasoning_rows import REASONING_PARSERS, ReasoningFormat, ReasoningRow
from jaxengine.parsers.scan.call_grammar import CallGrammar, Schema
from jaxengine.parsers.scan.call_start import CallStarts, listed_starts
from jaxengine.parsers.scan.events import OutputParser
from jaxengine.parsers.scan.harmony import END_SAMPLING, INVOKE, MUSE, MUSE_GLIMMER, STOP_WORDS, HarmonyWords
from jaxengine.parsers.tools import elements as tool_elements
from jaxengine.parsers.tools import gemma as tool_gemma
from jaxengine.parsers.tools import harmony as tool_harmony
from jaxengine.parsers.tools import hermes as tool_hermes
from jaxengine.parsers.tools import json_list as tool_json_list
from jaxengine.parsers.tools import llama3 as tool_llama3
from jaxengine.parsers.tools import messages as tool_messages
from jaxengine.parsers.tools import mistral as tool_mistral
from jaxengine.parsers.tools import parameter_words as words_of
from jaxengine.parsers.tools import parameters as tool_parameters
from jaxengine.parsers.tools import pythonic as tool_pythonic
from jaxengine.parsers.tools import sections as tool_sections

AUTO = "auto"
# Words of formats that a checkpoint may write with a suffix of its own.
_SUFFIXED = re.compile(r"<(?:think|tool_calls?|arg_key|arg_value)(:[^\s<>]+)>")


def call_ids() -> Iterator[str]:
    """Yield new ids of tool calls endlessly: "chatcmpl-tool-" and 32 hexadecimal digits."""
    while True:
        yield f"chatcmpl-tool-{uuid.uuid4().hex}"


def short_call_ids() -> Iterator[str]:
    """Yield new ids in the form that Mistral's chat templates require: nine letters and digits."""
    while True:
        yield "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


@dataclass(frozen=True)
class ToolFormat:
    """Format of tool calls.

    Attributes:
      parser: class that is called with new ids; for a typed format also with the functions' schemas.
      models: names of the models that use it, for documentation.
      grammar: yields rules for calls, with the top rule `calls`; raises ValueError for functions that the format cannot
        call. None: calls are separate from the answer, and only the answer is constrained by a grammar.
      forced_grammar: yields rules for entire outputs, with the top rule `start`, when a call is required; None: a
        required call is written as JSON of this engine's form.
      ids: returns an iterator of new call ids.
      starts: yields the beginnings of calls of a function, see CallStarts.words; None: they are not words.
      typed: whether the parser needs the functions, because values are plain text, whose types are in the schemas, or
        because a call is recognised by a function's name.
      special_tokens: whether calls are marked with special tokens, which detokenised text must include.
      stop_words: tokens that end an output, in addition to those of the model's configuration.
      template: words of a chat template, all of which must occur for "auto" to select the format.
      suffixed: returns the format for a checkpoint whose words end with a suffix (see suffix_of).
    """

    parser: Callable[..., OutputParser]
    models: str
    grammar: Callable[[CallGrammar], Iterator[str]] | None
    forced_grammar: Callable[[CallGrammar], Iterator[str]] | None = None
    ids: Callable[[], Iterator[str]] = call_ids
    starts: Callable[[str], Iterator[tuple[str, ...]]] | None = None
    typed: bool = False
    special_tokens: bool = False
    stop_words: tuple[str, ...] = ()
    template: tuple[str, ...] = ()
    suffixed: Callable[[str], ToolFormat] | None = None

    def open(self, functions: Mapping[str, Schema]) -> OutputParser:
        """Return a parser for one output, with new ids. functions: schemas of arguments, by function name."""
        return self.parser(self.ids(), functions) if self.typed else self.parser(self.ids())

    def call_starts(self, functions: Collection[str]) -> CallStarts:
        """Return the CallStarts of these functions: their names, and the texts with which calls of them begin in this
        format.
        """
        words = () if self.starts is None else tuple(words for name in functions for words in self.starts(name))
        return CallStarts(functions, words)


def _json_list(models: str, begins: tuple[str, ...], end: str = "", bare: bool = False, **fields: Any) -> ToolFormat:
    """Return the format of calls in a JSON list. begins, end, bare: arguments of JsonListToolParser. models, fields:
    fields of ToolFormat.
    """
    return ToolFormat(
        partial(tool_json_list.JsonListToolParser, begins=begins, end=end, bare=bare),
        models,
        partial(tool_json_list.grammar, begins=begins, end=end),
        starts=partial(listed_starts, begins),
        **fields,
    )


def _other_objects(
    models: str, call: tool_json_list.ListedCall, words: tuple[str, str], template: tuple[str, ...], **fields: Any
) -> ToolFormat:
    """Return the format of calls in a JSON list between two special tokens (`words`), whose objects have the form
    `call`. models, template, fields: fields of ToolFormat.
    """
    return ToolFormat(
        partial(tool_json_list.JsonListToolParser, begins=words[:1], end=words[1], call=call),
        models,
        partial(tool_json_list.grammar, begins=words[:1], end=words[1], call=call),
        special_tokens=True,
        template=template,
        **fields,
    )


def _gemma(models: str, words: tool_gemma.GemmaWords) -> ToolFormat:
    """Return the format of calls in Gemma's notation with these words. models: field of ToolFormat."""
    return ToolFormat(
        partial(tool_gemma.GemmaToolParser, words=words),
        models,
        partial(tool_gemma.grammar, words=words),
        starts=partial(tool_gemma.starts, words=words),
        typed=True,
        special_tokens=True,
        template=(words.begin,),
    )


def _section(models: str, words: tool_sections.SectionWords, template: tuple[str, ...]) -> ToolFormat:
    """Return the format of calls in a section with these words. models, template: fields of ToolFormat."""
    return ToolFormat(
        partial(tool_sections.SectionToolParser, words=words),
        models,
        partial(tool_sections.grammar, words=words),
        typed=True,
        starts=partial(tool_sections.starts, words=words),
        special_tokens=True,
        template=template,
    )


def _parameters(models: str, words: words_of.ParameterWords, template: tuple[str, ...]) -> ToolFormat:
    """Return the format of calls with plain-text arguments and these words. models, template: fields of ToolFormat."""
    return ToolFormat(
        partial(tool_parameters.ParameterToolParser, words=words),
        models,
        partial(tool_parameters.grammar, words=words),
        starts=partial(tool_parameters.starts, words=words),
        typed=True,
        special_tokens=True,
        template=template,
    )


def _pythonic(
    models: str, words: tuple[str, str], brackets: bool = True, nested: bool = False, **fields: Any
) -> ToolFormat:
    """Return the format of calls in Python's notation. words, brackets, nested: arguments of PythonicToolParser.
    models, fields: fields of ToolFormat.
    """
    return ToolFormat(
        partial(tool_pythonic.PythonicToolParser, words=words, brackets=brackets, nested=nested),
        models,
        partial(tool_pythonic.grammar, words=words, brackets=brackets),
        starts=partial(tool_pythonic.starts, words=words, brackets=brackets),
        **fields,
    )


def _objects(
    models: str,
    begin: str,
    end: str,
    space: str,
    key: str = "arguments",
    others: tuple[str, ...] = (),
    **fields: Any,
) -> ToolFormat:
    """Return the format of JSON objects between the words `begin` and `end` ("": none).

    space: text inside of the words. key: name of the arguments in a forced call. others: alternatives of `begin`.
    models, fields: fields of ToolFormat.
    """
    return ToolFormat(
        partial(tool_hermes.HermesToolParser, begin=begin, end=end, others=others),
        models,
        partial(tool_hermes.grammar, begin=begin, end=end, space=space, key=key, others=others),
        starts=partial(tool_hermes.starts, begin=begin, others=others),
        **fields,
    )


def _hy_v4(suffix: str = "") -> ToolFormat:
    """Return the format of Hy4's calls, with a checkpoint's suffix of its words."""
    return _parameters("Hy4", words_of.hy_v4(suffix), ())


_LLAMA3 = partial(ToolFormat, tool_llama3.Llama3ToolParser, grammar=tool_llama3.grammar)
_HERMES = partial(ToolFormat, tool_hermes.HermesToolParser, grammar=tool_hermes.grammar, starts=tool_hermes.starts)
_COHERE = partial(_other_objects, call=tool_json_list.COHERE, words=("<|START_ACTION|>", "<|END_ACTION|>"))
_QWEN3_CODER = _parameters(
    "Qwen3-Coder, Qwen3.5, Nemotron 3, Step 3.5 and 5, Granite 4.2",
    words_of.QWEN3_CODER,
    ("<function=", "<parameter=", "<tool_call>", "</function>"),
)


def _muse(models: str, messages: HarmonyWords, template: tuple[str, ...] = ()) -> ToolFormat:
    """Return the format of calls in Muse's messages. models, template: fields of ToolFormat."""
    return ToolFormat(
        partial(tool_messages.MuseToolParser, messages=messages),
        models,
        None,
        tool_messages.muse_forced_grammar,
        typed=True,
        special_tokens=True,
        stop_words=tool_messages.MUSE_STOP_WORDS,
        template=template,
    )


_MUSE = _muse("Muse Spark", MUSE)

TOOL_PARSERS: dict[str, ToolFormat] = {
    "hermes": _HERMES("Hermes 2 and 3, Qwen2.5, Qwen3", template=("<tool_call>", '"arguments')),
    "qwen3_json": _HERMES("Qwen2.5, Qwen3, as `hermes`"),
    "llama3_json": _LLAMA3("Llama 3.1, 3.2", special_tokens=True, template=("Environment: ipython", '"parameters"')),
    "llama4_json": _LLAMA3("Llama 4, told to write JSON", special_tokens=True),
    "mistral": ToolFormat(
        tool_mistral.MistralToolParser,
        "Mistral, Ministral, Magistral, Devstral",
        tool_mistral.grammar,
        starts=tool_mistral.starts,
        ids=short_call_ids,
        special_tokens=True,
        template=("[TOOL_CALLS]",),
    ),
    "pythonic": ToolFormat(tool_pythonic.PythonicToolParser, "Llama 3.2, ToolACE", tool_pythonic.grammar),
    "openai": ToolFormat(
        tool_harmony.HarmonyToolParser,
        "gpt-oss",
        None,
        tool_harmony.forced_grammar,
        typed=True,
        special_tokens=True,
        stop_words=STOP_WORDS,
        template=("<|channel|>", "<|message|>", "commentary"),
    ),
    "beam": ToolFormat(
        tool_messages.BeamToolParser,
        "Beam",
        None,
        tool_messages.beam_forced_grammar,
        typed=True,
        special_tokens=True,
        stop_words=STOP_WORDS,
        template=("<|channel|>", "<|message|>", "<rfl:parameter name="),
    ),
    "muse_glimmer": _muse("Muse Glimmer", MUSE_GLIMMER, ("<atem:function_calls>", "<|message|>")),
    "muse": _MUSE,
    "musespark1x": _MUSE,
    "inkling": ToolFormat(
        tool_harmony.InklingToolParser,
        "Inkling",
        None,
        tool_harmony.inkling_forced_grammar,
        special_tokens=True,
        stop_words=(END_SAMPLING,),
        template=(INVOKE,),
    ),
    "deepseek_v3": _section("DeepSeek V3, R1", tool_sections.DEEPSEEK_V3, ("<｜tool▁calls▁begin｜>", "```json")),
    "deepseek_v31": _section("DeepSeek V3.1", tool_sections.DEEPSEEK_V31, ("<｜tool▁calls▁begin｜>",)),
    "deepseek_v32": _parameters("DeepSeek V3.2", words_of.DEEPSEEK_V32, ("｜DSML｜",)),
    "deepseek_v4": _parameters("DeepSeek V4", words_of.DEEPSEEK_V4, ("｜DSML｜", "tool_calls>")),
    "deepseek_v41": _parameters("DeepSeek V4.1", words_of.DEEPSEEK_V41, ("｜DSML｜", " calls>")),
    "kimi_k2": _section("Kimi K2", tool_sections.KIMI_K2, ("<|tool_calls_section_begin|>",)),
    "plamo3": _section("PLaMo 3", tool_sections.PLAMO3, (tool_sections.PLAMO3.section[0],)),
    "qwen3_coder": _QWEN3_CODER,
    "qwen3_xml": _QWEN3_CODER,
    "step3": _parameters("Step 3", words_of.STEP3, ("<steptml:invoke",)),
    "step3p5": _QWEN3_CODER,
    "step5": _QWEN3_CODER,
    "mimo": _parameters("MiMo", words_of.MIMO, ()),
    "seed_oss": _parameters("Seed-OSS", words_of.SEED_OSS, ("<seed:tool_call>",)),
    "minimax_m2": _parameters("MiniMax M2", words_of.MINIMAX_M2, ("<minimax:tool_call>",)),
    "glm45": _parameters("GLM-4.5, GLM-4.6", words_of.GLM45, ("<arg_key>", "<arg_value>")),
    "glm47": _parameters("GLM-4.7", words_of.GLM45, ()),
    "ling3": _parameters("Ling 3", words_of.GLM45, ()),
    "poolside_v1": _parameters("Laguna", words_of.GLM45, ()),
    "hy_v3": _parameters("Hy3", words_of.HY_V3, ("<tool_sep>",)),
    "hy_v4": replace(_hy_v4(), suffixed=_hy_v4),
    "k2_horizon": _parameters(
        "K2 Horizon, in the template's default tool_call_format", words_of.K2_HORIZON, ("<ifm|tool_calls>",)
    ),
    "kimi_k3": _parameters("Kimi K3", words_of.KIMI_K3, ("<|open|>", "argument key=")),
    "minimax_m3": ToolFormat(
        tool_elements.ElementToolParser,
        "MiniMax M3",
        tool_elements.grammar,
        starts=partial(tool_parameters.starts, words=tool_elements.WORDS),
        typed=True,
        special_tokens=True,
        template=(tool_elements.TAG, "<invoke name="),
    ),
    "minicpm5": _parameters("MiniCPM5", words_of.MINICPM5, ("<function name=", "<param name=")),
    "dots": _parameters("dots", words_of.DOTS, ("<dots_function_call>",)),
    "gemma4": _gemma("Gemma 4", tool_gemma.GEMMA4),
    "functiongemma": _gemma("FunctionGemma", tool_gemma.FUNCTION_GEMMA),
    "granite": _json_list(
        "Granite 3",
        ("<|tool_call|>", "<tool_call>"),
        bare=True,
        special_tokens=True,
        template=("<|tool_call|>", "<|start_of_role|>"),
    ),
    "granite4": _HERMES("Granite 4", special_tokens=True, template=("<tool_call>", '"arguments', "<|start_of_role|>")),
    "granite-20b-fc": _objects("Granite 20B functioncalling", "<function_call>", "", " "),
    "gigachat3": _objects(
        "GigaChat 3 and 3.1",
        "<|function_call|>",
        "",
        "",
        others=("<|message_sep|>\n\nfunction call<|role_sep|>\n", "function call<|role_sep|>\n"),
        special_tokens=True,
        template=("<|role_sep|>", "function call"),
    ),
    "phi4_mini_json": _json_list("Phi-4-mini", ("functools",), template=("<|tool|>", "<|/tool|>")),
    "hunyuan_a13b": _json_list(
        "Hunyuan-A13B", ("<tool_calls>",), "</tool_calls>", template=("<tool_calls>", "<answer>")
    ),
    "jamba": _json_list("Jamba 1.5", ("<tool_calls>",), "</tool_calls>", template=("<tool_calls>", "<|bom|>")),
    "ernie45": _objects(
        "ERNIE 4.5", "<tool_call>", "</tool_call>", "\n", template=("<tool_call>", "<response>", "</response>")
    ),
    "internlm": _objects(
        "InternLM 2, 2.5, 3",
        "<|action_start|><|plugin|>",
        "<|action_end|>",
        "\n",
        "parameters",
        special_tokens=True,
        template=("<|action_start|>", "<|plugin|>"),
    ),
    "cohere_command3": _COHERE("Command R7B, Command A", template=("<|START_ACTION|>", "<|START_RESPONSE|>")),
    "cohere_command4": _COHERE("Command A+", template=("<|START_ACTION|>", "<|START_TEXT|>")),
    "apertus": _other_objects(
        "Apertus",
        tool_json_list.APERTUS,
        ("<|tools_prefix|>", "<|tools_suffix|>"),
        ("<|tools_prefix|>",),
        starts=partial(tool_json_list.keyed_starts, ("<|tools_prefix|>",)),
    ),
    "longcat": _objects(
        "LongCat-Flash",
        "<longcat_tool_call>",
        "</longcat_tool_call>",
        "\n",
        special_tokens=True,
        template=("<longcat_tool_call>",),
    ),
    "llama4_pythonic": _pythonic(
        "Llama 4",
        tool_pythonic.LLAMA4,
        special_tokens=True,
        template=("<|python_start|>", "<|python_end|>", "<|header_start|>"),
    ),
    "lfm2": _pythonic(
        "LFM2, LFM2.5", tool_pythonic.LFM2, nested=True, special_tokens=True, template=("<|tool_list_start|>",)
    ),
    "olmo3": _pythonic("Olmo 3", tool_pythonic.OLMO3, brackets=False, template=("<function_calls>",)),
    "xlam": ToolFormat(
        partial(tool_llama3.Llama3ToolParser, tags=tool_llama3.XLAM_TAGS), "xLAM 2", tool_llama3.grammar
    ),
}


def tool_format(name: str | None, suffix: str = "") -> ToolFormat | None:
    """Return the format of a tool parser; None for None and "auto". suffix: result of `suffix_of`, for formats that
    have one. Raises ConfigError for an unknown name.
    """
    _check("tool_call_parser", name, TOOL_PARSERS)
    row = TOOL_PARSERS.get(name or AUTO)
    return row if row is None or row.suffixed is None or not suffix else row.suffixed(suffix)


def reasoning_format(name: str | None, suffix: str = "") -> ReasoningFormat | None:
    """Return the format of a reasoning parser; None for None and "auto". suffix: result of `suffix_of`, for formats
    that have one. Raises ConfigError for an unknown name.
    """
    _check("reasoning_parser", name, REASONING_PARSERS)
    row = REASONING_PARSERS.get(name or AUTO)
    if row is None or row.suffixed is None or not suffix:
        return None if row is None else row.format
    return row.suffixed(suffix)


def suffix_of(words: Iterable[str]) -> str:
    """Return the suffix, its colon included, with which a checkpoint writes the words of its formats, such as
    ":6124c78e" for one with <think:6124c78e>; "" if it has none. words: the added tokens of its vocabulary.
    """
    return next((found[1] for found in map(_SUFFIXED.fullmatch, words) if found), "")


def _check(option: str, name: str | None, known: Mapping[str, object]) -> None:
    """Raise ConfigError, which names `option`, for a name that is neither in `known` nor "auto" nor None."""
    if name not in (None, AUTO, *known):
        raise ConfigError(option, name, ", ".join([AUTO, *known]))


def by_template(rows: Mapping[str, ToolFormat] | Mapping[str, ReasoningRow], template: str) -> str | None:
    """Return the name of the row that "auto" selects for a chat template, all of whose words are in the template; None
    if there is none. Of several rows it is the one with the most words.
    """
    fitting = [name for name, row in rows.items() if row.template and all(word in template for word in row.template)]
    return max(fitting, key=lambda name: len(rows[name].template), default=None)
