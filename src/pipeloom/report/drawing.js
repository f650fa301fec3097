"use strict";
// What pages share: elements, axes, the color mode, and the timelines of a step.

const root = document.documentElement;

// A color of the style sheet, for the canvas; it is another one in the dark, and on paper.
function color(name) {
  return getComputedStyle(root).getPropertyValue("--" + name).trim();
}

// ---------------------------------------------------------------- light or dark

const systemDark = matchMedia("(prefers-color-scheme: dark)");

// The reader's choice, kept by the browser where it keeps anything for a file.
function chosenMode(mode) {
  try {
    if (mode !== undefined) localStorage.setItem("pipeloom-mode", mode);
    return localStorage.getItem("pipeloom-mode");
  } catch {
    return mode ?? null;
  }
}

// Pictures on a canvas keep their pixels: they listen for "modechange" and are drawn again.
function setMode(mode) {
  if (root.dataset.mode === mode) return;
  root.dataset.mode = mode;
  window.dispatchEvent(new Event("modechange"));
}

function isDark() {
  return root.dataset.mode === "dark" && !root.hasAttribute("data-printing");
}

// Sets the mode of the page, the system's unless the reader chose one, and returns a button for the other one.
function modeSwitch() {
  const node = element("button", { type: "button", class: "mode" });
  const show = (mode) => {
    setMode(mode);
    node.textContent = mode === "dark" ? "Light mode" : "Dark mode";
  };
  let chosen = chosenMode();
  const system = () => (systemDark.matches ? "dark" : "light");
  show(chosen === "dark" || chosen === "light" ? chosen : system());
  node.addEventListener("click", () => {
    chosen = root.dataset.mode === "dark" ? "light" : "dark";
    chosenMode(chosen);
    show(chosen);
  });
  systemDark.addEventListener("change", () => chosen || show(system()));
  return node;
}

for (const name of ["beforeprint", "afterprint"]) {
  window.addEventListener(name, () => {
    root.toggleAttribute("data-printing", name === "beforeprint"); // paper is light
    window.dispatchEvent(new Event("modechange"));
  });
}

// ---------------------------------------------------------------- elements

// The state is an attribute, so that a test of the page in a browser sees a failure.
window.addEventListener("error", (event) => {
  root.dataset.state = "failed: " + event.message;
});

// An HTML element; strings become text, so nothing that a run wrote is read as markup.
function element(name, attributes = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}

function svg(name, attributes = {}, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}

function section(title, note, ...children) {
  const node = element("section", {}, element("h2", {}, title));
  if (note) node.append(element("p", { class: "note" }, note));
  node.append(...children);
  return node;
}

// Items are {name, style} with classes of the style sheet, or {name, fills} with the colors of a light and a dark page.
function keys(items) {
  const list = element("div", { class: "legend" });
  for (const { name, style, fills } of items) {
    const sign = element("i", { class: style || "tone" });
    fills?.forEach((fill, number) => sign.style.setProperty(number ? "--on-dark" : "--on-light", fill));
    list.append(element("span", {}, sign, name));
  }
  return list;
}

// Round values that divide a range into at most `most` parts.
function ticks(low, high, most) {
  const rough = (high - low) / most;
  const power = 10 ** Math.floor(Math.log10(rough));
  // 0.999: a range that is a round number up to rounding keeps its own step.
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough * 0.999) || rough;
  const found = [];
  // + 0 turns -0 into 0, which would be written as "-0".
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high + step * 1e-9; k += 1) found.push(k * step + 0);
  return { values: found, digits: Math.max(0, -Math.floor(Math.log10(step) + 1e-9)) };
}

function grouped(value, digits) {
  return value.toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits });
}

// ---------------------------------------------------------------- timelines

const MARGIN = 12;
const AXIS = 26;
const TITLE = 26;
let numTimelines = 0;

// The timelines of `data` (timeline.py) on one time axis. `box` and `toolbar()` go into the page, then `resize()`.
class Timeline {
  constructor(data) {
    this.withLanes = false;
    this.suffix = numTimelines || "";
    numTimelines += 1;
    this.canvas = element("canvas", {
      tabindex: "0",
      role: "application",
      "aria-roledescription": "timelines",
      "aria-describedby": "keys" + this.suffix,
    });
    this.tip = element("div", { class: "tip" });
    this.range = element("span", { class: "view", role: "status" });
    this.box = element("div", { class: "timeline" }, this.canvas, this.tip);
    this.take(data);
    this.listen();
  }

  take(data) {
    this.data = data;
    this.view = [0, data.end];
    this.hovered = null;
    this.tip.style.display = "none";
    const panels = data.panels.map((panel) => `${panel.title}: ${panel.makespan}`);
    this.canvas.setAttribute("aria-label", `timelines of the step, ${panels.join("; ")}`);
    this.where = new Map(); // box by panel and action
    data.panels.forEach((panel, number) => {
      for (const rank of panel.ranks) for (const lane of rank.lanes) for (const box of lane.boxes) {
        this.where.set(number + ":" + this.name(box) + ":" + rank.label, box);
      }
    });
  }

  // Shows other data; a part of the step that is in view stays in view.
  update(data) {
    const [from, to] = this.view.map((time) => time / this.data.end);
    this.take(data);
    this.view = [from * data.end, to * data.end];
    this.resize();
  }

  // A time as text; `digits` behind the point.
  text(time, digits) {
    return grouped(time * this.data.scale, digits);
  }

  get unit() {
    return this.data.unit ? " " + this.data.unit : "";
  }

  name([kind, stage, microbatch, slice]) {
    return stage + this.data.kinds[kind][0] + (microbatch === null ? "" : microbatch) + (slice ? "." + slice : "");
  }

  toolbar() {
    const button = (text, title, act) => {
      const node = element("button", { type: "button", title, "aria-label": title }, text);
      node.addEventListener("click", act);
      return node;
    };
    const lanes = element("input", { type: "checkbox", id: "lanes" + this.suffix });
    lanes.addEventListener("change", () => {
      this.withLanes = lanes.checked;
      this.resize();
    });
    return element(
      "div",
      { class: "toolbar" },
      button("+", "Zoom in", () => this.zoom(0.5)),
      button("\u2212", "Zoom out", () => this.zoom(2)),
      button("whole step", "Show the whole step", () => this.show(0, this.data.end)),
      element("label", {}, lanes, "communication lanes"),
      element(
        "span",
        { class: "hint", id: "keys" + this.suffix },
        "Drag or arrow keys to move, Ctrl and wheel or + and \u2212 to zoom, 0 for the whole step; hover an action to see it in every timeline.",
      ),
      this.range,
    );
  }

  // Rows from top to bottom: {panel, rank, lane, top, height}; and the panels' titles.
  layOut() {
    this.rows = [];
    this.titles = [];
    let top = 0;
    this.data.panels.forEach((panel, number) => {
      this.titles.push({ ...panel, top: top + TITLE - 9 });
      top += TITLE;
      for (const rank of panel.ranks) {
        const lanes = this.withLanes ? rank.lanes : rank.lanes.filter((lane) => lane.label === "compute");
        if (lanes.length === 0) top += 38;
        for (const lane of lanes) {
          const height = lane.label === "compute" ? 34 : 12;
          this.rows.push({ panel: number, rank: rank.label, lane, top, height });
          top += height + (lane.label === "compute" ? 4 : 2);
        }
        if (this.withLanes) top += 8;
      }
      top += 8;
    });
    this.bottom = top - 6;
    return top + AXIS;
  }

  resize() {
    const height = this.layOut();
    this.width = Math.max(this.box.clientWidth, 280);
    this.gutter = this.width < 600 ? 74 : 96;
    // At least two pixels for each unit: a printed or zoomed canvas is not drawn again.
    this.scale = Math.max(window.devicePixelRatio || 1, 2);
    this.canvas.width = Math.round(this.width * this.scale);
    this.canvas.height = Math.round(height * this.scale);
    this.canvas.style.width = this.width + "px";
    this.canvas.style.height = height + "px";
    this.draw();
  }

  x(time) {
    return this.gutter + ((time - this.view[0]) / (this.view[1] - this.view[0])) * (this.width - this.gutter - MARGIN);
  }

  time(x) {
    return this.view[0] + ((x - this.gutter) / (this.width - this.gutter - MARGIN)) * (this.view[1] - this.view[0]);
  }

  draw() {
    const pen = this.canvas.getContext("2d");
    pen.setTransform(this.scale, 0, 0, this.scale, 0, 0);
    pen.clearRect(0, 0, this.width, this.canvas.height / this.scale);
    pen.textBaseline = "middle";
    this.drawFrame(pen);
    pen.save();
    pen.beginPath();
    // Boxes that begin left of the view must not cover the names of the ranks.
    pen.rect(this.gutter, 0, this.width - this.gutter - MARGIN, this.bottom + AXIS);
    pen.clip();
    let drawn = 0;
    for (const row of this.rows) drawn += this.drawRow(pen, row);
    this.drawHover(pen);
    pen.restore();
    this.canvas.dataset.boxes = drawn;
    const digits = (this.view[1] - this.view[0]) * this.data.scale < 2 ? 3 : 1;
    const [from, to] = this.view.map((time) => this.text(time, digits));
    this.range.textContent = `${from} to ${to}${this.unit}`;
  }

  drawFrame(pen) {
    pen.font = "600 13px system-ui, sans-serif";
    for (const { title, name, makespan, top } of this.titles) {
      pen.font = "600 13px system-ui, sans-serif";
      pen.fillStyle = color("ink");
      pen.textAlign = "left";
      const room = this.width - this.gutter - MARGIN - 80;
      const text = pen.measureText(title).width < room ? title : name;
      pen.fillText(text, this.gutter, top);
      const width = pen.measureText(text).width;
      pen.fillStyle = color("muted");
      pen.font = "13px system-ui, sans-serif";
      pen.fillText(makespan, this.gutter + width + 10, top);
    }
    pen.textAlign = "right";
    for (const row of this.rows) {
      const isCompute = row.lane.label === "compute";
      pen.fillStyle = color(isCompute ? "row" : "lane");
      pen.fillRect(this.gutter, row.top, this.width - this.gutter - MARGIN, row.height);
      pen.fillStyle = color(isCompute ? "ink" : "muted");
      pen.font = (isCompute ? "12.5px" : "10px") + " system-ui, sans-serif";
      pen.fillText(isCompute ? row.rank : row.lane.label, this.gutter - 10, row.top + row.height / 2 + 0.5);
    }
    this.drawAxis(pen);
  }

  drawAxis(pen) {
    const { scale } = this.data;
    const { values, digits } = ticks(this.view[0] * scale, this.view[1] * scale, Math.min(12, this.width / 80));
    pen.font = "11px system-ui, sans-serif";
    pen.textAlign = "center";
    for (const value of values) {
      const x = Math.round(this.x(value / scale)) + 0.5;
      pen.fillStyle = color("tick");
      for (const row of this.rows) pen.fillRect(x - 0.5, row.top, 1, row.height);
      pen.fillStyle = color("muted");
      pen.fillRect(x - 0.5, this.bottom, 1, 4);
      const text = grouped(value, digits);
      // At the right edge the middle of a number would leave the canvas.
      pen.fillText(text, Math.min(x, this.width - 1 - pen.measureText(text).width / 2), this.bottom + 14);
    }
    pen.fillStyle = color("axis");
    pen.fillRect(this.gutter, this.bottom, this.width - this.gutter - MARGIN, 1);
    pen.textAlign = "right";
    pen.fillStyle = color("muted");
    pen.fillText(this.data.unit ? `time (${this.data.unit})` : "time", this.gutter - 10, this.bottom + 14);
  }

  // Number of compute boxes that are in view.
  drawRow(pen, row) {
    const isCompute = row.lane.label === "compute";
    let drawn = 0;
    pen.font = "11px system-ui, sans-serif";
    pen.textAlign = "center";
    const first = isDark() ? 2 : 0;
    for (const box of row.lane.boxes) {
      const [kind, , microbatch, slice, start, duration, tone] = box;
      if (start + duration < this.view[0] || start > this.view[1]) continue;
      const left = this.x(start);
      // Thinner boxes would vanish, and a short action is what somebody looks for.
      const width = Math.max(this.x(start + duration) - left, 0.75);
      const [fill, ink] = this.data.palette[tone].slice(first);
      pen.fillStyle = fill;
      pen.fillRect(left, row.top, width > 3 ? width - 0.7 : width, row.height);
      drawn += isCompute;
      // The number stands in the middle of what is seen of a box.
      const from = Math.max(left, this.gutter);
      const seen = Math.min(left + width, this.width - MARGIN) - from;
      if (!isCompute || seen < 9 || microbatch === null) continue;
      const number = microbatch + (slice ? "." + slice : "");
      const texts = [this.name(box), this.data.kinds[kind][0] + number, number];
      const text = texts.find((one) => seen > 3 + 6.6 * one.length);
      if (text !== undefined) {
        pen.fillStyle = ink;
        pen.fillText(text, from + seen / 2, row.top + row.height / 2 + 0.5);
      }
    }
    return drawn;
  }

  drawHover(pen) {
    if (this.hovered === null) return;
    const name = this.name(this.hovered.box);
    pen.strokeStyle = color("ink");
    pen.lineWidth = 2;
    for (const row of this.rows) {
      if (row.rank !== this.hovered.row.rank || row.lane.label !== this.hovered.row.lane.label) continue;
      const box = this.where.get(row.panel + ":" + name + ":" + row.rank);
      if (box === undefined) continue;
      const left = this.x(box[4]);
      pen.strokeRect(left, row.top, Math.max(this.x(box[4] + box[5]) - left, 1), row.height);
    }
  }

  find(x, y) {
    const row = this.rows.find((one) => y >= one.top - 1 && y <= one.top + one.height + 1);
    if (row === undefined || x < this.gutter) return null;
    const time = this.time(x);
    // Two pixels around a box belong to it, or thin ones could not be hit.
    const slack = this.time(x + 2) - time;
    let best = null;
    for (const box of row.lane.boxes) {
      // Boxes are in the order of their times (timeline.py).
      if (box[4] > time + slack) break;
      if (box[4] - slack <= time && time <= box[4] + box[5] + slack) best = box;
      if (best !== null && box[4] <= time && time < box[4] + box[5]) break;
    }
    return best && { row, box: best };
  }

  hover(event) {
    const found = this.find(event.offsetX, event.offsetY);
    const same = (found && found.box) === (this.hovered && this.hovered.box);
    this.hovered = found;
    if (!same) this.draw();
    this.tip.style.display = found ? "block" : "none";
    if (!found) return;
    this.tip.replaceChildren(...this.describe(found));
    const left = Math.min(event.offsetX + 14, this.width - this.tip.offsetWidth - 4);
    this.tip.style.left = left + "px";
    this.tip.style.top = event.offsetY + 18 + "px";
  }

  describe({ row, box }) {
    const [kind, stage, microbatch, slice] = box;
    const lines = [element("b", {}, this.name(box)), ` \u2002${this.data.kinds[kind][1]}, stage ${stage}`];
    if (microbatch !== null) lines.push(`, micro-batch ${microbatch}` + (slice ? `, slice ${slice}` : ""));
    lines.push(element("br"), element("span", {}, `${row.rank}, ${row.lane.label}`));
    this.data.panels.forEach((panel, number) => {
      const one = this.where.get(number + ":" + this.name(box) + ":" + row.rank);
      if (one === undefined) return;
      const [start, duration] = [one[4], one[5]].map((time) => this.text(time, 3) + this.unit);
      lines.push(element("br"), element("span", {}, panel.name + " "), `starts at ${start}, takes ${duration}`);
    });
    return lines;
  }

  show(from, to) {
    const end = this.data.end;
    // Not closer than a thousandth of the unit: times are whole nanoseconds.
    const width = Math.min(Math.max(to - from, 1e-3 / this.data.scale), end);
    const start = Math.min(Math.max(from, 0), end - width);
    this.view = [start, start + width];
    this.draw();
  }

  zoom(factor, around = (this.view[0] + this.view[1]) / 2) {
    this.show(around - (around - this.view[0]) * factor, around + (this.view[1] - around) * factor);
  }

  pan(pixels) {
    const by = this.time(pixels) - this.time(0);
    this.show(this.view[0] + by, this.view[1] + by);
  }

  listen() {
    let held = null;
    this.canvas.addEventListener("pointerdown", (event) => {
      held = event.clientX;
      // The drag goes on when the pointer leaves the canvas.
      this.canvas.setPointerCapture(event.pointerId);
    });
    this.canvas.addEventListener("pointermove", (event) => {
      if (held !== null) {
        this.pan(held - event.clientX);
        held = event.clientX;
      }
      this.hover(event);
    });
    for (const name of ["pointerup", "pointercancel"]) this.canvas.addEventListener(name, () => (held = null));
    this.canvas.addEventListener("pointerleave", () => {
      this.hovered = null;
      this.tip.style.display = "none";
      this.draw();
    });
    this.canvas.addEventListener("dblclick", () => this.show(0, this.data.end));
    this.canvas.addEventListener(
      "wheel",
      (event) => {
        const sideways = Math.abs(event.deltaX) > Math.abs(event.deltaY);
        if (!event.ctrlKey && !event.metaKey && !sideways) return; // the page scrolls
        event.preventDefault();
        if (sideways) this.pan(event.deltaX);
        else this.zoom(Math.exp(Math.max(-1, Math.min(1, event.deltaY / 150))), this.time(event.offsetX));
      },
      // Only a listener that is not passive may keep the page from scrolling.
      { passive: false },
    );
    this.canvas.addEventListener("keydown", (event) => {
      const acts = {
        ArrowLeft: () => this.pan(-80),
        ArrowRight: () => this.pan(80),
        Home: () => this.show(0, this.view[1] - this.view[0]),
        End: () => this.show(this.data.end - (this.view[1] - this.view[0]), this.data.end),
        "+": () => this.zoom(0.7),
        "=": () => this.zoom(0.7),
        "-": () => this.zoom(1 / 0.7),
        "\u2212": () => this.zoom(1 / 0.7),
        0: () => this.show(0, this.data.end),
      };
      // Own keys only: "constructor" is in every object. Ctrl and + stays the zoom of the browser.
      if (!Object.hasOwn(acts, event.key) || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
      acts[event.key]();
    });
    window.addEventListener("resize", () => this.resize());
    window.addEventListener("modechange", () => this.draw());
  }
}

// The colors of kinds, then the tones of the stages of a rank.
function timelineKeys(data) {
  const kinds = data.legend.map(([name, text]) => ({ name: text, style: `kind ${name}` }));
  return keys([...kinds, ...data.tones.map(([name, ...fills]) => ({ name, fills }))]);
}
