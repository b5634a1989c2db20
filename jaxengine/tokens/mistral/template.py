"""Chat templates of Mistral AI's tokenizers, whose files name only a version of the chat format.

They write what Mistral AI's own library makes of a conversation. Versions 1 to 3 put the system prompt into a message
of the user, and later ones mark it; from 11 on each call of a tool has its own mark, and from 13 on a call has no id.
"""

from __future__ import annotations

from dataclasses import dataclass

VERSIONS = (1, 2, 3, 7, 11, 13, 15)

# Contents are texts or lists of parts. Texts side by side are joined by line breaks, also those of messages side by
# side; from version 15 on those of one message are not. One image after all texts of a turn of the user goes before
# them.
_CONTENT = """
{%- set ns = namespace(open=false, breaks=true, system='', first=-1, last=-1, before='', tools=[], calls=[]) -%}
{%- set turn = namespace(texts=false, others=0, ends=false, moved=[], moves=false, sees=false) -%}
{%- macro write(text) -%}
  {%- if text -%}{{ '\\n\\n' if ns.open and ns.breaks }}{{ text }}{%- set ns.open = true -%}{%- endif -%}
  {%- set ns.breaks = CHUNK_BREAKS if text else ns.breaks -%}
{%- endmacro -%}
{%- macro render(content) -%}
  {%- set ns.breaks = true -%}
  {%- if content is string -%}{{ write(content) }}
  {%- elif content -%}
    {%- for part in content -%}
      {%- if part['type'] == 'text' -%}{{ write(part['text']) }}
      {%- elif part['type'] == 'image' and IMAGES and turn.sees -%}
        {%- if not turn.moves -%}{{ '[IMG]' }}{%- endif -%}{%- set ns.open = false -%}
      {%- elif part['type'] == 'audio' and SOUNDS -%}{{ '[BEGIN_AUDIO][AUDIO]' }}{%- set ns.open = false -%}
      {%- elif part['type'] == 'thinking' and THINKS -%}
        {{- '[THINK]' ~ part['thinking'] ~ ('[/THINK]' if part['closed']) -}}{%- set ns.open = false -%}
      {%- else -%}{{ raise_exception('a part of type ' ~ part['type'] ~ ' is not supported there by this tokenizer') }}
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
    {%- if ns.before != 'user' -%}{%- set turn.texts = false -%}{%- set turn.others = 0 -%}{%- endif -%}
    {%- set content = message['content'] or [] -%}
    {%- for part in ([{'type': 'text', 'text': content}] if content is string else content) -%}
      {%- if part['type'] != 'text' -%}
        {%- set turn.others = turn.others + 1 -%}
        {%- set turn.ends = part['type'] == 'image' -%}
      {%- elif part['text'] -%}
        {%- set turn.texts = true -%}
        {%- set turn.ends = false -%}
      {%- endif -%}
    {%- endfor -%}
    {%- if loop.last or loop.nextitem['role'] != 'user' -%}
      {%- if turn.texts and turn.others == 1 and turn.ends -%}
        {%- set turn.moved = turn.moved + [ns.last] -%}
      {%- endif -%}
    {%- endif -%}
  {%- endif -%}
  {%- set ns.before = message['role'] -%}
{%- endfor -%}
{%- set ns.before = '' -%}
{%- if add_generation_prompt and messages and messages[-1]['role'] == 'assistant' -%}
  {{- raise_exception('the last message is an answer: it may be continued, with continue_final_message') -}}
{%- endif -%}
"""
# Versions 1 to 3: all system messages are one text before a message of the user, with which a conversation begins.
_SYSTEM_INSIDE = """
{%- for message in messages if message['role'] == 'system' -%}
  {%- set text = render(message['content']) -%}
  {%- set ns.open = false -%}
  {%- set ns.system = ns.system ~ ('\\n\\n' if ns.system) ~ text -%}
{%- endfor -%}
{%- set others = messages | rejectattr('role', 'equalto', 'system') | list -%}
{%- if not others or others[0]['role'] == 'assistant' -%}
  {%- set messages = [{'role': 'user', 'content': ''}] + messages -%}
{%- endif -%}
"""
_LOOP = """
{%- for message in messages -%}
  {%- set role, starts = message['role'], message['role'] != ns.before -%}
  {%- set ends = loop.last or loop.nextitem['role'] != role -%}
  {%- if starts or role in ('system', 'tool') -%}{%- set ns.open = false -%}{%- endif -%}
  {%- set turn.sees = role == 'user' or role == 'tool' and VERSION >= 15 -%}
  {%- if role == 'user' -%}
    {%- if starts -%}
      {%- if PLACE and VERSION > 1 -%}
        {%- if ns.tools -%}{{ '[AVAILABLE_TOOLS][' ~ ns.tools | join(', ') ~ '][/AVAILABLE_TOOLS]' }}{%- endif -%}
        {{- settings -}}
      {%- endif -%}
      {{- '[INST] ' if VERSION == 1 else '[INST]' -}}
      {%- if ns.system and PLACE -%}{{ ns.system ~ '\\n\\n' }}{%- endif -%}
      {%- set turn.moves = loop.index0 in turn.moved -%}{{ '[IMG]' if turn.moves }}
    {%- endif -%}
    {{- render(message['content']) -}}
    {%- if ends -%}{{ ' [/INST]' if VERSION == 1 else '[/INST]' }}{%- set turn.moves = false -%}{%- endif -%}
  {%- elif role == 'system' and VERSION >= 7 and ns.before in ('', 'system', 'user') -%}
    {{- '[SYSTEM_PROMPT]' ~ render(message['content']) ~ '[/SYSTEM_PROMPT]' -}}
  {%- elif role == 'system' and VERSION < 7 -%}
  {%- elif role == 'assistant' -%}
    ASSISTANT
    {%- if ends and (VERSION != 2 or not message['tool_calls'] or loop.index0 > ns.last) -%}{{ eos_token }}{%- endif -%}
  {%- elif role == 'tool' and VERSION > 1 and (ns.before == 'assistant' or ns.before == 'tool' and LISTS) -%}
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
    {%- set text = text if message['is_json'] else text | tojson -%}
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
    """Chat format of a tokenizer, as its file describes it.

    Attributes:
      version: one of VERSIONS.
      images, sounds: whether messages of the user may have images, and sounds; from version 15 on results of tools may
        have images too.
      thinks: whether the vocabulary has marks around reasoning.
      efforts: values of reasoning_effort, the default first; () for a model without them.
    """

    version: int
    images: bool = False
    sounds: bool = False
    thinks: bool = False
    efforts: tuple[str, ...] = ()

    @property
    def joint(self) -> str:
        """Text between the text parts of a message: an empty line before version 15, then nothing."""
        return "\n\n" if self.version < 15 else ""

    def template(self) -> str:
        """Return the chat template of this version, as Jinja source, with parts for efforts, media and thinking as the
        format has them.
        """
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
            "LISTS": "(VERSION > 2 or loop.index0 < ns.last)",
            "VERSION": str(version),
            "PLACE": place,
            "IMAGES": str(self.images).lower(),
            "SOUNDS": str(self.sounds).lower(),
            "THINKS": str(self.thinks).lower(),
            "CHUNK_BREAKS": str(version < 15).lower(),
        }
        for name, text in facts.items():
            source = source.replace(name, text)
        return source
