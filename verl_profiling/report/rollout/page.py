"""The section "Rollout" on the page of a report."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from zlib import crc32

from verl_profiling.report.page.tables import Cell, Shown, count, number, percent, section, table, time
from verl_profiling.report.rollout.explain import NO_TRAJECTORY
from verl_profiling.report.rollout.pieces import BEFORE, LOOP_LAG, OWN_CODE, UNEXPLAINED
from verl_profiling.report.rollout.rows import CauseRow, PartRow, Rollout
from verl_profiling.report.rollout.tail import NONE_RAN
from verl_profiling.report.rollout.terminal import rollout_sentences
from verl_profiling.units import duration

__all__ = ["cause_key", "rollout_sections"]

_KEYS = {
    "decode": "s0",
    "generate": "s0",
    "prefill": "s3",
    "first token": "s3",
    "queued": "s4",
    "to the engine": "s2",
    "from the engine": "s2",
    "reward": "s1",
    "environment": "s8",
    "wait": "s5",
    "controller": "s6",
    OWN_CODE: "s9",
    LOOP_LAG: "k-host_blocked",
    NO_TRAJECTORY: "s3",
    NONE_RAN: "rest",
    BEFORE: "k-unexplained",
    UNEXPLAINED: "k-unexplained",
}
_OTHERS = 6
_FIRST_OTHER = 10


def cause_key(cause: str) -> str:
    """Return the class of ``page.css`` that colours a cause: its own, its family's, or one of its name."""
    family = cause.partition(":")[0]
    other = f"s{_FIRST_OTHER + crc32(cause.encode()) % _OTHERS}"
    return _KEYS.get(cause) or _KEYS.get(family) or other


def rollout_sections(rollout: Rollout) -> Iterator[str]:
    """Yield the sections, those without content empty."""
    sentences = "".join(f"<li>{escape(sentence)}</li>" for sentence in rollout_sentences(rollout))
    training = [row for row in rollout.causes if not row.validate]
    bars: list[tuple[str, Sequence[CauseRow | PartRow]]] = [("All trajectories", training)]
    if rollout.last and rollout.last.parts:
        bars.append((f"The last {rollout.last.trajectories:,} of {rollout.last.of:,}", rollout.last.parts))
    if validation := [row for row in rollout.causes if row.validate]:
        bars.append(("Validation", validation))
    bars.append(("The rollout on the wall clock", rollout.time))
    drawn = "".join(_bar(title, rows) for title, rows in bars if rows)
    note = "What trajectories waited for; the causes of each bar add up to its time."
    yield section("Rollout", f"<ul>{sentences}</ul>{drawn}{_causes(rollout)}", note)
    yield section("Tools and other spans", _calls(rollout))
    yield section("Blocked event loops", _blocks(rollout))
    yield section("Groups that waited most", _groups(rollout))
    yield section("Versions of the weights", _versions(rollout))
    yield section("What became of trajectories", _fates(rollout))
    yield section("Failed trajectories", _failures(rollout))


def _bar(title: str, rows: Sequence[CauseRow | PartRow]) -> str:
    parts = "".join(
        f'<i class="{cause_key(row.cause)}" style="flex-grow: {100 * row.share:.3f}" '
        f'title="{escape(f"{row.cause}: {row.share:.1%}")}"></i>'
        for row in rows
        if row.share >= 0.001
    )
    most = ", ".join(f"{row.cause} {row.share:.0%}" for row in rows[:3])
    whole = duration(sum(row.seconds for row in rows))
    return (
        f'<p class="bar"><b>{escape(title)}, {whole}</b> '
        f'<span class="note"><bdi>{escape(most)}</bdi></span></p>'
        f'<div class="stacked" aria-hidden="true">{parts}</div>'
    )


def _causes(rollout: Rollout) -> str:
    """Return a row for each cause of trajectories' time, and of the rollout's where no trajectory ran."""
    training = {row.cause: row for row in rollout.causes if not row.validate}
    validation = {row.cause: row for row in rollout.causes if row.validate}
    last = {part.cause: part for part in rollout.last.parts} if rollout.last else {}
    walls = {part.cause: part for part in rollout.time}
    names = list(dict.fromkeys((*training, *last, *walls, *validation)))
    columns: dict[str, list[Cell]] = {"cause": list(names)}
    columns["time"] = [time(row.seconds if (row := training.get(name)) else None) for name in names]
    columns["share"] = [percent(row.share) if (row := training.get(name)) else None for name in names]
    columns["trajectories"] = [
        count(row.trajectories) if (row := training.get(name)) else None for name in names
    ]
    columns["of the tail"] = [percent(part.share) if (part := last.get(name)) else None for name in names]
    columns["wall clock"] = [time(part.seconds if (part := walls.get(name)) else None) for name in names]
    if validation:
        columns["validation"] = [
            time(row.seconds if (row := validation.get(name)) else None) for name in names
        ]
    cells = list(zip(*columns.values(), strict=True))
    return table("Causes", list(columns), cells, [cause_key(name) for name in names])


def _calls(rollout: Rollout) -> str:
    headings = ("name", "role", "calls", "failed", "time", "p50", "p90", "p99", "longest", "at once", "most")
    rows: list[tuple[Cell, ...]] = [
        (
            row.name,
            row.role,
            count(row.calls),
            count(row.failed),
            *map(time, (row.seconds, row.p50_s, row.p90_s, row.p99_s, row.longest_s)),
            number(round(row.mean_running, 1)),
            count(row.most_running),
        )
        for row in rollout.calls
    ]
    return table("Tools and other spans", headings, rows, [cause_key(row.name) for row in rollout.calls])


def _blocks(rollout: Rollout) -> str:
    headings = ("lane", "by", "function", "times", "for", "longest", "stood still", "added up")
    rows: list[tuple[Cell, ...]] = [
        (
            row.lane,
            row.what,
            row.function,
            count(row.blocks),
            time(row.seconds),
            time(row.longest_s),
            count(row.trajectories),
            time(row.stood_still_s),
        )
        for row in rollout.blocks
    ]
    return table("Blocked event loops", headings, rows)


def _groups(rollout: Rollout) -> str:
    headings = ("group", "members", "first done", "last done", "waited", "the last one's cause")
    rows: list[tuple[Cell, ...]] = [
        (
            row.group,
            count(row.members),
            time(row.first_s),
            time(row.last_s),
            time(row.waited_s),
            row.last_cause if row.whole else f"{row.last_cause} (not done)",
        )
        for row in rollout.groups
    ]
    return table("Groups that waited most", headings, rows)


def _versions(rollout: Rollout) -> str:
    headings = ("version", "behind", "oldest of", "newest of", "segments", "tokens")
    rows: list[tuple[Cell, ...]] = [
        (
            count(row.version),
            None if row.behind is None else Shown(row.distance, row.behind),
            *map(count, (row.oldest, row.newest, row.segments, row.segment_tokens)),
        )
        for row in rollout.versions
    ]
    return table("Versions of the weights", headings, rows)


def _fates(rollout: Rollout) -> str:
    headings = ("fate", "trajectories", "time", "share", "response tokens", "turns", "tool calls")
    rows: list[tuple[Cell, ...]] = [
        (
            f"{row.fate} (validation)" if row.validate else row.fate,
            count(row.trajectories),
            time(row.seconds),
            percent(row.share),
            *map(count, (row.response_tokens, row.turns, row.tool_calls)),
        )
        for row in rollout.fates
    ]
    return table("What became of trajectories", headings, rows)


def _failures(rollout: Rollout) -> str:
    headings = ("error", "trajectories", "fate", "in", "for example")
    rows: list[tuple[Cell, ...]] = [
        (
            f"{row.error} (validation)" if row.validate else row.error,
            count(row.trajectories),
            row.fate,
            row.span,
            row.example,
        )
        for row in rollout.failures
    ]
    return table("Failed trajectories", headings, rows)
