// The server's API: requests with the key, streams of events, errors in words.

import { remember, recall, forget } from "./local.js";

/** What went wrong, as a sentence. `status` is 0 where there was no answer. */
export class ApiError extends Error {
  constructor(status, message, code = null) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

export const key = {
  get: () => recall("key"),
  set: (value) => remember("key", value),
  forget: () => forget("key"),
};

let askForKey = async () => null;
let asking = null;

/** `ask(wasRefused)` is called where the server wants a key; it resolves to one, or to null. */
export function onKeyNeeded(ask) {
  askForKey = ask;
}

/** The answer to a request. Where the server wants a key, the user is asked, and it is sent again. */
export async function request(path, { body, signal } = {}) {
  for (;;) {
    const used = key.get();
    const response = await send(path, body, signal, used);
    if (response.ok) return response;
    const error = await errorOf(response);
    if (response.status !== 401) throw error;
    if (key.get() === used) {
      asking ??= askForKey(used !== null).finally(() => (asking = null));
      const given = await asking;
      if (given === null) throw error;
      key.set(given);
    }
    signal?.throwIfAborted();
  }
}

async function send(path, body, signal, used) {
  const headers = {};
  if (used) headers.authorization = `Bearer ${used}`;
  if (body !== undefined) headers["content-type"] = "application/json";
  try {
    return await fetch(path, {
      method: body === undefined ? "GET" : "POST",
      headers,
      body: body === undefined ? undefined : JSON.stringify(body),
      signal,
      cache: "no-store",
      redirect: "error",
    });
  } catch (error) {
    if (signal?.aborted) throw error;
    throw new ApiError(0, "The server does not answer. It may have been stopped, or the network is down.");
  }
}

export async function getJson(path, signal) {
  return (await request(path, { signal })).json();
}

async function errorOf(response) {
  let detail = null;
  try {
    detail = (await response.json()).error ?? null;
  } catch {
    // No JSON: the status has to do.
  }
  return inWords(response.status, detail);
}

/** An error of the API as one for people. */
export function inWords(status, detail) {
  const code = detail?.code ?? detail?.type ?? null;
  if (code === "exceed_context_size_error" || detail?.type === "exceed_context_size_error") {
    const sizes =
      detail.n_prompt_tokens && detail.n_ctx
        ? `: it has ${detail.n_prompt_tokens.toLocaleString("en")} tokens of ${detail.n_ctx.toLocaleString("en")}`
        : "";
    return new ApiError(
      status,
      `This conversation is too long for the model${sizes}. Begin a new one, or edit an earlier message.`,
      "exceed_context_size_error",
    );
  }
  const said = typeof detail?.message === "string" && detail.message ? detail.message : null;
  if (status === 401) return new ApiError(status, said ?? "The server wants an API key.", code);
  if (status === 503) return new ApiError(status, said ?? "The server is not ready.", code);
  return new ApiError(status, said ?? `The server answered with an error (${status}).`, code);
}

/** The data of each server-sent event of a response. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let data = [];
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const raw of lines) {
        const line = raw.endsWith("\r") ? raw.slice(0, -1) : raw;
        if (line === "") {
          if (data.length) yield data.join("\n");
          data = [];
        } else if (line.startsWith("data:")) data.push(line.slice(line[5] === " " ? 6 : 5));
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
