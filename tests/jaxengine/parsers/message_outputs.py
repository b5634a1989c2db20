"""Outputs of models that write messages, with thoughts in some of them: gpt-oss, Muse and Inkling; and their record.

Words are those of the models' published chat templates.
"""

from __future__ import annotations

from typing import NamedTuple

from tests.jaxengine.parsers import element_outputs, writers
from tests.jaxengine.parsers.element_outputs import MUSE_NOW
from tests.jaxengine.parsers.outputs import INKLING_NOW, NOW
from tests.jaxengine.parsers.writers import Call


class Thought(NamedTuple):
    """An output and what it holds.

    prompt: what it follows, None for the format's. continued: the part of the answer that the prompt has already.
    written: its calls as they stand in the text.
    """

    text: str
    reasoning: str | None = None
    content: str | None = None
    calls: tuple[Call, ...] = ()
    prompt: str | None = None
    continued: str = ""
    written: str = ""


THOUGHTS = (
    "\nOkay, the user says hi.\n",
    "First, 3 < 5 and 7 > 2.\n\n1. Read [the file].\n2. Sum {its parts}.\r\n\tDone: `x[0]`, \\alpha, 50 %.",
    'Ça va ? 東京は晴れ。😀 The JSON would be {"a": "</th", "b": [1, 2]}, \'quoted\'.',
)
WRITE: Call = ("tools.write-file", {})
HEAD, NEXT, SAID = "<|channel|>analysis<|message|>", "<|end|><|start|>assistant", "<|channel|>final<|message|>"
NOW_CALL = "<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}<|call|>"
HARMONY = (
    *(Thought(f"{HEAD}{each}{NEXT}{SAID}Hello! 二 😀<|return|>", each, "Hello! 二 😀") for each in THOUGHTS),
    Thought(f"{HEAD}Hm.{NEXT}{SAID}Hi", "Hm.", "Hi"),
    Thought(f"{HEAD}Hm.{NEXT}{SAID}", "Hm."),
    Thought(f"{HEAD}Hm.{NEXT}<|channel|>fin", "Hm.", "<|start|>assistant<|channel|>fin"),
    Thought(f"{HEAD}Hm.<|end|>", "Hm."),
    Thought(f"{HEAD}Hm.<|en", "Hm.<|en"),
    Thought(f"{HEAD}Let me", "Let me"),
    Thought(HEAD),
    Thought(f"{HEAD}{NEXT}{SAID}Hi<|return|>", None, "Hi"),
    Thought(f"{SAID}Hi<|return|>", None, "Hi"),
    Thought(f"{SAID}Hi <|b|> <think>c</think><|return|>", None, "Hi <|b|> <think>c</think>"),
    Thought(""),
    Thought("Just an answer.", None, "Just an answer."),
    Thought("<|chan", None, "<|chan"),
    # The assistant's name left out, a word that a message keeps to, and two thoughts.
    Thought(f"{HEAD}Hm.<|end|>{SAID}Hi<|return|>", "Hm.", "Hi"),
    Thought(f"{HEAD}Hm.{NEXT}<|channel|>final <|constrain|>json<|message|>{{}}<|return|>", "Hm.", "{}"),
    Thought(f"{HEAD}Hm.{NEXT}<|channel|>final <|constrain|>ReplyAction <|message|>ok", "Hm.", "ok"),
    Thought(f"{HEAD}One.{NEXT}{HEAD}Two.{NEXT}{SAID}Hi<|return|>", "One.\nTwo.", "Hi"),
    Thought(f"{HEAD}Hm.{NEXT}<|channel|>commentary<|message|>I look.{NEXT}{SAID}Hi", "Hm.", "I look.\nHi"),
    # Calls: of a function, of a tool of its own, with the recipient in front of the channel, and cut off.
    Thought(f"{HEAD}Hm.{NEXT}{NOW_CALL}", "Hm.", None, (NOW,)),
    Thought(f"{HEAD}Hm.{NEXT}<|channel|>commentary<|message|>I look.{NEXT}{NOW_CALL}", "Hm.", "I look.", (NOW,)),
    Thought(f"{HEAD}Hm.{NEXT} to=functions.now<|channel|>commentary json<|message|>{{}}<|call|>", "Hm.", None, (NOW,)),
    Thought(f"{HEAD}Hm.{NEXT}{NOW_CALL.removesuffix('<|call|>')}", "Hm.", None, (NOW,)),
    Thought("<|channel|>analysis to=python code<|message|>print(1)<|call|>", "print(1)"),
    # Without the prefix, on any channel, and with the recipient in front of it: a call of the request's functions.
    Thought(f"{HEAD}Hm.{NEXT}{NOW_CALL.replace('functions.', '')}", "Hm.", None, (NOW,)),
    Thought(f"{HEAD}Hm.{NEXT}<|channel|>analysis to=now<|message|>{{}}<|call|>", "Hm.", None, (NOW,)),
    Thought(f"{HEAD}Hm.{NEXT}<|channel|>analysis to=functions.now code<|message|>{{}}<|call|>", "Hm.", None, (NOW,)),
    Thought(f"{HEAD}Hm.{NEXT} to=now<|channel|>commentary json<|message|>{{}}<|call|>", "Hm.", None, (NOW,)),
    Thought("to=now<|channel|>analysis<|message|>{}<|call|>", None, None, (NOW,)),
    Thought("<|channel|>commentary to=tools.write-file <|constrain|>json<|message|>{}", None, None, (WRITE,)),
    Thought(f"{HEAD}Hm.{NEXT}<|channel|>commentary to=nowhere<|message|>{{}}<|call|>", "Hm.\n{}"),
    Thought("<|channel|>commentary to=assistant<|message|>{}<|call|>", "{}"),
    Thought("<|channel|>analysis to=browser.search code<|message|>{}<|call|>", "{}"),
    Thought(f"{HEAD}I'd write to=functions.now <|constrain|> there{NEXT}{SAID}Hi")._replace(
        reasoning="I'd write to=functions.now <|constrain|> there", content="Hi"
    ),
)


# The same in Muse's words, without what only gpt-oss writes.
_IN_MUSE = {
    HEAD: " to=self<|message|>",
    NEXT: "<|eom|><|start|>assistant",
    SAID: " to=user<|message|>",
    NOW_CALL: MUSE_NOW,
    "<|return|>": "<|eot|>",
}


def in_muse(output: Thought) -> Thought:
    text = output.text
    for word, other in _IN_MUSE.items():
        text = text.replace(word, other)
    reasoning = output.reasoning and output.reasoning.replace("One.\nTwo.", "One.Two.")
    return output._replace(text=text, reasoning=reasoning)


MUSE = (
    *(
        each
        for each in map(in_muse, HARMONY)
        if not any(word in each.text for word in ("<|chan", "<|end|>", "<|call|>"))
    ),
    Thought(" to=self<|message|>Hm.<|eom|>", "Hm."),
    # The end of a message is missing before a call, and a text only speaks of recipients.
    Thought(f" to=self<|message|>Hm. {MUSE_NOW.lstrip()}", "Hm. ", None, (NOW,)),
    Thought(" to=self<|message|>Send to=now, to=to=<|message|>!<|eom|>", "Send to=now, to=to=<|message|>!"),
    Thought(" to=self<|message|>Send to=now", "Send to=now"),
    Thought(" to=self<|message|>Hm.<|start|>assistant to=user<|message|>Hi", "Hm.", "Hi"),
    Thought(f" to=self<|message|>{MUSE_NOW[18:-7]}<|eom|>", MUSE_NOW[18:-7]),
    Thought(" to=self<|message|>Hm.<|eo", "Hm.<|eo"),
    Thought(f" to=user<|message|>I look.<|eom|><|start|>assistant{MUSE_NOW}", None, "I look.", (NOW,)),
)
GLIMMER = (*MUSE, Thought("<|message|>Hi<|eot|>", None, "Hi"))
SPARK = (
    *MUSE,
    Thought("<|message|>Hm.<|eom|><|start|>assistant to=user<|message|>Hi<|eot|>", "Hm.", "Hi"),
    Thought(f" to=commentary<|message|>I look.<|eom|><|start|>assistant{MUSE_NOW}", None, "I look.", (NOW,)),
    Thought(" to=self<|message|>Hm.<|eom|><|start|>assistant to=developer<|message|>x<|eom|>", "Hm.x"),
)

# Words around messages, and calls, which other formats do not have.
INKLING_HEAD, INKLING_NEXT, INKLING_SAID = (
    "<|content_thinking|>",
    "<|end_message|><|message_model|>",
    "<|content_text|>",
)
INKLING_END = "<|end_message|><|content_model_end_sampling|>"
_CALL = INKLING_NOW.removeprefix("<|message_model|>")
INKLING = (
    *(
        Thought(f"{INKLING_HEAD}{each}{INKLING_NEXT}{INKLING_SAID}Hello! 二 😀{INKLING_END}", each, "Hello! 二 😀")
        for each in THOUGHTS
    ),
    Thought(f"{INKLING_HEAD}Hm.{INKLING_NEXT}{INKLING_SAID}Hi", "Hm.", "Hi"),
    Thought(f"{INKLING_HEAD}Hm.{INKLING_NEXT}{INKLING_SAID}", "Hm."),
    Thought(f"{INKLING_HEAD}Hm.{INKLING_NEXT}<|content_te", "Hm.", "<|content_te"),
    Thought(f"{INKLING_HEAD}Hm.<|end_message|>", "Hm."),
    Thought(f"{INKLING_HEAD}Hm.<|end_m", "Hm.<|end_m"),
    Thought(f"{INKLING_HEAD}Let me", "Let me"),
    Thought(INKLING_HEAD),
    Thought(f"{INKLING_HEAD}{INKLING_NEXT}{INKLING_SAID}Hi{INKLING_END}", None, "Hi"),
    Thought(f"{INKLING_SAID}Hi <|b|> <think>c</think>{INKLING_END}", None, "Hi <|b|> <think>c</think>"),
    Thought(f"{INKLING_HEAD}One.{INKLING_NEXT}{INKLING_HEAD}Two.{INKLING_NEXT}{INKLING_SAID}Hi", "One.Two.", "Hi"),
    # Text without a word of its kind, as the model answers without reasoning, and one that could have been a name.
    Thought(""),
    Thought(f"Just an answer.{INKLING_END}", None, "Just an answer."),
    Thought(f"Yes{INKLING_END}", None, "Yes"),
    Thought(f"{INKLING_HEAD}Hm.{INKLING_NEXT}Yes", "Hm.", "Yes"),
    Thought("<|content", None, "<|content"),
    # Ends that are missing, and words that other messages of the model have.
    Thought(f"{INKLING_HEAD}Hm.{INKLING_SAID}Hi", "Hm.", "Hi"),
    Thought(f"{INKLING_HEAD}Hm.<|content_model_end_sampling|>", "Hm."),
    Thought(f"{INKLING_HEAD}Hm.{INKLING_NEXT}f<|content_invoke_tool_text|>ls{INKLING_END}", "Hm.", "ls"),
    # Calls, the first without text before it, behind a remark, and one whose end is missing.
    Thought(_CALL, None, None, (NOW,)),
    Thought(f"{INKLING_HEAD}Hm.<|end_message|>{INKLING_NOW}", "Hm.", None, (NOW,)),
    Thought(f"{INKLING_HEAD}Hm.{_CALL}".replace("Hm.now", "Hm."), "Hm.", None, (NOW,)),
    Thought(f"{INKLING_HEAD}Hm.{INKLING_NEXT}{INKLING_SAID}Look<|end_message|>{_CALL}", "Hm.", "Look", (NOW,)),
    Thought(f"{INKLING_HEAD}Hm.<|end_message|>{INKLING_NOW.removesuffix(INKLING_END)}", "Hm.", None, (NOW,)),
    Thought(f"{INKLING_HEAD}Call now {{}}{INKLING_NEXT}{INKLING_SAID}Hi", "Call now {}", "Hi"),
)

# Name of a format -> its tokens, a thought, and a function that writes calls, which end the output.
ANALYSIS = "<|channel|>analysis<|message|>Hm, { ü\n<|end|><|start|>assistant"
_TOKENS = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>")
FORCED = {
    "openai": (_TOKENS, ANALYSIS, None),
    "beam": (_TOKENS, ANALYSIS, element_outputs.beam),
    "muse_glimmer": (
        ("<|start|>", "<|message|>", "<|eom|>", "<|eot|>"),
        " to=self<|message|>Hm, { ü\n<|eom|><|start|>assistant",
        element_outputs.muse,
    ),
    "inkling": (
        (
            "<|message_model|>",
            "<|content_thinking|>",
            "<|content_invoke_tool_json|>",
            "<|end_message|>",
            "<|content_model_end_sampling|>",
        ),
        f"{INKLING_HEAD}Hm, {{ ü\n{INKLING_NEXT}",
        lambda calls: writers.inkling(calls).removeprefix("<|message_model|>"),
    ),
}
