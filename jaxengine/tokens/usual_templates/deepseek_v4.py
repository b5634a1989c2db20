"""Chat templates of DeepSeek V4 and V4.1, whose repositories have a program in their place.

They write what DeepSeek's own library (deepseek-recipe) makes of a conversation. Results of tools are parts of a
message of the user. Without tools, the reasoning of earlier answers is left out. V4 takes instructions only at the
beginning.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_ABSOLUTE = (
    "Reasoning Effort: Absolute maximum with no shortcuts permitted.\n"
    "You MUST be very thorough in your thinking and comprehensively decompose the problem to resolve the root cause, "
    "rigorously stress-testing your logic against all potential paths, edge cases, and adversarial scenarios.\n"
    "Explicitly write out your entire deliberation process, documenting every intermediate step, considered "
    "alternative, and rejected hypothesis to ensure absolutely no assumption is left unchecked.\n\n"
)
_BEYOND = (
    "Reasoning Effort: Beyond maximum — exhaustive, relentless, and uncompromising.\n"
    "You MUST reason with the utmost depth and rigor, leaving absolutely nothing to chance: exhaustively decompose the "
    "problem into its most fundamental components, trace every causal chain to its root, and resolve the underlying "
    "cause rather than any surface symptom.\n"
    "Do not stop reasoning until you have independently verified the solution from multiple angles and are certain "
    "that no assumption remains unchecked and no error remains undiscovered.\n\n"
)
_BUDGET = "Reasoning Effort: {} (range 1-100, the higher the value, the more thorough the reasoning)\n\n"
_TOOLS = """## Tools

You have access to a set of tools to help answer the user's question. You can invoke tools by writing a \
"<｜DSML｜CALLS>" block like the following:

<｜DSML｜CALLS>
<｜DSML｜INVOKE name="$TOOL_NAME">
<｜DSML｜PARAMETER name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</｜DSML｜PARAMETER>
...
</｜DSML｜INVOKE>
<｜DSML｜INVOKE name="$TOOL_NAME2">
...
</｜DSML｜INVOKE>
</｜DSML｜CALLS>

String parameters should be specified as is and set `string="true"`. For all other types (numbers, booleans, arrays, \
objects), pass the value in JSON format and set `string="false"`.

If thinking_mode is enabled (triggered by <think>), you MUST output your complete reasoning inside <think>...</think> \
BEFORE any tool calls or final response.

Otherwise, output directly after </think> with tool calls or final response.

### Available Tool Schemas

{%- for tool in tools -%}
  {%- set about = tool['function'] -%}
  {%- set about = {'name': about['name'], 'description': about['description'] or '', \
'parameters': about['parameters'] or {}} -%}
  {{- ('\\n\\n' if loop.first else '\\n') ~ (about | tojson) -}}
{%- endfor %}


You MUST strictly follow the above defined tool name and parameter schemas to invoke tool calls."""
_SETTINGS = """
{%- set thinks = true -%}
{%- if thinking is defined or enable_thinking is defined -%}
  {%- set thinks = (thinking | default(false)) or (enable_thinking | default(false)) -%}
{%- endif -%}
{%- set effort = reasoning_effort | default('high', true) -%}
{%- set thinks = thinks and effort != 'none' -%}
{%- set drops = not tools and drop_thinking | default(true) -%}
{%- set efforts = EFFORTS -%}
{%- set head = '' -%}
{%- if thinks and effort is string and effort in efforts -%}{%- set head = efforts[effort] -%}
{%- elif thinks and BUDGETS and effort is integer and 1 <= effort <= 100 -%}
  {%- set head = BUDGET.format(effort) -%}
{%- elif thinks -%}
  {{- raise_exception('reasoning_effort must be one of none, ' ~ efforts | join(', ') ~ RANGE ~ ', got ' ~ effort) -}}
{%- endif -%}
"""
_MESSAGES = """
{%- set ns = namespace(before='', last=-1) -%}
{%- for message in messages -%}
  {%- if message['role'] in ('user', 'tool') or message['role'] == 'system' and not loop.first -%}
    {%- set ns.last = loop.index0 -%}
  {%- endif -%}
{%- endfor -%}
{{- bos_token -}}
{%- set begins = messages[0]['role'] == 'system' -%}
{{- SYSTEM if head or tools or begins -}}{{- head -}}
{%- if begins -%}{{ messages[0]['content'] }}{%- endif -%}
{%- if tools -%}{{ '\\n\\n' }}TOOLS{{ '\\n' }}{%- endif -%}
{%- for message in messages -%}
  {%- set role, content = message['role'], message['content'] or '' -%}
  {%- if role == 'system' and loop.first -%}
  {%- elif role == 'system' and SYSTEM -%}{{ SYSTEM ~ content }}
  {%- elif role in ('user', 'tool') -%}
    {{- '\\n\\n' if ns.before in ('user', 'tool') else '<｜User｜>' -}}
    {{- '<tool_result>' ~ content ~ '</tool_result>' if role == 'tool' else content -}}
  {%- elif role == 'latest_reminder' -%}{{ '<｜latest_reminder｜>' ~ content }}
  {%- elif role == 'assistant' -%}
    {{- '<｜Assistant｜>' -}}
    {%- if thinks and (not drops or loop.index0 > ns.last and not add_generation_prompt) -%}
      {{- '<think>' ~ (message['reasoning_content'] or '') -}}
    {%- endif -%}
    {{- '</think>' ~ content -}}
    {%- if message['tool_calls'] -%}
      {{- '\\n\\n<｜DSML｜CALLS>\\n' -}}
      {%- for call in message['tool_calls'] -%}
        {{- '<｜DSML｜INVOKE name="' ~ call['function']['name'] ~ '">\\n' -}}
        {%- for key, value in call['function']['arguments'] | items -%}
          {{- '<｜DSML｜PARAMETER name="' ~ key ~ '" string="' ~ ('true' if value is string else 'false') -}}
          {{- '">' ~ (value if value is string else value | tojson) ~ '</｜DSML｜PARAMETER>\\n' -}}
        {%- else -%}{{ NOTHING }}
        {%- endfor -%}
        {{- '</｜DSML｜INVOKE>\\n' -}}
      {%- endfor -%}
      {{- '</｜DSML｜CALLS>' -}}
    {%- endif -%}
    {{- eos_token -}}
  {%- else -%}{{ raise_exception('a message of ' ~ role ~ ' is not supported there') }}
  {%- endif -%}
  {%- set ns.before = role -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<｜Assistant｜>' ~ ('<think>' if thinks else '</think>') }}{%- endif -%}
"""


@dataclass(frozen=True)
class DeepseekFormat:
    """Chat format of DeepSeek V4 or V4.1.

    Attributes:
      efforts: text at the beginning of a prompt, by value of reasoning_effort.
      budget: the same text for an integer from 1 to 100, with {} in its place; "" if such values are not allowed.
      system: token before instructions; "" for a format without one, which takes them only at the beginning.
      words: names of the elements around calls, a call and an argument.
      nothing: what a call without arguments has in their place.
    """

    efforts: dict[str, str]
    budget: str
    system: str
    words: tuple[str, str, str]
    nothing: str

    def template(self) -> str:
        """Return the chat template, as Jinja source."""
        source = _SETTINGS + _MESSAGES.replace("TOOLS", _TOOLS)
        facts = {
            "EFFORTS": repr(self.efforts),
            "BUDGETS": str(bool(self.budget)).lower(),
            "BUDGET": repr(self.budget),
            "RANGE": repr(" or an integer from 1 to 100" if self.budget else ""),
            "SYSTEM": repr(self.system),
            "NOTHING": repr(self.nothing),
            **{f"DSML｜{name}": f"DSML｜{word}" for name, word in zip(_ELEMENTS, self.words, strict=True)},
        }
        return re.sub("|".join(facts), lambda found: facts[found[0]], source)


_ELEMENTS = ("CALLS", "INVOKE", "PARAMETER")
# OpenAI's other values stand for the nearest one below; "xhigh" is "high" in both models.
V4 = DeepseekFormat(
    dict.fromkeys(("minimal", "low", "medium"), "") | dict.fromkeys(("high", "xhigh"), _ABSOLUTE) | {"max": _BEYOND},
    budget="",
    system="",
    words=("tool_calls", "invoke", "parameter"),
    nothing="",
)
V41 = DeepseekFormat(
    {
        **dict.fromkeys(("minimal", "low", "medium"), _BUDGET.format(50)),
        **dict.fromkeys(("high", "xhigh"), _BUDGET.format(75)),
        "max": _BUDGET.format(100),
    },
    budget=_BUDGET,
    system="<｜System｜>",
    words=(" calls", " invoke", " parameter"),
    nothing="\n",
)
