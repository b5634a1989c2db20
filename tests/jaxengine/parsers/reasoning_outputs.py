"""Outputs of models that think: what all of them write, in each one's words behind the end of its prompt, and what is
odd about each.

Words and the ends of prompts are those of the models' published chat templates.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from tests.jaxengine.parsers.message_outputs import GLIMMER, HARMONY, INKLING, SPARK, THOUGHTS, Thought
from tests.jaxengine.parsers.outputs import NOW, PARIS, ZURICH
from tests.jaxengine.parsers.token_outputs import ALL_FORMATS
from tests.jaxengine.parsers.writers import Call


class Thinking(NamedTuple):
    """How a model thinks.

    prompt: how its template ends a prompt. off: the same with thoughts switched off, None where they cannot be.
    opens: the model writes the first word itself; otherwise the prompt ends with it. gap: stands before an answer.
    plain: a text without words is an answer.
    """

    tools: str
    prompt: str
    off: str | None = None
    words: tuple[str, str] = ("<think>", "</think>")
    opens: bool = False
    gap: str = "\n\n"
    answer: tuple[str, str] = ("", "")
    odd: tuple[Thought, ...] = ()

    @property
    def begin(self) -> str:
        return self.words[0] if self.opens else ""

    def write(self, *calls: Call) -> str:
        writes: Callable[[list[Call]], str] = ALL_FORMATS[self.tools].write
        return writes(list(calls))

    def think(self, thoughts: str) -> str:
        return self.begin + thoughts + self.words[1]

    def say(self, text: str) -> tuple[str, str]:
        """(as the model writes it, what of that is content)."""
        begin, end = self.answer
        return self.gap + begin + text + end, text if begin else self.gap + text


def common(form: Thinking) -> list[Thought]:
    """What every model may write."""
    begin, end = form.words
    hello, said = form.say("Hello!\n\n* one\n* 二 😀")
    written = form.write(PARIS)
    found = [Thought(form.think(thoughts) + hello, thoughts, said) for thoughts in THOUGHTS]
    cut, half = "Let me see", end[: len(end) // 2]
    mention = form.say(f"Write {begin} and {end} around it.")
    found += [
        # The words inside of thoughts and of answers.
        Thought(form.think(f"I may write {begin} here.") + hello, f"I may write {begin} here.", said),
        Thought(form.think("Hm.") + mention[0], "Hm.", mention[1]),
        Thought(form.think(f"a {end[:-1]}~ b {half}") + hello, f"a {end[:-1]}~ b {half}", said),
        # Nothing in them.
        Thought(form.think("") + hello, None, said),
        Thought(form.think("\n\n") + hello, "\n\n", said),
        # Cut off, at any place.
        Thought(form.begin + cut, cut),
        Thought(form.begin + cut + half, cut + half),
        Thought(form.begin + cut + end[:-1], cut + end[:-1]),
        Thought(form.think(cut), cut),
        Thought(form.think(cut) + form.gap + form.answer[0] + "Hel", cut, ("" if form.answer[0] else form.gap) + "Hel"),
        Thought(""),
        # Calls behind thoughts.
        Thought(form.think("I call.") + form.gap + written, "I call.", None, (PARIS,), written=written),
        Thought(form.think("I call.") + written, "I call.", None, (PARIS,), written=written),
        Thought(
            form.think("Two.") + form.gap + (both := form.write(ZURICH, NOW)), "Two.", None, (ZURICH, NOW), written=both
        ),
        Thought(
            form.think("Hm.") + f"{form.gap}I look.\n{written}",
            "Hm.",
            f"{form.gap}I look.\n",
            (PARIS,),
            written=written,
        ),
        Thought(form.think("") + form.gap + written, None, None, (PARIS,), written=written),
        # A prompt that speaks of the words.
        Thought(form.think("Hm.") + hello, "Hm.", said, prompt=f"What do {begin} and {end} mean?" + form.prompt),
        # Half of an answer is there already.
        Thought(" more" + end + hello, " more", said, continued=f"{begin}\nThere is"),
        Thought(" and that", None, " and that", continued=f"{begin}Hm.{end}This"),
    ]
    if form.opens:
        found += [
            Thought("\n" + form.think("Hm.") + hello, "Hm.", said),
            Thought(begin[:-1], None, begin[:-1]),
            Thought("Just an answer, <b>bold</b> [1].", None, "Just an answer, <b>bold</b> [1]."),
            Thought(written, None, None, (PARIS,), written=written),
            Thought(f"No {end} thought", None, f"No {end} thought"),
            Thought("Hm." + end + hello, "Hm.", said, prompt=form.prompt + begin + "\n"),
        ]
    else:
        found += [
            Thought(begin + "Hm." + end + hello, "Hm.", said),
            Thought("All of it is thought", "All of it is thought"),
            Thought(half, half),
        ]
    if form.off is not None:
        found += [
            Thought("Just an answer.", None, "Just an answer.", prompt=form.off),
            Thought(written, None, None, (PARIS,), prompt=form.off, written=written),
            Thought(f"Use {end}.", None, f"Use {end}.", prompt=form.off),
        ]
    return found


def shown(form: Thinking, outputs: list[Thought]) -> list[Thought]:
    """The same where thoughts stay in the content, behind the word that the prompt has."""

    def content(each: Thought) -> str:
        return ("" if each.continued else form.words[0]) + each.text.replace(each.written, "")

    return [each._replace(reasoning=None, content=content(each)) for each in outputs]


IM = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
REFLECT = (
    "<seed:cot_budget_reflect>I have used 129 tokens, and there are 383 tokens remaining.</seed:cot_budget_reflect>"
)
HERMES_CALL = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
MINIMAX = Thinking(
    "minimax_m2",
    "]~b]user\nHi[e~[\n]~b]ai\n<think>\n",
    odd=(
        Thought("Hm.\n</think>\n\n\n<minimax:tool_call>\nno", "Hm.\n", "\n\n\n<minimax:tool_call>\nno"),
        Thought("I'd write <invoke name=…>.</think>", "I'd write <invoke name=…>."),
    ),
)
THINKING: dict[str, Thinking] = {
    "deepseek_r1": Thinking(
        "deepseek_v3",
        "<｜User｜>Hi<｜Assistant｜><think>\n",
        off="<｜User｜>Hi<｜Assistant｜><think>\n\n</think>\n\n",
        odd=(
            # As the templates before that opened it, and as R1-0528 goes on: without the word, or with it.
            Thought("Okay.\n</think>\n\nHi!", "Okay.\n", "\n\nHi!", prompt="<｜User｜>Hi<｜Assistant｜>"),
            Thought("<think>\nOkay.\n</think>\n\nHi!", "\nOkay.\n", "\n\nHi!", prompt="<｜User｜>Hi<｜Assistant｜>"),
            Thought("**Answer:** \\boxed{4}", "**Answer:** \\boxed{4}", prompt="<｜User｜>Hi<｜Assistant｜>"),
            Thought("<think>\n\n</think>\n\nHi!", "\n\n", "\n\nHi!", prompt="<｜User｜>Hi<｜Assistant｜>"),
        ),
    ),
    "deepseek_v3": Thinking(
        "deepseek_v31",
        "<｜User｜>Hi<｜Assistant｜><think>",
        off="<｜User｜>Hi<｜Assistant｜></think>",
        gap="",
        odd=(
            Thought("Hm. <｜tool▁calls▁begin｜> later.</think>Hi", "Hm. <｜tool▁calls▁begin｜> later.", "Hi"),
            Thought("<｜tool▁call▁begin｜>no", "<｜tool▁call▁begin｜>no"),
        ),
    ),
    "qwen3": Thinking(
        "hermes",
        IM,
        off=IM + "<think>\n\n</think>\n\n",
        opens=True,
        odd=(
            # The thinking-only models' template, which has the word.
            Thought("Okay.\n</think>\n\nHi!", "Okay.\n", "\n\nHi!", prompt=IM + "<think>\n"),
            Thought("Okay.", "Okay.", prompt=IM + "<think>\n"),
            # Thoughts that a call ends, and some that speak of calls.
            Thought(f"<think>\n{HERMES_CALL}\n</think>\n\nHi", "\n", "\n\nHi", (NOW,)),
            Thought(f"<think>\nSo.\n{HERMES_CALL}", "\nSo.\n", None, (NOW,)),
            Thought(f"<think>So.{HERMES_CALL}\n{HERMES_CALL}\n", "So.", None, (NOW, NOW)),
            Thought(f"So.\n\n{HERMES_CALL}", "So.\n\n", None, (NOW,), prompt=IM + "<think>\n"),
            Thought(f"<think>I write {HERMES_CALL} then", "I write ", " then", (NOW,)),
            Thought(f"<think>\n{HERMES_CALL[:-14]}", "\n", None, (NOW,)),
            Thought(f"<think>\n{HERMES_CALL[:20]}", f"\n{HERMES_CALL[:20]}"),
            Thought("<think>In <tool_call> tags, 1 <", "In <tool_call> tags, 1 <"),
            Thought(f"<think>\n{HERMES_CALL}</think>{HERMES_CALL}", "\n", None, (NOW, NOW)),
            Thought("<think>\n\n</think>\n\nHi /no_think", "\n\n", "\n\nHi /no_think"),
            Thought("<thinking>Hm.</thinking>Hi", None, "<thinking>Hm.</thinking>Hi"),
            # The end word alone says that there are none.
            Thought("</think>Hi", None, "Hi"),
            Thought("\n</think>\n\nHi</think>", None, "\n\nHi</think>"),
        ),
    ),
    "glm45": Thinking(
        "glm45",
        "<|user|>\nHi<|assistant|>",
        off="<|user|>\nHi/nothink<|assistant|>\n<think></think>",
        opens=True,
        gap="\n",
        odd=(
            Thought("\n<think></think>\nHi", None, "\nHi"),
            Thought("\n<think>Hm.</think>\n<tool_call>now\n</tool_call>", "Hm.", None, (NOW,)),
            Thought("\nHi", None, "\nHi", prompt="<|user|>\nHi/nothink<|assistant|>\n<think></think>"),
        ),
    ),
    "glm47": Thinking(
        "glm47",
        "<|user|>Hi<|assistant|><think>",
        off="<|user|>Hi<|assistant|></think>",
        gap="",
        odd=(
            Thought("Hm.</think><tool_call>now</tool_call>", "Hm.", None, (NOW,)),
            Thought("1. **Read** it.</think>Hi", "1. **Read** it.", "Hi"),
        ),
    ),
    "mistral": Thinking(
        "mistral",
        "[INST]Hi[/INST]",
        words=("[THINK]", "[/THINK]"),
        opens=True,
        gap="",
        odd=(
            Thought("[THINK]a[0] = [TH[/THINK]Hi", "a[0] = [TH", "Hi"),
            Thought("[THINK]Hm.[/THINK][TOOL_CALLS]now[ARGS]{}", "Hm.", None, (NOW,)),
            Thought("<think>Hm.</think>Hi", None, "<think>Hm.</think>Hi"),
            Thought("[/THINK]Hi", None, "Hi"),
        ),
    ),
    "granite": Thinking(
        "granite",
        "<|start_of_role|>user<|end_of_role|>Hi<|end_of_text|>\n<|start_of_role|>assistant<|end_of_role|>",
        words=("Here is my thought process:", "Here is my response:"),
        opens=True,
        odd=(
            Thought("Here's my thought process: a\n\nHere's my response: b", " a\n\n", " b"),
            Thought("Here's my thought process: a Here is my response: b", " a ", " b"),
            Thought("Here is my thought process: Here is my res Here's", " Here is my res Here's"),
            Thought("Here is my thought process: Here is my cat. Here is my response:", " Here is my cat. "),
            Thought("Here is my response: b", None, " b"),
            Thought("Here is my cat", None, "Here is my cat"),
            Thought("Here's", None, "Here's"),
        ),
    ),
    "hunyuan_a13b": Thinking(
        "hunyuan_a13b",
        "<|startoftext|>Hi<|extra_0|>",
        off="<|startoftext|>/no_think Hi<|extra_0|><think>\n\n</think>\n",
        opens=True,
        gap="\n",
        answer=("<answer>\n", "\n</answer>"),
        odd=(
            Thought("<think>\n\n</think>\n<answer>\nHi\n</answer>", "\n\n", "Hi"),
            Thought("<think>a</think><answer>b</answer>", "a", "b"),
            Thought("<think>a</think><answer>b</answers></answer>", "a", "b</answers>"),
            Thought("<think>a</think>\n<answer>\nb\n</answ", "a", "b\n</answ"),
            Thought("<think>a</think>\n<ans", "a", "\n<ans"),
            Thought("<think>a</think>\n<answer>b</answer>\n", "a", "b"),
            Thought("<answer>\nb\n</answer>", None, "b"),
            Thought(
                '<think>a</think>\n<answer>b</answer>\n<tool_calls>[{"name": "now", "arguments": {}}]</tool_calls>',
                "a",
                "b\n",
                (NOW,),
            ),
        ),
    ),
    "seed_oss": Thinking(
        "seed_oss",
        "<seed:bos>user\nHi<seed:eos><seed:bos>assistant\n",
        off="<seed:bos>assistant\n<seed:think><seed:cot_budget_reflect>The current thinking budget is 0."
        "</seed:cot_budget_reflect>\n</seed:think>",
        words=("<seed:think>", "</seed:think>"),
        opens=True,
        gap="\n",
        odd=(
            Thought(f"<seed:think>Hm.\n{REFLECT}\nSo.</seed:think>Hi", f"Hm.\n{REFLECT}\nSo.", "Hi"),
            Thought(f"<seed:think>{REFLECT}</seed:think>Hi", REFLECT, "Hi"),
            Thought("<seed:think>Hm.</seed:thin", "Hm.</seed:thin"),
            Thought("<think>Hm.</think>Hi", None, "<think>Hm.</think>Hi"),
            Thought(
                "0</seed:cot_budget_reflect></seed:think>b",
                "0</seed:cot_budget_reflect>",
                "b",
                prompt="<seed:bos>assistant\n<seed:think><seed:cot_budget_reflect>",
            ),
        ),
    ),
    "ernie45": Thinking(
        "ernie45",
        "<|im_start|>user\nHi<|im_end|>\n\n<|im_start|>assistant\n<think>\n",
        gap="\n\n\n",
        answer=("<response>\n", "\n</response>\n"),
        odd=(
            Thought("Hm.\n</think>\n\n\n<response>\nHi\n</response>\n\n", "Hm.\n", "Hi"),
            Thought("Hm.\n</think>\n\n\n<response>\nHi", "Hm.\n", "Hi"),
            Thought("Hm.\n</think>\n\n\nHi", "Hm.\n", "\n\n\nHi"),
            Thought("Hm.\n</think>\n\n\n<resp", "Hm.\n", "\n\n\n<resp"),
            Thought("Hm.</think>\n\n\n<response>\nUse </response-> here\n</response>", "Hm.", "Use </response-> here"),
        ),
    ),
    "olmo3": Thinking(
        "olmo3",
        IM + "<think>",
        odd=(
            Thought("Hm.</think>\n\n<function_calls>now()</function_calls>", "Hm.", None, (NOW,)),
            Thought("I'd call <function_calls>now()</function_calls>", "I'd call ", None, (NOW,)),
            Thought("I'd call <function_calls>then()</func", "I'd call <function_calls>then()</func"),
        ),
    ),
    "kimi_k2": Thinking(
        "kimi_k2",
        "<|im_user|>user<|im_middle|>Hi<|im_end|><|im_assistant|>assistant<|im_middle|>",
        off="<|im_user|>user<|im_middle|>Hi<|im_end|><|im_assistant|>assistant<|im_middle|><think></think>",
        opens=True,
        gap="",
        odd=(
            # A call may come without the word that ends the thoughts.
            Thought(
                "<think>Hm.<|tool_calls_section_begin|><|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>{}"
                "<|tool_call_end|><|tool_calls_section_end|>",
                "Hm.",
                None,
                (NOW,),
            ),
            Thought("<think>Hm.<|tool_calls_sec", "Hm.<|tool_calls_sec"),
            Thought("<think>Hm. <|tool_call_begin|></think>Hi", "Hm. <|tool_call_begin|>", "Hi"),
        ),
    ),
    "plamo3": Thinking(
        "plamo3",
        "<|plamo:tag|>assistant<|plamo:msg|>",
        off="<|plamo:tag|>assistant<|plamo:msg|><|plamo:begin_think:plamo|><|plamo:end_think:plamo|>",
        words=("<|plamo:begin_think:plamo|>", "<|plamo:end_think:plamo|>"),
        gap="",
        odd=(Thought("Hm." + ALL_FORMATS["plamo3"].write([NOW]), "Hm.", None, (NOW,)),),
    ),
    "k2_horizon": Thinking(
        "k2_horizon",
        "<ifm|assistant><ifm|think>",
        off="<ifm|assistant><ifm|think></ifm|think>",
        words=("<ifm|think>", "</ifm|think>"),
        odd=(
            Thought("Hm.</ifm|think_fast>Hi", "Hm.", "Hi", prompt="<ifm|assistant><ifm|think_fast>"),
            Thought("<ifm|think_faster>Hm.</ifm|think_faster>Hi", "Hm.", "Hi", prompt="<ifm|assistant>"),
            Thought("Hm." + ALL_FORMATS["k2_horizon"].write([NOW]), "Hm.", None, (NOW,)),
        ),
    ),
    "minimax_m3": Thinking(
        "minimax_m2",
        "]~b]user\nHi[e~[\n]~b]ai\n",
        off="]~b]user\nHi[e~[\n]~b]ai\n<mm:think></mm:think>",
        words=("<mm:think>", "</mm:think>"),
        opens=True,
        gap="",
        odd=(Thought("Hm.</mm:think>Hi", "Hm.", "Hi", prompt="]~b]ai\n<mm:think>"),),
    ),
    "kimi_k3": Thinking(
        "kimi_k3",
        '<|open|>message role="assistant"<|sep|><|open|>think<|sep|>',
        off='<|open|>message role="assistant"<|sep|><|open|>think<|sep|><|close|>think<|sep|>',
        words=("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
        gap="",
        answer=("<|open|>response<|sep|>", "<|close|>response<|sep|>"),
        odd=(
            Thought("Hi<|close|>response<|sep|><|close|>message<|sep|>", None, "Hi", prompt="<|open|>response<|sep|>"),
            Thought("Hm." + ALL_FORMATS["kimi_k3"].write([NOW]), "Hm.", None, (NOW,)),
        ),
    ),
    "minimax_m2": MINIMAX,
    "minimax_m2_append_think": MINIMAX,
    "gemma4": Thinking(
        "gemma4",
        "<|turn>user\nHi<turn|>\n<|turn>model\n",
        off="<|turn>user\nHi<turn|>\n<|turn>model\n<|channel>thought\n<channel|>",
        words=("<|channel>", "<channel|>"),
        opens=True,
        gap="",
        odd=(
            # A call may come without the word that ends the thoughts.
            Thought("<|channel>thought\nHm.<|tool_call>call:now{}<tool_call|>", "Hm.", None, (NOW,)),
            Thought("Hm.<channel|>Hi", "Hm.", "Hi", prompt="<|tool_response>x<tool_response|><|channel>thought\n"),
            Thought("<|channel>thought\nHm\n<channel|>Hi", "Hm\n", "Hi"),
            # Every channel is one of thoughts, also without its name.
            Thought("<|channel>thousand reasons<channel|>Done", "thousand reasons", "Done"),
            Thought("<|channel>thou", "thou"),
        ),
    ),
    "cohere_command3": Thinking(
        "cohere_command3",
        "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
        off="<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|><|START_THINKING|><|END_THINKING|>",
        words=("<|START_THINKING|>", "<|END_THINKING|>"),
        opens=True,
        gap="",
        answer=("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
        odd=(
            Thought("<|START_THINKING|>a<|END_THINKING|><|START_TEXT|>b<|END_TEXT|>", "a", "b"),
            Thought("<|START_RESPONSE|>b<|END_RESPONSE|>", None, "b"),
            Thought(
                '<|START_THINKING|>a<|END_THINKING|><|START_ACTION|>[{"tool_name": "now", "parameters": {}}]'
                "<|END_ACTION|>",
                "a",
                None,
                (NOW,),
            ),
        ),
    ),
}
# Formats with the same words as another.
SAME = {
    "deepseek_v3": ("deepseek_v4", "deepseek_v41"),
    "qwen3": ("mimo", "holo2", "minicpmv", "nemotron_v3", "nano_v3", "hy_v3", "hy_v4", "granite_thinking_parser"),
    "glm47": ("ling3", "poolside_v1"),
    "deepseek_r1": ("step3", "step3p5", "step5"),
    "cohere_command3": ("cohere_command4",),
    "muse": ("musespark1x",),
}
# The first of those with the same words.
NAMES = [*THINKING, "openai_gptoss", "muse_glimmer", "muse", "inkling"]
THINKING |= {other: THINKING[name] for name, others in SAME.items() if name in THINKING for other in others}


def outputs(name: str) -> list[Thought]:
    """All of a format; prompts are never None."""
    if name == "openai_gptoss":
        return [each._replace(prompt="<|start|>user<|message|>Hi<|end|><|start|>assistant") for each in HARMONY]
    if name in ("muse_glimmer", "muse"):
        found = GLIMMER if name == "muse_glimmer" else SPARK
        return [each._replace(prompt="<|start|>user<|message|>Hi<|eot|><|start|>assistant") for each in found]
    if name == "inkling":
        return [each._replace(prompt="<|content_text|>Hi<|end_message|><|message_model|>") for each in INKLING]
    form = THINKING[name]
    found = [*common(form), *form.odd]
    if name == "minimax_m2_append_think":
        found = shown(form, found)
    ends = (each.prompt if each.prompt is not None else form.prompt for each in found)
    return [each._replace(prompt=end + each.continued) for each, end in zip(found, ends, strict=True)]


def tools(name: str) -> str:
    """The tool parser that goes with a reasoning parser."""
    if name in ("muse_glimmer", "muse", "inkling"):
        return name
    return "openai" if name == "openai_gptoss" else THINKING[name].tools
