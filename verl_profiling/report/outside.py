"""What the loop did around the step: the pauses of the capture, and its own stages until the next step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from verl_profiling.manifest import CAPTURE_START, CAPTURE_STOP, Manifest, Rpc, StageSpan
from verl_profiling.report.rows import OutsideRow
from verl_profiling.units import duration

__all__ = ["outside_rows", "outside_sentences"]

_ROWS = _PARTS = 4


def outside_rows(manifest: Manifest) -> list[OutsideRow]:
    """Return a row for each pause and for each outermost stage outside of the step, in order of time."""
    runs: dict[str, list[StageSpan]] = {}
    inside: dict[str, dict[str, float]] = {}
    outermost = ""
    for span in sorted(manifest.outside, key=lambda span: (span.begin_ns, span.depth)):
        if span.depth == 0:
            outermost = span.name
            runs.setdefault(outermost, []).append(span)
            inside.setdefault(outermost, {})
        elif span.depth == 1 and outermost:
            parts = inside[outermost]
            parts[span.name] = parts.get(span.name, 0.0) + _seconds([span])
    return [
        OutsideRow(
            name=name,
            runs=len(spans),
            begin_us=(spans[0].begin_ns - manifest.begin_ns) / 1000,
            duration_us=_seconds(spans) * 1e6,
            parts=_largest_first(inside[name] | _answers(manifest, name, spans[0])),
        )
        for name, spans in runs.items()
    ]


def outside_sentences(rows: Sequence[OutsideRow]) -> Iterator[str]:
    """Yield a line for what precedes the step, and one for what follows it, with what took longest."""
    before = [row for row in rows if row.name == CAPTURE_START]
    for when, found in (("before", before), ("after", [row for row in rows if row not in before])):
        if found:
            longest = sorted(found, key=lambda row: -row.duration_us)[:_ROWS]
            more = f" and {len(found) - _ROWS} more" if len(found) > _ROWS else ""
            yield f"{when} the step: {', '.join(_in_words(row) for row in found if row in longest)}{more}"


def _in_words(row: OutsideRow) -> str:
    name = "pause" if row.is_pause else row.name
    parts = ", ".join(f"{part} {duration(seconds)}" for part, seconds in list(row.parts.items())[:_PARTS])
    return f"{name} {duration(row.duration_us / 1e6)}" + (f" ({parts})" if parts else "")


def _answers(manifest: Manifest, name: str, pause: StageSpan) -> dict[str, float]:
    """Return for each role how long its slowest worker took to answer in a pause, in seconds."""
    method = {CAPTURE_START: "start_capture", CAPTURE_STOP: "stop_capture"}.get(name)
    roles = {worker.name: worker.identity.role for worker in manifest.workers}
    calls: dict[str, list[Rpc]] = {}
    for rpc in manifest.rpcs:
        if rpc.method == method and pause.begin_ns <= rpc.begin_ns <= pause.end_ns:
            calls.setdefault(roles.get(rpc.worker, rpc.worker), []).append(rpc)
    return {
        role: (max(rpc.end_ns for rpc in made) - min(rpc.begin_ns for rpc in made)) / 1e9
        for role, made in calls.items()
    }


def _largest_first(parts: dict[str, float]) -> dict[str, float]:
    return dict(sorted(parts.items(), key=lambda item: -item[1]))


def _seconds(spans: Sequence[StageSpan]) -> float:
    return sum(span.end_ns - span.begin_ns for span in spans) / 1e9
