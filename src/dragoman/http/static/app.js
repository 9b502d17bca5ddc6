// The frame of the web UI: views, the models and their states, the theme, and the API key.

import { ApiError, key, onUnauthorized, request } from "./api.js";
import { announce, confirmDialog, fill, h, icon, iconButton, kept, openDialog, toast } from "./dom.js";

// Each view is a module that exports `mount(root, app)`, which may return a function to call when the user leaves it.
const VIEWS = {
  chat: { title: "Chat", load: () => import("./chat.js") },
  lab: { title: "Lab", load: () => import("./lab.js") },
  operations: { title: "Operations", load: () => import("./operations.js") },
  api: { title: "API", load: () => import("./docs.js") },
};
const STATES = {
  loaded: "ready",
  loading: "loading",
  unloaded: "not loaded",
  sleeping: "asleep",
  failed: "failed",
  offline: "unreachable",
};
const POLL_MS = 1500;
const QUIET_POLL_MS = 30_000;

class App extends EventTarget {
  /** The models of the last reply of /v1/models. */
  models = [];
  /** The error of the last request for them, or null. */
  trouble = null;
  #chosen = kept(() => localStorage, "model");
  #timer = 0;
  #leave = null;
  #shown = null;

  /** The name of the selected model. */
  get model() {
    const names = this.models.map((model) => model.id);
    const chosen = this.#chosen.get();
    return names.includes(chosen) ? chosen : names[0] ?? null;
  }

  set model(name) {
    this.#chosen.set(name);
    this.dispatchEvent(new Event("models"));
  }

  modelEntry(name = this.model) {
    return this.models.find((model) => model.id === name) ?? null;
  }

  /** loaded, loading, unloaded, sleeping, failed; or offline if the server does not reply. */
  stateOf(model) {
    if (this.trouble?.status === 0) return "offline";
    if (this.trouble?.passes) return "loading";
    return model?.status?.value ?? (model ? "loaded" : "loading");
  }

  /** Fetches the models again, without throwing, and dispatches "models". */
  async refreshModels() {
    clearTimeout(this.#timer);
    try {
      this.models = (await request("v1/models")).data ?? [];
      this.trouble = null;
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      this.trouble = error;
    }
    this.dispatchEvent(new Event("models"));
    // No polling while the tab is hidden, or after the server has rejected the key.
    const busy = this.trouble?.status !== 401 && (this.trouble || this.models.some((model) => model.status?.value === "loading"));
    if (this.trouble?.status !== 401) this.#timer = setTimeout(() => this.#poll(), busy ? POLL_MS : QUIET_POLL_MS);
  }

  #poll() {
    if (document.hidden) document.addEventListener("visibilitychange", () => this.refreshModels(), { once: true });
    else this.refreshModels();
  }

  /** Opens a view, or an object in it: `go("lab")`, `go("chat/3f2a")`. */
  go(hash) {
    location.hash = hash;
  }

  /** The part of the URL after the name of the view: `#chat/3f2a` has "3f2a". */
  get place() {
    return decodeURIComponent(location.hash.split("/").slice(1).join("/"));
  }

  /** Opens the inspector for an answer; see inspector.js. */
  async openInspector(answer) {
    const module = await import("./inspector.js");
    return module.openInspector(this, answer);
  }

  async show() {
    const asked = location.hash.slice(1).split("/")[0];
    const name = asked in VIEWS ? asked : location.pathname.endsWith("/docs") ? "api" : "chat";
    if (name === this.#shown) {
      this.dispatchEvent(new Event("place"));
      return;
    }
    this.#shown = name;
    for (const link of document.querySelectorAll("[data-view]")) {
      if (link.dataset.view === name) link.setAttribute("aria-current", "page");
      else link.removeAttribute("aria-current");
    }
    document.title = name === "chat" ? "dragoman" : `${VIEWS[name].title} · dragoman`;
    const view = await VIEWS[name].load().catch(() => null);
    if (this.#shown !== name) return;
    this.#leave?.();
    const root = h("div", { class: `view ${name}-view` });
    fill(document.getElementById("view"), root);
    document.getElementById("bar-model").hidden = name === "api";
    this.#leave = view ? view.mount(root, this) : fill(root, h("p", { class: "empty" }, "This view could not be loaded; reload the page."));
    if (typeof this.#leave !== "function") this.#leave = null;
  }
}

// The end of the bar: the model and its state, the theme, the API key.

function modelPicker(app) {
  const select = h("select", { "aria-label": "Model", onchange: () => { app.model = select.value; } });
  const state = h("span", { class: "state", role: "img" });
  const draw = () => {
    const names = app.models.map((model) => model.id);
    const shown = names.length ? names : ["no model"];
    if (shown.join("\n") !== [...select.options].map((option) => option.value).join("\n")) {
      fill(select, shown.map((name) => h("option", { value: name }, name)));
    }
    for (const option of select.options) {
      const model = app.modelEntry(option.value);
      const value = app.stateOf(model);
      option.textContent = value === "loaded" || !model ? option.value : `${option.value} (${STATES[value] ?? value})`;
    }
    if (app.model) select.value = app.model;
    select.disabled = names.length < 2;
    const value = app.stateOf(app.modelEntry());
    state.dataset.value = value;
    const progress = describeProgress(app);
    state.setAttribute("aria-label", `The model is ${STATES[value] ?? value}${progress}`);
    state.title = `${STATES[value] ?? value}${progress}`;
  };
  app.addEventListener("models", draw);
  draw();
  return h("div", { class: "model-picker", id: "bar-model" }, state, select);
}

/** Returns ", 42 %" for a model that is being loaded, if the server reports the progress. */
export function describeProgress(app) {
  const part = app.modelEntry()?.status?.progress;
  // Until the server can list its models, the error message has the progress.
  const percent = typeof part === "number" ? Math.round(part * 100) : /\((\d+)%\)/.exec(app.trouble?.message ?? "")?.[1];
  return percent === undefined ? "" : `, ${percent} %`;
}

function themeButton() {
  const theme = kept(() => localStorage, "theme");
  const system = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (document.documentElement.dataset.theme ?? (system.matches ? "dark" : "light")) === "dark";
  const button = iconButton("moon", "Theme", () => {
    const next = isDark() ? "light" : "dark";
    document.documentElement.dataset.theme = next;
    // Choosing the system's theme again means to follow the system.
    if ((next === "dark") === system.matches) {
      delete document.documentElement.dataset.theme;
      theme.set(null);
    } else theme.set(next);
    draw();
  });
  const draw = () => {
    const label = isDark() ? "Switch to light" : "Switch to dark";
    fill(button, icon(isDark() ? "sun" : "moon"));
    button.setAttribute("aria-label", label);
    button.title = label;
  };
  system.addEventListener("change", draw);
  draw();
  return button;
}

/** Asks the user for an API key; resolves to whether one was entered. */
async function askForKey(problem) {
  const field = h("input", { type: "password", id: "key", autocomplete: "off", spellcheck: "false", autofocus: true, required: true });
  const given = await openDialog("This server needs an API key", (close) => h("form", {
    class: "stack",
    onsubmit: (event) => {
      event.preventDefault();
      close(field.value.trim());
    },
  },
  problem && h("p", { class: "field-error", role: "alert" }, problem),
  h("label", { for: "key" }, "API key"),
  field,
  h("p", { class: "hint" }, "It is stored only in this tab, and sent only to this server."),
  h("div", { class: "dialog-actions" }, h("button", { class: "button primary" }, "Use this key"))));
  if (!given) return false;
  key.set(given);
  return true;
}

function keyButton(app) {
  return iconButton("key", "API key", async () => {
    if (key.get() && await confirmDialog("API key", "An API key is stored in this tab.", "Remove it")) {
      key.set(null);
      toast("API key removed.");
    } else if (!key.get() && await askForKey("")) app.refreshModels();
  });
}

function start() {
  const app = new App();
  onUnauthorized(askForKey);
  fill(document.getElementById("bar-end"), modelPicker(app), themeButton(), keyButton(app));
  addEventListener("hashchange", () => app.show());
  addEventListener("unhandledrejection", (event) => {
    if (event.reason instanceof ApiError) {
      event.preventDefault();
      toast(event.reason.message, "error");
      announce(event.reason.message);
    }
  });
  app.show();
  app.refreshModels();
}

start();
