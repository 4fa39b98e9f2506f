// Questions to the user, notices, and what screen readers are told.

import { $, h, icon } from "./dom.js";

const NOTICE_MS = 8000;
const SAID = 12; // sentences that stay in the live region

/** Asks for a text (`label` given) or a yes; resolves to the text or true, or to null. */
export function ask({ title, text = "", label = null, value = "", type = "text", yes, danger = false }) {
  const dialog = $("ask");
  const form = dialog.querySelector("form");
  const input = $("ask-value");
  $("ask-title").textContent = title;
  $("ask-text").textContent = text;
  $("ask-text").hidden = !text;
  $("ask-field").hidden = label === null;
  $("ask-label").textContent = label ?? "";
  $("ask-yes").textContent = yes;
  $("ask-yes").classList.toggle("danger", danger);
  input.type = type;
  input.value = value;
  input.required = label !== null;
  input.autocomplete = "off";
  return new Promise((resolve) => {
    let answer = null;
    form.onsubmit = (event) => {
      event.preventDefault();
      answer = label === null ? true : input.value.trim();
      if (answer !== "") dialog.close();
    };
    $("ask-no").onclick = () => dialog.close();
    dialog.onclose = () => {
      input.value = "";
      resolve(answer);
    };
    dialog.showModal();
    if (label !== null) input.select();
    else $("ask-no").focus();
  });
}

/** Shows a notice for a while; an error stays until it is closed. */
export function notice(text, isError = false) {
  const node = h("div", { class: isError ? "notice error" : "notice", role: isError ? "alert" : "status" });
  const close = h("button", { type: "button", class: "icon small", "aria-label": "Close the notice", onclick: () => node.remove() }, icon("close"));
  $("notices").append(node);
  node.append(h("span", {}, text), close);
  if (!isError) setTimeout(() => node.remove(), NOTICE_MS);
}

/** Has screen readers say a sentence once they are done with the one before. */
export function say(text) {
  const region = $("said");
  region.append(h("p", {}, text));
  while (region.childElementCount > SAID) region.firstElementChild.remove();
}

/** Dialogs close by their own button and by a click beside them. */
export function setUpDialogs() {
  for (const dialog of document.querySelectorAll("dialog")) {
    for (const button of dialog.querySelectorAll("button.close")) {
      button.append(icon("close"));
      button.addEventListener("click", () => dialog.close());
    }
    dialog.addEventListener("pointerdown", (event) => {
      if (event.target !== dialog) return;
      const box = dialog.getBoundingClientRect();
      const isInside = event.clientX >= box.left && event.clientX <= box.right && event.clientY >= box.top && event.clientY <= box.bottom;
      if (!isInside) dialog.close();
    });
  }
}
