// The inline half of Markdown: code, emphasis, links. Text goes in, nodes come out; time is linear in the text,
// as every stack and every search is bounded.

import { h } from "./dom.js";

const MAX_OPEN = 64; // delimiters and brackets that wait for their other end; older ones are text
const MAX_RUN = 8; // longer runs of stars are text
const MAX_URL = 2000;
const ENTITIES = { amp: "&", lt: "<", gt: ">", quot: '"', apos: "'", nbsp: "\u00a0" };
const WORD = /[\p{L}\p{N}]/u;
const PUNCTUATION = /[!-/:-@[-`{-~]/;
const PLAIN = /(?:[^\\`*_~[\]!<&\nh$]|h(?!ttps?:\/\/))+/y;
const ADDRESS = new RegExp(`https?://[^\\s<>"\`\u3000-\u303f\uff00-\uffef]{1,${MAX_URL}}`, "iy");
const ENTITY = /&(?:#(\d{1,7})|#[xX]([0-9a-fA-F]{1,6})|([a-z]{2,5}));/y;

/** The address as a link may have it, or null: http and https alone, never relative. */
export function safeAddress(text) {
  if (text.length > MAX_URL || !/^https?:\/\//i.test(text)) return null;
  try {
    return new URL(text).href;
  } catch {
    return null;
  }
}

function link(address) {
  return h("a", { href: address, target: "_blank", rel: "noopener noreferrer", title: address });
}

/** Appends `text` to `parent`. */
export function inline(text, parent) {
  new Inline(text, parent).run();
}

class Inline {
  constructor(text, parent) {
    this.text = text;
    this.parent = parent;
    this.pos = 0;
    this.delimiters = [];
    this.brackets = [];
    this.absent = new Set(); // ends that do not come any more
    this.runs = null; // where runs of backticks of each length begin
  }

  run() {
    const { text } = this;
    while (this.pos < text.length) {
      PLAIN.lastIndex = this.pos;
      const plain = PLAIN.exec(text);
      if (plain) {
        this.plain(plain[0]);
        this.pos += plain[0].length;
        continue;
      }
      this.special(text[this.pos]);
    }
    this.emphasis(0);
  }

  special(char) {
    if (char === "\n") this.lineBreak();
    else if (char === "\\") this.escape();
    else if (char === "`") this.code();
    else if (char === "*" || char === "_" || char === "~") this.delimiter(char);
    else if (char === "[") this.openBracket(1, false);
    else if (char === "!" && this.text[this.pos + 1] === "[") this.openBracket(2, true);
    else if (char === "]") this.closeBracket();
    else if (char === "<") this.angle();
    else if (char === "&") this.entity();
    else if (char === "$" && this.text[this.pos + 1] === "$") this.math("$$", "$$");
    else if (char === "h") this.address();
    else this.take(1);
  }

  plain(value) {
    const last = this.parent.lastChild;
    if (last?.nodeType === Node.TEXT_NODE && last !== this.mark) last.appendData(value);
    else this.parent.append(value);
  }

  /** `length` characters as they stand. */
  take(length) {
    this.plain(this.text.slice(this.pos, this.pos + length));
    this.pos += length;
  }

  append(node, length) {
    this.parent.append(node);
    this.pos += length;
  }

  /** A text node that may become something else, and that no other text joins. */
  marker(length) {
    const node = document.createTextNode(this.text.slice(this.pos, this.pos + length));
    this.append(node, length);
    this.mark = node;
    return node;
  }

  lineBreak() {
    const last = this.parent.lastChild;
    if (last?.nodeType === Node.TEXT_NODE && last !== this.mark) last.data = last.data.replace(/ {1,9}$/, "");
    this.append(h("br"), 1);
  }

  escape() {
    const next = this.text[this.pos + 1];
    if (next === "(" && this.math("\\(", "\\)")) return;
    if (next === "[" && this.math("\\[", "\\]")) return;
    if (next === "\n") this.append(h("br"), 2);
    else if (next !== undefined && PUNCTUATION.test(next)) {
      this.plain(next);
      this.pos += 2;
    } else this.take(1);
  }

  /** TeX stays as it is written, so that its stars and underlines are no emphasis. */
  math(opener, closer) {
    const end = this.absent.has(closer) ? -1 : this.text.indexOf(closer, this.pos + opener.length);
    if (end < 0) {
      this.absent.add(closer);
      if (opener === "$$") this.take(2);
      return false;
    }
    const source = this.text.slice(this.pos, end + closer.length);
    this.append(h("span", { class: "math" }, source), source.length);
    return true;
  }

  code() {
    if (!this.runs) {
      this.runs = new Map();
      for (const { 0: run, index } of this.text.matchAll(/`+/g)) {
        if (!this.runs.has(run.length)) this.runs.set(run.length, []);
        this.runs.get(run.length).push(index);
      }
    }
    let length = 1;
    while (this.text[this.pos + length] === "`") length += 1;
    const starts = this.runs.get(length) ?? []; // none where a backslash took the first of the run
    while (starts.length && starts[0] <= this.pos) starts.shift();
    if (!starts.length) {
      this.take(length);
      return;
    }
    let inner = this.text.slice(this.pos + length, starts[0]).replaceAll("\n", " ");
    if (inner.startsWith(" ") && inner.endsWith(" ") && inner.trim()) inner = inner.slice(1, -1);
    this.append(h("code", {}, inner), starts[0] + length - this.pos);
  }

  delimiter(char) {
    let length = 1;
    while (this.text[this.pos + length] === char) length += 1;
    const before = this.text[this.pos - 1] ?? " ";
    const after = this.text[this.pos + length] ?? " ";
    if (length > MAX_RUN || (char === "~" && length !== 2)) {
      this.take(length);
      return;
    }
    // More generous than CommonMark next to punctuation, as languages without spaces need it.
    let opens = /\S/.test(after);
    let closes = /\S/.test(before);
    if (char === "_") {
      opens &&= !WORD.test(before);
      closes &&= !WORD.test(after);
    }
    const node = this.marker(length);
    if (opens || closes) this.delimiters.push({ char, length, total: length, opens, closes, node });
  }

  /** Pairs the delimiters from number `bottom` on. */
  emphasis(bottom) {
    const waiting = [];
    for (const closer of this.delimiters.splice(bottom)) {
      while (closer.closes && closer.length) {
        const at = waiting.findLastIndex((opener) => pairs(opener, closer));
        if (at < 0) break;
        waiting.length = at + 1;
        const opener = waiting[at];
        const used = closer.char === "~" ? 2 : Math.min(opener.length, closer.length, 2);
        this.wrap(opener, closer, used);
        if (!opener.length) waiting.pop();
      }
      if (closer.opens && closer.length) waiting.push(closer);
      if (waiting.length > MAX_OPEN) waiting.shift();
    }
  }

  wrap(opener, closer, used) {
    const element = h(closer.char === "~" ? "del" : used === 2 ? "strong" : "em");
    while (opener.node.nextSibling !== closer.node) element.append(opener.node.nextSibling);
    closer.node.before(element);
    for (const end of [opener, closer]) {
      end.length -= used;
      if (end.length) end.node.data = end.node.data.slice(used);
      else end.node.remove();
    }
  }

  openBracket(length, isImage) {
    const node = this.marker(length);
    if (this.brackets.length === MAX_OPEN) this.brackets.shift();
    this.brackets.push({ node, isImage, bottom: this.delimiters.length });
  }

  closeBracket() {
    const opener = this.brackets.pop();
    const target = opener && this.target();
    const address = target && safeAddress(target.address);
    if (!address) {
      this.take(1);
      return;
    }
    const element = link(address);
    this.parent.append(element);
    this.emphasis(opener.bottom);
    while (opener.node.nextSibling !== element) element.append(opener.node.nextSibling);
    for (const inner of element.querySelectorAll("a")) inner.replaceWith(...inner.childNodes);
    if (!element.hasChildNodes()) element.append(address);
    if (opener.isImage) element.classList.add("image"); // shown as a link: nothing is fetched from elsewhere
    else this.brackets.length = 0; // no links in links
    opener.node.remove();
    this.pos = target.end;
  }

  /** What stands in the parentheses behind `]`, or null. */
  target() {
    const { text } = this;
    let at = this.pos + 1;
    if (text[at] !== "(") return null;
    at += 1;
    while (text[at] === " " || text[at] === "\n") at += 1;
    let address;
    if (text[at] === "<") {
      const end = text.slice(at, at + MAX_URL + 2).search(/[>\n]/);
      if (end < 0 || text[at + end] !== ">") return null;
      address = text.slice(at + 1, at + end);
      at += end + 1;
    } else {
      const start = at;
      for (let depth = 0; at - start <= MAX_URL; at += 1) {
        const char = text[at];
        if (char === undefined || /\s/.test(char)) break;
        if (char === "(") depth += 1;
        if (char === ")") depth -= 1;
        if (depth < 0 || depth > 16) break;
      }
      address = text.slice(start, at);
    }
    const title = /\s{1,9}(?:"[^"]{0,300}"|'[^']{0,300}')\s{0,9}\)/y;
    title.lastIndex = at;
    const titled = title.exec(text);
    if (titled) return { address, end: at + titled[0].length };
    while (text[at] === " " || text[at] === "\n") at += 1;
    return text[at] === ")" ? { address, end: at + 1 } : null;
  }

  angle() {
    ADDRESS.lastIndex = this.pos + 1;
    const found = ADDRESS.exec(this.text)?.[0];
    const address = found && this.text[this.pos + 1 + found.length] === ">" && safeAddress(found);
    if (!address) {
      this.take(1);
      return;
    }
    const element = link(address);
    element.append(found);
    this.append(element, found.length + 2);
  }

  address() {
    ADDRESS.lastIndex = this.pos;
    let found = WORD.test(this.text[this.pos - 1] ?? " ") ? null : ADDRESS.exec(this.text)?.[0];
    while (found && /[.,;:!?*_~'\])]$/.test(found)) {
      const last = found.at(-1);
      const opener = { ")": "(", "]": "[" }[last];
      if (opener && found.split(opener).length >= found.split(last).length) break;
      found = found.slice(0, -1);
    }
    const address = found && safeAddress(found);
    if (!address) {
      this.take(1);
      return;
    }
    const element = link(address);
    element.append(found);
    this.append(element, found.length);
  }

  entity() {
    ENTITY.lastIndex = this.pos;
    const found = ENTITY.exec(this.text);
    let char = ENTITIES[found?.[3]];
    if (found && !found[3]) {
      const code = found[1] ? Number(found[1]) : Number.parseInt(found[2], 16);
      char = code > 0 && code <= 0x10ffff && !(code >= 0xd800 && code <= 0xdfff) ? String.fromCodePoint(code) : "\ufffd";
    }
    if (char === undefined) {
      this.take(1);
      return;
    }
    this.plain(char);
    this.pos += found[0].length;
  }
}

/** Whether two runs of delimiters belong together (CommonMark's rule of three included). */
function pairs(opener, closer) {
  if (opener.char !== closer.char || !opener.length) return false;
  if (closer.char === "~") return true;
  const both = opener.closes || closer.opens;
  return !(both && (opener.total + closer.total) % 3 === 0 && (opener.total % 3 || closer.total % 3));
}
