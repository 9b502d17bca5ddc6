// Converts a chat completion to requests of the other APIs: conversation, tools and sampling, as far as each supports them.

export const TARGETS = [
  { name: "Chat Completions", path: "v1/chat/completions" },
  { name: "Responses", path: "v1/responses" },
  { name: "Messages (Anthropic)", path: "v1/messages" },
  { name: "Completions (token ids)", path: "v1/completions" },
  { name: "Ollama", path: "api/chat" },
];
const SHARED = ["model", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "presence_penalty", "frequency_penalty", "repetition_penalty"];
const MOST = ["max_completion_tokens", "max_tokens"];

/** Converts a request; `prompt` is its rendered prompt: {ids, prompt}. */
export function convertRequest(body, path, prompt) {
  const most = MOST.map((name) => body[name]).find((value) => value);
  switch (path) {
    case "v1/responses": return toResponses(body, most);
    case "v1/messages": return toMessages(body, most);
    case "v1/completions": return { ...some(body, SHARED), prompt: prompt?.ids ?? prompt?.prompt ?? "", ...(most ? { max_tokens: most } : { max_tokens: 512 }), stream: true };
    case "api/chat": return toOllama(body, most);
    default: return { ...body, stream: true };
  }
}

const some = (body, names) => Object.fromEntries(names.filter((name) => body[name] !== undefined && body[name] !== null).map((name) => [name, body[name]]));
const textOf = (content) => (typeof content === "string" ? content : (content ?? []).map((part) => part.text ?? "").join(""));

function toResponses(body, most) {
  const input = body.messages.flatMap((message) => {
    if (message.role === "tool") return [{ type: "function_call_output", call_id: message.tool_call_id, output: textOf(message.content) }];
    const calls = (message.tool_calls ?? []).map((call) => ({ type: "function_call", call_id: call.id, name: call.function.name, arguments: call.function.arguments }));
    const said = textOf(message.content);
    return [...(said ? [{ type: "message", role: message.role, content: said }] : []), ...calls];
  });
  const made = { ...some(body, ["model", "temperature", "top_p", "top_k", "min_p", "seed"]), input, stream: true, store: false };
  if (most) made.max_output_tokens = most;
  if (body.tools) made.tools = body.tools.map(({ function: each }) => ({ type: "function", strict: false, ...each }));
  if (typeof body.tool_choice === "string") made.tool_choice = body.tool_choice;
  const format = body.response_format;
  if (format?.type === "json_schema") made.text = { format: { type: "json_schema", ...format.json_schema } };
  else if (format) made.text = { format };
  return made;
}

function toMessages(body, most) {
  const system = body.messages.filter((message) => message.role === "system" || message.role === "developer").map((message) => textOf(message.content)).join("\n\n");
  const messages = body.messages.filter((message) => message.role !== "system" && message.role !== "developer").map((message) => {
    if (message.role === "tool") return { role: "user", content: [{ type: "tool_result", tool_use_id: message.tool_call_id, content: textOf(message.content) }] };
    const said = textOf(message.content);
    const calls = (message.tool_calls ?? []).map((call) => ({ type: "tool_use", id: call.id, name: call.function.name, input: parsed(call.function.arguments) }));
    return { role: message.role, content: calls.length ? [...(said ? [{ type: "text", text: said }] : []), ...calls] : said };
  });
  const made = { ...some(body, ["model", "temperature", "top_p", "top_k"]), max_tokens: most ?? 512, messages, stream: true };
  if (system) made.system = system;
  if (body.stop) made.stop_sequences = [body.stop].flat();
  if (body.tools) made.tools = body.tools.map(({ function: { name, description, parameters } }) => ({ name, description, input_schema: parameters ?? { type: "object" } }));
  return made;
}

function toOllama(body, most) {
  const messages = body.messages.map((message) => ({
    role: message.role === "developer" ? "system" : message.role, content: textOf(message.content),
    ...(message.tool_calls ? { tool_calls: message.tool_calls.map(({ function: each }) => ({ function: { name: each.name, arguments: parsed(each.arguments) } })) } : {}),
  }));
  const { repetition_penalty: repeat, ...options } = some(body, SHARED.filter((name) => name !== "model"));
  if (repeat) options.repeat_penalty = repeat;
  if (most) options.num_predict = most;
  const made = { model: body.model, messages, options, stream: true };
  if (body.tools) made.tools = body.tools;
  if (body.response_format?.type === "json_object") made.format = "json";
  if (body.response_format?.type === "json_schema") made.format = body.response_format.json_schema.schema;
  return made;
}

function parsed(text) {
  try { return JSON.parse(text); } catch { return {}; }
}
