// Conversations in the browser's IndexedDB: heads for the list, bodies for what is open.
//
// A reply that is being written when the page goes away is put into local storage, which is kept at once, and
// taken up by the next page. Where the browser forbids IndexedDB, conversations live as long as the page.

import { forget, recallJson, remember } from "./local.js";

const JOURNAL = "journal";
const channel = "BroadcastChannel" in window ? new BroadcastChannel("duckllm") : null;

let database = null;
const memory = new Map();

const settled = (request) =>
  new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });

const finished = (transaction) =>
  new Promise((resolve, reject) => {
    transaction.oncomplete = () => resolve();
    transaction.onabort = () => reject(transaction.error ?? new DOMException("aborted", "AbortError"));
  });

/** Opens the store; false where nothing can be kept. */
export async function open() {
  try {
    const opening = indexedDB.open("duckllm", 1);
    opening.onupgradeneeded = () => {
      opening.result.createObjectStore("heads", { keyPath: "id" });
      opening.result.createObjectStore("bodies", { keyPath: "id" });
    };
    database = await settled(opening);
    await takeUpJournal();
    return true;
  } catch {
    database = null;
    return false;
  }
}

const headOf = ({ id, title, created, updated }) => ({ id, title, created, updated });

/** All heads, the newest first. */
export async function list() {
  const heads = database
    ? await settled(database.transaction("heads").objectStore("heads").getAll())
    : [...memory.values()].map(headOf);
  return heads.sort((a, b) => b.updated - a.updated);
}

/** A conversation; undefined where there is none of that id. */
export async function load(id) {
  if (!database) return memory.get(id);
  return settled(database.transaction("bodies").objectStore("bodies").get(id));
}

/** Keeps a conversation as it is now. A QuotaExceededError says that the browser has no room for it. */
export async function save(conversation) {
  if (!database) {
    memory.set(conversation.id, conversation);
    return;
  }
  const transaction = database.transaction(["heads", "bodies"], "readwrite");
  transaction.objectStore("heads").put(headOf(conversation));
  transaction.objectStore("bodies").put(conversation);
  await finished(transaction);
  channel?.postMessage(conversation.id);
}

export async function remove(id) {
  memory.delete(id);
  if (!database) return;
  const transaction = database.transaction(["heads", "bodies"], "readwrite");
  transaction.objectStore("heads").delete(id);
  transaction.objectStore("bodies").delete(id);
  await finished(transaction);
  channel?.postMessage(id);
}

/** Calls `listener(id)` when another page of this browser has changed a conversation. */
export function onChange(listener) {
  channel?.addEventListener("message", ({ data }) => listener(data));
}

/** Keeps replies that are being written: [{conversation, message}], at once. */
export function writeJournal(entries) {
  if (entries.length) remember(JOURNAL, JSON.stringify(entries));
}

async function takeUpJournal() {
  const entries = recallJson(JOURNAL, []);
  for (const { conversation, message } of entries) {
    const kept = await load(conversation);
    if (!kept || kept.messages[message.id]?.state !== "streaming") continue;
    kept.messages[message.id] = message;
    await save(kept);
  }
  forget(JOURNAL);
}

/** How much room the page takes, or null. */
export async function usage() {
  try {
    return (await navigator.storage.estimate()).usage ?? null;
  } catch {
    return null;
  }
}
