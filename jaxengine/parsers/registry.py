"""Table of the parsers, by vLLM's names. A new parser is a file and a row, or only a row if just the words differ."""

from __future__ import annotations

import secrets
import string
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from jaxengine.config.engine_config import ConfigError
from jaxengine.parsers.reasoning.harmony import HarmonyFormat
from jaxengine.parsers.reasoning.think import ThinkFormat
from jaxengine.parsers.scan.call_grammar import CallGrammar, Schema
from jaxengine.parsers.scan.call_start import CallStarts, listed_starts
from jaxengine.parsers.scan.events import OutputParser, ReasoningParser
from jaxengine.parsers.scan.harmony import STOP_WORDS
from jaxengine.parsers.tools import gemma as tool_gemma
from jaxengine.parsers.tools import harmony as tool_harmony
from jaxengine.parsers.tools import hermes as tool_hermes
from jaxengine.parsers.tools import json_list as tool_json_list
from jaxengine.parsers.tools import llama3 as tool_llama3
from jaxengine.parsers.tools import mistral as tool_mistral
from jaxengine.parsers.tools import parameters as tool_parameters
from jaxengine.parsers.tools import pythonic as tool_pythonic
from jaxengine.parsers.tools import sections as tool_sections

AUTO = "auto"


def call_ids() -> Iterator[str]:
    """Yield new ids of tool calls endlessly."""
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

    def open(self, functions: Mapping[str, Schema]) -> OutputParser:
        """Return a parser for one output, with new ids. functions: schemas of arguments, by function name."""
        return self.parser(self.ids(), functions) if self.typed else self.parser(self.ids())

    def call_starts(self, functions: Collection[str]) -> CallStarts:
        """Return the CallStarts of these functions: their names, and the texts with which calls of them begin in this
        format.
        """
        words = () if self.starts is None else tuple(words for name in functions for words in self.starts(name))
        return CallStarts(functions, words)


class ReasoningFormat(Protocol):
    """Protocol of a format of reasoning.

    Attributes:
      special_tokens, stop_words: see ToolFormat.
      holds_calls: whether tools may be called before the answer.
    """

    @property
    def special_tokens(self) -> bool: ...
    @property
    def stop_words(self) -> tuple[str, ...]: ...
    @property
    def holds_calls(self) -> bool: ...

    def open(self, prompt: str, continued: str = "", *, calls: CallStarts | None = None) -> ReasoningParser:
        """Return a parser for one output that follows `prompt`.

        continued: the beginning of the answer, which the output continues; "" for a new answer. calls: calls that a
        following parser of the model's own tool calls will find; None: no parser follows, and no call ends reasoning.
        """
        ...

    def waits_for(self, prompt: str, continued: str = "") -> dict[str, Any]:
        """Return the fields of structured_outputs, for an output that follows `prompt` and continues the answer
        `continued` ("" for a new answer), with which its grammar begins after reasoning: reasoning_end and, where
        reasoning is optional, reasoning_begin; {} without reasoning.
        """
        ...

    def answers_after(self, prompt: str, continued: str = "", *, calls: bool = True) -> dict[str, Any] | None:
        """Return the fields of stop_after, for an output that follows `prompt` and continues the answer `continued` (""
        for a new answer), which tell where the answer begins; None if all of the output is the answer.

        calls: whether a parser of the model's own tool calls follows.
        """
        ...

    def limited_by(self, prompt: str, continued: str = "") -> dict[str, Any] | None:
        """Return the fields of thinking_words, for an output that follows `prompt` and continues the answer `continued`
        ("" for a new answer), with which a budget can limit its reasoning; None if it has no reasoning to limit.
        """
        ...


@dataclass(frozen=True)
class ReasoningRow:
    """Row of the table of reasoning parsers.

    Attributes:
      format: the reasoning format.
      models: names of the models that use it, for documentation.
      template: words of a chat template by which "auto" selects it (see ToolFormat).
    """

    format: ReasoningFormat
    models: str
    template: tuple[str, ...] = ()


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


def _parameters(models: str, words: tool_parameters.ParameterWords, template: tuple[str, ...]) -> ToolFormat:
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


def _pythonic(models: str, words: tuple[str, str], brackets: bool = True, **fields: Any) -> ToolFormat:
    """Return the format of calls in Python's notation. words, brackets: arguments of PythonicToolParser. models,
    fields: fields of ToolFormat.
    """
    return ToolFormat(
        partial(tool_pythonic.PythonicToolParser, words=words, brackets=brackets),
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


_LLAMA3 = partial(ToolFormat, tool_llama3.Llama3ToolParser, grammar=tool_llama3.grammar)
_HERMES = partial(ToolFormat, tool_hermes.HermesToolParser, grammar=tool_hermes.grammar, starts=tool_hermes.starts)
_COHERE = partial(_other_objects, call=tool_json_list.COHERE, words=("<|START_ACTION|>", "<|END_ACTION|>"))
_QWEN3_CODER = _parameters(
    "Qwen3-Coder, Qwen3.5, Nemotron 3, Step 3.5 and 5, Granite 4.2",
    tool_parameters.QWEN3_CODER,
    ("<function=", "<parameter=", "<tool_call>", "</function>"),
)

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
    "deepseek_v3": _section("DeepSeek V3, R1", tool_sections.DEEPSEEK_V3, ("<｜tool▁calls▁begin｜>", "```json")),
    "deepseek_v31": _section("DeepSeek V3.1", tool_sections.DEEPSEEK_V31, ("<｜tool▁calls▁begin｜>",)),
    "deepseek_v32": _parameters("DeepSeek V3.2", tool_parameters.DEEPSEEK_V32, ("｜DSML｜",)),
    "deepseek_v4": _parameters("DeepSeek V4", tool_parameters.DEEPSEEK_V4, ("｜DSML｜", "tool_calls>")),
    "deepseek_v41": _parameters("DeepSeek V4.1", tool_parameters.DEEPSEEK_V41, ("｜DSML｜", " calls>")),
    "kimi_k2": _section("Kimi K2", tool_sections.KIMI_K2, ("<|tool_calls_section_begin|>",)),
    "plamo3": _section("PLaMo 3", tool_sections.PLAMO3, (tool_sections.PLAMO3.section[0],)),
    "qwen3_coder": _QWEN3_CODER,
    "qwen3_xml": _QWEN3_CODER,
    "step3": _parameters("Step 3", tool_parameters.STEP3, ("<steptml:invoke",)),
    "step3p5": _QWEN3_CODER,
    "step5": _QWEN3_CODER,
    "mimo": _parameters("MiMo", tool_parameters.MIMO, ()),
    "seed_oss": _parameters("Seed-OSS", tool_parameters.SEED_OSS, ("<seed:tool_call>",)),
    "minimax_m2": _parameters("MiniMax M2", tool_parameters.MINIMAX_M2, ("<minimax:tool_call>",)),
    "glm45": _parameters("GLM-4.5, GLM-4.6", tool_parameters.GLM45, ("<arg_key>", "<arg_value>")),
    "glm47": _parameters("GLM-4.7", tool_parameters.GLM45, ()),
    "ling3": _parameters("Ling 3", tool_parameters.GLM45, ()),
    "poolside_v1": _parameters("Laguna", tool_parameters.GLM45, ()),
    "hy_v3": _parameters("Hy3", tool_parameters.HY_V3, ("<tool_sep>",)),
    "k2_horizon": _parameters(
        "K2 Horizon, in the template's default tool_call_format", tool_parameters.K2_HORIZON, ("<ifm|tool_calls>",)
    ),
    "dots": _parameters("dots", tool_parameters.DOTS, ("<dots_function_call>",)),
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
    "lfm2": _pythonic("LFM2, LFM2.5", tool_pythonic.LFM2, special_tokens=True, template=("<|tool_list_start|>",)),
    "olmo3": _pythonic("Olmo 3", tool_pythonic.OLMO3, brackets=False, template=("<function_calls>",)),
    "xlam": _LLAMA3("xLAM 2"),
}

_THINK = ThinkFormat()
_ALWAYS = ThinkFormat(always=True)
_COHERE_THINK = ThinkFormat(
    ("<|START_THINKING|>",),
    ("<|END_THINKING|>",),
    calls=("<|START_ACTION|>",),
    answer=(("<|START_RESPONSE|>", "<|START_TEXT|>"), ("<|END_RESPONSE|>", "<|END_TEXT|>")),
    special_tokens=True,
)
# The second opening word is the prompt's when reasoning is disabled.
_SEED = ThinkFormat(("<seed:think>", "<seed:think><seed:cot_budget_reflect>"), ("</seed:think>",), special_tokens=True)
# Words of the efforts "high", "medium" and "low".
_K2_EFFORTS = "think", "think_fast", "think_faster"
_GRANITE = ThinkFormat(
    ("Here is my thought process:", "Here's my thought process:"), ("Here is my response:", "Here's my response:")
)

REASONING_PARSERS: dict[str, ReasoningRow] = {
    "deepseek_r1": ReasoningRow(_ALWAYS, "DeepSeek R1, QwQ", ("<｜Assistant｜><think>",)),
    "deepseek_v3": ReasoningRow(_THINK, "DeepSeek V3.1, V3.2", ("<｜Assistant｜>", "</think>", "thinking")),
    "deepseek_v4": ReasoningRow(_THINK, "DeepSeek V4"),
    "deepseek_v41": ReasoningRow(_THINK, "DeepSeek V4.1"),
    "qwen3": ReasoningRow(_THINK, "Qwen3 and others that open <think> themselves or in the prompt", ("</think>",)),
    "glm45": ReasoningRow(_THINK, "GLM-4.5, GLM-4.6", ("</think>", "<|assistant|>", "/nothink")),
    "glm47": ReasoningRow(_THINK, "GLM-4.7"),
    "ling3": ReasoningRow(_THINK, "Ling 3"),
    "poolside_v1": ReasoningRow(_THINK, "Laguna"),
    "hy_v3": ReasoningRow(_THINK, "Hy3"),
    "mimo": ReasoningRow(_THINK, "MiMo"),
    "holo2": ReasoningRow(_THINK, "Holo2"),
    "nemotron_v3": ReasoningRow(_THINK, "Nemotron 3"),
    "step3": ReasoningRow(_ALWAYS, "Step 3"),
    "step3p5": ReasoningRow(_ALWAYS, "Step 3.5, 3.7"),
    "step5": ReasoningRow(_ALWAYS, "Step 5"),
    "granite_thinking_parser": ReasoningRow(_THINK, "Granite 4.2"),
    "plamo3": ReasoningRow(
        ThinkFormat(
            ("<|plamo:begin_think:plamo|>",),
            ("<|plamo:end_think:plamo|>",),
            calls=tool_sections.PLAMO3.section[:1],
            always=True,
            special_tokens=True,
        ),
        "PLaMo 3",
        ("<|plamo:begin_think:plamo|>",),
    ),
    "k2_horizon": ReasoningRow(
        ThinkFormat(
            tuple(f"<ifm|{each}>" for each in _K2_EFFORTS),
            tuple(f"</ifm|{each}>" for each in _K2_EFFORTS),
            calls=("<ifm|tool_calls>",),
            always=True,
            special_tokens=True,
        ),
        "K2 Horizon",
        ("<ifm|think>",),
    ),
    "gemma4": ReasoningRow(
        ThinkFormat(("<|channel>thought\n",), ("<channel|>",), special_tokens=True),
        "Gemma 4",
        ("<|channel>",),
    ),
    "cohere_command3": ReasoningRow(_COHERE_THINK, "Command A Reasoning", ("<|START_THINKING|>",)),
    "cohere_command4": ReasoningRow(_COHERE_THINK, "Command A+"),
    "mistral": ReasoningRow(
        ThinkFormat(("[THINK]",), ("[/THINK]",), special_tokens=True), "Magistral, Ministral 3", ("[THINK]",)
    ),
    "openai_gptoss": ReasoningRow(HarmonyFormat(), "gpt-oss", ("<|channel|>", "analysis")),
    "granite": ReasoningRow(_GRANITE, "Granite 3.2", ("Here is my thought process:",)),
    "hunyuan_a13b": ReasoningRow(
        ThinkFormat(answer=(("<answer>",), ("</answer>",))), "Hunyuan-A13B", ("<answer>", "</think>")
    ),
    "seed_oss": ReasoningRow(_SEED, "Seed-OSS", ("<seed:think>",)),
    "ernie45": ReasoningRow(
        ThinkFormat(answer=(("<response>",), ("</response>",))), "ERNIE 4.5", ("<response>", "</think>")
    ),
    "olmo3": ReasoningRow(_THINK, "Olmo 3", ("</think>", "<function_calls>")),
    "kimi_k2": ReasoningRow(
        ThinkFormat(calls=("<|tool_calls_section_begin|>",), special_tokens=True),
        "Kimi K2",
        ("</think>", "<|tool_calls_section_begin|>"),
    ),
    "minimax_m2": ReasoningRow(_ALWAYS, "MiniMax M2", ("</think>", "<minimax:tool_call>", "<invoke")),
    "minimax_m3": ReasoningRow(
        ThinkFormat(("<mm:think>",), ("</mm:think>",), special_tokens=True), "MiniMax M3", ("<mm:think>",)
    ),
    "minimax_m2_append_think": ReasoningRow(
        ThinkFormat(always=True, shown=True), "MiniMax M2, whose thoughts stay in the content"
    ),
}


def tool_format(name: str | None) -> ToolFormat | None:
    """Return the format of a tool parser; None for None and "auto". Raises ConfigError for an unknown name."""
    _check("tool_call_parser", name, TOOL_PARSERS)
    return TOOL_PARSERS.get(name or AUTO)


def reasoning_format(name: str | None) -> ReasoningFormat | None:
    """Return the format of a reasoning parser; None for None and "auto". Raises ConfigError for an unknown name."""
    _check("reasoning_parser", name, REASONING_PARSERS)
    row = REASONING_PARSERS.get(name or AUTO)
    return None if row is None else row.format


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
