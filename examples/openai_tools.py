"""A tool call through OpenAI's client, streamed, and the tool's result sent back.

    jaxengine serve --enable-auto-tool-choice --tool-call-parser hermes
    python examples/openai_tools.py [BASE_URL]

BASE_URL is http://127.0.0.1:8000/v1 by default. `tool_choice` names the tool, so its arguments follow the schema with
any model. With "auto" the model decides, which needs a larger model than the embedded one.
"""

import json
import sys

from openai import OpenAI

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


def get_weather(city: str) -> str:
    """Return the tool's result, a fixed sentence about `city`. A real tool would look it up."""
    return f"It is sunny in {city}, 24 degrees."


client = OpenAI(base_url=(sys.argv[1:] or ["http://127.0.0.1:8000/v1"])[0], api_key="none")
model = client.models.list().data[0].id
messages = [{"role": "user", "content": "What is the weather in Paris?"}]
stream = client.chat.completions.create(
    model=model,
    messages=messages,
    tools=[WEATHER],
    tool_choice={"type": "function", "function": {"name": "get_weather"}},
    temperature=0,
    max_tokens=64,
    stream=True,
)
name, arguments, call_id = "", "", ""
for chunk in stream:
    for call in chunk.choices[0].delta.tool_calls or ():
        call_id = call.id or call_id
        name += call.function.name or ""
        arguments += call.function.arguments or ""
print(f"call: {name}({arguments})")

answer = get_weather(**json.loads(arguments))
function = {"name": name, "arguments": arguments}
messages += [
    {"role": "assistant", "content": "", "tool_calls": [{"id": call_id, "type": "function", "function": function}]},
    {"role": "tool", "tool_call_id": call_id, "content": answer},
]
last = client.chat.completions.create(model=model, messages=messages, temperature=0, max_tokens=32)
print(f"tool: {answer}\nanswer: {last.choices[0].message.content}")
