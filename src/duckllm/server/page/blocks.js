// The block half of Markdown: lines in, a list of blocks out, as data. It knows no document.
//
// A block: {type, at, ...}, `at` being the number of its first line. Types and what they have:
//   paragraph text | heading level text | code text language, and fence where it is not closed | math text | rule
//   quote blocks | item ordered delimiter start blocks task | table header rows align
// The items of a list are blocks of their own, so that a list that grows can be drawn item by item; `blocks` are
// what is inside. HTML is text. A line alone in a paragraph stays one.

const MAX_DEPTH = 16; // what is nested deeper is text

const FENCE = /^ {0,3}(`{3,}|~{3,})([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})(?=[ \t]|$)/;
const RULE = /^ {0,3}([-*_])(?:[ \t]*\1){2,}[ \t]*$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( {0,3})([-*+]|(\d{1,9})([.)]))(?=[ \t]|$)/;
const MATH = /^ {0,3}(\$\$|\\\[)/;

const isBlank = (line) => line === undefined || !/\S/.test(line);
const indentOf = (line) => line.search(/[^ ]|$/);

/** A text's lines, tabs at their beginning as spaces. */
export function splitLines(text) {
  return text.split("\n").map((line) => {
    const bare = line.endsWith("\r") ? line.slice(0, -1) : line;
    return /^ *\t/.test(bare) ? bare.replace(/^[ \t]+/, (indent) => indent.replaceAll("\t", "    ")) : bare;
  });
}

/** The blocks of `lines`. */
export function parseBlocks(lines, depth = 0) {
  const blocks = [];
  let at = 0;
  while (at < lines.length) {
    if (isBlank(lines[at])) {
      at += 1;
      continue;
    }
    const [block, next] = readBlock(lines, at, depth);
    blocks.push({ ...block, at });
    at = next;
  }
  return blocks;
}

function readBlock(lines, at, depth) {
  const line = lines[at];
  if (FENCE.test(line)) return readFence(lines, at);
  const heading = HEADING.exec(line);
  if (heading) return [{ type: "heading", level: heading[1].length, text: headingText(line) }, at + 1];
  if (RULE.test(line)) return [{ type: "rule" }, at + 1];
  if (MATH.test(line)) return readMath(lines, at);
  if (depth < MAX_DEPTH) {
    if (QUOTE.test(line)) return readQuote(lines, at, depth);
    if (ITEM.test(line)) return readItem(lines, at, depth);
  }
  if (startsTable(lines, at)) return readTable(lines, at);
  if (indentOf(line) >= 4) return readIndented(lines, at);
  return readParagraph(lines, at);
}

function headingText(line) {
  const text = line.trim().replace(/^#{1,6}/, "").trim();
  let end = text.length;
  while (text[end - 1] === "#") end -= 1;
  return end === 0 || /\s/.test(text[end - 1]) ? text.slice(0, end).trim() : text;
}

/** The fence that a line opens: {char, length, indent, language}, or null. */
export function openFence(line) {
  const found = FENCE.exec(line);
  if (!found) return null;
  const language = found[2].trim().split(/[\s{,]/)[0].slice(0, 40);
  return { char: found[1][0], length: found[1].length, indent: indentOf(line), language };
}

/** Whether a line closes a fence. */
export function closesFence(line, fence) {
  const text = line.trim();
  return (
    indentOf(line) < 4 && text.length >= fence.length && text[0] === fence.char && text === fence.char.repeat(text.length)
  );
}

/** A line of a fence's content, without the fence's own indentation. */
export const fenceContent = (line, fence) => line.slice(Math.min(fence.indent, indentOf(line)));

function readFence(lines, at) {
  const fence = openFence(lines[at]);
  const content = [];
  for (let next = at + 1; next < lines.length; next += 1) {
    if (closesFence(lines[next], fence)) {
      return [{ type: "code", language: fence.language, text: content.join("\n") }, next + 1];
    }
    content.push(fenceContent(lines[next], fence));
  }
  return [{ type: "code", language: fence.language, text: content.join("\n"), fence }, lines.length];
}

function readIndented(lines, at) {
  const content = [];
  let next = at;
  while (next < lines.length && (isBlank(lines[next]) || indentOf(lines[next]) >= 4)) {
    content.push(lines[next].slice(4));
    next += 1;
  }
  return [{ type: "code", language: "", text: content.join("\n").trimEnd() }, next];
}

function readMath(lines, at) {
  const closer = MATH.exec(lines[at])[1] === "$$" ? "$$" : "\\]";
  const content = [];
  for (let next = at; next < lines.length && !isBlank(lines[next]); next += 1) {
    content.push(lines[next]);
    const line = lines[next].trim();
    if (line.endsWith(closer) && (next > at || line.length > 3)) {
      return [{ type: "math", text: content.join("\n") }, next + 1];
    }
  }
  return [{ type: "math", text: content.join("\n") }, at + content.length];
}

function readQuote(lines, at, depth) {
  const content = [];
  let next = at;
  while (next < lines.length && QUOTE.test(lines[next])) {
    content.push(lines[next].replace(QUOTE, ""));
    next += 1;
  }
  return [{ type: "quote", blocks: parseBlocks(content, depth + 1) }, next];
}

function readItem(lines, at, depth) {
  const found = ITEM.exec(lines[at]);
  const markerIndent = found[1].length;
  const behind = lines[at].slice(found[0].length);
  const spaces = indentOf(behind);
  const contentIndent = found[0].length + (spaces >= 1 && spaces <= 4 && !isBlank(behind) ? spaces : 1);
  // More generous than CommonMark: two spaces are enough below a number too.
  const least = Math.min(contentIndent, markerIndent + 2);
  const content = [lines[at].slice(contentIndent)];
  let next = at + 1;
  let fence = openFence(content[0]);
  while (next < lines.length) {
    const line = lines[next];
    if (isBlank(line)) {
      let after = next;
      while (after < lines.length && isBlank(lines[after])) after += 1;
      if (after === lines.length || indentOf(lines[after]) < least) break;
      for (; next < after; next += 1) content.push("");
      continue;
    }
    const isLazy = !fence && !isBlank(lines[next - 1]) && !ITEM.test(line) && !interrupts(lines, next);
    if (indentOf(line) < least && !isLazy) break;
    const inner = line.slice(Math.min(contentIndent, indentOf(line)));
    if (fence && closesFence(inner, fence)) fence = null;
    else fence ??= openFence(inner);
    content.push(inner);
    next += 1;
  }
  const task = /^\[([ xX])\] /.exec(content[0]);
  if (task) content[0] = content[0].slice(4);
  const item = {
    type: "item",
    ordered: found[3] !== undefined,
    delimiter: found[4] ?? found[2],
    start: Number(found[3] ?? 0),
    task: task ? task[1] !== " " : null,
    blocks: parseBlocks(content, depth + 1),
  };
  return [item, next];
}

const cells = (line) => {
  let text = line.trim();
  if (text.startsWith("|")) text = text.slice(1);
  if (text.endsWith("|") && !text.endsWith("\\|")) text = text.slice(0, -1);
  return text.split(/(?<!\\)\|/).map((cell) => cell.replaceAll("\\|", "|").trim());
};

function alignments(line) {
  if (line === undefined || !/^ {0,3}[|:-][|: \t-]*$/.test(line) || !line.includes("-")) return null;
  const found = cells(line);
  if (!found.every((cell) => /^:?-+:?$/.test(cell))) return null;
  return found.map((cell) => (cell.endsWith(":") ? (cell.startsWith(":") ? "center" : "right") : "left"));
}

function startsTable(lines, at) {
  if (!lines[at].includes("|")) return false;
  const align = alignments(lines[at + 1]);
  return align !== null && align.length === cells(lines[at]).length;
}

function readTable(lines, at) {
  const align = alignments(lines[at + 1]);
  const rows = [];
  let next = at + 2;
  while (next < lines.length && !isBlank(lines[next]) && !endsParagraph(lines[next])) {
    const row = cells(lines[next]).slice(0, align.length);
    while (row.length < align.length) row.push("");
    rows.push(row);
    next += 1;
  }
  return [{ type: "table", header: cells(lines[at]), align, rows }, next];
}

/** Whether a line by itself ends the paragraph or table before it. */
function endsParagraph(line) {
  if (FENCE.test(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line) || MATH.test(line)) return true;
  const item = ITEM.exec(line);
  return item !== null && !isBlank(line.slice(item[0].length)) && (item[3] === undefined || Number(item[3]) === 1);
}

const interrupts = (lines, at) => endsParagraph(lines[at]) || startsTable(lines, at);

function readParagraph(lines, at) {
  let next = at + 1;
  while (next < lines.length && !isBlank(lines[next]) && !interrupts(lines, next)) next += 1;
  return [{ type: "paragraph", text: lines.slice(at, next).map((line) => line.trimStart()).join("\n") }, next];
}
