"use strict";
// Drawing functions of the report and the playground: elements, timelines on a canvas, bars, curves.
// Only the layout is computed here.

const root = document.documentElement;

// A color of the style sheet for the canvas, in the current mode.
function color(name) {
  return getComputedStyle(root).getPropertyValue("--" + name).trim();
}

// ---------------------------------------------------------------- light or dark

const systemDark = matchMedia("(prefers-color-scheme: dark)");

// The reader's choice. Some browsers store nothing for local files.
function chosenMode(mode) {
  try {
    if (mode !== undefined) localStorage.setItem("pipeloom-mode", mode);
    return localStorage.getItem("pipeloom-mode");
  } catch {
    return mode ?? null;
  }
}

function systemMode() {
  return systemDark.matches ? "dark" : "light";
}

// Style sheets do not change a canvas, so timelines are drawn again at "modechange".
function setMode(mode) {
  root.dataset.mode = mode;
  window.dispatchEvent(new Event("modechange"));
}

function isDark() {
  return root.dataset.mode === "dark" && !root.hasAttribute("data-printing");
}

setMode(chosenMode() ?? systemMode());
systemDark.addEventListener("change", () => {
  if (chosenMode() === null) setMode(systemMode());
});
for (const name of ["beforeprint", "afterprint"]) {
  window.addEventListener(name, () => {
    root.toggleAttribute("data-printing", name === "beforeprint"); // paper is light
    window.dispatchEvent(new Event("modechange"));
  });
}

// A button that switches between light and dark mode.
function modeButton() {
  const node = element("button", { type: "button", class: "mode" });
  const show = () => (node.textContent = root.dataset.mode === "dark" ? "Light mode" : "Dark mode");
  node.addEventListener("click", () => {
    const mode = root.dataset.mode === "dark" ? "light" : "dark";
    chosenMode(mode);
    setMode(mode);
  });
  window.addEventListener("modechange", show);
  show();
  return node;
}

// ---------------------------------------------------------------- elements

// An attribute has the state of the page, for tests in a browser.
window.addEventListener("error", (event) => {
  root.dataset.state = "failed: " + event.message;
});

// An HTML element. Strings become text nodes, so text from a run is never parsed as markup.
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

// Nodes of a sentence: what stands between two backticks is code.
function sentence(text) {
  return text.split("`").map((part, place) => (place % 2 ? element("code", {}, part) : part));
}

function section(title, note, ...children) {
  const node = element("section", {}, element("h2", {}, title));
  if (note) node.append(element("p", { class: "note" }, ...sentence(note)));
  node.append(...children);
  return node;
}

// A legend. Items are {name, style} with CSS classes, or {name, fills} with colors for a light and a dark page.
function keys(items) {
  const list = element("div", { class: "legend" });
  for (const { name, style, fills } of items) {
    const sign = element("i", { class: style || "tone" });
    fills?.forEach((fill, number) => sign.style.setProperty(number ? "--on-dark" : "--on-light", fill));
    list.append(element("span", {}, sign, name));
  }
  return list;
}

// Round values in a range, and their number of decimals; at most about `most` values.
function ticks(low, high, most) {
  const rough = (high - low) / most;
  const power = 10 ** Math.floor(Math.log10(rough));
  // 0.999 allows for rounding errors if the range is a multiple of a round step.
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough * 0.999) || rough;
  const found = [];
  // + 0 turns -0 into 0, since -0 is printed as "-0".
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

class Timeline {
  // Ids get a suffix, so that a page can have several timelines.
  constructor(data, suffix = "") {
    this.suffix = suffix;
    this.withLanes = false;
    this.canvas = element("canvas", {
      tabindex: "0",
      role: "application",
      "aria-roledescription": "timelines",
      "aria-describedby": "keys" + suffix,
    });
    this.tip = element("div", { class: "tip" });
    this.range = element("span", { class: "view", role: "status" });
    this.box = element("div", { class: "timeline" }, this.canvas, this.tip);
    this.legend = element("div");
    this.take(data);
    this.listen();
  }

  // Replace the data, and show all of it.
  take(data) {
    this.data = data;
    this.view = [0, data.end];
    this.hovered = null;
    this.where = null;
    const titles = data.panels.map((panel) => `${panel.title}: ${panel.makespan}`).join("; ");
    this.canvas.setAttribute("aria-label", `timelines of the step, ${titles}`);
    this.showKeys();
  }

  // The legend: kinds of the lanes that are shown, then tones of a rank's stages.
  showKeys() {
    const shown = this.data.legend.filter(([, , isCompute]) => isCompute || this.withLanes);
    const kinds = shown.map(([name, text]) => ({ name: text, style: `kind ${name}` }));
    this.legend.replaceChildren(keys([...kinds, ...this.data.tones.map(([name, ...fills]) => ({ name, fills }))]));
  }

  // The box of an action of a rank in a panel; undefined if there is none.
  boxOf(panel, name, rank) {
    // Made on demand, since it has an entry for each box.
    if (this.where === null) {
      this.where = new Map();
      this.data.panels.forEach((one, number) => {
        for (const { label, lanes } of one.ranks) for (const lane of lanes) for (const box of lane.boxes) {
          this.where.set(number + ":" + this.name(box) + ":" + label, box);
        }
      });
    }
    return this.where.get(panel + ":" + name + ":" + rank);
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
      this.showKeys();
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
    this.width = Math.max(this.box.clientWidth, 300);
    this.gutter = this.width < 600 ? 74 : 96;
    // The pixels of the screen, on paper at least two for each CSS pixel. Browsers draw nothing on a canvas higher than
    // 32,767 pixels.
    const ratio = window.devicePixelRatio || 1;
    this.scale = Math.min(root.hasAttribute("data-printing") ? Math.max(ratio, 2) : ratio, 32_000 / height);
    const [across, down] = [Math.round(this.width * this.scale), Math.round(height * this.scale)];
    // Setting a size clears the canvas and allocates it again.
    if (this.canvas.width !== across) this.canvas.width = across;
    if (this.canvas.height !== down) this.canvas.height = down;
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
    const form = this.form();
    for (const row of this.rows) drawn += this.drawRow(pen, row, form);
    this.drawHover(pen);
    pen.restore();
    this.canvas.dataset.boxes = drawn;
    root.dataset.boxes = drawn;
    const digits = this.view[1] - this.view[0] < 2e6 ? 3 : 1;
    const [from, to] = this.view.map((time) => grouped(time / 1e6, digits));
    this.range.textContent = `${from} to ${to} ${this.data.unit}`;
  }

  drawFrame(pen) {
    for (const { title, name, makespan, top } of this.titles) {
      pen.font = "600 13px system-ui, sans-serif";
      pen.fillStyle = color("ink");
      pen.textAlign = "left";
      const text = pen.measureText(title).width < this.width - this.gutter - MARGIN - 80 ? title : name;
      pen.fillText(text, this.gutter, top);
      const width = pen.measureText(text).width;
      pen.fillStyle = color("muted");
      pen.font = "13px system-ui, sans-serif";
      pen.fillText(makespan, this.gutter + width + 10, top);
    }
    pen.textAlign = "right";
    const [back, ink] = [[color("lane"), color("row")], [color("muted"), color("ink")]];
    for (const row of this.rows) {
      const isCompute = row.lane.label === "compute";
      pen.fillStyle = back[Number(isCompute)];
      pen.fillRect(this.gutter, row.top, this.width - this.gutter - MARGIN, row.height);
      pen.fillStyle = ink[Number(isCompute)];
      pen.font = (isCompute ? "12.5px" : "10px") + " system-ui, sans-serif";
      pen.fillText(isCompute ? row.rank : row.lane.label, this.gutter - 10, row.top + row.height / 2 + 0.5);
    }
    this.drawAxis(pen);
  }

  drawAxis(pen) {
    const { values, digits } = ticks(this.view[0] / 1e6, this.view[1] / 1e6, Math.min(12, this.width / 80));
    pen.font = "11px system-ui, sans-serif";
    pen.textAlign = "center";
    const [tick, muted] = [color("tick"), color("muted")];
    for (const value of values) {
      const x = Math.round(this.x(value * 1e6)) + 0.5;
      pen.fillStyle = tick;
      for (const row of this.rows) pen.fillRect(x - 0.5, row.top, 1, row.height);
      pen.fillStyle = muted;
      pen.fillRect(x - 0.5, this.bottom, 1, 4);
      const text = grouped(value, digits);
      // At the right edge, shift the number so that it is not cut off.
      pen.fillText(text, Math.min(x, this.width - MARGIN - pen.measureText(text).width / 2), this.bottom + 14);
    }
    pen.fillStyle = color("axis");
    pen.fillRect(this.gutter, this.bottom, this.width - this.gutter - MARGIN, 1);
    pen.textAlign = "right";
    pen.fillStyle = color("muted");
    pen.fillText(`time (${this.data.unit})`, this.gutter - 10, this.bottom + 14);
  }

  // Label of a box: stage, letter and micro-batch (form 0), letter and micro-batch (1), or only the micro-batch (2).
  label(box, form) {
    const [kind, , microbatch, slice] = box;
    const number = microbatch + (slice ? "." + slice : "");
    return [this.name(box), this.data.kinds[kind][0] + number, number][form];
  }

  // The longest form for which at least 80 % of the boxes in view have room; all labels have the same form.
  form() {
    const [from, to] = this.view;
    const lanes = this.rows.map((row) => row.lane).filter((lane) => lane.label === "compute");
    const seen = lanes.flatMap((lane) => lane.boxes.filter((box) => box[4] < to && box[4] + box[5] > from));
    const room = (box) => this.x(box[4] + box[5]) - this.x(box[4]);
    // Most boxes of a large step have no room for any label; making labels takes time.
    const fits = (box, form) => room(box) > 9 && room(box) > 3 + 6.6 * this.label(box, form).length;
    return [0, 1].find((form) => seen.filter((box) => fits(box, form)).length >= 0.8 * seen.length) ?? 2;
  }

  // Draw a row; return the number of its compute boxes in view.
  drawRow(pen, row, form) {
    const isCompute = row.lane.label === "compute";
    let drawn = 0;
    let last = null;
    pen.font = "11px system-ui, sans-serif";
    pen.textAlign = "center";
    const first = isDark() ? 2 : 0;
    for (const box of row.lane.boxes) {
      const [, , microbatch, , start, duration, tone] = box;
      if (start + duration < this.view[0] || start > this.view[1]) continue;
      const left = this.x(start);
      // Thinner boxes would be invisible.
      const width = Math.max(this.x(start + duration) - left, 0.75);
      const [fill, ink] = this.data.palette[tone].slice(first);
      if (fill !== last) pen.fillStyle = last = fill;
      pen.fillRect(left, row.top, width > 3 ? width - 0.7 : width, row.height);
      drawn += isCompute;
      // The label is in the middle of the visible part of the box.
      const from = Math.max(left, this.gutter);
      const seen = Math.min(left + width, this.width - MARGIN) - from;
      if (!isCompute || seen < 9 || microbatch === null) continue;
      const text = this.label(box, form);
      if (seen > 3 + 6.6 * text.length) {
        pen.fillStyle = last = ink;
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
      const box = this.boxOf(row.panel, name, row.rank);
      if (box === undefined) continue;
      const left = this.x(box[4]);
      pen.strokeRect(left, row.top, Math.max(this.x(box[4] + box[5]) - left, 1), row.height);
    }
  }

  find(x, y) {
    const row = this.rows.find((one) => y >= one.top - 1 && y <= one.top + one.height + 1);
    if (row === undefined || x < this.gutter) return null;
    const time = this.time(x);
    // A tolerance of two pixels, for thin boxes.
    const slack = this.time(x + 2) - time;
    let best = null;
    for (const box of row.lane.boxes) {
      // Boxes are sorted by time (timeline.py).
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
      const one = this.boxOf(number, this.name(box), row.rank);
      if (one === undefined) return;
      const [start, duration] = [one[4], one[5]].map((time) => grouped(time / 1e6, 3));
      lines.push(element("br"), element("span", {}, panel.name + " "), `starts at ${start} ${this.data.unit}, takes ${duration} ${this.data.unit}`);
    });
    return lines;
  }

  show(from, to) {
    const end = this.data.end;
    // At least a thousandth of the unit, since times are whole millionths.
    const width = Math.min(Math.max(to - from, 1000), end);
    const start = Math.min(Math.max(from, 0), end - width);
    this.view = [start, start + width];
    this.draw();
    this.canvas.dispatchEvent(new Event("viewchange"));
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
      // The drag continues when the pointer leaves the canvas.
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
      // Passive listeners cannot prevent the page from scrolling.
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
      // hasOwn, since every object inherits "constructor". Ctrl and + stays the browser's zoom.
      if (!Object.hasOwn(acts, event.key) || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
      acts[event.key]();
    });
    window.addEventListener("resize", () => this.resize());
    window.addEventListener("modechange", () => this.resize());
  }
}

// ---------------------------------------------------------------- where the time goes

function bars(data, whole = 1000) {
  const isOne = data.traces.length === 1;
  const [left, height, gap] = isOne ? [96, 15, 4] : [180, 15, 14];
  const width = whole - left;
  const picture = svg("svg", { role: "img", "aria-label": "bubble account" });
  let top = 4;
  for (const group of [...data.groups, data.total]) {
    if (group === data.total) top += 10;
    const middle = top + (data.traces.length * (height + 2)) / 2;
    picture.append(svg("text", { class: "strong", x: 0, y: middle + 3 }, group.label));
    group.bars.forEach((bar, number) => {
      if (!isOne) picture.append(svg("text", { x: left - 8, y: top + 11, "text-anchor": "end" }, data.traces[number]));
      let x = left;
      bar.forEach(([share, text], cause) => {
        const { name, key } = data.causes[cause];
        const words = `${group.label}, ${data.traces[number]}: ${name} ${text}`;
        const attributes = { x, y: top, width: share * width, height, class: `cause ${key}` };
        picture.append(svg("rect", attributes, svg("title", {}, words)));
        x += share * width;
      });
      top += height + 2;
    });
    top += gap;
  }
  picture.setAttribute("viewBox", `0 0 ${left + width + 6} ${top - gap + 4}`);
  return picture;
}

function meanings(causes) {
  const list = element("dl", { class: "causes" });
  for (const { name, key, meaning } of causes) {
    const sign = element("i", { class: `cause ${key}` });
    list.append(element("div", {}, element("dt", {}, sign, name), element("dd", {}, meaning)));
  }
  return list;
}

// ---------------------------------------------------------------- curves

const WIDTH = 620;

function frame(width, height, title) {
  const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": title });
  const node = element("div", {}, element("h3", {}, title), picture);
  return { node, picture };
}

function path(points, x, y, style) {
  let text = "";
  let open = false;
  for (const [at, value] of points) {
    // null, for a value that is not finite, is a gap in the line.
    if (value === null) open = false;
    else {
      text += `${open ? "L" : "M"}${x(at).toFixed(2)} ${y(value).toFixed(2)}`;
      open = true;
    }
  }
  return svg("path", { d: text, class: style });
}

function axes(picture, { x, y, across, up, bottom, left, right, unit }) {
  for (const value of up.values) {
    picture.append(
      svg("line", { class: "axis", x1: left, x2: right, y1: y(value), y2: y(value) }),
      svg("text", { x: left - 8, y: y(value) + 4, "text-anchor": "end" }, grouped(value, up.digits)),
    );
  }
  for (const value of across.values) {
    picture.append(svg("text", { x: x(value), y: bottom + 16, "text-anchor": "middle" }, grouped(value, across.digits)));
  }
  picture.append(svg("text", { x: right, y: bottom + 32, "text-anchor": "end" }, unit));
}

function overTime(data) {
  const [height, left, right, top] = [150, 40, WIDTH - 12, 8];
  const bottom = height - 38;
  const x = (time) => left + (time / data.end) * (right - left);
  const y = (held) => bottom - (held / Math.max(data.most, 1)) * (bottom - top);
  const panels = data.ranks.map((rank) => {
    const { node, picture } = frame(WIDTH, height, `${rank.label}, ${rank.peak}`);
    const up = ticks(0, Math.max(data.most, 1), 4);
    axes(picture, { x, y, across: ticks(0, data.end, 6), up: { ...up, digits: 0 }, bottom, left, right, unit: `time (${data.unit})` });
    rank.curves.forEach((points, number) => {
      const steps = points.flatMap(([time, held], k) => (k ? [[time, points[k - 1][1]], [time, held]] : [[time, held]]));
      const trace = data.traces[number];
      if (trace !== "predicted") {
        picture.append(path([...steps, [points.at(-1)[0], 0], [points[0][0], 0]], x, y, "area"));
      }
      picture.append(path(steps, x, y, `line ${trace}`));
    });
    return node;
  });
  const legend = keys(data.traces.map((trace, number) => ({ name: data.labels[number], style: `line ${trace}` })));
  return section(
    data.title,
    data.note,
    legend,
    element("div", { class: "grid" }, ...panels),
  );
}
