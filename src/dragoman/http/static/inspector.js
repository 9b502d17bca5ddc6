import { h, openDialog } from "./dom.js";

/** Shows how an answer came about. `answer` is described in chat.js. */
export function openInspector(app, answer) {
  return openDialog("Inspector", () => h("pre", { tabindex: "0" }, JSON.stringify(answer, null, 2)), { class: "wide" });
}
