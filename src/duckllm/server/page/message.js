// How one message looks, and how a reply grows.

import { siblings } from "./conversation.js";
import { say } from "./dialogs.js";
import { copyText, h, icon, iconButton } from "./dom.js";
import { count, percent, seconds, short } from "./format.js";
import { MarkdownView } from "./markdown.js";

const FRAME_MS = 33;
const COST_FACTOR = 9; // drawing takes at most a tenth of the time

/** The facts of a reply in one line. */
export function factsText(facts) {
  const said = [];
  if (facts?.tokens !== undefined) {
    const thought = facts.reasoning_tokens ? `, ${facts.reasoning_tokens.toLocaleString("en")} of them thinking` : "";
    said.push(count(facts.tokens, "token") + thought);
  }
  if (facts?.tokens_per_s) said.push(`${short(facts.tokens_per_s)} tok/s`);
  if (facts?.first_token_s !== undefined) said.push(`first after ${seconds(facts.first_token_s)}`);
  if (facts?.cached_tokens !== undefined && facts?.prompt_tokens !== undefined) {
    said.push(`${facts.cached_tokens.toLocaleString("en")} of ${count(facts.prompt_tokens, "prompt token")} cached`);
  }
  if (facts?.draft_tokens) said.push(`${percent((facts.accepted_tokens ?? 0) / facts.draft_tokens)} of guesses right`);
  return said.join(" · ");
}

/** A button that copies and says that it did. */
function copyButton(label, text) {
  const button = iconButton("copy", label, async () => {
    const copied = await copyText(text());
    button.replaceChildren(icon(copied ? "check" : "close"));
    say(copied ? "Copied" : "The browser does not permit copying");
    setTimeout(() => button.replaceChildren(icon("copy")), 2000);
  });
  return button;
}

class MessageView {
  /** `actions`: select(message), edit(message, text), regenerate(message), isBusy(). */
  constructor(conversation, message, actions) {
    this.conversation = conversation;
    this.message = message;
    this.actions = actions;
    this.footer = h("footer");
    this.node = h("article", { class: `message ${message.role}`, "data-id": message.id });
  }

  /** What stands below the message; the focus stays on the button of the same name. */
  setFooter(...children) {
    const focused = this.footer.contains(document.activeElement) ? document.activeElement.getAttribute("aria-label") : null;
    this.footer.replaceChildren(...children);
    if (focused) [...this.footer.querySelectorAll("button")].find((button) => button.getAttribute("aria-label") === focused)?.focus();
  }

  /** Which of several in this place it is, and the way to the others. */
  branches() {
    const all = siblings(this.conversation, this.message);
    if (all.length < 2) return [];
    const at = all.findIndex(({ id }) => id === this.message.id);
    const step = (name, label, to) => {
      const button = iconButton(name, label, () => this.actions.select(all[to]));
      button.disabled = to < 0 || to >= all.length || this.actions.isBusy();
      return button;
    };
    const place = h("span", { class: "place" }, `${at + 1}/${all.length}`);
    place.setAttribute("aria-label", `Version ${at + 1} of ${all.length}`);
    return [h("span", { class: "branches", role: "group", "aria-label": "Versions" },
      step("left", "Version before", at - 1), place, step("right", "Next version", at + 1))];
  }

  action(name, label, run) {
    const button = iconButton(name, label, run);
    button.disabled = this.actions.isBusy();
    return button;
  }
}

export class UserView extends MessageView {
  constructor(...parts) {
    super(...parts);
    this.body = h("div", { class: "said" }, this.message.content);
    this.node.append(h("h2", { class: "unseen" }, "You"), this.body, this.footer);
    this.refresh();
  }

  refresh() {
    if (this.editor) return;
    this.setFooter(
      ...this.branches(),
      copyButton("Copy the message", () => this.message.content),
      this.action("edit", "Edit and send again", () => this.edit()),
    );
  }

  edit() {
    const area = h("textarea", { "aria-label": "Message", rows: 3 });
    area.value = this.message.content;
    const finish = (text) => {
      this.editor.replaceWith(this.body);
      this.editor = null;
      this.footer.hidden = false;
      if (text) this.actions.edit(this.message, text);
      else this.footer.querySelector('[aria-label^="Edit"]')?.focus();
    };
    this.editor = h(
      "form",
      {
        class: "editor",
        onsubmit: (event) => {
          event.preventDefault();
          if (area.value.trim() && !this.actions.isBusy()) finish(area.value);
        },
        onkeydown: (event) => {
          if (event.key === "Escape") {
            event.stopPropagation();
            finish(null);
          } else if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
            event.preventDefault();
            this.editor.requestSubmit();
          }
        },
      },
      area,
      h("p", { class: "buttons" },
        h("button", { type: "button", class: "button", onclick: () => finish(null) }, "Cancel"),
        h("button", { type: "submit", class: "button primary" }, "Send")),
    );
    this.body.replaceWith(this.editor);
    this.footer.hidden = true;
    area.focus();
  }
}

export class ReplyView extends MessageView {
  constructor(conversation, message, actions, isLive) {
    super(conversation, message, actions);
    this.isLive = isLive;
    this.thoughts = h("div", { class: "prose" });
    this.thinkingTitle = h("span");
    this.thinking = h("details", { class: "thinking", hidden: true, ontoggle: () => this.drawThoughts() },
      h("summary", {}, this.thinkingTitle), this.thoughts);
    this.prose = h("div", { class: "prose" });
    this.waiting = h("p", { class: "waiting" }, h("span"), h("span"), h("span"), h("b", { class: "unseen" }, "Waiting for the first word"));
    this.problem = h("p", { class: "problem", hidden: true });
    this.markdown = new MarkdownView(this.prose, (text) => isLive && say(text));
    this.markdownOfThoughts = new MarkdownView(this.thoughts);
    this.timer = null;
    this.cost = 0;
    this.node.append(h("h2", { class: "unseen" }, "Reply"), this.thinking, this.prose, this.waiting, this.problem, this.footer);
    this.draw();
  }

  get isGrowing() {
    return this.isLive && this.message.state === "streaming";
  }

  /** Draws what has come, soon. */
  changed() {
    this.timer ??= setTimeout(() => {
      this.timer = null;
      this.draw();
    }, Math.max(FRAME_MS, this.cost * COST_FACTOR));
  }

  draw() {
    const began = performance.now();
    const { message, isGrowing } = this;
    this.node.setAttribute("aria-busy", String(isGrowing));
    this.node.classList.toggle("growing", isGrowing);
    this.waiting.hidden = !isGrowing || message.content !== "" || message.reasoning !== "";
    this.thinking.hidden = message.reasoning === "";
    this.thinkingTitle.textContent =
      message.thought_s !== null ? `Thought for ${message.thought_s < 1 ? "a moment" : seconds(message.thought_s)}` : isGrowing ? "Thinking…" : "Thought";
    if (this.thinking.open) this.drawThoughts();
    if (message.content !== this.markdown.text || !isGrowing) this.markdown.update(message.content, !isGrowing);
    if (!isGrowing) this.settle();
    this.refresh();
    this.cost = performance.now() - began;
    this.ondraw?.();
  }

  drawThoughts() {
    const { message, isGrowing } = this;
    if (this.thinking.open && message.reasoning !== this.markdownOfThoughts.text) {
      this.markdownOfThoughts.update(message.reasoning, !isGrowing || message.thought_s !== null);
    }
  }

  settle() {
    const { state, error, content } = this.message;
    const said = {
      length: "Cut at the longest reply that was allowed, or at the end of the context.",
      stopped: "Stopped.",
      streaming: "Broken off.",
      broken: error ?? "Broken off.",
      error: error ?? "An error.",
      done: content === "" ? "An empty reply." : null,
    }[state];
    this.problem.hidden = said === null;
    this.problem.textContent = said ?? "";
    this.problem.classList.toggle("error", state === "error" || (state === "broken" && error !== null));
    if (this.isLive) say(said ?? "The reply is complete.");
    this.isLive = false;
  }

  refresh() {
    if (this.isGrowing) {
      if (this.footer.childElementCount) this.footer.replaceChildren();
      return;
    }
    this.setFooter(
      ...this.branches(),
      copyButton("Copy the reply", () => this.message.content),
      this.action("again", "Regenerate", () => this.actions.regenerate(this.message)),
      h("p", { class: "facts" }, factsText(this.message.facts)),
    );
  }
}
