// The picture of the step: lanes below each other on one time axis, stages above their load.
const data = JSON.parse(document.getElementById("data").textContent);
const UNITS = [["s", 1], ["ms", 1e-3], ["us", 1e-6], ["ns", 1e-9]]; // as verl_profiling/units.py writes times
const PAPER = 680; // fits A4 and Letter, upright
const FOLDED_FROM = 9; // lanes of a role
const SHOWN_OUTLIERS = 5;
const [BAR, STRIP, LOAD, CURVE] = [20, 4, 18, 34]; // heights: a stage, a nested one, load, requests
const EDGE = 3; // of a lane that is on the critical path
const TALL_LOAD = 40; // where there are few lanes
const FEW_LANES = 6;
const SHORTEST_US = 10; // what fills the picture at the closest zoom
const spans = data.groups.flatMap((group) => group.lanes.flatMap((lane) => lane.spans)).filter((span) => !span.said);

function timeUnit(seconds) {
  return UNITS.find(([, scale]) => Math.abs(seconds) >= 0.9995 * scale) ?? (seconds ? UNITS.at(-1) : UNITS[0]);
}

function duration(seconds) {
  if (!seconds) return "0 s";
  const [unit, scale] = timeUnit(seconds);
  const value = seconds / scale;
  const digits = Math.abs(value) < 9.995 ? 2 : Math.abs(value) < 99.95 ? 1 : 0;
  const rounded = Number(value.toFixed(digits)); // as Python rounds, which toLocaleString alone does not
  return `${rounded.toLocaleString("en-US", { minimumFractionDigits: digits })} ${unit}`;
}

function element(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

function makeTip(container) {
  const tip = element("div", { className: "tip", hidden: true });
  tip.setAttribute("role", "status");
  container.append(tip);
  return {
    hide() { tip.hidden = true; },
    show([title, ...rest], left, top) {
      const name = element("strong", {}, element("bdi", { textContent: title }));
      tip.replaceChildren(name, ...rest.map((line) => element("span", { textContent: line })));
      tip.hidden = false;
      const room = container.clientWidth - tip.offsetWidth - 4;
      tip.style.left = `${Math.max(4, Math.min(left + 14, room))}px`;
      tip.style.top = `${top + 18}px`;
    },
  };
}

function rowsOf(group, unfolded) {
  const large = !group.open && group.lanes.length >= FOLDED_FROM;
  const [standing, rest] = [true, false].map((wanted) => group.lanes.filter((lane) => Boolean(lane.stands_out) === wanted));
  const lanes = !large ? group.lanes : unfolded ? [...standing, ...rest] : standing.slice(0, SHOWN_OUTLIERS);
  const rows = lanes.map((lane) => ({ ...lane, ...lane.queue, kind: lane.queue ? "running" : "lane", group, lane }));
  if (large) rows.unshift({ ...group, kind: "group", group, spans: group.envelope });
  const requests = requestsOf(group, data.running);
  if (requests.running.length) rows.push({ ...requests, kind: "running", group, spans: [], load: [] });
  const few = d3.sum(data.groups, (each) => (each.open ? 0 : each.lanes.length)) <= FEW_LANES;
  for (const row of rows) {
    row.levels = 1 + Math.max(-1, ...row.spans.map((span) => span.row));
    row.loadHeight = row.load.length ? (few ? TALL_LOAD : LOAD) : 0;
    row.height = row.kind === "running" ? CURVE : row.levels * BAR + row.loadHeight + 4;
  }
  return rows;
}

// The sums over the replicas of a group; empty if none of them tells.
function requestsOf(group, all) {
  const known = [...new Set(group.lanes.map((lane) => lane.worker))].map((name) => all[name]).filter((queue) => queue?.running.length);
  const sum = (curve) => (known[0]?.[curve] ?? []).map((_, part) => d3.sum(known, (queue) => queue[curve][part]));
  return { running: sum("running"), waiting: sum("waiting"), slots: known.every(({ slots }) => slots) ? d3.sum(known, ({ slots }) => slots) : null };
}

const count = (number) => Math.round(10 * number) / 10;

// What runs and what waits, at the most or at one time.
function queueText(row, of) {
  const waiting = row.waiting.length ? `, ${count(of(row.waiting))} waiting` : "";
  return `${count(of(row.running))} running${waiting}${row.slots ? `, limit ${row.slots}` : ""}`;
}

function drawRow(row, svg, x, width) {
  const drawing = d3.select(svg).attr("width", width).attr("height", row.height);
  drawing.selectAll("g.stage").data(row.spans).join((enter) => enterBar(enter, row))
    .each(function place(span) { placeBar(d3.select(this), row, span, x, width); });
  const inside = (us) => Math.min(Math.max(x(us), -2), width + 2);
  drawing.selectAll("rect.critical").data(row.critical ?? []).join("rect").attr("class", "critical")
    .attr("x", (span) => inside(span.begin)).attr("width", (span) => inside(span.end) - inside(span.begin))
    .attr("y", row.height - EDGE).attr("height", EDGE);
  if (row.load.length) {
    const y = (share) => row.levels * BAR + 2 + row.loadHeight * (1 - share / 100);
    const alone = row.load.map((share, part) => share - (row.communication[part] ?? 0));
    const working = row.load.map((share, part) => share - (row.waiting[part] ?? 0));
    drawArea(drawing, "compute", alone.map(() => 0), alone, x, y);
    drawArea(drawing, "communication", alone, working, x, y);
    drawArea(drawing, "waiting", working, row.load, x, y);
  } else if (row.kind === "running") {
    const all = row.running.map((running, part) => running + (row.waiting[part] ?? 0));
    const most = Math.max(d3.max(all), row.slots, 1);
    const y = (calls) => CURVE - 2 - (calls / most) * (CURVE - 6);
    drawArea(drawing, "running", row.running.map(() => 0), row.running, x, y);
    if (row.waiting.length) drawArea(drawing, "queued", row.running, all, x, y);
    drawing.selectAll("line").data(row.slots ? [row.slots] : []).join("line").attr("class", "slots")
      .attr("x1", x(0)).attr("x2", x(data.span_us)).attr("y1", y).attr("y2", y);
  }
}

function drawArea(drawing, name, low, high, x, y) {
  if (!high.length) return;
  const ends = [...high.keys(), high.length - 1];
  const shape = d3.area().curve(d3.curveStepAfter).x((_, at) => x((at * data.span_us) / high.length)).y0((part) => y(low[part])).y1((part) => y(high[part]));
  drawing.selectAll(`path.${name}`).data([ends]).join("path").attr("class", name).attr("d", shape);
}

function enterBar(enter, row) {
  const bar = enter.append("g").attr("class", (span) => `stage ${data.stages[span.stage].colour}${span.nested ? " nested" : ""}`);
  bar.append("rect").attr("class", "spread");
  if (row.kind === "group") bar.append("rect").attr("class", "together");
  bar.append("text").text((span) => (span.nested ? "" : data.stages[span.stage].name));
  return bar;
}

function placeBar(bar, row, span, x, width) {
  const inside = (us) => Math.min(Math.max(x(us), -2), width + 2);
  const [begin, end] = [inside(span.begin), inside(span.end)];
  const seen = x(span.end) >= -1 && x(span.begin) <= width + 1;
  bar.attr("display", seen ? null : "none");
  if (!seen) return;
  const y = span.row * BAR + (span.nested ? BAR - STRIP - 1 : 0);
  bar.selectAll("rect").attr("y", y).attr("height", span.nested ? STRIP : BAR - 2);
  bar.select(".spread").attr("x", begin).attr("width", Math.max(end - begin, 0.8));
  bar.select(".together").attr("x", inside(span.all_in)).attr("width", Math.max(inside(span.first_out) - inside(span.all_in), 0));
  const room = end - Math.max(begin, 0) - 8;
  bar.select("text").attr("x", Math.max(begin, 0) + 4).attr("y", y + 12)
    .attr("display", room > 6.4 * data.stages[span.stage].name.length ? null : "none");
}

function spanAt(row, us, level) {
  const hits = row.spans.filter((span) => span.begin <= us && us <= span.end);
  return hits.find((span) => !span.nested && span.row === level) ?? hits.find((span) => !span.nested) ?? hits[0];
}

function linesAt(row, span, us) {
  const at = (curve) => curve[Math.min(Math.floor((us / data.span_us) * curve.length), curve.length - 1)] ?? 0; // empty: nothing in it
  const percent = (share) => `${Math.round(100 * share)} %`;
  const where = row.lane ? row.lane.name : `${row.group.role}, ${row.group.lanes.length} lanes`;
  const lines = [span ? data.stages[span.stage].name : row.kind === "running" ? "running and waiting" : "no stage", where];
  if (span) {
    const took = span.end - span.begin;
    lines.push(`${duration(took / 1e6)}, from ${duration(span.begin / 1e6)} to ${duration(span.end / 1e6)}`);
    if (span.said) lines.push(span.said);
    if (span.lanes > 1) lines.push(`the first ends it at ${duration(span.first_out / 1e6)}`);
  }
  if (row.load.length) {
    const [busy, alone, waiting] = [row.load, row.communication, row.waiting].map((curve) => at(curve) / 100);
    const waits = waiting ? `, ${percent(waiting)} of it waiting for other ranks` : "";
    lines.push(`at ${duration(us / 1e6)}: busy ${percent(busy)}, ${percent(alone)} communication alone${waits}`);
  }
  if (row.kind === "running") {
    lines.push(`at ${duration(us / 1e6)}: ${queueText(row, at)}`);
  }
  return [...lines, ...[row.lane?.stands_out].filter(Boolean)];
}

// Perfetto ignores a range that begins before the first event of a timeline, or ends after its last.
function timelineAddress([begin, end]) {
  const given = new URLSearchParams(location.hash.slice(1)).get("timeline");
  const trusted = given && (given.startsWith(`${location.origin}/#!`) || given.startsWith("https://ui.perfetto.dev/#!"));
  if (!trusted || data.timeline_begin_ns == null || !spans.length) return null;
  const [first, last] = [d3.min(spans, (span) => span.begin), d3.max(spans, (span) => span.end)];
  const at = (us) => Math.round(data.timeline_begin_ns + Math.min(Math.max(us, first), last) * 1000);
  return `${given}&visStart=${at(begin)}&visEnd=${at(end)}`;
}

function labelOf(row, unfolded, build) {
  const label = element("div", { className: "label" });
  if (row.kind === "running") {
    const name = row.lane?.name ?? "requests";
    label.append(element("bdi", { textContent: name, title: name }), element("small", { textContent: `at most ${queueText(row, d3.max)}` }));
  } else if (row.kind === "lane") {
    label.classList.toggle("standing", Boolean(row.lane.stands_out));
    label.append(element("bdi", { textContent: row.lane.name, title: row.lane.name }));
    if (row.lane.stands_out) label.append(element("small", { textContent: row.lane.stands_out }));
  } else {
    const { role, lanes } = row.group;
    const open = unfolded.has(role);
    const button = element("button", { type: "button", textContent: open ? "fold" : `all ${lanes.length}` });
    button.setAttribute("aria-expanded", String(open));
    button.setAttribute("aria-label", `${button.textContent} lanes of ${role}`);
    button.addEventListener("click", () => {
      if (!unfolded.delete(role)) unfolded.add(role);
      build();
      document.querySelector(`[data-role="${CSS.escape(role)}"] button`).focus();
    });
    label.dataset.role = role;
    label.append(element("bdi", { textContent: `${role} × ${lanes.length}` }), button);
  }
  return label;
}

function makePicture(container, tools) {
  const rows = element("div", { className: "rows", tabIndex: 0 });
  rows.setAttribute("role", "group");
  rows.setAttribute("aria-label", "Stages of every lane over time");
  const ruler = d3.select(container).append("div").attr("class", "ruler");
  const ticks = ruler.append("svg").attr("aria-hidden", "true");
  const grid = d3.select(container).append("svg").attr("class", "grid").attr("aria-hidden", "true");
  const cursor = element("div", { className: "cursor", hidden: true });
  const link = element("a", { textContent: "timeline", title: "this range in the timeline", target: "_blank", rel: "noopener", hidden: true });
  container.append(rows, cursor);
  const tip = makeTip(container);
  const whole = d3.scaleLinear().domain([0, data.span_us]);
  const unfolded = new Set();
  let [shown, x, left, width, asked, selected] = [[], whole, 0, 0, 0, null];

  const zoom = d3.zoom().clickDistance(4).filter((event) => {
    const outwards = event.deltaY > 0 && d3.zoomTransform(rows).k <= 1;
    if (event.type === "wheel") return event.ctrlKey || event.metaKey || (rows.contains(document.activeElement) && !outwards);
    return !event.button && !event.target.closest(".label");
  }).on("zoom", ({ transform }) => {
    x = transform.rescaleX(whole);
    cancelAnimationFrame(asked);
    asked = requestAnimationFrame(draw);
  });
  const zoomed = d3.select(rows).call(zoom);

  function draw() {
    const visible = x.domain();
    const [unit, scale] = timeUnit((visible[1] - visible[0]) / 1e6);
    const axis = d3.scaleLinear(visible.map((us) => us / 1e6 / scale), [0, width]);
    const count = Math.max(2, Math.floor(width / 110));
    const labels = d3.axisBottom(axis).ticks(count).tickSizeOuter(0).tickFormat((value) => `${+value.toPrecision(9)} ${unit}`);
    ticks.attr("width", width).attr("height", 22).call(labels);
    grid.style("left", `${left}px`).attr("width", width).attr("height", rows.offsetHeight)
      .selectAll("line").data(axis.ticks(count)).join("line").attr("x1", axis).attr("x2", axis).attr("y2", rows.offsetHeight);
    for (const { row, svg } of shown) drawRow(row, svg, (us) => x(us) - left, width);
    d3.select(rows).selectAll("g.stage").classed("dim", (span) => selected !== null && span.stage !== selected);
    const address = timelineAddress(visible);
    link.hidden = !address;
    if (address) link.href = address;
    document.getElementById("view").hidden = Boolean(address) || data.timeline_begin_ns == null;
  }

  function build() {
    shown = data.groups.flatMap((group) => rowsOf(group, unfolded.has(group.role))).map((row) => {
      const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
      svg.setAttribute("aria-hidden", "true");
      const plot = element("div", { className: "plot" }, svg);
      const node = element("div", { className: `row ${row.kind}` }, labelOf(row, unfolded, build), plot);
      node.setAttribute("role", "group");
      node.setAttribute("aria-label", row.lane?.name ?? row.group.role);
      return { row, svg, node, plot };
    });
    rows.replaceChildren(...shown.map(({ node }) => node));
    layout();
  }

  function layout() {
    if (!shown.length) return;
    left = shown[0].plot.getBoundingClientRect().left - rows.getBoundingClientRect().left;
    width = shown[0].plot.clientWidth;
    whole.range([left, left + width]);
    const extent = [[left, 0], [left + width, 1]];
    zoom.extent(extent).translateExtent(extent).scaleExtent([1, Math.max(data.span_us / SHORTEST_US, 1)]);
    x = d3.zoomTransform(rows).rescaleX(whole);
    ruler.style("padding-left", `${left}px`);
    draw();
  }

  function select(stage) {
    selected = selected === stage ? null : stage;
    tools.querySelectorAll(".legend button").forEach((button, at) => button.setAttribute("aria-pressed", String(at === selected)));
    draw();
  }

  function onPointer(event) {
    const found = shown.find(({ node }) => node.contains(event.target));
    const [at, top] = d3.pointer(event, container);
    const hidden = !found || at < left || event.pointerType === "touch";
    cursor.hidden = hidden;
    if (hidden) return tip.hide();
    const us = Math.min(Math.max(x.invert(at), 0), data.span_us);
    const bar = event.target.closest("g.stage");
    const span = bar ? d3.select(bar).datum() : spanAt(found.row, us, Math.floor(d3.pointer(event, found.svg)[1] / BAR));
    cursor.style.left = `${at}px`;
    return tip.show(linesAt(found.row, span, us), at, top);
  }

  rows.addEventListener("pointermove", onPointer);
  rows.addEventListener("pointerleave", () => { tip.hide(); cursor.hidden = true; });
  rows.addEventListener("click", (event) => {
    const bar = event.target.closest("g.stage");
    if (bar) select(d3.select(bar).datum().stage);
    if (!event.target.closest("button")) rows.focus({ preventScroll: true });
  });

  const legend = element("ul", { className: "legend" });
  data.stages.forEach(({ name, colour }, stage) => {
    const button = element("button", { type: "button", title: "select in all lanes" }, element("i", { className: colour }), element("bdi", { textContent: name }));
    button.setAttribute("aria-pressed", "false");
    button.addEventListener("click", () => select(stage));
    legend.append(element("li", {}, button));
  });
  const loads = { compute: data.device ? "computing" : "operators", communication: "communication alone", waiting: "waiting for other ranks" };
  for (const [name, text] of Object.entries(loads)) legend.append(element("li", {}, element("i", { className: name }), text));
  if (data.groups.some((group) => group.critical.length)) legend.append(element("li", {}, element("i", { className: "critical" }), "on the critical path"));
  if (Object.keys(data.running).length || data.groups.some(({ role }) => role === "services")) {
    for (const [name, text] of [["running", "calls running"], ["queued", "calls waiting"], ["slots", "limit"]]) legend.append(element("li", {}, element("i", { className: name }), text));
  }
  legend.append(element("li", {}, "blank: idle"));
  const buttons = element("div", { className: "zoom" });
  for (const [text, title, act] of [["+", "closer", () => zoomed.call(zoom.scaleBy, 1.6)], ["−", "farther", () => zoomed.call(zoom.scaleBy, 1 / 1.6)], ["whole step", "the whole step", () => zoomed.call(zoom.transform, d3.zoomIdentity)]]) {
    const button = element("button", { type: "button", textContent: text, title });
    button.setAttribute("aria-label", title);
    button.addEventListener("click", act);
    buttons.append(button);
  }
  buttons.append(link);
  tools.append(legend, buttons);
  container.after(element("p", { className: "note hint", textContent: "Click into the picture, then the wheel zooms and dragging pans; Ctrl and wheel zoom at once." }));
  build();
  const wide = (width) => { container.style.width = width; layout(); };
  new ResizeObserver(layout).observe(container);
  addEventListener("beforeprint", () => wide(`${PAPER}px`));
  addEventListener("afterprint", () => wide(""));
}

makePicture(document.getElementById("picture"), document.getElementById("tools"));
