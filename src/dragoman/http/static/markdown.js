// Renders Markdown to elements. A model wrote the text, so it becomes only text nodes and a few harmless elements: HTML is
// shown as text, links lead only to http, https or mailto, and images become links, so that nothing is fetched.
//
// A streamed text is drawn as it grows. All blocks but the last are final, because the parser begins a new block only once
// no later text can make the line part of the block before. Each update therefore redraws only the last block, and of an
// open code block only appends the new text.

import { append, copyButton, h } from "./dom.js";

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([^`\s]*)[^`]*$/;
const HEADING = /^ {0,3}(#{1,6})\s+(\S.*)$/;
const RULE = /^ {0,3}([-*_])[ \t]*(?:\1[ \t]*){2,}$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])(\s+)(?=\S)/;
/** The start of a line that may still become a list item. */
const BEGUN = /^\s*(?:[-*+]|\d{1,9}[.)]?)?\s*$/;
const QUOTE = /^ {0,3}>/;
const DELIMITER = /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/;
const MOST_NESTED = 12;

/** Parses the blocks of a text. With `open`, the last line may be incomplete and begins no new block. */
function parse(text, open) {
  const lines = text.split("\n");
  const blocks = [];
  let offset = 0;
  for (let at = 0; at < lines.length;) {
    const [block, next] = lines[at].trim() ? parseBlock(lines, at, open) : [null, at + 1];
    const length = lines.slice(at, next).reduce((sum, line) => sum + line.length + 1, 0);
    if (block) blocks.push({ ...block, start: offset });
    offset += length;
    at = next;
  }
  return blocks;
}

function parseBlock(lines, at, open) {
  const line = lines[at];
  const fence = FENCE.exec(line);
  if (fence) return parseFence(lines, at, fence);
  const sure = !open || at < lines.length - 1;
  const heading = sure && HEADING.exec(line);
  if (heading) return [{ kind: "heading", level: heading[1].length, text: heading[2].trimEnd().replace(/(^|\s)#+$/, "") }, at + 1];
  if (sure && RULE.test(line)) return [{ kind: "rule" }, at + 1];
  if (QUOTE.test(line)) return parseQuote(lines, at);
  if (ITEM.test(line)) return parseList(lines, at, open);
  if (line.includes("|") && DELIMITER.test(lines[at + 1] ?? "") && (lines[at + 1] ?? "").includes("-")) return parseTable(lines, at);
  return parseParagraph(lines, at, open);
}

function parseFence(lines, at, [opening, mark, language]) {
  const indent = opening.search(/\S/);
  let end = at + 1;
  const closing = new RegExp(`^ {0,3}${mark[0]}{${mark.length},}\\s*$`);
  while (end < lines.length && !closing.test(lines[end])) end += 1;
  const code = lines.slice(at + 1, end).map((line) => line.slice(Math.min(indent, line.search(/\S|$/))));
  const closed = end < lines.length;
  return [{ kind: "code", language, text: code.join("\n"), closed }, closed ? end + 1 : end];
}

function parseQuote(lines, at) {
  let end = at;
  while (end < lines.length && lines[end].trim() && (QUOTE.test(lines[end]) || end > at)) end += 1;
  return [{ kind: "quote", text: lines.slice(at, end).map((line) => line.replace(/^ {0,3}> ?/, "")).join("\n") }, end];
}

function parseList(lines, at, open) {
  const [, indent, marker] = ITEM.exec(lines[at]);
  const ordered = /\d/.test(marker);
  const items = [];
  let end = at;
  let width = 0;
  for (; end < lines.length; end += 1) {
    const line = lines[end];
    const found = ITEM.exec(line);
    const depth = line.search(/\S|$/);
    if (found && depth < indent.length + 2 && depth < (width || Infinity)) {
      if (/\d/.test(found[2]) !== ordered) break;
      width = found[0].length;
      items.push([line.slice(width)]);
    } else if (!line.trim()) {
      // A blank line belongs to the item if the line after it does.
      let next = end + 1;
      while (next < lines.length && !lines[next].trim()) next += 1;
      const follows = lines[next] ?? "";
      const goesOn = follows.search(/\S|$/) >= Math.min(width, indent.length + 2) || ITEM.exec(follows)?.[2].length && /\d/.test(ITEM.exec(follows)[2]) === ordered;
      const mayGoOn = open && next === lines.length - 1 && BEGUN.test(follows);
      if (next < lines.length && !goesOn && !mayGoOn) break;
      items.at(-1).push("");
    } else if (depth > indent.length || !beginsBlock(line)) {
      const begun = open && end === lines.length - 1 && BEGUN.test(line);
      if (depth <= indent.length && !lines[end - 1].trim() && !begun) break;
      items.at(-1).push(line.slice(Math.min(width, depth)));
    } else break;
  }
  const texts = items.map((one) => one.join("\n").trimEnd());
  return [{ kind: "list", ordered, first: parseInt(marker, 10) || 0, items: texts }, end];
}

function beginsBlock(line) {
  return HEADING.test(line) || FENCE.test(line) || QUOTE.test(line) || RULE.test(line) || ITEM.test(line);
}

function parseTable(lines, at) {
  let end = at + 2;
  while (end < lines.length && lines[end].trim() && !beginsBlock(lines[end])) end += 1;
  const aligned = cells(lines[at + 1]).map((cell) => (cell.endsWith(":") ? (cell.startsWith(":") ? "center" : "right") : null));
  const rows = [lines[at], ...lines.slice(at + 2, end)].map(cells);
  return [{ kind: "table", aligned, rows }, end];
}

function cells(line) {
  return line.trim().replace(/^\|/, "").replace(/\|$/, "").split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));
}

function parseParagraph(lines, at, open) {
  let end = at + 1;
  for (; end < lines.length && lines[end].trim(); end += 1) {
    const sure = !open || end < lines.length - 1;
    if (sure && beginsBlock(lines[end]) || FENCE.test(lines[end])) break;
    if (sure && lines[end].includes("|") && DELIMITER.test(lines[end + 1] ?? "")) break;
  }
  return [{ kind: "paragraph", text: lines.slice(at, end).join("\n") }, end];
}

// Rendering of blocks.

function draw(block, depth = 0, outline = null) {
  switch (block.kind) {
    case "heading": return h(outline ? placeHeading(outline, block.level) : "p", {}, outline ? inline(block.text) : h("strong", {}, inline(block.text)));
    case "rule": return h("hr");
    case "code": return drawCode(block);
    case "quote": return h("blockquote", {}, drawAll(block.text, depth + 1));
    case "list": return drawList(block, depth);
    case "table": return drawTable(block);
    default: return h("p", {}, inline(block.text));
  }
}

/** Returns the heading level: messages begin with an h2, and no level is skipped, so `#` and `###` become h3 and h4. */
function placeHeading(outline, level) {
  while (outline.length && outline.at(-1) >= level) outline.pop();
  outline.push(level);
  return `h${Math.min(outline.length + 2, 6)}`;
}

function drawAll(text, depth) {
  return depth > MOST_NESTED ? [h("p", {}, text)] : parse(text, false).map((block) => draw(block, depth));
}

function drawCode({ language, text }) {
  const code = h("code", {}, document.createTextNode(text));
  const label = language.slice(0, 40) || "text";
  return h("div", { class: "code" },
    h("div", { class: "code-head" }, h("span", {}, label), copyButton(() => code.textContent, "Copy code")),
    h("pre", { tabindex: "0", "aria-label": `Code, ${label}`, role: "group" }, code));
}

function drawList({ ordered, first, items }, depth) {
  return h(ordered ? "ol" : "ul", { start: ordered && first !== 1 ? first : null }, items.map((text) => {
    const task = /^\[([ xX])\]\s+/.exec(text);
    const blocks = depth > MOST_NESTED ? [{ kind: "paragraph", text }] : parse(task ? text.slice(task[0].length) : text, false);
    const box = task && h("span", { class: "task", role: "img", "aria-label": task[1] === " " ? "open" : "done" }, task[1] === " " ? "☐ " : "☑ ");
    // A tight item has its text without a paragraph.
    return h("li", {}, box, blocks.map((block, at) => (at === 0 && block.kind === "paragraph" ? inline(block.text) : draw(block, depth + 1))));
  }));
}

function drawTable({ aligned, rows }) {
  const row = (tag, cells_) => h("tr", {}, aligned.map((side, at) =>
    h(tag, { style: side ? { "text-align": side } : {} }, inline(cells_[at] ?? ""))));
  return h("div", { class: "table", tabindex: "0", role: "group", "aria-label": "Table" },
    h("table", {}, h("thead", {}, row("th", rows[0])), h("tbody", {}, rows.slice(1).map((cells_) => row("td", cells_)))));
}

// Inline text.

const SPECIAL = /[\\`*_~[!<\n]|https?:\/\//g;
const LINK = /^\[((?:[^[\]\\]|\\.|\[[^[\]]*\])*)\]\(\s*<?([^\s<>()]*(?:\([^\s()]*\)[^\s<>()]*)*)>?(?:\s+["'(][^"')]*["')])?\s*\)/;
const AUTO = /^<((?:https?:\/\/|mailto:)[^\s<>]+)>/;
const BARE = /^https?:\/\/[^\s<>"'`]+[^\s<>"'`.,;:!?)\]}*_~]/;
const ADDRESS = /^(https?:\/\/|mailto:)/i;
const MOST_LINK = 4000;

/** Returns the nodes of inline text. */
export function inline(text, depth = 0) {
  const nodes = [];
  // A closing mark that was not found once is not searched again, which keeps the time linear.
  const missing = new Set();
  let plain = "";
  const add = (node) => {
    if (plain) nodes.push(plain);
    plain = "";
    nodes.push(node);
  };
  let at = 0;
  while (at < text.length) {
    SPECIAL.lastIndex = at;
    const found = SPECIAL.exec(text);
    const next = found ? found.index : text.length;
    plain += text.slice(at, next);
    at = next;
    if (!found) break;
    const taken = depth < MOST_NESTED ? inlineAt(text, at, found[0], missing, depth) : null;
    if (taken) {
      add(taken[0]);
      at = taken[1];
    } else {
      plain += text[at];
      at += 1;
    }
  }
  if (plain) nodes.push(plain);
  return nodes;
}

function inlineAt(text, at, mark, missing, depth) {
  const rest = () => text.slice(at, at + MOST_LINK);
  switch (mark) {
    case "\\": return text[at + 1] === "\n" ? [h("br"), at + 2] : /[!-/:-@[-`{-~]/.test(text[at + 1] ?? "") ? [text[at + 1], at + 2] : null;
    case "\n": return /  $/.test(text.slice(at - 2, at)) ? [h("br"), at + 1] : null;
    case "`": return codeSpan(text, at, missing);
    case "*": case "_": case "~": return emphasis(text, at, mark, missing, depth);
    case "<": return autoLink(AUTO.exec(rest()), at);
    case "[": return link(LINK.exec(rest()), at, depth);
    case "!": return text[at + 1] === "[" ? picture(LINK.exec(text.slice(at + 1, at + MOST_LINK)), at) : null;
    default: return /\w/.test(text[at - 1] ?? "") ? null : autoLink(BARE.exec(rest()), at);
  }
}

function closing(text, mark, from, missing) {
  if (missing.has(mark)) return -1;
  const end = text.indexOf(mark, from);
  if (end < 0) missing.add(mark);
  return end;
}

function codeSpan(text, at, missing) {
  const mark = /^`+/.exec(text.slice(at, at + 32))[0];
  let end = closing(text, mark, at + mark.length, missing);
  while (end >= 0 && (text[end + mark.length] === "`" || text[end - 1] === "`")) end = closing(text, mark, end + mark.length + 1, missing);
  if (end < 0) return [mark, at + mark.length];
  return [h("code", {}, text.slice(at + mark.length, end).replace(/\n/g, " ").replace(/^ (.+) $/, "$1")), end + mark.length];
}

function emphasis(text, at, mark, missing, depth) {
  const double = text[at + 1] === mark;
  if (mark === "~" && !double) return null;
  const run = double ? mark + mark : mark;
  const before = text[at - 1] ?? " ";
  const inside = at + run.length;
  if (!/\S/.test(text[inside] ?? " ") || (mark === "_" && /\w/.test(before))) return null;
  let end = closing(text, run, inside + 1, missing);
  for (let tries = 0; end >= 0 && tries < 64; tries += 1) {
    const after = text[end + run.length] ?? " ";
    const single = double || (after !== mark && text[end - 1] !== mark);
    if (single && /\S/.test(text[end - 1]) && !(mark === "_" && /\w/.test(after))) {
      // ***both***: the inner mark is closed first.
      if (double && after === mark && text[inside] === mark) end += 1;
      const tag = mark === "~" ? "del" : double ? "strong" : "em";
      return [h(tag, {}, inline(text.slice(inside, end), depth + 1)), end + run.length];
    }
    end = closing(text, run, end + (single ? 1 : run.length + (double ? 0 : 1)), missing);
  }
  return [run, inside];
}

function anchor(address, children) {
  return h("a", { href: address, target: "_blank", rel: "noopener noreferrer nofollow" }, children);
}

function autoLink(found, at) {
  if (!found) return null;
  const address = found[1] ?? found[0];
  return [anchor(address, address), at + found[0].length];
}

function link(found, at, depth) {
  if (!found) return null;
  const label = inline(found[1], depth + 1);
  // Links to anything but pages and mail are shown without a target.
  const node = ADDRESS.test(found[2]) ? anchor(found[2], label) : h("span", { class: "no-link", title: found[2] }, label);
  return [node, at + found[0].length];
}

function picture(found, at) {
  if (!found) return null;
  const label = `🖼 ${found[1] || found[2]}`;
  return [ADDRESS.test(found[2]) ? anchor(found[2], label) : h("span", { class: "no-link" }, label), at + 1 + found[0].length];
}

// Complete and streamed texts.

/** Renders a complete text as an element. */
export function render(text) {
  const outline = [];
  return append(h("div", { class: "markdown" }), parse(text, false).map((block) => draw(block, 0, outline)));
}

/** Draws a streamed text: `view.update(text)` while it grows, `view.update(text, true)` when it is complete. */
export class MarkdownView {
  constructor() {
    this.element = h("div", { class: "markdown" });
    this.forget();
  }

  forget() {
    this.element.replaceChildren();
    this.text = "";
    this.final = 0;
    this.outline = [];
    this.live = null;
    this.block = null;
  }

  update(text, whole = false) {
    if (!text.startsWith(this.text)) this.forget();
    else if (text === this.text && !whole) return;
    this.text = text;
    const blocks = parse(text.slice(this.final), !whole);
    const last = blocks.pop();
    for (const block of blocks) this.#replace(block, this.outline);
    if (!last) return;
    if (blocks.length) this.#settle(last.start);
    this.#replace(blocks.length ? { ...last, start: 0 } : last, [...this.outline]);
  }

  /** Marks the last drawn block as final. */
  #settle(start) {
    this.final += start;
    this.live = null;
    this.block = null;
  }

  #replace(block, outline) {
    const before = this.block;
    if (this.live && before?.start !== block.start) this.live = null;
    if (this.live && before.kind === "code" && block.kind === "code" && block.language === before.language && block.text.startsWith(before.text)) {
      this.live.querySelector("code").firstChild.appendData(block.text.slice(before.text.length));
    } else {
      const made = draw(block, 0, outline);
      if (this.live) this.live.replaceWith(made);
      else this.element.append(made);
      this.live = made;
    }
    this.block = block;
  }
}
