import { h } from "./dom.js";

export function mount(root) {
  root.append(h("p", { class: "empty" }, "Nothing here yet."));
}
