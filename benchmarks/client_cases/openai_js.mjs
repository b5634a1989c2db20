// OpenAI's JavaScript client: chat completions with its helpers, and /v1/responses.
import OpenAI from "openai";
import { zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";
import { BASE, KEY, MODEL, Place, QUESTION, Weather, check, report, told } from "./case.mjs";

const client = new OpenAI({ baseURL: `${BASE}/v1`, apiKey: KEY, maxRetries: 0 });
const messages = [{ role: "user", content: QUESTION }];
const ask = { model: MODEL, messages, temperature: 0, max_tokens: 64 };
const schema = z.toJSONSchema(Place);
const tools = [{ type: "function", function: { name: "get_weather", parameters: schema, strict: true } }];
const forced = { tools, tool_choice: "required", parallel_tool_calls: false };

async function chat() {
  const answer = await client.chat.completions.create(ask);
  const response = await client.responses.create({
    model: MODEL, input: QUESTION, temperature: 0, max_output_tokens: 64,
  });
  check(answer.choices[0].message.content && response.output_text === answer.choices[0].message.content);
}

async function stream() {
  const whole = await client.chat.completions.create(ask);
  const runner = client.chat.completions.stream({ ...ask, stream_options: { include_usage: true } });
  let text = "";
  for await (const chunk of runner) text += chunk.choices[0]?.delta.content ?? "";
  check(text === whole.choices[0].message.content);
  check((await runner.totalUsage()).completion_tokens === whole.usage.completion_tokens);
}

async function toolsForced() {
  const answer = await client.chat.completions.create({ ...ask, ...forced });
  Place.parse(JSON.parse(answer.choices[0].message.tool_calls[0].function.arguments));
}

async function streamed_tools() {
  const answer = await client.chat.completions.stream({ ...ask, ...forced }).finalChatCompletion();
  const [call, ...more] = answer.choices[0].message.tool_calls;
  check(more.length === 0);
  Place.parse(JSON.parse(call.function.arguments));
}

async function structured() {
  const format = zodResponseFormat(Weather, "weather");
  const answer = await client.chat.completions.parse({ ...ask, response_format: format });
  Weather.parse(answer.choices[0].message.parsed);
  const text = { format: zodTextFormat(Weather, "weather") };
  Weather.parse((await client.responses.parse({ model: MODEL, input: QUESTION, text })).output_parsed);
}

async function second_turn() {
  const first = (await client.chat.completions.create({ ...ask, ...forced })).choices[0].message;
  const [call] = first.tool_calls;
  const result = { role: "tool", tool_call_id: call.id, content: told(JSON.parse(call.function.arguments)) };
  const second = await client.chat.completions.create({
    ...ask, messages: [...messages, first, result], tools, tool_choice: "none",
  });
  check(second.choices[0].message.content);
}

async function tools_and_schema() {
  const format = zodResponseFormat(Weather, "weather");
  const answer = await client.chat.completions.parse({ ...ask, tools, response_format: format });
  const { parsed, tool_calls } = answer.choices[0].message;
  if (tool_calls?.length) tool_calls.forEach((call) => Place.parse(JSON.parse(call.function.arguments)));
  else Weather.parse(parsed);
}

await report(["openai"], {
  chat, stream, tools: toolsForced, streamed_tools, structured, second_turn, tools_and_schema,
});
