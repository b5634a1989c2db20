"""Chat templates of Mistral AI's tokenizers, whose files name only a version of the chat format.

They write what Mistral AI's own library makes of a conversation. Versions 1 to 3 put the system prompt into a message
of the user, and later ones mark it; from 11 on each call of a tool has its own mark, and from 13 on a call has no id.
"""

from __future__ import annotations

from dataclasses import dataclass

VERSIONS = (1, 2, 3, 7, 11, 13, 15)

# Contents are texts or lists of parts. Texts side by side are joined by line breaks, also those of messages side by
# side; from version 15 on those of one message are not. An image after texts only goes before them.
_CONTENT = """
{%- set ns = namespace(open=false, breaks=true, system='', first=-1, last=-1, before='', tools=[], calls=[]) -%}
{%- macro write(text) -%}
  {%- if text -%}{{ '\\n\\n' if ns.open and ns.breaks }}{{ text }}{%- set ns.open = true -%}{%- endif -%}
  {%- set ns.breaks = CHUNK_BREAKS -%}
{%- endmacro -%}
{%- macro render(content) -%}
  {%- set ns.breaks = true -%}
  {%- if content is string -%}{{ write(content) }}
  {%- elif content -%}
    {%- set others = content | rejectattr('type', 'equalto', 'text') | list -%}
    {%- if others | length == 1 and content[-1]['type'] == 'image' -%}{{ MARK_IMAGE }}{%- endif -%}
    {%- for part in content -%}
      {%- if part['type'] == 'text' -%}{{ write(part['text']) }}
      {%- elif part['type'] == 'image' and IMAGES -%}
        {%- if others | length > 1 or not loop.last -%}{{ MARK_IMAGE }}{%- endif -%}{%- set ns.open = false -%}
      {%- elif part['type'] == 'audio' and SOUNDS -%}{{ '[BEGIN_AUDIO][AUDIO]' }}{%- set ns.open = false -%}
      {%- else -%}{{ raise_exception('a part of type ' ~ part['type'] ~ ' is not supported by this tokenizer') }}
      {%- endif -%}
    {%- endfor -%}
  {%- endif -%}
{%- endmacro -%}
"""
_START = """
{{- bos_token -}}
{%- for tool in tools or [] -%}
  {%- set about = tool['function'] -%}
  {%- set shown = {'name': about['name'], 'description': about['description'] or ''} -%}
  {%- set shown = dict(shown, parameters=about['parameters'] or {}) -%}
  {%- set ns.tools = ns.tools + [{'type': 'function', 'function': shown} | tojson] -%}
{%- endfor -%}
{%- for message in messages -%}
  {%- if message['role'] == 'user' -%}
    {%- set ns.first = loop.index0 if ns.first < 0 else ns.first -%}
    {%- set ns.last = loop.index0 if ns.before != 'user' else ns.last -%}
  {%- endif -%}
  {%- set ns.before = message['role'] -%}
{%- endfor -%}
{%- set ns.before = '' -%}
"""
# Versions 1 to 3: all system messages are one text before a message of the user.
_SYSTEM_INSIDE = """
{%- for message in messages if message['role'] == 'system' -%}
  {%- set told = render(message['content']) -%}
  {%- set ns.open = false -%}
  {%- set ns.system = ns.system ~ ('\\n\\n' if ns.system) ~ told -%}
{%- endfor -%}
{%- set messages = messages | rejectattr('role', 'equalto', 'system') | list -%}
"""
_LOOP = """
{%- for message in messages -%}
  {%- set role, starts = message['role'], message['role'] != ns.before -%}
  {%- set ends = loop.last or loop.nextitem['role'] != role -%}
  {%- if starts or role in ('system', 'tool') -%}{%- set ns.open = false -%}{%- endif -%}
  {%- if role == 'user' -%}
    {%- if starts -%}
      {%- if PLACE and VERSION > 1 -%}
        {%- if ns.tools -%}{{ '[AVAILABLE_TOOLS][' ~ ns.tools | join(', ') ~ '][/AVAILABLE_TOOLS]' }}{%- endif -%}
        {{- settings -}}
      {%- endif -%}
      {{- '[INST] ' if VERSION == 1 else '[INST]' -}}
      {%- if ns.system and PLACE -%}{{ ns.system ~ '\\n\\n' }}{%- endif -%}
    {%- endif -%}
    {{- render(message['content']) -}}
    {%- if ends -%}{{ ' [/INST]' if VERSION == 1 else '[/INST]' }}{%- endif -%}
  {%- elif role == 'system' and VERSION >= 7 and ns.before in ('', 'system', 'user') -%}
    {{- '[SYSTEM_PROMPT]' ~ render(message['content']) ~ '[/SYSTEM_PROMPT]' -}}
  {%- elif role == 'assistant' and ns.before -%}
    ASSISTANT
    {%- if ends and (VERSION != 2 or not message['tool_calls'] or loop.index0 > ns.last) -%}{{ eos_token }}{%- endif -%}
  {%- elif role == 'tool' and VERSION > 1 and (ns.before == 'assistant' or ns.before == 'tool' and VERSION > 2) -%}
    TOOL
  {%- else -%}
    {{- raise_exception('a message of ' ~ role ~ ' after ' ~ (ns.before or 'nothing') ~ ' is not supported') -}}
  {%- endif -%}
  {%- set ns.before = role -%}
{%- endfor -%}
"""
_ANSWER = """
    {%- set thought = message['reasoning_content'] or message['reasoning'] -%}
    {%- if thought and THINKS -%}{{ '[THINK]' ~ thought ~ '[/THINK]' }}{%- set ns.open = false -%}{%- endif -%}
    {%- if message['tool_calls'] and message['content'] and VERSION < 7 -%}
      {{- raise_exception('an answer with tool calls must have no content') -}}
    {%- endif -%}
    {%- if not (message['tool_calls'] or message['content'] or thought and THINKS) -%}
      {{- raise_exception('an answer must have content or tool calls') -}}
    {%- endif -%}
    {{- ' ' if VERSION == 1 -}}
    {%- set content = message['content'] -%}
    {{- render(content.rstrip(' ') if content is string and ends and VERSION > 1 else content) -}}
    {%- if message['tool_calls'] -%}CALLS{%- endif -%}
"""
# Calls before the last message of the user are left out in version 2, which has no ids.
_LISTED_CALLS = """
    {%- set ns.calls = [] -%}
    {%- for call in message['tool_calls'] -%}
      {%- set made = call['function'] -%}
      {%- set text = made['arguments'] if made['arguments'] is string else made['arguments'] | tojson -%}
      {%- set own = ', "id": "' ~ call['id'][-9:] ~ '"' if call['id'] and VERSION > 2 else '' -%}
      {%- set text = '{"name": ' ~ (made['name'] | tojson) ~ ', "arguments": ' ~ text ~ own ~ '}' -%}
      {%- set ns.calls = ns.calls + [text] -%}
    {%- endfor -%}
    {%- if VERSION > 2 or loop.index0 > ns.last -%}{{ '[TOOL_CALLS][' ~ ns.calls | join(', ') ~ ']' }}{%- endif -%}
"""
_MARKED_CALLS = """
    {%- for call in message['tool_calls'] -%}
      {%- set made = call['function'] -%}
      {{- '[TOOL_CALLS]' ~ made['name'] -}}
      {%- if VERSION < 13 and call['id'] -%}{{ '[CALL_ID]' ~ call['id'][-9:] }}{%- endif -%}
      {{- '[ARGS]' ~ (made['arguments'] if made['arguments'] is string else made['arguments'] | tojson) -}}
    {%- endfor -%}
"""
# A result that is JSON stays as it is within JSON; any other text is quoted.
_QUOTED = """
    {%- set text = render(message['content']) | string -%}
    {%- set is_json = text[:1] ~ text[-1:] in ('{}', '[]', '""') or text in ('true', 'false', 'null') -%}
    {%- if not is_json and text not in (text | int | string, text | float | string) -%}
      {%- set text = text | tojson -%}
    {%- endif -%}
"""
_RESULTS = {
    2: _QUOTED
    + """
    {%- if loop.index0 > ns.last -%}
      {{- '[TOOL_RESULTS][{"name": ' ~ (message['name'] | tojson) ~ ', "content": ' ~ text ~ '}][/TOOL_RESULTS]' -}}
    {%- endif -%}
""",
    3: _QUOTED
    + """
    {{- '[TOOL_RESULTS]{"content": ' ~ text ~ ', "call_id": "' ~ message['tool_call_id'][-9:] ~ '"}[/TOOL_RESULTS]' -}}
""",
    7: """
    {{- '[TOOL_RESULTS]' ~ message['tool_call_id'][-9:] ~ '[TOOL_CONTENT]' -}}
    {{- render(message['content']) ~ '[/TOOL_RESULTS]' -}}
""",
    13: "{{- '[TOOL_RESULTS]' ~ render(message['content']) ~ '[/TOOL_RESULTS]' -}}",
}
_SETTINGS = """
{%- set effort = reasoning_effort or 'DEFAULT' -%}
{%- if effort not in VALUES -%}
  {{- raise_exception('reasoning_effort must be one of ' ~ VALUES | join(', ') ~ ', got ' ~ effort) -}}
{%- endif -%}
{%- set settings = '[MODEL_SETTINGS]{"reasoning_effort": "' ~ effort ~ '"}[/MODEL_SETTINGS]' -%}
"""


@dataclass(frozen=True)
class MistralFormat:
    """What a tokenizer's file says of its chat format.

    Attributes:
      version: one of VERSIONS.
      images, sounds: whether messages of the user may have images, and sounds.
      thinks: whether the vocabulary has marks around reasoning.
      efforts: values of reasoning_effort, the default first; () for a model without them.
    """

    version: int
    images: bool = False
    sounds: bool = False
    thinks: bool = False
    efforts: tuple[str, ...] = ()

    def template(self) -> str:
        """Return the chat template, as Jinja source."""
        version = self.version
        listed = version < 11
        result = _RESULTS[max((each for each in _RESULTS if each <= version), default=2)]
        answer = _ANSWER.replace("CALLS", _LISTED_CALLS if listed else _MARKED_CALLS)
        loop = _LOOP.replace("ASSISTANT", answer).replace("TOOL\n", f"{result}\n")
        settings = "{%- set settings = '' -%}"
        if self.efforts:
            settings = _SETTINGS.replace("DEFAULT", self.efforts[0]).replace("VALUES", repr(self.efforts))
        inside = _SYSTEM_INSIDE if version < 7 else ""
        source = settings + _CONTENT + inside + _START + loop
        # Tools, and the system prompt of early versions, stand before the first or the last message of the user.
        place = "loop.index0 == ns.first" if version in (1, 13, 15) else "loop.index0 == ns.last"
        facts = {
            "VERSION": str(version),
            "PLACE": place,
            "IMAGES": str(self.images).lower(),
            "SOUNDS": str(self.sounds).lower(),
            "THINKS": str(self.thinks).lower(),
            "CHUNK_BREAKS": str(version < 15).lower(),
            "MARK_IMAGE": "'[IMG]'",
        }
        for name, text in facts.items():
            source = source.replace(name, text)
        return source
