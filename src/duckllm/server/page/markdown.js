// Markdown as it grows: what is finished stays as it was drawn, the last block alone is drawn again, and a code
// block only gets longer. Every node comes from createElement: whatever a model writes, nothing of it is HTML.

import { closesFence, fenceContent, openFence, parseBlocks, splitLines } from "./blocks.js";
import { copyText, h, iconButton } from "./dom.js";
import { highlight } from "./highlight.js";
import { inline } from "./inline.js";

const element = (tag, text, attributes = {}) => {
  const node = h(tag, attributes);
  inline(text, node);
  return node;
};

/** A code block with its language and a button that copies it; its text goes into `.code`. */
function codeBlock(language) {
  const code = h("code");
  const button = iconButton("copy", "Copy the code", async () => {
    const copied = await copyText(code.textContent);
    button.classList.toggle("copied", copied);
    button.title = copied ? "Copied" : "Not permitted by the browser";
    button.setAttribute("aria-label", button.title);
    setTimeout(() => {
      button.classList.remove("copied");
      button.title = "Copy the code";
      button.setAttribute("aria-label", button.title);
    }, 2000);
  });
  const node = h(
    "figure",
    { class: "code-block" },
    h("figcaption", {}, h("span", {}, language || "text"), button),
    h("pre", { tabindex: 0, role: "region", "aria-label": language ? `Code, ${language}` : "Code" }, code),
  );
  return { node, code };
}

function table({ header, align, rows }) {
  const row = (values, tag) =>
    h("tr", {}, ...values.map((text, at) => element(tag, text, { class: align[at], scope: tag === "th" ? "col" : null })));
  return h(
    "div",
    { class: "table", tabindex: 0, role: "region", "aria-label": "Table" },
    h("table", {}, h("thead", {}, row(header, "th")), h("tbody", {}, ...rows.map((values) => row(values, "td")))),
  );
}

function build(block) {
  switch (block.type) {
    case "heading":
      return element(`h${Math.min(6, block.level + 2)}`, block.text);
    case "rule":
      return h("hr");
    case "code": {
      const { node, code } = codeBlock(block.language);
      highlight(block.text, block.language, code);
      return node;
    }
    case "math":
      return h("pre", { class: "math", tabindex: 0, role: "region", "aria-label": "Formula" }, block.text);
    case "quote":
      return h("blockquote", {}, ...buildAll(block.blocks));
    case "item": {
      const item = h("li", {}, ...buildAll(block.blocks));
      if (block.task !== null) {
        const box = h("input", { type: "checkbox", disabled: true, checked: block.task, "aria-label": "Done" });
        (item.querySelector(":scope > p") ?? item).prepend(box, " ");
        item.className = "task";
      }
      return item;
    }
    case "table":
      return table(block);
    default:
      return element("p", block.text);
  }
}

const sameList = (list, item) =>
  list !== null && list.ordered === item.ordered && list.delimiter === item.delimiter;

/** Draws blocks one after the other; items that belong together go into one list. */
class Drawer {
  constructor(parent) {
    this.parent = parent;
    this.list = null;
  }

  /** Draws one block and says how it is taken away again. */
  draw(block) {
    const before = this.list;
    const node = build(block);
    if (block.type !== "item") {
      this.list = null;
      this.parent.append(node);
      return { node, undo: () => this.undo(node, before) };
    }
    if (!sameList(this.list, block)) {
      const list = block.ordered ? h("ol", { start: block.start === 1 ? null : block.start }) : h("ul");
      this.list = { ordered: block.ordered, delimiter: block.delimiter, node: list };
      this.parent.append(list);
      list.append(node);
      return { node, undo: () => this.undo(list, before) };
    }
    this.list.node.append(node);
    return { node, undo: () => this.undo(node, before) };
  }

  undo(node, list) {
    node.remove();
    this.list = list;
  }
}

function buildAll(blocks) {
  const fragment = document.createDocumentFragment();
  const drawer = new Drawer(fragment);
  for (const block of blocks) drawer.draw(block);
  return fragment.childNodes;
}

/** Markdown in `parent`, of a text that grows at its end. */
export class MarkdownView {
  /** `onBlock` is told the text of every block that is finished. */
  constructor(parent, onBlock = () => {}) {
    this.parent = parent;
    this.onBlock = onBlock;
    this.drawer = new Drawer(parent);
    this.text = "";
    this.tail = 0; // where what may still change begins
    this.last = null; // the block drawn of it
    this.fence = null; // the code block that is growing
  }

  /** Draws `text`, which begins with the text of the call before. */
  update(text, isWhole = false) {
    this.text = text;
    if (this.fence && !this.growFence(isWhole)) return;
    this.last?.undo();
    this.last = null;
    const tail = text.slice(this.tail);
    const lines = splitLines(tail);
    const blocks = parseBlocks(lines);
    const starts = lineStarts(tail);
    blocks.forEach((block, at) => {
      const drawn = this.drawer.draw(block);
      const next = blocks[at + 1];
      // A block is finished once what follows it is sure to begin where it seems to.
      const sureLines = next && next.at + (next.type === "table" ? 2 : 1);
      if (isWhole || (next && sureLines < lines.length)) this.finished(drawn.node, block);
      else if (!this.last) {
        this.last = drawn;
        this.tail += starts[block.at];
      } else {
        const { undo } = this.last;
        this.last = { undo: () => (drawn.undo(), undo()) };
      }
    });
    const open = blocks.at(-1);
    if (isWhole) this.tail = text.length;
    else if (open?.type === "code" && open.fence && open.at + 1 < lines.length) this.startFence(open, this.tail, text);
  }

  finished(node, block) {
    this.onBlock(block.type === "code" ? "Code block" : node.textContent);
  }

  /** From now on the open code block at the end grows by what is new alone. */
  startFence(block, at, text) {
    this.last.undo();
    this.last = null;
    const { node, code } = codeBlock(block.language);
    this.drawer.list = null;
    this.parent.append(node);
    const partial = document.createTextNode("");
    const whole = document.createTextNode("");
    code.append(whole, partial);
    this.fence = { ...block.fence, node, code, whole, partial, isFirst: true };
    this.tail = text.indexOf("\n", at) + 1;
    this.growFence(false);
  }

  /** Adds the lines that are new; true where the code block has ended. */
  growFence(isWhole) {
    const { fence, text } = this;
    const added = [];
    for (;;) {
      const end = text.indexOf("\n", this.tail);
      if (end < 0 && !isWhole) break;
      const [line] = splitLines(text.slice(this.tail, end < 0 ? text.length : end));
      this.tail = end < 0 ? text.length : end + 1;
      const closes = closesFence(line, fence);
      if (!closes) {
        added.push((fence.isFirst ? "" : "\n") + fenceContent(line, fence));
        fence.isFirst = false;
      }
      if (closes || end < 0) {
        fence.whole.appendData(added.join(""));
        this.endFence();
        return true;
      }
    }
    fence.whole.appendData(added.join(""));
    const [line] = splitLines(text.slice(this.tail));
    const mayClose = line.trim() !== "" && line.trim() === fence.char.repeat(line.trim().length);
    fence.partial.data = mayClose || line === "" ? "" : (fence.isFirst ? "" : "\n") + fenceContent(line, fence);
    return false;
  }

  endFence() {
    const { node, code, whole, language } = this.fence;
    const text = whole.data;
    code.replaceChildren();
    highlight(text, language, code);
    this.fence = null;
    this.finished(node, { type: "code" });
  }
}

function lineStarts(text) {
  const starts = [0];
  for (let at = text.indexOf("\n"); at >= 0; at = text.indexOf("\n", at + 1)) starts.push(at + 1);
  return starts;
}

/** Draws a whole text. */
export function drawMarkdown(text, parent) {
  new MarkdownView(parent).update(text, true);
}
