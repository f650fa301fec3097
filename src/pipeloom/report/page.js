// Lays out the JSON contents of a report, with the functions of drawing.js.

// ---------------------------------------------------------------- head

function head(contents) {
  const facts = contents.facts.map(([name, value]) => element("div", {}, element("dt", {}, name), element("dd", {}, value)));
  const title = contents.title.replaceAll(" x ", " \u00d7 ");
  const nodes = [element("header", {}, element("h1", {}, title), element("p", {}, contents.folder), modeButton())];
  if (contents.unfinished !== null) nodes.push(unfinished(contents.unfinished));
  if (contents.verdict !== null) nodes.push(verdict(contents.verdict));
  return [...nodes, element("dl", { class: "facts" }, ...facts)];
}

// Measured and predicted step in words, and the parts that differ by more than the spread of the steps.
function verdict({ headline, causes, note }) {
  const lines = causes.map(([name, text]) => element("li", {}, element("b", {}, name), ": ", ...sentence(text)));
  const node = element("section", { class: "verdict", role: "note" }, element("h2", {}, "Verdict"), element("p", {}, ...sentence(headline)));
  node.append(lines.length > 0 ? element("ul", {}, ...lines) : element("p", {}, ...sentence(note)));
  return node;
}

// What an unfinished run lacks, and how to resume it.
function unfinished({ headline, state, missing, checkpoints, resume }) {
  const lines = missing.map(([what, why]) => element("li", {}, element("b", {}, what), `: ${why}`));
  const node = element("section", { class: "unfinished", role: "note" }, element("h2", {}, headline), element("p", {}, state));
  if (lines.length > 0) node.append(element("p", {}, "Missing on this page:"), element("ul", {}, ...lines));
  if (checkpoints.length > 0) node.append(element("p", {}, `Checkpoints: ${checkpoints.join(", ")}`));
  if (resume !== null) node.append(element("p", {}, "To resume: ", element("code", {}, resume)));
  return node;
}

// ---------------------------------------------------------------- measured and predicted

function headline(rows) {
  const cards = rows.map((row) => {
    const pair = (name, value, kind) => element("div", {}, element("dt", {}, name), element("dd", { class: kind }, value));
    const list = element("dl");
    if (row.measured !== null) list.append(pair("measured", row.measured, "measured"));
    if (row.predicted !== null) list.append(pair("predicted", row.predicted, "predicted"));
    if (row.ratio !== null) list.append(pair(row.ratio_of, row.ratio, "ratio"));
    return element("div", { class: "card" }, element("h3", {}, row.name), element("p", { class: "note" }, row.note), list);
  });
  return section("Speed", "", element("div", { class: "headline" }, ...cards));
}

// ---------------------------------------------------------------- timelines

function timelines(data) {
  const timeline = new Timeline(data);
  const node = section(
    "The step",
    "A row for each rank, a box for each action. Colors show kinds of actions; labels are stage, letter and micro-batch, as far as there is room.",
    timeline.toolbar(),
    timeline.box,
    timeline.legend,
  );
  return { node, timeline };
}

// ---------------------------------------------------------------- where the time goes

function pairedHeads(traces, groups) {
  const first = element("tr", {}, element("th", { class: "text" }));
  const second = element("tr", {}, element("th", { class: "text" }));
  for (const group of groups) {
    first.append(element("th", { class: "group first", colspan: traces.length }, group));
    traces.forEach((trace, number) => second.append(element("th", { class: trace + (number ? "" : " first") }, trace)));
  }
  return traces.length > 1 ? [first, second] : [first];
}

function account(data) {
  const head = element("thead", {}, ...pairedHeads(data.traces, data.causes.map((cause) => cause.name)));
  const body = element("tbody");
  data.rows.forEach((cells, number) => {
    const row = element("tr", number >= data.groups.length ? { class: "total" } : {});
    cells.forEach((text, column) => {
      const trace = (column - 1) % data.traces.length;
      const kind = column === 0 ? "text" : data.traces[trace] + (trace === 0 ? " first" : "");
      row.append(element("td", { class: kind }, text));
    });
    body.append(row);
  });
  return section(
    "Where the time goes",
    "The step of each rank by cause; the causes add up to the whole step. All bars have the same scale.",
    meanings(data.causes),
    bars(data),
    element("div", { class: "scroll" }, element("table", {}, head, body)),
    element("p", { class: "note" }, "In milliseconds. The last rows are the sums over all ranks, and the share of each cause."),
  );
}

// ---------------------------------------------------------------- all pipelines

function pipelines(rows) {
  const groups = ["messages", "data-parallel collectives"];
  const first = element("tr", {}, ...["", "", ""].map(() => element("th", { class: "text" })));
  const second = element("tr", {}, element("th", { class: "text" }, "pipeline"), element("th", {}, "step"), element("th", {}, "compute"));
  for (const group of groups) {
    first.append(element("th", { class: "group first", colspan: 3 }, group));
    ["busy", "hidden", "exposed"].forEach((name, number) => second.append(element("th", { class: number ? "" : "first" }, name)));
  }
  const body = element("tbody");
  for (const cells of rows) {
    const kinds = (column) => (column === 0 ? "text" : column >= 3 && column % 3 === 0 ? "first" : "");
    body.append(element("tr", {}, ...cells.map((text, column) => element("td", { class: kinds(column) }, text))));
  }
  return section(
    "Replicas",
    "The measured step of every pipeline in milliseconds. Compute and communication are sums over its ranks; the step is from the first action to the last.",
    element("div", { class: "scroll" }, element("table", {}, element("thead", {}, first, second), body)),
  );
}

// ---------------------------------------------------------------- communication

function communication(data) {
  const title = "Communication";
  if (data.rows.length === 0) return section(title, "There is no communication.");
  const columns = ["busy", "hidden", "exposed", "hidden share"];
  const first = element("tr", {}, ...["", "", ""].map(() => element("th", { class: "text" })));
  const second = element("tr", {}, element("th", { class: "text" }, "rank"), element("th", { class: "text" }, "lane"));
  second.append(element("th", {}, "actions"));
  for (const trace of data.traces) {
    first.append(element("th", { class: "group first", colspan: columns.length }, trace));
    columns.forEach((name, number) => second.append(element("th", { class: number ? "" : "first" }, name)));
  }
  const body = element("tbody");
  let before = "";
  for (const cells of [...data.rows, data.total]) {
    const row = element("tr", cells === data.total ? { class: "total" } : {});
    cells.forEach((text, column) => {
      const kind = column < 2 ? "text" : (column - 3) % columns.length === 0 ? "first" : "";
      row.append(element("td", { class: kind }, column === 0 && text === before ? "" : text));
    });
    before = cells[0];
    body.append(row);
  }
  return section(
    title,
    "Milliseconds for each lane. Busy: an action runs on the lane; hidden: the rank computes at the same time; exposed: it " +
      "does not. A message counts once, at its receiver: the send also lasts while the receiver is not ready.",
    element("div", { class: "scroll" }, element("table", {}, element("thead", {}, first, second), body)),
  );
}

// ---------------------------------------------------------------- curves

function curve(data, width) {
  const [height, left, right, top] = [width > WIDTH ? 300 : 230, 60, width - 14, 12];
  const bottom = height - 40;
  const { node, picture } = frame(width, height, data.unit ? `${data.title}, ${data.unit}` : data.title);
  const values = [...data.points.map((point) => point[1]), ...data.levels.map((l) => l.value), ...data.marks.map((m) => m.at[1])];
  const known = values.filter((value) => value !== null);
  if (known.length === 0) {
    picture.replaceWith(element("p", { class: "note" }, "No value is a finite number."));
    return node;
  }
  const low = data.from_zero ? 0 : Math.min(...known);
  const high = Math.max(...known);
  // The range of a flat curve is its value, or 1 if that is zero.
  const room = (high - low || Math.abs(high) || 1) * 0.05;
  const range = [data.from_zero ? 0 : low - room, high + room];
  const ends = [data.points[0][0], data.points.at(-1)[0]];
  const x = (step) => (ends[0] === ends[1] ? (left + right) / 2 : left + ((step - ends[0]) / (ends[1] - ends[0])) * (right - left));
  const y = (value) => bottom - ((value - range[0]) / (range[1] - range[0])) * (bottom - top);
  const across = ends[0] === ends[1] ? { values: [ends[0]], digits: 0 } : { ...ticks(ends[0], ends[1], 8), digits: 0 };
  // Steps are whole numbers.
  across.values = across.values.filter(Number.isInteger);
  axes(picture, { x, y, across, up: ticks(...range, 6), bottom, left, right, unit: "step" });
  const legend = [{ name: data.title.toLowerCase(), style: "line measured" }];
  for (const { name, value, style } of data.levels) {
    if (value === null) continue;
    const ends = { x1: left, x2: right, y1: y(value), y2: y(value) };
    picture.append(svg("line", { ...ends, class: `line level ${style}` }, svg("title", {}, name)));
    legend.push({ name, style: `line level ${style}` });
  }
  picture.append(path(data.points, x, y, "line measured"));
  // Only few dots: more would cover the line.
  if (data.points.length < 40) {
    for (const [step, value] of data.points) {
      if (value !== null) picture.append(svg("circle", { cx: x(step), cy: y(value), r: 2.2, class: "dot measured" }));
    }
  }
  for (const { name, at } of data.marks) {
    if (at[1] === null) continue;
    picture.append(svg("circle", { cx: x(at[0]), cy: y(at[1]), r: 5, class: "mark predicted" }));
    if (name) legend.push({ name, style: "mark predicted" });
  }
  if (legend.length > 1) node.insertBefore(keys(legend), picture);
  return node;
}

// The first curve has the width of the page.
function training(curves) {
  const nodes = curves.map((data, number) => curve(data, number || innerWidth <= 900 ? WIDTH : 2 * WIDTH));
  nodes[0].classList.add("wide");
  return section("Training", "", element("div", { class: "grid" }, ...nodes));
}

// ---------------------------------------------------------------- the rest

function sample({ prompt, continuation }) {
  const note = prompt ? "Gray: the prompt, from the validation text. Behind it: text from the trained model." : "";
  const text = element("pre", { class: "sample" }, element("span", { class: "prompt" }, prompt), continuation);
  return section("Sample", note, text);
}

// A part of an answer: paragraphs, lists of sentences, and tables.
function prose({ head, is_bad, parts }) {
  const nodes = parts.map((part) => {
    if (part.text !== undefined) return element("p", { class: "prose" }, ...sentence(part.text));
    if (part.list !== undefined) return element("ul", { class: "prose" }, ...part.list.map((text) => element("li", {}, ...sentence(text))));
    const kind = (column) => (part.is_text[column] ? "text" : "");
    const cells = (tag, row) => element("tr", {}, ...row.map((text, column) => element(tag, { class: kind(column) }, text)));
    const body = element("tbody", {}, ...part.rows.map((row) => cells("td", row)));
    return element("div", { class: "scroll" }, element("table", {}, element("thead", {}, cells("th", part.heads)), body));
  });
  if (head) return section(head[0].toUpperCase() + head.slice(1), "", ...nodes);
  return element("section", is_bad ? { class: "unfinished" } : {}, ...nodes);
}

function config(parts, note) {
  const blocks = parts.map((part) => {
    const [first, ...rest] = part.split("\n");
    return element("pre", {}, element("b", {}, first), "\n" + rest.join("\n"));
  });
  return section("Configuration", note, element("div", { class: "config" }, ...blocks));
}

function build() {
  const contents = JSON.parse(document.getElementById("contents").textContent);
  const page = document.getElementById("page");
  page.replaceChildren(...head(contents));
  for (const part of contents.answer) page.append(prose(part));
  if (contents.curves.length > 0) page.append(training(contents.curves));
  if (contents.headline.length > 0) page.append(headline(contents.headline));
  const step = contents.timeline === null ? null : timelines(contents.timeline);
  if (step !== null) page.append(step.node, account(contents.bubble), communication(contents.communication));
  if (contents.pipelines.length > 0) page.append(pipelines(contents.pipelines));
  for (const chart of contents.over_time) page.append(overTime(chart));
  for (const part of contents.reasons) page.append(prose(part));
  if (contents.sample !== null) page.append(sample(contents.sample));
  if (contents.config.length > 0) page.append(config(contents.config, contents.config_note));
  // Last, since a canvas has no width before it is in the page.
  if (step !== null) step.timeline.resize();
  root.dataset.expected = step === null ? 0 : contents.timeline.boxes;
  root.dataset.state = "ready";
}

build();
