"""Renders the report of a step as one self-contained HTML page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from verl_profiling.report.asked import SuspectRow, asked_sentence, compared, shown_history
from verl_profiling.report.model import Report
from verl_profiling.report.page.document import document
from verl_profiling.report.page.picture import picture
from verl_profiling.report.page.summary import summary
from verl_profiling.report.page.tables import (
    Cell,
    Shown,
    count,
    number,
    percent,
    section,
    size,
    table,
    time,
)
from verl_profiling.report.rollout.page import cause_key, rollout_sections
from verl_profiling.report.rows import WorkerRow
from verl_profiling.report.terminal import rollout_sentence, tokens_sentence
from verl_profiling.units import duration

__all__ = ["page_title", "render_html"]

INDENT = "\N{NO-BREAK SPACE}" * 3

_TOP_OPS = 40
_UNTOLD = (
    "How long requests were queued is not known: no engine tells both when its scheduler got a request "
    "(arrival_ns) and when it took it up (scheduled_ns)."
)
_SIZES = "What is on disk is of all steps of the capture."
_SCRIPTS = ("tip.js", "scale.js", "lanes.js", "pointer.js", "selection.js", "picture.js", "tail.js")


def render_html(report: Report) -> str:
    """Return the page."""
    parts = [f"policy version {report.policy_version}"] if report.policy_version is not None else []
    parts.append(f"{report.coverage.events:,} events{report.of_capture}")
    sections = "".join(filter(None, _sections(report)))
    return document(page_title(report), " · ".join(parts), sections, picture(report), _SCRIPTS)


def page_title(report: Report) -> str:
    """Return what a report is called."""
    return f"S{report.title[1:]}" if report.title.startswith("step ") else report.title


def _sections(report: Report) -> Iterable[str]:
    yield _asked(report)
    yield summary(report)
    yield _suspects(report.suspects)
    yield _picture(report)
    yield _stages(report)
    yield _outside(report)
    yield _lost(report)
    if report.rollout is not None:
        yield from rollout_sections(report.rollout)
    yield _workers("Workers", [row for row in report.workers if row.replica is None])
    yield _workers("Rollout engines", [row for row in report.workers if row.replica is not None])
    yield _devices(report)
    yield _engines(report)
    yield _replicas(report)
    yield _tail(report)
    yield _stragglers(report)
    yield _collectives(report)
    yield _ops(report)
    yield _measures(report)
    yield _counters(report)
    yield _costs(report)
    yield _clocks(report)
    yield _reported(report)
    yield _about(report)


def _asked(report: Report) -> str:
    if report.asked is None:
        return ""
    asked = report.asked
    said = "".join(f"<p>{escape(line)}</p>" for line in (asked_sentence(asked), shown_history(asked)) if line)
    return f'<section id="asked" aria-label="Who asked for the capture">{said}</section>'


def _suspects(rows: Sequence[SuspectRow]) -> str:
    cells: list[tuple[Cell, ...]] = []
    for row in rows:
        numbers = (row.value, row.peer_value, row.difference)
        shown = zip(compared(row), numbers, strict=True)
        value, peer, difference = (None if n is None else Shown(text, n) for text, n in shown)
        cells.append((row.suspect, row.kind, row.name, value, row.peers, peer, difference))
    headings = ("suspect", "what", "name", "suspect's", "peers", "peers'", "difference")
    title = "Suspects beside their peers"
    note = "Time in a stage is without waiting for other ranks; the rest of the time is in its parts."
    return section(title, table(title, headings, cells), note)


def _picture(report: Report) -> str:
    if not report.gantt and not report.workers:
        return ""
    command = escape(f"verl-profiling view {report.directory}")
    return section(
        "Lanes over time",
        '<div id="tools" class="tools"></div><div id="picture" class="picture"></div>'
        '<p id="selected" class="note" aria-live="polite"></p>'
        f'<p id="view" class="note" hidden>Every kernel on one timeline: run <code>{command}</code>; '
        "this page then links into it.</p>"
        "<noscript><p>A script draws the picture; the tables below need none.</p></noscript>",
    )


def _stages(report: Report) -> str:
    rows = [
        (
            INDENT * row.depth + row.name,
            count(row.runs),
            time(row.duration_us / 1e6),
            percent(row.share),
        )
        for row in report.stages
    ]
    return section("Step anatomy", table("Step anatomy", ("stage", "runs", "time", "of the step"), rows))


def _outside(report: Report) -> str:
    rows: list[tuple[Cell, ...]] = []
    for row in report.outside:
        rows.append((row.name, count(row.runs), time(row.duration_us / 1e6)))
        rows += [(f"{INDENT}{name}", None, time(seconds)) for name, seconds in row.parts.items()]
    note = (
        "Before the step and until the next one: no part of the numbers above and below. In its pauses the "
        "loop waits for the capture to start and to stop; roles are told at the same time."
    )
    return section("Around the step", table("Around the step", ("what", "runs", "time"), rows), note)


def _lost(report: Report) -> str:
    rows: list[tuple[Cell, ...]] = []
    keys = []
    for row in report.lost:
        rows.append((row.cause.replace("_", " "), time(row.seconds), percent(row.share)))
        keys.append(f"k-{row.cause}")
        for name, seconds in row.parts.items():
            share = row.share * seconds / row.seconds if row.seconds else 0.0
            rows.append((f"{INDENT}{name}", time(seconds), percent(share)))
            keys.append(cause_key(name))
    total = sum(row.seconds for row in report.lost)
    parts = "".join(
        f'<i class="k-{escape(row.cause)}" style="flex-grow: {100 * row.seconds / total:.3f}"></i>'
        for row in report.lost
        if row.seconds
    )
    bar = f'<div class="stacked" aria-hidden="true">{parts}</div>' if parts else ""
    title = "Lost time by cause"
    found = table(title, ("cause", f"{report.whose}-seconds", "of observed"), rows, keys)
    note = "Idle time, of which every instant has one cause, and waiting for other ranks in collectives."
    return section(title, bar + found, note)


def _workers(title: str, rows: Sequence[WorkerRow]) -> str:
    columns: dict[str, list[Cell]] = {
        "name": [row.name for row in rows],
        "device": [row.accelerator for row in rows],
        "observed": [time(row.span_us / 1e6) for row in rows],
        "busy": [time(row.busy_us / 1e6) for row in rows],
        "busy share": [percent(row.busy_us / row.span_us if row.span_us else 0.0) for row in rows],
        "idle": [time(row.idle_us / 1e6) for row in rows],
        "host-bound": [time(row.host_bound_us / 1e6) for row in rows],
        "compute": [time(row.compute_us / 1e6) for row in rows],
        "communication": [time(row.communication_us / 1e6) for row in rows],
        "exposed": [time(row.exposed_communication_us / 1e6) for row in rows],
        "waiting": [time(row.waiting_us / 1e6) for row in rows],
        "overlap": [time(row.overlap_us / 1e6) for row in rows],
        "copy": [time(row.memcpy_us / 1e6) for row in rows],
        "unrecognised": [time(row.unrecognised_us / 1e6) for row in rows],
        "files": [", ".join(row.traces) for row in rows],
    }
    if not any(row.unrecognised_us for row in rows):
        del columns["unrecognised"]
    for name in ("device", "files"):
        if not any(columns[name]):
            del columns[name]
    note = (
        "" if any(row.device for row in rows) else "CPU traces: busy means that operators or collectives ran."
    )
    cells = list(zip(*columns.values(), strict=True))
    return section(title, table(title, list(columns), cells), note)


def _devices(report: Report) -> str:
    """Return what devices did, if any has several lanes."""
    if not report.shares_devices:
        return ""
    headings = (
        "lanes",
        "device",
        "observed",
        "busy",
        "busy share",
        "idle",
        "host-bound",
        "exposed",
        "waiting",
    )
    rows: list[tuple[Cell, ...]] = [
        (
            row.name,
            row.place or row.uuid,
            time(row.span_us / 1e6),
            time(row.busy_us / 1e6),
            percent(row.busy_us / row.span_us if row.span_us else 0.0),
            *(time(us / 1e6) for us in (row.idle_us, row.host_bound_us)),
            *(time(us / 1e6) for us in (row.exposed_communication_us, row.waiting_us)),
        )
        for row in report.devices
    ]
    return section("Devices", table("Devices", headings, rows), "Lanes that share a device count once.")


def _engines(report: Report) -> str:
    headings = ("name", "iterations", "prefill", "decode", "prompt tokens", "generated", "queueing", "finish")
    rows: list[tuple[Cell, ...]] = [
        (
            row.name,
            count(row.iterations),
            time(row.prefill_us / 1e6),
            time(row.decode_us / 1e6),
            count(row.prefill_tokens),
            count(row.decode_tokens),
            time(None if row.queueing_us is None else row.queueing_us / 1e6),
            time(None if row.finish_us is None else row.finish_us / 1e6),
        )
        for row in report.engines
    ]
    return section("Engine iterations", table("Engine iterations", headings, rows))


def _replicas(report: Report) -> str:
    columns: dict[str, list[Cell]] = {
        "name": [row.worker for row in report.replicas],
        "requests": [count(row.requests) for row in report.replicas],
        "failed": [count(row.failed) for row in report.replicas],
    }
    for heading in ("queued", "to first token", "per token"):
        for share in ("p50", "p90", "p99"):
            field = f"{heading.replace(' ', '_')}_{share}_us"
            times = [getattr(row, field) for row in report.replicas]
            columns[f"{heading} {share}"] = [time(None if us is None else us / 1e6) for us in times]
    shares = [row.cache_hit_share for row in report.replicas]
    columns["from cache"] = [None if share is None else percent(share) for share in shares]
    taken_off = [row.preemptions for row in report.replicas]
    columns["preemptions"] = [None if times is None else count(times) for times in taken_off]
    known = {heading: cells for heading, cells in columns.items() if any(cell is not None for cell in cells)}
    note = "" if "queued p50" in known else _UNTOLD
    rows = list(zip(*known.values(), strict=True))
    return section("Requests by replica", table("Requests by replica", list(known), rows), note)


def _tail(report: Report) -> str:
    tail = report.tail
    if tail is None:
        return ""
    sentence = rollout_sentence(tail).removeprefix("rollout: ")
    note = f"{sentence[0].upper()}{sentence[1:]} (dashed: the median)."
    rows: list[tuple[Cell, ...]] = []
    if sample := tail.latency_s:
        rows.append(("latency", *map(time, (sample.p50, sample.p90, sample.p99, sample.max))))
    if sample := tail.response_tokens:
        rows.append(("response tokens", *map(number, (sample.p50, sample.p90, sample.p99, sample.max))))
    found = table("Requests", (f"{tail.requests:,} requests", "p50", "p90", "p99", "largest"), rows)
    return section("Rollout tail", '<div id="tail" class="chart"></div>' + found, note)


def _stragglers(report: Report) -> str:
    rows = [
        (
            row.stage,
            row.role,
            count(row.workers),
            row.slowest,
            time(row.slowest_us / 1e6),
            time(row.median_us / 1e6),
            time(row.wait_us / 1e6),
        )
        for row in report.stragglers
    ]
    headings = ("stage", "role", "workers", "slowest", "took", "median", "others waited")
    return section("Stragglers", table("Stragglers", headings, rows))


def _collectives(report: Report) -> str:
    rows = [
        (
            row.name,
            row.role,
            row.group,
            count(row.calls),
            time(row.median_us / 1e6),
            time(row.wait_us / 1e6),
            row.late,
            percent(row.late_share),
        )
        for row in report.collectives
    ]
    headings = ("collective", "role", "ranks", "calls", "median", "waiting", "most often last", "of calls")
    return section("Collectives", table("Collectives", headings, rows))


def _ops(report: Report) -> str:
    rows = [
        (row.name, row.stage, count(row.calls), time(row.self_us / 1e6), percent(row.share))
        for row in report.kernels[:_TOP_OPS]
    ]
    headings = ("kernel", "stage", "calls", "self time", "of all")
    notes = [] if any(row.device for row in report.workers) else ["Operators stand in for kernels."]
    if (more := len(report.kernels) - _TOP_OPS) > 0:
        notes.append(f"{more:,} more are in report.json and in the CSV.")
    note = " ".join(notes)
    return section("Kernels by self time", table("Kernels by self time", headings, rows), note)


def _measures(report: Report) -> str:
    """Return a row for each worker and stage, and a column for each number that any of them has."""
    names = list(dict.fromkeys(row.name for row in report.measures))
    cells: dict[tuple[str, str], dict[str, Cell]] = {}
    for row in report.measures:
        value = size(row.value) if row.name.endswith("_bytes") else number(row.value)
        cells.setdefault((row.worker, row.stage), {})[row.name] = value
    headings = [name.removesuffix("_bytes").replace("_", " ") for name in names]
    rows = [(*place, *(found.get(name) for name in names)) for place, found in cells.items()]
    note = "The largest value of a stage that ran several times."
    return section("Peaks by stage", table("Peaks by stage", ("worker", "stage", *headings), rows), note)


def _counters(report: Report) -> str:
    rows = [
        (row.lane, row.name, number(row.last), number(row.mean), number(row.max), count(row.samples))
        for row in report.counters
    ]
    headings = ("of", "count", "last", "mean", "largest", "counted")
    return section(
        "Counts", table("Counts", headings, rows), "Each holds until the next; the mean is over time."
    )


def _costs(report: Report) -> str:
    rows = [
        (row.worker, time(row.start_s), time(row.stop_s), time(row.export_s), size(row.bytes))
        for row in report.costs
    ]
    note = (
        f"It added {duration(report.capture_us / 1e6)} to the loop, which a step that is not profiled does "
        f"not spend. Writing is part of stopping. {_SIZES if report.capture_steps else ''}"
    )
    headings = ("worker", "start", "stop", "writing", "on disk")
    return section("Cost of the capture", table("Cost of the capture", headings, rows), note)


def _clocks(report: Report) -> str:
    rows = [
        (row.worker, row.host, time((row.end_us - row.begin_us) / 1e6), time(row.set_us / 1e6))
        for row in report.anchors
    ]
    found = table("Clocks", ("worker", "host", "watched for", "was set by"), rows)
    note = "How far unix time ran ahead of monotonic time during the capture."
    return section("Clocks", found, note)


def _reported(report: Report) -> str:
    """Return the loop's metrics, those with the same prefix folded together."""
    groups: dict[str, list[tuple[Cell, ...]]] = {}
    for name, value in report.metrics.items():
        prefix = name.partition("/")[0] if "/" in name else ""
        groups.setdefault(prefix, []).append((name, number(value)))
    content = "".join(
        f"<details><summary><bdi>{escape(prefix or 'others')}</bdi> ({len(rows)})</summary>"
        f"{table(prefix or 'others', ('metric', 'value'), rows)}</details>"
        for prefix, rows in groups.items()
    )
    field = '<input id="filter" type="search" placeholder="filter" aria-label="filter metrics" hidden>'
    note = "What the training loop logged for the step."
    return section("Reported by the loop", content and field + content, note)


def _about(report: Report) -> str:
    lines = [
        f"clock of {c.host}: corrected by {duration(c.offset_us / 1e6)}, accurate to "
        f"{duration(c.error_us / 1e6)}, drift {duration(c.drift_us / 1e6)}"
        for c in report.clocks
    ]
    if rate := report.throughput:
        lines.append(tokens_sentence(report, rate))
    if report.weight_sync_share:
        lines.append(f"weight sync: {report.weight_sync_share:.1%} of the step")
    lines += [f"missing: {sentence}" for sentence in report.coverage.missing]
    lines += [f"note: {note}" for note in report.notes]
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return section("About this step", items and f"<ul>{items}</ul>")
