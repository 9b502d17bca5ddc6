// A message in the chat. It is drawn when it is scrolled near the screen, and once per frame while it is streamed.

import { copyButton, fill, h, icon, iconButton } from "./dom.js";
import { mediaKind } from "./files.js";
import { MarkdownView, render } from "./markdown.js";
import { describeFile } from "./tree.js";

const LINE_PX = 26;
const LINE_CHARS = 78;

/** Estimates the height of a message that is not drawn yet. */
export function estimateHeight({ content = "", reasoning, calls = [], results = {} }) {
  const texts = [content, ...calls.map((call) => call.arguments), ...Object.values(results)];
  const lines = texts.join("\n").split("\n").reduce((sum, line) => sum + Math.ceil(line.length / LINE_CHARS + 0.4), 0);
  return 60 + lines * LINE_PX + (reasoning ? 40 : 0) + calls.length * 60;
}

const WHO = { user: "You", assistant: "Answer", tool: "Tool results" };

/** Draws a message; `actions` are {choose, edit, again, branch, inspect, sendResults}, each called with a node. */
export class MessageView {
  constructor(node, tree, actions) {
    Object.assign(this, { node, tree, actions, live: false, drawn: false });
    this.element = h("article", {
      class: `message ${node.role}`, "aria-label": WHO[node.role], dataset: { id: node.id },
    });
  }

  /** Draws the message, if it is not drawn yet. */
  show() {
    if (!this.drawn) this.draw();
  }

  draw() {
    this.drawn = true;
    const body = { user: () => this.#user(), tool: () => this.#results(), assistant: () => this.#assistant() }[this.node.role]();
    fill(this.element, h("h2", { class: "unseen" }, WHO[this.node.role]), body, this.foot = h("div", { class: "foot" }));
    this.#drawFoot();
  }

  // Messages of the user.

  #user() {
    const { content, files = [] } = this.node;
    return h("div", { class: "bubble" },
      files.map((file) => (mediaKind(file.type) === "image"
        ? h("img", { class: "picture", src: `data:${file.type};base64,${file.data}`, alt: file.name })
        : h("span", { class: "file" }, icon("file"), describeFile(file)))),
      content && h("div", { class: "said" }, content));
  }

  #results() {
    const calls = this.tree.nodes.get(this.node.parent)?.calls ?? [];
    return Object.entries(this.node.results).map(([id, text]) => {
      const name = calls.find((call) => call.id === id)?.name ?? id;
      return h("div", { class: "call" }, h("div", { class: "call-head" }, icon("tool"), h("span", {}, "Result of "), h("code", {}, name)),
        h("pre", { tabindex: "0", role: "group", "aria-label": `Result of ${name}` }, text));
    });
  }

  // Messages of the model.

  #assistant() {
    this.thought = h("div", { class: "thought-text" });
    this.thoughtLabel = h("span", {}, "Reasoning");
    this.thoughtBox = h("details", { class: "thought", hidden: true }, h("summary", {}, this.thoughtLabel), this.thought);
    this.text = new MarkdownView();
    this.calls = h("div", { class: "calls" });
    this.callViews = [];
    this.end = h("div", { class: "end" });
    this.update();
    return [this.thoughtBox, this.text.element, this.calls, this.end];
  }

  /** Draws what was added since the last call. */
  update() {
    if (!this.drawn) return;
    const { node, live } = this;
    if (node.reasoning) {
      this.thoughtBox.hidden = false;
      this.thoughtLabel.textContent = live && !node.content && !node.calls?.length ? "Thinking…" : "Reasoning";
      grow(this.thought, node.reasoning);
    }
    this.text.update(node.content ?? "", !live);
    for (const [at, call] of (node.calls ?? []).entries()) {
      this.callViews[at] ??= this.#addCall();
      this.callViews[at].update(call, live);
    }
  }

  #addCall() {
    const view = new CallView();
    this.calls.append(view.element);
    return view;
  }

  /** Sets whether the message is being streamed. */
  setLive(live) {
    this.live = live;
    this.element.toggleAttribute("aria-busy", live);
    this.element.classList.toggle("live", live);
    if (!this.drawn) return;
    this.update();
    this.#drawEnd();
    this.#drawFoot();
  }

  #drawEnd() {
    const { node } = this;
    fill(this.end,
      node.warning && h("p", { class: "notice amber" }, node.warning),
      node.error && h("div", { class: "notice danger", role: "alert" }, h("span", {}, node.error.message),
        h("button", { type: "button", class: "button small", onclick: () => this.actions.again(node) }, "Try again")),
      !this.live && this.#wantsResults() && this.#resultForm());
  }

  #wantsResults() {
    const { node } = this;
    return !node.error && (node.calls ?? []).some((call) => !call.server) && !(this.tree.children.get(node.id) ?? []).length;
  }

  /** Builds the form in which the user enters the results of calls. */
  #resultForm(given = {}) {
    const calls = this.node.calls.filter((call) => !call.server);
    const fields = calls.map((call) => [call.id, h("textarea", { id: `result-${this.node.id}-${call.id}`, class: "mono", rows: 2, value: given[call.id] ?? "", placeholder: '{"degrees": 21}' })]);
    return h("form", {
      class: "results stack",
      onsubmit: (event) => {
        event.preventDefault();
        this.actions.sendResults(this.node, Object.fromEntries(fields.map(([id, field]) => [id, field.value])));
      },
    }, fields.map(([id, field], at) => [h("label", { for: field.id }, `Result of ${calls[at].name}`), field]),
    h("div", { class: "row" }, h("button", { class: "button primary" }, fields.length > 1 ? "Send the results" : "Send the result")));
  }

  // Below the message.

  #drawFoot() {
    const { node, live } = this;
    if (!this.foot) return;
    if (node.role === "assistant") this.#drawEnd();
    fill(this.foot, this.#ways(), live ? null : this.#buttons(), node.role === "assistant" && !live ? h("span", { class: "facts" }, describeAnswer(node)) : null);
  }

  #ways() {
    const { ids, at } = this.tree.ways(this.node);
    if (ids.length < 2) return null;
    const go = (step) => () => this.actions.choose(ids[at + step]);
    return h("span", { class: "ways", role: "group", "aria-label": "Other versions" },
      iconButton("left", "Previous version", go(-1), { disabled: at === 0 }),
      h("span", {}, `${at + 1} / ${ids.length}`),
      iconButton("right", "Next version", go(1), { disabled: at === ids.length - 1 }));
  }

  #buttons() {
    const { node, actions } = this;
    const text = () => (node.role === "tool" ? Object.values(node.results).join("\n") : node.content || (node.calls ?? []).map((call) => `${call.name}(${call.arguments})`).join("\n"));
    return [
      copyButton(text, "Copy"),
      node.role === "assistant" && iconButton("again", "Regenerate", () => actions.again(node)),
      iconButton("edit", "Edit", () => this.#edit()),
      iconButton("branch", "Continue in a new chat", () => actions.branch(node)),
      node.role === "assistant" && iconButton("inspect", "Inspect", () => actions.inspect(node)),
    ];
  }

  #edit() {
    const { node } = this;
    const field = h("textarea", { rows: 3, "aria-label": "Edit", value: node.role === "tool" ? JSON.stringify(node.results, null, 2) : node.content });
    const form = h("form", {
      class: "edit stack",
      onsubmit: (event) => {
        event.preventDefault();
        this.actions.edit(node, field.value);
      },
      onkeydown: (event) => {
        if (event.key === "Escape") {
          event.stopPropagation();
          this.draw();
        } else if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
      },
    }, field, h("div", { class: "row" },
      h("button", { class: "button primary" }, node.role === "user" ? "Send" : "Save"),
      h("button", { type: "button", class: "button", onclick: () => this.draw() }, "Cancel"),
      h("span", { class: "hint" }, "The previous version stays as another branch.")));
    fill(this.element, form);
    field.focus();
  }
}

/** Appends the new end of a text to its text node. */
function grow(element, text) {
  const node = element.firstChild;
  if (node && text.startsWith(node.data)) node.appendData(text.slice(node.data.length));
  else element.textContent = text;
}

/** A tool call while it is streamed: its name, then its arguments, indented at the end. */
class CallView {
  constructor() {
    this.name = h("code");
    this.state = h("span", { class: "badge" });
    this.text = h("code");
    this.output = h("pre", { tabindex: "0", hidden: true, role: "group", "aria-label": "Result of the call" });
    this.element = h("div", { class: "call" },
      h("div", { class: "call-head" }, icon("tool"), this.name, this.state),
      h("pre", { tabindex: "0", role: "group", "aria-label": "Arguments of the call" }, this.text), this.output);
  }

  update(call, live) {
    this.name.textContent = call.name || "…";
    const over = call.output !== undefined || call.error !== undefined;
    this.state.textContent = call.server ? `${call.server}: ${over ? (call.error ? "failed" : "done") : "running"}` : live ? "streaming" : "needs a result";
    this.state.className = `badge ${call.error ? "danger" : call.server && over ? "accent" : "amber"}`;
    if (live) grow(this.text, call.arguments);
    else this.text.textContent = tidy(call.arguments);
    this.output.hidden = !over;
    if (over) this.output.textContent = call.error ?? call.output;
  }
}

function tidy(text) {
  try { return JSON.stringify(JSON.parse(text), null, 2); } catch { return text; }
}

const FINISHES = { length: "cut off at the token limit", stopped: "stopped", content_filter: "filtered", tool_calls: "calls" };

/** Returns facts such as `SmolLM2 · 42 tokens · 35 tokens/s · first after 0.2 s`. */
function describeAnswer({ model, usage, times, finish, edited }) {
  const tokens = usage?.completion_tokens;
  const seconds = times?.first && times.last > times.first ? (times.last - times.first) / 1000 : null;
  const parts = [
    model,
    edited && "edited",
    tokens && `${tokens} tokens`,
    tokens > 1 && seconds > 0.05 && `${Math.round((tokens - 1) / seconds)} tokens/s`,
    times?.first && times.sent && `first after ${((times.first - times.sent) / 1000).toFixed(2)} s`,
    FINISHES[finish],
  ];
  return parts.filter(Boolean).join(" · ");
}
