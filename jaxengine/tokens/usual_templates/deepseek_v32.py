"""Chat template of DeepSeek V3.2, whose repository has a program in its place (encoding_dsv32.py).

It writes what that program makes of a conversation. Reasoning is off unless a request asks for it; that of answers
before the last message of the user is left out.
"""

from __future__ import annotations

_TOOLS = """## Tools
You have access to a set of tools you can use to answer the user's question.
You can invoke functions by writing a "<｜DSML｜function_calls>" block like the following as part of your reply to the \
user:
<｜DSML｜function_calls>
<｜DSML｜invoke name="$FUNCTION_NAME">
<｜DSML｜parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</｜DSML｜parameter>
...
</｜DSML｜invoke>
<｜DSML｜invoke name="$FUNCTION_NAME2">
...
</｜DSML｜invoke>
</｜DSML｜function_calls>
String and scalar parameters should be specified as is without any escaping or quotes, while lists and objects should \
use JSON format. The "string" attribute should be set to "true" for string type parameters and "false" for other types \
(numbers, booleans, arrays, objects).
If the thinking_mode is enabled, then after function results you should strongly consider outputting a thinking block. \
Here is an example:
<｜DSML｜function_calls>
...
</｜DSML｜function_calls>
<function_results>
...
</function_results>
<think>...thinking about results</think>
Here are the functions available in JSONSchema format:
<functions>
{%- for tool in tools -%}{{ '\\n' ~ (tool['function'] | tojson) }}{%- endfor %}

</functions>{{ '\\n' }}"""
_MESSAGES = """
{%- set thinks = thinking | default(false) or enable_thinking | default(false) -%}
{%- set ns = namespace(last=-1) -%}
{%- for message in messages if message['role'] == 'user' -%}{%- set ns.last = ns.last + 1 -%}{%- endfor -%}
{%- set ns.user = -1 -%}
{{- bos_token -}}
{%- set begins = messages[0]['role'] == 'system' -%}
{%- if begins -%}{{ messages[0]['content'] }}{%- endif -%}
{%- if tools -%}{{ '\\n\\n' }}TOOLS{%- endif -%}
{%- for message in messages -%}
  {%- set role, content = message['role'], message['content'] or '' -%}
  {%- set opens = add_generation_prompt or not loop.last -%}
  {%- if role == 'system' -%}{{ content if not loop.first }}
  {%- elif role == 'user' -%}
    {%- set ns.user = ns.user + 1 -%}
    {{- '<｜User｜>' ~ content -}}
    {%- if opens -%}{{ '<｜Assistant｜>' ~ ('<think>' if thinks and ns.user == ns.last else '</think>') }}{%- endif -%}
  {%- elif role == 'tool' and loop.previtem is defined and loop.previtem['role'] in ('assistant', 'tool') -%}
    {{- '\\n\\n<function_results>' if loop.previtem['role'] == 'assistant' -}}
    {{- '\\n<result>' ~ content ~ '</result>' -}}
    {%- if loop.last or loop.nextitem['role'] != 'tool' -%}
      {{- '\\n</function_results>' -}}
      {%- if opens -%}{{ '\\n\\n' ~ ('<think>' if thinks and ns.user == ns.last else '</think>') }}{%- endif -%}
    {%- endif -%}
  {%- elif role == 'assistant' -%}
    {%- if thinks and ns.user == ns.last -%}{{ (message['reasoning_content'] or '') ~ '</think>' }}{%- endif -%}
    {{- content -}}
    {%- if message['tool_calls'] -%}
      {{- '\\n\\n<｜DSML｜function_calls>\\n' -}}
      {%- for call in message['tool_calls'] -%}
        {{- '<｜DSML｜invoke name="' ~ call['function']['name'] ~ '">\\n' -}}
        {%- for key, value in call['function']['arguments'] | items -%}
          {{- '<｜DSML｜parameter name="' ~ key ~ '" string="' ~ ('true' if value is string else 'false') ~ '">' -}}
          {{- (value if value is string else value | tojson) ~ '</｜DSML｜parameter>\\n' -}}
        {%- else -%}{{ '\\n' }}
        {%- endfor -%}
        {{- '</｜DSML｜invoke>\\n' -}}
      {%- endfor -%}
      {{- '</｜DSML｜function_calls>' -}}
    {%- endif -%}
    {{- eos_token -}}
  {%- else -%}{{ raise_exception('a message of ' ~ role ~ ' is not supported there') }}
  {%- endif -%}
  {%- if loop.last and add_generation_prompt and role not in ('user', 'tool') -%}
    {{- '<｜Assistant｜>' ~ ('<think>' if thinks else '</think>') -}}
  {%- endif -%}
{%- endfor -%}
"""
TEMPLATE = _MESSAGES.replace("TOOLS", _TOOLS)
