"use strict";
// Sends what is chosen to `pipeloom playground` and lays out its answers. It computes where the ink goes, and nothing
// else: which schedule it is, whether it is legal and what it costs is the server's answer.

const OWN_TEXT = "";
const START = { gather: 1, reduce: 1, stage_swap: 1, budget: 4, weight: 1 };

// Whether inputs apply; what does not is disabled and not sent.
const isText = (s) => s.family === OWN_TEXT;
const family = (s) => choices.families.find((one) => one.name === s.family);
const isFamily = (s) => !isText(s);
const moves = (s) => s.balance || s.offload;
const communicates = (s) => s.communication || s.transfer > 0 || s.reduce_grad || [s.unshard, s.tied, s.update, s.resident].some((one) => one !== null);

// kind: slider and number (of a whole number, or of any with `step`), check, choice, list (of whole numbers).
// `empty` is what stands in an input that may be left out.
const GROUPS = [
  ["Sizes", [
    { name: "pp", label: "pipeline ranks", kind: "slider", min: 1, max: 32, on: isFamily },
    { name: "loops", label: "loops (stages on each rank)", kind: "slider", min: 1, max: 16, on: (s) => isFamily(s) && family(s).loops === null },
    { name: "microbatches", label: "micro-batches", kind: "slider", min: 1, max: 128, on: isFamily },
    { name: "slices", label: "token slices of each", kind: "slider", min: 1, max: 16 },
    { name: "group_size", label: "group size", kind: "number", min: 1, empty: "smallest", on: (s) => isFamily(s) && family(s).grouped },
    { name: "placement", label: "placement", kind: "choice", empty: "the family's", options: () => choices.placements, on: (s) => isFamily(s) && family(s).placement === null },
  ]],
  ["Costs", [
    { name: "forward", label: "forward", kind: "slider", min: 0.1, max: 4, step: 0.1 },
    { name: "backward", label: "backward", kind: "slider", min: 0.1, max: 8, step: 0.1 },
    { name: "weight", label: "W, of a split backward", kind: "number", min: 0, step: 0.1, empty: "half", on: (s) => isText(s) || family(s).splits || s.split_backward !== null },
    { name: "transfer", label: "transfer between ranks", kind: "slider", min: 0, max: 2, step: 0.05 },
  ]],
  ["Sharding", [
    { name: "unshard", label: "gather weights", kind: "choice", empty: "no", options: () => ["1", "2", "3", "4", "all"], hint: "stages gathered at once" },
    { name: "prefetch", label: "gather ahead", kind: "number", min: 0, on: (s) => s.unshard !== null, hint: "visits to other stages" },
    { name: "gather", label: "cost of a gather", kind: "slider", min: 0, max: 8, step: 0.1, on: (s) => isText(s) || s.unshard !== null },
    { name: "reduce_grad", label: "reduce gradients", kind: "check" },
    { name: "gradient_buffers", label: "gradient buffers", kind: "number", min: 1, empty: "all", on: (s) => s.reduce_grad },
    { name: "reduce", label: "cost of a reduction", kind: "slider", min: 0, max: 8, step: 0.1, on: (s) => isText(s) || s.reduce_grad },
  ]],
  ["Memory", [
    { name: "balance", label: "balance (evict to a partner)", kind: "check" },
    { name: "offload", label: "offload to the host", kind: "check" },
    { name: "budget", label: "memory limit of a rank", kind: "number", min: 0, step: 0.5, empty: "none", on: moves, hint: "stage inputs" },
    { name: "move", label: "cost of a move", kind: "slider", min: 0, max: 4, step: 0.1, on: (s) => isText(s) || moves(s) },
    { name: "keep", label: "kept whole, by rank", kind: "list", empty: "all", on: (s) => isFamily(s) && family(s).trains, hint: "such as 2 2 2 2; the others are recomputed" },
    { name: "resident", label: "stages on the device", kind: "number", min: 1, empty: "all", hint: "fewer: stages are swapped to the host" },
    { name: "stage_swap", label: "cost of a stage swap", kind: "slider", min: 0, max: 8, step: 0.1, on: (s) => isText(s) || s.resident !== null },
  ]],
  ["More passes", [
    { name: "split_backward", label: "split backwards", kind: "choice", empty: "no", options: () => ["0", "1", "2", "4", "8", "end"], hint: "W follows so many places later" },
    { name: "communication", label: "sends and receives", kind: "check" },
    { name: "receive_buffers", label: "receives posted ahead", kind: "number", min: 1, on: communicates },
    { name: "tied", label: "cost of a tied matrix", kind: "number", min: 0, step: 0.1, empty: "not tied", hint: "of embedding and head, sent each step" },
    { name: "update", label: "optimizer", kind: "choice", empty: "not in the schedule", options: () => ["at-once", "at-the-end", "in-the-next-step"] },
  ]],
];
const FIELDS = GROUPS.flatMap(([, list]) => list);

let choices = null;
const sides = [];

function button(text, act, attributes = {}) {
  const node = element("button", { type: "button", ...attributes }, text);
  node.addEventListener("click", act);
  return node;
}

async function post(name, state) {
  const reply = await fetch(name, {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(state),
  });
  return reply;
}

// ---------------------------------------------------------------- a schedule with its inputs

class Side {
  constructor(letter) {
    this.letter = letter;
    this.inputs = new Map();
    this.errors = new Map();
    this.isBusy = this.isPending = false;
    this.answer = null;
    this.timeline = null;
    this.form = element("form", { class: "controls", "aria-label": `inputs of schedule ${letter}` }, this.head());
    for (const [title, list] of GROUPS) {
      this.form.append(element("fieldset", {}, element("legend", {}, title), ...list.map((field) => this.field(field))));
    }
    this.form.addEventListener("submit", (event) => event.preventDefault());
    this.form.addEventListener("input", () => this.changed());
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
      element("p", { class: "hint" }, "One row of actions for each rank, such as 0F0 0F1 0B0 0B1, or PyTorch's CSV."),
      this.error("text"),
    );
    this.inputs.set("family", select);
    this.inputs.set("text", this.text);
    return element(
      "fieldset",
      {},
      element("legend", {}, `Schedule${this.letter === "A" ? "" : " " + this.letter}`),
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
    const node = element("div", { class: `field ${kind}`, id: id + "-field" }, element("label", { for: id }, label));
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
    return node;
  }

  // What the inputs contain, by field; a number that is none stays text, which the server refuses.
  values() {
    const found = { family: this.inputs.get("family").value, text: this.text.value };
    for (const { name, kind } of FIELDS) {
      const input = this.inputs.get(name);
      if (kind === "check") found[name] = input.checked;
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

  take(state) {
    this.inputs.get("family").value = state.text === undefined ? state.family : OWN_TEXT;
    this.text.value = state.text ?? "";
    for (const { name, kind } of FIELDS) {
      const value = name in state ? state[name] : choices.defaults[name];
      const input = this.inputs.get(name);
      if (kind === "check") input.checked = Boolean(value);
      else input.value = value === null ? "" : Array.isArray(value) ? value.join(" ") : value;
      this.slide(name);
    }
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
    const slide = this.form.querySelector(`#${this.id(name)}-slider`);
    if (slide !== null) slide.value = this.inputs.get(name).value;
  }

  changed() {
    const values = this.values();
    const chosen = family(values);
    this.textBox.hidden = chosen !== undefined;
    this.summary.textContent = chosen === undefined ? "" : chosen.summary;
    for (const { name, on } of FIELDS) {
      const isOff = Boolean(on && !on(values));
      const box = this.form.querySelector(`#${this.id(name)}-field`);
      box.classList.toggle("is-off", isOff);
      for (const input of box.querySelectorAll("input, select")) input.disabled = isOff;
    }
    remember();
    this.refresh();
  }

  // One request at a time; what changes meanwhile is sent when its answer is there.
  async refresh() {
    if (this.isBusy) {
      this.isPending = true;
      return;
    }
    this.isBusy = true;
    const begin = performance.now();
    try {
      const reply = await post("answer", this.state());
      const body = reply.headers.get("Content-Type") === "application/json" ? await reply.json() : { problems: [{ field: null, text: await reply.text() }] };
      this.show(body, begin);
    } catch (error) {
      if (!(error instanceof TypeError)) throw error;
      this.show({ problems: [{ field: null, text: "No answer: is `pipeloom playground` still running? " + error.message }] }, begin);
    }
    this.isBusy = false;
    if (this.isPending) {
      this.isPending = false;
      this.refresh();
    }
  }

  // ---------------------------------------------------------------- its answer

  build() {
    this.verdict = element("div", { class: "verdict", role: "status", "aria-live": "polite" });
    this.rules = element("dl", { class: "rules" });
    this.proof = element("details", {}, element("summary", {}, "What was proved"), this.rules);
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
    this.legend = element("div");
    this.table = element("tbody");
    this.curves = element("details", {}, element("summary", {}, element("h2", {}, "Memory over time")));
    this.curves.addEventListener("toggle", () => this.showCurves());
    const copy = button("Copy command", () => navigator.clipboard.writeText(this.answer.command));
    this.results.append(
      this.verdict,
      this.facts,
      this.pictures,
      element("section", {}, element("h2", {}, "All figures"), element("div", { class: "scroll" }, element("table", {}, this.table))),
      element("section", {}, element("h2", {}, "The same on the command line"), this.command, element("p", { class: "toolbar" }, copy), this.downloads, this.failed),
      this.timing,
    );
  }

  show(answer, begin) {
    const problems = answer.problems ?? [];
    this.results.classList.toggle("is-stale", problems.length > 0);
    this.showProblems(problems);
    if (problems.length === 0) {
      this.answer = answer;
      this.showSchedule(answer);
    }
    root.dataset[`answers${this.letter}`] = Number(root.dataset[`answers${this.letter}`] ?? 0) + 1;
    const drawn = performance.now() - begin;
    this.times = [...(this.times ?? []), drawn].slice(-200);
    if (answer.computed_ms !== undefined) {
      this.timing.textContent = `Answered and drawn in ${drawn.toFixed(0)} ms, of which ${answer.computed_ms.toFixed(0)} ms computing.`;
    }
  }

  showProblems(problems) {
    for (const [name, node] of this.errors) {
      const own = problems.filter((one) => one.field === name).map((one) => one.text);
      node.textContent = own.join("\n");
      const input = this.inputs.get(name);
      if (own.length > 0) input.setAttribute("aria-invalid", "true");
      else input.removeAttribute("aria-invalid");
    }
    this.verdict.classList.toggle("is-wrong", problems.length > 0);
    if (problems.length === 0) return;
    const nodes = problems.map(({ text, rule, rank, slot }) => {
      const [first, ...rest] = text.split("\n");
      const line = element("p", {}, rule ? element("b", {}, "Illegal: ") : "", first);
      if (rest.length > 0) line.append(element("pre", {}, rest.join("\n")));
      if (rule && rank !== null && slot !== null && isText(this.values())) line.append(button("Show the place", () => this.point(rank, slot)));
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

  showSchedule(answer) {
    const { proof, timeline } = answer;
    this.verdict.replaceChildren(
      element("p", {}, element("b", {}, "Proved: "), `${proof.actions.toLocaleString("en-US")} actions, ${proof.rules.length} rules hold, and no rank can wait for ever.`),
      this.proof,
    );
    this.rules.replaceChildren(...proof.rules.flatMap(([name, words]) => [element("dt", {}, name), element("dd", {}, words)]));
    this.facts.replaceChildren(...answer.headline.map(([name, value, unit]) => element("div", {}, element("dt", {}, name), element("dd", { "data-fact": name }, value, element("small", {}, unit)))));
    this.ownEnd = timeline.end;
    if (this.timeline === null) {
      this.timeline = new Timeline(timeline, this.letter);
      this.pictures.append(
        element("section", {}, element("h2", {}, "The step"), this.timeline.toolbar(), this.timeline.box, this.legend),
        element("section", {}, element("h2", {}, "Where the time goes"), this.bars),
        element("section", {}, element("h2", {}, "Memory by rank"), element("p", { class: "note" }, "The most stage inputs that a rank holds for backwards; dashed: the limit."), this.levels),
        this.curves,
      );
    } else this.timeline.take(timeline);
    alignEnds();
    this.legend.replaceChildren(stageKeys(timeline));
    const width = Math.max(this.pictures.clientWidth, 280);
    this.bars.replaceChildren(keys(answer.bubble.causes.map(({ name, key }) => ({ name, style: `cause ${key}` }))), bars(answer.bubble, width));
    this.levels.replaceChildren(levels(answer.memory, width));
    this.table.replaceChildren(...answer.lines.map(([name, value]) => element("tr", {}, element("th", { scope: "row" }, name), element("td", {}, value))));
    this.command.textContent = answer.command;
    this.showCurves();
  }

  showCurves() {
    while (this.curves.children.length > 1) this.curves.lastChild.remove();
    if (this.curves.open && this.answer !== null) this.curves.append(...[...overTime(this.answer.over_time).children].slice(1));
  }

  async fetched(form) {
    const reply = await post(form, this.state());
    this.failed.textContent = reply.ok ? "" : (await reply.json()).problems.map((one) => one.text).join("\n");
    return reply.ok ? reply : null;
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
    if (reply === null) return;
    const { forward, backward, transfer, gather, reduce, move, stage_swap: swap, weight } = this.state();
    const costs = { forward, backward, transfer, gather, reduce, move, stage_swap: swap, weight };
    this.take({ ...Object.fromEntries(Object.entries(costs).filter(([, value]) => value !== undefined)), text: await reply.text() });
    this.text.focus();
    this.text.setSelectionRange(0, 0);
  }
}

function parsed(kind, text, missing) {
  if (text === "") return kind === "slider" || missing !== null ? missing : null;
  if (kind === "list") return text.split(/[\s,]+/).map((one) => (isNaN(one) ? one : Number(one)));
  return kind === "check" ? text === "true" : isNaN(text) ? text : Number(text);
}

// A bar for each rank, and where the limit is.
function levels({ by_rank: values, budget }, width) {
  const [left, right, height, gap] = [96, 56, 15, 4];
  const most = Math.max(...values, budget ?? 0, 1e-9);
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

// Two schedules have one time axis.
function alignEnds() {
  const drawn = sides.filter((side) => side.timeline !== null && side.ownEnd !== undefined);
  const end = Math.max(...drawn.map((side) => side.ownEnd));
  for (const { timeline } of drawn) {
    timeline.data.end = end;
    timeline.view = [0, end];
    timeline.resize();
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
    // What this version has no input for is the server's to refuse, not to be left out without a word.
    state[name] = field === undefined ? text : parsed(field.kind, text, null);
  }
  return state;
}

function load() {
  const [first, second] = [read(""), read("b.")];
  const isEmpty = Object.keys(first).length === 0;
  const known = (state) => "text" in state || choices.families.some((one) => one.name === state.family);
  const unknown = [...Object.keys(first), ...Object.keys(second)].filter((name) => !["family", "text", ...FIELDS.map((one) => one.name)].includes(name));
  const lost = [first, second].filter((state) => "family" in state && !known(state)).map((state) => `family=${state.family}`);
  say(...(unknown.length + lost.length > 0 ? [`This link has what this version lacks, which is left out: ${[...unknown, ...lost].join(", ")}`] : []));
  setCompared(Object.keys(second).length > 0, false);
  sides[0].take(isEmpty || !known(first) ? { family: choices.defaults.family, loops: 4, ...first, ...(known(first) ? {} : { family: choices.defaults.family }) } : first);
  if (sides.length > 1) sides[1].take(known(second) ? second : { ...second, family: choices.defaults.family });
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
  // Pictures are as wide as their side.
  for (const side of sides) if (side.answer !== null) side.showSchedule(side.answer);
  remember();
}

function say(...nodes) {
  const box = document.getElementById("shared");
  box.replaceChildren(...nodes);
  box.hidden = nodes.length === 0;
}

async function share() {
  // Without the token, which is whoever runs the server's alone.
  const link = location.origin + "/" + fragment();
  const field = element("input", { type: "text", readonly: "", value: link, "aria-label": "link" });
  say("Whoever has pipeloom sees the same with ", element("code", {}, "pipeloom playground 'LINK'"), ":", field);
  field.select();
  await navigator.clipboard.writeText(link).catch(() => {});
}

async function begin() {
  choices = await (await fetch("choices")).json();
  sides.push(new Side("A"));
  document.getElementById("sides").replaceChildren(sides[0].node);
  document.getElementById("share").after(modeButton());
  document.getElementById("compare").addEventListener("click", () => setCompared(sides.length === 1));
  document.getElementById("share").addEventListener("click", share);
  window.addEventListener("hashchange", load);
  let resizing = 0;
  window.addEventListener("resize", () => {
    clearTimeout(resizing);
    resizing = setTimeout(() => sides.forEach((side) => side.answer && side.showSchedule(side.answer)), 150);
  });
  load();
  root.dataset.state = "ready";
}

begin();
