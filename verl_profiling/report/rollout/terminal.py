"""Prints the section "Rollout" of a report."""

from __future__ import annotations

from collections.abc import Iterator

from rich.markup import escape
from rich.table import Table

from verl_profiling.report.columns import shortened, table_of
from verl_profiling.report.rollout.rows import Rollout
from verl_profiling.units import duration

__all__ = ["rollout_sentences", "rollout_tables"]

_ROWS = 12
_FEW = 6


def rollout_tables(rollout: Rollout) -> Iterator[Table]:
    """Yield the tables; one without rows is not to be shown."""
    yield _causes(rollout)
    yield _calls(rollout)
    yield _blocks(rollout)
    yield _groups(rollout)
    yield _versions(rollout)
    yield _fates(rollout)
    yield _failures(rollout)


def rollout_sentences(rollout: Rollout) -> Iterator[str]:
    """Yield what holds of the rollout as a whole."""
    also = f", {rollout.validation:,} of validation" if rollout.validation else ""
    took = ""
    if rollout.p50_s is not None and rollout.p99_s is not None:
        took = f": p50 {duration(rollout.p50_s)}, p99 {duration(rollout.p99_s)}"
    count = f"{_trajectories(rollout.trajectories)}{also}{took}"
    whole = duration(sum(part.seconds for part in rollout.time))
    yield f"{count}; {rollout.explained:.1%} of the {whole} of the rollout is attributed to a cause"
    if rollout.cut:
        were, are = ("was", "is") if rollout.cut == 1 else ("were", "are")
        yield f"{_trajectories(rollout.cut)} {were} recorded, or {are} in the step, in part: that part counts"
    if (last := rollout.last) and last.parts:
        parts = ", ".join(f"{part.cause} {part.share:.0%}" for part in last.parts[:3])
        yield (
            f"last: {last.trajectories:,} of {_trajectories(last.of)} ({last.trajectories / last.of:.1%}) "
            f"{'takes' if last.trajectories == 1 else 'take'} {duration(last.seconds)}, {last.share:.1%} of "
            f"{rollout.of_trajectories}: {parts}"
        )
    if polling := rollout.polling:
        times = "once" if polling.pauses == 1 else f"{polling.pauses:,} times"
        yield (
            f"polling the replay buffer: every {duration(polling.interval_s)}, {times}; the "
            f"trainer slept {duration(polling.late_s)} ({polling.late_share:.1%} of the step) after the last "
            "response was there"
        )
    if rollout.groups_seen:
        yield (
            f"{rollout.groups_seen:,} {'group' if rollout.groups_seen == 1 else 'groups'}: from the first "
            "member's end to the last one's p50 "
            f"{duration(rollout.group_spread_p50_s)}, at most {duration(rollout.group_spread_max_s)}; "
            f"members waited {duration(rollout.group_waited_s)} for their last one"
        )
    if rollout.versioned:
        yield (
            f"{rollout.partial:,} of {_trajectories(rollout.versioned)} "
            f"{'was' if rollout.partial == 1 else 'were'} made with several versions of the weights"
        )
    if rollout.uncertain_lag_s:
        yield f"of loop lag, {duration(rollout.uncertain_lag_s)} are an upper bound"


def _trajectories(count: int) -> str:
    return f"{count:,} trajector{'y' if count == 1 else 'ies'}"


def _causes(rollout: Rollout) -> Table:
    last = {part.cause: part for part in rollout.last.parts} if rollout.last else {}
    table = table_of(
        "Trajectories by what they waited for", "cause", "time", "share", "of the\ntail", "trajectories"
    )
    rows = [row for row in rollout.causes if not row.validate]
    for row in rows[:_ROWS]:
        part = last.get(row.cause)
        table.add_row(
            escape(shortened(row.cause)),
            duration(row.seconds),
            f"{row.share:.1%}",
            f"{part.share:.1%}" if part else "",
            f"{row.trajectories:,}",
        )
    return _more(table, len(rows), _ROWS)


def _calls(rollout: Rollout) -> Table:
    headings = ("calls", "failed", "time", "p50", "p90", "p99", "longest", "at once")
    table = table_of("Tools and other spans", "name", *headings)
    for row in rollout.calls[:_ROWS]:
        times = (row.seconds, row.p50_s, row.p90_s, row.p99_s, row.longest_s)
        counts = (f"{row.calls:,}", f"{row.failed:,}" if row.failed else "")
        name = row.name if row.role in ("", "agent_loop") else f"{row.name} ({row.role})"
        table.add_row(escape(shortened(name)), *counts, *map(duration, times), f"{row.most_running:,}")
    return _more(table, len(rollout.calls), _ROWS)


def _blocks(rollout: Rollout) -> Table:
    table = table_of(
        "Blocked event loops", "lane", "by", "times", "for", "longest", "stood still", "added up"
    )
    table.columns[1].justify = "left"
    for row in rollout.blocks[:_FEW]:
        table.add_row(
            escape(row.lane),
            escape(shortened(row.what)),
            f"{row.blocks:,}",
            duration(row.seconds),
            duration(row.longest_s),
            f"{row.trajectories:,}",
            duration(row.stood_still_s),
        )
    return _more(table, len(rollout.blocks), _FEW)


def _groups(rollout: Rollout) -> Table:
    table = table_of(
        "Groups that waited most", "group", "members", "first", "last", "waited", "the last one's"
    )
    for row in rollout.groups[:_FEW]:
        times = (row.first_s, row.last_s, row.waited_s)
        cause = shortened(row.last_cause) if row.whole else f"{shortened(row.last_cause)} (not done)"
        table.add_row(escape(shortened(row.group)), f"{row.members:,}", *map(duration, times), escape(cause))
    return _more(table, rollout.groups_seen, _FEW)


def _versions(rollout: Rollout) -> Table:
    headings = ("behind", "oldest of", "newest of", "segments", "tokens")
    table = table_of("Versions of the weights", "version", *headings)
    for row in rollout.versions[:_FEW]:
        counts = (row.oldest, row.newest, row.segments, row.segment_tokens)
        table.add_row(f"{row.version:,}", row.distance, *(f"{count:,}" for count in counts))
    return _more(table, len(rollout.versions), _FEW)


def _fates(rollout: Rollout) -> Table:
    table = table_of(
        "What became of trajectories", "fate", "trajectories", "time", "share", "tokens", "tool calls"
    )
    for row in rollout.fates if len(rollout.fates) > 1 else []:
        table.add_row(
            escape(f"{row.fate} (validation)" if row.validate else row.fate),
            f"{row.trajectories:,}",
            duration(row.seconds),
            f"{row.share:.1%}",
            f"{row.response_tokens:,}",
            f"{row.tool_calls:,}",
        )
    return table


def _failures(rollout: Rollout) -> Table:
    table = table_of("Failed trajectories", "error", "trajectories", "fate", "in", "e.g.")
    for column in table.columns[2:]:
        column.justify = "left"
    for row in rollout.failures:
        texts = (row.fate, row.span, row.example)
        error = f"{row.error} (validation)" if row.validate else row.error
        table.add_row(escape(error), f"{row.trajectories:,}", *(escape(shortened(text)) for text in texts))
    return table


def _more(table: Table, rows: int, shown: int) -> Table:
    if rows > shown:
        table.caption = f"{rows - shown:,} more: --csv, --json"
    return table
