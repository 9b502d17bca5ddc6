// Shared by the views beside the chat: styles, tabs, coloured JSON, and requests as code.

import { copyButton, fill, h } from "./dom.js";
import { key } from "./api.js";

const LONGEST_COLOURED = 200_000;
const MARKED = /("(?:[^"\\]|\\.)*")(\s*:)?|\b(true|false|null)\b|-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?/g;

// A view is shown after its styles have loaded.
await new Promise((done) => {
  const link = h("link", { rel: "stylesheet", href: "page/views.css", onload: done, onerror: done });
  document.head.append(link);
});

/** Debounces a function: `wait(f, 300)` calls f once, 300 ms after the last call. */
export function wait(act, ms) {
  let timer = 0;
  return (...given) => {
    clearTimeout(timer);
    timer = setTimeout(() => act(...given), ms);
  };
}

/** Creates tabs: `tabs("Request", [["curl", () => element], ...])`. Arrow keys move between them. */
export function tabs(label, entries, { onchange, first = 0 } = {}) {
  const panel = h("div", { role: "tabpanel", class: "tab-panel", tabindex: "0" });
  const buttons = entries.map(([name], at) => h("button", {
    type: "button", role: "tab", "aria-selected": "false", tabindex: "-1", id: `tab-${++made}`,
    onclick: () => open(at),
    onkeydown: (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!step) return;
      const next = (at + step + entries.length) % entries.length;
      open(next);
      buttons[next].focus();
    },
  }, name));
  const open = (at) => {
    buttons.forEach((button, place) => {
      button.setAttribute("aria-selected", String(place === at));
      button.tabIndex = place === at ? 0 : -1;
    });
    panel.setAttribute("aria-labelledby", buttons[at].id);
    fill(panel, entries[at][1]());
    onchange?.(at);
  };
  const list = h("div", { class: "tabs", role: "tablist", "aria-label": label }, buttons);
  open(first);
  return h("div", { class: "tabbed" }, list, panel);
}
let made = 0;

/** Shortens base64 data of images and audio to its first characters and its size. */
function withoutData(text) {
  return text.replace(/[A-Za-z0-9+/]{256,}={0,2}/g, (data) => `${data.slice(0, 16)}… (${Math.ceil(data.length * 3 / 4096)} KiB)`);
}

/** Shows JSON indented, with colours. */
export function showJson(value) {
  const text = withoutData(typeof value === "string" ? value : JSON.stringify(value, null, 2));
  return h("pre", { class: "json", tabindex: "0" }, text.length > LONGEST_COLOURED ? text : colourJson(text));
}

export function colourJson(text) {
  const parts = [];
  let at = 0;
  for (const found of text.matchAll(MARKED)) {
    const [all, string, colon, word] = found;
    parts.push(text.slice(at, found.index));
    const kind = string ? (colon ? "j-name" : "j-string") : word ? "j-word" : "j-number";
    parts.push(h("span", { class: kind }, string ?? all), colon ?? "");
    at = found.index + all.length;
  }
  return [...parts, text.slice(at)];
}

/** Shows a text that can be scrolled and copied; the copy is complete. */
export function codeBlock(text, label) {
  return h("div", { class: "code-block" }, h("pre", { tabindex: "0", "aria-label": label }, withoutData(text)), copyButton(() => text, `Copy ${label}`));
}

/** Returns the full URL of a path of this server. */
export function addressOf(path) {
  return new URL(path.replace(/^\//, ""), new URL(".", document.baseURI)).href;
}

const quote = (text) => `'${text.replaceAll("'", "'\\''")}'`;

/** Returns a request as a curl command, with $DRAGOMAN_API_KEY if there is a key. */
export function asCurl({ method, path, body, form }) {
  const parts = [`curl${body?.stream ? " -N" : ""}${method === "POST" || method === "GET" ? "" : ` -X ${method}`} ${quote(addressOf(path))}`];
  if (key.get()) parts.push('-H "Authorization: Bearer $DRAGOMAN_API_KEY"');
  if (body !== undefined) parts.push("-H 'Content-Type: application/json'", `-d ${quote(JSON.stringify(body, null, 2))}`);
  else if (method === "POST" && !form) parts.push("-X POST");
  for (const [name, value] of Object.entries(form ?? {})) {
    parts.push(`-F ${quote(typeof value === "string" ? `${name}=${value}` : `${name}=@${value.name}`)}`);
  }
  return parts.join(" \\\n  ");
}

/** Returns a request in Python: with OpenAI's or Anthropic's client for their APIs, otherwise with httpx. */
export function asPython({ method, path, body, form }) {
  const base = addressOf("/").replace(/\/$/, "");
  const secret = key.get() ? 'os.environ["DRAGOMAN_API_KEY"]' : '"none"';
  const importing = key.get() ? "import os\n\n" : "";
  const known = method === "POST" && body && PYTHON_CALLS[path];
  if (known) {
    const anthropic = path === "/v1/messages";
    const client = anthropic ? "anthropic" : "openai";
    const maker = anthropic ? `Anthropic(base_url="${base}", api_key=${secret})` : `OpenAI(base_url="${base}/v1", api_key=${secret})`;
    const { own, extra } = split(body, known.fields);
    const lines = Object.entries(own).map(([name, value]) => `    ${name}=${pythonValue(value, 1)},`);
    if (!own.model) lines.unshift('    model="default",');
    if (Object.keys(extra).length) lines.push(`    extra_body=${pythonValue(extra, 1)},`);
    const shown = body.stream ? "for event in answer:\n    print(event)" : "print(answer)";
    return `${importing}from ${client} import ${anthropic ? "Anthropic" : "OpenAI"}\n\nclient = ${maker}\nanswer = client.${known.call}(\n${lines.join("\n")}\n)\n${shown}\n`;
  }
  const headers = key.get() ? `, headers={"Authorization": f"Bearer {${secret}}"}` : "";
  const sent = body !== undefined ? `, json=${pythonValue(body, 0)}` : form ? `, files={${Object.keys(form).map((name) => `"${name}": ...`).join(", ")}}` : "";
  return `${importing}import httpx\n\nreply = httpx.request("${method}", "${addressOf(path)}"${headers}${sent})\nprint(reply.text)\n`;
}

const OPENAI_FIELDS = "model messages prompt input instructions stream max_tokens max_completion_tokens max_output_tokens temperature top_p n stop seed tools tool_choice response_format logprobs top_logprobs frequency_penalty presence_penalty logit_bias store metadata user reasoning_effort stream_options previous_response_id conversation background text reasoning system stop_sequences top_k thinking".split(" ");
const PYTHON_CALLS = {
  "/v1/chat/completions": { call: "chat.completions.create", fields: OPENAI_FIELDS.filter((name) => !["top_k", "system", "text", "thinking"].includes(name)) },
  "/v1/completions": { call: "completions.create", fields: OPENAI_FIELDS.filter((name) => !["top_k", "system", "text", "tools", "thinking"].includes(name)) },
  "/v1/responses": { call: "responses.create", fields: OPENAI_FIELDS.filter((name) => !["top_k", "system", "stop", "seed", "n", "thinking"].includes(name)) },
  "/v1/messages": { call: "messages.create", fields: OPENAI_FIELDS.filter((name) => !["seed", "n", "stop"].includes(name)) },
};

function split(body, fields) {
  const own = {}, extra = {};
  for (const [name, value] of Object.entries(body)) (fields.includes(name) ? own : extra)[name] = value;
  return { own, extra };
}

/** Returns a value as a Python literal. */
function pythonValue(value, depth) {
  const text = JSON.stringify(value, null, 4) ?? "None";
  const written = text.replace(MARKED, (all, string, colon, word) => (string ? all : { true: "True", false: "False", null: "None" }[word] ?? all));
  return written.replaceAll("\n", `\n${"    ".repeat(depth)}`);
}

/** Returns a request in JavaScript, for any browser or runtime. */
export function asJavaScript({ method, path, body, form }) {
  const headers = {};
  if (body !== undefined) headers["Content-Type"] = "application/json";
  const lines = [`  method: "${method}",`];
  const told = Object.entries(headers).map(([name, value]) => `"${name}": "${value}"`);
  if (key.get()) told.push("Authorization: `Bearer ${process.env.DRAGOMAN_API_KEY}`");
  if (told.length) lines.push(`  headers: { ${told.join(", ")} },`);
  if (body !== undefined) lines.push(`  body: JSON.stringify(${JSON.stringify(body, null, 2).replaceAll("\n", "\n  ")}),`);
  if (form) lines.push("  body: form, // a FormData");
  const read = body?.stream
    ? "for await (const piece of reply.body.pipeThrough(new TextDecoderStream())) console.log(piece);"
    : "console.log(await reply.json());";
  return `const reply = await fetch("${addressOf(path)}", {\n${lines.join("\n")}\n});\n${read}\n`;
}

/** Shows a request in all three languages. `request()` returns {method, path, body, form}. */
export function asCode(request) {
  return tabs("Request as code", [
    ["curl", () => codeBlock(asCurl(request()), "command")],
    ["Python", () => codeBlock(asPython(request()), "Python")],
    ["JavaScript", () => codeBlock(asJavaScript(request()), "JavaScript")],
  ]);
}

/** Returns the text of a stream event of any API: {text, reasoning, call, name}. */
export function textOfEvent(data) {
  const choice = data.choices?.[0];
  if (choice) {
    const delta = choice.delta ?? {};
    const call = delta.tool_calls?.[0]?.function ?? {};
    return { text: delta.content ?? choice.text ?? "", reasoning: delta.reasoning_content ?? "", call: call.arguments ?? "", name: call.name };
  }
  if (data.type === "response.output_text.delta") return { text: data.delta };
  if (/^response\.reasoning(_text|_summary_text)\.delta$/.test(data.type ?? "")) return { reasoning: data.delta };
  if (data.type === "response.output_item.added" && data.item?.type === "function_call") return { name: data.item.name };
  if (data.type === "response.function_call_arguments.delta") return { call: data.delta };
  if (data.type === "content_block_start" && data.content_block?.type === "tool_use") return { name: data.content_block.name };
  if (data.type === "content_block_delta") {
    const { text, thinking, partial_json: call } = data.delta ?? {};
    return { text, reasoning: thinking, call };
  }
  if (data.message && "content" in data.message && !data.type) return { text: data.message.content, reasoning: data.message.thinking };
  return typeof data.response === "string" ? { text: data.response, reasoning: data.thinking } : {};
}

const SVG = "http://www.w3.org/2000/svg";

/** Creates an SVG element. */
export function svg(tag, attributes, ...children) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}
