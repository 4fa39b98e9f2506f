// Small values in the browser's local storage: the key, the colours, the last settings, a draft.

const PREFIX = "duckllm.";
const memory = new Map(); // where the browser forbids storage, for as long as the page is open

export function recall(name) {
  try {
    return localStorage.getItem(PREFIX + name);
  } catch {
    return memory.get(name) ?? null;
  }
}

export function remember(name, value) {
  try {
    localStorage.setItem(PREFIX + name, value);
  } catch {
    memory.set(name, value);
  }
}

export function forget(name) {
  memory.delete(name);
  try {
    localStorage.removeItem(PREFIX + name);
  } catch {
    // Nothing was kept.
  }
}

/** A value kept as JSON; `otherwise` where there is none. */
export function recallJson(name, otherwise) {
  try {
    return JSON.parse(recall(name)) ?? otherwise;
  } catch {
    return otherwise;
  }
}
