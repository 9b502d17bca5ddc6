"use strict";
// Shows the OpenAPI document and lets a person try each operation. Text is only ever set as text.

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

function element(tag, text, className) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
}

function resolve(schema, api) {
  return schema && schema.$ref ? api.components.schemas[schema.$ref.split("/").pop()] : schema || {};
}

function typeName(schema, api) {
  if (schema.$ref) return schema.$ref.split("/").pop();
  if (schema.enum) return schema.enum.map((value) => JSON.stringify(value)).join(" | ");
  if (schema.anyOf) return schema.anyOf.map((one) => typeName(one, api)).filter((name) => name !== "null").join(" | ");
  const range = [schema.minimum, schema.maximum].some((bound) => bound !== undefined)
    ? ` (${schema.minimum ?? "…"} to ${schema.maximum ?? "…"})` : "";
  if (schema.type === "array") return `list of ${typeName(schema.items || {}, api)}`;
  return (schema.type || "any") + range;
}

function fieldTable(schema, api) {
  const table = element("table");
  const required = new Set(schema.required || []);
  for (const [name, field] of Object.entries(schema.properties || {})) {
    const row = table.insertRow();
    row.append(element("td", name + (required.has(name) ? " *" : "")), element("td", typeName(field, api)));
  }
  return table;
}

async function send(method, path, body, output) {
  const headers = { "Content-Type": "application/json" };
  const key = document.getElementById("key").value.trim();
  if (key) headers.Authorization = `Bearer ${key}`;
  output.textContent = "";
  const reply = await fetch(path, { method, headers, body: method === "POST" ? body : undefined });
  if (reply.status === 401) document.getElementById("key").focus();
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let part = await reader.read(); !part.done; part = await reader.read()) output.textContent += part.value;
  try { output.textContent = JSON.stringify(JSON.parse(output.textContent), null, 2); } catch { /* a stream or text */ }
}

function operation(path, method, described, api) {
  const box = element("details");
  const title = element("summary");
  title.append(element("span", method.toUpperCase(), `method ${method}`), element("code", path),
    element("span", described.summary, "what"));
  const body = element("div", undefined, "body");
  const media = described.requestBody && described.requestBody.content["application/json"].schema;
  const input = element("textarea");
  if (media) {
    input.value = JSON.stringify(EXAMPLES[path] || {}, null, 2);
    body.append(input);
  }
  const button = element("button", "Send");
  const output = element("pre", "");
  button.onclick = () => send(method.toUpperCase(), path.replace("{model}", ""), input.value, output)
    .catch((error) => { output.textContent = String(error); });
  body.append(button, output);
  for (const one of media ? media.anyOf || [media] : []) body.append(fieldTable(resolve(one, api), api));
  box.append(title, body);
  return box;
}

// The key stays in this tab: it is kept over a reload, and gone with the tab.
function keepKey() {
  const input = document.getElementById("key");
  input.value = sessionStorage.getItem("key") || "";
  input.oninput = () => sessionStorage.setItem("key", input.value);
}

async function main() {
  keepKey();
  const api = await (await fetch("/openapi.json")).json();
  document.getElementById("version").textContent = `version ${api.info.version}`;
  const list = document.getElementById("operations");
  list.textContent = "";
  for (const [path, methods] of Object.entries(api.paths)) {
    for (const [method, described] of Object.entries(methods)) list.append(operation(path, method, described, api));
  }
}

main();
