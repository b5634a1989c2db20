"""Table of the chat templates of families whose checkpoints have none, by registered class, and of tokenizer modes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jaxengine.tokens.chat_messages import Message
from jaxengine.tokens.chat_template import USUAL, Dialect
from jaxengine.tokens.mistral.dialect import results_in_order
from jaxengine.tokens.usual_templates import deepseek_v4, deepseek_v32


class OrderedResults:
    """chat_template.Dialect that puts consecutive results of tools in the order of their calls, for templates that
    write no ids. joint: text between the text parts of a message.
    """

    def __init__(self, joint: str):
        self.joint = joint

    def written(self, messages: Sequence[Message]) -> list[Message]:
        """Return the messages, with results of tools in the order of their calls."""
        return results_in_order(messages)

    def guarded(self, value: Any) -> Any:
        """Return the value: special tokens written in messages become their ids."""
        return value


@dataclass(frozen=True)
class UsualTemplate:
    """Chat template of a family: Jinja source, and the dialect that goes with it."""

    source: str
    dialect: Dialect = USUAL


# The texts of all messages, one after the other, whatever their roles, as in vLLM. PaliGemma's beginning-of-sequence
# token follows its images.
_TEXTS = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
_BOS_AND_TEXTS = UsualTemplate("{{ bos_token }}" + _TEXTS)
# As the published code of DeepSeek-VL2 writes a conversation.
_DEEPSEEK_VL2 = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'system' %}{{ message['content'] ~ '\\n\\n' }}"
    "{% elif message['role'] == 'user' %}{{ '<|User|>: ' ~ message['content'] ~ '\\n\\n' }}"
    "{% elif message['role'] == 'assistant' %}{{ '<|Assistant|>: ' ~ message['content'] ~ eos_token }}"
    "{% else %}{{ raise_exception('a message of ' ~ message['role'] ~ ' is not supported there') }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|Assistant|>:' }}{% endif %}"
)

USUAL_TEMPLATES: dict[str, UsualTemplate] = {
    "DeepseekOCRForCausalLM": _BOS_AND_TEXTS,
    "DeepseekOcr2ForConditionalGeneration": _BOS_AND_TEXTS,
    "DeepseekV32ForCausalLM": UsualTemplate(deepseek_v32.TEMPLATE, OrderedResults("\n")),
    "DeepseekV4ForCausalLM": UsualTemplate(deepseek_v4.V4.template(), OrderedResults("\n\n")),
    "DeepseekV41ForCausalLM": UsualTemplate(deepseek_v4.V41.template(), OrderedResults("\n\n")),
    "DeepseekVLV2ForCausalLM": UsualTemplate(_DEEPSEEK_VL2),
    "PaliGemmaForConditionalGeneration": UsualTemplate(_TEXTS),
    "CLIPModel": UsualTemplate(_TEXTS),
    "SiglipModel": UsualTemplate(_TEXTS),
}
# Values of tokenizer_mode that choose a template, whatever the checkpoint has -> registered class.
TEMPLATE_MODES = {
    "deepseek_v32": "DeepseekV32ForCausalLM",
    "deepseek_v4": "DeepseekV4ForCausalLM",
    "deepseek_v41": "DeepseekV41ForCausalLM",
}


def usual_template(mode: str, architecture: str, has_own: bool) -> UsualTemplate | None:
    """Return the template that replaces a tokenizer's own: that of a mode of TEMPLATE_MODES, else, if the tokenizer has
    none, that of its model's class; None to keep what it has.
    """
    if mode in TEMPLATE_MODES:
        return USUAL_TEMPLATES[TEMPLATE_MODES[mode]]
    return None if has_own else USUAL_TEMPLATES.get(architecture.partition("[")[0])
