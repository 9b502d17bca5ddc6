// Creates elements from text and other elements. Nothing here or elsewhere in the web UI parses a string as HTML.

const SAFE_PICTURE = /^data:image\/(png|jpeg|webp|gif);base64,[A-Za-z0-9+/=]*$/;
const SAFE_LINK = /^(https?:|mailto:|blob:|#|\.{0,2}\/|[\w-]+(\/|#|$))/i;
const PROPERTIES = new Set(["value", "checked", "disabled", "indeterminate", "open", "hidden", "selected", "readOnly"]);

/** Creates an element: h("p", {class: "a", onclick: f}, "text", [more], null). Children are elements or text. */
export function h(tag, attributes, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes ?? {})) setAttribute(made, name, value);
  append(made, children);
  return made;
}

export function append(parent, children) {
  for (const child of [children].flat(Infinity)) {
    if (child !== null && child !== undefined && child !== false) parent.append(child);
  }
  return parent;
}

/** Replaces the children of an element. */
export function fill(parent, ...children) {
  parent.replaceChildren();
  return append(parent, children);
}

function setAttribute(made, name, value) {
  if (value === null || value === undefined) return;
  if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
  else if (name === "class") made.className = value;
  else if (name === "dataset") Object.assign(made.dataset, value);
  else if (name === "style") for (const [key, one] of Object.entries(value)) made.style.setProperty(key, one);
  else if (PROPERTIES.has(name)) made[name] = value;
  else if (name === "src" && SAFE_PICTURE.test(value)) made.src = value;
  else if (name === "href" || name === "src") SAFE_LINK.test(value) && made.setAttribute(name, value);
  else if (value === true) made.setAttribute(name, "");
  else if (value !== false) made.setAttribute(name, String(value));
}

const SVG = "http://www.w3.org/2000/svg";
const ICONS = {
  add: "M12 5v14M5 12h14",
  attach: "M20 11.5l-8.2 8.2a5 5 0 0 1-7-7L13 4.4a3.3 3.3 0 0 1 4.7 4.7l-8.2 8.2a1.7 1.7 0 0 1-2.4-2.4L14.5 7.5",
  branch: "M6 4v9a4 4 0 0 0 4 4h8M15 14l3 3-3 3M6 4l-2.5 2.5M6 4l2.5 2.5",
  check: "M5 12.5l4.5 4.5L19 7.5",
  close: "M6 6l12 12M18 6L6 18",
  copy: "M9 9h10v11H9zM5 15V4h10",
  down: "M6 9.5l6 6 6-6",
  download: "M12 4v11m-4.5-4.5L12 15l4.5-4.5M5 20h14",
  edit: "M4 20l1-4L16 5l3 3L8 19zM14 7l3 3",
  file: "M7 3h7l4 4v14H7zM14 3v4h4",
  key: "M14.5 9.5a4.5 4.5 0 1 0-3.3 4.3L13 15.6h2v2h2v2h3v-3z M8 8h.01",
  left: "M14.5 6l-6 6 6 6",
  menu: "M4 7h16M4 12h16M4 17h16",
  moon: "M19.5 14.5A8 8 0 0 1 9.5 4.5a8 8 0 1 0 10 10z",
  more: "M5 12h.01M12 12h.01M19 12h.01",
  right: "M9.5 6l6 6-6 6",
  search: "M10.5 17a6.5 6.5 0 1 1 0-13 6.5 6.5 0 0 1 0 13zM15.5 15.5L20 20",
  send: "M12 20V5M5.5 11.5L12 5l6.5 6.5",
  sliders: "M4 7h9m4 0h3M4 17h3m4 0h9M15 4.5v5M9 14.5v5",
  stop: "M7 7h10v10H7z",
  sun: "M12 8a4 4 0 1 0 0 8 4 4 0 0 0 0-8zM12 2.5v2M12 19.5v2M2.5 12h2M19.5 12h2M5.3 5.3l1.4 1.4M17.3 17.3l1.4 1.4M18.7 5.3l-1.4 1.4M6.7 17.3l-1.4 1.4",
  again: "M19.5 12a7.5 7.5 0 1 1-2.3-5.4M19.5 3.5V8H15",
  inspect: "M4 6h16M4 12h7M4 18h5M16 20a4 4 0 1 0 0-8 4 4 0 0 0 0 8zM19 19l2.5 2.5",
  tool: "M14.5 6.5a4 4 0 0 1 5-1.5l-2.5 2.5 1.5 1.5L21 6.5a4 4 0 0 1-5.5 5L8 19a2 2 0 0 1-3-3l7.5-7.5z",
  trash: "M5 7h14M10 4h4M7 7l1 13h8l1-13",
};

export function icon(name) {
  const made = document.createElementNS(SVG, "svg");
  for (const [key, value] of Object.entries({ viewBox: "0 0 24 24", class: "icon", "aria-hidden": "true" })) {
    made.setAttribute(key, value);
  }
  const path = document.createElementNS(SVG, "path");
  path.setAttribute("d", ICONS[name]);
  made.append(path);
  return made;
}

/** Creates a button with an icon; `label` is its accessible name and tooltip. */
export function iconButton(name, label, onclick, attributes) {
  return h("button", { type: "button", class: "icon-button", "aria-label": label, title: label, onclick, ...attributes }, icon(name));
}

/** Creates a button that copies the result of `text()`, and confirms it. */
export function copyButton(text, label = "Copy") {
  const button = iconButton("copy", label, async () => {
    const done = await copyText(text());
    fill(button, icon(done ? "check" : "close"));
    announce(done ? "Copied" : "Could not copy");
    setTimeout(() => fill(button, icon("copy")), 1500);
  });
  return button;
}

/** Copies text. Without https, and not on localhost, browsers have no clipboard API: then from a selected field. */
export async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const field = h("textarea", { value: text, class: "unseen", "aria-hidden": "true" });
    document.body.append(field);
    field.select();
    const done = document.execCommand("copy");
    field.remove();
    return done;
  }
}

/** Announces a text to screen readers. */
export function announce(text) {
  document.getElementById("announcer").textContent = text;
}

/** Shows a text for a while in a corner; kind is "error" or empty. */
export function toast(text, kind = "") {
  const made = h("div", { class: `toast ${kind}`, role: kind === "error" ? "alert" : "status" }, text);
  document.getElementById("toasts").append(made);
  setTimeout(() => made.remove(), kind === "error" ? 8000 : 4000);
}

/** Opens a modal dialog, which keeps the focus until it is closed. `content(close)` returns its children; resolves to `close`'s
 * argument. */
export function openDialog(title, content, attributes) {
  return new Promise((resolve) => {
    let result;
    const close = (value) => {
      result = value;
      dialog.close();
    };
    const heading = h("h2", { id: `dialog-${++dialogs}` }, title);
    const dialog = h("dialog", { "aria-labelledby": heading.id, ...attributes },
      h("div", { class: "dialog-head" }, heading, iconButton("close", "Close", () => close())));
    append(dialog, content(close));
    dialog.addEventListener("close", () => {
      dialog.remove();
      resolve(result);
    });
    dialog.addEventListener("pointerdown", (event) => event.target === dialog && close());
    document.body.append(dialog);
    dialog.showModal();
  });
}
let dialogs = 0;

export function confirmDialog(title, text, action = "Delete") {
  return openDialog(title, (close) => [
    h("p", {}, text),
    h("div", { class: "dialog-actions" },
      h("button", { type: "button", class: "button", onclick: () => close(false) }, "Cancel"),
      h("button", { type: "button", class: "button danger", onclick: () => close(true) }, action)),
  ]);
}

export function download(name, type, text) {
  const url = URL.createObjectURL(new Blob([text], { type }));
  const link = h("a", { href: url, download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}

/** A value stored in this browser or tab; in memory, if the browser forbids storage. */
export function kept(storage, name) {
  let here = null;
  return {
    get() {
      try { return storage().getItem(name) ?? here; } catch { return here; }
    },
    set(value) {
      here = value;
      try {
        if (value) storage().setItem(name, value);
        else storage().removeItem(name);
      } catch { /* it stays in memory */ }
    },
  };
}
