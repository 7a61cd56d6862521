"""Renders a report as one self-contained HTML file, without network or library."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from importlib import resources
from pathlib import Path

from verl_profiling.report.model import Report
from verl_profiling.report.rows import WorkerRow
from verl_profiling.report.svg import gantt_chart, lost_bar, stage_colours, tail_chart
from verl_profiling.report.terminal import rollout_sentence

__all__ = ["render_html"]

Cell = str | float | int | None
_TOP_OPS = 40


def render_html(report: Report) -> str:
    """Return the page."""
    title = f"Step {report.step}" if report.step is not None else Path(report.directory).name
    files = resources.files("verl_profiling.report")
    style, script = (files.joinpath(name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    policy = "" if report.policy_version is None else f" · policy version {report.policy_version}"
    covered = (
        f"{report.coverage.read} of {report.coverage.expected} traces · {report.coverage.events:,} events"
    )
    sections = "".join(filter(None, _sections(report)))
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<title>{escape(title)} · verl-profiling</title><link rel="icon" href="data:,">'
        f"<style>{style}</style></head><body>"
        f"<header><h1>{escape(title)}</h1><p>{report.span_us / 1e6:.3f} s{policy} · {covered}</p>"
        '<button id="theme" type="button" title="switch theme (t)">light / dark</button></header>'
        f"<main>{sections}</main><script>{script}</script></body></html>\n"
    )


def _sections(report: Report) -> Iterable[str]:
    yield _findings(report)
    yield _section("Step", _legend(report) + _scroll(gantt_chart(report)), _STEP_NOTE)
    yield _stages(report)
    yield _section("Idle time by cause", _lost(report), "Every instant of idle time has one cause.")
    yield _workers("Workers", [row for row in report.workers if row.replica is None])
    yield _workers("Rollout engines", [row for row in report.workers if row.replica is not None])
    yield _engines(report)
    yield _tail(report)
    yield _stragglers(report)
    yield _collectives(report)
    yield _ops(report)
    yield _measures(report)
    yield _costs(report)
    yield _reported(report)
    yield _about(report)


_STEP_NOTE = "Upper bar: stages. Lower area: how much of the time something ran on the lane."


def _section(title: str, content: str, note: str = "") -> str:
    if not content:
        return ""
    slug = title.lower().replace(" ", "-")
    remark = f"<p>{escape(note)}</p>" if note else ""
    return f'<section id="{slug}"><h2>{escape(title)}</h2>{remark}{content}</section>'


def _scroll(content: str) -> str:
    return f'<div class="scroll" tabindex="0">{content}</div>'


def _findings(report: Report) -> str:
    items = "".join(
        f"<li>{escape(f.text)} <span>Try: {escape(f.advice)}.</span></li>" for f in report.findings
    )
    early = "" if report.complete else "<p>The step ended early; this is what was recorded until then.</p>"
    return _section("Findings", early + (f"<ol>{items}</ol>" if items else ""))


def _legend(report: Report) -> str:
    names = stage_colours(report).items()
    return (
        '<ul class="legend">'
        + "".join(f'<li><i class="c{c}"></i>{escape(n)}</li>' for n, c in names)
        + "</ul>"
    )


def _stages(report: Report) -> str:
    rows = [
        (("\N{NO-BREAK SPACE}" * 3 * s.depth) + s.name, s.runs, s.duration_us / 1e6, 100 * s.share)
        for s in report.stages
    ]
    return _section("Step anatomy", _table(("stage", "runs", "seconds", "% of step"), rows))


def _lost(report: Report) -> str:
    rows = [(row.cause.replace("_", " "), row.seconds, 100 * row.share) for row in report.lost]
    keys = [f'<i class="c{index % 10}"></i>' for index in range(len(rows))]
    return lost_bar(report.lost) + _table(("cause", "lane-seconds", "% of observed"), rows, keys)


def _workers(title: str, rows: Sequence[WorkerRow]) -> str:
    headings = ["name", "observed s", "busy s", "busy %", "idle s", "host-bound s", "compute s"]
    headings += ["communication s", "exposed s", "overlap s", "copy s"]
    cells = [
        (
            row.name,
            row.span_us / 1e6,
            row.busy_us / 1e6,
            100 * row.busy_us / row.span_us if row.span_us else 0.0,
            row.idle_us / 1e6,
            row.host_bound_us / 1e6,
            row.compute_us / 1e6,
            row.communication_us / 1e6,
            row.exposed_communication_us / 1e6,
            row.overlap_us / 1e6,
            row.memcpy_us / 1e6,
        )
        for row in rows
    ]
    note = (
        "" if any(row.device for row in rows) else "CPU traces: busy means that operators or collectives ran."
    )
    return _section(title, _table(headings, cells), note)


def _engines(report: Report) -> str:
    headings = (
        "name",
        "iterations",
        "prefill s",
        "decode s",
        "prompt tokens",
        "generated",
        "queueing s",
        "finish s",
    )
    rows: list[tuple[Cell, ...]] = [
        (
            row.name,
            row.iterations,
            row.prefill_us / 1e6,
            row.decode_us / 1e6,
            row.prefill_tokens,
            row.decode_tokens,
            None if row.queueing_us is None else row.queueing_us / 1e6,
            None if row.finish_us is None else row.finish_us / 1e6,
        )
        for row in report.engines
    ]
    return _section("Engine iterations", _table(headings, rows))


def _tail(report: Report) -> str:
    tail = report.tail
    if tail is None:
        return ""
    sentence = rollout_sentence(tail).removeprefix("rollout: ")
    note = f"{sentence[0].upper()}{sentence[1:]} (dashed: the median)."
    rows = [
        (name, sample.p50, sample.p90, sample.p99, sample.max)
        for name, sample in (("latency s", tail.latency_s), ("response tokens", tail.response_tokens))
        if sample
    ]
    table = _table((f"{tail.requests} requests", "p50", "p90", "p99", "largest"), rows)
    return _section("Rollout tail", tail_chart(tail) + table, note)


def _stragglers(report: Report) -> str:
    rows = [
        (r.stage, r.role, r.workers, r.slowest, r.slowest_us / 1e6, r.median_us / 1e6, r.wait_us / 1e6)
        for r in report.stragglers
    ]
    return _section(
        "Stragglers",
        _table(("stage", "role", "workers", "slowest", "s", "median s", "others waited s"), rows),
    )


def _collectives(report: Report) -> str:
    rows = [
        (r.name, r.role, r.calls, r.median_us, r.wait_us / 1e6, r.late, 100 * r.late_share)
        for r in report.collectives
    ]
    headings = ("collective", "role", "calls", "median us", "waiting s", "most often last", "% of calls")
    return _section("Collectives", _table(headings, rows))


def _ops(report: Report) -> str:
    rows = [(r.stage, r.name, r.calls, r.self_us / 1e6, 100 * r.share) for r in report.ops[:_TOP_OPS]]
    note = "Operators stand in for kernels in a CPU trace."
    if (more := len(report.ops) - _TOP_OPS) > 0:
        note += f" {more:,} more are in report.json and in the CSV."
    return _section(
        "Kernels by self time", _table(("stage", "kernel", "calls", "self s", "% of all"), rows), note
    )


def _measures(report: Report) -> str:
    """Return a row for each worker and stage, and a column for each number that any of them has."""
    names = list(dict.fromkeys(row.name for row in report.measures))
    cells: dict[tuple[str, str], dict[str, float]] = {}
    for row in report.measures:
        value = row.value / 1e6 if row.name.endswith("_bytes") else row.value
        cells.setdefault((row.worker, row.stage), {})[row.name] = value
    headings = [
        f"{n.removesuffix('_bytes').replace('_', ' ')} MB" if n.endswith("_bytes") else n for n in names
    ]
    rows = [(*place, *(found.get(name) for name in names)) for place, found in cells.items()]
    note = "The largest value of a stage that ran several times."
    return _section("Peaks by stage", _table(("worker", "stage", *headings), rows), note)


def _costs(report: Report) -> str:
    rows = [(row.worker, row.start_s, row.stop_s, row.export_s, row.bytes / 1e6) for row in report.costs]
    note = "Writing is part of stopping. A step that is not profiled spends none of it."
    headings = ("worker", "start s", "stop s", "writing s", "MB on disk")
    return _section("Cost of the capture", _table(headings, rows), note)


def _reported(report: Report) -> str:
    rows = [(name, float(value)) for name, value in report.metrics.items()]
    note = "What the training loop logged for the step."
    return _section("Reported by the loop", _table(("metric", "value"), rows), note)


def _about(report: Report) -> str:
    lines = [
        f"clock of {c.host}: corrected by {c.offset_us:,.1f} us, accurate to {c.error_us:,.1f} us, "
        f"drift {c.drift_us:,.1f} us"
        for c in report.clocks
    ]
    if rate := report.throughput:
        lines.append(
            f"{rate.tokens:,.0f} tokens ({rate.source}): {rate.tokens_per_s:,.0f} per second, "
            f"{rate.tokens_per_s_per_lane:,.0f} per second and lane"
        )
    lines.append(f"weight sync: {report.weight_sync_share:.1%} of the step")
    lines += [f"missing: {sentence}" for sentence in report.coverage.missing] + [
        f"note: {n}" for n in report.notes
    ]
    return _section(
        "About this step", "<ul>" + "".join(f"<li>{escape(line)}</li>" for line in lines) + "</ul>"
    )


def _table(headings: Sequence[str], rows: Sequence[Sequence[Cell]], keys: Sequence[str] = ()) -> str:
    """Return a table that is sorted by clicking a heading; numbers are right-aligned."""
    if not rows:
        return ""
    head = "".join(f'<th scope="col"><button type="button">{escape(h)}</button></th>' for h in headings)
    body = []
    for index, row in enumerate(rows):
        cells = "".join(
            _cell(value, headings[column], keys[index] if keys and not column else "")
            for column, value in enumerate(row)
        )
        body.append(f"<tr>{cells}</tr>")
    return _scroll(f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table>")


def _cell(value: Cell, heading: str, key: str) -> str:
    if value is None:
        return '<td class="n" data-v="-1">&ndash;</td>'
    if isinstance(value, str):
        return f'<td title="{escape(value)}">{key}{escape(value)}</td>'
    digits = 0 if isinstance(value, int) else 1 if "%" in heading else 3
    text = f"{value:,.{digits}f}"
    return f'<td class="n" data-v="{value:g}">{text}</td>'
