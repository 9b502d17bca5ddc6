// The state of the server: running and queued answers, tokens per second, prefix cache, memory, and requests by API key.
// All data is from GET /operations, polled every second while the view is visible.

import { ApiError, request } from "./api.js";
import { fill, h } from "./dom.js";
import { svg } from "./views.js";

const POLL_MS = 1000;
const POINTS = 90;

export function mount(root, app) {
  const board = new Board(app);
  fill(root, board.element);
  board.start();
  return () => board.leave();
}

class Board {
  #timer = 0;
  #left = false;
  #last = null;
  #history = { written: [], read: [], running: [], waiting: [], memory: [], cached: [] };

  constructor(app) {
    this.app = app;
    this.head = h("p", { class: "hint" });
    this.problem = h("p", { class: "field-error", role: "alert", hidden: true });
    this.cards = {
      written: card("Generated tokens", "tokens/s"),
      read: card("Prompt tokens", "tokens/s"),
      running: card("Answers", ""),
      cached: card("Prefix cache", "of prompt tokens"),
      kv: card("KV cache", "in use"),
      memory: card("Memory", ""),
    };
    this.tables = h("div", { class: "board" });
    this.pause = h("button", { type: "button", class: "button small", "aria-pressed": "false", onclick: () => this.toggle() }, "Pause");
    this.element = h("div", { class: "column operations" },
      h("div", { class: "operations-head" }, h("h1", {}, "Operations"), this.head, this.pause), this.problem,
      h("div", { class: "figures" }, Object.values(this.cards).map((each) => each.element)), this.tables);
  }

  start() { this.ask(); }

  leave() {
    this.#left = true;
    clearTimeout(this.#timer);
  }

  toggle() {
    const paused = this.pause.getAttribute("aria-pressed") !== "true";
    this.pause.setAttribute("aria-pressed", String(paused));
    clearTimeout(this.#timer);
    if (!paused) this.ask();
  }

  async ask() {
    try {
      const told = await request("operations");
      this.problem.hidden = true;
      if (this.#left) return;
      this.take(told, performance.now());
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      this.problem.hidden = false;
      this.problem.textContent = error.status === 404 ? "The server provides no metrics; start it without --metrics off." : error.message;
      if (error.status === 404) return;
    }
    if (this.#left || this.pause.getAttribute("aria-pressed") === "true") return;
    // No polling while the tab is hidden.
    if (document.hidden) document.addEventListener("visibilitychange", () => this.ask(), { once: true });
    else this.#timer = setTimeout(() => this.ask(), POLL_MS);
  }

  take(told, now) {
    const before = this.#last;
    this.#last = { told, now };
    const seconds = before ? (now - before.now) / 1000 : 0;
    const rate = (name) => (before && seconds > 0 ? Math.max(0, (told.tokens[name] - before.told.tokens[name]) / seconds) : null);
    const running = told.models.reduce((sum, model) => sum + model.running, 0);
    const waiting = told.models.reduce((sum, model) => sum + model.waiting, 0);
    const add = (name, value) => {
      if (value === null) return;
      this.#history[name].push(value);
      if (this.#history[name].length > POINTS) this.#history[name].shift();
    };
    add("written", rate("completion_tokens"));
    add("read", rate("prompt_tokens"));
    add("running", running);
    add("waiting", waiting);
    add("memory", told.memory.resident_bytes);
    this.draw(told, { running, waiting, written: rate("completion_tokens"), read: rate("prompt_tokens") });
  }

  draw(told, now) {
    const past = this.#history;
    this.head.textContent = `version ${told.version}, up for ${duration(told.uptime_s)}${told.draining ? ", and stopping" : ""}, ${told.requests_in_flight - 1 || "no"} other request${told.requests_in_flight === 2 ? "" : "s"} in flight`;
    const { cards } = this;
    cards.written.show(figure(now.written), chart([past.written]), `${figure(told.tokens.completion_tokens)} in total`);
    cards.read.show(figure(now.read), chart([past.read]), `${figure(told.tokens.prompt_tokens)} in total`);
    cards.running.show([String(now.running), h("small", {}, " running, "), String(now.waiting), h("small", {}, " queued")], chart([past.running, past.waiting]),
      told.models.map((model) => model.places && `capacity ${model.places}`).filter(Boolean).join(", "));
    const share = told.tokens.prompt_tokens ? told.tokens.cached_tokens / told.tokens.prompt_tokens : 0;
    cards.cached.show(`${(share * 100).toFixed(0)} %`, gauge(share, false), `${figure(told.tokens.cached_tokens)} of ${figure(told.tokens.prompt_tokens)}`);
    const used = told.models.map((model) => model.kv_usage).filter((value) => value !== null);
    const kv = used.length ? Math.max(...used) : null;
    cards.kv.show(kv === null ? "–" : `${(kv * 100).toFixed(0)} %`, kv === null ? null : gauge(kv, true), kv === null ? "not reported by this engine" : "");
    const { resident_bytes: resident, bodies_bytes: bodies, replies_bytes: replies } = told.memory;
    cards.memory.show(bytes(resident), chart([past.memory], true), `${bytes(bodies)} of request bodies, ${bytes(replies)} of unread replies`);
    fill(this.tables, modelTable(told), answerTable(told), keyTable(told), requestTable(told));
  }
}

function card(title, unit) {
  const value = h("p", { class: "value" });
  const drawing = h("div", {});
  const note = h("p", { class: "hint" });
  const element = h("section", { class: "card figure", "aria-label": title }, h("h2", {}, title), value, drawing, note);
  return {
    element,
    show(said, drawn, more) {
      fill(value, said, unit && h("small", {}, ` ${unit}`));
      fill(drawing, drawn);
      note.textContent = more ?? "";
    },
  };
}

// Drawings.

function chart(rows, fromLeast = false) {
  const all = rows.flat();
  const most = Math.max(...all, 1e-9);
  const least = fromLeast ? Math.min(...all, most) * 0.98 : 0;
  const x = (at, count) => 200 - (count - 1 - at) * (200 / (POINTS - 1));
  const y = (value) => 48 - ((value - least) / Math.max(most - least, 1e-9)) * 44;
  const lines = rows.flatMap((row, number) => {
    if (row.length < 2) return [];
    const points = row.map((value, at) => `${x(at, row.length).toFixed(1)},${y(value).toFixed(1)}`);
    const area = `M${points[0].split(",")[0]},50 L${points.join(" L")} L200,50 Z`;
    return [...(number ? [] : [svg("path", { class: "area", d: area })]), svg("path", { class: `line ${number ? "second" : ""}`, d: `M${points.join(" L")}` })];
  });
  return svg("svg", { class: "chart", viewBox: "0 0 200 50", preserveAspectRatio: "none", "aria-hidden": "true" },
    svg("line", { class: "ground", x1: 0, x2: 200, y1: 49.5, y2: 49.5 }), ...lines);
}

function gauge(part, warns) {
  const full = warns && part > 0.9 ? "full" : "";
  return svg("svg", { class: "bar-meter", viewBox: "0 0 100 6", preserveAspectRatio: "none", "aria-hidden": "true" },
    svg("rect", { class: "ground", width: 100, height: 6, rx: 2 }), svg("rect", { class: `used ${full}`, width: Math.min(100, part * 100), height: 6, rx: 2 }));
}

// Tables.

function table(title, names, rows, empty) {
  if (!rows.length && !empty) return null;
  return h("section", {}, h("h2", {}, title), rows.length
    ? h("div", { class: "sideways", tabindex: "0", role: "region", "aria-label": title }, h("table", {}, h("thead", {}, h("tr", {}, names.map((name) => h("th", {}, name)))),
      h("tbody", {}, rows.map((row) => h("tr", {}, row.map((value) => h("td", {}, value ?? "–")))))))
    : h("p", { class: "hint" }, empty));
}

const ms = (value) => (typeof value === "number" ? `${value < 10 ? value.toFixed(1) : Math.round(value)} ms` : null);

function modelTable(told) {
  return table("Models", ["model", "running", "queued", "capacity", "queue", "first token", "between tokens", "answers"], told.models.map((model) => [
    model.name, String(model.running), String(model.waiting), String(model.places ?? "–"), ms(model.mean_ms.queue), ms(model.mean_ms.first_token), ms(model.mean_ms.between_tokens),
    Object.entries(model.answers).filter(([, count]) => count).map(([how, count]) => `${count} ${how}`).join(", ") || "none yet",
  ]), null);
}

function answerTable(told) {
  return table("Active answers", ["state", "model", "key", "time", "prompt", "cached", "generated", "rate"], told.answers.map((each) => [
    h("span", { class: `badge ${each.state === "running" ? "accent" : "amber"}` }, each.state), each.model, each.key, `${each.seconds.toFixed(1)} s`, figure(each.prompt_tokens), figure(each.cached_tokens), figure(each.completion_tokens),
    each.tokens_per_s ? `${each.tokens_per_s}/s` : null,
  ]), "No active answers.");
}

function keyTable(told) {
  return table("Keys", ["key", "active requests", "share", "running", "queued"], told.keys.map((each) => [
    [each.name, each.you && h("span", { class: "badge accent" }, "you")], String(each.inside), h("div", {}, gauge(each.share, false)), String(each.running), String(each.waiting),
  ]), null);
}

function requestTable(told) {
  return table("Recent requests", ["request", "status", "duration", "queue", "first token", "rate", "prompt", "cached", "generated", "finish"], told.requests.map((each) => [
    h("code", {}, `${each.method} ${each.path}`), h("span", { class: `badge ${each.status < 400 ? "accent" : "danger"}` }, String(each.status)), ms(each.duration_ms), ms(each.queue_ms), ms(each.ttft_ms),
    each.tokens_per_s ? `${each.tokens_per_s}/s` : null, figure(each.prompt_tokens), figure(each.cached_tokens), figure(each.completion_tokens), each.finish,
  ]), "No requests yet.");
}

// Number formats.

function figure(value) {
  if (value === null || value === undefined) return "–";
  if (value >= 1e6) return `${(value / 1e6).toFixed(value < 1e7 ? 2 : 1)} M`;
  if (value >= 1e4) return `${(value / 1e3).toFixed(1)} k`;
  return value === Math.round(value) || value >= 100 ? String(Math.round(value)) : value.toFixed(1);
}

function bytes(value) {
  if (value < 1024) return `${value} B`;
  const names = ["KiB", "MiB", "GiB"];
  const power = Math.min(names.length, Math.floor(Math.log2(value) / 10));
  const shown = value / 2 ** (10 * power);
  return `${shown.toFixed(shown < 10 ? 1 : 0)} ${names[power - 1]}`;
}

function duration(seconds) {
  const [days, hours, minutes] = [seconds / 86400, (seconds / 3600) % 24, (seconds / 60) % 60].map(Math.floor);
  if (days) return `${days} d ${hours} h`;
  return hours ? `${hours} h ${minutes} min` : minutes ? `${minutes} min` : `${Math.floor(seconds)} s`;
}
