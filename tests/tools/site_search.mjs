// Asks the search of a built site, by the worker that its pages run: node site_search.mjs SITE QUESTION...
// Prints a JSON list: the first hit of each question, the best section of the best page, or null.
import { readFileSync, readdirSync } from "node:fs";
import { join } from "node:path";
import vm from "node:vm";

const [site, ...questions] = process.argv.slice(2);
const workers = join(site, "assets", "javascripts", "workers");
const source = readFileSync(join(workers, readdirSync(workers).find((name) => /^search\..*\.js$/.test(name))), "utf8");
const index = JSON.parse(readFileSync(join(site, "search", "search_index.json"), "utf8"));

let listener, answer;
const context = vm.createContext({
  console,
  addEventListener: (_, each) => (listener = each),
  postMessage: (message) => (answer = message),
});
context.self = context;
vm.runInContext(source, context);
const ask = async (type, data) => {
  await listener({ data: { type, data } });
  while (answer === undefined) await new Promise(setImmediate);
  const { data: found } = answer;
  answer = undefined;
  return found;
};

await ask(0, { config: index.config, docs: index.docs, options: { suggest: false } });
const hits = [];
for (const question of questions) {
  const [page] = (await ask(2, question)).items;
  const best = page && page.reduce((one, other) => (other.score > one.score ? other : one));
  hits.push(best ? best.location : null);
}
console.log(JSON.stringify(hits));
