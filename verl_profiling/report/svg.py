"""The charts of the HTML report, as plain SVG without script or library."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from verl_profiling.report.model import GanttSpan, Report, Tail
from verl_profiling.report.rows import LostRow

__all__ = ["gantt_chart", "lost_bar", "stage_colours", "tail_chart"]

_WIDTH = 1000
_LABEL = 150
_RIGHT = 12
_ROW = 36
_BAR = 17
_NESTED = 3
_LOAD = 11
_COLOURS = 10
_TICKS = (1, 2, 5)


def stage_colours(report: Report) -> dict[str, int]:
    """Return a colour number for each stage, by order of appearance."""
    names = dict.fromkeys(span.name for span in report.gantt)
    return {name: index % _COLOURS for index, name in enumerate(names)}


def gantt_chart(report: Report) -> str:
    """Draw each worker's stages over the step, and under them how busy it was."""
    span_us = max(report.span_us, 1.0)
    scale = (_WIDTH - _LABEL - _RIGHT) / span_us
    colours = stage_colours(report)
    rows: list[tuple[str, list[GanttSpan], list[int]]] = []
    controller = [span for span in report.gantt if span.lane == "controller"]
    if controller:
        rows.append(("controller", controller, []))
    drawn = set()
    for worker in report.workers:
        owner = worker.name if worker.replica is None else worker.name.rpartition("_rank")[0]
        spans = [] if owner in drawn else [span for span in report.gantt if span.lane == owner]
        drawn.add(owner)
        rows.append((worker.name, spans, worker.load))
    for name in dict.fromkeys(span.lane for span in report.gantt if span.lane not in drawn | {"controller"}):
        rows.append((name, [span for span in report.gantt if span.lane == name], []))
    height = len(rows) * _ROW + 26
    parts = [f'<svg class="gantt" viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="Stages over time">']
    parts += _axis(span_us, scale, height)
    for index, (name, spans, load) in enumerate(rows):
        top = index * _ROW + 4
        parts.append(f'<text x="{_LABEL - 8}" y="{top + 17}" class="lane">{escape(name)}</text>')
        for span in spans:
            parts.append(_stage_bar(span, top, scale, colours[span.name]))
        if load:
            parts.append(_load(load, top + _BAR + 1))
    parts.append("</svg>")
    return "".join(parts)


def _stage_bar(span: GanttSpan, top: int, scale: float, colour: int) -> str:
    x = _LABEL + max(span.begin_us, 0.0) * scale
    width = max((span.end_us - span.begin_us) * scale, 0.6)
    inset = _BAR - _NESTED if span.depth else 0  # a nested stage is a strip at the bottom of the outer one
    text = f"{span.name}: {(span.end_us - span.begin_us) / 1e6:.3f} s"
    label = f'<text x="{x + 4:.1f}" y="{top + 11.5}">{escape(span.name)}</text>'
    return (
        f'<g class="stage" tabindex="0" role="img" aria-label="{escape(text)}"><title>{escape(text)}</title>'
        f'<rect x="{x:.1f}" y="{top + inset}" width="{width:.1f}" height="{_BAR - inset}" rx="2" '
        f'class="c{colour}"/>'
        f"{label if width > 7 * len(span.name) + 8 and not span.depth else ''}</g>"
    )


def _load(load: list[int], top: int) -> str:
    step = (_WIDTH - _LABEL - _RIGHT) / len(load)
    base = top + _LOAD
    points = "".join(
        f"L{_LABEL + i * step:.0f} {base - share * _LOAD / 100:.1f}H{_LABEL + (i + 1) * step:.0f}"
        for i, share in enumerate(load)
    )
    title = f"<title>busy {sum(load) / len(load):.0f} % of the step</title>"
    return f'<path class="load" d="M{_LABEL} {base}{points}V{base}Z">{title}</path>'


def _axis(span_us: float, scale: float, height: int) -> Iterator[str]:
    """Yield lines and labels at round times, at most twelve."""
    unit = 1.0
    while span_us / (unit * _TICKS[-1]) > 12:
        unit *= 10
    tick = next((unit * step for step in _TICKS if span_us / (unit * step) <= 12), unit * _TICKS[-1])
    count = int(span_us / tick)
    digits = max(0, min(6, 6 - len(str(int(tick))) + 1))
    for index in range(count + 1):
        x = _LABEL + index * tick * scale
        yield f'<line x1="{x:.1f}" y1="0" x2="{x:.1f}" y2="{height - 20}" class="grid"/>'
        yield f'<text x="{x:.1f}" y="{height - 6}" class="tick">{index * tick / 1e6:.{digits}f} s</text>'


def lost_bar(rows: list[LostRow]) -> str:
    """Draw idle time by cause as one stacked bar."""
    total = sum(row.seconds for row in rows)
    if not total:
        return ""
    parts = [f'<svg class="lost" viewBox="0 0 {_WIDTH} 26" role="img" aria-label="Idle time by cause">']
    x = 0.0
    for index, row in enumerate(rows):
        width = row.seconds / total * _WIDTH
        text = f"{row.cause.replace('_', ' ')}: {row.seconds:.3f} lane-seconds"
        parts.append(
            f'<rect x="{x:.1f}" y="0" width="{width:.1f}" height="26" class="c{index % _COLOURS}">'
            f"<title>{escape(text)}</title></rect>"
        )
        x += width
    parts.append("</svg>")
    return "".join(parts)


def tail_chart(tail: Tail) -> str:
    """Draw the share of requests (or replicas) that are done, over time."""
    width, height, left = 600, 200, 46
    last = max(tail.finishes_us[-1], 1.0)
    count = len(tail.finishes_us)
    scale = (width - left - 10) / last
    line = f"M{left} {height - 24}" + "".join(
        f"H{left + max(us, 0) * scale:.1f}V{height - 24 - (i + 1) / count * (height - 40):.1f}"
        for i, us in enumerate(tail.finishes_us)
    )
    half = left + max(tail.median_finish_us, 0) * scale
    parts = [
        f'<svg class="tail" viewBox="0 0 {width} {height}" role="img" aria-label="Share done over time">'
    ]
    for share in (0, 50, 100):
        y = height - 24 - share / 100 * (height - 40)
        parts.append(f'<line x1="{left}" y1="{y}" x2="{width - 10}" y2="{y}" class="grid"/>')
        parts.append(f'<text x="{left - 6}" y="{y + 4}" class="lane">{share} %</text>')
    parts.append(f'<line x1="{half:.1f}" y1="10" x2="{half:.1f}" y2="{height - 24}" class="half"/>')
    parts.append(f'<path d="{line}" class="done"/>')
    parts.append(f'<text x="{left}" y="{height - 6}" class="tick">0</text>')
    parts.append(f'<text x="{width - 10}" y="{height - 6}" class="lane">{last / 1e6:.3f} s</text></svg>')
    return "".join(parts)
