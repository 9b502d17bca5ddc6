// A conversation as a tree: an edited message or repeated answer begins a branch, and no version is lost.
//
// A node has {id, parent, role, at} and
//   user:        content, files: [{name, type, size, data}] with data in base64
//   assistant:   content, reasoning, calls: [{id, name, arguments, server, output, error}], model, finish, usage, error,
//                times; `server` names the MCP server that ran the call, whose output is then included
//   tool:        results: {id of a call: text}, for all calls of the parent node

import { mediaKind } from "./files.js";

export const ROOT = "root";

export function newId() {
  return [...crypto.getRandomValues(new Uint8Array(9))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}

export class Tree {
  constructor(kept = {}) {
    this.id = kept.id ?? newId();
    this.title = kept.title ?? "";
    this.created = kept.created ?? Date.now();
    this.updated = kept.updated ?? this.created;
    this.settings = kept.settings ?? null;
    this.nodes = new Map();
    this.children = new Map([[ROOT, []]]);
    /** The child that is shown, by parent. */
    this.chosen = new Map(Object.entries(kept.chosen ?? {}));
    for (const node of kept.nodes ?? []) this.#put(node);
  }

  #put(node) {
    this.nodes.set(node.id, node);
    this.children.set(node.id, []);
    this.children.get(node.parent)?.push(node.id);
  }

  /** Adds a node below another, and shows it. */
  add(parent, node) {
    const made = { id: newId(), parent: parent ?? ROOT, at: Date.now(), ...node };
    this.#put(made);
    this.chosen.set(made.parent, made.id);
    this.updated = Date.now();
    if (!this.title && node.role === "user") this.title = titleOf(node);
    return made;
  }

  /** Returns the nodes that are shown, from the first on. */
  path() {
    const found = [];
    for (let id = this.#next(ROOT); id; id = this.#next(id)) found.push(this.nodes.get(id));
    return found;
  }

  #next(id) {
    const children = this.children.get(id) ?? [];
    const chosen = this.chosen.get(id);
    return children.includes(chosen) ? chosen : children.at(-1);
  }

  /** Returns the ids of all versions of a node, and its index among them. */
  ways(node) {
    const ids = this.children.get(node.parent) ?? [];
    return { ids, at: ids.indexOf(node.id) };
  }

  choose(id) {
    this.chosen.set(this.nodes.get(id).parent, id);
  }

  /** Returns the nodes from the first to this one. */
  upTo(id) {
    const found = [];
    for (let node = this.nodes.get(id); node; node = this.nodes.get(node.parent)) found.unshift(node);
    return found;
  }

  toJSON() {
    const { id, title, created, updated, settings } = this;
    return { id, title, created, updated, settings, chosen: Object.fromEntries(this.chosen), nodes: [...this.nodes.values()] };
  }
}

function titleOf(node) {
  const line = (node.content || node.files?.[0]?.name || "").trim().split("\n")[0];
  return line.length > 60 ? `${line.slice(0, 57)}…` : line;
}

/** Returns the name and size of a file. */
export function describeFile({ name, size }) {
  return `${name} (${size < 1024 ? `${size} B` : size < 1048576 ? `${Math.round(size / 1024)} KB` : `${(size / 1048576).toFixed(1)} MB`})`;
}

// Conversion to requests.

/** Returns the messages for Chat Completions. */
export function chatMessages(nodes, system) {
  const said = nodes.flatMap((node) => {
    if (node.role === "user") return [{ role: "user", content: userContent(node, "text", filePart) }];
    if (node.role === "tool") return Object.entries(node.results).map(([id, content]) => ({ role: "tool", tool_call_id: id, content }));
    const calls = (node.calls ?? []).map((call) => ({ id: call.id, type: "function", function: { name: call.name, arguments: call.arguments } }));
    const outputs = (node.calls ?? []).filter((call) => call.server).map((call) => ({ role: "tool", tool_call_id: call.id, content: call.output ?? call.error ?? "" }));
    const message = { role: "assistant", content: node.content || (calls.length ? null : "") };
    if (node.reasoning) message.reasoning_content = node.reasoning;
    if (!outputs.length) return [calls.length ? { ...message, tool_calls: calls } : message];
    // Calls that the server ran come before the final text.
    return [{ role: "assistant", content: null, tool_calls: calls }, ...outputs, { role: "assistant", content: node.content || "" }];
  });
  return system ? [{ role: "system", content: system }, ...said] : said;
}

/** Returns the input for Responses. */
export function responseItems(nodes) {
  return nodes.flatMap((node) => {
    if (node.role === "user") return [{ role: "user", content: userContent(node, "input_text", inputFile) }];
    if (node.role === "tool") return Object.entries(node.results).map(([id, output]) => ({ type: "function_call_output", call_id: id, output }));
    const calls = (node.calls ?? []).flatMap((call) => {
      const made = { type: "function_call", call_id: call.id, name: call.name, arguments: call.arguments };
      return call.server ? [made, { type: "function_call_output", call_id: call.id, output: call.output ?? call.error ?? "" }] : [made];
    });
    const text = node.content ? [{ role: "assistant", content: node.content }] : [];
    return (node.calls ?? []).some((call) => call.server) ? [...calls, ...text] : [...text, ...calls];
  });
}

function userContent(node, type, part) {
  return node.files?.length ? [...node.files.map(part), { type, text: node.content }] : node.content;
}

function filePart({ name, type, data }) {
  const url = `data:${type};base64,${data}`;
  if (mediaKind(type) === "image") return { type: "image_url", image_url: { url } };
  if (mediaKind(type) === "audio") return { type: "audio_url", audio_url: { url } };
  return { type: "file", file: { filename: name, file_data: `data:${type || "text/plain"};base64,${data}` } };
}

function inputFile({ name, type, data }) {
  if (mediaKind(type) === "image") return { type: "input_image", image_url: `data:${type};base64,${data}` };
  if (mediaKind(type) === "audio") return { type: "input_audio", input_audio: { data } };
  return { type: "input_file", filename: name, file_data: `data:${type || "text/plain"};base64,${data}` };
}

// Export.

/** Returns the shown branch of a conversation as Markdown. */
export function toMarkdown(tree) {
  const parts = tree.path().map((node) => {
    if (node.role === "tool") return Object.entries(node.results).map(([id, text]) => `### Result of \`${id}\`\n\n${fenced(text)}`).join("\n\n");
    const files = (node.files ?? []).map((file) => `*${describeFile(file)}*\n\n`).join("");
    const thought = node.reasoning ? `<details><summary>Reasoning</summary>\n\n${node.reasoning.trim()}\n\n</details>\n\n` : "";
    const calls = (node.calls ?? []).map((call) => `\n\n### Call of \`${call.name}\`\n\n${fenced(call.arguments, "json")}${call.output ? `\n\n${fenced(call.output)}` : ""}`).join("");
    return `## ${node.role === "user" ? "User" : `Assistant (${node.model ?? "model"})`}\n\n${files}${thought}${node.content ?? ""}${calls}`;
  });
  const system = tree.settings?.system ? `## System\n\n${tree.settings.system}\n\n` : "";
  return `# ${tree.title || "Conversation"}\n\n${system}${parts.join("\n\n")}\n`;
}

/** Returns a code block whose fence the text cannot close. */
function fenced(text, language = "") {
  const longest = Math.max(2, ...(text.match(/`+/g) ?? []).map((run) => run.length));
  const mark = "`".repeat(longest + 1);
  return `${mark}${language}\n${text}\n${mark}`;
}
