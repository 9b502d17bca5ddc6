// Shows the OpenAPI document and lets a person try each operation.

import { fetchRaw, request } from "./api.js";
import { fill, h } from "./dom.js";

const EXAMPLES = {
  "/v1/chat/completions": { messages: [{ role: "user", content: "Say hello in French." }], max_tokens: 32, stream: true },
  "/v1/completions": { prompt: "The capital of France is", max_tokens: 8 },
  "/v1/embeddings": { input: "Hello" },
  "/v1/chat/completions/render": { messages: [{ role: "user", content: "Hello" }] },
  "/v1/completions/render": { prompt: "Hello" },
  "/v1/chat/completions/input_tokens": { messages: [{ role: "user", content: "Hello" }] },
  "/tokenize": { prompt: "Hello world" },
  "/detokenize": { tokens: [1, 2, 3] },
};

async function send(method, path, body, output) {
  output.textContent = "";
  const reply = await fetchRaw(path, { method, body: method === "POST" ? body : undefined });
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let part = await reader.read(); !part.done; part = await reader.read()) output.textContent += part.value;
  try { output.textContent = JSON.stringify(JSON.parse(output.textContent), null, 2); } catch { /* a stream or text */ }
}

function operation(path, method, described) {
  const media = described.requestBody?.content["application/json"];
  const input = h("textarea", { rows: 8, "aria-label": `Body of ${path}`, value: JSON.stringify(EXAMPLES[path] ?? {}, null, 2) });
  const output = h("pre", { tabindex: "0" });
  const ask = () => send(method.toUpperCase(), path.replace("{model}", ""), input.value, output)
    .catch((error) => { output.textContent = String(error); });
  return h("details", {},
    h("summary", {}, h("span", {}, `${method.toUpperCase()} `), h("code", {}, path), ` ${described.summary}`),
    media && input, h("button", { type: "button", class: "button", onclick: ask }, "Send"), output);
}

export async function mount(root) {
  const list = h("div", { class: "column" }, "Loading…");
  root.append(list);
  const api = await request("openapi.json");
  fill(list, h("h1", {}, "API"), h("p", {}, `Version ${api.info.version}`),
    Object.entries(api.paths).flatMap(([path, methods]) =>
      Object.entries(methods).map(([method, described]) => operation(path, method, described))));
}
