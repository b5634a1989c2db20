// grpc-js with the service's .proto, as its users load it: whole and streamed answers, schemas, scores, errors.
import { credentials, Metadata, loadPackageDefinition } from "@grpc/grpc-js";
import { loadSync } from "@grpc/proto-loader";
import { GRPC, KEY, MODEL, PROTO, QUESTION, Weather, check, report } from "./case.mjs";
import { z } from "zod";

const loaded = loadSync(PROTO, { keepCase: true, longs: Number, enums: String, oneofs: true });
const { Inference } = loadPackageDefinition(loaded).jaxengine.v1;
const client = new Inference(GRPC, credentials.createInsecure());
const keyed = (key = KEY) => {
  const metadata = new Metadata();
  metadata.set("authorization", `Bearer ${key}`);
  return metadata;
};
const call = (method, asked, key = KEY) =>
  new Promise((resolve, reject) => {
    client[method](asked, keyed(key), (error, answer) => (error ? reject(error) : resolve(answer)));
  });
const asking = (...messages) => ({ messages: messages.map(([role, content]) => ({ role, content })) });
const ask = {
  model: MODEL,
  temperature: 0,
  messages: asking(["user", QUESTION]),
  stopping: { max_new_tokens: 32 },
  response: { output_token_ids: true },
};

async function chat() {
  const answer = await call("Generate", ask);
  const [output] = answer.outputs;
  check(output.text && answer.usage.num_output_tokens === output.token_ids.length);
  const { text } = await call("Detokenize", { model: MODEL, token_ids: output.token_ids, skip_special_tokens: true });
  check(text === output.text);
  const scored = await call("Score", { model: MODEL, text: QUESTION });
  const { token_ids } = await call("Tokenize", { model: MODEL, text: QUESTION });
  check(scored.prompt_info.token_ids.join() === token_ids.join() && scored.prompt_info.logprobs[1] < 0);
  const refused = await call("Generate", ask, "wrong").catch(({ details, code }) => ({ details, code }));
  check(refused.code === 16, `a wrong key: ${JSON.stringify(refused)}`); // UNAUTHENTICATED
  const wrong = await call("Generate", { ...ask, temperature: -1 }).catch(({ details, code }) => ({ details, code }));
  check(wrong.code === 3 && wrong.details.includes("temperature"), JSON.stringify(wrong)); // INVALID_ARGUMENT
}

async function stream() {
  const [whole] = (await call("Generate", ask)).outputs;
  let text = "";
  const token_ids = [];
  let last;
  for await (const chunk of client.GenerateStream(ask, keyed())) {
    text += chunk.outputs?.text ?? "";
    token_ids.push(...(chunk.outputs?.token_ids ?? []));
    last = chunk;
  }
  check(text === whole.text && token_ids.join() === whole.token_ids.join());
  check(last.usage.num_output_tokens === whole.token_ids.length);
}

async function structured() {
  const json = JSON.stringify(z.toJSONSchema(Weather));
  const answer = await call("Generate", { ...ask, decoding: { json }, stopping: { max_new_tokens: 64 } });
  Weather.parse(JSON.parse(answer.outputs[0].text));
  const decoding = { choice: { choices: ["sun", "rain"] } };
  check(["sun", "rain"].includes((await call("Generate", { ...ask, decoding })).outputs[0].text));
}

async function second_turn() {
  const first = (await call("Generate", ask)).outputs[0].text;
  const messages = asking(["user", QUESTION], ["assistant", first], ["user", "And in Rome?"]);
  check((await call("Generate", { ...ask, messages })).outputs[0].text);
}

await report(["@grpc/grpc-js", "@grpc/proto-loader"], { chat, stream, structured, second_turn });
