// Lanes by role: which are shown, and how each is drawn. A large role is folded; what stands out is shown first.
const FOLDED_FROM = 9;
const SHOWN_OUTLIERS = 5;
const BAR = 20;
const STRIP = 4;
const LOAD = 18;
const TALL_LOAD = 40; // where there are few lanes
const FEW_LANES = 6;
const CURVE = 34;

function rowsOf(group, unfolded) {
  const large = group.lanes.length >= FOLDED_FROM;
  const standing = group.lanes.filter((lane) => lane.stands_out);
  const rest = group.lanes.filter((lane) => !lane.stands_out);
  const rows = [];
  if (large) rows.push({ kind: "group", key: `group ${group.role}`, group, spans: group.envelope, ...curves(group) });
  const lanes = !large ? group.lanes : unfolded ? [...standing, ...rest] : standing.slice(0, SHOWN_OUTLIERS);
  for (const lane of lanes) rows.push({ kind: "lane", key: lane.name, group, lane, spans: lane.spans, ...curves(lane) });
  const running = requestsOf(group, data.running);
  const queued = requestsOf(group, data.queued);
  if (running.length) rows.push({ kind: "running", key: `running ${group.role}`, group, spans: [], running, queued });
  const loadHeight = d3.sum(data.groups, ({ lanes: all }) => all.length) > FEW_LANES ? LOAD : TALL_LOAD;
  for (const row of rows) {
    row.levels = 1 + Math.max(-1, ...row.spans.map((span) => span.row));
    row.loadHeight = row.load?.length ? loadHeight : 0;
  }
  return rows;
}

// Reports of older versions have fewer curves.
function curves({ load, communication, waiting }) {
  const whole = (curve) => load.map((_, part) => curve[part] ?? 0);
  return { load, communication: whole(communication), waiting: whole(waiting) };
}

// The sum over the replicas of a group; empty if none of them tells.
function requestsOf(group, curves) {
  const workers = [...new Set(group.lanes.map((lane) => lane.worker))].filter((name) => curves[name]?.length);
  if (!workers.length) return [];
  return curves[workers[0]].map((_, part) => workers.reduce((sum, name) => sum + curves[name][part], 0));
}

function describe(row, span) {
  const name = data.stages[span.stage].name;
  const where = row.kind === "group" ? plural(span.lanes, `lane`) + ` of ${row.group.role}` : row.lane.name;
  const busy = span.busy == null || span.end <= span.begin ? "" : `, busy ${percent(span.busy / (span.end - span.begin))}`;
  return `${name}, ${where}: ${duration((span.end - span.begin) / 1e6)}${busy}`;
}

function heightOf(row) {
  return row.kind === "running" ? CURVE : row.levels * BAR + row.loadHeight + 4;
}

function drawRow(row, svg, axis) {
  const x = (us) => axis.x(us) - axis.left;
  const drawing = d3.select(svg).attr("width", axis.width).attr("height", heightOf(row));
  drawing.selectAll("g.stage").data(row.spans).join((enter) => enterBar(enter, row))
    .each(function place(span) { placeBar(d3.select(this), row, span, x, axis.width); });
  const parts = row.load?.length ?? 0;
  if (parts) {
    const y = (share) => row.levels * BAR + 2 + row.loadHeight * (1 - share / 100);
    const below = { compute: row.load.map((share, part) => share - row.communication[part]) };
    below.communication = row.load.map((share, part) => share - row.waiting[part]);
    drawArea(drawing, "compute", below.compute.map((share) => [0, share]), parts, x, y);
    drawArea(drawing, "communication", below.communication.map((share, part) => [below.compute[part], share]), parts, x, y);
    drawArea(drawing, "waiting", row.load.map((share, part) => [below.communication[part], share]), parts, x, y);
  }
  if (row.kind === "running") {
    const most = Math.max(d3.max(row.running), 1);
    const y = (count) => CURVE - 2 - (count / most) * (CURVE - 6);
    drawArea(drawing, "running", row.running.map((count) => [0, count]), row.running.length, x, y);
    if (row.queued.length) drawArea(drawing, "queued", row.queued.map((count) => [0, count]), row.queued.length, x, y);
  }
}

function enterBar(enter, row) {
  const bar = enter.append("g")
    .attr("class", (span) => `stage ${data.stages[span.stage].colour}${span.nested ? " nested" : ""}`)
    .attr("role", "button").attr("tabindex", -1).attr("aria-pressed", "false")
    .attr("aria-label", (span) => describe(row, span));
  bar.append("rect").attr("class", "spread");
  if (row.kind === "group") bar.append("rect").attr("class", "together");
  bar.append("text").text((span) => (span.nested ? "" : data.stages[span.stage].name));
  return bar;
}

function placeBar(bar, row, span, x, width) {
  const [begin, end] = [Math.max(x(span.begin), -2), Math.min(x(span.end), width + 2)];
  const seen = end >= -1 && begin <= width + 1;
  bar.attr("display", seen ? null : "none");
  if (!seen) return;
  const y = span.row * BAR + (span.nested ? BAR - STRIP - 1 : 0);
  const height = span.nested ? STRIP : BAR - 2;
  bar.select(".spread").attr("x", begin).attr("y", y).attr("width", Math.max(end - begin, 0.8)).attr("height", height);
  if (row.kind === "group") {
    const [first, last] = [Math.max(x(span.all_in), -2), Math.min(x(span.first_out), width + 2)];
    bar.select(".together").attr("x", first).attr("y", y).attr("width", Math.max(last - first, 0)).attr("height", height);
  }
  const label = bar.select("text");
  const room = end - Math.max(begin, 0) - 8;
  label.attr("x", Math.max(begin, 0) + 4).attr("y", y + 12)
    .attr("display", room > 6.4 * data.stages[span.stage].name.length ? null : "none");
}

function drawArea(drawing, name, parts, count, x, y) {
  const width = data.span_us / count;
  const shape = d3.area().curve(d3.curveStepAfter)
    .x((_, part) => x(part * width)).y0(([low]) => y(low)).y1(([, high]) => y(high));
  drawing.selectAll(`path.${name}`).data([[...parts, parts.at(-1)]]).join("path").attr("class", name).attr("d", shape);
}
