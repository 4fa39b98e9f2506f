// The list of conversations, and the drawer that it is on narrow screens.

import { $, h } from "./dom.js";

const narrow = matchMedia("(max-width: 820px)");
const DAY_MS = 86_400_000;

let opener = null;
let drawn = "";

/** Draws the list; `busy` has the ids of those that are being answered. */
export function drawList(heads, current, busy) {
  const now = JSON.stringify([heads.map(({ id, title }) => [id, title, busy.has(id)]), current]);
  if (now === drawn) return;
  drawn = now;
  const groups = new Map();
  const today = new Date().setHours(0, 0, 0, 0);
  for (const head of heads) {
    const group = head.updated >= today ? "Today" : head.updated >= today - 6 * DAY_MS ? "The last seven days" : "Earlier";
    if (!groups.has(group)) groups.set(group, []);
    groups.get(group).push(head);
  }
  const item = ({ id, title }) =>
    h("li", {}, h("a", { class: "row", href: `#/c/${id}`, "aria-current": id === current ? "page" : null, title },
      h("span", { class: "name" }, title),
      busy.has(id) ? h("span", { class: "busy" }, h("span", { class: "unseen" }, "is being answered")) : null));
  const focusedHref = document.activeElement?.closest("#conversations a")?.getAttribute("href");
  $("conversations").replaceChildren(
    ...(heads.length ? [] : [h("p", { class: "none" }, "No conversations yet.")]),
    ...[...groups].flatMap(([name, group]) => [h("h2", {}, name), h("ul", {}, ...group.map(item))]),
  );
  if (focusedHref) $("conversations").querySelector(`a[href="${CSS.escape(focusedHref)}"]`)?.focus();
}

export function openSidebar(button) {
  opener = button;
  setOpen(true);
  $("close-sidebar").focus();
}

export function closeSidebar() {
  if (!document.body.classList.contains("sidebar-open")) return false;
  setOpen(false);
  opener?.focus();
  return true;
}

function setOpen(isOpen) {
  document.body.classList.toggle("sidebar-open", isOpen);
  $("veil").hidden = !isOpen;
  for (const button of document.querySelectorAll(".open-sidebar")) button.setAttribute("aria-expanded", String(isOpen));
  setInert();
}

/** On narrow screens one of list and page can be reached, on wide ones both. */
function setInert() {
  const isOpen = document.body.classList.contains("sidebar-open");
  $("sidebar").inert = narrow.matches && !isOpen;
  $("main").inert = narrow.matches && isOpen;
}

export function setUpSidebar() {
  narrow.addEventListener("change", () => setOpen(false));
  $("veil").addEventListener("click", closeSidebar);
  $("close-sidebar").addEventListener("click", closeSidebar);
  for (const button of document.querySelectorAll(".open-sidebar")) button.addEventListener("click", () => openSidebar(button));
  $("sidebar").addEventListener("click", (event) => event.target.closest("a") && closeSidebar());
  setInert();
}
