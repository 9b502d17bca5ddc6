// The settings of a chat: system prompt, sampling, response format, tools.

import { request } from "./api.js";
import { checkSchema, checkTools, readJson } from "./check.js";
import { fill, h, iconButton } from "./dom.js";

export const USUAL = { system: "", format: "text", schema: "", tools: "", tool_choice: "auto", mcp: [], thinking: "", stop: "", record: true };

const NUMBERS = [
  ["temperature", "Temperature", { min: 0, max: 2, step: 0.05 }, "0 always samples the likeliest token"],
  ["top_p", "Top p", { min: 0, max: 1, step: 0.01 }, "sample from the likeliest tokens with this total probability"],
  ["top_k", "Top k", { min: 0, step: 1 }, "sample from this many of the likeliest tokens"],
  ["min_p", "Min p", { min: 0, max: 1, step: 0.01 }, "sample from tokens with at least this share of the likeliest one's probability"],
  ["max_tokens", "Max tokens", { min: 1, step: 1 }, "limit of tokens for an answer"],
  ["seed", "Seed", { min: 0, step: 1 }, "the same seed gives the same answer"],
  ["repetition_penalty", "Repetition penalty", { min: 0, max: 2, step: 0.05 }, "1 disables it"],
];

export const EXAMPLE_TOOLS = JSON.stringify([
  {
    type: "function",
    function: {
      name: "get_weather",
      description: "The weather of a city now.",
      parameters: {
        type: "object",
        properties: { city: { type: "string" }, unit: { type: "string", enum: ["celsius", "fahrenheit"] } },
        required: ["city"],
      },
    },
  },
], null, 2);
export const EXAMPLE_SCHEMA = JSON.stringify({
  type: "object",
  properties: { title: { type: "string" }, year: { type: "integer" }, authors: { type: "array", items: { type: "string" } } },
  required: ["title", "year", "authors"],
  additionalProperties: false,
}, null, 2);

/** Creates a field for JSON that reports errors while typing; `check(value)` validates here, `ask(value)` on the server. */
export function jsonEditor({ id, label, value, check, ask, onChange, example, rows = 9 }) {
  const said = h("p", { id: `${id}-said`, "aria-live": "polite" });
  const field = h("textarea", { id, class: "mono", rows, spellcheck: "false", autocapitalize: "off", "aria-describedby": said.id, value, oninput: () => changed() });
  let asked = 0;
  const say = (text, kind) => {
    fill(said, text);
    said.className = kind;
    field.setAttribute("aria-invalid", String(kind === "field-error"));
  };
  const look = () => {
    clearTimeout(asked);
    if (!field.value.trim()) return say("", "hint");
    const { value: read, error } = readJson(field.value);
    const wrong = error ?? check(read);
    if (wrong) return say(wrong, "field-error");
    say("Valid.", "field-ok");
    if (ask) asked = setTimeout(async () => {
      const problem = await ask(read).catch(() => null);
      if (problem && field.value.trim() && !readJson(field.value).error) say(problem, "field-error");
    }, 400);
    return undefined;
  };
  const changed = () => {
    look();
    onChange(field.value);
  };
  const set = (text) => {
    field.value = text;
    changed();
  };
  const tidy = () => {
    const { value: read, error } = readJson(field.value);
    if (!error) set(JSON.stringify(read, null, 2));
  };
  look();
  return h("div", { class: "stack" }, h("label", { for: id }, label), field, said,
    h("div", { class: "row" },
      h("button", { type: "button", class: "button small", onclick: () => set(example) }, "Example"),
      h("button", { type: "button", class: "button small", onclick: tidy }, "Format"),
      h("button", { type: "button", class: "button small", onclick: () => set("") }, "Clear")));
}

/** Returns the server's first problem with a schema: the server knows what it can enforce. */
async function askAboutSchema(schema) {
  const { problems } = await request("v1/check_schema", { body: { schema }, quiet: true });
  return problems.length ? `${problems[0].place}: ${problems[0].message}` : null;
}

/** Builds the panel. It changes `settings` in place, and calls `onChange()`. */
export function settingsPanel(settings, onChange, onClose) {
  const set = (name) => (value) => {
    settings[name] = value;
    onChange();
  };
  return h("aside", { class: "settings", "aria-label": "Settings of this chat" },
    h("div", { class: "panel-head" }, h("h2", {}, "Settings"), iconButton("close", "Close settings", onClose)),
    h("div", { class: "panel-body" },
      section("System prompt", true, textField("system", settings, set, 5, "You are a helpful assistant.")),
      section("Sampling", false, numberFields(settings, set)),
      section("Response format", settings.format !== "text", formFields(settings, set)),
      section("Tools", Boolean(settings.tools || settings.mcp?.length), toolFields(settings, set)),
      section("Inspector", false,
        h("label", { class: "check" },
          h("input", { type: "checkbox", checked: settings.record, onchange: (event) => set("record")(event.target.checked) }),
          "Request token ids and log probabilities"),
        h("p", { class: "hint" }, "The inspector shows them for each answer. They make replies about four times as large."))));
}

function section(title, open, ...children) {
  return h("details", { open }, h("summary", {}, title), h("div", { class: "stack" }, children));
}

function textField(name, settings, set, rows, placeholder) {
  return h("textarea", { rows, "aria-label": "System prompt", placeholder, value: settings[name] ?? "", oninput: (event) => set(name)(event.target.value) });
}

function numberFields(settings, set) {
  const fields = NUMBERS.map(([name, label, range, hint]) => h("div", { class: "number" },
    h("label", { for: `set-${name}` }, label),
    h("input", {
      id: `set-${name}`, type: "number", ...range, placeholder: "default", title: hint, value: settings[name] ?? "",
      oninput: (event) => {
        const { valueAsNumber, validity } = event.target;
        event.target.setAttribute("aria-invalid", String(!validity.valid));
        if (validity.valid) set(name)(Number.isNaN(valueAsNumber) ? null : valueAsNumber);
      },
    })));
  const thinking = h("select", { id: "set-thinking", onchange: (event) => set("thinking")(event.target.value) },
    [["", "model default"], ["on", "on"], ["off", "off"]].map(([value, label]) => h("option", { value, selected: settings.thinking === value }, label)));
  return [
    h("div", { class: "numbers" }, fields),
    h("div", { class: "number" }, h("label", { for: "set-thinking" }, "Reasoning"), thinking),
    h("label", { for: "set-stop" }, "Stop sequences"),
    h("textarea", { id: "set-stop", class: "mono", rows: 2, placeholder: "one per line", value: settings.stop ?? "", oninput: (event) => set("stop")(event.target.value) }),
  ];
}

function formFields(settings, set) {
  const editor = h("div", { hidden: settings.format !== "schema" }, jsonEditor({
    id: "set-schema", label: "JSON Schema", value: settings.schema ?? "", check: checkSchema, ask: askAboutSchema, onChange: set("schema"), example: EXAMPLE_SCHEMA,
  }));
  const choose = (event) => {
    set("format")(event.target.value);
    editor.hidden = event.target.value !== "schema";
  };
  return [
    h("select", { "aria-label": "Response format", onchange: choose },
      [["text", "Text"], ["json", "Any JSON object"], ["schema", "JSON Schema"]].map(([value, label]) =>
        h("option", { value, selected: settings.format === value }, label))),
    editor,
  ];
}

function toolFields(settings, set) {
  const choices = [["auto", "The model decides"], ["required", "A call is required"], ["none", "No calls"]];
  return [
    jsonEditor({ id: "set-tools", label: "Functions", value: settings.tools ?? "", check: checkTools, onChange: set("tools"), example: EXAMPLE_TOOLS }),
    h("div", { class: "number" }, h("label", { for: "set-choice" }, "Calls"),
      h("select", { id: "set-choice", onchange: (event) => set("tool_choice")(event.target.value) },
        choices.map(([value, label]) => h("option", { value, selected: settings.tool_choice === value }, label)))),
    serverFields(settings, set),
  ];
}

/** The MCP servers that the operator has configured; the server runs their tools itself. */
function serverFields(settings, set) {
  const box = h("fieldset", { class: "stack" }, h("legend", {}, "MCP servers"), h("p", { class: "hint" }, "Loading…"));
  const draw = (labels) => {
    const known = [...new Set([...labels, ...(settings.mcp ?? [])])];
    const toggle = (label, on) => set("mcp")(known.filter((one) => (one === label ? on : settings.mcp?.includes(one))));
    fill(box, h("legend", {}, "MCP servers"), known.length
      ? known.map((label) => h("label", { class: "check" },
        h("input", { type: "checkbox", checked: settings.mcp?.includes(label), onchange: (event) => toggle(label, event.target.checked) }), label))
      : h("p", { class: "hint" }, "None configured; the operator adds them with --mcp-config."));
  };
  request("v1/mcp_servers", { quiet: true }).then(({ data }) => draw(data.map((one) => one.id)), () => draw([]));
  return box;
}
