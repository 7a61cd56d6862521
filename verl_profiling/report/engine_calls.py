"""The finding on the sleep and the wake of an engine, with the dearest part."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from verl_profiling.files.engine_marks import RESET, SLEEP, WAKE
from verl_profiling.numbers.report_columns import GanttSpan
from verl_profiling.report.finding_measures import Loss, on_all
from verl_profiling.report.model import Report
from verl_profiling.slices.intervals import grouped, length, spans_of
from verl_profiling.units import byte_size, duration

_REST = "rest"  # waits for the device and for peers, and collecting garbage


def sleep_and_wake(report: Report) -> Iterator[Loss]:
    """Yield the time of the engine that slept and woke longest.

    Several processes of an engine do it at the same time, and count once.
    """
    calls = [span for span in report.gantt if span.name.partition("/")[0] in (SLEEP, WAKE, RESET)]
    engines = grouped([span for span in calls if span.lane != "controller"], lambda one: one.lane)
    if not engines:
        return
    seconds, lane = max((sum(_parts_of(spans).values()), lane) for lane, spans in engines.items())
    spans = engines[lane]
    parts = _parts_of(spans)
    name = max(parts, key=lambda part: parts[part])
    most_s = parts[name]
    whole_s = max(report.span_us / 1e6, seconds)
    size = sum(span.bytes for span in spans if span.name == name)
    moved = f", {byte_size(size)}" if size else ""
    text = (
        f"Sleep and wake of {lane} took {duration(seconds)} ({seconds / whole_s:.0%} of the "
        f"step), most of it {name}: {duration(most_s)} ({most_s / whole_s:.0%}{moved})."
    )
    yield Loss(text, on_all(report, seconds), [lane], seconds / whole_s)


def _parts_of(spans: list[GanttSpan]) -> dict[str, float]:
    """Return the seconds of each part, and the seconds of each call outside of its parts."""
    parts = defaultdict[str, float](float)
    for name, runs in grouped(spans, lambda span: span.name).items():
        took_s = length(spans_of((round(r.begin_us * 1e3), round(r.end_us * 1e3)) for r in runs))
        call, _, part = name.partition("/")
        rest = call if call == RESET else f"{call}/{_REST}"
        parts[name if part else rest] += took_s / 1e9
        if part:
            parts[rest] -= took_s / 1e9
    return parts
