// The `openai` package of npm against a router; tests/e2e/test_worker_router.py runs it.
//
//   node openai_client.js '{"url": ..., "prompt": ..., "greedy": ..., "seed": ..., "sampled": [...], "tokens": ...}'
//
// "greedy" and "sampled" are the texts of the prompt by the executor's own client. Each check that holds is one line of
// the output; the first one that does not hold ends the program with its difference.

"use strict";

const assert = require("node:assert/strict");
const { OpenAI, BadRequestError } = require("openai");

const given = JSON.parse(process.argv[2]);
const client = new OpenAI({ baseURL: `${given.url}/v1`, apiKey: "none", maxRetries: 0, timeout: 60_000 });
const messages = [{ role: "user", content: given.prompt }];
const greedy = { model: "demo", max_tokens: given.tokens, temperature: 0 };
const usage = { prompt_tokens: given.prompt.length, completion_tokens: given.tokens };

const schema = {
  type: "object",
  properties: { name: { type: "string", maxLength: 6 }, old: { type: "boolean" } },
  required: ["name", "old"],
  additionalProperties: false,
};
const parameters = {
  type: "object",
  properties: { a: { type: "integer", minimum: 0, maximum: 99 } },
  required: ["a"],
  additionalProperties: false,
};
const tools = [{ type: "function", function: { name: "add", parameters } }];

function counted({ prompt_tokens, completion_tokens }) {
  return { prompt_tokens, completion_tokens };
}

async function collected(stream, text) {
  const found = { text: "", reasons: [], usage: null };
  for await (const chunk of stream) {
    found.usage = chunk.usage ?? found.usage;
    for (const choice of chunk.choices) {
      found.text += text(choice) ?? "";
      if (choice.finish_reason) found.reasons.push(choice.finish_reason);
    }
  }
  return found;
}

const checks = {
  "chat completion": async () => {
    const answer = await client.chat.completions.create({ ...greedy, messages });
    assert.equal(answer.choices[0].message.content, given.greedy);
    assert.equal(answer.choices[0].finish_reason, "length");
    assert.deepEqual(counted(answer.usage), usage);
  },
  "stream of a chat with usage": async () => {
    const options = { stream: true, stream_options: { include_usage: true } };
    const stream = await client.chat.completions.create({ ...greedy, messages, ...options });
    const found = await collected(stream, (choice) => choice.delta.content);
    assert.equal(found.text, given.greedy);
    assert.deepEqual(found.reasons, ["length"]);
    assert.deepEqual(counted(found.usage), usage);
  },
  "the package's own collector of a stream": async () => {
    const stream = client.chat.completions.stream({ ...greedy, messages });
    assert.equal(await stream.finalContent(), given.greedy);
  },
  completion: async () => {
    const answer = await client.completions.create({ ...greedy, prompt: given.prompt });
    assert.equal(answer.choices[0].text, given.greedy);
    assert.deepEqual(counted(answer.usage), usage);
  },
  "stream of a completion with usage": async () => {
    const options = { stream: true, stream_options: { include_usage: true } };
    const stream = await client.completions.create({ ...greedy, prompt: given.prompt, ...options });
    const found = await collected(stream, (choice) => choice.text);
    assert.equal(found.text, given.greedy);
    assert.deepEqual(counted(found.usage), usage);
  },
  "several texts with seeds": async () => {
    const sampled = { temperature: 0.9, n: given.sampled.length, seed: given.seed };
    const answer = await client.chat.completions.create({ ...greedy, messages, ...sampled });
    const texts = answer.choices.toSorted((a, b) => a.index - b.index).map((each) => each.message.content);
    assert.deepEqual(texts, given.sampled);
  },
  "log-probabilities": async () => {
    const scored = { logprobs: true, top_logprobs: 2 };
    const answer = await client.chat.completions.create({ ...greedy, messages, ...scored });
    const tokens = answer.choices[0].logprobs.content;
    assert.equal(tokens.map((each) => each.token).join(""), given.greedy);
    for (const each of tokens) {
      assert.equal(each.top_logprobs.length, 2);
      assert.equal(each.logprob, each.top_logprobs[0].logprob);
    }
  },
  stop: async () => {
    const stop = given.greedy.slice(8, 11);
    const answer = await client.chat.completions.create({ ...greedy, messages, stop });
    assert.equal(answer.choices[0].finish_reason, "stop");
    assert.equal(answer.choices[0].message.content, given.greedy.slice(0, given.greedy.indexOf(stop)));
  },
  "JSON schema": async () => {
    const format = { type: "json_schema", json_schema: { name: "person", schema, strict: true } };
    const answer = await client.chat.completions.parse({
      ...greedy,
      messages,
      max_tokens: 100,
      response_format: format,
    });
    const person = JSON.parse(answer.choices[0].message.content);
    assert.deepEqual(Object.keys(person).sort(), ["name", "old"]);
    assert.equal(typeof person.old, "boolean");
  },
  "a forced tool": async () => {
    const choice = { type: "function", function: { name: "add" } };
    const asked = { ...greedy, messages, max_tokens: 100, tools, tool_choice: choice };
    const [call] = (await client.chat.completions.create(asked)).choices[0].message.tool_calls;
    assert.equal(call.function.name, "add");
    const { a } = JSON.parse(call.function.arguments);
    assert.ok(Number.isInteger(a) && a >= 0 && a <= 99);
  },
  "a forced tool as a stream": async () => {
    const choice = { type: "function", function: { name: "add" } };
    const asked = { ...greedy, messages, max_tokens: 100, tools, tool_choice: choice, stream: true };
    const found = { name: "", arguments: "", reasons: [] };
    for await (const chunk of await client.chat.completions.create(asked)) {
      for (const choice of chunk.choices) {
        for (const call of choice.delta.tool_calls ?? []) {
          found.name += call.function.name ?? "";
          found.arguments += call.function.arguments ?? "";
        }
        if (choice.finish_reason) found.reasons.push(choice.finish_reason);
      }
    }
    assert.equal(found.name, "add");
    assert.ok(Number.isInteger(JSON.parse(found.arguments).a));
    assert.deepEqual(found.reasons, ["tool_calls"]);
  },
  embedding: async () => {
    const asked = { model: "demo", input: given.prompt, encoding_format: "float" };
    const answer = await client.embeddings.create(asked);
    const length = Math.hypot(...answer.data[0].embedding);
    assert.ok(Math.abs(length - 1) < 1e-5, `the length is ${length}`);
  },
  response: async () => {
    const asked = { model: "demo", input: given.prompt, max_output_tokens: given.tokens, temperature: 0 };
    const answer = await client.responses.create(asked);
    assert.equal(answer.output_text, given.greedy);
  },
  "stream of a response": async () => {
    const asked = { model: "demo", input: given.prompt, max_output_tokens: given.tokens, temperature: 0 };
    let text = "";
    let last = "";
    for await (const event of await client.responses.create({ ...asked, stream: true })) {
      if (event.type === "response.output_text.delta") text += event.delta;
      last = event.type;
    }
    assert.equal(text, given.greedy);
    assert.match(last, /^response\.(completed|incomplete)$/);
  },
  "an error": async () => {
    const format = { type: "json_schema", json_schema: { name: "x", schema: { type: "nonsense" } } };
    const asked = { ...greedy, messages, response_format: format };
    await assert.rejects(client.chat.completions.create(asked), BadRequestError);
  },
};

async function main() {
  for (const [name, check] of Object.entries(checks)) {
    await check();
    console.log(name);
  }
}

main().catch((error) => {
  console.error(error);
  process.exitCode = 1;
});
