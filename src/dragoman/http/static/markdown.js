import { h } from "./dom.js";

/** What was written, as elements. */
export function render(text) {
  return h("div", { class: "markdown" }, text);
}
