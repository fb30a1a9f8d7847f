// A scheduler with continuous batching and chunked prefill in JavaScript, on the generated contract alone.
"use strict";
const path = require("node:path");
const { randomUUID } = require("node:crypto");
const { inspect } = require("node:util");
const grpc = require("@grpc/grpc-js");
const protoLoader = require("@grpc/proto-loader");

const ROOT = path.join(__dirname, "..");
const BUDGET = 64; // tokens of a step: this bounds how long a long prompt delays the other texts
const LENGTH = 48; // tokens of a text behind its prompt

const definition = protoLoader.loadSync("ferrum_rpc/executor/v1/model_executor.proto", {
  includeDirs: [path.join(ROOT, "protos"), path.join(ROOT, "third_party/googleapis")],
  keepCase: true,
  longs: String,
  oneofs: true,
  defaults: true,
  enums: String,
});
const { ModelExecutor } = grpc.loadPackageDefinition(definition).ferrum_rpc.executor.v1;

async function main(target, ...prompts) {
  const client = new ModelExecutor(target, grpc.credentials.createInsecure(), { "grpc.max_receive_message_length": -1 });
  const call = (method, request) =>
    new Promise((resolve, reject) => client[method](request, (error, answer) => (error ? reject(error) : resolve(answer))));
  const texts = prompts.map((prompt) => ({ tokens: [...Buffer.from(prompt)], fed: 0, handle: null }));
  for (const text of texts) text.end = text.tokens.length + LENGTH;
  let running = texts, steps = 0;
  while (running.length) {
    const items = [], fed = [];
    let room = BUDGET;
    for (const text of running) {
      const token_ids = text.tokens.slice(text.fed, text.fed + room); // one token, or a chunk of a prompt
      if (!token_ids.length) continue;
      const last = text.fed + token_ids.length === text.tokens.length; // only then is its row wanted
      const output = { positions: last ? "POSITIONS_LAST" : "POSITIONS_NONE", greedy: {} };
      items.push({ token_ids, output, handle: text.handle, request_id: randomUUID() });
      fed.push({ text, last });
      room -= token_ids.length;
    }
    const { results, row_blocks } = await call("UnifiedForward", { items });
    steps += 1;
    for (const [index, result] of results.entries()) {
      if (result.result === "error") throw new Error(result.error.message);
      const { handle, rows } = result.output, { text, last } = fed[index];
      [text.handle, text.fed] = [handle, text.fed + items[index].token_ids.length];
      if (last) text.tokens.push(row_blocks[rows.block].tokens.token_ids.data.readUInt32LE(4 * rows.first));
    }
    const done = running.filter((text) => text.tokens.length >= text.end);
    await Promise.all(done.map(({ handle }) => call("Release", { handle })));
    running = running.filter((text) => !done.includes(text));
  }
  for (const { tokens } of texts) console.log(inspect(Buffer.from(tokens.filter((each) => each < 256)).toString()));
  console.log(`${texts.length} texts in ${steps} steps`);
  client.close();
}

main(...process.argv.slice(2));
