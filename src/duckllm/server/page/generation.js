// One reply as it is written: the request, its stream, its facts. It changes its message and tells who listens;
// it knows no document.

import { ApiError, events, inWords, request } from "./api.js";
import { history } from "./conversation.js";
import { requestFields, systemMessages } from "./settings.js";

export class Generation extends EventTarget {
  /** A reply to what stands above `message`, which is empty and the conversation's. */
  constructor(conversation, message, { model, health }) {
    super();
    this.conversation = conversation;
    this.message = message;
    this.model = model;
    this.health = health;
    this.abort = new AbortController();
    this.firstAt = null;
  }

  stop() {
    this.abort.abort();
  }

  /** Writes the reply; "change" events come as it grows, and a last one when its state is settled. */
  async run() {
    const { message, abort } = this;
    try {
      await this.stream();
    } catch (error) {
      if (abort.signal.aborted) message.state = "stopped";
      else {
        message.state = error instanceof ApiError && error.status !== 0 ? "error" : "broken";
        message.error = error instanceof ApiError ? error.message : "The connection broke off.";
        if (error instanceof ApiError && error.status === 0) this.health.lost();
      }
    }
    this.endThinking();
    this.dispatchEvent(new Event("change"));
  }

  async stream() {
    const { signal } = this.abort;
    const response = await this.begin(signal);
    const { message } = this;
    let finish = null;
    for await (const data of events(response)) {
      if (data === "[DONE]") break;
      const chunk = JSON.parse(data);
      if (chunk.error) throw inWords(Number(chunk.error.code) || 500, chunk.error);
      const choice = chunk.choices?.[0];
      if (choice?.delta) this.add(choice.delta);
      finish = choice?.finish_reason ?? finish;
      this.measure(chunk);
      this.dispatchEvent(new Event("change"));
    }
    signal.throwIfAborted();
    if (finish === null) throw new ApiError(0, "The connection broke off before the reply was whole.");
    message.state = finish === "length" ? "length" : finish === "error" ? "error" : "done";
    if (finish === "error") message.error = "The reply could not go on.";
  }

  /** Sends the request as soon as the server is ready; where it began to load anew, again. */
  async begin(signal) {
    const { conversation, message } = this;
    for (;;) {
      await this.health.ready(signal);
      const body = {
        model: this.model(),
        messages: [...systemMessages(conversation.settings), ...history(conversation, message.parent)],
        stream: true,
        stream_options: { include_usage: true },
        ...requestFields(conversation.settings),
      };
      this.sentAt = performance.now();
      try {
        return await request("/v1/chat/completions", { body, signal });
      } catch (error) {
        if (!(error instanceof ApiError) || error.status !== 503) throw error;
        await this.health.settled();
        if (this.health.isReady) throw error; // it is not loading: a worker is lost, or the queue is full
      }
    }
  }

  add({ content, reasoning_content: reasoning }) {
    const { message } = this;
    if ((content || reasoning) && this.firstAt === null) {
      this.firstAt = performance.now();
      message.facts = { first_token_s: (this.firstAt - this.sentAt) / 1000 };
    }
    if (reasoning) message.reasoning += reasoning;
    if (content) {
      this.endThinking();
      message.content += content;
    }
  }

  endThinking() {
    const { message } = this;
    if (message.reasoning && message.thought_s === null) {
      message.thought_s = (performance.now() - this.firstAt) / 1000;
    }
  }

  /** The facts of a reply, from the usage and the times that its last chunks have. */
  measure({ usage, timings }) {
    const facts = {};
    if (usage) {
      facts.prompt_tokens = usage.prompt_tokens;
      facts.tokens = usage.completion_tokens;
      facts.cached_tokens = usage.prompt_tokens_details?.cached_tokens;
      facts.reasoning_tokens = usage.completion_tokens_details?.reasoning_tokens;
    }
    if (timings) {
      facts.tokens_per_s = timings.predicted_per_second;
      facts.draft_tokens = timings.draft_n;
      facts.accepted_tokens = timings.draft_n_accepted;
    }
    for (const [name, value] of Object.entries(facts)) {
      if (Number.isFinite(value)) this.message.facts = { ...this.message.facts, [name]: value };
    }
  }
}
