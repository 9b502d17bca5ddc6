// The chat.
//
// What the inspector is given for an answer:
//   path      which API was asked: "v1/chat/completions"
//   request   the body that was sent
//   events    every event of the stream as it came, or null for an answer of another day
//   id, requestId, model, text, reasoning, calls: [{id, name, arguments}], finish, usage, error: {message, code} or null
//   times     {sent, first, last} in milliseconds, as performance.now() has them

import { h } from "./dom.js";

export function mount(root) {
  root.append(h("p", { class: "empty" }, "Nothing here yet."));
}
