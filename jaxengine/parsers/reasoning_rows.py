"""Table of the parsers of reasoning, by vLLM's names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

from jaxengine.parsers.reasoning.harmony import HarmonyFormat
from jaxengine.parsers.reasoning.think import ThinkFormat
from jaxengine.parsers.scan.call_start import CallStarts
from jaxengine.parsers.scan.events import ReasoningParser
from jaxengine.parsers.scan.harmony import (
    END_MESSAGE,
    END_SAMPLING,
    EOM,
    EOT,
    MESSAGE,
    MODEL,
    MUSE,
    MUSE_GLIMMER,
    SELF,
    START,
    TEXT,
    THINKING,
    HarmonyReader,
    InklingReader,
    invoked_function,
    recipient_function,
    xml_function,
)
from jaxengine.parsers.tools.parameter_words import KIMI_K3
from jaxengine.parsers.tools.sections import PLAMO3


class ReasoningFormat(Protocol):
    """Protocol of a format of reasoning.

    Attributes:
      special_tokens, stop_words: see registry.ToolFormat.
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
      template: words of a chat template by which "auto" selects it (see registry.ToolFormat).
      suffixed: returns the format for a checkpoint whose words end with a suffix (see registry.suffix_of).
    """

    format: ReasoningFormat
    models: str
    template: tuple[str, ...] = ()
    suffixed: Callable[[str], ReasoningFormat] | None = None


_THINK = ThinkFormat()


def _suffixed_think(suffix: str) -> ThinkFormat:
    """Return the format of reasoning between <think> and </think>, each with a suffix before its last character."""
    return ThinkFormat((f"<think{suffix}>",), (f"</think{suffix}>",), special_tokens=True)


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
_DEEPSEEK_WORDS = ("<｜Assistant｜>", "</think>", "thinking")
_GRANITE = ThinkFormat(
    ("Here is my thought process:", "Here's my thought process:"), ("Here is my response:", "Here's my response:")
)
_GLIMMER = HarmonyFormat(
    recipient_function,
    partial(HarmonyReader, MUSE_GLIMMER),
    stop_words=(EOT,),
    answer=(f"to=user{MESSAGE}",),
    thoughts=f"to={SELF}{MESSAGE}",
    after_thoughts=((EOM,), (EOT,)),
    closing=f"{EOM}{START}assistant to=user{MESSAGE}",
)
_MUSE = ReasoningRow(replace(_GLIMMER, reader=partial(HarmonyReader, MUSE)), "Muse Spark")

REASONING_PARSERS: dict[str, ReasoningRow] = {
    "deepseek_r1": ReasoningRow(_ALWAYS, "DeepSeek R1, QwQ", ("<｜Assistant｜><think>",)),
    "deepseek_v3": ReasoningRow(_THINK, "DeepSeek V3.1, V3.2", _DEEPSEEK_WORDS),
    "deepseek_v4": ReasoningRow(_THINK, "DeepSeek V4", (*_DEEPSEEK_WORDS, "<｜DSML｜tool_calls>")),
    "deepseek_v41": ReasoningRow(_THINK, "DeepSeek V4.1", (*_DEEPSEEK_WORDS, "<｜DSML｜ calls>")),
    "qwen3": ReasoningRow(_THINK, "Qwen3 and others that open <think> themselves or in the prompt", ("</think>",)),
    "glm45": ReasoningRow(_THINK, "GLM-4.5, GLM-4.6", ("</think>", "<|assistant|>", "/nothink")),
    "glm47": ReasoningRow(_THINK, "GLM-4.7"),
    "ling3": ReasoningRow(_THINK, "Ling 3"),
    "poolside_v1": ReasoningRow(_THINK, "Laguna"),
    "hy_v3": ReasoningRow(_THINK, "Hy3"),
    "hy_v4": ReasoningRow(_THINK, "Hy4", suffixed=_suffixed_think),
    "mimo": ReasoningRow(_THINK, "MiMo"),
    "holo2": ReasoningRow(_THINK, "Holo2"),
    "minicpmv": ReasoningRow(_THINK, "MiniCPM-V 4.6"),
    "nemotron_v3": ReasoningRow(_THINK, "Nemotron 3"),
    "nano_v3": ReasoningRow(_THINK, "Nemotron 3 Nano"),
    "step3": ReasoningRow(_ALWAYS, "Step 3"),
    "step3p5": ReasoningRow(_ALWAYS, "Step 3.5, 3.7"),
    "step5": ReasoningRow(_ALWAYS, "Step 5"),
    "granite_thinking_parser": ReasoningRow(_THINK, "Granite 4.2"),
    "plamo3": ReasoningRow(
        ThinkFormat(
            ("<|plamo:begin_think:plamo|>",),
            ("<|plamo:end_think:plamo|>",),
            calls=PLAMO3.section[:1],
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
        ThinkFormat(("<|channel>",), ("<channel|>",), label="thought\n", special_tokens=True),
        "Gemma 4",
        ("<|channel>",),
    ),
    "cohere_command3": ReasoningRow(_COHERE_THINK, "Command A Reasoning", ("<|START_THINKING|>",)),
    "cohere_command4": ReasoningRow(_COHERE_THINK, "Command A+"),
    "mistral": ReasoningRow(
        ThinkFormat(("[THINK]",), ("[/THINK]",), special_tokens=True), "Magistral, Ministral 3", ("[THINK]",)
    ),
    "openai_gptoss": ReasoningRow(HarmonyFormat(), "gpt-oss", ("<|channel|>", "analysis")),
    "beam": ReasoningRow(HarmonyFormat(xml_function), "Beam"),
    "muse_glimmer": ReasoningRow(_GLIMMER, "Muse Glimmer", ("to=self", "<|message|>")),
    "muse": _MUSE,
    "musespark1x": _MUSE,
    "inkling": ReasoningRow(
        HarmonyFormat(
            invoked_function,
            InklingReader,
            stop_words=(END_SAMPLING,),
            answer=(TEXT,),
            thoughts=THINKING,
            after_thoughts=((END_MESSAGE,), (END_SAMPLING,)),
            closing=f"{END_MESSAGE}{MODEL}{TEXT}",
            declares="<|content_xml|>",
        ),
        "Inkling",
        (THINKING,),
    ),
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
    "kimi_k3": ReasoningRow(
        ThinkFormat(
            ("<|open|>think<|sep|>",),
            ("<|close|>think<|sep|>",),
            calls=(KIMI_K3.section or ())[:1],
            dropped=KIMI_K3.dropped,
            special_tokens=True,
        ),
        "Kimi K3",
        ("<|open|>", "think"),
    ),
    "minimax_m2": ReasoningRow(_ALWAYS, "MiniMax M2", ("</think>", "<minimax:tool_call>", "<invoke")),
    "minimax_m3": ReasoningRow(
        ThinkFormat(("<mm:think>",), ("</mm:think>",), special_tokens=True), "MiniMax M3", ("<mm:think>",)
    ),
    "minimax_m2_append_think": ReasoningRow(
        ThinkFormat(always=True, shown=True), "MiniMax M2, whose thoughts stay in the content"
    ),
}
