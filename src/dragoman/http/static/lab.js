// The dialect lab: parses a model's output and shows the dialect with the reason for it, the events and parts, and the
// grammar that constrains an answer to the dialect.

import { ApiError, request } from "./api.js";
import { copyButton, fill, h, icon, kept } from "./dom.js";
import { codeBlock, showJson, tabs, wait } from "./views.js";

const OWN = "";
const TEMPLATE = "\n";
const SIZES = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128, 0];
const TOOLS = [{ type: "function", function: { name: "get_weather", parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] } } }];
const SHOWN_EVENTS = 400;
const FRAME_MS = 60;
const LEGEND = [["reasoning", "reasoning"], ["text", "text"], ["call", "a call"]];

export function mount(root, app) {
  const lab = new Lab(app);
  fill(root, lab.element);
  lab.start();
  return () => lab.leave();
}

class Lab {
  #own = null;
  #examples = new Map();
  #last = null;
  #running = null;
  #timer = 0;
  #tab = 0;
  #whole = null;

  constructor(app) {
    this.app = app;
    this.saved = kept(() => sessionStorage, "lab");
    const ask = wait(() => this.ask(), 250);
    this.text = h("textarea", { class: "mono", rows: 12, id: "lab-text", spellcheck: "false", oninput: ask, placeholder: "<think>…</think> and other model output" });
    this.dialect = h("select", { id: "lab-dialect", onchange: () => this.chosen() });
    this.template = h("textarea", { class: "mono", rows: 9, id: "lab-template", spellcheck: "false", oninput: ask, placeholder: "{% for message in messages %}…" });
    this.templateField = h("div", { class: "stack", hidden: true }, h("label", { for: "lab-template" }, "Chat template"), this.template,
      h("p", { class: "hint" }, "It runs in a separate process without access to files or network, and is not stored."));
    this.tools = h("textarea", { class: "mono", rows: 8, id: "lab-tools", spellcheck: "false", oninput: ask, value: JSON.stringify(TOOLS, null, 2) });
    this.toolsError = h("p", { class: "field-error", hidden: true, role: "alert" });
    this.inside = h("select", { id: "lab-inside", onchange: ask }, [["", "detected"], ["true", "inside reasoning"], ["false", "outside reasoning"]].map(([value, name]) => h("option", { value }, name)));
    this.size = h("input", { type: "range", id: "lab-size", min: 0, max: SIZES.length - 1, value: SIZES.length - 1, oninput: () => { this.drawSize(); ask(); } });
    this.sizeSaid = h("output", { for: "lab-size" });
    this.place = h("input", { type: "range", id: "lab-place", min: 0, max: 0, value: 0, oninput: () => { this.pause(); this.drawPlace(); } });
    this.placeSaid = h("output", { for: "lab-place" });
    this.play = h("button", { type: "button", class: "button small", onclick: () => (this.#timer ? this.pause() : this.run()) }, "Play");
    this.problem = h("p", { class: "field-error", role: "alert", hidden: true });
    this.found = h("div", { class: "card found" });
    this.verdict = h("p", { class: "verdict", role: "status" });
    this.raw = h("pre", { class: "raw", tabindex: "0", "aria-label": "Text with its parts" });
    this.more = h("div", {});
    this.result = h("div", { class: "stack", hidden: true }, this.found, this.#pieces(), this.raw, this.#legend(), this.more);
    this.element = h("div", { class: "lab-columns" },
      h("div", {}, h("h1", {}, "Dialect lab"),
        h("p", { class: "hint" }, "Shows how the server parses a model's output, like ", h("code", {}, "dragoman parse"), " and ", h("code", {}, "POST /parse"), "."),
        h("div", { class: "stack" }, h("label", { for: "lab-dialect" }, "Parse as"), h("div", { class: "row" }, h("div", { class: "grow" }, this.dialect), h("button", { type: "button", class: "button", onclick: () => this.example() }, "Example")), this.templateField),
        h("div", { class: "stack" }, h("label", { for: "lab-text" }, "Model output"), this.text),
        h("div", { class: "stack" }, h("label", { for: "lab-inside" }, "Starts"), this.inside),
        h("details", {}, h("summary", {}, "Tools of the request"), h("div", { class: "stack" }, h("label", { for: "lab-tools", class: "unseen" }, "Tools, as JSON"), this.tools, this.toolsError))),
      h("div", {}, this.problem, this.result));
  }

  #pieces() {
    return h("div", { class: "card stack" }, h("div", { class: "pieces" },
      h("label", { for: "lab-size" }, "Chunk size"), this.size, this.sizeSaid,
      h("label", { for: "lab-place" }, "Parsed so far"), this.place, this.placeSaid),
    h("div", { class: "row" }, this.play, this.verdict));
  }

  #legend() {
    return h("ul", { class: "legend", "aria-label": "Colours" }, LEGEND.map(([kind, name]) => h("li", {}, h("span", { class: `part ${kind}` }, name))),
      h("li", {}, "bold: markers, which are not part of the answer"));
  }

  async start() {
    const known = await request("dialects").catch((error) => this.fail(error));
    if (!known) return;
    this.#own = known.model;
    for (const each of known.data) this.#examples.set(each.name, each.example);
    const options = known.data.map((each) => h("option", { value: each.name }, `${each.name}: ${each.models}`));
    fill(this.dialect, h("option", { value: OWN }, known.model ? `This server's model (${known.model.name})` : "This server's model"), h("option", { value: TEMPLATE }, "A custom chat template"), h("optgroup", { label: "A dialect" }, options));
    try {
      const { text = "", dialect = OWN, template = "" } = JSON.parse(this.saved.get() ?? "{}");
      Object.assign(this.text, { value: text });
      this.template.value = template;
      this.dialect.value = dialect;
    } catch { /* nothing was stored */ }
    if (this.app.place && this.#examples.has(this.app.place)) this.dialect.value = this.app.place;
    this.templateField.hidden = this.dialect.value !== TEMPLATE;
    this.drawSize();
    if (this.text.value) this.ask();
    else this.example();
  }

  leave() {
    this.pause();
    this.#running?.abort();
  }

  chosen() {
    this.templateField.hidden = this.dialect.value !== TEMPLATE;
    const isExample = [...this.#examples.values()].includes(this.text.value);
    if (isExample && this.dialect.value !== TEMPLATE) this.example();
    else this.ask();
  }

  async example() {
    const name = this.dialect.value === OWN ? this.#own?.name : this.dialect.value;
    this.text.value = this.#examples.get(name) ?? this.#examples.get("hermes") ?? "";
    if (this.dialect.value === TEMPLATE && !this.template.value) this.template.value = await ownTemplate(this.app.model);
    this.ask();
  }

  #tools() {
    try {
      const found = JSON.parse(this.tools.value || "[]");
      this.toolsError.hidden = true;
      return Array.isArray(found) ? found : found.tools ?? [found];
    } catch (error) {
      this.toolsError.hidden = false;
      this.toolsError.textContent = `Not valid JSON: ${error.message}`;
      return null;
    }
  }

  async ask() {
    const tools = this.#tools();
    if (!tools) return;
    this.pause();
    this.#running?.abort();
    const { signal } = this.#running = new AbortController();
    const chosen = this.dialect.value;
    const body = { text: this.text.value, tools, return_grammar: true };
    if (chosen === TEMPLATE) body.template = this.template.value;
    else if (chosen !== OWN) body.dialect = chosen;
    else if (this.app.model) body.model = this.app.model;
    if (this.inside.value) body.starts_in_reasoning = this.inside.value === "true";
    this.saved.set(JSON.stringify({ text: this.text.value.slice(0, 100_000), dialect: chosen, template: this.template.value.slice(0, 100_000) }));
    const chunk = SIZES[this.size.value];
    try {
      const told = await request("parse", { body: chunk ? { ...body, chunk } : body, signal });
      const asked = JSON.stringify(body);
      if (!chunk) this.#whole = { asked, told };
      else if (this.#whole?.asked !== asked) this.#whole = { asked, told: await request("parse", { body: { ...body, return_grammar: false }, signal }) };
      this.draw(told, body.text);
    } catch (error) {
      if (error.name !== "AbortError") this.fail(error);
    }
  }

  fail(error) {
    if (!(error instanceof ApiError)) throw error;
    this.problem.hidden = false;
    this.problem.textContent = error.message;
    this.result.hidden = true;
  }

  draw(told, text) {
    this.#last = { told, text };
    this.problem.hidden = true;
    this.result.hidden = false;
    fill(this.found, drawFound(told));
    const same = this.#whole && sameAnswer(this.#whole.told, told);
    this.verdict.classList.toggle("no", !same);
    fill(this.verdict, icon(same ? "check" : "close"), same ? "The answer is the same with any chunk size." : "The answer differs with this chunk size: please report it.");
    this.place.max = String(text.length);
    this.place.value = String(text.length);
    this.drawPlace();
    fill(this.more, this.#tabs());
  }

  #tabs() {
    const { told, text } = this.#last;
    const entries = [
      ["Answer", () => drawAnswer(told.message)],
      [`Events (${told.events.length + told.left_out})`, () => { this.events = drawEvents(told, Number(this.place.value)); return this.events; }],
      ["Grammar", () => (told.grammar ? codeBlock(told.grammar, "grammar") : h("p", { class: "hint" }, told.grammar_error ?? "No grammar."))],
      ["Declaration", () => showJson(told.dialect.declares)],
    ];
    if ("prompt" in told) entries.push(["Prompt", () => (told.prompt === null ? h("p", { class: "field-error" }, told.template_error) : codeBlock(told.prompt, "prompt"))]);
    return tabs("Result", entries, { first: Math.min(this.#tab, entries.length - 1), onchange: (at) => { this.#tab = at; } });
  }

  drawSize() {
    const size = SIZES[this.size.value];
    this.sizeSaid.textContent = size ? `${size} character${size > 1 ? "s" : ""}` : "all at once";
    this.size.setAttribute("aria-valuetext", this.sizeSaid.textContent);
  }

  drawPlace() {
    if (!this.#last) return;
    const { told, text } = this.#last;
    const place = Number(this.place.value);
    this.placeSaid.textContent = `${place} of ${text.length}`;
    fill(this.raw, drawParts(told, text, place));
    if (this.events?.isConnected && told.events.length <= SHOWN_EVENTS) {
      [...this.events.querySelectorAll("tbody tr")].forEach((row, at) => { row.hidden = told.events[at].at > place; });
    }
  }

  /** Plays the text back in chunks of the selected size. */
  run() {
    if (!this.#last) return;
    const most = this.#last.text.length;
    const step = SIZES[this.size.value] || Math.max(1, Math.ceil(most / 120));
    if (Number(this.place.value) >= most) this.place.value = "0";
    this.play.textContent = "Pause";
    this.#timer = setInterval(() => {
      this.place.value = String(Math.min(most, Number(this.place.value) + step));
      this.drawPlace();
      if (Number(this.place.value) >= most) this.pause();
    }, FRAME_MS);
  }

  pause() {
    clearInterval(this.#timer);
    this.#timer = 0;
    this.play.textContent = "Play";
  }
}

async function ownTemplate(model) {
  return (await request(`tokenizer_info${model ? `?model=${encodeURIComponent(model)}` : ""}`).catch(() => null))?.chat_template ?? "";
}

function drawFound(told) {
  const { dialect } = told;
  return [
    h("p", { class: "found-name" }, dialect.name),
    h("p", {}, "Why: ", h("strong", {}, dialect.how), "."),
    h("p", { class: "hint" }, dialect.models, dialect.aliases.length ? `. Also called ${dialect.aliases.join(", ")}.` : "."),
    h("div", { class: "row" }, [["reasoning", dialect.reasoning], ["calls", dialect.calls]].map(([name, has]) => h("span", { class: `badge ${has ? "accent" : ""}` }, has ? name : `no ${name}`)),
      h("span", { class: "badge" }, told.starts_in_reasoning ? "starts inside reasoning" : "starts outside reasoning")),
    told.template_error && h("p", { class: "field-error" }, told.template_error),
  ];
}

/** Returns the text as parts: those of the answer, with the markers around them. */
export function drawParts(told, text, read = text.length) {
  const said = saidByPart(told);
  const drawn = told.parts.map((part, at) => {
    const slice = text.slice(part.begin, Math.min(part.end, read));
    if (!slice) return null;
    return h("span", { class: `part ${part.kind}`, title: part.kind === "call" ? `call of ${part.name}` : part.kind }, markers(slice, said[at] ?? "", part.kind));
  });
  return [...drawn, read < text.length ? h("span", { class: "unread" }, text.slice(read)) : null];
}

/** Returns the text of the events for each part; none for calls, whose arguments may be written differently. */
function saidByPart(told) {
  const said = told.parts.map(() => "");
  let at = -1, kind = "";
  for (const event of told.events) {
    const now = event.kind.startsWith("call") ? `call ${event.call}` : event.kind;
    if (now === "unseen" || now === "finish") continue;
    if (now !== kind) {
      kind = now;
      at++;
      while (at < told.parts.length && told.parts[at].kind !== now.split(" ")[0]) at++;
    }
    if (event.text && said[at] !== undefined) said[at] += event.text;
  }
  return said;
}

function markers(slice, said, kind) {
  if (kind === "call") return slice;
  const at = said ? slice.indexOf(said) : -1;
  if (at < 0) {
    // The slice may end in the middle of the text.
    const inside = said && [...Array(Math.min(slice.length, 64)).keys()].find((place) => said.startsWith(slice.slice(place)) && slice.length > place);
    return inside === undefined || inside === "" ? slice : [mark(slice.slice(0, inside)), slice.slice(inside)];
  }
  return [mark(slice.slice(0, at)), said, mark(slice.slice(at + said.length))];
}

const mark = (text) => (text ? h("span", { class: "marker" }, text) : null);

function drawAnswer(message) {
  return h("div", { class: "stack" },
    message.reasoning && [h("h2", { class: "part-head" }, "Reasoning"), h("pre", { tabindex: "0" }, message.reasoning)],
    message.text && [h("h2", { class: "part-head" }, "Text"), h("pre", { tabindex: "0" }, message.text)],
    message.tool_calls.map((call) => [h("h2", { class: "part-head" }, "Call of ", h("code", {}, call.name)), h("div", { class: "code-block" }, showJson(pretty(call.arguments)), copyButton(() => call.arguments, "Copy arguments"))]),
    !message.reasoning && !message.text && !message.tool_calls.length && h("p", { class: "hint" }, "Empty answer."));
}

function pretty(text) {
  try { return JSON.stringify(JSON.parse(text), null, 2); } catch { return text; }
}

function drawEvents(told, read) {
  const rows = told.events.slice(0, SHOWN_EVENTS).map((event) => h("tr", { hidden: event.at > read },
    h("td", {}, String(event.at)), h("td", {}, event.kind), h("td", {}, event.name ?? event.arguments ?? event.text ?? "")));
  const rest = told.events.length + told.left_out - rows.length;
  return h("div", { class: "sideways" }, h("table", { class: "events" },
    h("thead", {}, h("tr", {}, h("th", {}, "at"), h("th", {}, "event"), h("th", {}, "what"))), h("tbody", {}, rows)),
  rest > 0 && h("p", { class: "hint" }, `and ${rest} more`));
}

/** Compares two answers without the ids of calls, which are random. */
function sameAnswer(one, other) {
  const plain = ({ message }) => JSON.stringify({ ...message, tool_calls: message.tool_calls.map(({ name, arguments: given }) => [name, given]) });
  return plain(one) === plain(other) && JSON.stringify(one.parts) === JSON.stringify(other.parts);
}
