// What every client in JavaScript is asked to do, and how its cases report; see case.py.
import { readFileSync } from "node:fs";
import { z } from "zod";

export const [BASE, KEY, MODEL, GRPC, PROTO] = process.argv.slice(2);
export const QUESTION = "What is the weather in Paris? Answer in a few words.";
export const Place = z.object({ city: z.enum(["Paris", "Rome"]), days: z.number().int().min(1).max(9) });
export const Weather = z.object({
  city: z.enum(["Paris", "Rome"]),
  degrees: z.number().int().min(0).max(40),
  rain: z.boolean(),
});
export const told = ({ city, days }) => `${city}: 20 degrees and no rain, for ${days} days`;
const COLUMNS = ["chat", "stream", "tools", "streamed_tools", "structured", "second_turn", "tools_and_schema"];
const SECONDS = 900;

export function check(fact, text = "not what was expected") {
  if (!fact) throw new Error(text);
}

export async function report(packages, cases) {
  const version = (name) => JSON.parse(readFileSync(`node_modules/${name}/package.json`)).version;
  console.log(JSON.stringify({ client: packages.map((name) => `${name} ${version(name)}`).join(" + ") + " (js)" }));
  for (const column of COLUMNS.filter((each) => each in cases)) {
    let timer;
    const late = new Promise((_, reject) => {
      timer = setTimeout(() => reject(new Error(`not done after ${SECONDS} s`)), SECONDS * 1000);
    });
    try {
      await Promise.race([cases[column](), late]);
      console.log(JSON.stringify({ case: column, ok: true }));
    } catch (error) {
      console.error(error);
      console.log(JSON.stringify({ case: column, ok: false, why: String(error).slice(0, 300) }));
    }
    clearTimeout(timer);
  }
  process.exit(0);
}
