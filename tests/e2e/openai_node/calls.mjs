// Calls a server with OpenAI's Node client and prints what a user of that client sees, as one JSON object.
// Usage: node calls.mjs URL
import OpenAI from "openai";

const client = new OpenAI({ baseURL: `${process.argv[2]}/v1`, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "Name the capital city of France." }];
const asked = { model: "default", messages, max_tokens: 24, temperature: 0 };
const create = (fields) => client.chat.completions.create({ ...asked, ...fields });

async function streamed() {
  let text = "";
  for await (const chunk of await create({ stream: true })) text += chunk.choices[0]?.delta?.content ?? "";
  return text;
}

const calls = {
  "a chat": async () => (await create({})).choices[0].message.content,
  "a streamed chat": streamed,
  "the model default": async () => (await client.models.retrieve("default")).object,
  "a temperature out of range": () => create({ temperature: -1 }),
  "a temperature that is text": () => create({ temperature: "hot" }),
  "max_tokens below zero": () => create({ max_tokens: -1 }),
  "an unknown role": () => create({ messages: [{ role: "bot", content: "hi" }] }),
  "an unknown model": () => client.models.retrieve("gpt-4"),
  "a prompt that is too long": () => create({ messages: [{ role: "user", content: "long ".repeat(20000) }] }),
  "a streamed prompt that is too long": () => create({ stream: true, messages: [{ role: "user", content: "long ".repeat(20000) }] }),
  "a body that is no object": () => client.post("/chat/completions", { body: [1, 2] }),
  "a body without messages": () => client.post("/chat/completions", { body: {} }),
  "a route that does not exist": () => client.post("/conversations", { body: {} }),
  "a method that does not exist": () => client.get("/chat/completions"),
};

const seen = {};
for (const [name, call] of Object.entries(calls)) {
  try {
    const answer = await call();
    seen[name] = { answer: typeof answer === "string" ? answer : JSON.stringify(answer) };
  } catch (error) {
    seen[name] = { error: error.message, kind: error.constructor.name, type: error.type ?? null, param: error.param ?? null };
  }
}
console.log(JSON.stringify(seen));
