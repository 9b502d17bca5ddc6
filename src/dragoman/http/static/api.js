// Requests, only to the server that the page came from. Paths are relative, so that it works behind a proxy.

import { kept } from "./dom.js";

/** The API key, stored for this tab: it survives a reload, and is gone when the tab is closed. */
export const key = kept(() => sessionStorage, "key");

/** An error of the server; status 0 if it did not reply. */
export class ApiError extends Error {
  constructor(message, { status = 0, code = null, param = null, body = null, retryAfter = null } = {}) {
    super(message);
    Object.assign(this, { name: "ApiError", status, code, param, body, retryAfter });
  }

  /** Whether a later retry may succeed: a model is being loaded, or the server is at its limit. */
  get passes() {
    return this.status === 503 || this.status === 429;
  }
}

let askForKey = async () => false;
let asking = null;

/** Sets the function that asks for a key; `ask()` resolves to whether there is one. Rejected requests are then repeated. */
export function onUnauthorized(ask) {
  askForKey = ask;
}

function address(path) {
  return new URL(path.replace(/^\//, ""), new URL(".", document.baseURI));
}

/** Returns the Response, whatever its status. A body that is not a string or form is sent as JSON. */
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
    throw new ApiError("Cannot reach the server; check that it is running.");
  }
}

/** Returns the Response of a successful request. Without a valid key the user is asked for one. */
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
  const message = typeof error.message === "string" ? error.message : `The server replied with status ${reply.status}.`;
  const { code = null, param = null } = error;
  return new ApiError(message, { status: reply.status, code, param, body, retryAfter: Number(reply.headers.get("retry-after")) || null });
}

/** Returns the JSON of the reply: `await request("v1/models")`, `await request("tokenize", {body: {prompt: "a"}})`. */
export async function request(path, init) {
  const reply = await fetchOk(path, init);
  return reply.status === 204 ? null : reply.json();
}

/**
 * Sends a body and reads the events of the reply: `onEvent(data, name, text)`, with the JSON of each. Resolves at the end
 * of the stream to whether it had its end marker ([DONE], or an event that ends a response), and throws an ApiError for
 * errors before or during the stream. `onOpen(response)` is called first.
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
      throw new ApiError("The stream ended early: the connection to the server was lost.", { code: "stream_lost" });
    }
    if (part.done) return events.ended;
    events.take(part.value);
  }
}

/** Parses events from chunks of text, split anywhere. */
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
