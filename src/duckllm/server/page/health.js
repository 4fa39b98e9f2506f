// Whether the server can answer: asked while it cannot, at rest while it can.

const LOADING_MS = 700;
const MAX_WAIT_MS = 10_000;

export class Health extends EventTarget {
  constructor() {
    super();
    this.state = { status: "unknown" };
    this.running = false;
  }

  get isReady() {
    return this.state.status === "ok";
  }

  /** Asks until the server is ready; "change" events say what it is. */
  async watch() {
    if (this.running) return;
    this.running = true;
    for (let wait = 500; ; ) {
      const state = await ask();
      this.set(state);
      if (state.status === "ok") break;
      wait = state.status === "loading" ? LOADING_MS : Math.min(MAX_WAIT_MS, wait * 1.7);
      await new Promise((resolve) => setTimeout(resolve, wait));
    }
    this.running = false;
  }

  /** Resolves when the server is ready. */
  ready(signal) {
    if (this.isReady) return Promise.resolve();
    this.watch();
    return new Promise((resolve, reject) => {
      const end = (settle, value) => {
        this.removeEventListener("change", changed);
        signal?.removeEventListener("abort", aborted);
        settle(value);
      };
      const changed = () => this.isReady && end(resolve);
      const aborted = () => end(reject, signal.reason);
      this.addEventListener("change", changed);
      signal?.addEventListener("abort", aborted);
    });
  }

  /** Asks once more, and resolves when the answer is there. */
  settled() {
    this.watch();
    return new Promise((resolve) => this.addEventListener("change", resolve, { once: true }));
  }

  /** A request found the server gone or loading again. */
  lost() {
    this.set({ status: "unreachable" });
    this.watch();
  }

  set(state) {
    this.state = state;
    this.dispatchEvent(new Event("change"));
  }
}

async function ask() {
  try {
    const response = await fetch("/health", { cache: "no-store", redirect: "error" });
    if (response.ok) return { status: "ok" };
    const said = await response.json();
    if (response.status === 503 && said.status === "loading") {
      return { status: "loading", stage: String(said.stage ?? ""), progress: said.progress ?? null };
    }
    return { status: "unreachable" };
  } catch {
    return { status: "unreachable" };
  }
}
