"""The outcomes of trajectories: calls, blocked loops, groups, statuses, errors, versions, the last ones."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import numpy as np

from verl_profiling.manifest import Request
from verl_profiling.report.intervals import Axes, Ints, Sharing, length, overlaps, percentiles, union
from verl_profiling.report.records import OTHERS, Blocks, Pieces, Records, Trajectory
from verl_profiling.report.rows import (
    BlockRow,
    CallRow,
    FailureRow,
    GroupRow,
    LastTrajectories,
    PartRow,
    StatusRow,
    VersionRow,
)
from verl_profiling.timeline.processes import shortened

KEPT = ("done", "running")
"""Statuses of trajectories that are used, or may still be."""
_NONE_RAN = "no trajectory"  # time of the tail in which none of its trajectories ran

_MOST_CALLS = 50
_MOST_BLOCKS = 200
_MOST_FAILURES = 10
_FEW = 20


def call_rows(records: Records) -> list[CallRow]:
    """Return one row per process role and span name, the largest total time first.

    Durations include nested spans, and are clipped to the step. Beyond 50 rows, the rest is one row,
    ``(all others)``.
    """
    spans = records.spans
    roles = list(dict.fromkeys(role for _, role in records.processes))
    role_of = np.array([roles.index(role) for _, role in records.processes], dtype=np.int64)
    keys = role_of[spans.process] * max(len(records.names), 1) + spans.name
    known, place = np.unique(keys, return_inverse=True)
    took = np.bincount(place, weights=spans.end - spans.begin, minlength=len(known))
    most = np.argsort(-took, kind="stable")[:_MOST_CALLS]
    rows = []
    for at in most.tolist():
        role, name = divmod(int(known[at]), len(records.names))
        rows.append(_call_row(roles[role], records.names[name], np.flatnonzero(place == at), records))
    rest = np.flatnonzero(~np.isin(place, most))
    return [*rows, _call_row("", OTHERS, rest, records)] if len(rest) else rows


def _call_row(role: str, name: str, rows: Ints, records: Records) -> CallRow:
    begin, end = records.spans.begin[rows], records.spans.end[rows]
    took = (end - begin) / 1e9
    p50, p90, p99 = percentiles(took, 50, 90, 99)
    covered = length(union(np.stack((begin, end), axis=1)))
    ran = end > begin  # a span that begins when another ends does not overlap it
    before = np.searchsorted(np.sort(end[ran]), np.sort(begin[ran]), side="right")
    return CallRow(
        role=role,
        name=name,
        calls=len(rows),
        failed=int(records.spans.failed[rows].sum()),
        seconds=float(took.sum()),
        p50_s=p50,
        p90_s=p90,
        p99_s=p99,
        longest_s=float(took.max()),
        mean_running=float(took.sum()) * 1e9 / covered if covered else 0.0,
        most_running=int((np.arange(1, ran.sum() + 1) - before).max(initial=0)),
    )


def block_rows(blocks: Blocks, lag: Pieces) -> list[BlockRow]:
    """Return the functions and spans that blocked event loops, longest first, with the delayed trajectories.

    Only the 20 names with the longest total over all processes are kept.

    Args:
        blocks: The blocks.
        lag: Intervals of the trajectories' loop lag.
    """
    took = np.bincount(blocks.what, weights=blocks.end - blocks.begin, minlength=len(blocks.named))
    axes = Axes(int(blocks.loop.max(initial=0)) + 1, blocks.begin, blocks.end, lag.begin, lag.end)
    held, asked = (axes.put(one.loop, one.begin, one.end) for one in (blocks, lag))
    by_name = Counter[str]()
    for (_, name, _), spent in zip(blocks.named, took.astype(np.int64).tolist(), strict=True):
        by_name[name] += spent
    most = {name for name, _ in by_name.most_common(_FEW)}
    rows = []
    ranked = [what for what in np.argsort(-took, kind="stable") if blocks.named[what][1] in most]
    for what in ranked[:_MOST_BLOCKS]:
        mine = blocks.what == what
        beside = np.flatnonzero(np.isin(lag.loop, np.unique(blocks.loop[mine])))
        still = overlaps(asked[beside], union(held[mine]))
        lane, name, function = blocks.named[what]
        rows.append(
            BlockRow(
                lane=lane,
                what=name,
                function=function,
                blocks=int(mine.sum()),
                seconds=float(took[what]) / 1e9,
                longest_s=int((blocks.end[mine] - blocks.begin[mine]).max()) / 1e9,
                trajectories=len(np.unique(lag.owner[beside[still > 0]])),
                stood_still_s=int(still.sum()) / 1e9,
            )
        )
    return rows


def group_rows(
    trajectories: Sequence[Trajectory], pieces: Pieces, begin_ns: int
) -> tuple[list[GroupRow], dict[str, Any]]:
    """Return groups of two or more training trajectories, sorted by the time members waited for the last.

    The second result has totals over all groups: their count, the time waited, and median and maximum of
    the spread (seconds from a group's first end to its last).

    Args:
        trajectories: All trajectories.
        pieces: Time of the trajectories by cause.
        begin_ns: Begin of the step (unix ns).
    """
    groups: dict[str, list[int]] = {}
    for number, one in enumerate(trajectories):
        if one.said.group and not one.validate:
            groups.setdefault(one.said.group, []).append(number)
    found = []
    for group, members in groups.items():
        if len(members) > 1:
            ends = [trajectories[member].end_ns for member in members]
            found.append((max(ends) * len(ends) - sum(ends), group, members, min(ends), max(ends)))
    found.sort(key=lambda item: (-item[0], item[1]))
    rows = []
    for waited, group, members, first, last in found[:_FEW]:
        slowest = next(member for member in members if trajectories[member].end_ns == last)
        mine = pieces.of(np.flatnonzero(pieces.owner == slowest))
        took = np.maximum(mine.end - np.maximum(mine.begin, first), 0)
        by_cause = np.bincount(mine.cause, weights=took, minlength=len(pieces.causes))
        rows.append(
            GroupRow(
                group=shortened(group),
                members=len(members),
                first_s=(first - begin_ns) / 1e9,
                last_s=(last - begin_ns) / 1e9,
                waited_s=waited / 1e9,
                last_cause=pieces.causes[int(by_cause.argmax())] if by_cause.any() else "",
                whole=not any(trajectories[member].cut_end for member in members),
            )
        )
    spreads = [(last - first) / 1e9 for _, _, _, first, last in found] or [0.0]
    return rows, {
        "groups_seen": len(found),
        "group_waited_s": sum(item[0] for item in found) / 1e9,
        "group_spread_p50_s": median(spreads),
        "group_spread_max_s": max(spreads),
    }


def status_rows(records: Records, served: Mapping[int, Request]) -> list[StatusRow]:
    """Return one row per status, training before validation, the largest total time first."""
    spans = records.spans
    tools = [number for number, name in enumerate(records.names) if name.startswith("tool:")]
    owners = spans.trajectory[np.isin(spans.name, tools)]
    calls = np.bincount(owners[owners >= 0], minlength=len(records.trajectories))
    generated = Counter[int]()
    for span, request in served.items():
        generated[int(spans.trajectory[span])] += request.response_tokens
    common = {status for status, _ in Counter(one.status for one in records.trajectories).most_common(_FEW)}
    seconds: dict[tuple[bool, str], float] = defaultdict(float)
    counts: dict[tuple[bool, str], Counter[str]] = defaultdict(Counter)
    for number, one in enumerate(records.trajectories):
        key = (one.validate, one.status if one.status in common else OTHERS)
        seconds[key] += (one.end_ns - one.begin_ns) / 1e9
        tokens, made = one.number("response_tokens"), one.number("tool_calls")
        counts[key].update(
            trajectories=1,
            response_tokens=generated[number] if tokens is None else tokens,
            turns=one.number("turns") or 0,
            tool_calls=int(calls[number]) if made is None else made,
        )
    whole = {kind: sum(took for key, took in seconds.items() if key[0] is kind) for kind in (False, True)}
    ranked = sorted(seconds.items(), key=lambda item: (item[0][0], -item[1], item[0][1]))
    return [
        StatusRow(
            validate=key[0],
            status=key[1],
            seconds=took,
            share=took / whole[key[0]] if whole[key[0]] else 0.0,
            **counts[key],
        )
        for key, took in ranked
    ]


def failure_rows(trajectories: Sequence[Trajectory]) -> list[FailureRow]:
    """Return the 10 most frequent errors of failed and cancelled trajectories, then ``(all others)``."""
    counts = Counter[tuple[bool, str, str, str]]()
    examples: dict[tuple[bool, str, str, str], str] = {}
    for one in trajectories:
        if one.failed_in is not None:
            error = shortened(" ".join(one.said.error.split()))
            key = (one.validate, one.said.status, error, one.failed_in)
            sample = "" if one.said.sample is None else f"/{one.said.sample}"
            counts[key] += 1
            examples.setdefault(key, shortened(f"{one.said.group}{sample}"))
    ranked = sorted(counts.items(), key=lambda item: (item[0][0], -item[1], item[0]))
    found: list[tuple[Any, ...]] = [(*key, count, examples[key]) for key, count in ranked[:_MOST_FAILURES]]
    for validate in (False, True):
        rest = sum(count for key, count in ranked[_MOST_FAILURES:] if key[0] is validate)
        found += [(validate, "", OTHERS, "", rest, "")] if rest else []
    names = ("validate", "status", "error", "span", "trajectories", "example")
    return [FailureRow(**dict(zip(names, row, strict=True))) for row in found]


def version_rows(
    records: Records, served: Mapping[int, Request], trained: int | None
) -> tuple[list[VersionRow], int, int]:
    """Return policy versions, newest first, and two counts of training trajectories.

    The counts are the trajectories of known version, and those generated with several versions. Versions
    come from the loop (``min_version``, ``max_version``), else from the trajectory's requests.

    Args:
        records: The recorded trajectories.
        served: The request of each span, by the span's number.
        trained: Version that the step trains, if known.
    """
    segments, tokens = Counter[int](), Counter[int]()
    of_requests: defaultdict[int, set[int]] = defaultdict(set)
    for span, request in served.items():
        owner, version = int(records.spans.trajectory[span]), request.policy_version
        if version is not None and owner >= 0 and not records.trajectories[owner].validate:
            of_requests[owner].add(version)
            segments[version] += 1
            tokens[version] += request.response_tokens
    oldest, newest = Counter[int](), Counter[int]()
    partial = 0
    for number, one in enumerate(records.trajectories):
        said = [one.number("min_version"), one.number("max_version")]
        versions = {version for version in said if version is not None} or of_requests.get(number)
        if versions and not one.validate:
            oldest[min(versions)] += 1
            newest[max(versions)] += 1
            partial += min(versions) < max(versions)
    known = sorted({*oldest, *newest, *segments}, reverse=True)
    rows = [
        VersionRow(
            version=version,
            behind=None if trained is None else trained - version,
            oldest=oldest[version],
            newest=newest[version],
            segments=segments[version],
            segment_tokens=tokens[version],
        )
        for version in known[:_FEW]
    ]
    return rows, oldest.total(), partial


def last_trajectories(
    numbers: Ints, begin: Ints, end: Ints, pieces: Pieces, step_ns: int
) -> LastTrajectories | None:
    """Return the tail: the time in which only the last ``k`` of ``n`` trajectories still ran.

    ``k`` is at most ``n / 2``. It maximizes the tail's share of the rollout minus ``k / n``, i.e. it is
    where the curve of finished trajectories bends.

    Args:
        numbers: Numbers of the trajectories.
        begin: Begin of each trajectory (unix ns).
        end: End of each trajectory (unix ns).
        pieces: Time of all trajectories by cause.
        step_ns: Begin of the step (unix ns).
    """
    if not len(numbers):
        return None
    order = np.argsort(end, kind="stable")
    ends, first = end[order], int(begin.min())
    done = np.concatenate(([first], ends[:-1]))[::-1]  # time at which all but the last 1, 2, ... had ended
    sizes = np.arange(1, len(ends) + 1)
    wall = max(int(ends[-1]) - first, 1)
    gain = (ends[-1] - done) / wall - sizes / len(ends)
    size = int(gain[: max(len(ends) // 2, 1)].argmax()) + 1
    since, until = int(done[size - 1]), int(ends[-1])
    mine = np.isin(pieces.owner, numbers[order[len(order) - size :]]) & (pieces.end > since)
    tail = pieces.of(np.flatnonzero(mine))
    took = Sharing(np.zeros_like(tail.owner), tail.begin, tail.end).shares(np.array([[since, until]]))
    by_cause = np.bincount(tail.cause, weights=took, minlength=len(pieces.causes)) / 1e9
    seconds = (until - since) / 1e9
    parts = [(pieces.causes[cause], float(by_cause[cause])) for cause in np.argsort(-by_cause, kind="stable")]
    parts = [(cause, spent) for cause, spent in parts[:_FEW] if spent > 0]
    rest = seconds - float(by_cause.sum())
    parts += [(_NONE_RAN, rest)] if rest > 1e-9 else []
    return LastTrajectories(
        trajectories=size,
        of=len(ends),
        begin_s=(since - step_ns) / 1e9,
        seconds=seconds,
        share=(until - since) / wall,
        parts=[PartRow(cause=name, seconds=spent, share=spent / (seconds or 1.0)) for name, spent in parts],
    )
