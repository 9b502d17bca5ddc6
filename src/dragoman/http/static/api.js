// Requests to the server this page came from, and to no other. Paths are relative, so that it may stand behind a proxy.

import { kept } from "./dom.js";

/** The key stays in this tab: it is there after a reload, and gone with the tab. */
export const key = kept(() => sessionStorage, "key");

/** What the server said went wrong; status 0 where it said nothing. */
export class ApiError extends Error {
  constructor(message, { status = 0, code = null, param = null, body = null, retryAfter = null } = {}) {
    super(message);
    Object.assign(this, { name: "ApiError", status, code, param, body, retryAfter });
  }

  /** Whether it is worth asking again in a while: a model is being loaded, or all places are taken. */
  get passes() {
    return this.status === 503 || this.status === 429;
  }
}

let askForKey = async () => false;
let asking = null;

/** `ask()` resolves to whether there is a key now. Requests that were refused are then made again. */
export function onUnauthorized(ask) {
  askForKey = ask;
}

function address(path) {
  return new URL(path.replace(/^\//, ""), new URL(".", document.baseURI));
}

/** The Response, whatever its status. A body that is no string or form is sent as JSON. */
export async function fetchRaw(path, init = {}) {
  const headers = new Headers(init.headers);
  let { body } = init;
  if (body !== undefined && typeof body !== "string" && !(body instanceof FormData)) body = JSON.stringify(body);
  if (typeof body === "string" && !headers.has("content-type")) headers.set("content-type", "application/json");
  const sent = key.get();
  if (sent && !headers.has("authorization")) headers.set("authorization", `Bearer ${sent}`);
  try {
    return await fetch(address(path), { ...init, method: init.method ?? (body === undefined ? "GET" : "POST"), body, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server cannot be reached. Is it still running?");
  }
}

/** The Response of a request that went well. Without a right key the person is asked for one. */
export async function fetchOk(path, init = {}) {
  const sent = key.get();
  const reply = await fetchRaw(path, init);
  if (reply.ok) return reply;
  const error = await errorOf(reply);
  if (reply.status !== 401 || init.quiet) throw error;
  if (key.get() === sent) {
    asking ??= askForKey(sent ? error.message : "").finally(() => { asking = null; });
    if (!(await asking)) throw error;
  }
  return fetchOk(path, init);
}

async function errorOf(reply) {
  const text = await reply.text().catch(() => "");
  let body = null;
  try { body = JSON.parse(text); } catch { /* it is text */ }
  const error = typeof body?.error === "object" && body.error ? body.error : { message: body?.error };
  const message = typeof error.message === "string" ? error.message : `The server answered ${reply.status}.`;
  const { code = null, param = null } = error;
  return new ApiError(message, { status: reply.status, code, param, body, retryAfter: Number(reply.headers.get("retry-after")) || null });
}

/** What JSON the server answers: `await request("v1/models")`, `await request("tokenize", {body: {prompt: "a"}})`. */
export async function request(path, init) {
  const reply = await fetchOk(path, init);
  return reply.status === 204 ? null : reply.json();
}

/**
 * Sends a body and hears the events of the answer: `onEvent(data, name, text)`, with the JSON of each. Resolves at the end
 * of the stream with whether it was ended by its mark ([DONE], or an event that ends a response), and throws an ApiError
 * for what goes wrong before or in the middle. `onOpen(response)` comes first.
 */
export async function stream(path, body, { onEvent, onOpen, signal, method }) {
  const reply = await fetchOk(path, { body, signal, method });
  onOpen?.(reply);
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  const events = new EventReader(onEvent);
  for (;;) {
    let part;
    try {
      part = await reader.read();
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new ApiError("The stream broke off: the connection to the server was lost.", { code: "stream_lost" });
    }
    if (part.done) return events.ended;
    events.take(part.value);
  }
}

/** Text in pieces, cut anywhere, to events. */
class EventReader {
  constructor(onEvent) {
    this.onEvent = onEvent;
    this.ended = false;
    this.rest = "";
    this.name = "";
    this.data = [];
  }

  take(text) {
    const lines = (this.rest + text).split(/\r\n|\n|\r(?!$)/);
    this.rest = lines.pop();
    for (const line of lines) this.line(line);
  }

  line(line) {
    if (line === "") this.dispatch();
    else if (line.startsWith("data:")) this.data.push(line.slice(line[5] === " " ? 6 : 5));
    else if (line.startsWith("event:")) this.name = line.slice(6).trim();
  }

  dispatch() {
    const text = this.data.join("\n");
    const name = this.name;
    this.data = [];
    this.name = "";
    if (!text) return;
    if (text === "[DONE]") {
      this.ended = true;
      return;
    }
    const data = JSON.parse(text);
    this.ended ||= /^(message_stop|response\.(completed|incomplete|failed))$/.test(name || data.type || "");
    if (data.error) throw new ApiError(data.error.message ?? "The answer failed.", { code: data.error.code, param: data.error.param, body: data });
    this.onEvent(data, name, text);
  }
}
