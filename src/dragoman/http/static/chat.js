// The chat view: the list of chats on the left, the open chat in the middle, its settings on the right.

import { buildRequest, forgetTokens, inspected, streamAnswer } from "./answer.js";
import { describeProgress } from "./app.js";
import { announce, confirmDialog, download, fill, h, icon, iconButton, kept, openDialog, toast } from "./dom.js";
import { readFiles } from "./files.js";
import { BrowserHistory } from "./history.js";
import { estimateHeight, MessageView } from "./message.js";
import { EXAMPLE_SCHEMA, EXAMPLE_TOOLS, settingsPanel, USUAL } from "./settings.js";
import { describeFile, Tree, toMarkdown } from "./tree.js";

const IDLE_MS = 8;
const STRETCH = 10;
const NEAR_END_PX = 90;
const SAVE_MS = 1500;
const PHONE = matchMedia("(max-width: 50rem)");
const IDEAS = [
  ["Explain", "Why is the sky blue? Explain it to a child in three sentences."],
  ["Write code", "Write a Python function that merges two sorted lists, with a short test."],
  ["Call a tool", "What is the weather in Lisbon?", { tools: EXAMPLE_TOOLS }],
  ["Answer as JSON", "Tell me about the book Dune.", { format: "schema", schema: EXAMPLE_SCHEMA }],
];

export function mount(root, app) {
  const view = new ChatView(root, app);
  view.start();
  return () => view.leave();
}

class ChatView {
  constructor(root, app) {
    Object.assign(this, { root, app, history: new BrowserHistory(), usual: kept(() => localStorage, "settings") });
    this.leaving = new AbortController();
    /** The inspector's records of answers generated while this page is open, by node. */
    this.answers = new Map();
    this.views = new Map();
    /** The views of messages, by the element that contains them. */
    this.stretches = new Map();
    this.running = null;
    this.files = [];
    this.atEnd = true;
    this.tree = this.#newTree();
  }

  start() {
    this.#build();
    const { signal } = this.leaving;
    document.addEventListener("keydown", (event) => this.#key(event), { signal });
    this.app.addEventListener("models", () => this.#drawState(), { signal });
    this.app.addEventListener("place", () => this.#goToPlace(), { signal });
    addEventListener("beforeunload", () => this.#save(), { signal });
    this.#drawState();
    this.#drawList();
    this.#goToPlace();
    if (!PHONE.matches) this.input.focus();
  }

  leave() {
    this.running?.abort();
    this.leaving.abort();
    this.near.disconnect();
    this.#save();
  }

  // The parts of the view.

  #build() {
    this.list = h("ul", { class: "chats" });
    this.filter = h("input", { type: "search", placeholder: "Search", "aria-label": "Search chats", oninput: () => this.#drawList() });
    const side = h("aside", { class: "history", "aria-label": "Chats", id: "history" },
      h("button", { type: "button", class: "button new-chat", onclick: () => this.#startNew() }, icon("add"), "New chat"),
      this.filter, h("nav", { "aria-label": "Chats" }, this.list),
      h("p", { class: "hint kept" }, "Stored only in this browser."));
    this.thread = h("div", { class: "thread" });
    this.scroller = h("div", { class: "scroller", onscroll: () => this.#scrolled(), tabindex: "0", role: "region", "aria-label": "Conversation" }, this.thread);
    this.near = new IntersectionObserver((seen) => this.#approach(seen), { root: this.scroller, rootMargin: "1500px 0px" });
    this.jump = iconButton("down", "To the end", () => this.#toEnd(), { class: "icon-button jump", hidden: true });
    const middle = h("section", { class: "middle", "aria-label": "Chat" }, h("h1", { class: "unseen" }, "Chat"), this.#toolbar(), this.scroller, this.jump, this.#composer());
    fill(this.root, side, middle);
    this.#dropTarget(middle);
  }

  #toolbar() {
    this.menu = iconButton("menu", "Chats", () => this.#toggleHistory(), { "aria-expanded": "false", "aria-controls": "history" });
    this.title = h("input", {
      class: "title", "aria-label": "Title of this chat", placeholder: "New chat",
      onchange: () => {
        this.tree.title = this.title.value.trim();
        this.#save();
      },
    });
    this.gear = iconButton("sliders", "Settings", () => this.#toggleSettings(), { "aria-expanded": "false" });
    return h("div", { class: "toolbar" }, this.menu, this.title,
      iconButton("search", "Go to… (Ctrl+K)", () => this.#palette()),
      iconButton("download", "Export", () => this.#export()), this.gear);
  }

  #composer() {
    this.input = h("textarea", {
      rows: 1, "aria-label": "Message", placeholder: "Write a message…", enterkeyhint: "send",
      onkeydown: (event) => this.#inputKey(event), oninput: () => this.#drawSend(), onpaste: (event) => this.#pasted(event),
    });
    this.picker = h("input", { type: "file", multiple: true, hidden: true, onchange: () => this.#attach([...this.picker.files]) });
    this.attached = h("div", { class: "attached" });
    this.send = h("button", { class: "send", "aria-label": "Send" }, icon("send"));
    this.state = h("div", { class: "model-state", role: "status" });
    return h("form", {
      class: "composer",
      onsubmit: (event) => {
        event.preventDefault();
        if (this.running) this.#stop();
        else this.#submit();
      },
    }, this.state, h("div", { class: "box" }, this.attached,
      h("div", { class: "line" }, iconButton("attach", "Attach a file", () => this.picker.click()), this.picker, this.input, this.send)),
    h("p", { class: "hint keys" }, h("kbd", {}, "Enter"), " sends, ", h("kbd", {}, "Shift"), "+", h("kbd", {}, "Enter"), " starts a new line, ",
      h("kbd", {}, "Esc"), " stops, ", h("kbd", {}, "Ctrl"), "+", h("kbd", {}, "K"), " opens the command list"));
  }

  // Opening and saving chats.

  #newTree(kept_) {
    let usual = {};
    try { usual = JSON.parse(this.usual.get() ?? "{}"); } catch { /* the defaults apply */ }
    const tree = new Tree(kept_);
    tree.settings = { ...USUAL, ...usual, ...tree.settings };
    return tree;
  }

  async #goToPlace() {
    const id = this.app.place;
    if (id === this.tree.id) return;
    if (!id) {
      if (this.tree.nodes.size) this.#open(this.#newTree());
      else this.#drawThread();
      return;
    }
    const found = await this.history.load(id);
    if (found) this.#open(this.#newTree(found));
    else this.app.go("chat");
  }

  #startNew() {
    this.#toggleHistory(false);
    if (this.app.place) this.app.go("chat");
    else this.#open(this.#newTree());
    this.input.focus();
  }

  #open(tree) {
    this.#stop();
    this.#save();
    this.tree = tree;
    this.files = [];
    this.atEnd = true;
    this.#toggleHistory(false);
    this.#drawThread();
    this.#drawList();
    this.#drawAttached();
    if (this.panel) this.#toggleSettings(true);
    announce(tree.title ? `Chat ${tree.title}` : "New chat");
  }

  #save() {
    clearTimeout(this.saving);
    this.saving = 0;
    if (!this.tree.nodes.size) return;
    this.history.save(this.tree).then(() => this.#drawList(), () => toast("This chat could not be saved.", "error"));
  }

  #saveSoon() {
    this.saving ||= setTimeout(() => this.#save(), SAVE_MS);
  }

  async #drawList() {
    const wanted = this.filter.value.trim().toLowerCase();
    const all = await this.history.list();
    const shown = all.filter((one) => one.title.toLowerCase().includes(wanted));
    fill(this.list, shown.map((one) => h("li", {},
      h("a", { href: `#chat/${one.id}`, "aria-current": one.id === this.tree.id ? "page" : null }, one.title || "Untitled"),
      iconButton("trash", `Delete ${one.title || "this chat"}`, () => this.#remove(one)))));
  }

  async #remove({ id, title }) {
    if (!await confirmDialog("Delete this chat?", title || "Untitled")) return;
    await this.history.remove(id);
    if (id === this.tree.id) {
      this.tree = this.#newTree();
      this.app.go("chat");
      this.#drawThread();
    }
    this.#drawList();
  }

  // The thread.

  #drawThread() {
    const path = this.tree.path();
    this.title.value = this.tree.title;
    this.near.disconnect();
    this.views.clear();
    const actions = this.actions ??= this.#actions();
    for (const node of path) this.views.set(node.id, new MessageView(node, this.tree, actions));
    const views = [...this.views.values()];
    this.stretches.clear();
    for (let at = 0; at < views.length; at += STRETCH) this.#addStretch(views.slice(at, at + STRETCH));
    fill(this.thread, path.length ? [...this.stretches.keys()] : this.#welcome());
    // The last messages are drawn at once, others when they are scrolled near, and the rest when the browser is idle, so
    // that they can be searched and read aloud.
    const shown = [...this.stretches.keys()];
    for (const element of shown.splice(-2)) this.#showStretch(element);
    for (const element of shown) this.near.observe(element);
    this.#drawRest(shown.reverse());
    this.#toEnd();
  }

  /** Adds a group of messages that the browser lays out and paints together, or skips while far from the screen. */
  #addStretch(views) {
    const height = views.reduce((sum, view) => sum + estimateHeight(view.node), 0);
    const style = { "contain-intrinsic-size": `auto ${height}px` };
    this.stretches.set(h("div", { class: "stretch", style }, views.map((view) => view.element)), views);
  }

  #showStretch(element) {
    this.near.unobserve(element);
    for (const view of this.stretches.get(element) ?? []) view.show();
  }

  #drawRest(elements) {
    if (!elements.length) return;
    const later = window.requestIdleCallback ?? ((work) => setTimeout(work, 50));
    later((deadline) => {
      const until = performance.now() + Math.min(IDLE_MS, deadline?.timeRemaining() ?? IDLE_MS);
      do this.#showStretch(elements.shift()); while (elements.length && performance.now() < until);
      if (this.stretches.has(elements[0])) this.#drawRest(elements);
    });
  }

  #approach(seen) {
    for (const { target, isIntersecting } of seen) if (isIntersecting) this.#showStretch(target);
  }

  #welcome() {
    return h("div", { class: "welcome" },
      h("h2", {}, "What would you like to ask?"),
      h("p", { class: "hint" }, "Answers come from ", this.welcomeModel = h("strong", {}, this.app.model ?? "the model"), " on this server. No data leaves it."),
      h("div", { class: "ideas" }, IDEAS.map(([label, text, settings]) => h("button", {
        type: "button", class: "idea", onclick: () => {
          Object.assign(this.tree.settings, settings);
          this.input.value = text;
          this.#drawSend();
          this.input.focus();
          if (settings && this.panel) this.#toggleSettings(true);
        },
      }, h("strong", {}, label), h("span", {}, text)))));
  }

  #scrolled() {
    const { scrollHeight, scrollTop, clientHeight } = this.scroller;
    this.atEnd = scrollHeight - scrollTop - clientHeight < NEAR_END_PX;
    this.jump.hidden = this.atEnd;
  }

  #toEnd() {
    this.scroller.scrollTop = this.scroller.scrollHeight;
    this.atEnd = true;
    this.jump.hidden = true;
  }

  // Actions on a message.

  #actions() {
    const idle = (work) => (...given) => (this.running ? toast("An answer is being generated; stop it first.") : work(...given));
    return {
      choose: (id) => {
        if (this.running) return;
        this.tree.choose(id);
        this.#redraw();
        this.#save();
      },
      again: idle((node) => this.#answer(node.parent)),
      edit: idle((node, text) => this.#edit(node, text)),
      branch: idle((node) => this.#branch(node)),
      inspect: (node) => this.app.openInspector(inspected(node, this.answers.get(node.id))),
      sendResults: idle((node, results) => this.#answer(this.tree.add(node.id, { role: "tool", results }).id)),
    };
  }

  /** Redraws the thread, and keeps the scroll position. */
  #redraw() {
    const { scrollTop } = this.scroller;
    this.#drawThread();
    this.scroller.scrollTop = scrollTop;
  }

  #edit(node, text) {
    if (node.role === "user") {
      const made = this.tree.add(node.parent, { role: "user", content: text, files: node.files ?? [] });
      this.#answer(made.id);
    } else if (node.role === "tool") {
      let results = node.results;
      try { results = JSON.parse(text); } catch { return toast("The results are not valid JSON.", "error"); }
      this.#answer(this.tree.add(node.parent, { role: "tool", results }).id);
    } else {
      const { id: _, parent, at, usage, error, ...rest } = node;
      this.tree.add(parent, { ...rest, content: text, edited: true });
      this.#redraw();
      this.#save();
    }
    return undefined;
  }

  #branch(node) {
    const ids = new Map();
    const tree = this.#newTree();
    tree.title = `${this.tree.title} (branch)`;
    tree.settings = structuredClone(this.tree.settings);
    for (const one of this.tree.upTo(node.id)) {
      const { id, parent, ...rest } = structuredClone(one);
      ids.set(id, tree.add(ids.get(parent), rest).id);
    }
    this.#open(tree);
    this.#save();
    this.app.go(`chat/${tree.id}`);
    toast("A new chat continues from here.");
  }

  // Sending.

  async #submit() {
    const content = this.input.value.trim();
    if (!content && !this.files.length) return;
    if (!this.app.model) await this.app.refreshModels();
    if (!this.app.model) {
      toast(this.app.trouble?.message ?? "This server has no model.", "error");
      return;
    }
    if (this.running) return;
    const last = this.tree.path().at(-1);
    const made = this.tree.add(last?.id, { role: "user", content, ...(this.files.length ? { files: this.files } : {}) });
    this.input.value = "";
    this.files = [];
    this.#drawAttached();
    this.#drawSend();
    this.title.value = this.tree.title;
    if (this.app.place !== this.tree.id) history.replaceState(null, "", `#chat/${this.tree.id}`);
    this.#answer(made.id);
  }

  /** Adds an answer below a node, and streams it. */
  async #answer(parent) {
    const { tree } = this;
    const asked = buildRequest(tree.upTo(parent), tree.settings, this.app.model);
    const node = tree.add(parent, { role: "assistant", content: "", reasoning: "", calls: [], model: this.app.model });
    this.#drawThread();
    const view = this.views.get(node.id);
    view.setLive(true);
    const own = this.running = new AbortController();
    this.#drawSend();
    this.#toEnd();
    announce("The model is answering.");
    const answer = await this.#stream(node, asked, view);
    this.answers.set(node.id, answer);
    if (this.running === own) this.running = null;
    view.setLive(false);
    if (tree !== this.tree) {
      // The user has opened another chat in the meantime.
      this.history.save(tree).then(() => this.#drawList());
      return;
    }
    if (this.atEnd) this.#toEnd();
    this.#drawSend();
    this.#save();
    announce(node.error ? `The answer failed: ${node.error.message}` : `The answer is complete. ${node.content.slice(0, 300)}`);
    if (node.error) this.app.refreshModels();
  }

  async #stream(node, asked, view) {
    const { signal } = this.running;
    for (;;) {
      const answer = await streamAnswer(node, asked, { signal, onChange: () => { this.#drawSoon(view); this.#saveSoon(); } });
      if (node.error?.status === 400 && forgetTokens(asked.body, node.error)) {
        delete node.error;
        continue;
      }
      const waits = node.error?.status === 503 && /loading|starting|waking/.test(`${node.error.code} ${node.error.message}`);
      if (!waits || signal.aborted) return answer;
      // The model is being loaded: retry until it is ready.
      this.app.refreshModels();
      delete node.error;
      await new Promise((resolve) => { setTimeout(resolve, 1000); });
      if (signal.aborted) {
        node.finish = "stopped";
        return answer;
      }
    }
  }

  /** Draws at most once per frame, and less often if drawing takes long. */
  #drawSoon(view) {
    if (this.frame) return;
    this.frame = requestAnimationFrame((now) => {
      this.frame = 0;
      if (now < this.notBefore) return this.#drawSoon(view);
      const begun = performance.now();
      view.update();
      if (this.atEnd) this.scroller.scrollTop = this.scroller.scrollHeight;
      this.notBefore = performance.now() + 2 * (performance.now() - begun);
      return undefined;
    });
  }

  #stop() {
    this.running?.abort();
  }

  #drawSend() {
    const busy = Boolean(this.running);
    fill(this.send, icon(busy ? "stop" : "send"));
    this.send.setAttribute("aria-label", busy ? "Stop" : "Send");
    this.send.classList.toggle("busy", busy);
    this.send.disabled = !busy && !this.input.value.trim() && !this.files.length;
  }

  #drawState() {
    const { app } = this;
    const value = app.stateOf(app.modelEntry());
    const { trouble } = app;
    const said = {
      loading: `${app.model ?? "The model"} is being loaded${describeProgress(app)}.`,
      offline: "Cannot reach the server.",
      failed: `${app.model} failed to load.`,
      sleeping: `${app.model} is asleep; the next message wakes it.`,
      unloaded: `${app.model} is not loaded; the next message loads it, which takes a while.`,
    }[value];
    const part = Number(/(\d+) %/.exec(said ?? "")?.[1]);
    fill(this.state, trouble?.status === 401 ? h("p", {}, "This server needs an API key. ", h("button", { type: "button", class: "button small", onclick: () => app.refreshModels() }, "Enter it"))
      : said && h("p", {}, said), value === "loading" && part >= 0 ? h("progress", { max: 100, value: part, "aria-label": "Loading" }) : null);
    if (this.welcomeModel) this.welcomeModel.textContent = app.model ?? "the model";
  }

  // Files.

  async #attach(files) {
    this.picker.value = "";
    const { taken, refused } = await readFiles(files, this.app.modelEntry(), this.files);
    for (const text of refused) toast(text, "error");
    this.files.push(...taken);
    this.#drawAttached();
    this.#drawSend();
  }

  #drawAttached() {
    fill(this.attached, this.files.map((file) => h("span", { class: "file" }, icon("file"), describeFile(file),
      iconButton("close", `Remove ${file.name}`, () => {
        this.files = this.files.filter((one) => one !== file);
        this.#drawAttached();
        this.#drawSend();
      }))));
  }

  #pasted(event) {
    const files = [...event.clipboardData.files];
    if (!files.length) return;
    event.preventDefault();
    this.#attach(files);
  }

  #dropTarget(element) {
    const has = (event) => event.dataTransfer?.types.includes("Files");
    element.addEventListener("dragover", (event) => {
      if (!has(event)) return;
      event.preventDefault();
      element.classList.add("dropping");
    });
    element.addEventListener("dragleave", (event) => {
      if (!element.contains(event.relatedTarget)) element.classList.remove("dropping");
    });
    element.addEventListener("drop", (event) => {
      element.classList.remove("dropping");
      if (!has(event)) return;
      event.preventDefault();
      this.#attach([...event.dataTransfer.files]);
    });
  }

  // Keys.

  #inputKey(event) {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      if (!this.running) this.#submit();
    } else if (event.key === "ArrowUp" && !this.input.value && !this.running) {
      const last = this.tree.path().findLast((node) => node.role === "user");
      const button = last && this.views.get(last.id)?.element.querySelector('[aria-label="Edit"]');
      if (button) {
        event.preventDefault();
        button.click();
      }
    }
  }

  #key(event) {
    const control = event.ctrlKey || event.metaKey;
    if (document.querySelector("dialog[open]")) return;
    if (event.key === "Escape" && this.running) this.#stop();
    else if (event.key === "Escape" && this.root.classList.contains("with-history")) this.#toggleHistory(false);
    else if (control && event.key.toLowerCase() === "k") {
      event.preventDefault();
      this.#palette();
    } else if (control && event.shiftKey && event.key.toLowerCase() === "o") {
      event.preventDefault();
      this.#startNew();
    }
  }

  async #palette() {
    const chats = await this.history.list();
    const entries = [
      ["New chat", () => this.#startNew()],
      ["Settings", () => this.#toggleSettings()],
      ["Export this chat", () => this.#export()],
      ["Lab", () => this.app.go("lab")],
      ["Operations", () => this.app.go("operations")],
      ["API", () => this.app.go("api")],
      ...this.app.models.map((model) => [`Model: ${model.id}`, () => { this.app.model = model.id; }]),
      ...chats.map((chat) => [`Chat: ${chat.title || "Untitled"}`, () => this.app.go(`chat/${chat.id}`)]),
    ];
    (await openDialog("Go to…", (close) => palette(entries, close), { class: "palette" }))?.();
  }

  // Side panels.

  #toggleHistory(open = !this.root.classList.contains("with-history")) {
    this.root.classList.toggle("with-history", open);
    this.menu.setAttribute("aria-expanded", String(open));
    if (open && PHONE.matches) this.filter.focus();
  }

  #toggleSettings(open = !this.panel) {
    this.panel?.remove();
    this.panel = null;
    if (open) {
      const changed = () => {
        this.usual.set(JSON.stringify(this.tree.settings));
        if (this.tree.nodes.size) this.#saveSoon();
      };
      this.panel = settingsPanel(this.tree.settings, changed, () => {
        this.#toggleSettings(false);
        this.gear.focus();
      });
      this.root.append(this.panel);
    }
    this.root.classList.toggle("with-settings", open);
    this.gear.setAttribute("aria-expanded", String(open));
  }

  #export() {
    const name = (this.tree.title || "chat").replace(/[^\w-]+/g, "-").slice(0, 40);
    return openDialog("Export this chat", (close) => [
      h("p", {}, "Markdown has the messages on screen; JSON has all branches."),
      h("div", { class: "dialog-actions" },
        h("button", { type: "button", class: "button", onclick: () => close(download(`${name}.md`, "text/markdown", toMarkdown(this.tree))) }, "Markdown"),
        h("button", { type: "button", class: "button primary", onclick: () => close(download(`${name}.json`, "application/json", JSON.stringify(this.tree, null, 2))) }, "JSON")),
    ]);
  }
}

/** A field that filters a list, and the list, which the arrow keys navigate. */
function palette(entries, close) {
  let shown = entries;
  let at = 0;
  const list = h("ul", { class: "palette-list", role: "listbox", id: "palette-list", "aria-label": "Commands" });
  const draw = () => {
    fill(list, shown.map(([label, work], number) => h("li", {
      role: "option", id: `palette-${number}`, "aria-selected": String(number === at), onclick: () => close(work),
    }, label)));
    field.setAttribute("aria-activedescendant", shown.length ? `palette-${at}` : "");
    list.children[at]?.scrollIntoView({ block: "nearest" });
  };
  const field = h("input", {
    type: "text", role: "combobox", "aria-label": "Command", "aria-expanded": "true", "aria-controls": "palette-list", autocomplete: "off", autofocus: true,
    oninput: () => {
      shown = entries.filter(([label]) => label.toLowerCase().includes(field.value.trim().toLowerCase())).slice(0, 50);
      at = 0;
      draw();
    },
    onkeydown: (event) => {
      const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
      if (step && shown.length) {
        event.preventDefault();
        at = (at + step + shown.length) % shown.length;
        draw();
      } else if (event.key === "Enter" && shown[at]) {
        event.preventDefault();
        close(shown[at][1]);
      }
    },
  });
  draw();
  return [field, list];
}
