// The heat map of layers by workers: a canvas for the eye, arrow keys and a table for everyone else.

import { say } from "./dialogs.js";
import { h } from "./dom.js";
import { seconds } from "./format.js";

const WIDE_PX = 640; // from here on layers go from left to right, else downwards
const GAP = 46; // room for the labels at the left
const TOP = 20; // and above
const SCALES = {
  light: [[229, 241, 238], [126, 194, 184], [36, 136, 126], [13, 82, 86], [24, 36, 58]],
  dark: [[27, 50, 48], [30, 104, 97], [56, 166, 148], [162, 218, 172], [252, 243, 170]],
};
const INK = { light: { text: "#5f6257", lost: "#b3261e", empty: "#e7e4db", mark: "#22261f" }, dark: { text: "#a6ada6", lost: "#ff9d90", empty: "#2a2f2c", mark: "#ffffff" } };

const darkSystem = matchMedia("(prefers-color-scheme: dark)");

function scheme() {
  const chosen = document.documentElement.dataset.scheme;
  return chosen ?? (darkSystem.matches ? "dark" : "light");
}

function colour(share, stops) {
  const place = Math.min(1, Math.max(0, share)) * (stops.length - 1);
  const at = Math.min(stops.length - 2, Math.floor(place));
  const mixed = stops[at].map((from, channel) => Math.round(from + (stops[at + 1][channel] - from) * (place - at)));
  return `rgb(${mixed.join(" ")})`;
}

/** The value that a share of the sorted numbers does not exceed. */
const quantile = (sorted, share) => sorted[Math.min(sorted.length - 1, Math.floor(share * sorted.length))];

export class HeatMap {
  constructor() {
    this.data = { layers: [], workers: [], times: [] };
    this.place = null; // {layer, worker}: numbers in the lists
    this.canvas = h("canvas", {
      tabindex: 0, role: "application", "aria-roledescription": "heat map", "aria-describedby": "heat-summary",
      "aria-label": "Compute time by layer and worker; arrow keys go from value to value",
      onkeydown: (event) => this.key(event),
      onpointermove: (event) => this.point(event),
      onpointerdown: (event) => this.point(event),
      onfocus: () => this.moveTo(this.place ?? { layer: 0, worker: 0 }, true),
    });
    this.value = h("p", { class: "heat-value" });
    this.low = h("span");
    this.high = h("span");
    this.ramp = h("canvas", { width: 120, height: 10, "aria-hidden": "true" });
    this.summary = h("p", { id: "heat-summary", class: "soft" });
    this.table = h("div", { class: "table", tabindex: 0, role: "region", "aria-label": "Compute times" });
    this.details = h("details", { ontoggle: () => this.fillTable() }, h("summary", {}, "The values as a table"), this.table);
    this.node = h("div", { class: "heat" },
      h("div", { class: "heat-head" }, this.summary, h("p", { class: "ramp" }, this.low, this.ramp, this.high)),
      this.canvas, this.value, this.details);
    new ResizeObserver(() => this.draw()).observe(this.node);
    darkSystem.addEventListener("change", () => this.draw());
  }

  /** `times`: for each layer, microseconds of each worker or null. */
  update(layers, workers, times) {
    this.data = { layers, workers, times };
    const known = times.flat().filter((time) => time !== null).sort((a, b) => a - b);
    this.range = known.length ? [quantile(known, 0.01), quantile(known, 0.99)] : null;
    const [low, high] = this.range ?? [0, 0]; // single values beyond have the colours of the ends
    this.low.textContent = known.length ? `${known[0] < low ? "≤ " : ""}${seconds(low / 1e6)}` : "";
    this.high.textContent = known.length ? `${known.at(-1) > high ? "≥ " : ""}${seconds(high / 1e6)}` : "";
    const summary = known.length ? this.summarise(known) : "Nothing was computed yet.";
    if (this.summary.textContent !== summary) this.summary.textContent = summary;
    if (this.place && (this.place.layer >= layers.length || this.place.worker >= workers.length)) this.place = null;
    this.value.textContent = this.place ? this.describe(this.place) : "Point at a value, or go to it with the arrow keys.";
    this.draw();
  }

  summarise(known) {
    const { layers, workers, times } = this.data;
    let slowest = { time: -1 };
    times.forEach((row, layer) => row.forEach((time, worker) => {
      if (time !== null && time > slowest.time) slowest = { time, layer, worker };
    }));
    const where = `layer ${layers[slowest.layer]} on worker ${workers[slowest.worker].index}`;
    return `Median ${seconds(quantile(known, 0.5) / 1e6)}; slowest ${seconds(slowest.time / 1e6)}, ${where}.`;
  }

  describe({ layer, worker }) {
    const { layers, workers, times } = this.data;
    const time = times[layer]?.[worker] ?? null;
    const { index, address, is_lost: isLost } = workers[worker];
    const where = `Layer ${layers[layer]}, worker ${index} (${address})`;
    if (isLost) return `${where}: lost`;
    if (time === null) return `${where}: not measured`;
    const others = times[layer].filter((value) => value !== null).sort((a, b) => a - b);
    const comparison = others.length > 1 ? `; this layer's median ${seconds(quantile(others, 0.5) / 1e6)}` : "";
    return `${where}: ${seconds(time / 1e6)}${comparison}`;
  }

  /** Where cells lie: {isWide, across, down, width, height}, the last two of a cell, in pixels. */
  get grid() {
    const isWide = this.node.clientWidth >= WIDE_PX;
    const { layers, workers } = this.data;
    const [across, down] = isWide ? [layers.length, workers.length] : [workers.length, layers.length];
    const room = this.node.clientWidth - GAP;
    const width = Math.max(3, Math.min(isWide ? 40 : 64, room / Math.max(1, across)));
    return { isWide, across, down, width, height: down > 40 ? 9 : down > 16 ? 14 : 24 };
  }

  draw() {
    const { canvas } = this;
    const { isWide, across, down, width, height } = this.grid;
    if (!across || !down || !this.node.clientWidth) return;
    const ratio = window.devicePixelRatio || 1;
    const size = [GAP + across * width, TOP + down * height];
    [canvas.width, canvas.height] = size.map((length) => Math.ceil(length * ratio));
    canvas.style.width = `${size[0]}px`;
    canvas.style.height = `${size[1]}px`;
    const context = canvas.getContext("2d");
    context.scale(ratio, ratio);
    const ink = INK[scheme()];
    const { times, workers } = this.data;
    const gap = Math.min(width, height) >= 7 ? 1 : 0.5;
    for (let row = 0; row < down; row += 1) {
      for (let column = 0; column < across; column += 1) {
        const [layer, worker] = isWide ? [column, row] : [row, column];
        const time = times[layer]?.[worker] ?? null;
        const box = [GAP + column * width, TOP + row * height, width - gap, height - gap];
        if (time === null || workers[worker].is_lost) {
          context.fillStyle = ink.empty;
          context.fillRect(...box);
          if (workers[worker].is_lost) cross(context, box, ink.lost);
        } else {
          context.fillStyle = this.colourOf(time);
          context.fillRect(...box);
        }
      }
    }
    this.drawLabels(context, ink);
    this.drawRamp();
    if (this.place) {
      const [column, row] = isWide ? [this.place.layer, this.place.worker] : [this.place.worker, this.place.layer];
      context.strokeStyle = ink.mark;
      context.lineWidth = 2;
      context.strokeRect(GAP + column * width - 1, TOP + row * height - 1, width + 2 - gap, height + 2 - gap);
    }
  }

  colourOf(time) {
    const [low, high] = this.range;
    return colour(high > low ? (time - low) / (high - low) : 0.5, SCALES[scheme()]);
  }

  drawLabels(context, ink) {
    const { isWide, across, down, width, height } = this.grid;
    const { layers, workers } = this.data;
    const ofLayer = (at) => String(layers[at]);
    const ofWorker = (at) => `${isWide ? "w " : ""}${workers[at].index}`;
    const [above, left] = isWide ? [ofLayer, ofWorker] : [ofWorker, ofLayer];
    context.font = `11px ${getComputedStyle(this.node).fontFamily}`;
    context.fillStyle = ink.text;
    context.textBaseline = "middle";
    context.textAlign = "center";
    const each = step(24 / width);
    for (let at = 0; at < across; at += each) context.fillText(above(at), GAP + (at + 0.5) * width, TOP / 2);
    context.textAlign = "right";
    const eachRow = step(13 / height);
    for (let at = 0; at < down; at += eachRow) context.fillText(left(at), GAP - 8, TOP + (at + 0.5) * height);
    context.textAlign = "left";
    context.fillText(isWide ? "layer" : "worker", 0, TOP / 2);
  }

  drawRamp() {
    const context = this.ramp.getContext("2d");
    for (let x = 0; x < this.ramp.width; x += 1) {
      context.fillStyle = colour(x / (this.ramp.width - 1), SCALES[scheme()]);
      context.fillRect(x, 0, 1, this.ramp.height);
    }
  }

  point(event) {
    const { isWide, across, down, width, height } = this.grid;
    const column = Math.floor((event.offsetX - GAP) / width);
    const row = Math.floor((event.offsetY - TOP) / height);
    if (column < 0 || row < 0 || column >= across || row >= down) return;
    this.moveTo(isWide ? { layer: column, worker: row } : { layer: row, worker: column }, false);
  }

  key(event) {
    const { isWide } = this.grid;
    const { layers, workers } = this.data;
    const [dx, dy] = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1], Home: [-1e6, 0], End: [1e6, 0] }[event.key] ?? [0, 0];
    if ((!dx && !dy) || !layers.length || event.altKey || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    const within = (value, length) => Math.min(length - 1, Math.max(0, value));
    const { layer, worker } = this.place ?? { layer: 0, worker: 0 };
    const [byLayer, byWorker] = isWide ? [dx, dy] : [dy, dx];
    this.moveTo({ layer: within(layer + byLayer, layers.length), worker: within(worker + byWorker, workers.length) }, true);
  }

  moveTo(place, aloud) {
    if (!this.data.layers.length) return;
    this.place = place;
    this.value.textContent = this.describe(place);
    this.draw();
    clearTimeout(this.saying);
    if (aloud) this.saying = setTimeout(() => say(this.describe(place)), 200);
  }

  /** The table is of the moment when it is opened. */
  fillTable() {
    if (!this.details.open) return;
    const { layers, workers, times } = this.data;
    const cell = (time) => h("td", { class: "right" }, time === null ? "–" : String(Math.round(time)));
    this.table.replaceChildren(
      h("table", {},
        h("caption", {}, `Microseconds at ${new Date().toLocaleTimeString()}`),
        h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "Layer"), ...workers.map(({ index }) => h("th", { scope: "col", class: "right" }, `worker ${index}`)))),
        h("tbody", {}, ...layers.map((layer, at) => h("tr", {}, h("th", { scope: "row" }, String(layer)), ...times[at].map(cell))))),
    );
  }
}

/** How many labels are passed over: 1, 2, 5, 10, 20 ... */
function step(least) {
  for (const each of [1, 2, 5, 10, 20, 50, 100]) if (each >= least) return each;
  return 200;
}

function cross(context, [x, y, width, height], ink) {
  context.strokeStyle = ink;
  context.lineWidth = 1;
  context.beginPath();
  context.moveTo(x, y + height);
  context.lineTo(x + width, y);
  context.stroke();
}
