// Small pictures of numbers: a line over time, a bar in parts. Each says in words what it shows.

import { h, s } from "./dom.js";
import { percent, seconds, short } from "./format.js";

const SAMPLES = 60;
const HEIGHT = 40;

/** A line of the last samples. */
export class Sparkline {
  constructor(label) {
    this.label = label;
    this.samples = [];
    this.area = s("path", { class: "area" });
    this.line = s("path", { class: "line", "vector-effect": "non-scaling-stroke" });
    this.node = s("svg", { class: "sparkline", role: "img", viewBox: `0 0 ${SAMPLES - 1} ${HEIGHT}`, preserveAspectRatio: "none" }, this.area, this.line);
  }

  /** Adds a number; null leaves a gap. */
  push(value) {
    this.samples.push(value);
    if (this.samples.length > SAMPLES) this.samples.shift();
    const highest = Math.max(1e-9, ...this.samples.map((sample) => sample ?? 0));
    const first = SAMPLES - this.samples.length;
    const y = (sample) => (HEIGHT - 2 - (sample / highest) * (HEIGHT - 6)).toFixed(1);
    let line = "";
    let area = "";
    let start = null;
    this.samples.forEach((sample, at) => {
      const x = first + at;
      if (sample !== null) {
        if (start === null) area += `M${x} ${HEIGHT}`;
        line += `${start === null ? "M" : "L"}${x} ${y(sample)}`;
        area += `L${x} ${y(sample)}`;
        start ??= x;
      }
      if (start !== null && (sample === null || at === this.samples.length - 1)) {
        area += `L${sample === null ? x - 1 : x} ${HEIGHT}Z`;
        start = null;
      }
    });
    this.line.setAttribute("d", line);
    this.area.setAttribute("d", area);
    const known = this.samples.filter((sample) => sample !== null);
    const said = known.length ? `now ${short(known.at(-1))}, at most ${short(Math.max(...known))}` : "nothing yet";
    this.node.setAttribute("aria-label", `${this.label} of the last minute that the page looked: ${said}`);
  }
}

/** A whole and its parts, with a legend that has the numbers. */
export class StackedBar {
  constructor() {
    this.bar = h("div", { class: "stacked", "aria-hidden": "true" });
    this.legend = h("dl", { class: "legend" });
    this.node = h("div", {}, this.bar, this.legend);
    this.names = "";
  }

  /** `parts`: [name, seconds] each. */
  update(parts) {
    const whole = parts.reduce((sum, [, value]) => sum + value, 0);
    const names = parts.map(([name]) => name).join();
    if (names !== this.names) {
      this.names = names;
      this.bar.replaceChildren(...parts.map((_, at) => h("span", { class: `part-${at % 8}` })));
      this.legend.replaceChildren(
        ...parts.map(([name], at) => h("div", {}, h("dt", {}, h("i", { class: `part-${at % 8}`, "aria-hidden": "true" }), name), h("dd"))),
      );
    }
    parts.forEach(([, value], at) => {
      const share = whole > 0 ? value / whole : 0;
      this.bar.children[at].style.flexGrow = String(share);
      this.legend.children[at].lastElementChild.textContent = `${seconds(value)} · ${percent(share)}`;
    });
  }
}
