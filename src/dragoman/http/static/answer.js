// Requests an answer and folds the events of its stream into a node of the tree; the node is the same for both APIs.
//
// The request is a chat completion. With MCP servers it is a response, because only Responses reports their calls.

import { ApiError, stream } from "./api.js";
import { chatMessages, responseItems } from "./tree.js";

const CHAT = "v1/chat/completions";
const RESPONSES = "v1/responses";

/** Builds the request for an answer to these nodes. */
export function buildRequest(nodes, settings, model) {
  const tools = parsed(settings.tools) ?? [];
  return settings.mcp?.length ? responseRequest(nodes, settings, model, tools) : chatRequest(nodes, settings, model, tools);
}

function chatRequest(nodes, settings, model, tools) {
  const body = { model, messages: chatMessages(nodes, settings.system), stream: true, stream_options: { include_usage: true }, ...sampling(settings) };
  if (settings.max_tokens) body.max_completion_tokens = settings.max_tokens;
  if (tools.length) Object.assign(body, { tools, tool_choice: settings.tool_choice || "auto" });
  const schema = parsed(settings.schema);
  if (settings.format === "json") body.response_format = { type: "json_object" };
  if (settings.format === "schema" && schema) body.response_format = { type: "json_schema", json_schema: { name: "answer", schema, strict: true } };
  if (settings.thinking) body.chat_template_kwargs = { enable_thinking: settings.thinking === "on" };
  if (settings.record) Object.assign(body, { return_token_ids: true, logprobs: true, top_logprobs: 5 });
  return { path: CHAT, body };
}

/** Returns whether a request was rejected for the inspector's fields, which not every engine supports, and removes them. */
export function forgetTokens(body, { param, message }) {
  if (!body.logprobs || !/token.ids|logprobs/.test(`${param} ${message}`)) return false;
  for (const name of ["return_token_ids", "logprobs", "top_logprobs"]) delete body[name];
  return true;
}

function responseRequest(nodes, settings, model, tools) {
  const body = { model, input: responseItems(nodes), stream: true, store: false, ...sampling(settings) };
  if (settings.system) body.instructions = settings.system;
  if (settings.max_tokens) body.max_output_tokens = settings.max_tokens;
  const functions = tools.map(({ function: { name, description, parameters, strict } }) => ({ type: "function", name, description, parameters, strict: strict ?? false }));
  const servers = settings.mcp.map((label) => ({ type: "mcp", server_label: label, require_approval: "never" }));
  body.tools = [...functions, ...servers];
  const schema = parsed(settings.schema);
  if (settings.format === "json") body.text = { format: { type: "json_object" } };
  if (settings.format === "schema" && schema) body.text = { format: { type: "json_schema", name: "answer", schema, strict: true } };
  return { path: RESPONSES, body };
}

function sampling(settings) {
  const names = ["temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty", "repetition_penalty"];
  const given = Object.fromEntries(names.filter((name) => typeof settings[name] === "number").map((name) => [name, settings[name]]));
  const stops = (settings.stop ?? "").split("\n").filter(Boolean);
  return stops.length ? { ...given, stop: stops } : given;
}

function parsed(text) {
  try { return text?.trim() ? JSON.parse(text) : null; } catch { return null; }
}

/**
 * Streams an answer into `node`; `onChange()` is called after every event. Resolves when it is over, for whatever reason:
 * an error is in `node.error`. Returns the record for the inspector.
 */
export async function streamAnswer(node, { path, body }, { onChange, signal }) {
  const answer = { path, request: body, events: [], times: { sent: performance.now(), first: null, last: null } };
  const fold = path === CHAT ? foldChat : foldResponse;
  const hear = (data, name) => {
    answer.times.last = performance.now();
    answer.events.push(data);
    if (fold(node, data, name)) answer.times.first ??= answer.times.last;
    onChange();
  };
  try {
    const ended = await stream(path, body, { onEvent: hear, signal, onOpen: (reply) => { answer.requestId = reply.headers.get("x-request-id"); } });
    if (!ended) throw new ApiError("The stream ended before the answer was complete.", { code: "stream_lost" });
  } catch (error) {
    if (error.name === "AbortError") node.finish = "stopped";
    else if (error instanceof ApiError) node.error = { message: error.message, code: error.code, param: error.param, status: error.status };
    else throw error;
  }
  answer.times.last ??= performance.now();
  node.times = answer.times;
  return answer;
}

/** Builds the inspector's record of a node; `answer` exists if it was generated while this page was open. */
export function inspected(node, answer) {
  const { content, reasoning, calls, model, finish, usage, error, times } = node;
  const { path = CHAT, request = null, events = null, requestId = null } = answer ?? {};
  const id = events?.[0]?.id ?? events?.[0]?.response?.id ?? null;
  return { path, request, events, requestId, id, model, text: content, reasoning, calls, finish, usage, error: error ?? null, times };
}

// The events of the two APIs. Each function returns whether the event had a part of the answer.

function foldChat(node, data) {
  if (data.usage) node.usage = data.usage;
  node.model = data.model ?? node.model;
  const choice = data.choices?.[0];
  if (!choice) return false;
  const delta = choice.delta ?? {};
  const thought = delta.reasoning_content ?? delta.reasoning;
  if (thought) node.reasoning += thought;
  if (delta.content) node.content += delta.content;
  for (const part of delta.tool_calls ?? []) {
    const call = node.calls[part.index ?? 0] ??= { id: "", name: "", arguments: "" };
    if (part.id) call.id = part.id;
    if (part.function?.name) call.name += part.function.name;
    if (part.function?.arguments) call.arguments += part.function.arguments;
  }
  if (choice.finish_reason) node.finish = choice.finish_reason;
  return Boolean(thought || delta.content || delta.tool_calls);
}

function foldResponse(node, data, name) {
  const type = data.type ?? name;
  const callOf = (id) => node.calls.find((call) => call.item === id);
  switch (type) {
    case "response.created":
      node.model = data.response.model ?? node.model;
      return false;
    case "response.output_text.delta":
      node.content += data.delta;
      return true;
    case "response.reasoning_text.delta":
    case "response.reasoning_summary_text.delta":
      node.reasoning += data.delta;
      return true;
    case "response.output_item.added":
      return addItem(node, data.item);
    case "response.function_call_arguments.delta":
    case "response.mcp_call_arguments.delta": {
      const call = callOf(data.item_id);
      if (call) call.arguments += data.delta;
      return true;
    }
    case "response.output_item.done":
      endItem(node, data.item, callOf(data.item.id));
      return false;
    case "response.completed": case "response.incomplete": case "response.failed":
      endResponse(node, data.response);
      return false;
    default:
      return false;
  }
}

function addItem(node, item) {
  if (item.type !== "function_call" && item.type !== "mcp_call") return false;
  const server = item.type === "mcp_call" ? { server: item.server_label } : {};
  node.calls.push({ id: item.call_id ?? item.id, item: item.id, name: item.name, arguments: item.arguments ?? "", ...server });
  return true;
}

function endItem(node, item, call) {
  if (item.type === "mcp_list_tools" && item.error) node.warning = `Cannot list the tools of ${item.server_label}: ${describeFailure(item.error)}`;
  if (!call) return;
  call.arguments = item.arguments ?? call.arguments;
  if (item.type !== "mcp_call") return;
  if (item.error) call.error = describeFailure(item.error);
  else call.output = item.output ?? "";
}

function describeFailure(error) {
  return typeof error === "string" ? error : error.message ?? JSON.stringify(error);
}

function endResponse(node, response) {
  node.finish = response.status === "completed" ? (node.calls.some((call) => !call.server) ? "tool_calls" : "stop")
    : response.incomplete_details?.reason === "max_output_tokens" ? "length" : response.incomplete_details?.reason ?? response.status;
  if (response.error) node.error = { message: response.error.message, code: response.error.code };
  const { usage } = response;
  if (usage) {
    node.usage = { prompt_tokens: usage.input_tokens, completion_tokens: usage.output_tokens, total_tokens: usage.total_tokens,
      prompt_tokens_details: usage.input_tokens_details, completion_tokens_details: usage.output_tokens_details };
  }
}
