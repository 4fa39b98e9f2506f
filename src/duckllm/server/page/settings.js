// The system prompt and how replies are drawn: fields as data, their form, and what of them is sent.

import { $, h } from "./dom.js";

const NUMBERS = [
  { name: "temperature", label: "Temperature", min: 0, max: 2, step: "any", hint: "0 always takes the likeliest token; more is more varied." },
  { name: "top_p", label: "Top p", min: 0.01, max: 1, step: "any", hint: "Only the likeliest tokens that together have this probability." },
  { name: "top_k", label: "Top k", min: 0, step: 1, hint: "Only so many of the likeliest tokens; 0 is all." },
  { name: "min_p", label: "Min p", min: 0, max: 1, step: "any", hint: "Only tokens at least this probable, as a share of the likeliest one's." },
  { name: "max_tokens", label: "Longest reply", min: 1, step: 1, hint: "In tokens." },
  { name: "seed", label: "Seed", min: 0, step: 1, hint: "The same seed gives the same reply." },
];

const OWN = "model's own";
const EMPTY = { max_tokens: "no limit", seed: "new each time" };
const THINKING = [["", "As the model does"], ["on", "On"], ["off", "Off"]];

let canSwitchThinking = true;

/** Takes over what the model's card says of empty fields and of thinking. */
export function setModel({ default_sampling_params: defaults = {}, can_switch_thinking: canSwitch = true }) {
  canSwitchThinking = canSwitch;
  const { elements } = $("settings-form");
  for (const { name } of NUMBERS) elements[name].placeholder = defaults[name] ?? EMPTY[name] ?? OWN;
  elements.thinking.closest(".field").hidden = !canSwitch;
}

/** What of the settings a request has; what is empty is left to the model. */
export function requestFields(settings) {
  const fields = {};
  for (const { name } of NUMBERS) {
    if (typeof settings[name] === "number") fields[name] = settings[name];
  }
  if (settings.stop?.length) fields.stop = settings.stop;
  if (settings.thinking && canSwitchThinking) fields.chat_template_kwargs = { enable_thinking: settings.thinking === "on" };
  return fields;
}

/** The system message of a conversation, or none. */
export const systemMessages = (settings) =>
  settings.system ? [{ role: "system", content: settings.system }] : [];

function field(label, hint, control) {
  const id = `setting-${control.name}`;
  control.id = id;
  const help = h("p", { id: `${id}-hint`, class: "hint" }, hint);
  control.setAttribute("aria-describedby", help.id);
  return h("div", { class: "field" }, h("label", { for: id }, label), control, help);
}

/** Builds the form once. `onchange(settings)` is told what was changed and is valid. */
export function buildForm(onchange) {
  const form = $("settings-form");
  const number = ({ name, label, min, max, step, hint }) =>
    field(label, hint, h("input", { name, type: "number", inputmode: step === 1 ? "numeric" : "decimal", min, max, step, placeholder: EMPTY[name] ?? OWN }));
  form.append(
    field("System prompt", "What the model is told before the first message.", h("textarea", { name: "system", rows: 5 })),
    field("Thinking", "Whether the model thinks before it answers, where it knows how to.",
      h("select", { name: "thinking" }, ...THINKING.map(([value, label]) => h("option", { value }, label)))),
    h("div", { class: "pair" }, ...NUMBERS.map(number)),
    field("Stop strings", "One a line; a reply ends before any of them.", h("textarea", { name: "stop", rows: 2 })),
    h("p", { class: "hint" }, "An empty field leaves it to the model, whose own value it shows. What is set here is for this conversation, and for those that are begun after it."),
    h("p", { class: "buttons" }, h("button", { type: "button", class: "button", id: "reset-settings" }, "Empty all fields")),
  );
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("input", () => onchange(readForm(form)));
  $("reset-settings").addEventListener("click", () => {
    showForm({});
    onchange({});
  });
}

function readForm(form) {
  const settings = {};
  for (const { name } of NUMBERS) {
    const control = form.elements[name];
    const isValid = control.checkValidity();
    control.setAttribute("aria-invalid", String(!isValid));
    if (isValid && control.value !== "") settings[name] = control.valueAsNumber;
  }
  const { system, stop, thinking } = form.elements;
  if (system.value.trim()) settings.system = system.value;
  const strings = stop.value.split("\n").filter((line) => line !== "");
  if (strings.length) settings.stop = strings;
  if (thinking.value) settings.thinking = thinking.value;
  return settings;
}

/** Shows settings in the form. */
export function showForm(settings) {
  const { elements } = $("settings-form");
  for (const { name } of NUMBERS) {
    elements[name].value = settings[name] ?? "";
    elements[name].removeAttribute("aria-invalid");
  }
  elements.system.value = settings.system ?? "";
  elements.stop.value = (settings.stop ?? []).join("\n");
  elements.thinking.value = settings.thinking ?? "";
}
