// All operations of the API, with an example that works. Objects that an example needs (a stored answer, an uploaded file)
// are created when it is sent, unless the user names existing ones.

import { fetchRaw, key, request } from "./api.js";
import { fill, h, icon } from "./dom.js";
import { asCode, codeBlock, colourJson, showJson, tabs, textOfEvent } from "./views.js";

const GROUPS = [
  ["Chat completions", /^\/v1\/chat\/completions/],
  ["Completions", /^\/(v1\/completions|inference)/],
  ["Responses", /^\/v1\/responses/],
  ["Conversations", /^\/v1\/conversations/],
  ["Messages", /^\/(v1\/messages|api\/hello)/],
  ["Ollama", /^\/api\//],
  ["Embeddings and scores", /embeddings|rerank|score/],
  ["Files and batches", /^\/v1\/(files|uploads|batches)/],
  ["Tokens and parsers", /tokeni[sz]e|tokenizer|^\/parse|separate_reasoning|^\/dialects/],
  ["Models", /models|lora/],
  ["Training", /trajectories|engine/],
  ["Server", /./],
];
const IDS = /"((?:resp|conv|msg|chatcmpl|file|upload|part|batch|msgbatch|fc|rs)[_-][\w-]+)"/g;
const SOCKET = {
  method: "ws",
  path: "/v1/responses",
  summary: "Responses over a WebSocket",
  group: "Responses",
  described: { description: "One connection for many responses: each message requests one, and its events are sent back as messages. Browsers cannot send an API key with a WebSocket, so it works here only on servers without keys." },
};
const seen = new Set();

export async function mount(root, app) {
  const api = await request("openapi.json");
  const operations = Object.entries(api.paths).flatMap(([path, methods]) => Object.entries(methods).map(([method, described]) => ({
    method, path, described, summary: described.summary, group: GROUPS.find(([, fits]) => fits.test(path))[0],
  })));
  operations.splice(operations.findIndex((one) => one.group === "Responses") + 1, 0, SOCKET);
  const detail = h("section", { class: "operation", "aria-label": "Operation" });
  const list = h("nav", { class: "operation-list", "aria-label": "Operations" });
  const filter = h("input", { type: "search", placeholder: "Filter", "aria-label": "Filter operations", oninput: () => drawList() });
  const count = h("p", { class: "hint", role: "status" });
  let leave = null;

  const nameOf = (one) => `${one.method} ${one.path}`;
  const chosen = () => operations.find((one) => nameOf(one) === app.place) ?? operations[0];
  function drawList() {
    const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    const fits = operations.filter((one) => words.every((word) => `${nameOf(one)} ${one.summary} ${one.group}`.toLowerCase().includes(word)));
    count.textContent = `${fits.length} of ${operations.length} operations, version ${api.info.version}`;
    fill(list, GROUPS.map(([group]) => {
      const mine = fits.filter((one) => one.group === group);
      return mine.length ? [h("h2", {}, group), h("ul", {}, mine.map(link))] : null;
    }));
  }
  const link = (one) => h("li", {}, h("a", {
    href: `#api/${encodeURIComponent(nameOf(one))}`, class: "operation-link", "aria-current": one === chosen() ? "true" : null, title: one.summary,
  }, method(one.method), h("span", { class: "path" }, one.path)));
  function drawOperation() {
    leave?.();
    const one = chosen();
    leave = one === SOCKET ? drawSocket(detail, one, app) : drawDetail(detail, one, api, app);
    for (const each of list.querySelectorAll("a")) {
      const current = decodeURIComponent(each.hash.slice(5)) === nameOf(one);
      if (current) each.setAttribute("aria-current", "true");
      else each.removeAttribute("aria-current");
    }
  }
  const show = () => {
    drawOperation();
    detail.scrollIntoView?.({ block: "nearest" });
  };
  app.addEventListener("place", show);
  fill(root, h("div", { class: "api-columns" },
    h("div", { class: "api-side" }, h("h1", {}, "API"), filter, count, list, h("p", { class: "hint" }, h("a", { href: "openapi.json" }, "openapi.json"))),
    detail));
  drawList();
  drawOperation();
  return () => {
    leave?.();
    app.removeEventListener("place", show);
  };
}

const method = (name) => h("span", { class: `method ${name}` }, name === "delete" ? "DEL" : name.toUpperCase());

function head(one) {
  return [
    h("div", { class: "operation-head" }, method(one.method), h("h2", {}, h("code", {}, one.path))),
    h("p", { class: "operation-what" }, one.summary, one.described.description && h("span", { class: "hint" }, ` ${one.described.description}`)),
  ];
}

// One operation: its fields, the request, and the reply.

function drawDetail(detail, one, api, app) {
  const described = one.described;
  const content = described.requestBody?.content ?? {};
  const media = content["application/json"];
  const form = content["multipart/form-data"];
  const parameters = (described.parameters ?? []).map((each) => parameterField(each, described["x-before"], app));
  const body = media && bodyField(media.example, app);
  const fields = form && formFields(form, app);
  const reply = h("div", { class: "reply", "aria-live": "off" });
  const stop = new Stopper();
  const send = h("button", { type: "submit", class: "button primary" }, "Send");
  const words = () => ({ MODEL: app.model ?? "" });

  const gather = (known) => ({
    method: one.method.toUpperCase(),
    path: pathOf(one.path, parameters, known),
    ...(body ? { body: body.value(known) } : {}),
    ...(fields ? { form: fields.values() } : {}),
  });
  const act = async (event) => {
    event?.preventDefault();
    if (body && !body.check()) return;
    const signal = stop.begin();
    fill(send, "Stop");
    try {
      const known = await prepare(described["x-before"] ?? [], parameters, body, words(), reply, signal);
      if (known) await exchange(gather(known), reply, signal);
    } catch (error) {
      if (error.name !== "AbortError") fill(reply, h("p", { class: "field-error", role: "alert" }, error.message));
    } finally {
      stop.end(signal);
      fill(send, "Send");
    }
  };
  const code = h("details", { class: "as-code" }, h("summary", {}, "As code"));
  code.addEventListener("toggle", () => {
    if (code.open) fill(code, h("summary", {}, "As code"), body && !body.check() ? h("p", { class: "hint" }, "The body is not valid JSON.") : asCode(() => gather(words())));
  });
  const before = described["x-before"]?.length
    ? h("p", { class: "hint" }, `Sent first, unless you fill in the fields: ${described["x-before"].map((step) => `${(step.method ?? "post").toUpperCase()} ${step.path}`).join(", then ")}.`)
    : null;
  fill(detail, head(one), h("form", {
    class: "stack",
    onsubmit: (event) => (stop.busy ? (event.preventDefault(), stop.stop()) : act(event)),
    onkeydown: (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) act(event);
    },
  },
  parameters.length ? h("div", { class: "parameters" }, parameters.map((each) => each.element)) : null,
  body?.element, fields?.element, before,
  h("div", { class: "row" }, send, h("span", { class: "hint" }, h("kbd", {}, "Ctrl"), " ", h("kbd", {}, "Enter")), body && h("button", { type: "button", class: "button quiet small", onclick: () => body.reset() }, "Example"))),
  reply, code, media ? fieldTables(media.schema, api) : null, knownIds());
  return () => stop.stop();
}

/** Allows one request at a time; the next one aborts it. */
class Stopper {
  #current = null;
  get busy() { return this.#current !== null; }
  begin() {
    this.stop();
    this.#current = new AbortController();
    return this.#current.signal;
  }
  end(signal) { if (this.#current?.signal === signal) this.#current = null; }
  stop() {
    this.#current?.abort();
    this.#current = null;
  }
}

function parameterField(parameter, before, app) {
  const inPath = parameter.in === "path";
  const example = parameter.example ?? "";
  const isModel = example === "MODEL";
  const made = inPath && !isModel && before?.length;
  const input = h("input", {
    value: inPath ? (isModel ? app.model ?? "" : "") : example,
    placeholder: made ? "created when you send" : inPath ? example : "", autocomplete: "off", spellcheck: "false", list: made ? "seen-ids" : null,
  });
  const element = h("label", {}, h("code", {}, parameter.name), h("span", { class: "hint" }, inPath ? " in the path" : " query"), input);
  return { ...parameter, element, word: inPath ? example : null, get value() { return input.value.trim(); }, set value(text) { input.value = text; } };
}

const knownIds = () => h("datalist", { id: "seen-ids" }, [...seen].map((id) => h("option", { value: id })));

function bodyField(example, app) {
  const written = () => JSON.stringify(example, null, 2).replaceAll('"MODEL"', JSON.stringify(app.model ?? "MODEL"));
  const problem = h("p", { class: "field-error", hidden: true, role: "alert" });
  const input = h("textarea", {
    class: "mono", "aria-label": "Body", spellcheck: "false", value: written(), rows: Math.min(18, written().split("\n").length + 1), oninput: () => check(),
  });
  const check = () => {
    let error = null;
    try { JSON.parse(input.value || "{}"); } catch (found) { error = found; }
    problem.hidden = !error;
    problem.textContent = error ? `Not valid JSON: ${error.message}` : "";
    input.setAttribute("aria-invalid", String(Boolean(error)));
    return !error;
  };
  return {
    element: h("div", { class: "stack" }, input, problem),
    check,
    reset: () => { input.value = written(); check(); },
    names: (word) => input.value.includes(`"${word}"`),
    value: (known) => JSON.parse(replaceWords(input.value || "{}", known)),
  };
}

const replaceWords = (text, known) => Object.entries(known).reduce((made, [word, meant]) => made.replaceAll(`"${word}"`, JSON.stringify(meant)), text);

function formFields(form) {
  const inputs = Object.entries(form.schema.properties).map(([name, schema]) => {
    const example = form.example?.[name];
    if (schema.enum) return [name, h("select", {}, schema.enum.map((value) => h("option", { value, selected: value === example }, value)))];
    if (typeof example === "object" || schema.format === "binary") return [name, h("input", { type: "file" })];
    return [name, h("input", { value: example ?? "" })];
  });
  const values = () => Object.fromEntries(inputs.flatMap(([name, input]) => {
    if (input.type !== "file") return input.value ? [[name, input.value]] : [];
    const example = form.example?.[name];
    return [[name, input.files[0] ?? new File([example?.content ?? ""], example?.name ?? "file")]];
  }));
  const hint = Object.values(form.example ?? {}).find((each) => typeof each === "object");
  return {
    values,
    element: h("div", { class: "parameters" }, inputs.map(([name, input]) => h("label", {}, h("code", {}, name), h("span", { class: "hint" },
      input.type === "file" && hint ? ` file; default: ${hint.name}` : " form"), input))),
  };
}

function pathOf(path, parameters, known) {
  let made = path;
  const query = new URLSearchParams();
  for (const each of parameters) {
    const value = each.value || (each.word && known[each.word]) || (each.in === "path" ? each.word ?? each.name : "");
    if (each.in === "path") made = made.replace(`{${each.name}}`, encodeURIComponent(value).replaceAll("%2F", "/"));
    else if (value) query.set(each.name, value);
  }
  return query.size ? `${made}?${query}` : made;
}

/** Creates the objects that an example needs and the user has not named; returns the placeholders' values, or null. */
async function prepare(steps, parameters, body, known, reply, signal) {
  const missing = parameters.some((each) => each.in === "path" && !each.value && each.word !== "MODEL");
  const named = !parameters.some((each) => each.in === "path") && steps.some((step) => Object.keys(step.take ?? {}).some((word) => body?.names(word)));
  const needed = missing || named || (steps.length > 0 && steps.every((step) => !step.take));
  for (const step of needed ? steps : []) {
    fill(reply, h("p", { class: "hint" }, `First: ${(step.method ?? "post").toUpperCase()} ${step.path} …`));
    const path = step.path.split("/").map((part) => known[part] ?? part).join("/");
    const init = { method: (step.method ?? "post").toUpperCase(), signal };
    if (step.form) init.body = formData(step.form, known);
    else if (step.body !== undefined) init.body = replaceWords(JSON.stringify(step.body), known);
    const told = await settled(path, init, step.until ?? {}, signal);
    if (!told.ok) {
      fill(reply, h("p", { class: "hint" }, `${init.method} ${path}, sent first:`), await showReply(told.reply, performance.now()));
      return null;
    }
    for (const [word, place] of Object.entries(step.take ?? {})) known[word] = place.split(".").reduce((value, name) => value?.[name], told.body);
  }
  for (const each of parameters) if (each.in === "path" && !each.value && known[each.word]) each.value = known[each.word];
  return known;
}

function formData(fields, known = {}) {
  const made = new FormData();
  for (const [name, value] of Object.entries(fields)) {
    if (typeof value === "string") made.append(name, value);
    else made.append(name, value instanceof File ? value : new File([replaceWords(value.content, known)], value.name));
  }
  return made;
}

async function settled(path, init, until, signal) {
  for (let tries = 0; ; tries++) {
    const reply = await asked(path, init);
    if (!reply.ok) return { ok: false, reply };
    const body = await reply.clone().json().catch(() => ({}));
    if (tries > 100 || Object.entries(until).every(([name, value]) => body[name] === value)) return { ok: true, body };
    signal.throwIfAborted();
    await new Promise((done) => setTimeout(done, 200));
  }
}

/** Returns the reply, whatever its status; without a valid key the user is asked for one first. */
async function asked(path, init) {
  const reply = await fetchRaw(path, init);
  if (reply.status !== 401) return reply;
  const before = key.get();
  await request("v1/models").catch(() => null);
  return key.get() !== before ? fetchRaw(path, init) : reply;
}

async function exchange({ method: name, path, body, form }, out, signal) {
  const began = performance.now();
  fill(out, h("p", { class: "hint" }, "Waiting…"));
  const reply = await asked(path, { method: name, signal, ...(form ? { body: formData(form) } : body !== undefined ? { body } : {}) });
  const type = reply.headers.get("content-type") ?? "";
  if (/event-stream|ndjson/.test(type)) await showStream(reply, out, began);
  else fill(out, await showReply(reply, began));
}

function statusLine(reply, began) {
  const good = reply.ok ? "accent" : "danger";
  const time = h("span", { class: "hint" }, `${Math.round(performance.now() - began)} ms`);
  const headers = [...reply.headers].map(([name, value]) => `${name}: ${value}`).join("\n");
  return { time, element: h("div", { class: "reply-head" },
    h("span", { class: `badge ${good}` }, `${reply.status} ${reply.statusText}`.trim()), time,
    h("details", {}, h("summary", {}, "Headers"), h("pre", { tabindex: "0" }, headers))) };
}

async function showReply(reply, began) {
  const type = reply.headers.get("content-type") ?? "";
  const line = statusLine(reply, began).element;
  if (type.includes("octet-stream")) return [line, codeBlock((await reply.text()).slice(0, 20_000), "reply")];
  const text = await reply.text();
  for (const [, id] of text.matchAll(IDS)) seen.add(id);
  let value;
  try { value = JSON.parse(text); } catch { return [line, codeBlock(text, "reply")]; }
  const pretty = JSON.stringify(value, null, 2);
  return [line, h("div", { class: "code-block" }, showJson(pretty))];
}

/** Shows a stream as text, and as raw events. */
async function showStream(reply, out, began) {
  const line = statusLine(reply, began);
  const text = h("pre", { class: "stream-text", tabindex: "0", "aria-label": "Answer as text" });
  const raw = h("pre", { class: "json", tabindex: "0", "aria-label": "Raw events" });
  fill(out, line.element, tabs("Stream", [["Text", () => text], ["Events", () => raw]]));
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  const writer = new StreamWriter(text, raw);
  for (let part = await reader.read(); !part.done; part = await reader.read()) {
    writer.take(part.value);
    line.time.textContent = `${Math.round(performance.now() - began)} ms, ${writer.events} events`;
  }
  writer.end();
}

class StreamWriter {
  events = 0;
  #rest = "";
  #kind = "";
  #open = null;
  constructor(text, raw) { Object.assign(this, { text, raw }); }

  take(piece) {
    const lines = (this.#rest + piece).split("\n");
    this.#rest = lines.pop();
    for (const line of lines) this.#line(line);
  }

  end() { this.#line(this.#rest); }

  #line(line) {
    const data = line.startsWith("data:") ? line.slice(5).trim() : line.startsWith("{") ? line : "";
    if (line) this.raw.append(...(data ? [line.slice(0, line.length - data.length), ...colourJson(data), "\n"] : [`${line}\n`]));
    if (!data.startsWith("{")) return;
    this.events++;
    for (const [, id] of data.matchAll(IDS)) seen.add(id);
    const event = JSON.parse(data);
    const { text, reasoning, call, name } = textOfEvent(event);
    if (reasoning) this.#say("reasoning", reasoning);
    if (text) this.#say("text", text);
    if (name) this.#say("call", `\n${name}(`);
    if (call) this.#say("call", call);
    if (event.error) this.#say("error", event.error.message ?? String(event.error));
  }

  #say(kind, text) {
    if (this.#kind !== kind) {
      this.#kind = kind;
      this.#open = h("span", { class: `spoken ${kind}` });
      this.text.append(this.#open);
    }
    this.#open.append(text);
  }
}

// The fields of a body, from its schema.

function fieldTables(schema, api) {
  const some = (schema.anyOf ?? [schema]).map((each) => resolve(each, api)).filter((each) => each.properties);
  return h("details", { class: "fields" }, h("summary", {}, "Fields"), some.map((each) => {
    const required = new Set(each.required ?? []);
    return h("div", { class: "sideways", tabindex: "0", role: "region", "aria-label": "Fields" }, h("table", {}, h("thead", {}, h("tr", {}, h("th", {}, "field"), h("th", {}, "type"))),
      h("tbody", {}, Object.entries(each.properties).map(([name, field]) => h("tr", {},
        h("td", {}, h("code", {}, name), required.has(name) && h("span", { class: "badge amber" }, "required")),
        h("td", {}, typeName(field)))))));
  }));
}

const resolve = (schema, api) => (schema?.$ref ? api.components.schemas[schema.$ref.split("/").pop()] : schema ?? {});

function typeName(schema) {
  if (schema.$ref) return schema.$ref.split("/").pop();
  if (schema.enum) return schema.enum.map((value) => JSON.stringify(value)).join(" | ");
  if (schema.anyOf) return schema.anyOf.map(typeName).filter((name) => name !== "null").join(" | ");
  const bounds = [schema.minimum, schema.maximum];
  const range = bounds.some((bound) => bound !== undefined) ? ` (${bounds[0] ?? "…"} to ${bounds[1] ?? "…"})` : "";
  return schema.type === "array" ? `list of ${typeName(schema.items ?? {})}` : `${schema.type ?? "any"}${range}`;
}

// The WebSocket.

function drawSocket(detail, one, app) {
  const body = bodyField({ type: "response.create", model: "MODEL", input: "Name three colours.", max_output_tokens: 32 }, app);
  const text = h("pre", { class: "stream-text", tabindex: "0", "aria-label": "Answer as text" });
  const raw = h("pre", { class: "json", tabindex: "0", "aria-label": "Raw events" });
  const state = h("p", { class: "hint", role: "status" }, "Not connected.");
  let socket = null;
  const send = (event) => {
    event.preventDefault();
    if (!body.check()) return;
    const said = JSON.stringify(body.value({}));
    if (socket?.readyState === WebSocket.OPEN) {
      socket.send(said);
      return;
    }
    const address = new URL(one.path.slice(1), new URL(".", document.baseURI));
    address.protocol = address.protocol === "https:" ? "wss:" : "ws:";
    socket = new WebSocket(address);
    const writer = new StreamWriter(text, raw);
    state.textContent = "Connecting…";
    socket.onopen = () => {
      state.textContent = "Connected. Further messages use the same connection.";
      socket.send(said);
    };
    socket.onmessage = (event) => writer.take(`${event.data}\n`);
    socket.onclose = () => { state.textContent = "Connection closed. Servers with API keys reject it, because browsers cannot send a key."; };
  };
  fill(detail, head(one), h("form", { class: "stack", onsubmit: send }, body.element,
    h("div", { class: "row" }, h("button", { type: "submit", class: "button primary" }, icon("send"), "Connect and send"), state)),
  tabs("Stream", [["Text", () => text], ["Events", () => raw]]));
  return () => socket?.close();
}
