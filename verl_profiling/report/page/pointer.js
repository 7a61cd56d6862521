// What is under the pointer, or has the focus, as lines of text.
function spanAt(row, us, level) {
  const hits = row.spans.filter((span) => span.begin <= us && us <= span.end);
  return hits.find((span) => !span.nested && span.row === level) ?? hits.find((span) => !span.nested) ?? hits[0];
}

function partAt(values, us) {
  return values[Math.min(Math.max(Math.floor((us / data.span_us) * values.length), 0), values.length - 1)];
}

function linesAt(row, span, us) {
  const title = span ? data.stages[span.stage].name : row.kind === "running" ? "requests running" : "no stage";
  const lines = [title, row.kind === "lane" ? row.lane.name : `${row.group.role}, ${plural(row.group.lanes.length, "lane")}`];
  if (span) {
    lines.push(`${duration((span.end - span.begin) / 1e6)}, from ${duration(span.begin / 1e6)} to ${duration(span.end / 1e6)}`);
    if (row.kind === "group" && span.lanes > 1) lines.push(`the first ends it at ${duration(span.first_out / 1e6)}`);
    if (span.busy != null && span.end > span.begin) {
      const took = span.end - span.begin;
      lines.push(`busy ${percent(span.busy / took)} of it, ${percent(span.communication / took)} communication alone`);
    }
  }
  if (row.load?.length) {
    const [busy, alone, waiting] = [row.load, row.communication, row.waiting].map((curve) => `${Math.round(partAt(curve, us))} %`);
    lines.push(`at ${duration(us / 1e6)}: busy ${busy}, ${alone} communication alone, ${waiting} of it waiting for other ranks`.replace(/, 0 % of it.*/, ""));
  }
  const [running, queued] = [data.running, data.queued].map((curves) => (row.kind === "lane" ? curves[row.lane.worker] ?? [] : row.group.engine ? requestsOf(row.group, curves) : []));
  const at = (curve) => Math.round(10 * partAt(curve, us)) / 10;
  if (running.length) lines.push(`at ${duration(us / 1e6)}: ${at(running)} requests running${queued.length ? `, ${at(queued)} of them queued` : ""}`);
  if (row.lane?.shares) lines.push(row.lane.shares);
  if (row.lane?.stands_out) lines.push(row.lane.stands_out);
  return lines;
}
