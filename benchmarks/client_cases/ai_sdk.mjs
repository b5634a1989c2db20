// Vercel's AI SDK, over OpenAI's chat as a compatible server, over its responses, and over Anthropic's messages.
// With tools and a schema it has two steps: a small model goes on calling, and each step is a whole answer to wait for.
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { Output, generateText, stepCountIs, streamText, tool } from "ai";
import { BASE, KEY, MODEL, Place, QUESTION, Weather, check, report, told } from "./case.mjs";

const chatModel = createOpenAICompatible({
  name: "jaxengine", baseURL: `${BASE}/v1`, apiKey: KEY, supportsStructuredOutputs: true,
})(MODEL);
const models = [
  chatModel,
  createOpenAI({ baseURL: `${BASE}/v1`, apiKey: KEY }).responses(MODEL),
  createAnthropic({ baseURL: `${BASE}/v1`, apiKey: KEY })(MODEL),
];
const ask = { prompt: QUESTION, maxOutputTokens: 200, maxRetries: 0 };
const get_weather = tool({ description: "The weather.", inputSchema: Place, execute: async (place) => told(place) });
const tools = { get_weather };

async function chat() {
  for (const model of models) check((await generateText({ ...ask, model })).text);
}

async function stream() {
  for (const model of models) {
    let text = "";
    for await (const part of streamText({ ...ask, model }).textStream) text += part;
    check(text);
  }
}

async function toolsForced() {
  for (const model of models) {
    const { toolResults } = await generateText({ ...ask, model, tools, toolChoice: "required" });
    check(toolResults.length && toolResults.every(({ output }) => output.includes("20 degrees")));
  }
}

async function streamed_tools() {
  for (const model of models) {
    const run = streamText({ ...ask, model, tools, toolChoice: { type: "tool", toolName: "get_weather" } });
    check((await run.toolResults).every(({ output }) => output.includes("20 degrees")) && (await run.toolCalls).length);
  }
}

async function structured() {
  for (const model of models.slice(0, 2)) {
    const run = await generateText({ ...ask, model, output: Output.object({ schema: Weather }) });
    Weather.parse(run.output);
  }
}

async function second_turn() {
  for (const model of models) {
    const prepareStep = ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? "required" : "none" });
    const run = await generateText({ ...ask, model, tools, prepareStep, stopWhen: stepCountIs(2) });
    check(run.steps.length === 2 && run.text);
    // Of responses, the SDK sends references to the items that it had.
    const messages = [{ role: "user", content: QUESTION }, ...run.response.messages, { role: "user", content: "And?" }];
    check((await generateText({ model, maxOutputTokens: 20, maxRetries: 0, messages })).text);
  }
}

async function tools_and_schema() {
  for (const model of models.slice(0, 2)) {
    const output = Output.object({ schema: Weather });
    const run = await generateText({ ...ask, model, tools, output, stopWhen: stepCountIs(2) });
    if (run.finishReason === "tool-calls") check(run.toolCalls.length);
    else Weather.parse(run.output);
  }
}

await report(["ai", "@ai-sdk/openai", "@ai-sdk/openai-compatible", "@ai-sdk/anthropic"], {
  chat, stream, tools: toolsForced, streamed_tools, structured, second_turn, tools_and_schema,
});
