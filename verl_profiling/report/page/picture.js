// The picture of the step: lanes below each other on one time axis.
function makePicture(container) {
  const rows = element("div", { className: "rows", tabIndex: -1 });
  rows.setAttribute("role", "group");
  rows.setAttribute("aria-label", "Stages of every lane over time");
  const ruler = d3.select(container).append("div").attr("class", "ruler");
  const ticks = ruler.append("svg").attr("aria-hidden", "true");
  const grid = d3.select(container).append("svg").attr("class", "grid").attr("aria-hidden", "true");
  const cursor = element("div", { className: "cursor", hidden: true });
  container.append(rows, cursor);
  const tip = makeTip(container);
  const unfolded = new Set();
  let shown = [];
  let selected = null;
  const axis = makeTimeAxis(rows, data.span_us, draw);

  function draw() {
    const [begin, end] = axis.visible();
    const [unit, scale] = timeUnit((end - begin) / 1e6);
    const x = axis.x.copy().range([0, axis.width]).domain([begin / 1e6 / scale, end / 1e6 / scale]);
    const count = Math.max(2, Math.floor(axis.width / 110));
    const height = rows.offsetHeight;
    ticks.attr("width", axis.width).attr("height", 22).call(d3.axisBottom(x).ticks(count).tickSizeOuter(0).tickFormat((value) => `${+value.toPrecision(9)} ${unit}`));
    grid.style("left", `${axis.left}px`).attr("width", axis.width).attr("height", height)
      .selectAll("line").data(x.ticks(count)).join("line").attr("x1", x).attr("x2", x).attr("y2", height);
    for (const { row, svg } of shown) drawRow(row, svg, axis);
    for (const { svg } of shown) {
      d3.select(svg).selectAll("g.stage").classed("dim", (span) => selected !== null && span.stage !== selected)
        .attr("aria-pressed", (span) => String(span.stage === selected));
    }
    container.dispatchEvent(new CustomEvent("range", { detail: axis.visible() }));
  }

  function label(row) {
    if (row.kind === "running") {
      const [running, queued] = [row.running, row.queued].map((curve) => Math.round(10 * d3.max(curve)) / 10);
      return element("div", { className: "label" }, element("small", { textContent: queued ? `requests, peak ${running}, queued ${queued}` : `requests running, peak ${running}` }));
    }
    if (row.kind === "lane") {
      const made = element("div", { className: `label${row.lane.stands_out ? " standing" : ""}`, title: row.lane.name }, element("bdi", { textContent: row.lane.name }));
      if (row.lane.stands_out) made.append(element("small", { textContent: row.lane.stands_out }));
      if (row.lane.shares) made.append(element("small", { textContent: row.lane.shares }));
      return made;
    }
    const open = unfolded.has(row.group.role);
    const button = element("button", { type: "button", textContent: open ? "fold" : `all ${row.group.lanes.length}` });
    button.setAttribute("aria-expanded", String(open));
    button.setAttribute("aria-label", `${button.textContent} lanes of ${row.group.role}`);
    button.addEventListener("click", () => {
      if (!unfolded.delete(row.group.role)) unfolded.add(row.group.role);
      build();
      rows.querySelector(`[data-role="${CSS.escape(row.group.role)}"] button`).focus();
    });
    const made = element("div", { className: "label" }, element("bdi", { textContent: `${row.group.role} × ${row.group.lanes.length}` }), button);
    made.dataset.role = row.group.role;
    return made;
  }

  function build() {
    shown = data.groups.flatMap((group) => rowsOf(group, unfolded.has(group.role))).map((row) => {
      const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
      const plot = element("div", { className: "plot" }, svg);
      const node = element("div", { className: `row ${row.kind}${row.lane?.shares ? " shared" : ""}` }, label(row), plot);
      node.setAttribute("role", "group");
      node.setAttribute("aria-label", row.lane?.name ?? row.group.role);
      return { row, svg, node, plot };
    });
    rows.replaceChildren(...shown.map(({ node }) => node));
    layout();
    const first = rows.querySelector("g.stage");
    first?.setAttribute("tabindex", 0);
  }

  function layout() {
    if (!shown.length) return;
    const { plot } = shown[0];
    const left = plot.getBoundingClientRect().left - rows.getBoundingClientRect().left;
    axis.resize(left, plot.clientWidth);
    ruler.style("padding-left", `${left}px`);
    draw();
  }

  function select(stage) {
    selected = selected === stage ? null : stage;
    draw();
    container.dispatchEvent(new CustomEvent("stage", { detail: selected }));
  }

  function focusOn(bar) {
    if (!bar) return;
    rows.querySelector('g.stage[tabindex="0"]')?.setAttribute("tabindex", -1);
    bar.setAttribute("tabindex", 0);
    const span = d3.select(bar).datum();
    const [begin, end] = axis.visible();
    if (span.end < begin || span.begin > end) axis.show(span.begin - (end - begin) / 2.4, span.begin + (end - begin) / 2.4);
    bar.removeAttribute("display");
    bar.focus();
  }

  function neighbour(bar, key) {
    const at = shown.findIndex(({ svg }) => svg.contains(bar));
    const span = d3.select(bar).datum();
    const inOrder = (svg) => [...svg.querySelectorAll("g.stage")].sort((a, b) => d3.select(a).datum().begin - d3.select(b).datum().begin);
    if (key === "ArrowLeft" || key === "ArrowRight") {
      const bars = inOrder(shown[at].svg);
      return bars[bars.indexOf(bar) + (key === "ArrowRight" ? 1 : -1)];
    }
    const step = key === "ArrowDown" ? 1 : -1;
    let next = at + step;
    while (shown[next] && !shown[next].row.spans.length) next += step;
    if (!shown[next]) return null;
    const bars = inOrder(shown[next].svg);
    const nearest = (each) => Math.abs(d3.select(each).datum().begin - span.begin);
    return bars.reduce((a, b) => (nearest(b) < nearest(a) ? b : a));
  }

  function onKey(event) {
    const bar = event.target.closest("g.stage");
    const { key, shiftKey } = event;
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("button")) return;
    const arrow = key.startsWith("Arrow");
    if (key === "+" || key === "=") axis.closer();
    else if (key === "-") axis.farther();
    else if (key === "0" || key === "Home") axis.reset();
    else if (arrow && shiftKey && (key === "ArrowLeft" || key === "ArrowRight")) axis.pan(key === "ArrowRight" ? 0.25 : -0.25);
    else if (arrow && bar) focusOn(neighbour(bar, key));
    else if (bar && (key === "Enter" || key === " ")) select(d3.select(bar).datum().stage);
    else if (bar && key === "z") axis.show(d3.select(bar).datum().begin, d3.select(bar).datum().end);
    else if (key === "Escape") { tip.hide(); if (selected !== null) select(selected); }
    else return;
    event.preventDefault();
  }

  function onPointer(event) {
    const found = shown.find(({ node }) => node.contains(event.target));
    const [x, y] = d3.pointer(event, container);
    if (!found || x < axis.left || event.pointerType === "touch") { tip.hide(); cursor.hidden = true; return; }
    const us = Math.min(Math.max(axis.x.invert(x), 0), data.span_us);
    const [, inside] = d3.pointer(event, found.svg);
    const under = event.target.closest("g.stage");
    const span = under ? d3.select(under).datum() : spanAt(found.row, us, Math.floor(inside / BAR));
    cursor.hidden = false;
    cursor.style.left = `${x}px`;
    tip.show(linesAt(found.row, span, us), x, y);
  }

  rows.addEventListener("pointermove", onPointer);
  rows.addEventListener("pointerleave", () => { tip.hide(); cursor.hidden = true; });
  rows.addEventListener("keydown", onKey);
  rows.addEventListener("click", (event) => {
    const bar = event.target.closest("g.stage");
    if (bar) { select(d3.select(bar).datum().stage); focusOn(bar); }
    else if (!event.target.closest("button")) rows.focus({ preventScroll: true });
  });
  rows.addEventListener("focusin", (event) => {
    const bar = event.target.closest("g.stage");
    const found = bar && shown.find(({ svg }) => svg.contains(bar));
    if (!found) return;
    const span = d3.select(bar).datum();
    const box = bar.getBoundingClientRect();
    const frame = container.getBoundingClientRect();
    tip.show(linesAt(found.row, span, Math.max(span.begin, axis.visible()[0])), box.left - frame.left, box.top - frame.top);
  });
  rows.addEventListener("focusout", tip.hide);
  build();
  onWidth(container, layout);
  return { axis, select, selected: () => selected };
}

function makeTools(bar, container, picture) {
  const legend = element("ul", { className: "legend" });
  data.stages.forEach(({ name, colour }, stage) => {
    const button = element("button", { type: "button", title: "select in all lanes" }, element("i", { className: colour }), element("bdi", { textContent: name }));
    button.setAttribute("aria-pressed", "false");
    button.addEventListener("click", () => picture.select(stage));
    legend.append(element("li", {}, button));
  });
  const loads = [["compute", data.device ? "computing" : "operators"], ["communication", "communication alone"], ["waiting", "waiting for other ranks"]];
  for (const [name, text] of loads) legend.append(element("li", {}, element("i", { className: name }), text));
  legend.append(element("li", {}, "blank: idle"));
  const buttons = element("div", { className: "zoom" });
  for (const [text, title, act] of [["+", "closer (+)", picture.axis.closer], ["−", "farther (-)", picture.axis.farther], ["whole step", "the whole step (0)", picture.axis.reset]]) {
    const button = element("button", { type: "button", textContent: text, title });
    button.setAttribute("aria-label", title);
    button.addEventListener("click", act);
    buttons.append(button);
  }
  const link = element("a", { textContent: "timeline", title: "this range in the timeline", target: "_blank", rel: "noopener" });
  link.hidden = true;
  buttons.append(link);
  bar.append(legend, buttons);
  const hint = "Click into the picture, then: wheel zooms, drag pans; arrow keys move, + - 0 zoom, Enter selects a stage. Ctrl and wheel zoom at once.";
  container.after(element("p", { className: "note hint", textContent: hint }));

  const said = document.getElementById("selected");
  container.addEventListener("range", ({ detail }) => {
    const address = timelineAddress(detail);
    link.hidden = !address;
    document.getElementById("view").hidden = Boolean(address) || data.timeline_begin_ns == null;
    if (address) link.href = address;
  });
  container.addEventListener("stage", ({ detail }) => {
    legend.querySelectorAll("button").forEach((button, stage) => button.setAttribute("aria-pressed", String(stage === detail)));
    said.replaceChildren();
    if (detail === null) return;
    const runs = runsOf(detail);
    const near = element("button", { type: "button", textContent: "zoom to it" });
    near.addEventListener("click", () => picture.axis.show(Math.min(...runs.map((run) => run.begin)), Math.max(...runs.map((run) => run.end))));
    const clear = element("button", { type: "button", textContent: "clear" });
    clear.addEventListener("click", () => picture.select(detail));
    said.append(element("i", { className: data.stages[detail].colour }), element("bdi", { textContent: describeStage(detail) }), near, " ", clear);
  });
}

const place = document.getElementById("picture");
if (place) {
  const picture = makePicture(place);
  makeTools(document.getElementById("tools"), place, picture);
  picture.axis.reset();
}
