// The chat view: the conversation that is open, its composer, the replies that are being written.

import { $, download, h, icon } from "./dom.js";
import { addMessage, newConversation, path, select } from "./conversation.js";
import { ask, notice, say } from "./dialogs.js";
import { Generation } from "./generation.js";
import { forget, recall, recallJson, remember } from "./local.js";
import { ReplyView, UserView } from "./message.js";
import { showForm } from "./settings.js";
import * as store from "./store.js";

const SAVE_MS = 1000;
const NEAR_PX = 60; // so near to the end the log stays at the end

export class Chat {
  /** `onList()` is called when the list of conversations has changed. */
  constructor({ health, model, onList }) {
    this.health = health;
    this.model = model;
    this.onList = onList;
    this.conversation = this.fresh();
    this.generations = new Map(); // by conversation
    this.unsaved = new Map(); // replies that the store does not have yet, by conversation
    this.views = new Map(); // by message
    this.isPinned = true;
    this.setUp();
  }

  fresh() {
    return newConversation(recallJson("settings", {}));
  }

  setUp() {
    $("send").append(icon("send"));
    $("stop").append(icon("stop"));
    $("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    $("stop").addEventListener("click", () => this.stop());
    const box = $("message");
    const hasKeys = matchMedia("(hover: hover) and (pointer: fine)").matches;
    $("hint").textContent = hasKeys ? "Enter sends, Shift+Enter begins a line." : "";
    box.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing || !hasKeys) return;
      event.preventDefault();
      this.send();
    });
    box.addEventListener("input", () => {
      this.sizeBox();
      if (box.value) remember(this.draftName, box.value);
      else forget(this.draftName);
    });
    const log = $("log");
    log.addEventListener("scroll", () => {
      this.isPinned = log.scrollHeight - log.scrollTop - log.clientHeight < NEAR_PX;
      $("to-latest").hidden = this.isPinned;
    });
    $("to-latest").addEventListener("click", () => {
      this.scrollToEnd();
      box.focus();
    });
    new ResizeObserver(() => this.isPinned && this.scrollToEnd()).observe(log);
    window.addEventListener("pagehide", () => this.keepUnfinished());
    store.onChange((id) => this.changedElsewhere(id));
  }

  get draftName() {
    return `draft.${path(this.conversation).length ? this.conversation.id : "new"}`;
  }

  /** The address of the conversation, from "#" on. */
  get hash() {
    return path(this.conversation).length ? `#/c/${this.conversation.id}` : "#/";
  }

  get generation() {
    return this.generations.get(this.conversation.id);
  }

  sizeBox() {
    const box = $("message");
    box.style.height = "auto";
    box.style.height = `${box.scrollHeight}px`;
  }

  /** Shows a conversation, or a new one; false where there is none of that id. */
  async open(id) {
    this.wanted = id;
    if (id === this.conversation.id) {
      this.drawFrame();
      return true;
    }
    const found = id === null ? this.fresh() : (this.generations.get(id)?.conversation ?? (await store.load(id)));
    if (!found) return false;
    if (this.wanted === id) this.show(found); // else another one was asked for meanwhile
    return true;
  }

  show(conversation) {
    this.conversation = conversation;
    this.views.clear();
    $("messages").replaceChildren();
    $("message").value = recall(this.draftName) ?? "";
    this.sizeBox();
    showForm(conversation.settings);
    this.isPinned = true;
    this.redraw();
  }

  /** Draws the messages on the way to the leaf; those that are there stay. */
  redraw() {
    const shown = path(this.conversation);
    const wanted = new Set(shown.map(({ id }) => id));
    for (const [id, view] of this.views) {
      if (wanted.has(id)) continue;
      view.node.remove();
      this.views.delete(id);
    }
    for (const message of shown) {
      const view = this.views.get(message.id) ?? this.newView(message);
      $("messages").append(view.node);
      view.refresh();
    }
    this.drawFrame(shown.length);
    if (this.isPinned) this.scrollToEnd();
  }

  newView(message) {
    const { conversation } = this;
    const actions = {
      isBusy: () => this.generations.has(conversation.id),
      select: (other) => this.choose(other),
      edit: (old, text) => this.say(text, old.parent),
      regenerate: (old) => this.reply(old.parent),
    };
    const isLive = this.generation?.message === message;
    const view =
      message.role === "user" ? new UserView(conversation, message, actions) : new ReplyView(conversation, message, actions, isLive);
    view.ondraw = () => this.isPinned && this.scrollToEnd();
    this.views.set(message.id, view);
    return view;
  }

  drawFrame(numMessages = path(this.conversation).length) {
    const { conversation } = this;
    $("title").textContent = conversation.title;
    if (!$("chat").hidden) document.title = `${conversation.title} – duck-llm`;
    $("open-menu").hidden = numMessages === 0;
    $("chat").classList.toggle("empty", numMessages === 0);
    $("send").hidden = this.generation !== undefined;
    $("stop").hidden = this.generation === undefined;
    $("open-settings").classList.toggle("set", Object.keys(conversation.settings).length > 0);
  }

  scrollToEnd() {
    const log = $("log");
    log.scrollTop = log.scrollHeight;
  }

  /** Sends what stands in the composer. */
  send() {
    const box = $("message");
    if (!box.value.trim() || this.generation) return;
    const text = box.value;
    forget(this.draftName);
    box.value = "";
    this.sizeBox();
    this.say(text, this.conversation.leaf);
  }

  /** Says something below `parent`, and has it answered. */
  say(text, parent) {
    const user = addMessage(this.conversation, parent, "user", text);
    this.reply(user.id);
    history.replaceState(null, "", this.hash);
  }

  async reply(parent) {
    const { conversation } = this;
    if (this.generations.has(conversation.id)) return;
    const message = addMessage(conversation, parent, "assistant", "");
    const generation = new Generation(conversation, message, { model: this.model, health: this.health });
    this.generations.set(conversation.id, generation);
    this.unsaved.set(conversation.id, message);
    this.isPinned = true;
    this.redraw();
    say("Answering.");
    await this.save(conversation);
    let savedAt = performance.now();
    generation.addEventListener("change", () => {
      this.views.get(message.id)?.changed();
      if (message.state !== "streaming" || performance.now() - savedAt < SAVE_MS) return;
      savedAt = performance.now();
      this.save(conversation);
    });
    await generation.run();
    this.generations.delete(conversation.id);
    if (conversation === this.conversation) {
      const focused = document.activeElement;
      for (const view of this.views.values()) view.refresh();
      this.drawFrame();
      if (focused === $("stop")) $("message").focus();
    }
    if (await this.save(conversation)) this.unsaved.delete(conversation.id);
  }

  stop() {
    this.generation?.stop();
  }

  choose(message) {
    select(this.conversation, message);
    this.isPinned = false;
    this.redraw();
    this.views.get(message.id)?.node.querySelector(".branches button:not(:disabled)")?.focus();
    this.save(this.conversation);
  }

  /** Keeps the conversation; false, and a notice, where the browser does not. */
  async save(conversation) {
    try {
      await store.save(conversation);
      this.saveFailed = false;
      this.onList();
      return true;
    } catch (error) {
      if (!this.saveFailed) {
        const why = error.name === "QuotaExceededError" ? "it has no more room for this page. Export and delete old conversations" : error.message;
        notice(`The browser does not keep this conversation: ${why}.`, true);
      }
      this.saveFailed = true;
      return false;
    }
  }

  /** The page goes away: replies that are not kept yet are kept at once. */
  keepUnfinished() {
    const entries = [...this.unsaved].map(([conversation, message]) => ({
      conversation,
      message: { ...message, state: message.state === "streaming" ? "broken" : message.state },
    }));
    store.writeJournal(entries);
  }

  async changedElsewhere(id) {
    this.onList();
    if (id !== this.conversation.id || this.generations.has(id)) return;
    const found = await store.load(id);
    if (found) this.show(found);
  }

  /** Takes over what was set in the form. */
  changeSettings(settings) {
    this.conversation.settings = settings;
    $("open-settings").classList.toggle("set", Object.keys(settings).length > 0);
    remember("settings", JSON.stringify(settings));
    if (this.conversation.leaf !== null) this.save(this.conversation);
  }

  async rename() {
    const { conversation } = this;
    const title = await ask({ title: "Rename the conversation", label: "Name", value: conversation.title, yes: "Rename" });
    if (title === null) return;
    conversation.title = title;
    conversation.named = true;
    this.drawFrame();
    await this.save(conversation);
  }

  /** Deletes the conversation, if the user is sure; true where it is gone. */
  async remove() {
    const { conversation } = this;
    const isSure = await ask({ title: "Delete the conversation?", text: `“${conversation.title}” will be gone for good.`, yes: "Delete", danger: true });
    if (!isSure) return false;
    await this.forget(conversation.id);
    return true;
  }

  async forget(id) {
    this.generations.get(id)?.stop();
    this.unsaved.delete(id);
    await store.remove(id);
    this.onList();
  }

  export() {
    exportFile([this.conversation], this.conversation.title);
  }
}

/** Hands conversations to the user as a file. */
export function exportFile(conversations, name) {
  const safe = name.replace(/[^\p{L}\p{N} _-]/gu, "").trim().slice(0, 60) || "conversation";
  download(`${safe}.json`, JSON.stringify({ format: "duckllm-conversations", version: 1, conversations }, null, 1));
}
