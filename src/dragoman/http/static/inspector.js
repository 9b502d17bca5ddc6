// The inspector of an answer: prompt and answer token by token with probabilities, the parsed parts, timings, and the same
// request as code or through another API. `inspected` in answer.js builds the record that it is opened with.

import { ApiError, fetchOk, request, stream } from "./api.js";
import { fill, h, openDialog } from "./dom.js";
import { convertRequest, TARGETS } from "./convert.js";
import { asCode, showJson, svg, tabs, textOfEvent } from "./views.js";

const RECORDED = { return_token_ids: true, logprobs: true, top_logprobs: 5 };
const CHAT = "v1/chat/completions";
const MOST_TOKENS = 6000;
const CHANCES = [0.1, 0.35, 0.65, 0.9];

export function openInspector(app, answer) {
  return openDialog("Inspector", () => new Inspector(app, answer).elements, { class: "wide inspector" });
}

class Inspector {
  #prompt = null;
  #reading = null;

  constructor(app, answer) {
    this.app = app;
    this.facts = h("dl", { class: "told-facts" });
    this.body = h("div", { class: "tabbed-holder" });
    this.elements = [this.facts, this.body];
    this.take(answer);
  }

  take(answer) {
    this.answer = answer;
    this.record = readEvents(answer.events ?? []);
    this.#prompt = this.#reading = null;
    this.drawFacts();
    fill(this.body, tabs("Views of the answer", [
      ["Answer", () => later(() => this.drawAnswer())],
      ["Prompt", () => later(() => this.drawPrompt())],
      ["Raw text", () => later(() => this.drawRaw())],
      ["Timings", () => later(() => this.drawTimings())],
      ["Request", () => this.drawRequest()],
      ["Resend", () => this.drawAgain()],
    ]));
  }

  drawFacts() {
    const { answer } = this;
    const used = answer.usage ?? {};
    const cached = used.prompt_tokens_details?.cached_tokens;
    const seconds = answer.times?.first ? (answer.times.last - answer.times.first) / 1000 : 0;
    const rate = used.completion_tokens > 1 && seconds > 0 ? (used.completion_tokens - 1) / seconds : null;
    const facts = [
      ["model", answer.model ?? answer.request?.model],
      ["prompt", used.prompt_tokens && `${used.prompt_tokens} tokens${cached ? `, ${cached} cached` : ""}`],
      ["answer", used.completion_tokens && `${used.completion_tokens} tokens`],
      ["first token", answer.times?.first && `${Math.round(answer.times.first - answer.times.sent)} ms`],
      ["rate", rate && `${rate.toFixed(rate < 10 ? 1 : 0)} tokens/s`],
      ["finish", answer.finish],
      ["request", answer.requestId],
    ];
    fill(this.facts, facts.filter(([, value]) => value).map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, String(value)))));
  }

  /** Offers to repeat the request with token ids and log probabilities. */
  #ask(why) {
    const problem = h("p", { class: "field-error", role: "alert", hidden: true });
    const { path, request: body } = this.answer;
    if (!body || path.replace(/^\//, "") !== CHAT) return h("p", { class: "hint" }, why);
    const button = h("button", { type: "button", class: "button primary", onclick: async () => {
      button.disabled = true;
      fill(button, "Sending…");
      try { this.take(await askAgain(body)); } catch (error) {
        if (!(error instanceof ApiError)) throw error;
        Object.assign(problem, { hidden: false, textContent: error.message });
        button.disabled = false;
        fill(button, "Repeat and record");
      }
    } }, "Repeat and record");
    return h("div", { class: "stack" }, h("p", {}, why), h("p", { class: "hint" }, "You can repeat the request with token ids and log probabilities. Without greedy sampling or a seed, the answer may differ."), h("div", {}, button), problem);
  }

  async #read() {
    const { ids, promptIds } = this.record;
    this.#reading ??= request("parse", { body: { token_ids: ids, prompt_token_ids: promptIds ?? [], model: this.answer.model, tools: toolsOf(this.answer.request) }, quiet: true });
    return this.#reading;
  }

  async drawAnswer() {
    const { ids, logprobs } = this.record;
    if (!ids.length) return this.#ask("No token ids were recorded for this answer.");
    const told = await this.#read();
    const kinds = [];
    for (const part of told.parts) kinds.fill(part.kind, kinds.length, kinds.length = part.end);
    const special = new Set(told.special);
    const aligned = logprobs.length === ids.length ? logprobs : alignLogprobs(told.token_strs, logprobs);
    const tokens = ids.map((id, at) => ({ id, at, text: told.token_strs[at], special: special.has(at), kind: kinds[at], logprob: aligned[at] }));
    const mean = aligned.filter(Boolean);
    const perplexity = mean.length ? Math.exp(-mean.reduce((sum, each) => sum + each.logprob, 0) / mean.length) : null;
    return h("div", { class: "stack" },
      h("p", { class: "hint" }, `${ids.length} tokens`, perplexity && `, perplexity ${perplexity.toFixed(2)}`, mean.length ? ". Less likely tokens have a stronger colour; point at one, or use the arrow keys." : ". No log probabilities were recorded."),
      tokenView(tokens, "Answer, token by token", drawAnswerToken));
  }

  /** Returns the prompt: the ids returned with the answer, or else those that the server would render now. */
  async #render() {
    const { request: body, path } = this.answer;
    if (this.record.promptIds) {
      const told = await request("detokenize", { body: { tokens: this.record.promptIds, return_token_strs: true, model: this.answer.model }, quiet: true });
      return { ...told, ids: this.record.promptIds, exact: true };
    }
    if (!body) return null;
    const asked = path.replace(/^\//, "") === CHAT ? body : null;
    if (!asked) return null;
    const rendered = await request(`${CHAT}/render`, { body: withoutStream(asked), quiet: true });
    if (!rendered.prompt_token_ids) return { prompt: rendered.prompt, ids: null };
    const told = await request("detokenize", { body: { tokens: rendered.prompt_token_ids, return_token_strs: true, model: body.model }, quiet: true });
    return { ...told, ids: rendered.prompt_token_ids, exact: false };
  }

  async drawPrompt() {
    this.#prompt ??= this.#render();
    const told = await this.#prompt;
    if (!told) return h("p", { class: "hint" }, "The prompt of this answer is not available any more.");
    if (!told.ids) return h("div", { class: "stack" }, h("p", { class: "hint" }, "This engine takes text; there are no token ids."), h("pre", { tabindex: "0" }, told.prompt));
    const cached = this.answer.usage?.prompt_tokens_details?.cached_tokens ?? 0;
    const special = new Set(told.special);
    const sampled = await this.#sampled(told);
    const tokens = told.ids.map((id, at) => ({ id, at, text: told.token_strs[at], special: special.has(at), cached: at < cached, sampled: sampled.has(at) }));
    return h("div", { class: "stack" },
      h("p", { class: "hint" }, told.exact ? `The ${told.ids.length} ids that the model received.` : `${told.ids.length} ids, rendered again now; the answer did not include its own.`),
      h("ul", { class: "legend", "aria-label": "Colours" },
        h("li", {}, h("span", { class: "token special" }, "special token"), ` ${special.size}`),
        cached ? h("li", {}, h("span", { class: "token cached" }, "from the prefix cache"), ` ${cached}`) : h("li", {}, "nothing from the prefix cache"),
        sampled.size ? h("li", {}, h("span", { class: "token sampled" }, "as sampled"), ` ${sampled.size}: earlier answers keep their sampled ids, even where a tokenizer would encode them differently`) : null),
      tokenView(tokens, "Prompt, token by token", drawPromptToken));
  }

  /** Returns the positions of ids that a tokenizer would encode differently: they are from sampled answers. */
  async #sampled(told) {
    const body = this.answer.request;
    if (!told.exact || !body?.messages || !body.messages.some((message) => message.role === "assistant")) return new Set();
    const rendered = await request(`${CHAT}/render`, { body: { ...withoutStream(body), history: "template" }, quiet: true }).catch(() => null);
    const written = rendered?.prompt_token_ids ?? told.ids;
    let head = 0, tail = 0;
    while (head < told.ids.length && told.ids[head] === written[head]) head++;
    while (tail < told.ids.length - head && told.ids.at(-1 - tail) === written.at(-1 - tail)) tail++;
    return new Set(Array.from({ length: told.ids.length - head - tail }, (_, at) => head + at));
  }

  async drawRaw() {
    const { ids } = this.record;
    if (!ids.length) return this.#ask("The raw text with its markers needs the token ids, which were not recorded.");
    const told = await this.#read();
    const special = new Set(told.special);
    const spans = told.parts.map((part) => h("span", { class: `part ${part.kind}`, title: part.kind },
      told.token_strs.slice(part.begin, part.end).map((text, at) => (special.has(part.begin + at) ? h("span", { class: "token special" }, text) : text))));
    return h("div", { class: "stack" },
      h("p", { class: "hint" }, "Parsed as ", h("strong", {}, told.dialect.name), `: ${told.dialect.how}. `, h("a", { href: `#lab/${told.dialect.name}` , onclick: () => keepForLab(told.text) }, "Open in the lab")),
      h("pre", { class: "raw", tabindex: "0", "aria-label": "Raw text with its parts" }, spans),
      h("ul", { class: "legend", "aria-label": "Colours" }, ["reasoning", "text", "call", "end"].map((kind) => h("li", {}, h("span", { class: `part ${kind}` }, kind)))),
      h("table", {}, h("thead", {}, h("tr", {}, ["part", "tokens", "from", "to"].map((name) => h("th", {}, name)))),
        h("tbody", {}, told.parts.map((part) => h("tr", {}, h("td", {}, part.kind, part.name && ` of ${part.name}`), h("td", {}, String(part.end - part.begin)), h("td", {}, String(part.begin)), h("td", {}, String(part.end)))))));
  }

  async drawTimings() {
    const { times, usage, requestId } = this.answer;
    const told = requestId ? await request(`operations?request_id=${encodeURIComponent(requestId)}`, { quiet: true }).catch(() => null) : null;
    const server = told?.requests?.find((each) => each.request_id === requestId);
    const rows = [];
    if (server) {
      const reading = server.ttft_ms === undefined ? null : server.ttft_ms - (server.queue_ms ?? 0);
      rows.push(["queue", server.queue_ms, "waiting for the engine"], ["prompt", reading, "prefill of the prompt, without its cached part"], ["first token", server.ttft_ms, "from the request to the first token, measured by the server"],
        ["total", server.duration_ms, "of the request, measured by the server"], ["rate", server.tokens_per_s, "tokens per second, after the first"]);
    }
    if (times?.sent) {
      if (times.first) rows.push(["first token here", times.first - times.sent, "until this page received it"]);
      if (times.last) rows.push(["last token here", times.last - times.sent, "until this page received it"]);
    }
    if (!rows.length) return h("p", { class: "hint" }, "No timings were recorded for this answer.");
    const shown = rows.filter(([, value]) => typeof value === "number");
    const first = times?.first ? times.first - times.sent : server?.ttft_ms;
    const whole = times?.last ? times.last - times.sent : server?.duration_ms;
    return h("div", { class: "stack" }, whole ? timeline(Math.min(server?.queue_ms ?? 0, first ?? whole), first ?? whole, whole) : null,
      h("table", {}, h("tbody", {}, shown.map(([name, value, what]) => h("tr", {}, h("th", {}, name), h("td", {}, name === "rate" ? `${value}` : value < 10_000 ? `${value.toFixed(1)} ms` : `${(value / 1000).toFixed(2)} s`), h("td", { class: "hint" }, what))))),
      usage && showJson({ usage }));
  }

  drawRequest() {
    const { request: body, path } = this.answer;
    if (!body) return h("p", { class: "hint" }, "The request of this answer is not available any more.");
    return h("div", { class: "stack" }, asCode(() => ({ method: "POST", path: `/${path.replace(/^\//, "")}`, body })),
      h("details", {}, h("summary", {}, "Events, as received"), showJson(this.answer.events ?? [])));
  }

  drawAgain() {
    const { request: body, path } = this.answer;
    if (!body || path.replace(/^\//, "") !== CHAT) return h("p", { class: "hint" }, "Only a chat completion can be resent through another API.");
    const target = h("select", { id: "again-api", onchange: () => draw() }, TARGETS.map(({ name }) => h("option", {}, name)));
    const input = h("textarea", { class: "mono", rows: 14, "aria-label": "Body", spellcheck: "false" });
    const where = h("code", {});
    const out = h("div", { class: "stack", role: "status" });
    const problem = h("p", { class: "field-error", role: "alert", hidden: true });
    const chosen = () => TARGETS.find(({ name }) => name === target.value);
    const draw = async () => {
      const { path: to } = chosen();
      where.textContent = `POST /${to}`;
      const prompt = to === "v1/completions" ? await (this.#prompt ??= this.#render()).catch(() => null) : null;
      input.value = JSON.stringify(convertRequest(body, to, prompt), null, 2);
    };
    const send = h("button", { type: "button", class: "button primary", onclick: async () => {
      problem.hidden = true;
      send.disabled = true;
      try { await this.#sendAgain(chosen().path, JSON.parse(input.value), out); } catch (error) {
        Object.assign(problem, { hidden: false, textContent: error.message });
      } finally { send.disabled = false; }
    } }, "Send");
    draw();
    return h("div", { class: "again" },
      h("div", {}, h("label", { for: "again-api" }, "Through"), target, where, input, h("div", { class: "row" }, send), problem),
      h("div", {}, h("h3", {}, "New answer"), out, h("h3", {}, "First answer"), h("pre", { tabindex: "0" }, this.answer.reasoning && h("span", { class: "spoken reasoning" }, this.answer.reasoning), this.answer.text, (this.answer.calls ?? []).map((call) => h("span", { class: "spoken call" }, `\n${call.name}(${call.arguments})`)))));
  }

  async #sendAgain(path, body, out) {
    const said = { reasoning: "", text: "", call: "" };
    const pre = h("pre", { class: "stream-text", tabindex: "0", "aria-label": "New answer" });
    fill(out, pre);
    const began = performance.now();
    const hear = (data) => {
      const { text, reasoning, call, name } = textOfEvent(data);
      said.reasoning += reasoning ?? "";
      said.text += text ?? "";
      said.call += (name ? `\n${name}(` : "") + (call ?? "");
      fill(pre, said.reasoning && h("span", { class: "spoken reasoning" }, said.reasoning), said.text, said.call && h("span", { class: "spoken call" }, `${said.call})`));
    };
    if (path.startsWith("api/")) await lines(path, body, hear);
    else await stream(path, body, { onEvent: hear });
    const same = said.text === (this.answer.text ?? "");
    out.append(h("p", { class: `verdict ${same ? "" : "no"}` }, same ? "The text is the same." : `The text differs${body.temperature === 0 || body.seed !== undefined ? "." : ": without a seed, sampling is random."}`, ` ${Math.round(performance.now() - began)} ms`));
  }
}

/** Returns an element that is filled when `make()` resolves. */
function later(make) {
  const holder = h("div", {}, h("p", { class: "hint" }, "Loading…"));
  make().then((made) => fill(holder, made), (error) => {
    if (!(error instanceof ApiError)) throw error;
    fill(holder, h("p", { class: "field-error", role: "alert" }, error.message));
  });
  return holder;
}

/** Reads lines of JSON, as Ollama streams them. */
async function lines(path, body, hear) {
  const reply = await fetchOk(path, { body });
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (let part = await reader.read(); !part.done; part = await reader.read()) {
    const all = (rest + part.value).split("\n");
    rest = all.pop();
    for (const line of all) if (line) hear(JSON.parse(line));
  }
}

function keepForLab(text) {
  try { sessionStorage.setItem("lab", JSON.stringify({ text, dialect: "" })); } catch { /* the lab opens empty */ }
  document.querySelector("dialog.inspector")?.close();
}

const withoutStream = ({ stream: _, stream_options: __, ...rest }) => rest;
const toolsOf = (body) => (body?.tools?.every((tool) => tool.function) ? body.tools : undefined);

/** Returns the token ids and log probabilities in the events of a stream. */
export function readEvents(events) {
  const record = { ids: [], logprobs: [], promptIds: null };
  for (const event of events) {
    record.promptIds ??= event.prompt_token_ids ?? null;
    const choice = event.choices?.find((each) => !each.index);
    if (choice?.token_ids) record.ids.push(...choice.token_ids);
    if (choice?.logprobs?.content) record.logprobs.push(...choice.logprobs.content);
  }
  return record;
}

/** Assigns log probabilities to tokens by their texts, in order, if some tokens have none. */
function alignLogprobs(texts, logprobs) {
  let at = 0;
  return texts.map((text) => (logprobs[at]?.token === text ? logprobs[at++] : undefined));
}

async function askAgain(body) {
  const asked = { ...body, ...RECORDED, stream: true, stream_options: { include_usage: true } };
  const times = { sent: performance.now(), first: null, last: null };
  const answer = { path: CHAT, request: asked, events: [], text: "", reasoning: "", calls: [], times };
  await stream(CHAT, asked, {
    onOpen: (reply) => { answer.requestId = reply.headers.get("x-request-id"); },
    onEvent: (data) => {
      times.last = performance.now();
      answer.events.push(data);
      answer.model = data.model ?? answer.model;
      answer.usage = data.usage ?? answer.usage;
      const { text, reasoning, call, name } = textOfEvent(data);
      if (text || reasoning || call || name) times.first ??= times.last;
      answer.text += text ?? "";
      answer.reasoning += reasoning ?? "";
      if (name) answer.calls.push({ name, arguments: "" });
      if (call && answer.calls.length) answer.calls.at(-1).arguments += call;
      answer.finish = data.choices?.[0]?.finish_reason ?? answer.finish;
    },
  });
  return answer;
}

// A row of tokens. One of them is current: the one under the pointer, or with the focus.

function tokenView(tokens, label, describe) {
  const shown = tokens.slice(0, MOST_TOKENS);
  const detail = h("div", { class: "card token-detail", "aria-live": "polite" });
  const list = h("div", { class: "tokens", role: "group", "aria-label": label });
  const elements = shown.map((token) => drawToken(token));
  let current = 0;
  const choose = (at, focus) => {
    elements[current]?.removeAttribute("aria-current");
    if (elements[current]) elements[current].tabIndex = -1;
    current = at;
    elements[at].setAttribute("aria-current", "true");
    elements[at].tabIndex = 0;
    if (focus) elements[at].focus();
    fill(detail, describe(shown[at]));
  };
  const placeOf = (event) => Number(event.target.closest(".token")?.dataset.at ?? -1);
  list.addEventListener("pointerover", (event) => placeOf(event) >= 0 && choose(placeOf(event)));
  list.addEventListener("focusin", (event) => placeOf(event) >= 0 && placeOf(event) !== current && choose(placeOf(event)));
  list.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10 }[event.key];
    const to = event.key === "Home" ? 0 : event.key === "End" ? shown.length - 1 : step ? Math.max(0, Math.min(shown.length - 1, current + step)) : -1;
    if (to < 0) return;
    event.preventDefault();
    choose(to, true);
  });
  fill(list, elements);
  if (shown.length) choose(0);
  return h("div", { class: "token-side" }, h("div", {}, list, tokens.length > shown.length && h("p", { class: "hint" }, `and ${tokens.length - shown.length} more`)), detail);
}

function drawToken(token) {
  const chance = token.logprob ? Math.exp(token.logprob.logprob) : null;
  const names = ["token", token.special && "special", token.cached && "cached", token.sampled && "sampled"].filter(Boolean).join(" ");
  const grade = chance === null ? null : CHANCES.findIndex((most) => chance < most) + 1 || null;
  return h("span", { class: names, role: "button", tabindex: "-1", dataset: { at: token.at, ...(grade ? { p: grade } : {}) }, "aria-label": `${visible(token.text)}, id ${token.id}` }, glyphs(token.text));
}

const visible = (text) => text.replaceAll("\n", "↵").replaceAll("\t", "⇥").replace(/^ +| +$/g, (spaces) => "␣".repeat(spaces.length)) || "nothing";

/** Replaces invisible characters by symbols, and keeps line breaks. */
function glyphs(text) {
  if (!/[\n\t]/.test(text)) return text || h("span", { class: "glyph" }, "∅");
  return text.split(/([\n\t])/).map((part) => (part === "\n" ? [h("span", { class: "glyph" }, "↵"), "\n"] : part === "\t" ? h("span", { class: "glyph" }, "⇥") : part));
}

const percent = (chance) => `${(chance * 100).toFixed(chance < 0.1 ? 2 : 1)} %`;

function drawAnswerToken(token) {
  const { logprob } = token;
  const chosen = logprob && { token: token.text, logprob: logprob.logprob };
  const others = logprob?.top_logprobs ?? [];
  const known = others.some((each) => each.token === logprob.token);
  const rows = logprob ? [...(known ? [] : [chosen]), ...others] : [];
  return [
    h("p", { class: "big" }, visible(token.text)),
    h("p", { class: "hint" }, `id ${token.id}, token ${token.at + 1}`, token.kind && `, in ${token.kind === "call" ? "a call" : token.kind}`, token.special && ", a special token"),
    logprob && h("p", {}, percent(Math.exp(logprob.logprob)), h("span", { class: "hint" }, ` log probability ${logprob.logprob.toFixed(3)}`)),
    rows.length > 0 && h("table", { class: "chances" }, h("tbody", {}, rows.map((each) => {
      const chance = Math.exp(each.logprob);
      return h("tr", each.token === logprob.token || each === chosen ? { "data-chosen": true } : {}, h("td", {}, visible(each.token)), h("td", {}, percent(chance)), h("td", {}, meter(chance)));
    }))),
  ];
}

function drawPromptToken(token) {
  const said = [token.special && "a special token", token.cached ? "from the prefix cache" : "computed for this answer", token.sampled && "as sampled"].filter(Boolean).join(", ");
  return [h("p", { class: "big" }, visible(token.text)), h("p", { class: "hint" }, `id ${token.id}, token ${token.at + 1}`), h("p", {}, said)];
}

function meter(part) {
  return svg("svg", { class: "meter", viewBox: "0 0 100 10", preserveAspectRatio: "none", "aria-hidden": "true" },
    svg("rect", { class: "ground", width: 100, height: 10, rx: 3 }), svg("rect", { width: Math.max(1, part * 100), height: 10, rx: 3 }));
}

function timeline(queue, first, whole) {
  const x = (ms) => (ms / whole) * 1000;
  const bars = [["queue", 0, queue], ["first", queue, first], ["writing", first, whole]].filter(([, from, to]) => to > from);
  return h("div", { class: "stack" }, svg("svg", { class: "timeline", viewBox: "0 0 1000 40", preserveAspectRatio: "none", role: "img", "aria-label": `${queue.toFixed(0)} ms in the queue, first token after ${first.toFixed(0)} ms, complete after ${whole.toFixed(0)} ms` },
    ...bars.map(([name, from, to]) => svg("rect", { class: name, x: x(from), y: 8, width: Math.max(2, x(to) - x(from)), height: 24, rx: 4 }))),
  h("ul", { class: "legend" }, bars.map(([name, from, to]) => h("li", {}, `${{ queue: "in the queue", first: "until the first token", writing: "generating" }[name]}: ${(to - from).toFixed(0)} ms`))));
}
