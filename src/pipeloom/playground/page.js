"use strict";
// Sends what is chosen to `pipeloom playground` and lays out its answers. It computes where the ink goes, and nothing
// else: which schedule it is, whether it is legal and what it costs is the server's answer.

const OWN_TEXT = "";
const START = { gather: 1, reduce: 1, stage_swap: 1, budget: 4, weight: 1 };

// Whether inputs apply; what does not is hidden and not sent.
const isText = (s) => s.family === OWN_TEXT;
const family = (s) => choices.families.find((one) => one.name === s.family);
const isFamily = (s) => !isText(s);
const trains = (s) => isText(s) || family(s).trains;
const hasOthers = (s) => isText(s) || s.pp > 1;
const splits = (s) => isText(s) || family(s).splits || s.split_backward !== null && family(s).trains;
const balances = (s) => s.balance && trains(s) && hasOthers(s);
const moves = (s) => balances(s) || s.offload && trains(s);
const reduces = (s) => s.reduce_grad && trains(s);
const communicates = (s) => s.communication || s.transfer > 0 || reduces(s) || s.update !== null && trains(s)
  || [s.unshard, s.tied, s.resident].some((one) => one !== null);

// kind: slider and number (of a whole number, or of any with `step`), check, choice, list (of whole numbers).
// `empty` is what stands in an input that may be left out; `fixed` is the value that a family has, which is shown.
const GROUPS = [
  ["Sizes", [
    { name: "pp", label: "pipeline ranks (pp)", kind: "slider", min: 1, max: 32, on: isFamily },
    { name: "loops", label: "loops (stages per rank)", kind: "slider", min: 1, max: 16, on: isFamily, fixed: (s) => isFamily(s) ? family(s).loops : null },
    { name: "num_microbatches", label: "micro-batches", kind: "slider", min: 1, max: 128, on: isFamily },
    { name: "slices", label: "token slices", kind: "slider", min: 1, max: 16 },
    { name: "group_size", label: "group size", kind: "number", min: 1, empty: "smallest", on: (s) => isFamily(s) && family(s).grouped },
    { name: "placement", label: "placement", kind: "choice", empty: "default", options: () => choices.placements, on: (s) => isFamily(s) && family(s).placement === null && hasOthers(s) },
  ]],
  ["Costs", [
    { name: "forward", label: "forward", kind: "slider", min: 0.1, max: 4, step: 0.1 },
    { name: "backward", label: "backward", kind: "slider", min: 0.1, max: 8, step: 0.1, on: trains },
    { name: "weight", label: "W, of a split backward", kind: "number", min: 0, step: 0.1, empty: "half", on: splits },
    { name: "transfer", label: "transfer", kind: "slider", min: 0, max: 2, step: 0.05, on: hasOthers },
  ]],
  ["Sharding", [
    { name: "unshard", label: "gather weights", kind: "choice", empty: "no", options: () => ["1", "2", "3", "4", "all"], hint: "stages gathered at once" },
    { name: "prefetch", label: "gather ahead", kind: "number", min: 0, on: (s) => s.unshard !== null, hint: "visits to other stages" },
    { name: "gather", label: "cost of a gather", kind: "slider", min: 0, max: 8, step: 0.1, on: (s) => isText(s) || s.unshard !== null },
    { name: "reduce_grad", label: "reduce gradients", kind: "check", on: trains },
    { name: "gradient_buffers", label: "gradient buffers", kind: "number", min: 1, empty: "all", on: reduces },
    { name: "reduce", label: "cost of a reduction", kind: "slider", min: 0, max: 8, step: 0.1, on: (s) => isText(s) || reduces(s) },
  ]],
  ["Memory", [
    { name: "balance", label: "balance (evict to a partner)", kind: "check", on: (s) => trains(s) && hasOthers(s) },
    { name: "offload", label: "offload to the host", kind: "check", on: trains },
    { name: "budget", label: "memory limit of a rank", kind: "number", min: 0, step: 0.5, empty: "none", on: moves, hint: "stage inputs: for each micro-batch one of each loop" },
    { name: "move", label: "cost of a move", kind: "slider", min: 0, max: 4, step: 0.1, on: (s) => isText(s) || moves(s) },
    { name: "keep", label: "kept whole, by rank", kind: "list", empty: "all", on: (s) => isFamily(s) && family(s).trains, hint: "such as 2 2 2 2; the others are recomputed" },
    { name: "resident", label: "stages on the device", kind: "number", min: 1, empty: "all", hint: "fewer: stages are swapped to the host" },
    { name: "stage_swap", label: "cost of a stage swap", kind: "slider", min: 0, max: 8, step: 0.1, on: (s) => isText(s) || s.resident !== null },
  ]],
  ["More passes", [
    { name: "split_backward", label: "split backwards", kind: "choice", empty: "no", options: () => ["0", "1", "2", "4", "8", "end"], on: (s) => isText(s) || family(s).trains && !family(s).splits, hint: "W follows so many places later" },
    { name: "communication", label: "sends and receives", kind: "check", on: hasOthers },
    { name: "receive_buffers", label: "receives posted ahead", kind: "number", min: 1, on: (s) => hasOthers(s) && communicates(s) },
    { name: "tied", label: "cost of a tied matrix", kind: "number", min: 0, step: 0.1, empty: "none", hint: "of embedding and head, sent each step" },
    { name: "update", label: "optimizer steps", kind: "choice", empty: "none", options: () => ["at-once", "at-the-end", "in-the-next-step"], on: trains },
  ]],
];
const OPEN = ["Sizes", "Costs"];
const FIELDS = GROUPS.flatMap(([, list]) => list);

const COPIED = "Copied";

let choices = null;
const sides = [];

function button(text, act, attributes = {}) {
  const node = element("button", { type: "button", ...attributes }, text);
  node.addEventListener("click", act);
  return node;
}

// {isJson, json(), text(), blob(), headers}; without a server, words that state it.
async function post(name, state) {
  try {
    const reply = await fetch(name, {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify(state),
    });
    reply.isJson = reply.headers.get("Content-Type") === "application/json";
    return reply;
  } catch (error) {
    return new Response(`No answer: is \`pipeloom playground\` still running? ${error.message}`, { status: 503 });
  }
}

// ---------------------------------------------------------------- a schedule with its inputs

class Side {
  constructor(letter) {
    this.letter = letter;
    this.inputs = new Map();
    this.boxes = new Map();
    this.errors = new Map();
    this.isBusy = this.isPending = false;
    this.answer = null; // the last one without problems, with what was sent for it
    this.sent = null;
    this.timeline = null;
    this.work = element("p", { class: "hint" });
    this.form = element("form", { class: "controls", "aria-label": `inputs of schedule ${letter}` }, this.head());
    this.groups = GROUPS.map(([title, list]) => {
      const count = element("span", { class: "count" });
      const node = element("details", { class: "group" }, element("summary", {}, title, count), ...list.map((field) => this.field(field)));
      if (title === "Costs") node.firstChild.after(element("div", { class: "field wide" }, this.work));
      node.open = OPEN.includes(title);
      this.form.append(node);
      return { node, count, list };
    });
    this.form.addEventListener("submit", (event) => event.preventDefault());
    this.form.addEventListener("input", (event) => {
      const isNew = event.target === this.inputs.get("family") && isText(this.values()) && this.text.value === "";
      // One's own schedule begins with the rows of the last one.
      if (isNew && this.sent !== null) this.edit();
      else this.changed();
    });
    this.results = element("div", { class: "results" });
    this.node = element("section", { class: "side", "aria-label": `schedule ${letter}` }, this.form, this.results);
    this.build();
  }

  head() {
    const select = element("select", { id: this.id("family") });
    for (const one of choices.families) select.append(element("option", { value: one.name }, one.name));
    select.append(element("option", { value: OWN_TEXT }, "your own, as text"));
    this.summary = element("p", { class: "summary" });
    this.text = element("textarea", { id: this.id("text"), spellcheck: "false", rows: "10", "aria-label": "schedule as text" });
    this.textBox = element(
      "div",
      { class: "field wide" },
      this.text,
      element("p", { class: "hint" }, "A row of actions for each rank, such as 0F0 0F1 0B0 0B1; or PyTorch's CSV."),
      this.error("text"),
    );
    this.inputs.set("family", select);
    this.inputs.set("text", this.text);
    return element(
      "fieldset",
      { class: "group" },
      element("legend", {}, "Schedule", element("span", { class: "letter" }, " " + this.letter)),
      element("div", { class: "field wide" }, element("label", { for: select.id }, "family"), select, this.error("family")),
      this.summary,
      this.textBox,
    );
  }

  id(name) {
    return `${this.letter}-${name}`;
  }

  error(name) {
    const node = element("p", { class: "error", id: this.id(name) + "-error" });
    this.errors.set(name, node);
    return node;
  }

  field({ name, label, kind, min, max, step = 1, empty, options, hint }) {
    const id = this.id(name);
    const node = element("div", { class: `field ${kind}` }, element("label", { for: id }, label));
    const described = { id, "aria-describedby": `${id}-error` };
    let input;
    if (kind === "check") input = element("input", { ...described, type: "checkbox" });
    else if (kind === "choice") {
      input = element("select", described, element("option", { value: "" }, empty));
      for (const one of options()) input.append(element("option", { value: one }, one));
    } else if (kind === "list") input = element("input", { ...described, type: "text", placeholder: empty, inputmode: "numeric" });
    else {
      // any: a number beside the steps of its slider is one all the same.
      input = element("input", { ...described, type: "number", min, step: step === 1 ? 1 : "any", placeholder: empty ?? "" });
    }
    if (kind === "slider") {
      const slide = element("input", { type: "range", min, max, step, "aria-label": label, id: id + "-slider" });
      slide.addEventListener("input", () => (input.value = slide.value));
      input.addEventListener("input", () => (slide.value = input.value));
      node.append(slide);
    }
    node.append(input);
    if (hint) node.append(element("p", { class: "hint" }, hint));
    node.append(this.error(name));
    this.inputs.set(name, input);
    this.boxes.set(name, node);
    return node;
  }

  // What the inputs contain, by field; a number that is none stays text, which the server refuses.
  values() {
    const found = { family: this.inputs.get("family").value, text: this.text.value };
    for (const { name, kind, fixed } of FIELDS) {
      const input = this.inputs.get(name);
      if (fixed && fixed(found) !== null) found[name] = choices.defaults[name];
      else if (kind === "check") found[name] = input.checked;
      else found[name] = parsed(kind, input.validity.badInput ? "?" : input.value.trim(), choices.defaults[name]);
    }
    return found;
  }

  // What is sent: everything that applies and is not the default.
  state() {
    const values = this.values();
    const found = isText(values) ? { text: values.text } : { family: values.family };
    for (const { name, on } of FIELDS) {
      if (on && !on(values)) continue;
      if (JSON.stringify(values[name]) !== JSON.stringify(choices.defaults[name])) found[name] = values[name];
    }
    return found;
  }

  // What is sent of the other schedule, of whose model this one has the stages.
  beside() {
    return this === sides[1] && sides[0].answer !== null ? { beside: sides[0].answer.num_stages } : {};
  }

  take(state) {
    this.inputs.get("family").value = state.text === undefined ? state.family : OWN_TEXT;
    this.text.value = state.text ?? "";
    for (const { name, kind } of FIELDS) {
      const value = name in state ? state[name] : choices.defaults[name];
      const input = this.inputs.get(name);
      if (kind === "check") input.checked = Boolean(value);
      else input.value = value === null ? "" : Array.isArray(value) ? value.join(" ") : value;
      delete input.dataset.own;
      this.slide(name);
    }
    for (const { node, list } of this.groups) if (list.some(({ name }) => name in state)) node.open = true;
    // Where an input does not apply, what it starts with when it does.
    const values = this.values();
    for (const { name, on } of FIELDS) {
      if (name in START && !(name in state) && on && !on(values) && choices.defaults[name] !== null) {
        this.inputs.get(name).value = START[name];
        this.slide(name);
      }
    }
    this.changed();
  }

  slide(name) {
    const slide = this.boxes.get(name).querySelector("[type=range]");
    if (slide !== null) slide.value = this.inputs.get(name).value;
  }

  changed() {
    const values = this.values();
    const chosen = family(values);
    this.textBox.hidden = chosen !== undefined;
    this.summary.textContent = chosen === undefined ? "" : chosen.summary;
    this.form.classList.toggle("is-text", chosen === undefined);
    for (const { name, on, fixed } of FIELDS) {
      this.boxes.get(name).hidden = Boolean(on && !on(values));
      if (fixed) this.fix(name, fixed(values));
    }
    const sent = this.state();
    for (const { count, list } of this.groups) {
      const number = list.filter(({ name }) => name in sent).length;
      count.textContent = number === 0 ? "" : `${number} set`;
    }
    remember();
    this.refresh();
  }

  // Shows a value that cannot be chosen; the reader's own one comes back with a family that takes it.
  fix(name, value) {
    const input = this.inputs.get(name);
    if (value !== null) {
      input.dataset.own ??= input.value;
      input.value = value;
    } else if (input.dataset.own !== undefined) {
      input.value = input.dataset.own;
      delete input.dataset.own;
    }
    const slide = this.boxes.get(name).querySelector("[type=range]");
    input.disabled = slide.disabled = value !== null;
    slide.value = input.value === "" ? slide.min : input.value;
  }

  // One request at a time; what changes meanwhile is sent when its answer is there.
  async refresh() {
    if (this.isBusy) {
      this.isPending = true;
      return;
    }
    this.isBusy = true;
    const begin = performance.now();
    const sent = { ...this.state(), ...this.beside() };
    try {
      const reply = await post(this.curves.open ? "curves" : "answer", sent);
      this.show(reply.isJson ? await reply.json() : { problems: [{ field: null, text: await reply.text() }] }, sent, begin);
    } finally {
      this.isBusy = false; // also after an answer that the server's end cut off
    }
    if (this.isPending) {
      this.isPending = false;
      this.refresh();
    }
  }

  // ---------------------------------------------------------------- its answer

  build() {
    this.verdict = element("div", { class: "verdict", role: "status", "aria-live": "polite" });
    this.rules = element("dl", { class: "rules" });
    this.proof = element("details", {}, element("summary", {}, "The rules"), this.rules);
    this.facts = element("dl", { class: "facts" });
    this.pictures = element("div", { class: "picture" });
    this.command = element("pre", { class: "command" });
    this.downloads = element("p", { class: "toolbar" }, "Download ");
    for (const [form, text] of [["svg", "SVG"], ["txt", "text"], ["csv", "PyTorch's CSV"]]) {
      this.downloads.append(button(text, () => this.download(form), { "data-form": form }));
    }
    this.downloads.append(button("Edit as text", () => this.edit()));
    this.failed = element("p", { class: "error", role: "status" });
    this.timing = element("p", { class: "timing" });
    this.bars = element("div");
    this.levels = element("div");
    this.table = element("tbody");
    this.curves = element("details", {}, element("summary", {}, element("h2", {}, "Memory over time")));
    this.curves.addEventListener("toggle", () => this.curves.open && this.refresh());
    const copy = button("Copy command", () => copyText(copy, this.answer.command));
    this.old = element("p", { class: "note" }, "Below: the last schedule that was legal.");
    this.taking = element(
      "section",
      {},
      element("h2", {}, "The same on the command line"),
      element("div", { class: "toolbar" }, this.command, copy),
      this.downloads,
      this.failed,
    );
    this.body = element(
      "div",
      { class: "body", hidden: "" },
      this.facts,
      this.pictures,
      element("section", {}, element("h2", {}, "All figures"), element("div", { class: "scroll" }, element("table", {}, this.table))),
      this.taking,
      this.timing,
    );
    this.results.append(this.verdict, this.old, this.body);
  }

  show(answer, sent, begin) {
    const problems = answer.problems ?? [];
    const isWrong = problems.length > 0;
    this.results.classList.toggle("is-stale", isWrong);
    this.taking.hidden = isWrong;
    this.showProblems(problems);
    if (!isWrong) {
      const isSame = this.sent?.family === sent.family;
      [this.answer, this.sent] = [answer, sent];
      this.body.hidden = false;
      this.showSchedule(answer, isSame);
      const other = sides[1];
      if (other !== undefined && other !== this && other.sent?.beside !== answer.num_stages) other.refresh();
    }
    this.old.hidden = !isWrong || this.answer === null;
    const drawn = performance.now() - begin;
    if (answer.computed_ms !== undefined) {
      this.timing.textContent = `Answered and drawn in ${drawn.toFixed(0)} ms, of which ${answer.computed_ms.toFixed(0)} ms computing.`;
    }
  }

  showProblems(problems) {
    for (const [name, node] of this.errors) {
      const own = problems.filter((one) => one.field === name).map((one) => one.text);
      node.textContent = own.join("\n");
      const input = this.inputs.get(name);
      if (own.length > 0) {
        input.setAttribute("aria-invalid", "true");
        const group = input.closest("details");
        if (group !== null) group.open = true;
      } else input.removeAttribute("aria-invalid");
    }
    this.verdict.classList.toggle("is-wrong", problems.length > 0);
    if (problems.length === 0) return;
    const nodes = problems.map(({ text, rule, rank, slot }) => {
      const [first, ...rest] = text.split("\n");
      const line = element("p", {}, element("b", {}, rule ? "Illegal: " : "Problem: "), first);
      if (rest.length > 0) line.append(element("pre", {}, rest.join("\n")));
      if (rule && rank !== null && slot !== null && isText(this.values())) line.append(button("Select it in the text", () => this.point(rank, slot)));
      return line;
    });
    this.verdict.replaceChildren(...nodes);
  }

  // Selects an action in the text.
  point(rank, slot) {
    const rows = [...this.text.value.matchAll(/^.*$/gm)].filter(([line]) => /^\s*\d/.test(line));
    const cell = rows[rank] && [...rows[rank][0].matchAll(/[^\s,]+/g)][slot];
    if (!cell) return;
    const from = rows[rank].index + cell.index;
    this.text.focus();
    this.text.setSelectionRange(from, from + cell[0].length);
  }

  showSchedule(answer, isSame) {
    const { proof, timeline } = answer;
    this.end = timeline.end;
    this.most = Math.max(...answer.memory.by_rank, answer.memory.budget ?? 0, 1e-9);
    if (this.timeline === null) {
      this.timeline = new Timeline(timeline, this.letter);
      this.timeline.canvas.addEventListener("viewchange", () => showEverywhere(this));
      this.pictures.append(
        element("section", {}, element("h2", {}, "The step"), this.timeline.toolbar(), this.timeline.box, this.timeline.legend),
        element("section", {}, element("h2", {}, "Where the time goes"), this.bars),
        element("section", {}, element("h2", {}, "Memory by rank"), element("p", { class: "note" }, `The most that a rank holds for backwards, in ${answer.memory.unit}; dashed: the limit.`), this.levels),
        this.curves,
      );
    } else this.retake(timeline, isSame);
    this.drawn = null;
    // First: they read their widths, which the browser would lay the page out for after other changes.
    drawSides();
    this.verdict.replaceChildren(
      element("p", {}, element("b", {}, "Verified: "), `${proof.actions.toLocaleString("en-US")} actions; all ${proof.rules.length} rules hold; no deadlock.`),
      this.proof,
    );
    this.rules.replaceChildren(...proof.rules.flatMap(([name, words]) => [element("dt", {}, name), element("dd", {}, words)]));
    this.facts.replaceChildren(...answer.headline.map(([name, value, unit]) => element("div", {}, element("dt", {}, name), element("dd", { "data-fact": name }, value, element("small", {}, unit)))));
    this.table.replaceChildren(...answer.lines.map(([name, value]) => element("tr", {}, element("th", { scope: "row" }, name), element("td", {}, value))));
    this.command.textContent = answer.command;
    this.work.textContent = answer.same_work ?? "";
    this.showCurves();
  }

  // A reader's zoom stays while inputs of one family change.
  retake(contents, isSame) {
    const { view, data } = this.timeline;
    const seen = view.map((time) => time / data.end);
    this.timeline.take(contents);
    if (isSame) this.timeline.view = seen.map((share) => share * contents.end);
  }

  // Pictures on the axes of both schedules.
  draw({ end, most }) {
    const width = Math.max(this.pictures.clientWidth, 280);
    const [from, to] = this.timeline.view.map((time) => time / this.timeline.data.end);
    this.timeline.data.end = end;
    this.timeline.view = [from * end, to * end];
    this.timeline.resize();
    const { bubble, memory } = this.answer;
    this.bars.replaceChildren(keys(bubble.causes.map(({ name, key }) => ({ name, style: `cause ${key}` }))), bars(bubble, width - 6)); // as wide as the timeline
    this.levels.replaceChildren(levels(memory, most, width));
    this.drawn = { end, most };
  }

  // They are a quarter of an answer, which lacks them while they are not shown.
  showCurves() {
    while (this.curves.children.length > 1) this.curves.lastChild.remove();
    const { over_time: curves } = this.answer;
    if (this.curves.open && curves !== undefined) this.curves.append(...[...overTime(curves).children].slice(1));
  }

  async fetched(form) {
    const reply = await post(form, this.sent);
    const problems = reply.isJson ? (await reply.json()).problems.map((one) => one.text) : reply.ok ? [] : [await reply.text()];
    this.failed.textContent = problems.join("\n");
    return problems.length === 0 ? reply : null;
  }

  async download(form) {
    const reply = await this.fetched(form);
    if (reply === null) return;
    const name = /filename="([^"]+)"/.exec(reply.headers.get("Content-Disposition"))[1];
    const link = element("a", { href: URL.createObjectURL(await reply.blob()), download: name });
    link.click();
    URL.revokeObjectURL(link.href);
  }

  // The schedule as it is, to change by hand: the passes are in its rows, so they are off from now on.
  async edit() {
    const reply = await this.fetched("txt");
    if (reply === null) return this.changed();
    const { forward, backward, transfer, gather, reduce, move, stage_swap: swap, weight } = this.sent;
    const costs = { forward, backward, transfer, gather, reduce, move, stage_swap: swap, weight };
    this.take({ ...Object.fromEntries(Object.entries(costs).filter(([, value]) => value !== undefined)), text: await reply.text() });
    this.text.focus();
    this.text.setSelectionRange(0, 0);
  }
}

function parsed(kind, text, missing) {
  if (text === "") return missing;
  if (kind === "list") return text.split(/[\s,]+/).map((one) => (isNaN(one) ? one : Number(one)));
  return kind === "check" ? text === "true" : isNaN(text) ? text : Number(text);
}

// A bar for each rank, and where the limit is.
function levels({ by_rank: values, budget }, most, width) {
  const [left, right, height, gap] = [96, 56, 15, 4];
  const x = (value) => left + (value / most) * (width - left - right);
  const bottom = values.length * (height + gap);
  const picture = svg("svg", { role: "img", "aria-label": `memory by rank: ${values.join(", ")}`, viewBox: `0 0 ${width} ${bottom}` });
  values.forEach((value, rank) => {
    const top = rank * (height + gap);
    picture.append(
      svg("text", { class: "strong", x: 0, y: top + 11 }, `rank ${rank}`),
      svg("rect", { class: budget !== null && value > budget ? "level is-over" : "level", x: left, y: top, width: x(value) - left, height }),
      svg("text", { x: x(value) + 6, y: top + 11 }, grouped(value, Number.isInteger(value) ? 0 : 2)),
    );
  });
  if (budget !== null) picture.append(svg("line", { class: "budget", x1: x(budget), x2: x(budget), y1: 0, y2: bottom }));
  return picture;
}

// Two schedules have one time axis and one axis of memory.
function drawSides() {
  const shown = sides.filter((side) => side.timeline !== null);
  const [end, most] = ["end", "most"].map((name) => Math.max(...shown.map((side) => side[name])));
  for (const side of shown) if (side.drawn?.end !== end || side.drawn.most !== most) side.draw({ end, most });
}

function redraw() {
  for (const side of sides) side.drawn = null;
  drawSides();
}

// What is in view of one schedule, of the other too.
function showEverywhere(from) {
  for (const { timeline } of sides) {
    if (timeline === null || timeline === from.timeline) continue;
    timeline.view = [...from.timeline.view];
    timeline.draw();
  }
}

// ---------------------------------------------------------------- links

// A side as words of a link; the second one's names begin with "b.".
function written(side, prefix) {
  return Object.entries(side.state()).map(([name, value]) => [prefix + name, Array.isArray(value) ? value.join(" ") : String(value)]);
}

function fragment() {
  return "#" + new URLSearchParams(sides.flatMap((side, number) => written(side, number ? "b." : "")));
}

let writing = 0;
function remember() {
  // Browsers limit how often an address may change.
  clearTimeout(writing);
  writing = setTimeout(() => history.replaceState(null, "", fragment()), 250);
}

function read(prefix) {
  const state = {};
  for (const [full, text] of new URLSearchParams(location.hash.slice(1))) {
    const name = full.startsWith("b.") ? full.slice(2) : full;
    if (full.startsWith("b.") !== (prefix === "b.")) continue;
    const field = FIELDS.find((one) => one.name === name);
    state[name] = field === undefined ? text : parsed(field.kind, text, null);
  }
  return state;
}

function load() {
  const linked = [read(""), read("b.")];
  setCompared(Object.keys(linked[1]).length > 0, false);
  const isSame = (one, other) => JSON.stringify(one) === JSON.stringify(other);
  const lost = sides.flatMap((side, number) => {
    const state = linked[number];
    const isKnown = "text" in state || choices.families.some((one) => one.name === state.family);
    side.take(isKnown ? state : { loops: 4, ...state, family: choices.defaults.family });
    const taken = side.state();
    const names = Object.keys(state).filter((name) => !isSame(state[name], name in taken ? taken[name] : choices.defaults[name]));
    return names.map((name) => `${name}=${state[name]}`);
  });
  show(...(lost.length > 0 ? [`What has no effect here, or is unknown to this version, is left out of the link: ${lost.join(", ")}`] : []));
}

function setCompared(isWanted, copies = true) {
  const main = document.getElementById("sides");
  if (isWanted && sides.length === 1) {
    sides.push(new Side("B"));
    main.append(sides[1].node);
    if (copies) sides[1].take(sides[0].state());
  } else if (!isWanted && sides.length === 2) sides.pop().node.remove();
  main.classList.toggle("two", sides.length > 1);
  document.getElementById("compare").setAttribute("aria-pressed", String(sides.length > 1));
  redraw(); // pictures are as wide as their side
  remember();
}

function show(...nodes) {
  const box = document.getElementById("shared");
  box.replaceChildren(...nodes);
  box.hidden = nodes.length === 0;
}

async function share() {
  // Without the token, which is whoever runs the server's alone.
  const link = location.origin + "/" + fragment();
  const field = element("input", { type: "text", readonly: "", value: link, "aria-label": "link" });
  show("Whoever has pipeloom sees the same with ", element("code", {}, "pipeloom playground 'LINK'"), ":", field);
  field.select();
  await copyText(document.getElementById("share"), link);
}

async function copyText(node, text) {
  const before = node.textContent;
  const isCopied = await navigator.clipboard.writeText(text).then(() => true, () => false);
  if (!isCopied || before === COPIED) return;
  node.textContent = COPIED;
  setTimeout(() => (node.textContent = before), 1500);
}

function setInputs(areShown) {
  document.getElementById("sides").classList.toggle("no-inputs", !areShown);
  const node = document.getElementById("inputs");
  node.textContent = areShown ? "Hide inputs" : "Show inputs";
  redraw();
}

function reset() {
  history.replaceState(null, "", location.pathname);
  load();
}

async function begin() {
  choices = await (await fetch("choices")).json();
  sides.push(new Side("A"));
  document.getElementById("sides").replaceChildren(sides[0].node);
  document.getElementById("share").after(modeButton());
  document.getElementById("compare").addEventListener("click", () => setCompared(sides.length === 1));
  document.getElementById("share").addEventListener("click", share);
  document.getElementById("reset").addEventListener("click", reset);
  document.getElementById("inputs").addEventListener("click", ({ target }) => setInputs(target.textContent === "Show inputs"));
  window.addEventListener("hashchange", load);
  let resizing = 0;
  window.addEventListener("resize", () => {
    clearTimeout(resizing);
    resizing = setTimeout(redraw, 150);
  });
  load();
  root.dataset.state = "ready";
}

begin();
