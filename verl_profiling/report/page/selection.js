// A stage that is selected across all lanes, what can be said about it, and where it is in the timeline.
const spans = data.groups.flatMap((group) => group.lanes.flatMap((lane) => lane.spans));
const [firstEvent, lastEvent] = [d3.min(spans, (span) => span.begin), d3.max(spans, (span) => span.end)];

// Perfetto ignores a range that begins before the first event of a timeline, or ends after its last.
function timelineAddress([begin, end]) {
  const given = new URLSearchParams(location.hash.slice(1)).get("timeline");
  const trusted = given && (given.startsWith(`${location.origin}/#!`) || given.startsWith("https://ui.perfetto.dev/#!"));
  if (!trusted || data.timeline_begin_ns == null || !spans.length) return null;
  const at = (us) => Math.round(data.timeline_begin_ns + Math.min(Math.max(us, firstEvent), lastEvent) * 1000);
  return `${given}&visStart=${at(begin)}&visEnd=${at(end)}`;
}

function runsOf(stage) {
  return data.groups.flatMap((group) => group.lanes.flatMap((lane) =>
    lane.spans.filter((span) => span.stage === stage).map((span) => ({ ...span, lane: lane.name, took: span.end - span.begin }))));
}

function describeStage(stage) {
  const runs = runsOf(stage);
  const controller = runs.filter((run) => run.lane === "controller");
  const workers = runs.filter((run) => run.lane !== "controller");
  const parts = [];
  if (controller.length) parts.push(`${duration(d3.sum(controller, (run) => run.took) / 1e6)} on the controller`);
  if (workers.length) {
    const longest = workers.reduce((a, b) => (b.took > a.took ? b : a));
    const lanes = new Set(workers.map((run) => run.lane)).size;
    const median = d3.quantile(workers.map((run) => run.took), 0.5);
    parts.push(`${plural(workers.length, "run")} on ${plural(lanes, "lane")}, median ${duration(median / 1e6)}, longest ${duration(longest.took / 1e6)} (${longest.lane})`);
  }
  return `${data.stages[stage].name}: ${parts.join("; ")}. `;
}
