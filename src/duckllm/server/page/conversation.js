// A conversation: a tree of messages, as an edit or another reply begins a branch and loses nothing.
// Values alone: no document, no storage.
//
// {id, title, named, created, updated, settings, leaf, messages: {id: message}}
// A message: {id, parent, role, content, reasoning, state, error, facts, thought_s, created}; `state` of a reply is
// "streaming", "done", "length", "stopped" (by the user), "broken" (by a reload or the network) or "error".

import { randomId } from "./dom.js";

const TITLE_LENGTH = 48;
const STATES = ["streaming", "done", "length", "stopped", "broken", "error"];

export function newConversation(settings) {
  const now = Date.now();
  return { id: randomId(), title: "New chat", named: false, created: now, updated: now, settings: { ...settings }, leaf: null, messages: {} };
}

/** Adds a message below `parent` (null for a beginning) and goes to it. */
export function addMessage(conversation, parent, role, content) {
  const message = {
    id: randomId(), parent, role, content, reasoning: "", state: role === "assistant" ? "streaming" : "done",
    error: null, facts: null, thought_s: null, created: Date.now(),
  };
  conversation.messages[message.id] = message;
  conversation.leaf = message.id;
  conversation.updated = message.created;
  if (!conversation.named && role === "user" && parent === null) conversation.title = titleOf(content);
  return message;
}

/** The messages that are shown, first to last. */
export function path(conversation, leaf = conversation.leaf) {
  const found = [];
  for (let id = leaf; id !== null; id = conversation.messages[id].parent) found.push(conversation.messages[id]);
  return found.reverse();
}

/** The messages in the same place, by age: a message and what was said instead of it. */
export function siblings(conversation, message) {
  return Object.values(conversation.messages).filter(
    (other) => other.parent === message.parent && other.role === message.role,
  );
}

/** Shows a message with the newest that follows it. */
export function select(conversation, message) {
  let leaf = message;
  for (;;) {
    const next = Object.values(conversation.messages).findLast((other) => other.parent === leaf.id);
    if (!next) break;
    leaf = next;
  }
  conversation.leaf = leaf.id;
}

/** What is sent for a reply below `leaf`, without replies that failed before their first word. */
export function history(conversation, leaf) {
  return path(conversation, leaf)
    .filter((message) => message.role === "user" || message.content !== "")
    .map(({ role, content, reasoning }) => ({ role, content, ...(reasoning && { reasoning_content: reasoning }) }));
}

function titleOf(content) {
  const line = content.trim().split("\n")[0];
  return line.length <= TITLE_LENGTH ? line || "New chat" : `${line.slice(0, TITLE_LENGTH).trimEnd()}…`;
}

const string = (value, otherwise = "") => (typeof value === "string" ? value : otherwise);
const number = (value, otherwise = null) => (Number.isFinite(value) ? value : otherwise);
const record = (value) => (value !== null && typeof value === "object" && !Array.isArray(value) ? value : {});

/**
 * A conversation from a file, of checked parts; null where it is none.
 * A new id, so that nothing that is kept is replaced.
 */
export function imported(value) {
  const source = record(value);
  const given = Object.values(record(source.messages)).filter((message) => ["user", "assistant"].includes(message?.role));
  if (!given.length) return null;
  const conversation = {
    ...newConversation({}),
    title: string(source.title, "Imported").slice(0, 200),
    named: true,
    created: number(source.created, Date.now()),
    updated: number(source.updated, Date.now()),
  };
  for (const [name, setting] of Object.entries(record(source.settings))) {
    if (["string", "number"].includes(typeof setting) || Array.isArray(setting)) conversation.settings[name] = setting;
  }
  for (const message of given) {
    conversation.messages[string(message.id)] = {
      id: string(message.id),
      parent: typeof message.parent === "string" ? message.parent : null,
      role: message.role,
      content: string(message.content),
      reasoning: string(message.reasoning),
      state: STATES.includes(message.state) ? message.state : "done",
      error: typeof message.error === "string" ? message.error : null,
      facts: Object.fromEntries(Object.entries(record(message.facts)).filter(([, fact]) => Number.isFinite(fact))),
      thought_s: number(message.thought_s),
      created: number(message.created, Date.now()),
    };
  }
  conversation.leaf = string(source.leaf, null);
  return isTree(conversation) ? conversation : null;
}

/** Whether every message has a way to a beginning, and the leaf is a message. */
function isTree({ messages, leaf }) {
  const sound = new Set();
  for (const message of Object.values(messages)) {
    const seen = new Set();
    for (let id = message.id; id !== null && !sound.has(id); id = messages[id].parent) {
      if (!Object.hasOwn(messages, id) || seen.has(id)) return false;
      seen.add(id);
    }
    for (const id of seen) sound.add(id);
  }
  return leaf !== null && Object.hasOwn(messages, leaf);
}
