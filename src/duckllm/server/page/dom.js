// Elements made by createElement and textContent alone: no text is ever read as HTML.

/** An element; `on...` attributes are listeners, undefined, null and false leave an attribute out. */
export function h(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** The same of SVG. */
export function s(tag, attributes = {}, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

export const $ = (id) => document.getElementById(id);

const PATHS = {
  plus: "M12 5v14M5 12h14",
  menu: "M4 7h16M4 12h16M4 17h16",
  close: "M6 6l12 12M18 6L6 18",
  sliders: "M4 8h8M16 8h4M14 6a2 2 0 1 0 0 4a2 2 0 1 0 0-4M4 16h4M12 16h8M10 14a2 2 0 1 0 0 4a2 2 0 1 0 0-4",
  more: "M4.5 12h1M11.5 12h1M18.5 12h1",
  send: "M12 19V5M6 11l6-6 6 6",
  stop: "M8 8h8v8H8z",
  copy: "M9 9h10v11H9zM15 5.5H5V16",
  check: "M5 12.5l4.5 4.5L19 7.5",
  again: "M4.5 12a7.5 7.5 0 1 0 2.3-5.4M4.5 4.5v4h4",
  edit: "M5 19l1-4L16 5l3 3L9 18zM14 7l3 3",
  left: "M14 6l-6 6 6 6",
  right: "M10 6l6 6-6 6",
  save: "M12 5v10M8 11l4 4 4-4M5 19h14",
  trash: "M5 7h14M10 7V4.5h4V7M7 7l1 12.5h8L17 7",
  nodes: "M5 5h5v5H5zM14 5h5v5h-5zM5 14h5v5H5zM14 14h5v5h-5z",
  keyboard: "M3.5 7h17v10h-17zM7 10.5h.01M10.3 10.5h.01M13.7 10.5h.01M17 10.5h.01M8.5 14h7",
  box: "M4 8h16v11H4zM4 8l2-3.5h12L20 8M10 12h4",
};

/** A line drawing, 20 px, not said by screen readers. */
export function icon(name) {
  return s(
    "svg",
    { viewBox: "0 0 24 24", width: 20, height: 20, "aria-hidden": "true", class: "glyph" },
    s("path", { d: PATHS[name], fill: "none", stroke: "currentColor", "stroke-width": 1.8, "stroke-linecap": "round", "stroke-linejoin": "round" }),
  );
}

/** A button that is a drawing with a name. */
export function iconButton(name, label, onclick) {
  return h("button", { type: "button", class: "icon small", "aria-label": label, title: label, onclick }, icon(name));
}

/** Puts text on the clipboard, also where a page without TLS has no clipboard interface. */
export async function copyText(text) {
  if (navigator.clipboard && window.isSecureContext) {
    try {
      await navigator.clipboard.writeText(text);
      return true;
    } catch {
      // Not permitted: the old way may be.
    }
  }
  const area = h("textarea", { class: "unseen", "aria-hidden": "true", tabindex: -1 });
  area.value = text;
  const focused = document.activeElement;
  document.body.append(area);
  area.select();
  const copied = document.execCommand("copy");
  area.remove();
  focused?.focus();
  return copied;
}

/** A random name, 128 bits; crypto.randomUUID is not there without TLS. */
export function randomId() {
  const bytes = crypto.getRandomValues(new Uint8Array(16));
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

/** Hands a file to the user. */
export function download(name, text) {
  const url = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  h("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 60_000);
}
