// The cluster view: asks /cluster every second while it is seen, and shows what has changed.

import { getJson } from "./api.js";
import { Sparkline, StackedBar } from "./charts.js";
import { say } from "./dialogs.js";
import { $, h } from "./dom.js";
import { bytes, count, percent, seconds, short } from "./format.js";
import { HeatMap } from "./heatmap.js";

const EVERY_MS = 1000;
const MAX_WAIT_MS = 30_000;
const NEWS_MS = 15_000; // how long a worker's return is marked
const MAX_EVENTS = 50;
const PARTS = {
  attention_s: "attention", dense_s: "dense layers", dispatch_s: "sending to workers", wait_s: "waiting for experts",
  combine_s: "adding up", head_s: "rating all words", sampling_s: "choosing one", draft_s: "guessing",
};
const MEMORY = {
  weight_bytes: "weights", expert_bytes: "experts on this machine", process_bytes: "the processes themselves",
  cache_bytes: "KV cache", tier_bytes: "what leaves the KV cache",
  embedding_bytes: "embedding, in CPU memory", workspace_bytes: "graphs and workspaces on the GPU",
};
const STATES = { waiting: "waits for a lost one's place", new: "is asked", gone: "is gone", refused: "is not taken in" };
const COLUMNS = ["Worker", "State", "Share", "Weights", "Computes with", "Connection", "Round trip", "Compute", "Losses"];

const none = "–";
const time = (us) => (us === null || us === undefined ? none : seconds(us / 1e6));
const ofSeconds = (value) => (value === null || value === undefined ? none : seconds(value));
const list = (...parts) => parts.filter(Boolean).join(", ");
const speed = (node) => list(node.memory_bytes && bytes(node.memory_bytes), node.read_gb_per_s && `${short(node.read_gb_per_s)} GB/s`);
const words = (name) => name.replace(/_(s|bytes)$/, "").replaceAll("_", " ");

function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

export class ClusterView {
  constructor() {
    this.isShown = false;
    this.isPaused = false;
    this.timer = null;
    this.failures = 0;
    this.last = null; // the answer before, for what has changed
    this.returned = new Map(); // when a worker came back, by its number
    this.build();
    $("pause").addEventListener("click", () => this.pause(!this.isPaused));
    document.addEventListener("visibilitychange", () => this.wake());
  }

  build() {
    this.alert = h("div", { class: "cluster-alert", role: "alert", hidden: true });
    this.problem = h("p", { class: "cluster-problem", role: "status", hidden: true });
    this.rate = new Sparkline("Tokens per second");
    this.now = h("b", { class: "big" }, none);
    this.tiles = h("dl", { class: "tiles" });
    this.stepTitle = h("span", { class: "soft" });
    this.parts = new StackedBar();
    this.rows = h("tbody");
    this.noWorkers = h("p", { class: "soft", hidden: true }, "The experts are computed in the server's own process.");
    this.table = h("table", { class: "workers", role: "table" },
      h("thead", { role: "rowgroup" }, h("tr", { role: "row" }, ...COLUMNS.map((name) => h("th", { scope: "col", role: "columnheader" }, name)))),
      this.rows);
    this.rows.setAttribute("role", "rowgroup");
    this.others = h("dl", { class: "legend nodes" });
    this.othersCard = card("Other nodes", null, this.others);
    this.heat = new HeatMap();
    this.heatCard = card("Compute time by layer and worker", null, this.heat.node);
    this.memory = h("dl", { class: "legend" });
    this.events = h("ol", { class: "events" });
    this.noEvents = h("p", { class: "soft" }, "No worker was lost since this page was opened.");
    this.content = h("div", { class: "cluster-content", hidden: true },
      this.alert,
      h("div", { class: "overview" },
        h("section", { class: "card rate", "aria-label": "Tokens per second" }, h("h2", {}, "Tokens per second"), this.now, h("div", { class: "plot" }, this.rate.node)),
        h("section", { class: "card", "aria-label": "Requests and times" }, this.tiles)),
      card("A step's time", this.stepTitle, this.parts.node),
      card("Workers", null, this.noWorkers, this.table),
      this.othersCard,
      this.heatCard,
      h("div", { class: "overview even" }, card("Memory of the host", null, this.memory), card("What has happened", null, this.noEvents, this.events)),
    );
    $("cluster-body").append(this.problem, this.content);
  }

  /** Begins to ask, or rests. */
  show(isShown) {
    this.isShown = isShown;
    this.wake();
  }

  redraw() {
    this.heat.draw();
  }

  pause(isPaused) {
    this.isPaused = isPaused;
    setText($("pause"), isPaused ? "Resume" : "Pause");
    this.wake();
  }

  wake() {
    clearTimeout(this.timer);
    this.turn = null; // an answer that is under way comes too late
    if (this.isShown && !this.isPaused && document.visibilityState === "visible") this.poll();
  }

  async poll() {
    const turn = (this.turn = {});
    let data = null;
    let problem = null;
    try {
      data = await getJson("/cluster");
    } catch (error) {
      problem = error;
    }
    if (this.turn !== turn) return;
    this.failures = problem ? this.failures + 1 : 0;
    const wait = Math.min(MAX_WAIT_MS, EVERY_MS * 2 ** this.failures);
    this.timer = setTimeout(() => this.poll(), wait);
    if (problem) this.fail(problem, wait);
    else this.update(data);
  }

  fail(error, wait) {
    this.problem.hidden = false;
    const old = this.last ? " What is below is old." : "";
    if (error.status === 401) {
      setText(this.problem, `${error.message} Resume asks for it.`);
      this.pause(true);
    } else setText(this.problem, `${error.message}${old} It is asked again in ${seconds(wait / 1000)}.`);
    this.content.classList.toggle("old", this.last !== null);
    this.rate.push(null);
  }

  update(data) {
    this.problem.hidden = true;
    this.content.hidden = false;
    this.content.classList.remove("old");
    const { model, host, workers, layers, engine, requests } = data;
    const where = (host.device ?? "CPU") === "CPU" ? host.isa : `${host.device}, ${host.isa}`;
    setText($("cluster-model"), `${model.id}, ${model.weight_format}, ${count(workers.length, "worker")}, host ${where}`);
    this.showRate(data);
    this.showTiles(engine, requests, data.uptime_s);
    setText(this.stepTitle, engine.window_steps ? `${seconds(engine.step_s)}, mean of the last ${count(engine.window_steps, "step")}` : "No step yet");
    this.parts.update(Object.entries(engine.step_parts_s).map(([name, value]) => [PARTS[name] ?? words(name), value]));
    this.findEvents(workers);
    this.showWorkers(workers);
    this.showOthers(data.other_nodes ?? []);
    this.heatCard.hidden = !workers.length || !layers.length;
    if (!this.heatCard.hidden) this.heat.update(layers, workers, data.compute_us);
    showList(this.memory, Object.entries(host.memory_bytes).map(([name, value]) => [MEMORY[name] ?? words(name), bytes(value)]));
    this.last = data;
  }

  /** Tokens since the last answer by the server's own clock; a server that began anew has none. */
  showRate({ engine, uptime_s: now }) {
    const before = this.last;
    const passed = before ? now - before.uptime_s : 0;
    const made = before ? engine.num_generated_tokens - before.engine.num_generated_tokens : 0;
    if (passed <= 0 || made < 0) return;
    setText(this.now, short(made / passed));
    this.rate.push(made / passed);
  }

  showTiles(engine, requests, uptime) {
    const pair = (p50, p99) => (p50 === null ? none : `${seconds(p50)} · ${ofSeconds(p99)}`);
    showList(this.tiles, [
      ["Replies running", String(requests.running)],
      ["Waiting", String(requests.waiting)],
      ["Replies, last steps", engine.decode_tokens_per_s === null ? none : `${short(engine.decode_tokens_per_s)} tok/s`],
      ["Prompts, last steps", engine.prefill_tokens_per_s === null ? none : `${short(engine.prefill_tokens_per_s)} tok/s`],
      ["First token, median · 99 %", pair(engine.time_to_first_token_p50_s, engine.time_to_first_token_p99_s)],
      ["Between tokens, median · 99 %", pair(engine.inter_token_p50_s, engine.inter_token_p99_s)],
      ["Guesses right", engine.acceptance === null ? none : percent(engine.acceptance)],
      ["Running for", seconds(uptime)],
    ]);
  }

  findEvents(workers) {
    const before = this.last?.workers;
    if (before?.length === workers.length) {
      workers.forEach((worker, at) => {
        const old = before[at];
        const name = `Worker ${worker.index}`;
        if (worker.is_lost && !old.is_lost) this.happened(`${name} (${old.address}) is lost`, "lost");
        else if (!worker.is_lost && (old.is_lost || worker.num_losses > old.num_losses)) {
          const place = worker.address === old.address ? "" : `, now at ${worker.address}`;
          this.happened(`${name} ${old.is_lost ? "is back" : "was lost and is back"}${place}`, "back");
          this.returned.set(worker.index, performance.now());
        }
      });
    }
    const lost = workers.filter((worker) => worker.is_lost);
    this.alert.hidden = !lost.length;
    const names = lost.map(({ index, address }) => `${index} (${address})`).join(", ");
    setText(this.alert, lost.length ? `${lost.length === 1 ? "Worker" : "Workers"} ${names} lost. Replies wait until ${lost.length === 1 ? "it is" : "they are"} back or replaced.` : "");
  }

  happened(text, kind) {
    const now = new Date();
    this.noEvents.hidden = true;
    this.events.prepend(h("li", { class: kind }, h("time", { datetime: now.toISOString() }, now.toLocaleTimeString()), ` ${text}`));
    while (this.events.childElementCount > MAX_EVENTS) this.events.lastElementChild.remove();
    if (kind === "back") say(text);
  }

  showWorkers(workers) {
    this.noWorkers.hidden = workers.length > 0;
    this.table.hidden = !workers.length;
    while (this.rows.childElementCount > workers.length) this.rows.lastElementChild.remove();
    while (this.rows.childElementCount < workers.length) this.rows.append(newRow());
    const nameOf = ({ name }) => workers.filter((own) => own.name === name).length < 2 && name;
    const most = Math.max(...workers.map(({ share }) => share));
    workers.forEach((worker, at) => this.showWorker(this.rows.children[at], worker, most, nameOf(worker)));
  }

  /** Nodes that only wait. */
  showOthers(nodes) {
    this.othersCard.hidden = !nodes.length;
    showList(this.others, nodes.map((node) => [
      list(node.name, node.address),
      list(STATES[node.state], speed(node)) + (node.problem ? `: ${node.problem}` : ""),
    ]));
  }

  showWorker(row, worker, most, name) {
    const cell = (at) => row.children[at].lastElementChild;
    const isNew = performance.now() - (this.returned.get(worker.index) ?? -Infinity) < NEWS_MS;
    row.className = worker.is_lost ? "lost" : isNew ? "back" : "";
    cell(0).firstElementChild.textContent = String(worker.index);
    setText(cell(0).lastElementChild, list(name, worker.address));
    setText(cell(1), worker.is_lost ? "lost" : isNew ? "back again" : "working");
    const [bar, share] = cell(2).children;
    bar.firstElementChild.style.width = `${(100 * worker.share) / (most || 1)}%`;
    setText(share, `${Number((100 * worker.share).toFixed(1))} %, ${count(worker.stripes, "stripe")}`);
    setText(cell(3), `${worker.weights_bytes === null ? none : bytes(worker.weights_bytes)} ${worker.weight_format}`);
    setText(cell(4), list(worker.isa, worker.threads && count(worker.threads, "thread"), speed(worker)));
    setText(cell(5), worker.connection);
    setText(cell(6), time(worker.is_lost ? null : worker.round_trip_us));
    setText(cell(7), time(worker.is_lost ? null : worker.compute_us));
    setText(cell(8), String(worker.num_losses));
  }
}

function newRow() {
  const contents = COLUMNS.map((name) => {
    if (name === "Worker") return h("span", { class: "who" }, h("b"), h("span"));
    if (name === "State") return h("span", { class: "state" });
    if (name === "Share") return h("span", { class: "share" }, h("span", { class: "track", "aria-hidden": "true" }, h("span")), h("span"));
    return h("span");
  });
  return h("tr", { role: "row" },
    ...COLUMNS.map((name, at) => h(at ? "td" : "th", { role: at ? "cell" : "rowheader", scope: at ? null : "row" },
      h("span", { class: "column", "aria-hidden": "true" }, name), contents[at])));
}

function card(title, beside, ...children) {
  return h("section", { class: "card", "aria-label": title }, h("div", { class: "card-head" }, h("h2", {}, title), beside), ...children);
}

/** Terms and values; what has not changed stays untouched. */
function showList(list, entries) {
  while (list.childElementCount > entries.length) list.lastElementChild.remove();
  while (list.childElementCount < entries.length) list.append(h("div", {}, h("dt"), h("dd")));
  entries.forEach(([term, value], at) => {
    setText(list.children[at].firstElementChild, term);
    setText(list.children[at].lastElementChild, value);
  });
}
